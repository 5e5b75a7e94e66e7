"""Pairs that mispair holds itself as what an audit reads: as they are, or as a trained model sees them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor

from mispair.auditing.audit import Settings, score_source
from mispair.auditing.sources import row_ids
from mispair.auditing.sources.shards import ArrayRows, Side
from mispair.auditing.sources.source import Source
from mispair.auditing.sources.tfidf import word_vectors
from mispair.compute.devices import autocast
from mispair.data import loading
from mispair.data.batches import SideLoader, random_batches
from mispair.data.loading import with_noise
from mispair.data.npy import chunks
from mispair.data.pairs import IntArray, Pairs, Regions, Tokens
from mispair.data.pairs import Side as PairSide
from mispair.models import CosineNetwork
from mispair.models.inference import inference
from mispair.retrieval.matcher import Matcher
from mispair.retrieval.model_data import load_for

Array = npt.NDArray[np.floating]
BATCH = 128  # pairs that are each other's rivals
RIVALS = 4  # the best of them count
_WITHOUT_FILES = 'call mispair.audit with what matcher.encode(items, "left") and matcher.encode(items, "right") give'


def is_run(folder: Path) -> bool:
    """Whether this is what `mispair train` leaves behind."""
    return (folder / "best.safetensors").is_file()


def from_run(run: Path, device: str = "auto", images: Path | None = None) -> Source:
    """The training pairs of a run, noise and all, by the vectors of its networks; the two sides share a space."""
    matcher = Matcher.load(run, device)
    config = matcher.config
    pairs = with_noise(config, load_for(matcher, "train", advice=_WITHOUT_FILES))
    left, right = matcher.encode(pairs.left, "left"), matcher.encode(pairs.right, "right")
    source = _described(pairs, left, right, images or loading.find_folder(config.data) / "images")
    if all(isinstance(network, CosineNetwork) for network in matcher.networks):
        return source  # their vectors say all that they know
    return replace(source, opinion=NetworksOpinion(matcher, pairs))


class NetworksOpinion:
    """How much better networks score two items than the best rivals of either in a random batch, (n,).

    What a training loss says of a pair, without the margin beyond which a loss is zero and tells no more.
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
        # Neither another caption of its image nor an item's own partner is a rival of a pair that is made up.
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
    """Of the pairs on the diagonal of (n, n) similarities, (n,); what is the `same` is no rival."""
    own, others = S.diagonal(), S.masked_fill(same, -torch.inf)
    return 2 * own - _best_rivals(others, own) - _best_rivals(others.T, own)


def _best_rivals(others: Tensor, own: Tensor) -> Tensor:
    """Mean of the best few of each row; where there is no rival, the pair's own similarity."""
    best = others.topk(min(RIVALS, others.shape[1]), dim=1).values
    there = best.isfinite()
    mean = best.masked_fill(~there, 0).sum(1) / there.sum(1).clamp(min=1)
    return torch.where(there.any(1), mean, own)


def from_pairs(pairs: Pairs, images: Path | None = None) -> Source:
    """Pairs as they are: the mean of an item's regions, its vector, or a vector of its words."""
    return _described(pairs, _vectors(pairs.left), _vectors(pairs.right), images)


def match_score(pairs: Pairs, device: str = "auto", console: Console | None = None) -> Array:
    """Probability that each pair is right, by what the items are without any training; 0.5 where nobody can say."""
    score = score_source(from_pairs(pairs), Settings(device=device), console)
    return np.where(np.isnan(score), np.float32(0.5), score)


def _vectors(side: PairSide) -> Array:
    if isinstance(side, Tokens):
        return word_vectors(side.texts or side)
    if isinstance(side, Regions):
        return np.concatenate([part.mean(axis=1, dtype=np.float32) for _, part in chunks(side.features)])
    return np.asarray(side.features)


def _described(pairs: Pairs, left: Array, right: Array, images: Path | None) -> Source:
    """With ids, captions and pictures, where they are known."""
    groups = pairs.left_groups[pairs.link]
    shared = len(np.unique(groups)) < len(pairs)
    texts = pairs.right.texts if isinstance(pairs.right, Tokens) else pairs.right_ids
    known = row_ids.from_lists(None, groups if shared else None, len(pairs))
    source = Source(Side.of([ArrayRows(left, pairs.link)]), Side.of([ArrayRows(right)]), "memory", pairs.name, known)
    if texts:
        source = replace(source, captions=partial(row_ids.look_up, row_ids.as_texts(texts)))
    if not pairs.left_ids:
        return source
    pictures = row_ids.as_texts(pairs.left_ids)
    return replace(
        source,
        image_names=lambda rows: row_ids.look_up(pictures, pairs.link[rows]),
        images=() if images is None else (images,),
        names=replace(source.names, ids=_ids(pairs)),
    )


def _ids(pairs: Pairs) -> object:
    """As an audit of the folder gives them: `photo.jpg`, or `photo.jpg#0`, `photo.jpg#1` where it has several pairs.

    Pairs that were made wrong on purpose are not those of the folder: then the number of the pair follows the name of
    the picture that it has now, such as `photo.jpg#17`.
    """
    pictures = [pairs.left_ids[row] for row in pairs.link]
    if pairs.mismatched is None or not pairs.mismatched.any():
        return row_ids.from_images(pictures).ids
    return row_ids.as_texts(f"{picture}#{number}" for number, picture in enumerate(pictures))
