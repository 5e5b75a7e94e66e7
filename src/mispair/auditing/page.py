"""What the report of an audit shows, as plain values: everything is chosen, looked up and named already."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """One side of a pair as people see it."""

    text: str = ""  # a caption, or empty
    picture: str = ""  # a data URI of a thumbnail, or empty
    name: str = ""  # an id or a path, for whoever has neither


@dataclass(frozen=True)
class Partner:
    """A better partner for one side of a flagged pair."""

    id: str  # of the pair that it is taken from
    item: Item
    score: float  # match score of the new pair


@dataclass(frozen=True)
class Flagged:
    """A pair that looks wrong."""

    id: str
    score: float  # match score: probability that the pair is right
    reason: str
    left: Item
    right: Item
    new_lefts: tuple[Partner, ...] = ()  # for the right item, best first
    new_rights: tuple[Partner, ...] = ()  # for the left item


@dataclass(frozen=True)
class Alike:
    """Pairs whose items on one side are (nearly) the same."""

    side: str  # "left" or "right"
    ids: tuple[str, ...]
    items: tuple[Item, ...]
    more: int = 0  # further members that are not shown


@dataclass(frozen=True)
class Measure:
    """One ingredient of the score."""

    name: str  # such as "contrast"
    meaning: str  # one sentence
    weight: float  # share of the score, of all measures together 1
    separation: float  # AUROC of the observed pairs against shuffled ones: 0.5 says nothing


@dataclass(frozen=True)
class Page:
    """A whole report."""

    name: str  # of the data set
    pairs: int
    scored: int
    flagged: int
    noise_rate: float  # estimated share of wrong pairs
    noise_low: float  # its 95 % interval
    noise_high: float
    histogram: list[int]  # scored pairs by match score, equal bins from 0 to 1
    expected_right: list[float]  # of each bin, how many pairs are right by the scores' own account
    observed: list[int]  # pairs by combined score, equal bins from `lowest` to `highest`
    shuffled: list[float]  # what as many shuffled pairs would give, scaled to the estimated number of wrong ones
    lowest: float
    highest: float
    worst: list[Flagged]
    measures: list[Measure]
    alike: list[Alike] = field(default_factory=list)
    alike_pairs: int = 0  # how many pairs have a (nearly) equal one
    unreadable: dict[str, int] = field(default_factory=dict)  # by status
    unreadable_rows: list[tuple[str, str]] = field(default_factory=list)  # (id, status) of the first ones
    notes: list[str] = field(default_factory=list)  # what the reader should know about this audit
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
