"""Encode images and captions; `cache` keeps the vectors by content.

`encode_to_folder` writes the clip-retrieval layout:

    img_emb/img_emb_0.npy   text_emb/text_emb_0.npy   metadata/metadata_0.parquet (id, image_path, caption, status)
    encode.json   the input of the folder

Rows that cannot be encoded stay: the failed side is a zero vector, and `status` is the reason ("ok" otherwise).
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow

from mispair.encoders.cache import EncodingCache, Halves, Key, key_of
from mispair.encoders.encoders import (
    ImageEncoder,
    TextEncoder,
    identity,
    image_encoder,
    load_image,
    parts_of,
    text_encoder,
)
from mispair.encoders.image_hash import DifferenceHash, as_hashes
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL
from mispair.errors import ConflictError
from mispair.pairs.npy import write_array
from mispair.pairs.origin import MARK
from mispair.pairs.remote import Store
from mispair.pairs.result_tables import write_table
from mispair.pairs.shards import MovedRows, SideRows, join_views, views_of
from mispair.pairs.source import Hashes, Source
from mispair.support.arrays import IntArray
from mispair.support.cores import cores
from mispair.support.files import Json
from mispair.support.owned_folder import FolderKind, OwnedFolder
from mispair.support.progress import RowProgress

if TYPE_CHECKING:
    from rich.console import Console


OK = "ok"
_STORE_SECONDS = 20.0
BAD_SHARE = 0.01  # warn about more bad rows than this
SHARD = 4096  # captions between two visits to the cache; rows a file
_STORED = 1 << 26  # bytes of image encodings between two visits to the cache
_BATCH = 64  # items an encoder takes at a time
_AHEAD = 2 * _BATCH  # images that threads read during the encoding
_MOST_THREADS = 32
_PARTS = (("img_emb", ".npy"), ("text_emb", ".npy"), ("metadata", ".parquet"))
EMBEDDINGS = FolderKind("embeddings", MARK, [f"{stem}/{stem}_*{suffix}" for stem, suffix in _PARTS])
_HASHES = ("hash_along", "hash_down")  # columns of a table
_LONGEST_REASON = 200  # characters
_COUNTS = ("rows", "bad", "bad_images", "bad_captions", "kept")  # of an `Outcome`

Loaded = tuple[Sequence[ImageEncoder], Sequence[TextEncoder]]


@dataclass(frozen=True)
class Encoders:
    """Names of the encoders of both sides; A+B names several views of a side."""

    image_model: str = IMAGE_MODEL
    text_model: str = TEXT_MODEL
    device: str = "auto"

    def views(self) -> Loaded:
        """Load the encoders of each side, one a view.

        Raises:
            ConfigError: A name is unknown or given twice, or a package or its weights are missing.
        """
        for where, names in (("image_model", self.image_model), ("text_model", self.text_model)):
            if len(set(parts_of(names))) < len(parts_of(names)):
                raise ConflictError(names, where=where, expected="each encoder once")
        images = [image_encoder(name, self.device) for name in parts_of(self.image_model)]
        return images, [text_encoder(name, self.device) for name in parts_of(self.text_model)]


@dataclass(frozen=True)
class EncodedItems:
    """The items of one side by one encoder."""

    rows: IntArray  # first row of each item
    cells: MovedRows  # encodings of the items
    item: IntArray  # (N,) number of the item of each pair
    known: npt.NDArray[np.bool_]  # which encodings were in the cache, by item
    problems: dict[int, str]  # reasons for missing encodings, by row

    @property
    def of_pairs(self) -> MovedRows:
        """One encoding a pair."""
        return MovedRows(self.cells.side, self.cells.rows[self.item])


@dataclass(frozen=True)
class EncodedPairs:
    """Vectors of images (N, D) and captions (N, E), by each encoder of a side."""

    left: list[MovedRows]
    right: list[MovedRows]
    hashes: MovedRows  # of the images, by `DifferenceHash`
    problems: dict[int, str] = field(default_factory=dict)  # by row; one side has zero vectors only
    kept: int = 0  # rows that were in the cache

    def sides(self, name: str) -> tuple[SideRows, SideRows]:
        """The vectors of both sides; several encoders give several views."""
        left, right = (join_views([SideRows.of([view]) for view in side], name) for side in (self.left, self.right))
        return left, right


@dataclass(frozen=True)
class Outcome:
    """Counts of encoded and failed rows."""

    rows: int
    bad: int = 0  # whose status is not "ok"
    bad_images: int = 0  # without a vector of the image
    bad_captions: int = 0  # without a vector of the caption
    kept: int = 0  # whose vectors were in the cache
    example: str = ""  # id and status of the first bad row

    @classmethod
    def of(cls, problems: dict[int, str], kept: int, pairs: Source) -> Outcome:
        """Count the problems of the rows."""
        first = min(problems, default=None)
        return cls(
            rows=len(pairs),
            bad=len(problems),
            bad_images=sum(problem.startswith("image ") for problem in problems.values()),
            bad_captions=sum("; caption " in f"; {problem}" for problem in problems.values()),
            kept=kept,
            example="" if first is None else f"{pairs.ids([first])[0]}: {problems[first]}",
        )

    def __add__(self, later: Outcome) -> Outcome:
        """The outcome of both."""
        counts = {name: getattr(self, name) + getattr(later, name) for name in _COUNTS}
        return Outcome(**counts, example=self.example or later.example)

    @property
    def too_many_bad(self) -> bool:
        """Whether more than 1 % of the rows are bad."""
        return self.bad > BAD_SHARE * self.rows

    def lines(self) -> list[str]:
        """Describe the outcome in words."""
        kept = f", of which {self.kept:,} were encoded before" if self.kept else ""
        lines = [f"{self.rows:,} pairs{kept}."]
        if self.bad:
            lines.append(
                f"{self.bad:,} of them ({self.bad / self.rows:.1%}) could not be encoded and stay with a status: "
                f"{self.bad_images:,} for their image, {self.bad_captions:,} for their caption. First: {self.example}."
            )
        return lines


def encode(pairs: Source, encoders: Loaded, cache: Path, *, console: Console | None = None) -> EncodedPairs:
    """Encode all pairs by each encoder, and hash the images; reuse encodings in the cache."""
    *images, hashes = encode_images(pairs, [*encoders[0], DifferenceHash()], cache, console=console)
    rows = np.arange(len(pairs))
    with RowProgress(console, len(rows), "encoding captions") as bar:
        side = _Side("caption", encoders[1], cache)
        texts = side.encode(rows, rows, _captions(pairs, side), bar)
    problems = [_in_all([one.problems for one in each]) for each in (images, texts)]
    joined = {row: "; ".join(own[row] for own in problems if row in own) for row in problems[0] | problems[1]}
    kept = np.all([one.known[one.item] for one in [*images, *texts]], axis=0)
    left, right = ([one.of_pairs for one in each] for each in (images, texts))
    return EncodedPairs(left, right, hashes.of_pairs, joined, int(kept.sum()))


def _in_all(problems: list[dict[int, str]]) -> dict[int, str]:
    """Rows on which all encoders fail, with the problem of the first encoder."""
    return {row: why for row, why in problems[0].items() if all(row in one for one in problems)}


def encode_images(
    pairs: Source, encoders: Sequence[ImageEncoder], cache: Path, *, console: Console | None = None
) -> list[EncodedItems]:
    """Read each image once and encode it by each encoder; reuse encodings in the cache."""
    rows, image = np.unique(pairs.first_rows, return_inverse=True)
    side, pool = _Side("image", encoders, cache), ThreadPoolExecutor(min(_MOST_THREADS, cores()))
    with RowProgress(console, len(rows), "encoding images") as bar, pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # they name no file, and unreadable images get a status
        return side.encode(rows, image, _images(pairs, rows.tolist(), side, pool), bar)


def encode_to_folder(
    pairs: Source,
    out: Path,
    encoders: Loaded,
    cache: Path,
    *,
    shard: int = SHARD,
    overwrite: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Write the vectors of all pairs in the clip-retrieval layout, `shard` rows a file.

    Raises:
        DataError: The folder holds something else (`overwrite` starts over), or cannot be written.
    """
    request: dict[str, Json] = {
        **request_of(encoders),
        "rows": len(pairs),
        "rows a shard": shard,
        "ids, image paths or captions": [pairs.fingerprint()],
    }
    with OwnedFolder(out, EMBEDDINGS, request, overwrite=overwrite) as folder:
        folder.begin()
        encoded = encode(pairs, encoders, cache, console=console)
        for number, first in enumerate(range(0, len(pairs), shard)):
            write_shard(out, number, pairs, encoded, np.arange(first, min(first + shard, len(pairs))))
        folder.finish()
    return Outcome.of(encoded.problems, encoded.kept, pairs)


