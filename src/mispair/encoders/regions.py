"""From images to region features: the cells of a grid over a feature map, in the SCAN layout.

    {split}_ims.npy     float32 (images, cells, width)
    {split}_caps.txt    a caption a line, equally many an image; or {split}_caps.tsv with the image of each
    {split}_ids.txt     name of each image
    {split}_rows.npy    which row of the data set each caption is
    rows.parquet        all pairs: id, image_path, caption, status, split
    basis.npz           with `pca`: what each cell was multiplied by
    encode.json         what the folder was made from

Pairs whose image cannot be read are in no split; `status` in rows.parquet is the reason ("ok" otherwise).
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mispair.encoders.encode import EMBEDDINGS, OK, EncodedImages, Outcome, encode_images
from mispair.encoders.encoders import GridEncoder
from mispair.errors import ConflictError, DamagedError, InvalidValueError, TooFewError
from mispair.pairs.npy import open_array, write_rows
from mispair.pairs.origin import BASIS, MARK, Floats, Projection
from mispair.pairs.pairs import HELD_OUT, IntArray
from mispair.pairs.source import Source
from mispair.support.files import Json, replacing, write_atomically
from mispair.support.owned_folder import FolderKind, OwnedFolder

if TYPE_CHECKING:
    from rich.console import Console

_NAMES = {"train": "train", "restval": "train", "dev": "dev", "val": "dev", "validation": "dev", "test": "test"}
ROWS = "rows.parquet"
REGIONS = FolderKind(
    "region features",
    MARK,
    ["*_ims.npy", "*_caps.t*", "*_ids.txt", "*_rows.npy", ROWS],
    optional=[BASIS, *EMBEDDINGS.files],
)
_SHARE = 0.1  # of the images, that validate and that test
_SAMPLE = 2000  # images whose cells the projection is fitted on


@dataclass(frozen=True)
class SplitRule:
    """Which images train, validate and test."""

    dev: float | None = None  # share of the images that validate, or how many; None: a tenth, at most 5,000
    test: float | None = None  # share of the images that test, likewise
    only: str | None = None  # all pairs are this split

    def __post_init__(self) -> None:
        for name, value in (("dev", self.dev), ("test", self.test)):
            if value is not None and (not value >= 0 or (value >= 1 and value != int(value))):
                raise InvalidValueError(f"{value:g}", where=name, expected="a share of the images below 1, or how many")
        if self.only is not None and (not self.only or self.only != Path(self.only).name):
            raise InvalidValueError(f'"{self.only}"', where="split", expected="a name such as train or test")

    def request(self) -> dict[str, Json]:
        dev, test = (_SHARE if value is None else value for value in (self.dev, self.test))
        return {"dev": dev, "test": test, "split": self.only}

    def of(self, pairs: Source) -> list[str]:
        """The split of each row: as the data set says; else random, by the names of the images alone."""
        if self.only is not None:
            return [self.only] * len(pairs)
        named = pairs.splits
        if named is not None:
            unknown = next((name for name in named if name.strip().lower() not in _NAMES), None)
            if unknown is not None:
                raise DamagedError(
                    f'a row has the split "{unknown}"',
                    where=pairs.name,
                    expected="train, dev (or val) or test",
                    advice="Correct it, or name the column differently.",
                )
            return [_NAMES[name.strip().lower()] for name in named]
        first = pairs.first_rows
        images = np.unique(first)
        names = pairs.image_texts(images)
        if len(set(names)) < len(names):  # images in other files, whose names need not differ
            names = pairs.ids(images)
        return self.random(first, names, pairs.name)

    def random(self, first: IntArray, names: Sequence[str], what: str) -> list[str]:
        """The split of each row at random.

        Args:
            first: (N,) the first row that has the image of each row.
            names: Of the images, in the order of their first rows; they alone choose the split, as far as the shares
                allow.
            what: The data set, for messages.
        """
        images = np.unique(first)
        counts = [_count(value, len(images)) for value in (self.test, self.dev)]
        if sum(counts) >= len(images):
            raise TooFewError(
                f"{len(images):,} images: {counts[1]:,} validate, {counts[0]:,} test, and none is left to train",
                where=what,
                advice="Give a smaller `dev` and `test`.",
            )
        order = sorted(range(len(images)), key=lambda place: _random(names[place] or str(place)))
        of_image = dict.fromkeys(images[order[sum(counts) :]].tolist(), "train")
        of_image |= dict.fromkeys(images[order[: counts[0]]].tolist(), "test")
        of_image |= dict.fromkeys(images[order[counts[0] : sum(counts)]].tolist(), "dev")
        return [of_image[row] for row in first.tolist()]


def _count(value: float | None, images: int) -> int:
    """How many of so many images a share of them, or a number, is."""
    if value is None:
        return min(round(_SHARE * images), HELD_OUT)
    return round(value * images) if value < 1 else int(value)


def _random(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16).digest()


def encode_regions(
    pairs: Source,
    out: Path,
    encoder: GridEncoder,
    cache: Path,
    *,
    pca: int | Projection | None = None,
    splits: SplitRule | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Write region features and captions of all pairs in the SCAN layout.

    Args:
        pairs: Images and captions.
        out: Folder to write.
        encoder: Makes the cells.
        cache: Folder of the cache.
        pca: Numbers a cell, by the principal components of the training images; or a known projection.
        splits: Which images train, validate and test.
        overwrite: Start over in a folder that was made from something else.
        console: Where to show progress.

    Raises:
        ConfigError: The projection does not fit the encoder.
        DataError: The folder holds something else or cannot be written, or no image can be read.
    """
    rule = splits or SplitRule()
    _check_projection(pca, encoder)
    names = rule.of(pairs)
    with OwnedFolder(out, REGIONS, _request(pairs, encoder, pca, rule), overwrite=overwrite) as folder:
        folder.begin()
        (found,) = encode_images(pairs, [encoder], cache, console=console)
        good = _readable(pairs, found)
        projection = _fitted(pca, found, encoder, good, names)
        if projection is not None:
            projection.save(out / BASIS)
        for split in dict.fromkeys(names):
            rows = good[[names[row] == split for row in good]]
            if len(rows):
                _write_split(out, split, pairs, rows, found, encoder, projection)
        _write_rows(out / ROWS, pairs, names, found.problems)
        folder.finish()
    return Outcome.of(found.problems, len(pairs), found.kept, pairs.ids)


