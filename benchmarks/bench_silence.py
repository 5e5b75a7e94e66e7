"""Measure how long a command is silent and how good its estimates are: `make bench-silence ARGS="mispair --version"`.

The command writes to a pipe. Its first line is timed in seconds of the processor (Linux). Each `2 min 5 s left` is
compared with the time that its stage took from there on, except in the first tenth of the stage and in the last ten
seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from itertools import pairwise
from pathlib import Path

from tyro.conf import Positional

from common import run
from mispair.cli.output import say

SECONDS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
DURATION = r"((?:[\d.]+ (?:d|h|min|s)\b ?)+)"
LEFT, ENDED = re.compile(rf"^([^:\d]*).*?{DURATION}left"), re.compile(rf"^([^:\d]*): done in {DURATION}")
LAST = 10.0  # seconds between two lines


def main(command: Positional[tuple[str, ...]], /, log: Path | None = None) -> None:
    """Run a command and print its longest gap between two lines and the ratio of its estimates to the truth.

    Args:
        command: The command line, such as `-- mispair audit photos.csv --images photos`.
        log: File for the lines of the command, with the second of each.
    """
    began, lines, first = time.monotonic(), [(0.0, "")], 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            first = first or processor_seconds(process.pid)
            lines.append((time.monotonic() - began, line.rstrip()))
    lines.append((time.monotonic() - began, ""))
    if log is not None:
        log.write_text("".join(f"{second:8.1f}  {line}\n" for second, line in lines), encoding="utf-8")
    gap, after = max((after[0] - before[0], before[1]) for before, after in pairwise(lines))
    ratios = [ratio for number in range(len(lines)) for ratio in of_line(lines, number)]
    say(f"first line {lines[1][0]:.1f} s after the start, {first:.2f} s of them on the processor")
    say(f"{lines[-1][0]:.0f} s, exit code {process.returncode}; longest gap {gap:.1f} s, after: {after[:60]!r}")
    within = sum(0.5 <= ratio <= 2 for ratio in ratios)
    spread = f", ratios {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    say(f"{within} of {len(ratios)} estimates within a factor of two{spread}")


def processor_seconds(process: int) -> float:
    """User and system time of a process so far."""
    times = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def of_line(lines: list[tuple[float, str]], number: int) -> list[float]:
    """The estimate in a line, as a multiple of the time that was left; none without an estimate that counts."""
    second, text = lines[number]
    if (found := LEFT.match(text)) is None:
        return []
    ended = next((end for end in lines[number:] if (done := ENDED.match(end[1])) and done[1] == found[1]), lines[-1])
    done = ENDED.match(ended[1])
    took = seconds(done[2]) if done else ended[0]
    left = ended[0] - second
    return [seconds(found[2]) / left] if left > LAST and took - left >= took / 10 else []


def seconds(duration: str) -> float:
    return sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.]+) (d|h|min|s)\b", duration))


if __name__ == "__main__":
    raise SystemExit(run(main))
