"""A review: the pairs of an audit, the decisions on them, and the next pair."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from mispair.auditing.output_files import SUMMARY
from mispair.auditing.summary import AuditSummary, NoiseEstimate
from mispair.errors import ChangedError, ConflictError, DataError, NotFoundError
from mispair.functional.logistic import FloatArray
from mispair.reviewing.answers import Answers
from mispair.reviewing.audited_data import AuditedData
from mispair.reviewing.decisions import FILE, Decision, Decisions, Mode, Verdict
from mispair.reviewing.noise_estimate import (
    DRAW,
    AnnotatorErrors,
    Draw,
    Plan,
    annotator_errors,
    most_instructive,
)
from mispair.reviewing.pair_table import Filter, Pair, PairTable, Rows

if TYPE_CHECKING:
    from mispair.pairs.source import Source

State = Literal["any", "undecided", "decided", "keep", "drop", "re-pair", "rewrite", "unsure"]
PRECISION = 0.015  # half of the interval at which the noise rate is known well enough
RESERVED = 120.0  # seconds for which a drawn pair is not given to another session
SHOWN = 3  # suggestions of each side of a pair
VERDICTS, UNDECIDED = list(Verdict), -1


@dataclass(frozen=True)
class RateProgress:
    """Progress of the estimate of the noise rate."""

    decided: int  # decisions on drawn pairs that count
    estimate: NoiseEstimate | None  # None with too few of them
    unsure: int  # how many of them were left open
    waiting: int  # decisions that count as soon as a pair is decided that was drawn before theirs
    answered: int  # drawn pairs on which an annotator has answered
    annotator: str  # its name; empty without answers
    errors: AnnotatorErrors

    def reaches(self, half_width: float = PRECISION) -> bool:
        """Whether the interval is narrow enough."""
        return self.estimate is not None and self.estimate.half_width <= half_width


def decided_rate(folder: Path) -> NoiseEstimate | None:
    """The noise rate by decisions on drawn pairs, of this review or of the one behind the audit."""
    with closing(Review(folder)) as review:
        return review.rate().estimate or (None if review.summary is None else review.summary.decided)


class Review:
    """The state of a review, safe for threads. Decisions are written to the folder of the audit."""

    def __init__(self, folder: Path, images: Path | None = None) -> None:
        self.folder = folder
        self.data = AuditedData(folder, images, self._is_audited)
        self.table = PairTable(folder)
        self.summary = AuditSummary.read(folder / SUMMARY) if (folder / SUMMARY).exists() else None
        self.decisions = Decisions(folder / FILE)
        self.answers = Answers(folder / FILE)
        self._read_answers = lru_cache(2)(self._read_in_order)  # of an annotator, and the number of the last answer
        self._reserved: dict[int, tuple[str, float]] = {}  # drawn pairs: session and time
        self._lock = threading.Lock()
        self._row_verdicts = np.full(len(self.table), UNDECIDED, dtype=np.int8)
        self._followed, self._following = 0, threading.Lock()  # the last decision that these know of

    def close(self) -> None:
        self.decisions.close()
        self.answers.close()

    # Showing

    def view(self, row: int) -> Pair:
        """One pair with its suggestions."""
        if not 0 <= row < len(self.table):
            raise NotFoundError(f"no row {row} among {len(self.table):,} pairs", where=self.folder)
        found = self.table.suggestions(row)
        shown = [one for side in ("right", "left") for one in [one for one in found if one.replaced == side][:SHOWN]]
        suggestions = [replace(one, has_image=self.data.has_image(one.row, one.image)) for one in shown]
        return replace(self.views([row])[0], suggestions=suggestions)

    def views(self, rows: Sequence[int] | Rows) -> list[Pair]:
        """Pairs without their suggestions."""
        return [
            replace(
                pair,
                has_image=self.data.has_image(pair.row, pair.image),
                decision=self.decisions.get(pair.id),
                opinions=[one for one in self.answers.on(pair.id) if one.caption == pair.caption and one.verdict],
            )
            for pair in self.table.read(rows)
        ]

    @property
    def images_gone(self) -> Path | None:
        """The folder of the images, if it is not there any more."""
        root = self.data.image_folder
        return None if root is None or root.exists() else root

    def _is_audited(self, pairs: Source) -> bool:
        """Whether these are the pairs of the audit: the data may have changed since."""
        count = len(pairs)
        return self.table.is_of({"id": pairs.id_column(0, count), "caption": pairs.item_columns(0, count)["caption"]})

    def image(self, row: int) -> bytes | None:
        """The image file of a row; None if missing, or outside the folder of the images."""
        return self.data.read_image(row, self.table.read([row])[0].image) if 0 <= row < len(self.table) else None

    # Browsing

    def rows(self, wanted: Filter, state: State = "any") -> Rows:
        """The rows of a filter with a state of decision, in order."""
        order = self.table.select(wanted)
        return order if state == "any" else order[self._in_state(order, state)]

    def neighbours(self, row: int, wanted: Filter, state: State = "any") -> tuple[int | None, int | None]:
        """The rows before and after a row in the order of a filter; the row may have another state."""
        order = self.table.select(wanted)
        here = np.flatnonzero(order == row)
        before, after = (order[: here[0]], order[here[0] + 1 :]) if len(here) else (order[:0], order)
        if state != "any":
            before, after = before[self._in_state(before, state)], after[self._in_state(after, state)]
        return (int(before[-1]) if len(before) else None), (int(after[0]) if len(after) else None)

    def _in_state(self, rows: Rows, state: State) -> npt.NDArray[np.bool_]:
        verdicts = self._verdicts().take(rows)
        if state in ("undecided", "decided"):
            return np.asarray((verdicts == UNDECIDED) == (state == "undecided"))
        return np.asarray(verdicts == VERDICTS.index(Verdict(state)))

    def _verdicts(self) -> npt.NDArray[np.int8]:
        """(N,) the verdict on each row, as a place in `VERDICTS`; reads only the changes."""
        with self._following:
            last, changed = self.decisions.since(self._followed)
            for name, row in self.table.find(changed).items():
                decision = changed[name]
                self._row_verdicts[row] = UNDECIDED if decision is None else VERDICTS.index(decision.verdict)
            self._followed = last
            return self._row_verdicts

    # Deciding

    def decide(self, rows: Sequence[int], decision: Decision) -> list[Decision]:
        """Write the same decision on one or several rows; its id is filled in."""
        if self.table.is_outdated:
            what = "the audit was made anew or moved since this page was started"
            raise ChangedError(what, where=self.folder, advice="End the server with Ctrl-C, and start it again")
        if not rows or not all(0 <= row < len(self.table) for row in rows):
            raise NotFoundError("No such pair", advice="Reload the page")
        if len(rows) > 1 and decision.verdict in (Verdict.REPAIR, Verdict.REWRITE):
            raise ConflictError("A new partner or caption is for one pair", advice="Select one")
        if decision.verdict is Verdict.REWRITE and not self.data.takes_captions:
            raise ConflictError(
                "This data set has vectors instead of captions, so no new caption can be written to it",
                advice="Re-pair or drop the pair",
            )
        is_said = decision.mode is not Mode.RATE and all(
            any((one.name, one.verdict) == (decision.accepted, decision.verdict) for one in pair.opinions)
            for pair in self.views(rows)
        )
        if decision.accepted and not is_said:  # nor are the decisions that check annotators influenced by them
            raise NotFoundError(f"{decision.accepted} does not say so", advice="Reload the page")
        names = {pair.row: pair.id for pair in self.table.read(list(dict.fromkeys(rows)))}
        self._check_ids({row: name for row, name in names.items() if np.isnan(self.table.score[row])})
        return self.decisions.add([replace(decision, id=name) for name in names.values()])

    def _check_ids(self, unreadable: Mapping[int, str]) -> None:
        """Refuse rows with a repeated id: an audit reads only the first row."""
        first = self.table.find(set(unreadable.values()))
        for row, name in unreadable.items():
            if first.get(name) != row:
                what = f"row {row} has the same id as a pair before it, {name!r}: a decision would be on that one"
                raise DataError(what, where=self.folder, advice="Give each pair an id of its own, and audit again")

    def undo(self, session: str) -> list[int]:
        """Undo the session's last action; returns the rows concerned."""
        undone = [decision.id for decision in self.decisions.undo(session)]
        rows = self.table.find(undone)
        return [rows[name] for name in undone if name in rows]

    def progress(self) -> Counter[str]:
        """Number of pairs with each verdict, without decisions on missing pairs."""
        found = self._verdicts()
        counts = np.bincount(found[found != UNDECIDED], minlength=len(VERDICTS)).tolist()
        return Counter({str(verdict): count for verdict, count in zip(VERDICTS, counts, strict=True) if count})

    # Choosing for the reviewer

    @cached_property
    def draw(self) -> Draw:
        """The draw for the noise rate. Another one if the scores have changed: its decisions begin anew."""
        return Draw(1.0 - self.table.score[self.table.readable].astype(np.float64), int(self.draw_key[:8], 16))

    @cached_property
    def draw_key(self) -> str:
        """Tells this draw from those over other scores or of another version."""
        seed = self.decisions.setting("seed", str(int.from_bytes(np.random.default_rng().bytes(4))))
        return hashlib.sha256(f"{DRAW} {seed} ".encode() + self.table.score.tobytes()).hexdigest()

    @cached_property
    def drawn_rows(self) -> Rows:
        """The readable rows in drawn order."""
        return np.asarray(self.table.readable[self.draw.order])

    @cached_property
    def _instructive_rows(self) -> Rows:
        rows = self.table.readable
        return np.asarray(rows[most_instructive(1.0 - self.table.score[rows].astype(np.float64), 0)])

    def _drawn_decisions(self) -> dict[int, Decision]:
        """Decisions on drawn pairs of this draw, by row; the last one counts."""
        history = self.decisions.history(undone=False, mode=Mode.RATE)
        found = {one.id: one for one in history if one.draw == self.draw_key}
        return {row: found[name] for name, row in self.table.find(found).items()}

    def next_drawn(self, session: str) -> int | None:
        """The next pair to decide for the noise rate, and reserves it; None when all are decided."""
        decided = self._drawn_decisions()
        now = time.monotonic()
        with self._lock:
            self._reserved = {row: one for row, one in self._reserved.items() if now - one[1] < RESERVED}
            for row in self.drawn_rows[: len(decided) + len(self._reserved) + 1].tolist():
                owner = self._reserved.get(row, (session, now))[0]
                if row not in decided and owner == session:
                    self._reserved[row] = (session, now)
                    return int(row)
        return None

    def next_instructive(self) -> int | None:
        """The undecided pair of most use for learning."""
        undecided = np.flatnonzero(self._verdicts().take(self._instructive_rows) == UNDECIDED)
        return int(self._instructive_rows[undecided[0]]) if len(undecided) else None

    def inclusion(self, row: int) -> float:
        """Probability of a pair to be among those drawn up to it."""
        places = np.flatnonzero(self.drawn_rows == row)
        if not len(places):
            raise NotFoundError("This pair was not drawn for the noise rate", advice="Reload the page")
        place = int(places[0])
        return float(self.draw.inclusion(place + 1, self.draw.order[place : place + 1])[0])

    def advice(self) -> list[str]:
        """Sentences for the reviewer if the noise rate of the audit may be wrong."""
        if self.summary is None:
            return []
        summary = self.summary.model_copy(update={"decided": self.rate().estimate or self.summary.decided})
        return summary.rate_sentences if summary.may_be_blind or summary.is_contradicted else []

    def rate(self, annotator: str | None = None) -> RateProgress:
        """The noise rate from decisions on drawn pairs, up to the first undecided one, and from answers.

        `answers` are the answers of an annotator, by default of the last one asked.
        """
        found, decided = self._decisions_in_order()
        answers, name = self.answers_in_order(annotator)
        return RateProgress(
            decided=len(found),
            estimate=self.draw.estimate(found, answers),
            unsure=int(np.isnan(found).sum()),
            waiting=decided - len(found),
            answered=int(np.count_nonzero(~np.isnan(answers))),
            annotator=name,
            errors=annotator_errors(found, answers),
        )

    def plan(self, half_width: float, annotator: str, most_calls: int | None = None, calls: int | None = None) -> Plan:
        """The expected effort for an interval, by the decisions and answers so far."""
        return self.draw.plan(
            half_width, self._decisions_in_order()[0], self.answers_in_order(annotator)[0], most_calls, calls
        )

    def _decisions_in_order(self) -> tuple[FloatArray, int]:
        """Decisions on the first drawn pairs, up to the first without one, and how many there are in all."""
        decided = self._drawn_decisions()
        found: list[float] = []
        for row in self.drawn_rows[: len(decided)].tolist():
            if row not in decided:
                break
            matched = decided[row].verdict.matched
            found.append(np.nan if matched is None else float(not matched))
        return np.array(found), len(decided)

    def answers_in_order(self, annotator: str | None = None) -> tuple[FloatArray, str]:
        """Answers on the drawn pairs up to the last one with an answer, NaN for others; and the annotator's name."""
        number, last = self.answers.last
        return self._read_answers(annotator or last, number)

    def _read_in_order(self, annotator: str | None, _: int) -> tuple[FloatArray, str]:
        found = self.answers.of(annotator)
        answers = {row: found[name] for name, row in self.table.find(found).items()}
        places = np.flatnonzero(np.isin(self.drawn_rows, list(answers)))
        says = np.full(places[-1] + 1 if len(places) else 0, np.nan)
        for place, pair in zip(places, self.table.read(self.drawn_rows[places]), strict=True):
            if answers[pair.row].caption == pair.caption:  # else it was asked about as it was before
                says[place] = answers[pair.row].kind.mismatched
        return says, next((answer.name for answer in answers.values()), "")
