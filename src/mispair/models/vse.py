"""VSE-inf (Chen et al., CVPR 2021): one vector a side, pooled by the generalised pooling operator (GPO)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mispair.compute.devices import full_precision
from mispair.config import Config
from mispair.models.base import CosineNetwork, Encoded, SideSpec, l2norm, xavier_linear
from mispair.models.bigru import BiGRU
from mispair.models.encoders import WordRecurrence, as_set
from mispair.models.kernels import gpo
from mispair.models.layers import BatchNorm
from mispair.models.ragged import inside, to
from mispair.pairs.batches import Items
from mispair.settings import VseSettings


class GPO(nn.Module):
    """Pools a set by a weighted sum of its sorted values, channel by channel; the weights are learned for each length.

    Equal weights make it mean pooling, all weight on the first position max pooling.
    """

    def __init__(self, size: int = 32, temperature: float = 0.1) -> None:
        super().__init__()
        self.size, self.temperature = size, temperature
        self.rnn = BiGRU(size, size)
        self.score = nn.Linear(size, 1, bias=False)

    def weights(self, lengths: Tensor | None, width: int) -> Tensor:
        """Weights of the sorted positions, (B, width), 0 behind each length; (1, width) if all have the full width.

        They depend on the length alone, so they are computed once for each length that there is.
        """
        device = self.score.weight.device
        which = None
        if lengths is None:
            distinct = torch.full((1,), width, device=device)
        elif lengths.device.type == "cpu":
            distinct, which = torch.unique(lengths, return_inverse=True)
        else:  # which ones there are is not known here
            distinct, which = torch.arange(1, width + 1, device=device), lengths - 1
        codes = position_codes(width, self.size, device).expand(len(distinct), -1, -1)
        scores: Tensor = self.score(self.rnn(codes, distinct)).squeeze(-1)
        scores = scores.masked_fill(~inside(distinct, width, device), -torch.inf)
        weights = (scores / self.temperature).softmax(dim=-1)
        return weights if which is None else weights[to(which, device)]

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, n, D) with these lengths to (B, D)."""
        with full_precision(x):
            weights = self.weights(lengths, x.shape[1])
            if gpo.available(x.device) and gpo.fits(x):
                return gpo.pool(x, weights, None if lengths is None else to(lengths, x.device))
            if lengths is None:
                ordered = x.float().sort(dim=1, descending=True).values
            else:
                padded = ~inside(lengths, x.shape[1], x.device)[..., None]
                ordered = x.float().masked_fill(padded, -torch.inf).sort(dim=1, descending=True).values
                ordered = ordered.masked_fill(padded, 0)
            return (weights[:, None] @ ordered).squeeze(1)


def position_codes(count: int, size: int, device: torch.device) -> Tensor:
    """Sine on even, cosine on odd channels, base 10000: (count, size)."""
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(count, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class PooledRegions(nn.Module):
    """A linear map plus a small MLP of each region, then GPO."""

    def __init__(self, spec: SideSpec, embed_size: int) -> None:
        super().__init__()
        hidden = max(1, embed_size // 2)
        self.fc = xavier_linear(spec.size, embed_size)
        self.mlp = nn.Sequential(
            nn.Linear(spec.size, hidden), BatchNorm(hidden), nn.ReLU(), nn.Linear(hidden, embed_size)
        )
        self.pool = GPO()

    def forward(self, items: Items) -> Encoded:
        values, lengths = as_set(items, self.fc.weight)
        regions = values.flatten(0, 1)
        real = None if lengths is None else inside(lengths, values.shape[1], values.device).flatten()
        into, norm, relu, out = self.mlp
        mapped = self.fc(regions) + out(relu(norm(into(regions), real)))  # the statistics must not see padding
        return Encoded(None, None, l2norm(self.pool(mapped.view(*values.shape[:2], -1), lengths)))


class PooledWords(nn.Module):
    """A bidirectional GRU over the words, then GPO. One embedding more than words: the augmentation's <mask>."""

    def __init__(self, spec: SideSpec, embed_size: int, word_size: int) -> None:
        super().__init__()
        self.words = WordRecurrence(spec.size + 1, word_size, embed_size)
        self.pool = GPO()

    def forward(self, items: Items) -> Encoded:
        return Encoded(None, None, l2norm(self.pool(*self.words(items))))


class VSE(CosineNetwork):
    """VSE-inf (Chen et al., CVPR 2021): one vector a side, pooled by weights that are learned."""

    settings = (VseSettings,)
    ignores = ("dropout",)
    title = "VSE-inf"

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__()
        self.augments = config.of(VseSettings).augment
        self.left, self.right = self._encoder(left, config), self._encoder(right, config)

    @staticmethod
    def _encoder(spec: SideSpec, config: Config) -> nn.Module:
        if spec.kind == "tokens":
            return PooledWords(spec, config.embed_size, config.word_size)
        return PooledRegions(spec, config.embed_size)
