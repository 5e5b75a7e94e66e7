"""Who works on what: several processes, also on several machines, share a folder without doing anything twice.

A claim is a file that only one process can create. Its owner touches it while it works. A claim that nobody has touched
for a while, or whose process has ended, is void, and one of those who find it so may take it over.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mispair.support.files import write_atomically

BEAT, VOID = 10.0, 120.0  # seconds between two touches; seconds without one after which a claim is void


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Inside, the work is ours if this gives True, and the claim is kept fresh; False if it is somebody else's."""
    token = uuid.uuid4().hex
    if is_held(path) or not _take(path, token):
        yield False
        return
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, done), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        done.set()
        beat.join()
        if _read(path).get("token") == token:  # a process that slept for too long may have lost it
            path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether somebody works on it now."""
    owner = _read(path)
    if _age(path) > VOID:
        return False
    return owner.get("host") != socket.gethostname() or _is_alive(owner["pid"])


def _take(path: Path, token: str) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": token})
    if _create(path, mine):
        return True
    old = _read(path).get("token", "")
    guard = path.with_name(f"{path.name}-{old}")  # of all who find this claim void, only one gets past here
    if not _create(guard, mine):
        if _age(guard) > VOID:
            guard.unlink(missing_ok=True)
        return False
    try:
        if is_held(path) or _read(path).get("token", "") != old:
            return False
        write_atomically(path, mine.encode())
        return True
    finally:
        guard.unlink(missing_ok=True)


def _create(path: Path, content: str) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        file.write(content)
    return True


def _read(path: Path) -> dict[str, Any]:
    """Who owns it; nobody known if it is not there, or not yet written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(path: Path) -> float:
    """Seconds since it was touched; endless if it is not there."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with suppress(OSError):
            os.utime(path)


def _is_alive(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True
