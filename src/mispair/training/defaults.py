"""Default settings by data and device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from mispair import methods, models
from mispair.compute.devices import pick_device
from mispair.config import RUN_SETTINGS, Config
from mispair.methods.base import Schedule
from mispair.pairs.pairs import Pairs
from mispair.training.settings import override, owners

FEW = 10_000  # pairs, below which networks are small
STEPS = 600, 2000, 3500  # of one network: for few pairs, for more on a processor, for more on a GPU
MOST = 40  # epochs
UNAUDITED_SHORTER = 0.35  # on vectors, where networks soon memorise the mismatched pairs too
LR_AT_1024 = 5e-4


def fitted(config: Config, given: Collection[str], pairs: Pairs) -> Config:
    """Fill in the settings that are not `given`, by data and device."""
    device = pick_device(config.device)
    chosen = {key: value for key, value in _choice(config, len(pairs), device).items() if key not in given}
    start = chosen.get("negatives_start", config.negatives_start)
    if "negatives_end" in chosen:
        chosen["negatives_end"] = min(start, chosen["negatives_end"])
    elif "negatives_start" in chosen:
        chosen["negatives_start"] = max(start, config.negatives_end)
    return override(config, chosen)


def check_method(config: Config, given: Collection[str]) -> None:
    """Raise early if the method cannot train with these settings."""
    chosen = _choice(config, 1, torch.device("cpu"))
    epochs = {key: chosen[key] for key in ("epochs", "warmup_epochs") if key not in given}
    methods.select(config).check(override(config, epochs))


def note_unused(config: Config, given: Collection[str]) -> None:
    """Warn about given settings without effect on this method and its models."""
    method, own = methods.select(config), owners()
    if {*RUN_SETTINGS, *own} <= set(given):  # a recipe serves several methods
        return
    decided = [name for name in ("noise_ratio", "noise_kind", "noise_seed") if name in given]
    if decided and config.noise_file is not None and Path(config.noise_file).exists():
        has = "has" if len(decided) == 1 else "have"
        warnings.warn(f"{config.noise_file} is there, so {', '.join(decided)} {has} no effect.", stacklevel=3)
    names = dict.fromkeys(one.model for one in method.network_configs(config))
    networks = [models.find(name) for name in names]
    used = {*method.settings, *(kind for network in networks for kind in network.settings)}
    ignored = set(method.ignores).union(set.intersection(*(set(network.ignores) for network in networks)))
    ignored |= {name for name, kind in own.items() if kind not in used}
    unused = [name for name in (*RUN_SETTINGS, *own) if name in given and name in ignored]
    if unused:
        has = "has" if len(unused) == 1 else "have"
        warnings.warn(
            f"{', '.join(unused)} {has} no effect on the method {config.method} with {' and '.join(sorted(names))}.",
            stacklevel=3,
        )


def _choice(config: Config, pairs: int, device: torch.device) -> dict[str, Any]:
    """Choose model size, steps and schedule. Measured: see docs/train.md."""
    few, gpu, vectors = pairs < FEW, device.type == "cuda", models.find(config.model).takes_vectors
    method = methods.select(config)
    audited = config.audit or method.audits
    width = _width(few, gpu, vectors, audited)
    batch = method.schedule.batch_size or (64 if few and not vectors else 128)
    steps = STEPS[0] if few else STEPS[2 if gpu else 1]
    if vectors and not audited:
        steps = round(steps * UNAUDITED_SHORTER)
    epochs, warmup = _epochs(method.schedule, steps, batch, pairs)
    main = epochs - warmup
    return {
        "embed_size": width,
        "word_size": 300 if width == 1024 else max(32, width // 2),
        "sim_size": max(16, width // 4),
        "batch_size": batch,
        "warmup_epochs": warmup,
        "epochs": main,
        "lr": round(LR_AT_1024 * (1024 / width) ** (0.5 if vectors else 0.83), 5),  # narrow ones take larger steps
        "lr_decay_epochs": max(1, round(0.7 * main)),
        "weight_decay": 0.1 if vectors else 0.0 if few else 0.01,
        "dropout": 0.5 if vectors else config.dropout,
        "negatives_start": min(48, batch // 2),
        "negatives_end": 16 if few or vectors else 4,
        "hardening_steps": round(0.6 * main * math.ceil(pairs / batch)),
    }


def _width(few: bool, gpu: bool, vectors: bool, audited: bool) -> int:
    if few:
        return (512 if audited else 256) if vectors else 64
    return 1024 if gpu else 512 if vectors else 128


def _epochs(schedule: Schedule, steps: int, batch: int, pairs: int) -> tuple[int, int]:
    """Return the total number of epochs and the number of warm-up epochs."""
    total = round(steps * schedule.longer * batch / max(1, pairs))
    epochs = max(schedule.least_epochs[0 if pairs < FEW else 1], min(MOST, total))
    return epochs, max(1, round(schedule.warmup * epochs)) if schedule.warmup else 0


def first_line(config: Config, pairs: int) -> str:
    """Describe a training on so many pairs."""
    device = pick_device(config.device)
    where = f"{torch.get_num_threads()} processor threads" if device.type == "cpu" else device.type
    return (
        f"Training {config.method} with {config.model}, {config.embed_size} wide: {config.total_epochs} epochs of up "
        f"to {math.ceil(pairs / config.batch_size):,} steps on {where}."
    )