def request_of(encoders: Loaded) -> dict[str, Json]:
    """The names and the widths of encoders, for the mark of a folder."""
    sides = dict(zip(("image", "text"), encoders, strict=True))
    return {
        **{f"{side} model": "+".join(one.name for one in each) for side, each in sides.items()},
        **{f"{side} width": sum(one.width for one in each) for side, each in sides.items()},
    }


def shard_files(number: int) -> list[str]:
    """The files of a shard: vectors of images and of captions, and the table."""
    return [f"{stem}/{stem}_{number}{suffix}" for stem, suffix in _PARTS]


def write_shard(
    out: Path, number: int, pairs: Source, encoded: EncodedPairs, rows: IntArray, *, views: bool = False
) -> None:
    """Write the vectors and the table of some rows, the table last.

    Args:
        views: Write several views side by side as they are, the names of images as given, and hashes of the images.
    """
    *places, table = (out / name for name in shard_files(number))
    for place, side in zip(places, encoded.sides(pairs.name), strict=True):
        found = [view.gather(rows, np.float16) for view in (views_of(side) if views else [side])]
        write_array(place, np.hstack(found))
    hashes = as_hashes(encoded.hashes.read(rows)) if views else None
    _write_metadata(table, pairs, rows, encoded.problems, hashes)


