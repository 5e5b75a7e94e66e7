"""The commands `mispair bench ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from mispair.config import NoiseKind, read_recipe
from mispair.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mispair.bench.audit import Found
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

    _check({"batch-size": batch_size, "embed-size": embed_size, "images": images, "bank-size": bank_size}, 2)
    if batch_size is not None and images is not None and batch_size > 5 * images:
        raise ConfigError(f"--batch-size is {batch_size}, but {images} images have only {5 * images} captions.")
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
    bank_size: tuple[int, ...] = (),
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
        bank_size: Sizes of the memory bank to tell the cost of; the largest is trained with.
        json: Print figures for machines.
    """
    from rich.console import Console

    from mispair.bench.epoch import measure

    _check({"images": images, "bank-size": bank_size}, 2)
    if noise_file is not None and not noise_file.is_file():  # it would be made up
        raise ConfigError(f"There is no {noise_file}; give the file, or no --noise-file.")
    config = replace(read_recipe(recipe), device=device, noise_ratio=noise_ratio)
    config = replace(config, noise_file=None if noise_file is None else str(noise_file))
    schedule = measure(config, captions, images, bank_size, Console(file=sys.stderr, markup=False, highlight=False))
    if json:
        print(json_module.dumps(schedule.figures(), indent=2))
    else:
        _print(epoch_table(recipe, schedule))
        if schedule.choices:
            _print(choice_table(schedule))
    return 0


def bench_audit(
    source: Positional[Path | None] = None,
    *,
    left: Path | None = None,
    right: Path | None = None,
    kind: tuple[NoiseKind, ...] = ("caption",),
    ratio: tuple[float, ...] = (0.2, 0.4, 0.6),
    seeds: int = 3,
    pairs: int | None = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Measure how well an audit finds pairs that were made wrong on purpose, on your own data.

    Args:
        source: Folder of embeddings or features whose pairs are taken for right.
        left: Vectors of one side as .npy, instead.
        right: Vectors of the other side.
        kind: How pairs are made wrong: caption (at random), near (among look-alikes), group (whole groups), image.
        ratio: Shares of wrong pairs.
        seeds: How many times each.
        pairs: Use only so many pairs, drawn at random.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print figures for machines.
    """
    from mispair.auditing.source import open_arrays, open_source
    from mispair.bench.audit import measure

    _check({"seeds": seeds, "pairs": pairs}, 1)
    _check_shares(ratio)
    if source is not None:
        opened = open_source(source)
    elif left is not None and right is not None:
        opened = open_arrays(left, right)
    else:
        raise ConfigError("Give a folder, or both --left A.npy and --right B.npy.")
    rows = list(
        measure(
            opened, kind, ratio, seeds, count=pairs, device=device,
            tell=lambda row: print(f"{row.kind} {row.ratio:.2f} seed {row.seed}: {row.auroc:.4f}", file=sys.stderr),
        )
    )  # fmt: skip
    if json:
        print(json_module.dumps({"input": opened.name, "audits": [vars(row) for row in rows]}, indent=2))
    else:
        _print(audit_table(rows))
    return 0


def bench_scale(
    *,
    pairs: tuple[int, ...] = (10_000, 100_000, 1_000_000),
    width: int = 512,
    ratio: float = 0.4,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Measure how the time and the memory of an audit grow with the number of pairs; they are made up, on disk.

    Args:
        pairs: How many, as often as you like.
        width: Numbers a vector.
        ratio: Share of wrong pairs.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print figures for machines.
    """
    from mispair.bench.scale import measure

    _check({"pairs": pairs, "width": width}, 1)
    _check_shares((ratio,))
    sizes = []
    for size in measure(pairs, width, ratio, device):
        sizes.append(size)
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in size.stages.items())
        line = f"{size.pairs:,} pairs: {size.seconds:.1f} s ({stages}), {size.peak_bytes / 1e9:.2f} GB"
        print(line, file=sys.stderr if json else sys.stdout)
    if json:
        print(json_module.dumps({"width": width, "audits": [vars(size) for size in sizes]}, indent=2))
    return 0


def _check(given: dict[str, int | tuple[int, ...] | None], least: int) -> None:
    """Refuses numbers that are too small."""
    for name, value in given.items():
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < least:
                raise ConfigError(f"--{name} is {number}; expected at least {least}.")


def _check_shares(ratios: tuple[float, ...]) -> None:
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError("--ratio needs shares of wrong pairs between 0 and 1, such as 0.4.")


def _of_measure(row: Found, name: str) -> float:
    return row.measures[name]


def audit_table(rows: list[Found]) -> Table:
    """A column for each kind and share of noise, means over the seeds."""
    from statistics import fmean

    from rich.table import Table

    groups: dict[str, list[Found]] = {}
    for row in rows:
        groups.setdefault(f"{row.kind} {row.ratio:.0%}", []).append(row)
    table = Table("", *groups, title="Found and true", caption="suggestions: for the wrong pairs that were flagged")
    figures: dict[str, Callable[[Found], float]] = {
        "AUROC of the match score": lambda row: row.auroc,
        **{f"  of {name} alone": partial(_of_measure, name=name) for name in rows[0].measures},
        "average precision": lambda row: row.precision,
        "estimated noise rate": lambda row: row.noise_rate,
        "expected calibration error": lambda row: row.calibration,
        "first suggested right item is right": lambda row: row.right_found,
        "first suggested left item is right": lambda row: row.left_found,
        "  by the nearest neighbour's partner": lambda row: row.neighbour_found,
        "  by chance": lambda row: row.chance,
        "seconds": lambda row: row.seconds,
    }
    for name, show in figures.items():
        table.add_row(name, *(f"{fmean(map(show, found)):.4f}" for found in groups.values()))
    lowest = (min(row.auroc for row in found) for found in groups.values())
    table.add_row("AUROC, lowest of the seeds", *(f"{value:.4f}" for value in lowest))
    return table


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


def choice_table(schedule: Schedule) -> Table:
    from rich.table import Table

    table = Table(title="What a bank costs", caption="the same networks choose the pairs of an epoch")
    for head in ("", "pairs in a bank", "both banks, MB", "choosing, s", "of an epoch"):
        table.add_column(head, justify="right" if head else "left")
    for choice in schedule.choices:
        bank = (f"{choice.bank_size:,}", f"{choice.bank_bytes / 1e6:,.0f}") if choice.bank_size else ("", "")
        table.add_row(choice.name, *bank, f"{choice.seconds:,.1f}", f"{choice.share:.1%}")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False).print(table)
