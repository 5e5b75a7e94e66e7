"""Small data and plain references shared by several test files."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mispair.config import Config
from mispair.methods.base import Method, StepPlan, StepResult
from mispair.models.base import Encoded
from mispair.models.bigru import BiGRU
from mispair.pairs.batches import Items
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors, select
from mispair.pairs.vocabulary import SPECIAL_WORDS, Vocabulary
from mispair.support.arrays import IntArray
from mispair.training.settings import override

WORDS = 30


def small_config(**settings: object) -> Config:
    """A network small enough for two cores."""
    return override(Config(), {"embed_size": 16, "word_size": 6, "sim_size": 8, **settings})


def vocabulary(words: int = WORDS) -> Vocabulary:
    return Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(words - len(SPECIAL_WORDS)))))


def tokens(lengths: Sequence[int], words: int = WORDS, seed: int = 0) -> Tokens:
    """Texts of these lengths with random words."""
    ids = np.random.default_rng(seed).integers(1, words, size=sum(lengths), dtype=np.int32)
    return Tokens(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), vocabulary(words))


def regions(count: int, per_item: int = 5, width: int = 7, seed: int = 0) -> Regions:
    return Regions(np.random.default_rng(seed).standard_normal((count, per_item, width), dtype=np.float32))


def vectors(count: int, width: int = 7, seed: int = 0) -> Vectors:
    return Vectors(np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32))


def one_to_one(left: Regions | Tokens | Vectors, right: Regions | Tokens | Vectors) -> Pairs:
    """Right item i with left item i, starting again when the left items are used up."""
    return Pairs(left, right, np.arange(len(right)) % len(left))


def chosen(pairs: Pairs, rows: IntArray) -> Pairs:
    """A smaller set with only these pairs; the left side is kept whole."""
    truth = None if pairs.truth is None else pairs.truth[rows]
    return replace(pairs, right=select(pairs.right, rows), link=pairs.link[rows], truth=truth)


def token_items(lengths: Sequence[int], words: int = WORDS, seed: int = 0, extra: int = 0) -> Items:
    """Padded token ids; `extra` more padded places than the longest text needs."""
    side = tokens(lengths, words, seed)
    values = torch.zeros(len(lengths), max(lengths) + extra, dtype=torch.long)
    for row, length in enumerate(lengths):
        values[row, :length] = torch.from_numpy(side.ids[side.offsets[row] : side.offsets[row] + length]).long()
    return Items(values, torch.tensor(lengths))


def encoded_sets(lengths: Sequence[int], width: int, size: int, seed: int) -> Encoded:
    """Random unit vectors, zero where padded, that gather gradients."""
    generator = torch.Generator().manual_seed(seed)
    local = nn.functional.normalize(torch.randn(len(lengths), width, size, generator=generator), dim=-1)
    for row, length in enumerate(lengths):
        local[row, length:] = 0
    pooled = nn.functional.normalize(local.sum(dim=1), dim=-1)
    return Encoded(local.requires_grad_(), torch.tensor(lengths), pooled)


def shake(network: nn.Module, seed: int = 0) -> None:
    """Moves every parameter and running statistic from its initial value: zero biases and unit scales hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            if tensor.is_floating_point():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator).abs()
            else:
                assert "num_batches" in name


def plain_gru(rnn: nn.Module, x: Tensor) -> Tensor:
    """A `BiGRU` over one sequence (n, D), step by step from the GRU's equations; the mean of both directions."""
    assert isinstance(rnn, BiGRU)
    directions = []
    for gru, steps in ((rnn.ahead, range(len(x))), (rnn.back, range(len(x) - 1, -1, -1))):
        w_ih, w_hh, b_ih, b_hh = (
            getattr(gru, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = torch.zeros(gru.hidden_size)
        outputs: dict[int, Tensor] = {}
        for step in steps:
            from_input, from_hidden = w_ih @ x[step] + b_ih, w_hh @ h + b_hh
            r_in, z_in, n_in = from_input.chunk(3)
            r_h, z_h, n_h = from_hidden.chunk(3)
            r, z = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
            h = (1 - z) * torch.tanh(n_in + r * n_h) + z * h
            outputs[step] = h
        directions.append(torch.stack([outputs[step] for step in range(len(x))]))
    return (directions[0] + directions[1]) / 2


def plain_l2norm(x: Tensor) -> Tensor:
    """peers.md section 2: x / (sqrt(sum x^2) + 1e-8) over the last axis. Only for vectors that are not zero."""
    return x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-8)


def gradients(network: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by parameter name, taken off the network."""
    found = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.zero_grad(set_to_none=True)
    return found


def lengths_of(items: Items | Encoded) -> list[int]:
    """How many regions or words each item has."""
    values = items.values if isinstance(items, Items) else items.local
    assert values is not None
    return [values.shape[1]] * len(values) if items.lengths is None else items.lengths.tolist()


def take_step(method: Method, net: int, main_step: int, clean: IntArray, noisy: IntArray | None = None) -> StepResult:
    """A main step of `method` as the engine takes it, without its gradients."""
    plan = StepPlan(0, main_step, clean, noisy)
    step = method.loss(net, method.inputs(net, plan, None))
    method.after_step(net, plan)
    return step


ZEROS = ("a word", "all words", "a region", "all regions", "everything")


def zeroed(left: Encoded, right: Encoded, where: str) -> tuple[Tensor, Tensor]:
    """Makes some of the vectors zero, one of `ZEROS`; gives those of the regions and of the words."""
    (V, _), (words, _) = left.parts(), right.parts()
    with torch.no_grad():
        if where in ("a word", "all words", "everything"):
            words[0 if where == "a word" else slice(None)] = 0
        if where in ("a region", "all regions", "everything"):
            V[:, 2 if where == "a region" else slice(None)] = 0
    return V, words
