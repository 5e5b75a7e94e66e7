"""Whether a data set can take new captions, found without opening it: a page must not wait for that."""

from __future__ import annotations

from pathlib import Path

from mispair.auditing.moved import read_audit_mark
from mispair.reviewing.images import audited_source


def takes_captions(audit: Path) -> bool:
    """Whether an export can write new captions: not to vectors, which would have to be encoded again.

    Args:
        audit: The output of an audit.

    Returns:
        True also where it is not known, since the data set is not there any more.
    """
    mark = read_audit_mark(audit)
    if mark is None:
        return True
    if mark.request.get("--left"):
        return False
    source = audited_source(mark.request)
    try:
        return source is None or not source.is_dir() or not _holds_vectors(source.resolve())
    except OSError:
        return True


def _holds_vectors(folder: Path) -> bool:
    """Whether these are pairs of vectors: of a training run, of DataComp, or of clip-retrieval."""
    if (folder / "best.safetensors").is_file():  # `from_training.is_run` without importing torch
        return True
    from mispair.pairs.layouts import clip_retrieval, precomp
    from mispair.pairs.layouts.datacomp import find_datacomp

    if find_datacomp(folder):
        return True
    return not precomp.found_splits(folder) and bool(clip_retrieval.found_splits(folder))
