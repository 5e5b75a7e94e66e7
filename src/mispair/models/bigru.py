"""A bidirectional GRU over ragged sequences."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mispair.compute.devices import full_precision
from mispair.models.ragged import inside, to, turn


class BiGRU(nn.Module):
    """One bidirectional layer, the two directions averaged: (B, n, D) to (B, n, H), zero where padded.

    The directions are two plain GRUs, the second over sequences turned round within their lengths. The result equals
    packed sequences, which need hundreds of small copies on a GPU. Both directions are computed together by `scan`, on
    a CPU and on a GPU with Triton; elsewhere by torch's GRU, one after the other.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.ahead = nn.GRU(inputs, hidden, batch_first=True)
        self.back = nn.GRU(inputs, hidden, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = to(turned(lengths, x.shape[1]), x.device)
        x_back = turn(x, order)
        ahead, back = self._scan(x, x_back) if scans(x.device) else (self.ahead(x)[0], self.back(x_back)[0])
        mean: Tensor = (ahead.float() + turn(back, order).float()) / 2
        return mean * inside(lengths, x.shape[1], x.device)[..., None]

    def _scan(self, x: Tensor, x_back: Tensor) -> tuple[Tensor, Tensor]:
        """Both directions at once, with the weights of the two GRUs stacked."""
        steps = torch.stack([x, x_back]).transpose(1, 2)  # (2, n, B, D)
        weights = [
            torch.stack([getattr(gru, f"{name}_l0") for gru in (self.ahead, self.back)])
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        # Half precision is faster on a GPU, but not on a CPU.
        with full_precision(x) if x.device.type == "cpu" else nullcontext():
            ahead, back = scan(steps.float(), *weights).transpose(1, 2)
        return ahead, back


def scans(device: torch.device) -> bool:
    """Whether `scan` runs on this device."""
    if device.type == "cpu":
        return True
    from mispair.models.kernels import gru  # Triton takes a while to import, and a CPU has no use for it

    return gru.available(device)


def scan(steps: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """Several independent GRUs side by side: inputs (G, n, B, D) to states (G, n, B, H).

    torch's GRU on a CPU is a chain of small operations, each with its own node of the backward pass. Here the G GRUs
    share each operation and the whole chain is one node, whose backward pass sums up the weights' gradient in a single
    product. On a GPU it is the same in `kernels.gru`, and in the precision that autocast gives to the inputs' product.
    """
    groups, n, batch, _ = steps.shape
    inputs = torch.baddbmm(bias_ih[:, None], steps.flatten(1, 2), weight_ih.transpose(1, 2))
    by_step = inputs.view(groups, n, batch, -1).transpose(0, 1)
    if steps.device.type != "cpu":
        from mispair.models.kernels import gru

        return gru.scan(by_step, weight_hh, bias_hh).transpose(0, 1)
    states: Tensor = _Scan.apply(by_step.contiguous(), weight_hh, bias_hh)  # type: ignore[no-untyped-call]
    return states.transpose(0, 1)


class _Scan(torch.autograd.Function):
    """h' = n + z (h - n), with r, z = sigmoid(x_rz + W_rz h + b_rz) and n = tanh(x_n + r (W_n h + b_n)).

    Takes the inputs' share of the gates, (n, G, B, 3H), the weights (G, 3H, H) and the biases (G, 3H) of the states'
    share; gives the states (n, G, B, H).
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        n, groups, batch, _ = inputs.shape
        H = weight.shape[2]
        to_gates, bias = weight.transpose(1, 2).contiguous(), bias[:, None]
        states = inputs.new_zeros(n + 1, groups, batch, H)
        rz, new, candidate = (inputs.new_empty(n, groups, batch, width) for width in (2 * H, H, H))
        # All steps are taken apart before the loop: for small states taking them one by one costs more than the sums.
        before, after = states[:-1].unbind(0), states[1:].unbind(0)
        by_step = (inputs[..., : 2 * H], inputs[..., 2 * H :], rz, rz[..., :H], rz[..., H:], new, candidate)
        steps = zip(*(x.unbind(0) for x in by_step), before, after, strict=True)
        for input_rz, input_new, rz_t, r_t, z_t, new_t, candidate_t, h, h_next in steps:
            share = torch.baddbmm(bias, h, to_gates)
            torch.add(input_rz, share[..., : 2 * H], out=rz_t).sigmoid_()
            candidate_t.copy_(share[..., 2 * H :])
            torch.addcmul(input_new, r_t, candidate_t, out=new_t).tanh_()
            torch.lerp(new_t, h, z_t, out=h_next)
        ctx.save_for_backward(states, rz, new, candidate, weight)
        return states[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient,) = gradients
        states, rz, new, candidate, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        n, groups, batch, H = new.shape
        r, z = rz[..., :H], rz[..., H:]
        # All that does not depend on the gradient of later steps is computed for all steps at once.
        to_new = (1 - z) * (1 - new.square())
        to_z = (states[:-1] - new) * z * (1 - z)
        to_r = candidate * r * (1 - r)
        from_inputs = new.new_empty(n, groups, batch, 3 * H)  # gradient of the inputs' share of the gates
        from_states = new.new_empty(n, groups, batch, 3 * H)  # and of the states' share
        into = torch.zeros_like(new[0])
        here, there = from_inputs, from_states
        by_step = (
            gradient, to_new, to_r, to_z, r, z, there, there[..., : 2 * H], there[..., 2 * H :],
            here[..., :H], here[..., H : 2 * H], here[..., : 2 * H], here[..., 2 * H :],
        )  # fmt: skip
        steps = zip(*(x.unbind(0)[::-1] for x in by_step), strict=True)
        for g, new_t, r_slope, z_slope, r_t, z_t, gates, gates_rz, gates_new, in_r, in_z, in_rz, in_new in steps:
            into += g
            torch.mul(into, new_t, out=in_new)
            torch.mul(in_new, r_slope, out=in_r)
            torch.mul(into, z_slope, out=in_z)
            gates_rz.copy_(in_rz)
            torch.mul(in_new, r_t, out=gates_new)
            into = torch.baddbmm(into * z_t, gates, weight)
        flat_gates, flat_states = (x.transpose(0, 1).flatten(1, 2) for x in (from_states, states[:-1]))
        return from_inputs, flat_gates.transpose(1, 2) @ flat_states, flat_gates.sum(dim=1)


def turned(lengths: Tensor, width: int) -> Tensor:
    """Positions in the flattened (B * width) to turn each sequence round within its length; padding stays.

    >>> turned(torch.tensor([3, 1]), 4)
    tensor([2, 1, 0, 3, 4, 5, 6, 7])
    """
    position, last = torch.arange(width, device=lengths.device), lengths[:, None] - 1
    inside_item = torch.where(position <= last, last - position, position)
    return (inside_item + width * torch.arange(len(lengths), device=lengths.device)[:, None]).flatten()
