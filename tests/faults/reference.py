"""What a command leaves without any fault, and whether a folder holds the same."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.faults.commands import Command
from tests.faults.inject import Ended, run

from mispair.reviewing.decisions import FILE
from mispair.training.checkpoint import find

_TIMES = {  # names of what the clock decides, and of the hashes of files with such names in them
    "seconds", "selection_seconds", "logged_bytes", "time", "started", "stages", "report.html", "summary.json",
}  # fmt: skip

_TOOK = re.compile(rb'<p class="soft">mispair [^<]*</p>')  # versions, and how long the audit took


@dataclass(frozen=True)
class Reference:
    """What a command leaves without any fault.

    Attributes:
        prepared: Folder of its inputs.
        files: Their content, by name.
        varying: Files that differ from run to run without any fault.
        ended: How it ended, with the places for faults.
    """

    prepared: Path
    files: dict[str, bytes]
    varying: frozenset[str]
    ended: Ended


def reference(command: Command, place: Path) -> Reference:
    """Runs the command twice without a fault, on inputs that stay there for all faults."""
    prepared = place / "prepared"
    prepared.mkdir(parents=True)

    def prepare() -> int:
        command.prepare(prepared)
        return 0

    assert run(prepare, prepared, place / "log", None).code == 0, (place / "log").read_text()
    found = []
    for _ in range(2):
        folder = fresh(prepared, place / "work")
        ended = run(command, folder, place / "log", None)
        assert ended.code == 0, (place / "log").read_text()
        found.append(contents(folder))
    first, second = found
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    varying = {path for path in first if first[path] != second[path]}
    if command.ranks > 1:  # which steps are logged together is a matter of seconds
        varying |= {path for path in first if path.endswith("metrics.jsonl")}
    return Reference(prepared, first, frozenset(varying), ended)


def fresh(prepared: Path, folder: Path) -> Path:
    """A copy of the inputs."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder)
    return folder


def same(found: dict[str, bytes], expected: Reference) -> bool:
    """Whether all files are there, and no other, with the same bytes where these do not vary by themselves."""
    return not differences(found, expected)


def differences(found: dict[str, bytes], expected: Reference) -> list[str]:
    """Files that are too many, missing or different."""
    others = found.keys() ^ expected.files.keys()
    changed = {
        path
        for path in found.keys() & expected.files.keys()
        if path not in expected.varying and found[path] != expected.files[path]
    }
    return sorted(others | changed)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but locks and cached encodings with their keys, which stay on purpose.

    Checkpoints and logs are without what the clock decides: times, hashes in names, and which step the older one is of.
    """
    files = (path for path in folder.rglob("*") if path.is_file() and not _stays(path, folder))
    found = {str(path.relative_to(folder)): path for path in files}
    for checkpoints in {path.parent for path in found.values() if path.parent.name == "checkpoints"}:
        for age, path in enumerate(find(checkpoints)):
            name = path.relative_to(folder)
            found[str(name.with_name(f"{age} before the newest"))] = found.pop(str(name))
    return {name: b"" if name.endswith("1 before the newest") else _content(path, path.read_bytes())
            for name, path in found.items()}  # fmt: skip


def _stays(path: Path, folder: Path) -> bool:
    if path.relative_to(folder).parts[0] != "cache":
        return path.name.endswith(".lock")
    other = path.name.replace(".keys.npy", ".npy") if ".keys." in path.name else f"{path.stem}.keys.npy"
    return path.with_name(other).exists()


def _content(path: Path, content: bytes) -> bytes:
    if path.parent.name == "checkpoints" and path.suffix == ".pt":
        digest = hashlib.sha256()
        _add(digest, torch.load(io.BytesIO(content), weights_only=True))
        return digest.digest()
    if path.name == "report.html":
        return _TOOK.sub(b"", content)
    if path.name == FILE:
        return _decisions(path)
    if path.suffix in (".json", ".jsonl"):
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        return "\n".join(json.dumps(_timeless(json.loads(line))) for line in lines).encode()
    return content


def _decisions(path: Path) -> bytes:
    """The last decision on each pair; when it was made, and whether twice, is another thing after a fault."""
    with tempfile.TemporaryDirectory() as folder:  # reading changes the files beside it
        for file in path.parent.glob(f"{FILE}*"):
            shutil.copy(file, folder)
        with closing(sqlite3.connect(Path(folder) / FILE)) as copy:
            there = copy.execute("SELECT name FROM sqlite_master WHERE name = 'decisions'").fetchall()
            rows = copy.execute("SELECT id, verdict FROM decisions ORDER BY number").fetchall() if there else []
    return json.dumps(sorted(dict(rows).items())).encode()


def _add(digest: Any, value: Any) -> None:
    """Adds a state of tensors and plain values to a hash."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    elif isinstance(value, dict):
        for name, entry in value.items():
            if name not in _TIMES:
                digest.update(repr(name).encode())
                _add(digest, entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _add(digest, entry)
    else:
        digest.update(repr(value).encode())


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(entry) for name, entry in value.items() if name not in _TIMES}
    return [_timeless(entry) for entry in value] if isinstance(value, list) else value
