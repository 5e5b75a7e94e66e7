"""Training pairs to show in a report, with their labels and replacements."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from mispair.methods.report import Examples
from mispair.pairs.pairs import Pairs, Tokens

EACH = 3  # pairs of each kind
ExampleKind = Literal["matched", "mismatched", "new text", "new image"]


@dataclass(frozen=True)
class PairExample:
    """A training pair, its label y* (mean of both networks) and, if one half was replaced, the new half."""

    kind: ExampleKind
    text: str
    image: str  # its name in the data set
    label: Annotated[float, Field(allow_inf_nan=False)]
    mismatched: bool = False
    true_image: str | None = None  # that the text was written for
    new_text: str | None = None
    new_image: str | None = None

    @property
    def is_mismatched(self) -> bool:
        return self.mismatched or self.kind == "mismatched"

    @property
    def images(self) -> dict[str, str]:
        """The names of the images to show, by role."""
        shown = {"in the data": self.image}
        if self.new_image is not None:
            shown["replacement"] = self.new_image
            if self.is_mismatched and self.true_image is not None:
                shown["true, not in training"] = self.true_image
        return shown


def sample_examples(method: Examples | None, pairs: Pairs, seed: int) -> tuple[PairExample, ...]:
    """Random pairs of each kind; none of methods without labels and new partners."""
    mismatched = pairs.mismatched
    if method is None or mismatched is None or not isinstance(pairs.right, Tokens) or not pairs.right.texts:
        return ()
    labels, new_text, new_image = method.labels, method.new_right, method.new_left
    if labels is None or new_text is None or new_image is None:
        return ()
    rng, texts = np.random.default_rng(seed), pairs.right.texts
    truth = pairs.link if pairs.truth is None else pairs.truth

    def image(row: int) -> str:
        return pairs.left_ids[row] if pairs.left_ids else str(row)

    def example(kind: ExampleKind, pair: int, **new: str) -> PairExample:
        own, true = image(pairs.link[pair]), image(truth[pair]) if new else None
        return PairExample(kind, texts[pair], own, float(labels[pair]), bool(mismatched[pair]), true, **new)

    def sample(mask: Any) -> list[int]:
        return [int(pair) for pair in rng.permutation(np.flatnonzero(mask))[:EACH]]

    return (
        *(example("matched", pair) for pair in sample(~mismatched)),
        *(example("mismatched", pair) for pair in sample(mismatched)),
        *(example("new text", pair, new_text=texts[new_text[pair]]) for pair in sample(new_text >= 0)),
        *(example("new image", pair, new_image=image(pairs.link[new_image[pair]])) for pair in sample(new_image >= 0)),
    )
