"""The content of the report as plain values."""

from __future__ import annotations

import platform
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

import mispair
from mispair.auditing.findings import AuditSummary, Findings
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.tally import BINS, score_range
from mispair.pairs.pairs import IntArray
from mispair.support.formatting import listed, plain
from mispair.support.thumbnails import thumbnail


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
    """Pairs whose items on one side are (nearly) the same."""

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


WORST, GROUPS, MEMBERS = 24, 8, 4  # shown
MAX_IMAGES = 200


def make_page(audit: Findings) -> Page:
    """Looks up everything that the report shows."""
    lookup, judge, summary, tally = RowLookup(audit), audit.judge, audit.summary, audit.tally
    lowest, highest = score_range(judge)
    shuffled, _ = np.histogram(judge.null.clip(lowest, highest), BINS, (lowest, highest))
    scale = summary.noise_rate * tally.scored / max(1, len(judge.null))
    worst = _worst(audit)
    return Page(
        name=audit.source.name,
        summary=summary,
        histogram=tally.by_match.tolist(),
        expected_matched=tally.expected_matched.tolist(),
        observed=tally.by_sum.tolist(),
        shuffled=(scale * shuffled).tolist(),
        lowest=lowest,
        highest=highest,
        worst=[lookup.flagged(place) for place in worst],
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


def _worst(audit: Findings) -> list[int]:
    """Places of the worst pairs; those that a person has checked come last."""
    checked = np.isin(audit.suggested, list(audit.checked))
    places: list[int] = checked.argsort(kind="stable")[:WORST].tolist()
    return places


def _count_images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


class RowLookup:
    """Looks up captions and thumbnails of rows; only so many thumbnails that the page stays small."""

    def __init__(self, audit: Findings) -> None:
        self.audit, self.source = audit, audit.source
        self._left = MAX_IMAGES
        self.unreadable = 0  # images of those that were to be shown
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
        """What is missing on the page; complete when everything was looked up."""
        notes = []
        if self.unreadable:
            notes.append(f"{_count_images(self.unreadable)} could not be shown: their files cannot be read.")
        if self.not_found:
            places = listed([plain(str(place.resolve())) for place in self.source.images])
            notes.append(f"{_count_images(len(self.not_found))} were not found in {places}; give their folder.")
        return notes

    def left(self, row: int) -> Item:
        """The image; without one, its name."""
        if self.source.image_names is None:
            return Item(name=self.source.ids([row])[0])
        if not self.source.image_is_there(row):
            self.not_found.update(filter(None, self.source.image_names(np.array([row]))))
        return Item(image=self._thumbnail(row), name=self.source.ids([row])[0])

    def right(self, row: int) -> Item:
        return Item(text=self.source.texts([row])[0], name=self.source.ids([row])[0])

    def flagged(self, place: int) -> Flagged:
        """One of the pairs for which better partners were searched."""
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
        found = [
            (int(row), float(score)) for row, score in zip(partners.rows[place], partners.scores[place], strict=True)
        ]
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
