"""Encoders of images and texts, alone and together: `make bench-encoders ARGS="PHOTOS.csv IMAGES OUT"`.

Each photo counts with its first caption. The first table has no mismatched pairs: a regression, fitted across five
folds, tells own captions from those of ten other photos: random ones, or those whose photo, caption or both look alike.
With `--audits`, captions are exchanged in these ways, and audits find them. What looks alike, the default encoders say.

OUT keeps vectors (`image.NAME.npy`, `text.NAME.npy`), speeds (`speed.json`) and audits (`audits.jsonl`), which are not
made again. Vectors of other encoders can be put there by hand.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from tyro.conf import Positional

import mispair
from bench_near import Kind, partners
from common import at_least, check_ratios, run
from mispair.encoders.encoders import image_encoder, load_image, text_encoder
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL
from mispair.errors import InvalidValueError
from mispair.functional.metrics import auroc
from mispair.pairs.noise import NEIGHBOURS, nearest
from mispair.support.arrays import IntArray

Vectors = npt.NDArray[np.float32]
DEFAULT = {"image": IMAGE_MODEL, "text": TEXT_MODEL}
KINDS: tuple[Kind, ...] = ("random", "left", "right", "both")
BATCH = 32
FOLDS = 5
TIMED = 4  # batches that the speed is measured on


def first_captions(photos: Path, images: Path) -> tuple[list[Path], list[str]]:
    """The photos of a table image_path,caption, and the first caption of each."""
    with photos.open(encoding="utf-8", newline="") as file:
        first = dict(reversed(list(csv.reader(file))[1:]))
    return [images / image for image in first], list(first.values())


def encoder_of(side: str, name: str) -> Callable[[Sequence[Any]], Vectors]:
    """From image files or texts to vectors."""
    if side == "text":
        texts = text_encoder(name, "cpu")
        return lambda items: np.asarray(texts.encode(items), dtype=np.float32)
    images = image_encoder(name, "cpu")
    return lambda items: np.asarray(images.encode([images.prepare(load_image(item)) for item in items]), np.float32)


def encode(side: str, name: str, items: Sequence[Any], out: Path) -> None:
    """Make the vectors of one encoder, and measure its speed beside that of the default one."""
    path, speeds = out / f"{side}.{name.replace('/', '_')}.npy", out / "speed.json"
    if path.exists():
        return
    encoder, default = encoder_of(side, name), encoder_of(side, DEFAULT[side])
    batches = [items[first : first + BATCH] for first in range(0, len(items), BATCH)]
    seconds, ratios = [], []
    for batch in [batches[0], *batches[:TIMED]]:  # the first time warms up
        start = time.perf_counter()
        encoder(batch)
        between = time.perf_counter()
        default(batch)
        seconds.append((between - start) / len(batch))
        ratios.append((time.perf_counter() - between) / (between - start))
    found = json.loads(speeds.read_text()) if speeds.exists() else {}
    found[f"{side}.{name}"] = {"per_second": 1 / median(seconds[1:]), "times_default": median(ratios[1:])}
    speeds.write_text(json.dumps(found, indent=1))
    np.save(path, np.concatenate([encoder(batch) for batch in batches]))


def views(side: str, names: str, out: Path) -> Vectors:
    """The vectors of the encoders A+B+C, each centred and of unit length, one beside the other."""
    parts = [np.load(out / f"{side}.{name.replace('/', '_')}.npy").astype(np.float32) for name in names.split("+")]
    parts = [part - part.mean(0) for part in parts]
    return np.concatenate([part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts], axis=1)


def separation(
    left: Vectors, right: Vectors, others: dict[str, IntArray], seeds: int
) -> tuple[dict[str, float], float]:
    """AUROC of own captions against `others` (n, k) by kind, and the regularisation that is best for random ones."""
    left, right = _main_directions(left), _main_directions(right)
    found = []
    for regularisation in (1.0, 3.0, 10.0):
        runs = [_scores(left, right, regularisation, seed) for seed in range(seeds)]
        own = np.arange(len(left))
        means = {}
        for kind, rows in others.items():
            each = []
            for score in runs:
                one, other = score[own, own], score[own[:, None], rows].ravel()
                each.append(auroc(np.concatenate([one, other]), np.arange(len(one) + len(other)) < len(one)) or 0.5)
            means[kind] = float(np.mean(each))
        found.append((means, regularisation))
    return max(found, key=lambda row: row[0]["random"])


def _main_directions(side: Vectors) -> Vectors:
    """The coordinates along the 400 main directions of all items."""
    side = side - side.mean(0)
    values, vectors = np.linalg.eigh((side @ side.T).astype(np.float64))
    kept = np.argsort(-values)[:400]
    kept = kept[values[kept] > 1e-5 * values[kept[0]]]
    return np.asarray(vectors[:, kept] * np.sqrt(values[kept]), dtype=np.float32)


def _scores(left: Vectors, right: Vectors, regularisation: float, seed: int) -> Vectors:
    """(n, n) x' Cxx^-1 Cxy Cyy^-1 y, where Cxy leaves out the folds of both items; scaled by row and column."""
    fold = np.random.default_rng(seed).permutation(len(left)) % FOLDS
    spreads = [(side**2).mean(0) for side in (left, right)]
    whitened = [side / np.sqrt(spread + regularisation * spread.sum() / 256)
                for side, spread in zip((left, right), spreads, strict=True)]  # fmt: skip
    parts = [whitened[0][fold == number].T @ whitened[1][fold == number] for number in range(FOLDS)]
    score = np.empty((len(left), len(right)), np.float32)
    for one in range(FOLDS):
        for other in range(FOLDS):
            ties = sum(parts) - sum(parts[number] for number in {one, other})
            block = whitened[0][fold == one] @ ties @ whitened[1][fold == other].T
            score[np.ix_(fold == one, fold == other)] = block / (FOLDS - len({one, other}))
    squares = score**2
    scaled: Vectors = score / np.sqrt(squares.mean(1, keepdims=True) * squares.mean(0, keepdims=True))
    return scaled


