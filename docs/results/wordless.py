"""Captions without words among others: python wordless.py PHOTOS.csv IMAGES OUT [--seeds ...]

PHOTOS.csv has a line for each caption: image_path,caption; the first caption of each image is taken. Of 15 % of the
images the caption becomes a file name: one of a camera, which says nothing, or the caption itself with dashes and .jpg,
which says all. Of the others none or 20 % of all captions are exchanged.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with given.photos.open(encoding="utf-8", newline="") as file:
        first = {row[0]: row for row in reversed(list(csv.reader(file))[1:])}
    lines = [
        measure(list(first.values()), given.images, given.out, exchanged, says_all, seed)
        for says_all in (False, True)
        for exchanged in (0.0, 0.2)
        for seed in given.seeds
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
