"""Audit on a Ray cluster, block by block, by Ray Data. Ray is imported only when it is asked for.

    learning    an `Auditor` from some rows of all blocks, chosen by their numbers alone; by the driver
    measuring   each block by itself: match scores, and sketches of the items
    shared      rows with similar sketches meet by a shuffle, and one worker joins what was found
    partners    for the lowest match scores, among each other and in the sample; by the driver
    writing     the table of each block

Workers read blocks and write tables; the driver holds the sample and a list of blocks. Whatever is beside the result
already is not made again.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet
import torch
from rich.console import Console

from mispair.auditing.audit import LEARNED, MAX_SUGGESTED, Settings
from mispair.auditing.auditor import SAMPLE, Auditor
from mispair.auditing.blocks import Block, Rows, count_rows, find_blocks, gather, opened, states
from mispair.auditing.cuts import check_cut, share_of
from mispair.auditing.findings import NEARLY_ALL, SHARED, AuditSummary, MeasureSummary
from mispair.auditing.inputs import AuditInput
from mispair.auditing.match_scores import WORDLESS, limits
from mispair.auditing.output_files import AUDIT, SUGGESTIONS, SUMMARY, TABLE
from mispair.auditing.request import Request, hashed
from mispair.auditing.scoring.folds import PART, random_keys
from mispair.auditing.scoring.folds import SAMPLE as STREAM
from mispair.auditing.scoring.near_duplicates import BITS, DisjointSets, find_near_duplicates, groups_of, sketch
from mispair.auditing.scoring.partners import POOL, find_partners
from mispair.auditing.scoring.reasons import USUALLY, Usual, caption_reason
from mispair.auditing.scoring.reasons import WORDLESS as EMPTY_KINDS
from mispair.auditing.scoring.scan import FAULTS, READABLE, faults
from mispair.auditing.scoring.shared_items import SomeVectors, combined, near_enough
from mispair.errors import ConflictError, DataError, ExistsError, InvalidValueError
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.pairs import MATCH_THRESHOLD, FloatArray, IntArray
from mispair.pairs.remote import Store, url_of
from mispair.pairs.shards import Side
from mispair.pairs.source import Source
from mispair.support.extras import missing_package
from mispair.support.files import short_hash
from mispair.support.owned_folder import WORK
from mispair.support.progress import RowProgress, progress

AT_ONCE = 8192  # rows of a block in memory
CODES = 4  # sketches of an item of 64 bits: the first one finds near-duplicates, all together compare them
TOGETHER = 1 << 20  # rows of a side that one worker compares with each other
QUARTERS = 4  # of the first sketch: rows of which one is equal meet, where not all rows can
COMPARED = 1 << 11  # vectors of the sample by which the mean and the number of directions of a side are found
MOST_TASKS = 1000  # of one stage: each of them sees to one block after the other
DROPPED = 12  # last bits of the odds of match scores, to find the cut of `keep_best`
HALF = int(np.float32(0.5).view(np.uint32)) >> DROPPED
SCORES, ITEMS, SAMPLED, COUNTED = "scores", "items.parquet", "sample.npz", "blocks.json"
SIDES = ("left", "right")
Batch = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Job:
    """What each worker knows.

    Attributes:
        data: The pairs.
        out: Folder or URL of the result.
        blocks: All blocks.
        starts: (B + 1,) the first row of each block in the whole, and the number of all rows.
        settings: Of the audit.
    """

    data: AuditInput
    out: str
    blocks: tuple[Block, ...]
    settings: Settings
    starts: IntArray

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def work(self) -> Store:
        return Store(f"{self.out}/{WORK}")

    def open(self, number: int) -> contextlib.AbstractContextManager[Rows]:
        return opened(self.data, self.blocks[number])

    def gather(self, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        return gather(self.data, self.blocks, self.starts, rows)


@dataclass(frozen=True)
class Sample:
    """Readable pairs that are learned from, in the order of their numbers."""

    row: IntArray  # (n,)
    left: FloatArray  # (n, D)
    right: FloatArray  # (n, E)
    id: npt.NDArray[np.str_]  # (n,)
    caption: npt.NDArray[np.str_]  # (n,)
    joint: npt.NDArray[np.bool_]  # (n,) whether the data says that both sides have a common space

    @cached_property
    def some(self) -> list[SomeVectors]:
        return [SomeVectors.of(side[:COMPARED]) for side in (self.left, self.right)]

    @cached_property
    def usual(self) -> Usual:
        return Usual.of(self.caption.tolist())

    @cached_property
    def wordless(self) -> tuple[str, ...]:
        """The kinds of captions that say nothing about an image; none where many captions are such."""
        found = [caption_reason(text, self.usual) in EMPTY_KINDS for text in self.caption.tolist()]
        return EMPTY_KINDS if np.mean(found) < USUALLY else ()


def audit_on_ray(
    ray: Any,
    data: AuditInput,
    out: Path,
    settings: Settings,
    *,
    overwrite: bool = False,
    console: Console | None = None,
) -> AuditSummary:
    """Audit a data set block by block; the same call again goes on where an earlier one was interrupted.

    Args:
        ray: The module, connected.
        data: The pairs; what is in a store is read by the workers.
        out: Folder that all machines can write to, or a URL in a store.
        settings: How; not all of them are possible here.
        overwrite: Replace the audit of something else.
        console: Where to show progress.

    Raises:
        ConfigError: A setting is not possible here.
        DataError: The data cannot be audited, or `out` holds something else.
    """
    check_cut(settings.flag_below, settings.keep_best)
    unused = {"by": settings.by, "checked": settings.checked, "decisions": settings.decided}
    for name, value in unused.items():
        if value is not None:
            raise ConflictError("audits of the local engine only", where=name, advice="Leave it, or `engine`, out.")
    if data.is_run or max(len(data.left), len(data.right)) > 1:
        what = "the networks of a training run" if data.is_run else "vectors of several encoders"
        raise ConflictError(what, where="engine", expected="vectors of one encoder a side")
    blocks = find_blocks(data)
    store = Store(url_of(out) or str(out.absolute()))
    request = _request(data, settings)
    if not _begin(store, request, overwrite):
        return AuditSummary.model_validate_json(_read(store, SUMMARY))
    job = Job(data, store.url, tuple(blocks), settings, np.zeros(1, dtype=np.int64))
    with progress(console, len(job.blocks)) as show:
        summary = _Run(ray, job).audit(show)
        show.end()
    summary = summary.model_copy(update={"stages": show.stages, "seconds": round(sum(show.stages.values()), 2)})
    _write(store, SUMMARY, f"{summary.model_dump_json(indent=2)}\n".encode())
    for name in job.work.files():
        job.work.delete(name)
    _write(store, AUDIT.mark, json.dumps({"request": request, "finished": True}, indent=2).encode())
    return summary


def _request(data: AuditInput, settings: Settings) -> dict[str, Any]:
    keep = None if settings.keep_best is None else share_of(settings.keep_best)
    request = Request.model_validate({
        "fingerprint": [short_hash(json.dumps(sorted(states(data).items())))], "vectors": data.vectors,
        "joint": settings.joint, "flag_below": settings.flag_below, "keep_best": keep, "checked": hashed({}),
    })  # fmt: skip
    return request.written()


def _begin(store: Store, request: dict[str, Any], overwrite: bool) -> bool:
    """Mark the place as that of this audit; whether there is anything left to do."""
    names = store.files()
    mark = json.loads(_read(store, AUDIT.mark)) if AUDIT.mark in names else None
    if mark is not None and mark.get("request") == request and not overwrite:
        return not mark.get("finished")
    if names and mark is None:
        what = f"the folder is not empty and holds no {AUDIT.mark}"
        raise ExistsError(what, where=store.url, advice="Give another `out`.")
    if mark is not None and not overwrite:
        advice = "Give another `out`, or `overwrite` to replace it."
        raise ExistsError("holds the audit of other data or with other settings", where=store.url, advice=advice)
    ours = (AUDIT.mark, SUMMARY, SUGGESTIONS, LEARNED, f"{TABLE}/", f"{WORK}/")
    for name in names:
        if name.startswith(ours):
            store.delete(name)
    _write(store, AUDIT.mark, json.dumps({"request": request, "finished": False}, indent=2).encode())
    return True


@dataclass
class _Run:
    """One audit, as the driver sees it."""

    ray: Any
    job: Job

    def audit(self, show: RowProgress) -> AuditSummary:
        show.begin("counting rows")
        self.job = replace(self.job, starts=np.cumsum([0, *self._counts()]))
        show.begin("learning")
        sample = self._sample()
        auditor = self._auditor(sample)
        show.begin("measuring all pairs")
        gpu = auditor.judge.transforms[0].mean.device.type == "cuda"
        for batch in self._each(partial(_score, self.job), self._missing(f"{WORK}/{SCORES}"), gpu=gpu):
            show.step(len(batch["number"]))
        worst, below = self._worst()
        show.begin("searching near-duplicates")
        shared = self._shared(sample)
        show.begin("searching better partners")
        partners = self._partners(auditor, sample, worst)
        show.begin("writing tables")
        counts = Counter[str]()
        for batch in self._each(partial(_finish, self.job, below, partners), range(len(self.job.blocks))):
            for name, value in zip(batch["name"].tolist(), batch["value"].tolist(), strict=True):
                counts[name] += value
        return self._summary(auditor, counts, shared, below, partners)

    def _data(self, function: Callable[[Batch], Any], numbers: Sequence[int], *, gpu: bool = False) -> Any:
        """A data set of Ray: what a function gives for each block."""
        data, count = self.ray.data, min(len(numbers), MOST_TASKS)
        items = data.from_items([{"number": number} for number in numbers], override_num_blocks=count)
        if not gpu:
            return items.map_batches(function, batch_size=1, batch_format="numpy")
        most = self.job.settings.workers or int(self.ray.cluster_resources().get("GPU", 1))
        pool = data.ActorPoolStrategy(min_size=1, max_size=min(most, count))
        return items.map_batches(
            _Actor, fn_constructor_args=(function,), compute=pool, num_gpus=1, batch_size=1, batch_format="numpy"
        )

    def _each(self, function: Callable[[Batch], Any], numbers: Sequence[int], *, gpu: bool = False) -> Iterator[Batch]:
        if len(numbers):
            data = self._data(function, numbers, gpu=gpu)
            yield from data.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)

    def _missing(self, folder: str) -> list[int]:
        """The blocks without a file in a folder of the result."""
        there = Store(f"{self.job.out}/{folder}").files()
        return [number for number in range(len(self.job.blocks)) if _name(number) not in there]

    def _counts(self) -> list[int]:
        if COUNTED not in self.job.work.files():
            found = self._each(partial(_count, self.job), range(len(self.job.blocks)))
            counts = {int(batch["number"][0]): int(batch["rows"][0]) for batch in _single(found)}
            _write(self.job.work, COUNTED, json.dumps([counts[number] for number in sorted(counts)]).encode())
        rows: list[int] = json.loads(_read(self.job.work, COUNTED))
        return rows

    def _sample(self) -> Sample:
        if SAMPLED not in self.job.work.files():
            rows = _sample_rows(self.job.rows)
            found = list(self._each(partial(_sampled, self.job, rows), self._blocks_of(rows)))
            if not found:
                raise DataError("no pairs can be read", where=self.job.data.places[0])
            columns = {field.name: np.concatenate([batch[field.name] for batch in found]) for field in fields(Sample)}
            order = columns["row"].argsort()
            file = io.BytesIO()
            plain: dict[str, Any] = {name: _plain(values[order]) for name, values in columns.items()}
            np.savez(file, **plain)
            _write(self.job.work, SAMPLED, file.getvalue())
        return _sample(self.job.out)

    def _auditor(self, sample: Sample) -> Auditor:
        if LEARNED not in Store(self.job.out).files():
            joint = self.job.settings.joint or bool(sample.joint.any())
            auditor = Auditor(joint=joint, device=self.job.settings.device).fit(sample.left, sample.right)
            with TemporaryDirectory() as folder:
                auditor.save(Path(folder, LEARNED))
                Store(self.job.out).put(Path(folder, LEARNED), LEARNED)
        return _auditor(self.job.out, self.job.settings.device)

    def _worst(self) -> tuple[IntArray, float]:
        """The rows with the lowest match scores, and the score below which pairs are flagged."""
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
        return rows[scores < below], below

    def _shared(self, sample: Sample) -> dict[str, float]:
        """What was found about items that pairs share."""
        job = self.job
        if ITEMS not in job.work.files():
            apart = -(-job.rows // TOGETHER)
            cosines = [_cosine_of_codes(near_enough(side.units, job.rows)) for side in sample.some]
            keyed = self._data(partial(_keyed, job, apart), range(len(job.blocks)))
            keys = 2 * (1 if apart == 1 else QUARTERS * apart)
            cores = int(self.ray.cluster_resources().get("CPU", 1))
            links = keyed.groupby("key", num_partitions=max(1, min(keys, cores)))
            found = links.map_groups(partial(_near, keys // 2, cosines), batch_format="numpy")
            self.ray.get(self.ray.remote(_share).remote(job, *found.to_arrow_refs()))
        counts: dict[str, float] = json.loads(_table(job.work, ITEMS).schema.metadata[b"counts"])
        return counts

    def _partners(self, auditor: Auditor, sample: Sample, worst: IntArray) -> pyarrow.Table:
        """Better partners for these rows, as in `Findings.suggestions`, and the number of the row of each."""
        bank = np.flatnonzero(~np.isin(sample.row, worst))[:POOL]
        found = list(self._each(partial(_sampled, self.job, np.sort(worst)), self._blocks_of(worst)))
        found.sort(key=lambda batch: int(batch["row"][0]))  # blocks come in any order
        row, left, right, ids = (
            np.concatenate([*(batch[name] for batch in found), getattr(sample, name)[bank]])
            for name in ("row", "left", "right", "id")
        )
        factors = auditor.factors
        pairs = from_memory(left * np.float32(factors[0]), right * np.float32(factors[1]))
        match, places = auditor.score(left, right), np.arange(len(row) - len(bank))
        names = ("row", "id", "replaced", "rank", "suggested_id", "score")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for keep_left in (True, False):
            device = auditor.judge.transforms[0].mean.device
            partners = find_partners(pairs, auditor.judge, places, match, None, keep_left=keep_left, device=device)
            at, rank = np.nonzero(partners.rows >= 0)
            columns["row"] += row[at].tolist()
            columns["id"] += ids[at].tolist()
            columns["replaced"] += [SIDES[keep_left]] * len(at)
            columns["rank"] += (rank + 1).tolist()
            columns["suggested_id"] += ids[partners.rows[at, rank]].tolist()
            columns["score"] += partners.scores[at, rank].tolist()
        text, kinds = pyarrow.string(), {"row": pyarrow.int64(), "rank": pyarrow.int64(), "score": pyarrow.float32()}
        table = pyarrow.table({name: pyarrow.array(values, kinds.get(name, text)) for name, values in columns.items()})
        _write_table(Store(self.job.out), SUGGESTIONS, table.drop_columns("row"))
        return table

    def _blocks_of(self, rows: IntArray) -> list[int]:
        numbers: list[int] = np.unique(np.searchsorted(self.job.starts, rows, side="right") - 1).tolist()
        return numbers

    def _summary(
        self, auditor: Auditor, counts: Counter[str], shared: dict[str, float], below: float, partners: pyarrow.Table
    ) -> AuditSummary:
        judge, scored = auditor.judge, int(counts["scored"])
        combination = judge.combination
        # Copies count once; of the pairs of a placeholder all but one are mismatched.
        different = max(1.0, scored - shared["copies"])
        others = different - shared["placeholders"]
        rate, low, high = (
            (value * others + shared["mismatched"]) / different
            for value in (combination.rate, combination.low, combination.high)
        )
        best = partners.filter(np.asarray(partners["rank"]) == 1)["replaced"].to_pylist()
        return AuditSummary(
            pairs=self.job.rows,
            scored=scored,
            flagged=int(counts["flagged"]),
            noise_rate=rate,
            noise_rate_low=low,
            noise_rate_high=high,
            nothing_in_common=combination.high == 1 and combination.rate > NEARLY_ALL,
            flag_below=below,
            unreadable={name[1:]: int(count) for name, count in counts.items() if name.startswith("!")},
            reasons={name[1:]: int(count) for name, count in counts.items() if name.startswith("?")},
            near_duplicates_left=int(shared["near_duplicates_left"]),
            near_duplicates_right=int(shared["near_duplicates_right"]),
            suggested_right=best.count("right"),
            suggested_left=best.count("left"),
            measures={
                name: MeasureSummary(weight=float(weight), separation=float(separation))
                for name, weight, separation in zip(judge.names, combination.shares(), judge.separations, strict=True)
            },
            notes=["By `engine=ray`: the score of a pair depends on this pair and its shared items alone."],
            seconds=0,
            stages={},
        )


def _count(job: Job, batch: Batch) -> Batch:
    """The rows of a block; one that says what is wrong where the block cannot be read."""
    number = int(batch["number"][0])
    try:
        rows = count_rows(job.data, job.blocks[number])
    except DataError:
        rows = 1
    return {"number": np.array([number]), "rows": np.array([rows])}


def _single(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The rows of batches, one by one."""
    for batch in batches:
        for place in range(len(next(iter(batch.values())))):
            yield {name: values[place : place + 1] for name, values in batch.items()}


