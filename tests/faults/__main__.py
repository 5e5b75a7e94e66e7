"""`make faults`: a fault before every operation on files of every command; then the same command once more.

The second run must end well, leave the same bytes as a run without a fault, and no other file. What a faulted run says
must be a sentence. Exits with 1 if anything was lost, stuck or wrong.

With --results, a line of JSON is added to a file for each fault, and faults that are in it are not injected again.
`python -m tests.faults --docs FILE...` writes faults.csv and the tables of faults.md in benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.commands import COMMANDS, SKIPPED
from tests.faults.inject import IN_INPUT, KINDS, PLANTED, SECOND, STUCK, Ended, Fault, run, spoil, start
from tests.faults.reference import Reference, contents, differences, fresh, reference, same

RECORDS = Path(__file__).parents[2] / "benchmarks/results"
OUTCOMES = ("survived", "lost", "stuck", "wrong")
AT_ONCE, CROWD = "sixteen at once", 16
ALL = (*KINDS, *PLANTED, AT_ONCE)
_DIED = {"SIGKILL": -9, "SIGTERM": -15}  # most commands have nothing to save when they are asked to end
_SENTENCE = re.compile(
    "^mispair: |The same command goes on|Run the command again to resume|running in another process|: failed: ",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Result:
    """What became of a command after a fault: one of `OUTCOMES`, and the details."""

    command: str
    kind: str
    at: int
    outcome: str
    details: str = ""
    seconds: float = 0.0


def outcome(command: str, expected: Reference, fault: Fault, place: Path) -> tuple[str, str]:
    """What became of the command after this fault, one of `OUTCOMES`, and the details."""
    folder, log, other = fresh(expected.prepared, place / "work"), place / "log", place / "second"
    if fault.kind == IN_INPUT:
        spoil(folder, fault.at)
    other.unlink(missing_ok=True)
    ended = run(COMMANDS[command], folder, log, fault)
    said = log.read_text(errors="replace")
    if ended.code == STUCK:
        return "stuck", said
    if ended.code != _DIED.get(fault.kind) and (wrong := _misbehaved(ended.code, said)):
        return "wrong", wrong
    if fault.kind == SECOND and other.exists():
        theirs, _, code = other.read_text(errors="replace").rpartition("exit code ")
        if wrong := _misbehaved(int(code), theirs):
            return "wrong", f"the second process: {wrong}"
    found = contents(folder)
    if fault.kind == IN_INPUT:
        return ("survived", "") if ended.code else ("wrong", f"it trained on a NaN: {said}")
    if same(found, expected):
        return "survived", ""  # some commands refuse to write what is there
    if ended.code == 0:
        return "wrong", f"it ended well with other files: {differences(found, expected)}: {said}"
    ended = run(COMMANDS[command].again(), folder, log, None)
    again = log.read_text(errors="replace")
    if ended.code == STUCK:
        return "stuck", again
    if ended.code:
        return "lost", f"once more: exit code {ended.code}: {again}\nbefore: {said}"
    if different := differences(contents(folder), expected):
        return "wrong", f"other files: {different}\nbefore: {said}"
    return "survived", ""


def _misbehaved(code: int, said: str) -> str:
    """Why a command may not end like that; nothing if it may."""
    if "Traceback" in said or code < 0 or code == 70:
        return f"exit code {code}: {said}"
    return f"exit code {code} without a sentence: {said}" if code and not _SENTENCE.search(said) else ""


def crowd(command: str, expected: Reference, place: Path) -> Iterator[Result]:
    """Many processes start the same command at once: one does the work, the others say that it does or did."""
    folder = fresh(expected.prepared, place / "work")
    waits = [start(COMMANDS[command], folder, place / f"log-{number}", None) for number in range(CROWD)]
    codes = [wait().code for wait in waits]
    different = differences(contents(folder), expected)
    for number, code in enumerate(codes):
        said = (place / f"log-{number}").read_text(errors="replace")
        refused = code in (1, 2) and len(_SENTENCE.findall(said)) == 1 and "Traceback" not in said
        good = (code == 0 or refused) and not different and 0 in codes
        details = "" if good else f"exit code {code}, all codes {codes}, different {different}: {said}"
        yield Result(command, AT_ONCE, number, "stuck" if code == STUCK else "survived" if good else "wrong", details)


@functools.cache
def _reference(command: str, temporary: Path) -> tuple[Reference, Path]:
    """Of this process: results hold the path of the folder, so that each process compares with its own."""
    place = temporary / str(os.getpid()) / str(list(COMMANDS).index(command))
    return reference(COMMANDS[command], place), place


def places(command: str, temporary: Path) -> Ended:
    """Where faults can be injected."""
    return _reference(command, temporary)[0].ended


def inject(command: str, fault: Fault, temporary: Path) -> list[Result]:
    """The result of one fault; of many processes at once, a result of each."""
    expected, place = _reference(command, temporary)
    if fault.kind == AT_ONCE:
        return list(crowd(command, expected, place))
    started = time.monotonic()
    result, details = outcome(command, expected, fault, place)
    return [Result(command, fault.kind, fault.at, result, details, round(time.monotonic() - started, 2))]


def read_results(files: Iterable[Path]) -> list[Result]:
    """All results of these files."""
    return [Result(**json.loads(line)) for file in files for line in file.read_text().splitlines()]


def table(results: Iterable[Result]) -> str:
    """Counts by kind, in Markdown."""
    counts = Counter((result.kind, result.outcome) for result in results)
    kinds = [kind for kind in ALL if any((kind, outcome) in counts for outcome in OUTCOMES)]
    rows = {kind: [counts[kind, outcome] for outcome in OUTCOMES] for kind in kinds}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"| {kind} | {sum(row):,} | {' | '.join(f'{count:,}' for count in row)} |" for kind, row in rows.items()]
    head = f"| fault | injected | {' | '.join(OUTCOMES)} |\n|---|" + "---|" * (1 + len(OUTCOMES))
    return "\n".join((head, *lines))


def by_command(results: Iterable[Result]) -> str:
    """Counts by command, in Markdown."""
    counts = Counter((result.command, result.outcome == "survived") for result in results)
    lines = [
        f"| {name} | {counts[name, True] + counts[name, False]:,} | {counts[name, True]:,} |"
        for name in (*COMMANDS, *SKIPPED)  # results may be of a machine that has more
        if counts[name, True] + counts[name, False]
    ]
    return "\n".join(("| command | injected | survived |\n|---|---|---|", *lines))


def write_docs(results: Sequence[Result]) -> None:
    """Writes all counts to a CSV, and the tables into the page."""
    counts = Counter((result.command, result.kind, result.outcome) for result in results)
    rows = [",".join(("command", "fault", *OUTCOMES))]
    for command, kind in sorted({(command, kind) for command, kind, _ in counts}):
        rows.append(",".join((f'"{command}"', kind, *(str(counts[command, kind, outcome]) for outcome in OUTCOMES))))
    (RECORDS / "faults.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    page = RECORDS / "faults.md"
    start, end = "<!-- tables of faults -->\n", "<!-- end of tables -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    after = rest.partition(end)[2]
    tables = f"\n{table(results)}\n\n{by_command(results)}\n\n"
    page.write_text(f"{before}{start}{tables}{end}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all faults")
    parser.add_argument("--seed", type=int, default=0, help="of the share and the order")
    parser.add_argument("--only", nargs="*", default=list(COMMANDS), help="commands", choices=list(COMMANDS))
    parser.add_argument("--kinds", nargs="*", default=list(ALL), help="faults", choices=ALL)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no fault is begun")
    parser.add_argument("--results", type=Path, help="file that gets a line of JSON for each fault")
    parser.add_argument("--docs", nargs="*", type=Path, help="only write the tables of these files into docs")
    options = parser.parse_args()
    if options.docs is not None:
        write_docs(read_results(options.docs))
        return 0
    for name, why in SKIPPED.items():
        print(f"{name}: skipped, {why}", flush=True)
    results = injected(options)
    print(f"\n{table(results)}\n\n{by_command(results)}")
    return 1 if any(result.outcome != "survived" for result in results) or not results else 0


def injected(options: argparse.Namespace) -> list[Result]:
    """Injects the faults in random order, prints those that were not survived, and gives all results."""
    started, file = time.monotonic(), options.results
    results = read_results([file]) if file is not None and file.exists() else []
    done = {(result.command, Fault(result.kind, result.at)) for result in results}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs) as pool:
        temporary = Path(folder).resolve()
        faults = []
        for command, ended in zip(
            options.only, pool.map(places, options.only, [temporary] * len(options.only)), strict=True
        ):
            print(f"{command}: {ended.operations} operations on files, {ended.steps} steps", flush=True)
            faults += [
                (command, Fault(kind, at))
                for kind in options.kinds
                for at in range(COMMANDS[command].at_once if kind == AT_ONCE else ended.places(kind))
            ]
        chosen = random.Random(options.seed).sample(faults, max(1, round(options.share * len(faults))))
        chosen = [fault for fault in chosen if fault not in done]
        tasks = [pool.submit(inject, command, fault, temporary) for command, fault in chosen]
        for count, task in enumerate(as_completed(tasks), 1):
            for result in task.result():
                results.append(result)
                if result.details:
                    print(f"{result.outcome}: {result.command}, {result.kind}, {result.at}\n  {result.details}")
                if file is not None:
                    with file.open("a") as lines:
                        lines.write(f"{json.dumps(asdict(result))}\n")
            if time.monotonic() - started > 60 * options.minutes:
                for waiting in tasks:
                    waiting.cancel()
                break
            if count % 100 == 0:
                print(f"{count:,} of {len(chosen):,} faults in {time.monotonic() - started:.0f} s", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
