"""Settings of every training run, and those of its method and models by name.

A method or a model has its settings in its own file, as a dataclass with `@validated`. Flags, recipes and arguments of
`fit` are flat: every setting has a name of its own (`--tau 0.2`, `tau = 0.2`, `tau=0.2`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import pydantic
import tomli_w
from pydantic import AfterValidator, Field

from mispair.errors import ConfigError, ConflictError, UnknownNameError
from mispair.support.files import read_regular
from mispair.support.flags import OrNone
from mispair.support.validation import refusal

BEST = "best.safetensors"  # the model of a run folder
NoiseKind = Literal["caption", "image", "near", "group"]
C = TypeVar("C")
S = TypeVar("S")

_LARGEST = 2**31 - 1
Natural = Annotated[int, Field(ge=0, le=_LARGEST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, le=_LARGEST)]
WIDEST = 65_536
Width = Annotated[int, Field(ge=1, le=WIDEST)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def _writable(text: str) -> str:
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{text!r} has a NUL or bytes that are not UTF-8, which no recipe can hold")
    return text


Name = Annotated[str, AfterValidator(_writable)]


@dataclass_transform(frozen_default=True)
def validated(cls: type[C]) -> type[C]:
    """Make a frozen dataclass with checked values; an invalid one raises `InvalidValueError`."""
    checked = pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))(cls)
    construct: Callable[..., None] = checked.__init__

    @functools.wraps(construct)
    def checking(self: C, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            raise refusal(error) from None

    checked.__init__ = checking  # type: ignore[method-assign, assignment]
    return cast(type[C], checked)


@validated
class RunSettings:
    """Settings of every training run."""

    data: Name = "shapes"
    """Folder of the data set, or the word "shapes" for the built-in one."""
    method: Name = "plain"
    """How to train: `mispair methods` lists the methods."""
    model: Name = "vse"
    """vse: one vector a side (VSE-inf); sgr, saf: similarity graph or filter; scan: attention; two-tower: vectors."""
    seed: Seed = 0
    """Start of every random number: initial weights, order of the pairs, dropout, injected noise."""
    device: Name = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto: bf16 on CUDA, float32 elsewhere. Scores, losses and the last layer are float32 in any case."""
    vocab: OrNone[Name] = None
    """Vocabulary file (SCAN JSON). Without it the one beside the data is used, or one is built."""
    dev_protocol: Literal["full", "ncr"] = "full"
    """full: validate on up to 1,000 images; ncr: on the 200 images that NCR, BiCro and MSCN really use."""
    captions_per_image: OrNone[Count] = None
    """Captions an image in the files; found out by itself when not given."""
    noise_ratio: Fraction = 0.0
    """Share of the training pairs to mismatch on purpose."""
    noise_kind: NoiseKind = "caption"
    """caption: each on its own (NCR); image: all of an image (DECL); near: between like images; group: whole groups."""
    noise_file: OrNone[Name] = None
    """Noise index to use; written there first if the file does not exist."""
    noise_seed: OrNone[Seed] = None
    """Seed of the injected noise; the run's seed when not given."""
    embed_size: Width = 1024
    """Width of the common space."""
    word_size: Width = 300
    """Width of a word's embedding."""
    dropout: BelowOne = 0.4
    """SGR, SAF: dropout on word embeddings and in the attention that pools them; two-tower: on its hidden layer."""
    batch_size: Annotated[int, Field(ge=2, le=_LARGEST)] = 128
    """Pairs a step; the other pairs of a batch are the negatives."""
    warmup_epochs: Natural = 1
    """Epochs with the mean over all negatives, before the main epochs."""
    epochs: Natural = 20
    """Main epochs, after the warm-up."""
    lr: Positive = 2e-4
    """Learning rate of Adam."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; above 0 makes Adam AdamW."""
    lr_decay_epochs: Count = 15
    """Main epochs between divisions of the learning rate by 10."""
    grad_clip: Annotated[float, Field(gt=0)] = 2.0
    """Largest norm of the gradient over all parameters."""
    margin: Positive = 0.2
    """Margin alpha of the triplet loss."""
    negatives_start: Count = 48
    """The loss of an anchor is the mean over its n hardest negatives: n after the warm-up."""
    negatives_end: Count = 4
    """n at the end of the hardening; the paper's 1 collapses SGR on small data sets."""
    hardening_steps: Natural = 1000
    """Steps of the main epochs over which n shrinks, halving at a constant pace."""
    mask_false_negatives: bool = True
    """Leave out negatives that share the image of the pair (another caption of the same image)."""
    networks: OrNone[Literal[1, 2, 3]] = None
    """How many networks to train and average; the method's own number when not given. Mend: how many to keep."""
    audit: bool = False
    """Audit the pairs first: networks warm up on pairs that are not flagged. Mend always does."""
    checkpoint_seconds: NotNegative = 60.0
    """Time between two checkpoints; 0 writes one every step."""
    tensorboard: bool = False
    """Write TensorBoard files too (needs pip install -c constraints.txt '.[tensorboard]')."""

    def __post_init__(self) -> None:
        if self.total_epochs < 1:
            raise ConflictError("0, without a warm-up", where="epochs", expected="at least 1")
        if self.negatives_end > self.negatives_start:
            expected = f"at most `negatives_start`, which is {self.negatives_start}"
            raise ConflictError(str(self.negatives_end), where="negatives_end", expected=expected)

    @property
    def total_epochs(self) -> int:
        return self.warmup_epochs + self.epochs

    def decay(self, main_epoch: int) -> float:
        """Factor of the learning rate in a main epoch."""
        return float(0.1 ** (max(0, main_epoch) // self.lr_decay_epochs))


@validated
class Config(RunSettings):
    """Settings of a training run, its method and its models. `mispair.training.settings` checks their names.

    Attributes:
        own: Settings of the method and the models, by name.
    """

    own: dict[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, kind: type[S]) -> S:
        """Return the settings of a method or a model, such as `config.of(RepairSettings).tau`."""
        names = {field.name for field in dataclasses.fields(cast(Any, kind))}
        return kind(**{name: value for name, value in self.own.items() if name in names})

    def flat(self) -> dict[str, Any]:
        """Return all settings by name.

        >>> Config(own={"tau": 0.2}).flat()["tau"]
        0.2
        """
        return {**{name: getattr(self, name) for name in RUN_SETTINGS}, **self.own}

    def changed(self, settings: Mapping[str, Any]) -> Config:
        """Return a changed copy. Names of no run setting go to `own`."""
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in settings.items()}
        own = {name: plain.pop(name) for name in settings if name not in RUN_SETTINGS}
        return dataclasses.replace(self, **plain, own={**self.own, **own})


RUN_SETTINGS = tuple(field.name for field in dataclasses.fields(cast(Any, RunSettings)))


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Add the source of a setting, such as a file, to an error about it."""
    try:
        yield
    except ConfigError as error:
        if source:
            error.what = f"{error.what} ({source})"
        raise


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_regular(file).decode())
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=file) from None
    except (ValueError, RecursionError) as error:  # among them numbers too large and bytes that are no text
        raise ConfigError(f"not a TOML file: {error}", where=file) from None


def find_packaged(what: Literal["recipe", "suite"], path: str | Path) -> Path:
    """Find a TOML file by its path, or a built-in one by its short name."""
    built_in = Path(__file__).parent / f"{what}s"
    for candidate in (Path(path), built_in / path, built_in / f"{path}.toml"):
        if os.path.isfile(candidate):
            return candidate
    names = sorted(file.relative_to(built_in).with_suffix("").as_posix() for file in built_in.rglob("*.toml"))
    near = difflib.get_close_matches(str(path), names)
    raise UnknownNameError(
        f"there is no such {what}", where=path, advice=f"Give a TOML file or one of {', '.join(near or names)}."
    )


def to_toml(config: Config) -> str:
    """Write the settings as a recipe for the same run, without None."""
    return tomli_w.dumps({name: value for name, value in config.flat().items() if value is not None})


def difference(old: Config, new: Config) -> list[str]:
    """List the differences, one line each: `epochs: 20 -> 30`."""
    before, after = old.flat(), new.flat()
    names = dict.fromkeys([*before, *after])
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names if before.get(name) != after.get(name)
    ]
