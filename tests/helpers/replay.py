"""Recorded steps without a GPU: what a CUDA graph does, by the operations of torch on a CPU.

The operations of a step are noted with the tensors that they read and write. Repeating them does the same again with
what these tensors hold then; numbers of Python, and tensors that have been replaced since, are as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mispair.compute.cuda_graphs import SEEN, CudaGraphStep, _mapped, _shape, _tensors
from mispair.config import Config

READS_BACK = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"}
CHANGES_SHAPE = {"squeeze_", "unsqueeze_", "t_", "transpose_", "as_strided_"}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = function._schema.name.partition("::")[2], function._schema.returns
        if name in READS_BACK:
            raise RuntimeError(f"{name} waits for the GPU, so this step cannot be recorded")
        result = function(*args, **(kwargs or {}))
        is_view = bool(returns) and all(part.alias_info and not part.alias_info.is_write for part in returns)
        if not is_view and name not in CHANGES_SHAPE:
            self.operations.append((function, *(_same_memory(part) for part in (args, kwargs or {}, result))))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _same_memory(tree: Any) -> Any:
    """Tensors of the same memory that keep their shape."""
    return tree_map(lambda part: part.detach() if isinstance(part, Tensor) else part, tree)


class ReplayedStep(CudaGraphStep[Any]):
    """`CudaGraphStep` on a CPU; notes how often it has repeated a step."""

    replays = 0

    def __init__(self, step: Callable[[Any], Any], *, on: bool, pool: Any = None) -> None:  # noqa: ARG002
        super().__init__(step, on=False)
        self._tapes: dict[Any, tuple[Tape, list[Tensor], Any]] = {}

    def __call__(self, inputs: Any) -> Any:
        shape = _shape(inputs)
        self._seen[shape] += 1
        if self._seen[shape] < SEEN:
            return self._step(inputs)
        places = [self._place(number, tensor) for number, tensor in enumerate(_tensors(inputs))]
        for place, tensor in zip(places, _tensors(inputs), strict=True):
            place.copy_(tensor)
        if shape in self._tapes:
            tape, _, result = self._tapes[shape]
            tape.replay()
            ReplayedStep.replays += 1
            return result
        with Tape() as tape:
            copies = iter(places)
            result = self._step(_mapped(inputs, lambda _: next(copies)))
        self._tapes[shape] = tape, places, result
        return result

    def __exit__(self, *_: object) -> None:
        self._tapes.clear()
        self._places.clear()


def optimizer(config: Config, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """As `mispair.compute.optimizer.make` gives it for a GPU."""
    kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
    lr = torch.tensor(config.lr)
    return kind(parameters, lr, weight_decay=config.weight_decay, fused=True, capturable=True)