def _check_projection(pca: int | Projection | None, encoder: GridEncoder) -> None:
    if isinstance(pca, int) and not 0 < pca <= encoder.channels:
        expected = f"at most {encoder.channels}, as many as a cell of {encoder.encoder.name} has"
        raise InvalidValueError(f"{pca}", where="pca", expected=expected)
    if isinstance(pca, Projection) and len(pca.mean) != encoder.channels:
        raise ConflictError(
            f"a projection of {len(pca.mean)} numbers, but cells of {encoder.encoder.name} have {encoder.channels}",
            where="pca",
            advice="Give the encoder that it was made with as `image_model`.",
        )


def _request(pairs: Source, encoder: GridEncoder, pca: int | Projection | None, rule: SplitRule) -> dict[str, Json]:
    given: Json = (
        pca if isinstance(pca, int | None) else [hashlib.sha256(pca.mean.tobytes() + pca.basis.tobytes()).hexdigest()]
    )
    return {
        "image model": encoder.encoder.name,
        "grid": encoder.grid,
        "pca": given,
        **rule.request(),
        "rows": len(pairs),
        "ids, image paths or captions": [pairs.fingerprint()],
    }


def _readable(pairs: Source, found: EncodedImages) -> IntArray:
    """The pairs with an image and a caption; the others get a status."""
    for row, text in enumerate(pairs.texts()):
        if not text.strip():
            before = found.problems.get(row)
            found.problems[row] = "caption is blank" if before is None else f"{before}; caption is blank"
    good = np.array([row for row in range(len(pairs)) if row not in found.problems], dtype=np.int64)
    if not len(good):
        first = next(iter(found.problems.values()))
        raise TooFewError(f"none of {len(pairs):,} pairs can be encoded; the first: {first}", where=pairs.name)
    return good


