"""Turns validation errors of pydantic into sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_RULES = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dataclass_type": "a table",
    "dataclass_exact_type": "a table",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "a text that is not empty",
}


def sentences(error: ValidationError, *, flat: bool = False) -> str:
    """What is wrong, a clause for each value: `epochs is -1 but must be at least 0; ...`.

    Args:
        error: The error.
        flat: Name a value by its own key only, without the tables that it is in.
    """
    clauses: dict[str, list[str]] = {}  # of a union, each type that was tried has its own error
    for details in error.errors(include_url=False, include_context=True):
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # only wrong items were left out, which have their own clauses
        name, clause = _clause(details, flat)
        clauses.setdefault(name, []).append(clause)
    return "; ".join(" or ".join(dict.fromkeys(found)) for found in map(_joined, clauses.values()))


def _joined(clauses: Sequence[str]) -> list[str]:
    """Clauses about one value: the first whole, of the others only the rule."""
    return [clauses[0], *(clause.partition(" but must be ")[2] or clause for clause in clauses[1:])]


def _clause(details: ErrorDetails, flat: bool) -> tuple[str, str]:
    location, kind, value = details["loc"], details["type"], details.get("input")
    name = _name(location, flat)
    context: dict[str, Any] = details.get("ctx", {})
    if kind == "missing":
        return name, f'"{name}" is missing'
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return name, f'unknown key "{name}"'
    if kind == "value_error":  # raised by a validator of ours, which wrote the sentence
        return name, str(context["error"])
    if kind == "literal_error":
        rule = f"one of {str(context['expected']).replace(' or ', ', ').replace(chr(39), '')}"
    else:
        numbers = {key: f"{value:,.10g}" for key, value in context.items() if isinstance(value, int | float)}
        rule = _RULES[kind].format(**numbers) if kind in _RULES else details["msg"][:1].lower() + details["msg"][1:]
    huge = isinstance(value, int) and value.bit_length() > 1000  # Python does not print all of them
    return name, f"{name} is {'a huge number' if huge else repr(value)} but must be {rule}"


def _name(location: Sequence[int | str], flat: bool) -> str:
    """`part[2].rows[1].recipe`, counted from 1; without the names of types that pydantic adds for unions."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part + 1}]"
        elif part not in ("int", "float", "str", "bool", "none", "literal") and "[" not in part:
            name = part if flat or not name else f"{name}.{part}"
    return name
