"""The command `mispair audit`. Heavy imports wait until it runs."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from mispair.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from mispair.auditing.result import Audit
    from mispair.auditing.source import Source

BAD_SHARE, BAD_CODE = 0.01, 3  # of the rows may be unreadable; the exit code if there are more
_YES, _NO, _PLAIN = ("1", "true", "yes"), ("0", "false", "no"), ("right", "wrong")


def audit(
    source: Positional[Path | None] = None,
    *,
    out: Path,
    left: Path | None = None,
    right: Path | None = None,
    ids: Path | None = None,
    images: Path | None = None,
    split: str | None = None,
    joint: bool = False,
    checked: Path | None = None,
    clean: Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    workers: int | None = None,
    json: bool = False,
) -> int:
    """Find the wrong pairs of a data set, with a report. The same command again goes on where it was stopped.

    Args:
        source: Folder of embeddings (clip-retrieval), of features (SCAN) or of a training run; or raw images and
            captions, as for encode.
        out: Folder for the table of all pairs, the suggestions and the report.
        left: Vectors of one side as .npy, instead of a source.
        right: Vectors of the other side.
        ids: Table (CSV, TSV, parquet) with a row for each vector: id, caption, image_path.
        images: Folder of the pictures.
        split: Part of the data set; train by default, where it has parts.
        joint: Both encoders share a space, as CLIP's do.
        checked: CSV of pairs that you have looked at: id, and right (yes or no).
        clean: Write a copy of the input without the flagged and the unreadable pairs to this folder.
        overwrite: Replace what is in the folders.
        device: auto, cpu, cuda, cuda:1, mps.
        workers: Threads; as many as there are cores by default.
        json: Print figures for machines.
    """
    from rich.console import Console

    from mispair.auditing.api import Settings, audit_to_folder, check_free
    from mispair.auditing.output import check_copy
    from mispair.auditing.trained import is_run

    console = Console(file=sys.stderr, markup=False, highlight=False)
    check_free(out, overwrite)  # before hours of encoding
    if clean is not None:
        _check_clean(clean, out, source, overwrite=overwrite)
    looked_at = None if checked is None else read_checked(checked)
    pairs = _open(source, left, right, ids, images, split, out, device, console, overwrite=overwrite)
    if images is not None and not pairs.has_pictures:
        raise ConfigError(
            f"--images {images} is given, but {pairs.name} names no pictures; add a column image_path to its table, or "
            "leave --images out."
        )
    if clean is not None:
        check_copy(pairs, clean, overwrite)
    joint = joint or (source is not None and is_run(source))
    settings = Settings(joint, looked_at, device, workers)
    command = shlex.join(["mispair", *sys.argv[1:]])
    result = audit_to_folder(pairs, out, settings, overwrite=overwrite, console=console, command=command)
    if clean is not None:
        result.write_clean(clean, overwrite=overwrite)
    if json:
        print(json_module.dumps({"out": str(out), **result.summary}, indent=2))
    else:
        _tell(result, out, clean)
    return BAD_CODE if len(result.bad_rows) > BAD_SHARE * len(result) else 0


def _open(
    source: Path | None,
    left: Path | None,
    right: Path | None,
    ids: Path | None,
    images: Path | None,
    split: str | None,
    out: Path,
    device: str,
    console: Console,
    *,
    overwrite: bool,
) -> Source:
    from mispair.auditing.source import open_arrays, open_source
    from mispair.auditing.trained import from_run, is_run

    if source is None:
        if left is None or right is None:
            raise ConfigError("Give a folder to audit, or both --left A.npy and --right B.npy.")
        _refuse_split(split)
        return open_arrays(left, right, ids, images)
    if left is not None or right is not None or ids is not None:
        raise ConfigError("Give either a folder or --left and --right (with --ids), not both.")
    if is_run(source):
        _refuse_split(split)
        return from_run(source, device, images)
    if not _is_raw(source):
        return open_source(source, images, split)
    _refuse_split(split)
    if not source.exists():
        raise DataError(f"{source}: no such file or folder.")
    from mispair.auditing.encode import encode_source

    vectors = _vectors(out)
    console.print(f"Encoding {source} to {vectors}", soft_wrap=True)
    encode_source(source, vectors, images=images, device=device, overwrite=overwrite, console=console)
    return open_source(vectors, images)


def _refuse_split(split: str | None) -> None:
    if split is not None:
        raise ConfigError("--split is for folders of embeddings or features that have parts; leave it out.")


def _vectors(out: Path) -> Path:
    """Where raw images and captions are encoded to."""
    return Path(f"{out.resolve()}-embeddings")


def _check_clean(clean: Path, out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuses a place for the copy as far as it can be known before anything is encoded."""
    from mispair.auditing.output import check_planned_copy
    from mispair.auditing.trained import is_run

    if clean.is_dir() and any(clean.iterdir()) and not overwrite:
        raise DataError(f"{clean} is not empty; give another --clean, or --overwrite to replace the copy in it.")
    if clean.resolve().is_relative_to(out.resolve()) or out.resolve().is_relative_to(clean.resolve()):
        raise ConfigError(
            f"--clean {clean} and --out {out} lie in each other; give two folders of which neither is in the other."
        )
    if source is not None and is_run(source):
        check_planned_copy(source, "memory", clean, overwrite)
    elif source is not None and _is_raw(source):
        for folder in (source, _vectors(out)):
            check_planned_copy(folder, "clip", clean, overwrite)


