"""Pairs as the config of a training asks for them."""

from __future__ import annotations

from mispair.config import Config
from mispair.data import formats
from mispair.data.noise import add_noise
from mispair.data.pairs import Pairs
from mispair.data.text import Vocabulary


def load_split(config: Config, split: str, vocabulary: Vocabulary | None = None) -> Pairs:
    """Reads one split as the config of a run says; with the words that the run has trained, where they are known."""
    return formats.load(
        config.data,
        split,
        vocabulary=config.vocab if vocabulary is None else vocabulary,
        dev_protocol=config.dev_protocol,
        captions_per_image=config.captions_per_image,
    )


def with_noise(config: Config, train: Pairs) -> Pairs:
    """The training pairs with the noise that the config asks for."""
    if not config.noise_ratio and config.noise_file is None:
        return train
    seed = config.seed if config.noise_seed is None else config.noise_seed
    return add_noise(train, ratio=config.noise_ratio, seed=seed, kind=config.noise_kind, file=config.noise_file)
