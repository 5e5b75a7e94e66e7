"""What an audit says that it can see, against mismatches that were really made."""

from __future__ import annotations

import numpy as np
import pytest

import mispair
from made_pairs import made_pairs
from mispair.auditing import summary
from mispair.auditing.scoring import exchanges
from mispair.auditing.summary import detections


def test_of_random_mismatches_about_as_many_are_found_as_it_says() -> None:
    pairs = made_pairs(1500, 0.3, seed=2)
    found = mispair.audit(pairs.left, pairs.right)
    claimed = {one.words(): one for one in found.summary.detections}
    assert list(claimed)[:3] == ["at random", "between similar left items", "between the most similar left items"]
    random = claimed["at random"]
    assert random.found == pytest.approx(found.is_mismatch[pairs.mismatched].mean(), abs=0.05)
    assert random.at_most == found.judge.combination.high
    for by in ("left", "right"):  # the more alike, the harder
        assert random.found > claimed[f"between similar {by} items"].found
        assert claimed[f"between similar {by} items"].found >= claimed[f"between the most similar {by} items"].found
    example = claimed["between similar left items"].example
    assert len(found.source.find(example)) == 2


def test_mismatches_would_be_found_in_a_set_without_any() -> None:
    pairs = made_pairs(1500, 0.0, seed=2)
    random = mispair.audit(pairs.left, pairs.right).summary.detections[0]
    assert random.found > 0.5


def test_the_bound_holds_where_look_alikes_are_exchanged() -> None:
    pairs = made_pairs(1500, 0.0, noise=0.7, hidden=24, widths=(48, 40))
    near = pairs.left / np.linalg.norm(pairs.left, axis=1, keepdims=True)
    alike = near @ near.T
    np.fill_diagonal(alike, -1)
    right, free, rng = pairs.right.copy(), np.ones(1500, dtype=bool), np.random.default_rng(0)
    for row in range(300):
        other = rng.choice(np.argsort(-alike[row])[5:15])
        if free[row] and free[other]:
            right[[row, other]], free[[row, other]] = right[[other, row]], False
    found = mispair.audit(pairs.left, right).summary
    assert found.noise_rate_high < (~free).mean()  # each pair by itself looks right
    assert max(one.at_most for one in found.detections) >= (~free).mean()


def test_large_sets_are_judged_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = made_pairs(700, 0.2)
    monkeypatch.setattr(exchanges, "MOST", 100)
    found = mispair.audit(pairs.left, pairs.right)
    assert [one.words() for one in found.summary.detections] == ["at random", "between similar items"]
    monkeypatch.setattr(summary, "FEW", len(found.judge.similar) + 1)
    few = detections(found.judge, found.scores, 0.5, found.source.ids)
    assert [one.kind for one in few] == ["random"]
