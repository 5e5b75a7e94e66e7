"""Each layout: read, written clean and mended, read again, the same pairs."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from layouts import CAPTIONS, COLOURS, LAYOUTS, csv_file, image, photos, triples
from mispair.errors import ExistsError
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.copies import write_copy
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.shards import ArrayRows, SideRows
from mispair.pairs.source import Source
from refusals import refused


def encoded(pairs: Source) -> Source:
    vectors = SideRows.of([ArrayRows(np.ones((len(pairs), 2), np.float32))])
    return pairs.with_vectors(vectors, vectors, {})


# Row 0 goes; 1 gets the caption of 4, 2 the image of 5; 3, 4 and 5 stay.
EDITS = Edits(
    np.array([False, True, True, True, True, True]), np.array([0, 1, 5, 3, 4, 5]), np.array([0, 4, 2, 3, 4, 5])
)


def open_again(path: Path, out: Path, pairs: Source) -> Source:
    place = out if path.is_dir() else out / path.name
    return open_raw(place, pairs.outside)


@pytest.fixture(params=LAYOUTS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return LAYOUTS[request.param](tmp_path)


def opened(path: Path) -> tuple[Source, Source]:
    photos = path.parent / "photos"
    pairs = open_raw(path, photos if path.is_file() and photos.is_dir() else None)
    return pairs, encoded(pairs)


def test_read(path: Path) -> None:
    pairs, _ = opened(path)
    found = triples(pairs)
    assert [content for content, _ in found] == [image(colour) for colour in COLOURS]
    assert [text.replace("\t", " ") for _, text in found] == [text.replace("\t", " ") for text in CAPTIONS]


def test_clean_and_mended_are_read_again(path: Path, tmp_path: Path) -> None:
    pairs, source = opened(path)
    before = triples(pairs)
    clean = Edits.keeping(EDITS.keep)
    write_copy(source, clean, tmp_path / "clean")
    assert triples(open_again(path, tmp_path / "clean", pairs)) == before[1:]
    write_copy(source, EDITS, tmp_path / "mended")
    mended = [(before[i][0], before[c][1]) for i, c in zip(EDITS.image_from[1:], EDITS.caption_from[1:], strict=True)]
    again = triples(open_again(path, tmp_path / "mended", pairs))
    assert sorted(again) == sorted(mended)
    assert triples(pairs) == before  # the data is only read


def test_a_copy_of_all_rows_is_the_same_file(path: Path, tmp_path: Path) -> None:
    _, source = opened(path)
    write_copy(source, Edits.keeping(np.ones(6, dtype=bool)), tmp_path / "same")
    if path.is_dir() or path.suffix == ".csv":
        for file in (tmp_path / "same").rglob("*"):
            if file.suffix in (".csv", ".txt", ".png"):
                original = path / file.relative_to(tmp_path / "same") if path.is_dir() else path
                assert file.read_bytes() == original.read_bytes()


def test_rewritten_captions(path: Path, tmp_path: Path) -> None:
    pairs, source = opened(path)
    own = np.arange(6)
    edits = Edits(np.ones(6, dtype=bool), own, own, {2: "a new, “better” caption"})
    write_copy(source, edits, tmp_path / "new")
    expected = pairs.texts()
    expected[2] = "a new, “better” caption"
    assert open_again(path, tmp_path / "new", pairs).texts() == expected


def test_only_what_is_known_is_replaced(path: Path, tmp_path: Path) -> None:
    _, source = opened(path)
    clean = Edits.keeping(EDITS.keep)
    out = write_copy(source, clean, tmp_path / "out")
    write_copy(source, clean, out, overwrite=True)
    (out / "thesis.txt").write_text("mine")
    with refused(ExistsError, out, names="thesis.txt"):
        write_copy(source, clean, out, overwrite=True)
    assert source.size(clean) > 0


def test_a_copy_keeps_a_caption_without_image_where_it_was(tmp_path: Path) -> None:
    path = LAYOUTS["text files"](tmp_path)
    (path / "lost.txt").write_text("a lost pig\n")
    pairs, source = opened(path)
    assert len(pairs) == 7
    lost = pairs.ids().index("lost.txt#0")
    every = write_copy(source, Edits.keeping(np.ones(7, dtype=bool)), tmp_path / "every")
    assert (every / "lost.txt").read_text() == "a lost pig\n"
    without = write_copy(source, Edits.keeping(np.arange(7) != lost), tmp_path / "without")
    assert len(open_raw(without)) == 6
    assert sorted(file.name for file in tmp_path.iterdir()) == ["every", "photos", "without"]


def test_text_files_stay_as_they_are_unless_a_caption_changes(tmp_path: Path) -> None:
    path = LAYOUTS["text files"](tmp_path)
    texts = {"p.txt": " café\r\n\r\na dog".encode("utf-16"), "q.txt": b"caf\xe9", "r.txt": b"a cow\na pig"}
    for name, content in texts.items():
        (path / name).write_bytes(content)
    for name in ("p.png", "q.png", "r.png", "r.webp", "s.png"):  # r.txt is of two images, and s has no text
        (path / name).write_bytes(image(1))
    pairs, source = opened(path)
    ids = pairs.ids()
    every = write_copy(source, Edits.keeping(np.ones(len(ids), dtype=bool)), tmp_path / "every")
    assert {name: (every / name).read_bytes() for name in texts} == texts
    assert not (every / "s.txt").exists()
    keep = np.array([name not in ("p.png#0", "r.png#0", "r.png#1") for name in ids])
    own = np.arange(len(ids))
    edits = Edits(keep, own, own, {ids.index("r.webp#1"): "a horse"})
    some = write_copy(source, edits, tmp_path / "some")
    assert [(some / name).read_text("utf-8") for name in ("p.txt", "r.txt")] == ["a dog\n", "a cow\na horse\n"]
    assert (some / "q.txt").read_bytes() == texts["q.txt"]
    edits = Edits(own != ids.index("p.png#0"), np.where(own == ids.index("q.png#0"), ids.index("r.png#0"), own), own)
    moved = write_copy(source, edits, tmp_path / "moved")
    assert (moved / "r.txt").read_text("utf-8") == "café\na cow\na pig\n"  # once, though two images have it
    assert not (moved / "q.txt").exists()


def test_a_new_caption_that_the_encoding_of_a_table_lacks(tmp_path: Path) -> None:
    path = csv_file("cp1252", ",", header=True)(tmp_path)
    pairs, source = opened(path)
    own = np.arange(len(pairs))
    for number, caption in enumerate(("“naïve”", "一只狗")):
        out = write_copy(source, Edits(own >= 0, own, own, {0: caption}), tmp_path / f"new{number}")
        expected = [caption, *pairs.texts()[1:]]
        assert open_again(path, out, pairs).texts() == expected
        assert (b"says \x93no\x94" in (out / path.name).read_bytes()) == (not number)


def test_columns_and_notes_of_other_things_stay(tmp_path: Path) -> None:
    for name, key in (("COCO", "info"), ("Karpathy", "dataset")):
        path = LAYOUTS[name](tmp_path / name)
        pairs, source = opened(path)
        write_copy(source, EDITS, tmp_path / f"{name}-out")
        content: dict[str, Any] = json.loads((tmp_path / f"{name}-out" / path.name).read_text())
        assert content[key] == json.loads(path.read_text())[key]
        assert len(pairs) == 6
    path = LAYOUTS["imagefolder"](tmp_path / "lines")
    write_copy(opened(path)[1], EDITS, tmp_path / "lines-out")
    lines = (tmp_path / "lines-out/train/metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize("embedded", [False, True])
def test_a_column_may_be_empty_in_the_first_file(embedded: bool, tmp_path: Path) -> None:
    """Arrow gives such a column no type, but a cell of another file may come into it."""
    photos(tmp_path / "photos")
    (tmp_path / "set").mkdir()
    for part, numbers in enumerate((range(3), range(3, 6))):
        names = [f"{n}.png" if part else None for n in numbers]
        images = [{"bytes": image(n), "path": name} for n, name in zip(numbers, names, strict=True)]
        columns = {"image": images if embedded else names, "text": [CAPTIONS[n] if part else None for n in numbers]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"set/{part}.parquet")
    pairs = open_raw(tmp_path / "set", tmp_path / "photos")
    assert pairs.texts() == ["", "", "", *CAPTIONS[3:]]
    write_copy(encoded(pairs), EDITS, tmp_path / "out")
    again = open_raw(tmp_path / "out", tmp_path / "photos")
    assert again.image_texts() == ["", "5.png", "3.png", "4.png", "5.png"]
    assert again.texts() == [CAPTIONS[4], "", *CAPTIONS[3:]]
    if embedded:
        assert [again.read_image(row) for row in range(5)] == [image(n) for n in (1, 5, 3, 4, 5)]


def test_samples_that_stay_are_copied_byte_for_byte(tmp_path: Path) -> None:
    path = LAYOUTS["img2dataset"](tmp_path)
    write_copy(opened(path)[1], EDITS, tmp_path / "out")
    with tarfile.open(path / "00001.tar") as before, tarfile.open(tmp_path / "out/00001.tar") as after:
        assert after.getnames() == before.getnames()
    assert (path / "00001.tar").read_bytes().startswith((tmp_path / "out/00001.tar").read_bytes().rstrip(b"\0"))


def test_what_is_known_about_an_image_comes_with_it(tmp_path: Path) -> None:
    path = LAYOUTS["img2dataset"](tmp_path)
    pairs, source = opened(path)
    assert pairs.ids() == [f"{n:032x}" for n in COLOURS]
    assert source.shards == (("00000", 4), ("00001", 2))
    write_copy(source, EDITS, tmp_path / "out")
    table = pyarrow.parquet.read_table(tmp_path / "out/00000.parquet").to_pylist()
    assert [row["key"] for row in table] == [f"{n:09d}" for n in (1, 2, 3)]  # failed downloads are gone as well
    assert [row["url"] for row in table] == [f"http://a/{n}.png" for n in (1, 5, 3)]
    assert [row["caption"] for row in table] == [CAPTIONS[n] for n in (4, 2, 3)]
    assert [row["similarity"] for row in table] == [None, None, 3 / 8]  # of pairs that have changed nobody knows it
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        known = [json.load(file) for n in (1, 2, 3) if (file := tar.extractfile(f"{n:09d}.json"))]
    assert [(entry["url"], entry["caption"], entry["similarity"], entry["uid"]) for entry in known] == [
        (row["url"], row["caption"], row["similarity"], f"{n:032x}") for n, row in zip((1, 2, 3), table, strict=True)
    ]


def test_a_column_may_be_empty_in_the_first_table_of_tars(tmp_path: Path) -> None:
    path = LAYOUTS["img2dataset"](tmp_path)
    for name in ("00000", "00001"):
        table = pyarrow.parquet.read_table(path / f"{name}.parquet")
        notes = pyarrow.array([None] * len(table) if name == "00000" else ["a", "b", "c"])
        pyarrow.parquet.write_table(table.append_column("license", notes), path / f"{name}.parquet")
    write_copy(opened(path)[1], EDITS, tmp_path / "out")
    table = pyarrow.parquet.read_table(tmp_path / "out/00000.parquet")
    assert table["license"].to_pylist() == [None, "b", None]  # 2 has the image of 5


def test_entries_come_from_other_tables_with_the_images(tmp_path: Path) -> None:
    path = LAYOUTS["img2dataset"](tmp_path)
    table = pyarrow.parquet.read_table(path / "00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 1), path / "00001.parquet")  # 5 has no entry
    crossed = Edits(np.ones(6, dtype=bool), np.array([4, 5, 2, 0, 4, 5]), np.arange(6))
    write_copy(opened(path)[1], crossed, tmp_path / "out")
    table = pyarrow.parquet.read_table(tmp_path / "out/00000.parquet").to_pylist()
    assert [row["url"] for row in table] == ["http://a/4.png", None, "http://a/2.png", "http://a/0.png"]


def test_webdataset_and_datasets_read_the_copies(tmp_path: Path) -> None:
    datasets, webdataset = pytest.importorskip("datasets"), pytest.importorskip("webdataset")
    write_copy(opened(LAYOUTS["img2dataset"](tmp_path))[1], EDITS, tmp_path / "tars-out")
    tars = [str(path) for path in sorted((tmp_path / "tars-out").glob("*.tar"))]
    found = list(webdataset.WebDataset(tars, shardshuffle=False).to_tuple("png", "txt"))
    assert found == [(image(i), CAPTIONS[c].encode()) for i, c in ((1, 4), (5, 2), (3, 3), (4, 4), (5, 5))]
    write_copy(opened(LAYOUTS["Hugging Face"](tmp_path))[1], EDITS, tmp_path / "set-out")
    copy = datasets.Dataset.from_parquet([str(path) for path in sorted((tmp_path / "set-out").rglob("*.parquet"))])
    assert isinstance(copy.features["image"], datasets.Image)
    assert copy[0]["image"].getpixel((0, 0)) == (40, 7, 9)
    assert copy["n"][:] == [1, 2, 3, 4, 5]
    write_copy(opened(LAYOUTS["imagefolder"](tmp_path / "x"))[1], EDITS, tmp_path / "folder-out")
    folder = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "folder-out"), cache_dir=str(tmp_path / "hf"))
    assert folder["train"]["text"][:] == [CAPTIONS[c] for c in (4, 2, 3, 4, 5)]
