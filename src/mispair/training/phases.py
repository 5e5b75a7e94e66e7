"""Phases of a training: warm-up, main epochs, and a later phase such as epochs with noisy pairs."""

from __future__ import annotations

from mispair import methods
from mispair.config import Config
from mispair.errors import ConfigError
from mispair.methods.base import Method
from mispair.methods.base import Phase as Phase


def phases(config: Config) -> list[Phase]:
    """Return the phases in order; most methods have two."""
    return _method(config).phases(config)


def noisy_from(config: Config) -> int | None:
    """Return the number of epochs before noisy pairs take part; None if they never do."""
    start = _method(config).noisy_from(config)
    return None if start is None else config.warmup_epochs + start


def _method(config: Config) -> type[Method]:
    try:
        return methods.select(config)
    except ConfigError:  # stored results may be of a method that is not installed here
        return Method
