"""Numbers and texts as people read them, on pages and in the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

# Characters that UTF-8 cannot encode, XML forbids or a terminal executes, and marks that reverse the text direction.
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
_NAMED = 12


def clean(value: Any) -> Any:
    """Replace characters harmful to a page or a terminal; results of templates are clean already."""
    return FORBIDDEN.sub("\ufffd", value) if isinstance(value, str) and not isinstance(value, Markup) else value


def listed(names: Sequence[str]) -> str:
    """Join names for a message, at most twelve.

    >>> listed(["a", "b", "c"])
    'a, b, c'
    """
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + more


def plain(text: str) -> str:
    """Replace lone surrogates: tables, encoders and files refuse them.

    >>> plain("caf\\udce9")
    'caf?'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def duration(seconds: float) -> str:
    """A number of seconds as people say it.

    >>> duration(1.23), duration(75.4), duration(7500), duration(270000)
    ('1.2 s', '1 min 15 s', '2 h 5 min', '3 d 3 h')
    """
    if seconds < 59.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def percent(share: float, largest: float | None = None) -> str:
    """A share in per cent, with as many decimals as the `largest` of the shares beside it needs.

    >>> [percent(share).replace("\\xa0", " ") for share in (0.388, 0.0388, 0.00038, 0.00001, 0)]
    ['39 %', '3.9 %', '0.04 %', '<0.01 %', '0 %']
    >>> [percent(share).replace("\\xa0", " ") for share in (0.988, 0.9966, 0.99966, 1)]
    ['99 %', '99.7 %', '99.97 %', '100 %']
    """
    largest = share if largest is None else largest
    if 0 < share == largest < 0.00005:
        return "<0.01\xa0%"
    rest = 1 - largest if 1 - largest > 0.00005 else 1
    decimals = 0 if not share else 2 if min(largest, rest) < 0.001 else 1 if largest < 0.0995 or rest < 0.0095 else 0
    return f"{100 * share:.{decimals}f}\xa0%"


def byte_size(n_bytes: int) -> str:
    """A size in its largest unit.

    >>> byte_size(999), byte_size(8_552_448_000)
    ('999 bytes', '8.55 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} bytes"


def beginning(text: str, most: int) -> str:
    """Strip a text and cut it at a word if it is longer than `most`.

    >>> beginning(" A dog in the snow ", 9)
    'A dog in …'
    """
    text = text.strip()
    if len(text) <= most:
        return text
    head = text[:most]
    space = head.rfind(" ")
    return (head[:space] if space > most // 2 else head).rstrip() + " …"


def slug(text: str) -> str:
    """A text as part of a file name.

    >>> slug("VSE-inf, M = 4096")
    'vse-inf-m-4096'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "part"
