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

    def each(self) -> list[Encoders]:
        """One pair of encoders for each view, where several are named as A+B; the last of the fewer ones again.

        Raises:
            ConflictError: One is named twice.
        """
        sides = [parts_of(name) for name in (self.image_model, self.text_model)]
        for where, names in zip(("image_model", "text_model"), sides, strict=True):
            if len(set(names)) < len(names):
                raise ConflictError("+".join(names), where=where, expected="each encoder once")
        count = max(map(len, sides))
        padded = ([*names, *names[-1:] * (count - len(names))] for names in sides)
        return [replace(self, image_model=image, text_model=text) for image, text in zip(*padded, strict=True)]

    def load(self) -> tuple[ImageEncoder, TextEncoder]:
        """Both encoders.

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
    def kept(self) -> int:
        """Pairs whose image was in the cache."""
        return int(self.known[self.image].sum())


@dataclass(frozen=True)
class EncodedPairs:
    """The vectors of images (N, D) and captions (N, E)."""

    left: CachedRows
    right: CachedRows
    problems: dict[int, str] = field(default_factory=dict)  # of rows that have a zero vector on one side
    kept: int = 0  # rows that were in the cache

    def outcome(self, ids: Callable[[Sequence[int]], list[str]]) -> Outcome:
        """How many could be encoded."""
        return Outcome.of(self.problems, len(self.left.numbers), self.kept, ids)


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
    pairs: Source, encoders: tuple[ImageEncoder, TextEncoder], cache: Path, *, console: Console | None = None
) -> EncodedPairs:
    """The vectors of all pairs; those in the cache are not computed again."""
    images, texts = encoders
    found, side = encode_images(pairs, images, cache, console=console), _TextSide(pairs, texts, cache)
    numbers, before, problems = np.full(len(pairs), -1, dtype=np.int64), len(side.cache), dict(found.problems)
    with _at_work(console, len(pairs), "encoding captions") as (bar, _):
        for first in range(0, len(pairs), SHARD):
            for row, (number, problem) in enumerate(side.encode(range(first, min(first + SHARD, len(pairs)))), first):
                numbers[row] = number
                if problem:
                    problems[row] = f"{problems[row]}; {problem}" if row in problems else problem
            bar.reach(min(first + SHARD, len(pairs)))
    kept = found.known[found.image] & (numbers >= 0) & (numbers < before)
    left = replace(found.cells, numbers=found.cells.numbers[found.image])
    return EncodedPairs(left, side.cache.rows(numbers), problems, int(kept.sum()))


def encode_images(
    pairs: Source, encoder: ImageEncoder, cache: Path, *, console: Console | None = None
) -> EncodedImages:
    """Encodes each image once; those in the cache are not encoded again."""
    side = ImageSide(pairs, encoder, cache)
    rows, image = np.unique(pairs.first_rows, return_inverse=True)
    numbers, bad = np.full(len(rows), -1, dtype=np.int64), {}
    before, shard = len(side.cache), max(64, _STORED // (2 * encoder.width))
    with _at_work(console, len(rows), "encoding images") as (bar, pool):
        for first in range(0, len(rows), shard):
            for place, (number, problem) in enumerate(side.encode(rows[first : first + shard], pool, bar.step), first):
                numbers[place] = number
                if problem:
                    bad[place] = problem
    problems = {row: bad[number] for row, number in enumerate(image.tolist()) if number in bad}
    return EncodedImages(rows, side.cache.rows(numbers), image, (numbers >= 0) & (numbers < before), problems)


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
        encoded = encode(pairs, encoders, cache, console=console)
        for number, first in enumerate(range(0, len(pairs), shard)):
            rows = np.arange(first, min(first + shard, len(pairs)))
            for part, side in enumerate((encoded.left, encoded.right)):
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
    """An image or a caption: its key, what the encoder takes unless it is in the cache, or what is wrong with it."""

    name: int | str
    key: Key = b""
    prepared: Any = None
    problem: str = ""


Found = tuple[int, str]  # number of a vector in the cache, and what is wrong


class _Side:
    """One side of the pairs, its encoder and its cache."""

    what: str

    def __init__(self, pairs: Source, encoder: ImageEncoder | TextEncoder, cache: Path) -> None:
        self.pairs, self.encoder = pairs, encoder
        self.cache = EncodingCache(cache, identity(encoder.name), encoder.width)

    def _found(self, batches: Iterable[list[_Loaded]], step: Callable[[float], None]) -> dict[int | str, Found]:
        """The number or the problem of each item; what is encoded is stored even where the work is stopped."""
        keys: dict[int | str, Key] = {}
        problems: dict[int | str, Found] = {}
        vectors: dict[Key, Halves] = {}
        stored = time.monotonic()
        try:
            for batch in batches:
                if time.monotonic() - stored >= _STORE_SECONDS:  # so that no more is lost where the process is killed
                    new_ones, vectors = vectors, {}
                    self.cache.add(new_ones)
                    stored = time.monotonic()
                problems |= {item.name: (-1, item.problem) for item in batch if item.problem}
                keys |= {item.name: item.key for item in batch if not item.problem}
                new = {item.key: item.prepared for item in batch if item.prepared is not None}
                encoded = self.encoder.encode(list(new.values())) if new else ()
                for key, vector in zip(new, encoded, strict=True):
                    with np.errstate(over="ignore"):
                        half = vector.astype(np.float16)
                    if np.isfinite(half).all():
                        vectors[key] = half
                step(len(batch))
        finally:
            self.cache.add(vectors)
        infinite = f"{self.what} has a vector that is not finite"
        numbers = {name: self.cache.find(key) for name, key in keys.items()}
        return {name: (number, "" if number >= 0 else infinite) for name, number in numbers.items()} | problems


class ImageSide(_Side):
    """Encodes images."""

    what = "image"
    encoder: ImageEncoder

    def encode(self, rows: IntArray, pool: ThreadPoolExecutor, step: Callable[[float], None]) -> list[Found]:
        found = self._found(self._batches(rows.tolist(), pool), step)
        return [found[row] for row in rows.tolist()]

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
            known = self.cache.find(key) >= 0
            return _Loaded(row, key, None if known else self.encoder.prepare(load_image(content)))
        except (FileNotFoundError, NotADirectoryError):
            return _Loaded(row, problem="image is missing")
        except Exception as error:  # see load_image: one damaged file must not end the work on all others
            return _Loaded(row, problem=f"image cannot be read: {_reason(error)}")


class _TextSide(_Side):
    """Encodes captions; those of about one length together, which need little padding."""

    what = "caption"

    def encode(self, rows: Sequence[int]) -> list[Found]:
        texts = self.pairs.texts(rows)
        ordered = sorted(set(texts), key=lambda text: (len(text), text))
        loaded = [self._load(text) for text in ordered]
        batches = (loaded[first : first + _BATCH] for first in range(0, len(loaded), _BATCH))
        found = self._found(batches, lambda _: None)
        return [found[text] for text in texts]

    def _load(self, text: str) -> _Loaded:
        if not text.strip():
            return _Loaded(text, problem="caption is blank")
        key = key_of(text.encode())
        return _Loaded(text, key, None if self.cache.find(key) >= 0 else text)


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
