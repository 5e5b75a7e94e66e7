"""The judge of an audit: learned from a sample of the pairs, applied to every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring import calibration, measures
from mispair.auditing.scoring.calibration import Combination, separation
from mispair.auditing.scoring.common_space import CommonSpace, CommonSpaceFitter, moments
from mispair.auditing.scoring.folds import (
    FOLDS,
    NEAR,
    ORDER,
    in_random_order,
    random_keys,
    shuffled,
    strangers,
)
from mispair.auditing.scoring.joint import Expectation, normalised_cosines, share_a_space
from mispair.auditing.scoring.measures import BANK, Bank, largest, make_bank, measure
from mispair.auditing.scoring.recalibration import LEAST
from mispair.auditing.scoring.refinement import refined
from mispair.compute.threads import parallel_each, parallel_map
from mispair.errors import DataError
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import NetworkScore
from mispair.support.arrays import IntArray
from mispair.support.progress import stage_part
from mispair.support.tensor_files import flattened, part_of

REGULARISATIONS = (0.3, 1.0, 3.0, 10.0, 30.0)
FIRST = 1.0  # regularisation of the first round, ...
FEW_PAIRS, FIRST_OF_FEW = 2000, 10.0  # ... and with fewer pairs than these
WIDEST = 1024  # vectors that are wider are first cut to their main directions
HUGE = 1e15  # numbers whose squares may be too large for float32
ROUNDING = 1e-9  # a spread below this share of the largest one is rounding error
LONGEST = 10  # times the median length; longer vectors do not count for the mean
ENOUGH = 1000  # pairs that show which regularisation separates best
AT_ONCE, GPU_TIMES = 2048, 4  # pairs measured at a time; so many times more on a GPU
LEAST_TRUST = 1e-3
LEAST_WEIGHT = 1e-3  # of a score that observed pairs have no more of than shuffled ones
LEAST_GROUPS = 20  # below, hardly any shuffled pair has two of them in the same fold
CLOSE_BY = 10  # nearest neighbours whose partner is tried
PAIRS = 3 * AT_ONCE // 2  # of known items measured at a time, and GPU_TIMES more on a GPU
LOOK_ALIKES = 1 << 13  # pairs with the partner of a near neighbour, at most
ARRAYS = "separations", "observed", "null", "similar", "rows", "measured"  # of a judge


@dataclass(frozen=True)
class SideTransform:
    """Preprocessing of one side: centred, reduced to the main directions, of unit length."""

    mean: Tensor  # (D,)
    directions: Tensor | None = None  # (D, WIDEST), None if they are not wider
    columns: Tensor | None = None  # (k,) that are used, None for all, ...
    weights: Tensor | None = None  # (k,) and what they are multiplied by

    def __call__(self, vectors: Tensor) -> Tensor:
        centred = self.weighted(vectors - self.mean)
        huge = torch.nonzero(~(torch.linalg.vector_norm(centred, dim=1) <= HUGE))[:, 0]
        centred[huge] /= centred[huge].abs().amax(dim=1, keepdim=True)
        return normalize(centred if self.directions is None else centred @ self.directions, dim=1)

    def weighted(self, vectors: Tensor) -> Tensor:
        """The used columns, by their weights."""
        if self.columns is None or self.weights is None:
            return vectors
        return vectors[:, self.columns] * self.weights

    @property
    def width(self) -> int:
        """Possible directions of items."""
        return min(WIDEST, len(self.mean) if self.weights is None else int(self.weights.count_nonzero()))

    @classmethod
    def both(
        cls, left: Tensor, right: Tensor, weights: ViewWeights | None = None, *, joint: bool
    ) -> list[SideTransform]:
        """Fit both sides; in a common space they keep the same directions, and so their cosine."""
        usual = inliers(left), inliers(right)
        found = [cls(mean_of(side)) for side in usual]
        if weights is not None:
            used = [side != 0 for side in weights.sides]
            found = [
                replace(one, columns=columns, weights=side[columns])
                for one, side, own in zip(found, weights.sides, used, strict=True)
                for columns in [torch.nonzero(used[0] | used[1] if joint else own)[:, 0]]
            ]
        centred = [one.weighted(side - one.mean) for one, side in zip(found, usual, strict=True)]
        if joint:
            directions = _main_directions(centred)
            each = [directions, None if directions is None else directions.clone()]  # safetensors takes none twice
        else:
            each = [_main_directions([side]) for side in centred]
        return [replace(one, directions=directions) for one, directions in zip(found, each, strict=True)]


@dataclass(frozen=True)
class ViewWeights:
    """Weights of the views of both sides, see `views`."""

    # weights of the columns of the left and of the right side, (D,) and (E,); 0 for views that are left out
    sides: tuple[Tensor, Tensor]
    joint: bool  # whether views that share a space are among them, on both sides


def inliers(vectors: Tensor) -> Tensor:
    """Drop vectors far longer than most: a single broken one must not move the mean."""
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    return vectors[lengths <= LONGEST * lengths.median()]


def mean_of(vectors: Tensor) -> Tensor:
    exact = vectors.cpu() if vectors.device.type == "mps" else vectors  # which has no double precision
    return exact.double().mean(0).to(vectors)


def _main_directions(sides: list[Tensor]) -> Tensor | None:
    """Principal directions of centred vectors (n, D), (D, k); None if D is not above `WIDEST`.

    Fewer vectors than `WIDEST` have only as many directions as vectors.
    """
    if sides[0].shape[1] <= WIDEST:
        return None
    together = torch.cat(sides)
    if len(together) > WIDEST:
        both = torch.stack([moments(side) for side in sides]).sum(0)
        directions: Tensor = eigh(both)[1][:, -WIDEST:].flip(1)
    else:
        vectors = together.cpu().double()
        values, own = eigh(vectors @ vectors.T)
        there = values > ROUNDING * values[-1]
        directions = (vectors.T @ own[:, there] / values[there].sqrt()).flip(1)
    # Row-major, as they are after saving and loading: the memory order decides the order of summation.
    return directions.contiguous().to(sides[0])


@dataclass(frozen=True)
class Judge:
    """Measure and score pairs, in each fold by a space and a bank made without it."""

    transforms: list[SideTransform]  # of the left and of the right side
    spaces: list[CommonSpace]
    banks: list[Bank]
    combination: Combination
    expectation: Expectation | None  # in the space that both sides share; None where they do not
    networks: bool  # whether the scores of a run's networks are one of the measures
    separations: FloatArray  # (m,) AUROC of observed against shuffled pairs by each measure
    observed: FloatArray  # weighted sums of the measures of the sample
    null: FloatArray  # the same of shuffled pairs
    similar: FloatArray  # the same of trusted pairs with the partner of one of the nearest of a tenth of the pairs
    rows: IntArray  # (n,) rows of the sample, ascending; none where they are not known
    measured: npt.NDArray[np.float32]  # (n, m) their measures

    @property
    def joint(self) -> bool:
        """Whether both sides share a space."""
        return self.expectation is not None

    @property
    def names(self) -> list[str]:
        return measures.names(joint=self.joint, networks=self.networks)

    def measure(
        self, left: Tensor, right: Tensor, fold: npt.NDArray[np.uint8], networks: npt.NDArray[np.floating] | None = None
    ) -> npt.NDArray[np.float32]:
        """(n, m) measures of pairs of raw vectors; `networks` (n,) are the scores of a run's networks."""
        x, y = (transform(side) for transform, side in zip(self.transforms, (left, right), strict=True))
        rows = np.arange(len(left))
        found = measure_by_fold(
            self.spaces, self.banks, x, y, rows, rows, fold, joint=self.joint, size=AT_ONCE, workers=1
        )
        raw = self.transforms[0].weighted(left), self.transforms[1].weighted(right)
        return _complete(found, self.expectation, raw, rows, rows, fold, networks)

    def known(self, rows: IntArray) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Places of the rows already measured while learning, (k,), and their measures (k, m)."""
        at = np.searchsorted(self.rows, rows)
        places = np.flatnonzero(at < len(self.rows))
        places = places[self.rows[at[places]] == rows[places]]
        return places, self.measured[at[places]]

    def state(self) -> dict[str, Tensor]:
        """Everything, as named tensors."""
        parts = {
            "": {name: getattr(self, name) for name in ("networks", *ARRAYS)},
            "combination.": vars(self.combination),
        }
        if self.expectation is not None:
            parts["expectation."] = vars(self.expectation)
        for kind in LISTS:
            parts |= {f"{kind}.{number}.": vars(part) for number, part in enumerate(getattr(self, kind))}
        return flattened(parts)

    @classmethod
    def of(cls, state: dict[str, Tensor], device: torch.device) -> Judge:
        """Back from `state`."""

        def tensors(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t.to(device) for n, t in state.items() if n.startswith(prefix)}

        lists = {
            kind: [of(**tensors(f"{kind}.{number}.")) for number in range(count)] for kind, (of, count) in LISTS.items()
        }
        expected = tensors("expectation.")
        others: dict[str, Any] = lists | {name: state[name].numpy() for name in ARRAYS}
        return cls(
            **others,
            combination=Combination(**part_of(state, "combination.")),
            expectation=Expectation(**expected) if expected else None,
            networks=bool(state["networks"]),
        )


LISTS: dict[str, tuple[type, int]] = {
    "transforms": (SideTransform, 2),
    "spaces": (CommonSpace, FOLDS),
    "banks": (Bank, FOLDS),
}


def learn(
    left: Tensor,
    right: Tensor,
    fold: npt.NDArray[np.uint8],
    groups: IntArray,
    *,
    items: Sequence[IntArray] = (),
    joint: bool = False,
    views: ViewWeights | None = None,
    checked: FloatArray | None = None,
    network_score: NetworkScore | None = None,
    numbers: IntArray | None = None,
) -> Judge:
    """Learn from n pairs without labels.

    Args:
        left: (n, D) raw vectors.
        right: (n, E) the same.
        fold: (n,) fold of each pair.
        groups: (n,) pairs of one group share an item, directly or through others.
        items: (n,) left and right item of each pair; two pairs with a common item give no mismatched pair.
        joint: Whether both sides come from encoders with a common space; if they seem to, they are taken for such.
        views: Weights of the joined views; None if each side has one view.
        checked: (n,) 1 for pairs that a person has found matched, 0 for mismatched, NaN for all others.
        network_score: Scores any left and right items of these pairs by the networks of a run.
        numbers: (n,) rows of the pairs, ascending: `Judge.known` gives the measures of these.

    Raises:
        DataError: There are too few groups.
    """
    joint = (joint or share_a_space(left, right, fold, groups, *items)) if views is None else views.joint
    transforms = SideTransform.both(left, right, views, joint=joint)
    first = joint and network_score is None  # the networks of a run may have memorised mismatched pairs
    own = np.arange(len(left)) if numbers is None else numbers
    sample = Sample.of(transforms[0](left), transforms[1](right), fold, groups, *items, numbers=own, joint=first)
    sample = replace(sample, checked=checked)
    fitter = CommonSpaceFitter(sample.x, sample.y, sample.fold, (transforms[0].width, transforms[1].width))
    rows = np.arange(len(left))
    both = np.concatenate([rows, sample.shuffled]), np.concatenate([rows, sample.partner])
    weak, weak_null = np.split(fitter.regression(*both, FIRST), [len(rows)])
    last = _fit_rounds(sample, fitter)
    trust = last.trust()
    with stage_part(0.8):
        spaces = refined(last.spaces, sample.x, sample.y, sample.fold, trust, own)
    chosen = [_bank_rows(number, sample, trust) for number in range(FOLDS)]
    banks = [make_bank(space, sample.x[rows], sample.y[rows]) for space, rows in zip(spaces, chosen, strict=True)]
    swapped_lefts, swapped_rights, alike = look_alikes(sample, groups, *items)
    lefts = np.concatenate([rows, sample.shuffled, swapped_lefts])
    rights = np.concatenate([rows, sample.partner, swapped_rights])
    measured = measure_by_fold(spaces, banks, sample.x, sample.y, lefts, rights, fold[lefts], joint=joint, size=PAIRS)
    raw = transforms[0].weighted(left), transforms[1].weighted(right)
    expectation = Expectation.of(*raw, fold, trust) if joint else None
    scores = None if network_score is None else network_score(lefts, rights)
    columns = _complete(measured, expectation, raw, lefts, rights, fold[lefts], scores)
    observed, null, swapped = np.split(columns, [len(rows), len(rows) + len(sample.shuffled)])
    names = measures.names(joint=joint, networks=network_score is not None)
    # Where there are enough decisions, these recalibrate the scores, which must not have learned from them before.
    few = checked is not None and np.isfinite(checked).sum() < LEAST
    combination = calibration.combine(
        observed, null, swapped, alike, trust, checked if few else None, (weak, weak_null),
        np.isin(names, measures.NATURAL),
    )  # fmt: skip
    trusted = trust >= MATCH_THRESHOLD
    known = rows[:0] if numbers is None else numbers
    return Judge(
        transforms=transforms,
        spaces=spaces,
        banks=banks,
        combination=combination,
        expectation=expectation,
        networks=network_score is not None,
        separations=np.array([separation(a, b) for a, b in zip(observed.T, null.T, strict=True)]),
        observed=combination.sums(observed),
        null=combination.sums(null),
        similar=combination.sums(swapped[trusted[swapped_lefts] & trusted[swapped_rights]]),
        rows=known,
        measured=observed[: len(known)].copy(),
    )


@dataclass(frozen=True)
class Sample:
    """Preprocessed pairs to learn from, and shuffled pairs of their items."""

    x: Tensor  # (n, D) left items
    y: Tensor  # (n, E) right items
    fold: npt.NDArray[np.uint8]  # (n,)
    numbers: IntArray  # (n,) their rows: random choices depend on these, not on places among the others
    shuffled: IntArray  # (w,) rows whose left items have ...
    partner: IntArray  # (w,) ... the right items of these rows in a shuffled pair
    cosines: tuple[FloatArray, FloatArray] | None  # (n,) of pairs and (w,) of shuffled ones, in a space of both sides
    checked: FloatArray | None = None  # (n,) decisions of people, NaN without one

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        fold: npt.NDArray[np.uint8],
        groups: IntArray,
        *items: IntArray,
        numbers: IntArray | None = None,
        joint: bool = False,
    ) -> Sample:
        numbers = np.arange(len(x)) if numbers is None else numbers
        partner = shuffled(fold, groups, *items, numbers=numbers)
        rows, different = np.flatnonzero(partner >= 0), len(np.unique(groups))
        if min(different, len(rows)) < LEAST_GROUPS:
            raise DataError(
                f"The {len(x):,} pairs are of {different:,} groups; expected at least {LEAST_GROUPS} of about one "
                "size, as mismatched pairs are simulated with items of different groups. Pairs of one group "
                "share an item. Make the groups smaller, or give no groups."
            )
        cosines = normalised_cosines(x, y, rows, partner[rows], numbers) if joint else None
        return cls(x, y, fold, numbers, rows, partner[rows], cosines)

    def first_trust(self) -> FloatArray:
        """(n,) match probability of each pair, before anything is learned."""
        return np.ones(len(self.x)) if self.cosines is None else calibration.trust(*self.cosines)

    def informed(self, trust: FloatArray) -> FloatArray:
        """Put decisions of people in the place of probabilities (n,)."""
        return trust if self.checked is None else np.where(np.isnan(self.checked), trust, self.checked)

    def weight(self, trust: FloatArray) -> Tensor:
        """(n,) how much each pair counts in a fit."""
        return torch.from_numpy(np.maximum(self.informed(trust), LEAST_TRUST)).to(self.x)


def _fit_rounds(sample: Sample, fitter: CommonSpaceFitter) -> FitRound:
    """Fit a first round, and two more with the best regularisation."""
    few = len(sample.x) < FEW_PAIRS
    along = replace(sample, x=fitter.items[0], y=fitter.items[1])  # narrower, where pairs are few
    found = _fit_round(along, fitter, sample.first_trust(), FIRST_OF_FEW if few else FIRST)
    regularisation = _regularisation(along, fitter, found.trust())
    for _ in range(2):
        found = _fit_round(along, fitter, found.trust(), regularisation)
    return replace(found, spaces=[fitter.turned_back(space) for space in found.spaces])


def _fit_round(sample: Sample, fitter: CommonSpaceFitter, trust: FloatArray, regularisation: float) -> FitRound:
    """Fit the spaces to the pairs trusted so far, and score all pairs by them."""
    fitted = fitter.fit_several(sample.weight(trust), [regularisation])
    return measured_rounds(sample, fitted, sample.informed(trust), range(FOLDS))[0]


def _regularisation(sample: Sample, fitter: CommonSpaceFitter, trust: FloatArray) -> float:
    """The regularisation with the largest distance of matched pairs from shuffled ones, in few folds.

    The distance is smooth in the regularisation, so the maximum may lie between the tried values.
    """
    folds = range(min(FOLDS, math.ceil(ENOUGH * FOLDS / len(sample.x))))
    fitted = fitter.fit_several(sample.weight(trust), REGULARISATIONS, [(number,) for number in folds])
    rounds = measured_rounds(sample, fitted, sample.informed(trust), folds)
    likely = np.mean([one.trust() for one in rounds], axis=0)
    return math.exp(highest(np.log(REGULARISATIONS), np.array([one.distance(likely) for one in rounds])))


def highest(places: FloatArray, values: FloatArray) -> float:
    """Place of the maximum: the vertex of the parabola through the highest value and its neighbours."""
    best = int(values.argmax())
    if best in (0, len(values) - 1):
        return float(places[best])
    near = slice(best - 1, best + 2)
    curve, slope, _ = np.polyfit(places[near] - places[best], values[near], 2)
    return float(places[best] - slope / (2 * curve)) if curve < 0 else float(places[best])


def measured_rounds(
    sample: Sample, several: list[list[CommonSpace]], trust: FloatArray, folds: range
) -> list[FitRound]:
    """Score the pairs of the first folds, and their shuffled ones, by spaces fitted without each fold.

    `several` has the spaces of each of the folds by several fits, `trust` (n,) the probability that each pair matches.
    """
    rows, wrong = (np.flatnonzero(fold < len(folds)) for fold in (sample.fold, sample.fold[sample.shuffled]))
    lefts = np.concatenate([rows, sample.shuffled[wrong]])
    rights = np.concatenate([rows, sample.partner[wrong]])
    chosen = [_bank_rows(number, sample, trust) for number in folds]
    cosines = sample.cosines
    others = None if cosines is None else (cosines[0][rows], cosines[1][wrong])
    rounds = []
    for spaces in several:
        banks = [make_bank(space, sample.x[bank], sample.y[bank]) for space, bank in zip(spaces, chosen, strict=True)]
        measured = measure_by_fold(
            spaces, banks, sample.x, sample.y, lefts, rights, sample.fold[lefts], joint=False, size=PAIRS
        )
        observed, null = np.split(measured, [len(rows)])
        # Contrast and evidence added up, in units of their spread over shuffled pairs.
        spread = null.std(0) + 1e-9
        guess = ((part / spread).sum(1).astype(np.float64) for part in (observed, null))
        rounds.append(FitRound(spaces, *guess).beside(others))
    return rounds


def measure_by_fold(
    spaces: list[CommonSpace],
    banks: list[Bank],
    x: Tensor,
    y: Tensor,
    lefts: IntArray,
    rights: IntArray,
    fold: npt.NDArray[np.uint8],
    *,
    joint: bool,
    size: int,
    workers: int | None = None,
) -> npt.NDArray[np.float32]:
    """(n, m) measures of pairs of preprocessed items, each by the space and the bank of its fold.

    Pair i has the left item `lefts[i]` of (u, D) and the right item `rights[i]` of (v, E). `size` pairs are measured at
    a time.
    """
    size *= GPU_TIMES if x.device.type == "cuda" else 1
    each = [np.flatnonzero(fold == number) for number in range(FOLDS)]
    parts = [part for pairs in each for part in cut(pairs[lefts[pairs].argsort(kind="stable")], size)]

    def measured(part: IntArray) -> Tensor:
        number = fold[part[0]]
        own, a = np.unique(lefts[part], return_inverse=True)
        others, b = np.unique(rights[part], return_inverse=True)
        which = (torch.from_numpy(places).to(x.device) for places in (a, b))
        return measure(spaces[number], banks[number], x[own], y[others], *which, joint=joint)

    found = torch.cat(list(parallel_map(measured, parts, workers))).cpu().numpy()
    return np.asarray(found[np.concatenate(parts).argsort()], dtype=np.float32)


def _complete(
    measured: npt.NDArray[np.float32],
    expectation: Expectation | None,
    raw: tuple[Tensor, Tensor],
    lefts: IntArray,
    rights: IntArray,
    fold: npt.NDArray[np.uint8],
    networks: npt.NDArray[np.floating] | None,
) -> npt.NDArray[np.float32]:
    """Add the measures by expected partners and the scores (n,) of networks to others (n, m)."""
    columns = [measured]
    if expectation is not None:
        a, b = (torch.from_numpy(side).to(raw[0].device) for side in (lefts, rights))
        columns.append(expectation.measure(*raw, a, b, fold))
    if networks is not None:
        columns.append(networks.astype(np.float32)[:, None])
    return np.concatenate(columns, axis=1)


@dataclass(frozen=True)
class FitRound:
    """One round of learning: spaces, and a simple score of observed and of shuffled pairs."""

    spaces: list[CommonSpace]
    observed: FloatArray
    null: FloatArray

    def distance(self, likely: FloatArray) -> float:
        """Distance of the means of matched and of shuffled pairs, in standard deviations; `likely` (n,) are weights."""
        total = max(float(likely.sum()), 1e-12)
        mean = float(likely @ self.observed) / total
        spread = float(likely @ np.square(self.observed - mean)) / total
        return (mean - float(self.null.mean())) / math.sqrt(spread + float(self.null.var()) + 1e-12)

    def trust(self) -> FloatArray:
        """Match probability of each observed pair."""
        return calibration.trust(self.observed, self.null)

    def beside(self, others: tuple[FloatArray, FloatArray] | None) -> FitRound:
        """Add other scores of observed and shuffled pairs.

        Each score is weighted by its mean over observed pairs, in standard deviations over shuffled pairs.
        """
        if others is None:
            return self
        observed, null = np.zeros_like(self.observed), np.zeros_like(self.null)
        for own, strange in ((self.observed, self.null), others):
            centre, spread = strange.mean(), strange.std() + 1e-9
            weight = max(float((own.mean() - centre) / spread), LEAST_WEIGHT)
            observed += weight * (own - centre) / spread
            null += weight * (strange - centre) / spread
        return replace(self, observed=observed, null=null)


def look_alikes(sample: Sample, *groups: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Pairs with the partner of a near neighbour, (k,) rows of their left and right items, and how right they are.

    Every second row keeps its left item and gets the partner of another one of its fold with a similar left item. The
    new pair is as right as that partner is like its own one: their cosine, or 0 if that is negative. The others keep
    their right item. With many rows, a sample is enough.
    """
    step = math.ceil(len(sample.x) / LOOK_ALIKES)
    turn = random_keys(sample.numbers, ORDER) % np.uint64(2 * step)
    found = []
    for side, (kept, other) in enumerate(((sample.x, sample.y), (sample.y, sample.x))):
        near = neighbours_partners(kept, sample.fold, sample.numbers, turn == side * step, *groups)
        own = np.flatnonzero(near >= 0)
        alike = (other[own] * other[near[own]]).sum(1).clamp(min=0).double().cpu().numpy()
        found.append((own, near[own], alike) if side == 0 else (near[own], own, alike))
    lefts, rights, alike = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return lefts, rights, alike


