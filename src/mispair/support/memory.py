"""Memory of this process."""

from __future__ import annotations

import sys


def peak_memory() -> int | None:
    """Peak resident memory of this process in bytes; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
