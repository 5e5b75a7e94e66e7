"""Pairs with match scores: which of them warm up the networks, and what the split makes of the scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mispair
from mispair.config import Config
from mispair.errors import ChangedError, TooFewError
from mispair.methods import METHODS
from mispair.methods.coteaching import SURE, combine_odds
from mispair.methods.decl import Decl
from mispair.methods.plain import Plain
from mispair.methods.repair import Repair
from mispair.pairs.audited import AuditColumns
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import FloatArray
from refusals import refused
from tiny import tiny_pairs
from training import check_resume, trained
from two_networks import COUNT, random_w, small, training, vector_pairs, with_w

SCORE = np.random.default_rng(5).random(COUNT).astype(np.float32)
probabilities = st.floats(0, 1)


def scored(score: FloatArray = SCORE) -> Pairs:
    return replace(vector_pairs(), match_score=score)


# ---------------------------------------------------------------------- two opinions


def bayes(w: float, score: float, share: float) -> float:
    """Two independent opinions on one pair; `share` of all pairs are right, as both have taken into account."""
    right, wrong = w * score / share, (1 - w) * (1 - score) / (1 - share)
    return right / (right + wrong)


@given(st.lists(st.tuples(probabilities, probabilities), min_size=1, max_size=8))
def test_heard_equals_bayes(opinions: list[tuple[float, float]]) -> None:
    w, score = np.array(opinions).T
    share = float(np.clip(score.mean(), 1 - SURE, SURE))
    cut = np.clip([w, score], 1 - SURE, SURE)
    expected = [bayes(float(one), float(other), share) for one, other in cut.T]
    assert combine_odds(w, score) == pytest.approx(expected, abs=1e-6)


def test_an_audit_can_say_no_to_what_was_learned_by_heart() -> None:
    found = combine_odds(np.ones((2, 4)), np.array([0.0, 0.002, 0.9, 1.0]))
    assert found.shape == (2, 4)
    assert found.dtype == np.float32
    assert (found[:, :2] < 0.6).all()
    assert (found[:, 2:] > 0.99).all()


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_an_audit_that_says_the_same_of_all_changes_nothing_much(score: float) -> None:
    w = np.array([0.02, 0.4, 0.5, 0.97])
    assert combine_odds(w, np.full(4, score)) == pytest.approx(w, abs=1e-6)


# ---------------------------------------------------------------------- which pairs


def test_networks_warm_up_on_what_looks_right() -> None:
    right = np.flatnonzero(SCORE >= 0.5)
    plain = small(Plain, scored())  # type: ignore[type-var]
    for splits in (plain.begin_warmup(), plain.begin_epoch(0), small(Repair, scored()).begin_warmup()):
        assert all(np.array_equal(split.clean, right) for split in splits)


@pytest.mark.parametrize("score", [None, np.zeros(COUNT, np.float32), np.eye(COUNT, dtype=np.float32)[3]])
def test_all_pairs_where_hardly_any_looks_right(score: FloatArray | None) -> None:
    method = small(Plain, replace(vector_pairs(), match_score=score))  # type: ignore[type-var]
    assert np.array_equal(method.begin_warmup()[0].clean, np.arange(COUNT))


def test_the_split_hears_the_audit() -> None:
    w = random_w()
    method = with_w(small(Repair, scored(), noisy="drop"), w)
    splits = method.begin_epoch(0)
    assert np.allclose(method.w, combine_odds(w, SCORE))
    for net in range(2):
        assert np.array_equal(splits[net].clean, np.flatnonzero(method.w[1 - net] > method.coteaching.clean_threshold))


def test_hardening_of_decl_counts_the_steps_that_there_are(tmp_path: Path) -> None:
    """As if the other pairs were not there."""
    seen: list[int] = []
    pairs = replace(tiny_pairs(12), match_score=(np.arange(60) % 3 > 0).astype(np.float64))

    class Noting(Decl):
        def negatives(self, step: int) -> Any:
            seen.append(step)
            return super().negatives(step)

    config = training("decl", model="vse", batch_size=12, warmup_epochs=2, epochs=2, networks=1)
    METHODS["noting"] = Noting
    try:
        trained(replace(config, method="noting"), pairs, tmp_path / "run", None)
    finally:
        del METHODS["noting"]
    assert seen == list(range(4 * 4))  # 40 pairs in batches of 12: four steps an epoch


# ---------------------------------------------------------------------- whole trainings


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_on_audited_pairs(name: str, tmp_path: Path) -> None:
    pairs = add_noise(tiny_pairs(6), noise_ratio=0.4, seed=0)
    assert pairs.mismatched is not None
    pairs = replace(pairs, match_score=np.where(pairs.mismatched, 0.2, 0.9))
    epochs = 2 if name == "mend" else 1  # its teachers take no part in the last
    config = training(name, model="sgr" if name == "mscn" else "vse", epochs=epochs, noisy_start=0.0, meta_share=0.1)
    if name in ("plain", "repair"):
        check_resume(config, pairs, tmp_path, [(1, 0, 1)])
    else:
        assert trained(config, pairs, tmp_path / "whole", None)
    with refused(ChangedError, where=tmp_path / "whole"):
        trained(config, replace(pairs, match_score=None), tmp_path / "whole", None)


def test_the_audit_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(pairs: Pairs, *_: object) -> FloatArray:
        calls.append(len(pairs))
        return np.linspace(0, 1, len(pairs))

    monkeypatch.setattr("mispair.auditing.audit.score_pairs", counted)
    settings: dict[str, Any] = {"model": "two-tower", "embed_size": 4, "batch_size": 12, "epochs": 1, "device": "cpu"}
    for _ in range(2):
        mispair.fit(vector_pairs(), out=tmp_path / "run", audit=True, **settings)
    assert calls == [COUNT]
    kept = AuditColumns.read(tmp_path / "run" / "audited.parquet")
    assert np.array_equal(kept.match_score, np.linspace(0, 1, COUNT, dtype=np.float32))
    assert np.array_equal(kept.flagged, kept.match_score < 0.5)
    mispair.fit(scored(), out=tmp_path / "given", audit=True, **settings)
    assert calls == [COUNT]  # pairs that have scores are not audited again


def test_an_audit_finds_the_wrong_pairs_of_a_training() -> None:
    from mispair.auditing.audit import Settings, audit_source, score_pairs
    from mispair.pairs.layouts.arrays import from_pairs

    pairs = add_noise(tiny_pairs(120), noise_ratio=0.4, seed=0)
    wrong, score = pairs.mismatched, score_pairs(pairs, "cpu")
    assert wrong is not None
    assert score[~wrong].mean() > score[wrong].mean() + 0.2
    assert ((score >= 0) & (score <= 1)).all()
    np.testing.assert_array_equal(score, audit_source(from_pairs(pairs), Settings(device="cpu")).match_score)


def test_few_pairs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with refused(TooFewError, names="`audit`"):
        mispair.fit(vector_pairs(8), out=tmp_path / "run", audit=True, model="two-tower", device="cpu", epochs=1)


def test_it_is_off_by_default() -> None:
    assert not Config().audit
