"""`Source`: the pairs of a data set, row by row, as they are read, encoded, audited and edited.

Row i has a left and a right item: an image and a caption, or two vectors, which stay on disk. Nothing here holds all
vectors or a Python string for every row; only the SCAN layout, whose vectors are computed from regions and words, is
kept in memory (4 bytes a number).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from mispair.errors import NotFoundError, ShapeError
from mispair.pairs import row_ids
from mispair.pairs.edits import Edits, LookUp
from mispair.pairs.image_files import find_image
from mispair.pairs.pairs import FloatArray, IntArray
from mispair.pairs.row_ids import RowIds, Texts
from mispair.pairs.shards import NO_ROWS, ArrayRows, Matrix, MovedRows, Shard, Side, TensorRows, open_files
from mispair.pairs.tables import USUAL_NAMES, Roles, Table, open_table
from mispair.support.files import read_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LayoutName = Literal["clip", "arrays", "precomp", "memory", "raw", "datacomp"]
NetworkScore = Callable[[IntArray, IntArray], FloatArray]
Rows = Sequence[int] | IntArray | None  # numbers of rows; None for all
SPLIT = "split"  # column of a table
_SAMPLED_ROWS = 256
_HASHED = 1000  # rows of texts that are hashed at a time
_LOADED = 0.25  # share of the free memory of a GPU that all vectors may take


@dataclass(eq=False)
class Source:
    """The pairs of a data set, in its order. No row is ever left out: bad ones have a status.

    Attributes:
        left: Vectors of one side (N, D); no rows where the images are not encoded yet.
        right: Vectors of the other side (N, E).
        layout: How they are stored.
        name: Where they come from, for messages.
        names: Ids, groups and known faults.
        captions: Looks up the texts of rows; None where there are none.
        image_names: Looks up the image path of rows; None where there are none.
        images: Folders in which the images are searched, in this order.
        files: All files that are read.
        table: The table of ids, captions and paths.
        folder: The folder that was opened; None for single files and for memory.
        split: The part of it, where it has parts.
        network_score: Scores the left items of some rows with the right items of others, (n,), by the networks of a
            training run; None without a run.
        joint: Whether the vectors of both sides have a common space.
        shards: Names and sizes of the files that the rows are in, for tables of results beside them.
        notes: What the reader should know, such as files that are not read.
    """

    left: Side = NO_ROWS
    right: Side = NO_ROWS
    layout: LayoutName = "raw"
    name: str = "pairs"
    names: RowIds = RowIds()  # noqa: RUF009 - it is frozen
    captions: LookUp | None = None
    image_names: LookUp | None = None
    images: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    table: Table | None = None
    folder: Path | None = None
    split: str | None = None
    network_score: NetworkScore | None = None
    joint: bool = False
    shards: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            found = f"{len(self.left):,} vectors on the left side and {len(self.right):,} vectors on the right side"
            raise ShapeError(found, where=self.name, expected="one pair in row i of both")
        if self.table is not None and len(self.table) != len(self.left):
            raise ShapeError(
                f"{len(self.table):,} rows for {len(self.left):,} pairs of vectors",
                where=self.table.parts[0].path,
                expected="one row a pair",
            )

    def __len__(self) -> int:
        return len(self.left) if self.is_encoded else len(self.names.ids)

    def _with(self, **changes: Any) -> Self:
        """The same with other attributes, for subclasses, too."""
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    def _numbers(self, rows: Rows) -> IntArray:
        return np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.int64).reshape(-1)

    @property
    def is_encoded(self) -> bool:
        """Whether both sides have vectors."""
        return len(self.left) > 0

    def with_vectors(self, left: Shard, right: Shard, known: dict[int, str]) -> Self:
        """The same images and captions with their vectors.

        Args:
            left: Vectors of the images (N, D).
            right: Vectors of the captions (N, E).
            known: Rows that have no vectors, and why.
        """
        return self._with(left=Side.of([left]), right=Side.of([right]), names=replace(self.names, known=known))

    def edited(self, edits: Edits) -> Source:
        """The rows that are kept, with the items that each gets. Nothing is written."""
        return _Edited(self, edits)

    @property
    def widths(self) -> tuple[int, int]:
        return self.left.width, self.right.width

    @property
    def groups(self) -> IntArray | None:
        """Number of the group of each row (N,); rows with the same image share it. None where all differ."""
        return self.names.groups

    @property
    def first_rows(self) -> IntArray:
        """(N,) the first row with the image of each row."""
        if self.groups is None:
            return np.arange(len(self))
        _, first, group = np.unique(self.groups, return_index=True, return_inverse=True)
        return np.asarray(first[group], dtype=np.int64)

    @property
    def known(self) -> dict[int, str]:
        """Rows that are bad already by the table, and why."""
        return self.names.known

    @property
    def splits(self) -> Sequence[str] | None:
        """The split of each row, such as train or val; None where the data set has none."""
        table = self.table
        column = None if table is None else next((name for name in table.columns if name.lower() == SPLIT), None)
        if table is None or column is None:
            return None
        return [value for batch in table.batches([column]) for value in batch[0].to_pylist()]

    @cached_property
    def known_rows(self) -> IntArray:
        """Rows that are bad already by the table, in ascending order."""
        return np.array(sorted(self.known), dtype=np.int64)

    @property
    def has_texts(self) -> bool:
        return self.captions is not None

    @property
    def has_images(self) -> bool:
        """Whether there are image paths; the files themselves may be missing."""
        return self.image_names is not None

    def scaled(self) -> Source:
        """The same pairs with vectors of usual lengths: the squares of huge and of tiny numbers are no float32."""
        some = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))
        left, right = self.left.scaled(some), self.right.scaled(some)
        return self if left is self.left and right is self.right else self._with(left=left, right=right)

    def is_on(self, device: torch.device) -> bool:
        """Whether the vectors of both sides lie on a device."""
        return self.left.is_on(device) and self.right.is_on(device)

    def loaded(self, device: torch.device, workers: int) -> Source:
        """The same pairs with all vectors on a GPU, if they take little of its memory; else as they are."""
        import torch

        if device.type != "cuda" or self.left.nbytes + self.right.nbytes > _LOADED * torch.cuda.mem_get_info(device)[0]:
            return self
        return self._with(left=self.left.loaded(device, workers), right=self.right.loaded(device, workers))

    def part(self, start: int, stop: int) -> Source:
        """Rows start to stop as a source of their own, with all that is needed to measure them and nothing else.

        It can be sent to other processes, unless networks score the pairs.
        """
        low, high = np.searchsorted(self.known_rows, (start, stop))
        known = {row - start: self.known[row] for row in self.known_rows[low:high].tolist()}
        score = self.network_score
        return Source(
            self.left.part(start, stop),
            self.right.part(start, stop),
            self.layout,
            self.name,
            RowIds(known=known),
            network_score=None if score is None else lambda lefts, rights: score(start + lefts, start + rights),
        )

    def block(self, start: int, stop: int) -> tuple[Matrix, Matrix]:
        """Consecutive rows of both sides (n, D) and (n, E), read now; NaN and infinite values as they are."""
        return self.left.block(start, stop), self.right.block(start, stop)

    def tensors(self, rows: slice | IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Consecutive or any rows of both sides (n, D) and (n, E) on a device; NaN and infinite values as they are."""
        return self.left.tensor(rows, device), self.right.tensor(rows, device)

    def gather(self, rows: Sequence[int] | IntArray) -> tuple[Matrix, Matrix]:
        """Any rows of both sides (n, D) and (n, E), in the given order."""
        wanted = self._numbers(rows)
        return self.left.gather(wanted), self.right.gather(wanted)

    def ids(self, rows: Rows = None) -> list[str]:
        """The ids of some rows, by default of all; a missing one is empty."""
        wanted = self._numbers(rows)
        return [str(row) for row in wanted] if self.names.ids is None else Texts(self.names.ids)(wanted)

    def id_column(self, start: int, stop: int) -> Any:
        """The ids of consecutive rows as a pyarrow array."""
        import pyarrow

        if self.names.ids is None:
            return pyarrow.array(np.arange(start, stop)).cast(pyarrow.string())
        return self.names.ids[start:stop]

    def item_columns(self, start: int, stop: int) -> dict[str, Any]:
        """The image names and captions of consecutive rows as pyarrow arrays, where they are known."""
        known = {"image": self.image_names, "caption": self.captions}
        return {name: _as_array(look_up, start, stop) for name, look_up in known.items() if look_up is not None}

    def texts(self, rows: Rows = None) -> list[str]:
        """The captions of some rows, by default of all; empty where unknown."""
        wanted = self._numbers(rows)
        return [""] * len(wanted) if self.captions is None else self.captions(wanted)

    def image_texts(self, rows: Rows = None) -> list[str]:
        """The image names of some rows, by default of all; empty where unknown."""
        wanted = self._numbers(rows)
        return [""] * len(wanted) if self.image_names is None else self.image_names(wanted)

    def final_captions(self, edits: Edits, rows: IntArray) -> list[str]:
        """The captions of rows after the edits."""
        texts = self.texts(edits.caption_from[rows])
        return [edits.rewritten.get(int(row), text) for row, text in zip(rows, texts, strict=True)]

    @property
    def image_folder(self) -> Path | None:
        """The folder that the image names start from; None where it is not known, or the images are in other files."""
        return self.images[0] if self.images else None

    def image_number(self, row: int) -> int:
        """Equal for rows that share their image."""
        return row if self.groups is None else int(self.groups[row])

    def image_key(self, row: int) -> Hashable:
        """Equal for rows that show the same image; None where there is none."""
        return self.image_file(row)

    def has_image(self, row: int) -> bool:
        """Whether the data set names an image for a row; it may be missing."""
        return bool(self.image_texts([row])[0])

    def image_is_there(self, row: int) -> bool:
        """Whether the image of a row is there."""
        return self.image_file(row) is not None

    def image_file(self, row: int) -> Path | None:
        """The image file of a row; None where there is none, or it is no file of its own."""
        return self.image_files([row])[0]

    def image_files(self, rows: Rows = None) -> list[Path | None]:
        """The image files of some rows; None where there is no such file."""
        return [find_image(self.images, name) for name in self.image_texts(rows)]

    def read_image(self, row: int) -> bytes:
        """The image file of a row; several threads may call it at once.

        Raises:
            OSError: It cannot be read.
        """
        path = self.image_file(row)
        if path is None:
            raise FileNotFoundError("there is no such image")
        return read_regular(path)

    def image(self, row: int) -> bytes | None:
        """The image file of a row; None where it cannot be read."""
        try:
            return self.read_image(row)
        except OSError:
            return None

    def image_reader(self, rows: IntArray) -> Callable[[int], bytes | None]:
        """`image` for any of these rows: their names are looked up at once, and each file of names read once."""
        files = dict(zip(rows.tolist(), self.image_files(rows), strict=True))
        return lambda row: _content(files[row])

    def find(self, ids: Sequence[str]) -> IntArray:
        """The (first) rows with these ids.

        Raises:
            NotFoundError: Some are not there; the message names up to five of them.
        """
        return row_ids.find(self.names.ids, ids, len(self), self.name)

    def fingerprint(self) -> str:
        """A hash by which resumed work recognises its input.

        It is made of all ids, image names and captions; where there are vectors, of the sizes of the files, of when
        they were last written, and of a sample of rows.
        """
        if not self.is_encoded:
            texts = hashlib.sha256()
            for start in range(0, len(self), _HASHED):
                part = range(start, min(start + _HASHED, len(self)))
                columns = [self.ids(part), self.image_texts(part), self.texts(part)]
                texts.update(json.dumps(columns).encode())  # escapes what could make two lists equal
            return texts.hexdigest()
        rows = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))
        files = [(found.st_size, found.st_mtime_ns) for found in map(Path.stat, self.files)]
        known = hashlib.sha256(repr((self.layout, len(self), self.widths, files, self.ids(rows))).encode())
        known.update(self.left.gather(rows).tobytes())
        # Vectors of words are computed: their last digit may differ from machine to machine, their texts cannot.
        exact = self.layout != "precomp"
        known.update(self.right.gather(rows).tobytes() if exact else repr(self.texts(rows)).encode())
        if self.groups is not None:
            known.update(self.groups.tobytes())
        return known.hexdigest()


class _Edited(Source):
    """The rows of another source that are kept, with the items that each gets."""

    def __init__(self, source: Source, edits: Edits) -> None:
        import pyarrow

        rows, images, captions = edits.part(0, len(edits))
        self._of, self._rows, self._images = source, rows, images
        for name in ("layout", "name", "files", "folder", "split", "joint", "images"):
            setattr(self, name, getattr(source, name))
        if source.is_encoded:
            self.left = Side.of([MovedRows(source.left, images)])
            self.right = Side.of([MovedRows(source.right, captions)])
        same = images if source.groups is None else source.groups[images]
        groups = row_ids.numbers(pyarrow.array(same))
        places = np.full(len(edits), -1)
        places[rows] = np.arange(len(rows))
        changed = set(edits.repaired.tolist())
        known = {int(places[row]): why for row, why in source.known.items() if edits.keep[row] and row not in changed}
        self.names = RowIds(row_ids.as_texts(source.ids(rows)), groups, known)
        self.image_names = _moved(source.image_names, images)
        self.captions = _moved(source.captions, captions)
        if edits.rewritten:
            self.captions = Texts.of(source.final_captions(edits, rows))

    @property
    def splits(self) -> Sequence[str] | None:
        found = self._of.splits
        return None if found is None else [found[row] for row in self._rows]

    def has_image(self, row: int) -> bool:
        return self._of.has_image(int(self._images[row]))

    def image_file(self, row: int) -> Path | None:
        return self._of.image_file(int(self._images[row]))

    def read_image(self, row: int) -> bytes:
        return self._of.read_image(int(self._images[row]))


def _moved(look_up: LookUp | None, rows: IntArray) -> LookUp | None:
    return None if look_up is None else lambda wanted: look_up(rows[wanted])


def _as_array(look_up: LookUp, start: int, stop: int) -> Any:
    import pyarrow

    if isinstance(look_up, Texts):
        return look_up.array[start:stop]
    return pyarrow.array(look_up(np.arange(start, stop)), pyarrow.large_string())


def _content(path: Path | None) -> bytes | None:
    """What a file holds; None where it cannot be read."""
    try:
        return None if path is None else read_regular(path)
    except OSError:
        return None


def open_arrays(
    left: str | Path,
    right: str | Path,
    ids: str | Path | None = None,
    images: str | Path | None = None,
    columns: Roles | None = None,
) -> Source:
    """Open two .npy files.

    Args:
        left: Vectors of one side (N, D).
        right: Vectors of the other side (N, E); row i of both is one pair.
        ids: A table (CSV, TSV or parquet) with one row a pair: id, caption or text, image_path, image or path, group.
            Without it the number of a row is its id.
        images: Folder that the image paths are relative to; by default that of the table.
        columns: Columns of the table that have no usual names.

    Raises:
        DataError: A file is no such array or table, or they do not belong together.
    """
    sides = [open_files([Path(path)]) for path in (left, right)]
    name = f"{left} and {right}"
    files = (Path(left), Path(right))
    places = image_places(images)
    if ids is None:
        return Source(sides[0], sides[1], "arrays", name, RowIds(), files=files)
    path = Path(ids)
    table = open_table(path, columns=columns)
    roles = [role for role in USUAL_NAMES if table.find(role)]
    if not roles:
        raise NotFoundError(
            table.found(),
            where=path,
            expected="a header line with id, caption or text, image_path, image or path, or group",
        )
    places = places or (path.parent / "images", path.parent, Path())
    source = Source(sides[0], sides[1], "arrays", name, RowIds(), images=places, files=(*files, path), table=table)
    return described_by(source, table)


def from_memory(
    left: Any,
    right: Any,
    ids: Any = None,
    groups: Any = None,
    texts: Sequence[str] | None = None,
) -> Source:
    """Use arrays as they are.

    Args:
        left: Vectors of one side (N, D): a numpy array, or a torch tensor on any device.
        right: Vectors of the other side (N, E).
        ids: One a pair (a list, an array or a series); the number of its row by default.
        groups: One a pair, likewise: pairs that share it are not wrong for each other (captions of one image).
        texts: One a pair, for people.

    Raises:
        DataError: They are no vectors, or their numbers differ.
    """
    sides = [Side.of([_in_memory(values, what)]) for values, what in ((left, "left"), (right, "right"))]
    source = Source(sides[0], sides[1], "memory", "the given arrays", RowIds())
    captions = None
    if texts is not None:
        captions = Texts.of(row_ids.flat(texts, "texts", len(source)))
    return replace(source, names=row_ids.from_lists(ids, groups, len(source)), captions=captions)


def image_places(images: str | Path | None) -> tuple[Path, ...]:
    if images is None:
        return ()
    if not Path(images).is_dir():
        raise NotFoundError("no such folder", where=images, expected="the folder that the image paths start from")
    return (Path(images),)


def described_by(source: Source, table: Table) -> Source:
    caption, path = table.find("caption"), table.find("image_path")
    return replace(
        source,
        names=row_ids.from_table(table),
        captions=partial(table.cells, caption) if caption else None,
        image_names=partial(table.cells, path) if path else None,
    )


def _in_memory(values: Any, what: str) -> Shard:
    import torch

    where = f"the {what} side"
    if not isinstance(values, np.ndarray | torch.Tensor):
        raise ShapeError(f"a {type(values).__name__}", where=where, expected="a numpy array or a torch tensor")
    if values.ndim != 2 or 0 in values.shape:
        found = f"an array with shape {tuple(values.shape)}"
        raise ShapeError(found, where=where, expected="(N, D), one vector a row, at least one")
    if isinstance(values, torch.Tensor):
        if not (values.is_floating_point() or values.dtype == torch.int8) or values.layout != torch.strided:
            raise ShapeError(f"{values.dtype} ({values.layout})", where=where, expected="dense floats or int8")
        return TensorRows(values)
    real = values.dtype.kind == "f" and values.dtype.itemsize <= 8 and values.dtype.isnative
    if not real and values.dtype != np.int8:
        advice = "Convert it with array.astype(numpy.float32)"
        raise ShapeError(str(values.dtype), where=where, expected="float16, float32, float64 or int8", advice=advice)
    return ArrayRows(values)
