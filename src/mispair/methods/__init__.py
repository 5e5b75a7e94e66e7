"""Training methods by name: those of mispair, and those of installed packages.

A package adds a method with an entry point of the group `mispair.methods`, in its pyproject.toml:

    [project.entry-points."mispair.methods"]
    softmax = "my_package:Softmax"
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from mispair.config import Config
from mispair.errors import ConfigError
from mispair.methods.base import Method
from mispair.methods.bicro import BiCro
from mispair.methods.decl import Decl
from mispair.methods.mend import Mend
from mispair.methods.mscn import Mscn
from mispair.methods.ncr import NCR
from mispair.methods.oracle import Oracle
from mispair.methods.plain import Plain
from mispair.methods.repair import Repair

GROUP = "mispair.methods"
METHODS: dict[str, type[Method]] = {
    "plain": Plain,
    "mend": Mend,
    "repair": Repair,
    "oracle": Oracle,
    "decl": Decl,
    "ncr": NCR,
    "bicro": BiCro,
    "mscn": Mscn,
}


def find(name: str) -> type[Method]:
    """The method of this name; ours come first."""
    if name in METHODS:
        return METHODS[name]
    installed = _installed()
    if name in installed:
        return _load(installed[name])
    known = [*METHODS, *installed]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise ConfigError(f'There is no method "{name}"; the methods are {", ".join(known)}.{hint}')


def select(config: Config) -> type[Method]:
    """The method of these settings, in the variant that they choose."""
    return find(config.method).variant(config)


def find_all() -> dict[str, type[Method]]:
    """All methods by name."""
    return METHODS | {name: _load(entry) for name, entry in _installed().items() if name not in METHODS}


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> type[Method]:
    origin = f'The method "{entry.name}" ({entry.value})'
    try:
        found = entry.load()
    except Exception as error:  # whatever the code of another package raises
        raise ConfigError(f"{origin} cannot be imported: {type(error).__name__}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{origin} is no subclass of mispair.methods.Method.")
    return found


__all__ = ["METHODS", "Method", "find", "find_all", "select"]
