"""What the workers of an audit on Ray do with a block: count, draw, score, compare, and write its table."""

from __future__ import annotations

import contextlib
import json
import pickle
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import torch

from mispair.auditing.audit import (
    MAX_SUGGESTED,
    Settings,
    shared_notes,
)
from mispair.auditing.auditor import Auditor, checked_answers
from mispair.auditing.blocks import Block, Rows, count_rows, opened
from mispair.auditing.findings import Findings
from mispair.auditing.inputs import AuditInput
from mispair.auditing.match_scores import WORDLESS, MatchScores, limits
from mispair.auditing.output_files import LEARNED
from mispair.auditing.ray_cluster import Batch
from mispair.auditing.report.page import GROUPS, MEMBERS
from mispair.auditing.scoring.near_duplicates import (
    BITS,
    DisjointSets,
    Groups,
    find_near_duplicates,
    groups_of,
    sketch,
)
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.scoring.reasons import KINDS, USUALLY, Usual, caption_reason, image_reasons
from mispair.auditing.scoring.reasons import WORDLESS as EMPTY_KINDS
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan, faults
from mispair.auditing.scoring.shared_items import SharedItems, SomeVectors, combined
from mispair.auditing.scoring.views import with_joins
from mispair.auditing.summary import SHARD, SIDES
from mispair.errors import (
    DataError,
)
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

    def seen(self, captions: Sequence[str]) -> npt.NDArray[np.uint16]:
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

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[Rows]:
        """Open the rows of a block, with one vector an item once the auditor is fitted."""
        with opened(self.data, self.blocks[number]) as rows:
            joins = None if self.known is None else self.auditor().joins
            yield rows if joins is None else rows._replace(source=with_joins(rows.source, joins))

    def given(self, number: int, rows: Rows) -> contextlib.AbstractContextManager[Rows]:
        """Open the rows of a block as they were given, with their images and columns; `rows` are the open ones."""
        return contextlib.nullcontext(rows) if self.raw is None else opened(self.raw, self.raw_blocks[number])

    def auditor(self, device: str = "cpu") -> Auditor:
        """Return the fitted auditor, read once a process."""
        return _auditor(self.work, device, self.run)

    def items(self) -> pyarrow.Table:
        """Return the rows with shared items, read once a process."""
        return _items(self.work, self.run)

    def scores(self, number: int, columns: list[str] | None = None) -> pyarrow.Table:
        """Return what was measured of a block."""
        return self.store.table(f"{SCORES}/{file_name(number)}", columns)

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
    seen: npt.NDArray[np.uint16]  # reasons in the images of these
    new_rights: Partners  # for these
    new_lefts: Partners
    rows: IntArray  # all rows that can be partners, ascending
    names: npt.NDArray[np.str_]  # ids of these

    def ids(self, rows: IntArray) -> list[str]:
        """Return the ids of possible partners."""
        found: list[str] = self.names[np.searchsorted(self.rows, rows)].tolist()
        return found


def count(job: Job, batch: Batch) -> Batch:
    """Count the rows of a block; an unreadable block has one row, with a status."""
    number = int(batch["number"][0])
    try:
        rows = count_rows(job.data, job.blocks[number])
    except DataError:
        rows = 1
    return {"number": np.array([number]), "rows": np.array([rows])}


def sampled(job: Job, rows: IntArray, ids: Sequence[str], look: bool, batch: Batch) -> Iterator[Batch]:
    """Read rows of a block by their numbers or ids; `look` at their images, too."""
    number = int(batch["number"][0])
    own, start = job.own(number, rows), int(job.starts[number])
    try:
        with job.open(number) as here:
            source = here.source
            if ids:
                every = np.arange(start, start + here.stop - here.start)
                own = np.union1d(own, every[np.isin(_ids(source, every - start + here.start, every), ids)])
            if not len(own):
                return
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
            yield {
                "row": own, "left": left, "right": right, "id": np.array(_ids(source, places, own), dtype=np.str_),
                "caption": np.array(source.texts(places), dtype=np.str_), "joint": np.full(len(own), source.joint),
                "good": good, "seen": seen,
            }  # fmt: skip
    except DataError:
        return


def score(job: Job, batch: Batch) -> Batch:
    """Measure the rows of a block, and write their scores."""
    number = int(batch["number"][0])
    start, stop = job.starts[number : number + 2].tolist()
    try:
        with job.open(number) as rows:
            if rows.stop - rows.start != stop - start:
                raise DataError(f"{rows.stop - rows.start:,} rows and not {stop - start:,}")
            pieces = range(rows.start, rows.stop, AT_ONCE)
            found = [_measured(job, number, rows, begin, min(begin + AT_ONCE, rows.stop)) for begin in pieces]
    except DataError as error:
        found = [_unreadable(job, number, str(error))]
    job.store.write_table(f"{SCORES}/{file_name(number)}", pyarrow.concat_tables(found))
    return {"number": np.array([number])}


