"""The command `mispair audit`. Heavy imports wait until it runs."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from mispair.cli.output import console, print_json
from mispair.errors import ConfigError, DataError, StoppedError

if TYPE_CHECKING:
    from rich.console import Console

    from mispair.auditing.sources.source import Source


_YES, _NO, _PLAIN = ("1", "true", "yes"), ("0", "false", "no"), ("right", "wrong")


def audit(
    source: Positional[Path | None] = None,
    *,
    out: Path = Path("audit"),
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
        ids: Table (CSV, TSV, parquet) with a row for each vector: id, caption, image_path, group.
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
    from mispair.auditing.audit import Settings, audit_to_folder, check_free
    from mispair.auditing.clean_copy import check_copy, kept_rows, write_filtered
    from mispair.auditing.folder import SUMMARY, asked, has_copied, has_ended, write_ended
    from mispair.auditing.sources.from_training import is_run

    notes = console()
    pairs_used = None if checked is None else read_checked(checked)
    given = AuditInput(source, left, right, ids, images, split)
    given.check()
    made = [out, _vectors(out), *([] if clean is None else [clean])]
    wanted = asked(given.places(), {**given.settings(), "--joint": joint}, pairs_used, made)
    if not overwrite and has_ended(out, wanted):
        notes.print("This audit has ended already; nothing was computed again.")
        if clean is not None and not has_copied(out, clean):
            _check_clean(clean, out, source, overwrite=False)
            write_filtered(_open(given, out, device, notes, overwrite=False), kept_rows(out), clean)
            write_ended(out, wanted, clean)
        return _tell(json_module.loads((out / SUMMARY).read_bytes()), out, clean, json=json)
    check_free(out, overwrite)  # before hours of encoding
    if clean is not None:
        _check_clean(clean, out, source, overwrite=overwrite)
    joint = joint or (source is not None and is_run(source))
    settings = Settings(joint, pairs_used, device, workers)
    command = shlex.join(["mispair", *sys.argv[1:]])
    try:
        pairs = _open(given, out, device, notes, overwrite=overwrite)
        _check_pictures(pairs, images)
        if clean is not None:
            check_copy(pairs, clean, overwrite)
        result = audit_to_folder(pairs, out, settings, overwrite=overwrite, console=notes, command=command)
    except KeyboardInterrupt:
        raise StoppedError("The audit was stopped; the same command goes on where it was.", 130) from None
    write_ended(out, wanted, None)
    if clean is not None:
        result.write_clean(clean, overwrite=overwrite)
        write_ended(out, wanted, clean)
    return _tell(result.summary, out, clean, json=json)


@dataclass(frozen=True)
class AuditInput:
    """What the command line says about the pairs."""

    source: Path | None
    left: Path | None
    right: Path | None
    ids: Path | None
    images: Path | None
    split: str | None

    def check(self) -> None:
        """Refuses what contradicts itself or is not there.

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

    def places(self) -> dict[str, Path | None]:
        """What is read, by names for messages."""
        return {"the source": self.source, "--left": self.left, "--right": self.right, "--ids": self.ids}

    def settings(self) -> dict[str, object]:
        return {"--images": self.images and self.images.resolve(), "--split": self.split}


def _check_pictures(pairs: Source, images: Path | None) -> None:
    """Refuses a folder of pictures when nothing says which of them belongs to which pair."""
    if images is None or pairs.has_pictures:
        return
    if pairs.table is not None:
        raise ConfigError(
            f"--images {images} is given, but {pairs.table.parts[0].path} does not say which picture belongs to which "
            f"row: {pairs.table.found()}; expected one named image_path, image or path. Add it, or leave --images out."
        )
    where = {
        "arrays": "give a table with a column image_path as --ids",
        "clip": f"add metadata/metadata_0.csv with a column image_path to {pairs.name}",
        "precomp": f"add {pairs.split}_ids.txt with the name of a picture on each line",
        "memory": "its data has no names of pictures",
    }[pairs.layout]
    raise ConfigError(
        f"--images {images} is given, but nothing says which picture belongs to which pair of {pairs.name}; {where}, "
        "or leave --images out."
    )


