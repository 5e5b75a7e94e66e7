"""Audits of files and folders, with their results in a folder. They are resumable and not repeated."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mispair import __version__
from mispair.auditing.audit import JUDGE, Audit, Settings, audit_source, check, checked_answers
from mispair.auditing.clean_copy import (
    check_copy,
    check_planned_copy,
    is_copied,
    kept_rows,
    write_filtered,
    write_table,
)
from mispair.auditing.encoding.encode import encode_source
from mispair.auditing.encoding.raw_pairs import IMAGE_SUFFIXES
from mispair.auditing.findings import AuditSummary
from mispair.auditing.sources.from_training import from_run, is_run
from mispair.auditing.sources.source import Source, open_arrays, open_source
from mispair.auditing.sources.tables import open_table
from mispair.compute.devices import pick_device
from mispair.config import read_recipe
from mispair.data.loading import layout
from mispair.errors import ConfigError, DataError
from mispair.support.files import Json, write_atomically
from mispair.support.owned_folder import FolderKind, OwnedFolder

TABLE, CSV, SUGGESTIONS = "pairs.parquet", "pairs.csv", "suggestions.csv"
REPORT, SUMMARY = "report.html", "summary.json"
AUDIT = FolderKind("an audit", "audit.json", (TABLE, CSV, SUGGESTIONS, REPORT, SUMMARY))

_YES, _NO, _PLAIN = ("1", "true", "yes"), ("0", "false", "no"), ("right", "wrong")


@dataclass(frozen=True)
class AuditInput:
    """Where the pairs are.

    Attributes:
        source: Folder of embeddings, of features or of a training run; or raw images and captions.
        left: Vectors of one side as .npy, instead of a source.
        right: Vectors of the other side.
        ids: Table with a row for each vector.
        images: Folder of the images.
        split: Part of the data set.
    """

    source: Path | None = None
    left: Path | None = None
    right: Path | None = None
    ids: Path | None = None
    images: Path | None = None
    split: str | None = None

    def check(self) -> None:
        """Refuses arguments that contradict each other, and files that are not there.

        Raises:
            ConfigError: The arguments do not go together.
            DataError: There is no such source.
        """
        if self.source is None:
            if self.left is None or self.right is None:
                raise ConfigError("Give a folder to audit, or both --left A.npy and --right B.npy.")
        elif self.left is not None or self.right is not None or self.ids is not None:
            raise ConfigError("Give either a folder or --left and --right (with --ids), not both.")
        elif str(self.source) != "shapes" and not self.source.exists():
            raise DataError(f"{self.source}: no such file or folder.")
        elif self.source.suffix == ".npy" and self.source.is_file():
            raise ConfigError(
                f"{self.source} holds the vectors of one side; give those of both as --left A.npy --right B.npy."
            )
        if self.split is not None and (self.source is None or self.is_run or self.is_raw):
            raise ConfigError("--split is for folders of embeddings or features that have parts; leave it out.")

    @property
    def is_run(self) -> bool:
        """Whether these are the pairs of a training run."""
        return self.source is not None and is_run(self.source)

    @property
    def is_raw(self) -> bool:
        """Whether these are images and captions, which are encoded first."""
        source = self.source
        if source is None or self.is_run or str(source) == "shapes":
            return False
        return not source.is_dir() or _is_raw_folder(source)

    def open(self, vectors: Path, device: str, console: Console | None = None, *, overwrite: bool = False) -> Source:
        """Opens the pairs; raw ones are encoded to the folder `vectors`.

        Raises:
            ConfigError: --images is given, but nothing says which image belongs to which pair.
            DataError: The data cannot be read.
        """
        source = self._open(vectors, device, console, overwrite=overwrite)
        if self.images is not None and not source.has_images:
            raise ConfigError(_unused_images(source, self.images))
        return source

    def _open(self, vectors: Path, device: str, console: Console | None, *, overwrite: bool) -> Source:
        if self.source is None:
            assert self.left is not None
            assert self.right is not None
            return open_arrays(self.left, self.right, self.ids, self.images)
        if self.is_run:
            return from_run(self.source, device, self.images)
        if not self.is_raw:
            return open_source(self.source, self.images, self.split)
        if console is not None:
            console.print(f"Encoding {self.source} to {vectors}", soft_wrap=True)
        encode_source(self.source, vectors, images=self.images, device=device, overwrite=overwrite, console=console)
        return open_source(vectors, self.images)

    def request(self, settings: Settings, made: Sequence[Path]) -> dict[str, Json]:
        """What an audit of this input depends on, by the names on the command line.

        Args:
            settings: Settings of the audit.
            made: Folders that the audit itself writes, which may lie in those that are read.
        """
        places = {"the source": self.source, "--left": self.left, "--right": self.right, "--ids": self.ids}
        return {
            **{name: _state(place, made) for name, place in places.items()},
            "--images": None if self.images is None else str(self.images.resolve()),
            "--split": self.split,
            **_settings_request(settings),
        }


def audit_path(
    data: AuditInput,
    out: Path,
    settings: Settings,
    *,
    clean: Path | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    command: str = "",
) -> AuditSummary:
    """Audits files and writes `pairs.parquet`, `pairs.csv`, `suggestions.csv`, `summary.json` and `report.html`.

    An interrupted audit continues when it is called again with the same input and settings; a finished one is not
    repeated. Raw images and captions are encoded to `OUT-embeddings` first.

    Args:
        data: Where the pairs are.
        out: Folder of the results.
        settings: Settings of the audit.
        clean: Folder for a copy of the input without the flagged and the unreadable pairs.
        overwrite: Replace what is in the folders.
        console: Where to show progress.
        command: The command line, for the report.

    Raises:
        ConfigError: The arguments do not go together.
        DataError: The data cannot be audited, or a folder cannot be used.
    """
    data.check()
    vectors = Path(f"{out.resolve()}-embeddings")
    request = data.request(settings, [out, vectors, *([] if clean is None else [clean])])
    with OwnedFolder(out, AUDIT, request, overwrite=overwrite) as folder:
        if folder.finished and not overwrite:
            if console is not None:
                console.print("This audit has ended already; nothing was computed again.")
            summary = AuditSummary.read(out / SUMMARY)
            if clean is not None and not is_copied(clean, request):
                _check_clean(data, clean, out, vectors, overwrite=False)
                source = data.open(vectors, settings.device, console)
                write_filtered(source, kept_rows(out / TABLE), clean, request=request)
            return summary
        if clean is not None:
            _check_clean(data, clean, out, vectors, overwrite=overwrite)
        source = data.open(vectors, settings.device, console, overwrite=overwrite)
        if clean is not None:
            check_copy(source, clean, overwrite)
        audit = _audit(folder, source, _with_joint(settings, data), console, command)
        if clean is not None:
            write_filtered(source, audit.kept, clean, overwrite, request=request)
        return audit.summary


def audit_to_folder(
    source: Source,
    out: Path,
    settings: Settings,
    *,
    overwrite: bool = False,
    console: Console | None = None,
    command: str = "",
) -> Audit:
    """Audits a source and writes the same files as `audit_path`."""
    request: dict[str, Json] = {"the input": [source.fingerprint()], **_settings_request(settings)}
    with OwnedFolder(out, AUDIT, request, overwrite=overwrite) as folder:
        if folder.finished and not overwrite:
            raise DataError(f"{out} holds this audit already; read its files, or allow it to be replaced.")
        return _audit(folder, source, settings, console, command)


def _audit(folder: OwnedFolder, source: Source, settings: Settings, console: Console | None, command: str) -> Audit:
    out = folder.path
    check(source, settings)
    pick_device(settings.device)
    if any(path.resolve().is_relative_to(out.resolve()) for path in source.files):
        raise DataError(f"{out}: this is where the audited data is, which is never changed; choose another --out.")
    folder.begin()
    try:
        audit = audit_source(source, settings, work=folder.work, console=console, command=command)
    except DataError:
        if not (folder.work / JUDGE).exists():  # nothing to resume, and the corrected input must not be refused
            folder.abandon()
        raise
    audit.to_parquet(out / TABLE, overwrite=True)
    audit.to_csv(out / CSV, overwrite=True)
    write_table(out / SUGGESTIONS, [audit.suggestions], overwrite=True)
    audit.to_html(out / REPORT)
    write_atomically(out / SUMMARY, f"{audit.summary.model_dump_json(indent=2)}\n".encode())
    folder.finish()
    return audit


def _with_joint(settings: Settings, data: AuditInput) -> Settings:
    """The networks of a run have a common space."""
    return Settings(settings.joint or data.is_run, settings.checked, settings.device, settings.workers)


def _settings_request(settings: Settings) -> dict[str, Json]:
    answers = json.dumps(sorted(checked_answers(settings.checked).items()))
    return {
        "--joint": settings.joint,
        "--checked": [hashlib.sha256(answers.encode()).hexdigest()],
        "the version of mispair": __version__,
    }


def _state(place: Path | None, made: Sequence[Path]) -> list[Json]:
    """The place, and a hash of the names, sizes and times of all files there; of a run also of its data."""
    if place is None:
        return []
    digest = hashlib.sha256()
    for path in sorted(path for root in (place, *_trained_on(place)) for path in _files(root, made)):
        found = path.stat()
        digest.update(json.dumps([os.fspath(path), found.st_size, found.st_mtime_ns]).encode())
    return [str(place.resolve()), digest.hexdigest()]


def _trained_on(run: Path) -> list[Path]:
    """The data of a training run; nothing for any other place."""
    settings = run / "config.toml"
    if not is_run(run) or not settings.is_file():
        return []
    config = read_recipe(settings)
    return [Path(config.data), *(Path(path) for path in (config.noise_file,) if path)]


def _files(root: Path, made: Sequence[Path]) -> Iterator[Path]:
    root = root.resolve()
    inside = (path for path in root.rglob("*") if path.is_file()) if root.is_dir() else (root,) * root.is_file()
    own = [path.resolve() for path in made]
    return (path for path in inside if not any(path.is_relative_to(folder) for folder in own))


def _is_raw_folder(folder: Path) -> bool:
    """Whether it holds images and texts rather than vectors."""
    try:
        layout(folder)
    except DataError:
        found = (path.suffix.lower() for path in folder.rglob("*"))
        return any(suffix in (".txt", *IMAGE_SUFFIXES) for suffix in found) and not any(folder.glob("*.npy"))
    return False


def _unused_images(source: Source, images: Path) -> str:
    if source.table is not None:
        return (
            f"--images {images} is given, but {source.table.parts[0].path} does not say which image belongs to which "
            f"row: {source.table.found()}; expected one named image_path, image or path. Add it, or leave --images out."
        )
    where = {
        "arrays": "give a table with a column image_path as --ids",
        "clip": f"add metadata/metadata_0.csv with a column image_path to {source.name}",
        "precomp": f"add {source.split}_ids.txt with the name of an image on each line",
        "memory": "its data has no names of images",
    }[source.layout]
    return (
        f"--images {images} is given, but nothing says which image belongs to which pair of {source.name}; {where}, or "
        "leave --images out."
    )


def _check_clean(data: AuditInput, clean: Path, out: Path, vectors: Path, *, overwrite: bool) -> None:
    """Refuses a place for the copy as far as it can be known before anything is encoded."""
    if clean.is_dir() and any(clean.iterdir()) and not overwrite:
        raise DataError(f"{clean} is not empty; give another --clean, or --overwrite to replace the copy in it.")
    if clean.resolve().is_relative_to(out.resolve()) or out.resolve().is_relative_to(clean.resolve()):
        raise ConfigError(
            f"--clean {clean} and --out {out} lie in each other; give two folders of which neither is in the other."
        )
    if data.source is not None and data.is_run:
        check_planned_copy(data.source, "memory", clean, overwrite)
    elif data.source is not None and data.is_raw:
        for folder in (data.source, vectors):
            check_planned_copy(folder, "clip", clean, overwrite)


def read_checked(path: Path) -> dict[str, bool]:
    """Ids and whether the pair matches, from a table with the columns id and right (or is_mismatch).

    Raises:
        DataError: It is no such table, or gives two answers for one pair.
    """
    table = open_table(path)
    names = {name.lower(): name for name in table.columns}
    key = "right" if "right" in names else "is_mismatch"
    if "id" not in names or key not in names:
        raise DataError(f"{path}: {table.found()}; expected the columns id and right (yes or no).")
    answers: dict[str, bool] = {}
    for ids, cells in table.batches([names["id"], names[key]]):
        for name, cell in zip(ids.to_pylist(), cells.to_pylist(), strict=True):
            word = str(cell).strip().lower()
            if word not in _YES + _NO + _PLAIN:
                raise DataError(f"{path}: {cell!r} for {name!r} in the column {names[key]}; expected yes or no.")
            # "wrong" means mismatched, whether the column is named right or is_mismatch.
            right = word == "right" if word in _PLAIN else (word in _YES) == (key == "right")
            if answers.setdefault(str(name), right) != right:
                raise DataError(
                    f"{path}: the pair {name!r} is right in one row and wrong in another; keep one of them."
                )
    return answers