def _sample_rows(rows: int) -> IntArray:
    """Numbers of at most `SAMPLE` of so many rows, as `folds.sample` chooses them, without a number for each row."""
    chosen = np.zeros(0, dtype=np.int64)
    for start in range(0, rows, PART):
        chosen = np.append(chosen, np.arange(start, min(start + PART, rows)))
        chosen = chosen[np.argsort(random_keys(chosen, STREAM))[:SAMPLE]]
    return np.sort(chosen)


def _sampled(job: Job, rows: IntArray, batch: Batch) -> Iterator[Batch]:
    """Those of some rows that a block has and that can be read, with all that is known about them."""
    number = int(batch["number"][0])
    own = rows[np.searchsorted(rows, job.starts[number]) : np.searchsorted(rows, job.starts[number + 1])]
    try:
        with job.open(number) as here:
            source, places = here.source, here.start + own - job.starts[number]
            good = np.array([int(row) not in source.known for row in places], dtype=np.bool_)
            left, right = source.gather(places)
            good &= faults(torch.from_numpy(left), torch.from_numpy(right)) == READABLE
            found: Batch = {
                "row": own, "left": left, "right": right, "id": np.array(_ids(source, places, own), dtype=np.str_),
                "caption": np.array(source.texts(places), dtype=np.str_), "joint": np.full(len(own), source.joint),
            }  # fmt: skip
    except DataError:
        return
    if good.any():
        yield {name: values[good] for name, values in found.items()}


