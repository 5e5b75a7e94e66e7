"""WebDataset tars: `KEY.jpg`, `KEY.txt` and `KEY.json` are a sample; with the parquet files of img2dataset beside them.

Samples are never unpacked: unchanged ones are copied from tar to tar byte for byte.
"""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute

from mispair.errors import DamagedError, NotFoundError, TooFewError
from mispair.pairs.edits import Edits, TableCopies
from mispair.pairs.row_ids import RowIds, Texts, id_column
from mispair.pairs.source import Source
from mispair.pairs.tables import IMAGE_SUFFIXES, Table, decoded, find_column, open_table
from mispair.support.arrays import IntArray
from mispair.support.files import LARGEST, regular, replacing, unreadable
from mispair.support.formatting import plain

Entry = dict[str, Any]
_CAPTION, _JSON = ".txt", ".json"
_LONGEST_TEXT = 1 << 20  # bytes of a caption or of what is known about a sample
_OWN = "key", "uid"  # values of a sample that stay when it gets the image of another
_END = bytes(2 * tarfile.BLOCKSIZE)


class _Sample(NamedTuple):
    """A sample of a tar."""

    key: str  # its name
    id: str  # the `uid` that img2dataset and DataComp give it, or empty
    caption: str
    image: int  # where the image begins; -1 without one
    size: int  # of the image
    begin: int  # where the sample begins
    end: int  # where its last member ends
    dotted: str  # without an image: a member that would be one if its name had fewer dots, or empty


