import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import ChangedError, DataError, NotFoundError, ShapeError
from mispair.pairs import shards
from mispair.pairs.layouts.arrays import from_memory, open_arrays
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.npy import open_array
from mispair.pairs.source import Source
from mispair.pairs.tfidf import word_vectors
from refusals import refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

DTYPES = (np.float16, np.float32, np.float64, np.int8)


def numbers(n: int, width: int, dtype: Any = np.float32, seed: int = 0) -> npt.NDArray[Any]:
    values = 40 * np.random.default_rng(seed).standard_normal((n, width))
    return values.clip(-100, 100).astype(dtype)


def write_clip(folder: Path, left: Sequence[Any], right: Sequence[Any], *metadata: dict[str, list[Any]]) -> Path:
    """Shards as given; each metadata table as parquet."""
    for name, parts in (("img_emb", left), ("text_emb", right)):
        (folder / name).mkdir(parents=True)
        for number, shard in enumerate(parts):
            np.save(folder / name / f"{name}_{number}.npy", shard)
    (folder / "metadata").mkdir()
    for number, columns in enumerate(metadata):
        parquet.write_table(arrow.table(columns), folder / "metadata" / f"metadata_{number}.parquet")
    return folder


def write_csv(path: Path, rows: Sequence[Sequence[str]], separator: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    return path


def write_precomp(folder: Path, n: int, per_image: int = 5, split: str = "train", ids: bool = True) -> npt.NDArray[Any]:
    folder.mkdir(exist_ok=True)
    regions = numbers(n * 6, 4).reshape(n, 6, 4)
    np.save(folder / f"{split}_ims.npy", regions)
    texts = [f"a dog number {row % 7} and text {row % 11}" for row in range(n * per_image)]
    (folder / f"{split}_caps.txt").write_text("".join(f"{text}\n" for text in texts))
    if ids:
        (folder / f"{split}_ids.txt").write_text("".join(f"photo{row}\n" for row in range(n)))
    return regions


def cut(array: npt.NDArray[Any], cuts: Sequence[int]) -> list[npt.NDArray[Any]]:
    return [part for part in np.split(array, sorted(set(cuts))) if len(part)]


@given(data=st.data(), n=st.integers(1, 25), dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
def test_blocks_and_rows_do_not_depend_on_the_cuts(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, n: int, dtypes: tuple[Any, Any]
) -> None:
    places = st.lists(st.integers(0, n), max_size=4)
    left, right = numbers(n, 3, dtypes[0]), numbers(n, 5, dtypes[1], seed=1)
    folder = tmp_path_factory.mktemp("clip")
    source = open_source(write_clip(folder, cut(left, data.draw(places)), cut(right, data.draw(places))))
    assert (len(source), source.widths) == (n, (3, 5))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=12))
    for found, expected in zip(source.block(start, stop), (left[start:stop], right[start:stop]), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected.astype(np.float32))
    for found, expected in zip(source.gather(rows), (left, right), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected[np.array(rows, dtype=int)].astype(np.float32))


def test_blocks_are_copies_and_keep_what_is_not_finite(tmp_path: Path) -> None:
    left = np.array([[np.nan, 1], [np.inf, 2], [0, 0], [1e300, 1]])
    np.save(tmp_path / "a.npy", left)
    for source in (open_arrays(tmp_path / "a.npy", tmp_path / "a.npy"), from_memory(left, torch.from_numpy(left))):
        for side in source.block(0, 4):
            np.testing.assert_array_equal(side, [[np.nan, 1], [np.inf, 2], [0, 0], [np.inf, 1]])
            side[:] = 7
        assert source.block(2, 3)[0].tolist() == [[0, 0]]
    assert source.block(3, 99)[0].shape == (1, 2)
    assert source.gather([])[0].shape == (0, 2)
    with pytest.raises(IndexError):
        source.gather([4])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8])
@pytest.mark.parametrize("order", ["C", "F"])
def test_scattered_rows_of_a_file_in_either_order(tmp_path: Path, dtype: Any, order: Literal["C", "F"]) -> None:
    whole = numbers(50, 7, np.float32).astype(dtype)
    np.save(tmp_path / "a.npy", np.asarray(whole, order=order))
    rows = np.array([3, 3, 4, 49, 0])
    found = open_arrays(tmp_path / "a.npy", tmp_path / "a.npy").gather(rows)[0]
    np.testing.assert_array_equal(found, whole[rows].astype(np.float32))


def test_a_file_that_shrinks_between_two_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    np.save(path, numbers(50, 7))
    monkeypatch.setattr(shards, "_SMALL", 0)  # else it is kept in memory
    source, mapped = open_arrays(path, path), open_array(path, ndim=2)
    monkeypatch.setattr(shards, "open_array", lambda *_, **__: mapped)
    os.truncate(path, path.stat().st_size - 1)
    assert source.gather([48])[0].shape == (1, 7)
    with refused(ChangedError, path):
        source.gather([49])


