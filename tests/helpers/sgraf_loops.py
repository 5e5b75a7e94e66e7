"""Parts of SGR and SAF as plain loops, written from their description."""

from torch import Tensor, nn

from mispair.models import Encoded
from mispair.models.sgraf import SelfAttention
from small_data import encoded_sets, plain_l2norm

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
