"""From image files to a model that answers on files that it has never seen."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from layouts import write_tar
from mispair.auditing.summary import AuditSummary
from mispair.cli.main import main
from mispair.encoders import encode
from mispair.errors import DataError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.layouts.opening import load
from mispair.pairs.pairs import Tokens, Vectors
from mispair.retrieval import search as search_module
from mispair.retrieval.matcher import Matcher
from mispair.reviewing.decisions import FILE, Decision, Decisions, Verdict
from mispair.training import preparing

IMAGES = 60
NAMES = {"red": (220, 20, 20), "green": (20, 200, 30), "blue": (20, 30, 220), "grey": (120, 120, 120)}
SMALL = ["--epochs", "2", "--batch-size", "16", "--device", "cpu", "--json"]


class Colours:
    """The colours of 2 x 2 parts of an image."""

    pixels = 1024

    def __init__(self, *_: str) -> None:
        self.name, self.width = "efficientnet-lite0", 3

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        return np.asarray(image.resize((2, 2), Image.Resampling.BOX), dtype=np.float32)

    def maps(self, items: Sequence[Any], /) -> torch.Tensor:
        return torch.from_numpy(np.stack(items)).permute(0, 3, 1, 2)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = self.maps(items).mean(dim=(2, 3)).numpy()
        return found


class Words(Colours):
    """Colours by their names, and the length of the text."""

    def __init__(self, *_: str) -> None:
        self.name, self.width = "words", 4

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        colours = [NAMES[next(word for word in text.split() if word in NAMES)] for text in items]
        lengths = [[len(text)] for text in items]
        return np.concatenate([np.array(colours, dtype=np.float32), np.array(lengths, dtype=np.float32)], axis=1)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of four colours, two captions each; one of them is no image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path / "cache"))
    for module in (encode, search_module, preparing):
        monkeypatch.setattr(module, "image_encoder", Colours)
    for module in (encode, search_module):
        monkeypatch.setattr(module, "text_encoder", Words)
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    lines = ["image_path,caption"]
    for number in range(IMAGES):
        name = list(NAMES)[number % 4]
        save_image(tmp_path / f"photos/{number}.png", name, rng)
        lines += [f"{number}.png,a {name} thing {'x' * number}", f"{number}.png,one {name} {'y' * number}"]
    (tmp_path / "photos/7.png").write_bytes(b"no image")
    (tmp_path / "photos.csv").write_text("\n".join(lines))
    return tmp_path


def save_image(path: Path, name: str, rng: np.random.Generator) -> None:
    pixels = np.array(NAMES[name]) + rng.integers(-20, 20, (8, 8, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grid", [False, True])
def test_one_command_to_a_model(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, grid: bool
) -> None:
    command = ["train", "photos.csv", "--images", "photos", "--out", "run", *SMALL, *(["--grid", "2"] if grid else [])]
    with monkeypatch.context() as patch:
        patch.setattr(AuditSummary, "read", lambda _: SimpleNamespace(nothing_in_common=grid))
        assert main([*command, "--embed-size", "16", "--word-size", "8"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "they cannot be read: 2 of 120 pairs; the column status of run/audit/pairs.csv says why" in printed.err
    assert ("Note: These two sides have nothing to do with each other" in printed.err) == grid
    assert found["averaged"]["rsum"] > 0
    assert found["tested_on"] == "photos.csv test"
    assert (photos / "run/audit/report.html").exists()
    matcher = Matcher.load("run", "cpu")
    assert matcher.config.method == "mend"
    assert matcher.config.model == ("vse" if grid else "two-tower")
    assert matcher.origin is not None
    assert (matcher.origin.image_model, matcher.origin.grid) == ("efficientnet-lite0", 2 if grid else None)
    made = "efficientnet-lite0 on a grid of 2 x 2" if grid else "efficientnet-lite0 and all-minilm-l6-v2"
    assert f" by {made}, on cpu>" in repr(matcher)
    with pytest.raises(DataError, match=f"by {made}, .*`mispair search`"):
        matcher.encode(["photos/0.png"], "left")
    scores = [AuditColumns.read(photos / f"run/audited{part}.parquet") for part in ("", "_dev", "_test")]
    assert sum(map(len, scores)) == 2 * (IMAGES - 1)  # all but the two of the image that is none

    rng = np.random.default_rng(1)
    (photos / "new").mkdir()
    for name in NAMES:
        save_image(photos / f"new/{name}.png", name, rng)
    search = ["search", "run", "--device", "cpu", "--json", "--top", "3"]
    assert main([*search, "--query", "one red xx", "--images", "new"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    files = [Path(hit["image"]) for hit in hits]
    assert {file.parent for file in files} == {Path("new")}
    pixels = [np.asarray(Image.open(file), dtype=np.float32).reshape(2, 4, 2, 4, 3).mean(axis=(1, 3)) for file in files]
    features = np.stack(pixels).reshape(3, 4, 3)
    asked: Any = ["one red xx"] if grid else Words().encode(["one red xx"])
    scores_there = matcher.score(features if grid else features.mean(axis=1), asked)[:, 0]
    np.testing.assert_allclose([hit["score"] for hit in hits], scores_there, atol=0.02)  # resized to whole numbers
    monkeypatch.chdir(photos / "new")  # the files are elsewhere
    for place in (str(photos / "new"), "../new"):  # no hidden folder, though its name has a dot
        assert main(["search", "../run", *search[2:], "--query", "one red xx", "--images", place]) == 0
        found_there = json.loads(capsys.readouterr().out)["hits"]
        assert [Path(hit["image"]).name for hit in found_there] == [file.name for file in files]
    monkeypatch.chdir(photos)
    assert main([*search, "--image", "new/blue.png"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hits"]) == 3
    loaded = []

    def load(*name: str) -> Words:
        loaded.append(name)
        return Words()

    monkeypatch.setattr(search_module, "text_encoder", load)
    assert main([*search, "--query", "a green thing", "--top", "100"]) == 0
    assert len(loaded) == int(not grid)  # once, not for each split
    assert len(json.loads(capsys.readouterr().out)["hits"]) == IMAGES - 1  # all splits
    assert main([*search, "--image", "photos/7.png"]) == 2
    assert "image cannot be read" in capsys.readouterr().err
    for flags in ([], ["--images", "new"]):
        assert main([*search, "--query", " ", *flags]) == 2
        assert 'no word of " "' in capsys.readouterr().err

    before = (photos / "run/best.safetensors").read_bytes()
    assert main([*command, "--embed-size", "16", "--word-size", "8"]) == 0
    assert (photos / "run/best.safetensors").read_bytes() == before
    capsys.readouterr()
    assert main(["train", "--recipe", "run/config.toml", "--out", "run", "--json"]) == 0  # as a stopped run says it
    assert json.loads(capsys.readouterr().out)["averaged"] == found["averaged"]
    assert main(["eval", "run", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == "photos.csv test"
    (photos / "run").rename("moved")  # a run takes its features with it
    assert main(["eval", "moved", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["averaged"] == found["averaged"]
    assert main(["search", "moved", *search[2:], "--query", "a green thing"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hits"]) == 3
    there = ["moved" if word == "run" else word for word in command]
    for again in ([*there, "--embed-size", "16", "--word-size", "8"], ["train", "--recipe", "moved/config.toml"]):
        assert main([*again, "--out", "moved", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["averaged"] == found["averaged"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["one name", "no names", "few names", "tars"])
def test_images_inside_other_files_are_told_apart_whatever_their_names(photos: Path, kind: str) -> None:
    rows = [line.split(",") for line in (photos / "photos.csv").read_text().splitlines()[1:]]
    contents = [(photos / "photos" / name).read_bytes() for name, _ in rows]
    if kind == "tars":  # the keys of each begin anew
        (photos / "set").mkdir()
        for number in range(2):
            members = zip(rows[2 * number :: 4], contents[2 * number :: 4], strict=True)
            write_tar(
                photos / f"set/{number}.tar",
                [{f"{n}.png": image, f"{n}.txt": text.encode()} for n, ((_, text), image) in enumerate(members)],
            )
        source, pairs, images = "set", IMAGES - 1, IMAGES - 1
    else:
        few = [f"{int(name.split('.')[0]) % 9}.png" for name, _ in rows]
        names = {"one name": "image.png", "no names": None}
        cells = [{"bytes": image, "path": names.get(kind, name)} for image, name in zip(contents, few, strict=True)]
        table = pyarrow.table({"image": cells, "text": [text for _, text in rows]})
        pyarrow.parquet.write_table(table, photos / "set.parquet")
        source, pairs, images = "set.parquet", 2 * (IMAGES - 1), IMAGES - 1
    assert main(["train", source, "--method", "plain", "--out", "run", *SMALL, "--epochs", "1"]) == 0
    splits = [load("run/features", name) for name in ("train", "dev", "test")]
    assert [sum(map(len, splits)), sum(len(split.left) for split in splits)] == [pairs, images]
    assert all(split.groups is None or len(np.unique(split.groups)) == len(split.left) for split in splits)
    vectors = [split.left.features for split in splits if isinstance(split.left, Vectors)]
    seen = [{row.tobytes() for row in np.asarray(part)} for part in vectors]
    assert sum(map(len, seen)) == len(set.union(*seen)) == images


def test_without_an_audit_and_refusals(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "photos.csv", "--images", "photos", "--out", "run"]
    for flags, words in (
        (["--data", "x"], "Give either the files to train on or --data"),
        (["--model", "vse"], "--grid 6 for region features"),
        (["--vocab", "words.json"], "without --grid"),
        (["--grid", "9"], "has 2 x 2 cells"),
        (["--dev", "40", "--test", "30"], "none is left to train"),
        (["--images", "gone"], "gone: no such folder"),
        (["--method", "best"], "best"),
        (["--epochs", "1"], "--epochs: 1; expected 2 or more for --method mend"),
    ):
        assert main([*command, *flags]) == 2
        assert words in capsys.readouterr().err
        assert not (photos / "run").exists()
    lines = (photos / "photos.csv").read_text().splitlines()
    few = [lines[0], *lines[1:33:2]]
    (photos / "few.csv").write_text("\n".join(few))
    (photos / "only.csv").write_text("\n".join([f"{few[0]},split", *(f"{line},test" for line in lines[1:])]))
    for name, words in (
        ("few", "audit them as part of a larger set. Or give another --method, because mend audits first."),
        ("only", "all pairs are of the split test, and none is left to train"),
    ):
        assert main(["train", f"{name}.csv", *command[2:]]) == 2
        assert words in capsys.readouterr().err
        assert not (photos / "run").exists()
    few_flags = ["--out", "few", "--method", "plain", "--embed-size", "8", *SMALL]
    assert main(["train", "few.csv", "--images", "photos", *few_flags]) == 0  # no audit, so it needs no 50 pairs
    assert "they cannot be read: 1 of 16 pairs; `mispair audit` says why" in capsys.readouterr().err
    assert main(["train", "--out", "run", "--grid", "6"]) == 2
    assert "mispair train photos.csv" in capsys.readouterr().err
    assert main([*command, *SMALL, "--method", "plain", "--embed-size", "8"]) == 0
    assert not (photos / "run/audit").exists()
    assert not (photos / "run/audited.parquet").exists()
    again = [*command, *SMALL, "--method", "plain", "--embed-size", "8"]
    assert main([*again, "--dev", "0.2"]) == 2  # also after its end: else its result would be taken for another one
    assert (
        "a training on other files or decisions, or with other encoders (--dev was 0.1, now 0.2)"
        in capsys.readouterr().err
    )
    before = (photos / "photos.csv").read_text()
    (photos / "photos.csv").write_text(before.replace("one", "two"))
    for ended in (True, False):
        if not ended:
            (photos / "run/result.json").unlink()
        assert main(again) == 2
        error = capsys.readouterr().err
        assert "the source changed since)" in error
        assert "--overwrite" not in error
    (photos / "photos.csv").write_text(before)
    image = (photos / "photos/0.png").stat()
    save_image(photos / "photos/0.png", "red", np.random.default_rng(1))
    assert main(again) == 2
    assert "the source changed since)" in capsys.readouterr().err
    (photos / "photos/0.png").write_bytes(b" " * image.st_size)
    os.utime(photos / "photos/0.png", ns=(image.st_atime_ns, image.st_mtime_ns))
    (photos / "run/features/encode.json").write_text("{")
    assert main(again) == 2
    error = capsys.readouterr().err
    assert "run/features/encode.json" in error
    assert "--overwrite" not in error


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_others_is_refused_before_any_work(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(photos.rglob("*"))
    for command in (["train", "photos.csv", "--images", "photos"], ["train", "--data", "nothing"]):
        assert main([*command, "--out", "photos", *SMALL]) == 2
        assert "photos: exists and is not a run folder" in capsys.readouterr().err
        assert sorted(photos.rglob("*")) == before


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_features_is_trained_on_as_it_is(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encode", "photos.csv", "--images", "photos", "--out", "vectors"]) == 3
    assert main(["train", "vectors", "--out", "run", *SMALL, "--embed-size", "8", "--method", "plain"]) == 0
    matcher = Matcher.load("run", "cpu")
    assert matcher.config.model == "two-tower"
    assert Path(matcher.config.data) == photos / "vectors"
    capsys.readouterr()
    assert main(["train", "vectors", "--out", "other", "--grid", "2"]) == 2
    assert "holds features" in capsys.readouterr().err
    assert main(["train", "vectors", "--out", "other", "--dev", "0.2"]) == 2
    assert "vectors is trained on as it is" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grid", [False, True])
def test_a_review_is_trained_on(photos: Path, capsys: pytest.CaptureFixture[str], grid: bool) -> None:
    captions = [line.partition(",")[2].strip() for line in (photos / "photos.csv").read_text().splitlines()[1:]]
    assert main(["audit", "photos.csv", "--images", "photos", "--out", "audit"]) == 3  # an image is none
    names = [f"{row // 2}.png#{row % 2}" for row in range(len(captions))]
    decisions = Decisions(photos / "audit" / FILE)
    decisions.add([Decision(names[0], Verdict.DROP), Decision(names[3], Verdict.REPAIR, "left", names[80])])
    decisions.add([Decision(names[14], Verdict.REPAIR, "left", names[90])])  # of the image that is none
    decisions.add([Decision(names[5], Verdict.REWRITE, caption="rewritten red")])
    decisions.close()
    capsys.readouterr()
    command = ["train", "audit", "--out", "run", "--epochs", "2", "--device", "cpu", "--json", "--embed-size", "8"]
    assert main([*command, *(["--grid", "2", "--word-size", "8"] if grid else [])]) == 0
    told = capsys.readouterr()
    found_first = json.loads(told.out)
    assert found_first["averaged"]["rsum"] > 0
    assert found_first["tested_on"] == "photos.csv test"
    assert f"Left out, because they cannot be read: 1 of {len(names)} pairs; the column status of audit/" in told.err
    assert not (photos / "run/audit").exists()
    found: dict[tuple[str, str], float] = {}
    for split, name in zip(("train", "dev", "test"), ("", "_dev", "_test"), strict=True):
        pairs = load("run/features", split)
        texts = pairs.right.texts if isinstance(pairs.right, Tokens) else pairs.right_ids
        images = (Path(pairs.left_ids[row]).name for row in pairs.link)
        found |= dict(
            zip(
                zip(images, texts, strict=True),
                AuditColumns.read(Path(f"run/audited{name}.parquet")).match_score,
                strict=True,
            )
        )
    wanted = {(name.partition("#")[0], text) for name, text in zip(names, captions, strict=True)}
    wanted -= {("1.png", captions[3]), ("2.png", captions[5]), ("7.png", captions[14]), ("7.png", captions[15])}
    decided = {
        ("0.png", captions[0]): 0,
        ("40.png", captions[3]): 1,
        ("45.png", captions[14]): 1,
        ("2.png", "rewritten red"): 1,
    }
    assert found.keys() == wanted | decided.keys()
    assert {pair: found[pair] for pair in decided} == decided
    kept = AuditColumns.read(Path("run/audited_test.parquet"))
    kept.flagged[:2] = True
    kept.save(Path("run/audited_test.parquet"))
    assert main(["train", "--recipe", "run/config.toml", "--out", "run", "--json"]) == 0  # has ended already
    again = json.loads(capsys.readouterr().out)
    assert again["flagged"] == kept.flagged.sum()
    assert main(["eval", "run", "--json"]) == 0
    tested = json.loads(capsys.readouterr().out)
    assert {name: tested[name] for name in ("averaged", "flagged", "unflagged")} == {
        name: again[name] for name in ("averaged", "flagged", "unflagged")
    }
    assert main(["eval", "run"]) == 0
    assert f"without the {again['flagged']} pairs that the audit flags" in capsys.readouterr().out
    (photos / "run/result.json").unlink()
    assert main(["train", "--recipe", "run/config.toml", "--out", "run", "--json"]) == 0  # needs no decisions
