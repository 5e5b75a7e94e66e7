"""The commands `mispair bench ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from mispair.cli.output import console, print_json, print_table
from mispair.config import NoiseKind, read_recipe
from mispair.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mispair.bench.suite.runner import CellState
    from mispair.bench.suite.suite import Cell, Suite


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
    from mispair.bench.measure.step_speed import measure

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
    from mispair.bench.measure.epoch_time import measure

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
    from mispair.auditing.sources.source import open_arrays, open_source
    from mispair.bench.measure.audit_quality import found_table, measure

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
    from mispair.bench.measure.audit_scale import measure

    _check({"pairs": pairs, "width": width}, 1)
    _check_shares((ratio,))
    sizes = []
    for size in measure(pairs, width, ratio, device):
        sizes.append(size)
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in size.stages.items())
        line = f"{size.pairs:,} pairs: {size.seconds:.1f} s ({stages})"
        line += f", {size.peak_bytes / 1e9:.2f} GB" if size.peak_bytes else ""
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


def bench_run(
    suite: Positional[str],
    *,
    out: Path | None = None,
    data: str | None = None,
    seeds: int = 1,
    only: str = "",
    noise_file: str | None = None,
    device: str = "auto",
    jobs: int = 1,
    retry: bool = False,
    dry_run: bool = False,
    captions: Path | None = None,
    images: int | None = None,
    json: bool = False,
) -> int:
    """Train everything that a comparison needs. The same command again does what is missing; several may run at once.

    Args:
        suite: shapes, f8k, f30k, coco, cc152k, or a TOML file.
        out: Results folder, which several processes or machines may share; results/SUITE by default.
        data: Folder of the data set, if it is not where the suite says.
        seeds: How many trainings of each kind.
        only: Methods, recipes, rows or parts to do, with commas between them; all by default.
        noise_file: Published noise index files, with {ratio} in the name, such as noise/f30k_precomp_{ratio}.npy.
        device: auto, cpu, cuda, cuda:1, mps.
        jobs: How many trainings at a time.
        retry: Try again what has failed.
        dry_run: Only the first steps of every kind of training, on made-up pictures; tells memory and time of all.
        captions: For a dry run: file with a caption a line (.gz or not); made up by default.
        images: For a dry run: how many training images; by default as many as the suite's data set has.
        json: Print figures for machines.
    """
    from mispair.bench.suite.runner import run_cells, state
    from mispair.bench.suite.suite import read_suite
    from mispair.compute.devices import pick_device

    for name, value in (("seeds", seeds), ("jobs", jobs), ("images", images)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; expected at least 1.")
    pick_device(device)
    found = read_suite(suite)
    asked = replace(found, device=device, noise_file=noise_file or found.noise_file)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    if dry_run:
        return _rehearse(asked, asked.cells(seeds, wanted), captions, images or asked.images, json)
    results = out or Path("results") / asked.name
    cells = _prepare(results, suite, asked, data, seeds, wanted)
    earlier = set() if retry else {cell.name for cell in cells if state(results, cell).status == "failed"}
    states = run_cells(cells, results, jobs=jobs, retry=retry, console=console())
    if json:
        trainings = {one.cell.name: one.record and vars(one.record) for one in states}
        print_json({"results": str(results), "trainings": trainings})
    else:
        _tell(results, states, earlier)
    return 0 if all(one.status == "done" for one in states) else 1


def _prepare(
    results: Path, source: str, asked: Suite, data: str | None, seeds: int, wanted: Sequence[str]
) -> list[Cell]:
    """Checks folder, noise and data before anything is trained, takes the folder and gives what there is to do.

    Args:
        results: The folder.
        source: Name or file of the suite.
        asked: The suite as asked for; the folder may know its noise files.
        data: Folder of the data set, if it is not where the suite says.
        seeds: How many trainings of each kind.
        wanted: Methods, recipes, rows or parts to do; all if empty.
    """
    from mispair.bench.suite.results_folder import check_folder, claim_folder

    known = check_folder(results, asked)
    _check_noise(known, known.cells(seeds, wanted))
    placed = replace(known, data=_data(data or known.data))
    cells = placed.cells(seeds, wanted)
    _check_data(results, cells, placed.cells(seeds))
    claim_folder(results, source, placed, seeds)
    return cells


def _tell(results: Path, states: Sequence[CellState], earlier: Container[str]) -> None:
    """Says how the trainings have ended, and what failed; `earlier` are those that had failed before."""
    for one in states:
        if one.status == "failed":
            print(f"{one.cell.name}: {one.said()}{' (earlier; --retry tries again)' * (one.cell.name in earlier)}")
    said = {"running": "running in another process"}
    counts = Counter(one.status for one in states)
    print(f"{results}: {', '.join(f'{count} {said.get(status, status)}' for status, count in counts.most_common())}.")
    print(f"Tables and figures: mispair bench report {shlex.quote(str(results))}")


def _rehearse(suite: Suite, cells: list[Cell], captions: Path | None, images: int, json: bool) -> int:
    from mispair.bench.suite.dry_run import kinds as kinds_of
    from mispair.bench.suite.dry_run import rehearse, typical
    from mispair.support.formatting import duration

    _check_noise(suite, [typical(alike) for alike in kinds_of(cells)])
    kinds = []
    for kind in rehearse(cells, captions, images, tell=lambda name: print(name, file=sys.stderr)):
        kinds.append(kind)
        memory = "" if kind.memory is None else f", {kind.memory / 1e9:.1f} GB"
        said = kind.error or f"{duration(kind.seconds)} each{memory}"
        if not json:
            print(f"{kind.trainings:3d} x {kind.cell.name}: {said}", flush=True)
    if json:
        print_json([kind.figures() for kind in kinds])
        return 1 if any(kind.error for kind in kinds) else 0
    total = sum(kind.trainings * kind.seconds for kind in kinds)
    made = f"{len(cells)} trainings, {len(kinds)} kinds, {images:,} training images"
    print(f"{made}: about {duration(total)} one after the other.")
    return 1 if any(kind.error for kind in kinds) else 0


def bench_report(
    results: Positional[Path],
    *,
    out: Path | None = None,
    images: Path | None = None,
    json: bool = False,
) -> int:
    """Write the tables and figures of a comparison, as far as its trainings have ended.

    Args:
        results: Results folder of `mispair bench run`.
        out: Folder to write to; RESULTS/report by default.
        images: Folder with the pictures, for examples; by default `images` in the folder of the data set.
        json: Print figures for machines.
    """
    from mispair.bench.report.page import write_report
    from mispair.bench.suite.results_folder import read_results
    from mispair.data.loading import find_folder

    found = read_results(results)
    records = found.records(results)
    if images is not None and not images.is_dir():
        raise DataError(f"{images}: no such folder; expected the one with the pictures.")
    if images is None:
        try:
            images = find_folder(found.suite.data) / "images"
        except DataError:  # the trainings may have been made elsewhere
            images = None
    command = shlex.join(["mispair", *sys.argv[1:]])
    target = out or results / "report"
    files = write_report(found.suite, found.seeds, records, target, images, command)
    if json:
        print_json({"trainings": len(records), "files": [str(path) for path in files]})
    else:
        print(f"{len(records)} of {len(found.suite.cells(found.seeds))} trainings. Look at {target / 'index.html'}")
        if others := found.others(results):
            print(f"Left out, as damaged or of no row of suite.toml: {', '.join(others)}.", file=sys.stderr)
    return 0


def _data(data: str) -> str:
    """An absolute path, as workers and later calls may be elsewhere."""
    from mispair.data.loading import find_folder

    return data if data == "shapes" else str(find_folder(data).resolve())


def _check_data(results: Path, cells: list[Cell], everything: list[Cell]) -> None:
    """Reads the data once, with the noise of every share: what is wrong with it is said before anything is trained.

    It has to be that of all that has ended, whatever --only says: they will stand in one table.
    """
    from mispair.bench.suite.results_folder import check_data
    from mispair.bench.suite.runner import state
    from mispair.training.splits import load_splits

    waiting = [cell.config for cell in cells if state(results, cell).record is None]
    if not waiting:
        return
    by_file = {config.noise_file: config for config in waiting}
    pairs = {len(load_splits(config).train) for config in by_file.values()}
    check_data(results, everything, pairs.pop())


def _check_noise(suite: Suite, cells: list[Cell]) -> None:
    """Refuses noise files that are not there: they would be made up."""
    if suite.noise_file is None:
        return
    if "{ratio}" not in suite.noise_file:
        raise ConfigError("--noise-file needs {ratio} in its name, as every share of noise has its own file.")
    files = sorted({cell.config.noise_file for cell in cells if cell.config.noise_file})
    if missing := [path for path in files if not Path(path).is_file()]:
        raise DataError(f"There is no {missing[0]}; give the file of every share of noise, or no --noise-file.")
