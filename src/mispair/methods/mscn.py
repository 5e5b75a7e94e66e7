"""MSCN: similarities corrected by a meta network (Han et al., Noisy Correspondence Learning with Meta Similarity
Correction, CVPR 2023).

The last layer of a similarity network is the meta network. It learns from a few pairs known to match and as many random
ones: before each step it is changed so that a step of the other layers would separate these better (mscn_meta.py). The
other layers then take their step, with the similarity as the label: a low similarity makes a small margin. Before every
main epoch each network drops pairs for the other, by a mixture of Beta distributions over the similarities.

Differences from the published code:
- The known pairs are taken out of training. On Flickr30K and COCO the published ones are validation pairs, and also
  choose the best epoch.
- Both networks split at the start of an epoch. The published second network splits after the first has trained.
- The virtual step has no dropout. Its gradient is clipped: on Flickr8k it is 200 times as long as that of the real
  step, and the known pairs teach the meta network nothing.
- One Adam trains all layers in the warm-up and the other layers in the main epochs. The published code starts new ones.
- Before the first main epoch the meta network is calibrated to probabilities. Low similarities would make all margins
  vanish, and the network collapse within 40 steps (Flickr8k, SGR).
- The margin of a pair counts for the pair as the anchor, not along the columns in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from mispair.compute.devices import full_precision, send
from mispair.compute.optimizer import make as make_optimizer
from mispair.compute.optimizer import restore, set_lr
from mispair.config import Config
from mispair.errors import ConflictError, DataError, TooFewError
from mispair.functional.beta_mixture import by_moments, fit_betas, inner
from mispair.functional.gaussian_mixture import above
from mispair.functional.losses import hard_loss, meta_margin
from mispair.methods.base import EpochPairs, Method, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.epoch_metrics import MethodReport, selection, separation
from mispair.methods.mscn_meta import frozen, length, meta_gradient, score_layer
from mispair.models import MODELS, Network, find
from mispair.models.inference import inference
from mispair.models.sgraf import SimilarityVectors
from mispair.pairs.batches import Batch, PairLoader
from mispair.pairs.pairs import Pairs, Tokens
from mispair.settings import CoTeachingSettings, MscnSettings, SgrafSettings
from mispair.support.arrays import FloatArray, IntArray

META_SET, MISMATCHED, META_ORDER = 110, 111, 112  # streams of random numbers
HIDDEN = 64  # width of the published meta network
CHUNK = 512  # pairs scored at a time
WRONG, RIGHT = 0, 1  # components of the mixture and labels of known pairs


@dataclass(frozen=True)
class LabelledPairs:
    """Matched and mismatched pairs with known labels, equally many."""

    left: IntArray  # (2M,) pairs of the left items
    right: IntArray  # (2M,) pairs of the right items
    labels: IntArray  # (2M,)


@dataclass(frozen=True)
class MscnInputs(StepInputs):
    """A batch of pairs, and known pairs."""

    known: Batch = field(kw_only=True)
    labels: Tensor = field(kw_only=True)  # (n,) 1.0 or 0.0, of the known pairs


class Mscn(Method):
    """Similarities corrected by a meta network that learns from pairs known to match (Han et al., CVPR 2023).

    `meta_set` has training pairs known to match; no step trains on them. `known` has the meta set and as many
    mismatched pairs for each network, new ones in each epoch.
    """

    networks = 2
    repeatable = False
    uses_truth = True
    settings = (CoTeachingSettings, MscnSettings)
    ignores = ("split_losses", "split_memory", "noisy_start", "margin_base")
    distributed = True

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.meta_set = meta_set(loader.pairs, self.own.meta_share, self.rng(META_SET))
        self.rest = np.setdiff1d(np.arange(len(loader.pairs)), self.meta_set)
        settings = replace(config, lr=self.own.meta_lr, weight_decay=0.0)
        self.meta_optimizers = [make_optimizer(settings, list(score_layer(net).parameters())) for net in nets]
        self._report: MethodReport | None = None
        self._start(0)

    @property
    def own(self) -> MscnSettings:
        return self.config.of(MscnSettings)

    @classmethod
    def adapted(cls, config: Config) -> Config:
        if not issubclass(find(config.model), SimilarityVectors):
            fitting = [name for name, kind in MODELS.items() if issubclass(kind, SimilarityVectors)]
            expected = f"a model with similarity vectors for `method=mscn`: {' or '.join(fitting)}"
            raise ConflictError(config.model, where="model", expected=expected)
        return config if config.of(SgrafSettings).score_hidden else config.changed({"score_hidden": HIDDEN})

    # ------------------------------------------------------------------ before an epoch

    def begin_warmup(self) -> list[EpochPairs]:
        return [EpochPairs(self.rest)] * 2

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:
        self._start(epoch)
        matching = None if self.matching is None else self.matching[self.rest]
        kept, rows = [], []
        for net, known in zip(self.nets, self.known, strict=True):
            if epoch == 0:
                scale_to_odds(net, pair_scores(net, self.loader, known.left, known.right), known.labels)
            left, right = (np.concatenate([side, self.rest]) for side in (known.left, known.right))
            similarities = pair_scores(net, self.loader, left, right)
            of_known, of_rest = np.split(similarities, [len(known.labels)])
            w = clean_posterior(of_known, known.labels, of_rest)
            kept.append(above(w, self.config.of(CoTeachingSettings).clean_threshold))
            scores = separation({"similarity": of_rest, "w": w}, matching)
            known_scores = separation({"known": of_known}, known.labels == RIGHT)
            rows.append({**selection("clean", kept[-1], matching), **scores, **known_scores})
        self._report = MethodReport.of_networks(rows)
        return [EpochPairs(self.rest[chosen]) for chosen in kept[::-1]]  # by the other network

    def _start(self, epoch: int) -> None:
        """Set the learning rates and the known pairs of an epoch."""
        self.epoch, decay = epoch, self.config.decay(epoch)
        self.lr = self.config.lr * decay
        for optimizer in self.meta_optimizers:
            set_lr(optimizer, self.own.meta_lr * decay)
        pairs = self.loader.pairs
        self.known = [known_pairs(pairs, self.meta_set, self.rng(MISMATCHED, epoch, net)) for net in range(2)]

    # ------------------------------------------------------------------ a step

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        given = super().inputs(net, plan, augment)
        if plan.main_step is None:
            return given
        known, rows = self.known[net], self.known_rows(net, plan.position)
        left, right, loader = known.left[rows], known.right[rows], self.loader
        shapes = loader.left.pad_shape(loader.pairs.link[left]), loader.right.pad_shape(right)
        labels = send(torch.from_numpy(known.labels[rows].astype(np.float32)), loader.left.device)
        batch = loader.crossed_batch(left, right, None, shapes)
        return MscnInputs(given.batch, given.negatives, known=batch, labels=labels)

    def pairs_used(self, net: int, plan: StepPlan) -> IntArray:
        pairs = super().pairs_used(net, plan)
        if plan.main_step is None:
            return pairs
        known, rows = self.known[net], self.known_rows(net, plan.position)
        return np.concatenate([pairs, known.right[rows], known.left[rows]])

    def known_rows(self, net: int, position: int) -> IntArray:
        """Choose the known pairs of this step: round after round, each in a new order."""
        count = len(self.known[net].labels)
        size = min(self.config.batch_size, count)
        turn, place = divmod(position, count // size)
        return self.rng(META_ORDER, self.epoch, net, turn).permutation(count)[place * size : (place + 1) * size]

    def loss(self, net: int, inputs: MscnInputs) -> StepResult:
        network = self.nets[net]
        meta_loss, norm = self._correct(net, inputs)
        with frozen(score_layer(network)):
            S = similarity(network, inputs.batch)
        # Known pairs that are not finite must stop the run as well: 0 times infinity is not a number.
        return StepResult(self.triplet(S, inputs) + 0 * norm, S, {"meta_loss": meta_loss})

    def triplet(self, S: Tensor, inputs: StepInputs) -> Tensor:
        """The training loss L. The label of a pair is its own similarity, detached."""
        margin = meta_margin(S.detach().diagonal(), self.config.margin)
        return hard_loss(S, margin, inputs.negatives, self.false_negatives(inputs.batch))

    def _correct(self, net: int, inputs: MscnInputs) -> tuple[Tensor, Tensor]:
        """Take a step of the meta network; return the loss of the known pairs and the norm of its gradient."""
        network, optimizer = self.nets[net], self.meta_optimizers[net]
        gradient = meta_gradient(
            network,
            scores=lambda network: similarity(network, inputs.batch),
            loss=lambda S: self.triplet(S, inputs),
            meta_loss=lambda network: known_loss(network, inputs.known, inputs.labels),
            lr=self.lr,
            clip=self.config.grad_clip,
        )
        parameters = list(score_layer(network).parameters())
        for parameter, part in zip(parameters, gradient.total, strict=True):
            parameter.grad = part
        norm = length(gradient.total)
        optimizer.found_inf = (~torch.isfinite(norm)).to(torch.float32)  # type: ignore[attr-defined] # holds the update back
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return gradient.loss, norm

    # ------------------------------------------------------------------ state and report

    def state_dict(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for optimizer in self.meta_optimizers]
        return {"epoch": self.epoch, "meta_optimizers": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.meta_optimizers, state["meta_optimizers"], strict=True):
            restore(optimizer, saved)
        self._start(state["epoch"])

    def report(self) -> MethodReport | None:
        return self._report


def meta_set(pairs: Pairs, share: float, rng: np.random.Generator) -> IntArray:
    """Draw a share of all pairs from those known to match, as sorted numbers of pairs."""
    mismatched = pairs.mismatched
    if mismatched is None:
        what = "it is not known which pairs match"
        advice = "Inject noise with `noise_ratio`, or give Pairs whose truth is known."
        raise DataError(what, where=pairs.name, expected="some known pairs for `method=mscn`", advice=advice)
    right, count = np.flatnonzero(~mismatched), round(share * len(pairs))
    if count < 2 or len(pairs) - count < 2:
        what = f"a meta set of {count:,} of {len(pairs):,} pairs by `meta_share={share:g}`"
        raise TooFewError(what, where=pairs.name, expected="at least 2 in it and 2 others")
    if len(right) < count:
        what = f"{len(right):,} pairs are known to match"
        expected = f"{count:,} for the meta set by `meta_share={share:g}`"
        raise TooFewError(what, where=pairs.name, expected=expected, advice="Lower `meta_share`.")
    return np.sort(rng.choice(right, size=count, replace=False))


def known_pairs(pairs: Pairs, chosen: IntArray, rng: np.random.Generator) -> LabelledPairs:
    """Return the chosen pairs and as many mismatched ones: distinct random right items with left items of any pair."""
    right = rng.choice(len(pairs), size=len(chosen), replace=False)
    left = rng.integers(len(pairs), size=len(chosen))
    while (fits := pairs.left_groups[pairs.link[left]] == pairs.right_groups[right]).any():
        left[fits] = rng.integers(len(pairs), size=int(fits.sum()))
    labels = np.repeat([RIGHT, WRONG], len(chosen))
    return LabelledPairs(np.concatenate([chosen, left]), np.concatenate([chosen, right]), labels)


def pair_scores(network: Network, loader: PairLoader, left: IntArray, right: IntArray) -> FloatArray:
    """(n,) similarity of the left item of pair `left[i]` with the right item of `right[i]` in evaluation mode."""
    side = loader.pairs.right
    order = np.argsort(side.lengths[right], kind="stable") if isinstance(side, Tokens) else np.arange(len(right))
    found = []
    with inference(network):
        for start in range(0, len(order), CHUNK):
            rows = order[start : start + CHUNK]
            a = network.encode_left(loader.left.items(loader.pairs.link[left[rows]]))
            found.append(network.pair_similarity(a, network.encode_right(loader.right.items(right[rows]))))
    scores = np.empty(len(order), dtype=np.float32)
    scores[order] = torch.cat(found).float().cpu().numpy()
    return scores


def clean_posterior(known: FloatArray, labels: IntArray, x: FloatArray) -> FloatArray:
    """Probability of a match, for each similarity in `x`.

    Two Beta distributions are fitted to all similarities, from those of the known mismatched and matching pairs. The
    one with the higher mean is that of the matching pairs.
    """
    mixture = fit_betas(x, by_moments(known, np.stack([labels == WRONG, labels == RIGHT]).astype(np.float64)))
    return mixture.posterior(x, int(mixture.means.argmax()))


def scale_to_odds(network: Network, scores: FloatArray, labels: IntArray) -> None:
    """Calibrate the score layer: similarities of known pairs become probabilities.

    No order of similarities changes, and nothing at all where known pairs tell that high ones mean mismatched pairs.
    """
    slope, shift = log_odds(scores, labels)
    if slope > 0:
        last = [layer for layer in score_layer(network).modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            last.weight.mul_(slope)
            last.bias.mul_(slope).add_(shift)


def log_odds(scores: FloatArray, labels: IntArray) -> tuple[float, float]:
    """Slope and shift from the scores' log odds to log odds of a match (Platt, 1999)."""
    from sklearn.linear_model import LogisticRegression  # here, because only this method needs it and it loads slowly

    x = inner(scores)
    x = np.log(x) - np.log1p(-x)
    counts = np.bincount(labels, minlength=2)
    targets = np.array([1 / (counts[WRONG] + 2), (counts[RIGHT] + 1) / (counts[RIGHT] + 2)])[labels]
    # A soft target is a row of each class, weighted by it.
    classes, weights = np.repeat([RIGHT, WRONG], len(x)), np.concatenate([targets, 1 - targets])
    found = LogisticRegression(C=1e6, solver="newton-cholesky", tol=1e-9).fit(np.tile(x, 2)[:, None], classes, weights)
    return float(found.coef_[0, 0]), float(found.intercept_[0])


def known_loss(network: Network, batch: Batch, labels: Tensor) -> Tensor:
    """The meta loss M: cross-entropy of the similarities of known pairs."""
    S = network.pair_similarity(network.encode_left(batch.left), network.encode_right(batch.right))
    with full_precision(S):  # autocast refuses this loss
        return binary_cross_entropy(S, labels.to(S.dtype))
