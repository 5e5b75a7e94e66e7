"""The commands `mispair bench ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from mispair.cli_common import console, print_json, print_table
from mispair.config import NoiseKind, read_recipe
from mispair.errors import ConfigError


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
        print_json(report.figures())
    else:
        print_table(report.table())
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
    from mispair.bench.epoch import measure

    _check({"images": images, "bank-size": bank_size}, 2)
    if noise_file is not None and not noise_file.is_file():  # it would be made up
        raise ConfigError(f"There is no {noise_file}; give the file, or no --noise-file.")
    config = replace(read_recipe(recipe), device=device, noise_ratio=noise_ratio)
    config = replace(config, noise_file=None if noise_file is None else str(noise_file))
    schedule = measure(config, captions, images, bank_size, console())
    if json:
        print_json(schedule.figures())
    else:
        for table in schedule.tables(recipe):
            print_table(table)
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
    from mispair.bench.audit import found_table, measure

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
        print_json({"input": opened.name, "audits": [vars(row) for row in rows]})
    else:
        print_table(found_table(rows))
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
        print_json({"width": width, "audits": [vars(size) for size in sizes]})
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
