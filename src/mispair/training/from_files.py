"""Train from images and captions, or from a review: make the features for `mispair train --data`.

    RUN/audit/           the audit of all pairs, as `mispair audit` writes it; `mispair review RUN/audit` opens it
    RUN/features/        train, dev and test in the clip-retrieval layout, or with a grid in the SCAN layout
    RUN/made_from.json inputs and settings of the features

All are made once; an interrupted training resumes from them. A training from a review applies the decisions and does
not repeat the audit.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from rich.console import Console

from mispair import methods
from mispair.auditing.audit import Settings, check_rows
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import CSV, REPORT, SUMMARY
from mispair.auditing.summary import NOTHING_IN_COMMON, AuditSummary
from mispair.compute.devices import pick_device
from mispair.compute.distributed import connect
from mispair.config import Config
from mispair.encoders.cache import writable_cache
from mispair.encoders.encoders import GridEncoder, image_encoder
from mispair.encoders.options import FileOptions, Files
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL
from mispair.encoders.regions import encode_regions
from mispair.errors import ChangedError, ConflictError, DamagedError, DataError, ExistsError, TooFewError
from mispair.models import FOR_SETS, FOR_VECTORS, find
from mispair.pairs.audited import AuditColumns
from mispair.pairs.edits import Edits
from mispair.pairs.layouts import clip_retrieval, opening
from mispair.pairs.layouts.copies import is_copied, write_copy
from mispair.pairs.origin import note_source
from mispair.pairs.source import Source
from mispair.pairs.splits import SplitRule, read_rows
from mispair.reviewing.reviewed import Reviewed, is_audit
from mispair.support.files import Json, read_json, write_atomically
from mispair.support.formatting import listed
from mispair.support.owned_folder import changes
from mispair.training.defaults import check_method
from mispair.training.fit import TrainedRun, advising_no_audit, audit_splits, save_columns, train_and_test
from mispair.training.run_folder import AUDITED, MADE_FROM_FILES, check_place, read_result
from mispair.training.settings import override
from mispair.training.splits import load_splits
from mispair.training.trainer import check_ranks
from mispair.training.vectors import write_vectors

FEATURES, AUDIT_FOLDER, MADE_FROM = MADE_FROM_FILES
RECOMMENDED = "mend"
ENCODING, NO_IMAGES = ("grid", "pca"), "for image files, but {} holds features"
SPLITTING, HAS_SPLITS = ("dev", "test"), "for data without splits, but {} is trained on as it is"


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
        known = [self.pairs.fingerprint()] if review is None else [*review.request.values()]
        return {
            "images": None if files.images is None else str(files.images.resolve()),
            **{name: getattr(files, name) for name in ("allow_outside", "image_model", "text_model", "grid", "pca")},
            **self.splits.request(),
            "rows": len(self.trained),
            "the source" if review is None else "the audit or the decisions": known,
        }


def train_from_files(
    source: Path,
    config: Config,
    out: Path,
    console: Console | None = None,
    given: Collection[str] = (),
    *,
    files: Files | None = None,
) -> TrainedRun:
    """Train and test a model from files; the same call resumes after an interruption.

    The source is any input of `mispair audit`, or its output: then the pairs as a review leaves them. Settings that are
    not `given` follow the data and the device; the method is then the recommended one.
    """
    files = files or Files()
    if "method" not in given:
        config = replace(config, method=RECOMMENDED)
    with connect(config.device) as ranks:
        check_ranks(config, ranks)
        check_method(config, given)
        pick_device(config.device)
        ranks.by_first(lambda: check_place(out))
        work = _open_review(source, files, config) if is_audit(source) else _open(source, files, config)
        if work is None:
            ranks.by_first(lambda: _check_same(out, {}))
            model = _model_for(config, given, source, grid=False)
            config = opening.with_absolute_paths(override(config, {"data": str(source), **model}))
            return train_and_test(config, out, console, given)
        model = _model_for(config, given, work.data_set, grid=files.grid is not None)
        config = override(config, {"data": str((out / FEATURES).resolve()), **model})
        request = work.request()
        ranks.by_first(lambda: _check_same(out, request))
        if ranks.by_first(lambda: read_result(out)) is None:
            ranks.by_first(lambda: _prepare(work, request, config, out, console))
        return train_and_test(config, out, console, given)


def _open(source: Path, files: Files, config: Config) -> Work | None:
    """Open the source as `mispair audit` does; None for a data set that training reads directly."""
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


def _model_for(config: Config, given: Collection[str], data_set: Path | None, *, grid: bool) -> dict[str, str]:
    """Choose the model for a data set or for new features, unless it was given."""
    if data_set is not None:
        return {} if "model" in given or opening.layout(data_set) != "vectors" else {"model": FOR_VECTORS}
    if not grid:
        found = "images and captions are vectors without `grid`"
        opening.refuse_for_vectors(found, config.vocab, config.dev_protocol, config.captions_per_image)
    if "model" not in given:
        return {"model": FOR_SETS if grid else FOR_VECTORS}
    if find(config.model).takes_vectors == grid:
        how = "Leave out `grid`" if grid else "Give `grid=6` for region features"
        what = "a model for vectors" if grid else "a model for region features"
        raise ConflictError(f"{config.model}, {what}", where="model", advice=f"{how}, or give another `model`.")
    return {}


def _check_same(out: Path, request: Mapping[str, Json]) -> None:
    """Raise if the features of a run have another source, even in a finished run."""
    found, wanted = read_json(out / MADE_FROM), json.loads(json.dumps(request))
    if (out / FEATURES).exists() and found != wanted:
        different = changes(found if isinstance(found, dict) else {}, wanted)
        what = f"a training on other files or decisions, or with other encoders ({different})"
        raise ChangedError(what, where=out, advice="Give another `out`.")


def _prepare(work: Work, request: Mapping[str, Json], config: Config, out: Path, console: Console | None) -> None:
    """Audit the pairs, write the features of each split, and keep the audit columns."""
    review, edits, audit = work.review, work.edits, out / AUDIT_FOLDER
    audits = config.audit or methods.select(config).audits
    encoder = None if work.pairs.is_encoded else _grid_encoder(work, config)
    if review is not None:
        audit = work.source
        if console is not None:
            console.print(review.sentence(), soft_wrap=True)
    elif audits and not work.pairs.is_encoded:
        with advising_no_audit(config):
            check_rows(work.trained, Settings(device=config.device))
    with _refusing_other_files(out):
        write_atomically(out / MADE_FROM, json.dumps(dict(request)).encode())
        if audits and review is None:
            settings = Settings(device=config.device)
            audit_path(work.data, audit, settings, console=console, command="mispair train")
        if review is not None and edits is not None and work.data_set is not None:
            if not is_copied(out / FEATURES, request):
                write_copy(work.pairs, edits, out / FEATURES, request=request)
        elif encoder is not None:
            place, pca = writable_cache(work.files.cache), work.files.pca
            encode_regions(work.trained, out / FEATURES, encoder, place, pca=pca, splits=work.splits, console=console)
        else:
            encoded = work.data.encoded(work.trained, config.device, console)
            write_vectors(encoded, out / FEATURES, work.splits, request)
    note_source(out / FEATURES, work.source if review is None else Path(work.pairs.name))
    if console is not None:
        _note(work, audit if audits or review is not None else None, out, console)
    if audits:
        save_columns(out, _of_splits(work, work.columns or AuditColumns.read(audit), config, out, console))


def _grid_encoder(work: Work, config: Config) -> GridEncoder | None:
    """Return the encoder of region features, if any; raise for invalid splits before anything is encoded."""
    names = work.splits.of(work.trained)
    if "train" not in names:
        raise TooFewError(
            f"all pairs are of the split {listed(sorted(set(names)))}, and none is left to train",
            where=work.pairs.name,
            advice="Correct the column split, or name it differently.",
        )
    grid = work.files.grid
    return None if grid is None else GridEncoder(image_encoder(work.files.image_model, config.device), grid)


@contextmanager
def _refusing_other_files(out: Path) -> Iterator[None]:
    try:
        yield
    except (ChangedError, DamagedError, ExistsError) as error:
        if error.where is None or not Path(error.where).is_relative_to(out):
            raise
        raise type(error)(error.what, where=error.where, advice="Give another `out`") from None  # there is no overwrite


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


def _note(work: Work, audit: Path | None, out: Path, console: Console) -> None:
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
    if work.review is None:
        columns = AuditColumns.read(audit)
        console.print(
            f"The audit flags {columns.flagged.sum():,} of {len(columns):,} pairs: {audit / REPORT}, or `mispair "
            f"review {shlex.quote(str(audit))}`",
            soft_wrap=True,
        )
    if AuditSummary.read(audit / SUMMARY).nothing_in_common:
        console.print(f"Note: {NOTHING_IN_COMMON}.", soft_wrap=True)
