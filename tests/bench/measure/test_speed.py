"""The benchmarks measure the right things; no test depends on how long these take."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import mispair
from mispair.bench.measure import epoch_time, step_speed
from mispair.bench.measure.reference_loops import count_ranks
from mispair.cli.main import main
from mispair.config import Config, override
from mispair.functional.rank_correlation import ranks
from mispair.pairs import synthetic
from mispair.pairs.pairs import Regions, Tokens
from mispair.pairs.vocabulary import END, START


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 8, "REGIONS": 3, "WORDS": 60, "NOISE": 5, "CHUNK": 4}.items():
        monkeypatch.setattr(synthetic, name, value)
    monkeypatch.setattr(step_speed, "SECONDS", 0.0)


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    lines = [f"the {'big ' * (number % 4)}dog number {number % 7}" for number in range(23)]
    path = tmp_path / "caps.txt.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    return path


@pytest.mark.parametrize("real", [True, False])
def test_synthetic_pairs_have_five_captions_an_image(real: bool, captions: Path) -> None:
    pairs = synthetic.synthetic_pairs(captions if real else None, 9)
    texts = pairs.right
    assert isinstance(texts, Tokens)
    assert len(pairs.left) == 9
    assert Counter(pairs.link.tolist()) == dict.fromkeys(range(9), 5)
    for row in range(45):
        ids = texts.ids[texts.offsets[row] : texts.offsets[row + 1]].tolist()
        assert ids[0] == START
        assert ids[-1] == END
        assert not {START, END} & set(ids[1:-1])
        assert max(ids) < len(texts.vocabulary)
    assert isinstance(pairs.left, Regions)
    assert pairs.left.features.dtype == np.float16


def test_captions_of_a_file_come_in_order_and_again(captions: Path) -> None:
    texts = synthetic.read_captions(captions, 50, seed=0)
    assert texts.lengths[:5].tolist() == [6, 7, 8, 9, 6]  # the, dog, number and a digit, start and end
    assert texts.lengths[23:28].tolist() == texts.lengths[:5].tolist()
    assert synthetic.read_captions(captions, 10, seed=1).lengths.tolist() == texts.lengths[10:20].tolist()


def test_regions_carry_the_words_of_their_captions() -> None:
    pairs = synthetic.synthetic_pairs(None, 30)
    codes = np.random.default_rng(0).standard_normal((60, 8), dtype=np.float32)
    texts = pairs.right
    assert isinstance(texts, Tokens)
    assert isinstance(pairs.left, Regions)
    own = [set(texts.ids[texts.offsets[5 * i] : texts.offsets[5 * i + 5]].tolist()) for i in range(30)]
    noise = np.random.default_rng([0, 1]).standard_normal((5, 8), dtype=np.float32)
    for image in range(30):
        for region in pairs.left.features[image].astype(np.float32):
            apart = np.abs(region - codes[:, None] - noise).max(axis=2).min(axis=1)
            assert int(apart.argmin()) in own[image]
            assert apart.min() < 0.01


@pytest.mark.slow
def test_a_network_learns_from_synthetic_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "REGIONS", 12)
    monkeypatch.setattr(synthetic, "WIDTH", 32)
    train = synthetic.synthetic_pairs(None, 50)
    matcher = mispair.fit(
        train, warmup_epochs=5, epochs=5, model="vse", embed_size=32, word_size=16, batch_size=32, lr=3e-3,
        negatives_end=8, device="cpu", augment=False,
    )  # fmt: skip
    assert matcher.evaluate(train).averaged.rsum > 150  # chance: 2 * (2 + 10 + 20)


def test_counted_ranks_are_ranks() -> None:
    values = torch.tensor([0.3, 0.1, 0.3, 0.9, -2.0])
    assert count_ranks(values).tolist() == ranks(values[None])[0].tolist()


@pytest.mark.parametrize("model", ["sgr", "vse"])
def test_both_ways_compute_the_same(model: str) -> None:
    sizes = {"batch_size": 6, "embed_size": 16, "sim_size": 8, "word_size": 6, "dropout": 0.0, "augment": False}
    config = override(Config(), {"model": model, **sizes})
    comparison = step_speed.SpeedComparison(config, synthetic.synthetic_pairs(None, 4), torch.device("cpu"))
    batch = comparison.batch(pad_shapes=False)
    torch.testing.assert_close(comparison.similarity(batch), comparison.loop_similarity(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["sgr", "vse"])
def test_flops_are_those_of_the_papers_equations(model: str) -> None:
    """The matrix products counted by hand; the counter also sees small ones, and a few words of padding."""
    B, D, H, s, steps = 24, 64, 20, 16, 3
    sizes = {"batch_size": B, "embed_size": D, "word_size": H, "sim_size": s, "graph_steps": steps, "augment": False}
    pairs = synthetic.synthetic_pairs(None, 60)
    config = override(Config(), {"model": model, **sizes})
    comparison = step_speed.SpeedComparison(config, pairs, torch.device("cpu"))
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--batch-size", "1"], "--batch-size is 1; expected at least 2"),
        (["speed", "--bank-size", "-3"], "--bank-size is -3"),
        (["speed", "--images", "4", "--batch-size", "64"], "4 images have only 20 captions"),
        (["epoch", "--images", "0"], "--images is 0"),
        (["epoch", "--noise-file", "typo.npy"], "There is no typo.npy"),
        (["audit", "shapes", "--pairs", "-4"], "--pairs is -4"),
        (["audit", "shapes", "--noise-ratio"], "--noise-ratio needs noise ratios"),
        (["audit", "shapes", "--noise-ratio", "1.5"], "--noise-ratio needs noise ratios"),
        (["scale", "--pairs", "-5"], "--pairs is -5"),
        (["scale", "--noise-ratio", "3"], "--noise-ratio needs noise ratios"),
    ],
)
def test_mistakes_become_sentences(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_bench_speed(capsys: pytest.CaptureFixture[str], captions: Path) -> None:
    arguments = ["--batch-size", "4", "--embed-size", "8", "--images", "3", "--bank-size", "16", "--device", "cpu"]
    assert main(["bench", "speed", *arguments, "--captions", str(captions), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    whats = ["training step", "forward", "evaluation", "labels, bank of 16", "push, bank of 16"]
    assert [row["what"] for row in output["rows"]] == 2 * whats
    for row in output["rows"]:
        assert row["ratio"] == pytest.approx(row["loop_ms"] / row["ours_ms"])


@pytest.mark.slow
def test_bench_speed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch-size", "4", "--embed-size", "8", "--images", "3", "--bank-size", "16", "--device", "cpu"]
    assert main(["bench", "speed", *arguments, "--model", "vse"]) == 0
    assert "vse training step" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_epoch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'data = "x"\nmethod = "repair"\nmodel = "vse"\nembed_size = 16\nword_size = 8\nbatch_size = 16\n'
        "bank_size = 32\nwarmup_epochs = 5\nepochs = 40\nneighbours = 4\n"
    )
    command = ["bench", "epoch", "--recipe", str(recipe), "--images", "20", "--device", "cpu", "--bank-size", "8", "16"]
    assert main([*command, "--json"]) == 0
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
    assert main(command) == 0
    assert "Cost of the bank" in capsys.readouterr().out


def test_bench_epoch_of_a_student(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'data = "x"\nmethod = "mend"\nmodel = "vse"\nembed_size = 8\nword_size = 4\nbatch_size = 16\n'
        "warmup_epochs = 0\nepochs = 10\nflagged_size = 4\n"
    )
    assert main(["bench", "epoch", "--recipe", str(recipe), "--images", "8", "--device", "cpu", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [(phase["name"], phase["epochs"]) for phase in output["phases"]] == [("main", 5), ("student", 5)]
    assert [phase["steps"] for phase in output["phases"]] == [4, 2]  # 24 matched pairs; two teachers, one student
    assert output["report"]["clean_precision"] == [1.0]  # trusted by the truth
    assert output["banks"] == []


def test_the_schedule_is_that_of_the_recipe() -> None:
    phases = [
        epoch_time.EpochTime("a", 2.0, 2.0, 0.0, 1, 5),
        epoch_time.EpochTime("b", 5.0, 3.0, 0.5, 1, 40),
        epoch_time.EpochTime("c", 9, 9, 1, 1, 0),
    ]
    assert epoch_time.Schedule("x", 10, phases, [], None, None).seconds == 10 + 5 + 39 * 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("caps.txt", None), ("caps.txt", b""), ("caps.txt", b"\xff\xfe\x00bad"), ("caps.txt.gz", b"no archive"),
        ("caps.txt.gz", gzip.compress(b"a dog\n" * 99, mtime=0)[:-12]),
        ("caps.txt.gz", gzip.compress(b"a dog\n", mtime=0)[:10] + b"\xff" * 20),
    ],
)  # fmt: skip
def test_captions_that_cannot_be_read_get_a_sentence(
    name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["bench", "speed", "--captions", str(path), "--device", "cpu"]) == 2
    assert "caps.txt" in capsys.readouterr().err
