"""`Audit.attach_to`: match scores on pairs for a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mispair
from mispair.auditing.audit import Audit, Settings, audit_source
from mispair.errors import DataError
from mispair.pairs.layouts.arrays import from_pairs
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs, Vectors, select
from mispair.pairs.shapes import dataset

CPU = Settings(device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset.make(tmp_path_factory.mktemp("data") / "shapes", train=24, dev=6, test=6)


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Pairs:
    return mispair.load(str(folder), "train")


@pytest.fixture(scope="module")
def audit(pairs: Pairs) -> Audit:
    return audit_source(from_pairs(pairs), CPU)


def test_pairs_in_their_order(audit: Audit, pairs: Pairs) -> None:
    scored = audit.attach_to(pairs)
    assert scored.match_score is not None
    np.testing.assert_array_equal(scored.match_score, audit.match_score)
    np.testing.assert_array_equal(scored.flagged, audit.is_mismatch)
    assert replace(scored, match_score=None, flagged=None) == pairs


def test_pairs_of_the_audited_folder(folder: Path, pairs: Pairs) -> None:
    found = audit_source(open_source(folder), CPU)
    np.testing.assert_array_equal(found.attach_to(pairs).match_score, found.match_score)


def test_pairs_in_another_order_are_found_by_their_ids(tmp_path: Path) -> None:
    pairs = mispair.load(str(dataset.make(tmp_path / "shapes", train=60, dev=6, test=6)), "train")
    rows = np.arange(0, len(pairs), 5)[::-1]  # one caption an image, so that an id is an image name
    single = replace(pairs, right=select(pairs.right, np.sort(rows)), link=pairs.link[np.sort(rows)])
    turned = replace(pairs, right=select(pairs.right, rows), link=pairs.link[rows])
    found = audit_source(from_pairs(single), CPU)
    np.testing.assert_array_equal(found.attach_to(turned).match_score, found.match_score[::-1])


def test_other_pairs_are_refused(audit: Audit, pairs: Pairs) -> None:
    noisy = add_noise(pairs, noise_ratio=0.5, seed=0)
    with pytest.raises(DataError):
        audit.attach_to(noisy)
    fewer = replace(pairs, right=select(pairs.right, np.arange(60)), link=pairs.link[:60], left_ids=())
    with pytest.raises(DataError, match=fewer.name):
        audit.attach_to(fewer)
    with pytest.raises(DataError, match="120"):
        pairs.with_audit(np.ones(3))


def test_what_could_not_be_read_is_unknown() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(80, 6)).astype(np.float32), rng.normal(size=(80, 5)).astype(np.float32)
    left[7] = np.nan
    found = mispair.audit(left, right, device="cpu")
    score = found.attach_to(Pairs(Vectors(left), Vectors(right), np.arange(80))).match_score
    assert score is not None
    assert score[7] == 0.5
    np.testing.assert_array_equal(np.delete(score, 7), np.delete(found.match_score, 7))
