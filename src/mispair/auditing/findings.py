"""What an audit found: one row a pair, a summary, suggestions and near-duplicates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from mispair.auditing.cuts import SHARD, USUAL_CUTS, Cut, Part, cuts, parts, values_by
from mispair.auditing.scoring.calibration import PIECE, standardised
from mispair.auditing.scoring.exchanges import Exchanges
from mispair.auditing.scoring.folds import sample
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.near_duplicates import Groups
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.scoring.reasons import KINDS, Bits, in_words, wordless
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.auditing.scoring.siblings import Siblings
from mispair.errors import DamagedError
from mispair.functional.logistic import FloatArray, logistic
from mispair.pairs.audited import AuditColumns, Suggestions
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.pairs.source import Source
from mispair.support.files import read_regular

if TYPE_CHECKING:
    import pyarrow


NOTHING_IN_COMMON = "These two sides have nothing to do with each other, or nearly all pairs are mismatched"
NEARLY_ALL = 0.8  # noise rate from which on pairs that cannot be told from shuffled ones have nothing in common
BAD_SHARE = 0.01  # unreadable pairs above this share deserve a warning
REASONS = {
    "contrast": "other items fit either side better",
    "evidence": "the two have too little in common",
    "similarity": "the two are not alike in the learned space",
    "neighbours": "items like these have other partners",
    "rank": "seen from trusted pairs the two are in different places",
    "joint": "their encoders see no likeness",
    "joint_contrast": "their encoders see more likeness to other items",
    "networks": "the run's networks prefer other partners for either side",
}
SIBLINGS = "the other partners of its left item say something else"
EXCHANGED = "its partner and that of a similar pair fit better if they are exchanged"
SIDES = ("left", "right")
SHARED = "item is shared by pairs that have nothing else in common"
WORDLESS = 6  # of so many pairs whose caption has no word about an image, one is expected to match
FOUND_WRONG = "somebody has looked at it and found it wrong"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeasureSummary(_Frozen):
    """One ingredient of the match score.

    Attributes:
        weight: Its share of the score; those of all measures add up to 1.
        separation: AUROC of the observed pairs against shuffled ones.
    """

    weight: float
    separation: float


class AuditSummary(_Frozen):
    """The metrics of an audit, as in `summary.json`.

    Attributes:
        pairs: All pairs.
        scored: Those that could be read.
        flagged: Those with a match score below `flag_below`.
        noise_rate: Estimated share of mismatched pairs.
        noise_rate_low: Lower end of its 95 % interval.
        noise_rate_high: Upper end.
        close_rate: Estimated share of pairs that are close, but contradicted by the other partners of their left item
            or exchanged with a similar pair; not part of the noise rate. None where neither can be told.
        close_rate_low: Lower end of its 95 % interval.
        close_rate_high: Upper end.
        nothing_in_common: Whether the pairs cannot be told from shuffled ones: nearly all are mismatched, or the two
            sides have nothing to do with each other.
        flag_below: The cut: match score below which pairs are flagged.
        cuts: What other cuts would flag, and this one.
        by: Column, or "shard", by which `parts` are made.
        parts: Noise rates of parts of the data.
        unreadable: Number of pairs by what is wrong with them.
        reasons: Number of pairs by what they themselves show: shared items, captions and images.
        near_duplicates_left: Pairs whose left item (nearly) equals that of another pair.
        near_duplicates_right: The same for right items.
        suggested_right: Flagged pairs with a suggested right item.
        suggested_left: Flagged pairs with a suggested left item.
        measures: The ingredients of the match score, by name.
        notes: What the reader should know.
        seconds: Time of the audit.
        stages: Seconds of each part of it.
    """

    pairs: int
    scored: int
    flagged: int
    noise_rate: float
    noise_rate_low: float
    noise_rate_high: float
    close_rate: float | None = None
    close_rate_low: float | None = None
    close_rate_high: float | None = None
    nothing_in_common: bool = False
    flag_below: float = MATCH_THRESHOLD
    cuts: list[Cut] = []
    by: str | None = None
    parts: list[Part] = []
    unreadable: dict[str, int]
    reasons: dict[str, int] = {}
    near_duplicates_left: int
    near_duplicates_right: int
    suggested_right: int
    suggested_left: int
    measures: dict[str, MeasureSummary]
    notes: list[str]
    seconds: float
    stages: dict[str, float]

    @property
    def too_many_unreadable(self) -> bool:
        """Whether more than 1 % of the pairs could not be read."""
        return self.pairs - self.scored > BAD_SHARE * self.pairs

    def __getitem__(self, name: str) -> Any:
        warnings.warn(f'summary["{name}"] is now summary.{name}', DeprecationWarning, stacklevel=2)
        return getattr(self, name)

    @classmethod
    def read(cls, path: Path) -> AuditSummary:
        """Reads `summary.json`.

        Raises:
            DamagedError: It cannot be read.
        """
        try:
            return cls.model_validate_json(read_regular(path))
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged or of another version"
            what = f"the summary cannot be read ({reason})"
            raise DamagedError(what, where=path, advice="Audit again with `overwrite`.") from None


@dataclass(frozen=True)
class SimilarPairs:
    """What other pairs say about a pair that looks right by itself.

    Attributes:
        siblings: How the right items of one left item agree; None where hardly any has several.
        exchanges: Exchanges among pairs with similar left items; None where there are no more than by accident.
    """

    siblings: Siblings | None = None
    exchanges: Exchanges | None = None

    def lowered(self, score: FloatArray) -> FloatArray:
        """(N,) log odds that each pair matches, from those by itself."""
        score = score if self.siblings is None else score + self.siblings.penalty
        return score if self.exchanges is None else self.exchanges.lowered(score)


NO_OTHERS = SimilarPairs()


@dataclass(frozen=True)
class Findings:
    """What an audit found. Rows are in the order of the input; none is ever left out.

    Attributes:
        source: The pairs.
        judge: What was learned from them.
        scan: What was measured.
        suggested: Flagged rows for which better partners were searched, the lowest match score first.
        new_rights: Better right items for them.
        new_lefts: Better left items.
        items: Which rows share items.
        notes: What the reader should know.
        command: How to do it again.
        stages: Seconds of each part of the work.
        checked: Rows that a person has checked: 1 matched, 0 mismatched. These overrule the measures.
        similar: What pairs with the same left item, or with a similar one, say about each pair.
        seen: (N,) what captions and images themselves show, as bits of `scoring.reasons.KINDS`.
        threshold: Match score below which pairs are flagged.
        by: Column, or "shard", for whose values the summary has noise rates.
    """

    source: Source
    judge: Judge
    scan: Scan
    suggested: IntArray
    new_rights: Partners
    new_lefts: Partners
    items: SharedItems
    notes: tuple[str, ...] = ()
    command: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    checked: dict[int, float] = field(default_factory=dict)
    similar: SimilarPairs = NO_OTHERS
    seen: Bits | None = None
    threshold: float = MATCH_THRESHOLD
    by: str | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        found = self.summary
        return f"<Audit: {found.flagged:,} of {found.scored:,} pairs flagged, noise rate {found.noise_rate:.1%}>"

    @property
    def near_duplicates(self) -> tuple[Groups, Groups]:
        """Groups of rows whose left items, and whose right items, are (nearly) the same."""
        return self.items.near_duplicates

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(self.stages.values())

    @cached_property
    def score(self) -> npt.NDArray[np.float64]:
        """(N,) log odds that each pair matches, by itself and beside others; NaN where it could not be read."""
        return self.similar.lowered(self.judge.combination.score(self.scan.measures))

    @cached_property
    def match_score(self) -> npt.NDArray[np.float32]:
        """(N,) probability that each pair matches: 0 or 1 where a person has checked, NaN where it cannot be read."""
        return match_scores(self.judge, self.scan, self.items, self.checked, self.similar, self._seen)

    @property
    def is_mismatch(self) -> npt.NDArray[np.bool_]:
        """(N,) whether each pair is flagged; false where it could not be read."""
        return np.asarray(self.match_score < self.threshold)

    @property
    def columns(self) -> AuditColumns:
        """What the audit says about each pair, as columns that travel with the pairs."""
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
        """Rows that could not be read."""
        return np.flatnonzero(self.scan.status != READABLE)

    def status(self, rows: IntArray) -> list[str]:
        """ "ok", or what is wrong with each of these rows."""
        known, codes = self.source.known, self.scan.status[rows]
        return [
            known[int(row)] if code == BAD_IN_TABLE else FAULTS[code] for row, code in zip(rows, codes, strict=True)
        ]

    def reasons(self, rows: IntArray) -> list[str]:
        """What counts most against each of these rows, in words; empty for rows that are not flagged."""
        return [self._reasons[place] for place in self._against(rows)]

    @cached_property
    def _reasons(self) -> list[str]:
        shared = [
            f"its {SIDES[side]} item is shared by {count:,} pairs that have nothing else in common"
            for side, counts in enumerate(self._shared_counts)
            for count in counts.tolist()
        ]
        return [
            *(REASONS[name] for name in self.judge.names),
            "",
            FOUND_WRONG,
            SIBLINGS,
            EXCHANGED,
            *shared,
            *(f"its {kind}" for kind in KINDS),
        ]

    @cached_property
    def _shared_counts(self) -> list[npt.NDArray[np.int32]]:
        """Numbers of unlike partners that items of either side have, in ascending order."""
        return [np.unique(counts[counts > 0]) for counts in self.items.unlike]

    @cached_property
    def _seen(self) -> Bits:
        return np.zeros(len(self), dtype=np.uint16) if self.seen is None else self.seen

    def all_reasons(self, start: int, stop: int) -> pyarrow.Array:
        """What consecutive pairs themselves show, flagged or not: shared items, captions and images; mostly empty."""
        here = slice(start, stop)
        kinds, places = np.unique(
            np.column_stack([self._seen[here], *self.items.unlike[:, here]]), axis=0, return_inverse=True
        )
        words = ["; ".join([*_shared(lefts, rights), *in_words(int(bits))]) for bits, lefts, rights in kinds.tolist()]
        return _text_column(places.reshape(-1), words)

    @cached_property
    def _reason_counts(self) -> dict[str, int]:
        """Number of pairs by what they show."""
        readable = self.scan.status == READABLE
        shared = {
            f"{side} {SHARED}": int((counts[readable] > 0).sum())
            for side, counts in zip(SIDES, self.items.unlike, strict=True)
        }
        seen = {kind: int((self._seen >> bit & 1).sum()) for bit, kind in enumerate(KINDS)}
        return {kind: count for kind, count in (shared | seen).items() if count}

    def _against(self, rows: IntArray) -> npt.NDArray[np.int64]:
        """Index into `_reasons` for each of these rows."""
        combination = self.judge.combination
        here = standardised(self.scan.measures[rows], combination.centre, combination.spread)
        against = (self._typical - here) * np.maximum(combination.weights, 0)
        worst = np.where(np.isfinite(against), against, 0).argmax(axis=1)
        if self.similar.siblings is not None:
            lost = np.where(np.isfinite(against), against, 0).max(axis=1)
            worst[-self.similar.siblings.penalty[rows] > lost] = len(self.judge.names) + 2
        if self.similar.exchanges is not None:
            worst[self.similar.exchanges.chance[rows] > self.match_score[rows]] = len(self.judge.names) + 3
        start = len(self.judge.names) + 4
        seen = self._seen[rows]
        several = np.flatnonzero(seen)
        kinds = len(self._reasons) - len(KINDS)
        worst[several] = kinds + np.log2(seen[several] & -seen[several].astype(np.int64)).astype(np.int64)
        for counts, known in zip(self.items.unlike, self._shared_counts, strict=True):
            own = counts[rows]
            several = (own > 0) & (own == self.items.partners[rows])
            worst[several] = start + np.searchsorted(known, own[several])
            start += len(known)
        worst[np.isin(rows, list(self.checked))] = len(self.judge.names) + 1
        return np.where(self.match_score[rows] < self.threshold, worst, len(self.judge.names))

    @cached_property
    def _typical(self) -> npt.NDArray[np.float64]:
        """(m,) mean standardised measures of the pairs that are not flagged."""
        combination = self.judge.combination
        matched = sample(np.flatnonzero(self.match_score >= self.threshold), PIECE)
        values = standardised(self.scan.measures[matched], combination.centre, combination.spread)
        return np.asarray(values.mean(0) if len(values) else np.zeros(len(combination.weights)))

    @cached_property
    def table(self) -> pyarrow.Table:
        """One row a pair: id, status, match_score, is_mismatch, reason, suggestions, and all measures."""
        import pyarrow

        return pyarrow.concat_tables(self.pieces())

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[pyarrow.Table]:
        """The table, some rows at a time: as a whole it takes more memory than all the rest."""
        end = len(self) if stop is None else stop
        return (self._piece(first, min(first + PIECE, end)) for first in range(start, end, PIECE))

    def _piece(self, start: int, stop: int) -> pyarrow.Table:
        import pyarrow

        here = slice(start, stop)
        bad, match = self.scan.status[here] != READABLE, self.match_score[here]
        columns: dict[str, Any] = {
            "id": self.source.id_column(start, stop),
            **self.source.item_columns(start, stop),
            **self._source_column(start, stop),
            "status": self._status_column(start, stop),
            "match_score": pyarrow.array(match, mask=bad),
            "is_mismatch": pyarrow.array(match < self.threshold, mask=bad),
            "reason": _text_column(self._against(np.arange(start, stop)), self._reasons),
            "reasons": self.all_reasons(start, stop),
        }
        for name, partners in (("right", self.new_rights), ("left", self.new_lefts)):
            columns[f"suggested_{name}"], columns[f"suggested_{name}_score"] = self._best_partner(partners, start, stop)
        measures = self.scan.measures[here]
        columns |= {name: pyarrow.array(measures[:, k], mask=bad) for k, name in enumerate(self.judge.names)}
        if self.similar.siblings is not None:
            agreement = self.similar.siblings.agreement[here]
            columns["siblings"] = pyarrow.array(agreement, mask=np.isnan(agreement))
        if self.similar.exchanges is not None:
            columns["exchanged"] = pyarrow.array(self.similar.exchanges.chance[here], mask=bad)
        return pyarrow.table(columns)

    def _source_column(self, start: int, stop: int) -> dict[str, pyarrow.Array]:
        """Where consecutive pairs come from; none if all come from one file and nothing else is asked for."""
        if self._origins is None:
            return {}
        names, origin = self._origins
        return {"source": _text_column(origin[start:stop], names)}

    @cached_property
    def _origins(self) -> tuple[list[str], npt.NDArray[np.int32]] | None:
        """The values of the column `by`, or the names of the files, and the number of that of each pair (N,)."""
        files = self.source.shards
        if self.by is None or (self.by == SHARD and files):
            numbers = np.repeat(np.arange(len(files), dtype=np.int32), [size for _, size in files])
            return ([name for name, _ in files], numbers) if len(files) > 1 else None
        values = ["" if value is None else str(value) for value in values_by(self.source, self.by)]
        names, places = np.unique(values, return_inverse=True)
        return names.tolist(), places.astype(np.int32)

    def _status_column(self, start: int, stop: int) -> pyarrow.Array:
        words, places = list(FAULTS.values()), self.scan.status[start:stop].astype(np.int32)
        for place in np.flatnonzero(places == BAD_IN_TABLE):
            places[place] = len(words)
            words.append(self.source.known[start + int(place)])
        return _text_column(places, words)

    def _best_partner(self, partners: Partners, start: int, stop: int) -> tuple[pyarrow.Array, pyarrow.Array]:
        """For consecutive rows the id of the pair that has the best partner, and the match score of the new pair."""
        import pyarrow

        given = np.flatnonzero((partners.rows[:, 0] >= 0) & (self.suggested >= start) & (self.suggested < stop))
        scores = np.full(stop - start, np.nan, dtype=np.float32)
        scores[self.suggested[given] - start] = partners.scores[given, 0]
        place = np.zeros(stop - start, dtype=np.int32)
        place[self.suggested[given] - start] = np.arange(len(given))
        ids = pyarrow.array([*self.source.ids(partners.rows[given, 0]), ""], pyarrow.string())
        none = np.isnan(scores)
        return ids.take(pyarrow.array(place, mask=none)), pyarrow.array(scores, mask=none)

    @cached_property
    def suggestions(self) -> pyarrow.Table:
        """All better partners: of which pair, on which side, from which pair, and how well the new pair fits."""
        import pyarrow

        text, kinds = pyarrow.string(), {"rank": pyarrow.int64(), "score": pyarrow.float32()}
        columns: dict[str, list[Any]] = {name: [] for name in ("id", "replaced", "rank", "suggested_id", "score")}
        for side, partners in (("right", self.new_rights), ("left", self.new_lefts)):
            places, ranks = np.nonzero(partners.rows >= 0)
            columns["id"] += self.source.ids(self.suggested[places])
            columns["replaced"] += [side] * len(places)
            columns["rank"] += (ranks + 1).tolist()
            columns["suggested_id"] += self.source.ids(partners.rows[places, ranks])
            columns["score"] += partners.scores[places, ranks].tolist()
        return pyarrow.table({name: pyarrow.array(values, kinds.get(name, text)) for name, values in columns.items()})

    def _close_rate(self) -> dict[str, float]:
        """Share of the pairs that match by themselves and not beside others, with its 95 % interval."""
        if self.similar.siblings is None and self.similar.exchanges is None:
            return {}
        alone = match_scores(self.judge, self.scan, self.items, self.checked, seen=self._seen)
        counted = np.flatnonzero(~np.isnan(alone) & self.items.is_first)
        lost = np.maximum(alone[counted].astype(np.float64) - self.match_score[counted], 0)
        rate = float(lost.mean())
        _, group = np.unique(self.items.groups[counted], return_inverse=True)  # pairs of one group are not independent
        error = 1.96 * math.sqrt(float(np.square(np.bincount(group, lost - rate)).sum())) / len(lost)
        return {"close_rate": rate, "close_rate_low": max(rate - error, 0.0), "close_rate_high": min(rate + error, 1.0)}

    @cached_property
    def summary(self) -> AuditSummary:
        """The metrics of the audit."""
        combination, judge = self.judge.combination, self.judge
        bad = self.bad_rows
        kinds, counts = np.unique(self.status(bad), return_counts=True) if len(bad) else ((), ())
        return AuditSummary(
            pairs=len(self),
            scored=len(self) - len(bad),
            flagged=int(self.is_mismatch.sum()),
            noise_rate=self._of_all(combination.rate),
            noise_rate_low=self._of_all(combination.low),
            noise_rate_high=self._of_all(combination.high),
            **self._close_rate(),
            nothing_in_common=combination.high == 1 and combination.rate > NEARLY_ALL,
            flag_below=self.threshold,
            cuts=cuts(
                self.match_score[self.scan.status == READABLE],
                (combination.rate, combination.low, combination.high),
                [*USUAL_CUTS, self.threshold],
            ),
            by=self.by,
            parts=[] if self.by is None else self._parts(self.by),
            unreadable={str(kind): int(count) for kind, count in zip(kinds, counts, strict=True)},
            reasons=self._reason_counts,
            near_duplicates_left=len(self.near_duplicates[0].rows),
            near_duplicates_right=len(self.near_duplicates[1].rows),
            suggested_right=int((self.new_rights.rows[:, 0] >= 0).sum()),
            suggested_left=int((self.new_lefts.rows[:, 0] >= 0).sum()),
            measures={
                name: MeasureSummary(weight=float(weight), separation=float(separation))
                for name, weight, separation in zip(judge.names, combination.shares(), judge.separations, strict=True)
            },
            notes=list(self.notes),
            seconds=round(self.seconds, 2),
            stages={name: round(seconds, 2) for name, seconds in self.stages.items()},
        )

    def _parts(self, by: str) -> list[Part]:
        sums = self.judge.combination.sums(self.scan.measures)
        return parts(values_by(self.source, by), sums, self.judge.null, self.is_mismatch)

    def _of_all(self, rate: float) -> float:
        """The noise rate of all pairs, of that of the pairs that are learned from.

        Copies of a pair count once. Of the pairs of an item with unlike partners all but one are mismatched. Pairs
        whose caption says nothing about an image count by their match scores.
        """
        different = self.items.is_first & (self.scan.status == READABLE)
        partners, match = self.items.partners[different], self.match_score[different]
        shared = partners > 0
        empty = wordless(self._seen)[different] & ~shared
        others = len(partners) - int((shared | empty).sum())
        if others == len(partners):
            return rate
        mismatched = float((1 - 1 / partners[shared]).sum() + (1 - match[empty]).sum(dtype=np.float64))
        return (rate * others + mismatched) / len(partners)


def match_scores(
    judge: Judge,
    scan: Scan,
    items: SharedItems,
    checked: Mapping[int, float],
    similar: SimilarPairs = NO_OTHERS,
    seen: Bits | None = None,
) -> npt.NDArray[np.float32]:
    """(N,) match scores by the measures, by shared items, by captions and by what a person has checked.

    NaN for unreadable rows.
    """
    siblings, exchanges = similar.siblings, similar.exchanges
    match = judge.combination.match(scan.measures, None if siblings is None else siblings.penalty)
    if exchanges is not None:
        match *= 1 - exchanges.chance
    many = _expected_once(items, seen)
    rows = np.flatnonzero(many)
    if len(rows):
        match[rows] = np.minimum(match[rows], _one_in_many(judge, scan.measures[rows], many[rows]))
    for row, matched in checked.items():
        if not np.isnan(match[row]):
            match[row] = matched
    return match


def _expected_once(items: SharedItems, seen: Bits | None) -> npt.NDArray[np.integer]:
    """(N,) of how many such pairs one is expected to match: of the unlike partners of an item, and of captions that say
    nothing about an image; 0 for all other pairs."""
    return items.partners if seen is None else np.maximum(items.partners, WORDLESS * wordless(seen))


def _one_in_many(
    judge: Judge, measures: npt.NDArray[np.floating], partners: npt.NDArray[np.integer]
) -> npt.NDArray[np.float32]:
    """(n,) probability that pairs match of which one in so many is expected to.

    The evidence is how much more frequent such measures are among matched than among shuffled pairs. It is a straight
    line, as scores below those of all other pairs must count as well.
    """
    sums = np.concatenate([judge.observed, judge.null])
    observed = np.arange(len(sums)) < len(judge.observed)
    worth = np.where(observed, 1 / len(judge.observed), 1 / len(judge.null)) * len(sums) / 2
    slope, offset = logistic(sums[:, None], observed.astype(np.float64), worth, 1e-3)
    rate = judge.combination.rate
    ratio = np.exp(np.clip(judge.combination.sums(measures) * slope[0] + offset, -60, 60))
    odds = np.maximum(ratio - rate, 1e-12) / max(1 - rate, 1e-3) / (partners - 1)
    return np.asarray(odds / (1 + odds), dtype=np.float32)


def _shared(lefts: int, rights: int) -> list[str]:
    """What to say about the items of a pair that have so many unlike partners."""
    return [
        f"{side} item is shared by {count:,} pairs that have nothing else in common"
        for side, count in zip(SIDES, (lefts, rights), strict=True)
        if count
    ]


def _text_column(places: npt.NDArray[np.integer], words: list[str]) -> pyarrow.Array:
    """A column of texts of which only a few differ."""
    import pyarrow

    return pyarrow.array(words, pyarrow.string()).take(pyarrow.array(places))
