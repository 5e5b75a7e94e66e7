"""Two towers over frozen vectors of any two encoders: a linear map and a small residual MLP a side."""

from __future__ import annotations

from torch import nn

from mispair.config import Config
from mispair.errors import ConflictError
from mispair.models.base import CosineNetwork, Encoded, SideSpec, l2norm, xavier_linear
from mispair.models.layers import BatchNorm, Dropout
from mispair.pairs.batches import Items


class Tower(nn.Module):
    """Vectors to unit vectors of the common space."""

    def __init__(self, spec: SideSpec, embed_size: int, dropout: float) -> None:
        super().__init__()
        # Foreign embeddings come in any scale and with a common offset; neither says anything about the match.
        self.standardise = BatchNorm(spec.size, affine=False)
        self.fc = xavier_linear(spec.size, embed_size)
        self.mlp = nn.Sequential(
            nn.Linear(spec.size, embed_size), nn.ReLU(), Dropout(dropout), nn.Linear(embed_size, embed_size)
        )

    def forward(self, items: Items) -> Encoded:
        x = self.standardise(items.values.float())
        return Encoded(None, None, l2norm((self.fc(x) + self.mlp(x)).float()))


class TwoTower(CosineNetwork):
    """A linear map and a small residual MLP over the vectors of each side; the similarity is the cosine."""

    ignores = ("word_size",)
    title = "two towers"
    takes_vectors = True

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__()
        for name, spec in (("left", left), ("right", right)):
            if spec.kind != "vectors":
                expected, advice = f"a model for {spec}, as the {name} side has", "Give `model=vse` or `model=sgr`."
                raise ConflictError("two-tower", where="model", expected=expected, advice=advice)
        self.left = Tower(left, config.embed_size, config.dropout)
        self.right = Tower(right, config.embed_size, config.dropout)
