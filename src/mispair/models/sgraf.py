"""SGR and SAF (Diao et al., AAAI 2021): scores made of the similarity vectors of the words and of the whole sentence.

SGRAF is the mean of one trained model of either kind, see `mispair.evaluate_together`. The published code loops over
captions in Python. Here all captions of a batch are computed at once, with the same result: their real words stand one
after the other (T of them, no padding).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, linear

from mispair.compute.devices import EPSILON, full_precision, working, working_dtype
from mispair.compute.distributed import ALONE, Team
from mispair.config import Config
from mispair.models.base import Encoded, Network, SideSpec, l2norm, safe_norm, xavier_linear
from mispair.models.encoders import local_encoder
from mispair.models.kernels import compiled, graph, vectors
from mispair.models.layers import BatchNorm, Dropout
from mispair.models.ragged import Packing, inside, masked_mean, packing
from mispair.settings import SgrafSettings

SMOOTH, SLOPE = 9.0, 0.1  # sharpness of the attention; slope of the leaky ReLU below 0
IMAGES, CAPTIONS, TOTAL, LENGTH = 128, 120, 1792, 40  # usual images, captions, words in all, most of one caption
Weights = tuple[Tensor, ...]
LONG = 64  # words; hardly any caption of a photo has more


class SelfAttention(nn.Module):
    """Pools a set by attention with its own mean as the query: (B, n, D) to (B, D) of unit length."""

    def __init__(self, embed_size: int, dropout: float, regions: int = 0) -> None:
        super().__init__()
        local: list[nn.Module] = [xavier_linear(embed_size, embed_size)]
        whole: list[nn.Module] = [xavier_linear(embed_size, embed_size)]
        if regions:  # images are normalised, a region slot a channel; sentences are not
            local.append(BatchNorm(regions))
            whole.append(BatchNorm(embed_size))
        self.local = nn.Sequential(*local, nn.Tanh(), Dropout(dropout))
        self.whole = nn.Sequential(*whole, nn.Tanh(), Dropout(dropout))
        self.score = xavier_linear(embed_size, 1)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        query = self.whole(masked_mean(x, lengths))
        scores = self.score(self.local(x) * query[:, None]).squeeze(-1).float()
        if lengths is not None:
            scores = scores.masked_fill(~inside(lengths, x.shape[1], x.device), -torch.inf)
        return l2norm((scores.softmax(dim=-1)[:, None] @ x).squeeze(1))


class GraphReasoning(nn.Module):
    """One layer of `reasoned`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query, self.key, self.out = (xavier_linear(size, size) for _ in range(3))


def reasoned(nodes: Tensor, words: Packing, layer: Weights, *, last: bool, fused: bool) -> Tensor:
    """New nodes, by attention among those of each graph, without scaling and without residual.

    Each of l images has r sentence nodes, then the T words of all sentences: (l, r + T, s). A sentence and its words
    are a graph. The `last` layer returns only the nodes of the sentences, (l, r, s). `fused` layers run in kernels.
    """
    query, query_bias, key, _, out, out_bias = layer
    asking = nodes[:, : len(words.lengths)] if last else nodes
    # (W_q x + b_q)(W_k y + b_k) as a function of y is (W_k' W_q x + W_k' b_q) y plus what the softmax does not see: one
    # product a node instead of two.
    with full_precision(nodes):
        both, bias = key.T @ query, query_bias @ key
    queries = linear(asking, both, bias)
    if fused:
        attend = graph.attend_first if last else graph.attend
        attended = attend(queries, nodes, words.starts, words.lengths, 1 + words.longest)
    else:
        attended = plain_attention(queries, nodes, words, last=last)
    return linear(attended, out, out_bias).relu()


def plain_attention(queries: Tensor, nodes: Tensor, words: Packing, *, last: bool) -> Tensor:
    """Attention of each node to the nodes of its graph."""
    if words.longest > LONG and nodes.device.type == "cpu":
        return attention_by_caption(queries, nodes, words, last=last)
    count = len(words.lengths)

    def graphs(x: Tensor) -> Tensor:
        return torch.cat([x[:, :count, None], words.pad(x[:, count:], dim=1)], dim=2)  # (l, r, 1 + L, s)

    padded, asking = graphs(nodes), queries[:, :, None] if last else graphs(queries)
    edges = (asking @ padded.transpose(-1, -2)).float()
    hidden = nn.functional.pad(~words.inside, (1, 0))[:, None]
    attended = edges.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(padded.dtype) @ padded
    if last:
        return attended[:, :, 0]
    return torch.cat([attended[:, :, 0], words.pack(attended[:, :, 1:], dim=1)], dim=1)