def _ids(source: Source, places: IntArray, rows: IntArray) -> list[str]:
    """The ids of rows, which are their numbers in the whole where the data has no ids."""
    return list(map(str, rows.tolist())) if source.names.ids is None else source.ids(places)


class _Actor:
    """Calls a function in a process that keeps its GPU, and what was loaded there."""

    def __init__(self, function: Callable[[Batch], Batch]) -> None:
        self.function = function

    def __call__(self, batch: Batch) -> Batch:
        return self.function(batch)


def _score(job: Job, batch: Batch) -> Batch:
    """Measures the rows of a block, and writes what was found."""
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
    _write_table(job.work, f"{SCORES}/{_name(number)}", pyarrow.concat_tables(found))
    return {"number": np.array([number])}


def _measured(job: Job, number: int, rows: Rows, begin: int, end: int) -> pyarrow.Table:
    source, auditor, sample = rows.source, _auditor(job.out, job.settings.device), _sample(job.out)
    left, right = (torch.from_numpy(side) for side in source.block(begin, end))
    scores, sums = auditor.measured(left, right)
    known, codes = source.known, faults(left, right).tolist()
    status = [known.get(row, FAULTS[code]) for row, code in zip(range(begin, end), codes, strict=True)]
    bad = np.array([word != FAULTS[READABLE] for word in status])
    row = np.arange(begin, end) - rows.start + job.starts[number]
    captions = source.texts(range(begin, end)) if source.has_texts else []
    columns = {
        "row": row,
        "id": _ids(source, np.arange(begin, end), row),
        **source.item_columns(begin, end),
        "source": [job.blocks[number].name] * len(row),
        "status": status,
        "match_score": pyarrow.array(scores, mask=bad),
        "sum": pyarrow.array(sums, mask=bad),
        "reasons": [caption_reason(text, sample.usual) for text in captions] or [""] * len(row),
    }
    for name, side, some in zip(SIDES, (left, right), sample.some, strict=True):
        finite, mean = side.nan_to_num(0.0, 0.0, 0.0), torch.from_numpy(some.mean.astype(np.float32))
        columns |= {f"{name}_{code}": sketch(finite, mean, code).view(np.int64) for code in range(CODES)}
    return pyarrow.table(columns)


