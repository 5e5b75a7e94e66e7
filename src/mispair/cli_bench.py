"""The commands `mispair bench ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mispair.config import read_recipe
from mispair.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mispair.bench.epoch import Schedule
    from mispair.bench.speed import Report


def bench_speed(
    *,
    model: tuple[Literal["sgr", "vse"], ...] = ("sgr", "vse"),
    device: str = "auto",
    batch_size: int | None = None,
    embed_size: int | None = None,
    bank_size: tuple[int, ...] = (4096, 8192),
    captions: Path | None = None,
    images: int | None = None,
    json: bool = False,
) -> int:
    """Measure training step, forward pass, evaluation, labels and bank beside plain loops that do the same.

    Args:
        model: Which networks.
        device: auto, cpu, cuda, cuda:1, mps.
        batch_size: Pairs a batch; 128 on a GPU, 32 on a CPU.
        embed_size: Width of the embedding; 1024 on a GPU, 256 on a CPU.
        bank_size: Sizes of the memory bank.
        captions: File with a caption a line (.gz or not), for the lengths; made up by default.
        images: How many images to evaluate on, with five captions each; 512 on a GPU, 64 on a CPU.
        json: Print figures for machines.
    """
    from mispair.bench.speed import measure

    for name, values in (("batch-size", [batch_size]), ("embed-size", [embed_size]), ("images", [images])):
        if any(value is not None and value < 2 for value in values):
            raise ConfigError(f"--{name} must be at least 2.")
    report = measure(
        model, device=device, batch_size=batch_size, embed_size=embed_size, banks=bank_size, captions=captions,
        images=images, tell=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    if json:
        print(json_module.dumps(report.figures(), indent=2))
    else:
        _print(speed_table(report))
    return 0


def bench_epoch(
    *,
    recipe: str = "f30k/repair-sgr",
    captions: Path | None = None,
    noise_file: Path | None = None,
    noise_ratio: float = 0.4,
    images: int = 29000,
    device: str = "auto",
    bank_size: int | None = None,
    json: bool = False,
) -> int:
    """Measure whole epochs of a recipe on made-up pictures of full size, and tell how long its schedule takes.

    Args:
        recipe: Name of a recipe, or a TOML file.
        captions: File with a caption a line (.gz or not); made up by default.
        noise_file: Noise index to use.
        noise_ratio: Share of wrong pairs without it.
        images: How many training images, with five captions each.
        device: auto, cpu, cuda, cuda:1, mps.
        bank_size: Another size of the memory bank.
        json: Print figures for machines.
    """
    from rich.console import Console

    from mispair.bench.epoch import measure

    config = replace(read_recipe(recipe), device=device, noise_ratio=noise_ratio)
    config = replace(config, noise_file=None if noise_file is None else str(noise_file))
    config = replace(config, bank_size=bank_size or config.bank_size)
    schedule = measure(config, captions, images, Console(file=sys.stderr, markup=False, highlight=False))
    if json:
        print(json_module.dumps(schedule.figures(), indent=2))
    else:
        _print(epoch_table(recipe, schedule))
    return 0


def speed_table(report: Report) -> Table:
    from rich.table import Table

    settings = ", ".join(f"{name} {value:g}" for name, value in report.settings.items())
    table = Table(title=f"{report.device}: {settings}", caption="loop: a caption, item or pair at a time")
    for head in ("", "ours, ms", "loop, ms", "times", "ours, MB", "loop, MB", "of peak"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row in report.rows:
        share = "" if row.share is None else f"{row.share:.0%}"
        memory = ("" if count is None else f"{count / 1e6:,.0f}" for count in (row.ours_bytes, row.loop_bytes))
        times = (f"{row.ours_ms:,.2f}", f"{row.loop_ms:,.2f}", f"{row.ratio:,.1f}")
        table.add_row(f"{row.model} {row.what}", *times, *memory, share)
    return table


def epoch_table(recipe: str, schedule: Schedule) -> Table:
    from rich.table import Table

    hours = schedule.seconds / 3600
    memory = "" if schedule.memory is None else f"; at most {schedule.memory / 1e9:.1f} GB of GPU memory"
    table = Table(
        title=f"{recipe}, {schedule.pairs:,} pairs, {schedule.device}", caption=f"whole schedule: {hours:.2f} h{memory}"
    )
    for head in ("epoch", "first, s", "later, s", "choosing, s", "steps", "epochs"):
        table.add_column(head, justify="left" if head == "epoch" else "right")
    for phase in schedule.phases:
        parts = (f"{seconds:,.1f}" for seconds in (phase.first, phase.seconds, phase.choosing))
        table.add_row(phase.name, *parts, f"{phase.steps:,}", str(phase.epochs))
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False).print(table)
