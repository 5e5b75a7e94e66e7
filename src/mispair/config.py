"""Every setting of a training run, read from TOML recipes and written back beside the results.

Settings of one method or one kind of model are groups of their own (`config.repair.tau`). Flags and recipes are flat:
every setting has a name of its own (`--tau 0.2`, `tau = 0.2`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform, get_type_hints

import pydantic
import tomli_w
from pydantic import AfterValidator, Field

from mispair.errors import ConfigError
from mispair.support.files import is_file, read_regular
from mispair.support.validation import sentences

NoiseKind = Literal["caption", "image", "near", "group"]
C = TypeVar("C")

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
        raise ValueError(
            f"the name {text!r} has a NUL or bytes that are not UTF-8, which no recipe can hold; rename it"
        )
    return text


Name = Annotated[str, AfterValidator(_writable)]


@dataclass_transform(frozen_default=True)
def validated(cls: type[C]) -> type[C]:
    """A frozen dataclass whose values are checked; a wrong one is a `ConfigError`."""
    checked = pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid"))(cls)
    construct: Callable[..., None] = checked.__init__

    @functools.wraps(construct)
    def checking(self: C, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{sentences(error, flat=True)}.") from None

    checked.__init__ = checking  # type: ignore[method-assign, assignment]
    return cast(type[C], checked)


@validated
class SgrafSettings:
    """SGR and SAF."""

    sim_size: Width = 256
    """Width of SGR's and SAF's similarity vectors."""
    graph_steps: Annotated[int, Field(ge=1, le=100)] = 3
    """Layers of SGR's graph reasoning."""
    score_hidden: Annotated[int, Field(ge=0, le=WIDEST)] = 0
    """Width of a hidden layer before SGR's and SAF's score; MSCN sets it to 64, 0 is none."""


@validated
class ScanSettings:
    """SCAN."""

    attend: Literal["t2i", "i2t"] = "t2i"
    """t2i: words attend to regions; i2t: regions attend to words."""
    attend_sharpness: Positive = 9.0
    """lambda of the softmax of its attention; 9 for t2i, 4 for i2t."""
    aggregate: Literal["lse", "mean", "max", "sum"] = "lse"
    """How the similarities of the words (or regions) become one."""
    lse_sharpness: Positive = 6.0
    """lambda of its log-sum-exp; 6 for t2i, 5 (Flickr30K) or 20 (COCO) for i2t."""


@validated
class VseSettings:
    """VSE-inf."""

    augment: bool = True
    """Drop regions and words at random while training (size augmentation)."""


@validated
class CoTeachingSettings:
    """Methods whose two networks split the pairs for each other: NCR, BiCro, REPAIR."""

    clean_threshold: BelowOne = 0.5
    """p: pairs whose probability w of being clean is above it are the clean part."""
    split_losses: Literal["smoothed", "joint", "single"] = "smoothed"
    """Mixture over losses smoothed over the epochs, or over both networks too; or one epoch's losses (the paper)."""
    split_memory: BelowOne = 0.5
    """Weight of the epochs before in the smoothed losses."""
    noisy_start: Fraction = 0.5
    """Share of the main epochs before the noisy part takes part."""
    margin_base: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """m: how steeply the margin grows with the label."""


@validated
class RepairSettings:
    """REPAIR."""

    labels: Literal["rank", "hard"] = "rank"
    """Labels of the clean part: by rank correlation (RC), or 1 for all (hard)."""
    label_when: Literal["epoch", "batch"] = "epoch"
    """epoch: the other network labels all pairs before the epoch; batch: each network its own batches (Algorithm 1)."""
    noisy: Literal["replace", "drop", "train"] = "replace"
    """The noisy part is half-replaced (NPR), dropped, or trained on with its labels, 0 if hard."""
    bank_size: Count = 4096
    """M: pairs in the memory bank of each network."""
    gamma_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the highest rank correlations whose mean is gamma, the bound above which a label is 1 (paper: 0.1)."""
    eta: Fraction = 0.25
    """Noisy pairs are half-replaced if both networks' w is below it."""
    tau: NotNegative = 0.15
    """Weight of the noisy part in the loss, half-replaced or not."""
    neighbours: Count = 32
    """K: nearest items of the bank whose partners are tried for a half-replaced pair."""
    replace_by: Literal["peer", "own"] = "peer"
    """Which network's bank and similarity choose the new partners that train a network."""
    replace_side: Literal["both", "left", "right"] = "both"
    """Which side of a noisy pair is replaced; both: each pair makes two new ones."""