def _unreadable(job: Job, number: int, problem: str) -> pyarrow.Table:
    """Rows that say why their block cannot be read."""
    row = np.arange(*job.starts[number : number + 2])
    words = {"source": job.blocks[number].name, "status": problem, "reasons": ""}
    nothing = pyarrow.nulls(len(row), pyarrow.float32())
    columns = {
        "row": row,
        "id": [f"row#{number}" for number in row.tolist()],
        **{name: [word] * len(row) for name, word in words.items()},
        **dict.fromkeys(("match_score", "sum"), nothing),
        **{f"{name}_{code}": np.zeros_like(row) for name in SIDES for code in range(CODES)},
    }
    return pyarrow.table(columns)


def _lowest(job: Job, batch: Batch) -> Batch:
    """The lowest match scores of a block, and, as rows below 0, how many there are in each bin that is not empty."""
    table = _table(job.work, f"{SCORES}/{_name(int(batch['number'][0]))}", ["row", "match_score"])
    row, score = (table[name].to_numpy() for name in ("row", "match_score"))
    row, score = row[~np.isnan(score)], score[~np.isnan(score)]
    chosen = np.lexsort((row, score))[:MAX_SUGGESTED]
    bins, counts = np.unique(_bins(score), return_counts=True)
    return {"row": np.append(row[chosen], -1 - bins), "value": np.append(score[chosen].astype(np.float64), counts)}


