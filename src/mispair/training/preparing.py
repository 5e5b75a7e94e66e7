"""Make the features of a training from images and captions, or from a review of an audit.

    RUN/audit/           the audit of all pairs, as `mispair audit` writes it; `mispair review RUN/audit` opens it
    RUN/features/        train, dev and test in the clip-retrieval layout, or with a grid in the SCAN layout
    RUN/made_from.json   inputs and settings of the features

All are made once; an interrupted training resumes from them. A training from a review applies the decisions and does
not repeat the audit.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from rich.console import Console

from mispair import methods
from mispair.auditing.audit import Settings, check_rows
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import CSV, REPORT, SUMMARY
from mispair.auditing.summary import NOTHING_IN_COMMON, AuditSummary
from mispair.config import Config
from mispair.encoders.cache import writable_cache
from mispair.encoders.encoders import GridEncoder, image_encoder
from mispair.encoders.options import FileOptions, Files
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL
from mispair.encoders.regions import encode_regions
from mispair.errors import ChangedError, ConflictError, DamagedError, DataError, ExistsError, TooFewError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.edits import Edits
from mispair.pairs.layouts import clip_retrieval, opening
from mispair.pairs.layouts.copies import is_copied, write_copy
from mispair.pairs.npy import write_rows
from mispair.pairs.origin import MARK, note_source
from mispair.pairs.source import Source
from mispair.pairs.splits import SplitRule, read_rows, save_rows
from mispair.reviewing.reviewed import Reviewed, is_audit
from mispair.support.arrays import IntArray
from mispair.support.files import Json, replacing, write_atomically
from mispair.support.formatting import listed, plain
from mispair.support.owned_folder import FolderKind, OwnedFolder
from mispair.training.fit import advising_no_audit, audit_splits, save_columns
from mispair.training.run_folder import AUDITED, MADE_FROM_FILES
from mispair.training.splits import load_splits

FEATURES, AUDIT_FOLDER, MADE_FROM = MADE_FROM_FILES
ENCODING, NO_IMAGES = ("grid", "pca"), "for image files, but {} holds features"
SPLITTING, HAS_SPLITS = ("dev", "test"), "for data without splits, but {} is trained on as it is"
KIND = FolderKind("features", MARK, ["*_rows.npy", "*/img_emb/*.npy", "*/text_emb/*.npy", "*/metadata/*.parquet"])
BLOCK = 4096  # rows that are read at a time


@dataclass(frozen=True)
class Work:
    """Input of the features: a source, or the audit of one with its decisions, edits and edited columns."""

    source: Path
    files: Files
    data: AuditInput
    pairs: Source
    review: Reviewed | None = None
    edits: Edits | None = None
    columns: AuditColumns | None = None

    @property
    def splits(self) -> SplitRule:
        return SplitRule(self.files.dev, self.files.test)

    @property
    def data_set(self) -> Path | None:
        """The audited folder, if training can read it directly."""
        known = self.review is not None and self.pairs.layout in ("clip", "precomp")
        return self.data.source if known else None

    @cached_property
    def trained(self) -> Source:
        """The pairs after the decisions."""
        return self.pairs if self.edits is None else self.pairs.edited(self.edits)

    def request(self) -> dict[str, Json]:
        """Return everything the features depend on; see `owned_folder.Mark`."""
        files, review = self.files, self.review
        known: list[Json] = [self.pairs.fingerprint(), *self.pairs.image_state()]
        if review is not None:
            known = [*review.request.values()]
        return {
            "images": None if files.images is None else str(files.images.resolve()),
            **{name: getattr(files, name) for name in ("allow_outside", "image_model", "text_model", "grid", "pca")},
            **self.splits.request(),
            "rows": len(self.trained),
            "the source" if review is None else "the audit or the decisions": known,
        }


def open_work(source: Path, files: Files, config: Config) -> Work | None:
    """Open an audit, or a source as `mispair audit` does; None for a data set that training reads directly."""
    if is_audit(source):
        return _open_review(source, files, config)
    data = AuditInput(source=source, **{field.name: getattr(files, field.name) for field in fields(FileOptions)})
    data.check()
    if not data.is_raw:
        _check_not_given(files, ENCODING, NO_IMAGES.format(source))
        if opening.is_data_set(source):
            _check_not_given(files, SPLITTING, HAS_SPLITS.format(source))
            return None
    return Work(source, files, data, data.open(config.device))


def _open_review(source: Path, files: Files, config: Config) -> Work:
    """Open audited pairs with the decisions applied.

    Methods for flagged pairs get the items without a partner as flagged; others train without them.
    """
    if files.columns:
        what = f"names of columns, but the audit {source} knows its columns"
        raise ConflictError(what, where="columns", advice="Leave them out.")
    review = Reviewed.read(source, files.images)
    if review.data.is_run:
        raise DataError(
            f"{source}: this is an audit of the training pairs of {review.data.source}, by its networks. To train, "
            "audit the data itself."
        )
    pairs = review.open(config.device)
    if pairs.is_encoded and pairs.split not in (None, "train"):
        raise DataError(f"{source}: this is an audit of the split {pairs.split}; training needs one of train.")
    edits, _ = review.plan(pairs)
    columns = review.columns(edits)
    if methods.select(config).audits:
        edits = edits.with_unmatched(pairs.groups)
    audited = review.data.models
    image_model = (files.image_model == IMAGE_MODEL and audited.image_model) or files.image_model
    text_model = (files.text_model == TEXT_MODEL and audited.text_model) or files.text_model
    files = replace(files, image_model=image_model, text_model=text_model)
    data = replace(review.data, image_model=image_model, text_model=text_model, cache=files.cache)
    work = Work(source, files, data, pairs, review, edits, columns)
    if pairs.is_encoded:
        _check_not_given(files, ENCODING, NO_IMAGES.format(source))
        if work.data_set is not None:
            _check_not_given(files, SPLITTING, HAS_SPLITS.format(source))
        if pairs.layout != "precomp":
            pairs.check_no_rewritten(edits)
    return work


def _check_not_given(files: Files, names: Collection[str], what: str) -> None:
    for name in names:
        if getattr(files, name) is not None:
            raise ConflictError(what, where=name, advice="Leave it out.")


def prepare(work: Work, request: Mapping[str, Json], config: Config, out: Path, console: Console | None) -> None:
    """Audit the pairs, write the features of each split, and keep the audit columns."""
    audits, settings = config.audit or methods.select(config).audits, Settings(device=config.device)
    audit = work.source if work.review is not None else out / AUDIT_FOLDER if audits else None
    encoder = None if work.pairs.is_encoded else _grid_encoder(work, config)
    if work.review is not None:
        if console is not None:
            console.print(work.review.sentence(), soft_wrap=True)
    elif audits and not work.pairs.is_encoded:
        with advising_no_audit(config):
            check_rows(work.trained, settings)
    with _refusing_other_files(out):
        write_atomically(out / MADE_FROM, json.dumps(dict(request)).encode())
        if work.review is None and audit is not None:
            audit_path(work.data, audit, settings, console=console, command="mispair train")
        _write_features(work, request, encoder, config, out / FEATURES, console)
    note_source(out / FEATURES, work.source if work.review is None else Path(work.pairs.name))
    columns = AuditColumns.read(audit) if work.review is None and audit is not None else work.columns
    if console is not None:
        _note(work, audit, columns, out, console)
    if audits and columns is not None:
        save_columns(out, _of_splits(work, columns, config, out, console))


def _write_features(
    work: Work,
    request: Mapping[str, Json],
    encoder: GridEncoder | None,
    config: Config,
    out: Path,
    console: Console | None,
) -> None:
    if work.data_set is not None and work.edits is not None:
        if not is_copied(out, request):
            write_copy(work.pairs, work.edits, out, request=request)
    elif encoder is not None:
        place, pca = writable_cache(work.files.cache), work.files.pca
        encode_regions(work.trained, out, encoder, place, pca=pca, splits=work.splits, console=console)
    else:
        write_vectors(work.data.encoded(work.trained, config.device, console), out, work.splits, request)


def _grid_encoder(work: Work, config: Config) -> GridEncoder | None:
    """Return the encoder of region features, if any; raise for invalid splits before anything is encoded."""
    names = work.splits.of(work.trained)
    if "train" not in names:
        what = f"all pairs are of the split {listed(sorted(set(names)))}, and none is left to train"
        raise TooFewError(what, where=work.pairs.name, advice="Correct the column split, or name it differently.")
    grid = work.files.grid
    return None if grid is None else GridEncoder(image_encoder(work.files.image_model, config.device), grid)


@contextmanager
def _refusing_other_files(out: Path) -> Iterator[None]:
    try:
        yield
    except (ChangedError, DamagedError, ExistsError) as error:
        if error.where is not None and Path(error.where).is_relative_to(out):
            error.advice = "Give another `out`"  # there is no overwrite
        raise


def _of_splits(
    work: Work, columns: AuditColumns, config: Config, out: Path, console: Console | None
) -> dict[str, AuditColumns]:
    """Return the audit columns of each split by file name; dev and test are audited if they were not."""
    names = dict(zip(clip_retrieval.SPLITS, AUDITED, strict=True))
    if work.edits is not None:
        columns = columns.take(work.pairs.order(work.edits))
    if work.data_set is None:
        return {names[split]: columns.take(rows) for split, rows in read_rows(out / FEATURES).items()}
    if work.pairs.split is None:
        first = clip_retrieval.open_split(out / FEATURES).first_rows
        return {name: columns.take(clip_retrieval.cut(first, split)) for split, name in names.items()}
    parts = load_splits(config).parts
    return {**(audit_splits(parts, config, console) if len(parts) > 1 else {}), AUDITED[0]: columns}


def _note(work: Work, audit: Path | None, columns: AuditColumns | None, out: Path, console: Console) -> None:
    """Report unreadable pairs, left out of all splits, and the findings of the audit."""
    rows = read_rows(out / FEATURES).values()
    total = len(work.trained)
    if work.data_set is None and (left_out := total - sum(map(len, rows))):
        where = "`mispair audit`" if audit is None else f"the column status of {audit / CSV}"
        console.print(
            f"Left out, because they cannot be read: {left_out:,} of {total:,} pairs; {where} says why.", soft_wrap=True
        )
    if audit is None or (work.review is not None and work.review.decided):
        return
    if work.review is None and columns is not None:
        console.print(
            f"The audit flags {columns.flagged.sum():,} of {len(columns):,} pairs: {audit / REPORT}, or `mispair "
            f"review {shlex.quote(str(audit))}`",
            soft_wrap=True,
        )
    if AuditSummary.read(audit / SUMMARY).nothing_in_common:
        console.print(f"Note: {NOTHING_IN_COMMON}.", soft_wrap=True)


def write_vectors(source: Source, out: Path, rule: SplitRule, request: Mapping[str, Json]) -> None:
    """Write the vectors of each split, without unreadable rows; they depend on `request`."""
    encoded = source.layout == "raw"
    # Under the names by which `Origin.read` knows the encoders.
    models = {f"{side} model": request[f"{side}_model"] if encoded else None for side in ("image", "text")}
    with OwnedFolder(out, KIND, {**request, **models}) as folder:
        if folder.finished:
            return
        folder.begin()
        first = source.first_rows
        names = rule.of(source) if encoded else rule.random(first, source.ids(np.unique(first)), source.name)
        good = _readable(source)
        for split in dict.fromkeys(names):
            rows = good[[names[row] == split for row in good]]
            if len(rows):
                for stem, side in (("img_emb", source.left), ("text_emb", source.right)):
                    kind = np.float16 if encoded else np.float32  # as the cache has them
                    write_rows(out / split / stem / f"{stem}_0.npy", partial(side.gather, dtype=kind), rows)
                _write_metadata(out / split / "metadata/metadata_0.parquet", source, rows)
                save_rows(out, split, rows)
        folder.finish()


def _readable(source: Source) -> IntArray:
    """Return the rows with two finite, nonzero vectors."""
    good = np.ones(len(source), dtype=bool)
    good[source.known_rows] = False
    for start in range(0, len(source), BLOCK):
        rows = slice(start, start + BLOCK)
        for side in source.block(start, min(start + BLOCK, len(source))):
            good[rows] &= np.isfinite(side).all(axis=1) & side.any(axis=1)
    if not good.any():
        what = f"none of {len(source):,} pairs can be read"
        raise TooFewError(what, where=source.name, advice="See the report of the audit.")
    return np.flatnonzero(good)


def _image_names(source: Source, rows: IntArray) -> list[str]:
    """Name each image by its own name, or by the first id where names inside other files collide."""
    names = source.image_texts(rows)
    if source.layout != "raw":
        return names
    first = source.first_rows[rows]
    images = set(zip(names, first.tolist(), strict=True))
    return names if len(images) == len(set(names)) == len(np.unique(first)) else source.ids(first)


def _write_metadata(path: Path, source: Source, rows: IntArray) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"id": source.ids(rows)}
    if source.has_images:
        columns["image_path"] = [
            str(file.resolve()) if source.layout == "raw" and (file := source.image_file(row)) is not None else name
            for row, name in zip(rows.tolist(), _image_names(source, rows), strict=True)
        ]
    if source.has_texts:
        columns["caption"] = source.texts(rows)
    table = pyarrow.table({name: pyarrow.array(map(plain, texts), pyarrow.string()) for name, texts in columns.items()})
    with replacing(path) as written:
        pyarrow.parquet.write_table(table, written)
