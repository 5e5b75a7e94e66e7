"""`mispair audit` in a folder that holds a finished audit already."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from audit_cases import contents, make_case, write_clip
from kills import killed_runs
from mispair.auditing import audit as audit_module
from mispair.auditing import folder as folder_module
from mispair.auditing import inputs
from mispair.auditing.audit import Settings, audit_source
from mispair.auditing.auditor import Auditor
from mispair.auditing.folder import audit_path, read_input
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT
from mispair.auditing.summary import AuditSummary
from mispair.cli.main import main
from mispair.errors import DamagedError, DataError, NotFoundError
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.shapes import dataset
from mispair.support.owned_folder import OwnedFolder, read_mark
from refusals import refused

pytest.importorskip("pyarrow")

Capture = pytest.CaptureFixture[str]
ENDED = "This audit has ended already; nothing was computed again."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `place` with embeddings and their audit in the folder that is used when none is named; and its copy."""
    place = tmp_path_factory.mktemp("folder") / "place"
    case = make_case(100, 0.3)
    write_clip(place / "in", case.left, case.right, {"id": [f"p{row}" for row in range(100)]})
    (place / "checked.csv").write_text("id,right\np1,no\n")
    with chdir(place), redirect_stdout(StringIO()) as printed:
        assert audit("in") == 0
    assert "Report: audit/report.html" in printed.getvalue()
    assert "Decide on the doubtful pairs: mispair review audit\n" in printed.getvalue()
    shutil.copytree(place, place.with_name("copy"))
    return place


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As it was made, always at the same place, with the same times."""
    shutil.rmtree(made)
    shutil.copytree(made.with_name("copy"), made)
    monkeypatch.chdir(made)
    return made


def audit(*arguments: object) -> int:
    return main(["audit", *map(str, arguments), "--device", "cpu"])


def without_mark(copy: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(copy).items() if name != ".copy.json"}


def is_finished(out: Path) -> bool:
    mark = read_mark(out, AUDIT)
    return mark is not None and mark.finished


def never(*_: object, **__: object) -> None:
    raise AssertionError("it has started to work")


def test_nothing_is_done_again(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(folder_module, "audit_source", never)
    before = contents(place)
    for source in ("in", place / "in"):
        assert audit(source) == 0
        printed = capsys.readouterr()
        assert ENDED in printed.err
        assert "of 100 pairs are flagged" in printed.out
        assert "Report: audit/report.html" in printed.out
    assert audit("in", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"out": "audit", **json.loads(Path("audit/summary.json").read_text())}
    assert contents(place) == before


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (["in", "--checked", "checked.csv"], "(--checked changed since)"),
        (["in", "--joint"], "(--joint was False, now True)"),
        (["in", "--images", "in"], "(--images was None, now "),
        (
            ["--left", "in/img_emb/img_emb_0.npy", "--right", "in/text_emb/text_emb_0.npy"],
            "(`source` changed since; --left changed since; --right changed since)",
        ),
    ],
)
def test_another_audit_is_refused(place: Path, capsys: Capture, options: list[str], changed: str) -> None:
    before = contents(place)
    assert audit(*options) == 2
    error = capsys.readouterr().err
    assert f"audit: holds an audit with other settings {changed}" in error
    assert "--overwrite" in error
    assert contents(place) == before


def test_a_mistake_is_named_before_what_is_there(place: Path, capsys: Capture) -> None:
    assert (place / "audit").exists()
    for options, words in (([], "expected images and captions"), (["none"], "none: no such file or folder")):
        assert audit(*options) == 2
        assert words in capsys.readouterr().err


def test_tools_need_images_before_the_audit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "audit_source", never)
    with refused(NotFoundError):
        audit_path(AuditInput(place / "in"), place / "out", Settings(device="cpu"), tools=["argilla"])


def test_an_input_that_was_written_again_is_another(place: Path, capsys: Capture) -> None:
    path = place / "in/img_emb/img_emb_0.npy"
    later = path.stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    assert audit("in") == 2
    assert "(`source` changed since)" in capsys.readouterr().err
    assert audit("in", "--overwrite") == 0
    assert audit("in") == 0
    assert ENDED in capsys.readouterr().err


def test_a_folder_of_which_a_part_was_taken_away_has_not_ended(place: Path, capsys: Capture) -> None:
    (place / "audit/report.html").unlink()
    assert audit("in") == 0
    assert ENDED not in capsys.readouterr().err
    assert (place / "audit/report.html").exists()


def test_an_audit_that_is_replaced_has_not_ended_before_it_has(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(audit_module, "find_partners", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert audit("in", "--joint", "--overwrite") == 2  # refused: the old audit stays
        assert is_finished(place / "audit")
        assert audit("in", "--checked", "checked.csv", "--overwrite") == 130
        assert not is_finished(place / "audit")
    monkeypatch.setattr(Auditor, "fit_source", never)
    assert audit("in", "--checked", "checked.csv") == 0  # goes on
    assert audit("in", "--checked", "checked.csv") == 0


def test_a_clean_copy_is_made_later(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert audit("in", "--out", "other", "--clean", "wanted") == 0
    monkeypatch.setattr(folder_module, "audit_source", never)
    assert audit("in", "--clean", "clean") == 0
    assert without_mark(place / "clean") == without_mark(place / "wanted")
    before = contents(place)
    assert audit("in", "--clean", "clean") == 0
    assert "Without the flagged pairs: clean" in capsys.readouterr().out
    assert contents(place) == before
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("important")
    assert audit("in", "--clean", "mine") == 2
    assert "Give another --clean" in capsys.readouterr().err


def test_results_beside_the_data_do_not_change_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(place / "in")
    assert audit(".") == 0
    assert audit(".") == 0
    assert ENDED in capsys.readouterr().err


def test_the_data_of_a_run_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    data = dataset.make(tmp_path / "data", train=24, dev=6, test=6)
    small = ["--embed-size", "16", "--word-size", "8", "--epochs", "1", "--warmup-epochs", "0", "--device", "cpu"]
    assert main(["train", "--data", str(data), "--method", "plain", *small, "--out", "run"]) == 0
    assert audit("run") == 0
    monkeypatch.setattr(inputs, "from_run", never)
    assert audit("run") == 0
    assert ENDED in capsys.readouterr().err
    np.save(data / "train_ims.npy", np.load(data / "train_ims.npy") + 1)
    assert audit("run") == 2
    assert "(`source` changed since)" in capsys.readouterr().err


def test_a_second_audit_is_refused_before_it_works(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(folder_module, "audit_source", never)
    for name in ("audit", "other"):
        with OwnedFolder(Path(name), AUDIT, {}, overwrite=True):
            assert audit("in", "--out", name, "--overwrite") == 2
        assert f"{name}: another process" in capsys.readouterr().err
    assert not (place / "other").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_an_audit_that_is_killed_while_it_writes_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = audit_source(open_source(place / "in"), Settings(device="cpu"))
    monkeypatch.setattr(folder_module, "audit_source", lambda *_, **__: finished)
    data = AuditInput(place / "in")

    def work() -> object:
        return audit_path(data, place / "out", Settings(device="cpu"), clean=place / "clean")

    assert sum(1 for _ in killed_runs(work, place)) > 30
    monkeypatch.setattr(folder_module, "audit_source", never)
    assert work() == AuditSummary.read(place / "out/summary.json")
    assert sorted(contents(place / "out")) == sorted(contents(place / "audit"))
    assert (place / "out/pairs.parquet").read_bytes() == (place / "audit/pairs.parquet").read_bytes()
    assert sorted(path.name for path in place.iterdir()) == ["audit", "checked.csv", "clean", "in", "out"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_clean_copy_that_is_killed_is_written_again(place: Path) -> None:
    before = sorted(path.name for path in place.iterdir())

    def work() -> object:
        return audit_path(
            AuditInput(place / "in"), place / "audit", Settings(device="cpu"), clean=place / "clean"
        )  # fmt: skip

    assert sum(1 for _ in killed_runs(work, place)) > 10
    assert sorted(path.name for path in place.iterdir()) == sorted([*before, "clean"])


@pytest.mark.parametrize("name", ["summary.json", "pairs.parquet", "suggestions.parquet"])
def test_a_damaged_file_is_named(place: Path, capsys: Capture, name: str) -> None:
    path = place / "audit" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    for flags in ([], ["--clean", "clean"], ["--for", "label-studio"]):
        assert audit("in", *flags) == 2
        assert f"audit/{name}: the file has changed since it was written" in capsys.readouterr().err
    assert main(["export", "audit", "--to", "mended"]) == 2
    assert f"audit/{name}: the file has changed since it was written" in capsys.readouterr().err
    assert not (place / "clean").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"id_column": ["no name"]}, {"caption_column": 1}, {"flag_below": "low"}, {"keep_best": [1]},
        {"images": "a\0b"}, {"source": ["a\0b"]}, {"source": [{}]}, {"by": 5}, {"split": 5}, {"mine": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("finished", [True, False])
def test_a_mark_with_other_values_than_ours_is_no_traceback(
    place: Path, change: dict[str, object], finished: bool
) -> None:
    mark = json.loads((place / "audit/audit.json").read_text())
    changed = {**mark, "request": {**mark["request"], **change}, "finished": finished}
    (place / "audit/audit.json").write_text(json.dumps(changed))
    with pytest.raises(DataError):
        read_input(Path("audit"))
    main(["export", "audit", "--to", "mended"])  # what is of no use for it does not matter


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"pairs": "many"}', "[" * 100_000])
def test_a_damaged_summary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with refused(DamagedError, where=tmp_path / "summary.json"):
        AuditSummary.read(tmp_path / "summary.json")


def test_whether_a_file_lies_in_a_folder(tmp_path: Path) -> None:
    for name in ("data/deep", "out/deep"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("data/deep/a", "out/deep/b"):
        (tmp_path / name).touch()
    (tmp_path / "data/link").symlink_to(tmp_path / "out/deep/b")
    (tmp_path / "linked").symlink_to(tmp_path / "out")
    out = tmp_path / "out"
    inside = {"data/deep/a": False, "out/deep/b": True, "data/link": True, "linked/deep/b": True}
    for name, expected in inside.items():
        assert folder_module._lies_in([tmp_path / "data/deep/a", tmp_path / name], out) == expected, name
    assert not folder_module._lies_in([tmp_path / "out/deep/b"], tmp_path / "data")


def test_the_state_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    data, made = tmp_path / "data", tmp_path / "data/made"
    made.mkdir(parents=True)
    (data / "a").write_text("a")
    (data / "nowhere").symlink_to(tmp_path / "missing")

    def state() -> object:
        return folder_module._state(data, [made])

    before = state()
    (made / "b").write_text("b")
    assert state() == before
    (data / "c").write_text("")
    with_another = state()
    assert with_another != before
    (data / "c").write_text("longer")
    assert state() not in (before, with_another)
    assert folder_module._state(data / "a", [])[1:] != folder_module._state(data / "c", [])[1:]