def attention_by_caption(queries: Tensor, nodes: Tensor, words: Packing, *, last: bool) -> Tensor:
    """`plain_attention` graph after graph, to avoid padding all captions to the longest."""
    count, total = len(words.lengths), int(words.lengths.sum())
    sentences, rows = [], []
    for number, (start, length) in enumerate(zip(words.starts.tolist(), words.lengths.tolist(), strict=True)):
        members = [number, *range(count + start, count + start + length)]
        graph = nodes[:, members]
        asking = queries[:, number, None] if last else queries[:, members]
        attended = (asking @ graph.transpose(-1, -2)).float().softmax(dim=-1).to(graph.dtype) @ graph
        sentences.append(attended[:, 0])
        rows.append(attended[:, 1:])
    if last:
        return torch.stack(sentences, dim=1)
    rest = nodes.new_zeros(len(nodes), nodes.shape[1] - count - total, nodes.shape[2])
    return torch.cat([torch.stack(sentences, dim=1), *rows, rest], dim=1)


class SimilarityVectors(Network):
    """Scores by similarity vectors of the words and of the whole sentence; a subclass joins them.

    Left items are sets of regions, right items texts (or sets of their own).
    """

    settings = (SgrafSettings,)
    fixed_regions = True
    squashed = True
    score: nn.Module  # from the one vector to the score before the sigmoid

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__()
        d, s = config.embed_size, config.of(SgrafSettings).sim_size
        self.left, self.right = (local_encoder(spec, config, config.dropout) for spec in (left, right))
        self.left_pool = SelfAttention(d, config.dropout, regions=max(left.count, 1) if left.kind != "tokens" else 0)
        self.right_pool = SelfAttention(d, config.dropout)
        self.local_vector, self.global_vector = xavier_linear(d, s), xavier_linear(d, s)

    def share(self, team: Team) -> None:
        super().share(team)
        for layer in self.right_pool.modules():
            if isinstance(layer, Dropout):
                layer.team = ALONE  # every rank pools all right items

    def similarity(self, left: Encoded, right: Encoded) -> Tensor:
        regions, region_counts = left.parts()  # (l, R, D)
        words, lengths = right.parts()
        real = pack_words(words, lengths, right.capacity)
        packed, fused = real.pack(words), self._fused(real)  # (T, D)
        wholes = self.left_pool(regions, region_counts), self.right_pool(words, lengths)
        make_nodes = compiled_nodes if fused and compiles(regions, packed, real) else all_nodes
        inputs = regions, region_counts, packed, real, *wholes, self._vectors, self.layers
        weight = self.local_vector.weight
        fits = vectors.fits(working_dtype(weight), regions.shape[1], len(weight))
        return self._scores(make_nodes(*inputs, fused, fits and vectors.available(weight.device)), real)

    @property
    def layers(self) -> list[Weights]:
        """The parameters of each layer of graph reasoning."""
        return []

    @property
    def _vectors(self) -> Weights:
        """The linear maps to the similarity vectors of words and of sentences."""
        return *self.local_vector.parameters(), *self.global_vector.parameters()

    def _fused(self, words: Packing) -> bool:
        """Whether graph reasoning runs in kernels."""
        weight = self.local_vector.weight
        fits = graph.fits(len(weight), working_dtype(weight), 1 + words.longest)
        return not self.layers or (graph.available(weight.device) and fits)

    def pair_similarity(self, left: Encoded, right: Encoded) -> Tensor:
        regions, region_counts = left.parts()  # (n, R, D)
        words, lengths = right.parts()  # (n, L, D)
        affinity = leaky_relu(regions @ words.transpose(1, 2), SLOPE).float()  # padded words are zero and stay zero
        weights = context_weights(regions, region_counts, l2norm(affinity))
        local = similarity_vectors(weights, regions, words, *self._vectors[:2])
        left_whole, right_whole = self.left_pool(regions, region_counts), self.right_pool(words, lengths)
        ones = left_whole.new_ones(len(left), 1, 1)
        sides = left_whole[:, None], right_whole[:, None]
        whole = similarity_vectors(ones, *sides, *self._vectors[2:]).squeeze(1)
        real = pack_words(words, lengths, right.capacity)
        nodes = torch.cat([whole, real.pack(local)])[None]  # as if there were one image for all texts
        return self._scores(graphs_reasoned(nodes, real, self.layers, self._fused(real)), real).squeeze(0)

    def _scores(self, nodes: Tensor, words: Packing) -> Tensor:
        """Scores (l, r) of the nodes after all layers, (l, r + T, s) or without the words."""
        vectors = self.join(nodes, words)
        with full_precision(vectors):
            score: Tensor = self.score(vectors.float()).squeeze(-1).sigmoid()
        return score

    @abstractmethod
    def join(self, nodes: Tensor, words: Packing) -> Tensor:
        """One vector for each image and sentence, (l, r, s), of the nodes."""


