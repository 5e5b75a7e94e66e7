"""One training of a suite and its record, `cell.json`: the input of all tables and figures."""

from __future__ import annotations

import hashlib
from dataclasses import field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from rich.console import Console

from mispair import methods
from mispair.bench.suite.suite import LOCATIONS, Cell, digest
from mispair.compute.devices import give_back_memory, pick_device
from mispair.config import Config, to_toml
from mispair.errors import ConfigError, MispairError, StoppedError
from mispair.methods.epoch_metrics import Examples, MethodReport
from mispair.pairs.pairs import Pairs, Tokens
from mispair.support.arrays import FloatArray, Mask
from mispair.support.files import read_regular, write_atomically
from mispair.training.events import ValidationEvent
from mispair.training.fit import train_splits
from mispair.training.run_folder import Environment, read_environment, read_events, read_examples, read_result
from mispair.training.settings import every_setting, read_recipe
from mispair.training.splits import Splits, load_splits

RECORD, RUN = "cell.json", "run"
LONGEST_ERROR = 400  # characters
ETAS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
EACH = 3  # example pairs of each kind
Number = Annotated[float, Field(allow_inf_nan=False)]
ExampleKind = Literal["matched", "mismatched", "new text", "new image"]


@dataclass(frozen=True)
class DataRecord:
    """The data of a training."""

    name: str | None = None
    pairs: int | None = None  # for training
    tested_on: str | None = None
    dev_protocol: str | None = None
    mismatch: Number | None = None  # measured noise ratio, if the truth is known
    noise_file: str | None = None  # SHA-256


@dataclass(frozen=True)
class EpochRecord:
    """Validation after an epoch."""

    epoch: int
    rsum: Number
    seconds: Number
    networks_rsum: tuple[Number, ...] = ()
    selection_seconds: Number = 0.0


@dataclass(frozen=True)
class EtaPoint:
    """Detection of the mismatched pairs with one threshold eta."""

    eta: Number
    accuracy: Number
    recall: Number
    precision: Number | None = None  # None if no pair is detected


@dataclass(frozen=True)
class PairExample:
    """A training pair, its label y* (mean of both networks) and, if one half was replaced, the new half."""

    kind: ExampleKind
    text: str
    image: str  # its name in the data set
    label: Number
    mismatched: bool = False
    true_image: str | None = None  # that the text was written for
    new_text: str | None = None
    new_image: str | None = None

    @property
    def is_mismatched(self) -> bool:
        return self.mismatched or self.kind == "mismatched"

    @property
    def images(self) -> dict[str, str]:
        """The names of the images to show, by role."""
        shown = {"in the data": self.image}
        if self.new_image is not None:
            shown["replacement"] = self.new_image
            if self.is_mismatched and self.true_image is not None:
                shown["true, not in training"] = self.true_image
        return shown


@dataclass(frozen=True)
class Record:
    """A finished or failed training."""

    name: str  # of the cell
    label: str  # of its row
    digest: str  # hash of the settings that decide the result
    config: dict[str, Any]
    status: Literal["done", "failed"]
    error: str | None = None
    data: DataRecord = field(default_factory=DataRecord)
    test: dict[str, dict[str, Number]] = field(default_factory=dict)  # `network`, or each and `averaged`; `folds`
    validation: tuple[EpochRecord, ...] = ()
    method: MethodReport = field(default_factory=MethodReport)  # on its last epoch
    eta: tuple[EtaPoint, ...] = ()
    examples: tuple[PairExample, ...] = ()
    memory: int | None = None  # peak bytes on the GPU
    environment: Environment | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        tested = "network" in self.test or {"network A", "averaged"} <= self.test.keys()
        if (self.status == "done" and not tested) or not all("rsum" in metrics for metrics in self.test.values()):
            raise ValueError("the results on the test pairs are missing")
        return self

    @classmethod
    def of(cls, cell: Cell, status: Literal["done", "failed"], **content: Any) -> Record:
        return cls(cell.name, cell.label, digest(cell.config), every_setting(cell.config), status, **content)

    @property
    def seconds(self) -> float:
        """Sum over all epochs; an interrupted epoch counts from its resumption."""
        return sum(epoch.seconds for epoch in self.validation)

    @property
    def networks(self) -> int:
        """Number of tested networks; 0 after a failure."""
        return sum(name.startswith("network") for name in self.test)

    @property
    def bank_bytes(self) -> int | None:
        """Size of the memory banks of all networks."""
        return None if self.method.bank_bytes is None else sum(self.method.bank_bytes)

    def averaged(self, *, folds: bool = False) -> dict[str, float]:
        """Retrieval metrics with the mean of the networks' similarities, or of the only network."""
        return self.test["folds"] if folds else self.test.get("averaged") or self.test["network"]

    def single(self) -> dict[str, float]:
        """Retrieval metrics of the networks by themselves, their mean; of the student where a method has one."""
        networks = [metrics for name, metrics in self.test.items() if name.startswith("network")]
        if self._has_student:
            networks = networks[:1]
        return {name: fmean(metrics[name] for metrics in networks) for name in networks[0]}

    @property
    def _has_student(self) -> bool:
        try:
            return not methods.find(self.config["method"]).alike
        except (ConfigError, KeyError):  # settings of another version, or of a method that is not installed here
            return False

    def label_counts(self) -> tuple[list[int], list[int]]:
        """Histograms of the labels y* of matched and of mismatched pairs, all networks together."""
        clean, noisy = (
            [sum(counts) for counts in zip(*networks, strict=True)]
            for networks in (self.method.labels_clean or [], self.method.labels_noisy or [])
        )
        return clean, noisy


