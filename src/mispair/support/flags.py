"""Types of dataclasses and commands, for tyro's flags."""

from __future__ import annotations

from typing import Annotated, TypeVar

import tyro

T = TypeVar("T")

# A flag that may be left out. Its help is `--images PATH`, not `--images {None}|PATH (default: None)`.
OrNone = Annotated[T | None, tyro.conf.DisallowNone, tyro.conf.arg(help_behavior_hint="")]
