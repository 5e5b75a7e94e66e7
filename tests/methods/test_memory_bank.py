"""The bank against a plain list."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.methods.memory_bank import Bank
from mispair.models import Encoded
from small_data import lengths_of

WIDTH = 3


def encoded(numbers: list[int], lengths: list[int] | None) -> Encoded:
    """Items whose vectors tell which one they are: every local vector of item k is k, its pooled one -k."""
    values = torch.tensor(numbers, dtype=torch.float32)[:, None]
    pooled = -values.expand(-1, WIDTH)
    if lengths is None:
        return Encoded(None, None, pooled)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Encoded((values[:, None] * inside[..., None]).expand(-1, -1, WIDTH), torch.tensor(lengths), pooled)


def length_of(number: int) -> int:
    return 1 + number * 7 % 11


def fill(bank: Bank, sizes: list[int]) -> list[int]:
    """Pushes batches of these sizes, of numbered pairs; returns all numbers in their order."""
    pushed: list[int] = []
    for size in sizes:
        numbers = list(range(len(pushed) + 1, len(pushed) + size + 1))
        left = encoded(numbers, [4] * size)
        bank.push(left, encoded(numbers, [length_of(n) for n in numbers]), np.array(numbers))
        pushed += numbers
    return pushed


@given(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=12))
def test_it_holds_the_newest_pairs_and_their_own_vectors(size: int, sizes: list[int]) -> None:
    bank = Bank(size)
    newest = fill(bank, sizes)[-size:]
    assert len(bank) == len(newest)
    assert bank.ids.tolist() == newest
    left_pooled, right_pooled = bank.pooled()
    assert left_pooled[:, 0].tolist() == right_pooled[:, 0].tolist() == [-n for n in bank.ids]
    slots = np.arange(len(bank))[::-1].copy()
    for side, length in ((bank.left.take(slots), lambda _: 4), (bank.right.take(slots), length_of)):
        (local, _), lengths = side.parts(), lengths_of(side)
        assert lengths == [length(n) for n in bank.ids[slots]]
        for row, number in enumerate(bank.ids[slots]):
            assert (local[row, : lengths[row]] == number).all()
            assert (local[row, lengths[row] :] == 0).all()


def test_the_oldest_leave_first() -> None:
    bank = Bank(4)
    fill(bank, [3])
    assert bank.ids.tolist() == [1, 2, 3]
    fill_order = [bank.ids.tolist()]
    bank.push(encoded([4, 5], [4, 4]), encoded([4, 5], [2, 9]), np.array([4, 5]))
    fill_order.append(bank.ids.tolist())
    assert fill_order[-1] == [2, 3, 4, 5]  # 1 was the oldest


def test_models_with_one_vector_an_item() -> None:
    bank = Bank(3)
    bank.push(encoded([1, 2, 3, 4], None), encoded([1, 2, 3, 4], None), np.arange(1, 5))
    assert bank.left.take(np.array([0])).local is None
    assert bank.left.take(np.arange(3)).pooled[:, 0].tolist() == [-n for n in bank.ids]


def test_no_gradient_reaches_the_bank() -> None:
    bank = Bank(2)
    item = encoded([1, 2], [2, 3])
    assert item.local is not None
    local = item.local.clone().requires_grad_()
    bank.push(Encoded(local * 2, item.lengths, item.pooled), item, np.array([1, 2]))
    stored, _ = bank.left.take(np.array([0, 1])).parts()
    assert not stored.requires_grad
    assert not bank.pooled()[0].requires_grad


@pytest.mark.parametrize("sizes", [[2], [3, 3, 3], [9]])
def test_it_survives_a_checkpoint(sizes: list[int]) -> None:
    bank, copy = Bank(5), Bank(5)
    fill(bank, sizes)
    buffer = io.BytesIO()
    torch.save(bank.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    copy.load_state_dict(state, torch.device("cpu"))
    for one in (bank, copy):  # and goes on in the same way
        one.push(encoded([77, 78], [4, 4]), encoded([77, 78], [8, 1]), np.array([77, 78]))
    assert copy.ids.tolist() == bank.ids.tolist()
    slots = np.arange(len(bank))
    for ours, theirs in (
        (bank.left.take(slots), copy.left.take(slots)),
        (bank.right.take(slots), copy.right.take(slots)),
    ):
        assert torch.equal(ours.parts()[0], theirs.parts()[0])
        assert torch.equal(ours.pooled, theirs.pooled)


def test_it_takes_at_most_a_quarter_of_the_padded_one() -> None:
    """Regions and real words in half precision against regions and words padded to the longest in float32."""
    rng, size, width, longest = np.random.default_rng(0), 256, 64, 82
    bank = Bank(size)
    for start in range(0, 4 * size, 32):
        lengths = np.clip(rng.poisson(15.5, 32), 3, longest).tolist()
        left = Encoded(torch.rand(32, 36, width), torch.full((32,), 36), torch.rand(32, width))
        right = Encoded(torch.rand(32, max(lengths), width), torch.tensor(lengths), torch.rand(32, width))
        bank.push(left, right, np.arange(start, start + 32))
    assert bank.nbytes <= size * (36 + longest) * width * 4 / 4
