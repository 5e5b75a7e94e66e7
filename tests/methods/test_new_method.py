"""Adding a method takes a class and a line: a method of ten lines, registered and trained as a user would."""

from __future__ import annotations

import pytest
from torch import Tensor

import mispair
from mispair.errors import ConfigError
from mispair.methods import METHODS
from mispair.methods.base import Method, StepInputs, StepResult, similarity
from tiny import tiny_pairs


class Softmax(Method):
    """A contrastive loss, which mispair does not have."""

    def loss(self, net: int, inputs: StepInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        positive: Tensor = S.diagonal() / 0.07
        loss = (S / 0.07).logsumexp(dim=0) + (S / 0.07).logsumexp(dim=1) - 2 * positive
        return StepResult(loss.sum(), S, {"margin": (positive - S.mean()).mean()})


def test_a_new_method_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": "vse", "embed_size": 32, "word_size": 16, "batch_size": 32, "augment": False}
    with pytest.raises(ConfigError, match='no method "softmax"'):
        mispair.fit(tiny_pairs(8), method="softmax", device="cpu")
    monkeypatch.setitem(METHODS, "softmax", Softmax)
    pairs = tiny_pairs(30)
    matcher = mispair.fit(pairs, None, method="softmax", lr=3e-3, warmup_epochs=0, epochs=6, device="cpu", **settings)  # type: ignore[arg-type]
    assert matcher.evaluate(pairs).averaged.rsum > 200  # chance: about 105
