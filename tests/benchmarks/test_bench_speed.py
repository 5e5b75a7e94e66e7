"""The benchmarks measure the right things; no test depends on how long these take."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

import bench_epoch
import bench_speed
import synthetic
from common import run
from mispair.config import Config
from mispair.errors import ConflictError, InvalidValueError, NotFoundError
from mispair.functional.rank_correlation import ranks
from mispair.pairs.pairs import Tokens
from mispair.training.settings import override
from reference_loops import count_ranks
from refusals import refused


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 8, "REGIONS": 3, "WORDS": 60, "NOISE": 5, "CHUNK": 4}.items():
        monkeypatch.setattr(synthetic, name, value)
    monkeypatch.setattr(bench_speed, "SECONDS", 0.0)


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    lines = [f"the {'big ' * (number % 4)}dog number {number % 7}" for number in range(23)]
    path = tmp_path / "caps.txt.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    return path


def test_counted_ranks_are_ranks() -> None:
    values = torch.tensor([0.3, 0.1, 0.3, 0.9, -2.0])
    assert count_ranks(values).tolist() == ranks(values[None])[0].tolist()


@pytest.mark.parametrize("model", ["sgr", "vse"])
def test_both_ways_compute_the_same(model: str) -> None:
    sizes = {"batch_size": 6, "embed_size": 16, "sim_size": 8, "word_size": 6, "dropout": 0.0, "augment": False}
    config = override(Config(), {"model": model, **sizes})
    comparison = bench_speed.SpeedComparison(config, synthetic.synthetic_pairs(4), torch.device("cpu"))
    batch = comparison.batch(pad_shapes=False)
    torch.testing.assert_close(comparison.similarity(batch), comparison.loop_similarity(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["sgr", "vse"])
def test_flops_are_those_of_the_papers_equations(model: str) -> None:
    """The matrix products counted by hand; the counter also sees small ones, and a few words of padding."""
    B, D, H, s, steps = 24, 64, 20, 16, 3
    sizes = {"batch_size": B, "embed_size": D, "word_size": H, "sim_size": s, "graph_steps": steps, "augment": False}
    pairs = synthetic.synthetic_pairs(60)
    config = override(Config(), {"model": model, **sizes})
    comparison = bench_speed.SpeedComparison(config, pairs, torch.device("cpu"))
    assert isinstance(pairs.right, Tokens)
    regions, width, words = 3 * B, 8, B * float(pairs.right.lengths.mean())
    gru = 2 * words * 3 * D * (H + D)
    if model == "vse":
        expected = 2 * (regions * (width * (D + D // 2) + D * D // 2) + gru)
    else:
        nodes = B * (B + words)
        attention = 2 * B * words * 3 * D + nodes * D * s
        graph = 2 * (steps - 1) * nodes * s * s + 2 * B * B * s * s
        expected = 2 * (regions * width * D + gru + attention + graph + (regions + words) * D * D)
    counted = comparison.flops(train=False)
    assert expected < counted < 1.35 * expected
    assert 2 * counted < comparison.flops(train=True) < 3 * counted


def test_numbers_out_of_range_are_refused() -> None:
    with refused(InvalidValueError, "batch_size", "1"):
        bench_speed.main(batch_size=1)
    with refused(InvalidValueError, "bank_size", "-3"):
        bench_speed.main(bank_size=(-3,))
    with refused(ConflictError, "batch_size", "4 images"):
        bench_speed.main(images=4, batch_size=64)
    with refused(InvalidValueError, "images", "0"):
        bench_epoch.main(images=0)
    with refused(NotFoundError, "typo.npy"):
        bench_epoch.main(noise_file=Path("typo.npy"))


def test_bench_speed(capsys: pytest.CaptureFixture[str], captions: Path) -> None:
    arguments = ["--batch-size", "4", "--embed-size", "8", "--images", "3", "--bank-size", "16", "--device", "cpu"]
    assert run(bench_speed.main, [*arguments, "--captions", str(captions), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    whats = ["training step", "forward", "evaluation", "labels, bank of 16", "push, bank of 16"]
    assert [row["what"] for row in output["rows"]] == 2 * whats
    for row in output["rows"]:
        assert row["ratio"] == pytest.approx(row["loop_ms"] / row["ours_ms"])


@pytest.mark.slow
def test_bench_speed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch-size", "4", "--embed-size", "8", "--images", "3", "--bank-size", "16", "--device", "cpu"]
    assert run(bench_speed.main, [*arguments, "--model", "vse"]) == 0
    assert "vse training step" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_epoch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'data = "x"\nmethod = "repair"\nmodel = "vse"\nembed_size = 16\nword_size = 8\nbatch_size = 16\n'
        "bank_size = 32\nwarmup_epochs = 5\nepochs = 40\nneighbours = 4\n"
    )
    command = ["--recipe", str(recipe), "--images", "20", "--device", "cpu", "--bank-size", "8", "16"]
    assert run(bench_epoch.main, [*command, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [phase["epochs"] for phase in output["phases"]] == [5, 20, 20]
    assert output["phases"][0]["steps"] == 14  # two networks, 100 pairs
    assert output["schedule_seconds"] == pytest.approx(
        sum(phase["first"] + (phase["epochs"] - 1) * phase["seconds"] for phase in output["phases"])
    )
    assert output["report"]["bank_pairs"] == [16, 16]  # trained with the largest
    banks = [(cost["name"], cost["bank_size"]) for cost in output["banks"]]
    kinds = ("RC + drop", "RC + NPR")
    assert banks == [("hard + drop", 0), *((name, size) for size in (8, 16) for name in kinds)]
    no_bank, eight, _, sixteen, _ = (cost["bank_bytes"] for cost in output["banks"])
    assert no_bank == 0
    assert sixteen == 2 * eight > 0
    assert run(bench_epoch.main, command) == 0
    assert "Cost of the bank" in capsys.readouterr().out


def test_bench_epoch_of_a_student(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'data = "x"\nmethod = "mend"\nmodel = "vse"\nembed_size = 8\nword_size = 4\nbatch_size = 16\n'
        "warmup_epochs = 0\nepochs = 10\nflagged_size = 4\n"
    )
    assert run(bench_epoch.main, ["--recipe", str(recipe), "--images", "8", "--device", "cpu", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [(phase["name"], phase["epochs"]) for phase in output["phases"]] == [("main", 5), ("student", 5)]
    assert [phase["steps"] for phase in output["phases"]] == [4, 2]  # 24 matched pairs; two teachers, one student
    assert output["report"]["clean_precision"] == [1.0]  # trusted by the truth
    assert output["banks"] == []


def test_the_schedule_is_that_of_the_recipe() -> None:
    phases = [
        bench_epoch.EpochTime("a", 2.0, 2.0, 0.0, 1, 5),
        bench_epoch.EpochTime("b", 5.0, 3.0, 0.5, 1, 40),
        bench_epoch.EpochTime("c", 9, 9, 1, 1, 0),
    ]
    assert bench_epoch.Schedule("x", 10, phases, [], None, None).seconds == 10 + 5 + 39 * 3
