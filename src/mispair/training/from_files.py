"""Training from images and captions: encodes them, audits them, and writes what `mispair train --data` reads.

    RUN/audit/       the audit of all pairs, as `mispair audit` writes it; `mispair review RUN/audit` opens it
    RUN/features/    train, dev and test in the clip-retrieval layout, or with a grid in the SCAN layout

All of it is made once: an interrupted training goes on from there.

Training from a review: its pairs are taken as the decisions leave them, and the audit is not repeated. RUN/features/ is
then made for vectors and features as well, and RUN/review.json says which audit and which decisions it is of.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from mispair import methods
from mispair.auditing.audit import Settings, check_rows, score_splits
from mispair.auditing.findings import NOTHING_IN_COMMON, AuditSummary
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import CSV, SUMMARY
from mispair.compute.devices import pick_device
from mispair.compute.distributed import Ranks, connect
from mispair.config import Config
from mispair.encoders.cache import writable_cache
from mispair.encoders.encode import Encoders
from mispair.encoders.encoders import GridEncoder, image_encoder
from mispair.encoders.regions import SplitRule, encode_regions, read_rows, save_rows
from mispair.errors import ChangedError, ConfigError, DamagedError, DataError, ExistsError
from mispair.models import FOR_SETS, FOR_VECTORS, find
from mispair.pairs.audited import AuditColumns
from mispair.pairs.copying import write_rows
from mispair.pairs.edits import Edits
from mispair.pairs.layouts import clip_retrieval, loading
from mispair.pairs.layouts.copies import is_copied, write_copy
from mispair.pairs.origin import MARK, note_source, noted_request
from mispair.pairs.pairs import IntArray
from mispair.pairs.source import Source
from mispair.pairs.tables import Roles
from mispair.reviewing.reviewed import ReviewedPairs, is_audit, read_review
from mispair.support.files import Json, read_json, replacing, write_atomically
from mispair.support.formatting import listed, plain
from mispair.support.owned_folder import FolderKind, OwnedFolder, changes
from mispair.training.defaults import check_method
from mispair.training.fit import TrainedRun, advising_no_audit, train_and_test
from mispair.training.run_folder import AUDITED, MADE_FROM_FILES, check_place, read_result
from mispair.training.settings import override
from mispair.training.splits import load_splits
from mispair.training.trainer import check_ranks

FEATURES, AUDIT_FOLDER, REVIEW = MADE_FROM_FILES
SPLITS = ("train", "dev", "test")
VECTORS = FolderKind("features", MARK, ["*_rows.npy", "*/img_emb/*.npy", "*/text_emb/*.npy", "*/metadata/*.parquet"])
RECOMMENDED = "mend"
BLOCK = 4096  # rows that are copied at a time


@dataclass(frozen=True)
class Files:
    """Images and captions, and how to make features of them.

    Attributes:
        source: Whatever `mispair audit` reads, or what it has written: then the pairs as a review leaves them.
        images: Folder that the image paths start from.
        columns: Columns of a table that have no usual names.
        encoders: Names of the encoders.
        cache: Folder of encodings; that of the user by default.
        grid: Cells a side, for region features and words instead of vectors.
        pca: Numbers a cell.
        splits: Which images validate and test.
        allow_outside: Read images outside their folder too.
    """

    source: Path
    images: Path | None = None
    columns: Roles = field(default_factory=dict)
    encoders: Encoders = field(default_factory=Encoders)
    cache: Path | None = None
    grid: int | None = None
    pca: int | None = None
    splits: SplitRule = field(default_factory=SplitRule)
    allow_outside: bool = False


def train_from_files(
    files: Files, config: Config, out: Path, console: Console | None = None, given: Collection[str] = ()
) -> TrainedRun:
    """Everything from files to a tested model; the same call goes on where an earlier one stopped.

    Args:
        files: Images and captions, or anything else that `mispair audit` reads.
        config: Settings of the training. Those that are not `given` follow the data and the device; the method is then
            the recommended one.
        out: Run folder.
        console: Where to show progress.
        given: Names of the settings that were chosen.

    Raises:
        ConfigError: The settings do not go together, or an encoder is missing.
        DataError: The files cannot be read or trained on.
    """
    if "method" not in given:
        config = replace(config, method=RECOMMENDED)
    with connect(config.device) as ranks:
        check_ranks(config, ranks)
        check_method(config, given)
        return _train_from_files(files, config, out, console, given, ranks)


def _train_from_files(
    files: Files, config: Config, out: Path, console: Console | None, given: Collection[str], ranks: Ranks
) -> TrainedRun:
    pick_device(config.device)
    ranks.by_first(lambda: check_place(out))
    if is_audit(files.source):
        return _train_from_review(files, config, out, console, given, ranks)
    ranks.by_first(lambda: _refuse_other_review(out, None))
    data = AuditInput(
        files.source,
        images=files.images,
        image_column=files.columns.get("image_path"),
        caption_column=files.columns.get("caption"),
        id_column=files.columns.get("id"),
        image_model=files.encoders.image_model,
        text_model=files.encoders.text_model,
        cache=files.cache,
        allow_outside=files.allow_outside,
    )
    data.check()
    raw = data.open_raw()
    if raw is None and _is_data_set(files.source):  # features and captions, or vectors: as they are
        _refuse_encoding(files)
        _refuse_splits(files)
        config = override(config, {"data": str(files.source.resolve()), **_model(given, files.source)})
        return train_and_test(config, out, console, given)
    if raw is None:
        _refuse_encoding(files)
    features = str((out / FEATURES).resolve())
    config = override(config, {"data": features, "model": _fitting_model(config, given, files.grid is not None)})
    request = _request(files, data.open(None, config.device, console) if raw is None else raw)
    if ranks.by_first(lambda: read_result(out)) is None:
        ranks.by_first(lambda: _prepare(files, data, raw, request, config, out, console))
    ranks.by_first(lambda: _refuse_other_files(out, request))
    return train_and_test(config, out, console, given)


def _train_from_review(
    files: Files, config: Config, out: Path, console: Console | None, given: Collection[str], ranks: Ranks
) -> TrainedRun:
    """Trains on audited pairs as the decisions on them leave them.

    A method that makes use of flagged pairs gets what is left unmatched as such; others train without it.
    """
    if files.columns:
        raise ConfigError(f"{files.source} is an audit, which knows its columns; leave out the names of columns.")
    review = read_review(files.source, files.images, config.device, console)
    files = replace(files, encoders=_encoders(files.encoders, review.data.encoders))
    uses_unmatched = methods.select(config).audits
    edits = review.edits_with_unmatched if uses_unmatched else review.edits
    request = {**review.request, "unmatched": uses_unmatched}
    if review.pairs.is_encoded:
        _refuse_encoding(files)
        if review.data_set is not None:
            _refuse_splits(files)
        if review.pairs.layout != "precomp":
            review.pairs.check_no_rewritten(edits)
    model = (
        _model(given, review.data_set)
        if review.data_set is not None
        else {"model": _fitting_model(config, given, files.grid is not None)}
    )
    config = override(config, {"data": str((out / FEATURES).resolve()), **model})
    ranks.by_first(lambda: _refuse_other_review(out, request))
    if ranks.by_first(lambda: read_result(out)) is None:
        ranks.by_first(lambda: _prepare_review(files, review, edits, request, config, out, console))
    ranks.by_first(lambda: _refuse_other_files(out, _request(files)))
    return train_and_test(config, out, console, given)


def _encoders(given: Encoders, audited: Encoders) -> Encoders:
    """Those of the audit, unless others are given."""
    usual = Encoders()
    image = audited.image_model if given.image_model == usual.image_model else ""
    text = audited.text_model if given.text_model == usual.text_model else ""
    return replace(given, image_model=image or given.image_model, text_model=text or given.text_model)


def _is_data_set(source: Path) -> bool:
    try:
        loading.layout(source)
    except DataError:
        return False
    return True


def _model(given: Collection[str], folder: Path) -> dict[str, str]:
    return {} if "model" in given or loading.layout(folder) != "vectors" else {"model": FOR_VECTORS}


def _refuse_encoding(files: Files) -> None:
    if files.grid is not None or files.pca is not None:
        raise ConfigError(f"--grid and --pca are for image files, but {files.source} holds features; leave them out.")


def _refuse_splits(files: Files) -> None:
    if files.splits != SplitRule():
        raise ConfigError(
            f"--dev and --test are for data without splits, but {files.source} is trained on as it is; leave them out."
        )


def _request(files: Files, pairs: Source | None = None) -> dict[str, Json]:
    """What the features of a training depend on, as far as it is known before anything is encoded.

    Args:
        files: What is trained on.
        pairs: Its pairs, unless they are those of a review, which has a file of its own.
    """
    of_pairs: dict[str, Json] = {} if pairs is None else {"rows": len(pairs), "the source": [pairs.fingerprint()]}
    return {
        "--images": None if files.images is None else str(files.images.resolve()),
        "--allow-outside": files.allow_outside,
        "--image-model": files.encoders.image_model,
        "--text-model": files.encoders.text_model,
        "--grid": files.grid,
        "--pca": files.pca,
        **files.splits.request(),
        **of_pairs,
    }


def _refuse_other_files(out: Path, request: Mapping[str, Json]) -> None:
    """Refuses a run that has ended with other files, before its result is taken for theirs."""
    found = noted_request(out / FEATURES)
    if found is not None and found != request:
        raise DataError(
            f"{out} holds a training on other files or with other encoders ({changes(found, request)}); give another "
            "--out."
        )


def _fitting_model(config: Config, given: Collection[str], grid: bool) -> str:
    if not grid:
        found = "images and captions are vectors without `grid`"
        loading.refuse_for_vectors(found, config.vocab, config.dev_protocol, config.captions_per_image)
    if "model" not in given:
        return FOR_SETS if grid else FOR_VECTORS
    if find(config.model).takes_vectors == grid:
        how = "leave out --grid" if grid else "add --grid 6 for region features"
        raise ConfigError(f"--model {config.model} does not fit; {how}, or give another --model.")
    return config.model


def _prepare(
    files: Files,
    data: AuditInput,
    raw: Source | None,
    request: Mapping[str, Json],
    config: Config,
    out: Path,
    console: Console | None,
) -> None:
    """Audits the pairs, writes the features of each split, and keeps the match scores for the training."""
    audits = config.audit or methods.select(config).audits
    settings = Settings(device=config.device)
    if raw is not None and audits:
        with advising_no_audit(config):
            check_rows(raw, settings)
    encoder = _grid_encoder(files, raw)
    with _refusing_other_files(out):
        if audits:
            audit_path(data, out / AUDIT_FOLDER, settings, console=console, command="mispair train")
        _write_features(files, data, raw, encoder, config, out, console)
    note_source(out / FEATURES, files.source, request)
    pairs = request["rows"]
    assert isinstance(pairs, int)
    _note_left_out(out, pairs, out / AUDIT_FOLDER if audits else None, console)
    if audits:
        _keep_audited(out, console)


def _note_left_out(out: Path, pairs: int, audit: Path | None, console: Console | None) -> None:
    """Says how many pairs are in no split, because their image or caption is missing or damaged."""
    left_out = pairs - sum(map(len, read_rows(out / FEATURES).values()))
    if left_out and console is not None:
        where = "`mispair audit`" if audit is None else f"the column status of {audit / CSV}"
        console.print(
            f"Left out, because they cannot be read: {left_out:,} of {pairs:,} pairs; {where} says why.", soft_wrap=True
        )


def _prepare_review(
    files: Files,
    review: ReviewedPairs,
    edits: Edits,
    request: Mapping[str, Json],
    config: Config,
    out: Path,
    console: Console | None,
) -> None:
    """Writes the features of each split after the edits, and keeps the match scores for the training."""
    pairs = review.pairs
    edited = pairs.edited(edits)
    raw = None if edited.is_encoded else edited
    encoder = _grid_encoder(files, raw)
    write_atomically(out / REVIEW, json.dumps(dict(request)).encode())
    if console is not None:
        console.print(review.sentence(), soft_wrap=True)
        if not review.decided:
            _note_nothing_in_common(files.source, console)
    audits = config.audit or methods.select(config).audits
    if review.data_set is not None:
        if not is_copied(out / FEATURES, request):
            write_copy(pairs, edits, out / FEATURES, request=request)
        note_source(out / FEATURES, Path(pairs.name), _request(files))
        if audits:
            _keep_columns(out, _data_set_columns(pairs, edits, review.columns, config, console))
        return
    with _refusing_other_files(out):
        if raw is None:
            _write_vectors(edited, files, out / FEATURES)
        else:
            image_model, text_model = files.encoders.image_model, files.encoders.text_model
            data = replace(review.data, image_model=image_model, text_model=text_model, cache=files.cache)
            _write_features(files, data, raw, encoder, config, out, console)
    note_source(out / FEATURES, Path(pairs.name), _request(files))
    _note_left_out(out, len(edits.rows), files.source, console)
    if audits:
        _keep_columns_of_rows(out, review.columns.take(edits.rows))


def _refuse_other_review(out: Path, request: Mapping[str, Json] | None) -> None:
    """Refuses to go on with a run that began with other decisions, or with them where there are none now."""
    found = read_json(out / REVIEW)
    if found != request and (found is not None or (out / FEATURES).exists()):
        raise DataError(f"{out} holds a training on other decisions or on another audit; give another --out.")


def _data_set_columns(
    audited: Source, edits: Edits, columns: AuditColumns, config: Config, console: Console | None
) -> dict[str, AuditColumns]:
    """The audit of each split of an edited data set; dev and test are audited where they were not yet."""
    columns = columns.take(audited.order(edits))
    if audited.split is None:
        first = clip_retrieval.open_clip(Path(config.data)).first_rows
        return {split: columns.take(clip_retrieval.cut(first, split)) for split in SPLITS}
    splits = load_splits(config)
    others = {} if splits.dev is None else {"dev": splits.dev}
    if splits.tested is not splits.train and splits.tested is not splits.dev:
        others["test"] = splits.tested
    found = score_splits([splits.train, *others.values()], config.device, console)[1:] if others else ()
    scored = zip(others, found, strict=True)
    return {"train": columns} | {name: AuditColumns.of_scores(one) for name, one in scored if one is not None}


def _grid_encoder(files: Files, raw: Source | None) -> GridEncoder | None:
    """What makes region features, if they are asked for; wrong splits are refused before anything is encoded."""
    if raw is None:
        return None
    if "train" not in (names := files.splits.of(raw)):
        raise DataError(
            f"{raw.name}: all pairs are of the split {listed(sorted(set(names)))}, and none is left to train; correct "
            "the column split, or name it differently."
        )
    if files.grid is None:
        return None
    return GridEncoder(image_encoder(files.encoders.image_model, files.encoders.device), files.grid)


def _write_features(
    files: Files,
    data: AuditInput,
    raw: Source | None,
    encoder: GridEncoder | None,
    config: Config,
    out: Path,
    console: Console | None,
) -> None:
    """Region features and words, or vectors."""
    if raw is not None and encoder is not None:
        place = writable_cache(files.cache)
        encode_regions(raw, out / FEATURES, encoder, place, pca=files.pca, splits=files.splits, console=console)
    else:
        _write_vectors(data.open(raw, config.device, console), files, out / FEATURES)


@contextmanager
def _refusing_other_files(out: Path) -> Iterator[None]:
    try:
        yield
    except (ChangedError, DamagedError, ExistsError) as error:
        if error.where is None or not Path(error.where).is_relative_to(out):
            raise
        raise type(error)(error.what, where=error.where, advice="Give another `out`") from None  # there is no overwrite


def _keep_audited(out: Path, console: Console | None) -> None:
    """The columns of the audit that the run has made."""
    columns = AuditColumns.read(out / AUDIT_FOLDER)
    _keep_columns_of_rows(out, columns)
    if console is not None:
        console.print(
            f"The audit flags {columns.flagged.sum():,} of {len(columns):,} pairs: "
            f"{out / AUDIT_FOLDER / 'report.html'}, or `mispair review {shlex.quote(str(out / AUDIT_FOLDER))}`",
            soft_wrap=True,
        )
        _note_nothing_in_common(out / AUDIT_FOLDER, console)


def _note_nothing_in_common(audit: Path, console: Console) -> None:
    if AuditSummary.read(audit / SUMMARY).nothing_in_common:
        console.print(f"Note: {NOTHING_IN_COMMON}.", soft_wrap=True)


def _keep_columns_of_rows(out: Path, columns: AuditColumns) -> None:
    _keep_columns(out, {split: columns.take(rows) for split, rows in read_rows(out / FEATURES).items()})


def _keep_columns(out: Path, columns: Mapping[str, AuditColumns]) -> None:
    """The audit of each split, as the training looks for it."""
    for split, name in reversed(list(zip(SPLITS, AUDITED, strict=True))):  # that of the training pairs last
        if split in columns and not (out / name).exists():
            columns[split].save(out / name)


def _write_vectors(source: Source, files: Files, out: Path) -> None:
    """The vectors of each split in the clip-retrieval layout, without rows that could not be read."""
    raw = source if source.layout == "raw" else None
    request: dict[str, Json] = {
        "image model": None if raw is None else files.encoders.image_model,
        "text model": None if raw is None else files.encoders.text_model,
        **files.splits.request(),
        "rows": len(source),
        "the source": [source.fingerprint()],
    }
    with OwnedFolder(out, VECTORS, request) as folder:
        if folder.finished:
            return
        folder.begin()
        names = files.splits.of(raw) if raw is not None else _random_splits(source, files.splits)
        good = _readable(source)
        for split in dict.fromkeys(names):
            rows = good[[names[row] == split for row in good]]
            if len(rows):
                for stem, side in (("img_emb", source.left), ("text_emb", source.right)):
                    kind = np.float32 if raw is None else np.float16  # as the cache has them
                    write_rows(out / split / stem / f"{stem}_0.npy", partial(side.gather, dtype=kind), rows)
                _write_metadata(out / split / "metadata/metadata_0.parquet", source, rows)
                save_rows(out, split, rows)
        folder.finish()


def _random_splits(source: Source, rule: SplitRule) -> list[str]:
    groups = np.arange(len(source)) if source.groups is None else source.groups
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    return rule.random(first[inverse], source.ids(np.unique(first)), source.name)


def _readable(source: Source) -> IntArray:
    """Rows whose two vectors are finite and not zero."""
    good = []
    for start in range(0, len(source), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(source)))
        sides = source.gather(rows)
        usable = [np.isfinite(side).all(axis=1) & side.any(axis=1) for side in sides]
        good += [row for row in rows[usable[0] & usable[1]].tolist() if row not in source.known]
    if not good:
        raise DataError(f"{source.name}: none of {len(source):,} pairs can be read; see the report of the audit.")
    return np.array(good, dtype=np.int64)


def _image_names(source: Source, rows: IntArray) -> list[str]:
    """A name for each image: its own, or the first id that has it where those inside other files are not different."""
    assert source.image_names is not None
    names = source.image_names(rows)
    if source.layout != "raw":
        return names
    first = source.first_rows[rows]
    images = set(zip(names, first.tolist(), strict=True))
    return names if len(images) == len(set(names)) == len(np.unique(first)) else source.ids(first)


def _write_metadata(path: Path, source: Source, rows: IntArray) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"id": source.ids(rows)}
    if source.image_names is not None:
        columns["image_path"] = [
            str(file.resolve()) if source.layout == "raw" and (file := source.image_file(row)) is not None else name
            for row, name in zip(rows.tolist(), _image_names(source, rows), strict=True)
        ]
    if source.has_texts:
        columns["caption"] = source.texts(rows)
    table = pyarrow.table({name: pyarrow.array(map(plain, texts), pyarrow.string()) for name, texts in columns.items()})
    with replacing(path) as written:
        pyarrow.parquet.write_table(table, written)