def _measured(job: Job, number: int, rows: Rows, begin: int, end: int) -> pyarrow.Table:
    source, auditor, known = rows.source, job.auditor(job.settings.device), job.known
    assert known is not None
    left, right = (torch.from_numpy(side) for side in source.block(begin, end))
    views = ([view.block(begin, end) for view in views_of(side)] for side in (source.left, source.right))
    scores, measures = auditor.measured(*views)
    codes = faults(left, right).tolist()
    status = [source.known.get(row, FAULTS[code]) for row, code in zip(range(begin, end), codes, strict=True)]
    bad = np.array([word != FAULTS[READABLE] for word in status])
    row = np.arange(begin, end) - rows.start + job.starts[number]
    by, origin = job.settings.by, [job.blocks[number].name] * len(row)
    if by not in (None, SHARD):
        with job.given(number, rows) as given:
            if given.source.table is not None:
                origin = given.source.table.cells(str(by), given.start + np.arange(begin, end) - rows.start)
    columns = {
        "row": row,
        "id": _ids(source, np.arange(begin, end), row),
        **{name: [""] * len(row) for name in job.columns},
        **{name: cells for name, cells in source.item_columns(begin, end).items() if name in job.columns},
        "source": origin,
        "status": status,
        "match_score": pyarrow.array(scores, mask=bad),
        "seen": known.seen(source.texts(range(begin, end))) if source.has_texts else np.zeros(len(row), np.uint16),
        **{name: measures[:, place] for place, name in enumerate(auditor.judge.names)},
    }
    for name, side, some in zip(SIDES, (left, right), known.some, strict=True):
        finite, mean = side.nan_to_num(0.0, 0.0, 0.0), torch.from_numpy(some.mean.astype(np.float32))
        columns |= {f"{name}_{code}": sketch(finite, mean, code).view(np.int64) for code in range(CODES)}
    return pyarrow.table(columns)


def _unreadable(job: Job, number: int, problem: str) -> pyarrow.Table:
    """Make the rows of an unreadable block, with its problem as their status."""
    row = np.arange(*job.starts[number : number + 2])
    nothing = pyarrow.nulls(len(row), pyarrow.float32())
    columns = {
        "row": row,
        "id": [f"row#{number}" for number in row.tolist()],
        **{name: [""] * len(row) for name in job.columns},
        "source": [job.blocks[number].name] * len(row),
        "status": [problem] * len(row),
        "match_score": nothing,
        "seen": np.zeros(len(row), np.uint16),
        **dict.fromkeys(job.auditor().judge.names, nothing),
        **{f"{name}_{code}": np.zeros_like(row) for name in SIDES for code in range(CODES)},
    }
    return pyarrow.table(columns)


@dataclass(frozen=True)
class _Scored:
    """The rows of a block with their match scores, and the evidence for these."""

    table: pyarrow.Table
    bad: npt.NDArray[np.bool_]  # (n,) whether each row is unreadable
    measures: npt.NDArray[np.float32]  # (n, m)
    items: SharedItems
    seen: npt.NDArray[np.uint16]  # (n,) reasons in captions
    wordless: npt.NDArray[np.bool_]  # (n,) whether captions say nothing about an image
    match: npt.NDArray[np.float32]  # (n,) lowered for shared items and such captions
    checked: dict[int, float]  # rows that a person has checked

    @classmethod
    def of(cls, job: Job, number: int) -> _Scored:
        table, start, judge = job.scores(number), int(job.starts[number]), job.auditor().judge
        assert job.known is not None
        rows = np.arange(len(table))
        bad = np.asarray(table["status"].to_pylist()) != FAULTS[READABLE]
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
        return cls(table, bad, measures, items, seen, wordless, match, checked)


