"""Blocks of a data set, for one machine each: some of its files, or some rows of one file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow

from mispair.auditing.inputs import AuditInput
from mispair.compute.threads import parallel_each
from mispair.encoders.cache import FETCHED, cache_folder
from mispair.encoders.encode import SHARD
from mispair.errors import ConflictError, DamagedError, DataError, NotFoundError, ShapeError, TooFewError
from mispair.pairs.layouts.clip_retrieval import PARTS
from mispair.pairs.layouts.table import open_table_given
from mispair.pairs.remote import Store, fetch, url_of, version_of
from mispair.pairs.shards import ArrayRows, SideRows, join_views
from mispair.pairs.source import Source, is_inside
from mispair.pairs.tables import IMAGE_SUFFIXES, Table, open_table
from mispair.support.files import short_hash

ROWS = 1 << 16  # of a block that is cut from one file
_TABLES = (".csv", ".tsv", ".psv", ".parquet", ".pq")
UNREADABLE = DamagedError, ShapeError, TooFewError  # of one block; others end the audit
_AT_A_TIME = 8  # images that are fetched
_LAYOUTS = [  # the kinds of files of a block: clip-retrieval, DataComp
    {"img_emb/.npy", "text_emb/.npy"},
    {"img_emb/.npy", "text_emb/.npy", "metadata/.parquet"},
    {"img_emb/.npy", "text_emb/.npy", "metadata/.csv"},
    {".npz", ".parquet"},
    {"metadata/.npz", "metadata/.parquet"},
]


@dataclass(frozen=True)
class Block:
    """Part of a data set: files relative to its folder, rows of a table in a store, or rows of the whole."""

    name: str
    files: tuple[str, ...]
    start: int = 0
    stop: int = 0
    table: str = ""  # in the folder; its rows name the files
    raw: bool = False  # whether it has images and captions, to be encoded
    views: tuple[tuple[int, ...], ...] = ()  # widths of the views of each side, for encoded blocks


class Rows(NamedTuple):
    """Rows of an opened source."""

    source: Source
    start: int
    stop: int


def find_blocks(data: AuditInput) -> list[Block]:
    """Return the blocks of a data set, in the order of its rows; blocks of files have no row numbers yet.

    Images and captions are cut into tars, or into as many rows as `mispair encode` writes to a file.

    Raises:
        ConflictError: The files of its layout cannot be read one by one.
    """
    source = data.source
    if data.is_run:
        raise ConflictError("the networks of a training run", where="engine", expected="vectors")
    if source is not None and (url_of(source) or source.is_dir()):
        groups: dict[tuple[int, str], dict[str, str]] = {}
        names = sorted(_store(data).files())
        for name in names:
            kind, key = _kind(PurePosixPath(name))
            if kind:
                groups.setdefault(key, {})[kind] = name
        kinds = {frozenset(files) for files in groups.values()}
        if len(kinds) == 1 and kinds.pop() in _LAYOUTS:
            return [Block(key, tuple(files.values())) for (_, key), files in sorted(groups.items())]
        tars = [name for name in names if name.endswith(".tar")]
        if source.suffix == ".tar":  # a single one, at a URL
            tars = [name for name in tars if name == source.name]
        if tars and (url_of(source) or data.is_raw):
            top = [name for name in tars if "/" not in name]
            return [Block(PurePosixPath(name).stem, (name,), raw=True) for name in top or tars]
        if url_of(source):
            if photos := _photos(data, names):
                return photos
            expected = "tars; images with a table or texts; or vectors by clip-retrieval or DataComp"
            advice = "Put images and captions into tars (WebDataset)."
            raise ConflictError("data in another layout", where=url_of(source), expected=expected, advice=advice)
    whole = _whole(pickle.dumps(data))
    size, raw = ROWS if whole.is_encoded else SHARD, not whole.is_encoded
    return [Block(str(start), (), start, stop, raw=raw) for start, stop in _cuts(len(whole), size)]


def _cuts(rows: int, size: int) -> list[tuple[int, int]]:
    """Cut rows into blocks of a size."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _photos(data: AuditInput, names: Sequence[str]) -> list[Block]:
    """Cut a folder of images in a store, with one table or a text file for each image."""
    tables = [name for name in names if PurePosixPath(name).suffix.lower() in _TABLES and "/" not in name]
    if len(tables) == 1:
        cuts = _cuts(len(_table(pickle.dumps(data), tables[0])), SHARD)
        return [Block(str(start), (), start, stop, tables[0], raw=True) for start, stop in cuts]
    there = set(names)
    images = [PurePosixPath(name) for name in names if PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES]
    files = [(str(image), str(text)) for image in images if str(text := image.with_suffix(".txt")) in there]
    return [
        Block(str(start), tuple(chain.from_iterable(files[start:stop])), raw=True)
        for start, stop in _cuts(len(files), SHARD)
    ]


def state_of(data: AuditInput, blocks: Sequence[Block]) -> str:
    """Return a hash of the images and captions in blocks, which changes when they do."""
    if not blocks[0].files and not blocks[0].table:
        return short_hash(json.dumps(_whole(pickle.dumps(data)).state()))
    store = _store(data)
    states = store.files()
    files = states if blocks[0].table else {name for block in blocks for name in block.files}
    return version_of(store.url, {name: states[name] for name in files})