def test_a_side_may_have_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    whole = numbers(150, 2)
    write_clip(tmp_path, cut(whole, range(150)), [whole])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        assert (open_source(tmp_path).block(0, 150)[0] == whole).all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_clip_metadata(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/b.jpg").touch()
    vectors = numbers(5, 2)
    paths = ["x/a.jpg", "/elsewhere/b.jpg", "x/a.jpg", None, None]
    source = open_source(
        write_clip(
            tmp_path / "data",
            [vectors],
            [vectors],
            {
                "id": [7, 8, 7],
                "image_path": paths[:3],
                "caption": ["one", None, 'a, "b"\n'],
                "status": ["ok", "", "ok"],
            },
            {"id": [None, 9], "image_path": paths[3:], "caption": ["4", "5"], "status": ["no image", "OK"]},
        ),
        images=tmp_path / "photos",
    )
    assert source.layout == "clip"
    assert source.ids(range(5)) == ["7", "8", "7", "", "9"]
    assert source.texts([2, 0, 1]) == ['a, "b"\n', "one", ""]
    assert source.groups is not None
    assert source.groups.tolist() == [0, 1, 0, 2, 3]
    assert source.known == {2: "duplicate id", 3: "no image"}
    assert [source.image_file(row) for row in [1, 0, 3]] == [tmp_path / "photos/b.jpg", None, None]
    assert (source.has_texts, source.has_images) == (True, True)
    assert source.find(["9", "7", "9"]).tolist() == [4, 0, 4]
    with refused(NotFoundError, names="'', '1', '2', '3', '4'"):
        source.find(["", "9", "1", "2", "3", "4", "5", "6"])


def test_statuses_of_img2dataset_are_fine(tmp_path: Path) -> None:
    write_clip(tmp_path, [numbers(2, 2)], [numbers(2, 2)], {"key": ["0", "1"], "status": ["success", "failed"]})
    source = open_source(tmp_path)
    assert source.known == {1: "failed"}
    assert source.ids([1]) == ["1"]


@pytest.mark.parametrize(
    ("paths", "ids", "groups"),
    [
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["a", "b", "a"], ["a#0", "b#0", "a#1"], [0, 1, 0]),
        (["a", "", "a", None], ["a#0", "1", "a#1", "3"], [0, 1, 0, 2]),
        (["", None], ["0", "1"], None),
    ],
)
def test_image_paths_serve_as_ids(tmp_path: Path, paths: list[str], ids: list[str], groups: list[int] | None) -> None:
    vectors = numbers(len(paths), 2)
    source = open_source(write_clip(tmp_path, [vectors], [vectors], {"image_path": paths}))
    assert source.ids(range(len(paths))) == ids
    assert source.known == {}
    assert (None if source.groups is None else source.groups.tolist()) == groups
    assert source.find(ids).tolist() == list(range(len(paths)))
    assert not source.has_texts


def test_without_metadata_the_number_is_the_id(tmp_path: Path) -> None:
    source = open_source(write_clip(tmp_path, [numbers(12, 2)], [numbers(12, 3)]))
    assert source.ids([11, 0]) == ["11", "0"]
    assert source.texts([3]) == [""]
    assert [source.image_file(row) for row in [3]] == [None]
    assert (source.groups, source.known, source.has_texts, source.has_images) == (None, {}, False, False)
    assert source.find(["11", "3"]).tolist() == [11, 3]
    with refused(NotFoundError, names="'12', '01', '-1', 'x'"):
        source.find(["12", "01", "-1", "x"])


def test_splits_inside(tmp_path: Path) -> None:
    for split, rows in (("train", 4), ("test", 3)):
        write_clip(tmp_path / "all" / split, [numbers(rows, 2)], [numbers(rows, 2)])
    assert len(open_source(tmp_path / "all")) == 4
    test = open_source(tmp_path / "all", split="test")
    assert (len(test), test.split, test.folder) == (3, "test", tmp_path / "all")
    with refused(NotFoundError, tmp_path / "all"):
        open_source(tmp_path / "all", split="dev")
    with refused(NotFoundError, tmp_path / "all/train"):
        open_source(tmp_path / "all/train", split="dev")


