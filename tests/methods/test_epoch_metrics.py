"""Metrics of a split and its labels against plain recomputation."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from mispair.config import Config
from mispair.methods.epoch_metrics import MethodReport, ReplacedPairs, label_histograms, selection, separation
from mispair.methods.repair import Repair
from mispair.models import SideSpec, build
from mispair.pairs.batches import PairLoader
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.training.settings import override
from small_data import vectors

BOOLS = hnp.arrays(np.bool_, st.just(30))
ALWAYS = {
    "clean_share", "labels_clean", "labels_noisy", "gamma", "mu", "spread", "bank_pairs", "bank_bytes", "bank_age",
    "eta_share",
}  # fmt: skip
WITH_TRUTH = {
    "clean_precision", "clean_recall", "auroc_loss", "auroc_rank", "auroc_w", "eta_precision", "eta_recall",
}  # fmt: skip


def test_selection_by_hand() -> None:
    chosen, good = np.array([1, 1, 1, 0, 0], dtype=bool), np.array([1, 0, 1, 1, 1], dtype=bool)
    assert selection("x", chosen, good) == {"x_share": 0.6, "x_precision": 2 / 3, "x_recall": 0.5}
    assert selection("x", chosen, None) == {"x_share": 0.6}
    nothing = np.zeros(5, dtype=bool)
    assert selection("x", nothing, good) == {"x_share": 0.0, "x_precision": None, "x_recall": 0.0}
    assert selection("x", chosen, nothing) == {"x_share": 0.6, "x_precision": 0.0, "x_recall": None}


@given(BOOLS, BOOLS)
def test_selection_equals_scikit_learn(chosen: np.ndarray, good: np.ndarray) -> None:
    found = selection("x", chosen, good)
    expected = {
        "x_precision": precision_score(good, chosen, zero_division=0) if chosen.any() else None,
        "x_recall": recall_score(good, chosen, zero_division=0) if good.any() else None,
    }
    assert found == pytest.approx({"x_share": chosen.mean(), **expected})


def test_selection_gives_plain_numbers() -> None:
    """A checkpoint with one of numpy's could not be read back."""
    found = selection("x", np.array([True, False]), np.array([True, True]))
    assert {type(value) for value in found.values()} == {float}


def test_separation() -> None:
    scores, right = {"a": np.array([0.1, 0.9, 0.5]), "b": np.array([3, 3, 3])}, np.array([False, True, True])
    assert separation(scores, right) == {"auroc_a": 1.0, "auroc_b": 0.5}
    assert separation(scores, None) == {}
    assert separation(scores, np.ones(3, dtype=bool)) == {"auroc_a": None, "auroc_b": None}


@given(hnp.arrays(np.float32, st.just(30), elements=st.floats(0, 1, width=32)), BOOLS, BOOLS, st.booleans())
def test_histograms_count_all_pairs(labels: np.ndarray, clean: np.ndarray, right: np.ndarray, known: bool) -> None:
    found = label_histograms(labels, clean, right if known else None)
    kind = right if known else clean
    for name, chosen in (("labels_clean", labels[kind]), ("labels_noisy", labels[~kind])):
        assert len(found[name]) == 20
        assert sum(found[name]) == len(chosen)
        assert found[name][0] == sum(label < np.float32(0.05) for label in chosen)
        assert found[name][19] == sum(label >= np.float32(0.95) for label in chosen)
    assert all(type(count) is int for row in found.values() for count in row)


def test_a_report_of_networks() -> None:
    rows: list[dict[str, float | None]] = [
        {"clean_share": 0.1, "clean_recall": None},
        {"clean_share": 0.2, "clean_recall": 0.3},
    ]
    report = MethodReport.of_networks(rows, eta_share=0.5)
    assert report == MethodReport(clean_share=[0.1, 0.2], clean_recall=[None, 0.3], eta_share=0.5)
    for wrong in ({"clean_shares": [1.0]}, {"clean_share": ["much"]}, {"gamma": [None]}, {"metrics": {"a": "b"}}):
        with pytest.raises(ValidationError):
            MethodReport.model_validate(wrong)


