"""The report of an audit: its content as plain values, and as one self-contained HTML page."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jinja2 import Template

import mispair
from mispair.auditing.match_scores import Scores
from mispair.auditing.report import charts
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.measures import MEANINGS
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.summary import BINS, NOTHING_IN_COMMON, SIDES, AuditSummary, Tally, score_range
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.formatting import listed, percent, plain
from mispair.support.html import template
from mispair.support.thumbnails import Thumbnail, thumbnail

WORST, GROUPS, MEMBERS = 24, 8, 4  # shown
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


@dataclass(frozen=True)
class Row:
    """What a report shows of a row."""

    id: str
    caption: str
    image: str = ""  # a data URI of a thumbnail, or empty
    not_found: str = ""  # name of a missing image
    unreadable: str = ""  # name of a file that is no image


@dataclass(frozen=True)
class Reported:
    """What a report needs of an audit."""

    name: str  # of the data set
    command: str
    summary: AuditSummary
    tally: Tally
    judge: Judge
    worst: IntArray  # (n,) the worst flagged rows; pairs that a person has checked come last
    scores: Scores  # (n,) their match scores
    reasons: list[str]
    new_rights: Partners  # for them
    new_lefts: Partners
    near_duplicates: list[tuple[str, IntArray, int]]  # side, first rows and size of each of the largest groups
    near_duplicate_pairs: int  # how many pairs have a (nearly) equal one
    rows: Mapping[int, Row]  # all of them
    images: tuple[Path, ...] = ()  # folders that were searched


def make_page(audit: Reported) -> Page:
    """Collect the content of the report."""
    judge, summary, tally, rows = audit.judge, audit.summary, audit.tally, audit.rows
    lowest, highest = score_range(judge)
    shuffled, _ = np.histogram(judge.null.clip(lowest, highest), BINS, (lowest, highest))
    scale = summary.noise_rate * tally.scored / max(1, len(judge.null))
    return Page(
        name=audit.name,
        summary=summary,
        histogram=tally.by_match.tolist(),
        expected_matched=tally.expected_matched.tolist(),
        observed=tally.by_sum.tolist(),
        shuffled=(scale * shuffled).tolist(),
        lowest=lowest,
        highest=highest,
        worst=[
            Flagged(
                id=rows[row].id,
                score=score,
                reason=reason,
                left=_left(rows[row]),
                right=_right(rows[row]),
                new_lefts=_partners(audit.new_lefts, place, rows, _left),
                new_rights=_partners(audit.new_rights, place, rows, _right),
            )
            for place, (row, score, reason) in enumerate(
                zip(audit.worst.tolist(), audit.scores.tolist(), audit.reasons, strict=True)
            )
        ],
        near_duplicates=[
            NearDuplicates(
                side,
                tuple(rows[row].id for row in group.tolist()),
                tuple((_left if side == "left" else _right)(rows[row]) for row in group.tolist()),
                size - len(group),
            )
            for side, group, size in audit.near_duplicates
        ],
        near_duplicate_pairs=audit.near_duplicate_pairs,
        unreadable_rows=[(name, status) for _, name, status in tally.bad],
        image_notes=_notes(audit),
        command=audit.command,
        versions={
            "mispair": mispair.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "Python": platform.python_version(),
            "system": sys.platform,
        },
    )


def _count_images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


def _notes(audit: Reported) -> list[str]:
    """Return notes on images that could not be shown."""
    notes = []
    if unreadable := {row.unreadable for row in audit.rows.values()} - {""}:
        notes.append(f"{_count_images(len(unreadable))} could not be shown: their files cannot be read.")
    if not_found := {row.not_found for row in audit.rows.values()} - {""}:
        places = listed([plain(str(place.resolve())) for place in audit.images])
        notes.append(f"{_count_images(len(not_found))} were not found in {places}; give their folder.")
    return notes


def _left(row: Row) -> Item:
    return Item(image=row.image, name=row.id)


def _right(row: Row) -> Item:
    return Item(text=row.caption, name=row.id)


def _partners(
    partners: Partners, place: int, rows: Mapping[int, Row], item: Callable[[Row], Item]
) -> tuple[Partner, ...]:
    found = zip(partners.rows[place].tolist(), partners.scores[place].tolist(), strict=True)
    return tuple(Partner(rows[row].id, item(rows[row]), score) for row, score in found if row >= 0)


def rows_to_show(audit: Reported) -> tuple[IntArray, IntArray]:
    """Return all rows of a report, and those whose images it shows."""
    groups = [[rows for side, rows, _ in audit.near_duplicates if side == name] for name in SIDES]
    pictured = np.concatenate([audit.worst, audit.new_lefts.rows.ravel(), *groups[0]]).astype(np.int64)
    every = np.concatenate([pictured, audit.new_rights.rows.ravel(), *groups[1]]).astype(np.int64)
    return np.unique(every[every >= 0]), np.unique(pictured[pictured >= 0])


def read_rows(source: Source, rows: IntArray, pictured: IntArray) -> dict[int, Row]:
    """Read what a report shows of rows, with the images of some of them."""
    thumbnails: dict[Hashable, Thumbnail] = {}
    found, images = {}, set(pictured.tolist() if source.has_images else ())
    for row, name, caption in zip(rows.tolist(), source.ids(rows), source.texts(rows), strict=True):
        found[row] = Row(name, caption)
        if row not in images:
            continue
        if not source.image_is_there(row):
            found[row] = Row(name, caption, not_found=source.image_texts([row])[0])
            continue
        key = source.image_key(row)
        if key not in thumbnails:
            thumbnails[key] = thumbnail(source.image(row) or b"")
        image = thumbnails[key]
        found[row] = Row(name, caption, image.uri, unreadable=str(key) if image.problem else "")
    return found


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
    return summary.decided.sentence if summary.decided else summary.rate_sentences[0]


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
