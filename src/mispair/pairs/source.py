"""`Source`: the pairs of a data set by row, to read, encode, audit and edit.

Row i has a left and a right item: an image and a caption, or two vectors, which stay on disk. Nothing here holds all
vectors or a Python string for every row; only the SCAN layout, whose vectors are computed from regions and words, is
kept in memory (4 bytes a number). A layout is a subclass, which writes edited copies of itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow

from mispair.errors import ConflictError, NotFoundError, ShapeError, TooFewError
from mispair.pairs import row_ids
from mispair.pairs.edits import Edits, LookUp, TableCopies
from mispair.pairs.npy import write_rows
from mispair.pairs.origin import Origin
from mispair.pairs.result_tables import write_table
from mispair.pairs.row_ids import RowIds, Texts
from mispair.pairs.shards import NO_ROWS, Matrix, SideRows, moved, views_of
from mispair.pairs.tables import Table
from mispair.support.arrays import FloatArray, IntArray
from mispair.support.files import Json, read_regular
from mispair.support.formatting import plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LayoutName = Literal["clip", "arrays", "precomp", "memory", "raw", "datacomp"]
NetworkScore = Callable[[IntArray, IntArray], FloatArray]
Rows = Sequence[int] | IntArray | None  # numbers of rows; None for all
Hashes = npt.NDArray[np.uint64]
SPLIT = "split"  # column of a table
OWN_TABLE = "ids.csv"  # where the data has none
ENDINGS = ("", ".jpg", ".jpeg", ".png", ".webp")
_SAMPLED_ROWS = 256
_HASHED = 1000  # rows of texts that are hashed at a time
_LOADED = 0.25  # share of the free memory of a GPU that all vectors may take
_PROBED = 1000  # image files that must not all be missing, before hours are spent on the wrong folder


@dataclass(eq=False)
class Source:
    """The pairs of a data set, in its order. No row is ever left out: bad ones have a status."""

    left: SideRows = NO_ROWS  # vectors (N, D); no rows if nothing is encoded yet
    right: SideRows = NO_ROWS  # vectors (N, E)
    layout: LayoutName = "raw"
    name: str = "pairs"  # where they come from, for messages
    names: RowIds = RowIds()  # noqa: RUF009 - it is frozen
    captions: LookUp | None = None  # looks up texts of rows
    image_names: LookUp | None = None  # looks up image paths of rows
    images: tuple[Path, ...] = ()  # folders to search for images
    files: tuple[Path, ...] = ()  # all files that are read
    table: Table | None = None  # of ids, captions and paths
    folder: Path | None = None  # None for single files and for memory
    split: str | None = None
    others: tuple[Path, ...] = ()  # files of the other splits in the folder, which a copy contains unchanged
    network_score: NetworkScore | None = None  # of left items of some rows and right items of others, by a training
    joint: bool = False  # whether both sides have a common space
    hashes: Hashes | None = None  # difference hashes of the images (N, 2); zero if there is none
    shards: tuple[tuple[str, int], ...] = ()  # name and size of each file of rows; results have the same files
    notes: tuple[str, ...] = ()  # for the user, such as files that are not read
    inside: bool = False  # whether images are inside the files of the data set
    outside: Path | None = None  # folder of images that a copy refers to; None if it contains them
    allow_outside: bool = False  # whether to read images outside their folder, as a table may name any file

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            found = f"{len(self.left):,} vectors on the left side and {len(self.right):,} on the right side"
            raise ShapeError(found, where=self.name, expected="one pair in row i of both")
        if self.table is not None and len(self.table) != len(self.left):
            found = f"{len(self.table):,} rows for {len(self.left):,} pairs of vectors"
            raise ShapeError(found, where=self.table.parts[0].path, expected="one row a pair")

    def __len__(self) -> int:
        return len(self.left) if self.is_encoded else len(self.names.ids)

    def _with(self, **changes: Any) -> Self:
        """A copy with other attributes, also for subclasses."""
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    def _numbers(self, rows: Rows) -> IntArray:
        return np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.int64).reshape(-1)

    @property
    def is_encoded(self) -> bool:
        """Whether both sides have vectors."""
        return len(self.left) > 0

    def with_vectors(
        self,
        left: SideRows,
        right: SideRows,
        known: dict[int, str],
        *,
        joint: bool = False,
        hashes: Hashes | None = None,
    ) -> Self:
        """The same images and captions with vectors (N, D) and (N, E); `known` says which rows have none, and why."""
        return self._with(
            left=left,
            right=right,
            names=replace(self.names, known=known),
            joint=self.joint or joint,
            hashes=self.hashes if hashes is None else hashes,
        )

    def described_by(self, table: Table) -> Self:
        """The same with the ids, groups, captions and image names of a table."""
        caption, path = table.find("caption"), table.find("image_path")
        return self._with(
            names=row_ids.from_table(table),
            captions=partial(table.cells, caption) if caption else None,
            image_names=partial(table.cells, path) if path else None,
        )

    def edited(self, edits: Edits) -> Source:
        """The kept rows with their new items. Nothing is written."""
        return _Edited(self, edits)

    @property
    def widths(self) -> tuple[int, int]:
        return self.left.width, self.right.width

    @property
    def groups(self) -> IntArray | None:
        """Number of the group of each row (N,); rows with the same image share it. None if all differ."""
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
        """Rows with a fault in the table, and the fault."""
        return self.names.known

    @property
    def splits(self) -> Sequence[str] | None:
        """The split of each row, such as train or val; None if the data set has no splits."""
        table = self.table
        column = None if table is None else next((name for name in table.columns if name.lower() == SPLIT), None)
        if table is None or column is None:
            return None
        return [value for batch in table.batches([column]) for value in batch[0].to_pylist()]

    @cached_property
    def known_rows(self) -> IntArray:
        """Rows with a fault in the table, ascending."""
        return np.array(sorted(self.known), dtype=np.int64)

    @property
    def has_texts(self) -> bool:
        return self.captions is not None

    @property
    def has_images(self) -> bool:
        """Whether there are image paths; the files themselves may be missing."""
        return self.image_names is not None

    def scaled(self) -> Source:
        """The same pairs with vectors of usual lengths: the squares of huge and tiny numbers do not fit into
        float32."""
        left, right = (side.scaled(self._some_rows) for side in (self.left, self.right))
        return self if left is self.left and right is self.right else self._with(left=left, right=right)

    @property
    def _some_rows(self) -> IntArray:
        return np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))

    def is_on(self, device: torch.device) -> bool:
        """Whether the vectors of both sides lie on a device."""
        return self.left.is_on(device) and self.right.is_on(device)

    def loaded(self, device: torch.device, workers: int) -> Source:
        """The same pairs with all vectors on a GPU, if they take little of its memory; else unchanged."""
        import torch

        if device.type != "cuda" or self.left.nbytes + self.right.nbytes > _LOADED * torch.cuda.mem_get_info(device)[0]:
            return self
        return self._with(left=self.left.loaded(device, workers), right=self.right.loaded(device, workers))

    def part(self, start: int, stop: int) -> Source:
        """Return rows start to stop as a source, with vectors and faults only."""
        low, high = np.searchsorted(self.known_rows, (start, stop))
        known = {row - start: self.known[row] for row in self.known_rows[low:high].tolist()}
        score = self.network_score
        return Source(
            moved(self.left, np.arange(start, stop)),
            moved(self.right, np.arange(start, stop)),
            self.layout,
            self.name,
            RowIds(known=known),
            network_score=None if score is None else lambda lefts, rights: score(start + lefts, start + rights),
        )

    def block(self, start: int, stop: int) -> tuple[Matrix, Matrix]:
        """Consecutive rows of both sides (n, D) and (n, E), read now; keeps NaN and infinite values."""
        return self.left.block(start, stop), self.right.block(start, stop)

    def tensors(self, rows: slice | IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Consecutive or any rows of both sides (n, D) and (n, E) on a device; keeps NaN and infinite values."""
        return self.left.tensor(rows, device), self.right.tensor(rows, device)

    def gather(self, rows: Sequence[int] | IntArray) -> tuple[Matrix, Matrix]:
        """Any rows of both sides (n, D) and (n, E), in the given order."""
        wanted = self._numbers(rows)
        return self.left.gather(wanted), self.right.gather(wanted)

    def ids(self, rows: Rows = None) -> list[str]:
        """The ids of some rows, by default of all; empty if missing."""
        wanted = self._numbers(rows)
        return [str(row) for row in wanted] if self.names.ids is None else Texts(self.names.ids)(wanted)

    def id_column(self, start: int, stop: int) -> Any:
        """The ids of consecutive rows as a pyarrow array."""
        if self.names.ids is None:
            return pyarrow.array(np.arange(start, stop)).cast(pyarrow.string())
        return self.names.ids[start:stop]

    def item_columns(self, start: int, stop: int) -> dict[str, Any]:
        """The image names and captions of consecutive rows as pyarrow arrays, where they are known."""
        rows, known = np.arange(start, stop), {"image": self.image_names, "caption": self.captions}
        return {
            name: look_up.array[start:stop]
            if isinstance(look_up, Texts)
            else pyarrow.array(look_up(rows), pyarrow.large_string())
            for name, look_up in known.items()
            if look_up is not None
        }

    def texts(self, rows: Rows = None) -> list[str]:
        """The captions of some rows, by default of all; empty where unknown."""
        return self._looked_up(self.captions, rows)

    def image_texts(self, rows: Rows = None) -> list[str]:
        """The image names of some rows, by default of all; empty where unknown."""
        return self._looked_up(self.image_names, rows)

    def _looked_up(self, look_up: LookUp | None, rows: Rows) -> list[str]:
        wanted = self._numbers(rows)
        return [""] * len(wanted) if look_up is None else look_up(wanted)

    def final_captions(self, edits: Edits, rows: IntArray) -> list[str]:
        """The captions of rows after the edits."""
        texts = self.texts(edits.caption_from[rows])
        return [edits.rewritten.get(int(row), text) for row, text in zip(rows, texts, strict=True)]

    @property
    def image_folder(self) -> Path | None:
        """Folder of relative image names; None if unknown, or if images are inside other files."""
        return self.images[0] if self.images else None

    def image_key(self, row: int) -> Hashable:
        """Equal for rows with equal images; None without an image."""
        if not self.inside:
            return self.image_file(row)
        return row if self.groups is None else int(self.groups[row])

    def has_image(self, row: int) -> bool:
        """Whether the data set names an image for a row; it may be missing."""
        return self.inside or bool(self.image_texts([row])[0])

    def image_is_there(self, row: int) -> bool:
        """Whether the image of a row is there."""
        path = self.image_file(row)
        return self.has_image(row) and (self.inside if path is None else path.is_file())

    def image_file(self, row: int) -> Path | None:
        """The path of the image of a row; None if missing or inside another file."""
        return None if self.inside else find_image(self.images, self.image_texts([row])[0])

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
        """The image file of a row; None if it cannot be read."""
        try:
            return self.read_image(row)
        except OSError:
            return None

    def image_reader(self, rows: IntArray) -> Callable[[int], bytes | None]:
        """`image` for any of these rows; looks up their names at once."""
        names = dict(zip(rows.tolist(), self.image_texts(rows), strict=True))
        return self._with(image_names=lambda some: [names[row] for row in some.tolist()]).image

    def size(self, edits: Edits) -> int:
        """About how many bytes a copy takes."""
        own, others = (sum(path.stat().st_size for path in paths) for paths in (self.files, self.others))
        return int(own * edits.keep.mean()) + others

    def order(self, edits: Edits) -> IntArray:
        """The rows in the order of a copy."""
        return edits.rows

    def write(self, edits: Edits, out: Path) -> None:
        """Writes the edited rows to an empty folder: `left.npy`, `right.npy`, or a file a view, and a table."""
        rows = edits.rows
        self.check_no_rewritten(edits)
        for name, side, items in (("left", self.left, edits.image_from), ("right", self.right, edits.caption_from)):
            views = views_of(side)
            for number, view in enumerate(views, 1):
                path = out / f"{name}{f'_{number}' * (len(views) > 1)}.npy"
                write_rows(path, partial(view.gather, dtype=view.dtype), items[rows])
        copies = self._table_copies()
        if copies is not None:
            copies.write(edits, out)
            return
        columns: dict[str, Any] = {"id": self.ids(rows)}
        if self.has_texts:
            columns["caption"] = self.texts(edits.caption_from[rows])
        if self.groups is not None:
            columns["group"] = self.groups[edits.image_from[rows]]
        write_table(out / OWN_TABLE, [pyarrow.table(columns)])

    def _write_others(self, out: Path) -> None:
        """Write the other splits, and the encoders of the features if known."""
        assert self.folder is not None
        if (origin := Origin.read(self.folder)) is not None:
            origin.write(out)
        for path in self.others:
            place = out / path.relative_to(self.folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)

    def _table_copies(self, root: Path | None = None) -> TableCopies | None:
        """Copies of the table; they get ids if it has none, since positions change."""
        table = self.table
        if table is None:
            return None
        of_image = tuple(filter(None, (table.find("image_path"), table.find("group"))))
        return TableCopies(table, of_image, table.find("caption"), root, None if table.find("id") else self.ids)

    def check_no_rewritten(self, edits: Edits) -> None:
        """Raise if captions were rewritten, because these have no vectors."""
        if edits.rewritten:
            raise ConflictError(
                f"{len(edits.rewritten):,} captions were rewritten, and this data set has vectors instead of captions",
                where=self.name,
                advice="Write a copy of the images and captions, and encode that.",
            )

    def state(self) -> list[Json]:
        """Changes when a file of the data set does."""
        return [digest(self.files)]

    def image_state(self) -> list[Json]:
        """Changes when an image does."""
        return [digest(self.files)] if self.inside else []

    def find(self, ids: Sequence[str]) -> IntArray:
        """The (first) rows with these ids."""
        return row_ids.find(self.names.ids, ids, len(self), self.name)

    def fingerprint(self) -> str:
        """A hash of the data, to recognise it when work is resumed.

        Without vectors it covers all ids, image names and captions. With vectors it covers the sizes and times of the
        files, and a sample of rows.
        """
        if not self.is_encoded:
            texts = hashlib.sha256()
            for start in range(0, len(self), _HASHED):
                part = range(start, min(start + _HASHED, len(self)))
                columns = [self.ids(part), self.image_texts(part), self.texts(part)]
                texts.update(json.dumps(columns).encode())  # escapes what could make two lists equal
            return texts.hexdigest()
        rows = self._some_rows
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
    """The kept rows of another source, with their new items."""

    def __init__(self, source: Source, edits: Edits) -> None:
        rows, images, captions = edits.part(0, len(edits))
        self._of, self._rows, self._images = source, rows, images
        for name in ("layout", "name", "files", "folder", "split", "joint", "images", "inside"):
            setattr(self, name, getattr(source, name))
        if source.is_encoded:
            self.left = moved(source.left, images)
            self.right = moved(source.right, captions)
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


