import json
from pathlib import Path

import numpy as np
import pytest

from mispair.errors import DamagedError, NotFoundError
from mispair.pairs.check import Check, check
from mispair.pairs.layouts import opening
from mispair.pairs.noise import caption_noise, image_noise, save_noise
from mispair.pairs.vocabulary import Vocabulary
from refusals import refused

FORMATS = Path(__file__).parents[3] / "shared/data/formats"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "x_precomp"
    path.mkdir()
    features = np.random.RandomState(0).rand(20, 3, 4).astype(np.float32)
    for split, repeat in (("train", 1), ("dev", 5)):
        np.save(path / f"{split}_ims.npy", features.repeat(repeat, axis=0))
        (path / f"{split}_caps.txt").write_text("a dog runs .\n" * 99 + "a cat\n")
    return path


def text_of(found: Check) -> str:
    json.dumps(found.to_json(), allow_nan=False)
    return "\n".join(found.lines)


def test_a_good_folder_has_findings_and_no_problems(folder: Path) -> None:
    found = check(folder)
    assert found.problems == []
    text = text_of(found)
    assert "vocabulary: 8 words, built from the train and dev captions" in text
    assert "train: 20 images with 5 captions each" in text
    assert "dev: 100 rows, each image repeated 5 times: 20 images with 5 captions each" in text
    assert "train: features 20 x 3 x 4 float32, 960 bytes on disk, 480 bytes in memory in half precision" in text
    assert "dev: features 20 x 3 x 4 float32, 4.80 kB on disk, 480 bytes in memory in half precision" in text
    assert "train: 100 captions of 2 to 4 words (mean 4.0), 0.25% of the words unknown" in text
    train = found.splits["train"]
    assert train["words"] == {"min": 2, "mean": 3.98, "max": 4}
    assert train["unknown_share"] == pytest.approx(1 / 398)
    assert train["features"] is not None
    assert train["features"]["finite"]
    assert found.splits["dev"]["repeated"]


def test_noise_files_are_found_and_measured(folder: Path, tmp_path: Path) -> None:
    clean = np.arange(100) // 5
    save_noise(folder / "x_precomp_0.4.npy", caption_noise(clean, 0.4, 0))
    save_noise(folder / "noise_index/x_0.2.npy", caption_noise(clean, 0.2, 0))
    save_noise(tmp_path / "given.npy", image_noise(20, 0.5, 1))
    found = check(folder, noise_file=tmp_path / "given.npy")
    noise = found.noise
    assert list(noise) == [
        str(tmp_path / "given.npy"), str(folder / "x_precomp_0.4.npy"), str(folder / "noise_index/x_0.2.npy")
    ]  # fmt: skip
    assert [entry["level"] for entry in noise.values()] == ["image", "caption", "caption"]
    assert noise[str(tmp_path / "given.npy")]["mismatch"] == np.mean(image_noise(20, 0.5, 1) != np.arange(20))
    assert "image level, 20 entries" in text_of(found)
    assert found.problems == []


