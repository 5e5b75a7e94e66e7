"""Captions without words among others: `make bench-wordless ARGS="PHOTOS.csv IMAGES OUT"`.

PHOTOS.csv has a line for each caption: image_path,caption; the first caption of each image is taken. Of 15 % of the
images the caption becomes a file name: one of a camera, which says nothing, or the caption itself with dashes and .jpg,
which says all. Of the others none or 20 % of all captions are exchanged.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
from tyro.conf import Positional

from common import run
from mispair.cli.main import main as mispair


def measure(rows: list[list[str]], images: Path, out: Path, exchanged: float, says_all: bool, seed: int) -> str:
    rng, noisy = np.random.default_rng(seed), [list(row) for row in rows]
    order = rng.permutation(len(rows))
    named = order[: round(0.15 * len(rows))]
    moved = order[len(named) : len(named) + round(exchanged * len(rows))]
    for row in named:
        words = "-".join(re.findall(r"\w+", rows[row][1].lower()))
        noisy[row][1] = f"{words}.jpg" if says_all else f"IMG_{rng.integers(10_000):04}.jpg"
    for one, other in zip(moved, np.roll(moved, 1), strict=True):
        noisy[one][1] = rows[other][1]
    table, folder = out / "photos.csv", out / f"{exchanged}-{says_all}-{seed}"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["image_path", "caption"], *noisy])
    assert not mispair(["audit", str(table), "--images", str(images), "--out", str(folder), "--overwrite"])
    found = pyarrow.parquet.read_table(folder / "pairs.parquet", columns=["is_mismatch"])["is_mismatch"].to_numpy()
    rate = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["noise_rate"]
    truth = (len(moved) + (0 if says_all else len(named))) / len(rows)
    kind = "say all" if says_all else "say nothing"
    return (
        f"{kind}, seed {seed}: {found[named].sum()} of {len(named)} flagged; {truth:.1%} mismatched, {rate:.1%} found"
    )


def main(
    photos: Positional[Path], images: Positional[Path], out: Positional[Path], *, seeds: tuple[int, ...] = (0, 1, 2)
) -> None:
    """Print what the audits find.

    Args:
        photos: Table with a line for each caption: image_path,caption.
        images: Folder of the images.
        out: Folder of the audits.
        seeds: Of the noise.
    """
    out.mkdir(parents=True, exist_ok=True)
    with photos.open(encoding="utf-8", newline="") as file:
        first = {row[0]: row for row in reversed(list(csv.reader(file))[1:])}
    lines = [
        measure(list(first.values()), images, out, exchanged, says_all, seed)
        for says_all in (False, True)
        for exchanged in (0.0, 0.2)
        for seed in seeds
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(run(main))
