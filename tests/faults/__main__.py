"""`make faults`: a fault before every operation on files of every command; then the same command once more.

The second run must end well, leave the same bytes as a run without a fault, and no other file. What a faulted run says
must be a sentence. Exits with 1 if anything was lost, stuck or wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.commands import COMMANDS
from tests.faults.inject import KINDS, STUCK, Fault, run, start

OUTCOMES = ("survived", "lost", "stuck", "wrong")
AT_ONCE, CROWD = "sixteen at once", 16
_CHECKPOINT = re.compile(r"(checkpoints/step-\d+)-[0-9a-f]{16}")
_TIMES = 2  # runs without a fault: what differs between them is not compared, such as a log with times
_DIED = {"SIGKILL": -9, "SIGTERM": -15}  # most commands have nothing to save when they are asked to end


@dataclass(frozen=True)
class Reference:
    """What a command leaves without any fault."""

    prepared: Path
    files: dict[str, bytes]
    varying: frozenset[str]
    operations: int


def reference(name: str, place: Path) -> Reference:
    """Runs the command without a fault, on inputs that stay there for all faults."""
    prepared = place / "prepared"
    prepared.mkdir(parents=True)

    def prepare() -> int:
        COMMANDS[name].prepare(prepared)
        return 0

    code, _ = run(prepare, prepared, place / "log", None)
    assert code == 0, (place / "log").read_text()
    found, operations = [], 0
    for _ in range(_TIMES):
        folder = _fresh(prepared, place / "work")
        code, operations = run(COMMANDS[name], folder, place / "log", None)
        assert code == 0, (place / "log").read_text()
        found.append(contents(folder))
    first, second = found
    assert first.keys() == second.keys()
    varying = frozenset(path for path in first if first[path] != second[path] or _holds_times(path))
    return Reference(prepared, first, varying, operations)


def outcome(name: str, expected: Reference, fault: Fault, place: Path) -> tuple[str, str]:
    """What became of the command after this fault, one of `OUTCOMES`, and the details."""
    folder, log = _fresh(expected.prepared, place / "work"), place / "log"
    command = COMMANDS[name]
    code, _ = run(command, folder, log, fault)
    said = log.read_text(errors="replace")
    if code == STUCK:
        return "stuck", said
    if code != _DIED.get(fault.kind):
        if "Traceback" in said or code < 0 or code == 70:
            return "wrong", f"exit code {code}: {said}"
        if code and not re.search("^mispair: ", said, re.MULTILINE):
            return "wrong", f"exit code {code} without a sentence: {said}"
    if code == 0 and contents(folder).keys() != expected.files.keys():
        return "wrong", f"it ended well with other files: {sorted(contents(folder).keys() ^ expected.files.keys())}"
    if same(contents(folder), expected):
        return "survived", ""  # some commands refuse to write what is there
    code, _ = run(command, folder, log, None)
    again = log.read_text(errors="replace")
    if code == STUCK:
        return "stuck", again
    if code:
        return "lost", f"once more: exit code {code}: {again}\nbefore: {said}"
    found = contents(folder)
    if found.keys() != expected.files.keys():
        return "wrong", f"other files: {sorted(found.keys() ^ expected.files.keys())}\nbefore: {said}"
    if same(found, expected):
        return "survived", ""
    different = [path for path in found if found[path] != expected.files[path]]
    return "wrong", f"other bytes: {different}\nbefore: {said}"


def crowd(name: str, expected: Reference, place: Path) -> list[tuple[Fault, str, str]]:
    """Many processes start the same command at once: one does the work, the others say that it does or did."""
    folder = _fresh(expected.prepared, place / "work")
    waits = [start(COMMANDS[name], folder, place / f"log-{number}", None) for number in range(CROWD)]
    codes = [wait()[0] for wait in waits]
    results, right = [], same(contents(folder), expected)
    for number, code in enumerate(codes):
        said = (place / f"log-{number}").read_text(errors="replace")
        refused = code == 2 and len(re.findall("^mispair: ", said, re.MULTILINE)) == 1 and "Traceback" not in said
        result = (
            "stuck" if code == STUCK else "survived" if (code == 0 or refused) and right and 0 in codes else "wrong"
        )
        details = "" if result == "survived" else f"exit code {code}, all codes {codes}, right {right}: {said}"
        results.append((Fault(AT_ONCE, number), result, details))
    return results


def same(found: dict[str, bytes], expected: Reference) -> bool:
    """Whether all files are there, and no other, with the same bytes where these do not vary by themselves."""
    return found.keys() == expected.files.keys() and all(
        path in expected.varying or content == expected.files[path] for path, content in found.items()
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All files but locks, which stay on purpose; checkpoints without the hash in their names."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {_CHECKPOINT.sub(r"\1", str(path.relative_to(folder))): path.read_bytes() for path in files}


def _holds_times(path: str) -> bool:
    """A checkpoint knows how long the log was."""
    return "checkpoints/" in path


def _fresh(prepared: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder)
    return folder


def injected(name: str, share: float, seed: int, kinds: list[str]) -> tuple[str, int, list[tuple[Fault, str, str]]]:
    """All faults of one command, or a random share of them."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        expected = reference(name, place)
        faults = [Fault(kind, at) for kind in kinds for at in range(expected.operations)]
        chosen = random.Random(f"{seed} {name}").sample(faults, max(1, round(share * len(faults))))
        results = [(fault, *outcome(name, expected, fault, place)) for fault in chosen]
        results += crowd(name, expected, place)
    return name, expected.operations, results


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all faults")
    parser.add_argument("--seed", type=int, default=0, help="of the share")
    parser.add_argument("--only", nargs="*", default=list(COMMANDS), help="commands", choices=list(COMMANDS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="faults", choices=list(KINDS))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started, counts = time.monotonic(), Counter[tuple[str, str]]()
    with ProcessPoolExecutor(options.workers) as pool:
        tasks = [pool.submit(injected, name, options.share, options.seed, options.kinds) for name in options.only]
        for task in tasks:
            name, operations, results = task.result()
            print(f"{name}: {operations} operations on files, {len(results)} faults", flush=True)
            for fault, result, details in results:
                counts[fault.kind, result] += 1
                if details:
                    print(
                        f"  {result}: {fault.kind} before operation {fault.at}\n    " + details.replace("\n", "\n    ")
                    )
    print("\n| fault | injected | " + " | ".join(OUTCOMES) + " |\n|---|---|" + "---|" * len(OUTCOMES))
    for kind in (*options.kinds, AT_ONCE):
        row = [counts[kind, result] for result in OUTCOMES]
        print(f"| {kind} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    bad = sum(count for (_, result), count in counts.items() if result != "survived")
    print(f"\n{counts.total():,} faults in {time.monotonic() - started:.0f} s, {bad} not survived.")
    return 1 if bad or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
