"""Training by several processes (gloo, on CPUs)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import distributed

from mispair.compute.distributed import Ranks, _message, connect
from mispair.config import Config
from mispair.errors import ConflictError, MispairError, RankLostError
from mispair.methods.plain import Plain
from mispair.training.trainer import check_ranks
from on_ranks import KILLED, alone, on_ranks
from rank_work import fail, first_losses, gradients, layers, newest, robust_gradients, traffic, train
from refusals import refused

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="this torch has no gloo"
)

MAIN = {"warmup_epochs": 1, "epochs": 1, "noisy_start": 0.0, "hardening_steps": 1}
CASES: list[dict[str, Any]] = [
    {"method": "plain", "model": "vse"},
    {"method": "plain", "model": "sgr"},
    {"method": "plain", "model": "saf", "networks": 2},
    {"method": "plain", "model": "scan"},
    {"method": "plain", "model": "two-tower"},
    {"method": "decl", "model": "vse"},
    {"method": "repair", "model": "sgr", "bank_size": 16},
    {"method": "repair", "model": "vse", "bank_size": 16, "label_when": "batch"},
    {"method": "mend", "model": "sgr", "flagged_size": 3},
    {"method": "ncr", "model": "vse"},
    {"method": "bicro", "model": "vse"},
    {"method": "mscn", "model": "sgr", "meta_share": 0.1},
]


QUICK = [4, 6]  # plain with two towers, REPAIR with SGR


REPAIR: dict[str, Any] = {
    **{"method": "repair", "batch_size": 10, "warmup_epochs": 1, "epochs": 2, "noisy_start": 0.5},
    **{"bank_size": 16, "neighbours": 4, "eta": 0.6},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run folder and result of REPAIR in one process."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return folder, alone(train, folder, REPAIR)


def check_alike(folder: Path, reference: Path) -> None:
    """Two runs have come to the same state."""
    found, expected = newest(folder), newest(reference)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(
    "chosen", [QUICK, pytest.param([*range(len(CASES))], marks=pytest.mark.slow)], ids=["some methods", "all methods"]
)
def test_gradients_of_parts_add_up_to_those_of_the_whole_batch(chosen: list[int]) -> None:
    chosen_cases = [CASES[number] for number in chosen]
    found = on_ranks(2 if chosen == QUICK else 4, gradients, [{**MAIN, **case} for case in chosen_cases])
    for rank, cases in enumerate(found):
        assert not isinstance(cases, BaseException), cases
        for case, apart in zip(chosen_cases, cases, strict=True):
            assert max(apart.values()) < 1e-10, (rank, case, apart)


def test_layers_treat_parts_as_parts_of_the_whole() -> None:
    for apart in on_ranks(3, layers):
        assert max(apart) < 1e-12


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, id="two"),
        pytest.param(3, marks=pytest.mark.slow, id="three"),
    ],
)
def test_a_run_follows_that_of_one_process(size: int, tmp_path: Path, reference: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = reference
    results = on_ranks(size, train, tmp_path / "run", REPAIR)
    for result in results:
        assert result["rsum"] == pytest.approx(expected["rsum"])
        assert result["steps"] == expected["steps"]
    check_alike(tmp_path / "run", folder)
    events = [sorted((run / "metrics.jsonl").read_text().splitlines()) for run in (tmp_path / "run", folder)]
    places = [[(e["event"], e["step"], e.get("network")) for e in map(json.loads, lines)] for lines in events]
    assert sorted(map(str, places[0])) == sorted(map(str, places[1]))


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_ranks(
    tmp_path: Path, reference: tuple[Path, dict[str, Any]]
) -> None:
    for size, stop in ((4, 3), (3, 5), (2, 2)):  # in the middle of epochs
        results = on_ranks(size, train, tmp_path / "run", REPAIR, stop)
        assert all(result["code"] == 128 + 15 for result in results), results
    alone(train, tmp_path / "run", REPAIR)
    check_alike(tmp_path / "run", reference[0])


def test_first_losses_in_float32_are_those_of_one_process() -> None:
    expected = alone(first_losses)
    for losses in on_ranks(2, first_losses):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_the_traffic_of_a_step_is_that_of_the_docs() -> None:
    for counted, expected in on_ranks(2, traffic):
        assert counted == expected


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    first, second = on_ranks(2, fail, tmp_path / "run", "killed")
    assert second == KILLED
    assert isinstance(first, RankLostError)
    assert "any number of ranks" in str(first)
    assert not first.silent


def test_too_little_memory_for_a_message_is_no_lost_rank() -> None:
    with pytest.raises(torch.OutOfMemoryError), _message():
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_failing_rank_gives_its_reason_to_the_others(tmp_path: Path) -> None:
    first, second = on_ranks(2, fail, tmp_path / "run", "an error")
    assert isinstance(second, OSError)
    assert isinstance(first, MispairError)
    assert "the disk is gone" in str(first)
    assert first.silent


def test_ranks_that_torchrun_has_not_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with refused(ConflictError, where="WORLD_SIZE", names="LOCAL_RANK and MASTER_PORT"), connect():
        pass


def test_what_several_ranks_cannot_train_is_refused() -> None:
    several: Any = SimpleNamespace(size=2)
    with patch.object(Plain, "distributed", False), refused(ConflictError, where="method", names="plain"):
        check_ranks(Config(), several)


def test_the_loss_of_own_encoders_is_that_of_all_ranks() -> None:
    expected = robust_gradients(Ranks())
    for found in on_ranks(2, robust_gradients):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
