"""`mispair calibrate`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from html_reader import Reader
from mispair.cli.main import main
from mispair.pairs.audited import AuditColumns
from scored import N, five_levels, joint_space

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cosine, left, right, wrong = joint_space()
    answers = ["" if row % 12 else "no" if wrong[row] else "yes" for row in range(N)]
    ids, texts = [f"{row:032x}" for row in range(N)], [f"=caption {row}" for row in range(N)]
    columns = {"uid": ids, "caption": texts, "clip": cosine, "vlm": five_levels(4 * cosine), "ok": answers}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    np.save(tmp_path / "left.npy", left)
    np.save(tmp_path / "right.npy", right)
    np.save(tmp_path / "wrong.npy", wrong)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calibrate(*arguments: object) -> int:
    return main(["calibrate", "pairs.parquet", *map(str, arguments)])


def test_a_folder_with_page_table_and_summary(files: Path, capsys: Capture) -> None:
    vectors = "--left", "left.npy", "--right", "right.npy"
    assert calibrate("--score", "clip", *vectors, "--purity", 0.95, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {**json.loads((files / "calibrated/summary.json").read_text()), "out": "calibrated"} == printed
    assert printed["cut"]["purity"] == pytest.approx(0.95, abs=0.01)
    assert [one["evidence"] for one in printed["evidence"]] == ["vectors"]
    columns = AuditColumns.read(files / "calibrated")  # as the table of an audit: training takes it, too
    clip = pyarrow.parquet.read_table("pairs.parquet")["clip"].to_numpy()
    kept = clip >= printed["cut"]["least"]
    assert kept.sum() == printed["cut"]["kept"]
    assert (columns.match_score[kept].min()) >= columns.match_score[~kept].max()
    wrong = np.load("wrong.npy")
    assert (~wrong[kept]).mean() == pytest.approx(0.95, abs=0.02)
    page = (files / "calibrated/report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "http:" not in page
    assert "https:" not in page
    assert calibrate("--score", "clip", *vectors) == 0  # again, with another cut
    assert calibrate("--score", "vlm", "--checked", "ok") == 2  # something else
    assert calibrate("--score", "vlm", "--checked", "ok", "--overwrite") == 0


@pytest.mark.usefixtures("files")
def test_rows_to_check_and_then_checked(capsys: Capture) -> None:
    assert calibrate("--score", "clip") == 2  # no evidence
    assert "--checked" in capsys.readouterr().err
    assert calibrate("--score", "clip", "--draw", "check.csv") == 0
    assert calibrate("--score", "clip", "--draw", "check.csv") == 2
    rows = pyarrow.csv.read_csv("check.csv").to_pydict()
    assert list(rows) == ["id", "right", "caption"]
    assert rows["caption"][0].startswith("'=")  # a spreadsheet does not compute it
    wrong = np.load("wrong.npy")
    answers = ["no" if wrong[int(name, 16)] else "yes" for name in rows["id"]]
    pyarrow.csv.write_csv(pyarrow.table({**rows, "right": answers}), "check.csv")
    assert calibrate("--score", "clip", "vlm", "--checked", "check.csv", "--keep", 1000, "--json") == 0
    found = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert found["cut"]["kept"] <= 1000
    (one,) = found["evidence"]
    assert one["noise_rate_low"] <= wrong.mean() <= one["noise_rate_high"]


def test_page_says_what_it_rests_on(files: Path) -> None:
    assert calibrate("--score", "vlm", "--checked", "ok", "--purity", 0.9) == 0
    page = Reader()
    page.feed((files / "calibrated/report.html").read_text(encoding="utf-8"))
    assert not page.open
    assert f"checked rows ({N // 12:,})" in page.words
    assert "vlm ≥" in page.words


def test_a_mistake_is_a_sentence(files: Path, capsys: Capture) -> None:
    assert calibrate("--score", "siglip", "--checked", "ok") == 2
    assert calibrate("--score", "clip", "--checked", "nothing.csv") == 2
    assert calibrate("--score", "clip", "--checked", "ok", "--purity", 2) == 2
    assert calibrate("--score", "clip", "--checked", "ok", "--purity", 0.9, "--keep", 5) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert not (files / "calibrated").exists()
