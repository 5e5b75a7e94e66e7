"""Audit on a Ray cluster, block by block, with Ray Data. Ray is imported only when it is needed.

    encoding    images and captions of each block, if it has no vectors
    alone       the driver audits all rows as the local engine does, where it would learn from all of them; else:
    learning    a local audit of rows of all blocks, chosen by their numbers; by the driver
    measuring   each block by itself: match scores, and sketches of the items
    shared      rows with similar sketches meet by a shuffle, and one worker joins the links
    partners    for the lowest match scores, among each other and in the sample; by the driver
    writing     the table of each block, and its counts

Workers read blocks and write tables. The driver holds the sample, a list of blocks and counts. Files that are in the
working folder are not made again.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial, reduce
from operator import add
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import torch
from rich.console import Console

from mispair.auditing.audit import (
    COMMON_SPACE,
    MAX_SUGGESTED,
    Audit,
    Judged,
    Settings,
    audit_source,
    judged,
    notes_on,
    shared_notes,
)
from mispair.auditing.auditor import SAMPLE, Auditor, checked_answers
from mispair.auditing.blocks import Block, Rows, count_rows, encode_block, opened, outcome_of
from mispair.auditing.findings import Findings, suggestion_table, typical
from mispair.auditing.inputs import AuditInput
from mispair.auditing.match_scores import WORDLESS, MatchScores, limits
from mispair.auditing.output_files import LEARNED
from mispair.auditing.report.page import GROUPS, MEMBERS, WORST
from mispair.auditing.scoring.folds import PART, random_keys
from mispair.auditing.scoring.folds import SAMPLE as STREAM
from mispair.auditing.scoring.near_duplicates import (
    BITS,
    DisjointSets,
    Groups,
    find_near_duplicates,
    groups_of,
    sketch,
)
from mispair.auditing.scoring.partners import POOL, Partners, find_partners
from mispair.auditing.scoring.reasons import KINDS, USUALLY, Usual, caption_reason, image_reasons
from mispair.auditing.scoring.reasons import WORDLESS as EMPTY_KINDS
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan, faults
from mispair.auditing.scoring.shared_items import SharedItems, SomeVectors, combined, near_enough
from mispair.auditing.scoring.views import with_joins
from mispair.auditing.summary import SHARD, SIDES, AuditSummary, Tally, detections, share_of, values_by
from mispair.compute.devices import pick_device
from mispair.encoders.encode import Encoders, Outcome, read_hashes, request_of, shard_files
from mispair.errors import (
    DamagedError,
    DataError,
    InvalidValueError,
    MispairError,
    NotFoundError,
    ShapeError,
    TooFewError,
)
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.origin import MARK
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.remote import Store, url_of
from mispair.pairs.row_ids import RowIds, Texts, as_texts
from mispair.pairs.shards import ArrayRows, Shard, SideRows, join_views, views_of
from mispair.pairs.source import Source
from mispair.support.arrays import FloatArray, IntArray
from mispair.support.extras import missing_package
from mispair.support.progress import RowProgress, progress

ALONE = SAMPLE  # rows up to which the driver audits all of them itself, as the local engine does
AT_ONCE = 8192  # rows of a block in memory
CODES = 4  # sketches of an item of 64 bits: the first one finds near-duplicates, all together compare them
TOGETHER = 1 << 20  # rows of a side that one worker compares with each other
QUARTERS = 4  # of the first sketch: rows with an equal one meet, where not all rows can
COMPARED = 1 << 11  # vectors of the sample that give the mean and the number of directions of a side
MOST_TASKS = 1000  # of one stage: each of them sees to one block after the other
DROPPED = 12  # last bits of the odds of match scores, to find the cut of `keep_best`
HALF = int(np.float32(0.5).view(np.uint32)) >> DROPPED
ENCODED, SCORES, TABLES, ITEMS, SAMPLED, COUNTED, KNOWN = (
    "encoded", "scores", "tables", "items.parquet", "sample.npz", "blocks.json", "known.npz",
)  # fmt: skip
_WORDLESS_BITS = sum(1 << KINDS.index(kind) for kind in EMPTY_KINDS)
Batch = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Job:
    """The audit, as each worker knows it."""

    data: AuditInput
    work: str  # folder or URL of intermediate results, which all machines can read and write
    blocks: tuple[Block, ...]
    settings: Settings
    starts: IntArray  # (B + 1,) the first row of each block in the whole, and the number of all rows
    columns: tuple[str, ...] = ()  # of image and caption, those of the pairs
    has_views: bool = False  # whether the auditor has learned to join several views of a side
    raw: AuditInput | None = None  # the images and captions that `data` was encoded from
    raw_blocks: tuple[Block, ...] = ()  # of these

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
            joins = _auditor(self.work, "cpu").joins if self.has_views else None
            yield rows if joins is None else rows._replace(source=with_joins(rows.source, joins))

    def given(self, number: int, rows: Rows) -> contextlib.AbstractContextManager[Rows]:
        """Open the rows of a block as they were given, with their images and columns; `rows` are the open ones."""
        return contextlib.nullcontext(rows) if self.raw is None else opened(self.raw, self.raw_blocks[number])

    def own(self, number: int, rows: IntArray) -> IntArray:
        """Return the rows of a block among ascending rows."""
        return rows[np.searchsorted(rows, self.starts[number]) : np.searchsorted(rows, self.starts[number + 1])]


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


def audit_blocks(
    ray: Any,
    data: AuditInput,
    blocks: Sequence[Block],
    work: str,
    folder: Path,
    settings: Settings,
    console: Console | None = None,
    command: str = "",
) -> Audit:
    """Audit a data set block by block with Ray, a connected module; the same call again resumes.

    Up to `ALONE` rows the result is that of the local engine. Intermediate results are in `work`, a folder or URL for
    all machines, and in `folder`, on this machine.
    """
    job = Job(data, work, tuple(blocks), settings, np.zeros(1, dtype=np.int64))
    if blocks[0].raw:
        encoders, place = replace(data.models, device=settings.device), f"{work}/{ENCODED}"
        loaded = replace(encoders, device="cpu").views()  # raises before any work
        widths = tuple(tuple(encoder.width for encoder in side) for side in loaded)
        Store(place).write(MARK, json.dumps(request_of(loaded)).encode())
        encode_blocks(ray, data, blocks, place, encoders, views=True, workers=settings.workers, console=console)
        own = tuple(Block(block.name, tuple(shard_files(n)), views=widths) for n, block in enumerate(blocks))
        job = replace(job, data=AuditInput(Path(place)), blocks=own, raw=data, raw_blocks=job.blocks)
    with progress(console, len(blocks)) as show:
        run = _Run(ray, job, folder, command)
        run.count(show)
        pairs = _whole(run.job) if run.job.rows <= ALONE else None
        if pairs is None:
            return run.audit(show)
    found = audit_source(pairs, settings, work=folder, console=console, command=command)
    found.auditor.save(folder / LEARNED)  # with the decisions of people
    return found


def _whole(job: Job) -> Source | None:
    """Open all rows as the local engine does; None if a block cannot be read."""
    try:
        pairs = (job.raw or job.data).fetched().open("cpu")
    except (DamagedError, ShapeError, TooFewError):
        return None
    if job.raw is None or len(pairs) != job.rows:
        return pairs if len(pairs) == job.rows else None
    sides: list[list[list[Shard]]] = [[], []]  # by view and by block
    known, hashes = dict[int, str](), []
    for number, block in enumerate(job.blocks):
        with job.open(number) as rows:
            for side, views in zip((rows.source.left, rows.source.right), sides, strict=True):
                own = [ArrayRows(view.block(0, len(view), view.dtype)) for view in views_of(side)]
                views[:] = [[*before, one] for before, one in zip(views or [[]] * len(own), own, strict=True)]
            known |= {int(job.starts[number]) + row: why for row, why in rows.source.known.items()}
        hashes.append(read_hashes(Store(f"{job.work}/{ENCODED}"), block.files[-1]))
    left, right = (join_views([SideRows.of(view) for view in views], pairs.name) for views in sides)
    return pairs.with_vectors(left, right, known, hashes=np.concatenate(hashes))


def encode_blocks(
    ray: Any,
    data: AuditInput,
    blocks: Sequence[Block],
    place: str,
    encoders: Encoders,
    *,
    views: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> Outcome:
    """Encode images and captions block by block with Ray; write a shard a block to a folder or URL.

    Blocks with a shard are not encoded again. The mark `encode.json` must be there. For `views` see `write_shard`;
    there are as many `workers` as GPUs by default.
    """
    there = Store(place).files()
    done = frozenset(number for number in range(len(blocks)) if shard_files(number)[-1] in there)
    gpus = 0 if encoders.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    call = partial(_encode, data, tuple(blocks), place, encoders, views, done)
    found: dict[int, Outcome] = {}
    with progress(console, len(blocks), "encoding blocks") as show:
        for batch in _each(ray, call, range(len(blocks)), gpus and (workers or gpus)):
            for number, outcome in zip(batch["number"].tolist(), map(pickle.loads, batch["outcome"]), strict=True):
                if isinstance(outcome, MispairError):
                    raise outcome
                found[number] = outcome
                show.step(1)
    return reduce(add, (found[number] for number in sorted(found)))


def _encode(
    data: AuditInput,
    blocks: Sequence[Block],
    place: str,
    encoders: Encoders,
    views: bool,
    done: frozenset[int],
    batch: Batch,
) -> Batch:
    """Encode a block, unless it is done; return its outcome, or the error of the user."""
    number, store = int(batch["number"][0]), Store(place)
    found: Outcome | MispairError
    try:
        if number in done:
            found = outcome_of(number, store)
        else:
            data.check()
            _check_shared(store)
            found = encode_block(data, blocks[number], number, store, encoders, views=views)
    except MispairError as error:
        found = error
    return {"number": np.array([number]), "outcome": np.array([pickle.dumps(found)], dtype=object)}


def _check_shared(store: Store) -> None:
    try:
        store.open(MARK).close()
    except NotFoundError:
        advice = "Give `out` on a disk that all machines share, or in a store."
        raise NotFoundError("a worker does not find this folder", where=store.url, advice=advice) from None


@dataclass(frozen=True, kw_only=True)
class ClusterAudit(Audit):
    """An audit with its tables in files; it has the rows of the report."""

    tables: Callable[[], Iterator[tuple[str, Iterator[pyarrow.Table]]]]  # for `parts`
    known: dict[str, Any]  # attributes of the whole
    reason: list[str]  # for `reasons`

    def __post_init__(self) -> None:
        vars(self).update(self.known)  # in the place of cached properties

    def parts(self) -> Iterator[tuple[str, Iterator[pyarrow.Table]]]:
        return self.tables()

    def reasons(self, rows: IntArray) -> list[str]:
        return [self.reason[row] for row in rows.tolist()]


def _dataset(ray: Any, function: Callable[[Batch], Any], numbers: Sequence[int], actors: int = 0) -> Any:
    """Call a function for each block, in tasks or in as many actors, each with a GPU; return a data set of Ray."""
    data, count = ray.data, min(len(numbers), MOST_TASKS)
    items = data.from_items([{"number": number} for number in numbers], override_num_blocks=count)
    if not actors:
        return items.map_batches(function, batch_size=1, batch_format="numpy")
    pool = data.ActorPoolStrategy(min_size=1, max_size=min(actors, count))
    return items.map_batches(
        _Actor, fn_constructor_args=(function,), compute=pool, num_gpus=1, batch_size=1, batch_format="numpy"
    )


def _each(ray: Any, function: Callable[[Batch], Any], numbers: Sequence[int], actors: int = 0) -> Iterator[Batch]:
    if len(numbers):
        data = _dataset(ray, function, numbers, actors)
        yield from data.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)


@dataclass
class _Run:
    """One audit, as the driver sees it."""

    ray: Any
    job: Job
    folder: Path
    command: str

    def count(self, show: RowProgress) -> None:
        """Count the rows of all blocks."""
        show.begin("counting rows")
        self.job = replace(self.job, starts=np.cumsum([0, *self._counts()]))

    def audit(self, show: RowProgress) -> ClusterAudit:
        widths = self._widths()
        show.begin("learning")
        sample = self._sample()
        learned = self._learned(sample, widths, show)
        auditor = learned.auditor
        self.job = replace(self.job, has_views=auditor.joins is not None)
        show.begin("measuring all pairs")
        gpus = self.job.settings.workers or int(self.ray.cluster_resources().get("GPU", 1))
        actors = gpus if auditor.judge.transforms[0].mean.device.type == "cuda" else 0
        for batch in self._each(partial(_score, self.job), self._missing(SCORES), actors):
            show.step(len(batch["number"]))
        show.begin("searching near-duplicates")
        shared = self._shared()
        worst, match, below, scored = self._worst()
        show.begin("searching better partners")
        verdict = self._verdict(learned, sample, worst, match, below, scored)
        show.begin("writing tables")
        found = self._each(partial(_finish, self.job, verdict), range(len(self.job.blocks)))
        tally: Tally = reduce(add, (pickle.loads(one) for batch in found for one in batch["tally"].tolist()))
        show.end()
        return self._result(learned, tally, shared, verdict, show.stages)

    def _each(self, function: Callable[[Batch], Any], numbers: Sequence[int], actors: int = 0) -> Iterator[Batch]:
        return _each(self.ray, function, numbers, actors)

    def _missing(self, folder: str) -> list[int]:
        """The blocks without a file in a folder."""
        there = Store(f"{self.job.work}/{folder}").files()
        return [number for number in range(len(self.job.blocks)) if _name(number) not in there]

    def _counts(self) -> list[int]:
        if COUNTED not in self.job.store.files():
            counts = _joined(self._each(partial(_count, self.job), range(len(self.job.blocks))), "number")["rows"]
            self.job.store.write(COUNTED, json.dumps(counts.tolist()).encode())
        rows: list[int] = json.loads(self.job.store.read(COUNTED))
        return rows

    def _widths(self) -> list[list[int]]:
        """Read the widths of the views and the columns from the first readable block; check `by`."""
        by, problem = (
            self.job.settings.by,
            DataError("no pairs can be read", where=(self.job.raw or self.job.data).places[0]),
        )
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

    def _sample(self) -> Sample:
        """Draw pairs to learn from; add the checked pairs."""
        if SAMPLED not in self.job.store.files():
            rows, settings = _sample_rows(self.job.rows), self.job.settings
            checked = sorted(checked_answers(settings.checked))
            numbers = range(len(self.job.blocks)) if checked else self._blocks_of(rows)
            found = _joined(self._each(partial(_sampled, self.job, rows, checked, False), numbers))
            if lost := sorted(set(checked) - set(found["id"].tolist() if found else ())):
                raise NotFoundError(f"no pair has the id {lost[0]!r}", where="checked", expected="ids of the data")
            if not found or not found["good"].any():
                raise DataError("no pairs can be read", where=(self.job.raw or self.job.data).places[0])
            file, good = io.BytesIO(), found["good"]
            columns = {field.name: found[field.name][good] for field in fields(Sample)}
            texts = {name: values.astype(np.str_) for name, values in columns.items() if values.dtype == object}
            arrays: dict[str, Any] = {**columns, **texts}
            np.savez(file, **arrays)
            self.job.store.write(SAMPLED, file.getvalue())
        with np.load(io.BytesIO(self.job.store.read(SAMPLED)), allow_pickle=False) as there:
            return Sample(**{field.name: there[field.name] for field in fields(Sample)})

    def _learned(self, sample: Sample, widths: Sequence[Sequence[int]], show: RowProgress) -> Judged:
        """Audit the sample as the local engine does; write the auditor and the known for workers."""
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
        file = io.BytesIO()
        np.savez(file, left=left, right=right, caption=sample.caption[: 4 * COMPARED])
        store.write(KNOWN, file.getvalue())
        _auditor.cache_clear()
        _known.cache_clear()
        return learned

    def _shared(self) -> dict[str, Any]:
        """Find shared items of all blocks."""
        job = self.job
        if ITEMS not in job.store.files():
            apart = -(-job.rows // TOGETHER)
            cosines = [_cosine_of_codes(near_enough(side.units, job.rows)) for side in _known(job.work).some]
            keyed = _dataset(self.ray, partial(_keyed, job, apart), range(len(job.blocks)))
            keys = 2 * (1 if apart == 1 else QUARTERS * apart)
            cores = int(self.ray.cluster_resources().get("CPU", 1))
            links = keyed.groupby("key", num_partitions=max(1, min(keys, cores)))
            found = links.map_groups(partial(_near, keys // 2, cosines), batch_format="numpy")
            self.ray.get(self.ray.remote(_share).remote(job, *found.to_arrow_refs()))
        shared: dict[str, Any] = json.loads(_items(job.work).schema.metadata[b"about"])
        return shared

    def _worst(self) -> tuple[IntArray, FloatArray, float, int]:
        """Return the lowest flagged rows, their match scores, the cut, and the number of readable rows."""
        settings, counts = self.job.settings, np.zeros(2 * HALF + 1, dtype=np.int64)
        rows, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        for batch in self._each(partial(_lowest, self.job), range(len(self.job.blocks))):
            own, value = batch["row"], batch["value"]
            np.add.at(counts, -1 - own[own < 0], value[own < 0].astype(np.int64))
            rows, scores = np.append(rows, own[own >= 0]), np.append(scores, value[own >= 0].astype(np.float32))
            chosen = np.lexsort((rows, scores))[:MAX_SUGGESTED]
            rows, scores = rows[chosen], scores[chosen]
        below = MATCH_THRESHOLD if settings.flag_below is None else settings.flag_below
        if settings.keep_best is not None:
            flagged = (1 - share_of(settings.keep_best)) * counts.sum()
            below = _above(int(np.searchsorted(counts.cumsum(), flagged)))
        return rows[scores < below], scores[scores < below], below, int(counts.sum())

    def _verdict(
        self, learned: Judged, sample: Sample, worst: IntArray, match: FloatArray, below: float, scored: int
    ) -> Verdict:
        """Search better partners for the lowest flagged rows, and look at their images."""
        auditor, known = learned.auditor, _known(self.job.work)
        bank = np.flatnonzero(~np.isin(sample.row, worst))[:POOL]
        order = np.argsort(worst)
        found = _joined(self._each(partial(_sampled, self.job, worst[order], (), True), self._blocks_of(worst)))
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
                iter([self.job.store.table(f"{TABLES}/{_name(number)}")]),
            )

    def _result(
        self, learned: Judged, tally: Tally, shared: dict[str, Any], verdict: Verdict, stages: dict[str, float]
    ) -> ClusterAudit:
        """Collect the rows of the report."""
        job, judge, groups = self.job, learned.auditor.judge, shared["groups"]
        new_rights, new_lefts = verdict.new_rights, verdict.new_lefts
        joint = [] if job.settings.joint or learned.source.joint or not judge.joint else [COMMON_SPACE]
        by_engine = "With `engine=ray` the score of a pair depends only on this pair and its shared items."
        notes = [*joint, *notes_on(judge, tally.scored, tally.flagged), *shared["notes"], by_engine]
        summary = AuditSummary(
            **tally.metrics(judge, verdict.below),
            detections=detections(judge, learned.scores, verdict.below, learned.source.ids),
            decided=job.settings.decided,
            by=job.settings.by,
            **shared["counts"],
            suggested_right=int((new_rights.rows[:, 0] >= 0).sum()),
            suggested_left=int((new_lefts.rows[:, 0] >= 0).sum()),
            notes=notes,
            seconds=round(sum(stages.values()), 2),
            stages={name: round(seconds, 2) for name, seconds in stages.items()},
        )
        answers = checked_answers(job.settings.checked)
        some, shown = slice(2 * WORST), verdict.worst[: 2 * WORST]
        rights, lefts = (Partners(side.rows[some], side.scores[some]) for side in (new_rights, new_lefts))
        suggested = np.append(rights.rows[rights.rows >= 0], lefts.rows[lefts.rows >= 0])
        members = [row for side in groups for group in side for row in group["rows"]]
        rows = np.unique([*shown.tolist(), *suggested.tolist(), *members]).astype(np.int64)
        cells = _joined(self._each(partial(_shown, job, rows), self._blocks_of(rows)))
        names = cells["id"].tolist() if cells else []
        return ClusterAudit(
            source=_ShownRows.of((job.raw or job.data).places[0], cells),
            auditor=learned.auditor,
            scan=Scan.empty(len(rows), len(judge.names)),
            scores=MatchScores(
                np.zeros(len(rows)), rows[:0], np.zeros(0, dtype=np.float32),
                checked={place: 1.0 for place, name in enumerate(names) if name in answers},
            ),
            match_score=cells["match_score"] if cells else np.zeros(0, dtype=np.float32),
            suggested=np.searchsorted(rows, shown),
            new_rights=_renumbered(rights, rows.searchsorted),
            new_lefts=_renumbered(lefts, rows.searchsorted),
            items=SharedItems(
                rows, rows, rows, rows, np.zeros((2, len(rows)), dtype=np.int32),
                (_groups_of(groups[0], rows), _groups_of(groups[1], rows)), 0,
            ),
            seen=np.zeros(len(rows), dtype=np.uint16),
            threshold=verdict.below,
            command=self.command,
            stages=stages,
            tables=self._tables,
            reason=cells["reason"].tolist() if cells else [],
            known={
                "summary": summary, "tally": tally, "near_duplicate_pairs": shared["pairs"],
                "suggestions": suggestion_table(verdict.ids, verdict.worst, new_rights, new_lefts),
            },
        )  # fmt: skip


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


@dataclass(eq=False)
class _ShownRows(Source):
    """Some rows with their images."""

    found: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, name: Path, cells: Batch) -> _ShownRows:
        texts = {column: Texts.of(cells[column].tolist()) for column in ("id", "caption", "image") if column in cells}
        images = {place: content for place, content in enumerate(cells.get("content", ())) if content}
        return cls(
            name=str(url_of(name) or name), names=RowIds(texts["id"].array if texts else None), found=images,
            captions=texts.get("caption"), image_names=texts.get("image"), images=(name,),
        )  # fmt: skip

    def image_key(self, row: int) -> int:
        return row

    def image_is_there(self, row: int) -> bool:
        return row in self.found

    def image(self, row: int) -> bytes | None:
        return self.found.get(row)


def _renumbered(partners: Partners, number: Callable[[IntArray], Any]) -> Partners:
    """Replace the rows of partners with their new numbers."""
    return replace(partners, rows=np.where(partners.rows < 0, -1, number(partners.rows)))


def _groups_of(groups: list[dict[str, Any]], rows: IntArray) -> Groups:
    """Return the largest groups of near-duplicates by places among `rows`; -1 for other members."""
    each = [np.full(group["size"], -1) for group in groups]
    for places, group in zip(each, groups, strict=True):
        places[: len(group["rows"])] = np.searchsorted(rows, group["rows"])
    starts = np.cumsum([0, *map(len, each)])
    return Groups(np.concatenate([np.zeros(0, dtype=np.int64), *each]), starts)


def _count(job: Job, batch: Batch) -> Batch:
    """Count the rows of a block; an unreadable block has one row, with a status."""
    number = int(batch["number"][0])
    try:
        rows = count_rows(job.data, job.blocks[number])
    except DataError:
        rows = 1
    return {"number": np.array([number]), "rows": np.array([rows])}


def _sample_rows(rows: int) -> IntArray:
    """Choose at most `SAMPLE` row numbers as `folds.sample` does, in bounded memory."""
    chosen = np.zeros(0, dtype=np.int64)
    for start in range(0, rows, PART):
        chosen = np.append(chosen, np.arange(start, min(start + PART, rows)))
        chosen = chosen[np.argsort(random_keys(chosen, STREAM))[:SAMPLE]]
    return np.sort(chosen)


def _sampled(job: Job, rows: IntArray, ids: Sequence[str], look: bool, batch: Batch) -> Iterator[Batch]:
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
            if not job.has_views:  # the sample says how they are joined
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


def _shown(job: Job, rows: IntArray, batch: Batch) -> Batch:
    """Read the cells and images of rows of a block, for the report."""
    number = int(batch["number"][0])
    own = job.own(number, rows) - int(job.starts[number])
    table = job.store.table(f"{TABLES}/{_name(number)}").take(own)
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


@dataclass
class _Actor:
    """Call a function in a process with its own GPU and caches."""

    function: Callable[[Batch], Batch]

    def __call__(self, batch: Batch) -> Batch:
        return self.function(batch)


def _score(job: Job, batch: Batch) -> Batch:
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
    job.store.write_table(f"{SCORES}/{_name(number)}", pyarrow.concat_tables(found))
    return {"number": np.array([number])}


def _measured(job: Job, number: int, rows: Rows, begin: int, end: int) -> pyarrow.Table:
    source, auditor, known = rows.source, _auditor(job.work, job.settings.device), _known(job.work)
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
        **dict.fromkeys(_auditor(job.work, "cpu").judge.names, nothing),
        **{f"{name}_{code}": np.zeros_like(row) for name in SIDES for code in range(CODES)},
    }
    return pyarrow.table(columns)


def _found(job: Job, number: int, verdict: Verdict) -> BlockFindings:
    """Judge the rows of a block."""
    table, start = job.store.table(f"{SCORES}/{_name(number)}"), int(job.starts[number])
    auditor, known, items = _auditor(job.work, "cpu"), _known(job.work), _items(job.work)
    status, rows = table["status"].to_pylist(), np.arange(len(table))
    bad = np.asarray(status) != FAULTS[READABLE]
    measures = np.column_stack([table[name].to_numpy() for name in auditor.judge.names]).astype(np.float32)
    measures[bad] = np.nan
    inside = (items["row"].to_numpy() >= start) & (items["row"].to_numpy() < start + len(table))
    items = items.filter(inside)
    place, unlike = items["row"].to_numpy() - start, np.zeros((2, len(table)), dtype=np.int32)
    own = [rows + start, rows + start]
    first = rows.copy()
    first[place[~np.asarray(items["is_first"])]] = -1
    for side, name in enumerate(SIDES):
        own[side][place], unlike[side][place] = items[name].to_numpy(), items[f"unlike_{name}"].to_numpy()
    seen = table["seen"].to_numpy().astype(np.uint16)
    wordless = (seen & known.wordless) > 0
    score = np.array(table["match_score"].to_numpy(), dtype=np.float32)
    many = np.maximum(WORDLESS * wordless, unlike.max(axis=0))
    limited = np.flatnonzero((many > 0) & ~bad)
    if len(limited):
        sums = auditor.judge.combination.sums(measures[limited])
        score[limited] = np.minimum(score[limited], limits(auditor.judge, sums, many[limited]))
    ids, answers = table["id"].to_pylist(), checked_answers(job.settings.checked)
    checked = {row: float(answers[name]) for row, name in enumerate(ids) if name in answers and not bad[row]}
    score[list(checked)] = list(checked.values())
    here = np.flatnonzero((verdict.worst >= start) & (verdict.worst < start + len(table)))
    rights, lefts = (Partners(side.rows[here], side.scores[here]) for side in (verdict.new_rights, verdict.new_lefts))
    seen[verdict.worst[here] - start] |= verdict.seen[here]
    texts = {name: Texts.of(table[name].to_pylist()) for name in ("image", "caption") if name in table.column_names}
    names = RowIds(as_texts(ids), None, {row: status[row] for row in np.flatnonzero(bad).tolist()})
    return BlockFindings(
        source=Source(names=names, image_names=texts.get("image"), captions=texts.get("caption")),
        auditor=auditor,
        scan=Scan(measures, np.where(bad, BAD_IN_TABLE, READABLE).astype(np.uint8)),
        scores=MatchScores(score.astype(np.float64), rows[:0], score[:0], checked=checked),
        match_score=score,
        suggested=verdict.worst[here] - start, new_rights=rights, new_lefts=lefts,
        items=SharedItems(own[0], own[1], first, rows, unlike, (Groups.none(), Groups.none()), 0),
        seen=seen,
        threshold=verdict.below,
        start=start, wordless=wordless, origin=table["source"], verdict=verdict,
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


def _lowest(job: Job, batch: Batch) -> Batch:
    """Return the lowest match scores of a block and, as negative rows, the counts of its bins."""
    number = int(batch["number"][0])
    none, nothing = Partners.none(0), np.zeros(0, dtype=np.int64)
    undecided = Verdict(0.0, 0, np.zeros(0), nothing, np.zeros(0, np.uint16), none, none, nothing, np.zeros(0, np.str_))
    score = _found(job, number, undecided).match_score
    row = job.starts[number] + np.flatnonzero(~np.isnan(score))
    score = score[~np.isnan(score)]
    chosen = np.lexsort((row, score))[:MAX_SUGGESTED]
    bins, counts = np.unique(_bins(score), return_counts=True)
    return {"row": np.append(row[chosen], -1 - bins), "value": np.append(score[chosen].astype(np.float64), counts)}


def _bins(score: npt.NDArray[np.float32]) -> IntArray:
    """Return ascending bins (n,) of scores, from 0 to 2 HALF, as precise near 1 as near 0."""
    bits = (np.minimum(score, 1 - score).view(np.uint32) >> DROPPED).astype(np.int64)
    return np.where(score <= 0.5, bits, 2 * HALF - bits)


def _above(number: int) -> float:
    """Return the lowest score above a bin."""
    bits = np.array([number + 1 if number < HALF else 2 * HALF - number], dtype=np.uint32) << DROPPED
    edge = bits.view(np.float32)[0]
    return float(edge if number < HALF else np.nextafter(1 - edge, np.float32(2)))


def _keyed(job: Job, apart: int, batch: Batch) -> Batch:
    """Return the sketches of the readable items of a block; items with the same key are compared."""
    names = [f"{side}_{code}" for side in SIDES for code in range(CODES)]
    table = job.store.table(f"{SCORES}/{_name(int(batch['number'][0]))}", ["row", "match_score", *names])
    table = table.filter(table["match_score"].is_valid())
    row, parts = table["row"].to_numpy(), []
    for side, name in enumerate(SIDES):
        codes = [table[f"{name}_{code}"].to_numpy() for code in range(CODES)]
        for quarter in range(1 if apart == 1 else QUARTERS):
            value = (codes[0] >> (BITS // QUARTERS * quarter)) & 0xFFFF
            key = (side * (1 if apart == 1 else QUARTERS) + quarter) * apart + value % apart
            parts.append({"key": key, "row": row, **{f"code_{n}": one for n, one in enumerate(codes)}})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _near(keys: int, cosines: Sequence[float], group: Batch) -> Batch:
    """Link each row of a group to the first row with (nearly) the same item."""
    order = group["row"].argsort()
    rows, side = group["row"][order], int(group["key"][0] // keys)
    codes = np.stack([group[f"code_{number}"][order] for number in range(CODES)], axis=1).view(np.uint64)

    def signs(places: IntArray) -> FloatArray:
        bits = np.unpackbits(codes[places].view(np.uint8), axis=1)
        return np.asarray(bits, dtype=np.float32) * 2 - 1

    groups = find_near_duplicates(codes[:, 0].copy(), signs, cosines[side])
    first = np.repeat(groups.rows[groups.starts[:-1]], np.diff(groups.starts))
    return {"side": np.full(len(first), side), "row": rows[groups.rows], "first": rows[first]}


def _cosine_of_codes(cosine: float) -> float:
    """Convert a cosine of vectors to one of the signs of sketches: the angle decides how many differ."""
    return max(0.51, 1 - 2 * float(np.arccos(cosine)) / np.pi)


def _share(job: Job, *links: pyarrow.Table) -> None:
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
    if len(members):
        sides = [SideRows.of([_Scattered(job, members, number)]) for number in range(2)]
        pairs = Source(sides[0], sides[1], "memory", "shared items")
        unreadable = np.zeros(len(members), dtype=np.bool_)
        items = combined((found[0], found[1]), pairs, unreadable, list(_known(job.work).some), job.rows - len(members))
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
        return len(self.rows), _known(self.job.work).some[self.side].units.shape[1]

    def read(self, rows: slice | IntArray) -> FloatArray:
        wanted, found = self.rows[rows], np.empty((len(self.rows[rows]), self.shape[1]), dtype=np.float32)
        numbers = np.searchsorted(self.job.starts, wanted, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            with self.job.open(number) as block:
                side = (block.source.left, block.source.right)[self.side]
                found[here] = side.gather(block.start + wanted[here] - self.job.starts[number])
        return found


def _finish(job: Job, verdict: Verdict, batch: Batch) -> Batch:
    """Write the table of a block, and count its rows."""
    number = int(batch["number"][0])
    found = _found(job, number, verdict)
    job.store.write_table(f"{TABLES}/{_name(number)}", found.table)
    values = None if job.settings.by is None else found.origin.to_pylist()
    tally = found.counted(verdict.scored, found.wordless, values, found.start)
    return {"tally": np.array([pickle.dumps(tally)], dtype=object)}


def _name(number: int) -> str:
    return f"{number:06d}.parquet"


def _joined(batches: Iterator[Batch], by: str = "row") -> Batch:
    """Join batches, sorted by row number; nothing without any."""
    found = list(batches)
    if not found:
        return {}
    together = {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}
    order = together[by].argsort()
    return {name: values[order] for name, values in together.items()}


@lru_cache(maxsize=1)
def _known(work: str) -> Known:
    with np.load(io.BytesIO(Store(work).read(KNOWN)), allow_pickle=False) as found:
        return Known.of(found["left"], found["right"], found["caption"].tolist())


@lru_cache(maxsize=1)
def _items(work: str) -> pyarrow.Table:
    return Store(work).table(ITEMS)


@lru_cache(maxsize=2)
def _auditor(work: str, device: str) -> Auditor:
    with TemporaryDirectory() as folder:
        Store(work).get(LEARNED, Path(folder, LEARNED))
        auditor = Auditor.load(Path(folder, LEARNED), device)
    auditor.workers = 1  # one core a worker
    return auditor


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster (by default RAY_ADDRESS), or start Ray on this machine; yield the module.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
        context = importlib.import_module("ray.data").DataContext.get_current()
    except ImportError:
        raise missing_package("ray", "ray") from None
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {"include_dashboard": False} if where == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=where, logging_level="ERROR", log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise InvalidValueError(f"Ray at {where} cannot be used ({reason})", where="address") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own prints the stack of its C++
    try:
        yield ray
    finally:
        ray.shutdown()
