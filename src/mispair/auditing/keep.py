"""`mispair.keep("audit/")`: filter pairs in a data loader by an audit, without a copy of the data."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mispair.encoders.cache import cache_folder
from mispair.errors import NotFoundError
from mispair.pairs.audited import FLAGGED, SCORE
from mispair.pairs.result_tables import TABLE
from mispair.support.files import replacing, short_hash, unreadable

if TYPE_CHECKING:
    import pyarrow

MASKS = "masks"  # folder in that of encodings
_FREE = 0  # what a free place of the hash table holds

Hashes = npt.NDArray[np.uint64]


class Keep:
    """Kept pairs of an audit, memory-mapped: processes share it, and a look-up takes about a microsecond.

    Attributes:
        rows: (N,) whether each pair of the audit is kept, in the order of the audited data.
    """

    def __init__(self, keys: Path, rows: Path) -> None:
        self.rows = np.load(rows, mmap_mode="r", allow_pickle=False)
        self._files, self._table = (keys, rows), memoryview(np.load(keys, mmap_mode="r", allow_pickle=False))
        self._shift = _shift(len(self.rows))

    def __contains__(self, key: str) -> bool:
        wanted = _hash_of(key)
        place = wanted >> self._shift
        while (found := self._table[place]) < wanted and found != _FREE:
            place += 1
        return found == wanted

    def __len__(self) -> int:
        """Number of the kept pairs."""
        return int(np.count_nonzero(self.rows))

    def __reduce__(self) -> tuple[type[Keep], tuple[Path, Path]]:
        """Let new worker processes map the same files."""
        return Keep, self._files


def keep(audit: str | Path, *, by: str = "id", flag_below: float | None = None) -> Keep:
    """Look up the kept pairs of an audit: readable and not flagged.

        keep = mispair.keep("audit/", by="image")
        dataset = webdataset.WebDataset(shards).select(lambda sample: sample["__key__"] in keep)

    Args:
        audit: Folder of the audit, or its table.
        by: Column of the table that is looked up. "image" has the keys of the samples of tars. Where several pairs have
            one value, it is kept if one of them is.
        flag_below: Match score below which pairs are flagged; by default as in the audit.

    Raises:
        DataError: The table or column does not exist.
        ConfigError: `flag_below` is no match score.
    """
    from mispair.auditing.summary import check_cut

    check_cut(flag_below, None)
    place = Path(audit)
    table = place if place.is_file() else place / TABLE
    files = sorted(table.glob("*.parquet")) if table.is_dir() else [table]
    try:
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise unreadable(files[0], error) from None
    name = short_hash(repr([states, by, flag_below]))
    folder = cache_folder() / MASKS
    paths = folder / f"{name}-keys.npy", folder / f"{name}-rows.npy"
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        for path, values in zip(paths, _read(files, by, flag_below), strict=True):
            with replacing(path) as file:
                np.save(file, values)
    return Keep(*paths)


def _read(files: list[Path], by: str, flag_below: float | None) -> tuple[Hashes, npt.NDArray[np.bool_]]:
    """The hash table of the kept pairs, and whether each pair is kept; read some rows at a time."""
    import pyarrow
    import pyarrow.dataset

    hashes, kept = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.bool_)]
    try:
        data = pyarrow.dataset.dataset(files, format="parquet")
        missing = {by, SCORE, FLAGGED} - set(data.schema.names)
        if missing:
            there = ", ".join(data.schema.names)
            raise NotFoundError(f"no column {', '.join(sorted(missing))}, only {there}", where=files[0])
        for batch in data.to_batches(columns=list({by, SCORE, FLAGGED})):
            kept.append(_kept(batch, flag_below))
            keys = batch[by].filter(pyarrow.array(kept[-1])).drop_null().cast("string").to_pylist()
            hashes.append(np.fromiter(map(_hash_of, keys), dtype=np.uint64, count=len(keys)))
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(files[0], error) from None
    rows = np.concatenate(kept)
    return _table(np.unique(np.concatenate(hashes)), len(rows)), rows


def _kept(batch: pyarrow.RecordBatch, flag_below: float | None) -> npt.NDArray[np.bool_]:
    import pyarrow.compute as compute

    good = compute.invert(batch[FLAGGED]) if flag_below is None else compute.greater_equal(batch[SCORE], flag_below)
    return np.asarray(compute.fill_null(good, False).to_numpy(zero_copy_only=False))


def _hash_of(key: str) -> int:
    """64 bits, never `_FREE`: two CRCs take a third of the time of the hashes of hashlib."""
    content = key.encode()
    return (zlib.crc32(content) << 32 | zlib.crc32(content[::-1])) or 1


def _table(hashes: Hashes, rows: int) -> Hashes:
    """Ascending hashes with gaps: each stands at the place of its first bits, or as soon behind as there is room."""
    number = np.arange(len(hashes))
    home = (hashes >> np.uint64(_shift(rows))).astype(np.int64)
    places = np.maximum.accumulate(home - number) + number
    table = np.zeros((1 << (64 - _shift(rows))) + len(hashes) + 1, dtype=np.uint64)
    table[places] = hashes
    return table


def _shift(rows: int) -> int:
    """Number of trailing bits of a hash beside its place; there are at least two places for each row."""
    return 64 - max(1, (2 * rows - 1).bit_length())
