"""The pairs that a model was trained on, or other pairs read in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mispair.errors import ConfigError, DataError
from mispair.pairs.layouts.loading import SHAPES, load_split
from mispair.pairs.pairs import Pairs
from mispair.retrieval.matcher import Matcher


def load_for(
    matcher: Matcher,
    split: str,
    data: str | None = None,
    captions_per_image: int | None = None,
    *,
    advice: str = "give --data with the folder of the data set",
) -> Pairs:
    """Reads one split with the vocabulary of a model.

    Args:
        matcher: The model.
        split: Such as train or test.
        data: Data set; the one that the model was trained on by default.
        captions_per_image: Of `data`, where its files leave it open.
        advice: What to do where the data of the model is not known or not there, for the error.

    Raises:
        DataError: The model was trained from Python, so its data has no place; or its data is gone.
    """
    config = matcher.config
    if data:
        if captions_per_image is None and Path(data).resolve() == Path(config.data):
            captions_per_image = config.captions_per_image
        config = replace(config, data=data, captions_per_image=captions_per_image)
    elif captions_per_image is not None:
        raise ConfigError("--captions-per-image is of --data, which is not given; the model knows that of its own.")
    elif config.data != SHAPES and not Path(config.data).is_absolute():  # `mispair train` keeps absolute paths
        raise DataError(f'This model was trained from Python, on pairs named "{config.data}"; {advice}.')
    elif config.data != SHAPES and not Path(config.data).exists():
        raise DataError(f"{config.data}, which the model was trained on, is not there any more; {advice}.")
    return load_split(config, split, matcher.vocabulary)
