"""Audit on a Ray cluster, block by block.

    encoding    images and captions of each block, if it has no vectors
    alone       the driver audits all rows as the local engine does, where it would learn from all of them; else:
    learning    `Auditor.fit` on rows of all blocks, chosen by their numbers; by the driver
    measuring   each block by itself: match scores, and sketches of the items
    shared      rows with similar sketches are compared, and one worker joins the links
    partners    for the lowest match scores, among each other and in the sample; by the driver
    writing     the table of each block, and its counts

Workers read blocks and write tables (`ray_workers`). The driver holds the sample, a list of blocks and counts. Blocks
that were encoded or measured, the auditor and the shared items are in the working folder, and are not made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add, or_
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow
from rich.console import Console

from mispair.auditing import ray_workers
from mispair.auditing.audit import COMMON_SPACE, MAX_SUGGESTED, Results, Settings, audit_source, notes_on
from mispair.auditing.auditor import SAMPLE, Auditor, checked_answers
from mispair.auditing.blocks import UNREADABLE, Block, count_rows, cut
from mispair.auditing.findings import suggestion_table, typical
from mispair.auditing.inputs import AuditInput
from mispair.auditing.match_scores import MatchScores
from mispair.auditing.output_files import LEARNED
from mispair.auditing.ray_cluster import each, result, task
from mispair.auditing.ray_encoding import Encoding, encode_blocks
from mispair.auditing.ray_workers import (
    ITEMS,
    QUARTERS,
    SCORES,
    STEPS,
    TABLES,
    Columns,
    Job,
    Known,
    Verdict,
    file_name,
    joined,
)
from mispair.auditing.report.page import WORST, Reported, Row, rows_to_show
from mispair.auditing.scoring.folds import PART, random_keys, sample
from mispair.auditing.scoring.folds import SAMPLE as STREAM
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.partners import POOL, find_partners
from mispair.auditing.scoring.scan import Scan
from mispair.auditing.scoring.shared_items import SharedItems, near_enough
from mispair.auditing.scoring.views import with_joins
from mispair.auditing.summary import SIDES, AuditSummary, Tally, detections, share_of
from mispair.compute.threads import parallel_map
from mispair.encoders.encode import read_hashes, request_of, shard_files
from mispair.errors import NotFoundError
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.origin import MARK
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.remote import Store, url_of
from mispair.pairs.shards import views_of
from mispair.pairs.source import Source
from mispair.support.arrays import FloatArray, IntArray
from mispair.support.progress import RowProgress

ALONE = SAMPLE  # rows up to which the driver audits all of them itself, as the local engine does
TOGETHER = 1 << 20  # rows of a side that one worker compares with each other
COMPARED = 1 << 11  # vectors of the sample that give the mean and the number of directions of a side
COUNTERS = 16  # threads that read how many rows the blocks have
ENCODED = "encoded"


@dataclass(frozen=True)
class Found:
    """The results of an audit, with its tables in files."""

    reported: Reported
    summary: AuditSummary
    suggestions: pyarrow.Table
    parts: Callable[[], Iterator[tuple[str, Iterator[pyarrow.Table]]]]


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
    with RowProgress(console, len(blocks)) as show:
        show.begin("counting rows")
        counts = parallel_map(partial(_count, job), job.blocks, COUNTERS)
        run = _Run(ray, replace(job, starts=np.cumsum([0, *counts])), folder, command)
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
    encode_blocks(ray, Encoding(data, job.blocks, place, encoders, views=True), job.settings.workers, console)
    own = tuple(Block(block.name, tuple(shard_files(n)), views=widths) for n, block in enumerate(job.blocks))
    vectors = AuditInput(Path(place), cache=data.cache)
    return replace(job, data=vectors, blocks=own, raw=data, raw_blocks=job.blocks)


def _count(job: Job, block: Block) -> int:
    """Count the rows of a block; an unreadable block has one row, with a status."""
    try:
        return count_rows(job.data, block)
    except UNREADABLE:
        return 1


def _whole(job: Job) -> Source | None:
    """Open all rows as the local engine does; None if these are not the rows of the blocks, as one cannot be read."""
    try:
        pairs = (job.raw or job.data).fetched().open("cpu")
        if job.raw is None:
            return pairs if len(pairs) == job.rows else None
        encoded = job.data.fetched().open("cpu")
    except UNREADABLE:
        return None
    if len(pairs) != job.rows or encoded.texts() != pairs.texts():
        return None
    store = Store(f"{job.work}/{ENCODED}")
    hashes = np.concatenate([read_hashes(store, block.files[-1]) for block in job.blocks])
    left, right = job.blocks[0].views
    return pairs.with_vectors(cut(encoded.left, left), cut(encoded.right, right), encoded.known, hashes=hashes)


@dataclass
class _Run:
    """One audit, as the driver sees it."""

    ray: Any
    job: Job
    folder: Path
    command: str

    def audit(self, show: RowProgress) -> Found:
        show.begin("learning")
        widths, columns = result(self.ray, task(self.ray, ray_workers.describe).remote(self.job))
        self.job = replace(self.job, columns=columns)
        drawn = self._sample()
        source, auditor = self._learned(drawn, widths)
        show.begin("measuring all pairs")
        gpu = auditor.judge.transforms[0].mean.device.type == "cuda"
        done = Store(f"{self.job.work}/{SCORES}").files()
        for _ in self._each(
            ray_workers.score, [number for number in self._all if file_name(number) not in done], gpu=gpu
        ):
            show.step(1)
        show.begin("searching near-duplicates")
        shared = self._shared()
        worst, match, below, scored = self._worst()
        show.begin("searching better partners")
        verdict = self._verdict(source, auditor, drawn, worst, match, below, scored)
        show.begin("writing tables")
        tally: Tally = reduce(add, self._each(ray_workers.finish, self._all, verdict))
        show.end()
        stages = {name: round(seconds, 2) for name, seconds in show.stages.items()}
        return self._result(auditor, bool(drawn["joint"].any()), tally, shared, verdict, stages)

    @property
    def _all(self) -> range:
        return range(len(self.job.blocks))

    def _each(self, function: Callable[..., Any], numbers: Sequence[int], *given: Any, gpu: bool = False) -> Any:
        """Call a function of `ray_workers` for some blocks; yield the results in their order."""
        return each(self.ray, function, numbers, self.job, *given, workers=self.job.settings.workers, gpu=gpu)

    def _rows(self, rows: IntArray, ids: Sequence[str] = (), *, look: bool = False) -> Columns:
        """Read ascending rows, and those with some ids."""
        return joined(list(self._each(ray_workers.draw, self._all if ids else self._blocks_of(rows), rows, ids, look)))

    def _blocks_of(self, rows: IntArray) -> list[int]:
        numbers: list[int] = np.unique(np.searchsorted(self.job.starts, rows, side="right") - 1).tolist()
        return numbers

    def _sample(self) -> Columns:
        """Draw pairs to learn from; add the checked pairs."""
        checked = sorted(checked_answers(self.job.settings.checked))
        found = self._rows(_sample_rows(self.job.rows), checked)
        if lost := sorted(set(checked) - set(found["id"].tolist() if found else ())):
            raise NotFoundError(f"no pair has the id {lost[0]!r}", where="checked", expected="ids of the data")
        if not found or not found["good"].any():
            raise self.job.nothing()
        return {name: values[found["good"]] for name, values in found.items()}

    def _learned(self, drawn: Columns, widths: Sequence[Sequence[int]]) -> tuple[Source, Auditor]:
        """Fit the auditor and hand it to the workers; return it with the sample, one vector an item."""
        settings, store, path = self.job.settings, self.job.store, self.folder / LEARNED
        sides = zip((drawn["left"], drawn["right"]), widths, strict=True)
        left, right = (np.split(side, np.cumsum(each)[:-1], axis=1) for side, each in sides)
        path.parent.mkdir(parents=True, exist_ok=True)
        if LEARNED in store.files():
            store.get(LEARNED, path)
        else:
            answers = checked_answers(settings.checked)
            checked = {str(row): answers[name] for row, name in enumerate(drawn["id"].tolist()) if name in answers}
            joint = settings.joint or bool(drawn["joint"].any())
            auditor = Auditor(joint=joint, device=settings.device, workers=settings.workers)
            auditor.fit(left, right, checked=checked).save(path)
            store.put(path, LEARNED)
        auditor = Auditor.load(path, settings.device)
        source = from_memory(left, right)
        if auditor.joins is not None:
            source = with_joins(source, auditor.joins)
        some = sample(np.arange(len(source)), COMPARED)
        self.job = replace(self.job, known=Known.of(*source.gather(some), drawn["caption"][: 4 * COMPARED].tolist()))
        return source, auditor

    def _shared(self) -> dict[str, Any]:
        """Find shared items of all blocks."""
        job, ray = self.job, self.ray
        if ITEMS not in job.store.files():
            assert job.known is not None
            cosines = [near_enough(side.units, job.rows) for side in job.known.some]
            apart = -(-job.rows // TOGETHER)
            if apart == 1:
                links = [task(ray, ray_workers.near_in).remote(job, cosines, side) for side in range(2)]
            else:
                numbers = ray.data.from_items([{"number": number} for number in self._all])
                keys, cores = QUARTERS * apart, int(ray.cluster_resources().get("CPU", 1))
                items = numbers.map_batches(partial(_keyed, job, apart), batch_size=1, batch_format="numpy")
                groups = items.groupby("key", num_partitions=max(1, min(2 * keys, cores)))
                links = groups.map_groups(
                    partial(ray_workers.near, keys, cosines), batch_format="numpy"
                ).to_arrow_refs()
            result(ray, task(ray, ray_workers.share).remote(job, *links))
        shared: dict[str, Any] = json.loads(job.items().schema.metadata[b"about"])
        return shared

    def _worst(self) -> tuple[IntArray, FloatArray, float, int]:
        """Return the lowest flagged rows, their match scores, the cut, and the number of readable rows."""
        settings, counts = self.job.settings, np.zeros(len(STEPS) + 1, dtype=np.int64)
        rows, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        for own, values, steps, own_counts in self._each(ray_workers.lowest, self._all):
            counts[steps] += own_counts
            rows, scores = np.append(rows, own), np.append(scores, values)
            chosen = np.lexsort((rows, scores))[:MAX_SUGGESTED]
            rows, scores = rows[chosen], scores[chosen]
        below = MATCH_THRESHOLD if settings.flag_below is None else settings.flag_below
        if settings.keep_best is not None:
            flagged = (1 - share_of(settings.keep_best)) * counts.sum()
            ends = np.append(STEPS, np.nextafter(np.float32(1), np.float32(2)))
            below = float(ends[np.searchsorted(counts.cumsum(), flagged)])
        return rows[scores < below], scores[scores < below], below, int(counts.sum())

    def _verdict(
        self,
        source: Source,
        auditor: Auditor,
        drawn: Columns,
        worst: IntArray,
        match: FloatArray,
        below: float,
        scored: int,
    ) -> Verdict:
        """Search better partners for the lowest flagged rows, and look at their images."""
        known, judge = self.job.known, auditor.judge
        assert known is not None
        sides = ([view.block(0, len(source)) for view in views_of(side)] for side in (source.left, source.right))
        own, measures = auditor.measured(*sides)
        bank = np.flatnonzero(~np.isin(drawn["row"], worst))[:POOL]
        order = np.argsort(worst)
        found = self._rows(worst[order], look=True)
        found = {name: values[np.argsort(order)] for name, values in found.items()}  # the lowest match score first
        left, right = source.gather(bank)
        others = {name: values[bank] for name, values in drawn.items()} | {"left": left, "right": right}
        pool = joined([found, others])
        empty = (known.seen(pool["caption"].tolist()) & known.wordless) > 0
        match = np.append(match, own[bank]).astype(np.float32)
        left, right = (pool[side] * np.float32(factor) for side, factor in zip(SIDES, auditor.factors, strict=True))
        together, items, device = (
            from_memory(left, right),
            SharedItems.apart(len(match)),
            judge.transforms[0].mean.device,
        )
        lent = [np.flatnonzero(np.isin(pool["id"], list(side))) for side in self.job.settings.partnered]
        rights, lefts = (
            find_partners(
                together, judge, np.arange(len(worst)), match, items, keep_left=keep_left, device=device,
                partnered=partnered, excluded=empty & keep_left,
            )
            for keep_left, partnered in ((True, lent[1]), (False, lent[0]))
        )  # fmt: skip
        new_rights, new_lefts = (
            replace(one, rows=np.where(one.rows < 0, -1, pool["row"][one.rows])) for one in (rights, lefts)
        )
        usual = typical(judge, Scan(measures, np.zeros(len(own), dtype=np.uint8)), own >= below)
        names = dict(zip(pool["row"].tolist(), pool["id"].tolist(), strict=True))
        return Verdict(below, scored, usual, worst, pool["seen"][: len(worst)], new_rights, new_lefts, names)

    def _reported(
        self, summary: AuditSummary, tally: Tally, judge: Judge, shared: dict[str, Any], verdict: Verdict
    ) -> Reported:
        """Collect the content of the report; workers read its rows."""
        job, answers = self.job, checked_answers(self.job.settings.checked)
        is_checked = [name in answers for name in verdict.ids(verdict.worst[: 2 * WORST])]
        places = np.argsort(is_checked, kind="stable")[:WORST]  # checked ones come last
        place = (job.raw or job.data).places[0]
        found = Reported(
            name=str(url_of(place) or place),
            command=self.command,
            summary=summary,
            tally=tally,
            judge=judge,
            worst=verdict.worst[places],
            scores=np.zeros(0, dtype=np.float32),
            reasons=[],
            new_rights=verdict.new_rights.take(places),
            new_lefts=verdict.new_lefts.take(places),
            near_duplicates=[(side, np.array(rows), size) for side, rows, size in shared["groups"]],
            near_duplicate_pairs=shared["pairs"],
            rows={},
            images=(place,),
        )
        rows, pictured = rows_to_show(found)
        parts = self._each(ray_workers.report_rows, self._blocks_of(rows), rows, pictured)
        cells: dict[int, tuple[Row, float, str]] = reduce(or_, parts, {})
        _, scores, reasons = (
            zip(*(cells[row] for row in found.worst.tolist()), strict=True) if len(places) else ((),) * 3
        )
        return replace(
            found, scores=np.array(scores), reasons=list(reasons), rows={row: cell[0] for row, cell in cells.items()}
        )

    def _tables(self) -> Iterator[tuple[str, Iterator[pyarrow.Table]]]:
        """Read the table of each block."""
        for number, block in enumerate(self.job.raw_blocks or self.job.blocks):
            is_shard = any(name.endswith((".npz", ".tar")) for name in block.files)
            yield (
                PurePosixPath(block.name).name if is_shard else "",
                iter([self.job.store.table(f"{TABLES}/{file_name(number)}")]),
            )

    def _result(
        self,
        auditor: Auditor,
        joint: bool,
        tally: Tally,
        shared: dict[str, Any],
        verdict: Verdict,
        stages: dict[str, float],
    ) -> Found:
        """Collect the summary and the content of the report."""
        settings, judge = self.job.settings, auditor.judge
        space = [COMMON_SPACE] if judge.joint and not (settings.joint or joint) else []
        by_engine = "With `engine=ray` the score of a pair depends only on this pair and its shared items."
        scores = MatchScores(judge.combination.log_odds(judge.observed), np.arange(0), np.zeros(0, dtype=np.float32))
        summary = AuditSummary(
            **tally.metrics(judge, verdict.below),
            detections=detections(judge, scores, verdict.below, list),
            decided=settings.decided,
            checked=auditor.checked,
            by=settings.by,
            **shared["counts"],
            suggested_right=int((verdict.new_rights.rows[:, 0] >= 0).sum()),
            suggested_left=int((verdict.new_lefts.rows[:, 0] >= 0).sum()),
            notes=[*space, *notes_on(judge, tally.scored, tally.flagged), *shared["notes"], by_engine],
            seconds=round(sum(stages.values()), 2),
            stages=stages,
        )
        suggestions = suggestion_table(verdict.ids, verdict.worst, verdict.new_rights, verdict.new_lefts)
        return Found(self._reported(summary, tally, judge, shared, verdict), summary, suggestions, self._tables)


def _keyed(job: Job, apart: int, batch: Columns) -> Columns:
    """Call `keyed` in a data set of Ray."""
    return ray_workers.keyed(job, apart, int(batch["number"][0]))


def _sample_rows(rows: int) -> IntArray:
    """Choose at most `SAMPLE` row numbers as `folds.sample` does, in bounded memory."""
    chosen = np.zeros(0, dtype=np.int64)
    for start in range(0, rows, PART):
        chosen = np.append(chosen, np.arange(start, min(start + PART, rows)))
        chosen = chosen[np.argsort(random_keys(chosen, STREAM))[:SAMPLE]]
    return np.sort(chosen)
