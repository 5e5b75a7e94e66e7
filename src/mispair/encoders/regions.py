"""Encode images as region features: the cells of a grid over a feature map, in the SCAN layout.

    {split}_ims.npy     float32 (images, cells, width)
    {split}_caps.txt    a caption a line, equally many an image; or {split}_caps.tsv with the image of each
    {split}_ids.txt     name of each image
    {split}_rows.npy    row of each caption in the data set
    rows.parquet        all pairs: id, image_path, caption, status, split
    basis.npz           with `pca`: mean and basis of the projection of each cell
    encode.json         the input of the folder

Pairs without a readable image are in no split; `status` in rows.parquet is the reason ("ok" otherwise).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow

from mispair.encoders.encode import EMBEDDINGS, OK, EncodedItems, Outcome, encode_images
from mispair.encoders.encoders import GridEncoder
from mispair.errors import ConflictError, InvalidValueError, TooFewError
from mispair.pairs.layouts.precomp import write_lines, write_tsv
from mispair.pairs.npy import write_rows
from mispair.pairs.origin import BASIS, MARK, Floats, Projection
from mispair.pairs.result_tables import write_table
from mispair.pairs.source import Source
from mispair.pairs.splits import SplitRule, save_rows
from mispair.support.arrays import IntArray
from mispair.support.files import Json
from mispair.support.owned_folder import FolderKind, OwnedFolder

if TYPE_CHECKING:
    from rich.console import Console

ROWS = "rows.parquet"
REGIONS = FolderKind(
    "region features",
    MARK,
    ["*_ims.npy", "*_caps.t*", "*_ids.txt", "*_rows.npy", ROWS],
    optional=[BASIS, *EMBEDDINGS.files],
)
_SAMPLE = 2000  # images to fit the projection on


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

    A cell has `pca` principal components of the training images, or those of a known projection.

    Raises:
        ConfigError: The projection does not fit the encoder.
        DataError: The folder holds other files or cannot be written, or no image can be read.
    """
    rule = splits or SplitRule()
    _check_projection(pca, encoder)
    names = rule.of(pairs)
    with OwnedFolder(out, REGIONS, _request(pairs, encoder, pca, rule), overwrite=overwrite) as folder:
        folder.begin()
        (found,) = encode_images(pairs, [encoder], cache, console=console)
        good = _readable(pairs, found)
        projection = _fitted(pca, found, encoder, good, names) if isinstance(pca, int) else pca
        if projection is not None:
            projection.save(out / BASIS)
        for split in dict.fromkeys(names[row] for row in good.tolist()):
            rows = good[[names[row] == split for row in good]]
            _write_split(out, split, pairs, rows, found, encoder, projection)
        _write_rows(out / ROWS, pairs, names, found.problems)
        folder.finish()
    return Outcome.of(found.problems, int(found.known[found.item].sum()), pairs)


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
    return {
        "image model": encoder.encoder.name,
        "grid": encoder.grid,
        "pca": [pca.fingerprint()] if isinstance(pca, Projection) else pca,
        **rule.request(),
        "rows": len(pairs),
        "ids, image paths or captions": [pairs.fingerprint()],
    }


def _readable(pairs: Source, found: EncodedItems) -> IntArray:
    """Return the pairs with an image and a caption; give a status to the others."""
    for row, text in enumerate(pairs.texts()):
        if not text.strip():
            before = found.problems.get(row)
            found.problems[row] = "caption is blank" if before is None else f"{before}; caption is blank"
    good = np.array([row for row in range(len(pairs)) if row not in found.problems], dtype=np.int64)
    if not len(good):
        first = next(iter(found.problems.values()))
        raise TooFewError(f"none of {len(pairs):,} pairs can be encoded; the first: {first}", where=pairs.name)
    return good


def _fitted(pca: int, found: EncodedItems, encoder: GridEncoder, good: IntArray, names: list[str]) -> Projection:
    """Fit the principal components of the training images."""
    training = [row for row in good.tolist() if names[row] == "train"] or good.tolist()
    images = np.unique(found.item[training])
    some = images[np.unique(np.linspace(0, len(images) - 1, _SAMPLE).astype(np.int64))]
    cells = found.cells.read(some).reshape(-1, encoder.channels).astype(np.float32)
    if len(cells) < pca:
        raise TooFewError(f"{len(cells):,} cells", where=BASIS, expected=f"at least {pca} for `pca`")
    from sklearn.decomposition import PCA  # loads slowly

    fitted = PCA(pca, svd_solver="covariance_eigh").fit(cells)
    return Projection(fitted.mean_.astype(np.float32), np.ascontiguousarray(fitted.components_.T, dtype=np.float32))


def as_cells(values: npt.NDArray[np.floating], channels: int, projection: Projection | None) -> Floats:
    """Turn encodings (n, grid * grid * C) into regions (n, grid * grid, K)."""
    cells = values.reshape(len(values), -1, channels).astype(np.float32)
    return cells if projection is None else projection(cells)


def _write_split(
    out: Path,
    split: str,
    pairs: Source,
    rows: IntArray,
    found: EncodedItems,
    encoder: GridEncoder,
    projection: Projection | None,
) -> None:
    images, owner = np.unique(found.item[rows], return_inverse=True)
    order = np.argsort(owner, kind="stable")  # the captions of an image stand together
    rows, owner = rows[order], owner[order]
    write_rows(
        out / f"{split}_ims.npy",
        lambda wanted: as_cells(found.cells.read(wanted), encoder.channels, projection),
        images,
    )
    named = zip(pairs.image_texts(found.rows[images]), pairs.ids(found.rows[images]), strict=True)
    ids = [" ".join((name or other).split()) for name, other in named]
    texts = [" ".join(text.split()) for text in pairs.texts(rows)]
    write_lines(out / f"{split}_ids.txt", ids)
    save_rows(out, split, rows)
    if len(set(np.bincount(owner).tolist())) == 1:
        write_lines(out / f"{split}_caps.txt", texts)
    else:
        write_tsv(out / f"{split}_caps.tsv", [ids[place] for place in owner], texts)


def _write_rows(path: Path, pairs: Source, names: list[str], problems: dict[int, str]) -> None:
    items, rows = pairs.item_columns(0, len(pairs)), range(len(pairs))
    columns = {
        "id": pairs.id_column(0, len(pairs)),
        "image_path": items["image"],
        "caption": items["caption"],
        "status": pyarrow.array([problems.get(row, OK) for row in rows], pyarrow.string()),
        "split": pyarrow.array([None if row in problems else names[row] for row in rows], pyarrow.string()),
    }
    write_table(path, [pyarrow.table(columns)], overwrite=True)
