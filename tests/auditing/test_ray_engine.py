"""Audits block by block; a stand-in for Ray calls what the workers do in this process."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mispair
from audit_cases import Case, make_case
from mispair.auditing import blocks, ray_engine, ray_workers
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path, read_input
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT, READ_BACK
from mispair.auditing.ray_cluster import connect
from mispair.auditing.scoring.folds import sample
from mispair.auditing.scoring.shared_items import find_shared_items
from mispair.auditing.summary import AuditSummary
from mispair.cli.main import main
from mispair.errors import (
    ChangedError,
    ConfigError,
    ConflictError,
    ExistsError,
    InvalidValueError,
    MissingPackageError,
    NotFoundError,
)
from mispair.pairs.layouts.arrays import from_memory
from mispair.support.owned_folder import check_unchanged
from ray_stand_in import StandIn
from refusals import refused

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS, BLOCKS = 400, 5
CPU = Settings(device="cpu", workers=2)
_FILE = io.BytesIO()
Image.new("RGB", (40, 40), "red").save(_FILE, "JPEG")
_IMAGE = _FILE.getvalue()


@pytest.fixture(autouse=True, scope="module")
def _by_blocks() -> Iterator[None]:
    """Audit these few pairs as many are: the driver learns from a sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "ALONE", 0)
        yield


@pytest.fixture(scope="module")
def case() -> Case:
    case = make_case(ROWS, 0.3, widths=(40, 32), hidden=12)
    case.left[7] = 0
    case.left[390], case.right[301], case.left[311], case.right[311] = (
        case.left[100], case.right[30], case.left[12], case.right[12]
    )  # fmt: skip
    case.left[200:230:2] = case.left[200]  # a placeholder
    return case