def _open(given: AuditInput, out: Path, device: str, notes: Console, *, overwrite: bool) -> Source:
    from mispair.auditing.sources.from_training import from_run, is_run
    from mispair.auditing.sources.source import open_arrays, open_source

    source, images, split = given.source, given.images, given.split
    if source is None:
        assert given.left is not None
        assert given.right is not None
        _refuse_split(split)
        return open_arrays(given.left, given.right, given.ids, images)
    if is_run(source):
        _refuse_split(split)
        return from_run(source, device, images)
    if not _is_raw(source):
        return open_source(source, images, split)
    _refuse_split(split)
    from mispair.auditing.encoding.encode import encode_source

    vectors = _vectors(out)
    notes.print(f"Encoding {source} to {vectors}", soft_wrap=True)
    encode_source(source, vectors, images=images, device=device, overwrite=overwrite, console=notes)
    return open_source(vectors, images)


def _refuse_split(split: str | None) -> None:
    if split is not None:
        raise ConfigError("--split is for folders of embeddings or features that have parts; leave it out.")


def _vectors(out: Path) -> Path:
    """Where raw images and captions are encoded to."""
    return Path(f"{out.resolve()}-embeddings")


def _check_clean(clean: Path, out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuses a place for the copy as far as it can be known before anything is encoded."""
    from mispair.auditing.clean_copy import check_planned_copy
    from mispair.auditing.sources.from_training import is_run

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
    from mispair.auditing.encoding.raw_pairs import IMAGE_SUFFIXES
    from mispair.data.loading import layout

    try:
        layout(folder)
    except DataError:
        found = (path.suffix.lower() for path in folder.rglob("*"))
        return any(suffix in (".txt", *IMAGE_SUFFIXES) for suffix in found) and not any(folder.glob("*.npy"))
    return False


def read_checked(path: Path) -> dict[str, bool]:
    """Ids and whether the pair is right, from a table with the columns id and right (or is_mismatch)."""
    from mispair.auditing.sources.tables import open_table

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


def _tell(figures: dict[str, Any], out: Path, clean: Path | None, *, json: bool) -> int:
    """Prints what was found, and returns the exit code."""
    from mispair.auditing.encoding.encode import BAD_CODE, BAD_SHARE

    if json:
        print_json({"out": str(out), **figures})
    else:
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
    return BAD_CODE if figures["pairs"] - figures["scored"] > BAD_SHARE * figures["pairs"] else 0


def encode(
    source: Positional[Path],
    *,
    out: Path,
    images: Path | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    image_model: str = "efficientnet-lite0",
    text_model: str = "all-minilm-l6-v2",
    device: str = "auto",
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Turn raw images and captions into embeddings. The same command again goes on where it was stopped.

    Args:
        source: CSV, TSV or parquet of image paths and captions, COCO or Karpathy JSON, or folder of images and texts.
        out: Folder for the embeddings, in the clip-retrieval layout.
        images: Folder that the image paths start from; the one of the source by default.
        image_column: Column of image paths, if its name is not a usual one.
        caption_column: Column of captions, if its name is not a usual one.
        image_model: efficientnet-lite0, or open_clip:MODEL/WEIGHTS.
        text_model: all-minilm-l6-v2, transformers:NAME_OR_FOLDER, or open_clip:MODEL/WEIGHTS.
        device: auto, cpu, cuda, cuda:1, mps.
        overwrite: Start over in a folder that was made from something else.
        json: Print figures for machines.
    """
    from mispair.auditing.encoding.encode import BAD_CODE, encode_source

    outcome = encode_source(
        source, out, images=images, image_column=image_column, caption_column=caption_column, image_model=image_model,
        text_model=text_model, device=device, overwrite=overwrite,
        console=console(),
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **outcome.figures()})
    else:
        for line in outcome.lines():
            print(line)
        print(f"Embeddings: {out}")
    return BAD_CODE if outcome.too_many_bad else 0
