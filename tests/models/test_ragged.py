"""Padded and packed items, with lengths on the host and, as a recorded step has them, with room to spare."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.models.layers import BatchNorm
from mispair.models.ragged import inside, masked_mean, packing

ragged = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(ragged, st.integers(0, 3))
def test_pack_and_pad_are_each_others_reverse(lengths: list[int], extra: int) -> None:
    width = max(lengths) + extra
    real = packing(torch.tensor(lengths), width, torch.device("cpu"))
    padded = torch.randn(len(lengths), width, 2)
    packed = real.pack(padded)
    expected = torch.cat([padded[row, :length] for row, length in enumerate(lengths)])
    assert torch.equal(packed, expected)
    back = real.pad(packed)
    for row, length in enumerate(lengths):
        assert torch.equal(back[row, :length], padded[row, :length])
        assert (back[row, length:] == 0).all()
    assert torch.equal(real.pack(back), packed)
    assert real.owner.tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
    assert real.inside.sum().item() == sum(lengths)


@given(ragged)
def test_pad_along_another_axis(lengths: list[int]) -> None:
    real = packing(torch.tensor(lengths), max(lengths), torch.device("cpu"))
    packed = torch.randn(3, sum(lengths), 2)
    along_one = real.pad(packed, dim=1)
    assert along_one.shape == (3, len(lengths), max(lengths), 2)
    for image in range(3):
        assert torch.equal(along_one[image], real.pad(packed[image]))


def test_gradients_flow_through_packing() -> None:
    real = packing(torch.tensor([2, 1]), 3, torch.device("cpu"))
    x = torch.randn(2, 3, 4, requires_grad=True)
    real.pad(real.pack(x)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad[..., 0].tolist() == [[1, 1, 0], [1, 0, 0]]


@given(ragged)
def test_masked_mean(lengths: list[int]) -> None:
    local = torch.randn(len(lengths), max(lengths), 3)
    for row, length in enumerate(lengths):
        local[row, length:] = 0
    mean = masked_mean(local, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(mean[row], local[row, :length].mean(dim=0))


@given(ragged, st.integers(0, 3), st.integers(0, 5))
def test_a_row_may_be_longer_than_needed(lengths: list[int], extra: int, spare: int) -> None:
    counts, width, total = torch.tensor(lengths), max(lengths) + extra, sum(lengths)
    tight = packing(counts, width, torch.device("cpu"))
    loose = packing(counts, width, torch.device("cpu"), capacity=total + spare)
    padded = torch.randn(len(lengths), width, 2)
    packed = loose.pack(padded)
    assert torch.equal(packed[:total], tight.pack(padded))
    assert (packed[total:] == 0).all()
    assert torch.equal(loose.pad(packed + 1)[loose.inside], tight.pad(tight.pack(padded) + 1)[tight.inside])
    assert loose.owner[total:].tolist() == [len(lengths)] * spare
    assert loose.starts.tolist() == tight.starts.tolist()


def test_nothing_flows_from_behind_the_row_or_from_padding() -> None:
    real = packing(torch.tensor([2, 1]), 3, torch.device("cpu"), capacity=7)
    x = torch.randn(2, 3, 4, requires_grad=True)
    real.pack(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad[..., 0].tolist() == [[1, 1, 0], [1, 0, 0]]
    row = torch.randn(3, 7, 4, requires_grad=True)
    real.pad(row, dim=1).sum().backward()  # type: ignore[no-untyped-call]
    assert row.grad is not None
    assert row.grad[0, :, 0].tolist() == [1, 1, 1, 0, 0, 0, 0]


@given(ragged, st.integers(0, 3))
def test_batch_statistics_see_real_rows_alone(lengths: list[int], extra: int) -> None:
    width = max(lengths) + extra
    if sum(lengths) < 2:
        lengths = [*lengths, 2]  # torch refuses to normalise a single row
    real = inside(torch.tensor(lengths), max(width, 2), torch.device("cpu")).flatten()
    torch.manual_seed(0)
    ours, plain = BatchNorm(3), torch.nn.BatchNorm1d(3)
    for norm in (ours, plain):
        torch.nn.init.constant_(norm.weight, 1.5)
        torch.nn.init.constant_(norm.bias, 0.25)
    x = torch.randn(len(real), 3)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(int(real.sum()), 3)
    found, expected = ours(first, real)[real], plain(second[real])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for result in (found, expected):
        (result * weight).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-3, atol=1e-4)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.eval()(x, real), plain.eval()(x))