class Tars(Source):
    """The samples of tars, in their order; `root` is the folder of the data set, None for a single tar."""

    def __init__(self, paths: Sequence[Path], root: Path | None, *_: object) -> None:
        self._tars, self.name, self.inside = list(paths), str(root or paths[0]), True
        beside = [path.with_suffix(".parquet") for path in paths]
        self._tables = {path.stem: path for path in beside if path.is_file()}
        self.files = (*paths, *self._tables.values())
        text = pyarrow.large_string()
        columns: list[list[Any]] = [[], [], []]  # keys, ids and captions of each tar
        places, dotted = [], list[str]()
        for path in paths:  # not all samples are held as Python objects at a time
            found = _index(path)
            for number, chunks in enumerate(columns):
                chunks.append(pyarrow.array([sample[number] for sample in found], text))
            places.append(np.array([sample[3:7] for sample in found], dtype=np.int64).reshape(-1, 4))
            dotted += [sample.dotted for sample in found if sample.dotted]
        self._places: IntArray = np.concatenate(places)  # (N, 4): image and its size, begin and end of the sample
        self._starts = np.cumsum([0, *map(len, places)])
        if not len(self._places):
            raise TooFewError("no samples", where=self.name, expected="members such as 0001.jpg and 0001.txt")
        names, uids, texts = (pyarrow.chunked_array(chunks, text).combine_chunks() for chunks in columns)
        self._keys, self.image_names, self.captions = names, Texts(names), Texts(texts)
        captioned = pyarrow.compute.not_equal(texts, "").to_numpy(zero_copy_only=False)
        if not (captioned & (self._places[:, 0] >= 0)).any():
            raise TooFewError(
                "no sample has an image and a caption",
                where=self.name,
                expected="0001.jpg with 0001.txt or 0001.json, next to each other (`tar --sort=name -cf`)",
            )
        self.notes = (_dotted(dotted),) if dotted else ()
        named = pyarrow.compute.not_equal(uids, "")
        self.names = RowIds(id_column(pyarrow.compute.if_else(named, uids, names), names))
        sizes = np.diff(self._starts).tolist()
        self.shards = tuple((path.stem, size) for path, size in zip(paths, sizes, strict=True))

    def has_image(self, row: int) -> bool:
        return bool(self._places[row, 0] >= 0)

    def read_image(self, row: int) -> bytes:
        start, size = self._places[row, :2].tolist()
        if size > LARGEST:
            raise OSError(f"a file of {size / 1e6:,.0f} MB, and at most {LARGEST / 1e6:,.0f} MB are read")
        return self._read(row, start, start + size)

    def _read(self, row: int, start: int, stop: int) -> bytes:
        with self._tars[int(np.searchsorted(self._starts, row, side="right")) - 1].open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, edits: Edits, out: Path) -> None:
        changed = set(edits.repaired.tolist())
        for path, start, stop in zip(self._tars, self._starts, self._starts[1:], strict=False):
            rows = np.flatnonzero(edits.keep[start:stop]) + int(start)
            if not len(rows):
                continue
            with replacing(out / path.name) as file, path.open("rb") as tar:
                for row in rows.tolist():
                    if row in changed:
                        file.writelines(self._edited(row, edits))
                    else:
                        begin, end = self._places[row, 2:].tolist()
                        tar.seek(begin)
                        file.write(tar.read(end - begin))
                file.write(_END)
        if self._tables:
            self._write_tables(edits, out)

    def _edited(self, row: int, edits: Edits) -> Iterator[bytes]:
        """The members of a sample with another image or caption."""
        key = self.image_texts([row])[0]
        members, source = self._contents(row), int(edits.image_from[row])
        caption = self.final_captions(edits, np.array([row]))[0]
        known = _parsed(members.get(_JSON))
        if source != row:
            others = self._contents(source)
            members = {ending: content for ending, content in members.items() if ending not in IMAGE_SUFFIXES}
            members |= {ending: content for ending, content in others.items() if ending in IMAGE_SUFFIXES}
            known = known and _with_image_of(known, _parsed(others.get(_JSON)))
        if _CAPTION in members:
            members[_CAPTION] = caption.encode()
        name = known and find_column(tuple(known), "caption")
        if known and name:
            known[name] = caption
        if known:
            members[_JSON] = json.dumps(
                {name: None if _is_score(name) else known[name] for name in known}, ensure_ascii=False
            ).encode()
        for ending, content in members.items():
            yield from tar_member(f"{key}{ending}", content)

    def _contents(self, row: int) -> dict[str, bytes]:
        """The contents of a sample by their endings."""
        region = io.BytesIO(self._read(row, *self._places[row, 2:].tolist()) + _END)
        with tarfile.open(fileobj=region, mode="r:") as tar:
            return {
                _split(member.name)[1]: file.read()
                for member in tar
                if member.isreg() and (file := tar.extractfile(member)) is not None
            }

    def _write_tables(self, edits: Edits, out: Path) -> None:
        """Write the rows of img2dataset's tables for the written samples."""
        table = open_table(*self._tables.values())
        if "key" not in table.columns:
            advice = "Move the table elsewhere."
            raise NotFoundError('no column "key", as img2dataset writes it', where=table.files[0], advice=advice)
        row_of = self._rows_of(table)
        samples = edits.rows[row_of[edits.rows] >= 0]
        rows, own = row_of[samples], np.arange(len(table))
        image_from, caption_from = own.copy(), own.copy()
        image_from[rows], caption_from[rows] = row_of[edits.image_from[samples]], row_of[edits.caption_from[samples]]
        changed = np.intersect1d(edits.repaired, samples)
        new = dict(zip(row_of[changed].tolist(), self.final_captions(edits, changed), strict=True))
        caption, scores = table.find("caption"), tuple(filter(_is_score, table.columns))
        of_image = tuple(name for name in table.columns if name not in (*_OWN, caption, *scores))
        copies = TableCopies(table, of_image, caption, of_pair=scores)
        copies.write(Edits(np.isin(own, rows), image_from, caption_from, new), out)

    def _rows_of(self, table: Table) -> IntArray:
        """(N,) the row of each sample in the tables; -1 without one."""
        found, keys = np.full(len(self), -1), table.texts("key")
        ends = np.cumsum([0, *(len(part) for part in table.parts)])
        rows = dict(zip(self._tables, pairwise(ends), strict=True))
        for path, start, stop in zip(self._tars, self._starts, self._starts[1:], strict=False):
            if path.stem in rows:
                first, end = rows[path.stem]
                places = pyarrow.compute.index_in(self._keys[start:stop], value_set=keys[first:end])
                found[start:stop] = np.asarray(places.fill_null(-1 - first)) + first
        return found


