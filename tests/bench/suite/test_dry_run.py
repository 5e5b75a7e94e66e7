"""A dry run: the first steps of every kind of training, and the cost of the whole suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mispair.bench.suite import dry_run
from mispair.bench.suite.dry_run import PhaseTime, TrainingCost, group, measure, typical
from mispair.bench.suite.suite import Cell
from mispair.cli.main import main
from mispair.config import Config
from mispair.methods.base import StepPlan
from mispair.pairs.shapes import dataset
from mispair.training.run_folder import Run
from mispair.training.settings import override
from mispair.training.trainer import Trainer

SMALL = Config(
    model="vse", device="cpu", embed_size=8, word_size=8, batch_size=16, warmup_epochs=1, epochs=4,
    noise_ratio=0.4, own={"bank_size": 32, "neighbours": 4},
)  # fmt: skip


def cell(**settings: object) -> Cell:
    return Cell(str(settings), "x", override(SMALL, settings))


def test_trainings_that_take_as_long_are_of_one_kind() -> None:
    same = [cell(seed=1), cell(tau=0.3), cell(eta=0.1), cell(noise_ratio=0.2), cell(lr=1e-3)]
    others = [cell(method="repair"), cell(bank_size=64), cell(batch_size=32)]
    assert [len(alike) for alike in group([*same, *others])] == [5, 1, 1, 1]


def test_the_typical_training_stands_for_the_mean_of_its_kind() -> None:
    assert typical([cell(noise_ratio=ratio) for ratio in (0.2, 0.6, 0.4)]).config.noise_ratio == 0.4
    assert typical([cell(noise_ratio=0.6)]).config.noise_ratio == 0.6


def test_a_dry_run_needs_only_the_noise_files_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_run, "STEPS", 1)
    suite = tmp_path / "s.toml"
    suite.write_text(
        'title = "T"\ndata = "nowhere"\n[[part]]\nname = "a"\nkind = "retrieval"\nnoise_ratio = [0.2, 0.4, 0.6]\n'
        "[part.rows]\n"
        'plain = { recipe = "shapes/plain", embed_size = 8, word_size = 8, batch_size = 16 }\n'
    )
    command = ["bench", "run", str(suite), "--dry-run", "--images", "20", "--device", "cpu"]
    command += ["--noise-file", str(tmp_path / "noise_{ratio}.npy")]
    assert main(command) == 2
    assert "noise_0.4.npy" in capsys.readouterr().err
    np.save(tmp_path / "noise_0.4.npy", np.random.default_rng(0).permutation(np.repeat(np.arange(20), 5)))
    assert main(command) == 0
    output = capsys.readouterr().out
    assert output.startswith("  3 x plain-")
    assert "noise-40" in output


def test_a_dry_run_is_of_the_size_of_the_data_where_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_run, "STEPS", 1)
    data = dataset.make(tmp_path / "shapes", train=12, dev=4, test=4)
    suite = tmp_path / "s.toml"
    suite.write_text(
        'title = "T"\ndata = "nowhere"\n[[part]]\nname = "a"\nkind = "retrieval"\n[part.rows]\n'
        'plain = { recipe = "shapes/plain", embed_size = 8, word_size = 8, batch_size = 16 }\n'
    )
    command = ["bench", "run", str(suite), "--dry-run", "--device", "cpu"]
    assert main([*command, "--data", str(tmp_path / "elsewhere")]) == 2
    assert "elsewhere: no such folder" in capsys.readouterr().err
    assert main([*command, "--data", str(data)]) == 0
    assert "1 trainings, 1 kinds, 12 training images" in capsys.readouterr().out


def test_time_of_a_whole_training() -> None:
    phases = [PhaseTime("warm-up", 1, 0.0, 0.5, 10), PhaseTime("main", 4, 2.0, 0.25, 8)]
    assert TrainingCost(cell(), 3, phases, 0.1, None).seconds == pytest.approx(5 + 4 * (2 + 2) + 5 * 0.1)


def test_every_phase_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "STEPS", 2)
    started: list[str] = []
    plain, repair = measure([cell(), cell(method="repair"), cell(method="repair", seed=1)], 20, started.append)
    assert [kind.trainings for kind in (plain, repair)] == [1, 2]
    assert len(started) == 2
    assert [phase.name for phase in repair.phases] == ["warm-up", "main", "main, with noisy pairs"]
    assert [phase.epochs for phase in repair.phases] == [1, 2, 2]
    assert [phase.name for phase in plain.phases] == ["warm-up", "main"]  # it has no noisy part
    assert [phase.epochs for phase in plain.phases] == [1, 4]
    assert [phase.steps for phase in plain.phases] == [7, 7]  # 100 pairs
    assert repair.phases[0].steps == 14  # of two networks
    assert repair.phases[1].steps == pytest.approx(2 * 60 / 16, abs=3)  # 60 of the pairs are matched
    assert all(phase.step > 0 for kind in (plain, repair) for phase in kind.phases)
    assert repair.memory is None


@pytest.mark.parametrize("settings", [{"method": "mend", "epochs": 5}, {"audit": True}])
def test_two_towers_are_tried_with_vectors(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "STEPS", 1)
    (kind,) = measure([cell(model="two-tower", **settings)], 40, lambda _: None)
    assert kind.error is None
    assert all(phase.step > 0 for phase in kind.phases)


def test_the_timed_steps_have_only_shapes_that_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "STEPS", 3)
    made: list[tuple[int, ...]] = []
    steps = Trainer.steps

    def spied(trainer: Trainer, **part: int) -> Iterator[StepPlan]:
        for plan in steps(trainer, **part):
            made.append(tuple(plan.pairs))
            yield plan

    monkeypatch.setattr(Trainer, "steps", spied)
    list(measure([cell(epochs=1, warmup_epochs=0)], 20, lambda _: None))
    assert len(made) == 3 * (dry_run.WARMUP_ROUNDS + dry_run.TIMED_ROUNDS)
    assert made[:3] * 4 == made
    assert len(set(made)) == 3


def test_a_kind_that_runs_out_of_memory_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Path] = []
    close = Run.close

    def spied(run: Run) -> None:
        closed.append(run.path)
        close(run)

    def full(*_: object, **__: object) -> Iterator[StepPlan]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Run, "close", spied)
    monkeypatch.setattr(Trainer, "steps", full)
    (failed,) = measure([cell()], 20, lambda _: None)
    assert failed.error == "full"
    assert len(closed) == 1


@pytest.mark.slow
def test_a_kind_that_does_not_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_run, "STEPS", 1)
    suite = tmp_path / "s.toml"
    small = "embed_size = 8, word_size = 8, batch_size = 16"
    suite.write_text(
        'title = "T"\ndata = "nowhere"\n[[part]]\nname = "a"\nkind = "retrieval"\nnoise_ratio = [0.4]\n[part.rows]\n'
        f'plain = {{ recipe = "shapes/plain", {small} }}\n'
        f'scan = {{ recipe = "shapes/mscn", model = "two-tower", {small} }}\n'
    )
    command = ["bench", "run", str(suite), "--dry-run", "--images", "20", "--device", "cpu"]
    assert main(command) == 1
    output = capsys.readouterr().out
    assert "2 trainings, 2 kinds" in output
    assert main([*command, "--json"]) == 1
    errors = [kind["error"] for kind in json.loads(capsys.readouterr().out)]
    assert errors[0] is None
    assert errors[1]
    assert not (Path("results") / "s").exists()
