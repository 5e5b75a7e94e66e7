"""What a summary says about the noise rate, in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.auditing.summary import AuditSummary, Checked, Detection, NoiseEstimate

SUMMARY = AuditSummary(
    pairs=1000, scored=1000, flagged=40, noise_rate=0.04, noise_rate_low=0.01, noise_rate_high=0.1, unreadable={},
    near_duplicates_left=0, near_duplicates_right=0, suggested_right=0, suggested_left=0, measures={}, notes=[],
    seconds=1.0, stages={},
)  # fmt: skip
RATE = "About 4 % of the pairs have nothing to do with each other (1 % to 10 %)."


def seen(at_most: float) -> Detection:
    return Detection(kind="similar", by="left", found=0.5, found_at_1_percent=0.5, at_most=at_most)


def decided(low: float, high: float) -> NoiseEstimate:
    return NoiseEstimate(decisions=100, rate=(low + high) / 2, low=low, high=high)


def checked(mismatched: int, *, learned: bool) -> Checked:
    """Of 40 checked pairs, with one expected mismatch."""
    return Checked(pairs=40, mismatched=mismatched, expected=1.2, error=1.0, learned=learned)


FOUND = "People call 21 of 40 checked pairs mismatched; the audit by itself expects 1."
BY_PEOPLE = {"decided": decided(0.46, 0.66), "checked": checked(21, learned=True)}


@pytest.mark.parametrize(
    ("changes", "blind", "contradicted", "contained"),
    [
        ({}, False, False, [RATE]),
        ({"detections": [seen(0.15)]}, False, False, [RATE, "cannot rule out that 15 %"]),
        ({"detections": [seen(0.6)]}, True, False, [RATE, "cannot rule out that 60 %"]),
        ({"detections": [seen(1.0)]}, True, False, [RATE, "cannot tell how many"]),
        ({"detections": [seen(0.6)], "decided": decided(0.05, 0.2)}, False, False, [RATE, "60 %", "By 100 decisions"]),
        ({"decided": decided(0.46, 0.66)}, False, True, [RATE, "By 100 decisions", "more than the audit"]),
        ({"decided": decided(0.001, 0.005)}, False, True, [RATE, "By 100 decisions", "less than the audit"]),
        ({"checked": checked(4, learned=False)}, False, False, [RATE]),
        ({"checked": checked(21, learned=True)}, False, True, [f"{FOUND} The match scores follow", RATE]),
        ({"checked": checked(21, learned=False)}, False, True, [f"{FOUND} Check at least 30", RATE]),
        (BY_PEOPLE, False, True, [RATE, "By 100 decisions", "The match scores follow these decisions"]),
    ],
)
def test_the_rate_in_words(changes: dict[str, Any], blind: bool, contradicted: bool, contained: list[str]) -> None:
    summary = SUMMARY.model_copy(update=changes)
    assert (summary.may_be_blind, summary.is_contradicted) == (blind, contradicted)
    sentences = summary.rate_sentences
    assert bool(summary.advice) == (summary.decided is None and (blind or contradicted))
    assert len(sentences) == len(contained)
    for sentence, part in zip(sentences, contained, strict=True):
        assert part in sentence.replace("\xa0", " ")


@given(rate=st.floats(0, 1), below=st.floats(0, 1), above=st.floats(0, 1))
def test_no_rate_is_said_to_be_nothing_for_certain(rate: float, below: float, above: float) -> None:
    low, high = rate * below, rate + (1 - rate) * above
    words = SUMMARY.model_copy(
        update={"noise_rate": rate, "noise_rate_low": low, "noise_rate_high": high}
    ).rate_sentence.replace("\xa0", " ")
    assert "(0 % to 0 %)" not in words
    assert "At most 0 %" not in words
