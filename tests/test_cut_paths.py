"""What an audit flags, by any cut, is what every later step takes for flagged."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mispair
from audit_cases import make_case, write_clip
from audited import columns_after
from mispair.auditing import folder as audit_folder
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.cli.main import main
from mispair.compute.threads import one_thread_each
from mispair.errors import MispairError
from mispair.methods import METHODS
from mispair.pairs.audited import AuditColumns
from mispair.pairs.layouts.copies import MANIFEST
from mispair.pairs.pairs import Pairs, Vectors, subset, unflagged
from mispair.reviewing.decisions import FILE, Decision, Decisions, Verdict
from mispair.reviewing.reviewed import export
from mispair.robust.robust import Robust
from mispair.training import fit as fit_module
from mispair.training import from_files as from_files_module
from mispair.training.from_files import train_from_files
from mispair.training.run_folder import AUDITED
from mispair.training.trainer import Trainer
from tiny import tiny_pairs
from training import trained
from two_networks import training

ROWS = 90
CASE = make_case(ROWS, 0.3)
CUTS: dict[str, dict[str, float]] = {"flag_below": {"flag_below": 0.93}, "keep_best": {"keep_best": 0.5}}
SPLITS = ("train", "dev", "test")


class TrainedError(Exception):
    """Stands for a training."""


@dataclass(frozen=True)
class Audited:
    """An audit on disk that the command line has written with a cut."""

    data: Path
    out: Path
    cut: dict[str, float]
    flagged: npt.NDArray[np.bool_]
    match_score: npt.NDArray[Any]

    @property
    def pairs(self) -> Pairs:
        names = [f"p{row}" for row in range(ROWS)]
        return Pairs(Vectors(CASE.left), Vectors(CASE.right), np.arange(ROWS), left_ids=names, name="pairs")

    @property
    def settings(self) -> Settings:
        return replace(Settings(device="cpu"), **self.cut)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"id": [f"p{row}" for row in range(ROWS)]}
    return write_clip(tmp_path_factory.mktemp("data") / "clip", CASE.left, CASE.right, names)


@pytest.fixture(scope="module", params=CUTS)
def audited(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    cut, out = CUTS[request.param], tmp_path_factory.mktemp("out") / request.param
    flags = [text for name, value in cut.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["audit", str(folder), "--out", str(out), "--device", "cpu", *flags]) == 0
    table = AuditColumns.read(out)
    assert (table.flagged != (table.match_score < 0.5)).any()  # else a lost cut would not be noticed
    return Audited(folder, out, cut, table.flagged, table.match_score)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread_each():
        yield


# ---------------------------------------------------------------------- audits


def test_python_flags_what_the_command_flags(audited: Audited) -> None:
    found = mispair.audit(CASE.left, CASE.right, device="cpu", **audited.cut)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.is_mismatch, audited.flagged)
    np.testing.assert_array_equal(found.columns.flagged, audited.flagged)


def test_a_resumed_audit_keeps_its_cut(audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    data = AuditInput(audited.data)
    monkeypatch.setattr(audit_folder, "render", stop)
    with pytest.raises(KeyboardInterrupt):
        audit_path(data, tmp_path / "out", audited.settings)
    monkeypatch.undo()
    with pytest.raises(MispairError):
        audit_path(data, tmp_path / "out", Settings(device="cpu"))
    audit_path(data, tmp_path / "out", audited.settings)
    np.testing.assert_array_equal(AuditColumns.read(tmp_path / "out").flagged, audited.flagged)


# ---------------------------------------------------------------------- pairs in memory


def test_pairs_carry_the_cut(audited: Audited) -> None:
    pairs = mispair.audit(CASE.left, CASE.right, device="cpu", **audited.cut).attach_to(audited.pairs)  # type: ignore[arg-type]
    assert pairs.flagged is not None
    np.testing.assert_array_equal(pairs.flagged, audited.flagged)
    rows = np.arange(10, 60)
    np.testing.assert_array_equal(subset(pairs, rows).flagged, audited.flagged[rows])
    assert len(unflagged(pairs)) == (~audited.flagged).sum()
    assert pairs.with_link(pairs.link[::-1]).flagged is None  # they are other pairs


@pytest.mark.parametrize("method", ["weights", "mend", "repair"])
def test_robust_takes_the_cut(audited: Audited, method: Any) -> None:
    found = mispair.audit(CASE.left, CASE.right, device="cpu", **audited.cut)  # type: ignore[arg-type]
    kept = np.flatnonzero(~audited.flagged)
    for source in (found, found.table, audited.out, audited.out / "pairs.csv", found.attach_to(audited.pairs)):
        robust = Robust(source, method)
        np.testing.assert_array_equal(robust.trained, kept)
        np.testing.assert_array_equal(robust.weights > 0, ~audited.flagged)


# ---------------------------------------------------------------------- trainings


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"oracle", "mscn"}))  # which know true pairs instead
def test_every_method_warms_up_without_what_any_cut_flags(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = tiny_pairs(12)
    pairs = replace(pairs, truth=pairs.link).with_audit(rng.random(60), rng.random(60) < 0.4)
    assert pairs.flagged is not None
    config = training(name, batch_size=12)
    seen = set()
    for number, (_, plan) in enumerate(trained(config, pairs, tmp_path / "run", None)):
        if number < 2:  # of the warm-up, or of the first epoch of a method without one
            seen.update(plan.pairs.tolist())
    assert seen
    assert not pairs.flagged[list(seen)].any()


def test_another_cut_is_another_run(tmp_path: Path) -> None:
    pairs = tiny_pairs(12)
    score = np.random.default_rng(0).random(60)
    settings: dict[str, Any] = {"model": "vse", "method": "plain", "epochs": 1, "device": "cpu", "embed_size": 8}
    mispair.fit(pairs.with_audit(score, score < 0.7), out=tmp_path / "run", **settings)
    with pytest.raises(MispairError):
        mispair.fit(pairs.with_audit(score, score < 0.5), out=tmp_path / "run", **settings)


def test_a_run_reads_the_cut_that_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Noting(Trainer):
        def __init__(self, _config: Any, train: Pairs, dev: Pairs | None, *_: Any) -> None:
            seen.append((train.flagged, None if dev is None else dev.flagged))
            raise TrainedError

    monkeypatch.setattr(fit_module, "Trainer", Noting)
    pairs, dev, flagged = tiny_pairs(12), tiny_pairs(6, seed=1), np.arange(60) % 3 == 0
    (tmp_path / "run").mkdir()
    for name, count in zip(AUDITED, (60, 30), strict=False):
        AuditColumns.of_scores(np.full(count, 0.7, np.float32), flagged[:count]).save(tmp_path / "run" / name)
    for _ in range(2):
        with pytest.raises(TrainedError):
            mispair.fit(pairs, dev=dev, out=tmp_path / "run", model="vse", audit=True, device="cpu", method="plain")
    for train, validation in seen:
        np.testing.assert_array_equal(train, flagged)
        np.testing.assert_array_equal(validation, flagged[:30])


# ---------------------------------------------------------------------- reviews


def decide(audited: Audited) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Somebody keeps a flagged pair and drops one that is not; what is flagged then."""
    flagged = audited.flagged.copy()
    kept, dropped = int(np.flatnonzero(flagged)[0]), int(np.flatnonzero(~flagged)[0])
    (audited.out / FILE).unlink(missing_ok=True)
    decisions = Decisions(audited.out / FILE)
    decisions.add([Decision(f"p{kept}", Verdict.KEEP), Decision(f"p{dropped}", Verdict.DROP)])
    decisions.close()
    flagged[kept], flagged[dropped] = False, True
    return flagged, [f"p{row}" for row in np.flatnonzero(~flagged)]


