"""Load pairs for a model: its training data, or other pairs with its vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mispair.errors import ConflictError, NotFoundError
from mispair.pairs.layouts.opening import SHAPES, load_split
from mispair.pairs.pairs import Pairs
from mispair.retrieval.matcher import Matcher


def load_for(
    matcher: Matcher,
    split: str,
    data: str | None = None,
    captions_per_image: int | None = None,
    *,
    advice: str = "Give `data` with the folder of the data set",
) -> Pairs:
    """Read one split with the vocabulary of a model.

    Args:
        matcher: The model.
        split: Split, such as train or test.
        data: Data set; by default the training data of the model.
        captions_per_image: Number of captions an image, if the files do not tell.
        advice: Advice in the error if the data of the model is unknown or missing.

    Raises:
        NotFoundError: The training data was in memory, or is gone.
        ConflictError: `captions_per_image` without `data`.
    """
    config = matcher.config
    if data:
        if captions_per_image is None and Path(data).resolve() == Path(config.data):
            captions_per_image = config.captions_per_image
        config = replace(config, data=data, captions_per_image=captions_per_image)
    elif captions_per_image is not None:
        what = "it belongs to `data`, which is not given; by default the model uses its own training data"
        raise ConflictError(what, where="captions_per_image")
    elif config.data != SHAPES and not Path(config.data).is_absolute():  # `mispair train` keeps absolute paths
        raise NotFoundError(
            "the model was trained from Python, on pairs of this name", where=config.data, advice=advice
        )
    elif config.data != SHAPES and not Path(config.data).exists():
        what = "the model was trained on this data, which is no longer there"
        raise NotFoundError(what, where=config.data, advice=advice)
    return load_split(config, split, matcher.vocabulary)
