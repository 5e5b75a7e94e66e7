"""How the features of a data set were made from image files and texts.

`mispair encode` writes it beside them: names in `encode.json`, the projection of region features in `basis.npz`.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mispair.errors import DataError, NotFoundError
from mispair.pairs.npy import read_array
from mispair.support.files import read_json, regular, replacing, write_atomically
from mispair.support.formatting import plain
from mispair.support.owned_folder import FolderKind, check_unchanged, read_mark

MARK, BASIS = "encode.json", "basis.npz"
MADE_FROM = ".made_from.json"  # in features that a training has made for itself
_ENCODED = FolderKind("features", MARK, ())
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Projection:
    """Brings vectors (n, C) to K numbers: `(x - mean) @ basis`."""

    mean: Floats  # (C,)
    basis: Floats  # (C, K)

    def __call__(self, vectors: npt.NDArray[np.floating]) -> Floats:
        return np.asarray((vectors.astype(np.float32) - self.mean) @ self.basis, dtype=np.float32)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.mean.tobytes() + self.basis.tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        with replacing(path) as file:
            np.savez(file, region_mean=self.mean, region_basis=self.basis)

    @classmethod
    def load(cls, path: Path) -> Projection:
        """
        Raises:
            DataError: It is not such a file.
        """
        try:
            with zipfile.ZipFile(regular(path)) as found:
                arrays = {name: read_array(found.open(f"region_{name}.npy"), path) for name in ("mean", "basis")}
            mean, basis = (array.astype(np.float32) for array in arrays.values())
        except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(
                f"{path}: no projection can be read here ({error}); expected an .npz with region_mean (C,) and "
                "region_basis (C, K), as `mispair encode --pca` writes it."
            ) from None
        if mean.ndim != 1 or basis.ndim != 2 or len(mean) != len(basis) or not basis.shape[1]:
            raise DataError(
                f"{path}: region_mean has the shape {mean.shape} and region_basis {basis.shape}; expected (C,) and "
                "(C, K)."
            )
        return cls(mean, basis)


@dataclass(frozen=True)
class Origin:
    """Encoders of both sides."""

    image_model: str
    text_model: str | None = None  # None where a model reads the words
    grid: int | None = None  # cells a side of the grid of regions; None where an image is one vector
    projection: Projection | None = None  # of each region, if any

    def __str__(self) -> str:
        grid = "" if self.grid is None else f" on a grid of {self.grid} x {self.grid}"
        return f"{self.image_model}{grid}" + (f" and {self.text_model}" if self.text_model else "")

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """The origin of the features in a folder; None if unknown."""
        found = read_json(folder / MARK)
        request = found.get("request") if isinstance(found, dict) else None
        if not isinstance(request, dict):
            return None
        image, text, grid = (request.get(name) for name in ("image model", "text model", "grid"))
        if not isinstance(image, str) or not isinstance(text, str | None) or not isinstance(grid, int | None):
            return None
        projected = (folder / BASIS).is_file()
        return cls(image, text, grid, Projection.load(folder / BASIS) if projected else None)

    def write(self, folder: Path) -> None:
        """Write the files for `read`."""
        request = {"image model": self.image_model, "text model": self.text_model, "grid": self.grid}
        write_atomically(folder / MARK, json.dumps({"request": request}).encode())
        if self.projection is not None:
            self.projection.save(folder / BASIS)


def note_source(folder: Path, source: Path) -> None:
    """Note the name of the data that the features in a folder were made from."""
    write_atomically(folder / MADE_FROM, json.dumps({"source": plain(source.resolve().name)}).encode())


def data_name(folder: Path) -> str:
    """Name of the data in a folder: its noted source, else the folder."""
    found = read_json(folder / MADE_FROM)
    source = found.get("source") if isinstance(found, dict) else None
    return source if isinstance(source, str) and source else folder.name


def check_as_encoded(folder: Path) -> None:
    """Raise if files of `mispair encode` have changed; other folders pass."""
    mark = read_mark(folder, _ENCODED)
    names = () if mark is None else tuple(mark.files)
    for name in names:
        if not (folder / name).exists():
            raise NotFoundError("no such file", where=folder / name, advice="Copy it again, or encode again.")
    states = [(folder / name).stat() for name in names]
    _check(folder, names, tuple((state.st_size, state.st_mtime_ns) for state in states))


@lru_cache(maxsize=100)  # the splits of a data set are read one after the other
def _check(folder: Path, names: tuple[str, ...], _versions: tuple[tuple[int, int], ...]) -> None:
    check_unchanged(folder, _ENCODED, names)
