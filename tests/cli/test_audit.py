"""`mispair audit`, run as a user runs it."""

from __future__ import annotations

import csv
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from starlette.testclient import TestClient

from audit_cases import Case, contents, make_case, write_clip
from forked import fork_server
from mispair.auditing import audit as audit_module
from mispair.auditing.folder import read_checked
from mispair.auditing.scoring import scan
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.summary import AuditSummary
from mispair.cli.main import main
from mispair.encoders import encode
from mispair.errors import DataError
from mispair.pairs.source import Source
from mispair.reviewing.decisions import FILE, Decision, Decisions, Mode, Verdict
from mispair.reviewing.review import Review, decided_rate
from mispair.reviewing.server import make_app

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 100
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(ROWS, 0.3)


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = {"id": [f"p{row}" for row in range(ROWS)], "caption": [f"text {row}" for row in range(ROWS)]}
    return write_clip(tmp_path_factory.mktemp("in") / "clip", case.left, case.right, metadata)


@pytest.fixture(scope="module")
def arrays(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("arrays")
    np.save(place / "a.npy", case.left)
    np.save(place / "b.npy", case.right)
    lines = ["id;caption", *(f'n{row};"text; {row}"' for row in range(ROWS))]
    (place / "ids.csv").write_text("\n".join(lines))
    return place


def audit(*arguments: object) -> int:
    return main(["audit", *map(str, arguments), "--device", "cpu"])


def table(out: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = parquet.read_table(out / "pairs.parquet").to_pydict()
    return columns


def test_from_a_folder_to_a_folder_and_a_clean_copy(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    before = contents(folder)
    out, clean = tmp_path / "out", tmp_path / "clean"
    assert audit(folder, "--out", out, "--clean", clean) == 0
    printed = capsys.readouterr()
    assert "of 100 pairs are flagged as mismatched." in printed.out
    assert str(out / "report.html") in printed.out
    for note in json.loads((out / "summary.json").read_text())["notes"]:
        assert f"Note: {note}" in printed.out
    assert str(clean) in printed.out
    found = table(out)
    assert found["id"] == [f"p{row}" for row in range(ROWS)]
    with (out / "pairs.csv").open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == found["id"]
    kept = [row for row in range(ROWS) if not found["is_mismatch"][row]]
    assert 0 < len(kept) < ROWS
    assert parquet.read_table(clean / "metadata/metadata_0.parquet")["id"].to_pylist() == [f"p{row}" for row in kept]
    assert (np.load(clean / "img_emb/img_emb_0.npy") == np.load(folder / "img_emb/img_emb_0.npy")[kept]).all()
    assert "text " in (out / "report.html").read_text()
    assert audit(folder, "--out", tmp_path / "new", "--clean", clean) == 2
    assert "Give another --clean" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()  # refused before the work
    assert audit(folder, "--out", out, "--clean", clean, "--overwrite", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {"out": str(out), **json.loads((out / "summary.json").read_text())}
    assert (figures["pairs"], figures["flagged"]) == (ROWS, ROWS - len(kept))
    assert contents(folder) == before


def test_two_files_and_a_table(arrays: Path, tmp_path: Path) -> None:
    before = contents(arrays)
    options = ("--left", arrays / "a.npy", "--right", arrays / "b.npy")
    assert audit(*options, "--ids", arrays / "ids.csv", "--out", tmp_path / "out") == 0
    assert table(tmp_path / "out")["id"] == [f"n{row}" for row in range(ROWS)]
    assert "text; " in (tmp_path / "out/report.html").read_text()
    assert contents(arrays) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--left", "a.npy"], "both --left and --right"),
        (["--right", "b.npy"], "both --left and --right"),
        ([], "expected images and captions"),
        ([".", "--left", "a.npy"], "expected one of them"),
        ([".", "--ids", "ids.csv"], "expected one of them"),
        (["--left", "a.npy", "--right", "b.npy", "--joint"], "--joint: "),
        (["--left", "a.npy", "--right", "b.npy", "--split", "dev"], "--split: "),
        (["--left", "a.npy", "--right", "b.npy", "--workers", "0"], "--workers: 0"),
        (["--left", "a.npy", "--right", "b.npy", "--device", "gpu"], "--device: gpu"),
        (["--left", "a.npy", "--right", "few.npy"], "100 vectors on the left side and 40"),
        (["--left", "few.npy", "--right", "few.npy"], "40 pairs; expected at least 50"),
        (["--left", "a.npy", "--right", "same.npy"], "all right vectors are the same"),
        (["--left", "a.npy", "--right", "none.npy"], "no such file"),
        (["nowhere"], "nowhere: no such file or folder"),
        (["something"], "something: no data set, only thesis.doc"),
        (["a.npy"], "a.npy: the vectors of one side. Give those of both as --left and --right."),
        (["photos"], "no image has a text file of the same name; expected dog.txt, a caption a line, for dog.jpg."),
        (["photos"], "Or give a table of image paths and captions instead, and the folder as --images."),
        (["--left", "a.npy", "--right", "b.npy", "--checked", "unknown.csv"], "no pair has the id 'x'"),
        (["--left", "a.npy", "--right", "b.npy", "--checked", "columns.csv"], "expected the columns id and right"),
        (["--left", "a.npy", "--right", "b.npy", "--checked", "words.csv"], "'maybe' for '2'"),
        (["--left", "a.npy", "--right", "b.npy", "--checked", "none.csv"], "no such file"),
    ],
)
def test_mistakes_are_sentences_and_leave_nothing(
    options: Sequence[str], words: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, values in (("a", case.left), ("b", case.right), ("few", case.left[:40]), ("same", case.left * 0 + 1)):
        np.save(f"{name}.npy", values)
    Path("unknown.csv").write_text("id,right\nx,yes\n3,no\n")
    Path("columns.csv").write_text("id,left\n3,yes\n")
    Path("words.csv").write_text("id,right\n1,yes\n2,maybe\n")
    Path("something").mkdir()
    Path("something/thesis.doc").write_text("important")
    Path("photos").mkdir()
    Image.new("RGB", (4, 3)).save("photos/a.jpg")
    before = contents(tmp_path)
    assert main(["audit", *options, "--out", "out"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mispair: ")
    assert words in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("bad", "code"), [(1, 0), (2, 3)])
def test_too_many_bad_rows_end_with_3_after_the_work(
    case: Case, tmp_path: Path, capsys: Capture, bad: int, code: int
) -> None:
    right = case.right.copy()
    right[:bad] = 0
    np.save(tmp_path / "a.npy", case.left)
    np.save(tmp_path / "b.npy", right)
    out, clean = tmp_path / "out", tmp_path / "clean"
    sides = ("--left", tmp_path / "a.npy", "--right", tmp_path / "b.npy")
    assert audit(*sides, "--out", out, "--clean", clean) == code
    printed = capsys.readouterr()
    assert f"{bad} could not be read: the right vector is zero." in printed.out
    explained = "2 of 100 pairs could not be read, which is more than 1 %, so the exit code is 3; "
    assert (f"{explained}{out / 'pairs.csv'} and report.html say which ones, and why." in printed.err) == (code == 3)
    found = table(out)
    assert found["id"] == [str(row) for row in range(ROWS)]
    assert found["is_mismatch"][: bad + 1].count(None) == bad
    assert "could not be read" in (out / "report.html").read_text()
    assert len(np.load(clean / "left.npy")) == found["is_mismatch"].count(False)


def test_checked_pairs(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('ID;Note;Right\n"a;b";"x";Yes\nc;;no\nd;;1\ne;;0\nf;;right\ng;;wrong\nh;;True\ni;; FALSE \n')
    expected = {"a;b": True, "c": False, "d": True, "e": False, "f": True, "g": False, "h": True, "i": False}
    assert read_checked(path) == expected
    path.write_text("id,is_mismatch\na,true\nb,false\nc,1\nd,no\ne,wrong\nf,right\n")
    assert read_checked(path) == {"a": False, "b": True, "c": False, "d": True, "e": False, "f": True}
    parquet.write_table(arrow.table({"id": [1, 2], "right": [True, False]}), tmp_path / "t.parquet")
    assert read_checked(tmp_path / "t.parquet") == {"1": True, "2": False}
    path.write_text("id,right\na,\nb,yes\n")
    assert read_checked(path) == {"b": True}
    path.write_text("id,right\na,perhaps\n")
    with pytest.raises(DataError, match="'perhaps' for 'a' in the column right; expected yes or no"):
        read_checked(path)


def test_checked_pairs_are_used(folder: Path, tmp_path: Path) -> None:
    for answer in ("no", "yes"):
        (tmp_path / "t.csv").write_text("id,right\n" + "".join(f"p{row},{answer}\n" for row in range(0, 60, 2)))
        assert audit(folder, "--out", tmp_path / answer, "--checked", tmp_path / "t.csv") == 0
    wrong, right = (table(tmp_path / answer)["match_score"] for answer in ("no", "yes"))
    assert sum(wrong) < sum(right)


def test_bad_rows_of_an_encoded_folder_keep_their_status(case: Case, tmp_path: Path) -> None:
    status = ["ok"] * ROWS
    status[7], status[8] = "image is missing", "image cannot be read: truncated; caption is blank"
    left = case.left.copy()
    left[7] = 0
    columns: dict[str, list[Any]] = {"id": list(range(ROWS)), "status": status}
    folder = write_clip(tmp_path / "in", left, case.right, columns)
    assert audit(folder, "--out", tmp_path / "out") == 3
    found = table(tmp_path / "out")
    assert found["status"] == status
    assert [row for row, flag in enumerate(found["is_mismatch"]) if flag is None] == [7, 8]


# ---------------------------------------------------------------------- being killed


def audit_slowly(folder: Path, out: Path) -> None:
    """In a process that is killed."""
    scan.BLOCK, scan.PART = 10, 20
    measured = scan._measured

    def slowly(*arguments: Any) -> scan.Scan:
        time.sleep(0.2)
        return measured(*arguments)

    scan._measured = slowly  # type: ignore[assignment]
    sys.exit(audit(folder, "--out", out, "--workers", "1"))


@pytest.mark.posix
def test_sigkill_changes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK", 10)
    monkeypatch.setattr(scan, "PART", 20)
    assert audit(folder, "--out", tmp_path / "whole", "--workers", "2") == 0
    broken = tmp_path / "broken"
    work = broken / "unfinished"
    process = fork_server().Process(target=audit_slowly, args=(folder, broken))
    process.start()
    while not (work / "part-000000.npz").exists() and process.is_alive():
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    saved = len(list(work.glob("part-*.npz")))
    assert 1 <= saved < 5
    assert not (broken / "pairs.parquet").exists()
    measured, again = scan._measured, []

    def watched(source: Source, judge: Judge, first: int, *rest: Any) -> scan.Scan:
        again.append(first)
        return measured(source, judge, first, *rest)

    monkeypatch.setattr(scan, "_measured", watched)
    assert audit(folder, "--out", broken) == 0
    assert sorted(again) == list(range(20 * saved, ROWS, 10))
    for name in ("pairs.parquet", "pairs.csv", "suggestions.csv"):
        assert (broken / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not work.exists()


# ---------------------------------------------------------------------- raw images and captions


class Colours:
    """An image encoder: the mean colour."""

    name, width = "colours", 3
    pixels = 1024

    def __init__(self) -> None:
        self.seen = 0

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        return np.asarray(np.asarray(image).mean(axis=(0, 1)) / 100 - 1, dtype=np.float32)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        self.seen += len(items)
        return np.stack(items)


class Numbers:
    """A text encoder: the three numbers in a caption, seen through a random map."""

    name, width = "numbers", 4

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        view = np.random.default_rng(0).standard_normal((3, 4))
        numbers = [[float(word) / 100 - 1 for word in text.split()] for text in items]
        return np.asarray(np.array(numbers) @ view, dtype=np.float32)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Colours]:
    """A table of 60 photos of one colour and captions that name it, of which the last ten are wrong."""
    colours = Colours()
    monkeypatch.setattr(encode, "image_encoder", lambda *_: colours)
    monkeypatch.setattr(encode, "text_encoder", lambda *_: Numbers())
    (tmp_path / "photos").mkdir()
    values = np.random.default_rng(1).integers(0, 256, (60, 3))
    values[6] = values[5]  # near-duplicates, which the report shows
    lines = ["image,caption"]
    for row, colour in enumerate(values):
        Image.new("RGB", (4, 3 + row % 2), tuple(colour.tolist())).save(tmp_path / f"photos/{row}.png")
        named = colour if row < 50 else values[50 + (row + 1) % 10]
        lines.append(f"{row}.png,{' '.join(map(str, named))}")
    (tmp_path / "photos/3.png").write_text("no image")
    (tmp_path / "photos.csv").write_text("\n".join(lines))
    return tmp_path, colours


def test_raw_images_are_encoded_and_audited_and_it_goes_on(
    photos: tuple[Path, Colours], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    place, colours = photos
    out = place / "out"
    command = (place / "photos.csv", "--images", place / "photos", "--out", out)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(audit_module, "scan", interrupted)
        assert audit(*command) == 130
    assert "The audit was stopped; run the command again to resume." in capsys.readouterr().err
    assert colours.seen == 59
    assert audit(*command) == 3  # one of 60 is unreadable
    assert colours.seen == 59  # what was encoded is kept
    assert sorted(path.name for path in place.iterdir()) == ["out", "photos", "photos.csv"]
    found = table(out)
    assert found["status"][3].startswith("image cannot be read")
    assert found["is_mismatch"][3] is None
    assert found["status"].count("ok") == 59
    assert np.mean(found["match_score"][50:]) < np.mean([score for score in found["match_score"][:50] if score])
    assert "data:image/jpeg" in (out / "report.html").read_text()
    capsys.readouterr()
    monkeypatch.setattr(encode.Encoders, "views", interrupted)
    assert audit(*command) == 3
    assert "This audit has ended already" in capsys.readouterr().err


def test_a_folder_of_images_and_texts(photos: tuple[Path, Colours], monkeypatch: pytest.MonkeyPatch) -> None:
    place, _ = photos
    for line in (place / "photos.csv").read_text().splitlines()[1:]:
        name, caption = line.split(",")
        (place / "photos" / name).with_suffix(".txt").write_text(caption)
    (place / "photos").rename(place / "inside")
    (place / "photos").mkdir()
    (place / "inside").rename(place / "photos/inside")  # as `mispair encode` takes them, too
    (place / "here").mkdir()
    monkeypatch.chdir(place / "here")
    (place / "photos/inside/lost.txt").write_text("1 2 3")
    assert audit("../photos", "--out", ".", "--clean", "../clean") == 3
    found = table(place / "here")
    assert len(found["id"]) == 61
    assert found["id"][-1] == "inside/lost.txt#0"
    assert found["status"][-1] == "image is not named"
    assert found["is_mismatch"][-1] is None
    assert "inside/lost.txt#0" in (place / "here/report.html").read_text()
    assert not (place / "clean/inside/lost.txt").exists()


def test_nothing_is_encoded_for_a_folder_that_is_taken(photos: tuple[Path, Colours], capsys: Capture) -> None:
    place, colours = photos
    (place / "out").mkdir()
    (place / "out/thesis.txt").write_text("important")
    for options in (["--out", place / "out"], ["--out", place / "new", "--checked", place / "none.csv"],
                    ["--out", place / "new", "--split", "dev"]):  # fmt: skip
        assert audit(place / "photos.csv", "--images", place / "photos", *options) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert colours.seen == 0
    assert sorted(path.name for path in place.iterdir()) == ["out", "photos", "photos.csv"]


def test_a_photos_csv_comes_out_as_a_photos_csv(photos: tuple[Path, Colours], capsys: Capture) -> None:
    place, colours = photos
    before = (place / "photos.csv").read_text().splitlines()
    options = ("--images", place / "photos", "--clean", place / "clean", "--mended", place / "mended")
    assert audit(place / "photos.csv", *options, "--out", place / "out", "--for", "label-studio", "fiftyone") == 3
    assert "With better partners: " in capsys.readouterr().out
    found = table(place / "out")
    kept = [line for line, flagged in zip(before[1:], found["is_mismatch"], strict=True) if flagged is False]
    assert (place / "clean/photos.csv").read_text().splitlines() == [before[0], *kept]
    assert set(kept) <= set((place / "mended/photos.csv").read_text().splitlines()[1:])
    assert "photos.csv" in (place / "out/report.html").read_text()
    assert len(json.loads((place / "out/label-studio.json").read_text())) == 60
    assert len((place / "out/fiftyone.csv").read_text().splitlines()) == 61
    # Another place for the results and further copies: nothing is encoded again.
    assert colours.seen == 59
    assert audit(place / "photos.csv", "--images", place / "photos", "--out", place / "again") == 3
    assert audit(place / "photos.csv", "--images", place / "photos", "--out", place / "again",
                 "--mended", place / "mended2") == 3  # fmt: skip
    assert colours.seen == 59
    assert (place / "mended2/photos.csv").read_bytes() == (place / "mended/photos.csv").read_bytes()


def test_refusals_come_before_encoding(photos: tuple[Path, Colours], capsys: Capture) -> None:
    place, colours = photos
    (place / "checked.csv").write_text("id,right\nnobody,yes\n")
    (place / "few.csv").write_text("link,title\n1.png,0 0 0\n")
    (place / "odd.csv").write_text("a,b\n1.png,0 0 0\n")
    for options, words in (
        ([place / "photos.csv", "--checked", place / "checked.csv"], "no pair has the id 'nobody'"),
        ([place / "few.csv", "--image-column", "link"], "; expected at least 50"),
        ([place / "photos.csv", "--by", "shop"], "--by: "),
        ([place / "odd.csv"], '"a", "b". Name them with --image-column'),
    ):
        assert audit(*options, "--images", place / "photos", "--out", place / "out") == 2
        assert words in capsys.readouterr().err
    assert colours.seen == 0


def test_an_image_that_was_replaced_makes_another_audit(photos: tuple[Path, Colours], capsys: Capture) -> None:
    place, colours = photos
    command = (place / "photos.csv", "--images", place / "photos", "--out", place / "out")
    assert audit(*command) == 3
    Image.new("RGB", (4, 3)).save(place / "photos/7.png")
    assert audit(*command) == 2
    assert "(`source` changed since)" in capsys.readouterr().err
    assert audit(*command, "--overwrite") == 3
    assert colours.seen == 60


def test_decisions_on_other_data_are_not_taken_over(
    folder: Path, arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    other = ["--left", arrays / "a.npy", "--right", arrays / "b.npy", "--ids", arrays / "ids.csv", "--out", out]
    assert audit(folder, "--out", out) == 0
    with closing(Decisions(out / FILE)) as decisions:
        decisions.add([Decision("p1", Verdict.DROP, session="s")])
    before = table(out)
    assert audit(*other, "--overwrite") == 2
    message = capsys.readouterr().err
    assert f"{out} has a decision on the pairs of {folder}" in message
    assert "--export-decisions" in message
    assert table(out) == before
    assert audit(folder, "--out", out, "--overwrite") == 0  # the same pairs


def test_decisions_on_drawn_pairs_correct_the_rate_at_once(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert audit(folder, "--out", out) == 0
    with closing(Review(out)) as review:
        review.decisions.setting("seed", "0")
        assert not review.rate().estimate
        for _ in range(80):  # to these people nine of ten pairs are mismatched
            row = review.next_drawn("s")
            assert row is not None
            verdict = Verdict.KEEP if row % 10 == 0 else Verdict.DROP
            drawn = Decision("", verdict, session="s", mode=Mode.RATE, draw=review.draw_key)
            review.decide([row], replace(drawn, inclusion=review.inclusion(row)))
        estimate = review.rate().estimate
        assert estimate is not None
        assert estimate.low < 0.9 < estimate.high
        page = TestClient(make_app(review, frozenset({"testserver"})))
        assert "more than the audit sees by itself" in page.get("/").text  # on the page at once
    assert audit(folder, "--out", again, "--decisions", out) == 0
    assert "By 80 decisions on drawn pairs" in capsys.readouterr().out
    summary = AuditSummary.read(again / "summary.json")
    assert summary.decided == estimate
    assert "By 80 decisions on drawn pairs" in (again / "report.html").read_text().replace("\xa0", " ")
    assert np.mean(np.array(table(again)["match_score"]) < 0.5) > 0.7  # the scores follow the decisions
    # An audit anew in the same folder changes the draw, and keeps what was decided.
    assert audit(folder, "--out", out, "--decisions", out, "--overwrite") == 0
    assert decided_rate(out) == estimate