class ImageFiles(Source):
    """Images in files of their own, and captions.

    Each row has an id, the name of an image from the folder on, and a caption; each may be empty. A missing or repeated
    id is made of the image's name and the caption's number, as in dog.jpg#0.
    """

    def __init__(self, name: str, files: Iterable[Path], records: Sequence[tuple[str, str, str]], folder: Path) -> None:
        if not records:
            raise TooFewError("no pairs", where=name, expected="at least one image with a caption")
        self.name, self.files, self.image_root, self.images = name, tuple(files), folder, (folder,)
        ids, images, captions = zip(*records, strict=True)
        self._paths = [image.strip() for image in images]  # as the file system has them: perhaps no text
        self.image_names = Texts.of(self._paths)
        self.captions = Texts.of(text.strip() for text in captions)
        unique = row_ids.as_texts(row_ids.unique_ids([plain(text).strip() for text in ids], self._paths))
        self.names = RowIds(unique, row_ids.numbers(self.image_names.array))
        self._check_images()

    def image_file(self, row: int) -> Path | None:
        return self.image_root / self._paths[row] if self._paths[row] else None

    def read_image(self, row: int) -> bytes:
        path = self.image_file(row)
        if path and not self.allow_outside and os.path.exists(path) and not is_inside(self.image_root, path):
            raise OSError("it lies outside the folder of the images; `allow_outside` reads it")
        return super().read_image(row)

    def state(self) -> list[Json]:
        return [*super().state(), *self.image_state()]

    def image_state(self) -> list[Json]:
        own = range(len(self)) if self.groups is None else np.unique(self.groups, return_index=True)[1].tolist()
        images = (path for row in own if (path := self.image_file(row)) is not None)
        return [digest(images), *(["outside"] if self.allow_outside else [])]

    def check_places(self) -> None:
        """Refuse images of which none may be read, as all lie outside their folder."""
        there = [path for path in map(self.image_root.joinpath, self._probed) if os.path.exists(path)]
        if not self.allow_outside and there and not any(is_inside(self.image_root, path) for path in there):
            found = f"all images lie outside this folder, such as {plain(str(there[0]))}"
            advice = f"Give `images={there[0].parent}`, or `allow_outside`."
            raise ConflictError(found, where=self.image_root, advice=advice)

    @property
    def _probed(self) -> list[str]:
        return list(islice(filter(None, self._paths), _PROBED))

    def _check_images(self) -> None:
        """Refuse web addresses, and a wrong folder for all images."""
        for image in self._paths:
            if image.startswith(("http://", "https://")):
                advice = "mispair downloads nothing: fetch the images first, and give their paths."
                raise NotFoundError(f"{plain(image)} is a web address", where=self.name, advice=advice)
        named = self._probed
        if not any(os.path.exists(self.image_root / image) for image in named):
            count = f"{'first ' * (len(self._paths) > _PROBED)}{min(len(self._paths), _PROBED):,}"
            searched = f"looked for {plain(str(self.image_root / named[0]))}" if named else "no row names one"
            advice = "Give the folder that the image paths start from as `images`."
            raise NotFoundError(f"none of the {count} images ({searched})", where=self.image_root, advice=advice)


def find_image(places: Sequence[Path], name: str) -> Path | None:
    """The image file of this name in the first place, with or without its ending.

    A name never leads out of the places, by `..`, as an absolute path or through a link: a report or a page must not
    show other images of the machine.
    """
    if not name or "\0" in name:
        return None
    # Tables travel: without their old folders, paths from another machine still fit.
    bare = re.split(r"[/\\]", name)[-1]
    tried = ((place, place / f"{part}{ending}") for place in places for part in (name, bare) for ending in ENDINGS)
    return next((path for place, path in tried if os.path.isfile(path) and is_inside(place, path)), None)


def is_inside(place: Path, path: Path) -> bool:
    """Whether a path leads into a folder, also through `..` and links."""
    return path.resolve().is_relative_to(place.resolve())


def digest(paths: Iterable[Path]) -> str:
    """A hash of the names, sizes and times of files; missing ones count as such."""
    known = hashlib.sha256()
    for path in paths:
        try:
            found = path.stat()
            known.update(repr((os.fspath(path), found.st_size, found.st_mtime_ns)).encode("utf-8", "surrogateescape"))
        except OSError:
            known.update(repr((os.fspath(path), None)).encode("utf-8", "surrogateescape"))
    return known.hexdigest()
