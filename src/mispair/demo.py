"""`mispair demo`: how REPAIR survives wrong pairs, on the built-in data set, as a table and one self-contained page."""

from __future__ import annotations

import base64
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mispair import __version__
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_to_folder
from mispair.auditing.sources.from_pairs import from_pairs
from mispair.bench.suite.suite import digest
from mispair.config import Config, override, read_recipe
from mispair.data import loading
from mispair.data.loading import with_noise
from mispair.data.pairs import Pairs, Tokens
from mispair.methods.report import MethodReport
from mispair.retrieval.matcher import Matcher
from mispair.retrieval.search import best
from mispair.support.files import write_atomically
from mispair.support.formatting import slug
from mispair.support.html import template
from mispair.support.terminal import COLUMNS, retrieval_table
from mispair.training.events import ValidationEvent
from mispair.training.fit import train_and_test
from mispair.training.run_folder import read_events, read_examples, read_result

NOISE = 0.4
QUERIES, QUERY_WORDS, FOUND, EXAMPLES, MENDED = 4, 12, 5, 4, 6

# What is trained, in the order of the page: name, colour, recipe, settings beside those of the recipe. All have two
# networks and about as many steps.
TRAININGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Plain training": ("bad", "shapes/plain", {"networks": 2}),
    "Hard labels (as in NCR)": ("middle", "shapes/repair", {"labels": "hard", "noisy": "train"}),
    "REPAIR, audit first": ("good", "shapes/repair", {"audit": True}),
}
REPAIR = "REPAIR, audit first"


@dataclass(frozen=True)
class Training:
    """One training of the demo and what it reached."""

    name: str
    colour: str
    folder: Path
    test: dict[str, float]  # of two networks, averaged
    curve: list[float]  # validation rSum by epoch
    report: MethodReport | None  # of the method, on its last epoch


@dataclass(frozen=True)
class Audited:
    """What an audit found in the same pairs without any training."""

    flagged: int
    precision: float  # share of the flagged pairs that are wrong indeed
    recall: float  # share of the wrong pairs that are flagged
    noise_rate: float
    report: str  # path from the page


@dataclass(frozen=True)
class DemoResult:
    page: Path
    trainings: list[Training]
    audited: Audited

    def figures(self) -> dict[str, Any]:
        trainings = {training.name: training.test for training in self.trainings}
        return {"page": str(self.page), **trainings, "audit": asdict(self.audited)}

    def table(self) -> Table:
        rows = {training.name: training.test for training in self.trainings}
        return retrieval_table(f"Trained with {NOISE:.0%} wrong pairs, tested on right ones", rows)


@dataclass(frozen=True)
class Picture:
    """A picture on the page."""

    source: str
    name: str
    right: bool = False


@dataclass(frozen=True)
class Example:
    """A pair as the training saw it."""

    picture: Picture
    text: str
    wrong: bool


@dataclass(frozen=True)
class Mended:
    """A pair that REPAIR took for wrong, with the picture that it gave the text."""

    text: str
    old: Picture
    new: Picture
    true: Picture
    wrong: bool  # whether the pair was wrong indeed


@dataclass(frozen=True)
class Query:
    """A caption of the test set and, for each training, the pictures that its model finds."""

    text: str
    found: list[tuple[str, list[Picture], int]]  # name of the training, pictures, rank of the right one from 1


def run_demo(out: Path, seed: int, console: Console) -> DemoResult:
    """Trains in several ways on pairs of which 40 % are wrong, then writes `out/index.html`."""
    config = _config(REPAIR, seed)
    console.print("Drawing the shapes data set, if it is not there yet ...")
    folder = loading.find_folder(config.data)
    pairs, test = with_noise(config, loading.load(folder, "train")), loading.load(folder, "test")
    audited = _audit(pairs, folder, out, console)
    trainings = _train_all(seed, out, console)
    repair = next(training for training in trainings if training.name == REPAIR)
    page = template("demo.html").render(
        audited=audited,
        trainings=trainings,
        repair=repair,
        columns=COLUMNS,
        curves=_curves(trainings),
        histogram=_histogram(repair.report),
        mended=_mended(repair, pairs, folder, seed),
        queries=_queries(trainings, test, folder, seed),
        examples=_examples(pairs, folder),
        count=len(pairs),
        config=config,
        query_words=QUERY_WORDS,
        noise=NOISE,
        version=__version__,
    )
    path = out / "index.html"
    write_atomically(path, page.encode())
    return DemoResult(path, trainings, audited)


def _config(name: str, seed: int) -> Config:
    """The settings of a training."""
    _, recipe, settings = TRAININGS[name]
    return replace(override(read_recipe(recipe), settings, "demo"), seed=seed, noise_ratio=NOISE)


def _train_all(seed: int, out: Path, console: Console) -> list[Training]:
    """All trainings at once, one thread each: networks as small as these have no work for a second one."""
    count = len(TRAININGS)
    console.print(f"Training in {count} ways at once: about three minutes on two cores ...")
    with ProcessPoolExecutor(count, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.submit(_train, name, _config(name, seed), out, console.quiet) for name in TRAININGS]
        return [job.result() for job in jobs]


def _audit(pairs: Pairs, folder: Path, out: Path, console: Console) -> Audited:
    """Audits the pairs as they are: the mean of the features of each picture, and the words of its caption."""
    console.print(f"Auditing {len(pairs):,} pairs, of which {NOISE:.0%} are wrong, without any training ...")
    source = from_pairs(pairs, folder / "images")
    result = audit_to_folder(source, out / "audit", Settings(), overwrite=True, console=console, command="mispair demo")
    wrong, flagged = pairs.mismatched, result.is_mismatch
    assert wrong is not None
    precision, recall = (float((wrong & flagged).sum() / max(1, part.sum())) for part in (flagged, wrong))
    rate = float(result.judge.combination.rate)
    console.print(
        f"It takes {flagged.sum():,} pairs for wrong: {precision:.0%} of these are, and {recall:.0%} of all wrong ones "
        "are among them."
    )
    return Audited(int(flagged.sum()), precision, recall, rate, "audit/report.html")


