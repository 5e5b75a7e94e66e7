"""Pairs of any size to measure speed with: real or made-up captions, and regions that carry the captions' words.

The regions mean nothing, but a network can learn from them, so that a training goes its usual way: losses fall, right
and wrong pairs part, a method's split has the size that it would have.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path

import numpy as np
import torch

from mispair.data.pairs import IntArray, Pairs, Regions, Tokens
from mispair.data.vocabulary import END, SPECIAL_WORDS, START, Vocabulary
from mispair.errors import DataError

CAPTIONS, REGIONS, WIDTH, WORDS = 5, 36, 2048, 8481  # as Flickr30K
NOISE = 1024  # different noise vectors
CHUNK = 1024  # images made at a time


def stand_in(captions: Path | None, images: int, *, seed: int = 0) -> Pairs:
    """So many images with five captions each.

    Args:
        captions: A file with a caption a line, perhaps compressed (.gz); repeated if it is too short. By default
            captions are made up, as long as those of Flickr30K.
        images: How many.
        seed: Another seed makes other images, captions from another place of the file and the same words.
    """
    texts = made_up(CAPTIONS * images, seed) if captions is None else read(captions, CAPTIONS * images, seed)
    link = np.repeat(np.arange(images), CAPTIONS)
    return Pairs(Regions(pictures(texts, images, seed)), texts, link=link, name="stand-in")


def made_up(count: int, seed: int) -> Tokens:
    """Random words; few of them are frequent."""
    rng = np.random.default_rng([seed, 0])
    lengths = np.clip(rng.lognormal(2.43, 0.4, count).round().astype(np.int64), 2, 78)
    known = WORDS - len(SPECIAL_WORDS)
    words = (known * rng.random(int(lengths.sum())) ** 4).astype(np.int32) + len(SPECIAL_WORDS)
    texts = np.split(words, np.cumsum(lengths)[:-1])
    ids = np.concatenate([part for text in texts for part in ([START], text, [END])]).astype(np.int32)
    vocabulary = Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(known))))
    return Tokens(ids, np.concatenate([[0], np.cumsum(lengths + 2)]), vocabulary)


def read(path: Path, count: int, seed: int) -> Tokens:
    """Captions of a file, from its start or, for other seeds, from elsewhere."""
    lines, vocabulary = _words(path)
    start = seed * count % len(lines)
    chosen = [vocabulary.encode_tokens(lines[(start + number) % len(lines)]) for number in range(count)]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in chosen])]).astype(np.int64)
    return Tokens(np.concatenate(chosen).astype(np.int32), offsets, vocabulary)


@functools.cache
def _words(path: Path) -> tuple[list[list[str]], Vocabulary]:
    """The words of each line, and all of them."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            lines = [line.split() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as captions, one a line: {error}.") from error
    if not lines:
        raise DataError(f"{path} holds no captions; one a line is expected.")
    return lines, Vocabulary.build(" ".join(line) for line in lines)


def pictures(texts: Tokens, images: int, seed: int) -> np.ndarray:
    """(images, R, D) in half precision: the code of a random word of its captions in every region, and noise."""
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
