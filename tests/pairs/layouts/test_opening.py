import csv
import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import (
    ConflictError,
    DamagedError,
    DataError,
    NotFoundError,
    ShapeError,
    TooFewError,
)
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.source import Source
from refusals import refused


def write(path: Path, content: str | bytes | object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, (str, bytes)):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        path.write_text(json.dumps(content))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.jpg", "b.jpg", "sub/c.jpg"):
        write(tmp_path / name, b"not looked into")
    return tmp_path


def short(pairs: Source, folder: Path) -> list[tuple[str, str, str]]:
    files = [pairs.image_file(row) for row in range(len(pairs))]
    images = ["" if file is None else os.path.relpath(file, folder) for file in files]
    return list(zip(pairs.ids(), images, pairs.texts(), strict=True))


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
def test_separator_and_byte_order_mark(folder: Path, mark: str, start: str) -> None:
    text = f'{start}image{mark}caption\na.jpg{mark}A dog.\n\nsub/c.jpg{mark}"one{mark} ""two""\nthree"\n'
    assert short(open_raw(write(folder / "t.csv", text)), folder) == [
        ("a.jpg#0", "a.jpg", "A dog."),
        ("sub/c.jpg#0", "sub/c.jpg", f'one{mark} "two"\nthree'),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("t.csv", "image,caption\na.jpg,A dog.\n"), ("t.jsonl", '{"file_name": "a.jpg", "caption": "A dog."}\n')],
)
def test_the_folder_of_one_table(folder: Path, name: str, text: str) -> None:
    write(folder / name, text)
    write(folder / "manifest.csv", "id,action\na.jpg#0,kept\n")
    assert short(open_raw(folder), folder) == [("a.jpg#0", "a.jpg", "A dog.")]
    write(folder / "b.txt", "A cat.")  # images with text files
    assert ("b.jpg#0", "b.jpg", "A cat.") in short(open_raw(folder), folder)


def test_file_of_a_spreadsheet_in_utf_16(folder: Path) -> None:
    path = write(folder / "t.txt", "image\tcaption\r\na.jpg\tÄpfel\r\n".encode("utf-16"))
    assert short(open_raw(path), folder) == [("a.jpg#0", "a.jpg", "Äpfel")]


@pytest.mark.parametrize(
    ("header", "order"),
    [
        ("File Path,Text,id", "itc"),
        ("title,caption,filename", "xti"),
        ("image_name| comment_number| comment", "ixt"),
        ("KEY;IMG;Description", "cit"),
    ],
)
def test_usual_names_of_columns(folder: Path, header: str, order: str) -> None:
    mark = next(mark for mark in ",;|" if mark in header)
    values = {"i": "a.jpg", "t": "A dog.", "c": "7", "x": "9"}
    path = write(folder / "t.csv", f"{header}\n{mark.join(values[kind] for kind in order)}\n")
    assert short(open_raw(path), folder) == [("7" if "c" in order else "a.jpg#0", "a.jpg", "A dog.")]


def test_named_columns(folder: Path) -> None:
    path = write(folder / "t.tsv", "image\tbild\twords\nx.jpg\tb.jpg\tA cat.\n")
    rows = open_raw(path, columns={"image_path": "bild", "caption": "words"})
    assert short(rows, folder) == [("b.jpg#0", "b.jpg", "A cat.")]
    with refused(NotFoundError, path, names="image"):
        open_raw(path)
    with refused(NotFoundError, path, names="image"):
        open_raw(path, columns={"image_path": "foto", "caption": "words"})


def test_quotes_that_a_tab_separated_file_does_not_mean(folder: Path) -> None:
    path = write(folder / "t.tsv", 'image\tcaption\na.jpg\t"Stop" says the sign\nb.jpg\t"never closed\n')
    assert open_raw(path).texts() == ['"Stop" says the sign', '"never closed']


