"""Answers of annotators and their calls, beside the decisions of people.

An answer is saved as soon as it arrives, and a call before it is made. So a killed process neither repeats answered
questions nor loses track of the cost.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from enum import StrEnum

from mispair.reviewing.decisions import ReviewFile, Verdict

ROUNDING = 1e-9  # by which sums of prices may differ


class AnswerKind(StrEnum):
    """The result of a question."""

    MATCHED = "matched"
    MISMATCHED = "mismatched"
    UNCLEAR = "unclear"  # neither yes nor no
    FAILED = "failed"  # no answer; it is asked again by the next process
    NO_IMAGE = "no image"  # there is no image that could be shown, so nothing was asked

    @property
    def mismatched(self) -> float:
        """1 mismatched, 0 matched, NaN without an answer."""
        return {AnswerKind.MISMATCHED: 1.0, AnswerKind.MATCHED: 0.0}.get(self, float("nan"))


@dataclass(frozen=True)
class Answer:
    """An annotator's answer on one pair."""

    question: str  # hash of the annotator, the prompt, the image and the caption
    annotator: str  # which annotator and prompt
    name: str  # of the annotator, as the page shows it
    id: str  # of the pair
    caption: str  # of the pair, as it was asked about
    kind: AnswerKind
    text: str = ""  # the beginning of the reply

    @property
    def verdict(self) -> Verdict | None:
        """The decision that this answer suggests; None without a clear answer."""
        return {AnswerKind.MATCHED: Verdict.KEEP, AnswerKind.MISMATCHED: Verdict.DROP}.get(self.kind)


_COLUMNS = "question, annotator, name, id, caption, kind, text"


class Answers(ReviewFile):
    """The answers on the pairs of an audit."""

    def add(self, answer: Answer) -> None:
        """Write an answer; it is on the disk when this returns."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._transaction():
            self._file.execute(
                f"INSERT INTO answers ({_COLUMNS}, time) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*astuple(answer), time)
            )

    def get(self, question: str) -> Answer | None:
        """The answer to a question, unless it failed."""
        found = self._select("question = ? AND kind != ? ORDER BY number DESC LIMIT 1", question, AnswerKind.FAILED)
        return found[0] if found else None

    def on(self, name: str) -> list[Answer]:
        """The last answer of each annotator on a pair, the newest first."""
        last = "SELECT max(number) FROM answers WHERE id = ? GROUP BY annotator"
        return self._select(f"number IN ({last}) ORDER BY number DESC", name)

    def of(self, annotator: str | None) -> dict[str, Answer]:
        """The last answer of an annotator on each pair, by its id."""
        return {answer.id: answer for answer in self._select("annotator = ? ORDER BY number", annotator)}

    def _select(self, condition: str, *values: str | None) -> list[Answer]:
        with self._safely():
            rows = self._file.execute(f"SELECT {_COLUMNS} FROM answers WHERE {condition}", values).fetchall()
        return [
            Answer(question, annotator, name, pair, caption, AnswerKind(kind), text)
            for question, annotator, name, pair, caption, kind, text in rows
        ]

    @property
    def last(self) -> tuple[int, str | None]:
        """Number of the last answer, and its annotator; 0 and None without answers."""
        with self._safely():
            row = self._file.execute("SELECT number, annotator FROM answers ORDER BY number DESC LIMIT 1").fetchone()
        return row or (0, None)

    @property
    def spent(self) -> float:
        """The price of all calls."""
        with self._safely():
            return float(self._file.execute("SELECT total(price) FROM calls").fetchone()[0])

    def calls(self, annotator: str) -> int:
        """Number of calls of an annotator, lost ones included."""
        with self._safely():
            return int(self._file.execute("SELECT count(*) FROM calls WHERE annotator = ?", (annotator,)).fetchone()[0])

    def begin_call(self, annotator: str, price: float, limit: float | None, most_calls: int | None) -> int | None:
        """Write down a call before it is made; None if it would exceed a limit.

        `limit` is for the price of all calls of the file, `most_calls` for the calls of this annotator.
        """
        with self._transaction():
            if limit is not None and self.spent + price > limit + ROUNDING:
                return None
            if most_calls is not None and self.calls(annotator) >= most_calls:
                return None
            values = (annotator, price)
            return self._file.execute("INSERT INTO calls (annotator, price) VALUES (?, ?)", values).lastrowid

    def cancel_call(self, number: int) -> None:
        """Forget a call refused by a busy annotator."""
        with self._transaction():
            self._file.execute("DELETE FROM calls WHERE number = ?", (number,))
