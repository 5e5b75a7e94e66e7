"""From images and captions to vectors, by content: see `cache`.

`encode_to_folder` writes them in the clip-retrieval layout:

    img_emb/img_emb_0.npy   text_emb/text_emb_0.npy   metadata/metadata_0.parquet (id, image_path, caption, status)
    encode.json   what the folder was made from

Rows that cannot be encoded stay: the side that failed is a zero vector, and `status` is the reason ("ok" otherwise).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.encoders.cache import CachedRows, EncodingCache, Halves, Key, key_of
from mispair.encoders.encoders import (
    ImageEncoder,
    TextEncoder,
    identity,
    image_encoder,
    load_image,
    parts_of,
    text_encoder,
)
from mispair.encoders.image_hash import DifferenceHash
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL
from mispair.errors import ConflictError
from mispair.pairs.origin import MARK
from mispair.pairs.pairs import IntArray
from mispair.pairs.source import Source
from mispair.support.cores import cores
from mispair.support.files import Json, replacing
from mispair.support.owned_folder import FolderKind, OwnedFolder
from mispair.support.progress import RowProgress, progress

if TYPE_CHECKING:
    from rich.console import Console


OK = "ok"
_STORE_SECONDS = 20.0
BAD_SHARE = 0.01  # bad rows above this share deserve a warning
SHARD = 4096  # captions that are encoded before their vectors are stored; rows of a file
_STORED = 1 << 26  # bytes of encodings of images that are stored together
_BATCH = 32
_MOST_THREADS = 8
_PARTS = (("img_emb", ".npy"), ("text_emb", ".npy"), ("metadata", ".parquet"))
EMBEDDINGS = FolderKind("embeddings", MARK, [f"{stem}/{stem}_*{suffix}" for stem, suffix in _PARTS])
_LONGEST_REASON = 200  # characters


@dataclass(frozen=True)
class Encoders:
    """Names of encoders, which are loaded only when something is to be encoded; those of several views as A+B."""

    image_model: str = IMAGE_MODEL
    text_model: str = TEXT_MODEL
    device: str = "auto"

    def views(self) -> tuple[list[ImageEncoder], list[TextEncoder]]:
        """The encoders of each side, one a view.

        Raises:
            ConfigError: One is named twice or does not exist, or a package or its weights are missing.
        """
        images, texts = parts_of(self.image_model), parts_of(self.text_model)
        for where, names in (("image_model", images), ("text_model", texts)):
            if len(set(names)) < len(names):
                raise ConflictError("+".join(names), where=where, expected="each encoder once")
        return [image_encoder(name, self.device) for name in images], [
            text_encoder(name, self.device) for name in texts
        ]

    def load(self) -> tuple[ImageEncoder, TextEncoder]:
        """Both encoders; those of several views side by side in one.

        Raises:
            ConfigError: There is no such encoder, or a package or its weights are missing.
        """
        return image_encoder(self.image_model, self.device), text_encoder(self.text_model, self.device)


@dataclass(frozen=True)
class EncodedImages:
    """One encoding an image."""

    rows: IntArray  # first row of each image
    cells: CachedRows  # the encodings, in the same order
    image: IntArray  # number of the image of each pair
    known: npt.NDArray[np.bool_]  # images that were in the cache
    problems: dict[int, str] = field(default_factory=dict)  # of rows without one

    @property
    def of_pairs(self) -> CachedRows:
        """One encoding a pair."""
        return replace(self.cells, numbers=self.cells.numbers[self.image])

    @property
    def kept(self) -> int:
        """Pairs whose image was in the cache."""
        return int(self.known[self.image].sum())


@dataclass(frozen=True)
class EncodedPairs:
    """The vectors of images (N, D) and captions (N, E), by each encoder of a side."""

    left: list[CachedRows]
    right: list[CachedRows]
    hashes: CachedRows  # of the images, as `DifferenceHash` encodes them
    problems: dict[int, str] = field(default_factory=dict)  # of rows that have only zero vectors on one side
    kept: int = 0  # rows that were in the cache

    def outcome(self, ids: Callable[[Sequence[int]], list[str]]) -> Outcome:
        """How many could be encoded."""
        return Outcome.of(self.problems, len(self.hashes.numbers), self.kept, ids)


@dataclass(frozen=True)
class Outcome:
    """What was encoded."""

    rows: int
    bad: int = 0  # whose status is not "ok"
    bad_images: int = 0  # without a vector of the image
    bad_captions: int = 0  # without a vector of the caption
    kept: int = 0  # whose vectors were in the cache
    example: str = ""  # id and status of the first bad row

    @classmethod
    def of(cls, problems: dict[int, str], rows: int, kept: int, ids: Callable[[Sequence[int]], list[str]]) -> Outcome:
        """From what is wrong with some of the rows."""
        first = min(problems, default=None)
        return cls(
            rows=rows,
            bad=len(problems),
            bad_images=sum(problem.startswith("image ") for problem in problems.values()),
            bad_captions=sum("; caption " in f"; {problem}" for problem in problems.values()),
            kept=kept,
            example="" if first is None else f"{ids([first])[0]}: {problems[first]}",
        )

    @property
    def too_many_bad(self) -> bool:
        """Whether more than 1 % of the rows are bad."""
        return self.bad > BAD_SHARE * self.rows

    def lines(self) -> list[str]:
        """The same in words."""
        kept = f", of which {self.kept:,} were encoded before" if self.kept else ""
        lines = [f"{self.rows:,} pairs{kept}."]
        if self.bad:
            lines.append(
                f"{self.bad:,} of them ({self.bad / self.rows:.1%}) could not be encoded and stay with a status: "
                f"{self.bad_images:,} for their image, {self.bad_captions:,} for their caption. First: {self.example}."
            )
        return lines


def encode(
    pairs: Source,
    encoders: tuple[Sequence[ImageEncoder], Sequence[TextEncoder]],
    cache: Path,
    *,
    console: Console | None = None,
) -> EncodedPairs:
    """Encode all pairs by each encoder, and hash the images; what is in the cache is not computed again."""
    *found, hashes = encode_images(pairs, [*encoders[0], DifferenceHash()], cache, console=console)
    side = _TextSide(pairs, encoders[1], cache)
    numbers, before = np.full((len(side.caches), len(pairs)), -1, dtype=np.int64), [len(one) for one in side.caches]
    bad: list[dict[int, str]] = [{} for _ in side.caches]
    with _at_work(console, len(pairs), "encoding captions") as (bar, _):
        for first in range(0, len(pairs), SHARD):
            for own, problems, each in zip(
                numbers, bad, side.encode(range(first, min(first + SHARD, len(pairs)))), strict=True
            ):
                own[first : first + len(each)] = [number for number, _ in each]
                problems |= {row: problem for row, (_, problem) in enumerate(each, first) if problem}
            bar.reach(min(first + SHARD, len(pairs)))
    sides = _in_all([one.problems for one in found]), _in_all(bad)
    problems = {row: "; ".join(side[row] for side in sides if row in side) for row in sides[0] | sides[1]}
    kept = np.all([one.known[one.image] for one in found], axis=0)
    kept &= ((numbers >= 0) & (numbers < np.array(before)[:, None])).all(axis=0)
    left, right = (
        [one.of_pairs for one in found],
        [one.rows(own) for one, own in zip(side.caches, numbers, strict=True)],
    )
    return EncodedPairs(left, right, hashes.of_pairs, problems, int(kept.sum()))


def _in_all(problems: list[dict[int, str]]) -> dict[int, str]:
    """The problems of the first encoder, of the rows that have one with each."""
    return {row: why for row, why in problems[0].items() if all(row in one for one in problems)}


def encode_images(
    pairs: Source, encoders: Sequence[ImageEncoder], cache: Path, *, console: Console | None = None
) -> list[EncodedImages]:
    """Reads each image once and encodes it by each encoder, unless that has it in its cache."""
    side = ImageSide(pairs, encoders, cache)
    rows, image = np.unique(pairs.first_rows, return_inverse=True)
    numbers, before = np.full((len(encoders), len(rows)), -1, dtype=np.int64), [len(one) for one in side.caches]
    bad: list[dict[int, str]] = [{} for _ in encoders]
    shard = max(64, _STORED // (2 * sum(encoder.width for encoder in encoders)))
    with _at_work(console, len(rows), "encoding images") as (bar, pool):
        for first in range(0, len(rows), shard):
            for own, problems, each in zip(
                numbers, bad, side.encode(rows[first : first + shard], pool, bar.step), strict=True
            ):
                own[first : first + len(each)] = [number for number, _ in each]
                problems |= {place: problem for place, (_, problem) in enumerate(each, first) if problem}
    return [
        EncodedImages(
            rows,
            one.rows(own),
            image,
            (own >= 0) & (own < known),
            {row: problems[number] for row, number in enumerate(image.tolist()) if number in problems},
        )
        for one, own, known, problems in zip(side.caches, numbers, before, bad, strict=True)
    ]


@contextmanager
def _at_work(console: Console | None, total: int, what: str) -> Iterator[tuple[RowProgress, ThreadPoolExecutor]]:
    """A progress bar and threads that read images, without the warnings of Pillow."""
    pool = ThreadPoolExecutor(min(_MOST_THREADS, cores()))
    with progress(console, total, what) as bar, pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # they name no file, and what cannot be read gets a status
        yield bar, pool


def encode_to_folder(
    pairs: Source,
    out: Path,
    encoders: tuple[ImageEncoder, TextEncoder],
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
    with OwnedFolder(out, EMBEDDINGS, _request(pairs, encoders, shard), overwrite=overwrite) as folder:
        folder.begin()
        encoded = encode(pairs, ([encoders[0]], [encoders[1]]), cache, console=console)
        for number, first in enumerate(range(0, len(pairs), shard)):
            rows = np.arange(first, min(first + shard, len(pairs)))
            for part, side in enumerate((encoded.left[0], encoded.right[0])):
                with replacing(_place(out, part, number)) as file:
                    np.save(file, side.read(rows), allow_pickle=False)
            _write_table(_place(out, 2, number), pairs, rows, encoded.problems)
        folder.finish()
    return encoded.outcome(pairs.ids)


def _request(pairs: Source, encoders: tuple[ImageEncoder, TextEncoder], shard: int) -> dict[str, Json]:
    """What the vectors depend on."""
    images, texts = encoders
    return {
        "image model": images.name,
        "image width": images.width,
        "text model": texts.name,
        "text width": texts.width,
        "rows": len(pairs),
        "rows a shard": shard,
        "ids, image paths or captions": [pairs.fingerprint()],
    }


def _place(out: Path, part: int, number: int) -> Path:
    stem, suffix = _PARTS[part]
    return out / stem / f"{stem}_{number}{suffix}"


@dataclass(frozen=True)
class _Loaded:
    """An image or a caption: its key, what each encoder takes (None from its cache), or what is wrong with it."""

    name: int | str
    key: Key = b""
    prepared: Sequence[Any] = ()
    problem: str = ""


Found = tuple[int, str]  # number of a vector in the cache, and what is wrong


class _Side:
    """One side of the pairs, its encoders and their caches."""

    what: str

    def __init__(self, pairs: Source, encoders: Sequence[ImageEncoder | TextEncoder], cache: Path) -> None:
        self.pairs, self.encoders = pairs, encoders
        self.caches = [EncodingCache(cache, identity(encoder.name), encoder.width) for encoder in encoders]

    def _missing(self, key: Key) -> list[bool]:
        """Whether each encoder has still to encode an item."""
        return [cache.find(key) < 0 for cache in self.caches]

    def _found(
        self, names: Iterable[int | str], batches: Iterable[list[_Loaded]], step: Callable[[float], None]
    ) -> list[list[Found]]:
        """The number or the problem of each name, by each encoder; what is encoded is stored even after a stop."""
        keys: dict[int | str, Key] = {}
        problems: dict[int | str, Found] = {}
        vectors: list[dict[Key, Halves]] = [{} for _ in self.encoders]
        stored = time.monotonic()

        def store() -> None:
            for cache, own in zip(self.caches, vectors, strict=True):
                new = own.copy()
                own.clear()
                cache.add(new)

        try:
            for batch in batches:
                if time.monotonic() - stored >= _STORE_SECONDS:  # so that no more is lost where the process is killed
                    store()
                    stored = time.monotonic()
                problems |= {item.name: (-1, item.problem) for item in batch if item.problem}
                keys |= {item.name: item.key for item in batch if not item.problem}
                loaded = [item for item in batch if item.prepared]
                for number, (encoder, own) in enumerate(zip(self.encoders, vectors, strict=True)):
                    new = {item.key: item.prepared[number] for item in loaded if item.prepared[number] is not None}
                    encoded = encoder.encode(list(new.values())) if new else ()
                    for key, vector in zip(new, encoded, strict=True):
                        with np.errstate(over="ignore"):
                            half = vector.astype(np.float16)
                        if np.isfinite(half).all():
                            own[key] = half
                step(len(batch))
        finally:
            store()
        infinite = -1, f"{self.what} has a vector that is not finite"

        def found(cache: EncodingCache) -> dict[int | str, Found]:
            numbers = {name: cache.find(key) for name, key in keys.items()}
            return {name: (number, "") if number >= 0 else infinite for name, number in numbers.items()} | problems

        return [[each[name] for name in names] for each in map(found, self.caches)]


class ImageSide(_Side):
    """Encodes images."""

    what = "image"
    encoders: Sequence[ImageEncoder]

    def encode(self, rows: IntArray, pool: ThreadPoolExecutor, step: Callable[[float], None]) -> list[list[Found]]:
        return self._found(rows.tolist(), self._batches(rows.tolist(), pool), step)

    def _batches(self, rows: Sequence[int], pool: ThreadPoolExecutor) -> Iterator[list[_Loaded]]:
        """Batches of images, of which the next one is read while the last one is encoded."""

        def submit(batch: Sequence[int]) -> list[Future[_Loaded]]:
            return [pool.submit(self._load, row) for row in batch]

        batches = [rows[first : first + _BATCH] for first in range(0, len(rows), _BATCH)]
        following = submit(batches[0])
        for batch in [*batches[1:], []]:
            current, following = following, submit(batch)
            yield [future.result() for future in current]

    def _load(self, row: int) -> _Loaded:
        if not self.pairs.has_image(row):
            return _Loaded(row, problem="image is not named")
        try:
            content = self.pairs.read_image(row)
            if not content:
                return _Loaded(row, problem="image is empty")
            key = key_of(content)
            missing = self._missing(key)
            if not any(missing):
                return _Loaded(row, key)
            image, sides = load_image(content), zip(missing, self.encoders, strict=True)
            return _Loaded(row, key, [encoder.prepare(image) if new else None for new, encoder in sides])
        except (FileNotFoundError, NotADirectoryError):
            return _Loaded(row, problem="image is missing")
        except Exception as error:  # see load_image: one damaged file must not end the work on all others
            return _Loaded(row, problem=f"image cannot be read: {_reason(error)}")


class _TextSide(_Side):
    """Encodes captions; those of about one length together, which need little padding."""

    what = "caption"

    def encode(self, rows: Sequence[int]) -> list[list[Found]]:
        texts = self.pairs.texts(rows)
        ordered = sorted(set(texts), key=lambda text: (len(text), text))
        loaded = [self._load(text) for text in ordered]
        batches = (loaded[first : first + _BATCH] for first in range(0, len(loaded), _BATCH))
        return self._found(texts, batches, lambda _: None)

    def _load(self, text: str) -> _Loaded:
        if not text.strip():
            return _Loaded(text, problem="caption is blank")
        key = key_of(text.encode())
        return _Loaded(text, key, [text if new else None for new in self._missing(key)])


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"  # its own words repeat the path
    words = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(words).splitlines()[0][:_LONGEST_REASON]


def _write_table(path: Path, pairs: Source, rows: IntArray, problems: dict[int, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    names = pairs.image_texts(rows)
    files = [pairs.image_file(row) for row in rows.tolist()]
    paths = [name if file is None else os.path.abspath(file) for name, file in zip(names, files, strict=True)]
    columns = {
        "id": pairs.ids(rows),
        # File names may hold bytes that are no text.
        "image_path": [path.encode("utf-8", "replace").decode("utf-8") for path in paths],
        "caption": pairs.texts(rows),
        "status": [problems.get(row, OK) for row in rows.tolist()],
    }
    table = pyarrow.table({name: pyarrow.array(values, pyarrow.string()) for name, values in columns.items()})
    with replacing(path) as file:
        pyarrow.parquet.write_table(table, file)
