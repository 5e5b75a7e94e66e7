import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import DamagedError, DataError, NotFoundError, ShapeError
from mispair.pairs import tables
from mispair.pairs.tables import Table, TablePart, open_table
from refusals import refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

cells = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def column(table: Table, name: str) -> list[str]:
    return [text for batch in table.batches([name]) for text in batch[0].to_pylist()]


def write_csv(path: Path, rows: list[list[str]], separator: str = ",", encoding: str = "utf-8") -> None:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL).writerows(rows)


@pytest.mark.parametrize("separator", tables.SEPARATORS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("quoted", [False, True])
def test_the_separator_is_found_in_the_header(tmp_path: Path, separator: str, encoding: str, quoted: bool) -> None:
    path = tmp_path / "a.csv"
    rows = [["Image", "TEXT", "size"], ["ä.jpg", "one dog", "3"], ["b.jpg", "two cats; or dogs" * quoted, "4"]]
    if quoted:
        write_csv(path, rows, separator, encoding)
    else:
        path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding=encoding)
    table = open_table(path)
    assert table.columns == ("Image", "TEXT", "size")
    assert (table.find("image_path"), table.find("caption"), table.find("id")) == ("Image", "TEXT", None)
    assert column(table, "Image") == ["ä.jpg", "b.jpg"]
    assert column(table, "TEXT") == [row[1] for row in rows[1:]]


@pytest.mark.parametrize("quoted", [False, True])
def test_a_cell_may_be_long(tmp_path: Path, quoted: bool) -> None:
    csv.field_size_limit(1 << 17)  # as Python has it
    rows = [["image", "caption"], ["a.jpg", "a cat " * 40_000], ["b.jpg", "a dog"]]
    if quoted:
        write_csv(tmp_path / "a.csv", rows)
    else:
        (tmp_path / "a.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    assert column(open_table(tmp_path / "a.csv"), "caption") == [row[1] for row in rows[1:]]


def test_the_table_of_flickr30k_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text('image_name| comment_number| comment\n1.jpg| 0| Two men, one 5" tall .\n')
    table = open_table(path)
    assert (table.find("image_path"), table.find("caption")) == ("image_name", "comment")
    assert column(table, "comment") == ['Two men, one 5" tall .']


@given(
    rows=st.lists(st.tuples(cells, cells), max_size=12),
    small=st.booleans(),
    separator=st.sampled_from(tables.SEPARATORS),
    data=st.data(),
)
def test_text_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    small: bool,
    separator: str,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("t") / "a.csv"
    write_csv(path, [["id", "caption"], *map(list, rows)], separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_SMALL", 1 << 24 if small else 0)
        patch.setattr(tables, "_CHUNK", 3)
        table = open_table(path)
        assert len(table) == len(rows)
        assert column(table, "id") == [row[0] for row in rows]
        wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
        assert table.cells("caption", np.array(wanted, dtype=np.int64)) == [rows[row][1] for row in wanted]


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=3), group=st.integers(1, 4), data=st.data())
def test_parquet_cells_come_from_any_part(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], group: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("p")
    whole: list[str] = []
    for number, size in enumerate(sizes):
        values = [None if (len(whole) + row) % 3 == 0 else len(whole) + row for row in range(size)]
        content = arrow.table({"n": arrow.array(values, arrow.int64())})
        parquet.write_table(content, folder / f"{number}.parquet", row_group_size=group)
        whole += ["" if value is None else str(value) for value in values]
    table = open_table(*(folder / f"{number}.parquet" for number in range(len(sizes))))
    assert len(table) == len(whole)
    assert column(table, "n") == whole
    wanted = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)) if whole else []
    assert table.cells("n", np.array(wanted, dtype=np.int64)) == [whole[row] for row in wanted]


