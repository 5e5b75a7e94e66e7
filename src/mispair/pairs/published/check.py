"""Whether a folder has the files of a published data set, file by file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from mispair.errors import DataError, NotFoundError, ShapeError
from mispair.pairs.layouts.precomp import arrange, captions_path, read_captions, read_ids, vocabulary_places
from mispair.pairs.npy import TruncatedError, open_array
from mispair.pairs.published.catalogue import DATA_SETS, DataSet, PublishedFile, Publisher, Split
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.files import sha256_of, unreadable

Verdict = Literal[
    "right", "there", "missing", "another shape", "another length", "another size", "checksum wrong", "unreadable"
]
Answer = tuple[Verdict, str]  # and a sentence
_OTHER_TYPES = {
    "float16": "digits are lost, so results may change slightly",
    "float64": "it takes twice the space and adds nothing",
}


@dataclass(frozen=True)
class Finding:
    """A file of the catalogue, the verdict on it in a word and in a sentence, and where it lies."""

    file: PublishedFile
    verdict: Verdict
    sentence: str
    path: Path | None = None

    @property
    def fits(self) -> bool:
        """Whether mispair reads the published content."""
        return self.verdict in ("right", "there")

    def to_json(self) -> dict[str, str | bool | None]:
        """For `--json`."""
        return {
            "name": self.file.name,
            "needed": self.file.needed,
            "verdict": self.verdict,
            "fits": self.fits,
            "sentence": self.sentence,
            "path": None if self.path is None else str(self.path),
        }


def check_folder(data_set: DataSet, folder: Path) -> list[Finding]:
    """Look for every file of a data set in a folder.

    Texts and small files are read whole; of features only the header and a sample of rows.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise NotFoundError(what, where=folder, expected=f"the folder that holds {data_set.files[0].name}")
    return [_check_file(file, folder) for file in data_set.files]


def ready(findings: list[Finding]) -> bool:
    """Whether all needed files are right."""
    return all(finding.fits for finding in findings if finding.file.needed)


def to_fetch(data_set: DataSet, findings: list[Finding]) -> dict[Publisher, list[str]]:
    """Missing or wrong needed files, by source."""
    wrong = [finding.file for finding in findings if finding.file.needed and not finding.fits]
    names = {source: [file.name for file in wrong if file.source == source.name] for source in data_set.sources}
    return {source: found for source, found in names.items() if found}


def folder_inside(data_set: DataSet, folder: Path) -> Path | None:
    """A subfolder with the features, if this folder has none."""
    first = data_set.files[0].name
    if (folder / first).exists():
        return None
    found = [path.parent for path in sorted(folder.glob(f"*/{first}"))]
    return next((path for path in found if path.name == data_set.folder), found[0] if found else None)


def _check_file(file: PublishedFile, folder: Path) -> Finding:
    path = _find(file, folder)
    if path is None:
        sentence = "needed" if file.needed else f"optional; {file.without}"
        return Finding(file, "missing", sentence)
    examine = {"features": _features, "captions": _captions, "ids": _ids, "vocabulary": _vocabulary, "noise": _noise}
    try:
        return Finding(file, *examine[file.kind](file, path, folder), path)
    except TruncatedError as error:
        return Finding(file, "another size", str(error), path)
    except DataError as error:
        return Finding(file, "unreadable", str(error), path)
    except OSError as error:
        return Finding(file, "unreadable", str(unreadable(path, error)), path)


def _find(file: PublishedFile, folder: Path) -> Path | None:
    """Path of a file: first the place used by mispair itself, then other places."""
    paths = [Path(os.path.normpath(folder.resolve() / place)) for place in (file.name, *file.other_places)]
    if file.kind == "captions" and file.split:
        paths = [captions_path(folder.resolve(), file.split.name)]
    if file.kind == "vocabulary":
        paths = [*vocabulary_places(folder), *paths]
    return next((path for path in paths if path.is_file()), None)


