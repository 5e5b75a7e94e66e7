"""The number of cores for this process, and limits for its threads."""

from __future__ import annotations

import math
import os
from pathlib import Path

from mispair.errors import InvalidValueError

OWN = "MISPAIR_THREADS"
LIMITS = "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"
CGROUPS, CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """The cores for this process: MISPAIR_THREADS, or the least of affinity, container, Slurm and OpenMP."""
    if own := os.environ.get(OWN):
        return checked(own, OWN)
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = (os.environ.get(name, "").split(",")[0] for name in LIMITS)  # OpenMP has a number for each level
    return max(1, min([there, *(int(number) for number in given if number.isdecimal() and int(number)), *_quotas()]))


def checked(threads: str, where: str) -> int:
    """A valid number of threads."""
    if not (threads.isdecimal() and int(threads)):
        raise InvalidValueError(repr(threads), where=where, expected="a number of threads, at least 1")
    return int(threads)


def share_cores(threads: str | None = None) -> None:
    """Limit the threads of libraries still to be imported, and of processes still to be started.

    Threads that wait for others sleep. By default they spin, so several processes keep the cores busy without work.
    """
    if threads is not None:
        os.environ[OWN] = str(checked(threads, "threads"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(cores())


def _quotas() -> list[int]:
    """Limits of the control groups of this process, such as a container's, in whole cores."""
    found = []
    try:
        group = CGROUPS / CGROUP.read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(CGROUPS) and (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
                found += [] if quota == "max" else [math.ceil(int(quota) / int(period))]
    except OSError:  # no Linux
        pass
    return found
