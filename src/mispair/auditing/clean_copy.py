"""Tables of results, and a copy of the data without the pairs that are not kept."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.auditing.sources.shards import File
from mispair.auditing.sources.source import Layout, Source
from mispair.auditing.sources.tables import Part, Text
from mispair.data import precomp
from mispair.data.npy import open_array
from mispair.data.pairs import IntArray
from mispair.errors import DataError
from mispair.support.files import Json, read_json, replacing, write_atomically
from mispair.support.formatting import listed
from mispair.support.owned_folder import replacing_folder

if TYPE_CHECKING:
    import pyarrow


Mask = npt.NDArray[np.bool_]
_CHUNK_BYTES = 1 << 24
_OWN_TABLE = "ids.csv"  # where the data has none
_MARK = ".copy.json"  # the audit that a copy belongs to


def write_table(path: str | Path, pieces: Iterable[pyarrow.Table], *, overwrite: bool = False) -> None:
    """Write a table as parquet or as CSV, by the ending of the name, whole or not at all.

    Args:
        path: The file: .parquet or .csv.
        pieces: The table, some rows at a time; at least one piece, which may be empty.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        DataError: Another ending, a file that is there, or a place that cannot be written to.
    """
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    path = Path(path)
    writers = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}
    if path.suffix.lower() not in writers:
        raise DataError(f"{path}: tables are written as .parquet or .csv; choose one of these endings.")
    if path.exists() and not overwrite:
        raise DataError(f"{path}: the file is there already; allow it to be replaced (--overwrite) or choose another.")
    rest = iter(pieces)
    first = next(rest)
    with replacing(path) as file, writers[path.suffix.lower()](file, first.schema) as writer:
        writer.write_table(first)
        for piece in rest:
            writer.write_table(piece)


def write_filtered(
    source: Source,
    keep: Mask,
    out: str | Path,
    overwrite: bool = False,
    *,
    request: Mapping[str, Json] | None = None,
) -> Path:
    """Write a copy of the data with only some pairs, in the layout it came in.

    - clip: the shards and tables keep their numbers; a shard of which nothing is left is left out.
    - arrays and memory: `left.npy`, `right.npy` and a table of ids.
    - precomp: the audited split. Where all images keep equally many captions, one row an image; else one row a caption,
      with the features of its image repeated, because the layout has no other way to say whose caption it is.

    A table that has no ids gets a column of them, since positions change. The data itself is only read.

    Args:
        source: What was audited.
        keep: Which rows to keep (N,).
        out: A new or empty folder, outside the data.
        overwrite: Whether an earlier copy there may be replaced.
        request: What `is_copied` recognises the copy by.

    Raises:
        DataError: Nothing would be left, the folder holds something else or lies inside the data, or the disk is full.
    """
    keep = np.asarray(keep)
    if keep.shape != (len(source),) or keep.dtype != np.bool_:
        raise ValueError(f"keep must be {len(source)} booleans, not {keep.shape} of {keep.dtype}")
    if not keep.any():
        raise DataError(f"{source.name}: no pair is kept, so there is nothing to write; keep more of them.")
    out = Path(out).resolve()
    check_copy(source, out, overwrite)
    writers = {"clip": _write_clip, "precomp": _write_precomp, "arrays": _write_arrays, "memory": _write_arrays}
    size = (_precomp_size if source.layout == "precomp" else _size)(source, keep)
    with replacing_folder(out) as folder:
        free = shutil.disk_usage(folder).free
        if size > free:
            raise DataError(f"{out}: the copy needs {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free there.")
        writers[source.layout](source, keep, folder)
        if request is not None:
            write_atomically(folder / _MARK, json.dumps(request).encode())
    return out


def is_copied(out: Path, request: Mapping[str, Json]) -> bool:
    """Whether the folder is the copy that was written for this request."""
    found: Json = json.loads(json.dumps(request))
    return read_json(out / _MARK) == found


def kept_rows(table: Path) -> Mask:
    """Which rows of an audit's table are neither flagged nor unreadable (N,).

    Raises:
        DataError: The table cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        flagged = pyarrow.parquet.read_table(table, columns=["is_mismatch"]).column("is_mismatch")
    except (OSError, pyarrow.ArrowException):
        raise DataError(f"{table}: the table cannot be read; audit again with --overwrite.") from None
    return ~np.asarray(flagged.fill_null(True), dtype=np.bool_)


def check_copy(source: Source, out: Path, overwrite: bool) -> None:
    """Refuses a place where no copy of this data may be written, which takes no time.

    Raises:
        DataError: It lies in the data or the other way round, is a file, or holds something that would be lost.
    """
    _check_apart(source.folder, source.files, out.resolve())
    _check_free(_copied(source.layout, source.split, _table_name(source)), out.resolve(), overwrite)


