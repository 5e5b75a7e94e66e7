"""`mispair.Auditor`: learns from pairs, and scores any pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.inputs import open_pairs_given
from mispair.auditing.match_scores import learn_recalibration, new_match_scores
from mispair.auditing.scoring.folds import FOLDS, fold_numbers, sample
from mispair.auditing.scoring.judge import Judge, cut, learn
from mispair.auditing.scoring.near_duplicates import fingerprints
from mispair.auditing.scoring.recalibration import Recalibration
from mispair.auditing.scoring.scan import READABLE, faults
from mispair.auditing.scoring.shared_items import SharedItems, find_shared_items
from mispair.auditing.scoring.views import ViewJoin, joined, joins_of, view_weights, with_joins
from mispair.auditing.summary import Checked
from mispair.compute.devices import pick_device
from mispair.compute.threads import parallel_map
from mispair.errors import ConflictError, DamagedError, DataError, InvalidValueError, ShapeError, TooFewError
from mispair.functional.logistic import FloatArray, probability
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.pairs import Pairs
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.cores import cores
from mispair.support.formatting import percent, plain
from mispair.support.html import html_table
from mispair.support.tensor_files import flattened, load_tensors, part_of, save_tensors

SAMPLE = 1 << 15  # pairs that an audit learns from
LEAST = 50  # pairs, below which there is nothing to learn from
GPU_WORKERS = 8  # enough to read while others compute
READ, SCORED = 8192, 256  # rows that are read at a time, and that are scored at a time: always exactly so many
FORMAT = 4  # of saved auditors

Scores = npt.NDArray[np.float32]


class Auditor:
    """Learn what matching pairs have in common, and score pairs by it.

    >>> common = np.random.default_rng(0).standard_normal((200, 8))
    >>> left, right = common @ np.ones((8, 12)) + common @ np.eye(8, 12), common @ np.eye(8, 10)
    >>> auditor = Auditor(device="cpu").fit(left[:150], right[:150])
    >>> matched, mismatched = auditor.score(left[150:], right[150:]), auditor.score(left[150:], right[100:150])
    >>> bool(matched.mean() > mismatched.mean())
    True

    Args:
        joint: Both sides come from encoders with a common space, such as CLIP. `fit` notices it where it shows.
        device: auto, cpu, cuda, cuda:1, mps.
        workers: Threads; as many as there are cores by default.

    Attributes:
        noise_rate_: Estimated fraction of mismatched pairs among those that it was fitted to.
        noise_interval_: The 95 % interval of this fraction.
        joint_: Whether the cosine of both sides is one of the measures.
        measures_: Weight of each measure in the score; they sum to 1.
    """

    def __init__(self, *, joint: bool = False, device: str = "auto", workers: int | None = None) -> None:
        self.joint, self.device, self.workers = joint, device, workers
        self._judge: Judge | None = None
        self.factors = (1.0, 1.0)  # that vectors of unusual lengths are multiplied by
        self.joins: tuple[ViewJoin, ViewJoin] | None = None
        self._seen: Seen
        self.recalibration: Recalibration | None = None  # by decisions of people, where there are enough
        self.checked: Checked | None = None  # what they say beside the scores without it

    def fit(
        self, left: Any, right: Any = None, *, groups: Any = None, checked: Mapping[str, bool] | None = None
    ) -> Self:
        """Learn from pairs; some may be mismatched.

        Args:
            left: Vectors (N, D): a numpy array, a torch tensor, a list, or a table; or `Pairs`. A list of these has the
                vectors of several encoders.
            right: Vectors (N, E) of their partners, likewise; None for `Pairs`.
            groups: One value a pair; pairs with the same value share their left item.
            checked: Row numbers of pairs that a person has checked, and whether they match. From 30 on, `score` follows
                what people call a match.

        Raises:
            DataError: The pairs cannot be used, or there are too few.
        """
        source = _opened(left, right, groups)
        check_count(source)
        source = joined(source, joint=self.joint).scaled()
        device = pick_device(self.device)
        items = find_shared_items(source, workers=workers_of(self.workers, device), device=device)
        answers = checked_rows(source, checked)
        self.fit_source(source, items, answers)
        rows = np.array(sorted(answers), dtype=np.int64)
        places, measures = self.judge.known(rows)
        matched = np.array([answers[row] for row in rows[places].tolist()])
        log_odds, others = self.judge.combination.score(measures), self.judge.combination.log_odds(self.judge.observed)
        self.recalibration = learn_recalibration(source, self.judge, rows[places], matched, log_odds, others, device)
        self.checked = Checked.of(matched, probability(log_odds), learned=self.recalibration is not None)
        return self

    def fit_source(self, source: Source, items: SharedItems, checked: Mapping[int, float]) -> Self:
        """Learn from a scaled source and its checked rows: 1 matched, 0 mismatched."""
        self._judge, self._seen = _learned(source, items, checked, self.joint, pick_device(self.device))
        self.factors, self.joins = (source.left.factor, source.right.factor), joins_of(source)
        self.recalibration = self.checked = None
        return self

    def score(self, left: Any, right: Any = None) -> Scores:
        """Return the match scores (n,) of pairs: the probability that each matches. NaN where a vector is unreadable.

        The score of a pair depends on this pair alone. Pairs that the auditor was fitted to are scored by the folds
        that have not seen them. It may be fitted to matched pairs only. Memory is bounded: arrays may be memory maps.

        Args:
            left: Vectors (n, D), or `Pairs`.
            right: Vectors (n, E) of their partners.

        Raises:
            ShapeError: The vectors do not have the widths that the auditor was fitted to.
        """
        return self.measured(left, right)[0]

    def measured(self, left: Any, right: Any = None) -> tuple[Scores, Scores]:
        """Return the match scores (n,) as `score` does, and the measures (n, m) behind them."""
        judge, source = self.judge, _opened(left, right, None)
        if judge.networks:
            raise ConflictError("the audit of a training run scores pairs by its networks", advice="Use Matcher.score.")
        if self.joins is not None:
            source = with_joins(source, self.joins)
        fitted = len(judge.transforms[0].mean), len(judge.transforms[1].mean)
        if source.widths != fitted:
            raise ShapeError(
                "vectors of the widths {} and {}".format(*source.widths), where=source.name,
                expected="{} and {}, as in `fit`".format(*fitted),
            )  # fmt: skip
        sides = [side.times(factor) for side, factor in zip((source.left, source.right), self.factors, strict=True)]
        device = judge.transforms[0].mean.device
        found = np.full((len(source), 1 + len(judge.names)), np.nan, dtype=np.float32)

        def part(rows: tuple[Tensor, Tensor, npt.NDArray[np.uint8]]) -> Scores:
            measures = judge.measure(*rows)
            match: FloatArray | Scores = new_match_scores(judge, judge.combination.sums(measures))
            if self.recalibration is not None:
                sides = zip(judge.transforms, rows[:2], strict=True)
                match = self.recalibration.match(match, *(transform(side).cpu().numpy() for transform, side in sides))
            return np.column_stack([match, measures]).astype(np.float32)

        for start in range(0, len(source), READ):
            x, y = (side.tensor(slice(start, start + READ), device) for side in sides)
            good = np.flatnonzero(faults(x, y) == READABLE)
            fold = self._seen.folds(x, y)
            parts = [rows for number in range(FOLDS) for rows in cut(good[fold[good] == number], SCORED)]
            # The shape of a matrix decides the order of summation: always the same one, so always the same scores.
            filled = (np.resize(rows, SCORED) for rows in parts)
            scores = parallel_map(part, ((x[rows], y[rows], fold[rows]) for rows in filled), self.workers)
            for rows, one in zip(parts, scores, strict=True):
                found[start + rows] = one[: len(rows)]
        return found[:, 0], found[:, 1:]

    @property
    def judge(self) -> Judge:
        """The learned model.

        Raises:
            ConflictError: `fit` was not called.
        """
        if self._judge is None:
            raise ConflictError("this Auditor is not fitted yet", advice="Call `fit` first.")
        return self._judge

    @property
    def noise_rate_(self) -> float:
        """Estimated fraction of mismatched pairs in the fitted data."""
        return self.judge.combination.rate

    @property
    def noise_interval_(self) -> tuple[float, float]:
        """The 95 % interval of `noise_rate_`."""
        return self.judge.combination.low, self.judge.combination.high

    @property
    def joint_(self) -> bool:
        """Whether the cosine of both sides is one of the measures."""
        return self.judge.joint

    @property
    def measures_(self) -> dict[str, float]:
        """Weight of each measure in the score."""
        return dict(zip(self.judge.names, self.judge.combination.shares().tolist(), strict=True))

    def save(self, path: str | Path) -> None:
        """Write the auditor to one safetensors file."""
        judge = self.judge
        parts = {"seen.": vars(self._seen), "recalibration.": vars(self.recalibration) if self.recalibration else {}}
        parts |= {f"views.{side}.": join.state() for side, join in enumerate(self.joins or ())}
        about = {"auditor": FORMAT, "factors": list(self.factors), "joint": self.joint}
        about["checked"] = self.checked and self.checked.model_dump()
        save_tensors(path, judge.state() | flattened(parts), about)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Auditor:
        """Read a file of `save`.

        Raises:
            DamagedError: The file is damaged, no auditor, or one of another version.
        """
        state, about = load_tensors(path)
        found = (about or {}).get("auditor")
        if about is None or found != FORMAT:
            what = "not an auditor" if found is None else f"an auditor of format {found!r}"
            advice = "Fit it again with this version of mispair."
            raise DamagedError(what, where=path, expected=f"format {FORMAT}", advice=advice)
        try:
            auditor = cls(joint=about["joint"], device=device)
            # Tensors of a file are a map of it, which must not be overwritten while it is in use.
            state = {name: tensor.clone() for name, tensor in state.items()}
            auditor._judge = Judge.of(state, pick_device(device))
            auditor.factors = float(about["factors"][0]), float(about["factors"][1])
            left, right, recalibration = (part_of(state, name) for name in ("views.0.", "views.1.", "recalibration."))
            auditor.joins = (ViewJoin.of(left), ViewJoin.of(right)) if left and right else None
            auditor._seen = Seen(**part_of(state, "seen."))
            auditor.recalibration = Recalibration(**recalibration) if recalibration else None
            auditor.checked = Checked(**about["checked"]) if about["checked"] else None
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedError(f"not a whole auditor ({error!r})", where=path, advice="Fit it again.") from None
        return auditor

    def __repr__(self) -> str:
        if self._judge is None:
            return f"<Auditor on {self.device}, not fitted>"
        low, high = self.noise_interval_
        return f"<Auditor fitted, noise rate {percent(self.noise_rate_)} ({percent(low)} to {percent(high)})>"

    def _repr_html_(self) -> str:
        if self._judge is None:
            return html_table([], ["not fitted"], "Auditor")
        low, high = self.noise_interval_
        rows = [
            [name, percent(weight), float(separation)]
            for (name, weight), separation in zip(self.measures_.items(), self._judge.separations, strict=True)
        ]
        title = f"Auditor: noise rate {percent(self.noise_rate_)} ({percent(low)} to {percent(high)})"
        return html_table(rows, ["measure", "weight", "AUROC against shuffled pairs"], title)


@dataclass(frozen=True)
class Seen:
    """Learned items: their pairs are scored by a fold without them."""

    left: IntArray  # (n,) fingerprints of left items, ascending
    right: IntArray  # (m,) the same of right items
    fold: npt.NDArray[np.uint8]  # (n + m,) the fold of each

    @classmethod
    def of(cls, left: Tensor, right: Tensor, fold: npt.NDArray[np.uint8]) -> Seen:
        """Remember the vectors (n, D) and (n, E), with the fold of each pair (n,)."""
        (x, a), (y, b) = (np.unique(_prints(side), return_index=True) for side in (left, right))
        return cls(x, y, np.concatenate([fold[a], fold[b]]))

    def folds(self, left: Tensor, right: Tensor) -> npt.NDArray[np.uint8]:
        """(n,) fold for scoring each pair: the fold of its left or right item, or else any."""
        x, y = _prints(left), _prints(right)
        found = fold_numbers(x)
        # The left item comes last, as it decides where the two differ.
        folds = np.split(self.fold, [len(self.left)])
        for known, prints, fold in ((self.right, y, folds[1]), (self.left, x, folds[0])):
            if len(known):
                place = np.minimum(np.searchsorted(known, prints), len(known) - 1)
                found = np.where(known[place] == prints, fold[place], found)
        return found


def _prints(vectors: Tensor) -> IntArray:
    """(n,) fingerprints, the same for equal vectors."""
    return fingerprints(vectors.cpu().numpy()).view(np.int64)


def _opened(left: Any, right: Any, groups: Any) -> Source:
    if isinstance(left, Pairs):
        if right is not None:
            raise ConflictError("two sides", where="right", advice="Pairs have both sides; leave it out.")
        return open_pairs_given(left)
    if right is None:
        raise ShapeError("one side", expected="vectors of both sides, or Pairs")
    return from_memory(left, right, None, groups)


def workers_of(workers: int | None, device: torch.device) -> int:
    """Number of blocks to read and measure at the same time."""
    return workers or (GPU_WORKERS if device.type == "cuda" else cores())


def check_count(pairs: Source) -> None:
    """Raise if there are too few pairs to learn from.

    Raises:
        TooFewError: There are fewer than `LEAST`.
    """
    if len(pairs) < LEAST:
        raise TooFewError(
            "1 pair" if len(pairs) == 1 else f"{len(pairs):,} pairs",
            where=pairs.name,
            expected=f"at least {LEAST} to learn from",
            advice="Look through so few by hand, or audit them as part of a larger set.",
        )


def checked_answers(checked: Mapping[str, bool] | None) -> dict[str, bool]:
    """Whether checked pairs match, by id.

    Raises:
        InvalidValueError: An answer is neither right nor wrong, or both.
    """
    if checked is None:
        return {}
    expected = "a dict of ids and True (right) or False (wrong)"
    if not isinstance(checked, Mapping):
        raise InvalidValueError(f"a {type(checked).__name__}", where="checked", expected=expected)
    answers: dict[str, bool] = {}
    for name, right in checked.items():
        if not isinstance(right, bool | int | float | np.generic) or right not in (0, 1):
            raise InvalidValueError(f"{right!r} for the pair {name!r}", where="checked", expected=expected)
        if answers.setdefault(plain(str(name)), bool(right)) != bool(right):
            raise InvalidValueError(f"both True and False for the pair {str(name)!r}", where="checked")
    return answers


def checked_rows(source: Source, checked: Mapping[str, bool] | None) -> dict[int, float]:
    """Checked rows: 1 matched, 0 mismatched."""
    answers = checked_answers(checked)
    rows = source.find(list(answers)) if answers else np.arange(0)
    known = source.known
    return {row: float(right) for row, right in zip(rows.tolist(), answers.values(), strict=True) if row not in known}


def _learned(
    source: Source, items: SharedItems, checked: Mapping[int, float], joint: bool, device: torch.device
) -> tuple[Judge, Seen]:
    usable = items.is_first & (items.partners == 0)
    usable[list(source.known)] = False
    rows = sample(np.flatnonzero(usable), SAMPLE)
    answers = {int(items.first[row]): answer for row, answer in checked.items()}
    rows = np.union1d(rows, np.fromiter(answers, dtype=np.int64, count=len(answers)))
    left, right = source.tensors(rows, device)
    good = np.flatnonzero(faults(left, right) == READABLE)
    if len(good) < LEAST:
        raise _too_few(source, len(good), device)
    rows, left, right = rows[good], left[good], right[good]
    _check_vary(source, left, right)
    own, score = items.groups[rows], source.network_score
    fold = fold_numbers(own)
    shared, joins = (items.left[rows], items.right[rows]), joins_of(source)
    views = None if joins is None else view_weights((left, right), joins, source.joint, fold, own, *shared)
    judge = learn(
        left,
        right,
        fold,
        own,
        items=shared,
        joint=joint or source.joint,
        views=views,
        checked=np.array([answers.get(row, np.nan) for row in rows.tolist()]) if answers else None,
        network_score=None if score is None else lambda lefts, rights: score(rows[lefts], rows[rights]),
        numbers=rows,
    )
    return judge, Seen.of(left, right, fold)


def _too_few(source: Source, good: int, device: torch.device) -> DataError:
    left, right = source.tensors(sample(np.arange(len(source)), SAMPLE), device)
    if (readable := faults(left, right) == READABLE).any():
        _check_vary(source, left[readable], right[readable])
    often = Counter(source.known.values()).most_common(1)
    return TooFewError(
        f"only {good:,} of {min(len(source), SAMPLE):,} sampled pairs can be used",
        where=source.name,
        expected=f"at least {LEAST} without a bad status or id, with vectors that are finite and not zero",
        advice=f"Most often: {often[0][0]}." if often else "Check how the embeddings were made.",
    )


def _check_vary(source: Source, left: Tensor, right: Tensor) -> None:
    for name, side in (("left", left), ("right", right)):
        if not (side != side[0]).any():
            raise DataError(f"all {name} vectors are the same", where=source.name, advice="Check how they were made.")
