"""Join several views of a side: vectors of the same items by several encoders.

Each view has columns of its own, with vectors of unit length. A ridge regression on the other views of an item fills
missing vectors. `view_weights` then learns a weight for each view. It starts with the two views that best separate
pairs from shuffled pairs in held-out folds. It adds a view, or changes a weight, only if that separates them better,
and leaves out views that add nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.scoring.calibration import separation
from mispair.auditing.scoring.common_space import CommonSpaceFitter
from mispair.auditing.scoring.folds import FOLDS, fold_numbers, sample
from mispair.auditing.scoring.joint import share_a_space
from mispair.auditing.scoring.judge import (
    FIRST,
    LEAST_TRUST,
    FitRound,
    Sample,
    SideTransform,
    ViewWeights,
    measured_rounds,
)
from mispair.errors import ConflictError, ShapeError, TooFewError
from mispair.functional.logistic import FloatArray
from mispair.pairs.shards import Matrix, SideRows, ViewRows, unit, views_of
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray

SAMPLE = 4096  # rows to learn scales, regressions and weights from
LEAST = 50  # rows with vectors in both views, to fill the gaps of one by the other
RIDGE = 1.0  # times the mean spread of the filling view
WEIGHTS = (0.5, 1.0, 0.25)  # of a view beside the best ones; each view is tried with the first
BETTER = 1.02  # times the distance between matched and shuffled pairs, to add a view
REGULARISATIONS = (1.0, 3.0, 10.0)
SETS = 5  # of folds: fold f is in set f % SETS
SET_OUT = [tuple(number for number in range(FOLDS) if number % SETS == left_out) for left_out in range(SETS)]

Units = tuple[Matrix, npt.NDArray[np.bool_]]  # vectors of unit length (n, D), and whether each exists (n,)


@dataclass(frozen=True)
class ViewJoin:
    """Join views to one vector an item.

    Attributes:
        means: (D_v,) mean unit vector of each view.
        scales: Factors of the unit vectors, so all views vary equally.
        starts: First column of each view.
        width: Number of columns.
        fills: (D_u, D_v) regression of view v on view u.
    """

    means: tuple[Matrix, ...]
    scales: tuple[float, ...]
    starts: tuple[int, ...]
    width: int
    fills: Mapping[tuple[int, int], FloatArray]

    def __call__(self, parts: Sequence[Matrix]) -> Matrix:
        """Join rows of each view (n, D_v) to (n, W); zero if no view has a vector."""
        found = np.zeros((len(parts[0]), self.width), dtype=np.float32)
        units, there = zip(*map(unit, parts), strict=True)
        for number, (mean, scale, start) in enumerate(zip(self.means, self.scales, self.starts, strict=True)):
            block, gaps = units[number], ~there[number]
            for (other, filled), weights in self.fills.items():
                if filled == number and (here := gaps & there[other]).any():
                    block[here] = mean + ((units[other][here] - self.means[other]).astype(np.float64) @ weights)
                    gaps &= ~here
            block[gaps & np.any(there, axis=0)] = mean
            found[:, start : start + block.shape[1]] = scale * block
        return found

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return everything as named arrays."""
        named: dict[str, npt.NDArray[Any]] = {f"mean.{number}": mean for number, mean in enumerate(self.means)}
        named |= {f"fill.{one}.{other}": fill for (one, other), fill in self.fills.items()}
        return named | {"scales": np.array(self.scales), "starts": np.array(self.starts), "width": np.array(self.width)}

    @classmethod
    def of(cls, state: Mapping[str, npt.NDArray[Any]]) -> ViewJoin:
        """Restore from `state`."""
        starts = state["starts"].tolist()
        split = {name: name.split(".") for name in state if name.startswith("fill.")}
        fills = {(int(one), int(other)): state[name] for name, (_, one, other) in split.items()}
        means = tuple(state[f"mean.{number}"] for number in range(len(starts)))
        return cls(means, tuple(state["scales"].tolist()), tuple(starts), int(state["width"]), fills)

    @property
    def blocks(self) -> list[slice]:
        """The columns of each view."""
        return [slice(start, start + len(mean)) for start, mean in zip(self.starts, self.means, strict=True)]


def joined(source: Source, *, joint: bool = False) -> Source:
    """Join the views of each side; a source with one view a side stays as it is.

    Views with a common space get the same columns on both sides.

    Args:
        source: The pairs.
        joint: Whether the first views of both sides share a space.

    Raises:
        DataError: A view has no vectors, or is given twice.
    """
    sides = views_of(source.left), views_of(source.right)
    if max(map(len, sides)) == 1 or joins_of(source) is not None:
        return source
    rows = sample(np.delete(np.arange(len(source)), source.known_rows), SAMPLE)
    found = [[unit(view.gather(rows)) for view in views] for views in sides]
    for name, views in zip(("left", "right"), found, strict=True):
        _check_views(views, f"{source.name}: {name}")
    groups = rows if source.groups is None else source.groups[rows]
    pairs = _joint_pairs(found, groups, joint=joint or source.joint)
    joins = tuple(
        _join(views, starts, width) for views, (starts, width) in zip(found, _layout(found, pairs), strict=True)
    )
    return with_joins(source, (joins[0], joins[1]), joint=bool(pairs))


