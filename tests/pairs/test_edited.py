"""Pairs after edits are those that a copy with the same edits has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layouts import LAYOUTS, triples
from mispair.auditing.inputs import AuditInput
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.arrays import from_memory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_and_captions_of_every_layout(layout: str, tmp_path: Path) -> None:
    path = LAYOUTS[layout](tmp_path / "data")
    photos = path.parent / "photos"
    pairs = AuditInput(path, images=photos if path.is_file() and photos.is_dir() else None).open("cpu")
    before, ids = triples(pairs), pairs.ids()
    keep = np.array([False, True, True, True, True, True])
    edits = Edits(keep, np.array([0, 1, 5, 3, 4, 5]), np.array([0, 4, 2, 3, 4, 5]), {3: "a new one"})
    edited = pairs.edited(edits)
    assert edited.ids() == ids[1:]
    texts = [before[4][1], before[2][1], "a new one", before[4][1], before[5][1]]
    assert triples(edited) == list(zip([before[row][0] for row in (1, 5, 3, 4, 5)], texts, strict=True))
    assert edited.groups is not None
    assert edited.groups.tolist() == [0, 1, 2, 3, 1]
    assert edited.fingerprint() != pairs.fingerprint()
    for row, image in enumerate((1, 5, 3, 4, 5)):
        assert edited.image_file(row) == pairs.image_file(image)
        assert edited.image_texts([row]) == pairs.image_texts([image])
        assert edited.has_image(row)
    if pairs.splits is not None:
        assert edited.splits == list(pairs.splits)[1:]


def test_vectors() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal((4, 2)).astype(np.float32)
    source = from_memory(*vectors, ids=["a", "", "c", "d"], texts=list("wxyz"))
    assert source.known == {1: "missing id"}
    own = np.arange(4)
    edits = Edits(np.array([False, True, True, True]), np.array([0, 1, 3, 3]), np.array([0, 1, 2, 0]))
    edited = source.edited(edits)
    assert edited.ids(range(3)) == ["", "c", "d"]
    assert edited.texts(range(3)) == ["x", "y", "w"]
    assert edited.known == {0: "missing id"}
    assert edited.groups is not None
    assert edited.groups.tolist() == [0, 1, 1]
    for found, values, rows in zip(edited.block(0, 3), vectors, ([1, 3, 3], [1, 2, 0]), strict=True):
        np.testing.assert_array_equal(found, values[rows])
    assert source.edited(Edits(np.ones(4, dtype=bool), own[::-1], own)).known == {}  # it has other items now