def _bins(score: npt.NDArray[np.float32]) -> IntArray:
    """(n,) numbers from 0 to 2 HALF that ascend with the scores, as precise near 1 as near 0."""
    bits = (np.minimum(score, 1 - score).view(np.uint32) >> DROPPED).astype(np.int64)
    return np.where(score <= 0.5, bits, 2 * HALF - bits)


def _above(number: int) -> float:
    """The lowest score above those of a bin."""
    bits = np.array([number + 1 if number < HALF else 2 * HALF - number], dtype=np.uint32) << DROPPED
    edge = bits.view(np.float32)[0]
    return float(edge if number < HALF else np.nextafter(1 - edge, np.float32(2)))


def _keyed(job: Job, apart: int, batch: Batch) -> Batch:
    """The sketches of the readable items of a block by what decides which of them are compared with each other."""
    names = [f"{side}_{code}" for side in SIDES for code in range(CODES)]
    table = _table(job.work, f"{SCORES}/{_name(int(batch['number'][0]))}", ["row", "match_score", *names])
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
    """Links from the rows of a group to the first row with (nearly) the same item."""
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
    """The cosine of the signs of sketches where that of the vectors is this one: the angle decides how many differ."""
    return max(0.51, 1 - 2 * float(np.arccos(cosine)) / np.pi)