def test_short_and_blank_rows_stay(folder: Path) -> None:
    path = write(folder / "t.csv", "image,caption,extra\na.jpg\nb.jpg,  ,\n,A dog.,,,\n")
    assert short(open_raw(path), folder) == [
        ("a.jpg#0", "a.jpg", ""),
        ("b.jpg#0", "b.jpg", ""),
        ("row#0", "", "A dog."),
    ]


def test_ids_are_unique(folder: Path) -> None:
    path = write(folder / "t.csv", "id,image,caption\n1,a.jpg,x\n1,a.jpg,y\n1#1,b.jpg,z\n,b.jpg,w\n,b.jpg,v\n")
    assert open_raw(path).ids() == ["1", "1#1", "1#1#1", "b.jpg#1", "b.jpg#2"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "1", "1#1", "a.jpg#0"]),
            st.sampled_from(["a.jpg", "b.jpg", "", "gone.jpg"]),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")),
        ),
        min_size=1,
    ),
    st.sampled_from(",;\t|"),
)
def test_every_row_of_a_table_comes_back(folder: Path, table: list[tuple[str, str, str]], mark: str) -> None:
    table = [("first", "a.jpg", "A dog."), *table]
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=mark, quoting=csv.QUOTE_ALL)
        writer.writerows([("id", "image", "caption"), *table])
    rows = open_raw(folder / "t.csv")
    kept = [row for row in table if any(map(str.strip, row))]  # a wholly blank line is no row
    assert [(name, caption) for _, name, caption in short(rows, folder)] == [
        (image, caption.strip()) for _, image, caption in kept
    ]
    assert len(set(rows.ids())) == len(rows)


def test_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns: dict[str, list[Any]] = {"uid": [5, 6], "Image": ["a.jpg", None], "text": [None, " A dog."]}
    parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    assert short(open_raw(folder / "t.parquet"), folder) == [("5", "a.jpg", ""), ("6", "", "A dog.")]
    parquet.write_table(pyarrow.table({"image": [{"width": 1}], "caption": ["y"]}), folder / "t.parquet")
    with refused(ShapeError, folder / "t.parquet"):
        open_raw(folder / "t.parquet")
    parquet.write_table(pyarrow.table({"image": ["a.jpg"], "words": ["y"]}), folder / "t.parquet")
    with refused(NotFoundError, folder / "t.parquet", names="image"):
        open_raw(folder / "t.parquet")
    write(folder / "t.parquet", b"PAR1 and nonsense")
    with refused(DamagedError, folder / "t.parquet"):
        open_raw(folder / "t.parquet")


def test_coco(folder: Path) -> None:
    content = {
        "info": {},
        "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "c.jpg"}],
        "annotations": [
            {"id": 10, "image_id": 2, "caption": "A cat.\n"},
            {"id": 11, "image_id": 1, "caption": "half a character \ud800"},
            {"id": 12, "image_id": 3, "caption": "Whose image is not listed"},
            {"image_id": 2, "caption": None},
        ],
    }
    path = write(folder / "captions.json", content)
    assert short(open_raw(path, folder / "sub"), folder / "sub") == [
        ("10", "c.jpg", "A cat."),
        ("11", "a.jpg", "half a character ?"),
        ("12", "", "Whose image is not listed"),
        ("c.jpg#1", "c.jpg", ""),
    ]


def test_karpathy(folder: Path) -> None:
    sentences = [{"raw": "A dog.", "sentid": 4, "tokens": ["a", "dog"]}, {"raw": "Two dogs.", "sentid": 5}]
    images = [
        {"filename": "a.jpg", "split": "train", "sentences": sentences},
        {"filename": "c.jpg", "filepath": "sub", "split": "test", "sentences": [{"raw": "A cat."}]},
        {"filename": "b.jpg", "split": "test", "sentences": []},
    ]
    assert short(open_raw(write(folder / "dataset.json", {"images": images})), folder) == [
        ("4", "a.jpg", "A dog."),
        ("5", "a.jpg", "Two dogs."),
        ("sub/c.jpg#0", "sub/c.jpg", "A cat."),
        ("b.jpg#0", "b.jpg", ""),
    ]


