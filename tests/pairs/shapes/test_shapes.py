"""The built-in data set: files, determinism, truth of the captions, features from the pixels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mispair.errors import DataError, ExistsError, InvalidValueError, WriteError
from mispair.pairs.shapes import dataset
from mispair.pairs.shapes.drawing import Pixels, draw_scene
from mispair.pairs.shapes.features import FEATURE_SIZE, grid_features
from mispair.pairs.shapes.scene import (
    COLOUR_WORDS,
    IMAGE_SIZE,
    MAX_WORDS,
    SHAPE_NOUNS,
    Item,
    Scene,
    describe,
    grammar_words,
    relations,
    sample_scene,
)
from refusals import refused

SIZES = {"train": 7, "dev": 3, "test": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset.make(tmp_path_factory.mktemp("made") / "shapes", seed=3, **SIZES)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def item(shape: str = "circle", colour: str = "red", x: float = 0.5, y: float = 0.5, texture: str = "plain") -> Item:
    return Item(shape, colour, texture, "large", x, y, radius=0.15)


def drawn(*items: Item, background: str = "sand") -> Pixels:
    return draw_scene(Scene(background, items), np.random.default_rng(0))


# --- files ----------------------------------------------------------------------------------------------------------


def test_layout_is_that_of_scan(folder: Path) -> None:
    for split, size in SIZES.items():
        features = np.load(folder / f"{split}_ims.npy", allow_pickle=False)
        assert features.shape == (size, 36, FEATURE_SIZE)
        assert features.dtype == np.float32
        assert np.isfinite(features).all()
        assert len(lines(folder / f"{split}_caps.txt")) == 5 * size
        assert lines(folder / f"{split}_ids.txt") == [f"shapes-{split}-{index:05d}" for index in range(size)]
        for name in lines(folder / f"{split}_ids.txt"):
            with Image.open(folder / "images" / f"{name}.png") as image:
                assert image.size == (IMAGE_SIZE, IMAGE_SIZE)
    assert len(list((folder / "images").iterdir())) == sum(SIZES.values())
    assert "seed 3" in (folder / "README.md").read_text()


def test_features_belong_to_the_stored_images_row_by_row(folder: Path) -> None:
    names = lines(folder / "test_ids.txt")
    stored = np.stack([np.asarray(Image.open(folder / "images" / f"{name}.png")) for name in names])
    np.testing.assert_array_equal(grid_features(stored), np.load(folder / "test_ims.npy"))


def test_vocabulary_holds_every_word_in_the_layout_of_scan(folder: Path) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text())
    numbers = vocabulary["word2idx"]
    assert set(vocabulary) == {"word2idx", "idx2word", "idx"}
    assert [vocabulary["idx2word"][str(number)] for number in range(4)] == ["<pad>", "<start>", "<end>", "<unk>"]
    assert vocabulary["idx"] == len(numbers) == len(vocabulary["idx2word"])
    assert all(vocabulary["idx2word"][str(number)] == word for word, number in numbers.items())
    words = {word for split in SIZES for line in lines(folder / f"{split}_caps.txt") for word in line.split()}
    assert words <= set(numbers)


def test_same_seed_gives_the_same_files_and_another_seed_does_not(folder: Path, tmp_path: Path) -> None:
    again = dataset.make(tmp_path / "again", seed=3, **SIZES)
    assert files(again) == files(folder)
    other = dataset.make(tmp_path / "other", seed=4, **SIZES)
    for name in ("train_ims.npy", "train_caps.txt", "images/shapes-train-00000.png"):
        assert files(other)[name] != files(folder)[name]


def test_an_image_does_not_depend_on_the_sizes(folder: Path, tmp_path: Path) -> None:
    smaller = dataset.make(tmp_path / "smaller", seed=3, train=2, dev=1, test=1)
    np.testing.assert_array_equal(np.load(smaller / "train_ims.npy"), np.load(folder / "train_ims.npy")[:2])
    assert lines(smaller / "test_caps.txt") == lines(folder / "test_caps.txt")[:5]


def test_splits_differ() -> None:
    first = [dataset.example(0, split, 0).captions for split in SIZES]
    assert first[0] != first[1] != first[2] != first[0]


@pytest.mark.parametrize("content", ["file", "folder"])
def test_make_refuses_to_overwrite(tmp_path: Path, content: str) -> None:
    out = tmp_path / "mine"
    kept = out if content == "file" else out / "thesis.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("years of work")
    with refused(ExistsError, out):
        dataset.make(out, train=1, dev=1, test=1)
    assert kept.read_text() == "years of work"


def test_make_fills_an_empty_folder(tmp_path: Path) -> None:
    assert (dataset.make(tmp_path, train=1, dev=1, test=1) / "README.md").is_file()


@pytest.mark.parametrize("wrong", [{"dev": 0}, {"train": -1}, {"seed": -1}])
def test_make_refuses_numbers_out_of_range(tmp_path: Path, wrong: Mapping[str, int]) -> None:
    with refused(InvalidValueError, *wrong):
        dataset.make(tmp_path / "out", **{"train": 1, "dev": 1, "test": 1, **wrong})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("failure", "seen"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), DataError)]
)
def test_nothing_is_left_when_making_fails_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, seen: type[BaseException]
) -> None:
    def fail(_: object) -> None:
        raise failure

    monkeypatch.setattr(dataset, "grid_features", fail)  # the images of the first split are written by then
    with pytest.raises(seen):
        dataset.make(tmp_path / "out", train=1, dev=1, test=1)
    assert not any(tmp_path.iterdir())


# --- cache ----------------------------------------------------------------------------------------------------------


def test_cached_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path))
    first = dataset.cached(train=1, dev=1, test=1)
    made_at = (first / "train_ims.npy").stat().st_mtime_ns
    assert dataset.cached(train=1, dev=1, test=1) == first
    assert (first / "train_ims.npy").stat().st_mtime_ns == made_at
    assert dataset.cached(train=1, dev=1, test=1, seed=1) != first
    assert dataset.cached(train=2, dev=1, test=1) != first
    assert all(path.name.startswith(f"shapes-v{dataset.VERSION}-") for path in tmp_path.iterdir())


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISPAIR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert dataset.cached(train=1, dev=1, test=1).parent.parent == tmp_path / "xdg" / "mispair"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert dataset.cached(train=1, dev=1, test=1).parent.parent == tmp_path / "home" / ".cache" / "mispair"


def test_cached_uses_the_folder_of_a_faster_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path))
    write = dataset._write

    def overtaken(folder: Path, seed: int, sizes: Mapping[str, int]) -> None:
        winner = folder.parent.parent / folder.name  # where the finished folder will stand
        write(winner, seed, sizes)
        (winner / "winner").touch()
        write(folder, seed, sizes)

    monkeypatch.setattr(dataset, "_write", overtaken)
    assert (dataset.cached(train=1, dev=1, test=1) / "winner").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_cached_reports_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path / "file"))
    with refused(WriteError, names="MISPAIR_CACHE"):
        dataset.cached(train=1, dev=1, test=1)


# --- scenes and captions --------------------------------------------------------------------------------------------


def test_items_lie_apart_and_inside_the_image() -> None:
    for index in range(200):
        scene = sample_scene(np.random.default_rng(index))
        assert 2 <= len(scene.items) <= 4
        assert len({(one.shape, one.colour) for one in scene.items}) == len(scene.items)
        for one in scene.items:
            assert one.radius < one.x < 1 - one.radius
            assert one.radius < one.y < 1 - one.radius
            for other in scene.items:
                gap = max(abs(one.x - other.x), abs(one.y - other.y))
                assert one is other or gap > one.radius + other.radius
                assert one is other or relations(one, other)


def test_captions_are_short_different_lower_case_sentences() -> None:
    words = set(grammar_words())
    assert 80 <= len(words) <= 150
    for index in range(200):
        captions = dataset.example(0, "train", index).captions
        assert len(set(captions)) == 5
        for caption in captions:
            assert re.fullmatch(r"[a-z]+( [a-z]+){3,}", caption)
            assert len(caption.split()) <= MAX_WORDS
            assert set(caption.split()) <= words
            assert not re.search(r"\ba [aeiou]", caption)
            assert not re.search(r"\ban [^aeiou]", caption)


def test_captions_name_only_what_is_there() -> None:
    colour_of = {word: colour for colour, words in COLOUR_WORDS.items() for word in words}
    shape_of = {word: shape for shape, words in SHAPE_NOUNS.items() for word in words}
    coloured = re.compile(rf"\b({'|'.join(colour_of)}) ({'|'.join(shape_of)})\b")
    found = 0
    for index in range(200):
        one = dataset.example(0, "train", index)
        looks = {(each.colour, each.shape) for each in one.scene.items}
        for colour, shape in coloured.findall(" ; ".join(one.captions)):
            assert (colour_of[colour], shape_of[shape]) in looks
            found += 1
    assert found > 1000


def test_captions_tell_places_and_relations_as_they_are() -> None:
    star = Item("star", "purple", "striped", "small", x=0.2, y=0.15, radius=0.08)
    heart = Item("heart", "green", "plain", "large", x=0.8, y=0.85, radius=0.15)
    rng = np.random.default_rng(0)
    captions = [caption for _ in range(200) for caption in describe(Scene("night", (star, heart)), rng)]
    first_then_second = {"left of": "star", "right of": "heart", "above": "star", "over": "star", "below": "heart"}
    for relation, first in first_then_second.items():
        told = [caption for caption in captions if f" {relation} " in caption]
        assert told
        for caption in told:
            before, after = caption.split(f" {relation} ")
            assert first in before
            assert first not in after
    for place, here in {"left corner": "star", "right corner": "heart"}.items():
        told = [caption for caption in captions if place in caption]
        assert told
        assert all(here in caption for caption in told)
    together = " ".join(captions)
    assert not re.search(r"next to|beside|close to|three|four|centre|grass|sea|sand|dotted|red|big \w* ?star", together)
    assert re.search(r"tiny (striped|stripy) (purple|violet) star", together)
    assert re.search(r"at night|in the dark", together)


# --- images and features ------------------------------------------------------------------------------------------


def test_items_are_drawn_where_and_as_the_scene_says() -> None:
    image = drawn(item("circle", "red", x=0.2, y=0.8), item("ring", "blue", x=0.8, y=0.2)).astype(int)
    at = round(0.2 * IMAGE_SIZE)
    red, green, blue = image[-at, at]
    assert red > 150 > max(green, blue) + 30
    hole, rim = image[at, -at], image[at, -at + round(0.11 * IMAGE_SIZE)]
    assert hole[0] > hole[2]  # the sand shows through
    assert rim[2] > rim[0] + 60


def test_nuisance_changes_the_pixels_only() -> None:
    scene = Scene("sea", (item(),))
    images = [draw_scene(scene, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(images[0], images[1])
    assert (images[0] != images[2]).any()


def test_equal_images_have_equal_features_in_any_company() -> None:
    images = np.stack([dataset.example(0, "train", index).pixels for index in range(70)])  # more than one chunk
    features = grid_features(images)
    last_digit = 2e-7 if np.lib.NumpyVersion(np.__version__) < "2.3.0" else 0  # of an array's end
    for index in (0, 31, 69):
        np.testing.assert_allclose(grid_features(images[index : index + 1])[0], features[index], last_digit, last_digit)


@pytest.mark.parametrize(
    "other", [item(colour="blue"), item(shape="star"), item(texture="striped"), item(x=0.2), None], ids=str
)
def test_features_see_colour_shape_texture_and_place(other: Item | None) -> None:
    images = np.stack([drawn(item()), drawn(*([other] if other else []))])
    one, two = grid_features(images)
    assert np.abs(one - two).max() > 0.2


def test_features_see_the_ground() -> None:
    grass, snow = grid_features(np.stack([drawn(background="grass"), drawn(background="snow")]))
    assert np.abs(grass - snow).max() > 0.2


def test_features_change_where_the_pixels_change() -> None:
    image = drawn(item(x=0.2, y=0.2))
    shuffled = image.copy()
    corner = shuffled[:40, :40].reshape(-1, 3)
    np.random.default_rng(0).shuffle(corner)
    shuffled[:40, :40] = corner.reshape(40, 40, 3)
    before, after = grid_features(np.stack([image, shuffled])).reshape(2, 6, 6, -1)
    assert np.abs(before - after)[0, 0].max() > 0.2
    np.testing.assert_array_equal(before[4:], after[4:])  # too far below to see the corner


def test_no_images_have_no_features() -> None:
    assert grid_features(np.empty((0, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)).shape == (0, 36, FEATURE_SIZE)