def look_alikes(out: Path) -> dict[str, IntArray]:
    """(n, 10) other pairs of each kind, by the default encoders."""
    left, right = (views(side, name, out) for side, name in DEFAULT.items())
    count = len(left)
    drawn = np.random.default_rng(0).integers(1, count, (count, NEIGHBOURS))
    near = {"left": left, "right": right, "both": np.hstack([left, right])}
    return {"random": (np.arange(count)[:, None] + drawn) % count} | {
        kind: nearest(side, NEIGHBOURS) for kind, side in near.items()
    }


def measure(encoders: str, kind: Kind, noise_ratio: float, seed: int, out: Path) -> dict[str, Any]:
    """One audit."""
    link = partners(views("image", DEFAULT["image"], out), views("text", DEFAULT["text"], out), kind, noise_ratio, seed)
    image, _, text = encoders.partition(",")
    found = mispair.audit(views("image", image, out)[link], views("text", text, out), device="cpu")
    score = auroc(found.score, link == np.arange(len(link)))
    return {"encoders": encoders, "kind": kind, "noise_ratio": noise_ratio, "seed": seed, "auroc": score}


def line(name: str, means: Sequence[float]) -> str:
    return f"| {name.replace(',', ' | ')} | {' | '.join(f'{value:.3f}' for value in means)} |"


def separation_table(encoders: Sequence[str], out: Path, seeds: int) -> list[str]:
    """A line for each combination, without mismatched pairs."""
    others = look_alikes(out)
    lines = [f"| images | captions | {' | '.join(KINDS)} | near |", "|---" * (len(KINDS) + 3) + "|"]
    for name in encoders:
        image, _, text = name.partition(",")
        found, _ = separation(views("image", image, out), views("text", text, out), others, seeds)
        lines.append(line(name, [*found.values(), float(np.mean([found[kind] for kind in KINDS[1:]]))]))
    return lines


