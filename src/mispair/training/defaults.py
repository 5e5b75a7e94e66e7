"""Settings that follow the data and the device, where the user has not chosen them; and how long a run will take."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from mispair import methods
from mispair.compute.devices import autocast, pick_device
from mispair.compute.optimizer import make as make_optimizer
from mispair.config import GROUP_OF, GROUPS, KEYS, Config, override
from mispair.functional.losses import warmup_loss
from mispair.methods.base import similarity
from mispair.models import SideSpec, build
from mispair.pairs.batches import PairLoader
from mispair.pairs.pairs import Pairs, subset
from mispair.support.formatting import duration
from mispair.training.memory_check import check_memory

FEW = 10_000  # pairs, below which networks are small
STEPS = 600, 2000, 3500  # of one network: for few pairs, for more on a processor, for more on a GPU
LEAST, MOST = 6, 40  # epochs
LEAST_MEND = 16, 8  # for few pairs, for more
UNAUDITED_SHORTER = 0.35  # on vectors, which networks soon know by heart, the mismatched pairs too
MEND_LONGER = 1.6  # mend trains teachers and then a student
WARMUP = 0.2  # share of the epochs
LR_AT_1024 = 5e-4
TIMED = 3  # steps
WITH_WORDS = {"vse", "sgr", "saf", "scan"}
OF_MODELS = {  # groups of settings, and settings, that only these models read
    "sgraf": {"sgr", "saf"},
    "scan": {"scan"},
    "vse": {"vse"},
    "word_size": WITH_WORDS,
    "dropout": {"sgr", "saf", "two-tower"},
}
FORWARD = 0.35  # share of a step that its forward pass takes


def fitted(config: Config, given: Collection[str], pairs: Pairs) -> Config:
    """The settings, with those that were not given chosen by the data and the device.

    Args:
        config: All settings.
        given: Names of those that were given.
        pairs: What is trained on.
    """
    device = pick_device(config.device)
    chosen = {key: value for key, value in _choice(config, len(pairs), device).items() if key not in given}
    start = chosen.get("negatives_start", config.negatives_start)
    if "negatives_end" in chosen:
        chosen["negatives_end"] = min(start, chosen["negatives_end"])
    elif "negatives_start" in chosen:
        chosen["negatives_start"] = max(start, config.negatives_end)
    return override(config, chosen)


def check_method(config: Config, given: Collection[str]) -> None:
    """Refuses what the method cannot train with, before there are pairs to choose the other settings by."""
    chosen = _choice(config, 1, torch.device("cpu"))
    epochs = {key: chosen[key] for key in ("epochs", "warmup_epochs") if key not in given}
    methods.select(config).check(override(config, epochs))


def note_unused(config: Config, given: Collection[str]) -> None:
    """Notes the settings that were given and have no effect on this method with these models."""
    method = methods.select(config)
    if method.setting_groups is None or set(KEYS) <= set(given):  # a recipe serves several methods
        return
    models = {own.model for own in method.network_configs(method.adapted(config))}
    others = {name for name, readers in OF_MODELS.items() if not readers & models}
    others |= {name for name in GROUPS if name not in OF_MODELS and name not in method.setting_groups}
    others |= set(method.ignores)
    unused = [key for key in KEYS if key in given and others & {key, GROUP_OF.get(key)}]
    if unused:
        has = "has" if len(unused) == 1 else "have"
        warnings.warn(
            f"{', '.join(unused)} {has} no effect on the method {config.method} with {' and '.join(sorted(models))}.",
            stacklevel=3,
        )


def _choice(config: Config, pairs: int, device: torch.device) -> dict[str, Any]:
    """Model size, steps and schedule. Measured: see docs/train.md."""
    few, gpu, vectors, mend = pairs < FEW, device.type == "cuda", config.model == "two-tower", config.method == "mend"
    audited = config.audit or methods.select(config).audits
    if vectors:
        width, power = (512 if audited else 256) if few else 1024 if gpu else 512, 0.5
    else:
        width, power = 64 if few else 1024 if gpu else 128, 0.83
    batch = 96 if mend else 64 if few and not vectors else 128
    steps = STEPS[0] if few else STEPS[2 if gpu else 1]
    if vectors and not audited:
        steps = round(steps * UNAUDITED_SHORTER)
    total = steps * (MEND_LONGER if mend else 1) * batch / max(1, pairs)
    least = LEAST_MEND[0 if few else 1] if mend else LEAST
    epochs = max(least, min(MOST, round(total)))
    warmup = 0 if mend else max(1, round(WARMUP * epochs))
    main = epochs - warmup
    return {
        "embed_size": width,
        "word_size": 300 if width == 1024 else max(32, width // 2),
        "sim_size": max(16, width // 4),
        "batch_size": batch,
        "warmup_epochs": warmup,
        "epochs": main,
        "lr": round(LR_AT_1024 * (1024 / width) ** power, 5),  # narrower networks take larger steps
        "lr_decay_epochs": max(1, round(0.7 * main)),
        "weight_decay": 0.1 if vectors else 0.0 if few else 0.01,
        "dropout": 0.5 if vectors else config.dropout,
        "negatives_start": min(48, batch // 2),
        "negatives_end": 16 if few or vectors else 4,
        "hardening_steps": round(0.6 * main * math.ceil(pairs / batch)),
    }


def duration_sentence(config: Config, pairs: Pairs) -> str:
    """What will be trained, and about how long it will take by a few timed steps."""
    device = pick_device(config.device)
    method = methods.select(config)
    configs = method.network_configs(method.adapted(config))
    check_memory(configs, (SideSpec.of(pairs.left), SideSpec.of(pairs.right)), device)
    seconds = {own.model: _step_seconds(own, pairs, device) for own in {c.model: c for c in configs}.values()}
    teachers = method.student_from(config)
    if teachers is None:
        epoch = sum(seconds[own.model] for own in configs)
        total = config.total_epochs * epoch
    else:  # then the student learns from what the teachers, which do not train any more, think of its batches
        epoch = sum(seconds[own.model] for own in configs[:-1])
        total = teachers * epoch + (config.total_epochs - teachers) * (seconds[configs[-1].model] + epoch * FORWARD)
    steps = math.ceil(len(pairs) / config.batch_size)
    where = f"{torch.get_num_threads()} processor threads" if device.type == "cpu" else device.type
    return (
        f"Training {config.method} with {config.model}, {config.embed_size} wide: {config.total_epochs} epochs of up "
        f"to {steps:,} steps on {where}, about {duration(steps * total)}."
    )


def _step_seconds(config: Config, pairs: Pairs, device: torch.device) -> float:
    """Seconds of one training step of a throw-away network."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        network = build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=0).to(device).train()
        optimizer = make_optimizer(config, list(network.parameters()))
        rows = np.unique(np.linspace(0, len(pairs) - 1, min(config.batch_size, len(pairs))).astype(np.int64))
        if len(rows) < 2:
            return 0.0
        used = subset(pairs, rows)  # so that not all features are sent to the device
        loader, inside = PairLoader(used, device), np.arange(len(rows))
        took = []
        for _ in range(TIMED):
            started = time.monotonic()
            with autocast(device, config.precision):
                S = similarity(network, loader.batch(inside, None, loader.pad_shapes(inside)))
            warmup_loss(S, config.margin).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took.append(time.monotonic() - started)
    return min(took)  # the first ones take longer
