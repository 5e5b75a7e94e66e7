"""Mend: the recommended method for data with mismatched pairs.

An audit before the training finds the pairs to trust. Two teachers with different architectures train on them by
InfoNCE, and on flagged items with partners of similar trusted items (`soft_partners`). Then a new network, the student,
learns from the similarities of both teachers. Mismatches cannot spoil these, so its batches have flagged items as well.

The model is the student with its teachers, or the student alone (`networks = 1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send, uncached
from mispair.config import Config
from mispair.errors import ConflictError
from mispair.functional.contrastive import distillation, info_nce, match_probabilities
from mispair.methods.base import EpochPairs, Method, Schedule, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.epoch_metrics import Examples, MethodReport, ReplacedPairs, selection
from mispair.methods.oracle import matched_pairs
from mispair.methods.soft_partners import SoftPartners, find_soft_partners
from mispair.models import FOR_SETS, FOR_VECTORS, Network, find
from mispair.models.inference import inference
from mispair.pairs.batches import Batch, PairLoader, corrupt
from mispair.pairs.vocabulary import UNK
from mispair.settings import MendSettings
from mispair.support.arrays import IntArray

TEACHERS, STUDENT = (0, 1), 2
RISING = 0.05  # share of a network's epochs over which its learning rate rises
CORRUPTED = 0.1  # share of the words and regions that are replaced in training
BESIDE = 111  # stream of random numbers


@dataclass(frozen=True)
class MendInputs(StepInputs):
    """Trusted pairs and flagged items; the latter have other partners for a teacher, and none for the student."""

    weights: Tensor | None = field(default=None, kw_only=True)  # (B,) of each pair as a match, for a teacher
    uncorrupted: Batch | None = field(default=None, kw_only=True)  # what the teachers see, for the student


class Mend(Method):
    """Two teachers train on the pairs that an audit trusts, then a student learns from both (recommended)."""

    networks = 3
    audits = True
    schedule = Schedule(batch_size=96, longer=1.6, least_epochs=(16, 8), warmup=0)
    alike = False
    settings = (MendSettings,)
    ignores = ("margin", "negatives_start", "negatives_end", "hardening_steps", "lr_decay_epochs")
    distributed = True

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.check(config)
        self.device = loader.left.device
        self.epoch = -1  # the present one, warm-up included
        self.trusted = np.zeros(len(loader.pairs), dtype=bool)
        self.trusted[self.unflagged] = True
        self._flagged = np.flatnonzero(~self.trusted)
        self.partners: SoftPartners | None = None  # until the first epoch, and if all pairs are trusted

    @classmethod
    def check(cls, config: Config) -> None:
        if config.total_epochs < 2:
            expected = "2 or more for `method=mend`, which trains teachers and then a student"
            raise ConflictError(str(config.total_epochs), where="epochs", expected=expected)

    @classmethod
    def variant(cls, config: Config) -> type[Mend]:
        variants = {"audit": Mend, "all": MendUnaudited, "truth": MendOracle}
        return variants[config.of(MendSettings).trust] if cls is Mend else cls

    @classmethod
    def network_configs(cls, config: Config) -> list[Config]:
        usual = FOR_VECTORS if find(config.model).takes_vectors else FOR_SETS
        second = config.of(MendSettings).second_model or usual
        return [config, replace(config, model=second), config]

    @property
    def own(self) -> MendSettings:
        return self.config.of(MendSettings)

    # ------------------------------------------------------------------ before an epoch

    @classmethod
    def student_from(cls, config: Config) -> int:
        """Return the first epoch of the student (from 0, warm-up included)."""
        total = config.total_epochs
        return min(max(1, round((1 - config.of(MendSettings).student_share) * total)), total - 1)

    @property
    def teacher_epochs(self) -> int:
        return self.student_from(self.config)

    def trained_networks(self, epoch: int) -> Sequence[int]:
        return TEACHERS if epoch < self.teacher_epochs else (STUDENT,)

    def kept_networks(self, epoch: int) -> list[int]:
        if epoch < self.teacher_epochs:
            return list(TEACHERS)
        return [STUDENT, *reversed(TEACHERS)][: self.config.networks]

    def learning_rate(self, net: int, epoch: float) -> float:
        """Rise, then fall to 0 as a cosine, for the teachers and for the student. It never starts at zero."""
        teachers = self.teacher_epochs
        start, end = (teachers, self.config.total_epochs) if net == STUDENT else (0, teachers)
        done = (epoch - start) / (end - start)
        if done < RISING:
            return self.config.lr * max(done / RISING, 0.01)
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * (done - RISING) / (1 - RISING)))

    def begin_warmup(self) -> list[EpochPairs]:
        return self._begin(self.epoch + 1)

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:
        return self._begin(self.config.warmup_epochs + epoch)

    def _begin(self, epoch: int) -> list[EpochPairs]:
        self.epoch = epoch
        if self.partners is None and not self.trusted.all():
            self.partners = find_soft_partners(self.loader.pairs, self.trusted, self.device)
        training, nothing = EpochPairs(self.unflagged), EpochPairs(np.empty(0, dtype=np.int64))
        return [training if net in self.trained_networks(epoch) else nothing for net in range(len(self.nets))]

    # ------------------------------------------------------------------ a step

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> MendInputs:
        lefts, rights = self._items(net, plan)
        pairs = self.loader.pairs
        shapes = self.loader.left.pad_shape(pairs.link[lefts]), self.loader.right.pad_shape(rights)
        batch = self.loader.crossed_batch(lefts, rights, augment, shapes)
        if net == STUDENT:
            plain = batch if augment is None else self.loader.crossed_batch(lefts, rights, None, shapes)
            return MendInputs(batch, self.negatives(0), uncorrupted=plain)
        weights = torch.ones(len(rights))
        weights[len(plan.pairs) :] = self.own.flagged_weight
        return MendInputs(batch, self.negatives(0), weights=send(weights, self.device))

    def _items(self, net: int, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Choose the pairs of the left items of a step, and those of its right items."""
        if self.partners is None:
            return plan.pairs, plan.pairs
        rng, count = self.rng(BESIDE, self.epoch, net, plan.position), self.own.flagged_size
        if net == STUDENT:
            count = min(count, len(self._flagged))
            lefts, rights = (rng.choice(self._flagged, count, replace=False) for _ in range(2))
        else:
            lefts, rights = self.partners.draw(count, rng)
        return np.concatenate([plan.pairs, lefts]), np.concatenate([plan.pairs, rights])

    def pairs_used(self, net: int, plan: StepPlan) -> IntArray:
        return np.unique(np.concatenate(self._items(net, plan)))

    def warmup_loss(self, net: int, inputs: MendInputs) -> StepResult:  # type: ignore[override]
        return self.loss(net, inputs)

    def loss(self, net: int, inputs: MendInputs) -> StepResult:
        network, batch = self.nets[net], inputs.batch
        temperature = self.own.temperature
        if not network.augments:  # else the batch is augmented as the model wants it
            left, right = (corrupt(side, CORRUPTED, UNK) for side in (batch.left, batch.right))
            batch = replace(batch, left=left, right=right)
        S = similarity(network, batch)
        t = network.bounded(S)
        if inputs.uncorrupted is None:
            assert inputs.weights is not None
            rows = info_nce(t, temperature, self.false_negatives(batch)) * inputs.weights
            loss = rows.sum() / inputs.weights.sum().clamp(min=1)
            return StepResult(loss, S, logged=loss)
        with torch.no_grad(), uncached(self.device):
            taught = match_probabilities(self._teacher_scores(inputs.uncorrupted), temperature)
        return StepResult(distillation(t, temperature, *taught).sum(), S)

    def _teacher_scores(self, batch: Batch) -> list[Tensor]:
        """(B, B) score of each teacher, between -1 and 1."""
        scores = []
        for number in TEACHERS:
            teacher = self.nets[number]
            with inference(teacher):
                scores.append(teacher.bounded(similarity(teacher, batch)))
        return scores

    # ------------------------------------------------------------------ state and report

    def state_dict(self) -> dict[str, Any]:
        arrays = None
        if self.partners is not None:
            found = self.partners
            arrays = [torch.from_numpy(part) for part in (found.own, found.keeps_right, found.lenders, found.odds)]
        return {"epoch": self.epoch, "partners": arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        arrays = state["partners"]
        self.partners = None if arrays is None else SoftPartners(*(part.numpy() for part in arrays))

    def report(self) -> MethodReport:
        """Report the quality of the trusted pairs and of the soft partners."""
        metrics = selection("clean", self.trusted, self.matching)
        return MethodReport.of_networks([metrics], replaced=self._replaced())

    def _replaced(self) -> list[ReplacedPairs] | None:
        """Probability of a right soft partner, for flagged captions; unknown for images."""
        if self.partners is None:
            return None
        pairs, found = self.loader.pairs, self.partners
        if pairs.truth is None:
            return [ReplacedPairs(pairs=len(found))]
        groups, rows = pairs.left_groups, found.keeps_right
        right = groups[pairs.link[found.lenders[rows]]] == groups[pairs.truth[found.own[rows], None]]
        return [ReplacedPairs(pairs=len(found), new_left_fits=float((found.odds[rows] * right).sum(axis=1).mean()))]

    def examples(self, pairs: IntArray) -> Examples:
        """Return the trust of these pairs, and the most likely soft partners of the others."""
        new = {keeps_right: np.full(len(self.trusted), -1) for keeps_right in (True, False)}
        if self.partners is not None:
            for keeps_right, partners in new.items():
                rows = self.partners.keeps_right == keeps_right
                partners[self.partners.own[rows]] = self.partners.lenders[rows, 0]
        labels = self.trusted[pairs].astype(np.float32)
        return Examples(pairs, labels=labels, new_left=new[True][pairs], new_right=new[False][pairs])


class MendUnaudited(Mend):
    """Mend without an audit: trust all pairs."""

    audits = False

    @property
    def unflagged(self) -> IntArray:
        return np.arange(len(self.loader.pairs))


class MendOracle(Mend):
    """Mend on the pairs known to match. With `flagged_size` 0 it is its upper bound: the same training on
    matched pairs only."""

    audits = False
    uses_truth = True

    @cached_property
    def unflagged(self) -> IntArray:
        return matched_pairs(self.loader.pairs)
