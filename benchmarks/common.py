"""What the scripts share: their command line, and the checks of its numbers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence

import tyro

from mispair.cli.output import say, with_flags
from mispair.errors import InvalidValueError, MispairError, UnknownNameError


def run(main: Callable[..., None], argv: Sequence[str] | None = None) -> int:
    """Call `main` with the arguments of a command line, and return the exit code.

    A mistake of the user's becomes a sentence on stderr.
    """
    try:
        tyro.cli(main, args=argv)
    except MispairError as error:
        say(with_flags(str(error), inspect.signature(main).parameters), file=sys.stderr)
        return error.code
    return 0


def at_least(least: int, **given: int | tuple[int, ...] | None) -> None:
    """Refuse numbers that are too small."""
    for name, value in given.items():
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < least:
                raise InvalidValueError(str(number), where=name, expected=f"at least {least}")


def check_ratios(ratios: Sequence[float]) -> None:
    """Refuse noise ratios outside [0, 1]."""
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise InvalidValueError(
            ", ".join(map(str, ratios)) or "nothing",
            where="noise_ratio",
            expected="noise ratios from 0 to 1, such as 0.4",
        )


def check_names(names: Sequence[str], known: Collection[str], where: str) -> None:
    """Refuse names that are not known."""
    if unknown := [name for name in names if name not in known]:
        raise UnknownNameError(unknown[0], where=where, expected=f"one of {', '.join(known)}")