def _fitted(
    pca: int | Projection | None, found: EncodedImages, encoder: GridEncoder, good: IntArray, names: list[str]
) -> Projection | None:
    if not isinstance(pca, int):
        return pca
    training = [row for row in good.tolist() if names[row] == "train"] or good.tolist()
    images = np.unique(found.image[training])
    some = images[np.unique(np.linspace(0, len(images) - 1, _SAMPLE).astype(np.int64))]
    cells = found.cells.read(some).reshape(-1, encoder.channels).astype(np.float32)
    if len(cells) < pca:
        raise TooFewError(f"{len(cells):,} cells", where=BASIS, expected=f"at least {pca} for `pca`")
    from sklearn.decomposition import PCA  # here, because only this needs it and it loads slowly

    fitted = PCA(pca, svd_solver="covariance_eigh").fit(cells)
    return Projection(fitted.mean_.astype(np.float32), np.ascontiguousarray(fitted.components_.T, dtype=np.float32))


def as_cells(values: npt.NDArray[np.floating], channels: int, projection: Projection | None) -> Floats:
    """Encodings (n, grid * grid * C) as regions (n, grid * grid, K)."""
    cells = values.reshape(len(values), -1, channels).astype(np.float32)
    return cells if projection is None else projection(cells)


def _write_split(
    out: Path,
    split: str,
    pairs: Source,
    rows: IntArray,
    found: EncodedImages,
    encoder: GridEncoder,
    projection: Projection | None,
) -> None:
    images, owner = np.unique(found.image[rows], return_inverse=True)
    order = np.argsort(owner, kind="stable")  # the captions of an image stand together
    rows, owner = rows[order], owner[order]
    write_rows(
        out / f"{split}_ims.npy",
        lambda wanted: as_cells(found.cells.read(wanted), encoder.channels, projection),
        images,
    )
    own = pairs.image_texts(found.rows[images])
    spare = pairs.ids(found.rows[images])
    ids = [" ".join((name or other).split()) for name, other in zip(own, spare, strict=True)]
    texts = [" ".join(text.split()) for text in pairs.texts(rows)]
    counts = np.bincount(owner)
    write_atomically(out / f"{split}_ids.txt", _lines(ids))
    save_rows(out, split, rows)
    if (counts == counts[0]).all():
        write_atomically(out / f"{split}_caps.txt", _lines(texts))
        return
    table = io.StringIO(newline="")
    csv.writer(table, delimiter="\t").writerows((ids[place], text) for place, text in zip(owner, texts, strict=True))
    write_atomically(out / f"{split}_caps.tsv", table.getvalue().encode("utf-8", "replace"))


def save_rows(out: Path, split: str, rows: IntArray) -> None:
    """Which row of the data set each pair of a split is."""
    with replacing(out / f"{split}_rows.npy") as file:
        np.save(file, rows, allow_pickle=False)


def read_rows(folder: Path) -> dict[str, IntArray]:
    """The same of all splits, as `save_rows` wrote them."""
    return {
        path.name.removesuffix("_rows.npy"): np.asarray(open_array(path, ndim=1, kind="integer"))
        for path in folder.glob("*_rows.npy")
    }


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _write_rows(path: Path, pairs: Source, names: list[str], problems: dict[int, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    items = pairs.item_columns(0, len(pairs))
    columns = {
        "id": pairs.id_column(0, len(pairs)),
        "image_path": items["image"],
        "caption": items["caption"],
        "status": pyarrow.array([problems.get(row, OK) for row in range(len(pairs))], pyarrow.string()),
        "split": pyarrow.array(
            [names[row] if row not in problems else None for row in range(len(pairs))], pyarrow.string()
        ),
    }
    with replacing(path) as file:
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