def test_a_review_adds_decisions_to_the_cut(audited: Audited, tmp_path: Path) -> None:
    flagged, kept = decide(audited)
    found = columns_after(audited.out)
    np.testing.assert_array_equal(found.flagged, flagged)
    same = flagged == audited.flagged
    np.testing.assert_array_equal(found.match_score[same], audited.match_score[same])
    export(audited.out, tmp_path / "clean")
    with (tmp_path / "clean" / MANIFEST).open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file) if row["action"] == "kept"] == kept


def test_a_training_from_a_review_keeps_the_cut(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise TrainedError

    monkeypatch.setattr(from_files_module, "train_and_test", stop)
    flagged, _ = decide(audited)
    for _ in range(2):  # the second one goes on
        with pytest.raises(TrainedError):
            train_from_files(audited.out, mispair.Config(device="cpu"), tmp_path / "run", given={"device"})
    parts = [AuditColumns.read(tmp_path / "run" / name) for name in AUDITED]
    np.testing.assert_array_equal(np.concatenate([part.flagged for part in parts]), flagged)
    splits = [mispair.load(tmp_path / "run/features", split) for split in SPLITS]
    assert [len(part) for part in parts] == [len(split) for split in splits]


def test_decisions_on_an_earlier_audit_overrule_the_cut(audited: Audited, tmp_path: Path) -> None:
    flagged, _ = decide(audited)
    changed = np.flatnonzero(flagged != audited.flagged)
    flags = [text for name, value in audited.cut.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = ["audit", str(audited.data), "--out", str(tmp_path / "again"), "--device", "cpu", *flags]
    assert main([*command, "--decisions", str(audited.out)]) == 0
    again = AuditColumns.read(tmp_path / "again")
    np.testing.assert_array_equal(again.flagged[changed], flagged[changed])
    answers = {f"p{row}": not flagged[row] for row in changed.tolist()}
    ids = [f"p{row}" for row in range(ROWS)]
    found = mispair.audit(CASE.left, CASE.right, ids, checked=answers, device="cpu", **audited.cut)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.is_mismatch, again.flagged)
    np.testing.assert_array_equal(Robust(found).trained, np.flatnonzero(~again.flagged))
