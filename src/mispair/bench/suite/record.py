"""One training of a suite, and what is kept of it: `cell.json`, a few kilobytes that all tables and figures need."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from mispair.bench.suite.examples import examples
from mispair.bench.suite.suite import WHERE, Cell, digest
from mispair.compute.devices import give_back_memory
from mispair.config import Config, flat, read_recipe, to_toml
from mispair.errors import MispairError, StoppedError
from mispair.methods.report import BoolArray, FloatArray
from mispair.support.files import write_atomically
from mispair.training.events import ValidationEvent
from mispair.training.fit import train_splits
from mispair.training.run_folder import read_environment, read_events, read_examples, read_result
from mispair.training.splits import Splits, load_splits

RECORD, RUN = "cell.json", "run"
LONGEST_ERROR = 400  # letters
ETAS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)


@dataclass(frozen=True)
class Record:
    """A training that has ended, well or not.

    Attributes:
        name: Of the cell.
        label: Of its row.
        digest: Hash of the settings that decide the result.
        config: All settings.
        status: Whether it has ended well.
        error: What went wrong, in a sentence.
        data: What it was trained and tested on, the dev protocol, the share of wrong pairs, the noise file's hash.
        test: Retrieval figures by name: `network`, or `network A`, `network B` and `averaged`; `folds`.
        validation: One entry an epoch: rsum, networks_rsum, seconds, choosing_seconds.
        found: What the method found before its last epoch.
        eta: Accuracy, precision and recall of the wrong pairs found, by the threshold eta.
        examples: Pairs of a method that replaces halves, with what it made of them.
        memory: Most bytes ever in use on the GPU.
        environment: Versions, device, command.
    """

    name: str
    label: str
    digest: str
    config: dict[str, Any]
    status: Literal["done", "failed"]
    error: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    validation: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    eta: list[dict[str, float]] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)
    memory: int | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of all epochs; one that was interrupted counts from where it went on."""
        return float(sum(epoch["seconds"] for epoch in self.validation))

    def averaged(self, *, folds: bool = False) -> dict[str, float]:
        """Retrieval with the mean of the networks' similarities, or by the only network."""
        return self.test["folds"] if folds else self.test.get("averaged") or self.test["network"]

    def alone(self) -> dict[str, float]:
        """The mean over the networks by themselves."""
        networks = [figures for name, figures in self.test.items() if name.startswith("network")]
        return {name: fmean(figures[name] for figures in networks) for name in networks[0]}


def run_cell(cell: Cell, folder: Path, console: Console | None = None) -> Record:
    """Trains and tests a cell in its folder, from where an earlier process stopped, and writes its record.

    Raises:
        StoppedError: It was asked to stop, and has saved its state.
    """
    if cell.config.device != "cpu" and torch.cuda.is_available():
        give_back_memory()
        torch.cuda.reset_peak_memory_stats()
    start = Record(cell.name, cell.label, digest(cell.config), flat(cell.config), "done")
    try:
        _move(folder / RUN / "config.toml", cell.config)
        splits = load_splits(cell.config, console)
        matcher = train_splits(cell.config, splits, folder / RUN, console, "The same command goes on from here.")
        record = _described(start, cell, splits, splits.test(matcher).metrics(), folder / RUN)
    except MispairError as error:
        if isinstance(error, StoppedError) or isinstance(error.__context__, OSError):  # a full disk is no result
            raise
        record = replace(start, status="failed", error=_shortened(str(error).splitlines()[0]))
    except torch.OutOfMemoryError as error:
        sentence = f"{str(error).partition('.')[0]}. Try fewer --jobs, or a smaller batch_size in the recipe."
        record = replace(start, status="failed", error=sentence)
    write_record(folder, record)
    return record


def _shortened(sentence: str) -> str:
    """The beginning and the end, where the advice is, of what would fill a page."""
    return sentence if len(sentence) <= LONGEST_ERROR else f"{sentence[: LONGEST_ERROR // 2]} … {sentence[-120:]}"


def _move(settings: Path, config: Config) -> None:
    """Tells a training that was begun elsewhere where its data is now: it goes on all the same."""
    if settings.is_file():
        before = read_recipe(settings)
        here = replace(before, **{name: getattr(config, name) for name in WHERE})
        if here != before:
            write_atomically(settings, to_toml(here).encode())


def write_record(folder: Path, record: Record) -> None:
    write_atomically(folder / RECORD, (json.dumps(asdict(record), indent=1) + "\n").encode())


def read_record(folder: Path) -> Record | None:
    """The record of a cell that has ended; None before that, and if the file is damaged or of another cell."""
    try:
        found = Record(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.name == folder.name and _is_whole(found) else None


def _is_whole(record: Record) -> bool:
    """Whether tables and figures find what they expect."""
    tables = (record.config, record.data, record.test, record.found, record.environment)
    lists = (record.validation, record.eta, record.examples)
    if not all(isinstance(one, dict) for one in tables) or not all(isinstance(one, list) for one in lists):
        return False
    if not all(isinstance(entry, dict) for entry in (*record.test.values(), *(one for some in lists for one in some))):
        return False
    tested = "network" in record.test or {"network A", "averaged"} <= record.test.keys()
    numbers = [number for figures in record.test.values() for number in (figures.get("rsum"), *figures.values())]
    numbers += [epoch.get("seconds") for epoch in record.validation]
    known = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    return known and (record.status == "failed" or (record.status == "done" and tested))


def _described(start: Record, cell: Cell, splits: Splits, test: dict[str, Any], run: Path) -> Record:
    wanted = {"epoch", "rsum", "networks_rsum", "seconds", "selection_seconds"}
    result, about_pairs = read_result(run), read_examples(run)
    report = None if result is None else result.report
    data = {
        "mismatch": splits.noise_ratio,
        "tested_on": splits.tested.name,
        "name": splits.train.name,
        "pairs": len(splits.train),
        "dev_protocol": cell.config.dev_protocol,
        "noise_file": noise_hash(cell.config.noise_file),
    }
    device = cell.config.device != "cpu" and torch.cuda.is_available()
    return replace(
        start,
        data=data,
        test=test,
        validation=[event.model_dump(include=wanted) for event in read_events(run, ValidationEvent)],
        found={} if report is None else report.model_dump(exclude_unset=True),
        eta=_eta_curve(None if about_pairs is None else about_pairs.w, splits.train.mismatched),
        examples=[] if about_pairs is None else examples(about_pairs, splits.train, cell.config.seed),
        memory=torch.cuda.max_memory_allocated() if device else None,
        environment=read_environment(run).model_dump(),
    )


def noise_hash(file: str | None) -> str | None:
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _eta_curve(w: FloatArray | None, wrong: BoolArray | None) -> list[dict[str, float]]:
    """How well the wrong pairs are found among all: those that both networks give a w below eta.

    Where nothing is found, there is no precision.
    """
    if w is None or wrong is None or not wrong.any() or len(w) < 2:
        return []
    curve = []
    for eta in ETAS:
        chosen = np.asarray((w < eta).all(axis=0))
        hits = float((chosen & wrong).sum())
        point = {"eta": eta, "accuracy": float((chosen == wrong).mean()), "recall": hits / float(wrong.sum())}
        curve.append({**point, "precision": hits / float(chosen.sum())} if chosen.any() else point)
    return curve
