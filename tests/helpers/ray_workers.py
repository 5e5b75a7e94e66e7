"""What workers of Ray do before their first job in tests: small and slow parts, of which each is noted in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mispair.auditing.scoring import scan

BLOCK, PART = 10, 20


def set_up() -> None:
    """Parts of 20 rows in blocks that take SECONDS each; NOTES gets a line for each part that was kept."""
    scan.BLOCK, scan.PART = BLOCK, PART
    measured, save = scan._measured, scan._save

    def slow(*arguments: Any) -> scan.Scan:
        time.sleep(float(os.environ["SECONDS_A_BLOCK"]))
        return measured(*arguments)

    def noted(path: Path, *others: Any) -> None:
        save(path, *others)
        with Path(os.environ["NOTES"]).open("a") as file:
            file.write(f"{path.stem} {os.getpid()}\n")

    scan._measured = slow  # type: ignore[assignment]
    scan._save = noted  # type: ignore[assignment]


def environment(notes: Path, seconds: float = 0.0) -> dict[str, Any]:
    """The `runtime_env` of such workers."""
    here = Path(__file__).parent
    source = here.parents[1] / "src"
    variables = {"NOTES": str(notes), "SECONDS_A_BLOCK": str(seconds), "PYTHONPATH": f"{source}:{here}"}
    return {"worker_process_setup_hook": "ray_workers.set_up", "env_vars": variables}


def read(notes: Path) -> list[tuple[str, int]]:
    """The parts that were kept so far, and the process that measured each."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [(name, int(process)) for name, process in map(str.split, lines)]