def read_hashes(store: Store, name: str) -> Hashes:
    """Read the hashes (n, 2) of images from the table of a shard, where `write_shard` wrote them."""
    table = store.table(name, list(_HASHES))
    return np.column_stack([table[column].to_numpy() for column in _HASHES])


@dataclass(frozen=True)
class _Item:
    """An image or a caption."""

    places: list[int]  # its numbers among the items of the side
    key: Key = b""  # in the caches
    prepared: Sequence[Any] = ()  # input of each encoder; None if the encoding is in its cache
    problem: str = ""  # why it cannot be encoded


class _Side:
    """Encoders of one side, and their caches."""

    def __init__(self, what: str, encoders: Sequence[Any], cache: Path) -> None:
        self.what, self.encoders = what, encoders
        self.caches = [EncodingCache(cache, identity(encoder.name), encoder.width) for encoder in encoders]

    def missing(self, key: Key) -> list[bool]:
        """Whether each encoder has yet to encode an item."""
        return [not cache.find(key) for cache in self.caches]

    def encode(
        self, rows: IntArray, item: IntArray, batches: Iterable[list[_Item]], bar: RowProgress
    ) -> list[EncodedItems]:
        """Encode the items at `rows`, loaded in batches; `item` (N,) is the item of each pair.

        New encodings are stored every 20 seconds, and after an interruption.
        """
        numbers, before = np.zeros((len(self.caches), len(rows)), np.int64), [len(cache) for cache in self.caches]
        problems: dict[int, str] = {}
        keys: list[tuple[list[int], Key]] = []  # since the last storing
        vectors: list[dict[Key, Halves]] = [{} for _ in self.encoders]
        most = _STORED // (2 * sum(encoder.width for encoder in self.encoders))
        stored = time.monotonic()

        def store() -> None:
            for number, cache in enumerate(self.caches):
                new, vectors[number] = vectors[number], {}
                cache.add(new)
            for places, key in keys:
                numbers[:, places] = [[cache.find(key)] for cache in self.caches]
            keys.clear()

        try:
            for batch in batches:
                problems |= {place: one.problem for one in batch if one.problem for place in one.places}
                keys += [(one.places, one.key) for one in batch if not one.problem]
                for number, (encoder, own) in enumerate(zip(self.encoders, vectors, strict=True)):
                    loaded = {one.key: one.prepared[number] for one in batch if one.prepared and one.key not in own}
                    new = {key: prepared for key, prepared in loaded.items() if prepared is not None}
                    encoded = encoder.encode(list(new.values())) if new else ()
                    with np.errstate(over="ignore"):
                        halves = {key: vector.astype(np.float16) for key, vector in zip(new, encoded, strict=True)}
                    own |= {key: half for key, half in halves.items() if np.isfinite(half).all()}
                bar.step(sum(len(one.places) for one in batch))
                if len(keys) >= most or time.monotonic() - stored >= _STORE_SECONDS:
                    store()
                    stored = time.monotonic()
        finally:
            store()
        infinite = f"{self.what} has a vector that is not finite"
        return [
            EncodedItems(
                rows,
                cache.rows(own),
                item,
                (own > 0) & (own < known),
                {row: problems.get(item[row], infinite) for row in np.flatnonzero(own[item] == 0).tolist()},
            )
            for cache, own, known in zip(self.caches, numbers, before, strict=True)
        ]