@validated
class BicroSettings:
    """BiCro."""

    warmup_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of each warm-up batch, the pairs with the smallest losses, that is trained on."""
    label_floor: Fraction = 0.5
    """Labels not above it become 0."""


@validated
class DeclSettings:
    """DECL."""

    evidence_scale: Annotated[float, Field(ge=0.08, allow_inf_nan=False)] = 0.1
    """Temperature of the evidence; below 0.08 rounding would win."""
    hinge_weight: NotNegative = 0.8
    """lambda 1, weight of the dynamic hinge loss."""
    kl_weight: NotNegative = 0.1
    """lambda 2, weight of the divergence from no evidence."""
    hinge_decay: NotNegative = 0.025
    """eta, by how much the number of hard negatives falls each step."""
    hinge_least: Count = 5
    """mu, the least number of hard negatives."""


@validated
class MscnSettings:
    """MSCN."""

    meta_lr: Positive = 1.7e-5
    """Learning rate of the meta network."""
    meta_share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of the training pairs, known to match, that make its meta set."""


@validated
class MendSettings:
    """Mend."""

    second_model: Literal["vse", "sgr", "saf", "scan", "two-tower"] | None = None
    """Model of the second teacher; by default vse, and two-tower beside two-tower."""
    student_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the epochs, after those of the teachers, that train the student."""
    temperature: Positive = 0.05
    """Temperature of the softmax over the scores of a batch."""
    flagged_size: Natural = 32
    """Flagged pairs that go with each batch of trusted ones."""
    flagged_weight: NotNegative = 0.3
    """Weight of a flagged item with its soft partner."""
    trust: Literal["audit", "all", "truth"] = "audit"
    """Which pairs are trusted: those that the audit does not flag; all; or those known to match, as an upper bound."""


@validated
class Config:
    """A training run. Every setting is a flag of `mispair train` and a key of a recipe."""

    data: Name = "shapes"
    """Folder of the data set, or the word "shapes" for the built-in one."""
    method: Name = "plain"
    """How to train: `mispair methods` lists the methods."""
    model: Literal["vse", "sgr", "saf", "scan", "two-tower"] = "vse"
    """vse: one vector a side (VSE-inf); sgr, saf: similarity graph or filter; scan: attention; two-tower: vectors."""
    seed: Seed = 0
    """Start of every random number: initial weights, order of the pairs, dropout, injected noise."""
    device: Name = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto: bf16 on CUDA, float32 elsewhere. Scores, losses and the last layer are float32 in any case."""
    vocab: Name | None = None
    """Vocabulary file (SCAN JSON). Without it the one beside the data is used, or one is built."""
    dev_protocol: Literal["full", "ncr"] = "full"
    """full: validate on up to 1,000 images; ncr: on the 200 images that NCR, BiCro and MSCN really use."""
    captions_per_image: Count | None = None
    """Captions an image in the files; found out by itself when not given."""
    noise_ratio: Fraction = 0.0
    """Share of the training pairs to mismatch on purpose."""
    noise_kind: NoiseKind = "caption"
    """caption: each on its own (NCR); image: all of an image (DECL); near: between like images; group: whole groups."""
    noise_file: Name | None = None
    """Noise index to use; written there first if the file does not exist."""
    noise_seed: Seed | None = None
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
    """The learning rate is divided by 10 every so many main epochs."""
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
    local_negatives: bool = False
    """Under torchrun: negatives are the other pairs of a rank's part of the batch, not of the whole batch."""
    networks: Literal[1, 2, 3] | None = None
    """How many networks to train and average; the method's own number when not given. Mend: how many to keep."""
    audit: bool = False
    """Audit the pairs first: networks warm up on pairs that are not flagged. Mend always does."""
    as_published: bool = False
    """Compute what the authors' code computes where it departs from their papers: NCR, BiCro, MSCN."""
    checkpoint_seconds: NotNegative = 60.0
    """Time between two checkpoints; 0 writes one every step."""
    tensorboard: bool = False
    """Write TensorBoard files too (needs pip install -c constraints.txt '.[tensorboard]')."""

    sgraf: SgrafSettings = dataclasses.field(default_factory=SgrafSettings)
    scan: ScanSettings = dataclasses.field(default_factory=ScanSettings)
    vse: VseSettings = dataclasses.field(default_factory=VseSettings)
    coteaching: CoTeachingSettings = dataclasses.field(default_factory=CoTeachingSettings)
    repair: RepairSettings = dataclasses.field(default_factory=RepairSettings)
    bicro: BicroSettings = dataclasses.field(default_factory=BicroSettings)
    decl: DeclSettings = dataclasses.field(default_factory=DeclSettings)
    mscn: MscnSettings = dataclasses.field(default_factory=MscnSettings)
    mend: MendSettings = dataclasses.field(default_factory=MendSettings)

    def __post_init__(self) -> None:
        if self.total_epochs < 1:
            raise ConfigError("epochs is 0 but must be at least 1, or come after a warm-up.")
        if self.negatives_end > self.negatives_start:
            raise ConfigError(
                f"negatives_end is {self.negatives_end} but must be at most negatives_start, {self.negatives_start}."
            )

    @property
    def total_epochs(self) -> int:
        return self.warmup_epochs + self.epochs

    @property
    def noisy_from(self) -> int:
        """The main epoch from which on noisy pairs take part, by its number from 0."""
        return int(self.coteaching.noisy_start * self.epochs + 1e-9)

    def decay(self, main_epoch: int) -> float:
        """What the learning rate is multiplied by in a main epoch."""
        return float(0.1 ** (max(0, main_epoch) // self.lr_decay_epochs))


GROUPS: dict[str, type[Any]] = {
    name: kind for name, kind in get_type_hints(Config).items() if hasattr(kind, "__dataclass_fields__")
}
GROUP_OF = {field.name: group for group, kind in GROUPS.items() for field in dataclasses.fields(kind)}
KEYS = [field.name for field in dataclasses.fields(Config) if field.name not in GROUPS] + list(GROUP_OF)


def flat(config: Config) -> dict[str, Any]:
    """All settings by their names, without the groups.

    >>> flat(Config())["tau"]
    0.15
    """
    nested = dataclasses.asdict(config)
    groups = [nested.pop(name) for name in GROUPS]
    return {**nested, **{key: value for group in groups for key, value in group.items()}}


def override(config: Config, settings: Mapping[str, Any], source: str = "settings") -> Config:
    """A copy of `config` with `settings` put in by their flat names; an unknown key or a wrong type is refused.

    >>> override(Config(), {"epochs": 3, "tau": 0.2}).repair.tau
    0.2
    >>> override(Config(), {"epoch": 3})
    Traceback (most recent call last):
    mispair.errors.ConfigError: settings: unknown key "epoch"; did you mean "epochs"?
    """
    changes: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.4)
            hint = f'did you mean "{near[0]}"?' if near else f"the keys are {', '.join(KEYS)}."
            raise ConfigError(f'{source}: unknown key "{key}"; {hint}')
        number = value.item() if hasattr(value, "item") else value  # numpy's numbers are numbers
        changes.setdefault(GROUP_OF.get(key, ""), {})[key] = number
    try:
        own = changes.pop("", {})
        groups = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
        return dataclasses.replace(config, **own, **groups)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_recipe(path: str | Path) -> Config:
    """Reads a recipe, by file name or by the short name of one that comes with mispair, such as `f8k/plain-sgr`."""
    file = find_packaged("recipe", path)
    return override(Config(), read_toml(file), str(file))


def read_toml(file: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(read_regular(file).decode())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:  # among them numbers too large and bytes that are no text
        raise ConfigError(f"{file} is not a TOML file: {error}.") from None


def find_packaged(what: Literal["recipe", "suite"], path: str | Path) -> Path:
    """A TOML file, or one that comes with mispair by its short name."""
    built_in = Path(__file__).parent / f"{what}s"
    for candidate in (Path(path), built_in / path, built_in / f"{path}.toml"):
        if is_file(candidate):
            return candidate
    names = sorted(str(file.relative_to(built_in).with_suffix("")) for file in built_in.rglob("*.toml"))
    near = difflib.get_close_matches(str(path), names)
    raise ConfigError(f'There is no {what} "{path}"; give a TOML file or one of: {", ".join(near or names)}.')


def to_toml(config: Config) -> str:
    """The settings as a recipe that gives the same run again. Settings that are None are left out."""
    return tomli_w.dumps({key: value for key, value in flat(config).items() if value is not None})


def difference(old: Config, new: Config) -> list[str]:
    """What differs, a line each: `epochs: 20 -> 30`."""
    before, after = flat(old), flat(new)
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]
