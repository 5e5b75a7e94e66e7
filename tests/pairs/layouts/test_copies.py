import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mispair
from mispair.errors import (
    ConflictError,
    DataError,
    ExistsError,
    TooFewError,
    WriteError,
)
from mispair.pairs.edits import Edits, TableCopies
from mispair.pairs.layouts.arrays import from_memory, open_arrays
from mispair.pairs.layouts.clip_retrieval import ClipRetrieval
from mispair.pairs.layouts.copies import write_copy
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.origin import Origin, Projection
from mispair.pairs.pairs import Regions, Tokens
from mispair.pairs.result_tables import write_table
from mispair.pairs.source import Source
from mispair.pairs.tables import open_table
from mispair.support.arrays import Mask
from refusals import refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ODD = ["a,b", 'say "x"', "two\nlines", "two\r\nlines", "a\rb", "tab\there", "ünï;|", " ", "#1", "\u2028"]


def numbers(n: int, width: int, dtype: Any = np.float32, seed: int = 0) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(dtype)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_filtered(source: Source, keep: Mask, out: Path, overwrite: bool = False) -> Path:
    return write_copy(source, Edits.keeping(keep), out, overwrite)


def kept(*rows: int, n: int) -> npt.NDArray[np.bool_]:
    return np.isin(np.arange(n), rows)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_is_read_as_it_was_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"new/folder/a{ending}"
    n = len(ODD)
    columns = {
        "id": ODD, "match_score": np.linspace(0, 1, n, dtype=np.float32), "is_mismatch": np.arange(n) % 2 == 0,
        "caption": arrow.array(ODD[::-1]), "chunked": arrow.chunked_array([list(range(n - 1)), [7]]),
    }  # fmt: skip
    whole = arrow.table(columns)
    write_table(path, [whole[:1], whole[1:1], whole[1:]])
    table = open_table(path)
    assert table.columns == tuple(columns)
    for name, values in columns.items():
        cells = table.cells(name, np.arange(n))
        if name == "match_score":
            np.testing.assert_array_equal(np.array(cells, np.float32), values)
        else:
            expected = [str(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]
            assert cells == ([text.lower() for text in expected] if name == "is_mismatch" else expected)


def test_a_table_is_replaced_only_when_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    one, two = (arrow.table({"id": [name]}) for name in "12")
    write_table(path, [one])
    with pytest.raises(ExistsError):
        write_table(path, [two])
    assert "1" in path.read_text()
    write_table(path, [two], overwrite=True)
    assert "2" in path.read_text()
    with pytest.raises(WriteError):
        write_table(tmp_path / "a.xlsx", [one])
    with pytest.raises(ValueError, match="schema"):
        write_table(tmp_path / "b.parquet", [one, arrow.table({"text": ["1"]})])
    assert [one.name for one in tmp_path.iterdir()] == ["a.csv"]


def write_clip(folder: Path, sizes: list[int], kind: str | None, columns: dict[str, list[Any]], dtype: Any) -> None:
    start = 0
    for number, size in enumerate(sizes):
        rows = slice(start, start + size)
        for seed, (name, width) in enumerate((("img_emb", 3), ("text_emb", 2))):
            (folder / name).mkdir(parents=True, exist_ok=True)
            np.save(folder / name / f"{name}_{number}.npy", numbers(sum(sizes), width, dtype, seed)[rows])
        if kind:
            (folder / "metadata").mkdir(exist_ok=True)
            path = folder / "metadata" / f"metadata_{number}.{kind}"
            part = {name: values[rows] for name, values in columns.items()}
            if kind == "parquet":
                parquet.write_table(arrow.table(part), path, row_group_size=2)
            else:
                with path.open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file, delimiter=";").writerows([list(part), *zip(*part.values(), strict=True)])
        start += size


