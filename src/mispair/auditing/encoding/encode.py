"""From raw pairs to embeddings in the clip-retrieval layout, shard by shard.

    img_emb/img_emb_0.npy   text_emb/text_emb_0.npy   metadata/metadata_0.parquet (id, image_path, caption, status)
    encode.json   what the folder was made from, so that an interrupted run continues only with the same

Rows that cannot be encoded stay: the side that failed is a zero vector, and `status` is the reason ("ok" otherwise).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.auditing.encoding.encoders import (
    IMAGE_MODEL,
    TEXT_MODEL,
    ImageEncoder,
    TextEncoder,
    image_encoder,
    load_image,
    text_encoder,
)
from mispair.auditing.encoding.raw_pairs import Row, read_raw
from mispair.data.npy import open_array
from mispair.errors import DataError
from mispair.support.files import Json, replacing
from mispair.support.owned_folder import FolderKind, OwnedFolder
from mispair.support.progress import progress

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console


OK = "ok"
BAD_SHARE = 0.01  # bad rows above this share deserve a warning
SHARD = 4096  # rows: minutes on two cores, which is what a stopped run loses
_BATCH = 64
_THREADS = min(8, os.cpu_count() or 1)
_PARTS = (("img_emb", ".npy"), ("text_emb", ".npy"), ("metadata", ".parquet"))
EMBEDDINGS = FolderKind("embeddings", "encode.json", [f"{stem}/{stem}_*{suffix}" for stem, suffix in _PARTS])
_LONGEST_REASON = 200  # characters
Prepare = Callable[["Image"], Any]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Outcome:
    """What was encoded.

    Attributes:
        rows: All pairs.
        bad: Those whose status is not "ok".
        bad_images: Those without a vector of the image.
        bad_captions: Those without a vector of the caption.
        kept: Rows that an earlier run had encoded already.
        example: Id and status of the first bad row; empty where there is none.
    """

    rows: int
    bad: int = 0
    bad_images: int = 0
    bad_captions: int = 0
    kept: int = 0
    example: str = ""

    @property
    def too_many_bad(self) -> bool:
        """Whether more than 1 % of the rows are bad."""
        return self.bad > BAD_SHARE * self.rows

    def metrics(self) -> dict[str, int | str]:
        """The same as names and values, ready for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same in words."""
        kept = f", of which {self.kept:,} were there already" if self.kept else ""
        lines = [f"{self.rows:,} pairs{kept}."]
        if self.bad:
            lines.append(
                f"{self.bad:,} of them ({self.bad / self.rows:.1%}) could not be encoded and stay with a status: "
                f"{self.bad_images:,} for their image, {self.bad_captions:,} for their caption. First: {self.example}."
            )
        return lines


def encode_source(
    source: Path,
    out: Path,
    *,
    images: Path | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    image_model: str = IMAGE_MODEL,
    text_model: str = TEXT_MODEL,
    device: str = "auto",
    overwrite: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Read raw pairs and encode them; see `read_raw`, `image_encoder`, `text_encoder` and `encode_rows`."""
    rows = read_raw(source, images, image_column=image_column, caption_column=caption_column)
    encoders = image_encoder(image_model, device), text_encoder(text_model, device)
    return encode_rows(rows, out, *encoders, overwrite=overwrite, console=console)


