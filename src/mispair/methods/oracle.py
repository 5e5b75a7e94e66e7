"""The ceiling: plain training on the pairs that are known to be right. What other methods reach is held against it."""

from __future__ import annotations

import numpy as np

from mispair.config import Config
from mispair.data.loader import PairLoader
from mispair.errors import ConfigError
from mispair.methods.base import Split
from mispair.methods.plain import Plain
from mispair.models import Network


class Oracle(Plain):
    """`Plain` without the wrong pairs."""

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        wrong = loader.pairs.mismatched
        if wrong is None:
            raise ConfigError("The oracle needs pairs whose truth is known; inject noise with --noise-ratio.")
        self._right = Split(np.flatnonzero(~wrong))

    def begin_warmup(self) -> list[Split]:
        return [self._right] * len(self.nets)

    def begin_epoch(self, epoch: int) -> list[Split]:  # noqa: ARG002 - the same pairs in every epoch
        return self.begin_warmup()
