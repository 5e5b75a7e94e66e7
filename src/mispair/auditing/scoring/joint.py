"""Vectors of encoders with a common space, such as those of CLIP: what their cosines say about a pair.

The normalised cosine is negCLIPLoss of Wang et al., "CLIPLoss and Norm-Based Data Selection Methods for Multimodal
Contrastive Learning" (NeurIPS 2024): the cosine s_ii of a pair, less what either item has with any other one,

    s_ii - t/2 * (log mean_j exp(s_ij / t) + log mean_j exp(s_ji / t)).

Items that are similar to everything lose by it, and special ones win. The paper takes the temperature t of the encoder,
0.01, and random batches of the data. Here the others are trusted pairs, both sides are centred, and t goes with the
spread of the cosines, because that of an unknown encoder is not known.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.calibration import separated, separation
from mispair.auditing.scoring.folds import shuffled
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import IntArray

TEMPERATURE = 0.25  # times the standard deviation of the cosines of shuffled pairs
LEAST_SPREAD = 1e-6
PIECE = 4096  # pairs at a time
OTHERS = 1024  # pairs that all are compared with before any is trusted
CLEAR, SURE = 0.55, 5.0  # AUROC of pairs against shuffled ones, and standard errors above chance, to see a common space


def temperature(left: Tensor, right: Tensor) -> Tensor:
    """The temperature for items like these: M pairs (M, D) of unit length, in random order."""
    spread = (left * right.roll(1, dims=0)).sum(1).std(correction=0)
    return TEMPERATURE * spread.clamp(min=LEAST_SPREAD)


def normalised_cosine(
    left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor, lefts: Tensor, rights: Tensor
) -> Tensor:
    """(n,) cosines of pairs, less what their items have with others.

    Pair i has the items `lefts[i]` of (u, D) and `rights[i]` of (v, D). The others are M pairs (M, D). All items are of
    unit length.
    """
    scale = temperature(other_left, other_right)
    to_right, to_left = _log_mean_exp(left, other_right, scale), _log_mean_exp(right, other_left, scale)
    pieces = zip(torch.split(lefts, PIECE), torch.split(rights, PIECE), strict=True)
    cosine = torch.cat([(left[a] * right[b]).sum(1) for a, b in pieces])
    return cosine - scale / 2 * (to_right[lefts] + to_left[rights])


def _log_mean_exp(items: Tensor, others: Tensor, scale: Tensor) -> Tensor:
    """(n,) log of the mean exponential of the cosines of each item with others, over the temperature."""
    scaled = others.T / scale
    parts = [torch.logsumexp(part @ scaled, dim=1) for part in torch.split(items, PIECE)]
    return torch.cat(parts) - math.log(len(others))


def normalised_cosines(x: Tensor, y: Tensor, lefts: IntArray, rights: IntArray) -> tuple[FloatArray, FloatArray]:
    """The same of pairs of centred unit vectors (n, D), (n,), and of their left and right items in some rows (w,)."""
    chosen = np.random.default_rng(0).permutation(len(x))[:OTHERS]
    rows = torch.arange(len(x), device=x.device)
    strange = (torch.from_numpy(items).to(x.device) for items in (lefts, rights))
    both = [torch.cat([rows, items]) for items in strange]
    found = normalised_cosine(x, y, x[chosen], y[chosen], both[0], both[1]).double().cpu().numpy()
    return found[: len(x)], found[len(x) :]


def share_a_space(left: Tensor, right: Tensor, fold: npt.NDArray[np.uint8], *groups: IntArray) -> bool:
    """Whether raw vectors (n, D) and (n, E) seem to come from encoders with a common space.

    They do if they are equally wide, and the cosines of pairs are clearly above those of shuffled pairs.
    """
    if left.shape[1] != right.shape[1]:
        return False
    x, y = (normalize(side - side.mean(0), dim=1) for side in (left, right))
    partner = shuffled(fold, *groups)
    rows = np.flatnonzero(partner >= 0)
    if not len(rows):
        return False
    paired = (x * y).sum(1).cpu().numpy()
    null = (x[rows] * y[partner[rows]]).sum(1).cpu().numpy()
    return separation(paired, null) > CLEAR and separated(paired, null, SURE)