def test_folder_of_images_and_texts(folder: Path) -> None:
    write(folder / "a.txt", "\ufeffA dog.\r\n\r\n Two dogs.\n")
    write(folder / "sub/c.txt", b"caf\xe9")
    write(folder / "README.txt", "not a caption")
    write(folder / ".hidden/a.jpg", "")
    write(folder / "._a.jpg", "")
    expected = [
        ("a.jpg#0", "a.jpg", "A dog."),
        ("a.jpg#1", "a.jpg", "Two dogs."),
        ("b.jpg#0", "b.jpg", ""),
        ("sub/c.jpg#0", "sub/c.jpg", "café"),
    ]
    assert short(open_raw(folder), folder) == expected
    write(folder.parent / "texts/b.txt", "A cat.")
    assert short(open_raw(folder.parent / "texts", folder), folder)[1] == ("b.jpg#0", "b.jpg", "A cat.")


def test_a_caption_that_lost_its_image_is_a_row(folder: Path) -> None:
    write(folder / "a.txt", "A dog.")
    write(folder / "b.TXT", "A cat.")
    write(folder / "sub/c.txt", "A cow.")
    write(folder / "sub/b.txt", "A lost pig.\nA pig.")
    write(folder / "c.txt", "")
    write(folder / "License.txt", "All rights reserved.")
    write(folder / ".notes.txt", "hidden")
    pairs = open_raw(folder)
    assert short(pairs, folder) == [
        ("a.jpg#0", "a.jpg", "A dog."),
        ("b.jpg#0", "b.jpg", "A cat."),
        ("c.txt#0", "", ""),
        ("sub/b.txt#0", "", "A lost pig."),
        ("sub/b.txt#1", "", "A pig."),
        ("sub/c.jpg#0", "sub/c.jpg", "A cow."),
    ]
    assert [pairs.has_image(row) for row in range(6)] == [True, True, False, False, False, True]
    before = pairs.state()
    write(folder / "sub/b.txt", "Another pig.")
    assert pairs.state() != before


def test_other_texts_in_a_folder_of_images_are_no_captions(folder: Path) -> None:
    """As many as captions, they are something else: tags, or logs."""
    for name in ("a", "b", "a_tags", "b_tags"):
        write(folder / f"{name}.txt", name)
    pairs = open_raw(folder)
    assert short(pairs, folder)[-2:] == [("b.jpg#0", "b.jpg", "b"), ("sub/c.jpg#0", "sub/c.jpg", "")]
    (note,) = pairs.notes
    assert note.startswith("2 text files without an image, such as a_tags.txt, are not read")
    (folder / "a_tags.txt").unlink()
    assert open_raw(folder).notes == ()