def check_same(source: Source, keep: npt.NDArray[np.bool_], copy: Source) -> None:
    rows = np.flatnonzero(keep)
    assert copy.layout == source.layout
    assert copy.ids(range(len(copy))) == source.ids(rows)
    assert copy.texts(range(len(copy))) == source.texts(rows)
    for one, two in zip(copy.block(0, len(copy)), source.gather(rows), strict=True):
        np.testing.assert_array_equal(one, two)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from(["parquet", "csv", None]),
    with_ids=st.booleans(),
    dtype=st.sampled_from([np.float16, np.float32]),
    data=st.data(),
)
def test_a_filtered_clip_folder_holds_the_kept_rows(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    kind: str | None,
    with_ids: bool,
    dtype: Any,
    data: st.DataObject,
) -> None:
    n = sum(sizes)
    folder = tmp_path_factory.mktemp("clip")
    columns = {
        "image_path": [f"{row // 2}.jpg" for row in range(n)],
        "caption": [f"{ODD[row % len(ODD)]} {row}" for row in range(n)],
        "size": [str(row) for row in range(n)],
    }
    if with_ids:
        columns["id"] = [f"{ODD[row % len(ODD)]}{row}" for row in range(n)]
    write_clip(folder / "in", sizes, kind, columns, dtype)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any)))
    source = open_source(folder / "in")
    before = contents(folder / "in")
    write_filtered(source, keep, folder / "out")
    assert contents(folder / "in") == before
    copy = open_source(folder / "out")
    check_same(source, keep, copy)
    starts = np.cumsum([0, *sizes])
    left = [number for number, size in enumerate(sizes) if keep[starts[number] : starts[number] + size].any()]
    for name in ("img_emb", "text_emb"):
        stored = sorted((folder / "out" / name).iterdir())
        assert [path.stem for path in stored] == [f"{name}_{number}" for number in left]
        assert all(np.load(path).dtype == dtype for path in stored)
    if kind:
        assert copy.table is not None
        assert set(copy.table.columns) == {*columns, "id"}
        assert copy.table.cells("size", np.arange(len(copy))) == [str(row) for row in np.flatnonzero(keep)]


@pytest.mark.parametrize("layout", ["vectors", "regions"])
def test_the_other_splits_and_the_origin_come_along(tmp_path: Path, layout: str) -> None:
    data = tmp_path / "data"
    if layout == "vectors":
        for split, size in (("train", 6), ("dev", 3), ("test", 2)):
            names = [f"{split}-{row}.jpg" for row in range(size)]
            write_clip(data / split, [size], "csv", {"image_path": names, "caption": names}, np.float32)
        origin = Origin("shapes", "shapes")
    else:
        for split, size in (("train", 6), ("dev", 3), ("test", 2)):
            data.mkdir(exist_ok=True)
            np.save(data / f"{split}_ims.npy", np.zeros((size, 4, 3), np.float32))
            (data / f"{split}_caps.txt").write_text("a dog\n" * size)
        origin = Origin("shapes", None, 2, Projection(np.zeros(5, np.float32), np.ones((5, 3), np.float32)))
    origin.write(data)
    source = open_source(data)
    keep = kept(0, 2, 5, n=6)
    out = write_filtered(source, keep, tmp_path / "copy")
    assert [len(mispair.load(out, split)) for split in ("train", "dev", "test")] == [3, 3, 2]
    before, after = contents(data), contents(out)
    others = [name for name in before if name.startswith(("dev", "test"))]
    assert len(others) >= 4
    assert all(after[name] == before[name] for name in others)
    read = Origin.read(out)
    assert read is not None
    assert (read.image_model, read.text_model, read.grid) == (origin.image_model, origin.text_model, origin.grid)
    if origin.projection is not None:
        assert read.projection is not None
        assert read.projection.fingerprint() == origin.projection.fingerprint()
    write_filtered(source, keep, out, overwrite=True)  # all its files are known as those of a copy


