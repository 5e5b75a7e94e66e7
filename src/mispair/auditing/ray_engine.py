"""Audit on a Ray cluster, block by block, with Ray Data.

    encoding    images and captions of each block, if it has no vectors
    alone       the driver audits all rows as the local engine does, where it would learn from all of them; else:
    learning    a local audit of rows of all blocks, chosen by their numbers; by the driver
    measuring   each block by itself: match scores, and sketches of the items
    shared      rows with similar sketches meet by a shuffle, and one worker joins the links
    partners    for the lowest match scores, among each other and in the sample; by the driver
    writing     the table of each block, and its counts

Workers read blocks and write tables (`ray_workers`). The driver holds the sample, a list of blocks and counts. Files
that are in the working folder are not made again.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from operator import add
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
from rich.console import Console

from mispair.auditing.audit import (
    COMMON_SPACE,
    MAX_SUGGESTED,
    Judged,
    Results,
    Settings,
    audit_source,
    judged,
    notes_on,
)
from mispair.auditing.auditor import SAMPLE, checked_answers
from mispair.auditing.blocks import Block
from mispair.auditing.findings import suggestion_table, typical
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import LEARNED
from mispair.auditing.ray_cluster import Batch, dataset, each, joined
from mispair.auditing.ray_encoding import encode_blocks
from mispair.auditing.ray_workers import (
    ITEMS,
    QUARTERS,
    SCORES,
    STEPS,
    TABLES,
    Job,
    Known,
    Verdict,
    count,
    file_name,
    finish,
    keyed,
    lowest,
    near,
    sampled,
    score,
    share,
    shown,
)
from mispair.auditing.report.page import WORST
from mispair.auditing.scoring.folds import PART, random_keys
from mispair.auditing.scoring.folds import SAMPLE as STREAM
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.near_duplicates import Groups
from mispair.auditing.scoring.partners import POOL, Partners, find_partners
from mispair.auditing.scoring.shared_items import SharedItems, near_enough
from mispair.auditing.scoring.views import with_joins
from mispair.auditing.summary import SHARD, AuditSummary, Tally, detections, share_of, values_by
from mispair.compute.devices import pick_device
from mispair.encoders.encode import read_hashes, request_of, shard_files
from mispair.errors import DamagedError, DataError, InvalidValueError, NotFoundError, ShapeError, TooFewError
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.origin import MARK
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.remote import Store, url_of
from mispair.pairs.shards import ArrayRows, Shard, SideRows, join_views, views_of
from mispair.pairs.source import Rows, Source
from mispair.support.arrays import FloatArray, IntArray
from mispair.support.progress import RowProgress, progress

ALONE = SAMPLE  # rows up to which the driver audits all of them itself, as the local engine does
TOGETHER = 1 << 20  # rows of a side that one worker compares with each other
COMPARED = 1 << 11  # vectors of the sample that give the mean and the number of directions of a side
ENCODED, SAMPLED, COUNTED = "encoded", "sample.npz", "blocks.json"


@dataclass(frozen=True)
class Sample:
    """Pairs to learn from, by ascending row number."""

    row: IntArray  # (n,)
    left: FloatArray  # (n, D) the views side by side
    right: FloatArray  # (n, E)
    id: npt.NDArray[np.str_]  # (n,)
    caption: npt.NDArray[np.str_]  # (n,)
    joint: npt.NDArray[np.bool_]  # (n,) whether the data says that both sides have a common space

    def source(self, widths: Sequence[Sequence[int]]) -> Source:
        """Return the pairs, given the widths of the views of either side."""
        sides = zip((self.left, self.right), widths, strict=True)
        left, right = (np.split(side, np.cumsum(each)[:-1], axis=1) for side, each in sides)
        return from_memory(left, right, self.id.tolist(), None, self.caption.tolist())


def audit_blocks(
    ray: Any,
    data: AuditInput,
    blocks: Sequence[Block],
    work: str,
    folder: Path,
    settings: Settings,
    console: Console | None = None,
    command: str = "",
) -> Results:
    """Audit a data set block by block with Ray, a connected module; the same call again resumes.

    Up to `ALONE` rows the result is that of the local engine. Intermediate results are in `work`, a folder or URL for
    all machines, and in `folder`, on this machine.
    """
    job = Job(data, work, tuple(blocks), settings, np.zeros(1, dtype=np.int64))
    if blocks[0].raw:
        job = _encoded(ray, job, console)
    with progress(console, len(blocks)) as show:
        show.begin("counting rows")
        run = _Run(ray, replace(job, starts=np.cumsum([0, *_counts(ray, job)])), folder, command)
        pairs = _whole(run.job) if run.job.rows <= ALONE else None
        if pairs is None:
            return run.audit(show)
    found = audit_source(pairs, settings, work=folder, console=console, command=command)
    found.auditor.save(folder / LEARNED)  # with the decisions of people
    return found


def _encoded(ray: Any, job: Job, console: Console | None) -> Job:
    """Encode the images and captions of all blocks; return the job with their vectors."""
    data, place = job.data, f"{job.work}/{ENCODED}"
    encoders = replace(data.models, device=job.settings.device)
    loaded = replace(encoders, device="cpu").views()  # raises before any work
    widths = tuple(tuple(encoder.width for encoder in side) for side in loaded)
    Store(place).write(MARK, json.dumps(request_of(loaded)).encode())
    encode_blocks(ray, data, job.blocks, place, encoders, views=True, workers=job.settings.workers, console=console)
    own = tuple(Block(block.name, tuple(shard_files(n)), views=widths) for n, block in enumerate(job.blocks))
    return replace(job, data=AuditInput(Path(place)), blocks=own, raw=data, raw_blocks=job.blocks)


def _counts(ray: Any, job: Job) -> list[int]:
    """Count the rows of each block."""
    if COUNTED not in job.store.files():
        counts = joined(each(ray, partial(count, job), range(len(job.blocks))), "number")["rows"]
        job.store.write(COUNTED, json.dumps(counts.tolist()).encode())
    rows: list[int] = json.loads(job.store.read(COUNTED))
    return rows


def _whole(job: Job) -> Source | None:
    """Open all rows as the local engine does; None if these are not the rows of the blocks, as one cannot be read."""
    try:
        pairs = (job.raw or job.data).fetched().open("cpu")
    except (DamagedError, ShapeError, TooFewError):
        return None
    if len(pairs) != job.rows:
        return None
    if job.raw is None:
        return pairs
    sides: list[list[list[Shard]]] = [[], []]  # by view and by block
    known, hashes = dict[int, str](), []
    for number, block in enumerate(job.blocks):
        with job.open(number) as rows:
            if rows.source.texts() != pairs.texts(np.arange(*job.starts[number : number + 2])):
                return None
            for side, views in zip((rows.source.left, rows.source.right), sides, strict=True):
                own = [ArrayRows(view.block(0, len(view), view.dtype)) for view in views_of(side)]
                views[:] = [[*before, one] for before, one in zip(views or [[]] * len(own), own, strict=True)]
            known |= {int(job.starts[number]) + row: why for row, why in rows.source.known.items()}
        hashes.append(read_hashes(Store(f"{job.work}/{ENCODED}"), block.files[-1]))
    left, right = (join_views([SideRows.of(view) for view in views], pairs.name) for views in sides)
    return pairs.with_vectors(left, right, known, hashes=np.concatenate(hashes))


@dataclass
class _Run:
    """One audit, as the driver sees it."""

    ray: Any
    job: Job
    folder: Path
    command: str

    def audit(self, show: RowProgress) -> ClusterAudit:
        widths = self._widths()
        show.begin("learning")
        sample = self._sample()
        learned = self._learned(sample, widths, show)
        show.begin("measuring all pairs")
        gpus = self.job.settings.workers or int(self.ray.cluster_resources().get("GPU", 1))
        actors = gpus if learned.auditor.judge.transforms[0].mean.device.type == "cuda" else 0
        for batch in self._each(score, self._missing(SCORES), actors):
            show.step(len(batch["number"]))
        show.begin("searching near-duplicates")
        shared = self._shared()
        worst, match, below, scored = self._worst()
        show.begin("searching better partners")
        verdict = self._verdict(learned, sample, worst, match, below, scored)
        show.begin("writing tables")
        found = self._each(finish, self._all, 0, verdict)
        tally: Tally = reduce(add, (pickle.loads(one) for batch in found for one in batch["tally"].tolist()))
        show.end()
        return self._result(learned, tally, shared, verdict, show.stages)

    @property
    def _all(self) -> range:
        return range(len(self.job.blocks))

    def _each(
        self, function: Callable[..., Any], numbers: Sequence[int], actors: int = 0, *given: Any
    ) -> Iterator[Batch]:
        """Call a function of `ray_workers` for some blocks."""
        return each(self.ray, partial(function, self.job, *given), numbers, actors)

    def _missing(self, folder: str) -> list[int]:
        """The blocks without a file in a folder."""
        there = Store(f"{self.job.work}/{folder}").files()
        return [number for number in range(len(self.job.blocks)) if file_name(number) not in there]

    def _widths(self) -> list[list[int]]:
        """Read the widths of the views and the columns from the first readable block; check `by`."""
        by, problem = self.job.settings.by, self._nothing()
        for number in range(len(self.job.blocks)):
            try:
                with self.job.open(number) as rows:
                    if by not in (None, SHARD):
                        with self.job.given(number, rows) as given:
                            values_by(given.source, str(by))
                    self.job = replace(self.job, columns=tuple(rows.source.item_columns(rows.start, rows.start)))
                    return [[view.width for view in views_of(side)] for side in (rows.source.left, rows.source.right)]
            except InvalidValueError:
                raise
            except DataError as error:
                problem = error
        raise problem

    def _nothing(self) -> DataError:
        return DataError("no pairs can be read", where=(self.job.raw or self.job.data).places[0])

    def _sample(self) -> Sample:
        """Draw pairs to learn from; add the checked pairs."""
        if SAMPLED not in self.job.store.files():
            rows, settings = _sample_rows(self.job.rows), self.job.settings
            checked = sorted(checked_answers(settings.checked))
            numbers = self._all if checked else self._blocks_of(rows)
            found = joined(self._each(sampled, numbers, 0, rows, checked, False))
            if lost := sorted(set(checked) - set(found["id"].tolist() if found else ())):
                raise NotFoundError(f"no pair has the id {lost[0]!r}", where="checked", expected="ids of the data")
            if not found or not found["good"].any():
                raise self._nothing()
            file, good = io.BytesIO(), found["good"]
            columns = {field.name: found[field.name][good] for field in fields(Sample)}
            texts = {name: values.astype(np.str_) for name, values in columns.items() if values.dtype == object}
            arrays: dict[str, Any] = {**columns, **texts}
            np.savez(file, **arrays)
            self.job.store.write(SAMPLED, file.getvalue())
        with np.load(io.BytesIO(self.job.store.read(SAMPLED)), allow_pickle=False) as there:
            return Sample(**{field.name: there[field.name] for field in fields(Sample)})

    def _learned(self, sample: Sample, widths: Sequence[Sequence[int]], show: RowProgress) -> Judged:
        """Audit the sample as the local engine does; hand the auditor to the workers."""
        settings, store = self.job.settings, self.job.store
        answers = checked_answers(settings.checked)
        settings = replace(
            settings, joint=settings.joint or bool(sample.joint.any()), by=None, partnered=((), ()),
            checked={name: answers[name] for name in sample.id.tolist() if name in answers},
        )  # fmt: skip
        if LEARNED in store.files():
            store.get(LEARNED, self.folder / LEARNED)
        self.folder.mkdir(parents=True, exist_ok=True)
        source = sample.source(widths)
        learned = judged(source, settings, pick_device(settings.device), self.folder, show)
        learned.auditor.save(self.folder / LEARNED)  # with the decisions of people
        store.put(self.folder / LEARNED, LEARNED)
        if learned.auditor.joins is not None:
            source = with_joins(source, learned.auditor.joins)
        left, right = source.block(0, min(COMPARED, len(source)))
        self.job = replace(self.job, known=Known.of(left, right, sample.caption[: 4 * COMPARED].tolist()))
        return learned

    def _shared(self) -> dict[str, Any]:
        """Find shared items of all blocks."""
        job = self.job
        if ITEMS not in job.store.files():
            assert job.known is not None
            apart = -(-job.rows // TOGETHER)
            cosines = [near_enough(side.units, job.rows) for side in job.known.some]
            groups = dataset(self.ray, partial(keyed, job, apart), self._all)
            keys = 2 * (1 if apart == 1 else QUARTERS * apart)
            cores = int(self.ray.cluster_resources().get("CPU", 1))
            links = groups.groupby("key", num_partitions=max(1, min(keys, cores)))
            found = links.map_groups(partial(near, keys // 2, cosines), batch_format="numpy")
            self.ray.get(self.ray.remote(share).remote(job, *found.to_arrow_refs()))
        shared: dict[str, Any] = json.loads(job.items().schema.metadata[b"about"])
        return shared

    def _worst(self) -> tuple[IntArray, FloatArray, float, int]:
        """Return the lowest flagged rows, their match scores, the cut, and the number of readable rows."""
        settings, counts = self.job.settings, np.zeros(len(STEPS) + 1, dtype=np.int64)
        rows, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        for batch in self._each(lowest, self._all):
            own, value = batch["row"], batch["value"]
            np.add.at(counts, -1 - own[own < 0], value[own < 0].astype(np.int64))
            rows, scores = np.append(rows, own[own >= 0]), np.append(scores, value[own >= 0].astype(np.float32))
            chosen = np.lexsort((rows, scores))[:MAX_SUGGESTED]
            rows, scores = rows[chosen], scores[chosen]
        below = MATCH_THRESHOLD if settings.flag_below is None else settings.flag_below
        if settings.keep_best is not None:
            flagged = (1 - share_of(settings.keep_best)) * counts.sum()
            ends = np.append(STEPS, np.nextafter(np.float32(1), np.float32(2)))
            below = float(ends[np.searchsorted(counts.cumsum(), flagged)])
        return rows[scores < below], scores[scores < below], below, int(counts.sum())

    def _verdict(
        self, learned: Judged, sample: Sample, worst: IntArray, match: FloatArray, below: float, scored: int
    ) -> Verdict:
        """Search better partners for the lowest flagged rows, and look at their images."""
        auditor, known = learned.auditor, self.job.known
        assert known is not None
        bank = np.flatnonzero(~np.isin(sample.row, worst))[:POOL]
        order = np.argsort(worst)
        found = joined(self._each(sampled, self._blocks_of(worst), 0, worst[order], (), True))
        left, right = learned.source.gather(bank)
        scale = [np.float32(factor) for factor in auditor.factors]
        back = np.argsort(order)  # the lowest match score first
        if found:
            left = np.concatenate([found["left"][back] * scale[0], left])
            right = np.concatenate([found["right"][back] * scale[1], right])
        row, ids, captions = (
            np.concatenate([*([found[name][back]] if found else []), getattr(sample, name)[bank]])
            for name in ("row", "id", "caption")
        )
        match = np.append(match, learned.scores.alone()[bank]).astype(np.float32)
        empty = (known.seen(captions.tolist()) & known.wordless) > 0
        source, device = from_memory(left, right), auditor.judge.transforms[0].mean.device
        lent = [np.flatnonzero(np.isin(ids, list(side))) for side in self.job.settings.partnered]
        new_rights, new_lefts = (
            _renumbered(find_partners(
                source, auditor.judge, np.arange(len(worst)), match, SharedItems.apart(len(match)),
                keep_left=keep_left, device=device, partnered=own, excluded=empty & keep_left,
            ), row.__getitem__)
            for keep_left, own in ((True, lent[1]), (False, lent[0]))
        )  # fmt: skip
        matched, order = learned.scores.match() >= below, np.argsort(row)
        seen = found["seen"][back] if found else np.zeros(0, dtype=np.uint16)
        usual = typical(auditor.judge, learned.scan, matched)
        return Verdict(below, scored, usual, worst, seen, new_rights, new_lefts, row[order], ids[order])

    def _blocks_of(self, rows: IntArray) -> list[int]:
        numbers: list[int] = np.unique(np.searchsorted(self.job.starts, rows, side="right") - 1).tolist()
        return numbers

    def _tables(self) -> Iterator[tuple[str, Iterator[pyarrow.Table]]]:
        for number, block in enumerate(self.job.raw_blocks or self.job.blocks):
            is_shard = any(name.endswith((".npz", ".tar")) for name in block.files)
            yield (
                PurePosixPath(block.name).name if is_shard else "",
                iter([self.job.store.table(f"{TABLES}/{file_name(number)}")]),
            )

    def _result(
        self, learned: Judged, tally: Tally, shared: dict[str, Any], verdict: Verdict, stages: dict[str, float]
    ) -> ClusterAudit:
        """Collect the summary and the rows of the report."""
        job, judge = self.job, learned.auditor.judge
        joint = [] if job.settings.joint or learned.source.joint or not judge.joint else [COMMON_SPACE]
        by_engine = "With `engine=ray` the score of a pair depends only on this pair and its shared items."
        notes = [*joint, *notes_on(judge, tally.scored, tally.flagged), *shared["notes"], by_engine]
        summary = AuditSummary(
            **tally.metrics(judge, verdict.below),
            detections=detections(judge, learned.scores, verdict.below, learned.source.ids),
            decided=job.settings.decided,
            by=job.settings.by,
            **shared["counts"],
            suggested_right=int((verdict.new_rights.rows[:, 0] >= 0).sum()),
            suggested_left=int((verdict.new_lefts.rows[:, 0] >= 0).sum()),
            notes=notes,
            seconds=round(sum(stages.values()), 2),
            stages={name: round(seconds, 2) for name, seconds in stages.items()},
        )
        some = slice(2 * WORST)
        worst, rights, lefts = verdict.worst[some], verdict.new_rights.take(some), verdict.new_lefts.take(some)
        members = [row for side in shared["groups"] for group in side for row in group["rows"]]
        rows = np.unique(np.concatenate([worst, rights.rows.ravel(), lefts.rows.ravel(), members]).astype(np.int64))
        rows = rows[rows >= 0]
        cells = joined(self._each(shown, self._blocks_of(rows), 0, rows))
        source = _ShownRows.of((job.raw or job.data).places[0], cells)
        answers = checked_answers(job.settings.checked)
        return ClusterAudit(
            source=source,
            judge=judge,
            summary=summary,
            tally=tally,
            match_score=source.column("match_score"),
            reason=source.column("reason"),
            checked={row: 1.0 for row, name in source.column("id").items() if name in answers},
            suggested=worst,
            new_rights=rights,
            new_lefts=lefts,
            near_duplicates=(_groups_of(shared["groups"][0]), _groups_of(shared["groups"][1])),
            near_duplicate_pairs=shared["pairs"],
            suggestions=suggestion_table(verdict.ids, verdict.worst, verdict.new_rights, verdict.new_lefts),
            command=self.command,
            tables=self._tables,
        )


@dataclass(frozen=True, kw_only=True)
class ClusterAudit:
    """An audit whose tables are in files; it has some rows for the report, by their numbers in the whole."""

    source: Source
    judge: Judge
    summary: AuditSummary
    tally: Tally
    match_score: Mapping[int, float]
    reason: Mapping[int, str]
    checked: Mapping[int, float]
    suggested: IntArray
    new_rights: Partners
    new_lefts: Partners
    near_duplicates: tuple[Groups, Groups]
    near_duplicate_pairs: int
    suggestions: pyarrow.Table
    command: str
    tables: Callable[[], Iterator[tuple[str, Iterator[pyarrow.Table]]]]

    def parts(self) -> Iterator[tuple[str, Iterator[pyarrow.Table]]]:
        """Read the table of each block."""
        return self.tables()

    def reasons(self, rows: IntArray) -> list[str]:
        return [self.reason[row] for row in rows.tolist()]


@dataclass(eq=False)
class _ShownRows(Source):
    """Some rows with their images, by their numbers in the whole."""

    cells: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: Path, columns: Batch) -> _ShownRows:
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        cells = {each[0]: dict(zip(columns, each, strict=True)) for each in values}  # the row comes first

        def look_up(column: str) -> Callable[[IntArray], list[str]] | None:
            return None if column not in columns else lambda rows: [cells[row][column] for row in rows.tolist()]

        captions, images = look_up("caption"), look_up("image")
        return cls(name=str(url_of(name) or name), cells=cells, captions=captions, image_names=images, images=(name,))

    def column(self, name: str) -> dict[int, Any]:
        """Return the cells of a column by row."""
        return {row: cells[name] for row, cells in self.cells.items()}

    def ids(self, rows: Rows = None) -> list[str]:
        return [self.cells[row]["id"] for row in self._numbers(rows).tolist()]

    def image_key(self, row: int) -> int:
        return row

    def image_is_there(self, row: int) -> bool:
        return bool(self.cells[row]["content"])

    def image(self, row: int) -> bytes | None:
        return self.cells[row]["content"] or None


def _renumbered(partners: Partners, number: Callable[[IntArray], Any]) -> Partners:
    """Replace the rows of partners with their new numbers."""
    return replace(partners, rows=np.where(partners.rows < 0, -1, number(partners.rows)))


def _groups_of(groups: list[dict[str, Any]]) -> Groups:
    """Return the largest groups of near-duplicates; -1 stands for members that are not shown."""
    each = [np.pad(group["rows"], (0, group["size"] - len(group["rows"])), constant_values=-1) for group in groups]
    return Groups(np.concatenate([np.zeros(0, dtype=np.int64), *each]), np.cumsum([0, *map(len, each)]))


def _sample_rows(rows: int) -> IntArray:
    """Choose at most `SAMPLE` row numbers as `folds.sample` does, in bounded memory."""
    chosen = np.zeros(0, dtype=np.int64)
    for start in range(0, rows, PART):
        chosen = np.append(chosen, np.arange(start, min(start + PART, rows)))
        chosen = chosen[np.argsort(random_keys(chosen, STREAM))[:SAMPLE]]
    return np.sort(chosen)