def _is_raw(source: Path) -> bool:
    """Whether it is to be encoded first."""
    return str(source) != "shapes" and (not source.is_dir() or _is_raw_folder(source))


def _is_raw_folder(folder: Path) -> bool:
    """Whether it holds pictures and texts rather than vectors."""
    from mispair.data.formats import layout

    try:
        layout(folder)
    except DataError:
        return any(path.suffix == ".txt" for path in folder.iterdir()) and not any(folder.glob("*.npy"))
    return False


def read_checked(path: Path) -> dict[str, bool]:
    """Ids and whether the pair is right, from a table with the columns id and right (or is_mismatch)."""
    from mispair.auditing.tables import open_table

    table = open_table(path)
    names = {name.lower(): name for name in table.columns}
    key = "right" if "right" in names else "is_mismatch"
    if "id" not in names or key not in names:
        raise DataError(f"{path}: {table.found()}; expected the columns id and right (yes or no).")
    found: dict[str, bool] = {}
    for ids, answers in table.batches([names["id"], names[key]]):
        for name, answer in zip(ids.to_pylist(), answers.to_pylist(), strict=True):
            word = str(answer).strip().lower()
            if word not in _YES + _NO + _PLAIN:
                raise DataError(f"{path}: {answer!r} for {name!r} in the column {names[key]}; expected yes or no.")
            # A pair that is called wrong is wrong, whether the column asks for right ones or for mismatches.
            right = word == "right" if word in _PLAIN else (word in _YES) == (key == "right")
            if found.setdefault(str(name), right) != right:
                raise DataError(
                    f"{path}: the pair {name!r} is right in one row and wrong in another; keep one of them."
                )
    return found


def _tell(result: Audit, out: Path, clean: Path | None) -> None:
    figures = result.summary
    print(
        f"{figures['flagged']:,} of {figures['scored']:,} pairs look wrong. Estimated noise rate "
        f"{figures['noise_rate']:.1%} ({figures['noise_rate_low']:.1%} to {figures['noise_rate_high']:.1%})."
    )
    for status, count in figures["unreadable"].items():
        print(f"{count:,} could not be read: {status}.")
    print(f"Report: {out / 'report.html'}")
    print(f"Table:  {out / 'pairs.parquet'} and pairs.csv; better partners in suggestions.csv")
    if clean is not None:
        print(f"Without the wrong ones: {clean}")