def joins_of(source: Source) -> tuple[ViewJoin, ViewJoin] | None:
    """Return the joins of both sides; None if they are not joined."""
    left, right = ([getattr(shard, "join", None) for shard in side.shards] for side in (source.left, source.right))
    return (left[0], right[0]) if isinstance(left[0], ViewJoin) and isinstance(right[0], ViewJoin) else None


def with_joins(source: Source, joins: tuple[ViewJoin, ViewJoin], *, joint: bool = False) -> Source:
    """Join the views by known joins; raise if the views do not fit the joins."""
    sides = []
    for name, side, join in zip(("left", "right"), (source.left, source.right), joins, strict=True):
        widths, expected = [view.width for view in views_of(side)], [len(mean) for mean in join.means]
        if widths != expected:
            what = f"{name} views of the widths {widths}"
            raise ShapeError(what, where=source.name, expected=f"{expected}, as in `fit`")
        sides.append(SideRows.of([ViewRows(views_of(side), join)]))
    return source.with_vectors(sides[0], sides[1], source.known, joint=joint)


def _check_views(views: Sequence[Units], where: str) -> None:
    for number, (_, there) in enumerate(views, 1):
        if not there.any():
            raise TooFewError(f"view {number} has no vector in any row", where=where, advice="Leave it out.")
    for (one, (a, _)), (other, (b, _)) in combinations(enumerate(views, 1), 2):
        if np.array_equal(a, b):
            raise ConflictError(f"views {one} and {other} are the same", where=where, advice="Give each encoder once.")


def _joint_pairs(found: Sequence[Sequence[Units]], groups: IntArray, *, joint: bool) -> list[tuple[int, int]]:
    """Find left and right views with a common space; each view is in one pair at most."""
    pairs: list[tuple[int, int]] = []
    for (i, (x, here)), (j, (y, there)) in product(enumerate(found[0]), enumerate(found[1])):
        if x.shape[1] == y.shape[1] and not any(i == one or j == other for one, other in pairs):
            both = here & there
            a, b, fold = torch.from_numpy(x[both]), torch.from_numpy(y[both]), fold_numbers(groups[both])
            given, enough = joint and i == j == 0, both.sum() >= LEAST
            if given or (enough and share_a_space(a, b, fold, groups[both])):
                pairs.append((i, j))
    return pairs


def _layout(found: Sequence[Sequence[Units]], pairs: Sequence[tuple[int, int]]) -> list[tuple[list[int], int]]:
    """Assign columns: the first column of each view, and the number of columns, of both sides."""
    starts, end = [[-1] * len(views) for views in found], 0
    for pair in pairs:
        for side, number in enumerate(pair):
            starts[side][number] = end
        end += found[0][pair[0]][0].shape[1]
    layout = []
    for views, own in zip(found, starts, strict=True):
        end *= bool(pairs)  # without a common space the columns of the sides are unrelated
        for number, (units, _) in enumerate(views):
            if own[number] < 0:
                own[number], end = end, end + units.shape[1]
        layout.append((own, end))
    return [(own, end if pairs else width) for own, width in layout]  # one width in a common space


def _join(views: Sequence[Units], starts: Sequence[int], width: int) -> ViewJoin:
    means = [units[there].mean(axis=0) for units, there in views]
    spreads = [
        np.sqrt(np.square(units[there] - mean).sum(1).mean()) for (units, there), mean in zip(views, means, strict=True)
    ]
    fills = {}
    for (u, (a, here)), (v, (b, there)) in permutations(enumerate(views), 2):
        both = here & there
        if both.sum() >= LEAST and not there.all():
            x, y = (a[both] - means[u]).astype(np.float64), (b[both] - means[v]).astype(np.float64)
            moments = x.T @ x
            ridge = RIDGE * np.trace(moments) / len(moments) * np.eye(len(moments))
            fills[u, v] = np.linalg.solve(moments + ridge, x.T @ y)
    scales = tuple(float(1 / max(spread, 1e-6)) for spread in spreads)
    return ViewJoin(tuple(means), scales, tuple(starts), width, fills)


