"""`mispair filter`: every cut, every output, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

import mispair
from audit_cases import make_case, write_clip
from mispair.calibrating.cuts import at_rate
from mispair.cli.main import main
from scored import N, made

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of two sources, of which one is noisier, and its calibration."""
    score, wrong, null = made()
    rng = np.random.default_rng(9)
    noisy = np.where(wrong, rng.random(N) < 0.8, rng.random(N) < 0.3)
    score[4] = np.nan
    ids, sources = [f"{7 * row:032x}" for row in range(N)], np.where(noisy, "web", "stock")
    pyarrow.parquet.write_table(
        pyarrow.table({"uid": ids, "source": sources, "clip": score}), tmp_path / "pairs.parquet"
    )
    np.save(tmp_path / "wrong.npy", wrong)
    monkeypatch.chdir(tmp_path)
    mispair.calibrate("pairs.parquet", "clip", shuffled=null).write("calibrated")
    return tmp_path


def run(*arguments: object) -> int:
    return main(["filter", *map(str, arguments)])


def test_a_copy_a_mask_and_uids_agree(work: Path) -> None:
    assert run("calibrated", "--purity", 0.95, "--to", "kept", "--mask", "mask.npy", "--uids", "uids.npy") == 0
    mask, wrong = np.load("mask.npy"), np.load("wrong.npy")
    assert mask.shape == (N,)
    assert not mask[4]
    assert (~wrong[mask]).mean() == pytest.approx(0.95, abs=0.02)
    source = pyarrow.parquet.read_table("pairs.parquet")
    assert pyarrow.parquet.read_table("kept/pairs.parquet").equals(source.filter(mask))
    uids = np.load("uids.npy")
    assert uids.dtype == np.dtype("u8,u8")
    assert [(int(high) << 64) + int(low) for high, low in uids] == sorted(
        7 * row for row in np.flatnonzero(mask).tolist()
    )
    assert not list(work.glob(".*"))  # nothing is left of the writing


@pytest.mark.parametrize("cut", [("--keep", 700), ("--probability", 0.9), ("--least", 2.0)])
def test_every_cut(work: Path, cut: tuple[str, float]) -> None:
    assert run("calibrated", *cut, "--mask", "mask.npy") == 0
    mask, table = np.load("mask.npy"), pyarrow.parquet.read_table(work / "calibrated/pairs.parquet")
    score, match = table["clip"].to_numpy(), table["match_score"].to_numpy()
    expected = {
        "--keep": score >= np.sort(score[~np.isnan(score)])[-700],
        "--probability": match >= np.float64(0.9),
        "--least": score >= 2,
    }[cut[0]]
    assert (mask == expected).all()