def audit_table(encoders: Sequence[str], done: list[dict[str, Any]]) -> list[str]:
    """A line for each combination: the mean AUROC of audits by kind and ratio, and of all look-alikes."""
    ratios = sorted({row["noise_ratio"] for row in done})
    columns = [(kind, ratio) for kind in KINDS for ratio in ratios]
    titles = [f"{kind} {ratio:.0%}" for kind, ratio in columns]
    lines = [f"| images | captions | {' | '.join(titles)} | near |", "|---" * (len(columns) + 3) + "|"]
    for name in encoders:
        own = [row for row in done if row["encoders"] == name]
        means = [np.mean([row["auroc"] for row in own if (row["kind"], row["noise_ratio"]) == key]) for key in columns]
        near = [mean for mean, (kind, _) in zip(means, columns, strict=True) if kind != "random"]
        lines.append(line(name, [*means, np.mean(near)]))  # kinds count alike, also in a record that was cut off
    return lines


def audit_all(
    encoders: Sequence[str], out: Path, noise_ratio: Sequence[float], seeds: int, workers: int
) -> list[dict[str, Any]]:
    """Audits of all exchanges; those in the record are not repeated."""
    record = out / "audits.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    known = {(row["encoders"], row["kind"], row["noise_ratio"], row["seed"]) for row in done}
    cases = [(name, kind, ratio, seed) for seed in range(seeds) for name in encoders for kind in KINDS
             for ratio in noise_ratio]  # fmt: skip
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool, record.open("a", encoding="utf-8") as file:
        for case in as_completed([pool.submit(measure, *case, out) for case in cases if case not in known]):
            done.append(case.result())
            file.write(json.dumps(done[-1]) + "\n")
            file.flush()
    return done


def main(
    photos: Positional[Path],
    images: Positional[Path],
    out: Positional[Path],
    *,
    encoders: tuple[str, ...] = (f"{IMAGE_MODEL},{TEXT_MODEL}",),
    noise_ratio: tuple[float, ...] = (0.2, 0.4),
    seeds: int = 3,
    audits: bool = False,
    workers: int = 1,
) -> None:
    """Print a table of audits by encoders, and the speed of each encoder.

    Args:
        photos: Table with a line for each caption: image_path,caption.
        images: Folder of the images.
        out: Folder of the results.
        encoders: IMAGE,TEXT; each one name, or several as A+B.
        noise_ratio: Shares of the captions that are exchanged.
        seeds: Folds, and audits of each kind.
        audits: Audit exchanged captions as well.
        workers: Processes for the audits.
    """
    check_ratios(noise_ratio)
    at_least(1, seeds=seeds, workers=workers)
    for name in encoders:
        if name.count(",") != 1:
            raise InvalidValueError(f'"{name}"', where="encoders", expected="IMAGE,TEXT")
    out.mkdir(parents=True, exist_ok=True)
    items: dict[str, Sequence[Any]] = dict(zip(DEFAULT, first_captions(photos, images), strict=True))
    for combination in [",".join(DEFAULT.values()), *encoders]:
        for side, names in zip(DEFAULT, combination.split(","), strict=True):
            for name in names.split("+"):
                encode(side, name, items[side], out)
    print("\n".join(separation_table(encoders, out, seeds)), flush=True)
    if audits:
        print("\n".join(audit_table(encoders, audit_all(encoders, out, noise_ratio, seeds, workers))))
    speeds = out / "speed.json"
    for name, speed in (json.loads(speeds.read_text()) if speeds.exists() else {}).items():
        print(f"{name}: {speed['per_second']:.0f} a second, {speed['times_default']:.2f} times the default's")


if __name__ == "__main__":
    sys.exit(run(main))
