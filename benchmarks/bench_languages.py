"""False alarms by language: `make bench-languages ARGS="IMAGES.npy en.npy de.npy zh.npy"`.

All files have the same rows: vectors of images, and of their captions in each language by one encoder. A share of the
captions is in each language but the first. A fifth of the pairs is mismatched, whatever the language.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tyro.conf import Positional

import mispair
from common import at_least, check_ratios, run
from mispair.functional.metrics import auroc
from mispair.pairs.noise import caption_noise


def main(
    images: Positional[Path], captions: Positional[tuple[Path, ...]], *, share: float = 0.1, seeds: int = 3
) -> None:
    """Print a row for each language and seed.

    Args:
        images: Vectors of images.
        captions: Vectors of captions, a file a language.
        share: Share of the captions in each language but the first.
        seeds: Audits.
    """
    check_ratios((share,))
    at_least(1, seeds=seeds)
    left = np.load(images).astype(np.float32)
    texts = [np.load(path).astype(np.float32) for path in captions]
    rows = np.arange(len(left))
    print("| language | seed | pairs | AUROC | false alarms | found |\n|---|---|---|---|---|---|")
    for seed in range(seeds):
        language = np.zeros(len(left), dtype=np.int64)
        order = np.random.default_rng(seed).permutation(rows)
        count = int(share * len(left))
        for number in range(1, len(texts)):
            language[order[(number - 1) * count : number * count]] = number
        right = np.stack(texts)[language, rows]
        link = caption_noise(rows, 0.2, seed)
        found, matched = mispair.audit(left[link], right), link == rows
        for number, path in enumerate(captions):
            own = language == number
            value = auroc(found.score[own], matched[own]) or 0.5
            alarms, hits = (found.is_mismatch[own & which].mean() for which in (matched, ~matched))
            print(f"| {path.stem} | {seed} | {own.sum():,} | {value:.3f} | {alarms:.3f} | {hits:.3f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
