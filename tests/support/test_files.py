"""Files that are whole or absent, and what the dead leave."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mispair.errors import MispairError
from mispair.pairs import tables
from mispair.pairs.layouts import precomp
from mispair.pairs.layouts.captions_json import open_json
from mispair.pairs.tables import text_encoding
from mispair.pairs.vocabulary import Vocabulary
from mispair.support import files
from mispair.training.settings import read_recipe


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say it")
def test_what_a_process_left_is_deleted_even_if_nobody_has_asked_how_it_ended(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, files.writer().encode())
        os._exit(0)
    name = os.read(reader, 100).decode()
    left = tmp_path / f".results.json.{name}.tmp"
    left.touch()
    until = time.monotonic() + 60
    while not files._is_zombie(child) and time.monotonic() < until:
        time.sleep(0.001)
    files.write_atomically(tmp_path / "results.json", b"{}")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert not files.is_dead(files.writer())


@pytest.mark.parametrize(
    "name", ["captions.json", "captions.csv", "wide.csv", "vocab.json", "train_caps.txt", "recipe.toml"]
)
def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write({"wide.csv": codecs.BOM_UTF16_LE, "train_caps.txt": b"", "recipe.toml": b""}.get(name, b"{"))
        file.truncate(80_000_000_000)  # sparse: takes no room on the disk
    readers: dict[str, Callable[[Path], object]] = {
        "captions.json": lambda path: open_json([path], None, tmp_path),
        "captions.csv": text_encoding,
        "wide.csv": text_encoding,
        "vocab.json": Vocabulary.load,
        "train_caps.txt": precomp._read_lines,
        "recipe.toml": read_recipe,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "LARGEST_JSON", 1 << 20)  # or a gigabyte would be read here
        with pytest.raises(MispairError) as caught:
            readers[name](path)
    assert "80,000 MB" in str(caught.value) or "at most 1 MB" in str(caught.value)
    assert files.read_json(path) is None


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_synced_where_it_must_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    with files.replacing(tmp_path / "file", durable=durable) as file:
        file.write(b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert bool(synced) == durable
