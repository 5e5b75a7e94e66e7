"""From photos to a model, with captions exchanged: `make bench-photos ARGS="PHOTOS.csv IMAGES OUT"`.

PHOTOS.csv has a line for each caption: image_path,caption. Of a share of all lines the captions are exchanged. Each row
trains with one command on that, and is tested on the test images with their true captions. A row that is done is not
done again.
"""

from __future__ import annotations

import csv
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
from sklearn.metrics import roc_auc_score
from tyro.conf import Positional

from common import check_names, run
from mispair.cli.main import main as mispair
from mispair.retrieval.matcher import Matcher, load_for

ROWS: dict[str, list[str]] = {
    "mend": [],
    "plain-audit": ["--method", "plain", "--audit"],
    "repair": ["--method", "repair"],
    "plain": ["--method", "plain"],
}


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def write(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["image_path", "caption"], *rows])


def exchanged(rows: list[list[str]], share: float, seed: int) -> list[list[str]]:
    """The captions of a share of the lines go round in a circle, drawn so that none meets its own image."""
    rng = np.random.default_rng(seed)
    names = np.array([image for image, _ in rows])
    while True:
        chosen = rng.permutation(len(rows))[: round(share * len(rows))]
        if (names[chosen] != names[np.roll(chosen, 1)]).all():
            break
    noisy = [list(row) for row in rows]
    for one, other in zip(chosen, np.roll(chosen, 1), strict=True):
        noisy[one][1] = rows[other][1]
    return noisy


def measure(name: str, seed: int, rows: list[list[str]], images: Path, out: Path, share: float) -> dict[str, float]:
    noisy, run = exchanged(rows, share, seed), out / f"{name}_{seed}"
    write(out / f"photos_{seed}.csv", noisy)
    given = [str(out / f"photos_{seed}.csv"), "--images", str(images), "--out", str(run)]
    start, used = time.perf_counter(), time.process_time()
    assert not mispair(["train", *given, "--seed", str(seed), *ROWS[name]])
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - used}
    memory = {"gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # Linux counts in kilobytes
    test = [rows[row] for row in np.load(run / "features/test_rows.npy")]
    write(out / f"test_{seed}.csv", test)
    truth = out / f"truth_{seed}"
    if not truth.exists():
        given = [str(out / f"test_{seed}.csv"), "--images", str(images), "--out", str(truth / "test")]
        assert not mispair(["encode", *given])
    matcher = Matcher.load(run)
    tested = matcher.evaluate(load_for(matcher, "test", str(truth), None)).averaged.metrics()["rsum"]
    table = run / "audit/pairs.parquet"
    if not table.exists():
        return {"test_rsum": tested, **times, **memory}
    score = pyarrow.parquet.read_table(table, columns=["match_score"])["match_score"].to_numpy()
    wrong = np.array([one[1] != other[1] for one, other in zip(rows, noisy, strict=True)])
    return {"test_rsum": tested, "audit_auroc": float(roc_auc_score(wrong, -score)), **times, **memory}


def main(
    photos: Positional[Path],
    images: Positional[Path],
    out: Positional[Path],
    *,
    rows: tuple[str, ...] = tuple(ROWS),
    seeds: tuple[int, ...] = (0, 1, 2),
    share: float = 0.3,
) -> None:
    """Print the test rSum, the audit's AUROC, times and memory of each training, as JSON.

    Args:
        photos: Table with a line for each caption: image_path,caption.
        images: Folder of the images.
        out: Folder of the results.
        rows: mend, plain-audit, repair, plain.
        seeds: Of noise and training.
        share: Of the lines whose captions are exchanged.
    """
    check_names(rows, ROWS, "rows")
    out.mkdir(parents=True, exist_ok=True)
    for name in rows:
        for seed in seeds:
            done = out / f"{name}_{seed}.json"
            if not done.exists():
                found = measure(name, seed, read(photos), images, out, share)
                done.write_text(json.dumps(found), encoding="utf-8")
            print(name, seed, done.read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
