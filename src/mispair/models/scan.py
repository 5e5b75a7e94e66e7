"""SCAN (Lee et al., ECCV 2018): words attend to regions, or regions to words, and are compared with the result.

The published code loops over captions in Python. Here all captions of a batch are computed at once, with the same
result. The attended context of a word, a sum of regions, is never computed. Its cosine with the word needs only the
products of words and regions, and those of the regions with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from mispair.compute.devices import EPSILON, full_precision
from mispair.config import Config
from mispair.models.base import Encoded, Network, SideSpec, l2norm
from mispair.models.encoders import local_encoder
from mispair.models.ragged import inside, to
from mispair.models.sgraf import SLOPE, mask_regions, pack_words, products, unit_over_words
from mispair.settings import ScanSettings


class SCAN(Network):
    """Stacked cross attention (Lee et al., ECCV 2018): words attend to regions, or regions to words.

    Left items are sets of regions, right items texts (or sets of their own). All in float32: rounding the products to
    half precision would add a far larger error than rounding the encoders' vectors has.
    """

    settings = (ScanSettings,)
    ignores = ("dropout",)

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__()
        self.left, self.right = (local_encoder(spec, config, dropout=0) for spec in (left, right))  # as published
        own = config.of(ScanSettings)
        self.attend, self.sharpness = own.attend, own.attend_sharpness
        self.aggregation, self.lse_sharpness = own.aggregate, own.lse_sharpness

    def similarity(self, left: Encoded, right: Encoded) -> Tensor:
        with full_precision(left.pooled):
            return self._words_look(left, right) if self.attend == "t2i" else self._regions_look(left, right)

    def _words_look(self, left: Encoded, right: Encoded) -> Tensor:
        """Each caption's words at the regions of each image, (l, r)."""
        regions, region_counts, words, lengths = _floats(left, right)
        real = pack_words(words, lengths, right.capacity)
        packed = real.pack(words)  # (T, D)
        raw = regions @ packed.T  # (l, R, T)
        affinity = unit_over_words(leaky_relu(raw, SLOPE), real)
        cosines = self._cosines(raw, affinity, region_counts, regions, packed)  # (l, T)
        return self._aggregate(real.pad(cosines, dim=1), lengths)

    def _regions_look(self, left: Encoded, right: Encoded) -> Tensor:
        """Each image's regions at the words of each caption, (l, r)."""
        regions, region_counts, words, lengths = _floats(left, right)
        real = pack_words(words, lengths, right.capacity)
        flat = regions.flatten(0, 1)
        raw = real.pad(real.pack(words) @ flat.T)  # (r, L, l * R)
        affinity = l2norm(leaky_relu(raw, SLOPE).view(*raw.shape[:2], *regions.shape[:2])).flatten(2)
        cosines = self._cosines(raw, affinity, lengths, words, flat)  # (r, l * R)
        return self._aggregate(cosines.view(-1, *regions.shape[:2]), region_counts).T

    def pair_similarity(self, left: Encoded, right: Encoded) -> Tensor:
        with full_precision(left.pooled):
            regions, region_counts, words, lengths = _floats(left, right)
            sides = (regions, region_counts), (words, lengths)
            (context, counts), (queries, query_counts) = sides if self.attend == "t2i" else sides[::-1]
            raw = context @ queries.transpose(1, 2)
            affinity = l2norm(leaky_relu(raw, SLOPE))  # padded queries are zero and stay zero
            cosines = self._cosines(raw, affinity, counts, context, queries)
            return self._aggregate(cosines, query_counts)

    def _cosines(
        self, raw: Tensor, affinity: Tensor, counts: Tensor | None, context: Tensor, queries: Tensor
    ) -> Tensor:
        """Cosine of each query with its attended context, (c, N), 0 where a vector is zero.

        The products of contexts (c, m, D) and queries are `raw` (c, m, N), and `affinity` for the attention. `counts`
        (c,) is the number of real elements among the m. Queries are (N, D), or (c, N, D) where every context has its
        own.
        """
        weights = mask_regions(self.sharpness * affinity, counts).softmax(dim=1)
        product = (weights * raw).sum(dim=1)
        square = ((products(context) @ weights) * weights).sum(dim=1) * queries.square().sum(dim=-1)
        # Where a vector is zero, so is the product; divided by 1 instead of the bound it has a gradient of usual size.
        lengths = torch.where(square > 0, square, 1).sqrt().clamp(min=EPSILON)
        return product / lengths

    def _aggregate(self, cosines: Tensor, counts: Tensor | None) -> Tensor:
        """One similarity for each set of queries: (..., q, n) to (..., q), over the first `counts` (q,) of each row."""
        width, device = cosines.shape[-1], cosines.device
        padded = None if counts is None else ~inside(counts, width, device)
        if self.aggregation in ("lse", "max"):
            kept = cosines if padded is None else cosines.masked_fill(padded, -torch.inf)
            if self.aggregation == "max":
                return kept.amax(dim=-1)
            return (self.lse_sharpness * kept).logsumexp(dim=-1) / self.lse_sharpness
        total = (cosines if padded is None else cosines.masked_fill(padded, 0)).sum(dim=-1)
        if self.aggregation == "sum":
            return total
        return total / (width if counts is None else to(counts, device))


def _floats(left: Encoded, right: Encoded) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Regions and words with their counts."""
    (regions, region_counts), (words, lengths) = left.parts(), right.parts()
    return regions.float(), region_counts, words.float(), lengths
