"""`mispair demo`: what wrong pairs do to training, on the built-in data set, as tables and one self-contained page."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from rich.console import Console
from rich.table import Table

from mispair import __version__
from mispair.api import train_and_test, with_noise
from mispair.config import Config, read_recipe
from mispair.data import formats
from mispair.data.pairs import Pairs, Tokens
from mispair.files import write_atomically
from mispair.matcher import Matcher
from mispair.search import best
from mispair.tables import COLUMNS, retrieval_table

NOISE = 0.4
QUERIES, QUERY_WORDS, FOUND, EXAMPLES = 6, 12, 5, 4


@dataclass(frozen=True)
class Training:
    """One trained model of the demo and what it reached."""

    name: str
    folder: Path
    test: dict[str, float]
    curve: list[float]  # validation rSum by epoch


@dataclass(frozen=True)
class DemoResult:
    page: Path
    trainings: list[Training]

    def figures(self) -> dict[str, Any]:
        return {"page": str(self.page), **{training.name: training.test for training in self.trainings}}

    def tables(self) -> list[Table]:
        return [retrieval_table(training.name, {"test": training.test}) for training in self.trainings]


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
class Query:
    """A caption of the test set and, for each training, the pictures that its model finds."""

    text: str
    found: list[tuple[str, list[Picture], int]]  # name of the training, pictures, rank of the right one from 1


def run_demo(out: Path, seed: int, console: Console) -> DemoResult:
    """Trains on right pairs and on pairs of which 40 % are wrong, then writes `out/index.html`."""
    recipe = replace(read_recipe("shapes/plain"), seed=seed)
    noisy = replace(recipe, noise_ratio=NOISE)
    console.print("Drawing the shapes data set, if it is not there yet ...")
    folder = formats.find_folder(recipe.data)
    trainings = [
        _train("All pairs right", recipe, out / "clean", console),
        _train(f"{NOISE:.0%} of the pairs wrong", noisy, out / "noisy", console),
    ]
    test, examples = formats.load(folder, "test"), _examples(folder, noisy)
    page = out / "index.html"
    write_atomically(page, _render(trainings, _queries(trainings, test, folder, seed), examples, noisy).encode())
    return DemoResult(page, trainings)


def _train(name: str, config: Config, folder: Path, console: Console) -> Training:
    console.print(f"\n{name}: plain training", style="bold")
    result = train_and_test(config, folder, console)
    log = folder / "metrics.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    curve = [event["rsum"] for event in events if event["event"] == "validation"]
    return Training(name, folder, result["network"], curve)


def _examples(folder: Path, config: Config) -> list[Example]:
    """Pairs as the noisy training sees them: right ones and wrong ones in turn."""
    pairs = with_noise(config, formats.load(folder, "train"))
    wrong = pairs.mismatched
    assert wrong is not None
    right, mismatched = np.flatnonzero(~wrong), np.flatnonzero(wrong)
    step = max(1, len(mismatched) // EXAMPLES)
    chosen = [pair for i in range(EXAMPLES // 2) for pair in (right[i * step + 1], mismatched[i * step])]
    return [
        Example(_picture(folder, pairs, int(pairs.link[pair])), _text(pairs, int(pair)), bool(wrong[pair]))
        for pair in chosen
    ]


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


def _render(trainings: list[Training], queries: list[Query], examples: list[Example], config: Config) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mispair"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    top = max((value for training in trainings for value in training.curve), default=0.0) or 1.0
    return environment.get_template("demo.html").render(
        trainings=trainings,
        columns=COLUMNS,
        curves=[(t.name, _points(t.curve, top), t.curve[-1]) for t in trainings if t.curve],
        queries=queries,
        examples=examples,
        config=config,
        query_words=QUERY_WORDS,
        noise=NOISE,
        version=__version__,
    )


def _points(curve: list[float], top: float, width: int = 300, height: int = 120) -> str:
    """A curve as the points of an SVG polyline."""
    step = width / max(1, len(curve) - 1)
    return " ".join(f"{i * step:.1f},{height - value / top * height:.1f}" for i, value in enumerate(curve))