def check_planned_copy(folder: Path, layout: Layout, out: Path, overwrite: bool) -> None:
    """The same for data that is still to be made from, or in, a folder: all of it, in this layout.

    Raises:
        DataError: As for `check_copy`.
    """
    _check_apart(folder, (folder,), out.resolve())
    _check_free(_copied(layout, None, _OWN_TABLE), out.resolve(), overwrite)


def _check_apart(folder: Path | None, files: Iterable[Path], out: Path) -> None:
    """The copy must not come to lie in the data, nor the data in what the copy replaces."""
    inside = folder is not None and out.is_relative_to(folder.resolve())
    if inside or any(path.resolve().is_relative_to(out) for path in files):
        raise DataError(
            f"{out}: this is where the audited data is, which is never changed; choose a folder outside it."
        )


def _check_free(patterns: list[str], out: Path, overwrite: bool) -> None:
    """Only what a copy consists of is ever replaced: a folder may have been named by mistake."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: this is a file; choose a folder.")
    there = (
        {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()} if out.exists() else set()
    )
    if there and not overwrite:
        raise DataError(
            f"{out}: the folder is not empty; allow an earlier copy in it to be replaced (--overwrite) or choose "
            "another."
        )
    others = sorted(name for name in there if not any(fnmatchcase(name, pattern) for pattern in patterns))
    if others:
        raise DataError(
            f"{out}: the folder also holds {listed(others)}, which no copy of this data consists of and which would be "
            "lost; choose another folder."
        )


def _copied(layout: Layout, split: str | None, table: str) -> list[str]:
    """Patterns of the files of a copy."""
    if layout == "clip":
        within = f"{split}/" if split else ""
        return [_MARK, *(f"{within}{name}/{name}_*" for name in ("img_emb", "text_emb", "metadata"))]
    if layout == "precomp":
        return [_MARK, f"{split}_ims.npy", f"{split}_caps.txt", f"{split}_caps.tsv", f"{split}_ids.txt", "vocab.json"]
    return [_MARK, "left.npy", "right.npy", table]


def _table_name(source: Source) -> str:
    return _OWN_TABLE if source.table is None else source.table.parts[0].path.name


def _size(source: Source, keep: Mask) -> int:
    """Bytes of the copied vectors."""
    return sum(int(keep.sum()) * side.shards[0].read(slice(0, 1)).nbytes for side in (source.left, source.right))


def _write_clip(source: Source, keep: Mask, out: Path) -> None:
    target = out / source.split if source.split else out
    for side in (source.left, source.right):
        for shard, start in zip(side.shards, side.starts, strict=False):
            assert isinstance(shard, File)
            rows = np.flatnonzero(keep[start : start + shard.shape[0]])
            if len(rows):
                _write_rows(target / shard.path.parent.name / shard.path.name, shard.read, rows)
    if source.table is None:
        _write_own_tables(source, keep, target)
        return
    start = 0
    for part in source.table.parts:
        if keep[start : start + len(part)].any():
            _write_part(source, part, start, keep, target / "metadata" / part.path.name)
        start += len(part)


def _write_own_tables(source: Source, keep: Mask, target: Path) -> None:
    """One table of ids a shard, where there was none."""
    import pyarrow

    for shard, start in zip(source.left.shards, source.left.starts, strict=False):
        assert isinstance(shard, File)
        rows = np.flatnonzero(keep[start : start + shard.shape[0]]) + start
        if len(rows):
            number = shard.path.stem.rpartition("_")[2]
            table = pyarrow.table({"id": source.ids(rows)})
            write_table(target / "metadata" / f"metadata_{number}.parquet", [table])


def _write_arrays(source: Source, keep: Mask, out: Path) -> None:
    import pyarrow

    rows = np.flatnonzero(keep)
    for name, side in (("left", source.left), ("right", source.right)):
        _write_rows(out / f"{name}.npy", side.shards[0].read, rows)
    if source.table is not None:
        _write_part(source, source.table.parts[0], 0, keep, out / _table_name(source))
        return
    columns: dict[str, Any] = {"id": source.ids(rows)}
    if source.has_texts:
        columns["caption"] = source.texts(rows)
    if source.groups is not None:
        columns["group"] = source.groups[rows]
    write_table(out / _table_name(source), [pyarrow.table(columns)])


def _write_rows(
    path: Path, read: Callable[[slice | IntArray], npt.NDArray[Any]], rows: IntArray, times: IntArray | None = None
) -> None:
    """Some rows of an array as one .npy file, a few megabytes at a time; row i `times[i]` times."""
    first = read(rows[:1])
    total = len(rows) if times is None else int(times.sum())
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": (total, *first.shape[1:])}
    step = max(1, _CHUNK_BYTES // max(1, first.nbytes))
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(rows), step):
            values = read(rows[start : start + step])
            if times is not None:
                values = np.repeat(values, times[start : start + step], axis=0)
            file.write(np.ascontiguousarray(values).tobytes())


def _write_part(source: Source, part: Part, start: int, keep: Mask, path: Path) -> None:
    """The kept rows of one file of the table with all its columns, and with ids where it has none."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    assert source.table is not None
    named = source.table.find("id") is not None

    def pieces() -> Iterator[pyarrow.Table]:
        row = start
        for batch in part.records():
            inside = keep[row : row + len(batch)]
            kept = pyarrow.Table.from_batches([batch]).filter(pyarrow.array(inside))
            if not named:
                ids = source.ids(np.flatnonzero(inside) + row)
                kept = kept.append_column("id", pyarrow.array(ids, pyarrow.string()))
            yield kept
            row += len(batch)

    rest = pieces()
    first = next(rest)
    with replacing(path) as file:
        if isinstance(part, Text):
            options = pyarrow.csv.WriteOptions(delimiter=part.separator)
            writer = pyarrow.csv.CSVWriter(file, first.schema, write_options=options)
        else:
            writer = pyarrow.parquet.ParquetWriter(file, first.schema)
        with writer:
            for piece in chain([first], rest):
                writer.write_table(piece)


