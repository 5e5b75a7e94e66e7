"""Training methods by name."""

from __future__ import annotations

import difflib

from mispair.errors import ConfigError
from mispair.methods.base import Method
from mispair.methods.bicro import BiCro
from mispair.methods.decl import Decl
from mispair.methods.mscn import Mscn
from mispair.methods.ncr import NCR
from mispair.methods.oracle import Oracle
from mispair.methods.plain import Plain
from mispair.methods.repair import Repair

METHODS: dict[str, type[Method]] = {
    "plain": Plain,
    "repair": Repair,
    "oracle": Oracle,
    "decl": Decl,
    "ncr": NCR,
    "bicro": BiCro,
    "mscn": Mscn,
}


def find(name: str) -> type[Method]:
    """The method of this name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f'There is no method "{name}"; the methods are {", ".join(METHODS)}.{hint}')
    return METHODS[name]


__all__ = ["METHODS", "Method", "find"]
