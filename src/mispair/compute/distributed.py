"""Training by several processes, started by torchrun and connected by torch.distributed.

The ranks of a `Team` share the work on a network. Each rank encodes its part of a batch and compares its left items
with all right items. Then every rank has all similarities and computes the same loss (`models.comparison`). The sum of
the gradients is the gradient of one process with the same batch.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mispair.errors import ConflictError, MispairError, RankLostError

FAILURE, TEXT = "failure", "text"  # keys of the store: the first rank that failed, and why
START_SECONDS = 1800.0  # in which all ranks must have come
WAIT = 3.0  # seconds in which a failing rank writes down why
TELLING = 1.0  # seconds for which the others stay: torchrun ends all ranks with the first one, also the one that prints
LONGEST = timedelta(days=14)  # for which ranks wait for the first one, which may audit or encode for hours
T = TypeVar("T")


class Team:
    """Ranks with a common batch."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.count = 0  # size of the batch, while this rank works on its part

    @property
    def alone(self) -> bool:
        return self.size == 1

    def splits(self, count: int) -> bool:
        """Whether a batch of `count` items is shared: each rank needs at least one."""
        return not self.alone and count >= self.size

    def part(self, count: int) -> slice:
        """The part of this rank, of `count` items."""
        return slice(*self._bounds(count)[self.rank : self.rank + 2])

    def _bounds(self, count: int) -> list[int]:
        each, more = divmod(count, self.size)
        return [each * place + min(place, more) for place in range(self.size + 1)]

    @contextmanager
    def on_part(self, count: int) -> Iterator[slice]:
        """Work on the part of this rank of a batch of `count` items, inside the block."""
        before, self.count = self.count, count
        try:
            yield self.part(count)
        finally:
            self.count = before

    def gather(self, part: Tensor, count: int) -> Tensor:
        """Join the parts of all ranks to (count, ...); their gradients are summed, as each rank uses it differently."""
        whole: Tensor = _Gather.apply(part, self, count)  # type: ignore[no-untyped-call]
        return whole

    def gather_alike(self, part: Tensor, count: int) -> Tensor:
        """The same, if all ranks compute the same from it: each one already has the whole gradient."""
        own = self.part(count)
        whole = self._gathered(part, count)
        return torch.cat([whole[: own.start], part, whole[own.stop :]])

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks; their gradients are summed, as each rank uses it differently."""
        if self.alone:
            return x
        summed: Tensor = _Total.apply(x, self)  # type: ignore[no-untyped-call]
        return summed

    def replicated(self, x: Tensor) -> Tensor:
        """x, computed by all ranks; its gradient is divided by their number, as gradients are summed later."""
        if self.alone:
            return x
        same = x.view_as(x)
        if same.requires_grad:
            same.register_hook(lambda gradient: gradient / self.size)  # type: ignore[no-untyped-call]
        return same

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors with their sum over the ranks, in one message for each dtype."""
        if self.alone:
            return
        tensors = [tensor.detach() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
            self._sum(flat)
            for tensor, new in zip(chosen, torch.split(flat, [t.numel() for t in chosen]), strict=True):
                tensor.copy_(new.view_as(tensor))

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of all ranks."""
        self.add_up([parameter.grad for parameter in parameters if parameter.grad is not None])

    def rows(self, function: Callable[[slice], Sequence[np.ndarray]], count: int) -> list[np.ndarray]:
        """Arrays of `count` rows; each rank computes its slice by `function`."""
        if not self.splits(count):
            return list(function(slice(0, count)))
        parts = [torch.from_numpy(np.ascontiguousarray(array)) for array in function(self.part(count))]
        return [self._gathered(part, count).numpy() for part in parts]

    def _sum(self, tensor: Tensor) -> None:
        with _message():
            dist.all_reduce(tensor)

    def _gathered(self, part: Tensor, count: int) -> Tensor:
        bounds = self._bounds(count)
        sizes = [end - start for start, end in pairwise(bounds)]
        sent = part.detach().contiguous()
        if len(sent) < max(sizes):  # messages have one size
            sent = torch.cat([sent, sent.new_zeros(max(sizes) - len(sent), *sent.shape[1:])])
        received = sent.new_empty(self.size, *sent.shape)
        with _message():
            dist.all_gather(list(received.unbind()), sent)
        return torch.cat([rows[:size] for rows, size in zip(received, sizes, strict=True)])


ALONE = Team()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, team: Team, count: int) -> Tensor:
        ctx.team, ctx.part = team, team.part(count)
        return team._gathered(part, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.team._sum(gradient)
        return gradient[ctx.part], None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        summed = x.clone(memory_format=torch.contiguous_format)
        team._sum(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.team._sum(gradient)
        return gradient, None


class Ranks:
    """All processes of a training, also as one team, `world`; the first reads and writes the run folder."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.world = ALONE if size == 1 else Team(rank, size)
        self._host = None if size == 1 else dist.new_group(backend="gloo", timeout=LONGEST)  # for what is no tensor

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def highest(self, *numbers: int) -> list[int]:
        """The highest of each number over all ranks."""
        if self.size == 1:
            return [*numbers]
        found = torch.tensor(numbers)
        with _message():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._host)
        return found.tolist()

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _message():
            dist.all_gather_object(values, value, group=self._host)
        return values

    def by_first(self, function: Callable[[], T]) -> T:
        """The result or error of `function` on the first rank, for all ranks."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = function()
            except MispairError as error:
                outcome[1] = error
        with _message():
            dist.broadcast_object_list(outcome, src=0, group=self._host)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def first_before_others(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank, then on the others, to reuse its files."""
        results: list[T] = []
        self.by_first(lambda: results.append(function()))
        return results[0] if results else function()

    def _failed(self, error: BaseException) -> BaseException:
        """The error to raise: one rank prints the reason for all of them."""
        if self._store is None:
            return error
        if isinstance(error, RankLostError):
            try:
                self._store.wait([TEXT], timedelta(seconds=WAIT))
                text, _, code = self._store.get(TEXT).decode().rpartition("\n")
            except RuntimeError:  # a killed process has not said anything
                return _silenced(error, not self._is_teller())
            reason = MispairError(text)
            reason.code = int(code)
            return _silenced(reason, True)
        teller = self._is_teller()
        if teller:
            text = str(error) if isinstance(error, MispairError) else f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):
                self._store.set(TEXT, f"{text}\n{getattr(error, 'code', 1)}")
        return _silenced(error, not teller)

    def _is_teller(self) -> bool:
        """Whether this rank failed first: it prints the reason."""
        assert self._store is not None
        try:
            return bool(self._store.compare_set(FAILURE, "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:  # the store has ended as well
            return True


def _silenced(error: BaseException, silent: bool) -> BaseException:
    if isinstance(error, MispairError):
        error.silent = silent
        if silent:
            time.sleep(TELLING)
    return error


_connected: Ranks | None = None


@contextmanager
def connect(device: str = "auto") -> Iterator[Ranks]:
    """Connect the processes of torchrun; without torchrun, only this one.

    An error on one rank ends all of them with the same reason, printed once. A nested `connect` yields the outer ranks.
    """
    global _connected
    if _connected is not None:
        yield _connected
        return
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        what = f"{size}, with RANK, but without {' and '.join(missing)}"
        advice = "Start the ranks with torchrun, or unset WORLD_SIZE to train in this process alone."
        raise ConflictError(what, where="WORLD_SIZE", advice=advice)
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        if device not in ("auto", "cuda"):
            found = f"{device}, but each of {size} ranks has a GPU of its own"
            raise ConflictError(found, where="device", advice="Give `device=cuda`.")
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count():  # NCCL wants a GPU for each
            backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(local_device())
    found, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store = _fresh(found, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    _connected = Ranks(rank, size, store)
    try:
        yield _connected
    except BaseException as error:
        reason = _connected._failed(error)
        if reason is error:
            raise
        raise reason from error
    else:
        dist.destroy_process_group()
    finally:
        _connected = None


def _fresh(store: Any, rank: int, size: int) -> Any:
    """A fresh part of the store: torchrun keeps the store when it restarts the ranks.

    The count of restarts differs between machines. So the first rank chooses a name, and answers the others until all
    ranks of this attempt have it.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"mispair/asking/{rank}", own)
        name = store.get(f"mispair/answer/{own}").decode()
        store.set(f"mispair/heard/{name}/{rank}", "")
        return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    waiting = set(range(1, size))
    deadline = time.monotonic() + START_SECONDS
    while waiting:
        for other in sorted(waiting):
            if store.check([f"mispair/asking/{other}"]):
                store.set(f"mispair/answer/{store.get(f'mispair/asking/{other}').decode()}", own)
            if store.check([f"mispair/heard/{own}/{other}"]):
                waiting.remove(other)
        if time.monotonic() > deadline:
            raise RankLostError(f"{len(waiting)} of {size} ranks did not start", advice="See the output of torchrun.")
        time.sleep(0.02)
    return dist.PrefixStore(own, store)  # type: ignore[attr-defined]


def local_device() -> int | None:
    """Number of the GPU of this rank; None for a single process."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    return int(rank) % max(1, torch.cuda.device_count())


@contextmanager
def _message() -> Iterator[None]:
    """Raise `RankLostError` if a message between ranks fails."""
    try:
        yield
    except torch.OutOfMemoryError:  # of this rank
        raise
    except RuntimeError as error:
        about = str(error).partition("\n")[0]
        what = (
            f"another rank ended without a reason ({about}): it was killed, or its machine is gone; torchrun names it"
        )
        advice = "Run the same command again to resume from the last checkpoint, with any number of ranks."
        raise RankLostError(what, advice=advice) from error
