"""The steps of an epoch."""

from __future__ import annotations

from itertools import islice
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.methods.base import EpochPairs, StepPlan
from mispair.training.plan import noisy_batches, plan_epoch

Order = Literal["together", "after", "before"]


def planned(clean: int, noisy: int, size: int, order: Order = "together", first: int | None = 10) -> list[StepPlan]:
    pairs = EpochPairs(np.arange(clean), np.arange(1000, 1000 + noisy), order)
    return plan_epoch(pairs, size, np.random.default_rng(0), np.random.default_rng(1), first)


@given(st.integers(0, 60), st.integers(0, 40), st.integers(2, 16), st.sampled_from(["together", "after", "before"]))
def test_an_epoch_goes_once_over_the_clean_pairs(clean: int, noisy: int, size: int, order: Order) -> None:
    plans = planned(clean, noisy, size, order)
    ours = [plan for plan in plans if not plan.on_noisy]
    seen = [int(pair) for plan in ours for pair in plan.pairs]
    left_out = clean % size == 1  # a pair alone has no negatives
    assert len(seen) == len(set(seen)) == clean - left_out
    assert all(1 < len(plan.pairs) <= size for plan in ours)
    assert [plan.position for plan in plans] == list(range(len(plans)))
    assert [plan.main_step for plan in ours] == list(range(10, 10 + len(ours)))
    served = [plan.pairs if plan.on_noisy else plan.noisy for plan in plans if plan.on_noisy or plan.noisy is not None]
    assert len(served) == (len(ours) if noisy > 1 else 0)
    for batch in served:
        assert batch is not None
        assert batch.min() >= 1000
        assert len(set(batch.tolist())) == len(batch) == min(size, noisy)


@pytest.mark.parametrize(("order", "kinds"), [("after", [False, True] * 3), ("before", [True, False] * 3)])
def test_steps_on_noisy_pairs_come_after_or_before(order: Order, kinds: list[bool]) -> None:
    plans = planned(12, 20, 4, order)
    assert [plan.on_noisy for plan in plans] == kinds
    assert [plan.main_step for plan in plans] == [10, 10, 11, 11, 12, 12]
    assert all(plan.noisy is None for plan in plans)


def test_together_both_are_in_one_step() -> None:
    plans = planned(12, 20, 4)
    assert [plan.on_noisy for plan in plans] == [False] * 3
    assert all(plan.noisy is not None for plan in plans)


def test_warming_up_has_no_main_steps() -> None:
    assert {plan.main_step for plan in planned(12, 0, 4, first=None)} == {None}


@given(st.integers(2, 30), st.integers(2, 12))
def test_noisy_batches_go_round(pairs: int, size: int) -> None:
    share = min(size, pairs)
    rounds = pairs // share
    batches = list(islice(noisy_batches(np.arange(pairs), size, np.random.default_rng(0)), 3 * rounds))
    for start in range(0, 3 * rounds, rounds):
        seen = [int(pair) for batch in batches[start : start + rounds] if batch is not None for pair in batch]
        assert len(seen) == len(set(seen)) == rounds * share


def test_the_same_random_numbers_give_the_same_plan() -> None:
    first, second = planned(30, 9, 4, "after"), planned(30, 9, 4, "after")
    assert [plan.pairs.tolist() for plan in first] == [plan.pairs.tolist() for plan in second]
