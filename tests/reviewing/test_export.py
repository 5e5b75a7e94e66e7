"""A data set after a review: each decision does what it says, and the copy is read as the data was."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import mispair
from audited import columns_after, write_audit_of
from layouts import LAYOUTS, triples
from mispair.auditing.folder import read_input
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import TABLE
from mispair.cli.main import main
from mispair.errors import ChangedError, ConflictError, DataError, ExistsError, NotFoundError
from mispair.pairs.layouts.copies import MANIFEST
from mispair.pairs.pairs import Regions, Tokens
from mispair.reviewing.audited_data import AuditedData
from mispair.reviewing.compare import check_decided, compare
from mispair.reviewing.decisions import FILE, Decision, Decisions, Verdict, read_answers, read_current, read_partnered
from mispair.reviewing.review import Review
from mispair.reviewing.reviewed import Reviewed, export
from refusals import refused

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
    ids = [f"{row}.png#0" for row in range(COUNT)]
    found = AuditInput(data / "photos.csv", images=data / "photos")
    return write_audit_of(tmp_path / "audit", found, ids, range(4), right={0: ids[5]}, left={1: ids[6]})


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "photos.csv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter=";"))


def manifest(folder: Path) -> dict[str, tuple[str, str]]:
    with (folder / "manifest.csv").open(newline="") as file:
        return {row["id"]: (row["action"], row["by"]) for row in csv.DictReader(file)}


def test_without_decisions_the_audit_decides(audited: Path, tmp_path: Path) -> None:
    done = export(audited, tmp_path / "clean")
    assert done == {"kept": 8, "dropped": 4}
    assert [row["photo"] for row in rows(tmp_path / "clean")] == [f"{number}.png" for number in range(4, COUNT)]
    done = export(audited, tmp_path / "mended", mend=True)
    assert done == {"kept": 8, "dropped": 2, "re-paired": 2}
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
    assert export(audited, tmp_path / "all", policy="decided") == {"kept": COUNT}


def test_of_equal_ids_the_first_is_meant(tmp_path: Path) -> None:
    for side in ("left", "right"):
        np.save(tmp_path / f"{side}.npy", np.eye(4, dtype=np.float32))
    (tmp_path / "ids.csv").write_text("id\na\nb\na\nc\n")
    data = AuditInput(left=(tmp_path / "left.npy",), right=(tmp_path / "right.npy",), ids=tmp_path / "ids.csv")
    audit = write_audit_of(tmp_path / "audit", data, ["a", "b", "a", "c"], [])
    decisions = Decisions(audit / FILE)
    decisions.add([Decision("a", Verdict.DROP), Decision("c", Verdict.REPAIR, "right", "a")])
    decisions.close()
    export(audit, tmp_path / "mended", policy="decided")
    np.testing.assert_array_equal(np.load(tmp_path / "mended" / "right.npy"), np.eye(4)[[1, 2, 0]])
    assert columns_after(audit).match_score.tolist() == [0, pytest.approx(0.9), pytest.approx(0.9), 1]


def test_a_folder_that_cannot_be_written_is_read(
    audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = Decisions(audited / FILE)  # not closed: they are in a second file still
    decisions.add([Decision("0.png#0", Verdict.KEEP), Decision("8.png#0", Verdict.DROP)])
    before = {file.name: file.read_bytes() for file in audited.iterdir()}
    assert f"{FILE}-wal" in before
    monkeypatch.setattr("os.access", lambda *_: False)
    assert export(audited, tmp_path / "mended") == {"kept": 8, "dropped": 4}
    assert read_answers(audited) == {"0.png#0": True, "8.png#0": False}
    assert compare(audited, audited).answers == 2
    assert main(["review", str(audited), "--export-decisions", str(tmp_path / "d.csv")]) == 0
    assert len((tmp_path / "d.csv").read_text().splitlines()) == 3
    assert {file.name: file.read_bytes() for file in audited.iterdir()} == before
    decisions.close()


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
    assert done == {"kept": 8, "re-paired": 1, "rewritten": 1, "dropped": 2}
    found = {row["photo"]: row for row in rows(tmp_path / "mended")}
    assert "3.png" not in found  # unsure: the audit decides
    assert "8.png" not in found
    assert found["0.png"]["caption"] == "caption 0; of a dog"
    assert found["1.png"]["caption"] == "caption 9; of a dog"
    assert found["2.png"]["caption"] == '=new "caption"; here'
    assert found["1.png"]["shop"] == "shop 1"
    decisions = Decisions(audited / FILE)
    decisions.add([Decision(ids[9], Verdict.REPAIR, "left", ids[1], reviewer="ana")])  # the caption that pair 1 got
    decisions.close()
    assert export(audited, tmp_path / "once", mend=True) == {**done, "kept": 7, "repeated": 1}
    assert [row["photo"] for row in rows(tmp_path / "once")].count("1.png") == 1
    assert manifest(tmp_path / "once")[ids[9]] == ("repeated", "ana")
    told = manifest(tmp_path / "mended")
    assert [told[name] for name in ids[:4]] == [
        ("kept", "ana"), ("re-paired", "ana"), ("rewritten", "ana"), ("dropped", "audit"),
    ]  # fmt: skip
    assert told[ids[8]] == ("dropped", "a person")
    again = AuditInput(tmp_path / "mended" / "photos.csv", images=read_input(audited).images).open("cpu")
    assert again.texts()[:2] == ["caption 0; of a dog", "caption 9; of a dog"]


def test_it_replaces_only_its_own_copies(audited: Path, tmp_path: Path) -> None:
    export(audited, tmp_path / "out")
    with pytest.raises(DataError, match="not empty"):
        export(audited, tmp_path / "out", policy="decided")
    export(audited, tmp_path / "out", mend=True, overwrite=True)
    (tmp_path / "out/photos.csv").write_text("lost")
    export(audited, tmp_path / "out", mend=True, overwrite=True)
    assert len(rows(tmp_path / "out")) == 10
    (tmp_path / "out" / "letter.txt").write_text("mine")
    with refused(ExistsError, tmp_path / "out", "letter.txt"):
        export(audited, tmp_path / "out", overwrite=True)
    with refused(ConflictError, tmp_path / "data"):
        export(audited, tmp_path / "data", overwrite=True)


def test_the_same_export_is_not_written_twice(audited: Path, tmp_path: Path) -> None:
    first = export(audited, tmp_path / "out")
    written = (tmp_path / "out" / MANIFEST).stat()
    assert export(audited, tmp_path / "out") == first
    assert (tmp_path / "out" / MANIFEST).stat().st_ino == written.st_ino
    decisions = Decisions(audited / FILE)
    decisions.add([Decision("p5", Verdict.DROP)])
    decisions.close()
    with pytest.raises(DataError, match="not empty"):
        export(audited, tmp_path / "out")


def test_data_that_has_changed_is_refused(audited: Path, tmp_path: Path) -> None:
    path = tmp_path / "data" / "photos.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="not the one that was audited"):
        export(audited, tmp_path / "out")
    path.unlink()
    with pytest.raises(
        DataError, match="which was audited, is not there any more; move it back, or audit it where it is"
    ):
        export(audited, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_images_that_have_moved_or_are_gone(audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, command = tmp_path / "data/photos", ["export", str(audited), "--to", str(tmp_path / "out")]
    photos.rename(tmp_path / "moved")
    assert main(command) == 2
    assert f"{photos}: " in capsys.readouterr().err
    assert main([*command, "--images", str(tmp_path / "moved")]) == 0
    assert len(rows(tmp_path / "out")) == 8
    (tmp_path / "moved").rename(photos)
    (photos / "7.png").unlink()
    assert main([*command, "--overwrite"]) == 2
    assert "1 of 12 images that were audited are not there any more, such as 7.png" in capsys.readouterr().err
    with pytest.raises(DataError, match="1 of 12 images"):
        Reviewed.read(audited).open("cpu")
    assert len(rows(tmp_path / "out")) == 8


def test_an_audit_that_was_moved_with_its_data(audited: Path, tmp_path: Path) -> None:
    before = tmp_path / "project"
    before.mkdir()
    for name in ("audit", "data"):
        (tmp_path / name).rename(before / name)
    mark = json.loads((before / "audit/audit.json").read_text())
    assert mark["place"] == str(audited)
    assert read_input(before / "audit").source == before / "data/photos.csv"
    export(before / "audit", tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 8
    review = Review(before / "audit")
    assert (review.images_gone, review.image(3)) == (None, (before / "data/photos/3.png").read_bytes())
    assert review.data.takes_captions
    (before / "data").rename(tmp_path / "elsewhere")
    assert Review(before / "audit").images_gone == tmp_path / "data/photos"
    assert read_input(before / "audit").source == tmp_path / "data/photos.csv"


def test_decisions_answer_whether_pairs_match(audited: Path) -> None:
    with refused(NotFoundError, audited, FILE):
        read_answers(audited)
    decisions = Decisions(audited / FILE)
    decisions.add(
        [Decision("a", Verdict.KEEP), Decision("b", Verdict.REPAIR, "left", "c"), Decision("c", Verdict.UNSURE)]
    )
    decisions.add([Decision("d", Verdict.REWRITE, caption="x"), Decision("e", Verdict.DROP)])
    decisions.close()
    assert read_answers(audited) == {"a": True, "b": False, "d": False, "e": False}
    assert read_partnered(audited) == (["c", "d"], ["b"])
    changes = compare(audited, audited)
    assert (changes.answers, changes.gone, changes.flagged, changes.cleared, changes.moved) == (0, 4, 0, 0, 0.0)


def test_decisions_on_other_pairs_are_refused_before_any_work(
    audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decisions = Decisions(audited / FILE)
    decisions.add([Decision("8.png#0", Verdict.DROP), Decision("9.png#0", Verdict.REPAIR, "left", "10.png#0")])
    decisions.close()
    data = AuditInput(tmp_path / "data/photos.csv", images=tmp_path / "data/photos")
    assert not check_decided(audited, data, "")
    content = data.source.read_text() if data.source else ""
    path = tmp_path / "data/photos.csv"
    path.write_text(content.replace("caption 3;", "another;"))  # nobody has decided on it
    assert not check_decided(audited, data, "")
    command = ["audit", str(path), "--images", str(data.images)]
    ways = ["--decisions", str(audited), "--out", str(tmp_path / "again")], ["--out", str(audited), "--overwrite"]
    for old, new, name in (
        ("caption 8;", "another;", "'8.png#0' was 'caption 8; of a dog'"),
        ("\n10.png", '\n10.png;"first";shop\n10.png', "'10.png#0' was 'caption 10; of a dog'"),
        ("\n", "\nnew-", "photos.csv"),
    ):
        path.write_text(content.replace(old, new))
        for row in range(COUNT):
            Image.new("RGB", (8, 8)).save(tmp_path / f"data/photos/new-{row}.png")
        with refused(ChangedError, audited, name):
            check_decided(audited, data, "")
        for way in ways:
            assert main([*command, *way]) == 2
            assert name in capsys.readouterr().err
        assert not (tmp_path / "again").exists()
        assert (audited / TABLE).exists()


def test_decisions_on_pairs_that_are_gone_do_not_count(
    audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decisions = Decisions(audited / FILE)
    decisions.add([Decision("8.png#0", Verdict.DROP), Decision("9.png#0", Verdict.REPAIR, "left", "10.png#0")])
    decisions.close()
    path = tmp_path / "data/photos.csv"
    data = AuditInput(path, images=path.parent / "photos")
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("8.png", "10.png"))]
    path.write_text("\n".join([lines[0], "0.png;a new one;shop", *lines[1:]]) + "\n")
    assert check_decided(audited, data, "") == {"8.png#0", "10.png#0"}
    found = data.open("cpu")
    assert found is not None
    again = write_audit_of(tmp_path / "again", data, found.ids(), [2])
    changes = compare(audited, again)
    assert (changes.answers, changes.gone, changes.flagged, changes.cleared) == (1, 1, 0, 3)
    assert "1 decisions (1 more are on pairs that are gone)" in changes.sentence()
    (again / FILE).write_bytes((audited / FILE).read_bytes())
    assert main(["export", str(again), "--to", str(tmp_path / "out")]) == 2
    assert "decide on it again in the review" in capsys.readouterr().err


def test_the_commands(audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(audited), "--to", str(tmp_path / "out")]) == 0
    assert "4 dropped, 8 kept" in capsys.readouterr().out
    assert main(["export", str(audited), "--to", str(tmp_path / "mended"), "--mend"]) == 0
    told = capsys.readouterr().out
    assert ("re-paired" in told) != ("that --mend needs; decide with: mispair review" in told)
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "other")]) == 2
    assert "no finished audit in here" in capsys.readouterr().err
    (tmp_path / "d.csv").write_text("id,verdict\n0.png#0,keep\n")
    both = ["--import-decisions", str(tmp_path / "d.csv"), "--export-decisions", str(tmp_path / "e.csv")]
    assert main(["review", str(audited), *both]) == 0
    assert "0.png#0,keep" in (tmp_path / "e.csv").read_text()
    assert main(["review", str(audited), "--port", "0"]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_out_as_decided(layout: str, tmp_path: Path) -> None:
    path = LAYOUTS[layout](tmp_path / "data")
    photos = path.parent / "photos"
    data = AuditInput(path, images=photos if path.is_file() and photos.is_dir() else None)
    pairs = data.open("cpu")
    before, ids = triples(pairs), pairs.ids()
    audit = write_audit_of(tmp_path / "audit", data, ids, [0, 5])
    decisions = Decisions(audit / FILE)
    decisions.add([Decision(ids[1], Verdict.REPAIR, "right", ids[4]), Decision(ids[2], Verdict.REPAIR, "left", ids[5])])
    decisions.add([Decision(ids[3], Verdict.REWRITE, caption="a new one"), Decision(ids[5], Verdict.KEEP)])
    decisions.close()
    assert export(audit, tmp_path / "out") == {"dropped": 1, "re-paired": 2, "rewritten": 1, "kept": 2}
    assert AuditedData(audit).takes_captions
    place = tmp_path / "out" if path.is_dir() else tmp_path / "out" / path.name
    again = AuditInput(place, images=data.images).open("cpu")
    wanted = [(1, before[4][1]), (5, before[2][1]), (3, "a new one"), (4, before[4][1]), (5, before[5][1])]
    assert sorted(triples(again)) == sorted((before[row][0], text) for row, text in wanted)


def write_vectors(layout: str, folder: Path, vectors: Sequence[npt.NDArray[np.float32]]) -> AuditInput:
    folder.mkdir()
    places = [folder / f"{side}.npy" for side in ("left", "right")]
    if layout == "embeddings":
        places = [folder / name / f"{name}_0.npy" for name in ("img_emb", "text_emb")]
    if layout == "DataComp":
        (folder / "metadata").mkdir()
        names = {"uid": [f"{row:032x}" for row in range(COUNT)], "text": [f"caption {row}" for row in range(COUNT)]}
        pyarrow.parquet.write_table(pyarrow.table(names), folder / "metadata/a.parquet")
        np.savez(folder / "metadata/a.npz", b32_img=vectors[0], b32_txt=vectors[1])
        return AuditInput(folder)
    for place, values in zip(places, vectors, strict=True):
        place.parent.mkdir(exist_ok=True)
        np.save(place, values)
    return AuditInput(folder) if layout == "embeddings" else AuditInput(left=(places[0],), right=(places[1],))


@pytest.mark.parametrize("layout", ["arrays", "embeddings", "DataComp"])
def test_every_layout_of_vectors_comes_out_as_decided(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    vectors = (rng.standard_normal((COUNT, 3)).astype(np.float32), rng.standard_normal((COUNT, 2)).astype(np.float32))
    data = write_vectors(layout, tmp_path / "data", vectors)
    ids = data.open("cpu").ids(range(COUNT))
    audit = write_audit_of(tmp_path / "audit", data, ids, [0, 5])
    decisions = Decisions(audit / FILE)
    decisions.add([Decision(ids[1], Verdict.REPAIR, "right", ids[4]), Decision(ids[2], Verdict.REPAIR, "left", ids[5])])
    decisions.close()
    assert export(audit, tmp_path / "out") == {"dropped": 2, "re-paired": 2, "kept": COUNT - 4}
    if layout == "arrays":
        again = AuditInput(left=(tmp_path / "out/left.npy",), right=(tmp_path / "out/right.npy",)).open("cpu")
    else:
        again = AuditInput(tmp_path / "out").open("cpu")
    left, right = [1, 5, 3, 4, *range(6, COUNT)], [4, 2, 3, 4, *range(6, COUNT)]
    for found, values, rows in zip(again.block(0, len(again)), vectors, (left, right), strict=True):
        np.testing.assert_array_equal(found, values[rows])
    decisions = Decisions(audit / FILE)
    decisions.add([Decision(ids[3], Verdict.REWRITE, caption="a new one")])
    decisions.close()
    with pytest.raises(ConflictError):
        export(audit, tmp_path / "other")
    assert not AuditedData(audit).takes_captions
    assert not (tmp_path / "other").exists()
    (tmp_path / "d.csv").write_text(f"id,verdict,caption\n{ids[4]},rewrite,a new one\n")
    assert main(["review", str(audit), "--import-decisions", str(tmp_path / "d.csv")]) == 2
    assert "but the data set has vectors instead of captions" in capsys.readouterr().err
    assert ids[4] not in read_current(audit / FILE)


def test_features_of_regions_come_out_as_decided(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    features = np.arange(6, dtype=np.float32)[:, None, None] + np.zeros((6, 2, 3), np.float32)
    np.save(tmp_path / "data/train_ims.npy", features)
    (tmp_path / "data/train_caps.txt").write_text("".join(f"caption {row}\n" for row in range(12)))
    data = AuditInput(tmp_path / "data", split="train")
    ids = data.open("cpu").ids(range(12))
    audit = write_audit_of(tmp_path / "audit", data, ids, [0])
    decisions = Decisions(audit / FILE)
    decisions.add([Decision(ids[2], Verdict.REPAIR, "right", ids[9]), Decision(ids[4], Verdict.REPAIR, "left", ids[6])])
    decisions.add([Decision(ids[11], Verdict.REWRITE, caption="a new one")])
    decisions.close()
    export(audit, tmp_path / "out")
    assert AuditedData(audit).takes_captions
    pairs = mispair.load(tmp_path / "out", "train")
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    found = zip(pairs.left.features[pairs.link][:, 0, 0].tolist(), pairs.right.texts, strict=True)
    wanted = [(row // 2, f"caption {row}") for row in (1, 3, 5, 6, 7, 8, 9, 10)]
    assert sorted(found) == sorted([*wanted, (1, "caption 9"), (3, "caption 4"), (5, "a new one")])
