"""A GPU step as one command: recorded once for each shape of its inputs, then repeated.

A training step has hundreds of small operations. Launching them one by one takes several times as long as running
them. A CUDA graph launches all at once; only the inputs are copied to their places.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

MOST = 64  # recorded shapes; the rare ones beyond are run as they come
SEEN = 2  # a shape is recorded when it comes for the second time: the first run also prepares its kernels
OLD_END = "_cuda_endAllocateCurrentStreamToPool"  # its name before torch 2.8
T = TypeVar("T")


class CudaGraphStep(Generic[T]):
    """Runs `step` on inputs: frozen dataclasses, tuples and tensors in any nesting, all tensors on the GPU.

    The next call overwrites the result. `step` must do the same for all inputs of one shape, read nothing back and
    leave no gradients behind. Used as a context, it frees its memory at the end. Steps that never run at the same time
    may share a memory `pool` (`torch.cuda.graph_pool_handle()`).
    """

    def __init__(self, step: Callable[[Any], T], *, on: bool, pool: Any = None) -> None:
        self._step, self._on = step, on
        self._pool = torch.cuda.graph_pool_handle() if on and pool is None else pool
        self._seen: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], T]] = {}
        self._places: dict[Hashable, Tensor] = {}  # where the inputs are read, shared by all shapes that can

    def __call__(self, inputs: Any) -> T:
        if not self._on:
            return self._step(inputs)
        shape = _shape(inputs)
        self._seen[shape] += 1
        known = shape in self._recorded
        if not known and self._seen[shape] >= SEEN and len(self._recorded) < MOST:
            known = self._record(shape, inputs)
        if not known:
            return self._step(inputs)
        graph, places, result = self._recorded[shape]
        for place, tensor in zip(places, _tensors(inputs), strict=True):
            place.copy_(tensor)
        graph.replay()
        return result

    def __enter__(self) -> CudaGraphStep[T]:
        return self

    def __exit__(self, *_: object) -> None:
        """Free all recorded steps and their memory."""
        for device in {place.device for place in self._places.values()}:
            torch.cuda.synchronize(device)  # the last step may still be running in that memory
        self._forget()

    def _forget(self) -> None:
        self._recorded.clear()
        self._places.clear()
        if self._pool is not None:
            torch.cuda.empty_cache()

    def _record(self, shape: Hashable, inputs: Any) -> bool:
        """Records the step for inputs of this shape, without running it."""
        places = [self._place(number, tensor) for number, tensor in enumerate(_tensors(inputs))]
        device = places[0].device
        graph, stream, random_state = torch.cuda.CUDAGraph(), _stream(device), torch.cuda.get_rng_state(device)
        torch.cuda.synchronize(device)
        try:
            # This stream is recorded, so it must be on the GPU of the inputs, even if another GPU is the current one.
            # That is entered first, for `graph` stays on it where recording fails.
            # Other threads may load batches meanwhile, so only this thread is checked for operations that cannot be
            # recorded.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                copies = iter(places)
                result = self._step(_mapped(inputs, lambda _: next(copies)))
        except RuntimeError as error:
            warnings.warn(f"This GPU does not record steps, so training takes longer: {error}", stacklevel=2)
            self._on = False
            _end_recording(device, self._pool, random_state)
            self._forget()  # nobody repeats what was recorded before, and memory may be what is missing
            return False
        self._recorded[shape] = graph, places, result
        return True

    def _place(self, number: int, tensor: Tensor) -> Tensor:
        key = number, tensor.shape, tensor.dtype
        if key not in self._places:
            self._places[key] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self._places[key].copy_(tensor)
        return self._places[key]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of recorded steps on this GPU: graphs with common memory must share it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end_recording(device: torch.device, pool: Any, random_state: Tensor) -> None:
    """Clean up after a failed recording: torch still reserves memory and cannot draw random numbers."""
    name = "_cuda_endAllocateToPool" if hasattr(torch._C, "_cuda_endAllocateToPool") else OLD_END
    try:
        getattr(torch._C, name)(device.index, pool)
    except RuntimeError:  # torch has ended it
        return
    torch._C._cuda_releasePool(device.index, pool)
    fresh = torch.Generator(device)
    fresh.set_state(random_state)
    torch.cuda.default_generators[device.index].graphsafe_set_state(fresh)


def _mapped(inputs: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, tuple):
        return tuple(_mapped(part, change) for part in inputs)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        return replace(inputs, **{f.name: _mapped(getattr(inputs, f.name), change) for f in fields(inputs)})
    return inputs


def _shape(inputs: Any) -> Hashable:
    """All of the inputs but the numbers in their tensors."""
    return _mapped(inputs, lambda tensor: (tensor.shape, tensor.dtype))  # type: ignore[no-any-return]


def _tensors(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(inputs, found.append)
    return found
