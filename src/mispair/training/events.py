"""Events of a training: the lines of metrics.jsonl."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mispair.methods.epoch_metrics import MethodReport


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int
    step: int  # steps of all networks so far


class StepEvent(_Event):
    """Means over the steps of one network since the previous event."""

    event: Literal["steps"] = "steps"
    network: int
    loss: float
    spread: float  # standard deviation of a batch's similarities
    grad_norm: float  # before clipping
    metrics: dict[str, float] = {}  # further ones of the method


class ValidationEvent(_Event):
    """Validation result of an epoch, from the averaged similarities of the networks."""

    event: Literal["validation"] = "validation"
    i2t_r1: float
    i2t_r5: float
    i2t_r10: float
    i2t_median_rank: float
    i2t_mean_rank: float
    t2i_r1: float
    t2i_r5: float
    t2i_r10: float
    t2i_median_rank: float
    t2i_mean_rank: float
    rsum: float
    networks_rsum: list[float]  # of each network alone
    seconds: float  # that the epoch took
    selection_seconds: float  # of these, in which the method chose the pairs


class MethodEvent(MethodReport):
    """The method's report on a main epoch."""

    event: Literal["method"] = "method"
    epoch: int
    step: int


Event = StepEvent | ValidationEvent | MethodEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def to_line(event: Event) -> bytes:
    values = event.model_dump(exclude_unset=True)
    return json.dumps({"event": event.event, **values}).encode() + b"\n"


def from_line(line: bytes) -> Event:
    """Read an event; raise ValueError if this version has no such event."""
    return _EVENT.validate_json(line)


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers to plot as curves."""
    values = {**event.model_dump(), **event.metrics} if isinstance(event, StepEvent) else event.model_dump()
    return {name: value for name, value in values.items() if isinstance(value, float)}
