"""What the workers of an audit on Ray do with a block: draw, score, compare, and write its table."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import torch

from mispair.auditing.audit import MAX_SUGGESTED, Settings, shared_notes
from mispair.auditing.auditor import Auditor, checked_answers
from mispair.auditing.blocks import UNREADABLE, Block, Rows, opened
from mispair.auditing.findings import Findings
from mispair.auditing.inputs import AuditInput
from mispair.auditing.match_scores import WORDLESS, MatchScores, limits
from mispair.auditing.output_files import LEARNED
from mispair.auditing.report.page import GROUPS, MEMBERS, Row, read_rows
from mispair.auditing.scoring.near_duplicates import (
    BITS,
    DisjointSets,
    Groups,
    find_near_duplicates,
    groups_of,
    sketch,
)
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.scoring.reasons import KINDS, USUALLY, Bits, Usual, caption_reason, image_reasons
from mispair.auditing.scoring.reasons import WORDLESS as EMPTY_KINDS
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan, faults
from mispair.auditing.scoring.shared_items import SharedItems, SomeVectors, combined
from mispair.auditing.scoring.views import with_joins
from mispair.auditing.summary import SHARD, SIDES, Tally, values_by
from mispair.errors import DamagedError, DataError
from mispair.functional.logistic import probability
from mispair.pairs.remote import Store
from mispair.pairs.row_ids import RowIds, Texts, as_texts
from mispair.pairs.shards import SideRows, views_of
from mispair.pairs.source import Source
from mispair.support.arrays import FloatArray, IntArray

AT_ONCE = 8192  # rows of a block in memory
CODES = 4  # sketches of an item of 64 bits: the first one finds near-duplicates, all together compare them
QUARTERS = 4  # of the first sketch: rows with an equal one meet, where not all rows can
# Match scores in steps of 0.05 % of their odds, to find the cut of `keep_best` by counts
STEPS = np.unique(probability(np.linspace(-20, 20, 80_001)).astype(np.float32))
SCORES, TABLES, ITEMS = "scores", "tables", "items.parquet"
_WORDLESS_BITS = sum(1 << KINDS.index(kind) for kind in EMPTY_KINDS)
Columns = dict[str, npt.NDArray[Any]]  # some rows


@dataclass(frozen=True)
class Known:
    """Properties of the whole, estimated from the sample, for workers."""

    some: tuple[SomeVectors, SomeVectors]
    usual: Usual
    wordless: int  # bits of captions that say nothing about an image; 0 where many captions are such

    @classmethod
    def of(cls, left: FloatArray, right: FloatArray, captions: list[str]) -> Known:
        usual = Usual.of(captions)
        empty = np.mean([caption_reason(text, usual) in EMPTY_KINDS for text in captions])
        return cls((SomeVectors.of(left), SomeVectors.of(right)), usual, _WORDLESS_BITS if empty < USUALLY else 0)

    def seen(self, captions: Sequence[str]) -> Bits:
        """Return (n,) the reasons in captions, as bits of `reasons.KINDS`."""
        reasons = (caption_reason(text, self.usual) for text in captions)
        return np.array([1 << KINDS.index(reason) if reason else 0 for reason in reasons], dtype=np.uint16)


@dataclass(frozen=True)
class Job:
    """The audit, as each worker knows it."""

    data: AuditInput
    work: str  # folder or URL of intermediate results, which all machines can read and write
    blocks: tuple[Block, ...]
    settings: Settings
    starts: IntArray  # (B + 1,) the first row of each block in the whole, and the number of all rows
    columns: tuple[str, ...] = ()  # of image and caption, those of the pairs
    known: Known | None = None  # once the auditor is fitted
    raw: AuditInput | None = None  # the images and captions that `data` was encoded from
    raw_blocks: tuple[Block, ...] = ()  # of these
    run: str = field(default_factory=lambda: uuid.uuid4().hex)  # workers may serve several audits in one folder

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def store(self) -> Store:
        return Store(self.work)

    @contextmanager
    def open(self, number: int) -> Iterator[Rows]:
        """Open the rows of a block, with one vector an item once the auditor is fitted."""
        with opened(self.data, self.blocks[number]) as rows:
            joins = None if self.known is None else self.auditor().joins
            yield rows if joins is None else rows._replace(source=with_joins(rows.source, joins))

    def given(self, number: int, rows: Rows) -> AbstractContextManager[Rows]:
        """Open the rows of a block as they were given, with their images and columns; `rows` are the open ones."""
        return nullcontext(rows) if self.raw is None else opened(self.raw, self.raw_blocks[number])

    def auditor(self, device: str = "cpu") -> Auditor:
        """Return the fitted auditor, read once a process."""
        return _auditor(self.work, device, self.run)

    def items(self) -> pyarrow.Table:
        """Return the rows with shared items, read once a process."""
        return _items(self.work, self.run)

    def scores(self, number: int, columns: list[str] | None = None) -> pyarrow.Table:
        """Return what was measured of a block."""
        return self.store.table(f"{SCORES}/{file_name(number)}", columns)

    def nothing(self) -> DataError:
        return DataError("no pairs can be read", where=(self.raw or self.data).places[0])

    def own(self, number: int, rows: IntArray) -> IntArray:
        """Return the rows of a block among ascending rows."""
        return rows[np.searchsorted(rows, self.starts[number]) : np.searchsorted(rows, self.starts[number + 1])]


@dataclass(frozen=True)
class Verdict:
    """Findings about the whole, for the tables of all blocks."""

    below: float  # match score below which pairs are flagged
    scored: int  # number of readable rows
    typical: FloatArray  # (m,) mean standardised measures of pairs that are not flagged
    worst: IntArray  # the lowest flagged rows
    seen: Bits  # reasons in the images of these
    new_rights: Partners  # for these
    new_lefts: Partners
    names: dict[int, str]  # ids of all rows that can be partners

    def ids(self, rows: IntArray) -> list[str]:
        """Return the ids of possible partners."""
        return [self.names[row] for row in rows.tolist()]


def describe(job: Job) -> tuple[list[list[int]], tuple[str, ...]]:
    """Return the widths of the views of both sides, and the columns of the pairs, of the first readable block.

    Raises:
        InvalidValueError: There is no column `by`.
        DataError: No block is readable.
    """
    by, problem = job.settings.by, job.nothing()
    for number in range(len(job.blocks)):
        try:
            with job.open(number) as rows:
                if by not in (None, SHARD):
                    with job.given(number, rows) as given:
                        values_by(given.source, str(by))
                widths = [[view.width for view in views_of(side)] for side in (rows.source.left, rows.source.right)]
                return widths, tuple(rows.source.item_columns(rows.start, rows.start))
        except UNREADABLE as error:
            problem = error
    raise problem


def draw(job: Job, rows: IntArray, ids: Sequence[str], look: bool, number: int) -> Columns:
    """Read rows of a block by their numbers or ids; `look` at their images, too."""
    own, start = job.own(number, rows), int(job.starts[number])
    with suppress(*UNREADABLE), job.open(number) as here:
        source = here.source
        if ids:
            every = np.arange(start, start + here.stop - here.start)
            own = np.union1d(own, every[np.isin(_ids(source, every - start + here.start, every), ids)])
        places = here.start + own - start
        good = np.array([int(row) not in source.known for row in places], dtype=np.bool_)
        left, right = source.gather(places)
        good &= faults(torch.from_numpy(left), torch.from_numpy(right)) == READABLE
        if job.known is None:  # the sample says how they are joined
            sides = views_of(source.left), views_of(source.right)
            left, right = (np.hstack([view.gather(places) for view in views]) for views in sides)
        seen = np.zeros(len(own), dtype=np.uint16)
        if look and source.has_images:
            with job.given(number, here) as given:
                looked = given.start + own - start
                seen = image_reasons(looked, given.source.image_reader(looked))
        return {
            "row": own, "left": left, "right": right, "id": np.array(_ids(source, places, own), dtype=np.str_),
            "caption": np.array(source.texts(places), dtype=np.str_), "joint": np.full(len(own), source.joint),
            "good": good, "seen": seen,
        }  # fmt: skip
    return {}


def score(job: Job, number: int) -> None:
    """Measure the rows of a block, and write their scores."""
    start, stop = job.starts[number : number + 2].tolist()
    try:
        with job.open(number) as rows:
            if rows.stop - rows.start != stop - start:
                raise DamagedError(f"{rows.stop - rows.start:,} rows and not {stop - start:,}")
            pieces = range(rows.start, rows.stop, AT_ONCE)
            found = [_measured(job, number, rows, begin, min(begin + AT_ONCE, rows.stop)) for begin in pieces]
    except UNREADABLE as error:
        row, source = np.arange(start, stop), Source(names=RowIds(known=dict.fromkeys(range(stop - start), str(error))))
        measures, codes = np.zeros((stop - start, len(job.auditor().judge.names) + 1)), 2 * CODES * [np.zeros_like(row)]
        ids, origin = [f"row#{number}" for number in row.tolist()], [job.blocks[number].name] * len(row)
        nothing = np.zeros(len(row), dtype=np.uint8)
        found = [_table(job, row, source, range(len(row)), nothing, ids, origin, measures, codes)]
    job.store.write_table(f"{SCORES}/{file_name(number)}", pyarrow.concat_tables(found))


def _measured(job: Job, number: int, rows: Rows, begin: int, end: int) -> pyarrow.Table:
    """Measure some rows of a block."""
    source, auditor, known, places = rows.source, job.auditor(job.settings.device), job.known, range(begin, end)
    assert known is not None
    left, right = (torch.from_numpy(side) for side in source.block(begin, end))
    views = ([view.block(begin, end) for view in views_of(side)] for side in (source.left, source.right))
    row = np.arange(begin, end) - rows.start + job.starts[number]
    by, origin = job.settings.by, [job.blocks[number].name] * len(row)
    if by not in (None, SHARD):
        with job.given(number, rows) as given:
            if given.source.table is not None:
                origin = given.source.table.cells(str(by), given.start + np.arange(begin, end) - rows.start)
    codes = []
    for side, some in zip((left, right), known.some, strict=True):
        finite, mean = side.nan_to_num(0.0, 0.0, 0.0), torch.from_numpy(some.mean.astype(np.float32))
        codes += [sketch(finite, mean, code).view(np.int64) for code in range(CODES)]
    found, ids = np.column_stack(auditor.measured(*views)), _ids(source, np.arange(begin, end), row)
    return _table(job, row, source, places, faults(left, right), ids, origin, found, codes)


def _table(
    job: Job,
    row: IntArray,
    source: Source,
    places: range,  # of the rows in the source
    faulty: npt.NDArray[np.uint8],  # (n,) keys of FAULTS
    ids: list[str],
    origin: Sequence[str],
    measures: FloatArray,  # (n, 1 + m) match scores and measures
    codes: Sequence[IntArray],  # (n,) sketches of left items, then of right items
) -> pyarrow.Table:
    """Make the table of what was measured of some rows."""
    status = [source.known.get(place, FAULTS[code]) for place, code in zip(places, faulty.tolist(), strict=True)]
    assert job.known is not None
    items = source.item_columns(places.start, places.stop)
    names = [f"{side}_{code}" for side in SIDES for code in range(CODES)]
    columns = {
        "row": row,
        "id": ids,
        **{name: items.get(name, [""] * len(row)) for name in job.columns},
        "source": origin,
        "status": status,
        "match_score": pyarrow.array(
            measures[:, 0].astype(np.float32), mask=np.array([word != FAULTS[READABLE] for word in status])
        ),
        "seen": job.known.seen(source.texts(places)) if source.has_texts else np.zeros(len(row), np.uint16),
        **dict(zip(job.auditor().judge.names, measures[:, 1:].T, strict=True)),
        **dict(zip(names, codes, strict=True)),
    }
    return pyarrow.table(columns)


@dataclass(frozen=True, kw_only=True)
class BlockFindings(Findings):
    """Findings about the rows of a block."""

    start: int  # number of the first row in the whole
    wordless: npt.NDArray[np.bool_]  # (n,) whether captions say nothing about an image
    origin: pyarrow.ChunkedArray  # the block of each row, or its value of the column `by`
    verdict: Verdict | None = None  # about the whole, once it is known

    @cached_property
    def _typical(self) -> FloatArray:
        assert self.verdict is not None
        return self.verdict.typical

    @cached_property
    def _origins(self) -> pyarrow.DictionaryArray:
        return self.origin.combine_chunks().dictionary_encode()

    def _piece(self, start: int, stop: int) -> pyarrow.Table:
        table = super()._piece(start, stop)
        for name, own in (("left_item", self.items.left), ("right_item", self.items.right)):
            table = table.append_column(name, pyarrow.array(own[start:stop]))
        return table

    def _partner_ids(self, rows: IntArray) -> list[str]:
        assert self.verdict is not None
        return self.verdict.ids(rows)


def _found(job: Job, number: int) -> BlockFindings:
    """Score the rows of a block: by what was measured, by their shared items, and by decisions of people."""
    table, start, judge = job.scores(number), int(job.starts[number]), job.auditor().judge
    assert job.known is not None
    rows, status = np.arange(len(table)), table["status"].to_pylist()
    bad = np.array([word != FAULTS[READABLE] for word in status], dtype=np.bool_)
    measures = np.column_stack([table[name].to_numpy() for name in judge.names]).astype(np.float32)
    measures[bad] = np.nan
    shared = job.items()
    shared = shared.filter((shared["row"].to_numpy() >= start) & (shared["row"].to_numpy() < start + len(table)))
    place, first = shared["row"].to_numpy() - start, rows.copy()
    own, unlike = [rows + start, rows + start], np.zeros((2, len(table)), dtype=np.int32)
    first[place[~np.asarray(shared["is_first"])]] = -1
    for side, name in enumerate(SIDES):
        own[side][place], unlike[side][place] = shared[name].to_numpy(), shared[f"unlike_{name}"].to_numpy()
    items = SharedItems(own[0], own[1], first, rows, unlike, (Groups.none(), Groups.none()), 0)
    seen = table["seen"].to_numpy().astype(np.uint16)
    wordless = (seen & job.known.wordless) > 0
    match = np.array(table["match_score"].to_numpy(), dtype=np.float32)
    many = np.maximum(WORDLESS * wordless, items.partners)
    limited = np.flatnonzero((many > 0) & ~bad)
    if len(limited):
        sums = judge.combination.sums(measures[limited])
        match[limited] = np.minimum(match[limited], limits(judge, sums, many[limited]))
    answers = checked_answers(job.settings.checked)
    ids = table["id"].to_pylist() if answers else []
    checked = {row: float(answers[name]) for row, name in enumerate(ids) if name in answers and not bad[row]}
    match[list(checked)] = list(checked.values())
    texts = {name: Texts.of(table[name].to_pylist()) for name in job.columns}
    known = {row: status[row] for row in np.flatnonzero(bad).tolist()}
    return BlockFindings(
        source=Source(
            names=RowIds(as_texts(table["id"].to_pylist()), None, known),
            image_names=texts.get("image"),
            captions=texts.get("caption"),
        ),
        auditor=job.auditor(),
        scan=Scan(measures, np.where(bad, BAD_IN_TABLE, READABLE).astype(np.uint8)),
        scores=MatchScores(match.astype(np.float64), rows[:0], match[:0], checked=checked),
        match_score=match,
        suggested=rows[:0],
        new_rights=Partners.none(0),
        new_lefts=Partners.none(0),
        items=items,
        seen=seen,
        start=start,
        wordless=wordless,
        origin=table["source"],
    )


def lowest(job: Job, number: int) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    """Return the rows of a block with the lowest match scores, these scores, and counts by place in `STEPS`."""
    score = _found(job, number).match_score
    row = job.starts[number] + np.flatnonzero(~np.isnan(score))
    score = score[~np.isnan(score)]
    chosen = np.lexsort((row, score))[:MAX_SUGGESTED]
    steps, counts = np.unique(np.searchsorted(STEPS, score, side="right"), return_counts=True)
    return row[chosen], score[chosen], steps, counts


def keyed(job: Job, apart: int, number: int) -> Columns:
    """Return the sketches of the readable items of a block; items with the same key are compared."""
    names = [f"{side}_{code}" for side in SIDES for code in range(CODES)]
    table = job.scores(number, ["row", "match_score", *names])
    table = table.filter(table["match_score"].is_valid())
    row, parts = table["row"].to_numpy(), []
    for side, name in enumerate(SIDES):
        codes = [table[f"{name}_{code}"].to_numpy() for code in range(CODES)]
        for quarter in range(1 if apart == 1 else QUARTERS):
            value = (codes[0] >> (BITS // QUARTERS * quarter)) & 0xFFFF
            key = (side * (1 if apart == 1 else QUARTERS) + quarter) * apart + value % apart
            parts.append({"key": key, "row": row, **{f"code_{n}": one for n, one in enumerate(codes)}})
    return joined(parts)


def joined(parts: Sequence[Columns]) -> Columns:
    """Join parts, of which some may be empty."""
    some = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in some]) for name in (some[0] if some else ())}


def near_in(job: Job, cosines: Sequence[float], side: int) -> pyarrow.Table:
    """Link the rows of all blocks with (nearly) the same item on one side."""
    items = joined([keyed(job, 1, number) for number in range(len(job.blocks))])
    return pyarrow.table(near(1, cosines, {name: values[items["key"] == side] for name, values in items.items()}))


def near(keys: int, cosines: Sequence[float], group: Columns) -> Columns:
    """Link each row of a group to the first row with (nearly) the same item."""
    order = group["row"].argsort()
    rows, side = group["row"][order], int(group["key"][0] // keys)
    codes = np.stack([group[f"code_{number}"][order] for number in range(CODES)], axis=1).view(np.uint64)

    def signs(places: IntArray) -> FloatArray:
        bits = np.unpackbits(codes[places].view(np.uint8), axis=1)
        return np.asarray(bits, dtype=np.float32) * 2 - 1

    groups = find_near_duplicates(codes[:, 0].copy(), signs, cosine_of_codes(cosines[side]))
    first = np.repeat(groups.rows[groups.starts[:-1]], np.diff(groups.starts))
    return {"side": np.full(len(first), side), "row": rows[groups.rows], "first": rows[first]}


def cosine_of_codes(cosine: float) -> float:
    """Convert a cosine of vectors to one of the signs of sketches: the angle decides how many differ."""
    return max(0.51, 1 - 2 * float(np.arccos(cosine)) / np.pi)


def share(job: Job, *links: pyarrow.Table) -> None:
    """Join the links of all groups; write rows with shared items, and items with unlike partners."""
    none = pyarrow.table({name: pyarrow.array([], "int64") for name in ("side", "row", "first")})
    table = pyarrow.concat_tables([none, *(part.cast(none.schema) for part in links if part.num_rows)])
    side, row, first = (table[name].to_numpy() for name in ("side", "row", "first"))
    members = np.unique(np.concatenate([row, first]))
    found = []
    for number in range(2):
        sets = DisjointSets(np.arange(len(members)))
        sets.join(*(np.searchsorted(members, rows[side == number]) for rows in (row, first)))
        found.append(groups_of(sets, np.arange(len(members))))
    items = None
    assert job.known is not None
    if len(members):
        sides = [SideRows.of([_Scattered(job, members, number)]) for number in range(2)]
        pairs = Source(sides[0], sides[1], "memory", "shared items")
        unreadable = np.zeros(len(members), dtype=np.bool_)
        items = combined((found[0], found[1]), pairs, unreadable, list(job.known.some), job.rows - len(members))
    unlike = np.zeros((2, len(members)), dtype=np.int32) if items is None else items.unlike
    columns = {
        "row": members,
        "is_first": np.ones(len(members), dtype=np.bool_) if items is None else items.is_first,
        "left": members if items is None else members[items.left],
        "right": members if items is None else members[items.right],
        **{f"unlike_{name}": unlike[side] for side, name in enumerate(SIDES)},
    }
    about = {
        "counts": {f"near_duplicates_{name}": len(groups.rows) for name, groups in zip(SIDES, found, strict=True)},
        "pairs": len(members),
        "notes": [] if items is None else shared_notes(items, np.ones(len(members), dtype=np.bool_)),
        "groups": [
            (side, members[group[:MEMBERS]].tolist(), len(group))
            for side, groups in zip(SIDES, found, strict=True)
            for group in groups.first(GROUPS // 2)
        ],
    }
    job.store.write_table(ITEMS, pyarrow.table(columns).replace_schema_metadata({"about": json.dumps(about)}))


@dataclass(frozen=True)
class _Scattered:
    """Vectors of one side of rows in any blocks, read when they are needed."""

    job: Job
    rows: IntArray
    side: int

    @property
    def shape(self) -> tuple[int, int]:
        assert self.job.known is not None
        return len(self.rows), self.job.known.some[self.side].units.shape[1]

    def read(self, rows: slice | IntArray) -> FloatArray:
        wanted, found = self.rows[rows], np.empty((len(self.rows[rows]), self.shape[1]), dtype=np.float32)
        numbers = np.searchsorted(self.job.starts, wanted, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            with self.job.open(number) as block:
                side = (block.source.left, block.source.right)[self.side]
                found[here] = side.gather(block.start + wanted[here] - self.job.starts[number])
        return found


def finish(job: Job, verdict: Verdict, number: int) -> Tally:
    """Write the table of a block, and count its rows."""
    found = _found(job, number)
    here = np.flatnonzero((verdict.worst >= found.start) & (verdict.worst < found.start + len(found)))
    suggested, seen = verdict.worst[here] - found.start, found.seen.copy()
    seen[suggested] |= verdict.seen[here]
    found = replace(
        found, threshold=verdict.below, suggested=suggested, new_rights=verdict.new_rights.take(here),
        new_lefts=verdict.new_lefts.take(here), seen=seen, verdict=verdict,
    )  # fmt: skip
    job.store.write_table(f"{TABLES}/{file_name(number)}", found.table)
    values = None if job.settings.by is None else found.origin.to_pylist()
    return found.counted(verdict.scored, found.wordless, values, found.start)


def file_name(number: int) -> str:
    return f"{number:06d}.parquet"


def report_rows(job: Job, rows: IntArray, pictured: IntArray, number: int) -> dict[int, tuple[Row, float, str]]:
    """Read what a report shows of rows of a block, some with their images, and their scores and reasons."""
    own, start, images = job.own(number, rows), int(job.starts[number]), dict[int, Row]()
    cells = job.store.table(f"{TABLES}/{file_name(number)}").take(own - start).to_pylist()
    if "image" in job.columns:
        with suppress(DataError), job.open(number) as encoded, job.given(number, encoded) as here:
            some = here.start - start + job.own(number, pictured)
            images = {row - here.start + start: found for row, found in read_rows(here.source, some, some).items()}
    found = {}
    for row, cell in zip(own.tolist(), cells, strict=True):
        image = replace(images.get(row, Row("", "")), id=cell["id"], caption=cell.get("caption", ""))
        found[row] = image, cell["match_score"], cell["reason"]
    return found


def _ids(source: Source, places: IntArray, rows: IntArray) -> list[str]:
    """Return the ids of rows; without ids in the data, their numbers in the whole."""
    return list(map(str, rows.tolist())) if source.names.ids is None else source.ids(places)


@lru_cache(maxsize=1)
def _items(work: str, _: str) -> pyarrow.Table:
    return Store(work).table(ITEMS)


@lru_cache(maxsize=2)
def _auditor(work: str, device: str, _: str) -> Auditor:
    with TemporaryDirectory() as folder:
        Store(work).get(LEARNED, Path(folder, LEARNED))
        auditor = Auditor.load(Path(folder, LEARNED), device)
    auditor.workers = 1  # one core a worker
    return auditor
