"""Adapter for sentence-transformers: a loss class and a batch sampler.

The training data has three columns: the left item, the right item, and `label` with the number of the pair.

args = SentenceTransformerTrainingArguments(..., batch_sampler=batch_sampler(robust))
trainer = SentenceTransformerTrainer(
    model, args, data, loss=RobustRankingLoss(model, robust), callbacks=[RobustCallback(robust)]
)  # RobustCallback is in mispair.robust.hugging_face
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from mispair.errors import ShapeError
from mispair.robust.pytorch import RobustLoss
from mispair.robust.robust import Robust
from mispair.robust.sampler import RobustSampler


class RobustRankingLoss(nn.Module):
    """In the place of `MultipleNegativesRankingLoss`; the temperature of `robust` is the inverse of its scale."""

    def __init__(self, model: nn.Module, robust: Robust) -> None:
        super().__init__()
        self.model, self.loss = model, RobustLoss(robust)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """The loss of a batch: `labels` are the numbers of the pairs."""
        return self.compute_loss_from_embeddings(
            [self.model(one)["sentence_embedding"] for one in sentence_features], labels
        )

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        if len(embeddings) != 2 or labels is None:
            expected = "two columns of items, and a column `label` with the pair numbers"
            raise ShapeError(f"{len(embeddings)} columns", where="the batch", expected=expected)
        loss: Tensor = self.loss(*embeddings, labels)
        return loss


def batch_sampler(robust: Robust) -> Callable[..., RobustSampler]:
    """For the argument `batch_sampler` of `SentenceTransformerTrainingArguments`."""

    def make(dataset: Any, batch_size: int, **_: Any) -> RobustSampler:
        if len(dataset) != len(robust):
            expected = f"the training data of Robust, with {len(robust):,}"
            advice = "To evaluate, give an `evaluator` in the place of an `eval_dataset`"
            raise ShapeError(f"{len(dataset):,} pairs", where="dataset", expected=expected, advice=advice)
        return robust.sampler(batch_size, rank=0, world=1)  # accelerate shares the batches out

    return make
