"""REPAIR: rank correlation and noisy pair half-replacing with a memory bank (the paper this project is about).

Two networks teach each other. Before every main epoch each looks at all pairs: a mixture over its losses splits them
into clean and noisy ones, and rank correlation against its bank of clean pairs labels them. Split and labels of one
network train the other. From half time on, noisy pairs that both networks are sure about come back with a new partner
from the bank. docs/methods.md tells what we do where the paper leaves a choice.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.config import Config
from mispair.data.batches import Items, PadShapes, PairLoader
from mispair.data.pairs import IntArray
from mispair.functional.losses import hard_loss, soft_margin
from mispair.functional.rank_correlation import bank_correlation, label_bounds, soft_labels
from mispair.methods.base import Split, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.coteaching import CoTeaching
from mispair.methods.epoch_view import EpochView, encode_left, encode_right
from mispair.methods.half_replacing import find_partners
from mispair.methods.memory_bank import Bank
from mispair.methods.report import (
    BoolArray,
    Examples,
    MethodReport,
    ReplacedPairs,
    label_histograms,
    selection,
    separation,
)
from mispair.models import Network
from mispair.models.inference import inference

FIRST_FILL = 101  # stream of random numbers
CHUNK = 1024  # pairs encoded for a bank at a time
KEEP_LEFT, KEEP_RIGHT = 0, 1  # which side of a half-replaced pair stays


@dataclass(frozen=True)
class NoisyBatch:
    """Noisy pairs that train beside the clean ones."""

    left: Items
    right: Items
    lent: Literal["left", "right"] | None  # which side comes from a bank, and so gets no gradients
    labels: Tensor  # (n,) y*
    same: Tensor | None  # (n, n) true where two pairs are no negatives of each other


@dataclass(frozen=True)
class RepairInputs(StepInputs):
    """A batch of clean pairs with its labels, and perhaps noisy pairs."""

    labels: Tensor = field(kw_only=True)  # (B,) y*
    beside: tuple[NoisyBatch, ...] = ()


class Repair(CoTeaching):
    """REPAIR and, by `labels` and `noisy`, every row of its ablation table.

    Attributes:
        queues: Numbers of the newest M pairs that have trained each network, oldest first, and the step of each.
        banks: The same pairs as the network sees them.
        labels: (2, N) soft correspondence labels y*, by each network.
        bounds: gamma and mu of each network.
        partners: (2, 2, N) new partner of each half-replaced pair, as the number of the pair that lends its item: for
            each network to be trained, for the kept left and the kept right item; -1 for none.
        partner_labels: (2, 2, N) y* of these new pairs.
    """

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.device = next(nets[0].parameters()).device
        count = len(loader.pairs)
        self.bank_size = min(config.repair.bank_size, count)
        self.banks = [Bank(self.bank_size) for _ in nets]
        self.queues = [np.empty((2, 0), dtype=np.int64)] * 2
        self.steps = [0, 0]
        self.labels = torch.ones(2, count, device=self.device)
        self.bounds = [(1.0, 0.0)] * 2
        self.partners = np.full((2, 2, count), -1)
        self.partner_labels = torch.zeros(2, 2, count, device=self.device)

    @classmethod
    def noisy_from(cls, config: Config) -> int | None:
        return None if config.repair.noisy == "drop" else super().noisy_from(config)

    # ------------------------------------------------------------------ before an epoch

    def divide(self, epoch: int, views: list[EpochView], clean: BoolArray) -> list[Split]:
        correlations = [self._label(net, view, clean[1 - net]) for net, view in enumerate(views)] if self._ranks else []
        rows = self._metrics(views, correlations, clean)
        sure = np.asarray((self.w < self.config.repair.eta).all(axis=0))
        others: dict[str, object] = {**selection("eta", sure, self.loader.pairs.mismatched)}
        started = self.noisy_started(epoch)
        splits = [self._split(net, views, clean[1 - net], started) for net in range(2)]
        if started and self.config.repair.noisy == "replace":
            others["replaced"] = [self._replaced(net, split.noisy) for net, split in enumerate(splits)]
        self._report = MethodReport.of_networks(rows, **others)
        return splits

    @property
    def _ranks(self) -> bool:
        """Whether anything is made of the banks."""
        return self.config.repair.labels == "rank" or self.config.repair.noisy == "replace"

    def _label(self, net: int, view: EpochView, trains: BoolArray) -> Tensor:
        """Labels all pairs by a network's bank; gives their rank correlation."""
        first = not self.queues[net].size
        if first:
            self._enqueue(net, self.rng(FIRST_FILL, net).permutation(np.flatnonzero(trains)))
        if first or self.config.repair.label_when == "epoch":
            self._refill(net, view)
        link = send(torch.from_numpy(self.loader.pairs.link), self.device)
        correlation = bank_correlation(view.left, view.right, *self.banks[net].pooled(), link)
        self.bounds[net] = label_bounds(correlation, self.config.repair.gamma_share)
        self.labels[net] = soft_labels(correlation, *self.bounds[net])
        return correlation

    def _split(self, net: int, views: list[EpochView], clean: BoolArray, started: bool) -> Split:
        """The pairs that train network `net`, as the other one has split them."""
        config = self.config
        if not started:
            return Split(np.flatnonzero(clean))
        if config.repair.noisy == "train":
            return Split(np.flatnonzero(clean), np.flatnonzero(~clean))
        noisy = np.flatnonzero(~clean & (self.w < config.repair.eta).all(axis=0))
        teacher = 1 - net if config.repair.replace_by == "peer" else net
        self.partners[net] = -1
        for side in self._sides:
            new = find_partners(
                views[teacher], self.banks[teacher], noisy, config.repair.neighbours, keep_left=side == KEEP_LEFT
            )
            self.partners[net, side, noisy] = new.ids
            where = send(torch.from_numpy(noisy), self.device)
            self.partner_labels[net, side, where] = soft_labels(new.correlation, *self.bounds[teacher])
        noisy = noisy[(self.partners[net][self._sides][:, noisy] >= 0).all(axis=0)]
        return Split(np.flatnonzero(clean), noisy)

    @property
    def _sides(self) -> list[int]:
        return {"both": [KEEP_LEFT, KEEP_RIGHT], "left": [KEEP_RIGHT], "right": [KEEP_LEFT]}[
            self.config.repair.replace_side
        ]

    # ------------------------------------------------------------------ a step

    @property
    def repeatable(self) -> bool:  # type: ignore[override]
        return self.config.repair.label_when == "epoch"

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        if plan.main_step is None:
            return super().inputs(net, plan, augment)
        others = [] if plan.noisy is None else [plan.noisy, *self._lent(net, plan.noisy).values()]
        pad_shapes = self.loader.pad_shapes(plan.pairs, *others)
        beside = () if plan.noisy is None else self._beside(net, plan.noisy, augment, pad_shapes)
        clean = self.loader.batch(plan.pairs, augment, pad_shapes)
        labels = self.labels[1 - net, clean.pairs]
        if self.config.repair.labels == "hard":
            labels = torch.ones_like(labels)
        return RepairInputs(clean, self.negatives(plan.main_step), labels=labels, beside=beside)

    def pairs_used(self, net: int, plan: StepPlan) -> IntArray:
        lent = {} if plan.main_step is None or plan.noisy is None else self._lent(net, plan.noisy)
        return np.concatenate([super().pairs_used(net, plan), *lent.values()])

    def _lent(self, net: int, noisy: IntArray) -> dict[int, IntArray]:
        """By kept side: the pairs that lend their other item to these noisy ones."""
        if self.config.repair.noisy == "train":
            return {}
        return {side: self.partners[net, side, noisy] for side in self._sides}

    def _beside(
        self, net: int, noisy: IntArray, augment: np.random.Generator | None, pad_shapes: PadShapes
    ) -> tuple[NoisyBatch, ...]:
        """Noisy pairs as they are; or with a new right and with a new left item."""
        batch = self.loader.batch(noisy, augment, pad_shapes)
        if self.config.repair.noisy == "train":
            labels = self.labels[1 - net, batch.pairs]
            if self.config.repair.labels == "hard":
                labels = torch.zeros_like(labels)
            return (NoisyBatch(batch.left, batch.right, None, labels, self.false_negatives(batch)),)
        beside, own, groups = [], batch.left_groups, self.loader.pairs.left_groups
        for side, ids in self._lent(net, noisy).items():
            labels = self.partner_labels[net, side, batch.pairs]
            lenders = send(torch.from_numpy(groups[self.loader.pairs.link[ids]]), self.device)
            same = lenders[:, None] == lenders
            if side == KEEP_LEFT:
                same = same | (own[:, None] == own) | (own[:, None] == lenders)
                beside.append(
                    NoisyBatch(batch.left, self.loader.right.items(ids, pad_shapes[1]), "right", labels, same)
                )
            else:
                lent = self.loader.left.items(self.loader.pairs.link[ids], pad_shapes[0])
                beside.append(NoisyBatch(lent, batch.right, "left", labels, same))
        return tuple(beside)

    def loss(self, net: int, inputs: RepairInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        labels = inputs.labels
        if self.config.repair.label_when == "batch" and self._ranks:
            own = self._label_and_push(net, inputs.batch.pairs.cpu().numpy())
            labels = own if self.config.repair.labels == "rank" else labels
        loss = hard_loss(S, self._margin(labels), inputs.negatives, self.false_negatives(inputs.batch))
        if not inputs.beside:
            return StepResult(loss, S)
        beside = torch.stack([self._beside_loss(net, part, inputs.negatives) for part in inputs.beside]).mean()
        return StepResult(
            loss + self.config.repair.tau * beside, S, {"noisy_loss": beside / len(inputs.beside[0].labels)}
        )

    def _beside_loss(self, net: int, pairs: NoisyBatch, negatives: Tensor) -> Tensor:
        network = self.nets[net]
        with inference(network) if pairs.lent == "left" else nullcontext():
            left = network.encode_left(pairs.left)
        with inference(network) if pairs.lent == "right" else nullcontext():
            right = network.encode_right(pairs.right)
        return hard_loss(network.similarity(left, right), self._margin(pairs.labels), negatives, pairs.same)

    def _margin(self, labels: Tensor) -> Tensor:
        return soft_margin(labels, self.config.margin, self.config.coteaching.margin_base)

    def _label_and_push(self, net: int, pairs: IntArray) -> Tensor:
        """Labels of a batch by the network's own bank, into which it then goes (Algorithm 1)."""
        left, right = (encode(self.nets[net], self.loader, pairs) for encode in (encode_left, encode_right))
        correlation = bank_correlation(left.pooled, right.pooled, *self.banks[net].pooled())
        self.banks[net].push(left, right, pairs)
        return soft_labels(correlation, *label_bounds(correlation, self.config.repair.gamma_share))

    def after_step(self, net: int, plan: StepPlan) -> None:
        self.steps[net] += 1
        self._enqueue(net, plan.pairs)

    # ------------------------------------------------------------------ the bank

    def _enqueue(self, net: int, pairs: IntArray) -> None:
        """First in, first out: M pairs stay."""
        new = np.stack([pairs, np.full_like(pairs, self.steps[net])])
        self.queues[net] = np.concatenate([self.queues[net], new], axis=1)[:, -self.bank_size :]

    def _refill(self, net: int, view: EpochView) -> None:
        """Fills the bank with the queue, as the network sees its pairs now.

        A bank that is read once an epoch need not be filled at every step: this is cheaper, nothing in it is stale, and
        a checkpoint holds numbers instead of features.
        """
        bank = self.banks[net] = Bank(self.bank_size)
        pairs = self.queues[net][0]
        for start in range(0, len(pairs), CHUNK):
            chunk = pairs[start : start + CHUNK]
            bank.push(view.left_of(chunk), view.right_of(chunk), chunk)

    # ------------------------------------------------------------------ state and report

    def state_dict(self) -> dict[str, Any]:
        partners = {"partners": torch.from_numpy(self.partners), "partner_labels": self.partner_labels}
        plain = {"bounds": self.bounds, "steps": self.steps, "labels": self.labels}
        queues = [torch.from_numpy(queue) for queue in self.queues]
        # Banks that are refilled before they are read again need no saving.
        banks = [bank.state_dict() for bank in self.banks] if self.config.repair.label_when == "batch" else []
        return {**super().state_dict(), **partners, **plain, "queues": queues, "banks": banks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.partners, self.bounds, self.steps = state["partners"].numpy(), state["bounds"], state["steps"]
        self.labels, self.partner_labels = (state[name].to(self.device) for name in ("labels", "partner_labels"))
        self.queues = [queue.numpy() for queue in state["queues"]]
        for bank, saved in zip(self.banks, state["banks"], strict=False):
            bank.load_state_dict(saved, self.device)

    def examples(self, pairs: IntArray) -> Examples:
        labels = self.labels[:, send(torch.from_numpy(pairs), self.device)].mean(dim=0).cpu().numpy()
        new_right, new_left = self.partners.max(axis=0)[:, pairs]  # of one network or the other
        return Examples(pairs, self.w[:, pairs], labels, new_left, new_right)

    def _metrics(self, views: list[EpochView], correlations: list[Tensor], clean: BoolArray) -> list[dict[str, Any]]:
        """Of each network: the split, the labels and the bank at the start of this epoch."""
        wrong = self.loader.pairs.mismatched
        right = None if wrong is None else ~wrong
        rows = self.metrics(views, clean)
        for net, correlation in enumerate(correlations):
            rows[net] |= self._label_metrics(net, clean[net], right)
            rows[net] |= separation({"rank": correlation.cpu().numpy()}, right)
        return rows

    def _label_metrics(self, net: int, clean: BoolArray, right: BoolArray | None) -> dict[str, Any]:
        bank, (gamma, mu) = self.banks[net], self.bounds[net]
        return {
            **label_histograms(self.labels[net].cpu().numpy(), clean, right),
            "gamma": gamma,
            "mu": mu,
            "bank_pairs": len(bank),
            "bank_bytes": bank.nbytes,
            "bank_age": float(self.steps[net] - self.queues[net][1].mean()),
        }

    def _replaced(self, net: int, noisy: IntArray) -> ReplacedPairs:
        """How many pairs get new partners and, where the truth is known, how many of these are right."""
        pairs, fits = self.loader.pairs, {}
        if pairs.truth is not None and len(noisy):
            for side in self._sides:
                ids = self.partners[net, side, noisy]
                left, right = (noisy, ids) if side == KEEP_LEFT else (ids, noisy)
                same = pairs.left_groups[pairs.link[left]] == pairs.left_groups[pairs.truth[right]]
                fits["new_right_fits" if side == KEEP_LEFT else "new_left_fits"] = float(same.mean())
        return ReplacedPairs(pairs=len(noisy), **fits)