def write_parts(folder: Path, contents: list[dict[str, Any]]) -> list[Path]:
    paths = [folder / f"{number}.parquet" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        parquet.write_table(arrow.table(content), path, row_group_size=2)
    return paths


@given(st.lists(st.lists(st.one_of(st.none(), cells), max_size=5), min_size=2, max_size=6), st.data())
def test_many_parquet_files_are_one_table(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[str | None]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    text = arrow.string()
    paths = write_parts(folder, [{"id": range(len(part)), "text": arrow.array(part, text)} for part in parts])
    table = open_table(*paths)
    whole = [cell or "" for part in parts for cell in part]
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8) if whole else st.just([])), np.int64)
    assert [len(part) for part in table.parts] == [len(part) for part in parts]
    assert [part.path for part in table.parts] == paths
    assert column(table, "text") == whole
    assert column(table, "id") == [str(row) for part in parts for row in range(len(part))]
    assert table.cells("text", rows) == [whole[row] for row in rows]
    if len(rows):
        assert table.take("id", rows).to_pylist() == [int(column(table, "id")[row]) for row in rows]


def test_parquet_files_may_have_texts_of_other_types(tmp_path: Path) -> None:
    contents: list[dict[str, Any]] = [
        {"text": ["a", "b", "c"]},
        {"text": ["d"]},
        {"text": [1, 2]},
        {"text": arrow.array(["e", "f"]).dictionary_encode()},
        {"text": [None]},
        {"text": arrow.array([b"g"])},
        {"text": ["h"]},
        {"text": ["i"]},
    ]
    table = open_table(*write_parts(tmp_path, contents))
    whole = ["a", "b", "c", "d", "1", "2", "e", "f", "", "g", "h", "i"]
    assert column(table, "text") == whole
    assert table.cells("text", np.arange(12)[::-1]) == whole[::-1]


def test_the_file_whose_texts_are_not_utf8_is_named(tmp_path: Path) -> None:
    bad = arrow.Array.from_buffers(arrow.string(), 1, arrow.array([b"\xff"]).buffers())
    paths = write_parts(tmp_path, [{"text": ["a"]}, {"text": ["b"]}, {"text": bad}])
    with refused(ShapeError, tmp_path / "2.parquet", names="UTF-8"):
        column(open_table(*paths), "text")


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_neighbouring_cells_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "text":
        write_csv(path, [["id", "caption"], *([str(row), f"text {row}"] for row in range(50))])
    else:
        parquet.write_table(arrow.table({"caption": [f"text {row}" for row in range(50)]}), path)
    table = open_table(path)
    reads: list[int] = []
    chunk = TablePart.chunk

    def counted(self: TablePart, number: int, column: str) -> Any:
        reads.append(number)
        return chunk(self, number, column)

    monkeypatch.setattr(TablePart, "chunk", counted)
    for row in range(50):
        assert table.cells("caption", np.array([row])) == [f"text {row}"]
    assert len(reads) == 1


def test_a_large_text_table_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    write_csv(path, [["id", "caption"], *([str(row), "some words " * 20] for row in range(20_000))])
    monkeypatch.setattr(tables, "_SMALL", 0)
    monkeypatch.setattr(tables, "_CHUNK", 1000)
    before = arrow.total_allocated_bytes()
    table = open_table(path)
    assert table.cells("id", np.array([19_999, 0, 4321])) == ["19999", "0", "4321"]
    assert arrow.total_allocated_bytes() - before < 500_000 < path.stat().st_size / 8
    for batch in table.batches(["id"]):  # no part of a buffer that holds the captions as well
        assert all(buffer is None or buffer.parent is None for buffer in batch[0].buffers())


def test_arrow_reads_a_small_text_table_from_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread of Arrow that lets go of Python's memory while the process ends aborts it.
    pyarrow = pytest.importorskip("pyarrow")
    opened, open_file = [], pyarrow.ipc.open_file

    def opening(file: Any) -> Any:
        opened.append(file)
        return open_file(file)

    monkeypatch.setattr(pyarrow.ipc, "open_file", opening)
    path = tmp_path / "pairs.csv"
    path.write_text("id,caption\na,a dog\n", encoding="utf-8")
    assert open_table(path).cells("caption", np.array([0])) == ["a dog"]
    assert [type(file) for file in opened] == [pyarrow.Buffer]


