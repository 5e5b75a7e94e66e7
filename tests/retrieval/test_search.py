"""Finding the images for a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.pairs.pairs import Pairs, Vectors
from mispair.retrieval.search import find_images


class Cosines:
    """A model: the dot product of what it is given."""

    vocabulary = None

    def score(self, left: Any, right: Any) -> npt.NDArray[np.float32]:
        one, other = (np.asarray(side.features if isinstance(side, Vectors) else side) for side in (left, right))
        return np.asarray(one @ other.T, dtype=np.float32)


def test_the_caption_shown_is_the_one_that_fits_its_image() -> None:
    images = np.eye(3, dtype=np.float32)
    captions = images[[1, 0, 0, 1, 2]]  # the first caption of the first image is one of the second
    pairs = Pairs(
        Vectors(images),
        Vectors(captions),
        np.array([0, 0, 0, 1, 1]),
        left_ids=("cat.jpg", "dog.jpg", "bird.jpg"),
        right_ids=("a dog", "a cat", "the cat", "my dog", "a bird"),
    )
    hits = find_images(Cosines(), pairs, np.array([[3, 2, 1]], dtype=np.float32), 3)  # type: ignore[arg-type]
    assert [(hit.image, hit.text) for hit in hits] == [("cat.jpg", "a cat"), ("dog.jpg", "my dog"), ("bird.jpg", "")]
