"""The Python door: `mispair.fit(pairs) -> Matcher`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from mispair.config import Config, override
from mispair.data.pairs import Pairs
from mispair.engine import Trainer
from mispair.matcher import Matcher
from mispair.run import Run


def fit(
    pairs: Pairs,
    dev: Pairs | None = None,
    *,
    out: str | Path | None = None,
    console: Console | None = None,
    **settings: Any,
) -> Matcher:
    """Trains a matching model.

    Args:
        pairs: What to train on.
        dev: Pairs to choose the best epoch by; without them the last one is kept.
        out: Run folder; an interrupted run in it is continued. Without it nothing is kept on disk.
        console: Where to show progress; nowhere by default.
        **settings: Fields of `mispair.Config`, such as `method="plain"`, `model="sgr"`, `epochs=10`.
    """
    config = override(Config(data=pairs.name), settings, "fit")
    if out is None:
        with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
            return _train(config, pairs, dev, Path(folder) / "run", console)
    return _train(config, pairs, dev, Path(out), console)


def _train(config: Config, train: Pairs, dev: Pairs | None, out: Path, console: Console | None) -> Matcher:
    run = Run(out, config)
    try:
        return Trainer(config, train, dev, run, console).fit()
    finally:
        run.close()
