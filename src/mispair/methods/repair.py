"""REPAIR: rank correlation and noisy pair half-replacing with a memory bank (the paper this project is about).

Two networks teach each other. Before every main epoch each splits the pairs into clean and noisy ones by a mixture over
their losses, and labels them by rank correlation with its bank of clean pairs. Split and labels of one network train
the other. From half time on, surely noisy pairs return with a new partner from the bank.
benchmarks/lab-book/repair-choices.md has our choices where the paper leaves one open.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.config import Config
from mispair.errors import NonFiniteError
from mispair.functional.losses import hard_loss
from mispair.functional.rank_correlation import bank_correlation, label_bounds, soft_labels
from mispair.methods.base import EpochPairs, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.coteaching import CoTeaching
from mispair.methods.epoch_metrics import Examples, ReplacedPairs, label_histograms, selection, separation
from mispair.methods.epoch_view import EpochView, encode_items
from mispair.methods.half_replacing import find_partners
from mispair.methods.memory_bank import Bank
from mispair.models import Network
from mispair.models.comparison import compare
from mispair.pairs.batches import Batch, Items, PadShapes, PairLoader
from mispair.settings import CoTeachingSettings, RepairSettings
from mispair.support.arrays import IntArray, Mask

FIRST_FILL = 101  # stream of random numbers
CHUNK = 1024  # pairs encoded for a bank at a time
KEEP_LEFT, KEEP_RIGHT = 0, 1  # which side of a half-replaced pair stays
KEPT_SIDES = {"both": [KEEP_LEFT, KEEP_RIGHT], "left": [KEEP_RIGHT], "right": [KEEP_LEFT]}  # by the side to replace


@dataclass(frozen=True)
class NoisyBatch:
    """Noisy pairs trained in the same step as clean ones."""

    left: Items
    right: Items
    from_bank: Literal["left", "right"] | None  # the side that is new, which gets no gradients
    labels: Tensor  # (n,) y*
    same: Tensor | None  # (n, n) true where two pairs are no negatives of each other


@dataclass(frozen=True)
class RepairInputs(StepInputs):
    """A batch of clean pairs with its labels, and perhaps noisy pairs."""

    labels: Tensor = field(kw_only=True)  # (B,) y*
    noisy: tuple[NoisyBatch, ...] = ()


class Repair(CoTeaching):
    """Rank correlation labels the clean pairs, and noisy ones are half-replaced from a memory bank.

    `labels` and `noisy` make every row of the ablation table.
    """

    settings = (CoTeachingSettings, RepairSettings)

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.device = next(nets[0].parameters()).device
        count = len(loader.pairs)
        self.bank_size = min(config.of(RepairSettings).bank_size, count)
        self.banks = [Bank(self.bank_size) for _ in nets]  # the queued pairs as encoded by each network
        # The newest M training pairs and their steps, the oldest first.
        self.queues = [np.empty((2, 0), dtype=np.int64)] * 2
        self.steps = [0, 0]
        self.labels = torch.ones(2, count, device=self.device)  # soft correspondence labels y*, by each network
        self.bounds = [(1.0, 0.0)] * 2  # gamma and mu of each network
        # New partners, as numbers of pairs, and their y*: for each trained network, kept left and kept right items.
        self.partners = np.full((2, 2, count), -1)
        self.partner_labels = torch.zeros(2, 2, count, dtype=torch.float32, device=self.device)
        self._correlations: list[Tensor] = []  # of this epoch, (N,) by each network

    @classmethod
    def variant(cls, config: Config) -> type[Repair]:
        return RepairByBatch if cls is Repair and config.of(RepairSettings).label_when == "batch" else cls

    @classmethod
    def noisy_from(cls, config: Config) -> int | None:
        return None if config.of(RepairSettings).noisy == "drop" else super().noisy_from(config)

    @property
    def own(self) -> RepairSettings:
        return self.config.of(RepairSettings)

    @property
    def uses_bank(self) -> bool:
        return self.own.labels == "rank" or self.own.noisy == "replace"

    # ------------------------------------------------------------------ before an epoch

    def divide(self, epoch: int, views: list[EpochView], clean: Mask) -> list[EpochPairs]:
        if self.uses_bank:
            self._correlations = [self._label(net, view, clean[1 - net]) for net, view in enumerate(views)]
        parts = super().divide(epoch, views, clean)
        if self.own.noisy == "replace" and self.noisy_started(epoch):
            return [replace(part, noisy=self._replace(net, views, part.noisy)) for net, part in enumerate(parts)]
        return parts

    def _label(self, net: int, view: EpochView, trains: Mask) -> Tensor:
        """Label all pairs by a network's bank; return their rank correlation."""
        if not self.queues[net].size:
            self._enqueue(net, self.rng(FIRST_FILL, net).permutation(np.flatnonzero(trains)))
        self.refill(net, view)
        link = send(torch.from_numpy(self.loader.pairs.link), self.device)
        team, count = view.network.team, len(link)
        part = team.part(count)
        correlation = bank_correlation(view.left, view.right[part], *self._bank_vectors(net), link[part])
        if not team.alone:
            correlation = team.gather_alike(correlation, count)
        self.bounds[net] = label_bounds(correlation, self.own.gamma_share)
        self.labels[net] = soft_labels(correlation, *self.bounds[net])
        return correlation

    def _replace(self, net: int, views: list[EpochView], noisy: IntArray) -> IntArray:
        """Find new partners for the noisy pairs of network `net`; return the pairs with new partners."""
        own, sides = self.own, KEPT_SIDES[self.own.replace_side]
        noisy = noisy[self._below_eta[noisy]]
        teacher = 1 - net if own.replace_by == "peer" else net
        where = send(torch.from_numpy(noisy), self.device)
        self.partners[net] = -1
        for side in sides:
            new = find_partners(views[teacher], self.banks[teacher], noisy, own.neighbours, keep_left=side == KEEP_LEFT)
            self.partners[net, side, noisy] = new.ids
            self.partner_labels[net, side, where] = soft_labels(new.correlation, *self.bounds[teacher])
        return np.asarray(noisy[(self.partners[net][sides][:, noisy] >= 0).all(axis=0)])

    @property
    def _below_eta(self) -> Mask:
        """(N,) true for noisy pairs, by the certain judgement of both networks."""
        return np.asarray((self.w < self.own.eta).all(axis=0))

    # ------------------------------------------------------------------ a step

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        if plan.main_step is None:
            return super().inputs(net, plan, augment)
        noisy: tuple[NoisyBatch, ...] = ()
        pad_shapes = self.loader.pad_shapes(plan.pairs)
        if plan.noisy is not None:
            from_bank = self._from_bank(net, plan.noisy)
            pad_shapes = self.loader.pad_shapes(plan.pairs, plan.noisy, *from_bank.values())
            batch = self.loader.batch(plan.noisy, augment, pad_shapes)
            noisy = tuple(self._half_replaced(net, batch, side, ids, pad_shapes) for side, ids in from_bank.items())
            if not noisy:  # unchanged
                labels = self._labels(net, batch, hard=0.0)
                noisy = (NoisyBatch(batch.left, batch.right, None, labels, self.false_negatives(batch)),)
        clean = self.loader.batch(plan.pairs, augment, pad_shapes)
        labels = self._labels(net, clean, hard=1.0)
        return RepairInputs(clean, self.negatives(plan.main_step), labels=labels, noisy=noisy)

    def pairs_used(self, net: int, plan: StepPlan) -> IntArray:
        from_bank = {} if plan.main_step is None or plan.noisy is None else self._from_bank(net, plan.noisy)
        return np.concatenate([super().pairs_used(net, plan), *from_bank.values()])

    def _from_bank(self, net: int, noisy: IntArray) -> dict[int, IntArray]:
        """Return the lending pairs for each kept side; empty without replacement."""
        sides = KEPT_SIDES[self.own.replace_side] if self.own.noisy == "replace" else []
        return {side: self.partners[net, side, noisy] for side in sides}

    def _labels(self, net: int, batch: Batch, *, hard: float) -> Tensor:
        """y* of the other network, or the hard label."""
        labels = self.labels[1 - net, batch.pairs]
        return torch.full_like(labels, hard) if self.own.labels == "hard" else labels

    def _half_replaced(self, net: int, batch: Batch, side: int, ids: IntArray, pad_shapes: PadShapes) -> NoisyBatch:
        """Combine noisy pairs with the right or the left items of the pairs `ids`."""
        labels = self.partner_labels[net, side, batch.pairs]
        rows = self.loader.pairs.link[ids]
        own, new = batch.left_groups, send(torch.from_numpy(self.loader.pairs.left_groups[rows]), self.device)
        same = new[:, None] == new
        if side == KEEP_RIGHT:
            return NoisyBatch(self.loader.left.items(rows, pad_shapes[0]), batch.right, "left", labels, same)
        same = same | (own[:, None] == own) | (own[:, None] == new)
        return NoisyBatch(batch.left, self.loader.right.items(ids, pad_shapes[1]), "right", labels, same)

    def loss(self, net: int, inputs: RepairInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        margin = self.margin(self.batch_labels(net, inputs))
        loss = hard_loss(S, margin, inputs.negatives, self.false_negatives(inputs.batch))
        if not inputs.noisy:
            return StepResult(loss, S)
        losses = []
        for part in inputs.noisy:
            noisy_S = compare(self.nets[net], part.left, part.right, without_gradient=part.from_bank)
            losses.append(hard_loss(noisy_S, self.margin(part.labels), inputs.negatives, part.same))
        noisy = torch.stack(losses).mean()
        return StepResult(loss + self.own.tau * noisy, S, {"noisy_loss": noisy / len(inputs.noisy[0].labels)})

    def batch_labels(self, net: int, inputs: RepairInputs) -> Tensor:  # noqa: ARG002 - a hook
        """(B,) y* of the clean pairs in a step of network `net`."""
        return inputs.labels

    def after_step(self, net: int, plan: StepPlan) -> None:
        self.steps[net] += 1
        self._enqueue(net, plan.pairs)

    # ------------------------------------------------------------------ the bank

    def _enqueue(self, net: int, pairs: IntArray) -> None:
        """Append pairs and keep the last M."""
        new = np.stack([pairs, np.full_like(pairs, self.steps[net])])
        self.queues[net] = np.concatenate([self.queues[net], new], axis=1)[:, -self.bank_size :]

    def _bank_vectors(self, net: int) -> tuple[Tensor, Tensor]:
        """Both sides of a bank. Raise if a number is not finite: ranks would hide it and all labels would be wrong."""
        left, right = self.banks[net].pooled()
        if not bool(left.isfinite().all() & right.isfinite().all()):
            what = f"the memory bank of network {'AB'[net]} holds a number that is not finite"
            advice = "Run the command again to resume from the last checkpoint; if it stops here again, lower `lr`."
            raise NonFiniteError(what, advice=advice)
        return left, right

    def refill(self, net: int, view: EpochView) -> None:
        """Fill the bank with the queued pairs as the network encodes them now.

        A bank that is read once an epoch need not be filled at every step: this is cheaper, nothing in it is stale, and
        a checkpoint holds numbers instead of features.
        """
        bank = self.banks[net] = Bank(self.bank_size)
        pairs = self.queues[net][0]
        for start in range(0, len(pairs), CHUNK):
            chunk = pairs[start : start + CHUNK]
            bank.push(view.encoded(chunk, left=True), view.encoded(chunk, left=False), chunk)

    # ------------------------------------------------------------------ state and report

    def state_dict(self) -> dict[str, Any]:
        partners = {"partners": torch.from_numpy(self.partners), "partner_labels": self.partner_labels}
        plain = {"bounds": self.bounds, "steps": self.steps, "labels": self.labels}
        queues = [torch.from_numpy(queue) for queue in self.queues]
        return {**super().state_dict(), **partners, **plain, "queues": queues}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.partners, self.bounds, self.steps = state["partners"].numpy(), state["bounds"], state["steps"]
        self.labels, self.partner_labels = (state[name].to(self.device) for name in ("labels", "partner_labels"))
        self.queues = [queue.numpy() for queue in state["queues"]]

    def examples(self, pairs: IntArray) -> Examples:
        labels = self.labels[:, send(torch.from_numpy(pairs), self.device)].mean(dim=0).cpu().numpy()
        new_right, new_left = self.partners.max(axis=0)[:, pairs]  # of one network or the other
        return Examples(pairs, self.w[:, pairs], labels, new_left, new_right)

    def metrics(self, views: list[EpochView], clean: Mask) -> list[dict[str, Any]]:
        rows = super().metrics(views, clean)
        for net, correlation in enumerate(self._correlations):
            bank, (gamma, mu) = self.banks[net], self.bounds[net]
            rows[net] |= {
                **separation({"rank": correlation.cpu().numpy()}, self.matching),
                **label_histograms(self.labels[net].cpu().numpy(), clean[net], self.matching),
                "gamma": gamma,
                "mu": mu,
                "bank_pairs": len(bank),
                "bank_bytes": bank.nbytes,
                "bank_age": float(self.steps[net] - self.queues[net][1].mean()),
            }
        return rows

    def shared_metrics(self, epoch: int, parts: list[EpochPairs]) -> dict[str, Any]:
        metrics: dict[str, Any] = {**selection("eta", self._below_eta, self.loader.pairs.mismatched)}
        if self.own.noisy == "replace" and self.noisy_started(epoch):
            metrics["replaced"] = [self._replaced(net, part.noisy) for net, part in enumerate(parts)]
        return metrics

    def _replaced(self, net: int, noisy: IntArray) -> ReplacedPairs:
        """Count the pairs with new partners and, where the truth is known, the matching fraction."""
        pairs, fits = self.loader.pairs, {}
        if pairs.truth is not None and len(noisy):
            for side, ids in self._from_bank(net, noisy).items():
                left, right = (noisy, ids) if side == KEEP_LEFT else (ids, noisy)
                same = pairs.left_groups[pairs.link[left]] == pairs.left_groups[pairs.truth[right]]
                fits["new_right_fits" if side == KEEP_LEFT else "new_left_fits"] = float(same.mean())
        return ReplacedPairs(pairs=len(noisy), **fits)


class RepairByBatch(Repair):
    """Algorithm 1 of the paper: in each step a network labels its batch by its own bank, then adds the batch to it."""

    repeatable = False

    def refill(self, net: int, view: EpochView) -> None:
        if not len(self.banks[net]):
            super().refill(net, view)

    def batch_labels(self, net: int, inputs: RepairInputs) -> Tensor:
        if not self.uses_bank:
            return inputs.labels
        pairs = inputs.batch.pairs.cpu().numpy()
        left, right = (encode_items(self.nets[net], self.loader, pairs, left=left) for left in (True, False))
        correlation = bank_correlation(left.pooled, right.pooled, *self._bank_vectors(net))
        self.banks[net].push(left, right, pairs)
        if self.own.labels == "hard":
            return inputs.labels
        return soft_labels(correlation, *label_bounds(correlation, self.own.gamma_share))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "banks": [bank.state_dict() for bank in self.banks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for bank, saved in zip(self.banks, state["banks"], strict=True):
            bank.load_state_dict(saved, self.device)