def _dotted(members: Sequence[str]) -> str:
    several = f"{len(members):,} samples have" if len(members) > 1 else "A sample has"
    return (
        f"{several} no image, but members such as {plain(members[0])}: the name of a sample ends at its first dot, as "
        "in WebDataset, so files with more dots may become one sample. Rename them."
    )


def check_unpacked(path: Path) -> None:
    """Raise if a file is compressed by gzip."""
    with regular(path).open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            advice = f"Unpack it first: gunzip {shlex.quote(str(path))}"
            raise DamagedError("compressed by gzip", where=path, advice=advice)


def _index(path: Path) -> list[_Sample]:
    """Find the samples of a tar."""
    length = regular(path).stat().st_size
    check_unpacked(path)
    try:
        with tarfile.open(path, "r:", encoding="utf-8") as tar, path.open("rb") as contents:
            by_key = groupby(_members(tar, length), lambda member: _split(member.name)[0])
            found = [_sample(key, list(members), contents) for key, members in by_key]
            contents.seek(tar.offset)
            if contents.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile stops at a damaged header without a word
                raise tarfile.ReadError("a header is damaged")
    except (tarfile.TarError, ValueError) as error:
        raise unreadable(path, error, expected="a tar", advice="Copy or write it again.") from None
    return found


def _members(tar: tarfile.TarFile, length: int) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar of this length."""
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
        if member.isreg():
            if member.offset_data + member.size > length:
                raise tarfile.ReadError("its end is missing")
            yield member


def _sample(key: str, files: Sequence[tarfile.TarInfo], file: IO[bytes]) -> _Sample:
    members = {_split(member.name)[1]: member for member in reversed(files)}  # the first one of each ending

    def content(ending: str) -> bytes:
        member = members.get(ending)
        if member is None or member.size > _LONGEST_TEXT:
            return b""
        file.seek(member.offset_data)
        return file.read(member.size)

    image = next((member for member in files if _split(member.name)[1] in IMAGE_SUFFIXES), None)
    dotted = (member.name for member in files if _split(member.name)[1].endswith(tuple(IMAGE_SUFFIXES)))
    known = _parsed(content(_JSON)) or {}
    name = find_column(tuple(known), "caption")
    caption = decoded(content(_CAPTION)) if _CAPTION in members else known.get(name or "") or ""
    return _Sample(
        key=plain(key),
        id=plain(str(known.get("uid") or "")),
        caption=plain(str(caption)).strip(),
        image=-1 if image is None else image.offset_data,
        size=0 if image is None else image.size,
        begin=files[0].offset,
        end=files[-1].offset_data + _padded(files[-1].size),
        dotted=next(dotted, "") if image is None else "",
    )


def _split(name: str) -> tuple[str, str]:
    """The key and the ending of a member: the folder and the name up to its first dot, and the rest.

    >>> _split("00/0001.seg.png"), _split("./0001.JPG")
    (('00/0001', '.seg.png'), ('./0001', '.jpg'))
    """
    folder, slash, base = name.rpartition("/")
    key, dot, ending = base.partition(".")
    return f"{folder}{slash}{key}", f"{dot}{ending}".lower()


def _parsed(content: bytes | None) -> Entry | None:
    """The JSON of a sample; None if missing or not an object."""
    try:
        found = json.loads(content) if content else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _with_image_of(own: Entry, other: Entry | None) -> Entry:
    """The entry of a sample with the image of another: its own names and caption, the rest of the other."""
    stays = (*_OWN, find_column(tuple(own), "caption"))
    return {name: value if name in stays else (other or {}).get(name) for name, value in own.items()}


def _is_score(name: str) -> bool:
    """Whether a value says how well image and caption fit, which nobody has measured for a changed pair."""
    return name.endswith(("similarity", "similarity_score"))


def tar_member(name: str, content: bytes) -> Iterator[bytes]:
    """The bytes of a file in a tar: header, content and padding."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    yield info.tobuf(tarfile.PAX_FORMAT)
    yield content
    yield bytes(_padded(len(content)) - len(content))


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