def test_without_features_captions_and_noise_are_still_counted(folder: Path) -> None:
    save_noise(folder / "x_precomp_0.4.npy", caption_noise(np.arange(100) // 5, 0.4, 0))
    (folder / "train_ims.npy").unlink()
    found = check(folder)
    assert len(found.problems) == 1
    assert "train_ims.npy: no such file" in found.problems[0]
    assert "train: 100 captions" in text_of(found)
    assert "caption level, 100 entries" in text_of(found)
    assert "taking 5 captions an image" in text_of(found)


def test_without_captions_features_and_noise_are_still_counted(folder: Path) -> None:
    save_noise(folder / "noise_inx_0.4.npy", image_noise(20, 0.4, 0))
    (folder / "train_caps.txt").unlink()
    found = check(folder)
    assert len(found.problems) == 1
    assert "train: features 20 x 3 x 4" in text_of(found)
    assert "image level, 20 entries" in text_of(found)


def test_all_problems_are_collected(folder: Path, tmp_path: Path) -> None:
    features = np.ones((20, 3, 4), np.float32)
    features[7, 0, 0] = np.inf
    np.save(folder / "train_ims.npy", features)
    features[7, 0, 0] = 70_000
    np.save(folder / "test_ims.npy", features)
    (folder / "test_caps.txt").write_text("a dog\n" * 42 + "\n" + "it &apos;s\n" * 57)
    (folder / "dev_ids.txt").write_text("one\n")
    np.save(folder / "dev2_ims.npy", features[:3])
    (folder / "dev2_caps.txt").write_text("a dog\n" * 10)
    save_noise(folder / "x_0.9.npy", np.arange(7))
    found = check(folder, vocabulary=tmp_path / "no.json", noise_file=[tmp_path / "no.npy"])
    text_of(found)
    for sentence in (
        "no.json: no such file",
        "train_ims.npy: row 7",
        "above the half-precision range of 65,504",
        "test: 1 caption without a word, the first on line 43",
        "1 ids; expected 20",
        "10 captions for 3 image rows",
        "expected 100 (one a pair) or 20 (one an image)",
        "no.npy: no such file",
    ):
        assert any(sentence in problem for problem in found.problems), sentence
    assert len(found.problems) == 8
    assert "test: 57 captions with HTML entities" in text_of(found)
    assert found.splits["train"]["unknown_share"] is None


def test_captions_that_are_read_in_part_are_counted(folder: Path) -> None:
    with (folder / "train_caps.txt").open() as file:
        lines = file.read().splitlines()
    (folder / "train_caps.txt").write_text("\n".join(["dog " * 300, "cat " * 249, *lines[2:]]) + "\n")
    assert "train: 1 caption of 250 words or more; networks read the first 250" in text_of(check(folder))


def test_no_train_split_is_a_problem(folder: Path) -> None:
    for path in folder.glob("train_*"):
        path.unlink()
    save_noise(folder / "x_0.4.npy", np.arange(100))
    found = check(folder)
    assert ["no train split" in problem for problem in found.problems] == [True, False]
    assert "noise" in found.problems[1]


def test_an_empty_caption_file_is_a_problem(folder: Path) -> None:
    (folder / "train_caps.txt").write_text("")
    found = check(folder)
    assert any("train: the caption file is empty" in problem for problem in found.problems)


def test_one_mistake_is_one_problem(folder: Path, tmp_path: Path) -> None:
    (folder / "train_caps.txt").write_bytes("a dog\n".encode("utf-16"))
    problems = check(folder).problems
    assert len(problems) == 1
    assert "train_caps.txt: byte 0" in problems[0]
    assert "`iconv -f utf-16 -t utf-8`" in problems[0]
    (folder / "train_caps.txt").write_text("")
    assert check(folder).problems == ["train: the caption file is empty; copy or write it again."]
    for name, rows in (("img_emb", 20), ("text_emb", 19)):
        (tmp_path / "pairs" / name).mkdir(parents=True)
        np.save(tmp_path / "pairs" / name / f"{name}_0.npy", np.ones((rows, 3), np.float16))
    assert len(check(tmp_path / "pairs").problems) == 1  # not once a split


def test_captions_that_do_not_stand_together_are_a_problem(tmp_path: Path) -> None:
    np.save(tmp_path / "train_ims.npy", np.random.RandomState(0).rand(4, 3, 4).astype(np.float32))
    captions = [f"a dog {i}" for i in range(8)]
    for ids, bad in (([0, 0, 1, 1, 2, 2, 3, 3], False), (range(8), False), ([0, 1, 2, 3] * 2, True)):
        rows = (f"{number}\t{text}\n" for number, text in zip(ids, captions, strict=True))
        (tmp_path / "train_caps.tsv").write_text("".join(rows))
        problems = check(tmp_path).problems
        assert len(problems) == bad
        if bad:
            assert "rows 1 to 2 have the ids 0, 1;" in problems[0]
            with refused(DamagedError, tmp_path / "train_caps.tsv", "0, 1"):
                opening.load(tmp_path)


def test_splits_of_another_width_are_a_problem(folder: Path, tmp_path: Path) -> None:
    np.save(folder / "dev_ims.npy", np.random.RandomState(1).rand(20, 3, 9).astype(np.float32))
    assert check(folder).problems == [
        "dev: features of width 9, but 4 for training; make the features of all splits in the same way."
    ]
    for split, width in (("train", 3), ("test", 5)):
        for name in ("img_emb", "text_emb"):
            (tmp_path / "pairs" / split / name).mkdir(parents=True)
            values = np.ones((20, 3 if name == "img_emb" else width), np.float32)
            np.save(tmp_path / "pairs" / split / name / f"{name}_0.npy", values)
    problems = check(tmp_path / "pairs").problems
    assert len(problems) == 1
    assert "test: texts features of width 5, but 3 for training" in problems[0]


def test_metadata_without_paths_is_named(tmp_path: Path) -> None:
    for name in ("img_emb", "text_emb", "metadata"):
        (tmp_path / name).mkdir()
    for name in ("img_emb", "text_emb"):
        np.save(tmp_path / name / f"{name}_0.npy", np.ones((20, 3), np.float16))
    assert "no image paths known\n" in text_of(check(tmp_path))
    (tmp_path / "metadata/metadata_0.csv").write_text("url,text\n" + "a,b\n" * 20)
    assert "no image paths known, though there is metadata: it needs a column image_path" in text_of(check(tmp_path))


def test_a_given_vocabulary_is_named(folder: Path, tmp_path: Path) -> None:
    Vocabulary.build(["a"], 1).save(tmp_path / "words.json")
    assert f"vocabulary: 5 words, {tmp_path / 'words.json'}" in text_of(
        check(folder, vocabulary=tmp_path / "words.json")
    )


def test_vectors(tmp_path: Path) -> None:
    for name in ("img_emb", "text_emb"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / f"{name}_0.npy", np.ones((20, 3), np.float16))
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/metadata_0.csv").write_text("image_path\n" + "".join(f"{i // 2}.jpg\n" for i in range(20)))
    save_noise(tmp_path / "pairs_0.5.npy", image_noise(16, 0.5, 0))
    found = check(tmp_path)
    assert found.problems == []
    assert "train: 16 pairs of vectors, 8 different image paths" in text_of(found)
    assert "dev texts: features 2 x 3 float16" in text_of(found)
    assert "caption level, 16 entries" in text_of(found)


def test_encoded_files_that_have_changed_are_a_problem(folder: Path) -> None:
    mark = {"request": {}, "finished": True, "files": {"dev_ims.npy": "0" * 64}}
    (folder / "encode.json").write_text(json.dumps(mark))
    (problem,) = check(folder).problems
    assert str(folder / "dev_ims.npy") in problem


def test_noise_between_rows_of_one_image_is_no_mismatch(tmp_path: Path) -> None:
    for name in ("img_emb", "text_emb"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / f"{name}_0.npy", np.ones((20, 3), np.float16))
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/metadata_0.csv").write_text("image_path\n" + "".join(f"{i // 2}.jpg\n" for i in range(20)))
    rows = [1, 0, 3, 2, 8, 9, 6, 7, 4, 5, 10, 11, 12, 13, 14, 15]
    for index in (rows, [row // 2 for row in rows]):  # numbers of rows, and of images
        save_noise(tmp_path / "pairs_0.5.npy", np.array(index))
        found = check(tmp_path)
        assert found.noise[str(tmp_path / "pairs_0.5.npy")]["mismatch"] == 0.25


def test_vectors_of_different_lengths_are_a_problem(tmp_path: Path) -> None:
    for name, rows in (("img_emb", 20), ("text_emb", 19)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / f"{name}_0.npy", np.ones((rows, 3), np.float16))
    found = check(tmp_path)
    assert "20 vectors" in found.problems[0]


def test_no_data_set_at_all_is_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path):
        check(tmp_path)


@pytest.mark.skipif(not FORMATS.exists(), reason="needs the published files")
def test_published_noise_files_without_the_large_features(tmp_path: Path) -> None:
    (tmp_path / "train_caps.txt").write_text("a dog .\n" * 145_000)
    noise = [FORMATS / "f30k_precomp_0.4.npy", FORMATS / "noise_inx_0.4.npy"]
    found = check(tmp_path, vocabulary=FORMATS / "f30k_precomp_vocab.json", noise_file=noise)
    assert [entry["level"] for entry in found.noise.values()] == ["caption", "image"]
    assert [entry["mismatch"] for entry in found.noise.values()] == pytest.approx([0.4, 0.4], abs=1e-4)
    assert found.vocabulary is not None
    assert found.vocabulary["size"] == 8481


@pytest.mark.parametrize("layout", ["regions", "vectors"])
def test_images_of_train_in_other_splits_are_named(layout: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, size in (("train", 40), ("dev", 20), ("test", 20)):
        features = rng.normal(size=(size, 3, 40) if layout == "regions" else (size, 40)).astype(np.float32)
        if split == "train":
            train = features
        elif split == "test":
            features[4:6] = train[7:9]
        if layout == "regions":
            np.save(tmp_path / f"{split}_ims.npy", features)
            (tmp_path / f"{split}_caps.txt").write_text("a dog\n" * size)
        else:
            for name in ("img_emb", "text_emb"):
                (tmp_path / split / name).mkdir(parents=True)
                np.save(tmp_path / split / name / f"{name}_0.npy", features)
    found = check(tmp_path)
    assert [line for line in found.lines if "train, too" in line] == [
        "test: 2 of 20 images are in train, too, so results on them say little about new images"
    ]
    assert not found.problems
