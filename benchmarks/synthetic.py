"""Synthetic pairs of any size for speed measurements: random captions, regions made from their words.

A network can learn from them, so that a training takes its usual course: losses fall, matched and mismatched pairs
separate, and a method's clean and noisy sets have realistic sizes.
"""

from __future__ import annotations

import numpy as np
import torch

from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
from mispair.pairs.vocabulary import END, SPECIAL_WORDS, START, Vocabulary
from mispair.support.arrays import IntArray

CAPTIONS, REGIONS, WIDTH, WORDS = 5, 36, 2048, 8481  # as Flickr30K
VECTOR, HIDDEN = 512, 64  # numbers of a vector, and of what both sides have in common
NOISE = 1024  # number of different noise vectors
CHUNK = 1024  # images at a time


def synthetic_pairs(images: int, *, seed: int = 0, texts: Tokens | None = None) -> Pairs:
    """Images with five captions each: `texts`, or random words with the lengths of Flickr30K."""
    texts = random_captions(CAPTIONS * images, seed) if texts is None else texts
    link = np.repeat(np.arange(images), CAPTIONS)
    return Pairs(Regions(region_features(texts, images, seed)), texts, link=link, name="stand-in")


def synthetic_vectors(count: int, *, seed: int = 0) -> Pairs:
    """Vectors of two encoders: both sides map the same points linearly, the same for all seeds, with noise."""
    maps, rng = np.random.default_rng(0), np.random.default_rng([seed, 1])
    points = rng.standard_normal((count, HIDDEN), dtype=np.float32)

    def side() -> Vectors:
        features = points @ maps.standard_normal((HIDDEN, VECTOR), dtype=np.float32)
        return Vectors(features + 4 * rng.standard_normal(features.shape, dtype=np.float32))

    return Pairs(side(), side(), link=np.arange(count), name="stand-in")


def random_captions(count: int, seed: int) -> Tokens:
    """Random words, few of them frequent. The vocabulary is the same for all seeds."""
    rng = np.random.default_rng([seed, 0])
    lengths = np.clip(rng.lognormal(2.43, 0.4, count).round().astype(np.int64), 2, 78)
    known = WORDS - len(SPECIAL_WORDS)
    words = (known * rng.random(int(lengths.sum())) ** 4).astype(np.int32) + len(SPECIAL_WORDS)
    texts = np.split(words, np.cumsum(lengths)[:-1])
    ids = np.concatenate([part for text in texts for part in ([START], text, [END])]).astype(np.int32)
    vocabulary = Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(known))))
    return Tokens(ids, np.concatenate([[0], np.cumsum(lengths + 2)]), vocabulary)


def region_features(texts: Tokens, images: int, seed: int) -> np.ndarray:
    """(images, R, D) in half precision: in every region the code of a random word of the captions, plus noise."""
    codes = np.random.default_rng(0).standard_normal((len(texts.vocabulary), WIDTH), dtype=np.float32)
    rng = np.random.default_rng([seed, 1])
    noise = rng.standard_normal((NOISE, WIDTH), dtype=np.float32)
    codes_there, noise_there = torch.from_numpy(codes), torch.from_numpy(noise)  # torch uses all cores
    features = np.empty((images, REGIONS, WIDTH), dtype=np.float16)
    first, last = texts.offsets[:-1:CAPTIONS], texts.offsets[CAPTIONS::CAPTIONS]
    for start in range(0, images, CHUNK):
        here = slice(start, min(start + CHUNK, images))
        shape = here.stop - start, REGIONS
        places: IntArray = (first[here] + rng.random(shape).T * (last[here] - first[here])).T.astype(np.int64)
        which = torch.from_numpy(texts.ids[places].astype(np.int64)), torch.from_numpy(rng.integers(NOISE, size=shape))
        torch.from_numpy(features[here]).copy_(codes_there[which[0]] + noise_there[which[1]])
    return features
