"""Find and fix mismatched pairs, and train models that tolerate them.

import mispair

matcher = mispair.fit(mispair.load("shapes"), dev=mispair.load("shapes", "dev"), epochs=3)
matcher.score(images, ["a small red star above a blue ring"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mispair import errors
from mispair.errors import ConfigError, DataError, MispairError, TrainingError

__version__ = "0.3.0"

# One line a name here and one in _HOME: type checkers read the first, Python the second.
if TYPE_CHECKING:
    from mispair.auditing.audit import Audit as Audit
    from mispair.auditing.audit import audit as audit
    from mispair.auditing.auditor import Auditor as Auditor
    from mispair.auditing.keep import keep as keep
    from mispair.calibrating.calibrate import Calibration as Calibration
    from mispair.calibrating.calibrate import calibrate as calibrate
    from mispair.config import Config as Config
    from mispair.encoders.encoders import list_encoders as list_encoders
    from mispair.methods import list_methods as list_methods
    from mispair.models import list_models as list_models
    from mispair.pairs.layouts.opening import load as load
    from mispair.pairs.noise import add_noise as add_noise
    from mispair.pairs.pairs import Pairs as Pairs
    from mispair.pairs.pairs import Regions as Regions
    from mispair.pairs.pairs import Tokens as Tokens
    from mispair.pairs.pairs import Vectors as Vectors
    from mispair.retrieval.matcher import Matcher as Matcher
    from mispair.retrieval.matcher import evaluate_together as evaluate_together
    from mispair.reviewing.annotate import AnnotationResult as AnnotationResult
    from mispair.reviewing.annotate import annotate as annotate
    from mispair.reviewing.page import ReviewPage as ReviewPage
    from mispair.reviewing.page import review as review
    from mispair.robust.robust import Robust as Robust
    from mispair.training.fit import fit as fit

_HOME = {
    "AnnotationResult": "reviewing.annotate",
    "Audit": "auditing.audit",
    "Auditor": "auditing.auditor",
    "Calibration": "calibrating.calibrate",
    "Config": "config",
    "Matcher": "retrieval.matcher",
    "Pairs": "pairs.pairs",
    "Regions": "pairs.pairs",
    "ReviewPage": "reviewing.page",
    "Robust": "robust.robust",
    "Tokens": "pairs.pairs",
    "Vectors": "pairs.pairs",
    "add_noise": "pairs.noise",
    "annotate": "reviewing.annotate",
    "audit": "auditing.audit",
    "calibrate": "calibrating.calibrate",
    "evaluate_together": "retrieval.matcher",
    "fit": "training.fit",
    "keep": "auditing.keep",
    "list_encoders": "encoders.encoders",
    "list_methods": "methods",
    "list_models": "models",
    "load": "pairs.layouts.opening",
    "review": "reviewing.page",
}
__all__ = ["ConfigError", "DataError", "MispairError", "TrainingError", "errors", *_HOME]


def __dir__() -> list[str]:
    """List the public names, for `mispair.<TAB>`."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import on first use, so `mispair --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'mispair' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mispair.{_HOME[name]}"), name)
