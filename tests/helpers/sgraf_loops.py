"""Parts of SGR and SAF as plain loops, written from their description."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mispair.models import Encoded
from mispair.models.sgraf import SelfAttention, SimilarityVectors
from small_data import encoded_sets, gradients, plain_l2norm

D = 16  # width of the embedding


def some_regions(items: int, regions: int, seed: int = 0) -> Encoded:
    return encoded_sets([regions] * items, regions, D, seed)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return x @ layer.weight.T + layer.bias


def normalise(layer: nn.Module, x: Tensor, channel: int) -> Tensor:
    """Batch normalisation with the channels on axis `channel`; batch statistics in training mode."""
    assert isinstance(layer, nn.BatchNorm1d)
    shape = [1] * x.dim()
    shape[channel] = x.shape[channel]
    if layer.training:
        axes = [axis for axis in range(x.dim()) if axis != channel]
        mean, variance = x.mean(axes), x.var(axes, unbiased=False)
    else:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean, variance = layer.running_mean, layer.running_var
    centred = (x - mean.view(shape)) / (variance + layer.eps).sqrt().view(shape)
    return centred * layer.weight.view(shape) + layer.bias.view(shape)


def visual_self_attention(pool: SelfAttention, V: Tensor) -> Tensor:
    """G1, (B, R, D) to (B, D)."""
    a = normalise(pool.local[1], linear(pool.local[0], V), channel=1).tanh()
    g = normalise(pool.whole[1], linear(pool.whole[0], V.mean(dim=1)), channel=1).tanh()
    e = linear(pool.score, a * g[:, None]).squeeze(-1)
    alpha = e.exp() / e.exp().sum(dim=1, keepdim=True)
    return plain_l2norm((alpha[..., None] * V).sum(dim=1))


def text_self_attention(pool: SelfAttention, W: Tensor) -> Tensor:
    """T1, the real words (n, D) of one caption to (D,)."""
    a, g = linear(pool.local[0], W).tanh(), linear(pool.whole[0], W.mean(dim=0)).tanh()
    e = linear(pool.score, a * g).squeeze(-1)
    beta = e.exp() / e.exp().sum()
    return plain_l2norm((beta[:, None] * W).sum(dim=0))


def is_well_conditioned(left: Encoded, right: Encoded) -> bool:
    """Whether no caption of one word is orthogonal to a region: the norm over words makes a sign of what is left."""
    (V, _), (words, lengths) = left.parts(), right.parts()
    assert lengths is not None
    A = V @ words[lengths == 1, 0].T
    return not A.numel() or bool(A.abs().min() > 1e-5)


def loop_nodes(network: SimilarityVectors, V: Tensor, words: Tensor, lengths: list[int]) -> list[Tensor]:
    """X of each caption with all images, (B, n + 1, s)."""
    v_star = visual_self_attention(network.left_pool, V)
    nodes = []
    for j, n in enumerate(lengths):
        W = words[j, :n]
        t_star = text_self_attention(network.right_pool, W)
        A = V @ W.T  # (B, R, n)
        A = plain_l2norm(torch.where(A > 0, A, 0.1 * A))  # over words
        P = torch.softmax(9 * A, dim=1)  # over regions
        C = plain_l2norm(P.transpose(1, 2) @ V)  # (B, n, D)
        local = plain_l2norm(linear(network.local_vector, (C - W) ** 2))
        whole = plain_l2norm(linear(network.global_vector, (v_star - t_star) ** 2))
        nodes.append(torch.cat([whole[:, None], local], dim=1))
    return nodes


def check_gradients(
    network: SimilarityVectors, reference: Callable[[Any, Encoded, Encoded], Tensor], left: Encoded, right: Encoded
) -> dict[str, Tensor | None]:
    """Compare all gradients of the similarities with those of the reference, and return the latter by name."""
    (V, _), (words, lengths) = left.parts(), right.parts()
    assert lengths is not None
    weights = torch.randn(len(V), len(words), generator=torch.Generator().manual_seed(2))
    results = []
    for similarity in (network.similarity, lambda *sides: reference(network, *sides)):
        (similarity(left, right) * weights).sum().backward()  # type: ignore[no-untyped-call]
        results.append({"regions": V.grad, "words": words.grad, **gradients(network)})
        V.grad = words.grad = None
    ours, expected = results
    not_reached = {name for name, gradient in expected.items() if gradient is None}
    assert all(name.startswith(("left.", "right.")) for name in not_reached)  # the encoders were not run
    real = torch.arange(words.shape[1]) < lengths[:, None]
    for name in expected.keys() - not_reached:
        a, b = ours[name], expected[name]
        assert b is not None
        if name.endswith("key.bias"):  # adds the same to all edges of a node, so that the softmax does not see it
            assert a is None
            a = torch.zeros_like(b)
        assert a is not None
        if name == "words":  # what flows into padding is thrown away by the encoder
            a, b = a[real], b[real]
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6, msg=name)
    return expected
