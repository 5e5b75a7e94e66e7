"""Training methods by name, including those of installed packages.

A package adds a method with an entry point of the group `mispair.methods`, in its pyproject.toml:

    [project.entry-points."mispair.methods"]
    softmax = "my_package:Softmax"
"""

from __future__ import annotations

from mispair.config import Config
from mispair.methods.base import Method
from mispair.methods.bicro import BiCro
from mispair.methods.decl import Decl
from mispair.methods.mend import Mend
from mispair.methods.mscn import Mscn
from mispair.methods.ncr import NCR
from mispair.methods.oracle import Oracle
from mispair.methods.plain import Plain
from mispair.methods.repair import Repair
from mispair.support.registry import Registry

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
REGISTRY: Registry[Method] = Registry("method", Method, METHODS)  # type: ignore[type-abstract]
find, find_all = REGISTRY.find, REGISTRY.all


def list_methods() -> dict[str, str]:
    """List the methods for `mispair.fit`, with one line each.

    >>> list_methods()["plain"]
    'Triplet loss on the hardest negatives of the batch; every pair is taken for a match.'
    """
    return REGISTRY.titles()


def select(config: Config) -> type[Method]:
    """Return the method class for these settings, including its variant."""
    return find(config.method).variant(config)


__all__ = ["METHODS", "Method", "find", "find_all", "list_methods", "select"]