def neighbours_partners(
    x: Tensor, fold: npt.NDArray[np.uint8], numbers: IntArray, wanted: npt.NDArray[np.bool_], *groups: IntArray
) -> IntArray:
    """For each wanted pair another one of its fold, with one of the `CLOSE_BY` nearest items (n, D).

    -1 for pairs that are not wanted, and where that one is of one of the pair's groups.
    """
    partner = np.full(len(fold), -1)

    def search(number: int) -> None:
        places = np.flatnonzero(fold == number)
        if len(places) < 2:
            return
        others = x[places].T
        for part in cut(np.flatnonzero(wanted[places]), AT_ONCE):
            rows = places[part]
            near = x[rows] @ others
            near[torch.arange(len(rows)), torch.from_numpy(part)] = -torch.inf
            nearest = largest(near, min(CLOSE_BY, len(places) - 1))[1].cpu().numpy()
            pick = (random_keys(numbers[rows], NEAR) % np.uint64(nearest.shape[1])).astype(np.int64)
            partner[rows] = places[nearest[np.arange(len(rows)), pick]]

    parallel_each(search, range(FOLDS))
    return strangers(partner, *groups)


def _bank_rows(number: int, sample: Sample, trust: FloatArray) -> IntArray:
    """Likely matches of the other folds, chosen at random: the bank must be diverse."""
    others = np.flatnonzero((sample.fold != number) & (trust >= MATCH_THRESHOLD))
    if len(others) < measures.FEW:
        others = np.flatnonzero(sample.fold != number)
    return in_random_order(others, sample.numbers)[:BANK]


def cut(places: IntArray, size: int) -> list[IntArray]:
    return [places[start : start + size] for start in range(0, len(places), size)]
