"""Two sides and their link: what goes in, and what is refused in a sentence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mispair
from mispair.errors import ShapeError
from mispair.pairs.pairs import Pairs, Regions, Vectors, fingerprint, with_first_items
from mispair.retrieval.matcher import check_content
from refusals import refused
from small_data import vectors

ARRAY = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("left", "names"),
    [
        (ARRAY, "array of float32 with shape (4, 3)"),
        (ARRAY.tolist(), "type list"),
        (Vectors(ARRAY.tolist()), "type list"),  # type: ignore[arg-type]
        (Vectors(np.full((4, 3), "a")), "<U1"),
        (Regions(ARRAY), "3 dimensions"),
    ],
)
def test_what_is_no_side_is_refused(left: Any, names: str) -> None:
    with refused(ShapeError, "the left side of mine", names):
        Pairs(left, vectors(4), np.arange(4), name="mine")


MASKED = np.ma.masked_greater(np.arange(8.0).reshape(4, 2), 5)


@pytest.mark.parametrize(
    "read",
    [
        lambda: mispair.audit(MASKED, ARRAY),
        lambda: mispair.audit(list(MASKED), ARRAY),
        lambda: mispair.audit([MASKED, ARRAY], ARRAY),
        lambda: mispair.calibrate(MASKED[:, 0], shuffled=[0.1, 0.2]),
        lambda: Pairs(vectors(4), Vectors(MASKED), np.arange(4)),
        lambda: Pairs(vectors(4), vectors(4), np.ma.masked_equal(np.arange(4), 2)),
        lambda: Pairs(vectors(4), vectors(4), np.arange(4), match_score=MASKED[:, 0] / 8),
        lambda: check_content(Vectors(MASKED), "the images"),
    ],
)
def test_masked_arrays_are_refused(read: Callable[[], object]) -> None:
    with refused(ShapeError, names="masked"):
        read()


@pytest.mark.parametrize("label", ["link", "truth", "groups"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], np.zeros(4), np.zeros((4, 1), np.int64), np.array(list("abcd"))])
def test_rows_must_be_a_flat_array_of_whole_numbers(label: str, rows: Any) -> None:
    given = {"link": np.arange(4), label: rows}
    with refused(ShapeError, f"{label} of pairs", "4 whole numbers"):
        Pairs(vectors(4), vectors(4), **given)


def test_whole_numbers_are_features_too() -> None:
    assert len(Pairs(Vectors(np.arange(8).reshape(4, 2)), vectors(4), np.arange(4))) == 4


@pytest.mark.parametrize("label", ["link", "truth", "groups"])
def test_rows_become_numbers_that_torch_takes(label: str) -> None:
    rows = np.arange(4, dtype=np.uint16)[::-1]
    rows.setflags(write=False)
    given: dict[str, Any] = {"link": np.arange(4), label: rows}
    pairs = Pairs(vectors(4), vectors(4), **given)
    assert torch.from_numpy(getattr(pairs, label)).tolist() == [3, 2, 1, 0]
    assert getattr(pairs, label).flags.writeable  # torch warns of what it must not change


@pytest.mark.parametrize(
    ("score", "names"),
    [
        ([0.5] * 4, "type list"),
        (np.zeros(3), "(3,)"),
        (np.zeros(4, int), "int64"),
        (np.array([0.1, 0.2, 1.5, 0]), "between 0 and 1"),
        (np.array([0.1, np.nan, 0.5, 0]), "0.5"),
    ],
)
def test_match_scores_must_be_probabilities(score: Any, names: str) -> None:
    with refused(ShapeError, "match_score of mine", names):
        Pairs(vectors(4), vectors(4), np.arange(4), match_score=score, name="mine")


def test_pairs_that_are_joined_anew_have_no_match_score() -> None:
    pairs = Pairs(vectors(4), vectors(4), np.arange(4), match_score=np.ones(4))
    assert pairs.with_link(np.arange(4)[::-1]).match_score is None
    assert fingerprint(pairs) != fingerprint(replace(pairs, match_score=None))


def test_rows_that_are_fine_are_not_copied() -> None:
    link = np.arange(4)
    assert Pairs(vectors(4), vectors(4), link).link is link


def test_groups_are_part_of_the_fingerprint_where_there_are_any() -> None:
    plain = Pairs(vectors(16), vectors(16, seed=1), np.arange(16))
    parts = plain.link, plain.left.features, plain.right.features  # type: ignore[union-attr]
    assert fingerprint(plain) == hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    grouped = [replace(plain, groups=np.arange(16) // size) for size in (2, 4)]
    assert len({fingerprint(pairs) for pairs in (plain, *grouped)}) == 3
    assert fingerprint(replace(plain, groups=grouped[0].groups)) == fingerprint(grouped[0])


@pytest.mark.parametrize("shape", [(40, 3), (40, 5, 100)])
def test_one_changed_item_is_part_of_the_fingerprint(shape: tuple[int, ...]) -> None:
    features = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    changed = features.copy()
    changed[1] += 1  # not one of the sixteen rows that are hashed as a whole
    side = Vectors if len(shape) == 2 else Regions
    one, other = (Pairs(side(array), vectors(40), np.arange(40)) for array in (features, changed))
    assert fingerprint(one) != fingerprint(other)


def test_the_first_items_are_the_first_that_have_a_pair() -> None:
    link = np.array([9, 7, 9, 8, 7])  # as where one array has the images of all splits
    cut = with_first_items(Pairs(vectors(12), vectors(5, seed=1), link), 2)
    assert cut.link.tolist() == [0, 1, 0]
    assert np.array_equal(cut.left.features, vectors(12).features[7:9])  # type: ignore[union-attr]
    assert np.array_equal(cut.right.features, vectors(5, seed=1).features[[1, 3, 4]])  # type: ignore[union-attr]