def _images(pairs: Source, rows: list[int], side: _Side, pool: ThreadPoolExecutor) -> Iterator[list[_Item]]:
    """Load the images of some rows; threads read the next ones during the encoding."""
    pixels = max(encoder.pixels for encoder in side.encoders)

    def load(place: int) -> _Item:
        row = rows[place]
        if not pairs.has_image(row):
            return _Item([place], problem="image is not named")
        try:
            content = pairs.read_image(row)
            if not content:
                return _Item([place], problem="image is empty")
            key = key_of(content)
            missing = side.missing(key)
            if not any(missing):
                return _Item([place], key)
            image, encoders = load_image(content, pixels), zip(missing, side.encoders, strict=True)
            return _Item([place], key, [encoder.prepare(image) if new else None for new, encoder in encoders])
        except (FileNotFoundError, NotADirectoryError):
            return _Item([place], problem="image is missing")
        except Exception as error:  # see load_image: one damaged file must not end the work on all others
            return _Item([place], problem=f"image cannot be read: {_reason(error)}")

    places = iter(range(len(rows)))
    ahead = deque(pool.submit(load, place) for place in islice(places, _AHEAD))
    while ahead:
        batch: list[_Item] = []
        while ahead and len(batch) < _BATCH:
            batch.append(ahead.popleft().result())
            ahead.extend(pool.submit(load, place) for place in islice(places, 1))
        yield batch


def _captions(pairs: Source, side: _Side) -> Iterator[list[_Item]]:
    """Load the captions of all rows; a batch has texts of similar length, which need little padding."""

    def load(text: str, places: list[int]) -> _Item:
        if not text.strip():
            return _Item(places, problem="caption is blank")
        key = key_of(text.encode())
        return _Item(places, key, [text if new else None for new in side.missing(key)])

    for start in range(0, len(pairs), SHARD):
        rows: dict[str, list[int]] = {}
        for row, text in enumerate(pairs.texts(range(start, min(start + SHARD, len(pairs)))), start):
            rows.setdefault(text, []).append(row)
        texts = sorted(rows, key=lambda text: (len(text), text))
        for first in range(0, len(texts), _BATCH):
            yield [load(text, rows[text]) for text in texts[first : first + _BATCH]]


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"  # its own words repeat the path
    words = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(words).splitlines()[0][:_LONGEST_REASON]


def _write_metadata(
    path: Path, pairs: Source, rows: IntArray, problems: dict[int, str], hashes: Hashes | None = None
) -> None:
    """Write the table of some rows, with absolute paths or, with hashes, with the names of images as given."""
    paths = pairs.image_texts(rows)
    if hashes is None:
        files = [pairs.image_file(row) for row in rows.tolist()]
        paths = [name if file is None else os.path.abspath(file) for name, file in zip(paths, files, strict=True)]
    columns = {
        "id": pairs.ids(rows),
        # File names may hold bytes that are not text.
        "image_path": [path.encode("utf-8", "replace").decode("utf-8") for path in paths],
        "caption": pairs.texts(rows),
        "status": [problems.get(row, OK) for row in rows.tolist()],
    }
    table = pyarrow.table({name: pyarrow.array(values, pyarrow.string()) for name, values in columns.items()})
    for name, half in zip(_HASHES, () if hashes is None else hashes.T, strict=False):
        table = table.append_column(name, pyarrow.array(half))
    write_table(path, [table], overwrite=True)