class _Named:
    """A terminal for one of several processes: its name stands before every line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> None:
        for line in filter(str.strip, text.splitlines()):
            sys.stderr.write(f"{self.name}: {line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def run_folder(out: Path, name: str, config: Config) -> Path:
    """Where a training is: another seed, or another version of the recipe, is another run."""
    return out / "runs" / f"{slug(name.partition('(')[0])}-{digest(config)[:8]}"


def _train(name: str, config: Config, out: Path, quiet: bool) -> Training:
    console = Console(file=cast(IO[str], _Named(name)), width=120, quiet=quiet)
    folder = run_folder(out, name, config)
    result = train_and_test(config, folder, console)
    curve = [event.rsum for event in read_events(folder, ValidationEvent)]
    ended = read_result(folder)
    report = None if ended is None else ended.report
    return Training(name, TRAININGS[name][0], folder, result.evaluation.averaged.metrics(), curve, report)


def _examples(pairs: Pairs, folder: Path) -> list[Example]:
    """Pairs as the trainings see them: right ones and wrong ones in turn."""
    wrong = pairs.mismatched
    assert wrong is not None
    right, mismatched = np.flatnonzero(~wrong), np.flatnonzero(wrong)
    step = max(1, len(mismatched) // EXAMPLES)
    chosen = [pair for i in range(EXAMPLES // 2) for pair in (right[i * step + 1], mismatched[i * step])]
    return [
        Example(_picture(folder, pairs, int(pairs.link[pair])), _text(pairs, int(pair)), bool(wrong[pair]))
        for pair in chosen
    ]


def _mended(repair: Training, pairs: Pairs, folder: Path, seed: int) -> list[Mended]:
    """Random pairs to which REPAIR gave another picture in its last epoch, not chosen by how well that went."""
    examples = read_examples(repair.folder)
    assert examples is not None
    assert examples.new_left is not None
    assert pairs.truth is not None
    assert isinstance(pairs.right, Tokens)
    partners = examples.new_left
    replaced = np.flatnonzero((partners >= 0) & (pairs.right.lengths - 2 >= QUERY_WORDS))
    chosen = np.random.default_rng(seed).choice(replaced, min(MENDED, len(replaced)), replace=False)
    mended = []
    for pair in chosen:
        true = int(pairs.truth[pair])
        rows = int(pairs.link[pair]), int(pairs.link[partners[pair]]), true
        old, new, right = (_picture(folder, pairs, row, row == true) for row in rows)
        mended.append(Mended(_text(pairs, int(pair)), old, new, right, wrong=not old.right))
    return mended


def _queries(trainings: list[Training], test: Pairs, folder: Path, seed: int) -> list[Query]:
    """Random captions of the test set that say enough, not chosen by how well anything does on them."""
    assert isinstance(test.right, Tokens)
    telling = np.flatnonzero(test.right.lengths - 2 >= QUERY_WORDS)  # without start and end
    chosen = np.random.default_rng(seed).choice(telling, min(QUERIES, len(telling)), replace=False)
    texts = [_text(test, int(pair)) for pair in chosen]
    scores = {training.name: Matcher.load(training.folder, "cpu").score(test.left, texts) for training in trainings}
    queries = []
    for column, (pair, text) in enumerate(zip(chosen, texts, strict=True)):
        true_row, found = int(test.link[pair]), []
        for name, S in scores.items():
            pictures = [_picture(folder, test, row, row == true_row) for row in best(S[:, column], FOUND)]
            found.append((name, pictures, int((S[:, column] >= S[true_row, column]).sum())))
        queries.append(Query(text, found))
    return queries


def _picture(folder: Path, pairs: Pairs, row: int, right: bool = False) -> Picture:
    name = pairs.left_ids[row]
    encoded = base64.b64encode((folder / "images" / f"{name}.png").read_bytes()).decode()
    return Picture(f"data:image/png;base64,{encoded}", name, right)


def _text(pairs: Pairs, pair: int) -> str:
    assert isinstance(pairs.right, Tokens)
    return pairs.right.texts[pair]


def _curves(trainings: list[Training], width: int = 300, height: int = 150) -> list[tuple[Training, str, float]]:
    """Validation curves as the points of SVG polylines, and where their names stand without touching each other."""
    top = max((value for training in trainings for value in training.curve), default=0.0) or 1.0
    lines = []
    for training in trainings:
        step = width / max(1, len(training.curve) - 1)
        heights = [height - value / top * height for value in training.curve]
        lines.append((training, " ".join(f"{i * step:.1f},{y:.1f}" for i, y in enumerate(heights)), heights[-1]))
    lines.sort(key=lambda line: line[2])
    placed, free = [], -np.inf
    for training, points, y in lines:
        free = max(y, free + 19)
        placed.append((training, points, free))
    return placed


def _histogram(report: MethodReport | None, height: int = 120) -> list[tuple[float, float]]:
    """Heights of the bars for right and for wrong pairs in each bin of the labels y*, network A."""
    assert report is not None
    assert report.labels_clean is not None
    assert report.labels_noisy is not None
    counts = report.labels_clean[0], report.labels_noisy[0]
    shares = [np.asarray(count) / max(1, sum(count)) for count in counts]
    top = max(share.max() for share in shares) or 1.0
    return [(float(a / top * height), float(b / top * height)) for a, b in zip(*shares, strict=True)]
