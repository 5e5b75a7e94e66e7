"""Measure rates and purities of `mispair calibrate`: `make bench-calibrate ARGS="FOLDER [FOLDER ...]"`.

Half of the pairs of a folder of embeddings, one pair an image, learn a joint space by canonical correlation, as the
training pairs of CLIP do. Of others a share exchanges the partners. Their scores are the cosine in the joint space, a
noisy number that rises with the truth, and an answer from 1 to 5. Each kind of evidence then estimates the noise rate
and finds the cuts for some purities.

Without a folder only the last two scores are made; `ARGS="--seeds 100 --draws 1"` makes 400 independent data sets.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tyro.conf import Positional

import mispair
from common import at_least, check_ratios, run
from mispair.calibrating.calibrate import Calibration
from mispair.errors import ConflictError
from mispair.functional.canonical_correlation import canonical_directions
from mispair.functional.logistic import FloatArray
from mispair.pairs.layouts.opening import open_source

NOISE_RATIOS = (0.1, 0.2, 0.4, 0.6)
PURITIES = (0.9, 0.95, 0.99)
SHUFFLED = 2000  # shuffled pairs that are scored, where the score is not a cosine
NEAREST = 10  # look-alikes
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Found:
    """One calibration beside the truth."""

    score: str
    evidence: str
    noise_ratio: float
    truth: float
    found: Calibration | None
    wrong: Bools

    def purity(self, asked: float) -> tuple[float, float, bool] | None:
        """The share that the cut says it keeps, the true one, and whether the interval holds it; None without a cut."""
        assert self.found is not None
        try:
            cut = self.found.cut(purity=asked)
        except ConflictError:
            return None
        got = float((~self.wrong[self.found.view.order >= cut.least]).mean())
        return cut.purity, got, cut.purity_low <= got <= cut.purity_high


def joint_space(x: FloatArray, y: FloatArray, learn: Any, rest: Any) -> tuple[FloatArray, FloatArray]:
    """Unit vectors of the other pairs in the space that some learned."""
    middle = x[learn].mean(0), y[learn].mean(0)
    directions = canonical_directions(x[learn] - middle[0], y[learn] - middle[1])
    sides = [(side[rest] - mean) @ one for side, mean, one in zip((x, y), middle, directions, strict=True)]
    left, right = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    return left, right


def exchanged(left: FloatArray, noise_ratio: float, rng: np.random.Generator, *, similar: bool) -> Any:
    """(n,) the partner of each pair: its own, or that of a random pair, or of one with a similar left item."""
    n = len(left)
    partner, rows = np.arange(n), rng.permutation(n)[: round(noise_ratio * n)]
    if not similar:
        partner[rows] = np.roll(rows, 1)
        return partner
    alike = left @ left.T
    np.fill_diagonal(alike, -np.inf)
    near = np.argpartition(-alike, NEAREST, axis=1)[:, :NEAREST]
    partner[rows] = near[rows, rng.integers(0, NEAREST, len(rows))]
    return partner


def noisy_scores(wrong: Bools, rng: np.random.Generator) -> dict[str, FloatArray]:
    """A noisy number that rises with the truth, and an answer from 1 to 5."""
    noise = rng.normal(size=(2, len(wrong)))
    return {
        "noisy monotone": 1 / (1 + np.exp(-(2.6 * ~wrong + noise[0]))),
        "1 to 5": np.clip(np.rint(np.where(wrong, 1.4, 4.2) + noise[1]), 1, 5),
    }


def measure(
    folder: Path | None,
    noise_ratio: float,
    seed: int,
    pairs: int,
    checked: int,
    draws: int,
    *,
    audit: bool,
    similar: bool,
) -> Iterator[Found]:
    """Every kind of score by every kind of evidence, on one data set with one noise."""
    rng = np.random.default_rng([seed, round(1000 * noise_ratio), similar])
    if folder is None:
        wrong = rng.permutation(pairs) < round(noise_ratio * pairs)
        yield from calibrated(noise_ratio, wrong, None, None, rng, checked, draws)
        return
    source = open_source(folder)
    x, y = (side.astype(np.float64) for side in source.block(0, len(source)))
    order = rng.permutation(len(x))
    rest = order[len(x) // 2 :][:pairs]
    left, right = joint_space(x, y, order[: len(x) // 2], rest)
    partner = exchanged(left, noise_ratio, rng, similar=similar)
    audited = mispair.audit(x[rest], y[rest][partner], device="cpu") if audit else None
    wrong, sides = partner != np.arange(len(left)), (left, right[partner])
    yield from calibrated(noise_ratio, wrong, sides, audited, rng, checked, draws, noisy=not similar)


def calibrated(
    noise_ratio: float, wrong: Bools, sides: tuple[FloatArray, FloatArray] | None, audited: mispair.Audit | None,
    rng: np.random.Generator, checked: int, draws: int, *, noisy: bool = True,
) -> Iterator[Found]:  # fmt: skip
    """The scores of one data set: the cosine of its sides, if there are any, and noisy ones."""
    for draw in range(draws):
        scores = {} if sides is None else {"cosine": (sides[0] * sides[1]).sum(1)}
        scores |= noisy_scores(wrong, rng) if noisy else {}
        shuffled = noisy_scores(np.ones(SHUFFLED, dtype=bool), rng)
        answers = np.full(len(wrong), np.nan)
        rows = rng.choice(len(wrong), checked, replace=False)
        answers[rows] = ~wrong[rows]
        for name, score in scores.items():
            known: dict[str, Any] = {"shuffled": shuffled.get(name)}
            if sides is not None and name == "cosine":
                known = dict(zip(("left", "right"), sides, strict=True))
            kinds: dict[str, dict[str, Any]] = {
                "(c) checked": {"checked": answers}, "(a) and (c)": {"checked": answers, **known}
            }  # fmt: skip
            if draw == 0 or name != "cosine":  # which would be the same
                kinds |= {"(a) shuffled": known, **({} if audited is None else {"(b) audit": {"audit": audited}})}
            for evidence, given in kinds.items():
                try:
                    found = mispair.calibrate(score, **given)
                except ConflictError:  # few wrong pairs that look right: the answers may contradict the score
                    found = None
                yield Found(name, evidence, noise_ratio, float(wrong.mean()), found, wrong)


def main(
    folders: Positional[tuple[Path, ...]] = (),
    *,
    noise_ratios: tuple[float, ...] = NOISE_RATIOS,
    seeds: int = 3,
    pairs: int = 3000,
    checked: int = 200,
    draws: int = 3,
    audit: bool = True,
) -> None:
    """Print tables of errors, coverage and purities.

    Args:
        folders: Embeddings, one pair an image; none for scores without pairs.
        noise_ratios: Shares of mismatched pairs.
        seeds: Repetitions, with other pairs and noise.
        pairs: Of each calibration.
        checked: Random pairs that are checked.
        draws: Samples of checked pairs for each data set and noise.
        audit: Audit the vectors, too.
    """
    at_least(1, seeds=seeds, pairs=pairs, checked=checked, draws=draws)
    check_ratios(noise_ratios)
    for similar in (False, True) if folders else (False,):
        cases = [
            one
            for folder in folders or (None,)
            for noise_ratio in noise_ratios
            for seed in range(seeds)
            for one in measure(
                folder, noise_ratio, seed, pairs, checked, draws, audit=audit and not similar, similar=similar
            )
        ]
        print(f"\nPartners exchanged {'between look-alikes' if similar else 'at random'}:\n")
        print_rates(cases)
        print_purities(cases)


def grouped(cases: list[Found]) -> dict[tuple[str, str], list[Found]]:
    groups: dict[tuple[str, str], list[Found]] = defaultdict(list)
    for one in cases:
        if one.found is not None:
            groups[one.evidence, one.score].append(one)
    return dict(sorted(groups.items()))


def print_rates(cases: list[Found]) -> None:
    """Mean absolute error of the noise rate, by the noise, and coverage."""
    ratios = sorted({one.noise_ratio for one in cases})
    heads = [f"error at {ratio:.0%}".replace("%", " %") for ratio in ratios]
    print(f"| evidence | score | cases | {' | '.join(heads)} | interval holds | its width | at most holds |")
    print(f"|{'---|' * (len(ratios) + 6)}")
    for (evidence, score), group in grouped(cases).items():
        views = [(one.noise_ratio, one.truth, one.found.view) for one in group if one.found is not None]
        errors = [np.mean([abs(view.rate - truth) for at, truth, view in views if at == ratio]) for ratio in ratios]
        covered = np.mean([view.low <= truth <= view.high for _, truth, view in views])
        width = np.mean([view.high - view.low for _, _, view in views])
        bound = [truth <= view.at_most for _, truth, view in views if view.at_most is not None]
        cells = [*(f"{error:.3f}" for error in errors), f"{covered:.1%}", f"{width:.3f}"]
        cells.append(f"{np.mean(bound):.0%}" if bound else "")
        print(f"| {evidence} | {score} | {len(views)} | {' | '.join(cells)} |".replace("%", " %"), flush=True)
    print(f"\nRefused: {sum(one.found is None for one in cases)} of {len(cases)}.")


def print_purities(cases: list[Found]) -> None:
    """The purity that a cut claims and the true one, for each that was asked."""
    print(f"\n| evidence | score | {' | '.join(f'asked {asked:.2f}: says, got' for asked in PURITIES)} | holds |")
    print(f"|{'---|' * (len(PURITIES) + 3)}")
    for (evidence, score), group in grouped(cases).items():
        cells: list[str] = []
        holds: list[bool] = []
        for asked in PURITIES:
            found = [purity for one in group if (purity := one.purity(asked)) is not None]
            says, got = (np.mean([one[side] for one in found]) if found else 0.0 for side in (0, 1))
            cells.append(f"{says:.3f}, {got:.3f}" if found else "no cut")
            holds += [held for _, _, held in found]
        print(f"| {evidence} | {score} | {' | '.join(cells)} | {np.mean(holds):.0%} |".replace("%", " %"), flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
