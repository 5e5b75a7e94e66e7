"""Images of an audited data set, as files and inside the files of the data set."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from mispair.auditing import folder as audit_folder
from mispair.auditing.inputs import AuditInput
from mispair.reviewing import audited_data
from mispair.reviewing.audited_data import AuditedData
from mispair.reviewing.review import Review


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The data sets that were opened for an image."""
    found: list[Path] = []

    def read_input(audit: Path) -> AuditInput:
        found.append(source(audit))
        return AuditInput(source(audit))

    def source(audit: Path) -> Path:
        return Path((audit / "source").read_text(encoding="utf-8"))

    def read_mark(audit: Path) -> SimpleNamespace:
        return SimpleNamespace(request={"source": [str(source(audit))]})

    monkeypatch.setattr(audited_data, "read_audit_mark", read_mark)
    monkeypatch.setattr(audit_folder, "read_input", read_input)
    return found


def audit_of(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "source").write_text(str(source), encoding="utf-8")
    return tmp_path / "audit"


def test_images_inside_tars_are_read(tmp_path: Path, opened: list[Path]) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "0.tar", "w") as tar:
        for name, content in (("a.jpg", b"first"), ("a.txt", b"one"), ("b.jpg", b"second"), ("b.txt", b"two")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    found = AuditedData(audit_of(shards, tmp_path))
    assert [found.read_image(row, name) for row, name in enumerate(("a.jpg", "b.jpg"))] == [b"first", b"second"]
    assert opened == [shards]  # once


def test_images_inside_parquet_files_need_no_names(tmp_path: Path, opened: list[Path]) -> None:
    source = tmp_path / "set.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"first", b"second"], "text": ["one", "two"]}), source)
    found = AuditedData(audit_of(source, tmp_path))
    assert [(found.has_image(row, ""), found.read_image(row, "")) for row in range(2)] == [
        (True, b"first"),
        (True, b"second"),
    ]
    assert opened == [source]
    audited = {"id": ["row#0", "row#1"], "caption": ["one", "two"], "image": ["", ""], "status": ["ok"] * 2}
    table = pyarrow.table({**audited, "match_score": [0.1, 0.2], "is_mismatch": [True, True]})
    pyarrow.parquet.write_table(table, tmp_path / "audit/pairs.parquet")
    assert Review(tmp_path / "audit").image(1) == b"second"
    assert Review(tmp_path / "audit").view(1).has_image
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"second", b"first"], "text": ["two", "one"]}), source)
    assert Review(tmp_path / "audit").image(1) is None  # not that of another pair
    assert not Review(tmp_path / "audit").view(1).has_image


@pytest.mark.parametrize("kind", ["table", "embeddings", "gone"])
def test_a_missing_image_does_not_open_what_holds_none(
    kind: str, tmp_path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "data"
    if kind == "table":
        source = tmp_path / "photos.csv"
        source.write_text("image,caption\na.jpg,one\n", encoding="utf-8")
        (tmp_path / "b.jpg").write_bytes(b"there")
    elif kind == "embeddings":
        (source / "metadata").mkdir(parents=True)
        for name in ("img_emb_0.npy", "metadata/metadata_0.parquet"):
            (source / name).touch()
    monkeypatch.setitem(sys.modules, "mispair.auditing.folder", None)  # whose imports take a second
    found = AuditedData(audit_of(source, tmp_path))
    assert found.read_image(0, "a.jpg") is None
    assert not found.has_image(0, "")
    assert found.has_image(0, "a.jpg")
    assert found.read_image(1, "b.jpg") == (b"there" if kind == "table" else None)
    assert opened == []
