"""Old names of arguments and flags work with a note."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mispair
from mispair.cli.main import main
from mispair.support.renamed import current_flag, renamed_argument
from tiny import tiny_pairs


def test_an_old_argument_works_with_a_note() -> None:
    pairs = tiny_pairs(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = mispair.add_noise(pairs, noise_ratio=0.5, seed=0)
    with pytest.warns(UserWarning, match='"ratio" of add_noise is called noise_ratio now'):
        found = mispair.add_noise(pairs, ratio=0.5, seed=0)  # type: ignore[call-arg]
    assert np.array_equal(found.link, expected.link)
    with pytest.raises(TypeError, match="ratio is the old name of noise_ratio"):
        mispair.add_noise(pairs, ratio=0.5, noise_ratio=0.5, seed=0)  # type: ignore[call-arg]


def test_a_decorated_function_keeps_its_name_and_its_other_arguments() -> None:
    @renamed_argument("old", "new")
    def function(first: int, *, new: int = 2) -> tuple[int, int]:
        """Text."""
        return first, new

    assert (function.__name__, function.__doc__, function(1), function(1, new=3)) == (
        "function",
        "Text.",
        (1, 2),
        (1, 3),
    )


def test_an_old_flag_works_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--ratio=1.5"]) == 2
    told = capsys.readouterr().err
    assert "the flag --ratio is called --noise-ratio now" in told
    assert "--noise-ratio needs noise ratios" in told


@pytest.mark.parametrize(
    ("word", "current"),
    [("--a-b", "--c-d"), ("--a_b=1", "--c-d=1"), ("--ab", "--ab"), ("a_b", "a_b"), ("--x=--a-b", "--x=--a-b")],
)
@pytest.mark.filterwarnings("ignore")
def test_only_flags_of_that_name_are_changed(word: str, current: str) -> None:
    assert current_flag(word, {"a_b": "c_d"}) == current
