"""Whether a folder has the files of a published data set, file by file."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from mispair.errors import DataError, NotFoundError, ShapeError
from mispair.pairs.layouts.precomp import arrange, captions_path, read_captions, read_ids
from mispair.pairs.npy import TruncatedError, open_array
from mispair.pairs.published.catalogue import DATA_SETS, DataSet, PublishedFile, Publisher, Split
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.files import unreadable

Verdict = Literal[
    "right", "there", "missing", "another shape", "another length", "another size", "checksum wrong", "unreadable"
]


@dataclass(frozen=True)
class Finding:
    """A file of the catalogue, the verdict on it in a word and in a sentence, and where it lies."""

    file: PublishedFile
    verdict: Verdict
    sentence: str
    path: Path | None = None

    @property
    def fits(self) -> bool:
        """Whether mispair reads what was published."""
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
    """The needed files that are missing or wrong, by where they come from."""
    wrong = [finding.file for finding in findings if finding.file.needed and not finding.fits]
    names = {source: [file.name for file in wrong if file.source == source.name] for source in data_set.sources}
    return {source: found for source, found in names.items() if found}


def folder_inside(data_set: DataSet, folder: Path) -> Path | None:
    """A folder in this one that has the features, where this one has not."""
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
        return examine[file.kind](file, path, folder)
    except TruncatedError as error:
        return Finding(file, "another size", str(error), path)
    except DataError as error:
        return Finding(file, "unreadable", str(error), path)
    except OSError as error:
        return Finding(file, "unreadable", str(unreadable(path, error)), path)


def _find(file: PublishedFile, folder: Path) -> Path | None:
    """Where a file lies: first where mispair itself would take it from, then at its other places."""
    places = [file.name, *file.other_places]
    if file.kind == "captions" and file.split:
        places = [captions_path(folder, file.split.name).name]
    if file.kind == "vocabulary":
        own = _own_vocabulary(folder)
        places = ["vocab.json", own, f"../vocab/{own}", f"../{own}", *places]
    paths = (Path(os.path.normpath(folder.resolve() / place)) for place in places)
    return next((path for path in paths if path.is_file()), None)


def _own_vocabulary(folder: Path) -> str:
    """The file name under which a data set in this folder finds its vocabulary."""
    return f"{folder.resolve().name}_vocab.json"


def _features(file: PublishedFile, path: Path, _: Path) -> Finding:
    assert file.split is not None
    assert file.shape is not None
    array = open_array(path)
    answer = partial(Finding, file, path=path)
    found = _shape(array)
    if array.ndim != 3 or array.shape[1:] != file.shape[1:]:
        return answer("another shape", f"{found}; expected {_by(file.shape)}.{_known_as(array.shape)}")
    if len(array) not in (file.split.images, file.split.captions):
        return answer("another shape", f"{found}; {_expected_rows(file.split)}{_known_as(array.shape)}")
    if too_long := _too_long(array, path):
        return answer("another size", too_long)
    if not _rows_fit(array, file.split, file.name):
        return answer(
            "another shape",
            f"{found}, but the rows are not {file.split.images:,} images "
            f"{file.split.captions // file.split.images} times each, so captions and images would not fit; fetch the "
            "file again.",
        )
    return answer("there", "; ".join([found, *_row_remarks(len(array), file.split), *_type_remarks(str(array.dtype))]))


def _expected_rows(split: Split) -> str:
    choice = f"{split.images:,} or {split.captions:,}" if split.captions != split.images else f"{split.images:,}"
    return f"expected {choice} rows.{_dev_remark(split)}"


def _dev_remark(split: Split) -> str:
    """What a validation set of another size does; of other splits it would change the results themselves."""
    if split.name != "dev":
        return ""
    return " mispair trains all the same, but chooses the best epoch on other pairs than the papers did."


def _known_as(shape: tuple[int, ...]) -> str:
    """Which published file has this shape: somebody may have mixed up two folders."""
    names = [
        f"{file.name} of {data_set.title}" for data_set in DATA_SETS.values() for file in data_set.files
        if file.kind == "features" and file.shape == shape
    ]  # fmt: skip
    return f" This is the shape of {' or '.join(names)}." if names else ""


def _rows_fit(array: npt.NDArray[Any], split: Split, name: str) -> bool:
    """Whether the reader will find as many different images as there should be."""
    return len(arrange(array, split.captions, None, name)[0]) == split.images


def _row_remarks(rows: int, split: Split) -> list[str]:
    if rows == split.rows:
        return []
    if rows == split.images:
        return ["each image once, where the published file repeats it: the same to mispair"]
    times = split.captions // split.images
    return [f"each image {times} times, where the published file has it once: the same to mispair, but larger"]


def _type_remarks(dtype: str) -> list[str]:
    remarks = {
        "float16": "published as float32: mispair reads float16 too, but digits are lost and results may move a little",
        "float64": "published as float32: mispair reads float64 too, but it takes twice the room and adds nothing",
    }
    return [remarks[dtype]] if dtype in remarks else []


def _too_long(array: npt.NDArray[Any], path: Path) -> str:
    """A sentence where bytes follow the array, which numpy would pass over in silence."""
    promised, size = int(getattr(array, "offset", 0)) + array.nbytes, path.stat().st_size
    if size <= promised:  # less is refused when the file is opened
        return ""
    return f"{size:,} bytes where the header promises {promised:,}: something was appended; fetch the file again."


def _captions(file: PublishedFile, path: Path, folder: Path) -> Finding:
    assert file.split is not None
    lines = len(read_captions(folder, file.split.name)[0])
    if lines != file.lines:
        sentence = f"{lines:,} captions; expected {file.lines:,}.{_dev_remark(file.split)}"
        return Finding(file, "another length", sentence, path)
    other = f"; {path.name}, which is published as {file.name}" if path.name != file.name else ""
    return _with_checksum(file, path, f"{lines:,} captions{other}")


def _ids(file: PublishedFile, path: Path, folder: Path) -> Finding:
    assert file.split is not None
    try:
        read_ids(folder, file.split.name, file.split.images, file.split.captions // file.split.images)
    except ShapeError as error:
        return Finding(file, "another length", str(error), path)
    return _with_checksum(file, path, "as many ids as images or captions")


def _vocabulary(file: PublishedFile, path: Path, folder: Path) -> Finding:
    words = len(Vocabulary.load(path))
    if file.words not in (None, words):
        return Finding(file, "another length", f"{words:,} words; published with {file.words:,}.", path)
    own = _own_vocabulary(folder)
    lost = path.name not in ("vocab.json", own)
    remark = f"; mispair looks for {own} beside this folder: rename it, or give it as `vocab`" if lost else ""
    return _with_checksum(file, path, f"{words:,} words{remark}")


def _noise(file: PublishedFile, path: Path, _: Path) -> Finding:
    assert file.shape is not None
    array = open_array(path, kind="integer")
    if array.shape != file.shape:
        sentence = f"{_shape(array)}; expected {_by(file.shape)}. A noise index fits only the set it was made for."
        return Finding(file, "another shape", sentence, path)
    return _with_checksum(file, path, f"{len(array):,} entries")


def _with_checksum(file: PublishedFile, path: Path, found: str) -> Finding:
    """The verdict on a file that is right otherwise."""
    if file.sha256 is None:
        return Finding(file, "there", f"{found}; checksum unknown", path)
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest == file.sha256:
        return Finding(file, "right", f"{found}; checksum right", path)
    if file.repacked:
        return Finding(file, "there", f"{found}; not byte for byte the copy that we know, which may be repacked", path)
    other = f"SHA-256 {digest}, expected {file.sha256}: this is another file."
    size = path.stat().st_size
    if file.file_bytes not in (None, size):
        return Finding(file, "another size", f"{size:,} bytes, expected {file.file_bytes:,}; {other}", path)
    return Finding(file, "checksum wrong", f"{found}; {other}", path)


def _shape(array: npt.NDArray[Any]) -> str:
    return f"{_by(array.shape)} {array.dtype}"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape) or "a single number"
