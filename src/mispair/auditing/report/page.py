"""The report of an audit: its content as plain values, and as one self-contained HTML page."""

from __future__ import annotations

import platform
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np
import torch
from jinja2 import Template

import mispair
from mispair.auditing.match_scores import Scores
from mispair.auditing.report import charts
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.measures import MEANINGS
from mispair.auditing.scoring.near_duplicates import Groups
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.summary import BINS, NOTHING_IN_COMMON, AuditSummary, Tally, score_range
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.formatting import listed, percent, plain
from mispair.support.html import template
from mispair.support.thumbnails import thumbnail

WORST, GROUPS, MEMBERS = 24, 8, 4  # shown
MAX_IMAGES = 200
_LONGEST_TEXT = 3000  # characters of a caption, so that the page stays small
# How well a measure separates matched from mismatched pairs: its AUROC, and the word for it.
_VERDICTS = ((0.95, "very well"), (0.85, "well"), (0.7, "fairly"), (0.55, "a little"), (0.0, "hardly at all"))


@dataclass(frozen=True)
class Item:
    """One side of a pair."""

    text: str = ""  # a caption, or empty
    image: str = ""  # a data URI of a thumbnail, or empty
    name: str = ""  # an id or a path, shown without text and image


@dataclass(frozen=True)
class Partner:
    """A better partner for one side of a flagged pair."""

    id: str  # of the pair that it is taken from
    item: Item
    score: float  # probability that it is the missing partner


@dataclass(frozen=True)
class Flagged:
    """A flagged pair."""

    id: str
    score: float  # match score: probability that the pair matches
    reason: str
    left: Item
    right: Item
    new_lefts: tuple[Partner, ...] = ()  # for the right item, best first
    new_rights: tuple[Partner, ...] = ()  # for the left item


@dataclass(frozen=True)
class NearDuplicates:
    """Pairs with (nearly) the same item on one side."""

    side: str  # "left" or "right"
    ids: tuple[str, ...]
    items: tuple[Item, ...]
    more: int = 0  # further members that are not shown


@dataclass(frozen=True)
class Page:
    """A whole report."""

    name: str  # of the data set
    summary: AuditSummary
    histogram: list[int]  # scored pairs by match score, equal bins from 0 to 1
    expected_matched: list[float]  # expected number of matched pairs in each bin, the sum of its match scores
    observed: list[int]  # pairs by combined score, equal bins from `lowest` to `highest`
    shuffled: list[float]  # what as many shuffled pairs would give, scaled to the estimated number of mismatched ones
    lowest: float
    highest: float
    worst: list[Flagged]
    near_duplicates: list[NearDuplicates] = field(default_factory=list)
    near_duplicate_pairs: int = 0  # how many pairs have a (nearly) equal one
    unreadable_rows: list[tuple[str, str]] = field(default_factory=list)  # (id, status) of the first ones
    image_notes: list[str] = field(default_factory=list)  # images that could not be shown
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)


class Reported(Protocol):
    """What a report needs of an audit; see `Findings`."""

    @property
    def source(self) -> Source: ...
    @property
    def judge(self) -> Judge: ...
    @property
    def summary(self) -> AuditSummary: ...
    @property
    def tally(self) -> Tally: ...
    @property
    def match_score(self) -> Scores | Mapping[int, float]: ...
    @property
    def checked(self) -> Mapping[int, float]: ...
    @property
    def suggested(self) -> IntArray: ...
    @property
    def new_rights(self) -> Partners: ...
    @property
    def new_lefts(self) -> Partners: ...
    @property
    def near_duplicates(self) -> tuple[Groups, Groups]: ...
    @property
    def near_duplicate_pairs(self) -> int: ...
    @property
    def command(self) -> str: ...
    def reasons(self, rows: IntArray) -> list[str]: ...