def encode_rows(
    rows: Sequence[Row],
    out: Path,
    image_encoder: ImageEncoder,
    text_encoder: TextEncoder,
    *,
    shard: int = SHARD,
    overwrite: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Write the vectors of all rows; what an earlier run with the same rows and encoders finished is kept.

    Args:
        rows: The pairs; an image or a caption that occurs in several is encoded once a shard.
        out: Folder to write.
        image_encoder: Turns images into vectors.
        text_encoder: Turns captions into vectors.
        shard: Rows a file.
        overwrite: Start over in a folder that was made from something else.
        console: Where to show progress; nowhere by default.

    Raises:
        DataError: The folder holds something else, or cannot be written.
    """
    request = _request(rows, image_encoder, text_encoder, shard)
    with OwnedFolder(out, EMBEDDINGS, request, overwrite=overwrite) as folder:
        folder.begin()
        outcome = _encode_shards(rows, out, image_encoder, text_encoder, shard, console)
        folder.finish()
    return outcome


def _encode_shards(
    rows: Sequence[Row],
    out: Path,
    image_encoder: ImageEncoder,
    text_encoder: TextEncoder,
    shard: int,
    console: Console | None,
) -> Outcome:
    outcome = Outcome(len(rows))
    widths = image_encoder.width, text_encoder.width
    with (
        progress(console, len(rows), "encoding") as bar,
        ThreadPoolExecutor(_THREADS) as pool,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", module="PIL")  # they name no file, and what cannot be read gets a status
        for number, first in enumerate(range(0, len(rows), shard)):
            part = rows[first : first + shard]
            statuses = _finished(out, number, len(part), widths)
            if statuses is None:
                statuses = _encode_shard(part, out, number, (image_encoder, text_encoder), pool, bar.step)
            else:
                outcome = replace(outcome, kept=outcome.kept + len(part))
            outcome = _count(outcome, part, statuses)
            bar.reach(first + len(part))
    return outcome


def _request(rows: Sequence[Row], images: ImageEncoder, texts: TextEncoder, shard: int) -> dict[str, Json]:
    """What the vectors depend on."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())  # escapes what could make two lists of rows equal
    return {
        "image model": images.name,
        "image width": images.width,
        "text model": texts.name,
        "text width": texts.width,
        "rows": len(rows),
        "rows a shard": shard,
        "ids, image paths or captions": [digest.hexdigest()],
    }


def _place(out: Path, part: int, number: int) -> Path:
    stem, suffix = _PARTS[part]
    return out / stem / f"{stem}_{number}{suffix}"


def _finished(out: Path, number: int, rows: int, widths: tuple[int, int]) -> list[str] | None:
    """Statuses of a shard that is there as a whole."""
    import pyarrow
    import pyarrow.parquet

    try:
        shapes = [open_array(_place(out, part, number), ndim=2).shape for part in (0, 1)]
        statuses: list[str] = (
            pyarrow.parquet.read_table(_place(out, 2, number), columns=["status"]).column("status").to_pylist()
        )
    except (DataError, OSError, pyarrow.ArrowException):
        return None
    return statuses if shapes == [(rows, width) for width in widths] and len(statuses) == rows else None


def _encode_shard(
    rows: Sequence[Row],
    out: Path,
    number: int,
    encoders: tuple[ImageEncoder, TextEncoder],
    pool: ThreadPoolExecutor,
    step: Callable[[float], None],
) -> list[str]:
    """Write one shard, the table last, and return the statuses."""
    images, texts = encoders
    paths = list(dict.fromkeys(row.image for row in rows))
    share = len(rows) / len(paths)  # the bar counts rows
    left = _encode_items(_images(paths, images.prepare, pool), images, "image", lambda done: step(done * share))
    right = _encode_items(_captions({row.caption for row in rows}), texts, "caption")
    statuses = []
    vectors = np.zeros((len(rows), images.width), np.float16), np.zeros((len(rows), texts.width), np.float16)
    for place, row in enumerate(rows):
        pair = left[row.image], right[row.caption]
        for side, item in zip(vectors, pair, strict=True):
            if item.vector is not None:
                side[place] = item.vector
        statuses.append("; ".join(item.problem for item in pair if item.problem) or OK)
    for part, side in enumerate(vectors):
        with replacing(_place(out, part, number)) as file:
            np.save(file, side, allow_pickle=False)
    _write_table(_place(out, 2, number), rows, statuses)
    return statuses


@dataclass(frozen=True)
class _Loaded:
    """An image or a caption that is ready for its encoder, or what is wrong with it."""

    name: str
    prepared: Any = None
    problem: str = ""


@dataclass(frozen=True)
class _Item:
    vector: Halves | None = None
    problem: str = ""


def _encode_items(
    batches: Iterable[list[_Loaded]],
    encoder: ImageEncoder | TextEncoder,
    what: str,
    step: Callable[[float], None] = lambda _: None,
) -> dict[str, _Item]:
    """Vector or problem of each image path or caption."""
    found = {}
    for batch in batches:
        good = [item for item in batch if not item.problem]
        found.update({item.name: _Item(problem=item.problem) for item in batch})
        vectors = encoder.encode([item.prepared for item in good]) if good else ()
        for item, vector in zip(good, vectors, strict=True):
            with np.errstate(over="ignore"):
                half = vector.astype(np.float16)
            finite = bool(np.isfinite(half).all())
            found[item.name] = _Item(half) if finite else _Item(problem=f"{what} has a vector that is not finite")
        step(len(batch))
    return found


def _images(paths: Sequence[str], prepare: Prepare, pool: ThreadPoolExecutor) -> Iterator[list[_Loaded]]:
    """Batches of images, of which the next one is read while the last one is encoded."""

    def submit(batch: Sequence[str]) -> list[Future[_Loaded]]:
        return [pool.submit(_load, path, prepare) for path in batch]

    batches = [paths[first : first + _BATCH] for first in range(0, len(paths), _BATCH)]
    following = submit(batches[0])
    for batch in [*batches[1:], []]:
        current, following = following, submit(batch)
        yield [future.result() for future in current]


def _load(path: str, prepare: Prepare) -> _Loaded:
    if not path:
        return _Loaded(path, problem="image is not named")
    try:
        if not os.path.getsize(path):
            return _Loaded(path, problem="image is empty")
        return _Loaded(path, prepare(load_image(path)))
    except (FileNotFoundError, NotADirectoryError):
        return _Loaded(path, problem="image is missing")
    except Exception as error:  # see load_image: one damaged file must not end the work on all others
        return _Loaded(path, problem=f"image cannot be read: {_reason(error)}")


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"  # its own words repeat the path
    words = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(words).splitlines()[0][:_LONGEST_REASON]


def _captions(texts: Iterable[str]) -> Iterator[list[_Loaded]]:
    """Batches of captions of about one length, which need little padding."""
    ordered = sorted(texts, key=lambda text: (len(text), text))
    for first in range(0, len(ordered), _BATCH):
        yield [
            _Loaded(text, text, "" if text.strip() else "caption is blank") for text in ordered[first : first + _BATCH]
        ]


def _write_table(path: Path, rows: Sequence[Row], statuses: Sequence[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "id": [row.id for row in rows],
        # File names may hold bytes that are no text.
        "image_path": [row.image.encode("utf-8", "replace").decode("utf-8") for row in rows],
        "caption": [row.caption for row in rows],
        "status": list(statuses),
    }
    table = pyarrow.table({name: pyarrow.array(values, pyarrow.string()) for name, values in columns.items()})
    with replacing(path) as file:
        pyarrow.parquet.write_table(table, file)


def _count(outcome: Outcome, rows: Sequence[Row], statuses: Sequence[str]) -> Outcome:
    bad = [place for place, status in enumerate(statuses) if status != OK]
    example = f"{rows[bad[0]].id}: {statuses[bad[0]]}" if bad else ""
    return replace(
        outcome,
        bad=outcome.bad + len(bad),
        bad_images=outcome.bad_images + sum(status.startswith("image ") for status in statuses),
        bad_captions=outcome.bad_captions + sum("; caption " in f"; {status}" for status in statuses),
        example=outcome.example or example,
    )
