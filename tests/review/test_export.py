"""A data set after a review: each decision does what it says, and the copy is read as the data was."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from mispair.auditing.folder import read_input
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT, TABLE
from mispair.cli.main import main
from mispair.errors import DataError
from mispair.review.compare import compare
from mispair.review.decisions import FILE, Decision, Decisions, Verdict, read_answers
from mispair.review.export import export
from mispair.support.files import Json
from mispair.support.owned_folder import OwnedFolder

COUNT = 12


@pytest.fixture
def audited(tmp_path: Path) -> Path:
    """An audit of photos.csv, of which pairs 0 to 3 are flagged; 0 and 1 have a sure better caption and image."""
    data = tmp_path / "data"
    (data / "photos").mkdir(parents=True)
    with (data / "photos.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["photo", "caption", "shop"])
        for row in range(COUNT):
            Image.new("RGB", (8, 8), (row, 0, 0)).save(data / "photos" / f"{row}.png")
            writer.writerow([f"{row}.png", f"caption {row}; of a dog", f"shop {row % 2}"])
    out = tmp_path / "audit"
    pairs = AuditInput(data / "photos.csv", images=data / "photos").open_raw()
    assert pairs is not None
    ids = pairs.ids.to_pylist()
    flagged = np.arange(COUNT) < 4
    none = [None] * (COUNT - 1)
    table = {
        "id": ids,
        "status": ["ok"] * COUNT,
        "match_score": np.where(flagged, 0.1, 0.9).astype(np.float32),
        "is_mismatch": flagged,
        "suggested_right": [ids[5], *none],
        "suggested_right_score": pyarrow.array([0.95, *none], pyarrow.float32()),
        "suggested_left": [None, ids[6], *none[1:]],
        "suggested_left_score": pyarrow.array([None, 0.95, *none[1:]], pyarrow.float32()),
    }
    request: dict[str, Json] = {
        "the source": [str(data / "photos.csv"), "0"],
        "--images": str(data / "photos"),
        "the columns": [],
    }
    with OwnedFolder(out, AUDIT, request) as folder:
        folder.begin()
        pyarrow.parquet.write_table(pyarrow.table(table), out / TABLE)
        folder.finish()
    return out


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "photos.csv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter=";"))


def manifest(folder: Path) -> dict[str, tuple[str, str]]:
    with (folder / "manifest.csv").open(newline="") as file:
        return {row["id"]: (row["action"], row["by"]) for row in csv.DictReader(file)}


def test_without_decisions_the_audit_decides(audited: Path, tmp_path: Path) -> None:
    done = export(audited, tmp_path / "clean")
    assert done.counts == {"kept": 8, "dropped": 4}
    assert [row["photo"] for row in rows(tmp_path / "clean")] == [f"{number}.png" for number in range(4, COUNT)]
    done = export(audited, tmp_path / "mended", mend=True)
    assert done.counts == {"kept": 8, "dropped": 2, "re-paired": 2}
    found = rows(tmp_path / "mended")
    assert [(row["photo"], row["caption"]) for row in found[:2]] == [
        ("0.png", "caption 5; of a dog"),
        ("6.png", "caption 1; of a dog"),
    ]
    assert set(manifest(tmp_path / "mended").values()) == {
        ("kept", "audit"),
        ("dropped", "audit"),
        ("re-paired", "audit"),
    }
    assert export(audited, tmp_path / "all", policy="decided").counts == {"kept": COUNT}


def test_people_come_before_the_audit(audited: Path, tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(audited / TABLE)
    ids = table.column("id").to_pylist()
    decisions = Decisions(audited / FILE)
    decisions.add([Decision(ids[0], Verdict.KEEP, reviewer="ana")])
    decisions.add([Decision(ids[1], Verdict.REPAIR, "right", ids[9], reviewer="ana")])
    decisions.add([Decision(ids[2], Verdict.REWRITE, caption='=new "caption"; here', reviewer="ana")])
    decisions.add([Decision(ids[3], Verdict.UNSURE), Decision(ids[8], Verdict.DROP), Decision("gone", Verdict.DROP)])
    decisions.close()
    done = export(audited, tmp_path / "mended", mend=True)
    assert done.counts == {"kept": 8, "re-paired": 1, "rewritten": 1, "dropped": 2}
    found = {row["photo"]: row for row in rows(tmp_path / "mended")}
    assert "3.png" not in found  # unsure: the audit decides
    assert "8.png" not in found
    assert found["0.png"]["caption"] == "caption 0; of a dog"
    assert found["1.png"]["caption"] == "caption 9; of a dog"
    assert found["2.png"]["caption"] == '=new "caption"; here'
    assert found["1.png"]["shop"] == "shop 1"
    told = manifest(tmp_path / "mended")
    assert [told[name] for name in ids[:4]] == [
        ("kept", "ana"), ("re-paired", "ana"), ("rewritten", "ana"), ("dropped", "audit"),
    ]  # fmt: skip
    assert told[ids[8]] == ("dropped", "a person")
    again = AuditInput(tmp_path / "mended" / "photos.csv", images=read_input(audited).images).open_raw()
    assert again is not None
    assert again.captions.to_pylist()[:2] == ["caption 0; of a dog", "caption 9; of a dog"]


def test_it_replaces_only_its_own_copies(audited: Path, tmp_path: Path) -> None:
    export(audited, tmp_path / "out")
    with pytest.raises(DataError, match="not empty"):
        export(audited, tmp_path / "out")
    export(audited, tmp_path / "out", mend=True, overwrite=True)
    (tmp_path / "out" / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match=r"also holds letter\.txt"):
        export(audited, tmp_path / "out", overwrite=True)
    with pytest.raises(DataError, match="where the audited data is"):
        export(audited, tmp_path / "data", overwrite=True)


def test_data_that_has_changed_is_refused(audited: Path, tmp_path: Path) -> None:
    path = tmp_path / "data" / "photos.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="not the one that was audited"):
        export(audited, tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="no such file or folder"):
        export(audited, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_decisions_answer_whether_pairs_match(audited: Path) -> None:
    with pytest.raises(DataError, match="review this audit first"):
        read_answers(audited)
    decisions = Decisions(audited / FILE)
    decisions.add(
        [Decision("a", Verdict.KEEP), Decision("b", Verdict.REPAIR, "left", "c"), Decision("c", Verdict.UNSURE)]
    )
    decisions.add([Decision("d", Verdict.REWRITE, caption="x"), Decision("e", Verdict.DROP)])
    decisions.close()
    assert read_answers(audited) == {"a": True, "b": False, "d": False, "e": False}
    changes = compare(audited, audited)
    assert (changes.answers, changes.flagged, changes.cleared, changes.moved) == (4, 0, 0, 0.0)


def test_the_commands(audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(audited), "--to", str(tmp_path / "out")]) == 0
    assert "4 dropped, 8 kept" in capsys.readouterr().out
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "other")]) == 2
    assert "no finished audit in here" in capsys.readouterr().err
    (tmp_path / "d.csv").write_text("id,verdict\n0.png#0,keep\n")
    both = ["--import-decisions", str(tmp_path / "d.csv"), "--export-decisions", str(tmp_path / "e.csv")]
    assert main(["review", str(audited), *both]) == 0
    assert "0.png#0,keep" in (tmp_path / "e.csv").read_text()
    assert main(["review", str(audited), "--port", "0"]) == 2
    assert "--port is 0; expected 1 to 65535" in capsys.readouterr().err
