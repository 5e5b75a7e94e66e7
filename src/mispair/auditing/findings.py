"""What an audit found: one row a pair, a summary, suggestions and near-duplicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from mispair.auditing.auditor import Auditor
from mispair.auditing.cuts import SHARD, Cut, Part, below_cuts, count_parts, values_by
from mispair.auditing.detection import Detection, detections
from mispair.auditing.match_scores import MatchScores, Scores, SimilarPairs
from mispair.auditing.scoring.calibration import PIECE, standardised
from mispair.auditing.scoring.folds import sample
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.near_duplicates import Groups
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.scoring.reasons import KINDS, Bits, in_words, wordless
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.auditing.tally import BINS, SHARED, SHOWN, SIDES, MeasureSummary, Tally, cut_values, rates_of, score_range
from mispair.errors import DamagedError
from mispair.pairs.audited import AuditColumns, Suggestions
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.pairs.source import Source
from mispair.support.files import read_regular
from mispair.support.formatting import percent

if TYPE_CHECKING:
    import pyarrow


NOTHING_IN_COMMON = "These two sides have nothing to do with each other, or nearly all pairs are mismatched"
SMALLEST = 0.0001  # share that is written as more than 0
BLIND = 0.1  # share of pairs that may be mismatched beyond the noise rate's interval before people are asked
BAD_SHARE = 0.01  # unreadable pairs above this share deserve a warning
REASONS = {
    "contrast": "other items fit either side better",
    "evidence": "the two have too little in common",
    "similarity": "the two are not alike in the learned space",
    "neighbours": "items like these have other partners",
    "rank": "seen from trusted pairs the two are in different places",
    "joint": "their encoders see no likeness",
    "joint_contrast": "their encoders see more likeness to other items",
    "cosine": "their encoders see no likeness",
    "expected": "other pairs let expect other partners",
    "networks": "the run's networks prefer other partners for either side",
}
SIBLINGS = "the other partners of its left item say something else"
EXCHANGED = "its partner and that of a similar pair fit better if they are exchanged"
FOUND_WRONG = "somebody has looked at it and found it wrong"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NoiseEstimate(_Frozen):
    """The noise rate by decisions of people on pairs that were drawn for it.

    Attributes:
        decisions: How many.
        rate: Estimated share of mismatched pairs, as these people see it.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    decisions: int
    rate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def sentence(self) -> str:
        """The rate in words."""
        rate, low, high = (percent(share, self.high) for share in (self.rate, self.low, self.high))
        return f"By {self.decisions:,} decisions on drawn pairs, {rate} are mismatched ({low} to {high})."


