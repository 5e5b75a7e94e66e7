"""A data set of a few random images with telling captions, for tests that train."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mispair.pairs.pairs import Pairs, Regions, Tokens
from mispair.pairs.vocabulary import Vocabulary

WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
REGIONS, WIDTH = 5, 12


def tiny_arrays(images: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Features and five captions an image, both from the same few hidden letters: there is something to learn."""
    rng = np.random.default_rng(seed)
    meaning = np.random.default_rng(99).normal(size=(len(WORDS), WIDTH))
    features, captions = [], []
    for _ in range(images):
        letters = rng.choice(len(WORDS), size=4, replace=False)
        regions = meaning[rng.choice(letters, size=REGIONS)] + 0.1 * rng.normal(size=(REGIONS, WIDTH))
        features.append(regions)
        for _ in range(5):
            captions.append(" ".join(WORDS[i] for i in rng.permutation(letters)[: rng.integers(1, 5)]))
    return np.asarray(features, dtype=np.float32), captions


def tiny_pairs(images: int, seed: int = 0) -> Pairs:
    features, captions = tiny_arrays(images, seed)
    vocabulary = Vocabulary(("<pad>", "<start>", "<end>", "<unk>", *WORDS))
    tokens = Tokens(*vocabulary.encode(captions), vocabulary, captions)
    return Pairs(Regions(features), tokens, np.arange(len(captions)) // 5, name="tiny")


def tiny_folder(folder: Path, images: int = 16) -> Path:
    """The same as files in the SCAN layout."""
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "dev", "test")):
        count = images if split == "train" else images // 2
        features, captions = tiny_arrays(count, seed)
        np.save(folder / f"{split}_ims.npy", features)
        (folder / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
        (folder / f"{split}_ids.txt").write_text("\n".join(f"{split}{i}" for i in range(count)) + "\n")
    return folder


def weights(run: Path) -> dict[str, bytes]:
    """Every tensor of a run's newest checkpoint, as bytes."""
    from mispair.training import checkpoint

    state = checkpoint.resume(run / "checkpoints")
    assert state is not None
    return {
        f"{number}.{name}": tensor.numpy().tobytes()
        for number, network in enumerate(state.networks)
        for name, tensor in network.items()
    }
