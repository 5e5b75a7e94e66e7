"""Folders of audits that were killed: what is taken away, what is refused, what is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit_cases import contents, make_case, write_clip
from mispair.auditing import audit as audit_module
from mispair.auditing.audit import Settings
from mispair.auditing.auditor import Auditor
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.errors import ChangedError, DataError
from mispair.support.tensor_files import load_tensors, save_tensors
from refusals import refused

pytest.importorskip("pyarrow")

CPU = Settings(device="cpu")
FILES = [
    "audit.json", "pairs.csv", "pairs.parquet", "report.html", "suggestions.csv", "suggestions.parquet", "summary.json",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    case = make_case(100, 0.3)
    return write_clip(tmp_path / "in", case.left, case.right)


def interrupt(folder: Path, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "find_partners", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            audit_path(AuditInput(folder), out, CPU)


def test_what_killed_writers_left_is_taken_away(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(folder, out)
    for name in ("pairs.parquet", "report.html"):
        (out / f".{name}.4711.tmp").write_text("half of it")
    mine = [".pairs.parquet.mine.tmp", "pairs.parquet.4711.tmp"]
    for name in mine:
        (out / name).write_text("not ours")
    audit_path(AuditInput(folder), out, CPU)
    assert sorted(contents(out)) == sorted([*FILES, *mine])


def test_an_audit_that_was_killed_at_once_is_not_in_the_way(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".audit.json.4711.tmp").write_text("{")
    audit_path(AuditInput(folder), out, CPU)
    assert sorted(contents(out)) == FILES
    other = tmp_path / "other"
    (other / "unfinished").mkdir(parents=True)
    (other / "unfinished/thesis.txt").write_text("important")
    with pytest.raises(DataError, match="is not empty"):
        audit_path(AuditInput(folder), other, CPU)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def leave_out_an_array(path: Path) -> None:
    """As a version that does not know it would."""
    state, about = load_tensors(path)
    del state["measured"]
    save_tensors(path, state, about)


def be_of_another_version(path: Path) -> None:
    state, about = load_tensors(path)
    save_tensors(path, state, {**(about or {}), "auditor": 0})


@pytest.mark.parametrize("change", [flip_a_bit, leave_out_an_array, be_of_another_version])
def test_what_was_learned_is_learned_again_where_it_cannot_be_used(
    change: Callable[[Path], None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(folder, out)
    change(out / "unfinished/auditor.safetensors")
    learned, learn = [], Auditor.fit_source

    def count(*arguments: Any) -> Any:
        learned.append(1)
        return learn(*arguments)

    monkeypatch.setattr(Auditor, "fit_source", count)
    audit_path(AuditInput(folder), out, CPU)
    assert learned == [1]


def test_vectors_that_have_changed_are_noticed(folder: Path, tmp_path: Path) -> None:
    """Even where only a few of very many rows have."""
    out = tmp_path / "out"
    interrupt(folder, out)
    before = contents(out)
    path = folder / "img_emb/img_emb_0.npy"
    written = path.stat().st_mtime_ns
    np.save(path, np.load(path))
    os.utime(path, ns=(written + 1, written + 1))
    with refused(ChangedError, out, "(`source` changed since)"):
        audit_path(AuditInput(folder), out, CPU)
    with refused(ChangedError, where=out, names="(`source` changed since; `checked` changed since)"):
        audit_path(AuditInput(folder), out, Settings(device="cpu", checked={"1": True}))
    assert contents(out) == before
    os.utime(path, ns=(written, written))
    audit_path(AuditInput(folder), out, CPU)
    assert sorted(contents(out)) == FILES


def test_few_pairs_are_counted_without_the_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    import mispair

    case = make_case(160, 0.3)
    case.left[60:] = np.nan
    monkeypatch.setattr(audit_module, "FEW_PAIRS", 100)
    notes = mispair.audit(case.left, case.right, device="cpu").notes
    assert any(note.startswith("60 pairs are few") for note in notes)
