"""Results of an audit: one row a pair, a summary, suggestions and near-duplicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.auditing.auditor import Auditor
from mispair.auditing.match_scores import MatchScores, Scores
from mispair.auditing.report.page import GROUPS, MEMBERS, WORST, Reported, read_rows, rows_to_show
from mispair.auditing.scoring.calibration import PIECE, standardised
from mispair.auditing.scoring.folds import sample
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.near_duplicates import Groups
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.scoring.reasons import KINDS, Bits, in_words, wordless
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.auditing.summary import (
    BINS,
    SHARD,
    SHARED,
    SHOWN,
    SIDES,
    AuditSummary,
    NoiseEstimate,
    Tally,
    below_cuts,
    count_parts,
    cut_values,
    detections,
    rates_of,
    score_range,
    values_by,
)
from mispair.pairs.audited import AuditColumns, Suggestions
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray

if TYPE_CHECKING:
    import pyarrow


REASONS = {
    "contrast": "other items fit either side better",
    "evidence": "the two have too little in common",
    "joint": "their encoders see no likeness",
    "joint_contrast": "other items have a higher cosine with either side",
    "cosine": "their encoders see no likeness",
    "expected": "similar pairs have different partners",
    "networks": "the run's networks prefer other partners for either side",
}
SIBLINGS = "it contradicts the other partners of its left item"
EXCHANGED = "exchanging its partner with that of a similar pair fits better"
FOUND_WRONG = "a person found it wrong"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of an audit. Rows are in the order of the input; none is left out.

    Attributes:
        source: The pairs.
        auditor: Fitted model of the audit.
        scan: What was measured.
        scores: Inputs of the match scores.
        match_score: (N,) probability that each pair matches: 0 or 1 where a person has checked, NaN where it cannot be
            read.
        suggested: Flagged rows for which better partners were searched, the lowest match score first.
        new_rights: Better right items for them.
        new_lefts: Better left items.
        items: Which rows share items.
        notes: Notes for the reader.
        command: Command or call for a repetition.
        stages: Seconds of each part of the work.
        seen: (N,) problems visible in a caption or image alone, as bits of `scoring.reasons.KINDS`.
        threshold: Match score below which pairs are flagged.
        by: Column with a noise rate for each value in the summary, or "shard".
        decided: The noise rate by decisions of people.
    """

    source: Source
    auditor: Auditor
    scan: Scan
    scores: MatchScores
    match_score: Scores
    suggested: IntArray
    new_rights: Partners
    new_lefts: Partners
    items: SharedItems
    notes: tuple[str, ...] = ()
    command: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    seen: Bits
    threshold: float = MATCH_THRESHOLD
    by: str | None = None
    decided: NoiseEstimate | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        found, (rate, low, high) = self.summary, self.summary.rates
        return f"<Audit: {found.flagged:,} of {found.scored:,} pairs flagged, noise rate {rate} ({low} to {high})>"

    @property
    def judge(self) -> Judge:
        """The learned model."""
        return self.auditor.judge

    @property
    def checked(self) -> Mapping[int, float]:
        """Checked rows: 1 matched, 0 mismatched. These overrule the measures."""
        return self.scores.checked

    @property
    def near_duplicates(self) -> tuple[Groups, Groups]:
        """Groups of rows with (nearly) the same left items, and with the same right items."""
        return self.items.near_duplicates

    @property
    def seconds(self) -> float:
        """Seconds of the audit."""
        return sum(self.stages.values())

    @cached_property
    def score(self) -> npt.NDArray[np.float64]:
        """(N,) log odds of a match, by the pair alone and compared with other pairs; NaN for unreadable rows."""
        return self.scores.final

    @property
    def is_mismatch(self) -> npt.NDArray[np.bool_]:
        """(N,) whether each pair is flagged; false for unreadable rows."""
        return np.asarray(self.match_score < self.threshold)

    @property
    def columns(self) -> AuditColumns:
        """Results for each pair, as columns to attach to the pairs."""
        rights, lefts = (
            Suggestions(self.suggested, side.rows, side.scores) for side in (self.new_rights, self.new_lefts)
        )
        return AuditColumns(self.match_score, self.is_mismatch, self.items.left, self.items.right, lefts, rights)

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """(N,) whether each pair is readable and not flagged."""
        return np.asarray(~self.is_mismatch & (self.scan.status == READABLE))

    @property
    def bad_rows(self) -> IntArray:
        """Unreadable rows."""
        return np.flatnonzero(self.scan.status != READABLE)

    def status(self, rows: IntArray) -> list[str]:
        """ "ok", or the fault of each of these rows."""
        known, codes = self.source.known, self.scan.status[rows].tolist()
        return [
            known[int(row)] if code == BAD_IN_TABLE else FAULTS[code] for row, code in zip(rows, codes, strict=True)
        ]

    def all_reasons(self, start: int, stop: int) -> list[str]:
        """Faults seen in consecutive pairs, flagged or not: shared items, captions, images; mostly empty."""
        here = slice(start, stop)
        shown = np.column_stack([self.seen[here], *self.items.unlike[:, here]])
        kinds, places = np.unique(shown, axis=0, return_inverse=True)
        words = []
        for bits, *counts in kinds.tolist():
            shared = [_shared(side, count) for side, count in zip(SIDES, counts, strict=True) if count]
            words.append("; ".join([*shared, *in_words(bits)]))
        return [words[place] for place in places.reshape(-1)]

    @cached_property
    def tally(self) -> Tally:
        """Counts of all rows."""
        scored = len(self) - len(self.bad_rows)
        values = None if self.by is None else values_by(self.source, self.by)
        return self.counted(scored, wordless(self.seen), values)

    def counted(
        self,
        scored: int,
        wordless: npt.NDArray[np.bool_],
        values: Sequence[str] | None,
        first: int = 0,
    ) -> Tally:
        """Count the rows, perhaps from the row `first` on of a whole with `scored` readable rows."""
        judge, match, readable = self.judge, self.match_score, self.scan.status == READABLE
        bad = self.bad_rows
        status = self.status(bad)
        known, sums = match[~np.isnan(match)], np.full(len(match), np.nan)
        sums[readable] = judge.combination.sums(self.scan.measures[readable])
        lowest, highest = score_range(judge)
        bins = np.minimum((known * BINS).astype(int), BINS - 1)
        unlike = zip(SIDES, self.items.unlike, strict=True)
        shown = {f"{side} {SHARED}": (counts[readable] > 0).sum() for side, counts in unlike}
        shown |= {kind: (self.seen >> bit & 1).sum() for bit, kind in enumerate(KINDS)}
        return Tally(
            pairs=len(match),
            scored=int(readable.sum()),
            flagged=int(self.is_mismatch.sum()),
            different=self._different(readable, wordless),
            below=below_cuts(known, rates_of(judge), scored, cut_values(self.threshold)),
            by_match=np.bincount(bins, minlength=BINS),
            expected_matched=np.asarray(np.bincount(bins, weights=known, minlength=BINS), dtype=np.float64),
            by_sum=np.histogram(sums[readable].clip(lowest, highest), BINS, (lowest, highest))[0],
            unreadable=Counter(status),
            reasons=Counter({kind: int(count) for kind, count in shown.items() if count}),
            bad=list(zip((first + bad[:SHOWN]).tolist(), self.source.ids(bad[:SHOWN]), status[:SHOWN], strict=True)),
            parts={} if values is None else count_parts(values, sums, judge.null, self.is_mismatch),
        )

    def _different(self, readable: npt.NDArray[np.bool_], empty: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """`Tally.different`.

        Copies of a pair count once. All but one pair of a placeholder count as mismatched. Pairs
        with a caption that says nothing about an image count by their match scores.
        """
        rows = self.items.is_first & readable
        partners, match = self.items.partners[rows], self.match_score[rows]
        shared = partners > 0
        empty = empty[rows] & ~shared
        mismatched = float((1 - 1 / partners[shared]).sum() + (1 - match[empty]).sum(dtype=np.float64))
        return np.array([len(partners), int((shared | empty).sum()), mismatched])

    @cached_property
    def near_duplicate_pairs(self) -> int:
        """Number of pairs with a (nearly) equal item."""
        return len(np.union1d(self.near_duplicates[0].rows, self.near_duplicates[1].rows))

    def reasons(self, rows: IntArray) -> list[str]:
        """Main evidence against each of these rows, in words; empty for unflagged rows."""
        combination, scores, match = self.judge.combination, self.scores, self.match_score[rows]
        here = standardised(self.scan.measures[rows], combination.centre, combination.spread)
        against = (self._typical - here) * np.maximum(combination.weights + combination.natural, 0)
        against = np.where(np.isfinite(against), against, 0)
        by_measure = np.array([REASONS[name] for name in self.judge.names], dtype=object)[against.argmax(axis=1)]
        # The first reason that applies is the main one.
        told: list[tuple[npt.NDArray[np.bool_], Any]] = [
            (~(match < self.threshold), ""),
            (np.isin(rows, list(self.checked)), FOUND_WRONG),
        ]
        for side, counts in reversed(list(zip(SIDES, self.items.unlike[:, rows], strict=True))):
            sizes, number = np.unique(counts, return_inverse=True)
            named = np.array([f"its {_shared(side, count)}" for count in sizes], dtype=object)
            told.append(((counts > 0) & (counts == self.items.partners[rows]), named[number]))
        told += [(self.seen[rows] >> bit & 1 == 1, f"its {kind}") for bit, kind in enumerate(KINDS)]
        if scores.proved is not None:
            told.append((scores.proved[rows] > match, EXCHANGED))
        if scores.siblings is not None:
            told.append((-scores.siblings.penalty[rows] > against.max(axis=1), SIBLINGS))
        applies, words = zip(*told, strict=True)
        reasons: list[str] = np.select(list(applies), list(words), by_measure).tolist()
        return reasons

    @cached_property
    def _typical(self) -> npt.NDArray[np.float64]:
        return typical(self.judge, self.scan, self.match_score >= self.threshold)

    @cached_property
    def table(self) -> pyarrow.Table:
        """One row a pair: id, status, match_score, is_mismatch, reason, suggestions, and all measures."""
        import pyarrow

        return pyarrow.concat_tables(self.pieces())

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[pyarrow.Table]:
        """The table, some rows at a time: as a whole it takes more memory than all the rest."""
        end = len(self) if stop is None else stop
        return (self._piece(first, min(first + PIECE, end)) for first in range(start, end, PIECE))

    def parts(self) -> Iterator[tuple[str, Iterator[pyarrow.Table]]]:
        """The table file by file of the input: the name of each file, and its rows; without a name if there is one."""
        start = 0
        for name, size in self.source.shards or (("", len(self)),):
            yield name, self.pieces(start, start + size)
            start += size

    def _piece(self, start: int, stop: int) -> pyarrow.Table:
        import pyarrow

        here, rows = slice(start, stop), np.arange(start, stop)
        bad, match = self.scan.status[here] != READABLE, self.match_score[here]
        columns: dict[str, Any] = {
            "id": self.source.id_column(start, stop),
            **self.source.item_columns(start, stop),
            **({} if self._origins is None else {"source": self._origins[start:stop].dictionary_decode()}),
            "status": pyarrow.array(self.status(rows), pyarrow.string()),
            "match_score": pyarrow.array(match, mask=bad),
            "is_mismatch": pyarrow.array(match < self.threshold, mask=bad),
            "reason": pyarrow.array(self.reasons(rows), pyarrow.string()),
            "reasons": pyarrow.array(self.all_reasons(start, stop), pyarrow.string()),
        }
        for name, partners in (("right", self.new_rights), ("left", self.new_lefts)):
            columns[f"suggested_{name}"], columns[f"suggested_{name}_score"] = self._best_partner(partners, start, stop)
        measures = self.scan.measures[here]
        columns |= {name: pyarrow.array(measures[:, k], mask=bad) for k, name in enumerate(self.judge.names)}
        if self.scores.siblings is not None:
            agreement = self.scores.siblings.agreement[here]
            columns["siblings"] = pyarrow.array(agreement, mask=np.isnan(agreement))
        if self.scores.proved is not None:
            columns["exchanged"] = pyarrow.array(self.scores.proved[here], mask=bad)
        return pyarrow.table(columns)

    @cached_property
    def _origins(self) -> pyarrow.DictionaryArray | None:
        """The value of the column `by`, or the name of the file, of each pair; None if all come from one file."""
        import pyarrow

        files = self.source.shards
        if len(files) < 2 and (self.by is None or (self.by == SHARD and files)):
            return None
        values = values_by(self.source, self.by or SHARD)
        return pyarrow.array(["" if value is None else str(value) for value in values]).dictionary_encode()

    def _best_partner(self, partners: Partners, start: int, stop: int) -> tuple[pyarrow.Array, pyarrow.Array]:
        """Id of the best partner's pair and match score of the new pair, for consecutive rows."""
        import pyarrow

        given = np.flatnonzero((partners.rows[:, 0] >= 0) & (self.suggested >= start) & (self.suggested < stop))
        places = self.suggested[given] - start
        ids, scores = np.full(stop - start, None), np.full(stop - start, np.nan, dtype=np.float32)
        ids[places], scores[places] = self._partner_ids(partners.rows[given, 0]), partners.scores[given, 0]
        return pyarrow.array(ids, pyarrow.string()), pyarrow.array(scores, mask=np.isnan(scores))

    def _partner_ids(self, rows: IntArray) -> list[str]:
        return self.source.ids(rows)

    @cached_property
    def suggestions(self) -> pyarrow.Table:
        """All better partners: pair, side, pair of the partner, and match score of the new pair."""
        return suggestion_table(self.source.ids, self.suggested, self.new_rights, self.new_lefts)

    def _close_rate(self) -> dict[str, Any]:
        """Share of pairs with a match score lowered by others, with its 95 % interval."""
        scores = replace(self.scores, exchanged=self.scores.proved)
        if scores.siblings is None and scores.exchanged is None:
            return {}
        alone, match = scores.alone(), scores.match()
        counted = np.flatnonzero(~np.isnan(alone) & self.items.is_first)
        lost = np.maximum(alone[counted].astype(np.float64) - match[counted], 0)
        rate = float(lost.mean())
        _, group = np.unique(self.items.groups[counted], return_inverse=True)  # pairs of one group are not independent
        error = 1.96 * math.sqrt(float(np.square(np.bincount(group, lost - rate)).sum())) / len(lost)
        return {"close_rate": rate, "close_rate_low": max(rate - error, 0.0), "close_rate_high": min(rate + error, 1.0)}

    @cached_property
    def summary(self) -> AuditSummary:
        """The metrics of the audit."""
        return AuditSummary(
            **self.tally.metrics(self.judge, self.threshold),
            **self._close_rate(),
            detections=detections(self.judge, self.scores, self.threshold, self.source.ids),
            decided=self.decided,
            checked=self.auditor.checked,
            by=self.by,
            near_duplicates_left=len(self.near_duplicates[0].rows),
            near_duplicates_right=len(self.near_duplicates[1].rows),
            suggested_right=int((self.new_rights.rows[:, 0] >= 0).sum()),
            suggested_left=int((self.new_lefts.rows[:, 0] >= 0).sum()),
            notes=list(self.notes),
            seconds=round(self.seconds, 2),
            stages={name: round(seconds, 2) for name, seconds in self.stages.items()},
        )

    @property
    def reported(self) -> Reported:
        """Content of the report."""
        places = np.isin(self.suggested, list(self.checked)).argsort(kind="stable")[:WORST]
        worst, groups = self.suggested[places], zip(SIDES, self.near_duplicates, strict=True)
        found = Reported(
            name=self.source.name,
            command=self.command,
            summary=self.summary,
            tally=self.tally,
            judge=self.judge,
            worst=worst,
            scores=self.match_score[worst],
            reasons=self.reasons(worst),
            new_rights=self.new_rights.take(places),
            new_lefts=self.new_lefts.take(places),
            near_duplicates=[
                (side, group[:MEMBERS], len(group)) for side, found in groups for group in found.first(GROUPS // 2)
            ],
            near_duplicate_pairs=self.near_duplicate_pairs,
            rows={},
            images=self.source.images,
        )
        return replace(found, rows=read_rows(self.source, *rows_to_show(found)))


def typical(judge: Judge, scan: Scan, matched: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """(m,) mean standardised measures of unflagged pairs."""
    rows, combination = sample(np.flatnonzero(matched), PIECE), judge.combination
    values = standardised(scan.measures[rows], combination.centre, combination.spread)
    return np.asarray(values.mean(0) if len(values) else np.zeros(len(combination.weights)))


def _shared(side: str, count: int) -> str:
    """Describe a placeholder: an item with this many unrelated partners."""
    return f"{side} item is shared by {count:,} pairs that have nothing else in common"


def suggestion_table(
    ids: Callable[[IntArray], list[str]], suggested: IntArray, new_rights: Partners, new_lefts: Partners
) -> pyarrow.Table:
    """Make the table of better partners for the rows `suggested`."""
    import pyarrow

    text, kinds = pyarrow.string(), {"rank": pyarrow.int64(), "score": pyarrow.float32()}
    columns: dict[str, list[Any]] = {name: [] for name in ("id", "replaced", "rank", "suggested_id", "score")}
    for side, partners in (("right", new_rights), ("left", new_lefts)):
        places, ranks = np.nonzero(partners.rows >= 0)
        columns["id"] += ids(suggested[places])
        columns["replaced"] += [side] * len(places)
        columns["rank"] += (ranks + 1).tolist()
        columns["suggested_id"] += ids(partners.rows[places, ranks])
        columns["score"] += partners.scores[places, ranks].tolist()
    return pyarrow.table({name: pyarrow.array(values, kinds.get(name, text)) for name, values in columns.items()})