def _share(job: Job, *links: pyarrow.Table) -> None:
    """Joins the links of all groups, and writes which rows share items and which items have unlike partners."""
    none = pyarrow.table({name: pyarrow.array([], "int64") for name in ("side", "row", "first")})
    table = pyarrow.concat_tables([none, *(part.cast(none.schema) for part in links if part.num_rows)])
    side, row, first = (table[name].to_numpy() for name in ("side", "row", "first"))
    members = np.unique(np.concatenate([row, first]))
    found = []
    for number in range(2):
        sets = DisjointSets(np.arange(len(members)))
        sets.join(*(np.searchsorted(members, rows[side == number]) for rows in (row, first)))
        found.append(groups_of(sets, np.arange(len(members))))
    columns = {"row": members, "left": members, "right": members, "unlike": np.zeros(len(members), dtype=np.int32)}
    is_first = np.ones(len(members), dtype=np.bool_)
    if len(members):
        sides = [Side.of([_Scattered(job, members, number)]) for number in range(2)]
        pairs = Source(sides[0], sides[1], "memory", "shared items")
        unreadable = np.zeros(len(members), dtype=np.bool_)
        items = combined((found[0], found[1]), pairs, unreadable, _sample(job.out).some, job.rows - len(members))
        is_first = items.is_first
        columns |= {"left": members[items.left], "right": members[items.right], "unlike": items.partners}
    unlike = columns["unlike"][is_first]
    counts = {
        "copies": int((~is_first).sum()),
        "placeholders": int((unlike > 0).sum()),
        "mismatched": float((1 - 1 / unlike[unlike > 0]).sum()),
        **{f"near_duplicates_{name}": len(groups.rows) for name, groups in zip(SIDES, found, strict=True)},
    }
    _write_table(job.work, ITEMS, pyarrow.table(columns).replace_schema_metadata({"counts": json.dumps(counts)}))


