"""Cuts of ordered pairs, with the pairs kept and lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mispair.auditing.summary import share_interval
from mispair.errors import ConflictError, InvalidValueError
from mispair.functional.logistic import FloatArray
from mispair.support.arrays import IntArray
from mispair.support.formatting import percent


@dataclass(frozen=True)
class Cut:
    """The pairs from a score up.

    Attributes:
        least: The lowest score that is kept.
        match_score: Probability that a pair with this score matches.
        kept: Number of kept pairs.
        purity: Estimated share of matched pairs among them.
        purity_low: Lower end of its 95 % interval.
        purity_high: Upper end.
        lost: Estimated share of all matched pairs that the cut loses.
    """

    least: float
    match_score: float
    kept: int
    purity: float
    purity_low: float
    purity_high: float
    lost: float


@dataclass(frozen=True)
class Ranked:
    """Ordered pairs with probabilities of a match. A cut keeps all pairs of the same score or none."""

    order: FloatArray  # (n,) higher is better
    match: FloatArray  # (n,) probability of a match; never falls with the order
    rate: float  # noise rate
    low: float  # ends of its 95 % interval
    high: float
    # 95 % interval of the share of wrong pairs among some rows; by default that of the rate gives it
    interval: Callable[[IntArray], tuple[float, float]] | None = field(default=None, kw_only=True)

    @property
    def rates(self) -> tuple[float, float, float]:
        """The noise rate, and both ends of its interval."""
        return self.rate, self.low, self.high

    @cached_property
    def _best_first(self) -> IntArray:
        return np.argsort(-self.order, kind="stable")

    @cached_property
    def _ends(self) -> IntArray:
        """Number of kept pairs of each possible cut, ascending."""
        ordered = self.order[self._best_first]
        return np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))

    @cached_property
    def _matched(self) -> FloatArray:
        """(n,) expected number of matched pairs among the first ones."""
        return np.cumsum(self.match[self._best_first])

    @property
    def purities(self) -> tuple[IntArray, FloatArray]:
        """Number of pairs kept by each possible cut, and the share of matched ones."""
        return self._ends, self._matched[self._ends - 1] / self._ends

    def cut(
        self,
        *,
        purity: float | None = None,
        keep: int | None = None,
        probability: float | None = None,
        least: float | None = None,
    ) -> Cut:
        """The cut with the most pairs, by exactly one wish.

        Args:
            purity: A share of the kept pairs matches.
            keep: Highest number of kept pairs.
            probability: Each kept pair matches with this probability or more.
            least: Each kept pair has this score or more.
        """
        wishes = {"purity": purity, "keep": keep, "probability": probability, "least": least}
        if len(given := [f"`{name}`" for name, value in wishes.items() if value is not None]) != 1:
            raise ConflictError(" and ".join(given) or "no cut", expected=f"one of {', '.join(wishes)}")
        kept, purities = self.purities
        advice = "Ask for less."
        if purity is not None:
            if not 0 < purity <= 1:
                raise InvalidValueError(str(purity), where="purity", expected="a share of matched pairs such as 0.95")
            enough, best = purities >= purity - 1e-12, f"the purest cut has {percent(float(purities.max()))}"
        elif keep is not None:
            if keep < 1:
                raise InvalidValueError(str(keep), where="keep", expected="a number of pairs such as 1000000")
            enough, best = kept <= keep, f"{kept[0]:,} pairs have the highest score"
            advice = f"Keep at least {kept[0]:,}."
        else:
            values, lowest = (self.order, least) if least is not None else (self.match, probability or 0.0)
            enough = values[self._best_first][kept - 1] >= lowest
            best = f"the best pair has {values.max():.4g}"
        if not enough.any():
            raise ConflictError(f"no pair is kept: {best}", where=given[0].strip("`"), advice=advice)
        return self._at(int(kept[np.flatnonzero(enough)[-1]]))

    def _at(self, kept: int) -> Cut:
        rows = self._best_first[:kept]
        wrong, low, high = share_interval(1 - self.match[rows], self.rates, len(self.match))
        if self.interval is not None:
            low, high = self.interval(rows)
            low, high = min(low, wrong), max(high, wrong)
        last, all_matched = rows[-1], max(float(self._matched[-1]), 1e-12)
        return Cut(
            least=float(self.order[last]),
            match_score=float(self.match[last]),
            kept=kept,
            purity=1 - wrong,
            purity_low=1 - high,
            purity_high=1 - low,
            lost=float(max(0.0, 1 - self._matched[kept - 1] / all_matched)),
        )


def at_rate(match: FloatArray, rate: float, rounds: int = 200) -> FloatArray:
    """Convert probabilities (n,) from the noise rate `rate` to another noise rate, such as the rate of one source.

    The odds of each pair are multiplied by the same factor until their mean agrees with it (Saerens et al., 2002).
    """
    base = min(max(1 - rate, 1e-6), 1 - 1e-6)
    share, found = base, match
    for _ in range(rounds):
        up, down = match * share / base, (1 - match) * (1 - share) / (1 - base)
        found = up / np.maximum(up + down, 1e-300)
        before, share = share, min(max(float(found.mean()), 1e-6), 1 - 1e-6)
        if abs(share - before) < 1e-9:
            break
    return found
