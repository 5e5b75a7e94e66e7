"""Adapter for open_clip: a loss in the place of `ClipLoss` and `SigLipLoss`, for its tasks and for loops of your own.

loss = RobustClipLoss(robust)
losses = loss(**model(images, texts), rows=rows, output_dict=True)

If open_clip calls the loss itself, as in `CLIPTask(model, loss=loss)`, it passes no pair numbers: set `loss.rows`
before each step. Their batches come from `robust.sampler`.
"""

from __future__ import annotations

from torch import Tensor

from mispair.errors import NotFoundError
from mispair.robust.pytorch import RobustLoss


class RobustClipLoss(RobustLoss):
    """`Robust.loss` with the arguments of open_clip's losses. With several GPUs it gathers the items of all."""

    rows: Tensor | None = None  # numbers of the pairs of the next batch

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        rows: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of a batch; as `{"contrastive_loss": loss}` if `output_dict`."""
        rows = self.rows if rows is None else rows
        self.rows = None  # so that the next batch is not taken for this one
        if rows is None:
            advice = "Give rows=..., or set loss.rows before each step"
            raise NotFoundError("no pair numbers", where="rows", advice=advice)
        loss = super().forward(image_features, text_features, rows, logit_scale, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss
