"""What an audit reads: the vectors of both sides, still on disk, and what is known about each pair.

Row i of both sides is one pair. Nothing here holds all vectors or a Python string for every row; only the SCAN layout,
whose vectors are computed from regions and words, is kept in memory (4 bytes a number).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mispair.errors import DataError
from mispair.pairs import row_ids
from mispair.pairs.edits import LookUp
from mispair.pairs.image_files import find_image
from mispair.pairs.pairs import FloatArray, IntArray
from mispair.pairs.raw import RawPairs
from mispair.pairs.row_ids import RowIds
from mispair.pairs.shards import ArrayRows, Matrix, Shard, Side, TensorRows, open_files
from mispair.pairs.tables import USUAL_NAMES, Roles, Table, open_table
from mispair.support.files import read_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LayoutName = Literal["clip", "arrays", "precomp", "memory", "raw", "datacomp"]
NetworkScore = Callable[[IntArray, IntArray], FloatArray]
_SAMPLED_ROWS = 256
_LOADED = 0.25  # share of the free memory of a GPU that all vectors may take


@dataclass(frozen=True)
class Source:
    """Pairs to be audited.

    Attributes:
        left: Vectors of one side (N, D).
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
        raw: The images and captions that the vectors were made from.
        network_score: Scores the left items of some rows with the right items of others, (n,), by the networks of a
            training run; None without a run.
        joint: Whether the vectors of both sides have a common space.
        shards: Names and sizes of the files that the rows are in, for tables of results beside them.
    """

    left: Side
    right: Side
    layout: LayoutName
    name: str
    names: RowIds
    captions: LookUp | None = None
    image_names: LookUp | None = None
    images: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    table: Table | None = None
    folder: Path | None = None
    split: str | None = None
    raw: RawPairs | None = None
    network_score: NetworkScore | None = None
    joint: bool = False
    shards: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            raise DataError(
                f"{self.name}: {len(self.left):,} vectors on the left side and {len(self.right):,} on the right side; "
                "row i of both must be one pair."
            )
        if self.table is not None and len(self.table) != len(self.left):
            raise DataError(
                f"{self.table.parts[0].path}: {len(self.table):,} rows for {len(self.left):,} pairs of vectors; the "
                "table needs one row a pair."
            )

    def __len__(self) -> int:
        return len(self.left)

    @property
    def widths(self) -> tuple[int, int]:
        return self.left.width, self.right.width

    @property
    def groups(self) -> IntArray | None:
        """Number of the group of each row (N,); rows with the same image share it. None where all differ."""
        return self.names.groups

    @property
    def known(self) -> dict[int, str]:
        """Rows that are bad already by the table, and why."""
        return self.names.known

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
        return self if left is self.left and right is self.right else replace(self, left=left, right=right)

    def is_on(self, device: torch.device) -> bool:
        """Whether the vectors of both sides lie on a device."""
        return self.left.is_on(device) and self.right.is_on(device)

    def loaded(self, device: torch.device, workers: int) -> Source:
        """The same pairs with all vectors on a GPU, if they take little of its memory; else as they are."""
        import torch

        if device.type != "cuda" or self.left.nbytes + self.right.nbytes > _LOADED * torch.cuda.mem_get_info(device)[0]:
            return self
        return replace(self, left=self.left.loaded(device, workers), right=self.right.loaded(device, workers))

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
        wanted = _rows(rows)
        return self.left.gather(wanted), self.right.gather(wanted)

    def ids(self, rows: Sequence[int] | IntArray) -> list[str]:
        """The ids of some rows; a missing one is empty."""
        wanted = _rows(rows)
        return [str(row) for row in wanted] if self.names.ids is None else row_ids.look_up(self.names.ids, wanted)

    def id_column(self, start: int, stop: int) -> Any:
        """The ids of consecutive rows as a pyarrow array."""
        import pyarrow

        if self.names.ids is None:
            return pyarrow.array(np.arange(start, stop)).cast(pyarrow.string())
        return self.names.ids[start:stop]

    def item_columns(self, start: int, stop: int) -> dict[str, Any]:
        """The image names and captions of consecutive rows as pyarrow arrays, where they are known."""
        import pyarrow

        rows = np.arange(start, stop)
        known = {"image": self.image_names, "caption": self.captions}
        return {
            name: pyarrow.array(look_up(rows), pyarrow.large_string())
            for name, look_up in known.items()
            if look_up is not None
        }

    def texts(self, rows: Sequence[int] | IntArray) -> list[str]:
        """The captions of some rows; empty where unknown."""
        wanted = _rows(rows)
        return [""] * len(wanted) if self.captions is None else self.captions(wanted)

    def image_files(self, rows: Sequence[int] | IntArray) -> list[Path | None]:
        """The image files of some rows; None where there is no such file."""
        wanted = _rows(rows)
        if self.raw is not None:
            files = [self.raw.image_file(row) for row in wanted.tolist()]
            return [path if path is not None and path.is_file() else None for path in files]
        if self.image_names is None:
            return [None] * len(wanted)
        return [find_image(self.images, name) for name in self.image_names(wanted)]

    @property
    def image_folder(self) -> Path | None:
        """The folder that the image names start from; None where it is not known, or the images are in other files."""
        if self.raw is not None:
            return self.raw.image_folder
        return self.images[0] if self.images else None

    def image_key(self, row: int) -> Hashable:
        """Equal for rows that show the same image; None where there is none."""
        return self.image_files([row])[0] if self.raw is None else self.raw.image_number(row)

    def has_image(self, row: int) -> bool:
        """Whether the image of a row is there."""
        inside = self.raw is not None and self.raw.has_image(row) and self.raw.image_file(row) is None
        return inside or self.image_files([row])[0] is not None

    def read_image(self, row: int) -> bytes | None:
        """The content of the image file of a row; None where it cannot be read."""
        if self.raw is None:
            return _content(self.image_files([row])[0])
        try:
            return self.raw.read_image(row)
        except OSError:
            return None

    def image_reader(self, rows: IntArray) -> Callable[[int], bytes | None]:
        """`read_image` for any of these rows: their names are looked up at once, and each file of names read once."""
        if self.raw is not None or self.image_names is None:
            return self.read_image
        names = dict(zip(rows.tolist(), self.image_names(rows), strict=True))
        return lambda row: _content(find_image(self.images, names[row]))

    def find(self, ids: Sequence[str]) -> IntArray:
        """The (first) rows with these ids.

        Raises:
            DataError: Some are not there; the message names up to five of them.
        """
        return row_ids.find(self.names.ids, ids, len(self), self.name)

    def fingerprint(self) -> str:
        """A hash by which a resumed audit recognises its input.

        It is made of the sizes of the files, of when they were last written, and of a sample of rows.
        """
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
        raise DataError(
            f"{path}: {table.found()}; expected a header line with id, caption or text, image_path, image or path, or "
            "group."
        )
    places = places or (path.parent / "images", path.parent, Path())
    source = Source(sides[0], sides[1], "arrays", name, RowIds(), images=places, files=(*files, path), table=table)
    return described_by(source, table)


def from_raw(pairs: RawPairs, left: Shard, right: Shard, known: dict[int, str], folder: Path | None = None) -> Source:
    """Images and captions by their vectors.

    Args:
        pairs: The images and captions.
        left: Vectors of the images (N, D).
        right: Vectors of the captions (N, E).
        known: Rows that have no vectors, and why.
        folder: The folder of the data set, if it is one.
    """
    return Source(
        Side.of([left]),
        Side.of([right]),
        "raw",
        pairs.name,
        RowIds(pairs.ids, pairs.groups, known),
        captions=partial(row_ids.look_up, pairs.captions),
        image_names=partial(row_ids.look_up, pairs.image_names),
        files=pairs.files,
        folder=folder,
        raw=pairs,
        shards=pairs.shards,
    )


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
        captions = partial(row_ids.look_up, row_ids.as_texts(row_ids.flat(texts, "texts", len(source))))
    return replace(source, names=row_ids.from_lists(ids, groups, len(source)), captions=captions)


def _rows(rows: Sequence[int] | IntArray) -> IntArray:
    return np.asarray(rows, dtype=np.int64).reshape(-1)


def image_places(images: str | Path | None) -> tuple[Path, ...]:
    if images is None:
        return ()
    if not Path(images).is_dir():
        raise DataError(f"{images}: no such folder; expected the folder that the image paths are relative to.")
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

    if not isinstance(values, np.ndarray | torch.Tensor):
        raise DataError(f"The {what} side is a {type(values).__name__}; expected a numpy array or a torch tensor.")
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(
            f"The {what} side has the shape {tuple(values.shape)}; expected (N, D), one vector a row, at least one."
        )
    if isinstance(values, torch.Tensor):
        if not (values.is_floating_point() or values.dtype == torch.int8) or values.layout != torch.strided:
            raise DataError(f"The {what} side holds {values.dtype} ({values.layout}); expected dense floats or int8.")
        return TensorRows(values)
    real = values.dtype.kind == "f" and values.dtype.itemsize <= 8 and values.dtype.isnative
    if not real and values.dtype != np.int8:
        raise DataError(
            f"The {what} side holds {values.dtype}; expected float16, float32, float64 or int8. Convert it with "
            "array.astype(numpy.float32)."
        )
    return ArrayRows(values)
