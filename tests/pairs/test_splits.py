"""Splits of the images of a data set."""

from __future__ import annotations

import numpy as np
import pytest

from mispair.pairs.splits import SplitRule


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [(SplitRule(), [60_000, 5_000, 5_000]), (SplitRule(dev=0.1, test=6_000), [57_000, 7_000, 6_000])],
)
def test_of_many_images_few_validate_and_test(rule: SplitRule, sizes: list[int]) -> None:
    """Unless it is said how many."""
    found = rule.random(np.arange(70_000), list(map(str, range(70_000))), "photos")
    assert [found.count(split) for split in ("train", "dev", "test")] == sizes
