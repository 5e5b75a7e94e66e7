"""The same mathematics as the networks, in plain loops: references of the tests and of `bench_speed.py`.

Written from the papers' equations, one caption or one item at a time, as the public implementations compute them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mispair.models.sgraf import SGR, SelfAttention
from mispair.models.vse import GPO, VSE, PooledRegions, PooledWords, position_codes
from mispair.pairs.batches import Items


def unit(x: Tensor) -> Tensor:
    """x / (|x| + 1e-8) over the last axis, for vectors that are not zero."""
    return x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-8)


def image_attention(pool: SelfAttention, V: Tensor) -> Tensor:
    """Self-attention of images, (B, R, D) to (B, D)."""
    a, g = pool.local[:2](V).tanh(), pool.whole[:2](V.mean(dim=1)).tanh()  # linear map and normalisation
    e = pool.score(a * g[:, None]).squeeze(-1)
    return unit((e.softmax(dim=1)[..., None] * V).sum(dim=1))


def text_attention(pool: SelfAttention, W: Tensor) -> Tensor:
    """Self-attention of one text, its words (n, D) to (D,)."""
    a, g = pool.local[0](W).tanh(), pool.whole[0](W.mean(dim=0)).tanh()
    e = pool.score(a * g).squeeze(-1)
    return unit((e.softmax(dim=0)[:, None] * W).sum(dim=0))


def sgr_similarity(network: SGR, V: Tensor, words: Tensor, lengths: list[int]) -> Tensor:
    """Every image (B, R, D) against every caption of padded (r, L, D), a caption at a time: (B, r). Without dropout."""
    v_star = image_attention(network.left_pool, V)
    columns = []
    for W_padded, n in zip(words, lengths, strict=True):
        W = W_padded[:n]
        t_star = text_attention(network.right_pool, W)
        A = V @ W.T  # (B, R, n)
        A = unit(torch.where(A > 0, A, 0.1 * A))  # over words
        P = torch.softmax(9 * A, dim=1)  # over regions
        C = unit(P.transpose(1, 2) @ V)  # (B, n, D)
        local = unit(network.local_vector((C - W) ** 2))
        whole = unit(network.global_vector((v_star - t_star) ** 2))
        X = torch.cat([whole[:, None], local], dim=1)
        for layer in network.graph:
            X = reason(layer, X)
        columns.append(torch.sigmoid(network.score(X[:, 0])).squeeze(-1))
    return torch.stack(columns, dim=1)


def reason(layer: nn.Module, X: Tensor) -> Tensor:
    """One layer of graph reasoning on graphs (B, 1 + n, s)."""
    q, k = layer.query(X), layer.key(X)  # type: ignore[operator]
    edges = torch.softmax(q @ k.transpose(1, 2), dim=-1)
    return torch.relu(layer.out(edges @ X))  # type: ignore[operator]


def gpo_pool(gpo: GPO, x: Tensor, lengths: list[int]) -> Tensor:
    """The generalised pooling operator, an item at a time: (B, n, D) to (B, D)."""
    items = []
    for item, n in zip(x, lengths, strict=True):
        codes = position_codes(n, gpo.size, x.device)[None]
        scores = gpo.score(gpo.rnn(codes, torch.tensor([n]))).squeeze(-1).squeeze(0)
        weights = torch.softmax(scores / gpo.temperature, dim=0)
        items.append(weights @ item[:n].sort(dim=0, descending=True).values)
    return torch.stack(items)


def vse_similarity(network: VSE, images: Items, texts: Items) -> Tensor:
    """Every image against every text, pooled an item at a time."""
    assert isinstance(network.left, PooledRegions)
    assert isinstance(network.right, PooledWords)
    values = images.values.float()
    flat = values.flatten(0, 1)
    mapped = (network.left.fc(flat) + network.left.mlp(flat)).view(*values.shape[:2], -1)
    a = unit(gpo_pool(network.left.pool, mapped, [values.shape[1]] * len(values)))
    hidden, lengths = network.right.words(texts)
    return a @ unit(gpo_pool(network.right.pool, hidden, lengths.tolist())).T


def count_ranks(values: Tensor) -> Tensor:
    """Rank of each of (M,) values by comparing all with all, M x M (Eq. 4 as it is written)."""
    return (values[None] <= values[:, None]).sum(dim=1).float()
