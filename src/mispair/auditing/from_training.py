"""The training pairs of a run as a source, with vectors and scores of its networks.

This is the only module of the audit that knows trained models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.compute.devices import autocast
from mispair.config import BEST
from mispair.models import CosineNetwork
from mispair.models.inference import inference
from mispair.pairs.batches import SideLoader, random_batches
from mispair.pairs.layouts import opening
from mispair.pairs.layouts.arrays import from_vectors
from mispair.pairs.noise import with_noise
from mispair.pairs.pairs import Pairs
from mispair.pairs.source import Source
from mispair.retrieval.matcher import Matcher, load_for
from mispair.support.arrays import IntArray

Array = npt.NDArray[np.floating]
BATCH = 128  # pairs whose items are compared with each other
RIVALS = 4  # best-scoring other items that count
_WITHOUT_FILES = 'Call mispair.audit with what matcher.encode(items, "left") and matcher.encode(items, "right") give'


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a training run."""
    return (folder / BEST).is_file()


def from_run(run: Path, device: str = "auto", images: Path | None = None) -> Source:
    """The training pairs of a run with its noise, by the vectors of its networks; the two sides share a space."""
    matcher = Matcher.load(run, device)
    config = matcher.config
    pairs = with_noise(config, load_for(matcher, "train", advice=_WITHOUT_FILES))
    left, right = matcher.encode(pairs.left, "left"), matcher.encode(pairs.right, "right")
    source = from_vectors(pairs, left, right, images or opening.find_folder(config.data) / "images")
    source = replace(source, joint=True)
    if all(isinstance(network, CosineNetwork) for network in matcher.networks):
        return source  # the measures of the vectors contain all that these networks know
    return replace(source, network_score=NetworkScore(matcher, pairs))


class NetworkScore:
    """Score of two items by networks, less the score of the best rival of either in a random batch, (n,).

    The hinge loss of a pair without its margin, beyond which the loss is zero.
    """

    def __init__(self, matcher: Matcher, pairs: Pairs) -> None:
        self.matcher, self.link, self.groups = matcher, pairs.link, pairs.left_groups
        self.left, self.right = (SideLoader(side, matcher.device) for side in (pairs.left, pairs.right))

    def __call__(self, lefts: IntArray, rights: IntArray) -> Array:
        found = np.zeros(len(lefts), dtype=np.float32)
        for places in random_batches(len(lefts), BATCH, np.random.default_rng(0)) if len(lefts) else ():
            found[places] = self._batch(lefts[places], rights[places])
        return found

    def _batch(self, lefts: IntArray, rights: IntArray) -> Array:
        rows = self.link[lefts]
        own, owners = self.groups[rows], self.groups[self.link[rights]]
        # Neither another caption of its image nor an item's own partner is a rival of a shuffled pair.
        same = torch.from_numpy((own[:, None] == own) | (own[:, None] == owners)).to(self.matcher.device)
        contrasts = []
        with autocast(self.matcher.device, self.matcher.config.precision):
            for network in self.matcher.networks:
                with inference(network):
                    left, right = self.left.items(rows), self.right.items(rights)
                    S = network.similarity(network.encode_left(left), network.encode_right(right)).float()
                    contrasts.append(contrast(S, same))
        return torch.stack(contrasts).mean(0).cpu().numpy()


def contrast(S: Tensor, same: Tensor) -> Tensor:
    """Twice the similarity of each pair on the diagonal of (n, n) less its best rivals, (n,).

    Args:
        S: (n, n) similarities.
        same: (n, n) items that are not rivals.
    """
    own, others = S.diagonal(), S.masked_fill(same, -torch.inf)
    return 2 * own - _best_rivals(others, own) - _best_rivals(others.T, own)


def _best_rivals(others: Tensor, own: Tensor) -> Tensor:
    """Mean of the best few of each row; without a rival, the pair's own similarity."""
    best = others.topk(min(RIVALS, others.shape[1]), dim=1).values
    there = best.isfinite()
    mean = best.masked_fill(~there, 0).sum(1) / there.sum(1).clamp(min=1)
    return torch.where(there.any(1), mean, own)
