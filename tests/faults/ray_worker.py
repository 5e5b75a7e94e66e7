"""What a worker of Ray does before its first part. It imports little, because each worker does so anew."""

from __future__ import annotations

from tests.faults.inject import join

from mispair.auditing.scoring import scan

PART = 20  # rows measured at a time


def set_up() -> None:
    """Makes the parts small, and lets faults happen in this process too."""
    scan.PART = PART
    join()
