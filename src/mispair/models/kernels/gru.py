"""GRUs on a GPU in few launches: cuDNN makes about 25 a step and direction, and the rate of launches is the limit.

Wide states take a batched matrix product and one kernel a step; narrow ones one kernel for the whole sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mispair.compute.devices import full_precision
from mispair.models.kernels.common import HAS_TRITON, jit, on, works

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

NARROW = 64  # up to here the three weight matrices of a group fit into the registers of one program
BLOCK = 512  # elements a program of the stepwise kernels


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once."""

    def trial() -> None:
        parts = [torch.zeros(shape, device=device, requires_grad=True) for shape in ((1, 1, 1, 3), (1, 3, 1), (1, 3))]
        torch.autograd.grad(scan(*parts).sum(), parts)

    return works(device, trial, "GRUs")


def scan(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Several GRUs side by side, as `mispair.models.bigru._Scan`: the states (n, G, B, H), in float32.

    The inputs' share of the gates is (n, G, B, 3H). If it is in half precision, so are the operands of the matrix
    products of wide states. The states' share has weights (G, 3H, H) and biases (G, 3H).
    """
    states: Tensor = _Gru.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return states


class _Gru(torch.autograd.Function):
    """The equations of `bigru._Scan`. All tensors are kept as (G, n, B, ...), as the final product needs them.

    The forward pass saves the slopes of the gates rather than the gates: they lie within about 1, so that float16 is
    precise for them, while 1 - new^2 from a rounded `new` near 1 is not.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        inputs = inputs.transpose(0, 1).contiguous()
        groups, n, batch, _ = inputs.shape
        H = weight.shape[2]
        product = torch.float32 if H <= NARROW else inputs.dtype
        to_save = torch.float32 if product == torch.float32 else torch.float16
        ctx.dtype = inputs.dtype
        weight, bias = weight.to(product).contiguous(), bias.float().contiguous()
        states = inputs.new_empty(groups, n, batch, H, dtype=torch.float32)
        copies = states if product == torch.float32 else inputs.new_empty(groups, n, batch, H, dtype=product)
        learns = any(ctx.needs_input_grad)
        slopes = inputs.new_empty(groups, n, batch, 5 * H, dtype=to_save) if learns else None
        with on(inputs):
            if H <= NARROW:
                _sequence[batch, groups](inputs, weight, bias, states, slopes, n, batch, **_narrow(H))
            else:
                _steps(inputs, weight, bias, states, copies, slopes)
        if slopes is not None:
            ctx.save_for_backward(copies, slopes, weight)
        return states.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copies, slopes, weight = ctx.saved_tensors
        groups, n, batch, H = copies.shape
        gradient = gradients[0].transpose(0, 1).contiguous()
        from_inputs = slopes.new_empty(groups, n, batch, 3 * H, dtype=ctx.dtype)  # of the inputs' share of the gates
        from_states = slopes.new_empty(groups, n, batch, 3 * H, dtype=weight.dtype)  # of the states' share
        with on(gradient), full_precision(gradient):
            if H <= NARROW:
                settings = _narrow(H)
                _sequence_back[batch, groups](gradient, weight, slopes, from_inputs, from_states, n, batch, **settings)
            else:
                _steps_back(gradient, weight, slopes, from_inputs, from_states)
            later, before = from_states[:, 1:].flatten(1, 2), copies[:, :-1].flatten(1, 2)  # the first state is 0
            to_weight = torch.bmm(later.transpose(1, 2), before).float()
            to_bias = from_states.sum(dim=(1, 2), dtype=torch.float32)
        return from_inputs.transpose(0, 1), to_weight, to_bias


def _narrow(H: int) -> dict[str, int]:
    """Settings of the kernels for a whole sequence. A lone warp waits for no other; its registers hold 32."""
    width = max(16, triton.next_power_of_2(H))
    return {"H": H, "WIDTH": width, "num_warps": 1 if width <= 32 else 4}


def _steps(inputs: Tensor, weight: Tensor, bias: Tensor, states: Tensor, copies: Tensor, slopes: Tensor | None) -> None:
    """All steps forward; `copies` are the states in the precision of the products, perhaps `states` itself."""
    groups, n, batch, H = states.shape
    grid = (triton.cdiv(batch * H, BLOCK), groups)
    apart = None if copies is states else copies
    share = copies.new_empty(groups, batch, 3 * H)
    before, to_gates = copies.unbind(1), weight.transpose(1, 2)
    for t in range(n):
        if t > 0:
            torch.bmm(before[t - 1], to_gates, out=share)
        _step[grid](inputs, share if t > 0 else None, bias, states, apart, slopes, t, n, batch, H=H, BLOCK=BLOCK)


def _steps_back(gradient: Tensor, weight: Tensor, slopes: Tensor, from_inputs: Tensor, from_states: Tensor) -> None:
    """All steps backward."""
    groups, n, batch, H = gradient.shape
    grid = (triton.cdiv(batch * H, BLOCK), groups)
    product, kept = weight.new_empty(groups, batch, H), gradient.new_empty(groups, batch, H)
    gates = from_states.unbind(1)
    for t in range(n - 1, -1, -1):
        later = product if t < n - 1 else None
        _step_back[grid](gradient, later, kept, slopes, from_inputs, from_states, t, n, batch, H=H, BLOCK=BLOCK)
        if t > 0:
            torch.bmm(gates[t], weight, out=product)


@jit()
def _load(pointer: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit()
def _cell(
    inputs: tl.tensor, share_r: tl.tensor, share_z: tl.tensor, share_n: tl.tensor, h: tl.tensor, slopes: tl.tensor,
    mask: tl.tensor, H: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The next state; the pointers stand on the places of r and of the first slope."""
    r = tl.sigmoid(_load(inputs, mask) + share_r)
    z = tl.sigmoid(_load(inputs + H, mask) + share_z)
    new = 2 * tl.sigmoid(2 * (_load(inputs + 2 * H, mask) + r * share_n)) - 1  # tanh
    if slopes is not None:
        tl.store(slopes, (1 - z) * (1 - new * new), mask=mask)
        tl.store(slopes + H, (h - new) * z * (1 - z), mask=mask)
        tl.store(slopes + 2 * H, share_n * r * (1 - r), mask=mask)
        tl.store(slopes + 3 * H, r, mask=mask)
        tl.store(slopes + 4 * H, z, mask=mask)
    return new + z * (h - new)


@jit()
def _cell_back(
    into: tl.tensor, slopes: tl.tensor, from_inputs: tl.tensor, from_states: tl.tensor, mask: tl.tensor, H: tl.constexpr
) -> tl.tensor:
    """Store the gradients of the gates; return those of the states' share and of the state itself."""
    to_new = into * _load(slopes, mask)
    to_z = into * _load(slopes + H, mask)
    to_r = to_new * _load(slopes + 2 * H, mask)
    to_share = to_new * _load(slopes + 3 * H, mask)
    tl.store(from_inputs, to_r, mask=mask)
    tl.store(from_inputs + H, to_z, mask=mask)
    tl.store(from_inputs + 2 * H, to_new, mask=mask)
    tl.store(from_states, to_r, mask=mask)
    tl.store(from_states + H, to_z, mask=mask)
    tl.store(from_states + 2 * H, to_share, mask=mask)
    return to_r, to_z, to_share, into * _load(slopes + 4 * H, mask)


@jit("t", "n", "batch")
def _step(
    inputs: tl.tensor,
    share: tl.tensor,  # (G, B, 3H) product of the state before and the weights; None at the first step
    bias: tl.tensor, states: tl.tensor,
    copies: tl.tensor,  # or None
    slopes: tl.tensor,  # or None
    t: tl.tensor, n: tl.tensor, batch: tl.tensor, H: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One step of all rows, after its matrix product."""
    group = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < batch * H
    row, unit = place // H, place % H
    rows = (group * n + t).to(tl.int64) * batch  # large batches hold more than 2^31 elements
    share_r = _load(bias + group * 3 * H + unit, mask)
    share_z = _load(bias + group * 3 * H + H + unit, mask)
    share_n = _load(bias + group * 3 * H + 2 * H + unit, mask)
    h = tl.zeros((BLOCK,), tl.float32)
    if share is not None:
        own = share + group * batch * 3 * H + row * 3 * H + unit
        share_r += _load(own, mask)
        share_z += _load(own + H, mask)
        share_n += _load(own + 2 * H, mask)
        h = _load(states + (rows - batch) * H + place, mask)
    gates = row * 3 * H + unit
    if slopes is not None:
        slopes += rows * 5 * H + row * 5 * H + unit
    h = _cell(inputs + rows * 3 * H + gates, share_r, share_z, share_n, h, slopes, mask, H)
    tl.store(states + rows * H + place, h, mask=mask)
    if copies is not None:
        tl.store(copies + rows * H + place, h, mask=mask)


@jit("t", "n", "batch")
def _step_back(
    gradient: tl.tensor,
    product: tl.tensor,  # (G, B, H) gradient by way of the next step's gates; None at the last step
    kept: tl.tensor,  # (G, B, H) and straight from the next state, read and written
    slopes: tl.tensor, from_inputs: tl.tensor, from_states: tl.tensor, t: tl.tensor, n: tl.tensor, batch: tl.tensor,
    H: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One step of all rows, before its matrix product."""
    group = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < batch * H
    row, unit = place // H, place % H
    rows = (group * n + t).to(tl.int64) * batch
    own = group * batch * H + place
    into = _load(gradient + rows * H + place, mask)
    if product is not None:
        into += _load(product + own, mask) + _load(kept + own, mask)
    slopes += rows * 5 * H + row * 5 * H + unit
    gates = rows * 3 * H + row * 3 * H + unit
    _, _, _, straight = _cell_back(into, slopes, from_inputs + gates, from_states + gates, mask, H)
    tl.store(kept + own, straight, mask=mask)


@jit()
def _matrix(weight: tl.tensor, unit: tl.tensor, H: tl.constexpr) -> tl.tensor:
    """(WIDTH, WIDTH) weights of one gate, 0 outside (H, H)."""
    mask = (unit < H)[:, None] & (unit < H)[None, :]
    return _load(weight + unit[:, None] * H + unit[None, :], mask)


@jit("n", "batch")
def _sequence(
    inputs: tl.tensor, weight: tl.tensor, bias: tl.tensor, states: tl.tensor,
    slopes: tl.tensor,  # or None
    n: tl.tensor, batch: tl.tensor, H: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """All steps of one row. `tl.dot` takes 16 rows at least: few programs, where a row each keeps more of the GPU."""
    row, group = tl.program_id(0), tl.program_id(1)
    unit = tl.arange(0, WIDTH)
    mask = unit < H
    weight += group * 3 * H * H
    W_r, W_z, W_n = _matrix(weight, unit, H), _matrix(weight + H * H, unit, H), _matrix(weight + 2 * H * H, unit, H)
    bias += group * 3 * H + unit
    b_r, b_z, b_n = _load(bias, mask), _load(bias + H, mask), _load(bias + 2 * H, mask)
    h = tl.zeros((WIDTH,), tl.float32)
    for t in range(n):
        here = (group * n + t).to(tl.int64) * batch + row
        share_r = b_r + tl.sum(W_r * h[None, :], axis=1)
        share_z = b_z + tl.sum(W_z * h[None, :], axis=1)
        share_n = b_n + tl.sum(W_n * h[None, :], axis=1)
        into_slopes = None if slopes is None else slopes + here * 5 * H + unit
        h = _cell(inputs + here * 3 * H + unit, share_r, share_z, share_n, h, into_slopes, mask, H)
        tl.store(states + here * H + unit, h, mask=mask)


@jit("n", "batch")
def _sequence_back(
    gradient: tl.tensor, weight: tl.tensor, slopes: tl.tensor, from_inputs: tl.tensor, from_states: tl.tensor,
    n: tl.tensor, batch: tl.tensor, H: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """All steps of one row, backward."""
    row, group = tl.program_id(0), tl.program_id(1)
    unit = tl.arange(0, WIDTH)
    mask = unit < H
    weight += group * 3 * H * H
    W_r, W_z, W_n = _matrix(weight, unit, H), _matrix(weight + H * H, unit, H), _matrix(weight + 2 * H * H, unit, H)
    into = tl.zeros((WIDTH,), tl.float32)
    for back in range(n):
        here = (group * n + n - 1 - back).to(tl.int64) * batch + row
        into += _load(gradient + here * H + unit, mask)
        gates = here * 3 * H + unit
        to_r, to_z, to_n, straight = _cell_back(
            into, slopes + here * 5 * H + unit, from_inputs + gates, from_states + gates, mask, H
        )
        into = straight + tl.sum(W_r * to_r[:, None] + W_z * to_z[:, None] + W_n * to_n[:, None], axis=0)