def _features(file: PublishedFile, path: Path, _: Path) -> Answer:
    assert file.split is not None
    assert file.shape is not None
    array, split = open_array(path), file.split
    found, rows = _shape(array), dict.fromkeys((split.images, split.captions))
    if array.ndim != 3 or array.shape[1:] != file.shape[1:]:
        return "another shape", f"{found}; expected {_by(file.shape)}.{_known_as(array.shape)}"
    if len(array) not in rows:
        expected = " or ".join(f"{count:,}" for count in rows)
        return "another shape", f"{found}; expected {expected} rows.{_dev_remark(split)}{_known_as(array.shape)}"
    promised, size = int(getattr(array, "offset", 0)) + array.nbytes, path.stat().st_size
    if size > promised:  # numpy passes it over in silence; less is refused when the file is opened
        what = f"{size:,} bytes where the header promises {promised:,}"
        return "another size", f"{what}: something was appended; fetch the file again."
    times = split.captions // split.images
    if len(arrange(array, split.captions, None, file.name)[0]) != split.images:  # as the reader finds them
        return "another shape", (
            f"{found}, but the rows are not {split.images:,} images {times} times each, so captions and images would "
            "not fit; fetch the file again."
        )
    remarks = [found]
    if len(array) != split.rows:
        stored = "each image once, while the published file repeats it; mispair accepts both"
        repeated = f"each image {times} times, while the published file has it once; mispair accepts both"
        remarks.append(stored if len(array) == split.images else repeated)
    if str(array.dtype) in _OTHER_TYPES:
        remarks.append(f"published as float32: mispair reads {array.dtype} too, but {_OTHER_TYPES[str(array.dtype)]}")
    return "there", "; ".join(remarks)


def _dev_remark(split: Split) -> str:
    """Describe the effect of a validation set of another size."""
    if split.name != "dev":
        return ""
    return " mispair can train, but chooses the best epoch on other pairs than the papers."


def _known_as(shape: tuple[int, ...]) -> str:
    """Published files with this shape, to detect mixed-up folders."""
    names = [
        f"{file.name} of {data_set.title}" for data_set in DATA_SETS.values() for file in data_set.files
        if file.kind == "features" and file.shape == shape
    ]  # fmt: skip
    return f" This is the shape of {' or '.join(names)}." if names else ""


def _captions(file: PublishedFile, path: Path, folder: Path) -> Answer:
    assert file.split is not None
    lines = len(read_captions(folder, file.split.name)[0])
    if lines != file.lines:
        return "another length", f"{lines:,} captions; expected {file.lines:,}.{_dev_remark(file.split)}"
    other = f"; {path.name}, which is published as {file.name}" if path.name != file.name else ""
    return _with_checksum(file, path, f"{lines:,} captions{other}")


def _ids(file: PublishedFile, path: Path, folder: Path) -> Answer:
    assert file.split is not None
    try:
        read_ids(folder, file.split.name, file.split.images, file.split.captions // file.split.images)
    except ShapeError as error:
        return "another length", str(error)
    return _with_checksum(file, path, "as many ids as images or captions")


def _vocabulary(file: PublishedFile, path: Path, folder: Path) -> Answer:
    words = len(Vocabulary.load(path))
    if file.words not in (None, words):
        return "another length", f"{words:,} words; published with {file.words:,}."
    known = vocabulary_places(folder)
    remark = f"; mispair looks for {known[-1].name} beside this folder: rename it, or give it as `vocab`"
    remark = "" if path in known else remark
    return _with_checksum(file, path, f"{words:,} words{remark}")


def _noise(file: PublishedFile, path: Path, _: Path) -> Answer:
    assert file.shape is not None
    array = open_array(path, kind="integer")
    if array.shape != file.shape:
        wrong = f"{_shape(array)}; expected {_by(file.shape)}"
        return "another shape", f"{wrong}. A noise index fits only the set it was made for."
    return _with_checksum(file, path, f"{len(array):,} entries")


def _with_checksum(file: PublishedFile, path: Path, found: str) -> Answer:
    """The verdict on a file after all other checks."""
    if file.sha256 is None:
        return "there", f"{found}; checksum unknown"
    digest = sha256_of(path)
    if digest == file.sha256:
        return "right", f"{found}; checksum right"
    if file.repacked:
        return "there", f"{found}; not byte for byte the copy that we know, which may be repacked"
    other, size = f"SHA-256 {digest}, expected {file.sha256}: this is another file.", path.stat().st_size
    if file.file_bytes not in (None, size):
        return "another size", f"{size:,} bytes, expected {file.file_bytes:,}; {other}"
    return "checksum wrong", f"{found}; {other}"


def _shape(array: npt.NDArray[Any]) -> str:
    return f"{_by(array.shape)} {array.dtype}"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape) or "a single number"
