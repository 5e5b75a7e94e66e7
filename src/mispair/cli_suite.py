"""The commands `mispair bench run` and `mispair bench report`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from mispair.cli_common import console, print_json
from mispair.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mispair.bench.runner import CellState
    from mispair.bench.suite import Cell, Suite


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
    from mispair.bench.runner import run_cells, state
    from mispair.bench.suite import read_suite
    from mispair.devices import pick_device

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
    from mispair.bench.results import check_folder, claim_folder

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
    from mispair.bench.rehearsal import kinds as kinds_of
    from mispair.bench.rehearsal import rehearse, typical
    from mispair.wording import duration

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
    from mispair.bench.report import write_report
    from mispair.bench.results import read_results
    from mispair.data.formats import find_folder

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
    from mispair.data.formats import find_folder

    return data if data == "shapes" else str(find_folder(data).resolve())


def _check_data(results: Path, cells: list[Cell], everything: list[Cell]) -> None:
    """Reads the data once, with the noise of every share: what is wrong with it is said before anything is trained.

    It has to be that of all that has ended, whatever --only says: they will stand in one table.
    """
    from mispair.api import load_splits
    from mispair.bench.results import check_data
    from mispair.bench.runner import state

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