def _kind(path: PurePosixPath) -> tuple[str, tuple[int, str]]:
    """Return the kind of a file, empty if it is in no block, and its block."""
    folder = f"{path.parent}/" if str(path.parent) in PARTS else ""
    if path.suffix not in (".npy", ".npz", ".parquet", ".csv"):
        return "", (0, "")
    number = path.stem.removeprefix(f"{path.parent}_")
    if folder and number.isdecimal():
        return f"{folder}{path.suffix}", (int(number), number)
    return f"{folder}{path.suffix}", (0, str(path.with_suffix("")))


def count_rows(data: AuditInput, block: Block) -> int:
    """Count the rows of a block by the header of an array or the footer of a table."""
    import pyarrow.parquet

    if not block.files:
        return block.stop - block.start
    name = min(block.files, key=lambda name: (not name.endswith(".npy"), not name.endswith(".parquet")))
    try:
        with _store(data).open(name) as file:
            if name.endswith(".parquet"):
                return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return int(read(file)[0][0])
    except (ValueError, IndexError, pyarrow.ArrowException) as error:
        raise DamagedError(str(error), where=name) from None


def count_all(data: AuditInput, blocks: Sequence[Block], first: Rows) -> int:
    """Count the rows of all blocks; those of tars are estimated from their sizes and the first block."""
    if not blocks[0].raw or not blocks[0].files:
        return sum(count_rows(data, block) for block in blocks)
    states = _store(data).files()
    whole, own = (sum(states[name][0] for block in some for name in block.files) for some in (blocks, blocks[:1]))
    return round(len(first.source) * whole / own)


@contextmanager
def opened(data: AuditInput, block: Block) -> Iterator[Rows]:
    """Open the rows of a block; copy files of a store to this machine until they are closed."""
    if block.table:
        with TemporaryDirectory(prefix="mispair-") as folder:
            yield _opened_table(data, block, Path(folder))
        return
    if not block.files:
        yield Rows(_whole(pickle.dumps(data)), block.start, block.stop)
        return
    store = _store(data)
    with TemporaryDirectory(prefix="mispair-") as folder:
        for name in block.files:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if "://" in store.url:
                store.get(name, path)
            else:
                path.symlink_to(Path(store.url, name))
        try:
            source = replace(data, source=Path(folder)).open(device="cpu")
            source.name = store.url
            if any(len(widths) > 1 for widths in block.views):
                sides = zip((source.left, source.right), block.views, strict=True)
                source.left, source.right = (cut(side, widths) for side, widths in sides)
            if data.images is None and data.source is not None and "://" not in store.url:
                source.images = (data.source / "images", data.source, Path())
        except DataError as error:
            error.where = str(error.where or "").replace(folder, store.url)
            raise
        yield Rows(source, 0, len(source))


def _opened_table(data: AuditInput, block: Block, folder: Path) -> Rows:
    """Open rows of a table in a store, with copies of their images; a missing image is a row with a status."""
    table, store, rows = _table(pickle.dumps(data), block.table), _store(data), np.arange(block.start, block.stop)
    part = pyarrow.table({name: table.take(name, rows) for name in table.columns})
    (column,) = table.require({"image_path": "images"})

    def get(name: str) -> None:
        path = folder / name
        if name and is_inside(folder, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(NotFoundError):
                store.get(name, path)

    if pyarrow.types.is_string(kind := part[column].type) or pyarrow.types.is_large_string(kind):
        parallel_each(get, sorted(set(map(str.strip, table.cells(column, rows)))), _AT_A_TIME)
    source = open_table_given(part, folder, data.columns)
    source.name, source.allow_outside = f"{store.url}/{block.table}", False
    return Rows(source, 0, len(source))


@lru_cache(maxsize=1)
def _table(pickled: bytes, name: str) -> Table:
    """Open a table of a store, fetched once to this machine."""
    data: AuditInput = pickle.loads(pickled)
    copy = fetch(f"{_store(data).url}/{name}", cache_folder(data.cache) / FETCHED)
    return open_table(copy, columns=data.columns)


def cut(side: SideRows, widths: Sequence[int]) -> SideRows:
    """Return views that were written side by side."""
    parts = np.split(side.block(0, len(side), side.dtype), np.cumsum(widths)[:-1], axis=1)
    return join_views([SideRows.of([ArrayRows(part)]) for part in parts], "")


def _store(data: AuditInput) -> Store:
    """The folder of a data set, also of a single tar."""
    assert data.source is not None
    is_file = data.source.suffix == ".tar" and not data.source.is_dir()
    place = data.source.parent if is_file else data.source
    return Store(url_of(place) or str(place.absolute()))


@lru_cache(maxsize=1)
def _whole(pickled: bytes) -> Source:
    """Open a data set without blocks of files; each machine fetches URLs once."""
    data: AuditInput = pickle.loads(pickled)
    return data.fetched().open(device="cpu")
