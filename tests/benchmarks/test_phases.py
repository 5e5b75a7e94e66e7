"""Which epochs a training is made of."""

from __future__ import annotations

from typing import Any

import pytest

from mispair.bench.report.figures import noisy_from
from mispair.config import Config
from mispair.methods import METHODS
from mispair.methods.plain import Plain
from mispair.training.settings import override
from phases import phases


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"method": "plain"}, [(0, 3), (3, 10)]),
        ({"method": "oracle"}, [(0, 3), (3, 10)]),
        ({"method": "repair"}, [(0, 3), (3, 5), (8, 5)]),
        ({"method": "repair", "noisy": "drop"}, [(0, 3), (3, 10)]),
        ({"method": "ncr", "noisy": "drop"}, [(0, 3), (3, 5), (8, 5)]),  # a setting of repair's alone
        ({"method": "ncr", "noisy_start": 0.0}, [(0, 3), (3, 0), (3, 10)]),
        ({"method": "ncr", "noisy_start": 1.0}, [(0, 3), (3, 10)]),
        ({"method": "mend"}, [(0, 3), (3, 3), (6, 7)]),
        ({"method": "mend", "student_share": 0.9}, [(0, 1), (1, 0), (1, 12)]),
    ],
)
def test_noisy_pairs_have_a_phase_where_they_take_part(
    settings: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    config = override(Config(warmup_epochs=3, epochs=10), settings)
    found = phases(config)
    assert [(phase.start, phase.epochs) for phase in found] == expected
    assert sum(phase.epochs for phase in found) == config.total_epochs
    later = None if len(found) < 3 or found[2].name == "student" else found[2].start
    assert noisy_from(config) == later


def test_results_of_a_missing_method_have_no_later_phase() -> None:
    assert noisy_from(Config(method="unheard-of")) is None


class Late(Plain):
    """A method of a user's own."""

    @classmethod
    def noisy_from(cls, config: Config) -> int | None:
        return config.epochs - 1


def test_a_new_method_says_itself_when_noisy_pairs_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "late", Late)
    config = Config(method="late", warmup_epochs=3, epochs=10)
    assert [(phase.start, phase.epochs) for phase in phases(config)] == [(0, 3), (3, 9), (12, 1)]
