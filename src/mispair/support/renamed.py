"""Names of the version before, which work for one more version with a note."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function whose keyword argument `old` is called `new` now."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{function.__name__}: {old} is the old name of {new}; give only {new}.")
                note_renamed(f'the argument "{old}" of {function.__name__}', new)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def current_flag(word: str, renamed: Mapping[str, str]) -> str:
    """A word of a command line; a flag whose name is a key of `renamed`, such as max_steps, by its present name."""
    flag, equals, value = word.partition("=")
    key = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or key not in renamed:
        return word
    current = f"--{renamed[key].replace('_', '-')}"
    note_renamed(f"the flag {flag}", current)
    return f"{current}{equals}{value}"


def note_renamed(what: str, new: str) -> None:
    warnings.warn(f"{what} is called {new} now; the old name goes in 0.3.", stacklevel=4)