@dataclass(frozen=True)
class _Scattered:
    """Vectors of one side of rows that lie in any blocks, read when they are needed."""

    job: Job
    rows: IntArray
    side: int

    @property
    def shape(self) -> tuple[int, int]:
        sample = _sample(self.job.out)
        return len(self.rows), (sample.left, sample.right)[self.side].shape[1]

    def read(self, rows: slice | IntArray) -> FloatArray:
        return self.job.gather(self.rows[rows])[self.side]


def _finish(job: Job, below: float, partners: pyarrow.Table, batch: Batch) -> Batch:
    """Writes the table of a block, and counts what is in it."""
    number = int(batch["number"][0])
    table, start = _table(job.work, f"{SCORES}/{_name(number)}"), int(job.starts[number])
    auditor, sample = _auditor(job.out, "cpu"), _sample(job.out)
    items = _table(job.work, ITEMS)
    inside = compute.and_(compute.greater_equal(items["row"], start), compute.less(items["row"], start + len(table)))
    items = items.filter(inside)
    score, sums = (np.array(table[name].to_numpy()) for name in ("match_score", "sum"))
    own = {side: table["row"].to_numpy().copy() for side in SIDES}
    many = WORDLESS * np.isin(table["reasons"].to_numpy(zero_copy_only=False), sample.wordless)
    shared, place = np.zeros(len(table), dtype=np.int64), items["row"].to_numpy() - start
    shared[place] = items["unlike"].to_numpy()
    for side in SIDES:
        own[side][place] = items[side].to_numpy()
    limited = np.flatnonzero((np.maximum(many, shared) > 0) & ~np.isnan(score))
    if len(limited):
        most = limits(auditor.judge, sums[limited].astype(np.float64), np.maximum(many, shared)[limited])
        score[limited] = np.minimum(score[limited], most)
    bad, flagged = np.isnan(score), score < below
    says = [f"an {SHARED}" if count else "" for count in shared]
    reasons = ["; ".join(filter(None, pair)) for pair in zip(says, table["reasons"].to_pylist(), strict=True)]
    kept = ("id", "image", "caption", "source", "status")
    columns = {name: table[name] for name in kept if name in table.column_names}
    columns |= {
        "match_score": pyarrow.array(score, mask=bad), "is_mismatch": pyarrow.array(flagged, mask=bad),
        "reasons": reasons, "left_item": own["left"], "right_item": own["right"],
    }  # fmt: skip
    best = partners.filter(compute.equal(partners["rank"], 1))
    for side in reversed(SIDES):
        given = best.filter(compute.equal(best["replaced"], side))
        at = given["row"].to_numpy() - start
        here = np.flatnonzero((at >= 0) & (at < len(table)))
        ids, chance = np.full(len(table), None), np.full(len(table), np.nan, dtype=np.float32)
        ids[at[here]] = np.array(given["suggested_id"].to_pylist(), dtype=object)[here]
        chance[at[here]] = given["score"].to_numpy()[here]
        columns[f"suggested_{side}"] = pyarrow.array(ids, pyarrow.string())
        columns[f"suggested_{side}_score"] = pyarrow.array(chance, mask=np.isnan(chance))
    _write_table(Store(job.out), f"{TABLE}/{_name(number)}", pyarrow.table(columns))
    counts = Counter(f"!{word}" for word in table["status"].to_pylist() if word != FAULTS[READABLE])
    counts.update(f"?{word}" for words in reasons if words for word in words.split("; "))
    counts.update({"scored": int((~bad).sum()), "flagged": int(flagged.sum())})
    return {"name": np.array(list(counts), dtype=object), "value": np.array(list(counts.values()))}


