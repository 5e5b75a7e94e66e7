from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mispair.errors import ConfigError
from mispair.functional import metrics
from mispair.functional.metrics import fold_retrieval, retrieval
from mispair.models import Network, SideSpec, build
from mispair.models import inference as inference_module
from mispair.models.inference import average, encode_side, inference, score, similarities
from mispair.pairs.batches import SideLoader
from mispair.pairs.pairs import Pairs
from mispair.retrieval import evaluation
from mispair.retrieval.evaluation import evaluate, evaluate_in_blocks
from small_data import one_to_one, regions, shake, small_config, tokens, vectors

CPU = torch.device("cpu")
LENGTHS = [5, 1, 12, 3, 3, 9, 2, 7, 1, 20, 4]
SETS = {
    "vse": one_to_one(regions(7), tokens(LENGTHS)),
    "sgr": one_to_one(regions(7), tokens(LENGTHS)),
    "saf": one_to_one(regions(7), tokens(LENGTHS)),
    "scan": one_to_one(regions(7), tokens(LENGTHS)),
    "two-tower": one_to_one(vectors(7, 6), vectors(11, 9)),
    "vse of texts": one_to_one(tokens(LENGTHS[:7]), tokens(LENGTHS, seed=1)),
    "sgr of texts": one_to_one(tokens(LENGTHS[:7]), tokens(LENGTHS, seed=1)),
    "scan of texts": one_to_one(tokens(LENGTHS[:7]), tokens(LENGTHS, seed=1)),
    "sgr of vectors": one_to_one(vectors(7), tokens(LENGTHS)),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_module, "CHUNK", 3)
    monkeypatch.setattr(inference_module, "LARGER", 1)


def make(name: str, seed: int = 0) -> tuple[Network, Pairs]:
    pairs = SETS[name]
    config = small_config(model=name.split()[0], dropout=0.4)
    network = build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed)
    shake(network, seed)
    return network, pairs


@pytest.mark.parametrize("name", SETS)
def test_chunks_give_the_scores_of_one_big_matrix_in_the_right_order(name: str) -> None:
    network, pairs = make(name)
    left, right = SideLoader(pairs.left, CPU), SideLoader(pairs.right, CPU)
    network.eval()
    with torch.no_grad():
        a, b = network.encode_left(left.items(np.arange(7))), network.encode_right(right.items(np.arange(11)))
        expected = network.similarity(a, b)
    network.train()

    sides = encode_side(network, left, left=True), encode_side(network, right, left=False)
    S = score(network, *sides)
    assert S.shape == (7, 11)
    assert not S.requires_grad
    torch.testing.assert_close(S, expected, rtol=0, atol=2e-6)
    assert expected.std() > 1e-4  # or any order would do
    for side, encoded in zip(sides, (a, b), strict=True):
        assert [len(chunk) for chunk in side.chunks] == [3] * (len(encoded) // 3) + [len(encoded) % 3]
        torch.testing.assert_close(side.pooled(), encoded.pooled, rtol=0, atol=2e-6)


def test_texts_are_encoded_in_the_order_of_their_lengths() -> None:
    network, pairs = make("sgr")
    side = encode_side(network, SideLoader(pairs.right, CPU), left=False)
    assert [LENGTHS[row] for row in side.rows.tolist()] == sorted(LENGTHS)
    assert [chunk.parts()[0].shape[1] for chunk in side.chunks] == [2, 4, 9, 20]


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_comes_back(training: bool) -> None:
    network, pairs = make("sgr")
    network.train(training)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    left, right = SideLoader(pairs.left, CPU), SideLoader(pairs.right, CPU)
    first, second = (similarities([network], left, right)[0] for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    assert all(module.training is training for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.is_grad_enabled()


def test_the_mode_comes_back_after_an_error() -> None:
    network, _ = make("sgr")
    network.train()

    def fail() -> None:
        with inference(network):
            assert not network.training
            assert not torch.is_grad_enabled()
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        fail()
    assert network.training
    assert torch.is_grad_enabled()


def test_two_equal_networks_are_worth_one() -> None:
    network, pairs = make("sgr")
    left, right = SideLoader(pairs.left, CPU), SideLoader(pairs.right, CPU)
    (alone,) = similarities([network], left, right)
    result = evaluate(similarities([network, network], left, right), pairs)
    assert result.averaged == result.networks[0] == result.networks[1]
    assert result.averaged == evaluate([alone], pairs).averaged


def test_matrices_are_averaged_before_ranking() -> None:
    pairs = SETS["sgr"]
    a, b = torch.randn(7, 11), torch.randn(7, 11)
    groups = torch.arange(7), torch.from_numpy(pairs.link)
    result = evaluate([a, b], pairs)
    assert result.networks == [retrieval(a, *groups), retrieval(b, *groups)]
    assert result.averaged == retrieval((a + b) / 2, *groups)
    assert result.folds is None
    mean = (a + b) / 2
    expected = fold_retrieval(
        lambda rows, columns: retrieval(mean[rows][:, columns], groups[0][rows], groups[1][columns]), *groups, 3
    )
    assert evaluate([a, b], pairs, folds=3).folds == expected


@pytest.mark.parametrize("names", [["vse of texts"], ["two-tower", "two-tower"], ["sgr", "vse", "sgr"]])
def test_blocks_of_rows_give_the_result_of_whole_matrices(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make(name, seed) for seed, name in enumerate(names)]
    networks, pairs = [network for network, _ in made], replace(made[0][1], groups=np.array([0, 1, 2, 2, 3, 4, 5]))
    matrices = similarities(networks, SideLoader(pairs.left, CPU), SideLoader(pairs.right, CPU))
    expected = evaluate(matrices, pairs, 2, average(networks, matrices))
    most = 2 * len(pairs.right)  # so that the seven rows are four blocks
    held: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        S = score(*args)
        held.append(S.numel())
        return S

    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", most)
    monkeypatch.setattr(evaluation, "score", counted)
    assert evaluate_in_blocks(networks, pairs, CPU, 2) == expected
    assert len(expected.networks) == len(names)
    assert max(held) <= most  # in the folds, too


def test_a_fold_without_captions_is_refused() -> None:
    pairs = Pairs(vectors(4), vectors(3), link=np.array([0, 1, 1]))
    with pytest.raises(ConfigError, match="3 to 4"):
        evaluate([torch.zeros(4, 3)], pairs, 2)


def test_truth_and_groups_decide_what_is_right() -> None:
    pairs = Pairs(
        vectors(4), vectors(4), link=np.array([1, 0, 2, 3]), truth=np.arange(4), groups=np.array([0, 1, 2, 2])
    )
    assert evaluate([torch.eye(4)], pairs).averaged.rsum == 600
    swapped = torch.eye(4)[[0, 1, 3, 2]]  # within a group
    assert evaluate([swapped], pairs).averaged.rsum == 600
    assert evaluate([torch.eye(4)[[1, 0, 2, 3]]], pairs).averaged.left_to_right.r1 == 50


def test_metrics_name_the_networks() -> None:
    pairs = SETS["sgr"]
    S = torch.randn(7, 11)
    assert list(evaluate([S], pairs).metrics()) == ["network"]
    assert list(evaluate([S, S], pairs, folds=2).metrics()) == ["network A", "network B", "averaged", "folds"]
    assert list(evaluate([S, S, S], pairs).metrics()) == ["network A", "network B", "network C", "averaged"]
    assert list(evaluate([S, S], pairs).metrics(("sgr", "saf"))) == ["sgr", "saf", "averaged"]
