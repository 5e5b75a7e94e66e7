"""Ask an annotator about the drawn pairs of an audit, within a price: `mispair.annotate` and `mispair annotate`."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from mispair.errors import ConflictError, DataError, InvalidValueError, NotFoundError
from mispair.reviewing.annotators import (
    SHOWN,
    Annotator,
    Function,
    NoAnswerError,
    read_answer,
)
from mispair.reviewing.answers import Answer, AnswerKind
from mispair.reviewing.noise_estimate import ASSUMED_ERROR, LEAST, AnnotatorErrors, Plan
from mispair.reviewing.page import audit_folder
from mispair.reviewing.review import PRECISION, RateProgress, Review
from mispair.support.formatting import beginning, clean, percent, plain
from mispair.support.progress import RowProgress
from mispair.support.thumbnails import thumbnail

if TYPE_CHECKING:
    from rich.console import Console

    from mispair.auditing.audit import Audit

SIZE, MOST_IMAGE_BYTES = 512, 200_000  # pixels and bytes of what is sent
ATTEMPTS = 4  # of a pair
BUSY_ATTEMPTS = 20
PAUSE = 1.0  # seconds before the second attempt, doubled before each further one
LONGEST_PAUSE = 600.0  # that an annotator may ask for
IN_A_ROW = 20  # pairs without a clear answer after which the annotator is taken to be out of order
SAMPLE = 100  # pairs of which one at least must have an image, and one a caption
EVERY = 50  # answers after which the estimate is made anew


@dataclass(frozen=True)
class Budget:
    """The limits of a run: the checked arguments of `annotate`."""

    half_width: float
    price_per_call: float
    limit: float | None
    calls: int | None
    rate: float | None
    workers: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_allowed = field.name in ("price_per_call", "limit", "calls")
            if value is not None and not (0 < value < math.inf or (value == 0 and least_is_allowed)):
                expected = "at least 0" if least_is_allowed else "greater than 0"
                raise InvalidValueError(str(value), where=field.name, expected=expected)
        if self.limit is not None and not self.price_per_call:
            raise ConflictError("no price of a call", where="limit", advice="Give `price_per_call`, too")


@dataclass(frozen=True)
class Forecast:
    """The expected calls, decisions and price."""

    plan: Plan  # calls and decisions in all
    receiver: str  # where pairs go
    images: Path | None  # folder that the images come from; None if they are inside the files of the data set
    progress: RateProgress  # decisions and answers that there are
    budget: Budget  # what it may cost
    calls: int  # calls to make now
    spent: float  # what was spent before

    def __str__(self) -> str:
        plan, progress, budget = self.plan, self.progress, self.budget
        width = f"±{100 * budget.half_width:.2g} points"
        within = "" if budget.limit is None else f" within {budget.limit:.2f}"
        if not plan.calls:
            reached = progress.reaches(budget.half_width)
            why = "reached already" if reached else f"answers of this annotator do not pay off{within}"
            return f"{width}: {why}; {plan.alone:,} decisions of people suffice."
        assumed = f"if it errs on {percent(ASSUMED_ERROR)}"
        if progress.errors.both:
            assumed = f"it has erred on {_errors(progress.errors)}"
        cost = f"{self.calls:,} calls now"
        if budget.price_per_call:
            cost += f" for {self.calls * budget.price_per_call:.2f}"
            cost += (
                "" if budget.limit is None else f"; never more than {budget.limit:.2f} in all, {self.spent:.2f} so far"
            )
        return (
            f"Sends to {self.receiver}: caption and image of each pair, the image as a JPEG of at most {SIZE} x {SIZE} "
            f"pixels without its name. Images come from {self.images or 'the files of the data set'}.\n"
            f"{width}: about {plan.calls:,} calls and {plan.decisions:,} decisions instead of {plan.alone:,} decisions "
            f"({assumed}); {progress.decided:,} decisions are there.\n{cost}."
        )


@dataclass(frozen=True)
class AnnotationResult:
    """The answers of an annotator.

    Attributes:
        forecast: What was expected.
        kinds: Number of pairs with each kind of answer.
        unclear: The beginning of an answer that was neither yes nor no; empty if there was none.
        calls: Calls of this run.
        spent: Money for all calls of the review.
        stopped: Reason for the end of the questions: planned, narrow (the interval is), limit, or no gain (by the
            errors so far more answers do not pay off).
        progress: The noise rate with these answers.
        decisions_left: Decisions of people that are missing to the wanted interval, by a new plan.
    """

    forecast: Forecast
    kinds: Counter[AnswerKind]
    unclear: str
    calls: int
    spent: float
    stopped: str
    progress: RateProgress
    decisions_left: int

    def __str__(self) -> str:
        lines = []
        if self.kinds:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.kinds.items()))
            example = f' ("{self.unclear}")' if self.unclear else ""
            lines.append(
                f"Answers: {kinds}{example}. {self.calls:,} calls were made; {self.spent:.2f} is spent in all."
            )
        if self.progress.errors.both:
            lines.append(f"The annotator has erred on {_errors(self.progress.errors)} that people decided, too.")
        if (found := self.progress.estimate) is not None:
            lines.append(found.sentence)
        if self.stopped == "limit":
            lines.append("The limit of money or calls is reached.")
        if self.stopped == "no gain":
            lines.append("More answers would not pay off, by the annotator's errors so far.")
        return "\n".join(lines)


def _errors(errors: AnnotatorErrors) -> str:
    low, high = errors.interval
    share, lowest, highest = (percent(one, high) for one in (errors.rate, low, high))
    return f"{errors.wrong:,} of {errors.both:,} pairs ({share}, {lowest} to {highest})"


def annotate(
    audit: Audit | str | Path,
    annotator: Annotator | Callable[[bytes, str], object],
    folder: str | Path | None = None,
    *,
    images: str | Path | None = None,
    half_width: float = PRECISION,
    price_per_call: float = 0.0,
    limit: float | None = None,
    calls: int | None = None,
    rate: float | None = None,
    workers: int = 4,
    agree: Callable[[Forecast], bool] | None = None,
    console: Console | None = None,
) -> AnnotationResult | None:
    """Ask an annotator about pairs that are drawn for the noise rate, until its interval is narrow enough.

    People must decide on some of these pairs, too, before or after that (`mispair.review`, *Estimate the noise rate*):
    they show how often the annotator errs, which the estimate corrects for. Answers are written as they arrive, and no
    pair is asked about twice.

    Args:
        audit: The result of `mispair.audit`, or the folder of `mispair audit`.
        annotator: A function of an image (a JPEG, as bytes) and a caption that returns whether they match, or an
            `Endpoint` or `Command` of `mispair.reviewing.annotators`.
        folder: Folder for an audit in memory; `review` by default.
        images: Folder of the images, if they have been moved since the audit.
        half_width: Stop when half of the 95 % interval of the noise rate is this.
        price_per_call: In any currency.
        limit: Highest cost of all calls of this review, earlier runs and retries included.
        calls: Number of calls, earlier runs of this annotator included; by default as many as pay off.
        rate: Most calls a minute.
        workers: Calls at a time.
        agree: Called with the forecast before the first question; return False to stop.
        console: Console for progress.

    Returns:
        What was answered; None if there was no agreement.

    Raises:
        DataError: There are no images or captions, or the annotator does not work.
        ConfigError: A number is out of range, or there is a limit without a price.
    """
    budget = Budget(half_width, price_per_call, limit, calls, rate, workers)
    place, image_folder = audit_folder(audit, folder, images)
    one = annotator if isinstance(annotator, Annotator) else Function(annotator)
    review = Review(place, image_folder)
    with closing(one), closing(review):
        run = _Run(review, one, budget)
        forecast = run.forecast()
        if agree is not None and not agree(forecast):
            return None
        with RowProgress(console, forecast.plan.calls, "Ask") as bar:
            return run.ask_all(forecast, bar)


class _Pace:
    """When the next call may be made."""

    def __init__(self, rate: float | None) -> None:
        self._gap = 60.0 / rate if rate else 0.0
        self._next, self._lock = 0.0, threading.Lock()
        self.stopped = threading.Event()

    def wait(self) -> bool:
        """Wait for a turn; False when no call must be made any more."""
        while not self.stopped.is_set():
            with self._lock:
                seconds = self._next - time.monotonic()
                if seconds <= 0:
                    self._next = time.monotonic() + self._gap
                    return True
            self.stopped.wait(seconds)
        return False

    def pause(self, seconds: float) -> None:
        """No call of any thread is made for so long."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class _Run:
    """One annotator, asked by several threads."""

    def __init__(self, review: Review, annotator: Annotator, budget: Budget) -> None:
        self.review, self.answers, self.annotator, self.budget = review, review.answers, annotator, budget
        self._pace = _Pace(budget.rate)
        self._in_a_row, self._made_before = 0, self.answers.calls(annotator.identity)
        self._out_of_budget, self._lock = False, threading.Lock()

    def forecast(self) -> Forecast:
        """The expected calls, by the decisions and answers so far."""
        review, budget = self.review, self.budget
        first = review.drawn_rows[:SAMPLE]
        if not any(review.image(row) for row in first.tolist()):
            where, advice = review.data.image_folder or review.folder, "Give the folder of the images with `images`"
            raise NotFoundError("an annotator needs images, and none is found", where=where, advice=advice)
        if not any(pair.caption for pair in review.table.read(first)):
            raise NotFoundError("the audit has no captions", where=review.folder)
        identity, spent = self.annotator.identity, self.answers.spent
        there, made = len(self.answers.of(identity)), self.answers.calls(identity)
        wanted = None if budget.calls is None else there + max(0, budget.calls - made)
        most = None
        if budget.limit is not None:
            most = there + max(0, int((budget.limit - spent) / budget.price_per_call + 1e-6))
            wanted = None if wanted is None else min(most, wanted)
        plan = review.plan(budget.half_width, identity, most, wanted)
        receiver, images, progress = self.annotator.receiver, review.data.image_folder, review.rate(identity)
        return Forecast(plan, receiver, images, progress, budget, max(0, plan.calls - there), spent)

    def ask_all(self, forecast: Forecast, bar: RowProgress) -> AnnotationResult:
        """Ask about the drawn pairs, in their order, as far as was planned."""
        rows = self.review.drawn_rows[: forecast.plan.calls].tolist()
        stopped = ""
        with ThreadPoolExecutor(self.budget.workers) as pool:
            try:
                for start in range(0, len(rows), EVERY):
                    for _ in pool.map(self._answer, rows[start : start + EVERY]):
                        bar.step(1)
                    stopped = self._reason_to_stop() if start + EVERY < len(rows) else ""
                    if stopped or self._out_of_budget:
                        break
            finally:
                self._pace.stopped.set()
        identity = self.annotator.identity
        found, progress = self.answers.of(identity), self.review.rate(identity)
        needed = self.review.plan(self.budget.half_width, identity, calls=len(found)).decisions
        return AnnotationResult(
            forecast=forecast,
            kinds=Counter(one.kind for one in found.values()),
            unclear=next((one.text for one in found.values() if one.kind is AnswerKind.UNCLEAR), ""),
            calls=self.answers.calls(identity) - self._made_before,
            spent=self.answers.spent,
            stopped="limit" if self._out_of_budget else stopped or "planned",
            progress=progress,
            decisions_left=0 if progress.reaches(self.budget.half_width) else max(0, needed - progress.decided),
        )

    def _reason_to_stop(self) -> str:
        """Reason to stop the calls; empty to go on."""
        identity, budget = self.annotator.identity, self.budget
        progress = self.review.rate(identity)
        if progress.reaches(budget.half_width):
            return "narrow"
        if budget.calls is not None or progress.errors.both < LEAST:  # as it was asked for, or too little is known
            return ""
        return "" if self.review.plan(budget.half_width, identity).calls > progress.answered else "no gain"

    def _answer(self, row: int) -> None:
        """Write the answer on a row, unless it is there."""
        pair = self.review.table.read([row])[0]
        content = self.review.image(row)
        hashed = hashlib.sha256()
        for part in (self.annotator.identity.encode(), pair.caption.encode(), content or b""):
            hashed.update(hashlib.sha256(part).digest())
        question, who = hashed.hexdigest(), self.annotator
        known = self.answers.get(question)
        if known is None:
            small = b"" if content is None else thumbnail(content, SIZE, MOST_IMAGE_BYTES).content
            found = self._ask(small, pair.caption) if small else (AnswerKind.NO_IMAGE, "")
        elif (known.id, known.caption) == (pair.id, pair.caption):
            return
        else:  # another pair has the same image and caption
            found = known.kind, known.text
        if found is not None:
            self.answers.add(Answer(question, who.identity, who.name, pair.id, pair.caption, *found))

    def _ask(self, image: bytes, caption: str) -> tuple[AnswerKind, str] | None:
        """The answer of the annotator; None if no more calls may be made."""
        attempt, busy, kind, text = 0, 0, AnswerKind.FAILED, ""
        budget, identity = self.budget, self.annotator.identity
        while kind is AnswerKind.FAILED and attempt < ATTEMPTS and busy < BUSY_ATTEMPTS:
            if not self._pace.wait():
                return None
            number = self.answers.begin_call(identity, budget.price_per_call, budget.limit, budget.calls)
            if number is None:
                self._out_of_budget = True
                self._pace.stopped.set()
                return None
            try:
                said = self.annotator.ask(image, caption)
            except NoAnswerError as error:
                text = str(error)
                if error.busy:
                    self.answers.cancel_call(number)
                    seconds = PAUSE * 2 ** min(busy, 6) if error.seconds is None else error.seconds
                    if seconds > LONGEST_PAUSE:
                        what = f"it asks for a pause of {seconds:.0f} seconds"
                        raise DataError(what, where=self.annotator.receiver, advice="Go on later") from None
                    self._pace.pause(seconds)
                    busy += 1
                    continue
                attempt = attempt + 1 if error.again else ATTEMPTS
                if attempt < ATTEMPTS and self._pace.stopped.wait(PAUSE * 2 ** (attempt - 1)):
                    return None
            except BaseException:
                self._pace.stopped.set()
                raise
            else:
                kind, text = read_answer(said), plain(clean(beginning(str(said), SHOWN)))
        self._check(kind, text)
        return kind, text if kind in (AnswerKind.UNCLEAR, AnswerKind.FAILED) else ""

    def _check(self, kind: AnswerKind, text: str) -> None:
        """Stop after too many pairs in a row without a clear answer."""
        with self._lock:
            self._in_a_row = 0 if kind in (AnswerKind.MATCHED, AnswerKind.MISMATCHED) else self._in_a_row + 1
            if self._in_a_row >= IN_A_ROW:
                self._pace.stopped.set()
                what = f"{self._in_a_row} pairs in a row have no clear answer; the last one was: {text}"
                advice = "What was answered is kept; try it again when the annotator is in order"
                raise DataError(what, where=self.annotator.receiver, advice=advice)
