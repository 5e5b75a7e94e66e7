"""The commands `mispair bench ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from mispair.cli.output import console, print_json, say
from mispair.errors import DataError, InvalidValueError, NotFoundError
from mispair.support.flags import OrNone

if TYPE_CHECKING:
    from mispair.bench.suite.runner import CellState


def bench_run(
    suite: Positional[str],
    *,
    out: OrNone[Path] = None,
    data: OrNone[str] = None,
    seeds: int = 1,
    only: tuple[str, ...] = (),
    noise_file: OrNone[str] = None,
    device: str = "auto",
    jobs: int = 1,
    retry: bool = False,
    json: bool = False,
) -> int:
    """Run all trainings of a comparison. Run it again to resume; several processes may share the work.

    Args:
        suite: shapes, f8k, coco-small, vectors, f30k, coco, cc152k, or a TOML file.
        out: Results folder, which several processes or machines may share; results/SUITE by default.
        data: Folder of the data set, if it is not where the suite says.
        seeds: Number of trainings of each kind.
        only: Methods, recipes, rows or parts to train; all by default.
        noise_file: Published noise index files, with {ratio} in the name, such as noise/f30k_precomp_{ratio}.npy.
        device: auto, cpu, cuda, cuda:1, mps.
        jobs: Number of trainings at a time.
        retry: Repeat failed trainings.
        json: Print the numbers as JSON.
    """
    from mispair.bench.suite.record import to_json
    from mispair.bench.suite.results_folder import prepare
    from mispair.bench.suite.runner import run_cells, state
    from mispair.bench.suite.suite import read_suite
    from mispair.compute.devices import pick_device

    for name, number in {"seeds": seeds, "jobs": jobs}.items():
        if number < 1:
            raise InvalidValueError(str(number), where=name, expected="at least 1")
    pick_device(device)
    read = read_suite(suite)
    requested = replace(read, device=device, noise_file=noise_file or read.noise_file)
    results = out or Path("results") / requested.name
    cells = prepare(results, suite, requested, data, seeds, only)
    earlier = set() if retry else {cell.name for cell in cells if state(results, cell).status == "failed"}
    states = run_cells(cells, results, jobs=jobs, retry=retry, console=console())
    if json:
        trainings = {one.cell.name: one.record and to_json(one.record) for one in states}
        print_json({"results": str(results), "trainings": trainings})
    else:
        _print_states(results, states, earlier)
    return 0 if all(one.status == "done" for one in states) else 1


def _print_states(results: Path, states: Sequence[CellState], earlier: Container[str]) -> None:
    """Print the states of the trainings; `earlier` are those with an earlier failure."""
    for one in states:
        if one.status == "failed":
            say(f"{one.cell.name}: {one}{' (earlier; --retry repeats it)' * (one.cell.name in earlier)}")
    names = {"running": "running in another process"}
    counts = Counter(one.status for one in states)
    say(f"{results}: {', '.join(f'{count} {names.get(status, status)}' for status, count in counts.most_common())}.")
    say(f"Tables and figures: mispair bench report {shlex.quote(str(results))}")


def bench_report(
    results: Positional[Path],
    *,
    out: OrNone[Path] = None,
    images: OrNone[Path] = None,
    json: bool = False,
) -> int:
    """Write the tables and figures of a comparison from its finished trainings.

    Args:
        results: Results folder of `mispair bench run`.
        out: Folder to write to; RESULTS/report by default.
        images: Folder with the images of examples; by default `images` in the folder of the data set.
        json: Print the numbers as JSON.
    """
    from mispair.bench.report.page import write_report
    from mispair.bench.suite.results_folder import read_results
    from mispair.pairs.layouts.opening import find_folder

    content = read_results(results)
    if images is not None and not images.is_dir():
        raise NotFoundError("no such folder", where=images, expected="the one with the images")
    if images is None:
        with suppress(DataError):  # the trainings may have been made elsewhere
            images = find_folder(content.suite.data) / "images"
    command = shlex.join(["mispair", *sys.argv[1:]])
    target = out or results / "report"
    files = write_report(content, target, images, command)
    if json:
        print_json({"trainings": len(content.records), "files": [str(path) for path in files]})
    else:
        say(f"{len(content.records)} of {len(content.cells)} trainings. Open {target / 'index.html'}")
        if content.ignored:
            say(
                f"Ignored, because damaged or without a row in suite.toml: {', '.join(content.ignored)}.",
                file=sys.stderr,
            )
    return 0