def _found(job: Job, number: int, verdict: Verdict) -> BlockFindings:
    """Judge the rows of a block."""
    scored, start = _Scored.of(job, number), int(job.starts[number])
    table, rows = scored.table, np.arange(len(scored.table))
    here = np.flatnonzero((verdict.worst >= start) & (verdict.worst < start + len(rows)))
    scored.seen[verdict.worst[here] - start] |= verdict.seen[here]
    status = table["status"].to_pylist()
    names = RowIds(
        as_texts(table["id"].to_pylist()), None, {row: status[row] for row in np.flatnonzero(scored.bad).tolist()}
    )
    texts = {name: Texts.of(table[name].to_pylist()) for name in ("image", "caption") if name in table.column_names}
    return BlockFindings(
        source=Source(names=names, image_names=texts.get("image"), captions=texts.get("caption")),
        auditor=job.auditor(),
        scan=Scan(scored.measures, np.where(scored.bad, BAD_IN_TABLE, READABLE).astype(np.uint8)),
        scores=MatchScores(scored.match.astype(np.float64), rows[:0], scored.match[:0], checked=scored.checked),
        match_score=scored.match,
        suggested=verdict.worst[here] - start,
        new_rights=verdict.new_rights.take(here), new_lefts=verdict.new_lefts.take(here),
        items=scored.items,
        seen=scored.seen,
        threshold=verdict.below,
        start=start, wordless=scored.wordless, origin=table["source"], verdict=verdict,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockFindings(Findings):
    """Findings about the rows of a block."""

    start: int  # number of the first row in the whole
    wordless: npt.NDArray[np.bool_]  # (n,) whether captions say nothing about an image
    origin: pyarrow.ChunkedArray  # the block of each row, or its value of the column `by`
    verdict: Verdict

    def __post_init__(self) -> None:
        vars(self)["_typical"] = self.verdict.typical  # in the place of a cached property
        vars(self)["_origins"] = self.origin.combine_chunks().dictionary_encode()

    def _piece(self, start: int, stop: int) -> pyarrow.Table:
        table = super()._piece(start, stop)
        for name, own in (("left_item", self.items.left), ("right_item", self.items.right)):
            table = table.append_column(name, pyarrow.array(own[start:stop]))
        return table

    def _partner_ids(self, rows: IntArray) -> list[str]:
        return self.verdict.ids(rows)


def lowest(job: Job, batch: Batch) -> Batch:
    """Return the lowest match scores of a block and, as negative rows, the counts between two `STEPS`."""
    number = int(batch["number"][0])
    score = _Scored.of(job, number).match
    row = job.starts[number] + np.flatnonzero(~np.isnan(score))
    score = score[~np.isnan(score)]
    chosen = np.lexsort((row, score))[:MAX_SUGGESTED]
    steps, counts = np.unique(np.searchsorted(STEPS, score, side="right"), return_counts=True)
    return {"row": np.append(row[chosen], -1 - steps), "value": np.append(score[chosen].astype(np.float64), counts)}


def keyed(job: Job, apart: int, batch: Batch) -> Batch:
    """Return the sketches of the readable items of a block; items with the same key are compared."""
    names = [f"{side}_{code}" for side in SIDES for code in range(CODES)]
    table = job.scores(int(batch["number"][0]), ["row", "match_score", *names])
    table = table.filter(table["match_score"].is_valid())
    row, parts = table["row"].to_numpy(), []
    for side, name in enumerate(SIDES):
        codes = [table[f"{name}_{code}"].to_numpy() for code in range(CODES)]
        for quarter in range(1 if apart == 1 else QUARTERS):
            value = (codes[0] >> (BITS // QUARTERS * quarter)) & 0xFFFF
            key = (side * (1 if apart == 1 else QUARTERS) + quarter) * apart + value % apart
            parts.append({"key": key, "row": row, **{f"code_{n}": one for n, one in enumerate(codes)}})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def near(keys: int, cosines: Sequence[float], group: Batch) -> Batch:
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
            [{"size": len(group), "rows": members[group[:MEMBERS]].tolist()} for group in groups.first(GROUPS // 2)]
            for groups in found
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


def finish(job: Job, verdict: Verdict, batch: Batch) -> Batch:
    """Write the table of a block, and count its rows."""
    number = int(batch["number"][0])
    found = _found(job, number, verdict)
    job.store.write_table(f"{TABLES}/{file_name(number)}", found.table)
    values = None if job.settings.by is None else found.origin.to_pylist()
    tally = found.counted(verdict.scored, found.wordless, values, found.start)
    return {"tally": np.array([pickle.dumps(tally)], dtype=object)}


def file_name(number: int) -> str:
    return f"{number:06d}.parquet"


def shown(job: Job, rows: IntArray, batch: Batch) -> Batch:
    """Read the cells and images of rows of a block, for the report."""
    number = int(batch["number"][0])
    own = job.own(number, rows) - int(job.starts[number])
    table = job.store.table(f"{TABLES}/{file_name(number)}").take(own)
    names = ("id", "image", "caption", "match_score", "reason")
    found = {name: np.array(table[name].to_pylist()) for name in names if name in table.column_names}
    found["match_score"] = table["match_score"].to_numpy().astype(np.float32)
    contents = np.full(len(own), b"", dtype=object)
    if "image" in found:
        with contextlib.suppress(DataError), job.open(number) as encoded, job.given(number, encoded) as here:
            places = here.start + own
            read = here.source.image_reader(places)
            contents[:] = [read(place) or b"" for place in places.tolist()]
    return {"row": own + int(job.starts[number]), **found, "content": contents}


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