def test_each_source_at_its_own_noise_rate(work: Path, capsys: Capture) -> None:
    assert run("calibrated", "--purity", 0.95, "--by", "source", "--mask", "mask.npy", "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    mask, wrong = np.load("mask.npy"), np.load("wrong.npy")
    web = np.array(pyarrow.parquet.read_table("pairs.parquet")["source"].to_pylist()) == "web"
    assert counts["by"] == {"stock": int(mask[~web].sum()), "web": int(mask[web].sum())}
    for rows in (web, ~web):
        assert (~wrong[mask & rows]).mean() == pytest.approx(0.95, abs=0.03)
    table = pyarrow.parquet.read_table(work / "calibrated/pairs.parquet")
    match = np.nan_to_num(table["match_score"].to_numpy())
    rate = json.loads((work / "calibrated/summary.json").read_text())["evidence"][-1]["noise_rate"]
    for rows in (web, ~web):
        assert 1 - at_rate(match[rows], rate).mean() == pytest.approx(wrong[rows].mean(), abs=0.03)


def test_a_table_with_a_score_of_ones_own(work: Path) -> None:
    assert run("pairs.parquet", "--score", "clip", "--least", 1.5, "--to", "kept") == 0
    found = pyarrow.parquet.read_table("kept/pairs.parquet")["clip"].to_numpy()
    assert found.min() >= 1.5
    pyarrow.csv.write_csv(pyarrow.table({"clip": [0.1, 0.9, None], "text": ["a", "b;", "c"]}), work / "a.csv")
    assert run("a.csv", "--score", "clip", "--keep", 1, "--to", "csv", "--mask", "one.npy") == 0
    assert np.load("one.npy").tolist() == [False, True, False]
    assert pyarrow.csv.read_csv("csv/a.csv").to_pydict() == {"clip": [0.9], "text": ["b;"]}


def test_folders_of_hugging_face_and_datacomp(work: Path) -> None:
    source = pyarrow.parquet.read_table("pairs.parquet")
    (work / "hf/data").mkdir(parents=True)
    (work / "datacomp").mkdir()
    for number, part in enumerate((source[:1000], source[1000:])):
        pyarrow.parquet.write_table(part, work / f"hf/data/train-{number}.parquet")
        pyarrow.parquet.write_table(part, work / f"datacomp/{number}.parquet")
        vectors = np.ones((len(part), 3), np.float16)
        np.savez(work / f"datacomp/{number}.npz", l14_img=vectors, l14_txt=vectors)
    score = source["clip"].to_numpy()
    for name, files in (("hf", "data/train-*.parquet"), ("datacomp", "*.parquet")):
        assert run(name, "--score", "clip", "--least", 2, "--to", f"{name}-kept") == 0
        parts = [pyarrow.parquet.read_table(path) for path in sorted((work / f"{name}-kept").glob(files))]
        assert pyarrow.concat_tables(parts).equals(source.filter(score >= 2))
    assert len(np.load(work / "datacomp-kept/0.npz")["l14_img"]) == (score[:1000] >= 2).sum()
    assert len(np.load(work / "datacomp-kept/subset.npy")) == (score >= 2).sum()


def test_an_audit(work: Path) -> None:
    case = make_case(120, 0.3)
    write_clip(work / "clip", case.left, case.right, {"id": [f"p{row}" for row in range(120)]})
    assert main(["audit", "clip", "--out", "audit", "--device", "cpu"]) == 0
    assert run("audit", "--probability", 0.6, "--to", "kept", "--mask", "mask.npy") == 0
    match = pyarrow.parquet.read_table("audit/pairs.parquet")["match_score"].to_numpy()
    mask = np.load("mask.npy")
    assert (mask == (match >= 0.6)).all()
    assert len(np.load("kept/img_emb/img_emb_0.npy")) == mask.sum()


def test_equal_match_scores_of_an_audit(work: Path) -> None:
    case = make_case(300, 0.1)
    write_clip(work / "clip", case.left, case.right, {"id": [f"p{row}" for row in range(300)]})
    assert main(["audit", "clip", "--out", "audit", "--device", "cpu"]) == 0
    match = pyarrow.parquet.read_table("audit/pairs.parquet")["match_score"].to_numpy()
    assert len(np.unique(match)) < 200
    for keep in (1, 7, 100, 250):
        assert run("audit", "--keep", keep, "--mask", f"{keep}.npy") == 0
        kept = np.load(f"{keep}.npy")
        assert kept.sum() == keep
        assert match[kept].min() >= match[~kept].max()


@pytest.mark.parametrize(
    "arguments",
    [
        ("calibrated", "--purity", 0.9),  # no place
        ("calibrated", "--mask", "m.npy"),  # no cut
        ("calibrated", "--purity", 0.9, "--keep", 3, "--mask", "m.npy"),
        ("calibrated", "--score", "clip", "--least", 1, "--mask", "m.npy"),
        ("calibrated", "--purity", 0.9, "--by", "nothing", "--mask", "m.npy"),
        ("calibrated", "--least", 99, "--mask", "m.npy"),
        ("calibrated", "--purity", 0.9, "--mask", "wrong.npy"),  # taken
        ("pairs.parquet", "--least", 1, "--mask", "m.npy"),  # no column
        ("pairs.parquet", "--score", "clip", "--purity", 0.9, "--mask", "m.npy"),  # not calibrated
        ("pairs.parquet", "--score", "uid", "--least", 1, "--mask", "m.npy"),
        ("nowhere", "--least", 1, "--mask", "m.npy"),
        ("calibrated", "--purity", 0.9, "--to", "calibrated"),
    ],
)
def test_a_mistake_is_a_sentence_and_writes_nothing(work: Path, arguments: tuple[str, ...], capsys: Capture) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err.startswith("mispair: ")
    assert not (work / "m.npy").exists()


def test_data_that_changed_is_refused(work: Path, capsys: Capture) -> None:
    pyarrow.parquet.write_table(pyarrow.parquet.read_table("pairs.parquet")[:-1], work / "pairs.parquet")
    assert run("calibrated", "--keep", 10, "--mask", "m.npy") == 2
    assert "pairs.parquet" in capsys.readouterr().err
    pyarrow.csv.write_csv(pyarrow.table({"clip": [0.1, 0.9]}), work / "a.csv")
    assert run("a.csv", "--score", "clip", "--keep", 1, "--uids", "u.npy") == 2  # ids that are no uids