def repair(pairs: Pairs, **settings: Any) -> Repair:
    config = override(Config(), {
        "method": "repair", "model": "two-tower", "embed_size": 8, "batch_size": 20, "epochs": 2, "bank_size": 50,
        "noisy_start": 0.0, "neighbours": 5, **settings,
    })  # fmt: skip
    specs = SideSpec.of(pairs.left), SideSpec.of(pairs.right)
    nets = [build(config, *specs, seed=seed).train() for seed in (1, 2)]
    return Repair.variant(config)(config, nets, PairLoader(pairs, torch.device("cpu")))


def noisy_vectors() -> Pairs:
    """The same vectors on both sides: even a network that has not learned anything tells wrong pairs."""
    left = vectors(200, width=6)
    return add_noise(Pairs(left, left, np.arange(200)), noise_ratio=0.4, seed=0)


def test_a_report_equals_a_plain_recomputation() -> None:
    pairs = noisy_vectors()
    method = repair(pairs, eta=0.9)
    for network in method.nets:  # the same map on both sides
        network.right.load_state_dict(network.left.state_dict())
    splits = method.begin_epoch(0)
    report = method.report()
    assert report is not None
    assert report.model_fields_set == ALWAYS | WITH_TRUTH | {"replaced"}
    found = report.model_dump(exclude_unset=True)

    right = pairs.link == np.arange(200)
    for net in range(2):
        chosen = np.zeros(200, dtype=bool)
        chosen[splits[1 - net].clean] = True  # what one network has split trains the other
        assert found["clean_share"][net] == pytest.approx(chosen.mean())
        assert found["clean_precision"][net] == pytest.approx(precision_score(right, chosen))
        assert found["clean_recall"][net] == pytest.approx(recall_score(right, chosen))
        assert found["auroc_w"][net] == pytest.approx(roc_auc_score(right, method.w[net]))
        # The labels are the coefficients, cut at both ends; the losses order pairs as their probabilities do, mostly.
        assert found["auroc_rank"][net] == pytest.approx(roc_auc_score(right, method.labels[net]), abs=0.05)
        assert found["auroc_loss"][net] == pytest.approx(found["auroc_w"][net], abs=0.05)
        assert found["auroc_loss"][net] > 0.9
        assert found["auroc_rank"][net] > 0.9
        assert sum(found["labels_clean"][net]) == right.sum()
        assert sum(found["labels_noisy"][net]) == (~right).sum()
        assert (found["gamma"][net], found["mu"][net]) == method.bounds[net]
        assert found["bank_pairs"][net] == 50
        assert found["bank_bytes"][net] == 50 * 8 * 2 * 2  # two half-precision vectors a pair
        assert found["bank_age"][net] == 0
        assert found["spread"][net] > 0
    sure = (method.w < 0.9).all(axis=0)
    assert found["eta_share"] == pytest.approx(sure.mean())
    assert found["eta_precision"] == pytest.approx(precision_score(~right, sure))
    assert found["eta_recall"] == pytest.approx(recall_score(~right, sure))
    for net, replaced in enumerate(found["replaced"]):
        noisy = splits[net].noisy
        assert replaced["pairs"] == len(noisy) > 10
        new_right, new_left = method.partners[net, 0, noisy], method.partners[net, 1, noisy]
        # The true left item of right item i is i.
        assert replaced["new_right_fits"] == np.mean(pairs.link[noisy] == new_right)
        assert replaced["new_left_fits"] == np.mean(pairs.link[new_left] == noisy)
    json.dumps(found, allow_nan=False)


def test_without_truth_nothing_is_held_against_it() -> None:
    pairs = replace(noisy_vectors(), truth=None)
    method = repair(pairs, eta=1.0)
    splits = method.begin_epoch(0)
    report = method.report()
    assert report is not None
    assert report.model_fields_set == ALWAYS | {"replaced"}
    found = report.model_dump(exclude_unset=True)
    for net in range(2):
        assert sum(found["labels_clean"][net]) == len(splits[1 - net].clean)
        assert sum(found["labels_clean"][net]) + sum(found["labels_noisy"][net]) == 200
        assert set(found["replaced"][net]) == {"pairs"}


def replaced(method: Repair) -> list[ReplacedPairs] | None:
    report = method.report()
    assert report is not None
    return report.replaced


def test_a_report_is_of_this_epoch() -> None:
    method = repair(noisy_vectors(), eta=1.0, noisy_start=0.5)
    method.begin_epoch(0)
    assert replaced(method) is None
    method.begin_epoch(1)
    assert replaced(method) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.begin_epoch(0)
    assert replaced(method) is None
