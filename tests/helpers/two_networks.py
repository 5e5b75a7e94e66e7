"""Plain loops and small methods for the tests of methods whose two networks teach each other."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

import mispair
from mispair.config import Config
from mispair.errors import MispairError
from mispair.methods.base import Method, StepPlan, StepResult, similarity
from mispair.methods.coteaching import CoTeaching
from mispair.models import Network, SideSpec, build
from mispair.pairs.batches import PairLoader
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import IntArray
from mispair.training.settings import override
from small_data import regions, shake, tokens, vectors

ALPHA = 0.2
COUNT = 60
SMALL: dict[str, Any] = {
    "model": "two-tower", "embed_size": 8, "word_size": 6, "sim_size": 8, "batch_size": 12, "warmup_epochs": 1,
    "epochs": 2, "lr": 1e-3, "dropout": 0.3, "augment": False, "hardening_steps": 10, "negatives_start": 5,
    "negatives_end": 2, "device": "cpu",
}  # fmt: skip
SHUFFLED = np.random.default_rng(3).permutation(COUNT)
CLEAN, NOISY = SHUFFLED[:23], SHUFFLED[23:35]
M = TypeVar("M", bound=CoTeaching)
Matrix = list[list[float]]


def vector_pairs(count: int = COUNT, shared: int = 2) -> Pairs:
    """Vectors on both sides, `shared` pairs with the same left item."""
    left, right = vectors(-(-count // shared), width=6), vectors(count, width=5, seed=1)
    return Pairs(left, right, np.arange(count) // shared)


def image_text(count: int = COUNT) -> Pairs:
    return Pairs(regions(count // 2), tokens([1 + i * 7 % 9 for i in range(count)]), np.arange(count) // 2)


def small(kind: type[M], pairs: Pairs | None = None, **settings: Any) -> M:
    """The method with two networks that have not learned anything."""
    config = override(Config(data="test"), {**SMALL, **settings})
    if pairs is None:
        pairs = vector_pairs() if config.model == "two-tower" else image_text()
    nets = [build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=seed).train() for seed in (1, 2)]
    for seed, net in enumerate(nets):
        shake(net, seed)
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.momentum = 0.0  # so that nothing changes from one step to the next
    return cast(M, kind.variant(config)(config, nets, PairLoader(pairs, torch.device("cpu"))))


def with_w(method: M, w: np.ndarray) -> M:
    """Puts these probabilities in the place of the mixture's."""
    method.clean_probabilities = lambda losses: w.astype(losses.dtype)  # type: ignore[method-assign]
    return method


def random_w(seed: int = 0, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).random((2, count)).astype(np.float32)


def step_on(method: Method, net: int, pairs: IntArray, *, on_noisy: bool = False, main_step: int = 0) -> StepResult:
    """A main step on clean or on noisy pairs, without its gradients."""
    return method.loss(net, method.inputs(net, StepPlan(0, main_step, pairs, None, on_noisy), None))


def in_evaluation(network: Network, method: Method, pairs: IntArray) -> Tensor:
    """Similarities of a batch without dropout and with the batch norms at rest."""
    network.eval()
    with torch.no_grad():
        S = similarity(network, method.loader.batch(pairs))
    network.train()
    return S


# ---------------------------------------------------------------------- formulas as loops


def same_images(method: Method, pairs: IntArray) -> list[list[bool]]:
    """Which pairs are no negatives of each other."""
    rows = method.loader.pairs.link[pairs].tolist()
    return [[method.config.mask_false_negatives and a == b for b in rows] for a in rows]


def margin_of(label: float, base: float = 10.0) -> float:
    return float(ALPHA * (base**label - 1) / (base - 1))


def loop_losses(S: Tensor, masked: list[list[bool]]) -> list[float]:
    """Mean over the batch of both costs of each pair; the pair itself counts as 0."""
    s, B = S.tolist(), len(S)
    losses = []
    for i in range(B):
        total = 0.0
        for j in range(B):
            if j != i and not masked[i][j]:
                total += max(0.0, ALPHA + s[i][j] - s[i][i])
            if j != i and not masked[j][i]:
                total += max(0.0, ALPHA + s[j][i] - s[i][i])
        losses.append(total / B)
    return losses


def loop_quality(S: Tensor, masked: list[list[bool]]) -> list[float]:
    return [min(ALPHA, max(0.0, ALPHA - loss / 2)) for loss in loop_losses(S, masked)]


def loop_hard_loss(
    S: Tensor, image_margin: Matrix, text_margin: Matrix, negatives: int, masked: list[list[bool]]
) -> float:
    """Sum over all anchors of the mean over their hardest negatives; margins by image and caption."""
    s, B, total = S.tolist(), len(S), 0.0
    for a in range(B):
        others = [b for b in range(B) if b != a]
        images = [0.0 if masked[a][b] else max(0.0, image_margin[a][b] + s[a][b] - s[a][a]) for b in others]
        texts = [0.0 if masked[b][a] else max(0.0, text_margin[b][a] + s[b][a] - s[a][a]) for b in others]
        for costs in (images, texts):
            hardest = sorted(costs)[-negatives:]
            total += sum(hardest) / len(hardest)
    return total


def pair_loss(S: Tensor, labels: list[float], negatives: int, masked: list[list[bool]], base: float = 10.0) -> float:
    """A pair's margin counts in its row for its image, in its column for its caption."""
    margins = [margin_of(label, base) for label in labels]
    rows = [[margins[i] for _ in margins] for i in range(len(margins))]
    columns = [list(margins) for _ in margins]
    return loop_hard_loss(S, rows, columns, negatives, masked)


# ---------------------------------------------------------------------- whole runs


def training(method: str, **settings: Any) -> Config:
    """A training on `tiny_pairs` that is over in a moment."""
    chosen = {**SMALL, "method": method, "model": "vse", "batch_size": 8, "checkpoint_seconds": 1000.0, **settings}
    return override(Config(data="test"), chosen)


def ends_well(method: str, pairs: Pairs, **settings: Any) -> bool:
    """Trains to a model with finite scores; False if it was refused with a sentence. Warnings are welcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            matcher = mispair.fit(pairs, method=method, **{**SMALL, "noisy_start": 0.0, **settings})
        except MispairError:
            return False
    return bool(np.isfinite(matcher.score(pairs.left, pairs.right)).all())


LITTLE: list[tuple[str, Pairs, dict[str, Any]]] = [  # little or much noise, few pairs: all of it must end well
    ("no noise", vector_pairs(), {}),
    ("90 % noise", add_noise(vector_pairs(shared=1), noise_ratio=0.9, seed=0), {}),
    (
        "losses of one epoch",
        add_noise(vector_pairs(shared=1), noise_ratio=0.4, seed=0),
        {"split_losses": "single"},
    ),
    ("batches of two, one alone", vector_pairs(15), {"batch_size": 2}),
    ("one large batch", vector_pairs(), {"batch_size": 1000}),
    ("two images", vector_pairs(12, shared=6), {}),
    ("two pairs", vector_pairs(2, shared=1), {}),
    ("no warm-up", vector_pairs(), {"warmup_epochs": 0}),
    ("sgr", image_text(24), {"model": "sgr"}),
]
