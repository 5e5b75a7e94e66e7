"""Resumable audits of files and folders, with their results in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from mispair.auditing.audit import Results, Settings, audit_source, check, check_rows, check_settings
from mispair.auditing.auditor import checked_answers
from mispair.auditing.blocks import find_blocks
from mispair.auditing.from_training import is_run
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import (
    AUDIT,
    CSV,
    LEARNED,
    READ_BACK,
    REPORT,
    SHARDS,
    SUBSET,
    SUGGESTIONS,
    SUGGESTIONS_CSV,
    SUMMARY,
    TABLE,
)
from mispair.auditing.output_store import working_folder
from mispair.auditing.report.page import make_page, render
from mispair.auditing.request import Request, local_place, read_audit_mark
from mispair.auditing.summary import AuditSummary, share_of
from mispair.auditing.tool_files import Tool, export, no_images
from mispair.compute.devices import pick_device
from mispair.config import read_toml
from mispair.errors import ConflictError, DataError, ExistsError, MispairError, NotFoundError, ShapeError
from mispair.pairs.layouts.copies import check_copy, is_copied, read_edits, write_copy
from mispair.pairs.layouts.datacomp import uid_subset
from mispair.pairs.npy import write_array
from mispair.pairs.origin import check_as_encoded
from mispair.pairs.remote import Store, url_of, version_of
from mispair.pairs.result_tables import defused, original, table_writer, write_table
from mispair.pairs.source import Source, digest
from mispair.pairs.tables import open_table
from mispair.support.files import Json, write_atomically
from mispair.support.owned_folder import WORK, OwnedFolder, check_unchanged

_OF_INPUT = "split", "vectors", "image_column", "caption_column", "id_column"
_YES, _NO, _PLAIN = ("1", "true", "yes"), ("0", "false", "no"), ("right", "wrong")


def audit_path(
    data: AuditInput,
    out: Path,
    settings: Settings,
    *,
    clean: Path | None = None,
    mended: Path | None = None,
    tools: Sequence[Tool] = (),
    cluster: Any = None,
    overwrite: bool = False,
    console: Console | None = None,
    command: str = "",
) -> AuditSummary:
    """Audit files and write `pairs.parquet`, `pairs.csv`, `suggestions.csv`, `summary.json` and `report.html`.

    Call it again with the same input and settings to resume; a finished audit is not repeated. Images and captions are
    encoded first; encodings are cached.

    Args:
        out: Folder of the results, or its URL in an object store.
        clean: Folder for a copy of the input without the flagged and the unreadable pairs.
        mended: Folder for a copy in which flagged pairs have their sure better partners.
        tools: Also write files for these tools.
        cluster: The module of Ray, connected; its workers read and score the pairs. All machines can write to `out`.
        overwrite: Replace the files in all these folders.
        command: The command line, for the report.

    Raises:
        ConfigError: The arguments do not go together.
        DataError: The data cannot be audited, or a folder cannot be used.
    """
    data.check()
    check_settings(settings)
    blocks = [] if cluster is None else find_blocks(data)
    is_cut = any(block.files for block in blocks)  # into files; workers open them
    raw = data.open(settings.device) if data.is_raw and not is_cut else None
    url = url_of(out)
    copies = {kind: place for kind, place in (("clean", clean), ("mended", mended)) if place is not None}
    encodes = raw is not None or any(block.raw for block in blocks)
    request = _request(data, raw, settings, [out, *copies.values()], encodes=encodes)
    with (
        working_folder(out, request, data.cache, overwrite=overwrite) as out,
        OwnedFolder(out, AUDIT, request, overwrite=overwrite) as folder,
    ):
        done = folder.finished and not overwrite
        if done:
            if console is not None:
                console.print("This audit has ended already; nothing was computed again.")
            check_unchanged(out, AUDIT, READ_BACK)
            copies = {kind: place for kind, place in copies.items() if not is_copied(place, {**request, "copy": kind})}
        _check_copies(data, raw, copies, out, overwrite=overwrite)
        source = raw
        if done:
            summary = AuditSummary.read(out / SUMMARY)
        elif cluster is None:
            if raw is not None:
                check_rows(raw, settings)
            elif data.source is not None:
                check_as_encoded(data.source)
            source = encoded = data.encoded(raw or data.open(settings.device), settings.device, console)
            for place in copies.values():
                check_copy(source.folder, source.files, place, overwrite)
            check(source, settings)
            if tools and not source.has_images:
                raise no_images()
            pick_device(settings.device)

            def audited() -> Results:
                return audit_source(encoded, settings, work=folder.work, console=console, command=command)

            summary = _write(folder, source.files, audited)
        else:
            from mispair.auditing.ray_engine import audit_blocks

            work = str(folder.work.absolute()) if url is None else f"{url}/{WORK}"
            inside = [] if data.source is None or url_of(data.source) else [data.source / "inside"]
            files = inside if raw is None else raw.files

            def audited() -> Results:
                audit = audit_blocks(cluster, data, blocks, work, folder.work, settings, console, command)
                shutil.copyfile(folder.work / LEARNED, out / LEARNED)
                return audit

            summary = _write(folder, files, audited)
        if copies or tools:
            source = source or data.fetched().open(settings.device)
            for kind, place in copies.items():
                edits = read_edits(out / TABLE, source, mend=kind == "mended")
                write_copy(source, edits, place, overwrite, request={**request, "copy": kind})
            _export(source, out, tools)
        return summary


def _export(source: Source, out: Path, tools: Sequence[Tool]) -> None:
    import pyarrow
    import pyarrow.parquet

    for tool in tools:
        with pyarrow.parquet.ParquetFile(out / TABLE) as table:
            batches = table.iter_batches()
            export((pyarrow.Table.from_batches([batch]) for batch in batches), tool, out, source.image_folder)


def _write(folder: OwnedFolder, files: Sequence[Path], audited: Callable[[], Results]) -> AuditSummary:
    """Audit, and write the results; `files` are the audited ones."""
    out = folder.path
    if _lies_in(files, out):
        raise ExistsError(
            "this folder holds the audited data, which is never changed", where=out, advice="Give another `out`."
        )
    folder.begin()
    try:
        audit = audited()
    except MispairError:
        if not (folder.work / LEARNED).exists():  # nothing to resume, and the corrected input must not be refused
            folder.abandon()
        raise
    _write_tables(audit, out)
    write_table(out / SUGGESTIONS, [audit.suggestions], overwrite=True)
    write_table(out / SUGGESTIONS_CSV, [defused(audit.suggestions)], overwrite=True)
    write_atomically(out / REPORT, render(make_page(audit.reported)).encode())
    write_atomically(out / SUMMARY, f"{audit.summary.model_dump_json(indent=2)}\n".encode())
    folder.finish()
    return audit.summary


def _lies_in(files: Sequence[Path], folder: Path) -> bool:
    """Whether a file or the target of a link is in a folder; there may be thousands of files in few folders."""
    inside = folder.resolve()
    places = {parent.resolve() for parent in {path.parent for path in files}}
    links = (path.resolve() for path in files if path.is_symlink())
    return any(place.is_relative_to(inside) for place in (*places, *links))


def _write_tables(audit: Results, out: Path) -> None:
    """Write the table of all pairs as parquet and CSV; for DataComp also one a shard, and the list of kept pairs."""
    import pyarrow.compute as compute

    kept: list[npt.NDArray[np.void] | None] = []
    with table_writer(out / TABLE) as write, table_writer(out / CSV) as write_sheet:
        for name, pieces in audit.parts():
            with table_writer(out / SHARDS / f"{name}.parquet") if name else nullcontext() as write_shard:
                for piece in pieces:
                    write(piece)
                    write_sheet(defused(piece))
                    if write_shard is not None:
                        write_shard(piece)
                        ids = piece["id"].filter(compute.equal(piece["is_mismatch"], False)).to_pylist()
                        kept += [uid_subset(ids)] if ids else []
    subsets = [part for part in kept if part is not None]
    if subsets and len(subsets) == len(kept):
        write_array(out / SUBSET, np.sort(np.concatenate(subsets)))


def _request(
    data: AuditInput, raw: Source | None, settings: Settings, made: Sequence[Path], *, encodes: bool
) -> dict[str, Json]:
    """Return the request of an audit; its own folders, `made`, may lie in the folders of the input."""

    def state(place: Path | None) -> list[str]:
        if place is not None and place in data.urls:
            return [*data.urls[place]]  # the URL and the version of what was fetched: the same on all machines
        if place is not None and (url := url_of(place)):  # read by the workers of a cluster
            return [url, version_of(url, Store(url).files())]
        if place is not None and place == data.source and raw is not None:
            return [str(place.resolve()), *map(str, raw.state())]
        return _state(place, made)

    values = {
        "source": state(data.source),
        "left": [state(place) for place in data.left],
        "right": [state(place) for place in data.right],
        "ids": state(data.ids),
        "images": None if data.images is None else str(data.images.resolve()),
        **{name: getattr(data, name) for name in _OF_INPUT},
        "image_model": data.models.image_model if encodes else "",
        "text_model": data.models.text_model if encodes else "",
        "allow_outside": encodes and data.allow_outside,
        "joint": settings.joint,
        "flag_below": settings.flag_below,
        "keep_best": None if settings.keep_best is None else share_of(settings.keep_best),
        "by": settings.by,
        "checked": [hashlib.sha256(json.dumps(sorted(checked_answers(settings.checked).items())).encode()).hexdigest()],
        "partnered": [list(ids) for ids in settings.partnered] if any(settings.partnered) else [],
    }
    return Request.model_validate(values).model_dump()


def read_input(out: Path) -> AuditInput:
    """Return the input of an audit, by its folder.

    Raises:
        DataError: The folder holds no finished audit, or a damaged one.
    """
    mark = read_audit_mark(out)
    if mark is None or not mark.finished:
        raise NotFoundError("no finished audit in here", where=out, expected="the folder of an audit")
    request = Request.of(mark, out)
    return AuditInput(
        source=local_place(request.source),
        left=tuple(filter(None, map(local_place, request.left))),
        right=tuple(filter(None, map(local_place, request.right))),
        ids=local_place(request.ids),
        images=None if request.images is None else Path(request.images),
        image_model=request.image_model,
        text_model=request.text_model,
        allow_outside=request.allow_outside,
        **{name: getattr(request, name) for name in _OF_INPUT},
    )


def _state(place: Path | None, made: Sequence[Path]) -> list[str]:
    """Return the place and a hash of the names, sizes and times of its files. For a run, the hash includes its data."""
    if place is None:
        return []
    roots, config = [place], place / "config.toml"
    if is_run(place) and config.is_file():
        settings = read_toml(config)
        roots += [Path(settings[name]) for name in ("data", "noise_file") if settings.get(name)]
    files = sorted(file for root in roots for file in _files(root.resolve(), [path.resolve() for path in made]))
    return [str(place.resolve()), digest(files)]


def _files(root: Path, made: Sequence[Path]) -> Iterator[Path]:
    """Yield a file, or all files of a folder outside the folders `made`."""
    if not root.is_dir():
        yield root
    for folder, _, names in os.walk(root):
        if not any(Path(folder).is_relative_to(one) for one in made):
            yield from (Path(folder, name) for name in names)


def _check_copies(
    data: AuditInput, raw: Source | None, copies: Mapping[str, Path], out: Path, *, overwrite: bool
) -> None:
    """Raise if a copy cannot be written to its place, before anything is encoded."""
    for (one, first), (other, second) in combinations({"out": out, **copies}.items(), 2):
        if first.resolve().is_relative_to(second.resolve()) or second.resolve().is_relative_to(first.resolve()):
            raise ConflictError(f"`{one}` ({first}) and `{other}` ({second}) must not contain each other")
    for kind, place in copies.items():
        if place.is_dir() and any(place.iterdir()) and not overwrite:
            advice = f"Give another `{kind}`, or `overwrite` to replace the copy in it."
            raise ExistsError("the folder is not empty", where=place, advice=advice)
        if raw is not None:
            check_copy(raw.folder, raw.files, place, overwrite)
        elif data.source is not None and data.is_run:
            check_copy(data.source, (data.source,), place, overwrite)


def read_checked(path: Path) -> dict[str, bool]:
    """Read ids and answers from a table with the columns id and right (or is_mismatch); skip rows without an answer.

    Raises:
        DataError: The columns are missing, or a pair has two answers.
    """
    table = open_table(path)
    names = {name.lower(): name for name in table.columns}
    key = "right" if "right" in names else "is_mismatch"
    if "id" not in names or key not in names:
        raise ShapeError(table.found(), where=path, expected="the columns id and right (yes or no)")
    answers: dict[str, bool] = {}
    for ids, cells in table.batches([names["id"], names[key]]):
        for name, cell in zip(ids.to_pylist(), cells.to_pylist(), strict=True):
            if not str(cell).strip():
                continue
            right = read_answer(cell, names[key], path, name)
            if answers.setdefault(original(str(name)), right) != right:  # the id may come from pairs.csv
                what = f"the pair {name!r} is right in one row and wrong in another"
                raise DataError(what, where=path, advice="Keep one of them.")
    return answers


def read_answer(cell: str, column: str, where: Path, name: str = "") -> bool:
    """Whether a pair matches, by a cell of the column right (yes: it matches) or is_mismatch.

    Raises:
        DataError: The cell is not an answer.
    """
    word = str(cell).strip().lower()
    if word not in _YES + _NO + _PLAIN:
        about = f" for {name!r}" if name else ""
        raise DataError(f"{cell!r}{about} in the column {column}", where=where, expected="yes or no")
    # "wrong" means mismatched, whatever the name of the column.
    return word == "right" if word in _PLAIN else (word in _YES) == (column.lower() != "is_mismatch")
