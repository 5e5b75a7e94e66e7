"""`Robust`: a loss and a sampler to train any two encoders on mismatched pairs.

Three methods, for one network:

- weights: each pair is weighted by its match score; flagged pairs have weight 0.
- mend: also, flagged items train with partners of similar trusted items (docs/methods.md#mend).
- repair: as mend, but trusted pairs are weighted by a rank correlation measured while training: do the neighbours of
  the left item have partners near the right item (REPAIR)?
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from mispair.compute.devices import send
from mispair.errors import (
    ChangedError,
    ConflictError,
    DamagedError,
    InvalidValueError,
    NonFiniteError,
    NotFoundError,
    ShapeError,
    TooFewError,
)
from mispair.functional.contrastive import info_nce, sigmoid_losses
from mispair.functional.losses import hard_losses, soft_margin
from mispair.functional.rank_correlation import label_bounds, rank_correlation, soft_labels
from mispair.pairs.pairs import described
from mispair.robust.audited import Audited, columns_of, other_partners
from mispair.robust.sampler import RobustSampler, epoch_order
from mispair.support.arrays import IntArray

MethodName = Literal["weights", "mend", "repair"]
LossName = Literal["infonce", "siglip", "triplet"]
Rows = Tensor | npt.NDArray[np.integer] | Sequence[int]

GAMMA_SHARE = 0.1  # repair: fraction of the pairs whose mean correlation is gamma
SAMPLED = 120  # stream of random numbers
UNSEEN = -2.0  # lower than anything that is measured
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0  # where SigLIP starts


class Robust:
    """Robust training for encoders of your own.

    >>> robust = Robust([0.9, 0.2, 0.8, 1.0])  # match scores; or an audit, or "audit/pairs.parquet"
    >>> for batch in robust.sampler(3):
    ...     similarity = torch.eye(len(batch), requires_grad=True)  # of your encoders: (B, B) cosines
    ...     loss = robust.loss(similarity, batch)
    >>> robust.end_epoch()
    >>> robust
    Robust(method="weights", loss="infonce"): 4 pairs, 3 trusted, 0 flagged items with other partners, epoch 1

    Attributes:
        match_score: (N,) probability that each pair matches; 0 for unreadable pairs.
        epoch: Number of finished epochs.
        trained: Pairs of every epoch, in ascending order.
        partners: Other partners of flagged items; None if none are known or used.
        sampled: Number of pairs an epoch, including those with other partners.
        seed: Seed of the order of the pairs.
    """

    def __init__(
        self,
        pairs: Audited,
        method: MethodName = "weights",
        *,
        loss: LossName = "infonce",
        flag_below: float | None = None,
        flagged_weight: float = 0.3,
        flagged_share: float = 0.2,
        temperature: float = 0.05,
        margin: float = 0.2,
        negatives: int = 1,
        left_items: Rows | None = None,
        right_items: Rows | None = None,
        seed: int = 0,
    ) -> None:
        """Read the match scores.

        Args:
            pairs: A result of `mispair.audit`; the path of its folder or its `pairs.parquet`; a table with a column
                `match_score`; `Pairs` with match scores; or one number between 0 and 1 for each pair.
            method: weights, mend or repair.
            loss: infonce, siglip, or triplet with soft margins (Eq. 1 and 2 of the REPAIR paper).
            flag_below: Match score below which a pair is flagged; by default as the audit flags, else 0.5.
            flagged_weight: Weight of a flagged item with another partner.
            flagged_share: Largest fraction of these in a batch.
            temperature: Temperature of InfoNCE, if `loss` gets no `logit_scale`.
            margin: Margin of the triplet loss, for a pair with match score 1.
            negatives: Number of hardest negatives in the mean of the triplet loss.
            left_items: (N,) number of each pair's left item, if pairs share items that the scores do not name.
            right_items: (N,) the same for right items.
            seed: Seed of the order of the pairs.
        """
        for name, value, known in (("method", method, MethodName), ("loss", loss, LossName)):
            _check(name, value, value in get_args(known), f"one of {', '.join(get_args(known))}")
        for name, number, high in (
            ("flagged_weight", flagged_weight, 1.0),
            ("flagged_share", flagged_share, 0.9),
            ("flag_below", 0 if flag_below is None else flag_below, 1.0),
        ):
            _check(name, number, 0 <= number <= high, f"a number between 0 and {high:g}")
        for name, number in (("temperature", temperature), ("margin", margin)):
            _check(name, number, isinstance(number, int | float | np.number) and number > 0, "a number greater than 0")
        for name, count, least in (("negatives", negatives, 1), ("seed", seed, 0)):
            is_count = isinstance(count, int | np.integer) and count >= least
            _check(name, count, is_count, f"a whole number from {least} on")
        self.method, self.loss_name, self.seed = method, loss, int(seed)  # torch loads no number of numpy
        self.flagged_weight, self.temperature, self.margin, self.negatives = (
            flagged_weight, temperature, margin, negatives,
        )  # fmt: skip
        columns = columns_of(pairs).flagged_below(flag_below)
        self.match_score, self._trusted = np.nan_to_num(columns.match_score), columns.kept
        self.trained = np.flatnonzero(self._trusted)
        if len(self.trained) < 2:
            found = f"{len(self.trained)} of {len(self):,} pairs are trusted"
            raise TooFewError(found, expected="two or more", advice="Audit the pairs again, or lower `flag_below`")
        borrows = method != "weights" and flagged_weight > 0 and flagged_share > 0
        self.partners = other_partners(pairs, columns, self._trusted) if borrows else None
        most = round(len(self.trained) * flagged_share / (1 - flagged_share))
        self.sampled = len(self.trained) + (0 if self.partners is None else min(len(self.partners), most))
        self._left = self._items(columns.left_items, left_items, "left_items")
        self._right = self._items(columns.right_items, right_items, "right_items")
        self._partner_rows = self._places()
        self._weights = np.where(self._trusted, self.match_score, 0).astype(np.float32)
        self._seen = np.full(len(self), UNSEEN, dtype=np.float32)  # what this epoch has measured of each pair
        self._device = torch.device("cpu")  # of the last similarities
        self.epoch = 0
        self.step = 0  # calls of `loss` in this epoch
        self._position = 0  # first batch of the next sampler
        self._batch: int | None = None  # pairs a batch, of all processes together, where a sampler is used

    def __len__(self) -> int:
        return len(self.match_score)

    def __repr__(self) -> str:
        beside = 0 if self.partners is None else len(self.partners)
        return (
            f'Robust(method="{self.method}", loss="{self.loss_name}"): {len(self):,} pairs, {len(self.trained):,} '
            f"trusted, {beside:,} flagged items with other partners, epoch {self.epoch}"
        )

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """(N,) present weight of each pair, between 0 and 1."""
        return self._weights.copy()

    # ------------------------------------------------------------------ training

    def sampler(self, batch_size: int, rank: int | None = None, world: int | None = None) -> RobustSampler:
        """Batches of pair numbers for `DataLoader(batch_sampler=...)`: trusted pairs, and flagged ones beside the pair
        that lends them a partner.

        Args:
            batch_size: Pairs a batch, in each process.
            rank: Number of this process; by default that of `torch.distributed`.
            world: Number of processes.
        """
        return RobustSampler(self._order, self.sampled, batch_size, rank, world)

    def loss(
        self,
        similarity: Tensor,
        rows: Rows,
        *,
        logit_scale: float | Tensor | None = None,
        logit_bias: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch.

        If all match scores are 1 and no pairs share an item, it is the usual loss of this kind: InfoNCE in both
        directions as in CLIP, SigLIP's, or the triplet loss with the hardest negatives.

        Args:
            similarity: (B, B) cosines of each left item with each right item of the batch.
            rows: (B,) numbers of the pairs, whose own cosines stand on the diagonal.
            logit_scale: Factor of the cosines, such as a learned scale; by default 1 / temperature, and 10 for siglip.
                The triplet loss uses the cosines without a scale.
            logit_bias: Added to the scaled cosines; by default 0, and -10 for siglip.

        Raises:
            ShapeError: The shapes are not (B, B) and (B,).
            NotFoundError: A number in `rows` is not a pair number.
            NonFiniteError: A similarity or the loss is not finite; the error names the pairs.
        """
        numbers = self._numbers(similarity, rows)
        lefts, rights, weights = self._matched(numbers)
        device = self._device = similarity.device
        moved = not np.array_equal(lefts, rights)
        mask = self._false_negatives(numbers, lefts, rights)
        same, w = (send(torch.from_numpy(array), device) for array in (mask, weights))
        S = similarity
        if moved:
            row, column = (send(torch.from_numpy(places), device) for places in (lefts, rights))
            S = similarity[row][:, column]
        loss = self._loss(S.float(), same, w, logit_scale, logit_bias)
        if not bool(loss.isfinite()):
            raise NonFiniteError(self._complaint(similarity, numbers))
        if torch.is_grad_enabled():
            self.step += 1
            if self.method == "repair":
                self._measure(similarity.detach().float(), numbers)
        return loss

    def end_epoch(self) -> None:
        """Begin the next epoch, with another order of the pairs and the measured weights.

        With several processes all must call it, because they exchange their measurements.
        """
        if self.method == "repair":
            self._exchange()
            self._update()
        self._seen[:] = UNSEEN
        self.epoch, self.step, self._position = self.epoch + 1, 0, 0

    def _order(self, batch: int) -> tuple[int, IntArray]:
        """First batch of a sampler, 0 except once after loading a checkpoint, and the pairs of the epoch."""
        if self._position and self._batch not in (None, batch):
            what = f"{batch:,} pairs a batch of all processes"
            expected = f"{self._batch:,} as in the checkpoint, which was written within an epoch"
            advice = "Give the sampler the same size, or call end_epoch first"
            raise ConflictError(what, where="batch_size", expected=expected, advice=advice)
        if not self._position and self.step >= self.sampled // batch:
            warnings.warn(
                "Robust: end_epoch was not called after the last epoch, so its batches come again in the same order.",
                stacklevel=3,
            )
        self._batch = batch
        position, self._position = self._position, 0
        rng = np.random.default_rng([self.seed, SAMPLED, self.epoch])
        return position, epoch_order(self.trained, self.partners, self.sampled - len(self.trained), rng)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as tensors and plain values. The rest comes from the pairs and arguments."""
        return {
            "method": self.method,
            "pairs": self._fingerprint(),
            "seed": self.seed,
            "sampled": self.sampled,
            "batch": self._batch,
            "epoch": self.epoch,
            "step": self.step,
            "weights": torch.from_numpy(self._weights.copy()),
            "seen": torch.from_numpy(self._seen.copy()),
        }

    def load_state_dict(self, state: dict[str, Any], *, skip: bool = True) -> None:
        """Continue where `state_dict` was called.

        Args:
            state: Its result.
            skip: Let the next sampler leave out the finished batches of the epoch. Give False to a trainer that skips
                them itself.

        Raises:
            DamagedError: It is not a state of `Robust`.
            ChangedError: It has another method, other pairs or another seed, or was saved within a longer or shorter
                epoch.
        """
        if not isinstance(state, dict) or not state.keys() >= self.state_dict().keys():
            advice = "Load the entry of the checkpoint that holds it"
            raise DamagedError("not a result of Robust.state_dict", where="state", advice=advice)
        mine = {"method": self.method, "pairs": self._fingerprint(), "seed": self.seed}
        if state["step"]:  # at the start of an epoch its length may change
            mine["sampled"] = self.sampled
        for name, own in mine.items():
            if state[name] != own:
                what = "other pairs or match scores" if name == "pairs" else f"{name} {state[name]}, not {own}"
                advice = "Make Robust with the same arguments"
                raise ChangedError(f"the checkpoint is of {what}", where=name, advice=advice)
        self.epoch, self.step, self._batch = int(state["epoch"]), int(state["step"]), state["batch"]
        self._weights = np.array(state["weights"].cpu().numpy(), dtype=np.float32)
        self._seen = np.array(state["seen"].cpu().numpy(), dtype=np.float32)
        self._position = self.step if skip else 0

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self.match_score.tobytes() + self.trained.tobytes())
        if self.partners is not None:
            digest.update(self.partners.own.tobytes() + self.partners.lenders.tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------ a batch

    def _numbers(self, similarity: Tensor, rows: Rows) -> IntArray:
        """The pair numbers on the host, checked."""
        if not isinstance(similarity, Tensor) or similarity.dim() != 2 or similarity.shape[0] != similarity.shape[1]:
            found = str(tuple(similarity.shape)) if isinstance(similarity, Tensor) else described(similarity)
            expected = "a square tensor (B, B), each left item of the batch against each right item"
            advice = "With several processes, gather the items of all of them first"
            raise ShapeError(found, where="similarity", expected=expected, advice=advice)
        numbers = np.asarray(rows.detach().cpu() if isinstance(rows, Tensor) else rows)
        if numbers.shape != (len(similarity),) or numbers.dtype.kind not in "iu":
            expected = f"{len(similarity):,} whole numbers, the pairs on the diagonal"
            raise ShapeError(described(numbers), where="rows", expected=expected)
        wrong = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(wrong):
            raise NotFoundError(f"no pair {wrong[0]:,}", where="rows", expected=f"pairs 0 to {len(self) - 1:,}")
        return numbers.astype(np.int64)

    def _matched(self, numbers: IntArray) -> tuple[IntArray, IntArray, npt.NDArray[np.float32]]:
        """Left and right item of the batch of each pair, and its weight.

        A pair consists of its own items; an item of a flagged pair may get another partner from the batch.
        """
        lefts, rights, weights = np.arange(len(numbers)), np.arange(len(numbers)), self._weights[numbers]
        if self.partners is None:
            return lefts, rights, weights
        borrowers = np.flatnonzero(~self._trusted[numbers])
        if not len(borrowers):
            return lefts, rights, weights
        order = numbers.argsort(kind="stable")
        which = self._partner_rows[numbers[borrowers]]  # (n, 2)
        lenders = self.partners.lenders[which]  # (n, 2, K)
        place = order[np.searchsorted(numbers[order], lenders).clip(max=len(numbers) - 1)]
        odds = np.where((which[..., None] >= 0) & (numbers[place] == lenders), self.partners.odds[which], 0)
        best = odds.reshape(len(borrowers), -1).argmax(axis=1)
        found = np.take_along_axis(odds.reshape(len(borrowers), -1), best[:, None], axis=1)[:, 0] > 0
        side, lent = np.divmod(best, lenders.shape[2])
        chosen = place[np.arange(len(borrowers)), side, lent]
        left, right = found & (side == 0), found & (side == 1)
        lefts[borrowers[left]], rights[borrowers[right]] = chosen[left], chosen[right]
        weights[borrowers[found]] = self.flagged_weight
        return lefts, rights, weights

    def _false_negatives(self, numbers: IntArray, lefts: IntArray, rights: IntArray) -> npt.NDArray[np.bool_]:
        """(B, B) true for pairs with a common item: they are not each other's negatives."""
        left, right = self._left[numbers[lefts]], self._right[numbers[rights]]
        return np.asarray((left[:, None] == left) | (right[:, None] == right))

    def _loss(
        self, S: Tensor, mask: Tensor, weights: Tensor, scale: float | Tensor | None, bias: float | Tensor | None
    ) -> Tensor:
        if self.loss_name == "triplet":
            margins = soft_margin(weights, self.margin)
            losses = hard_losses(S, margins, self.negatives, mask)
            return (losses * (weights > 0)).sum() / (weights > 0).sum().clamp(min=1)
        if self.loss_name == "siglip":
            z = S * (SIGLIP_SCALE if scale is None else scale) + (SIGLIP_BIAS if bias is None else bias)
            positive, negative = sigmoid_losses(z, mask)
            return (weights * positive + negative).mean()
        z = S * (1 / self.temperature if scale is None else scale) + (0 if bias is None else bias)
        return (info_nce(z, 1.0, mask) * weights).sum() / weights.sum().clamp(min=1) / 2

    def _complaint(self, similarity: Tensor, numbers: IntArray) -> str:
        bad = ~similarity.detach().isfinite()
        both = (bad.all(dim=1) | bad.all(dim=0)).cpu().numpy()
        named = numbers[both if both.any() else (bad.any(dim=1)).cpu().numpy()]
        pairs = ", ".join(str(number) for number in named[:5]) + (", ..." if len(named) > 5 else "")
        what = f"similarities of pairs {pairs} are not finite"
        if not len(named):
            what = "the loss is not finite, though all similarities are; give a smaller logit_scale"
        return f"Epoch {self.epoch}, step {self.step}: {what}. The weights have not been updated."

    # ------------------------------------------------------------------ what an epoch shows

    def _measure(self, S: Tensor, numbers: IntArray) -> None:
        """Note the rank correlation of each trusted pair of the batch."""
        trusted = self._trusted[numbers]
        bank = send(torch.from_numpy(np.flatnonzero(trusted)), S.device)
        if len(bank) < 3:
            return
        values = rank_correlation(-S[:, bank], -S[bank].T)
        self._seen[numbers[trusted]] = values.cpu().numpy()[trusted]

    def _exchange(self) -> None:
        """Share the measurements of all processes."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            seen = torch.from_numpy(self._seen).to(self._device)
            dist.all_reduce(seen, dist.ReduceOp.MAX)
            self._seen = seen.cpu().numpy()

    def _update(self) -> None:
        """Set the weights of the trusted pairs by the measurements of the epoch."""
        seen = self.trained[self._seen[self.trained] > UNSEEN]
        if not len(seen):
            return
        values = torch.from_numpy(self._seen[seen])
        self._weights[seen] = soft_labels(values, *label_bounds(values, GAMMA_SHARE)).numpy()

    # ------------------------------------------------------------------ items

    def _items(self, known: IntArray, given: Rows | None, name: str) -> IntArray:
        if given is None:
            return known
        items = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        if items.shape != (len(self),) or items.dtype.kind not in "iu":
            expected = f"{len(self):,} whole numbers, one for each pair"
            raise ShapeError(described(items), where=name, expected=expected)
        return items.astype(np.int64)

    def _places(self) -> IntArray:
        """(N, 2) row of each pair in `partners`, with its right and with its left item kept; -1: none."""
        places = np.full((len(self), 2), -1, dtype=np.int64)
        if self.partners is not None:
            places[self.partners.own, np.where(self.partners.keeps_right, 0, 1)] = np.arange(len(self.partners))
        return places


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise InvalidValueError(repr(value), where=name, expected=expected)
