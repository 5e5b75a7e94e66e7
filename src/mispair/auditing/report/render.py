"""The report of an audit as one self-contained HTML page."""

from __future__ import annotations

from functools import cache

from jinja2 import Template

from mispair.auditing.report import charts
from mispair.auditing.report.page import Item, Page
from mispair.auditing.scoring.measures import MEANINGS
from mispair.auditing.summary import NOTHING_IN_COMMON, AuditSummary
from mispair.support.formatting import percent
from mispair.support.html import template

_LONGEST_TEXT = 3000  # characters of a caption, so that the page stays small

# How well a measure separates matched from mismatched pairs: its AUROC, and the word for it.
_VERDICTS = ((0.95, "very well"), (0.85, "well"), (0.7, "fairly"), (0.55, "a little"), (0.0, "hardly at all"))


def render(page: Page) -> str:
    """The page as HTML, without scripts and without anything that is fetched."""
    summary, (left, right) = page.summary, _nouns(page)
    has_curves = sum(page.observed) > 0 and page.highest > page.lowest
    return _template().render(
        page=page,
        summary=summary,
        meanings=MEANINGS,
        headline=_headline(summary),
        rate=summary.rates[0] if summary.scored else "–",
        interval="{1} to {2}".format(*summary.rates) if summary.scored else "",
        share_flagged=percent(summary.flagged / summary.scored) if summary.scored else "",
        unread=max(sum(summary.unreadable.values()), summary.pairs - summary.scored),
        left=left,
        right=right,
        histogram=charts.histogram(page.histogram, page.expected_matched) if sum(page.histogram) else None,
        curves=charts.curves(page.observed, page.shuffled, page.lowest, page.highest) if has_curves else None,
        width=charts.WIDTH,
        height=charts.HEIGHT,
        ceiling=_ceiling(summary),
        percent=percent,
        verdict=lambda separation: _verdict(separation, summary),
    )


@cache
def _template() -> Template:
    return template("audit.html", count=count, pairs=pairs, score=_score, ending=_ending)


def count(number: float) -> str:
    """A number with separators.

    >>> count(10000000)
    '10,000,000'
    """
    return f"{number:,.0f}"


def pairs(number: int) -> str:
    """A number of pairs.

    >>> pairs(1), pairs(7000)
    ('1 pair', '7,000 pairs')
    """
    return f"{number:,} pair{'s' * (number != 1)}"


def _score(score: float) -> str:
    """A match score; a probability is never written as 0 or as 1.

    >>> _score(0.0004), _score(0.5), _score(0.9996)
    ('<0.01', '0.50', '>0.99')
    """
    return "<0.01" if score < 0.005 else ">0.99" if score >= 0.995 else f"{score:.2f}"


def _ending(text: str) -> str:
    """The whole text, or as much of it as any page needs."""
    text = text.strip()
    more = len(text) - _LONGEST_TEXT
    return text if more <= 0 else f"{text[:_LONGEST_TEXT]} … ({more:,} more characters)"


def _headline(summary: AuditSummary) -> str:
    """The result in one sentence."""
    if not summary.scored:
        return f"None of the {pairs(summary.pairs)} could be scored." if summary.pairs else "There are no pairs."
    if summary.scored == 1:
        which = "pair that could be scored" if summary.pairs > 1 else "pair"
        return f"The only {which} is {'' if summary.flagged else 'not '}flagged."
    _, low, high = summary.rates
    if summary.nothing_in_common:
        return f"{NOTHING_IN_COMMON} ({low} to {high} of the pairs)."
    return summary.decided.sentence if summary.decided else summary.rate_sentence


def _nouns(page: Page) -> tuple[str, str]:
    """The nouns for the items of either side."""
    lefts, rights = ([pair.left for pair in page.worst], [pair.right for pair in page.worst])
    for group in page.near_duplicates:
        (lefts if group.side == "left" else rights).extend(group.items)
    left, right = _kind(lefts), _kind(rights)
    if left != right:
        return left, right
    noun = "text" if left == "caption" else left
    return f"left {noun}", f"right {noun}"


def _kind(items: list[Item]) -> str:
    if any(item.image for item in items):
        return "image"
    return "caption" if any(item.text for item in items) else "item"


def _ceiling(summary: AuditSummary) -> float:
    """The largest possible separation: the mismatched ones of the observed pairs are like shuffled ones."""
    return 1 - 0.5 * min(1.0, max(0.0, summary.noise_rate)) if summary.scored else 1.0


def _verdict(separation: float, summary: AuditSummary) -> str:
    """The separation of a measure in words, relative to the largest possible one."""
    possible = max(_ceiling(summary) - 0.5, 0.01)
    value = 0.5 + 0.5 * (separation - 0.5) / possible
    return next((word for least, word in _VERDICTS if value >= least), _VERDICTS[-1][1])