BROKEN = {
    "empty.csv": (b"", DamagedError, ""),
    "blank.csv": (b"\n \n", DamagedError, ""),
    "header.csv": (b"image,caption\n", DataError, ""),
    "comma.csv": (b"image,caption\na.jpg,A dog, running\n", ShapeError, "row 1"),
    "open.csv": (b'image,caption\na.jpg,"A dog\nb.jpg,A cat\n', DamagedError, "line 3"),
    "after.csv": (b'image,caption\na.jpg,"A" dog\n', DamagedError, "line 2"),
    "damaged.csv": ("image,caption\na.jpg,café\n".encode() + b"b.jpg,caf\xe9\n", DamagedError, "line 3"),
    "none.csv": (b"one,two\n1,2\n", NotFoundError, "`image_column` and `caption_column`"),
    "web.csv": (b"image,caption\nhttps://a.b/c.jpg,A dog\n", DataError, "https://a.b/c.jpg"),
    "away.csv": (b"image,caption\nz.jpg,A dog\n", DataError, "z.jpg"),
    "nameless.csv": (b"image,caption\n,A dog\n", DataError, ""),
    "silent.csv": (b"image,caption\na.jpg,\nb.jpg,  \n", TooFewError, ""),
    "packed.csv.gz": (gzip.compress(b"image,caption"), DamagedError, "gunzip"),
    "packed.tar": (gzip.compress(b"image,caption"), DamagedError, "gunzip"),
    "table.xlsx": (b"PK", DamagedError, ".csv"),
    "cut.json": (b'{"images": [', DamagedError, "JSON"),
    "deep.json": (b"[" * 100_000, DamagedError, "JSON"),
    "digits.json": (b'{"images": [{"id": %s}]}' % (b"9" * 5000), DamagedError, "JSON"),
    "list.json": (b"[1]", DamagedError, "list"),
    "other.json": (b'{"data": []}', DamagedError, "data"),
    "images.json": (b'{"images": [{"file_name": "a.jpg"}]}', DamagedError, '"sentences"'),
    "boxes.json": (b'{"images": [], "annotations": [{"bbox": []}]}', DamagedError, '"caption"'),
    "entries.json": (b'{"images": {"a": 1}, "annotations": []}', DamagedError, '"images"'),
    "sentence.json": (b'{"images": [{"sentences": "A dog"}]}', DamagedError, '"sentences"'),
    "nothing.json": (b'{"images": [], "annotations": []}', DataError, ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_explained(folder: Path, name: str) -> None:
    content, kind, names = BROKEN[name]
    with pytest.raises(kind) as caught:
        open_raw(write(folder / name, content))
    assert names in str(caught.value)
    assert name in str(caught.value) or kind is DataError
    assert "\n" not in str(caught.value)


def test_images_outside_and_an_audit_are_explained(folder: Path) -> None:
    (folder / "results").mkdir()
    table = write(folder / "results/t.csv", f"image,caption\n{folder}/a.jpg,A dog.\n../b.jpg,A cat.\n")
    with refused(ConflictError, folder / "results", f"`images={folder}`"):
        open_raw(table)
    assert len(open_raw(table, allow_outside=True)) == len(open_raw(table, folder)) == 2
    write(folder / "results/audit.json", "{}")
    write(folder / "results/pairs.parquet", "")
    with refused(ConflictError, folder / "results"):
        open_raw(folder / "results")


def test_wrong_folders_are_explained(folder: Path) -> None:
    table = write(folder / "t.csv", "image,caption\na.jpg,A dog.\n")
    with refused(NotFoundError, folder / "nowhere.csv"):
        open_raw(folder / "nowhere.csv")
    with refused(NotFoundError, folder / "nowhere"):
        open_raw(table, folder / "nowhere")
    with pytest.raises(DataError):
        open_raw(table, folder / "sub")
    table.unlink()
    with refused(NotFoundError, folder):
        open_raw(folder)
    (folder / "empty").mkdir()
    with refused(NotFoundError, folder / "empty"):
        open_raw(folder / "empty")
    with refused(ConflictError, folder):
        open_raw(folder, columns={"image_path": "image"})


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("header", ["image;caption\r\n", ""])
def test_any_encoding_with_and_without_a_header(folder: Path, encoding: str, header: str) -> None:
    text = f"{header}a.jpg;Ein Ärgernis, oder? „Nein“\r\nsub/c.jpg;café\r\n"
    pairs = open_raw(write(folder / "t.csv", text.encode(encoding)))
    assert short(pairs, folder) == [
        ("a.jpg#0", "a.jpg", "Ein Ärgernis, oder? „Nein“"),
        ("sub/c.jpg#0", "sub/c.jpg", "café"),
    ]


def test_without_a_header_columns_have_numbers(folder: Path) -> None:
    path = write(folder / "t.csv", "7,short,a.jpg,a long sentence about a dog\n8,brief,b.jpg,another one on cats\n")
    assert open_raw(path).texts() == ["a long sentence about a dog", "another one on cats"]
    pairs = open_raw(path, columns={"caption": "2", "id": "1"})
    assert short(pairs, folder) == [("7", "a.jpg", "short"), ("8", "b.jpg", "brief")]


def test_flickr8k_token_file(folder: Path) -> None:
    path = write(folder / "Flickr8k.token.txt", 'a.jpg#0\tA dog, running .\na.jpg#1\tTwo "dogs\n\nb.jpg#0\tA cat\n')
    assert short(open_raw(path), folder) == [
        ("a.jpg#0", "a.jpg", "A dog, running ."),
        ("a.jpg#1", "a.jpg", 'Two "dogs'),
        ("b.jpg#0", "b.jpg", "A cat"),
    ]


@pytest.mark.parametrize("content", [b"no tar", b"x" * 600, b""])
def test_a_damaged_tar(folder: Path, content: bytes) -> None:
    with refused(DamagedError, folder / "a.tar"):
        open_raw(write(folder / "a.tar", content))


def tar_of(folder: Path, *names: str, content: bytes = b"abc") -> Path:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return folder / "a.tar"


@pytest.mark.parametrize(
    ("content", "caption"),
    [
        *(("„Äpfel“, café".encode(encoding), "„Äpfel“, café") for encoding in ("cp1252", "utf-8-sig", "utf-16")),
        ("一只狗".encode()[:-1], "一只\ufffd"),  # cut off
        (b"caf\xe9 \x81", "café \ufffd"),
    ],
)
def test_any_encoding_in_text_files_and_tars(folder: Path, content: bytes, caption: str) -> None:
    write(folder / "a.txt", content)
    assert open_raw(folder).texts()[0] == caption
    assert open_raw(tar_of(folder, "1.jpg", "1.txt", content=content)).texts() == [caption]


@pytest.mark.parametrize("names", [("1.jpg", "2.jpg", "1.txt", "2.txt"), ("1.jpg", "1.cls", "2.jpg", "2.cls")])
def test_a_tar_without_whole_samples_is_refused(folder: Path, names: tuple[str, ...]) -> None:
    with refused(TooFewError, folder / "a.tar", names="0001.jpg"):
        open_raw(tar_of(folder, *names))


def test_names_with_more_dots_in_a_tar_are_told(folder: Path) -> None:
    pairs = open_raw(tar_of(folder, "1.jpg", "1.txt", "1.seg.png", "Mr. A.jpg", "Mr. A.txt", "Mr. B.jpg", "Mr. B.txt"))
    assert pairs.ids() == ["1", "Mr"]
    (note,) = pairs.notes
    assert note.startswith(
        "A sample has no image, but members such as Mr. A.jpg: the name of a sample ends at its first"
    )


def test_a_tar_that_was_cut_or_damaged(folder: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("0.jpg", "0.txt", f"{'long' * 60}.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 2000
            tar.addfile(info, io.BytesIO(b"y" * 2000))
    pairs = open_raw(write(folder / "a.tar", buffer.getvalue()))
    assert pairs.image_texts() == ["0", "long" * 60]
    assert pairs.read_image(1) == b"y" * 2000
    flipped = bytearray(buffer.getvalue())
    flipped[2560] ^= 1  # in the name of the second member, which its checksum covers
    for damaged in (buffer.getvalue()[:3000], bytes(flipped)):
        with refused(DamagedError, folder / "a.tar"):
            open_raw(write(folder / "a.tar", damaged))


def test_half_a_character_at_the_end_of_lines_is_refused(tmp_path: Path) -> None:
    content = '{"image": "a.png", "caption": "a dog"}\n'.encode("utf-16-be")
    (tmp_path / "t.jsonl").write_bytes(content + b"\x00")
    with refused(DamagedError, tmp_path / "t.jsonl"):
        open_raw(tmp_path / "t.jsonl")
