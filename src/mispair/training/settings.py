"""All settings of a training: of the run, of methods and of models, including installed packages."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from mispair.config import RUN_SETTINGS, Config, find_packaged, naming_source, read_toml
from mispair.errors import ConflictError, UnknownNameError
from mispair.settings import BUILT_IN
from mispair.support.registry import entries


class Settings(TypedDict, total=False):
    """Keyword arguments of `mispair.fit`; `mispair train --help` explains them."""

    method: str
    model: str
    seed: int
    device: str
    precision: Literal["auto", "float32", "bf16"]
    embed_size: int
    word_size: int
    dropout: float
    batch_size: int
    warmup_epochs: int
    epochs: int
    lr: float
    weight_decay: float
    lr_decay_epochs: int
    grad_clip: float
    margin: float
    negatives_start: int
    negatives_end: int
    hardening_steps: int
    mask_false_negatives: bool
    networks: Literal[1, 2, 3] | None
    audit: bool
    checkpoint_seconds: float
    tensorboard: bool
    # models
    augment: bool
    sim_size: int
    graph_steps: int
    score_hidden: int
    attend: Literal["t2i", "i2t"]
    attend_sharpness: float
    aggregate: Literal["lse", "mean", "max", "sum"]
    lse_sharpness: float
    # methods
    second_model: str | None
    student_share: float
    temperature: float
    flagged_size: int
    flagged_weight: float
    trust: Literal["audit", "all", "truth"]
    clean_threshold: float
    split_losses: Literal["smoothed", "joint", "single"]
    split_memory: float
    noisy_start: float
    margin_base: float
    labels: Literal["rank", "hard"]
    label_when: Literal["epoch", "batch"]
    noisy: Literal["replace", "drop", "train"]
    bank_size: int
    gamma_share: float
    eta: float
    tau: float
    neighbours: int
    replace_by: Literal["peer", "own"]
    replace_side: Literal["both", "left", "right"]
    evidence_scale: float
    hinge_weight: float
    kl_weight: float
    hinge_decay: float
    hinge_least: int
    warmup_share: float
    label_floor: float
    meta_lr: float
    meta_share: float


def owners() -> dict[str, type[Any]]:
    """Return the class of each method or model setting, by name; raise ConflictError if two have one name."""
    found: dict[str, type[Any]] = {}
    for kind in (*BUILT_IN, *_installed()):
        for field in dataclasses.fields(kind):
            other = found.setdefault(field.name, kind)
            if other is not kind or field.name in RUN_SETTINGS:
                rival = "every run" if field.name in RUN_SETTINGS else other.__name__
                advice = f"Rename that of {kind.__module__}.{kind.__name__}."
                raise ConflictError(f"a setting of {rival} has this name", where=field.name, advice=advice)
    return found


def _installed() -> list[type[Any]]:
    """Return the settings classes of installed packages."""
    if not (entries("model") or entries("method")):  # otherwise help waits for torch
        return []
    from mispair import methods, models

    owned = [owner.settings for owner in models.REGISTRY.installed().values()]
    owned += [owner.settings for owner in methods.REGISTRY.installed().values()]
    return [kind for settings in owned for kind in settings]


def setting_classes() -> list[type[Any]]:
    """Return the settings classes of all models and methods."""
    return list(dict.fromkeys(owners().values()))


def all_names() -> list[str]:
    """Return the names of all settings."""
    return [*RUN_SETTINGS, *owners()]


def override(config: Config, settings: Mapping[str, Any], source: str = "") -> Config:
    """Return a copy of `config` with changed settings. Errors about unknown names and invalid values name the `source`.

    >>> override(Config(), {"epochs": 3, "tau": 0.2}).flat()["tau"]
    0.2
    >>> override(Config(), {"epoch": 3})
    Traceback (most recent call last):
    mispair.errors.UnknownNameError: `epoch`: unknown setting. Did you mean `epochs`?
    """
    known = owners()
    with naming_source(source):
        for name in settings:
            if name not in RUN_SETTINGS and name not in known:
                names = [*RUN_SETTINGS, *known]
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                advice = f"Did you mean `{near[0]}`?" if near else f"The settings are {', '.join(names)}."
                raise UnknownNameError("unknown setting", where=name, advice=advice)
        changed = config.changed(settings)
        if "model" in settings:
            from mispair import models

            models.find(changed.model)
        for kind in {known[name] for name in settings if name in known}:
            changed.of(kind)
    return changed


def read_recipe(path: str | Path) -> Config:
    """Read a recipe, by file name or by the short name of a built-in one such as `f8k/plain-sgr`."""
    file = find_packaged("recipe", path)
    return override(Config(), read_toml(file), str(file))


def every_setting(config: Config) -> dict[str, Any]:
    """Return all settings by name, including those of all methods and models."""
    return {**{name: getattr(config, name) for name in RUN_SETTINGS}, **_of(config, setting_classes())}


def complete(config: Config) -> Config:
    """Return the settings in effect: of the run, its method and its models.

    >>> complete(Config(model="two-tower", own={"tau": 0.2})).own
    {}
    """
    from mispair import methods, models

    method = methods.select(config)
    used = dict.fromkeys(own.model for own in method.network_configs(config))
    kinds = dict.fromkeys([*(kind for model in used for kind in models.find(model).settings), *method.settings])
    return dataclasses.replace(config, own=_of(config, kinds))


def _of(config: Config, kinds: Iterable[type[Any]]) -> dict[str, Any]:
    """Return the settings of some methods and models by name."""
    return {name: value for kind in kinds for name, value in dataclasses.asdict(config.of(kind)).items()}