def _write_precomp(source: Source, keep: Mask, out: Path) -> None:
    assert source.folder is not None
    assert source.split is not None
    folder, split = source.folder, source.split
    regions, per_image = _regions(source)
    images, counts = _kept_images(keep, per_image)
    uneven = _uneven(counts)
    if uneven and counts.sum() % precomp.USUAL_CAPTIONS_PER_IMAGE == 0:
        # The reader takes one row a caption for five rows an image where the first rows repeat like that. An image with
        # another number of captions at the start rules that out.
        odd = int(np.argmax(counts % precomp.USUAL_CAPTIONS_PER_IMAGE > 0))
        images, counts = (np.concatenate([part[[odd]], np.delete(part, odd)]) for part in (images, counts))
    # (images, per_image) -> the kept pairs in the order of the images
    pairs = images[:, None] * per_image + np.arange(per_image)
    rows = pairs[keep[pairs]]
    _write_rows(out / f"{split}_ims.npy", lambda wanted: np.array(regions[wanted]), images, counts if uneven else None)
    captions = precomp.captions_path(folder, split)
    if captions.suffix == ".tsv":
        named = zip(_image_names(source, rows, per_image), source.texts(rows), strict=True)
        text = io.StringIO(newline="")
        csv.writer(text, delimiter="\t").writerows(named)
        write_atomically(out / captions.name, text.getvalue().encode())
    else:
        _write_lines(out / captions.name, source.texts(rows))
        _write_lines(out / f"{split}_ids.txt", _image_names(source, rows if uneven else images * per_image, per_image))
    if any(precomp.captions_path(folder, part).exists() for part in ("train", "dev")):
        # Words of all captions, so that the copy is read with the same numbers as the data it came from.
        precomp.find_vocabulary(folder)[0].save(out / "vocab.json")


def _regions(source: Source) -> tuple[npt.NDArray[Any], int]:
    """One row of features an image (still mapped), and how many captions each has."""
    assert source.folder is not None
    assert source.split is not None
    features = open_array(precomp.features_path(source.folder, source.split), ndim=3)
    return precomp.arrange(features, len(source), None, source.name)


def _kept_images(keep: Mask, per_image: int) -> tuple[IntArray, IntArray]:
    """Images of which a caption is kept, and how many of each."""
    counts = keep.reshape(-1, per_image).sum(axis=1)
    images = np.flatnonzero(counts)
    return images, counts[images]


def _uneven(counts: IntArray) -> bool:
    return bool((counts != counts[0]).any())


def _precomp_size(source: Source, keep: Mask) -> int:
    regions, per_image = _regions(source)
    images, counts = _kept_images(keep, per_image)
    rows = int(counts.sum()) if _uneven(counts) else len(images)
    return rows * int(regions[0].nbytes)


def _image_names(source: Source, rows: IntArray, per_image: int) -> list[str]:
    return [str(row // per_image) for row in rows] if source.image_names is None else source.image_names(rows)


def _write_lines(path: Path, lines: list[str]) -> None:
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
