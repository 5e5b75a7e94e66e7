import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mispair.errors import (
    ConflictError,
    DamagedError,
    InvalidValueError,
    MispairError,
    NotFoundError,
    ShapeError,
)
from mispair.pairs.layouts import opening
from mispair.pairs.pairs import Regions, Tokens
from mispair.pairs.vocabulary import SPECIAL_WORDS, Vocabulary
from mispair.support.files import LARGEST_CELL
from refusals import refused

F30K = Path(__file__).parents[3] / "shared/data/formats"


def write_split(
    folder: Path, split: str, images: int, captions: int | None = None, *, repeat: int = 1, dtype: Any = np.float32
) -> npt.NDArray[Any]:
    """A split of random regions; returns the features of each image once."""
    folder.mkdir(parents=True, exist_ok=True)
    features = np.random.RandomState(images).rand(images, 3, 4).astype(dtype)
    np.save(folder / f"{split}_ims.npy", features.repeat(repeat, axis=0))
    n = 5 * images if captions is None else captions
    (folder / f"{split}_caps.txt").write_text("".join(f"caption number {i} .\n" for i in range(n)))
    return features


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_five_captions_a_row(tmp_path: Path, dtype: Any) -> None:
    features = write_split(tmp_path / "x_precomp", "train", 6, dtype=dtype)
    (tmp_path / "x_precomp/train_ids.txt").write_text("".join(f"photo{i}.jpg\n" for i in range(6)))
    pairs = opening.load(tmp_path / "x_precomp")
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    assert isinstance(pairs.left.features, np.memmap)
    np.testing.assert_array_equal(pairs.left.features, features)
    np.testing.assert_array_equal(pairs.link, np.arange(30) // 5)
    assert pairs.truth is None
    assert pairs.left_ids[5] == "photo5.jpg"
    assert pairs.right.texts[7] == "caption number 7 ."
    assert pairs.right.lengths.tolist() == [6] * 30
    assert pairs.name == "x_precomp train"


def test_repeated_rows_are_found_and_taken_once(tmp_path: Path) -> None:
    features = write_split(tmp_path, "train", 6, repeat=5)
    (tmp_path / "train_ids.txt").write_text("".join(f"{i // 5}\n" for i in range(30)))
    pairs = opening.load(tmp_path)
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.left.features, np.memmap)
    np.testing.assert_array_equal(pairs.left.features, features)
    np.testing.assert_array_equal(pairs.link, np.arange(30) // 5)
    assert list(pairs.left_ids) == list("012345")


def test_one_caption_a_row(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 10, captions=10)
    pairs = opening.load(tmp_path)
    assert len(pairs.left) == len(pairs.right) == 10
    np.testing.assert_array_equal(pairs.link, np.arange(10))


def test_constant_features_do_not_count_as_repeated(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 10, captions=10)
    np.save(tmp_path / "train_ims.npy", np.zeros((10, 3, 4), np.float32))
    assert len(opening.load(tmp_path).left) == 10
    assert len(opening.load(tmp_path, captions_per_image=5).left) == 2


def test_captions_per_image_can_be_forced(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 6, repeat=5)
    assert len(opening.load(tmp_path, captions_per_image=1).left) == 30
    assert len(opening.load(tmp_path, captions_per_image=5).left) == 6


@pytest.mark.parametrize(
    ("images", "captions", "forced", "kind", "names"),
    [
        (10, 10, 5, ConflictError, "blocks of 5"),
        (10, 50, 1, ConflictError, "5 a row"),
        (10, 10, 0, InvalidValueError, "0"),
        (10, 50, 5.0, InvalidValueError, "5.0"),
        (10, 50, "5", InvalidValueError, "'5'"),
        (10, 49, None, ShapeError, "49"),
        (10, 0, None, ShapeError, "0 captions"),
        (10, 5, None, ShapeError, "10 or 50"),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    tmp_path: Path, images: int, captions: int, forced: Any, kind: type[MispairError], names: str
) -> None:
    write_split(tmp_path, "train", images, captions)
    with refused(kind, "captions_per_image" if forced is not None else f"{tmp_path.name} train", names):
        opening.load(tmp_path, captions_per_image=forced)


@pytest.mark.parametrize(
    ("split", "protocol", "images", "captions"),
    [("dev", "full", 1000, 5000), ("dev", "ncr", 200, 1000), ("test", "full", 1014, 5070), ("test", "ncr", 1014, 5070)],
)
def test_dev_protocols_on_the_repeated_rows_of_flickr30k(
    tmp_path: Path, split: str, protocol: Any, images: int, captions: int
) -> None:
    write_split(tmp_path, split, 1014, repeat=5)
    pairs = opening.load(tmp_path, split, vocabulary=Vocabulary(SPECIAL_WORDS), dev_protocol=protocol)
    assert (len(pairs.left), len(pairs.right)) == (images, captions)
    assert pairs.link[-1] == images - 1


def test_the_ncr_protocol_keeps_a_thousand_images_of_single_captions(tmp_path: Path) -> None:
    write_split(tmp_path, "dev", 1010, captions=1010)
    assert len(opening.load(tmp_path, "dev", dev_protocol="ncr").left) == 1000


def test_an_unknown_protocol_is_refused(tmp_path: Path) -> None:
    with refused(InvalidValueError, "dev_protocol", names="half"):
        opening.load(tmp_path, dev_protocol="half")  # type: ignore[arg-type]


def test_tsv_captions_bring_their_ids(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 3, captions=3)
    (tmp_path / "train_caps.txt").unlink()
    (tmp_path / "train_caps.tsv").write_text('7\ta dog\n8\t"a ""big"" cat"\n9\tétoile \n', encoding="utf-8")
    pairs = opening.load(tmp_path)
    assert isinstance(pairs.right, Tokens)
    assert pairs.right.texts == ["a dog", 'a "big" cat', "étoile"]
    assert pairs.left_ids == ["7", "8", "9"]


def test_line_separators_inside_captions_do_not_shift_them(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 3, captions=3)
    (tmp_path / "train_caps.txt").write_bytes("\ufeffone\u2028two\r\nthree\x0cfour\r\n\r\n".encode())
    pairs = opening.load(tmp_path)
    assert isinstance(pairs.right, Tokens)
    assert pairs.right.texts == ["one\u2028two", "three\x0cfour", ""]


@pytest.mark.parametrize(
    ("name", "content", "kind", "names"),
    [
        ("train_caps.txt", b"ok\n\xff\n", DamagedError, "byte 3"),
        ("train_caps.tsv", b"7\ta dog\nlonely\n", ShapeError, "row 2"),
        ("train_caps.tsv", b'7\t"' + b"x" * (LARGEST_CELL + 1), DamagedError, ""),
        ("train_ids.txt", b"1\n2\n", ShapeError, "2 ids"),
        ("train_ims.npy", b"", DamagedError, ""),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, name: str, content: bytes, kind: type[MispairError], names: str
) -> None:
    write_split(tmp_path, "train", 3)
    if name.endswith("tsv"):
        (tmp_path / "train_caps.txt").unlink()
    (tmp_path / name).write_bytes(content)
    with refused(kind, tmp_path / name, names):
        opening.load(tmp_path)


def test_features_that_are_not_finite_are_refused_unless_asked(tmp_path: Path) -> None:
    features = write_split(tmp_path, "train", 6)
    features[4, 1, 2] = np.nan
    np.save(tmp_path / "train_ims.npy", features)
    with refused(DamagedError, tmp_path / "train_ims.npy", names="4"):
        opening.load(tmp_path)
    assert len(opening.load(tmp_path, finite=False)) == 30


# The vocabulary


@pytest.mark.parametrize(
    "place",
    ["x_precomp/vocab.json", "x_precomp/x_precomp_vocab.json", "vocab/x_precomp_vocab.json", "x_precomp_vocab.json"],
)
def test_a_vocabulary_beside_the_data_is_found(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_split(tmp_path / "x_precomp", "train", 2)
    vocabulary = Vocabulary((*SPECIAL_WORDS, "caption"))
    vocabulary.save(tmp_path / place)
    monkeypatch.chdir(tmp_path / "x_precomp")
    right = opening.load(".").right
    assert isinstance(right, Tokens)
    assert right.vocabulary == vocabulary


def test_a_given_vocabulary_comes_first(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 2)
    Vocabulary((*SPECIAL_WORDS, "found")).save(tmp_path / "vocab.json")
    given = Vocabulary((*SPECIAL_WORDS, "given"))
    given.save(tmp_path / "other.json")
    for form in (given, tmp_path / "other.json"):
        right = opening.load(tmp_path, vocabulary=form).right
        assert isinstance(right, Tokens)
        assert right.vocabulary == given


def test_a_vocabulary_is_built_from_train_and_dev(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write_split(tmp_path, split, 1)
        (tmp_path / f"{split}_caps.txt").write_text(f"both {split}\n" * 3 + f"{split} {split}\n" * 2)
    built = [opening.load(tmp_path, split).right for split in ("train", "dev", "test")]
    assert all(isinstance(right, Tokens) for right in built)
    words = {right.vocabulary.words[4:] for right in built if isinstance(right, Tokens)}
    assert words == {("dev", "train", "both")}


def test_no_vocabulary_and_nothing_to_build_one_from_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, "test", 2)
    with refused(NotFoundError, tmp_path):
        opening.load(tmp_path, "test")


# Folders and splits


def test_splits_come_in_the_natural_order(tmp_path: Path) -> None:
    for split in ("meta", "testall", "test", "dev", "train"):
        write_split(tmp_path, split, 1)
    np.save(tmp_path / "half_ims.npy", np.zeros((1, 1, 1)))
    assert opening.splits(tmp_path) == ["train", "dev", "test", "testall", "meta"]
    assert opening.layout(tmp_path) == "precomp"


def test_a_missing_split_is_refused_naming_the_others(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 1)
    write_split(tmp_path, "testall", 1)
    with refused(NotFoundError, tmp_path):
        opening.load(tmp_path, "dev")
    with refused(NotFoundError, tmp_path):
        opening.load(tmp_path, "test")


def test_half_a_split_is_refused_naming_the_missing_file(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 1)
    (tmp_path / "train_caps.txt").rename(tmp_path / "dev_caps.txt")
    with refused(NotFoundError, tmp_path, names="train_caps.txt"):
        opening.load(tmp_path)
    with refused(NotFoundError, tmp_path, names="dev_ims.npy"):
        opening.load(tmp_path, "dev")


def test_a_folder_that_is_no_data_set_says_what_it_holds(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path):
        opening.layout(tmp_path)
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("")
    with refused(NotFoundError, tmp_path, names="train_ims.npy"):
        opening.layout(tmp_path)
    write_split(tmp_path / "f30k_precomp", "train", 1)
    with refused(NotFoundError, tmp_path, names="f30k_precomp"):
        opening.layout(tmp_path)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ((".copy.json", "manifest.csv", "photos.csv"), r"photos\.csv, .*`images=FOLDER`"),
        ((".copy.json", "0.JPG", "0.txt", "manifest.csv"), "without `data`.* mispair train .*"),
        (("ids.csv", "left.npy", "right.npy"), r"audit `left=.*left\.npy` `right=.*` `ids=.*ids\.csv`"),
        (("manifest.csv",), "^$"),
    ],
)
def test_a_folder_of_images_or_of_their_table_says_how_it_is_given(
    tmp_path: Path, names: tuple[str, ...], advice: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(NotFoundError) as caught:
        opening.layout(tmp_path)
    assert re.search(advice, caught.value.advice)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "nowhere"):
        opening.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with refused(NotFoundError, tmp_path / "file"):
        opening.splits(tmp_path / "file")


@pytest.mark.skipif(not F30K.exists(), reason="needs the published files")
def test_published_captions_fit_the_published_vocabulary(tmp_path: Path) -> None:
    import gzip

    write_split(tmp_path, "train", 200)
    with gzip.open(F30K / "f30k_train_caps.txt.gz", "rb") as file:
        (tmp_path / "train_caps.txt").write_bytes(b"".join(line for line, _ in zip(file, range(1000), strict=False)))
    right = opening.load(tmp_path, vocabulary=F30K / "f30k_precomp_vocab.json").right
    assert isinstance(right, Tokens)
    assert right.texts[1] == "two young , white males are outside near many bushes ."
    assert (right.ids == 3).mean() < 0.02


# ---------------------------------------------------------------- any number of captions an image


def write_uneven(folder: Path, split: str, owners: list[int], *, images: int = 4) -> npt.NDArray[Any]:
    """Captions of these images in a .tsv, in this order."""
    features = np.random.RandomState(images).rand(images, 3, 4).astype(np.float32)
    np.save(folder / f"{split}_ims.npy", features)
    lines = [f"photo{owner}\tcaption number {number} .\n" for number, owner in enumerate(owners)]
    (folder / f"{split}_caps.tsv").write_text("".join(lines))
    (folder / f"{split}_ids.txt").write_text("".join(f"photo{row}\n" for row in range(images)))
    return features


@pytest.mark.parametrize("owners", [[0, 0, 1, 2, 3], [3, 0, 2, 2, 1, 0, 2], [1, 0, 3, 2], [0, 1, 2, 3, 0, 1, 2, 3]])
def test_captions_are_joined_to_images_by_their_ids(tmp_path: Path, owners: list[int]) -> None:
    features = write_uneven(tmp_path, "train", owners)
    pairs = opening.load(tmp_path)
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    np.testing.assert_array_equal(pairs.left.features, features)
    assert pairs.link.tolist() == owners
    assert list(pairs.left_ids) == [f"photo{row}" for row in range(4)]
    assert pairs.right.texts[1] == "caption number 1 ."


def test_dev_protocols_with_uneven_captions(tmp_path: Path) -> None:
    owners = [row for row in range(1200) for _ in range(1 + row % 2)]
    write_uneven(tmp_path, "dev", owners, images=1200)
    full, ncr = (opening.load(tmp_path, "dev", dev_protocol=protocol) for protocol in ("full", "ncr"))
    assert (len(full.left), len(full)) == (1000, 1500)
    assert (len(ncr.left), len(ncr)) == (666, 999)
    assert ncr.link.tolist() == owners[:999]


def test_images_without_a_caption_are_refused(tmp_path: Path) -> None:
    write_uneven(tmp_path, "train", [0, 0, 1, 3])
    with refused(NotFoundError, tmp_path / "train_ids.txt", names="train_caps.tsv"):
        opening.load(tmp_path)


def test_uneven_captions_without_ids_of_the_rows_say_what_to_write(tmp_path: Path) -> None:
    write_uneven(tmp_path, "train", [0, 0, 1, 2, 3])
    (tmp_path / "train_ids.txt").unlink()
    with refused(ShapeError, names="_caps.tsv"):
        opening.load(tmp_path)


def test_ids_of_captions_that_are_not_those_of_images_do_not_join(tmp_path: Path) -> None:
    write_uneven(tmp_path, "train", [0, 1, 2, 3])
    (tmp_path / "train_ids.txt").write_text("a\nb\nc\nd\n")
    assert opening.load(tmp_path).link.tolist() == [0, 1, 2, 3]
