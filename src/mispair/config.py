"""Every setting of a training run: one frozen dataclass, read from TOML recipes, written back beside the results."""

from __future__ import annotations

import difflib
import math
import numbers
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mispair.errors import ConfigError

NoiseKind = Literal["caption", "image", "near", "group"]


@dataclass(frozen=True)
class Config:
    """A training run. Every field is a flag of `mispair train` and a key of a recipe."""

    data: str = "shapes"
    """Folder of the data set, or the word "shapes" for the built-in one."""
    method: str = "plain"
    """How to train: see docs/methods.md."""
    model: Literal["vse", "sgr", "saf", "scan", "two-tower"] = "vse"
    """vse: one vector a side (VSE-inf); sgr, saf: similarity graph or filter; scan: attention; two-tower: vectors."""
    seed: int = 0
    """Start of every random number: initial weights, order of the pairs, dropout, injected noise."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto: bf16 on CUDA, float32 elsewhere. Scores, losses and the last layer are float32 in any case."""

    vocab: str | None = None
    """Vocabulary file (SCAN JSON). Without it the one beside the data is used, or one is built."""
    dev_protocol: Literal["full", "ncr"] = "full"
    """full: validate on up to 1,000 images; ncr: on the 200 images that NCR, BiCro and MSCN really use."""
    captions_per_image: int | None = None
    """Captions an image in the files; found out by itself when not given."""

    noise_ratio: float = 0.0
    """Share of the training pairs to make wrong on purpose."""
    noise_kind: NoiseKind = "caption"
    """caption: each on its own (NCR); image: all of an image (DECL); near: between like images; group: whole groups."""
    noise_file: str | None = None
    """Noise index to use; written there first if the file does not exist."""
    noise_seed: int | None = None
    """Seed of the injected noise; the run's seed when not given."""

    embed_size: int = 1024
    """Width of the common space."""
    word_size: int = 300
    """Width of a word's embedding."""
    sim_size: int = 256
    """Width of SGR's and SAF's similarity vectors."""
    graph_steps: int = 3
    """Layers of SGR's graph reasoning."""
    score_hidden: int = 0
    """Width of a hidden layer before SGR's and SAF's score; MSCN sets it to 64, 0 is none."""
    attend: Literal["t2i", "i2t"] = "t2i"
    """SCAN: words look at regions, or regions at words."""
    attend_sharpness: float = 9.0
    """SCAN: lambda of the softmax of its attention; 9 for t2i, 4 for i2t."""
    aggregate: Literal["lse", "mean", "max", "sum"] = "lse"
    """SCAN: how the similarities of the words (or regions) become one."""
    lse_sharpness: float = 6.0
    """SCAN: lambda of its log-sum-exp; 6 for t2i, 5 (Flickr30K) or 20 (COCO) for i2t."""
    dropout: float = 0.4
    """SGR, SAF: dropout on word embeddings and in the attention that pools them; two-tower: on its hidden layer."""
    augment: bool = True
    """VSE-inf: drop regions and words at random while training (size augmentation)."""

    batch_size: int = 128
    """Pairs a step."""
    warmup_epochs: int = 1
    """Epochs with the mean over all negatives, before the main epochs."""
    epochs: int = 20
    """Main epochs, after the warm-up."""
    lr: float = 2e-4
    """Learning rate of Adam."""
    weight_decay: float = 0.0
    """Decoupled weight decay; above 0 makes Adam AdamW."""
    lr_decay_epochs: int = 15
    """The learning rate is divided by 10 every so many main epochs."""
    grad_clip: float = 2.0
    """Largest norm of the gradient over all parameters."""
    margin: float = 0.2
    """Margin alpha of the triplet loss."""
    negatives_start: int = 48
    """The loss of an anchor is the mean over its n hardest negatives: n after the warm-up."""
    negatives_end: int = 4
    """n at the end of the hardening; the paper's 1 collapses SGR on small data sets."""
    hardening_steps: int = 1000
    """Steps of the main epochs over which n shrinks, halving at a constant pace."""
    mask_false_negatives: bool = True
    """Leave out negatives that share the image of the pair (another caption of the same image)."""

    networks: int | None = None
    """How many networks to train and average, 1 or 2; the method's own number when not given."""
    audit: bool = False
    """Audit the pairs first: networks warm up on those that look right, and the split hears the audit, too."""
    clean_threshold: float = 0.5
    """p: pairs whose probability w of being clean is above it are the clean part (REPAIR)."""
    split: Literal["smoothed", "joint", "single"] = "smoothed"
    """Mixture over losses smoothed over the epochs, or over both networks too; or one epoch's losses (the paper)."""
    split_memory: float = 0.5
    """Weight of the epochs before in the smoothed losses."""
    labels: Literal["rank", "hard"] = "rank"
    """Labels of the clean part: by rank correlation (RC), or 1 for all (hard) (REPAIR)."""
    label_when: Literal["epoch", "batch"] = "epoch"
    """epoch: the other network labels all pairs before the epoch; batch: each network its own batches (Algorithm 1)."""
    noisy: Literal["replace", "drop", "train"] = "replace"
    """The noisy part is half-replaced (NPR), dropped, or trained on with its labels, 0 if hard (REPAIR)."""
    noisy_start: float = 0.5
    """Share of the main epochs before the noisy part takes part."""
    bank_size: int = 4096
    """M: pairs in the memory bank of each network (REPAIR)."""
    gamma_share: float = 0.5
    """Share of the highest rank correlations whose mean is gamma, the bound above which a label is 1 (paper: 0.1)."""
    margin_base: float = 10.0
    """m: how steeply the margin grows with the label."""
    eta: float = 0.25
    """Noisy pairs are half-replaced if both networks' w is below it (REPAIR)."""
    tau: float = 0.15
    """Weight of the noisy part in the loss, half-replaced or not (REPAIR)."""
    neighbours: int = 32
    """K: nearest items of the bank whose partners are tried for a half-replaced pair (REPAIR)."""
    replace_by: Literal["peer", "own"] = "peer"
    """Which network's bank and similarity choose the new partners that train a network (REPAIR)."""
    replace_side: Literal["both", "left", "right"] = "both"
    """Which side of a noisy pair is replaced; both: each pair makes two new ones (REPAIR)."""

    as_published: bool = False
    """Compute what the authors' code computes where it departs from their papers: NCR, BiCro, MSCN."""
    warmup_share: float = 0.3
    """BiCro: share of each warm-up batch, the pairs with the smallest losses, that is trained on."""
    label_floor: float = 0.5
    """BiCro: labels not above it become 0."""
    evidence_scale: float = 0.1
    """DECL: temperature of the evidence."""
    hinge_weight: float = 0.8
    """DECL: lambda 1, weight of the dynamic hinge loss."""
    kl_weight: float = 0.1
    """DECL: lambda 2, weight of the divergence from no evidence."""
    hinge_decay: float = 0.025
    """DECL: eta, by how much the number of hard negatives falls each step."""
    hinge_least: int = 5
    """DECL: mu, the least number of hard negatives."""
    meta_lr: float = 1.7e-5
    """MSCN: learning rate of the meta network."""
    meta_share: float = 0.02
    """MSCN: share of the training pairs, known to be right, that make its meta set."""

    checkpoint_seconds: float = 60.0
    """Time between two checkpoints; 0 writes one every step."""
    tensorboard: bool = False
    """Write TensorBoard files too (needs pip install -c constraints.txt '.[tensorboard]')."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r} but must be {rule}" for name, ok, rule in self._rules() if not ok
        ]
        if problems:
            raise ConfigError("; ".join(problems) + ".")

    def _rules(self) -> list[tuple[str, bool, str]]:
        at_least_one = ("embed_size", "word_size", "sim_size", "graph_steps", "lr_decay_epochs", "negatives_start",
                        "bank_size", "neighbours", "hinge_least")  # fmt: skip
        above_zero = ("lr", "margin", "attend_sharpness", "lse_sharpness", "meta_lr")
        not_negative = ("weight_decay", "tau", "hinge_weight", "kl_weight", "hinge_decay", "checkpoint_seconds")
        rules = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        rules += [
            ("batch_size", self.batch_size >= 2, "at least 2, because the other pairs of a batch are the negatives"),
            ("epochs", self.epochs >= 0 and self.total_epochs >= 1, "1 or more, or 0 after a warm-up"),
            ("warmup_epochs", self.warmup_epochs >= 0, "0 or more"),
            ("hardening_steps", self.hardening_steps >= 0, "0 or more"),
            ("noise_ratio", 0 <= self.noise_ratio <= 1, "between 0 and 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("grad_clip", self.grad_clip > 0, "above 0"),
            ("negatives_end", 1 <= self.negatives_end <= self.negatives_start, "between 1 and negatives_start"),
            ("networks", self.networks in (None, 1, 2), "1 or 2"),
            ("clean_threshold", 0 <= self.clean_threshold < 1, "at least 0 and below 1"),
            ("split_memory", 0 <= self.split_memory < 1, "at least 0 and below 1"),
            ("noisy_start", 0 <= self.noisy_start <= 1, "between 0 and 1"),
            ("gamma_share", 0 < self.gamma_share <= 1, "above 0 and at most 1"),
            ("margin_base", 1 < self.margin_base < math.inf, "above 1 and finite"),
            ("evidence_scale", 0.08 <= self.evidence_scale < math.inf, "finite and at least 0.08, or rounding wins"),
            ("eta", 0 <= self.eta <= 1, "between 0 and 1"),
            ("label_floor", 0 <= self.label_floor <= 1, "between 0 and 1"),
            ("warmup_share", 0 < self.warmup_share <= 1, "above 0 and at most 1"),
            ("meta_share", 0 < self.meta_share < 1, "between 0 and 1"),
            ("score_hidden", self.score_hidden >= 0, "0 or more"),
            *((name, 0 < getattr(self, name) < math.inf, "above 0 and finite") for name in above_zero),
            *((name, 0 <= getattr(self, name) < math.inf, "0 or more and finite") for name in not_negative),
            ("captions_per_image", self.captions_per_image is None or self.captions_per_image >= 1, "at least 1"),
            ("seed", self.seed >= 0, "0 or more"),
            ("noise_seed", self.noise_seed is None or self.noise_seed >= 0, "0 or more"),
        ]
        for field in fields(self):
            choices = get_args(HINTS[field.name]) if get_origin(HINTS[field.name]) is Literal else ()
            value = getattr(self, field.name)
            rules.append((field.name, not choices or value in choices, f"one of {', '.join(map(str, choices))}"))
        return rules

    @property
    def total_epochs(self) -> int:
        return self.warmup_epochs + self.epochs

    @property
    def noisy_from(self) -> int:
        """The main epoch from which on noisy pairs take part, by its number from 0."""
        return int(self.noisy_start * self.epochs + 1e-9)

    def decay(self, main_epoch: int) -> float:
        """What the learning rate is multiplied by in a main epoch."""
        return float(0.1 ** (max(0, main_epoch) // self.lr_decay_epochs))


HINTS = get_type_hints(Config)


def override(config: Config, settings: Mapping[str, Any], source: str = "settings") -> Config:
    """A copy of `config` with `settings` put in; an unknown key or a wrong type is refused.

    >>> override(Config(), {"epochs": 3}).epochs
    3
    >>> override(Config(), {"epoch": 3})
    Traceback (most recent call last):
    mispair.errors.ConfigError: settings: unknown key "epoch"; did you mean "epochs"?
    """
    clean = {}
    for key, value in settings.items():
        if key not in HINTS:
            near = difflib.get_close_matches(key, HINTS, n=1, cutoff=0.4)
            hint = f'did you mean "{near[0]}"?' if near else f"the keys are {', '.join(HINTS)}."
            raise ConfigError(f'{source}: unknown key "{key}"; {hint}')
        clean[key] = _cast(value, HINTS[key], f"{source}: {key}")
    return replace(config, **clean)


def read_recipe(path: str | Path) -> Config:
    """Reads a recipe, by file name or by the short name of one that comes with mispair, such as `f8k/plain-sgr`."""
    file = find_packaged("recipe", path)
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}.") from None
    return override(Config(), settings, str(file))


def find_packaged(what: Literal["recipe", "suite"], path: str | Path) -> Path:
    """A TOML file, or one that comes with mispair by its short name."""
    built_in = Path(__file__).parent / f"{what}s"
    for candidate in (Path(path), built_in / path, built_in / f"{path}.toml"):
        if candidate.is_file():
            return candidate
    names = sorted(str(file.relative_to(built_in).with_suffix("")) for file in built_in.rglob("*.toml"))
    raise ConfigError(f'There is no {what} "{path}"; give a TOML file or one of: {", ".join(names)}.')


def to_toml(config: Config) -> str:
    """The settings as a recipe that gives the same run again. Settings that are None are left out."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in asdict(config).items() if value is not None)


def difference(old: Config, new: Config) -> list[str]:
    """What differs, a line each: `epochs: 20 -> 30`."""
    before, after = asdict(old), asdict(new)
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]


def _toml(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _cast(value: Any, hint: Any, where: str) -> Any:
    """Checks a value against a field's type; whole numbers are welcome where a fraction is expected."""
    if get_origin(hint) is Literal:
        return value  # Config checks the choice itself
    allowed = get_args(hint) or (hint,)
    if float in allowed and isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's as well
        return float(value)
    if int in allowed and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if any(type(value) is kind for kind in allowed):
        return value
    wanted = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ConfigError(f"{where} is {value!r} but must be of type {wanted}.")
