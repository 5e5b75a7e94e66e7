"""`make soak`: audits, trainings and review requests for as long as wanted, with faults all the time.

In each round, one process that never ends audits and trains, a server that never ends answers requests, another server
is killed after it has acknowledged decisions, and commands in processes of their own meet faults (see `__main__`).
Exits with 1 if anything was lost, a file was left behind, or the memory of one of the two processes grew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from tests.faults.__main__ import outcome
from tests.faults.commands import COMMANDS
from tests.faults.inject import KINDS, Fault
from tests.faults.reference import contents, differences, fresh, reference

from audited import write_audit
from mispair.reviewing.decisions import FILE, Decisions

WORKED = ("audit with a clean copy", "training, two networks")
FAULTED = (*WORKED, "export", "encoding")
GROWTH = 1.03  # of the memory from the second quarter of all rounds to the last one
ROWS = 4000
REQUESTS = 30


def memory_of(process: int) -> float:
    """Resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def work_for_ever(folder: Path, channel: Connection) -> None:
    """Audits and trains in this process, once for each word that it gets, and says what was different."""
    os.chdir(folder)
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    expected = {}
    for name in WORKED:
        expected[name] = reference(COMMANDS[name], folder / name.replace(" ", "-"))
    while channel.recv() == "once more":
        different = []
        for name in WORKED:
            place = fresh(expected[name].prepared, expected[name].prepared.parent / "work")
            os.chdir(place)
            code = COMMANDS[name]()
            different += [f"{name}: exit code {code}"] if code else differences(contents(place), expected[name])
        sys.stdout.flush()
        os.truncate(folder / "log", 0)
        channel.send(different)


class Server:
    """`mispair review` in a process of its own."""

    def __init__(self, audit: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "mispair", "review", str(audit), "--port", str(port), "--no-open"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}"
        self.page = httpx.Client(base_url=address, headers={"Origin": address}, timeout=60)
        while True:
            try:
                self.page.get("/favicon.ico")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, "the server has ended"
                time.sleep(0.05)

    def decide(self, row: int) -> str:
        """Decides on a pair; gives its id when the decision was acknowledged."""
        answer = self.page.post("/decide", data={"row": str(row), "verdict": "keep"})
        assert answer.status_code == 200, answer.text
        return f"p{row}"

    def browse(self, chance: random.Random) -> None:
        """Looks at a page of each kind."""
        at, page = chance.randrange(ROWS), chance.randrange(1, 90)
        for address in (f"/?at={at}", f"/?view=grid&page={page}", "/?mode=rate", "/?mode=teach", "/decisions.csv"):
            assert self.page.get(address).status_code == 200, address

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait()
        self.page.close()


def soak(minutes: float, seed: int, results: Path | None) -> list[str]:
    """Rounds for so many minutes; gives what went wrong."""
    chance, wrong, memory = random.Random(seed), list[str](), list[tuple[float, float]]()
    end, decided, acknowledged = time.monotonic() + 60 * minutes, 0, set[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        ours, theirs = multiprocessing.Pipe()
        (folder / "worker").mkdir()
        worker = multiprocessing.get_context("fork").Process(
            target=work_for_ever, args=(folder / "worker", theirs), daemon=True
        )
        worker.start()
        assert worker.pid is not None
        expected = {
            command: reference(COMMANDS[command], folder / f"f{number}") for number, command in enumerate(FAULTED)
        }
        steady, audit = Server(write_audit(folder / "steady", ROWS)), write_audit(folder / "killed", ROWS)
        before = set(folder.iterdir()), set(Path(tempfile.gettempdir()).iterdir())
        while time.monotonic() < end or len(memory) < 8:
            ours.send("once more")
            for command in FAULTED:
                fault = Fault(chance.choice(list(KINDS)), chance.randrange(expected[command].ended.operations))
                result, details = outcome(command, expected[command], fault, expected[command].prepared.parent)
                if result != "survived":
                    wrong.append(f"{command}, {fault}: {result}: {details}")
                    print(wrong[-1], flush=True)
            killed = Server(audit)
            for _ in range(REQUESTS):
                steady.browse(chance)
                steady.decide(chance.randrange(ROWS))
                acknowledged.add(killed.decide(decided % ROWS))
                decided += 1
            killed.end(signal.SIGKILL)
            wrong += ours.recv()
            memory.append((memory_of(worker.pid), memory_of(steady.process.pid)))
            if results is not None:
                worked, served = memory[-1]
                line = {"round": len(memory), "worker_mb": worked, "server_mb": served, "decisions": decided}
                with results.open("a") as lines:
                    lines.write(f"{json.dumps(line | {'wrong': len(wrong)})}\n")
        ours.send("end")
        worker.join()
        steady.end(signal.SIGINT)
        decisions = Decisions(audit / FILE)
        wrong += [f"lost decisions: {sorted(acknowledged - set(decisions.current))}"] * (
            not acknowledged <= set(decisions.current)
        )
        decisions.close()
        after = set(folder.iterdir()), set(Path(tempfile.gettempdir()).iterdir())
        left = [path for new, old in zip(after, before, strict=True) for path in new - old]
        wrong += [f"left behind: {path}" for path in left if "mispair" in path.name or path.parent == folder]
    print(f"{len(memory)} rounds, {len(memory) * len(WORKED)} runs in one process, {len(FAULTED) * len(memory)} "
          f"faults, {len(memory)} killed servers, {decided:,} decisions acknowledged by them")  # fmt: skip
    for number, what in enumerate(("worker", "server")):
        values = [row[number] for row in memory]
        quarter = max(1, len(values) // 4)
        early, late = (statistics.median(part) for part in (values[quarter : 2 * quarter], values[-quarter:]))
        print(f"memory of the {what}: {values[0]:.0f} MB at first, {early:.0f} MB in the second quarter, {late:.0f} MB "
              f"in the last, {max(values):.0f} MB at most")  # fmt: skip
        wrong += [f"the memory of the {what} grew from {early:.0f} to {late:.0f} MB"] * (late > GROWTH * early)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file that gets a line of JSON for each round")
    options = parser.parse_args()
    wrong = soak(options.minutes, options.seed, options.results)
    print(*wrong or ["nothing was lost, nothing was left behind, memory did not grow"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
