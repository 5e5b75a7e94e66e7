"""Turns validation errors of pydantic into sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mispair.errors import ConfigError, InvalidValueError, UnknownNameError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_TABLES = ("dict_type", "model_type", "model_attributes_type", "dataclass_type", "dataclass_exact_type")


def sentences(error: ValidationError) -> str:
    """The problems, a clause for each value: `epochs is -1 but must be at least 0; ...`."""
    return "; ".join(problem.clause() for problem in _problems(error, flat=False))


def refusal(error: ValidationError) -> ConfigError:
    """The error about the first wrong setting; its advice names the others."""
    first, *others = _problems(error, flat=True)
    advice = " ".join(f"`{other.name}`: {other.clause()}." for other in others)
    if first.unknown:
        return UnknownNameError("unknown setting", where=first.name, advice=advice)
    return InvalidValueError(first.found, where=first.name, expected=" or ".join(first.rules), advice=advice)


@dataclass
class _Problem:
    """A wrong value: the value as found, and the rule of each type tried."""

    name: str
    found: str
    rules: list[str]
    unknown: bool = False

    def clause(self) -> str:
        if not self.rules:
            return self.found
        return f"{self.name} is {self.found} but must be {' or '.join(self.rules)}"


def _problems(error: ValidationError, *, flat: bool) -> list[_Problem]:
    """One for each value; `flat` names it by its own key only, without its tables."""
    found: dict[str, _Problem] = {}  # of a union, each type that was tried has its own error
    for details in error.errors(include_url=False, include_context=True):
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # only wrong items were left out, which have their own problems
        new = _problem(details, flat)
        old = found.setdefault(new.name, new)
        if old is not new:
            old.rules = list(dict.fromkeys([*old.rules, *(new.rules or [new.found])]))
    return list(found.values())


def _problem(details: ErrorDetails, flat: bool) -> _Problem:
    location, kind, value = details["loc"], details["type"], details.get("input")
    name = _name(location, flat)
    context: dict[str, Any] = details.get("ctx", {})
    if kind == "missing":
        return _Problem(name, f'"{name}" is missing', [])
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _Problem(name, f'unknown key "{name}"', [], unknown=True)
    if kind == "value_error":  # raised by a validator of ours, which wrote the sentence
        return _Problem(name, str(context["error"]), [])
    rule = "a table" if kind in _TABLES else details["msg"].removeprefix("Input should be ")
    huge = isinstance(value, int) and value.bit_length() > 1000  # Python does not print all of them
    return _Problem(name, "a huge number" if huge else repr(value), [rule])


def _name(location: Sequence[int | str], flat: bool) -> str:
    """`part[2].rows[1].recipe`, counted from 1; without pydantic's names of union types."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part + 1}]"
        elif part not in ("int", "float", "str", "bool", "none", "literal") and "[" not in part:
            name = part if flat or not name else f"{name}.{part}"
    return name