def test_a_filtered_split_stays_a_split_and_loads(tmp_path: Path) -> None:
    write_clip(tmp_path / "in/train", [6], "parquet", {"image_path": list("abcdef")}, np.float32)
    write_clip(tmp_path / "in/test", [2], None, {}, np.float32)
    write_filtered(open_source(tmp_path / "in"), kept(1, 4, n=6), tmp_path / "out")
    assert list(mispair.load(tmp_path / "out", "train").left_ids) == ["b", "e"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", None])
def test_filtered_arrays(tmp_path: Path, ending: str | None) -> None:
    n = len(ODD)
    np.save(tmp_path / "a.npy", np.asfortranarray(numbers(n, 3, np.float16)))
    np.save(tmp_path / "b.npy", numbers(n, 2).astype(np.int8))
    table = None
    if ending == "parquet":
        table = tmp_path / "names.parquet"
        write_table(table, [arrow.table({"id": ODD, "text": ODD[::-1], "n": list(range(n))})])
    elif ending:
        table = tmp_path / f"names.{ending}"
        with table.open("w", newline="", encoding="utf-8-sig") as file:
            rows = zip(ODD, ODD[::-1], range(n), strict=True)
            csv.writer(file, delimiter="," if ending == "csv" else "\t").writerows([["id", "text", "n"], *rows])
    source = open_arrays(tmp_path / "a.npy", tmp_path / "b.npy", table)
    keep = kept(0, 2, 3, 4, 8, n=n)
    out = write_filtered(source, keep, tmp_path / "out")
    name = table.name if table else "ids.csv"
    assert {path.name for path in out.iterdir()} == {".copy.json", "left.npy", "right.npy", name}
    check_same(source, keep, open_arrays(out / "left.npy", out / "right.npy", out / name))
    assert np.load(out / "left.npy").dtype == np.float16
    assert np.load(out / "right.npy").dtype == np.int8


def test_filtered_memory(tmp_path: Path) -> None:
    source = from_memory(numbers(4, 2), torch.eye(4), ids=list("abcd"), groups=[1, 1, 2, 2], texts=ODD[:4])
    out = write_filtered(source, kept(0, 1, 3, n=4), tmp_path / "out")
    copy = open_arrays(out / "left.npy", out / "right.npy", out / "ids.csv")
    assert copy.ids(range(3)) == list("abd")
    assert copy.texts(range(3)) == [ODD[0], ODD[1], ODD[3]]
    assert copy.groups is not None
    assert copy.groups.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(copy.block(0, 3)[1], np.eye(4)[[0, 1, 3]])


def write_precomp(folder: Path, n: int, per_image: int, form: str) -> None:
    """Features with the number of their image; no two captions are equal."""
    folder.mkdir()
    regions = np.arange(n, dtype=np.float32)[:, None, None] + np.zeros((n, 2, 3), np.float32)
    repeated = form == "repeated"
    np.save(folder / "train_ims.npy", regions.repeat(per_image, axis=0) if repeated else regions)
    captions = [f"image {row // per_image} caption {row}" for row in range(n * per_image)]
    if form == "tsv":
        lines = [f"id{row // per_image}\t{text}\n" for row, text in enumerate(captions)]
        (folder / "train_caps.tsv").write_text("".join(lines))
    else:
        (folder / "train_caps.txt").write_text("".join(f"{text}\n" for text in captions))
        (folder / "train_ids.txt").write_text("".join(f"id{row}\n" for row in range(n)))


def check_precomp(source: Source, keep: npt.NDArray[np.bool_], out: Path) -> None:
    pairs = mispair.load(out, "train")
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    assert sorted(pairs.right.texts) == sorted(source.texts(np.flatnonzero(keep)))
    for pair, text in enumerate(pairs.right.texts):
        image = text.split()[1]
        assert (pairs.left.features[pairs.link[pair]] == float(image)).all()
        assert pairs.left_ids[pairs.link[pair]] == f"id{image}"


@given(
    n=st.integers(1, 8),
    per_image=st.sampled_from([1, 2, 5]),
    form=st.sampled_from(["txt", "tsv", "repeated"]),
    data=st.data(),
)
def test_a_filtered_precomp_folder_loads_with_the_kept_captions(
    tmp_path_factory: pytest.TempPathFactory, n: int, per_image: int, form: str, data: st.DataObject
) -> None:
    if form == "repeated" and (per_image != 5 or n == 1):
        form = "txt"  # only five rows an image that differ are recognised as repeated
    folder = tmp_path_factory.mktemp("precomp")
    write_precomp(folder / "in", n, per_image, form)
    source = open_source(folder / "in")
    assert len(source) == n * per_image
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(source), max_size=len(source)).filter(any)))
    before = contents(folder / "in")
    write_filtered(source, keep, folder / "out")
    assert contents(folder / "in") == before
    check_precomp(source, keep, folder / "out")