def write(folder: Path, case: Case, cuts: int = BLOCKS) -> AuditInput:
    """Blocks in the clip-retrieval layout."""
    for number, rows in enumerate(np.array_split(np.arange(len(case)), cuts)):
        columns = {
            "id": [f"p{row}" for row in rows],
            "caption": [f"a dog runs over field {row}" for row in rows],
            "image_path": [f"{row}.jpg" for row in rows],
        }
        for name, side in (("img_emb", case.left), ("text_emb", case.right), ("metadata", columns)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            if isinstance(side, dict):
                parquet.write_table(pyarrow.table(side), folder / name / f"{name}_{number}.parquet")
            else:
                np.save(folder / name / f"{name}_{number}.npy", side[rows])
    return AuditInput(folder)


@pytest.fixture(scope="module")
def done(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditInput, Path, AuditSummary]:
    """The data, its audit and the summary."""
    folder = tmp_path_factory.mktemp("ray")
    data = write(folder / "in", case)
    return data, folder / "out", audit_path(data, folder / "out", CPU, cluster=StandIn())


def table(out: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = parquet.read_table(out / "pairs.parquet").to_pydict()
    return found


def metrics(summary: AuditSummary) -> dict[str, Any]:
    """Without times; sums of parts may differ in their last digits."""
    found: dict[str, Any] = json.loads(
        summary.model_dump_json(exclude={"seconds", "stages"}), parse_float=lambda text: round(float(text), 12)
    )
    return found


def test_the_scores_are_those_of_the_auditor(done: tuple[AuditInput, Path, AuditSummary], case: Case) -> None:
    _, out, summary = done
    found, auditor = table(out), mispair.Auditor.load(out / "auditor.safetensors", "cpu")
    expected = auditor.score(case.left, case.right)
    score = np.array(found["match_score"], dtype=np.float32)
    placeholder = np.arange(200, 230, 2)
    others = np.delete(np.arange(ROWS), placeholder)
    assert score[others].tobytes() == expected[others].tobytes()
    assert (score[placeholder] <= expected[placeholder]).all()
    assert found["id"] == [f"p{row}" for row in range(ROWS)]
    assert found["source"] == [str(number) for number in range(BLOCKS) for _ in range(ROWS // BLOCKS)]
    assert summary.flagged == sum(flag is True for flag in found["is_mismatch"]) == int((score < 0.5).sum())
    assert (summary.pairs, summary.scored, summary.unreadable) == (ROWS, ROWS - 1, {found["status"][7]: 1})
    assert found["match_score"][7] is None
    assert len(mispair.keep(out)) == summary.scored - summary.flagged


def test_few_pairs_are_audited_as_by_the_local_engine(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "ALONE", ROWS)
    data, checked = write(tmp_path / "in", case), {f"p{row}": not case.mismatched[row] for row in range(0, 80, 2)}
    settings = replace(CPU, by="caption", checked=checked, partnered=(["p3"], ["p5"]))
    theirs, calls = audit_path(data, tmp_path / "local", settings), StandIn()
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(tmp_path / "in"), "/few/", recursive=True)
    stored = AuditInput(Path("memory://few/in"), cache=tmp_path / "cache")
    for given, out in ((stored, "stored"), (data, "ray")):
        ours = audit_path(given, tmp_path / out, settings, cluster=calls)
        assert metrics(ours) == metrics(theirs)
        assert not calls.calls
        for name in ("pairs.parquet", "pairs.csv", "suggestions.parquet"):
            assert (tmp_path / out / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    auditor = mispair.Auditor.load(tmp_path / "ray/auditor.safetensors", "cpu")
    assert auditor.recalibration is not None
    monkeypatch.setattr(ray_engine, "ALONE", ROWS - 1)
    assert audit_path(data, tmp_path / "many", settings, cluster=calls).pairs == ROWS
    assert calls.calls["score"] == BLOCKS


def test_few_pairs_of_which_a_block_cannot_be_read(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "ALONE", ROWS)
    data = write(tmp_path / "in", case)
    (tmp_path / "in/text_emb/text_emb_1.npy").write_bytes(b"nothing")
    assert audit_path(data, tmp_path / "out", CPU, cluster=StandIn()).pairs == ROWS


def test_what_is_learned_depends_on_no_block(
    done: tuple[AuditInput, Path, AuditSummary], case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = audit_path(write(tmp_path / "in", case, 2), tmp_path / "out", CPU, cluster=StandIn())
    assert metrics(other) == metrics(done[2])
    one, two = table(done[1]), table(tmp_path / "out")
    assert [one.pop("source") == two.pop("source"), one == two] == [False, True]
    readable = np.delete(np.arange(ROWS), 7)
    fitted = mispair.Auditor(device="cpu").fit(case.left[readable], case.right[readable])
    score = fitted.score(case.left, case.right)[:200]
    assert np.nanmax(np.abs(score - np.array(one["match_score"][:200], dtype=np.float32))) < 1e-6
    monkeypatch.setattr(ray_engine, "SAMPLE", 100)
    monkeypatch.setattr(ray_engine, "PART", 64)
    assert ray_engine._sample_rows(ROWS).tolist() == sample(np.arange(ROWS), 100).tolist()


def test_shared_items_of_all_blocks(
    done: tuple[AuditInput, Path, AuditSummary], case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "TOGETHER", 100)
    audit_path(done[0], tmp_path / "out", CPU, cluster=StandIn())
    expected = find_shared_items(from_memory(case.left, case.right), workers=1, device=torch.device("cpu"))
    for out in (done[1], tmp_path / "out"):  # searched at once and in parts
        found = table(out)
        assert found["left_item"] == expected.left.tolist()
        assert found["right_item"] == expected.right.tolist()
        shared = [row for row, words in enumerate(found["reasons"]) if words]
        assert shared == np.flatnonzero(expected.partners).tolist() == list(range(200, 230, 2))
        assert all(found["is_mismatch"][row] for row in shared)


def test_better_partners(done: tuple[AuditInput, Path, AuditSummary], case: Case) -> None:
    found, suggestions = table(done[1]), parquet.read_table(done[1] / "suggestions.parquet").to_pylist()
    holder = np.argsort(case.holder)  # the row that has the right item of each
    flagged = [row for row in np.flatnonzero(case.mismatched).tolist() if found["is_mismatch"][row]]
    right = sum(found["suggested_right"][row] == f"p{holder[row]}" for row in flagged)
    assert right > 0.5 * len(flagged)
    first = {(one["id"], one["replaced"]): one["suggested_id"] for one in suggestions if one["rank"] == 1}
    for row in range(ROWS):
        assert found["suggested_right"][row] == first.get((f"p{row}", "right"))
        assert found["suggested_left"][row] == first.get((f"p{row}", "left"))


def test_an_audit_that_is_killed_at_every_stage_goes_on(
    done: tuple[AuditInput, Path, AuditSummary], tmp_path: Path
) -> None:
    calls: Counter[str] = Counter()
    for stage in ("draw", "score", "near_in", "share", "lowest", "finish", "report_rows"):

        def killed(name: str, number: int, stage: str = stage) -> None:
            if name == stage and number in (-1, 1):
                raise KeyboardInterrupt

        ray = StandIn(killed, calls)
        with pytest.raises(KeyboardInterrupt):
            audit_path(done[0], tmp_path / "out", CPU, cluster=ray)
        assert json.loads((tmp_path / "out/audit.json").read_text())["finished"] is False
        calls[stage] -= 1
    audit_path(done[0], tmp_path / "out", CPU, cluster=StandIn(calls=calls))
    assert calls["score"] == BLOCKS
    assert table(tmp_path / "out") == table(done[1])
    again = StandIn()
    assert audit_path(done[0], tmp_path / "out", CPU, cluster=again).pairs == ROWS
    assert not again.calls
    assert not list((tmp_path / "out/unfinished").rglob("*.*"))


def test_a_block_that_cannot_be_read_is_rows_with_a_status(case: Case, tmp_path: Path) -> None:
    data = write(tmp_path / "in", case)
    (tmp_path / "in/text_emb/text_emb_1.npy").write_bytes(b"nothing")
    (tmp_path / "in/img_emb/img_emb_3.npy").write_bytes(b"nothing")
    summary = audit_path(data, tmp_path / "out", CPU, cluster=StandIn())
    size = ROWS // BLOCKS
    assert (summary.pairs, summary.scored) == (4 * size + 1, 3 * size - 1)
    found = table(tmp_path / "out")
    bad = [row for row, name in enumerate(found["source"]) if name in "13"]
    assert len(bad) == size + 1
    assert all(found["status"][row] != "ok" and found["match_score"][row] is None for row in bad)
    assert str(tmp_path / "in") in found["status"][bad[0]]


def test_rows_of_arrays_and_datacomp(
    done: tuple[AuditInput, Path, AuditSummary], case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "ROWS", 150)
    np.save(tmp_path / "left.npy", case.left)
    np.save(tmp_path / "right.npy", case.right)
    data = AuditInput(left=(tmp_path / "left.npy",), right=(tmp_path / "right.npy",))
    audit_path(data, tmp_path / "arrays", CPU, cluster=StandIn())
    found = table(tmp_path / "arrays")
    assert found["match_score"] == table(done[1])["match_score"]
    assert found["id"] == [str(row) for row in range(ROWS)]
    assert list(dict.fromkeys(found["source"])) == ["0", "150", "300"]
    (tmp_path / "dc/metadata").mkdir(parents=True)
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 2)):
        sides = {"l14_img": case.left[rows, :32], "l14_txt": case.right[rows]}
        np.savez(tmp_path / f"dc/metadata/{number}.npz", **sides)  # type: ignore[arg-type]
        uids = pyarrow.table({"uid": [f"{row:032x}" for row in rows], "text": ["a"] * len(rows)})
        parquet.write_table(uids, tmp_path / f"dc/metadata/{number}.parquet")
    audit_path(AuditInput(tmp_path / "dc"), tmp_path / "uids", CPU, cluster=StandIn())
    assert table(tmp_path / "uids")["id"] == [f"{row:032x}" for row in range(ROWS)]
    assert mispair.Auditor.load(tmp_path / "uids/auditor.safetensors", "cpu").joint_


def test_the_best_are_kept(done: tuple[AuditInput, Path, AuditSummary], tmp_path: Path) -> None:
    summary = audit_path(done[0], tmp_path / "out", replace(CPU, keep_best=0.6), cluster=StandIn())
    assert summary.flagged / summary.scored == pytest.approx(0.4, abs=0.02)
    score = np.sort(np.array([one for one in table(done[1])["match_score"] if one is not None], dtype=np.float32))
    assert summary.flag_below == pytest.approx(float(score[int(0.4 * len(score))]), rel=0.01)
    assert (np.diff(ray_workers.STEPS) > 0).all()


def test_another_audit_is_replaced_only_if_asked(
    done: tuple[AuditInput, Path, AuditSummary], case: Case, tmp_path: Path
) -> None:
    out = shutil.copytree(done[1], tmp_path / "out")
    with refused(ChangedError, str(out)):
        audit_path(done[0], out, replace(CPU, flag_below=0.4), cluster=StandIn())
    checked = {f"p{row}": not case.mismatched[row] for row in range(0, 80, 2)}
    other = replace(CPU, flag_below=0.4, checked=checked)  # workers know the auditor before
    assert audit_path(done[0], out, other, overwrite=True, cluster=StandIn()).flag_below == 0.4
    auditor = mispair.Auditor.load(out / "auditor.safetensors", "cpu")
    assert table(out)["match_score"][81:200] == auditor.score(case.left, case.right)[81:200].tolist()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a.txt").write_text("1")
    with refused(ExistsError, str(tmp_path / "full")):
        audit_path(done[0], tmp_path / "full", CPU, cluster=StandIn())


def test_everything_that_the_local_engine_writes(case: Case, tmp_path: Path) -> None:
    """The same files as by the local engine; what both compute of the pairs alone is equal."""
    data = write(tmp_path / "in", case)
    for row in range(ROWS):
        (tmp_path / f"in/{row}.jpg").write_bytes(_IMAGE)
    checked = {f"p{row}": row not in np.flatnonzero(case.mismatched) for row in range(0, 80, 2)}
    settings = replace(CPU, by="caption", checked=checked, partnered=(["p3"], ["p5"]))
    found = {}
    for name, cluster in (("ray", StandIn()), ("local", None)):
        copies = {"clean": tmp_path / name / "clean", "mended": tmp_path / name / "mended"}
        out = tmp_path / name / "out"
        found[name] = audit_path(
            data, out, settings, tools=["argilla"], cluster=cluster, clean=copies["clean"], mended=copies["mended"]
        )
        kept = sum(flag is False for flag in table(out)["is_mismatch"])
        assert len(AuditInput(copies["clean"]).open("cpu")) == kept
        assert len(AuditInput(copies["mended"]).open("cpu")) >= kept
        assert len(json.loads((out / "argilla.json").read_text())) == ROWS
    ours, theirs = (table(tmp_path / name / "out") for name in ("ray", "local"))
    assert set(ours) == {*theirs, "left_item", "right_item"} - {"siblings", "exchanged"}
    for name in ("id", "image", "caption", "status", "reasons", "source"):
        assert ours[name] == theirs[name]
    assert np.mean([one == other for one, other in zip(ours["reason"], theirs["reason"], strict=True)]) > 0.8
    assert {name: ours["match_score"][int(name[1:])] for name in checked} == checked
    assert "a person found it wrong" in ours["reason"]
    one, other = found["ray"], found["local"]
    assert [(part.value, part.pairs) for part in one.parts] == [(part.value, part.pairs) for part in other.parts]
    assert [cut.flag_below for cut in one.cuts] == [cut.flag_below for cut in other.cuts]
    assert {d.kind for d in one.detections} == {d.kind for d in other.detections} != set()
    assert (one.reasons, one.unreadable) == (other.reasons, other.unreadable)
    assert one.noise_rate == pytest.approx(other.noise_rate, abs=0.05)
    files = [{path.name for path in (tmp_path / name / "out").iterdir()} for name in ("ray", "local")]
    assert files[0] == files[1] | {"auditor.safetensors"}
    pages = [(tmp_path / name / "out/report.html").read_text() for name in ("ray", "local")]
    assert pages[0].count("</section>") == pages[1].count("</section>")
    assert pages[0].count("data:image/jpeg") > 20
    for heading in ("Worst pairs", "Near-duplicates", "Unreadable"):
        assert (heading in pages[0]) == (heading in pages[1])
    undecided = [2 if score is None or f"p{row}" in checked else score for row, score in enumerate(ours["match_score"])]
    assert f"p{np.argmin(undecided)}" in pages[0]
    lines = (tmp_path / "ray/out/pairs.csv").read_text().splitlines()
    assert len(lines) == ROWS + 1
    check_unchanged(tmp_path / "ray/out", AUDIT, READ_BACK)
    assert read_input(tmp_path / "ray/out").source == (tmp_path / "in").resolve()
    with refused(NotFoundError, "checked"):
        audit_path(data, tmp_path / "no", replace(CPU, checked={"nobody": True}), cluster=StandIn())
    with refused(InvalidValueError, where="by", names="nothing"):
        audit_path(data, tmp_path / "no", replace(CPU, by="nothing"), cluster=StandIn())
    assert not (tmp_path / "no").exists()


def test_several_views(case: Case, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    views = case.left, (case.left @ rng.standard_normal((40, 24))).astype(np.float32)
    paths = [tmp_path / f"left{number}.npy" for number in range(2)]
    for path, view in zip(paths, views, strict=True):
        np.save(path, view)
    np.save(tmp_path / "right.npy", case.right)
    data = AuditInput(left=tuple(paths), right=(tmp_path / "right.npy",))
    audit_path(data, tmp_path / "out", CPU, cluster=StandIn())
    auditor = mispair.Auditor.load(tmp_path / "out/auditor.safetensors", "cpu")
    expected = auditor.score(list(views), case.right)
    found = np.array(table(tmp_path / "out")["match_score"], dtype=np.float32)
    assert np.mean(found == expected) > 0.9
    readable = np.delete(np.arange(ROWS), 7)
    fitted = mispair.Auditor(device="cpu").fit([view[readable] for view in views], case.right[readable])
    assert np.nanmax(np.abs(fitted.score(list(views), case.right) - expected)) < 1e-6


def test_what_workers_do_not_do_is_refused(
    done: tuple[AuditInput, Path, AuditSummary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused(ConflictError, "memory://nothing"):
        audit_path(AuditInput(Path("memory://nothing")), tmp_path / "out", CPU, cluster=StandIn())
    assert not (tmp_path / "out").exists()
    assert main(["audit", str(done[0].source), "--address", "auto", "--out", str(tmp_path / "out")]) == 2
    assert "--engine" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(MissingPackageError, names="[ray]"), connect():
        pass


def test_ray_is_started_where_no_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Any] = {"shutdown": 0}

    def init(**options: Any) -> None:
        calls["init"] = options
        signal.signal(signal.SIGTERM, lambda *_: None)
        if options["address"] == "nowhere":
            raise ConnectionError("Could not find it.\nAt all.")

    fake: Any = ModuleType("ray")
    fake.init, fake.shutdown = init, lambda: calls.update(shutdown=calls["shutdown"] + 1)
    fake.is_initialized = lambda: calls.get("user", False)
    context = SimpleNamespace(get_current=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.data", SimpleNamespace(DataContext=context))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with connect():
        assert calls["init"]["address"] == "local"
        assert signal.getsignal(signal.SIGTERM) is before
    assert calls["shutdown"] == 1
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    with connect():
        assert calls["init"]["address"] == "there:6379"
    with connect("here:6379"):
        assert calls["init"]["address"] == "here:6379"
    with pytest.raises(ConfigError, match="nowhere"), connect("nowhere"):
        pass
    calls.update(user=True, shutdown=0)
    with connect():
        pass
    assert not calls["shutdown"]  # it is not ours
