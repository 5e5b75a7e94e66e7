"""What workers of Ray do before their first job in tests: small and slow parts, of which each is noted in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mispair.auditing import ray_engine
from mispair.auditing.scoring import scan

BLOCK, PART = 10, 20


def set_up() -> None:
    """Parts of 20 rows in blocks that take SECONDS each; NOTES gets a line for each part that was measured."""
    scan.BLOCK, scan.PART = BLOCK, PART
    measured, measure = scan._measured, ray_engine.PartWorker.measure

    def slow(*arguments: Any) -> scan.Scan:
        time.sleep(float(os.environ["SECONDS_A_BLOCK"]))
        return measured(*arguments)

    def noted(self: ray_engine.PartWorker, part: ray_engine.Part) -> scan.Scan:
        found = measure(self, part)
        with Path(os.environ["NOTES"]).open("a") as file:
            file.write(f"{part.start} {os.getpid()}\n")
        return found

    scan._measured = slow  # type: ignore[assignment]
    ray_engine.PartWorker.measure = noted  # type: ignore[method-assign]


def environment(notes: Path, seconds: float = 0.0) -> dict[str, Any]:
    """The `runtime_env` of such workers."""
    here = Path(__file__).parent
    source = here.parents[1] / "src"
    variables = {"NOTES": str(notes), "SECONDS_A_BLOCK": str(seconds), "PYTHONPATH": f"{source}:{here}"}
    return {"worker_process_setup_hook": "ray_workers.set_up", "env_vars": variables}


def read(notes: Path) -> list[tuple[str, int]]:
    """The parts that were measured so far, and the process that measured each."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [(name, int(process)) for name, process in map(str.split, lines)]