class AuditSummary(_Frozen):
    """The metrics of an audit, as in `summary.json`.

    Attributes:
        pairs: All pairs.
        scored: Those that could be read.
        flagged: Those with a match score below `flag_below`.
        noise_rate: Estimated share of pairs whose sides have nothing to do with each other.
        noise_rate_low: Lower end of its 95 % interval.
        noise_rate_high: Upper end.
        close_rate: Estimated share of pairs that are close, but contradicted by the other partners of their left item
            or exchanged with a similar pair; not part of the noise rate. None where neither can be told.
        close_rate_low: Lower end of its 95 % interval.
        close_rate_high: Upper end.
        detections: Which share of mismatches that are made on purpose would be found, by kind.
        decided: The noise rate by decisions of people; None without them.
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
    detections: list[Detection] = []
    decided: NoiseEstimate | None = None
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
    def rates(self) -> tuple[str, str, str]:
        """The noise rate and the two ends of its interval, in per cent with the same decimals."""
        rate, low, high = self.noise_rate, self.noise_rate_low, self.noise_rate_high
        return percent(rate, high), percent(low, high), percent(high, high)

    @property
    def at_most(self) -> float:
        """The largest share of mismatched pairs that the audit cannot rule out, between similar items included.

        Partners that are even more alike, or similar on both sides, look like matches to any encoder.
        """
        counted = (one for one in self.detections if one.kind == "similar" and one.by != "both")
        return max([self.noise_rate_high, *(one.at_most for one in counted)])

    @property
    def may_be_blind(self) -> bool:
        """Whether many more pairs may be mismatched than the audit sees, and nobody has decided on drawn pairs."""
        return self.decided is None and self.at_most - self.noise_rate_high > BLIND

    @property
    def is_contradicted(self) -> bool:
        """Whether people have decided that another share of the pairs is mismatched."""
        decided = self.decided
        return decided is not None and (decided.low > self.noise_rate_high or decided.high < self.noise_rate_low)

    @property
    def rate_sentence(self) -> str:
        """The noise rate in words."""
        rate, low, high = self.rates
        if self.noise_rate < SMALLEST:
            high = percent(max(self.noise_rate_high, SMALLEST))
            return f"At most {high} of the pairs have nothing to do with each other."
        return f"About {rate} of the pairs have nothing to do with each other ({low} to {high})."

    @property
    def rate_sentences(self) -> list[str]:
        """The noise rate, what may hide from it, and what people have decided."""
        found = [self.rate_sentence]
        if self.at_most > self.noise_rate_high:
            found.append(
                "Mismatches between similar items can look like matches: "
                f"this audit cannot rule out that {percent(self.at_most)} of the pairs are mismatched."
            )
        if self.decided is not None:
            found.append(self.decided.sentence)
            if self.is_contradicted:
                more = "more" if self.decided.rate > self.noise_rate else "less"
                found.append(
                    f"That is {more} than the audit sees by itself. Audit again with these decisions to use them."
                )
        elif self.may_be_blind:
            found.append("In a review, decide on about 100 drawn pairs to know the rate.")
        return found

    @property
    def too_many_unreadable(self) -> bool:
        """Whether more than 1 % of the pairs could not be read."""
        return self.pairs - self.scored > BAD_SHARE * self.pairs

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


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an audit found. Rows are in the order of the input; none is ever left out.

    Attributes:
        source: The pairs.
        auditor: What was learned from them.
        scan: What was measured.
        scores: What decides the match scores.
        match_score: (N,) probability that each pair matches: 0 or 1 where a person has checked, NaN where it cannot be
            read.
        suggested: Flagged rows for which better partners were searched, the lowest match score first.
        new_rights: Better right items for them.
        new_lefts: Better left items.
        items: Which rows share items.
        notes: What the reader should know.
        command: How to do it again.
        stages: Seconds of each part of the work.
        similar: What pairs with the same left item, or with a similar one, say about each pair.
        seen: (N,) what captions and images themselves show, as bits of `scoring.reasons.KINDS`.
        threshold: Match score below which pairs are flagged.
        by: Column, or "shard", for whose values the summary has noise rates.
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
    similar: SimilarPairs
    seen: Bits
    threshold: float = MATCH_THRESHOLD
    by: str | None = None
    decided: NoiseEstimate | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        found = self.summary
        return f"<Audit: {found.flagged:,} of {found.scored:,} pairs flagged, noise rate {found.rates[0]}>"

    @property
    def judge(self) -> Judge:
        """What the auditor has learned."""
        return self.auditor.judge

    @property
    def checked(self) -> Mapping[int, float]:
        """Rows that a person has checked: 1 matched, 0 mismatched. These overrule the measures."""
        return self.scores.checked

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
        return self.scores.final(self.similar)

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
        known, codes = self.source.known, self.scan.status[rows].tolist()
        return [
            known[int(row)] if code == BAD_IN_TABLE else FAULTS[code] for row, code in zip(rows, codes, strict=True)
        ]

    def all_reasons(self, start: int, stop: int) -> list[str]:
        """What consecutive pairs themselves show, flagged or not: shared items, captions and images; mostly empty."""
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
        """What the rows add up to."""
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
        """Count the rows, which may be a part of a whole.

        Args:
            scored: Readable rows of the whole data set.
            wordless: (n,) whether the caption of each row says nothing about an image.
            values: The value of each row by which noise rates are given.
            first: Number of the first row in the whole.
        """
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

        Copies of a pair count once. Of the pairs of an item with unlike partners all but one are mismatched. Pairs
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
        """How many pairs have a (nearly) equal item."""
        return len(np.union1d(self.near_duplicates[0].rows, self.near_duplicates[1].rows))

    def reasons(self, rows: IntArray) -> list[str]:
        """What counts most against each of these rows, in words; empty for rows that are not flagged.

        What comes later overrules what comes before.
        """
        combination, similar, match = self.judge.combination, self.similar, self.match_score[rows]
        here = standardised(self.scan.measures[rows], combination.centre, combination.spread)
        against = (self._typical - here) * np.maximum(combination.weights + combination.natural, 0)
        against = np.where(np.isfinite(against), against, 0)
        found = np.array([REASONS[name] for name in self.judge.names], dtype=object)[against.argmax(axis=1)]
        if similar.siblings is not None:
            found[-similar.siblings.penalty[rows] > against.max(axis=1)] = SIBLINGS
        if similar.exchanged is not None:
            found[similar.exchanged[rows] > match] = EXCHANGED
        seen = self.seen[rows]
        for bit, kind in reversed(list(enumerate(KINDS))):  # of several the first counts
            found[seen >> bit & 1 == 1] = f"its {kind}"
        for side, counts in zip(SIDES, self.items.unlike[:, rows], strict=True):
            shared = (counts > 0) & (counts == self.items.partners[rows])
            found[shared] = [f"its {_shared(side, count)}" for count in counts[shared]]
        found[np.isin(rows, list(self.checked))] = FOUND_WRONG
        found[~(match < self.threshold)] = ""
        reasons: list[str] = found.tolist()
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
        if self.similar.siblings is not None:
            agreement = self.similar.siblings.agreement[here]
            columns["siblings"] = pyarrow.array(agreement, mask=np.isnan(agreement))
        if self.similar.exchanged is not None:
            columns["exchanged"] = pyarrow.array(self.similar.exchanged[here], mask=bad)
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
        """For consecutive rows the id of the pair that has the best partner, and the match score of the new pair."""
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
        """All better partners: of which pair, on which side, from which pair, and how well the new pair fits."""
        return suggestion_table(self.source.ids, self.suggested, self.new_rights, self.new_lefts)

    def _close_rate(self) -> dict[str, float]:
        """Share of the pairs that match by themselves and not beside others, with its 95 % interval."""
        if self.similar.siblings is None and self.similar.exchanged is None:
            return {}
        alone = self.scores.alone()
        counted = np.flatnonzero(~np.isnan(alone) & self.items.is_first)
        lost = np.maximum(alone[counted].astype(np.float64) - self.match_score[counted], 0)
        rate = float(lost.mean())
        _, group = np.unique(self.items.groups[counted], return_inverse=True)  # pairs of one group are not independent
        error = 1.96 * math.sqrt(float(np.square(np.bincount(group, lost - rate)).sum())) / len(lost)
        return {"close_rate": rate, "close_rate_low": max(rate - error, 0.0), "close_rate_high": min(rate + error, 1.0)}

    @cached_property
    def summary(self) -> AuditSummary:
        """The metrics of the audit."""
        close: dict[str, Any] = self._close_rate()
        return AuditSummary(
            **self.tally.metrics(self.judge, self.threshold),
            **close,
            detections=detections(self.judge, self.scores, self.similar, self.threshold, self.source.ids),
            decided=self.decided,
            by=self.by,
            near_duplicates_left=len(self.near_duplicates[0].rows),
            near_duplicates_right=len(self.near_duplicates[1].rows),
            suggested_right=int((self.new_rights.rows[:, 0] >= 0).sum()),
            suggested_left=int((self.new_lefts.rows[:, 0] >= 0).sum()),
            notes=list(self.notes),
            seconds=round(self.seconds, 2),
            stages={name: round(seconds, 2) for name, seconds in self.stages.items()},
        )


def typical(judge: Judge, scan: Scan, matched: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """(m,) mean standardised measures of the pairs that are not flagged."""
    rows, combination = sample(np.flatnonzero(matched), PIECE), judge.combination
    values = standardised(scan.measures[rows], combination.centre, combination.spread)
    return np.asarray(values.mean(0) if len(values) else np.zeros(len(combination.weights)))


def _shared(side: str, count: int) -> str:
    """What to say about an item of a pair that has so many unlike partners."""
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
