"""Co-teaching (from NCR): each of two networks splits the pairs into clean and noisy ones for the other."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mispair.config import Config
from mispair.functional.gaussian_mixture import FloatArray, clean_probability, is_clean
from mispair.functional.losses import soft_margin
from mispair.methods.base import EpochPairs, Method
from mispair.methods.epoch_metrics import Examples, MethodReport, selection, separation
from mispair.methods.epoch_view import EpochView, epoch_view
from mispair.models import Network
from mispair.pairs.batches import Batch, PadShapes, PairLoader
from mispair.settings import CoTeachingSettings
from mispair.support.arrays import IntArray, Mask

SURE = 0.99  # the highest probability that losses or an audit can give


class CoTeaching(Method):
    """Base class of NCR, BiCro and REPAIR."""

    networks = 2
    settings: tuple[type, ...] = (CoTeachingSettings,)
    distributed = True
    order: Literal["together", "after", "before"] = "together"  # of noisy pairs, as in `EpochPairs`

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.w = np.ones((2, len(loader.pairs)), dtype=np.float32)  # probability of being clean, by each network
        self.mean_losses: FloatArray = np.zeros((2, 0), dtype=np.float32)  # (2, N) from the first main epoch on
        self._report: MethodReport | None = None

    @classmethod
    def noisy_from(cls, config: Config) -> int | None:
        start = int(config.of(CoTeachingSettings).noisy_start * config.epochs + 1e-9)
        return start if start < config.epochs else None

    @property
    def coteaching(self) -> CoTeachingSettings:
        return self.config.of(CoTeachingSettings)

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:
        config = self.config
        batches = self.random_batches(epoch)
        views = [
            epoch_view(n, self.loader, config.margin, batches, mask=config.mask_false_negatives) for n in self.nets
        ]
        self.w = self.clean_probabilities(np.stack([view.losses.cpu().numpy() for view in views]))
        if (score := self.loader.pairs.match_score) is not None:
            self.w = combine_odds(self.w, score)
        clean = np.stack([is_clean(w, self.coteaching.clean_threshold) for w in self.w])
        parts = self.divide(epoch, views, clean)
        self._report = MethodReport.of_networks(self.metrics(views, clean), **self.shared_metrics(epoch, parts))
        return parts

    def clean_probabilities(self, losses: FloatArray) -> FloatArray:
        """(2, N) probability w of each pair by each network."""
        if self.coteaching.split_losses == "single":
            return np.stack([clean_probability(row) for row in losses]).astype(np.float32)
        # The root brings the many small and the few large losses close enough to two Gaussians.
        roots = np.sqrt(self.smoothed(losses))
        return np.stack([clean_probability(row, converged=True) for row in roots]).astype(np.float32)

    def smoothed(self, losses: FloatArray) -> FloatArray:
        """Smooth losses over the epochs: a mismatched pair, memorised by now, had a high loss before.

        A joint split also averages over both networks, because their mistakes differ most after the warm-up.
        """
        known, memory = bool(self.mean_losses.size), np.float32(self.coteaching.split_memory)
        self.mean_losses = memory * self.mean_losses + (1 - memory) * losses if known else losses
        joint = np.broadcast_to(self.mean_losses.mean(axis=0), self.mean_losses.shape)
        return joint if self.coteaching.split_losses == "joint" else self.mean_losses

    def divide(self, epoch: int, views: list[EpochView], clean: Mask) -> list[EpochPairs]:  # noqa: ARG002 - a hook
        """Return the pairs of each network; `clean` (2, N) is the judgement of each network."""
        by_peer = clean[::-1]
        if not self.noisy_started(epoch):
            return [EpochPairs(np.flatnonzero(row), order=self.order) for row in by_peer]
        return [EpochPairs(np.flatnonzero(row), np.flatnonzero(~row), self.order) for row in by_peer]

    def augmented(
        self, pairs: IntArray, augment: np.random.Generator | None, pad_shapes: PadShapes
    ) -> tuple[Batch, Batch]:
        """Load a batch, and the same pairs without augmentation."""
        batch = self.loader.batch(pairs, augment, pad_shapes)
        return batch, batch if augment is None else self.loader.batch(pairs, None, pad_shapes)

    def margin(self, labels: Tensor) -> Tensor:
        """Margin of each pair by its label (Eq. 2)."""
        return soft_margin(labels, self.config.margin, self.coteaching.margin_base)

    def noisy_started(self, epoch: int) -> bool:
        """Whether noisy pairs take part in main epoch `epoch`."""
        start = self.noisy_from(self.config)
        return start is not None and epoch >= start

    def metrics(self, views: list[EpochView], clean: Mask) -> list[dict[str, Any]]:
        """Return metrics of each network's split, by their names in `MethodReport`."""
        return [
            {
                **selection("clean", clean[net], self.matching),
                "spread": view.spread,
                **separation({"loss": -view.losses.cpu().numpy(), "w": self.w[net]}, self.matching),
            }
            for net, view in enumerate(views)
        ]

    def shared_metrics(self, epoch: int, parts: list[EpochPairs]) -> dict[str, Any]:  # noqa: ARG002 - a hook
        """Return metrics of both networks together."""
        return {}

    def report(self) -> MethodReport | None:
        return self._report

    def examples(self, pairs: IntArray) -> Examples:
        return Examples(pairs, w=self.w[:, pairs])

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.from_numpy(self.w), "mean_losses": torch.from_numpy(self.mean_losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w, self.mean_losses = state["w"].numpy(), state["mean_losses"].numpy()


def combine_odds(w: FloatArray, score: FloatArray) -> FloatArray:
    """Combine the probabilities of being clean by losses, w (..., N), and by an independent audit.

    The odds are multiplied; their common prior, the fraction of matching pairs, counts once. A network that has
    memorised all pairs is sure of them all, so neither probability counts for more than `SURE`.

    >>> combine_odds(np.array([0.2, 0.5, 0.8]), np.array([0.8, 0.5, 0.2])).round(1)
    array([0.5, 0.5, 0.5], dtype=float32)
    """
    odds = [_odds(np.clip(np.asarray(p, dtype=np.float64), 1 - SURE, SURE)) for p in (w, score, score.mean())]
    both = odds[0] * odds[1] / odds[2]
    return np.asarray(both / (1 + both), dtype=np.float32)


def _odds(p: FloatArray) -> FloatArray:
    return np.asarray(p / (1 - p))