def _name(number: int) -> str:
    return f"{number:06d}.parquet"


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(np.str_) if values.dtype == object else values


@lru_cache(maxsize=1)
def _sample(out: str) -> Sample:
    with np.load(io.BytesIO(_read(Store(f"{out}/{WORK}"), SAMPLED)), allow_pickle=False) as found:
        return Sample(**{field.name: found[field.name] for field in fields(Sample)})


@lru_cache(maxsize=1)
def _auditor(out: str, device: str) -> Auditor:
    with TemporaryDirectory() as folder:
        Store(out).get(LEARNED, Path(folder, LEARNED))
        auditor = Auditor.load(Path(folder, LEARNED), device)
    auditor.workers = 1  # one core a worker
    return auditor


def _read(store: Store, name: str) -> bytes:
    with TemporaryDirectory() as folder:
        store.get(name, Path(folder, "found"))
        return Path(folder, "found").read_bytes()


def _write(store: Store, name: str, content: bytes) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "made").write_bytes(content)
        store.put(Path(folder, "made"), name)


def _table(store: Store, name: str, columns: list[str] | None = None) -> pyarrow.Table:
    with TemporaryDirectory() as folder:
        store.get(name, Path(folder, "table"))
        return pyarrow.parquet.read_table(Path(folder, "table"), columns=columns, memory_map=False)


def _write_table(store: Store, name: str, table: pyarrow.Table) -> None:
    with TemporaryDirectory() as folder:
        pyarrow.parquet.write_table(table, Path(folder, "made"))
        store.put(Path(folder, "made"), name)


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster, or start Ray on this machine, until the block ends; gives the module.

    Args:
        address: Of the cluster; by default RAY_ADDRESS, else only this machine is used.

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
