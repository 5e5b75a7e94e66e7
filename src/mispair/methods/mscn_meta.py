"""MSCN's bilevel step: change the score layer by its effect on the next step of the rest of the network.

A network is theta and phi: phi is its score layer, MSCN's meta network, and theta all the rest. A virtual step with the
training loss L takes theta to theta' = theta - lr dL/dtheta, which depends on phi. The loss M of pairs that are known
to be matched or mismatched is computed with theta' and phi, and phi follows its gradient:

    dM/dphi = M_phi(theta', phi) - lr d/dphi (v . dL/dtheta),    v = M_theta(theta', phi).

The second term is of second order. The published code differentiates twice through the whole network, which a fused GRU
does not offer. But phi sees theta only by the similarity vectors x, and the loss is made of straight pieces of the
similarities S = sigmoid(score(x; phi)), so almost everywhere that term is

    d/dphi sum_ij (dL/dS_ij) (dS_ij/dx_ij . x'_ij),    x' = d/de x(theta + e v) at e = 0,

with dL/dS a constant. The score layer is differentiated twice, exactly; only x' is a difference quotient, of two
forward passes. (DARTS takes that of the gradient for phi: it jumps with every hinge and every ReLU of phi, x does not.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mispair.compute.devices import full_precision, uncached
from mispair.models import Network

# e |v|, how far theta is moved to either side. In float32, on new SGR and SAF networks of width 64 to 1,024, the second
# term is then wrong by 0.04 to 11 %. A wider move meets more kinks (DARTS' 0.01: 27 to 210 %), a shorter one rounding.
REACH = 1e-4
SCORE = "score"  # name of the layer that is phi

Weights = dict[str, Tensor]
Scoring = Callable[[Network], Tensor]  # a network's similarities of a fixed batch


class MetaGradient(NamedTuple):
    """Loss of the known pairs and its gradient."""

    loss: Tensor  # M, after the virtual step
    direct: list[Tensor]  # first term of the gradient, for each of phi's parameters
    mixed: list[Tensor]  # second term

    @property
    def total(self) -> list[Tensor]:
        return [a + b for a, b in zip(self.direct, self.mixed, strict=True)]


def meta_gradient(
    network: Network,
    scores: Scoring,
    loss: Callable[[Tensor], Tensor],
    meta_loss: Scoring,
    lr: float,
    clip: float = math.inf,
) -> MetaGradient:
    """Compute the loss of known pairs after a virtual step, and its gradient for the score layer.

    Nothing is changed and no random number drawn: the network is in evaluation mode for this, so that all passes are
    of one function, without dropout, and the running statistics see no virtual weights.

    `scores` returns the similarities S of the training batch, `loss` L of S, made of straight pieces, and `meta_loss`
    M. The virtual step has the learning rate `lr`. A gradient of L longer than `clip` is cut to this length, as before
    a real step; the factor counts as a constant.
    """
    phi, theta = list(score_layer(network).parameters()), body(network)
    device, team = phi[0].device, network.team
    with steady(network):
        with uncached(device):
            S, x = captured(network, scores)
            slopes, *slope = grads(loss(S), [S, *theta.values()])
            team.add_up(slope)
            rate = lr * (clip / length(slope)).clamp(max=1)
            there = {
                name: (weight.detach() - rate * g).requires_grad_()
                for (name, weight), g in zip(theta.items(), slope, strict=True)
            }
            M = with_weights(network, there, meta_loss)
            pulls = grads(M, [*there.values(), *phi])
        v, direct = dict(zip(there, pulls, strict=False)), pulls[len(there) :]
        moving = motion(network, scores, theta, v)
    with full_precision(x):
        x = x.detach().requires_grad_()
        again = score_layer(network)(x).squeeze(-1).sigmoid()
        shared = team.splits(len(slopes))  # then x is of this rank's left items
        slopes = slopes[team.part(len(slopes))] if shared else slopes
        (to_x,) = torch.autograd.grad((slopes * again).sum(), x, create_graph=True)
        mixed = grads((to_x * moving).sum(), phi)
        if shared:
            team.add_up(mixed)
    return MetaGradient(M.detach(), direct, [-rate * part for part in mixed])


def motion(network: Network, scores: Scoring, theta: Weights, v: Weights) -> Tensor:
    """x' (l, r, s): rate of change of the similarity vectors when theta moves along v.

    Always in float32, also under autocast: half precision would round the small move away.
    """
    with torch.no_grad(), full_precision(next(iter(v.values()))):
        reach = length(v.values())
        e = REACH / reach.clamp(min=torch.finfo(reach.dtype).tiny ** 0.5)
        ahead, back = (
            with_weights(
                network,
                {name: weight + sign * e * v[name] for name, weight in theta.items()},
                lambda there: captured(there, scores)[1],
            )
            for sign in (1, -1)
        )
        return (ahead - back) / (2 * e)


def length(parts: Iterable[Tensor]) -> Tensor:
    """Length of several tensors as one vector."""
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()


def score_layer(network: Network) -> nn.Module:
    """phi. Its input is (..., s), and the sigmoid of its output (..., 1) the similarity."""
    return network.get_submodule(SCORE)


def body(network: Network) -> Weights:
    """theta: all parameters except those of the score layer."""
    return {name: part for name, part in network.named_parameters() if not name.startswith(f"{SCORE}.")}


def captured(network: Network, scores: Scoring) -> tuple[Tensor, Tensor]:
    """Return the similarities and the inputs of the score layer."""
    given: list[Tensor] = []
    hook = score_layer(network).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    try:
        S = scores(network)
    finally:
        hook.remove()
    (x,) = given
    return S, x


def grads(loss: Tensor, of: list[Any]) -> list[Tensor]:
    """Gradients, zero where the loss does not depend on a tensor."""
    return list(torch.autograd.grad(loss, of, materialize_grads=True))


class _Carrier(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, function: Callable[[Network], Tensor]) -> Tensor:
        return function(self.network)


def with_weights(network: Network, weights: Weights, function: Callable[[Network], Tensor]) -> Tensor:
    """Evaluate `function` with these weights instead of the network's own; buffers stay."""
    renamed = {f"network.{name}": weight for name, weight in weights.items()}
    result: Tensor = functional_call(_Carrier(network), renamed, (function,))
    return result


@contextmanager
def steady(network: Network) -> Iterator[None]:
    """Switch to evaluation mode with gradients, and restore the mode afterwards."""
    was_training = network.training
    network.eval()
    for module in network.modules():
        if isinstance(module, nn.RNNBase):  # it does the same in both modes, but cuDNN gives no gradients in this one
            module.train()
    try:
        yield
    finally:
        network.train(was_training)


@contextmanager
def frozen(layer: nn.Module) -> Iterator[None]:
    """Freeze this layer inside the block."""
    layer.requires_grad_(False)
    try:
        yield
    finally:
        layer.requires_grad_(True)
