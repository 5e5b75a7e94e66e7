import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mispair.errors import (
    ConflictError,
    DamagedError,
    MispairError,
    NotFoundError,
    ShapeError,
    TooFewError,
)
from mispair.pairs.layouts import clip_retrieval, opening
from mispair.pairs.pairs import Vectors
from refusals import refused


def write_vectors(folder: Path, shards: Sequence[int], paths: Sequence[str] | None = None) -> None:
    for number, rows in enumerate(shards):
        for name, width in (("img_emb", 2), ("text_emb", 3)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            first = sum(shards[:number])
            values = np.arange(first, first + rows, dtype=np.float32)[:, None].repeat(width, axis=1)
            np.save(folder / name / f"{name}_{number}.npy", values)
    if paths is not None:
        (folder / "metadata").mkdir(exist_ok=True)
        first = 0
        for number, rows in enumerate(shards):
            with (folder / "metadata" / f"metadata_{number}.csv").open("w", newline="") as file:
                table = [(paths[i], f"text {i}") for i in range(first, first + rows)]
                csv.writer(file).writerows([("image_path", "caption"), *table])
            first += rows


def values(side: Any) -> list[int]:
    assert isinstance(side, Vectors)
    return [int(value) for value in side.features[:, 0]]


def test_vectors_are_cut_by_position(tmp_path: Path) -> None:
    write_vectors(tmp_path, [20], [f"{i}.jpg" for i in range(20)])
    parts = {split: opening.load(tmp_path, split) for split in opening.splits(tmp_path)}
    assert {split: values(part.left) for split, part in parts.items()} == {
        "train": list(range(16)),
        "dev": [16, 17],
        "test": [18, 19],
    }
    for part in parts.values():
        assert values(part.left) == values(part.right)
        assert isinstance(part.left, Vectors)
        assert isinstance(part.left.features, np.memmap)
        assert part.groups is None
    assert parts["dev"].left_ids == ["16.jpg", "17.jpg"]
    assert parts["dev"].right_ids == ["text 16", "text 17"]


def test_of_many_vectors_few_validate_and_test() -> None:
    def sizes(count: int) -> list[int]:
        return [len(clip_retrieval.cut(np.arange(count), split)) for split in ("train", "dev", "test")]

    assert [sizes(30), sizes(50_000), sizes(70_000)] == [
        [24, 3, 3],
        [40_000, 5_000, 5_000],
        [60_000, 5_000, 5_000],
    ]


def test_rows_of_one_image_stay_in_one_split_and_share_a_group(tmp_path: Path) -> None:
    paths = [f"{i // 3}.jpg" for i in range(40)]
    paths[39] = "0.jpg"  # far away from its image
    write_vectors(tmp_path, [40], paths)
    parts = [opening.load(tmp_path, split) for split in ("train", "dev", "test")]
    assert [values(part.left) for part in parts] == [[*range(33), 39], [33, 34, 35], [36, 37, 38]]
    train = parts[0]
    assert train.groups is not None
    assert train.groups[-1] == 0
    assert train.right_groups.tolist()[:4] == [0, 0, 0, 3]


def test_rows_of_one_group_may_have_no_paths(tmp_path: Path) -> None:
    write_vectors(tmp_path, [20])
    np.save(tmp_path / "img_emb/img_emb_0.npy", np.arange(20)[:, None] // 4 * np.ones(2, np.float32))
    (tmp_path / "metadata").mkdir()
    rows = "".join(f"{row // 4}\n" for row in range(20))
    (tmp_path / "metadata/metadata_0.csv").write_text(f"group\n{rows}")
    train = opening.load(tmp_path)
    assert (values(train.left), train.link.tolist()) == ([0, 1, 2, 3], [row // 4 for row in range(16)])


def test_rows_without_a_path_are_images_of_their_own(tmp_path: Path) -> None:
    write_vectors(tmp_path, [10], [""] * 10)
    assert [len(opening.load(tmp_path, split)) for split in ("train", "dev", "test")] == [8, 1, 1]


def test_shards_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_vectors(tmp_path, [1] * 12, [f"{i}" for i in range(12)])
    assert values(opening.load(tmp_path).left) == list(range(9))
    assert opening.load(tmp_path, "test").left_ids == ["10", "11"]


def test_subfolders_are_splits(tmp_path: Path) -> None:
    write_vectors(tmp_path / "train", [3, 2])
    write_vectors(tmp_path / "test", [2], ["a", "a"])
    assert opening.layout(tmp_path) == "vectors"
    assert opening.splits(tmp_path) == ["train", "test"]
    assert values(opening.load(tmp_path).left) == [0, 1, 2, 3, 4]
    assert opening.load(tmp_path).left_ids == ()
    test = opening.load(tmp_path, "test")
    assert test.groups is not None
    assert test.groups.tolist() == [0, 0]
    with refused(NotFoundError, tmp_path):
        opening.load(tmp_path, "dev")


def test_take_reads_any_ascending_rows(tmp_path: Path) -> None:
    write_vectors(tmp_path, [4, 2, 3])
    side = clip_retrieval.open_split(tmp_path).left
    for rows in ([1, 2], [0, 3], [3, 4], [0, 2, 5, 8], [6, 7, 8], list(range(9))):
        found = clip_retrieval.take(side, np.array(rows))
        assert found[:, 0].tolist() == rows
        assert isinstance(found, np.memmap) == (rows in ([1, 2], [6, 7, 8]))


def test_parquet_metadata(tmp_path: Path) -> None:
    write_vectors(tmp_path, [10])
    (tmp_path / "metadata").mkdir()
    table = pyarrow.table({"image_path": [str(i) for i in range(10)], "caption": [None] * 10, "width": [1] * 10})
    pyarrow.parquet.write_table(table, tmp_path / "metadata/metadata_0.parquet")
    assert opening.load(tmp_path, "test").left_ids == ["9"]


def test_vectors_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_vectors(tmp_path / "rows", [10])
    np.save(tmp_path / "rows/text_emb/text_emb_0.npy", np.zeros((9, 3), np.float32))
    write_vectors(tmp_path / "width", [10, 10])
    np.save(tmp_path / "width/img_emb/img_emb_1.npy", np.zeros((10, 7), np.float32))
    write_vectors(tmp_path / "names", [10], ["a"] * 10)
    (tmp_path / "names/metadata/metadata_0.csv").write_text("image_path,caption\na,b\n")
    write_vectors(tmp_path / "few", [3])
    write_vectors(tmp_path / "none", [10])
    (tmp_path / "none/img_emb/img_emb_0.npy").unlink()
    kind: type[MispairError]
    for folder, split, kind, where, names in (
        ("rows", "train", ShapeError, "rows", "10 vectors"),
        ("width", "train", ShapeError, "width/img_emb/img_emb_1.npy", "width 7"),
        ("names", "train", ShapeError, "names", "1 rows for 10 pairs"),
        ("few", "dev", TooFewError, "few", "3 pairs"),
        ("none", "train", NotFoundError, "none/img_emb", "img_emb_0.npy"),
    ):
        with refused(kind, tmp_path / where, names):
            opening.load(tmp_path / folder, split)


@pytest.mark.parametrize("side", ["img_emb", "text_emb", "metadata"])
def test_shards_of_different_numbers_are_not_joined(tmp_path: Path, side: str) -> None:
    write_vectors(tmp_path, [4, 4, 4], [f"{i}.jpg" for i in range(12)])
    for stem in {"img_emb", "text_emb", "metadata"} - {side}:
        next((tmp_path / stem).glob(f"{stem}_1.*")).unlink()
    next((tmp_path / side).glob(f"{side}_2.*")).unlink()
    with refused(NotFoundError, tmp_path):
        opening.load(tmp_path)


def test_one_table_may_name_the_rows_of_several_shards(tmp_path: Path) -> None:
    write_vectors(tmp_path, [4, 6])
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/metadata_7.csv").write_text("image_path\n" + "".join(f"{i}.jpg\n" for i in range(10)))
    assert opening.load(tmp_path, "test").left_ids == ["9.jpg"]


def test_a_damaged_table_is_refused_in_one_line(tmp_path: Path) -> None:
    write_vectors(tmp_path, [30])
    (tmp_path / "metadata").mkdir()
    path = tmp_path / "metadata/metadata_0.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image_path": [str(i) * 50 for i in range(30)]}), path)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(DamagedError) as refusal:
        opening.load(tmp_path)
    assert "\n" not in str(refusal.value)


def test_vectors_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_vectors(tmp_path / "x", [10])
    np.save(tmp_path / "x/text_emb/text_emb_0.npy", np.full((10, 3), np.inf, np.float32))
    with refused(DamagedError, "x train texts", "row 0"):
        opening.load(tmp_path / "x")


def test_a_folder_of_data_sets_is_not_one(tmp_path: Path) -> None:
    write_vectors(tmp_path / "my_pairs", [10])
    with refused(NotFoundError, tmp_path):
        opening.load(tmp_path)


@pytest.mark.parametrize("given", [{"captions_per_image": 5}, {"dev_protocol": "ncr"}, {"vocabulary": "words.json"}])
def test_what_is_for_captions_is_refused_for_vectors(tmp_path: Path, given: dict[str, Any]) -> None:
    write_vectors(tmp_path, [20])
    with refused(ConflictError, *given):
        opening.load(tmp_path, **given)