def test_lenient_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,caption\n1\n , \n2,two,,\n")
    with refused(ShapeError, path, names="row 1"):
        open_table(path)
    table = open_table(path, lenient=True)
    assert (column(table, "id"), column(table, "caption")) == (["1", "2"], ["", "two"])
    path.write_text("id,caption\n1,two,three\n")
    with refused(ShapeError, path, names="row 1"):
        open_table(path, lenient=True)


def test_text_in_utf_16(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\tcaption\n1\tÄpfel\n", encoding="utf-16")
    assert column(open_table(tmp_path / "a.csv"), "caption") == ["Äpfel"]
    (tmp_path / "a.csv").write_bytes("id\tcaption\n1\tÄpfel\n".encode("utf-16")[:-1])
    with refused(DamagedError, tmp_path / "a.csv", names="UTF-16"):
        open_table(tmp_path / "a.csv")


def test_a_dictionary_column_is_text(tmp_path: Path) -> None:
    values = arrow.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(arrow.table({"id": values}), tmp_path / "a.parquet")
    assert column(open_table(tmp_path / "a.parquet"), "id") == ["a", "b", "a"]


def test_texts_of_parquet_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    wrong = arrow.Array.from_buffers(arrow.string(), 1, arrow.array([b"\xff"], arrow.binary()).buffers())
    parquet.write_table(arrow.table({"id": wrong}), tmp_path / "a.parquet")
    with refused(ShapeError, tmp_path / "a.parquet", names="UTF-8"):
        column(open_table(tmp_path / "a.parquet"), "id")


@pytest.mark.posix
def test_a_table_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.parquet"
    with path.open("wb") as file:
        parquet.write_table(arrow.table({"id": ["a"]}), file)
    with refused(DamagedError, path, names="UTF-8"):
        open_table(path)


@pytest.mark.slow
def test_thirty_thousand_columns(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(30_000)]
    (tmp_path / "a.csv").write_text(f"{','.join(names)}\n{','.join(['1'] * len(names))}\n")
    assert len(open_table(tmp_path / "a.csv").columns) == 30_000


@pytest.mark.parametrize(
    ("content", "kind", "names"),
    [
        (b"", DamagedError, ""),
        (b"PAR1 and then nothing", DamagedError, ""),
        (b"PK\x03\x04\x00\x00", DamagedError, ""),
        ("id,caption\n1,caf\u00e9\n".encode() + b"2,caf\xe9\n", DamagedError, "line 3"),
        (b"id,caption\n1,two, three\n", ShapeError, "(id, caption)"),
        (b"id,caption\n1\n", ShapeError, "row 1"),
        (b'id,caption\n1,"two\n2,three\n', DamagedError, "line 3"),
        (b"id,caption\r1,two\r", DamagedError, "line 1"),
        (b"id,caption,id\n1,2,3\n", ShapeError, "'id'"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, content: bytes, kind: type[DataError], names: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with refused(kind, path, names):
        open_table(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "none.csv"):
        open_table(tmp_path / "none.csv")
    with refused(DamagedError, tmp_path):
        open_table(tmp_path)
    (tmp_path / "a.csv").write_text("width,height\n1,2\n")
    (tmp_path / "b.csv").write_text("id\n1\n")
    with refused(ShapeError, tmp_path / "b.csv", names="a.csv"):
        open_table(tmp_path / "a.csv", tmp_path / "b.csv")
    assert open_table(tmp_path / "b.csv").find("id") == "id"


def test_a_column_of_lists_is_refused(tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"id": [[1], [2]]}), tmp_path / "a.parquet")
    with refused(ShapeError, tmp_path / "a.parquet"):
        column(open_table(tmp_path / "a.parquet"), "id")


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\n\n1\n\n2\n\n")
    table = open_table(tmp_path / "a.csv")
    assert table.parts[0].format is not None
    assert column(table, "id") == ["1", "2"]


def test_columns_of_unequal_lengths_are_refused() -> None:
    """As in a damaged parquet file, whose columns are read one by one."""
    table = Table.of(arrow.table({"a": ["x", "y"]}), "t")
    with refused(DamagedError, "t"):
        table.joined("a", [arrow.array(["x"], arrow.large_string())])