def run_cell(cell: Cell, folder: Path, console: Console | None = None) -> Record:
    """Train and test a cell in its folder, from where an earlier process stopped, and write its record."""
    try:
        if (device := pick_device(cell.config.device)).type == "cuda":
            give_back_memory()
            torch.cuda.reset_peak_memory_stats(device)
        _move(folder / RUN / "config.toml", cell.config)
        splits = load_splits(cell.config, console)
        matcher = train_splits(cell.config, splits, folder / RUN, console, "Run the command again to resume.")
        record = _described(cell, splits, splits.test(matcher).metrics(), folder / RUN)
    except MispairError as error:
        if isinstance(error, StoppedError) or isinstance(error.__context__, OSError):  # a full disk is no result
            raise
        record = Record.of(cell, "failed", error=_shortened(str(error).splitlines()[0]))
    except torch.OutOfMemoryError as error:
        sentence = f"{str(error).partition('.')[0]}. Try fewer jobs, or a smaller batch_size in the recipe."
        record = Record.of(cell, "failed", error=sentence)
    write_record(folder, record)
    return record


def _shortened(sentence: str) -> str:
    """The beginning and the end, where the advice is."""
    return sentence if len(sentence) <= LONGEST_ERROR else f"{sentence[: LONGEST_ERROR // 2]} … {sentence[-120:]}"


def _move(settings: Path, config: Config) -> None:
    """Update the paths in a run folder from another machine, to resume it."""
    if settings.is_file():
        before = read_recipe(settings)
        here = replace(before, **{name: getattr(config, name) for name in LOCATIONS})
        if here != before:
            write_atomically(settings, to_toml(here).encode())


def write_record(folder: Path, record: Record) -> None:
    write_atomically(folder / RECORD, _RECORDS.dump_json(record, indent=1, exclude_none=True) + b"\n")


def read_record(folder: Path) -> Record | None:
    """The record of an ended cell; None before its end, and if the file is damaged or of another cell."""
    try:
        record = _RECORDS.validate_json(read_regular(folder / RECORD))
    except (OSError, ValidationError):
        return None
    return record if record.name == folder.name else None


def to_json(record: Record) -> Any:
    """Convert to plain values, for `--json`."""
    return _RECORDS.dump_python(record, mode="json", exclude_none=True)


_RECORDS = TypeAdapter(Record)


def _described(cell: Cell, splits: Splits, test: dict[str, Any], run: Path) -> Record:
    result, examples = read_result(run), read_examples(run)
    data = DataRecord(
        name=splits.train.name,
        pairs=len(splits.train),
        tested_on=splits.tested.name,
        dev_protocol=cell.config.dev_protocol,
        mismatch=splits.noise_ratio,
        noise_file=noise_hash(cell.config.noise_file),
    )
    device = pick_device(cell.config.device)
    return Record.of(
        cell,
        "done",
        data=data,
        test=test,
        validation=tuple(
            EpochRecord(event.epoch, event.rsum, event.seconds, tuple(event.networks_rsum), event.selection_seconds)
            for event in read_events(run, ValidationEvent)
        ),
        method=(result and result.report) or MethodReport(),
        eta=() if examples is None else eta_curve(examples.w, splits.train.mismatched),
        examples=sample_examples(examples, splits.train, cell.config.seed),
        memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        environment=read_environment(run),
    )


def noise_hash(file: str | None) -> str | None:
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def eta_curve(w: FloatArray | None, mismatched: Mask | None) -> tuple[EtaPoint, ...]:
    """Quality of detecting mismatched pairs by w < eta for both networks."""
    if w is None or mismatched is None or not mismatched.any() or len(w) < 2:
        return ()
    curve = []
    for eta in ETAS:
        detected = np.asarray((w < eta).all(axis=0))
        hits = float((detected & mismatched).sum())
        precision = hits / float(detected.sum()) if detected.any() else None
        accuracy, recall = float((detected == mismatched).mean()), hits / float(mismatched.sum())
        curve.append(EtaPoint(eta, accuracy, recall, precision))
    return tuple(curve)


def sample_examples(method: Examples | None, pairs: Pairs, seed: int) -> tuple[PairExample, ...]:
    """Random pairs of each kind; none of methods without labels and new partners."""
    mismatched = pairs.mismatched
    if method is None or mismatched is None or not isinstance(pairs.right, Tokens) or not pairs.right.texts:
        return ()
    labels, new_text, new_image = method.labels, method.new_right, method.new_left
    if labels is None or new_text is None or new_image is None:
        return ()
    rng, texts = np.random.default_rng(seed), pairs.right.texts
    truth = pairs.link if pairs.truth is None else pairs.truth

    def image(row: int) -> str:
        return pairs.left_ids[row] if pairs.left_ids else str(row)

    def example(kind: ExampleKind, pair: int, **new: str) -> PairExample:
        own, true = image(pairs.link[pair]), image(truth[pair]) if new else None
        return PairExample(kind, texts[pair], own, float(labels[pair]), bool(mismatched[pair]), true, **new)

    def sample(mask: Any) -> list[int]:
        return [int(pair) for pair in rng.permutation(np.flatnonzero(mask))[:EACH]]

    return (
        *(example("matched", pair) for pair in sample(~mismatched)),
        *(example("mismatched", pair) for pair in sample(mismatched)),
        *(example("new text", pair, new_text=texts[new_text[pair]]) for pair in sample(new_text >= 0)),
        *(example("new image", pair, new_image=image(pairs.link[new_image[pair]])) for pair in sample(new_image >= 0)),
    )
