"""Synthetic pairs of any size for speed measurements: real or random captions, regions made from their words.

A network can learn from them, so that a training takes its usual course: losses fall, matched and mismatched pairs
separate, and a method's clean and noisy sets have realistic sizes.
"""

from __future__ import annotations

import functools
import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from mispair.errors import DamagedError
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
from mispair.pairs.vocabulary import END, SPECIAL_WORDS, START, Vocabulary
from mispair.support.arrays import IntArray
from mispair.support.files import LARGEST_TEXT, regular

CAPTIONS, REGIONS, WIDTH, WORDS = 5, 36, 2048, 8481  # as Flickr30K
VECTOR, HIDDEN = 512, 64  # numbers of a vector, and of what both sides have in common
NOISE = 1024  # number of different noise vectors
CHUNK = 1024  # images at a time


def synthetic_pairs(captions: Path | None, images: int, *, seed: int = 0) -> Pairs:
    """Images with five captions each, from a file with one per line (.gz or not), repeated if it is too short.

    By default captions are random words, with the lengths of Flickr30K. The vocabulary is the same for all seeds.
    """
    count = CAPTIONS * images
    texts = random_captions(count, seed) if captions is None else read_captions(captions, count, seed)
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


def stand_in(vectors: bool, captions: Path | None, images: int, *, seed: int = 0) -> Pairs:
    """Vectors with one pair an image, or regions with five captions each."""
    if vectors:
        return synthetic_vectors(images, seed=seed)
    return synthetic_pairs(captions, images, seed=seed)


def random_captions(count: int, seed: int) -> Tokens:
    """Random words, few of them frequent."""
    rng = np.random.default_rng([seed, 0])
    lengths = np.clip(rng.lognormal(2.43, 0.4, count).round().astype(np.int64), 2, 78)
    known = WORDS - len(SPECIAL_WORDS)
    words = (known * rng.random(int(lengths.sum())) ** 4).astype(np.int32) + len(SPECIAL_WORDS)
    texts = np.split(words, np.cumsum(lengths)[:-1])
    ids = np.concatenate([part for text in texts for part in ([START], text, [END])]).astype(np.int32)
    vocabulary = Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(known))))
    return Tokens(ids, np.concatenate([[0], np.cumsum(lengths + 2)]), vocabulary)


def read_captions(path: Path, count: int, seed: int) -> Tokens:
    """Consecutive captions of a file; the seed chooses where they start."""
    lines, vocabulary = _words(path)
    start = seed * count % len(lines)
    chosen = [vocabulary.encode_tokens(lines[(start + number) % len(lines)]) for number in range(count)]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in chosen])]).astype(np.int64)
    return Tokens(np.concatenate(chosen).astype(np.int32), offsets, vocabulary)


@functools.cache
def _words(path: Path) -> tuple[list[list[str]], Vocabulary]:
    """The words of each line, and the vocabulary of all lines."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(regular(path), "rb") as file:
            content = file.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise OSError(f"it has more than the {LARGEST_TEXT / 1e6:,.0f} MB that are read")
        lines = [line.split() for line in content.decode("utf-8").splitlines() if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DamagedError(f"cannot be read: {error}", where=path, expected="captions, one a line") from error
    if not lines:
        raise DamagedError("no captions", where=path, expected="one a line")
    return lines, Vocabulary.build(" ".join(line) for line in lines)


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
