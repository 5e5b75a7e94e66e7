"""mispair finds, mends and survives mismatched pairs.

import mispair

matcher = mispair.fit(mispair.load("shapes"), dev=mispair.load("shapes", "dev"), epochs=3)
matcher.score(images, ["a small red star above a blue ring"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from mispair.auditing.audit import Audit, audit
    from mispair.config import Config
    from mispair.pairs.layouts.loading import load
    from mispair.pairs.noise import add_noise
    from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
    from mispair.retrieval.matcher import Matcher, evaluate_together
    from mispair.robust.robust import Robust
    from mispair.training.fit import fit

_HOME = {
    "audit": "auditing.audit",
    "Audit": "auditing.audit",
    "fit": "training.fit",
    "Config": "config",
    "load": "pairs.layouts.loading",
    "add_noise": "pairs.noise",
    "Pairs": "pairs.pairs",
    "Regions": "pairs.pairs",
    "Tokens": "pairs.pairs",
    "Vectors": "pairs.pairs",
    "Matcher": "retrieval.matcher",
    "evaluate_together": "retrieval.matcher",
    "Robust": "robust.robust",
}
__all__ = [
    "Audit",
    "Config",
    "Matcher",
    "Pairs",
    "Regions",
    "Robust",
    "Tokens",
    "Vectors",
    "add_noise",
    "audit",
    "evaluate_together",
    "fit",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `mispair --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'mispair' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mispair.{_HOME[name]}"), name)