def view_weights(
    sides: tuple[Tensor, Tensor],
    joins: tuple[ViewJoin, ViewJoin],
    joint: bool,
    fold: npt.NDArray[np.uint8],
    *items: IntArray,
) -> ViewWeights:
    """Learn the weights of views that separate matched from shuffled pairs best.

    Args:
        sides: (n, D) and (n, E) joined views.
        joins: Their joins.
        joint: Whether some views share a space.
        fold: (n,) fold of each pair.
        items: (n,) shared items, as for `Sample.of`.
    """
    rows = sample(np.arange(len(fold)), SAMPLE)
    own = tuple(numbers[rows] for numbers in items)
    trials = _Trials((sides[0][rows], sides[1][rows]), joins, joint, fold[rows], own)
    lefts, rights = np.split(np.eye(sum(len(join.starts) for join in joins)), [len(joins[0].starts)])
    best = max((trials.tried(one + other) for one, other in product(lefts, rights)), key=lambda tried: tried.worth)
    trust = trials.trust(best.weights)
    best = trials.tried(best.weights, trust)
    while (best.weights == 0).any():
        one, other = ([view for view in side if not best.weights @ view] for side in (lefts, rights))
        # Some views relate only to a view of the other side, so pairs of views are tried, too.
        added = [*one, *other, *(a + b for a, b in product(one, other))]
        new = _best([best.weights + WEIGHTS[0] * views for views in added], best, trials, trust)
        first = new.weights - best.weights
        new = _best([best.weights + first * (weight / WEIGHTS[0]) for weight in WEIGHTS], best, trials, trust)
        if new.gain(best) < BETTER:
            break
        best = new
    return trials.weights(best.weights)


def _best(several: Sequence[FloatArray], than: _Tried, trials: _Trials, trust: FloatArray) -> _Tried:
    """Try several weights and return the best ones."""
    return max((trials.tried(weights, trust) for weights in several), key=lambda tried: tried.gain(than))


@dataclass(frozen=True)
class _Tried:
    """Weights of views, and the scores of pairs and shuffled pairs."""

    weights: FloatArray  # of the left views, then of the right ones
    last: FitRound

    @property
    def worth(self) -> float:
        return separation(self.last.observed, self.last.null)

    def gain(self, other: _Tried) -> float:
        """Divide the distance of matched from shuffled pairs by the distance with other weights."""
        likely = (self.last.trust() + other.last.trust()) / 2
        return self.last.distance(likely) / max(other.last.distance(likely), 1e-12)


@dataclass(frozen=True)
class _Trials:
    """Fit spaces with weighted views, and score the pairs of held-out folds."""

    sides: tuple[Tensor, Tensor]
    joins: tuple[ViewJoin, ViewJoin]
    joint: bool
    fold: npt.NDArray[np.uint8]
    items: tuple[IntArray, ...]

    def weights(self, weights: FloatArray) -> ViewWeights:
        """Spread weights of views over their columns."""
        each = np.split(weights, [len(self.joins[0].starts)])
        left, right = (torch.zeros(side.shape[1]).to(side) for side in self.sides)
        for columns, join, own in zip((left, right), self.joins, each, strict=True):
            for block, weight in zip(join.blocks, own, strict=True):
                columns[block] = float(weight)
        return ViewWeights((left, right), self.joint and bool((left * right).any()))

    def tried(self, weights: FloatArray, trust: FloatArray | None = None) -> _Tried:
        """Try weights with the best regularisation; all pairs are trusted by default."""
        rounds = self._rounds(weights, trust, REGULARISATIONS)
        likely = np.mean([one.trust() for one in rounds], axis=0)
        return _Tried(weights, max(rounds, key=lambda one: one.distance(likely)))

    def trust(self, weights: FloatArray) -> FloatArray:
        """Return the match probability of each pair (n,)."""
        return self._rounds(weights, None, [FIRST])[0].trust()

    def _rounds(
        self, weights: FloatArray, trust: FloatArray | None, regularisations: Sequence[float]
    ) -> list[FitRound]:
        views = self.weights(weights)
        transforms = SideTransform.both(*self.sides, views, joint=views.joint)
        x, y = (transform(side) for transform, side in zip(transforms, self.sides, strict=True))
        pairs = Sample.of(x, y, self.fold, *self.items, joint=views.joint)
        fitter = CommonSpaceFitter(x, y, self.fold, (transforms[0].width, transforms[1].width))
        along = replace(pairs, x=fitter.items[0], y=fitter.items[1])
        trust = pairs.first_trust() if trust is None else trust
        worth = torch.from_numpy(np.maximum(trust, LEAST_TRUST)).to(x)
        fitted = fitter.fit_several(worth, regularisations, SET_OUT)  # half as many fits as without one fold each
        each = [[spaces[number % SETS] for number in range(FOLDS)] for spaces in fitted]
        return measured_rounds(along, each, trust, range(FOLDS))