def make_page(audit: Reported) -> Page:
    """Collect the content of the report."""
    lookup, judge, summary, tally = RowLookup(audit), audit.judge, audit.summary, audit.tally
    lowest, highest = score_range(judge)
    shuffled, _ = np.histogram(judge.null.clip(lowest, highest), BINS, (lowest, highest))
    scale = summary.noise_rate * tally.scored / max(1, len(judge.null))
    checked = np.isin(audit.suggested, list(audit.checked))  # these come last
    return Page(
        name=audit.source.name,
        summary=summary,
        histogram=tally.by_match.tolist(),
        expected_matched=tally.expected_matched.tolist(),
        observed=tally.by_sum.tolist(),
        shuffled=(scale * shuffled).tolist(),
        lowest=lowest,
        highest=highest,
        worst=[lookup.flagged(place) for place in checked.argsort(kind="stable")[:WORST].tolist()],
        near_duplicates=[
            group
            for side, groups in enumerate(audit.near_duplicates)
            for group in lookup.near_duplicates(side, groups.first(GROUPS // 2))
        ],
        near_duplicate_pairs=audit.near_duplicate_pairs,
        unreadable_rows=[(name, status) for _, name, status in tally.bad],
        image_notes=lookup.notes(),
        command=audit.command,
        versions={
            "mispair": mispair.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "Python": platform.python_version(),
            "system": sys.platform,
        },
    )  # fmt: skip


def _count_images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


class RowLookup:
    """Look up captions and thumbnails of rows, at most `MAX_IMAGES` of them."""

    def __init__(self, audit: Reported) -> None:
        self.audit, self.source = audit, audit.source
        self._left = MAX_IMAGES
        self.unreadable = 0  # images
        self.not_found: set[str] = set()  # names of images
        self._thumbnails: dict[Hashable, str] = {}

    def _thumbnail(self, row: int) -> str:
        key = self.source.image_key(row)
        if key not in self._thumbnails:
            content = self.source.image(row) if self._left > 0 else None
            if content is None:
                return ""
            self._left -= 1
            found = thumbnail(content)
            self.unreadable += bool(found.problem)
            self._thumbnails[key] = found.uri
        return self._thumbnails[key]

    def notes(self) -> list[str]:
        """Return notes on missing images, after all look-ups."""
        notes = []
        if self.unreadable:
            notes.append(f"{_count_images(self.unreadable)} could not be shown: their files cannot be read.")
        if self.not_found:
            places = listed([plain(str(place.resolve())) for place in self.source.images])
            notes.append(f"{_count_images(len(self.not_found))} were not found in {places}; give their folder.")
        return notes

    def left(self, row: int) -> Item:
        """Return the left item: an image, or its name."""
        if self.source.image_names is None:
            return Item(name=self.source.ids([row])[0])
        if not self.source.image_is_there(row):
            self.not_found.update(filter(None, self.source.image_names(np.array([row]))))
        return Item(image=self._thumbnail(row), name=self.source.ids([row])[0])

    def right(self, row: int) -> Item:
        return Item(text=self.source.texts([row])[0], name=self.source.ids([row])[0])

    def flagged(self, place: int) -> Flagged:
        """Return one of `Findings.suggested`, by its place."""
        audit, row = self.audit, int(self.audit.suggested[place])
        return Flagged(
            id=self.source.ids([row])[0],
            score=float(audit.match_score[row]),
            reason=audit.reasons(np.array([row]))[0],
            left=self.left(row),
            right=self.right(row),
            new_lefts=self._partners(audit.new_lefts, place, left=True),
            new_rights=self._partners(audit.new_rights, place, left=False),
        )

    def _partners(self, partners: Partners, place: int, *, left: bool) -> tuple[Partner, ...]:
        found = zip(partners.rows[place].tolist(), partners.scores[place].tolist(), strict=True)
        show = self.left if left else self.right
        return tuple(Partner(self.source.ids([row])[0], show(row), score) for row, score in found if row >= 0)

    def near_duplicates(self, side: int, groups: list[IntArray]) -> list[NearDuplicates]:
        show = self.left if side == 0 else self.right
        return [
            NearDuplicates(
                ("left", "right")[side],
                tuple(self.source.ids(group[:MEMBERS])),
                tuple(show(int(row)) for row in group[:MEMBERS]),
                max(0, len(group) - MEMBERS),
            )
            for group in groups
        ]


def render(page: Page) -> str:
    """Render the page as HTML, without scripts and external files."""
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
        verdict=lambda separation: _verdict(separation, _ceiling(summary)),
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
    """Return the text, cut after `_LONGEST_TEXT` characters."""
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
    """Return the largest possible separation: mismatched pairs are like shuffled ones."""
    return 1 - 0.5 * min(1.0, max(0.0, summary.noise_rate)) if summary.scored else 1.0


def _verdict(separation: float, ceiling: float) -> str:
    """Return the separation of a measure in words, relative to the largest possible one."""
    value = 0.5 + 0.5 * (separation - 0.5) / max(ceiling - 0.5, 0.01)
    return next((word for least, word in _VERDICTS if value >= least), _VERDICTS[-1][1])