@pytest.mark.parametrize("ids", [True, False])
def test_precomp(tmp_path: Path, ids: bool) -> None:
    regions = write_precomp(tmp_path / "x", 30, ids=ids)
    write_precomp(tmp_path / "x", 8, per_image=1, split="dev", ids=ids)
    source = open_source(tmp_path / "x")
    assert (source.layout, len(source), source.widths) == ("precomp", 150, (4, 16))
    left, right = source.block(3, 12)
    np.testing.assert_allclose(left, regions.mean(axis=1)[np.arange(3, 12) // 5], rtol=1e-5)
    np.testing.assert_array_equal(right, word_vectors(source.texts(range(150)))[3:12])
    np.testing.assert_array_equal(source.gather([149, 0])[0], [source.block(149, 150)[0][0], source.block(0, 1)[0][0]])
    assert source.ids([0, 6]) == (["photo0#0", "photo1#1"] if ids else ["0", "6"])
    assert source.texts([6]) == ["a dog number 6 and text 6"]
    assert source.groups is not None
    assert source.groups.tolist() == [row // 5 for row in range(150)]
    assert source.has_images == ids
    (tmp_path / "x/images").mkdir()
    (tmp_path / "x/images/photo1.png").touch()
    found = tmp_path / "x/images/photo1.png" if ids else None
    assert [source.image_file(row) for row in [6, 0]] == [found, None]
    dev = open_source(tmp_path / "x", split="dev")
    assert (len(dev), dev.groups) == (8, None)
    assert dev.ids([7]) == (["photo7"] if ids else ["7"])


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@given(ids=st.lists(texts, min_size=1, max_size=8), kind=st.sampled_from(["csv", "tsv", "parquet"]))
def test_any_ids_come_back(tmp_path_factory: pytest.TempPathFactory, ids: list[str], kind: str) -> None:
    folder = tmp_path_factory.mktemp("ids")
    np.save(folder / "a.npy", numbers(len(ids), 2))
    path = folder / f"ids.{kind}"
    if kind == "parquet":
        parquet.write_table(arrow.table({"id": ids}), path)
    else:
        write_csv(path, [["id", "text"], *([one, "t"] for one in ids)], "," if kind == "csv" else "\t")
    source = open_arrays(folder / "a.npy", folder / "a.npy", path)
    assert source.ids(range(len(ids))) == ids
    assert source.find(ids).tolist() == [ids.index(one) for one in ids]
    assert source.known == {row: "duplicate id" for row, one in enumerate(ids) if one in ids[:row]}


def test_arrays_with_groups_and_images(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", numbers(3, 2))
    (tmp_path / "1.jpg").touch()
    table = write_csv(tmp_path / "ids.tsv", [["Image", "group"], ["1.jpg", "g"], ["2.jpg", "h"], ["3.jpg", "g"]], "\t")
    source = open_arrays(tmp_path / "a.npy", tmp_path / "a.npy", table)
    assert source.groups is not None
    assert source.groups.tolist() == [0, 1, 0]
    assert [source.image_file(row) for row in [0, 1]] == [tmp_path / "1.jpg", None]
    assert source.ids([2]) == ["3.jpg"]


@pytest.mark.parametrize(
    "make", [np.asarray, torch.from_numpy, lambda x: torch.from_numpy(x).bfloat16().requires_grad_()]
)
def test_memory(make: Any) -> None:
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    source = from_memory(
        make(values), values, ids=["a", None, "a", float("nan")], groups=[5, 5, 1, 5], texts=list("wxyz")
    )
    assert source.layout == "memory"
    np.testing.assert_array_equal(source.block(1, 3)[0], values[1:3])
    np.testing.assert_array_equal(source.gather([3, 0])[0], values[[3, 0]])
    assert source.known == {1: "missing id", 2: "duplicate id", 3: "missing id"}
    assert source.groups is not None
    assert source.groups.tolist() == [0, 0, 1, 0]
    assert source.texts([3]) == ["z"]
    for groups in (np.array([3, 2, 1, 0]), torch.arange(4), ["a", "", None, "b"], None):
        assert from_memory(values, values, groups=groups).groups is None
    assert from_memory(values, values, ids=np.array([4, 5, 6, 7])).ids([0]) == ["4"]


@pytest.mark.parametrize(
    ("left", "more", "where", "names"),
    [
        ("vectors", {}, "the left side", "str"),
        (np.zeros(3), {}, "the left side", "(3,)"),
        (np.zeros((0, 3)), {}, "the left side", "(0, 3)"),
        (np.zeros((3, 0)), {}, "the left side", "(3, 0)"),
        (np.zeros((3, 2), np.int64), {}, "the left side", "int64"),
        (np.zeros((3, 2), object), {}, "the left side", "object"),
        (np.zeros((3, 2), ">f4"), {}, "the left side", ">f4"),
        (torch.zeros(3, 2, dtype=torch.long), {}, "the left side", "torch.int64"),
        (np.zeros((4, 2)), {}, "the given arrays", "4 vectors"),
        (np.zeros((3, 2)), {"ids": ["a"]}, "ids", "(1,)"),
        (np.zeros((3, 2)), {"groups": np.zeros((3, 1))}, "groups", "(3, 1)"),
        (np.zeros((3, 2)), {"texts": "abc"}, "texts", ""),
    ],
)
def test_wrong_memory_is_refused(left: Any, more: dict[str, Any], where: str, names: str) -> None:
    with refused(ShapeError, where, names):
        from_memory(left, np.zeros((3, 2)), **more)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    arrays = {
        "good": np.zeros((3, 2)), "flat": np.zeros(3), "long": np.zeros((4, 2)), "objects": np.array([[None]] * 3),
        "words": np.array([["a"]] * 3), "empty": np.zeros((0, 2)), "whole": np.zeros((3, 2), np.int64),
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
    for name, sentence in (
        ("flat", "2 dimensions"), ("long", "4 vectors on the left side and 3"), ("objects", "pickled Python"),
        ("words", "numbers of type <U1"), ("empty", r"\(0, 2\)"), ("whole", "int64"), ("none", "no such file"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=sentence):
            open_arrays(tmp_path / f"{name}.npy", tmp_path / "good.npy")
    good = tmp_path / "good.npy"
    write_csv(tmp_path / "two.csv", [["id"], ["1"], ["2"]])
    with refused(ShapeError, tmp_path / "two.csv", "2 rows"):
        open_arrays(good, good, tmp_path / "two.csv")
    write_csv(tmp_path / "other.csv", [["width", "height"], *[["1", "2"]] * 3])
    with refused(NotFoundError, names="width, height"):
        open_arrays(good, good, tmp_path / "other.csv")
    with refused(NotFoundError):
        open_arrays(good, good, images=tmp_path / "nowhere")


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.md").touch()
    a, b = numbers(3, 2), numbers(4, 2)
    write_clip(tmp_path / "rows", [a], [b])
    write_clip(tmp_path / "width", [a, numbers(3, 5)], [a, a])
    write_clip(tmp_path / "metadata", [a], [a], {"id": ["1", "2"]})
    for name, sentence in (
        ("other", r"notes\.md"),
        ("none", "no such file or folder"),
        ("rows", "3 .*4 "),
        ("width", r"width 5.*img_emb_0\.npy"),
        ("metadata", "2 rows for 3 pairs"),
    ):
        with pytest.raises(DataError, match=sentence):
            open_source(tmp_path / name)


def test_the_fingerprint_tells_inputs_apart(tmp_path: Path) -> None:
    values = numbers(5, 2)

    def made(name: str, array: npt.NDArray[Any], ids: list[str]) -> Source:
        return open_source(write_clip(tmp_path / name, [array], [array], {"id": ids}))

    first = made("a", values, list("abcde"))
    assert first.fingerprint() == open_source(tmp_path / "a").fingerprint()
    again = tmp_path / "a/text_emb/text_emb_0.npy"
    when = again.stat().st_mtime_ns
    for moment in (when + 1, when):  # written again, perhaps with other numbers in rows that are not in the sample
        before = first.fingerprint()
        os.utime(again, ns=(moment, moment))
        assert first.fingerprint() != before
    changed = values.copy()
    changed[3, 1] += 1
    others = [made("c", changed, list("abcde")), made("d", values, list("abcdx")), made("e", values[:4], list("abcd"))]
    memory = [from_memory(values, values), from_memory(values, values, groups=[1, 1, 2, 3, 4])]
    assert len({source.fingerprint() for source in (first, *others, *memory)}) == 6
    write_precomp(tmp_path / "p", 4)
    before = open_source(tmp_path / "p").fingerprint()
    assert open_source(tmp_path / "p").fingerprint() == before
    captions = (tmp_path / "p/train_caps.txt").read_text()
    (tmp_path / "p/train_caps.txt").write_text(captions.replace("number 3", "number 4", 1))
    assert open_source(tmp_path / "p").fingerprint() != before


def test_images_of_many_rows_are_looked_up_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "c.jpg").write_bytes(b"c")
    asked = []

    def image_names(rows: npt.NDArray[np.int64]) -> list[str]:
        asked.append(len(rows))
        return [("a.jpg", "b.jpg", "c.jpg")[row] for row in rows]

    vectors = np.ones((3, 2), np.float32)
    source = replace(from_memory(vectors, vectors), image_names=image_names, images=(tmp_path,))
    read = source.image_reader(np.array([2, 1, 0]))
    assert [read(row) for row in (0, 1, 2)] == [b"a", None, b"c"]
    assert asked == [3]
    assert [source.image(row) for row in (0, 1, 2)] == [b"a", None, b"c"]