class SGR(SimilarityVectors):
    """Similarity graph reasoning (Diao et al., AAAI 2021): a graph over the words and the whole sentence."""

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__(left, right, config)
        own = config.of(SgrafSettings)
        self.graph = nn.ModuleList(GraphReasoning(own.sim_size) for _ in range(own.graph_steps))
        self.score = score_layer(config)

    @property
    def layers(self) -> list[Weights]:
        return [tuple(layer.parameters()) for layer in self.graph]

    def join(self, nodes: Tensor, words: Packing) -> Tensor:
        return nodes[:, : len(words.lengths)]


def score_layer(config: Config) -> nn.Module:
    """Layer from a similarity vector to its score: a linear map, or MSCN's meta network."""
    own = config.of(SgrafSettings)
    s, hidden = own.sim_size, own.score_hidden
    if not hidden:
        return xavier_linear(s, 1)
    return nn.Sequential(nn.Linear(s, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def compiles(regions: Tensor, packed: Tensor, words: Packing) -> bool:
    """Whether `compiled_nodes` takes these inputs."""
    sizes = len(regions), len(packed), len(words.lengths), words.longest
    wide = len(regions) * len(packed) * packed.shape[1]
    return compiled.available(packed.device) and compiled.fits(sizes, wide)


def compiled_nodes(
    regions: Tensor, counts: Tensor | None, packed: Tensor, words: Packing, image: Tensor, sentence: Tensor,
    project: Weights, layers: list[Weights], fused: bool, one_pass: bool,
) -> Tensor:  # fmt: skip
    """`all_nodes`, compiled once for all sizes."""
    of_images, of_captions, of_words = {0: IMAGES}, {0: CAPTIONS}, {0: TOTAL}
    changing: list[compiled.Changing] = [
        *((tensor, of_images) for tensor in (regions, counts, image)),
        *((tensor, of_captions) for tensor in (sentence, words.starts, words.lengths)),
        *((tensor, of_words) for tensor in (packed, words.taken, words.owner)),
        (words.inside, {0: CAPTIONS, 1: LENGTH}),
    ]
    inputs = regions, counts, packed, words, image, sentence, project, layers
    return compiled.run(all_nodes, changing, *inputs, fused, one_pass)


def all_nodes(
    regions: Tensor, counts: Tensor | None, packed: Tensor, words: Packing, image: Tensor, sentence: Tensor,
    project: Weights, layers: list[Weights], fused: bool, one_pass: bool,
) -> Tensor:  # fmt: skip
    """Compute the nodes of all images with all sentences and words, (l, r + T, s), after these layers.

    Inputs are regions (l, R, D) with real `counts` (l,), packed words (T, D), pooled images (l, D) and sentences
    (r, D). `project` has the linear maps to the vectors of words and of sentences. `fused`: graph reasoning runs in
    kernels; `one_pass`: so do the vectors of words.
    """
    weights = context_weights(regions, counts, unit_over_words(leaky_relu(regions @ packed.T, SLOPE), words))
    of_words, of_sentences = project[:2], project[2:]
    ones = image.new_ones(len(image), len(sentence), 1)
    whole = similarity_vectors(ones, image[:, None], sentence, *of_sentences)
    if one_pass:
        weight, bias = of_words
        nodes = vectors.vectors(weights.transpose(1, 2), regions, working(packed), weight, bias, whole)
    else:
        nodes = torch.cat([whole, similarity_vectors(weights, regions, packed, *of_words)], dim=1)
    return graphs_reasoned(nodes, words, layers, fused)


def graphs_reasoned(nodes: Tensor, words: Packing, layers: list[Weights], fused: bool) -> Tensor:
    """The nodes after all layers; after the last one only those of the sentences."""
    for number, layer in enumerate(layers, 1):
        nodes = reasoned(nodes, words, layer, last=number == len(layers), fused=fused)
    return nodes


def unit_over_words(affinity: Tensor, words: Packing) -> Tensor:
    """(l, R, T) divided by its norm over the words of each caption, in float32."""
    with full_precision(affinity):
        affinity, owner = affinity.float(), ownership(words)
        norms = safe_norm(affinity.square() @ owner) @ owner.T
        return affinity / torch.where(words.taken, norms, 1)


def ownership(words: Packing) -> Tensor:
    """(T, r) 1 where a word is of a caption, else 0.

    Products with it are sums by caption, or bring them back to the words. That is exact and, unlike scatter operations,
    the same in every run.
    """
    return (words.owner[:, None] == torch.arange(len(words.lengths), device=words.owner.device)).float()


def context_weights(regions: Tensor, counts: Tensor | None, affinity: Tensor) -> Tensor:
    """Weights (l, T, R) of the regions in the context of each word, a vector of unit length.

    The `regions` are (l, R, D), with `counts` (l,) real ones, and `affinity` is (l, R, T).
    """
    weights = mask_regions(SMOOTH * affinity, counts).softmax(dim=1)
    with full_precision(weights):
        # The length follows from the regions' products with each other, so the wide (l, T, D) tensor of all contexts is
        # never touched for it.
        square = ((products(regions) @ weights) * weights).sum(dim=1, keepdim=True)
        return (weights / safe_norm(square)).transpose(1, 2)


def products(regions: Tensor) -> Tensor:
    """Products of the regions of each image with each other, (l, R, R) in float32."""
    with full_precision(regions):
        regions = regions.float()
        return regions @ regions.transpose(1, 2)


def similarity_vectors(weights: Tensor, regions: Tensor, words: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Similarity vectors (l, T, s) of unit length: a linear map of the squared differences of words and contexts.

    A context is a sum of `regions` (l, R, D) by `weights` (l, T, R). The `words` are (T, D), or (l, T, D) where every
    image has its own.
    """
    vectors = linear((working(weights) @ working(regions) - working(words)).square(), weight, bias)
    return l2norm(vectors, dtype=working_dtype(vectors))


def pack_words(words: Tensor, lengths: Tensor | None, capacity: int | None) -> Packing:
    """Positions of the words of padded (r, L, D) texts in one row."""
    if lengths is None:
        lengths, capacity = torch.full((len(words),), words.shape[1], device=words.device), words[..., 0].numel()
    return packing(lengths, words.shape[1], words.device, capacity)


def mask_regions(scores: Tensor, counts: Tensor | None) -> Tensor:
    """Take padded regions out of a softmax over dim 1."""
    if counts is None:
        return scores
    return scores.masked_fill(~inside(counts, scores.shape[1], scores.device)[..., None], -torch.inf)


class AttentionFilter(nn.Module):
    """A sum of the nodes of each graph, weighted by how much of each passes its gate, brought to unit length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.norm = xavier_linear(size, 1), BatchNorm(1)

    def forward(self, nodes: Tensor, words: Packing) -> Tensor:
        """Map nodes (l, r + T, s), as in `GraphReasoning`, to (l, r, s)."""
        owner = ownership(words).T
        graphs = torch.cat([torch.eye(len(owner), device=owner.device), owner], dim=1)  # (r, r + T) 0 or 1
        real = torch.cat([words.taken.new_ones(len(owner)), words.taken]).expand(nodes.shape[:2])
        with full_precision(nodes):
            # The normalisation would amplify the rounding errors of half precision.
            passed = self.norm(self.gate(nodes.float()).flatten(0, 1), real.flatten()).sigmoid().view(real.shape)
            total = passed @ graphs.T  # (l, r)
        summed = (working(passed)[:, None] * working(graphs)) @ working(nodes)
        return l2norm(summed.float() / (total + EPSILON)[..., None])


class SAF(SimilarityVectors):
    """Similarity attention filtration (Diao et al., AAAI 2021): a weighted sum over the words and the sentence."""

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__(left, right, config)
        self.filter = AttentionFilter(config.of(SgrafSettings).sim_size)
        self.score = score_layer(config)

    def join(self, nodes: Tensor, words: Packing) -> Tensor:
        joined: Tensor = self.filter(nodes, words)
        return joined