@pytest.mark.parametrize("gone", [[], [0], [2, 5], [1, 3, 6]])
def test_any_number_of_captions_an_image_in_any_order(tmp_path: Path, gone: list[int]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    owners = [2, 0, 0, 1, 2, 3, 2]
    np.save(folder / "train_ims.npy", np.arange(4, dtype=np.float32)[:, None, None] + np.zeros((4, 2, 3), np.float32))
    lines = [f"id{owner}\timage {owner} caption {row}\n" for row, owner in enumerate(owners)]
    (folder / "train_caps.tsv").write_text("".join(lines))
    (folder / "train_ids.txt").write_text("".join(f"id{row}\n" for row in range(4)))
    source = open_source(folder)
    assert source.image_names is not None
    assert source.image_names(np.arange(7)) == [f"id{owner}" for owner in owners]
    keep = ~kept(*gone, n=7)
    write_filtered(source, keep, tmp_path / "out")
    check_precomp(source, keep, tmp_path / "out")


def test_captions_are_not_taken_for_five_an_image(tmp_path: Path) -> None:
    write_precomp(tmp_path / "in", 400, 5, "txt")
    source = open_source(tmp_path / "in")
    # Two neighbours that keep two and three: blocks of five rows are those of one image everywhere else.
    keep = np.ones(2000, dtype=bool)
    keep[[1000, 1001, 1002, 1005, 1006]] = False
    write_filtered(source, keep, tmp_path / "out")
    check_precomp(source, keep, tmp_path / "out")


def test_whole_images_keep_one_row(tmp_path: Path) -> None:
    write_precomp(tmp_path / "in", 6, 5, "txt")
    write_filtered(open_source(tmp_path / "in"), np.repeat(kept(1, 2, 5, n=6), 5), tmp_path / "out")
    assert np.load(tmp_path / "out/train_ims.npy").shape == (3, 2, 3)
    assert (tmp_path / "out/vocab.json").exists()


def test_the_data_is_never_touched(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_clip(data / "in", [3], None, {}, np.float32)
    np.save(data / "a.npy", numbers(3, 2))
    folder, arrays = open_source(data / "in"), open_arrays(data / "a.npy", data / "a.npy")
    before = contents(tmp_path)
    keep = kept(0, n=3)
    (tmp_path / "link").symlink_to(data / "in")
    for source, out in (
        (folder, data / "in"), (folder, data / "in/new"), (folder, data), (arrays, data), (folder, tmp_path / "link"),
    ):  # fmt: skip
        with refused(ConflictError, out.resolve()):
            write_filtered(source, keep, out, overwrite=True)
    assert contents(tmp_path) == before
    write_filtered(arrays, keep, data / "filtered")
    with refused(TooFewError, tmp_path / "data/in"):
        write_filtered(folder, np.zeros(3, dtype=bool), tmp_path / "new")
    with pytest.raises(ValueError, match="edits of 4 rows for 3"):
        write_filtered(folder, np.ones(4, dtype=bool), tmp_path / "new")


def test_only_an_earlier_copy_is_replaced(tmp_path: Path) -> None:
    write_clip(tmp_path / "in", [2, 2], "csv", {"id": list("abcd")}, np.float32)
    source, out = open_source(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    write_filtered(source, kept(0, 3, n=4), out)
    with refused(ExistsError, out):
        write_filtered(source, kept(1, n=4), out)
    assert open_source(out).ids([0, 1]) == ["a", "d"]
    write_filtered(source, kept(1, n=4), out, overwrite=True)
    assert open_source(out).ids([0]) == ["b"]
    assert not (out / "img_emb/img_emb_1.npy").exists()
    (out / "notes.txt").write_text("mine")
    with refused(ExistsError, out, names="notes.txt"):
        write_filtered(source, kept(2, n=4), out, overwrite=True)
    assert open_source(out).ids([0]) == ["b"]
    with refused(ExistsError, tmp_path / "out/notes.txt"):
        write_filtered(source, kept(2, n=4), out / "notes.txt", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_a_failed_copy_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clip(tmp_path / "in", [2, 2], None, {}, np.float32)
    source = open_source(tmp_path / "in")

    def damaged(*_: object) -> None:
        raise DataError("the file is empty")

    with monkeypatch.context() as patch:
        patch.setattr(TableCopies, "write", damaged)  # when the vectors have been written
        patch.setattr("mispair.pairs.layouts.clip_retrieval.write_table", damaged)
        with refused(DataError):
            write_filtered(source, kept(0, 3, n=4), tmp_path / "out")
    monkeypatch.setattr(ClipRetrieval, "size", lambda *_: 1 << 60)
    with refused(WriteError, tmp_path / "out", "1152921504.61 GB"):
        write_filtered(source, kept(0, n=4), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("gone", [range(7), range(7, 14), range(14, 20)])
def test_ids_are_added_where_a_batch_keeps_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: range) -> None:
    monkeypatch.setattr("mispair.pairs.tables.BATCH", 7)
    write_clip(tmp_path / "in", [20], "parquet", {"caption": [f"text {row}" for row in range(20)]}, np.float32)
    source = open_source(tmp_path / "in")
    keep = ~np.isin(np.arange(20), gone)
    write_filtered(source, keep, tmp_path / "out")
    check_same(source, keep, open_source(tmp_path / "out"))
