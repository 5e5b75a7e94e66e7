"""`mispair.calibrate(scores) -> Calibration`: probabilities, a noise rate and cuts from scores that people have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.calibrating.cuts import Cut, Ranked
from mispair.calibrating.evidence import View, by_audit, by_checked, by_shuffled, by_vectors, disagreement
from mispair.calibrating.scores import Scores, checked_rows, of_audit, open_scores, open_vectors
from mispair.errors import ConflictError, ShapeError
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.result_tables import write_table
from mispair.support.html import html_table

if TYPE_CHECKING:
    import pyarrow

    from mispair.auditing.audit import Audit

USUAL_PURITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
SETTLES = (
    "Give the vectors that the score was made of (`left` and `right`), the scores of a few hundred shuffled pairs "
    "(`shuffled`), an audit of the same rows (`audit`), or at least 60 random rows that you have checked (`checked`)."
)


@dataclass(frozen=True)
class Calibration:
    """Scores with the probability that each pair matches.

    Attributes:
        source: The scores of all N pairs.
        readable: (N,) whether each pair has all scores.
        views: What each kind of evidence says about the readable pairs; the last one counts.
        notes: What the reader should know.
    """

    source: Scores
    readable: npt.NDArray[np.bool_]
    views: tuple[View, ...]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.readable)

    def __repr__(self) -> str:
        return (
            f"<Calibration of {', '.join(self.source.columns)}: {int(self.readable.sum()):,} of {len(self):,} pairs, "
            f"noise rate {self.noise_rate:.1%} ({self.view.low:.1%} to {self.view.high:.1%})>"
        )

    @property
    def view(self) -> View:
        """The evidence that the probabilities come from."""
        return self.views[-1]

    @property
    def noise_rate(self) -> float:
        """Estimated share of wrong pairs; `view` has its interval, and what counts as wrong."""
        return self.view.rate

    @property
    def match_score(self) -> FloatArray:
        """(N,) probability that each pair matches; NaN where it has no score."""
        return self._of_all(self.view.match)

    def _of_all(self, values: FloatArray) -> FloatArray:
        found = np.full(len(self), np.nan)
        found[self.readable] = values
        return found

    @cached_property
    def ranked(self) -> Ranked:
        """The readable pairs in their order."""
        return Ranked(self.view.order, self.view.match, (self.view.rate, self.view.low, self.view.high))

    def cut(self, *, purity: float | None = None, keep: int | None = None) -> Cut:
        """The cut for a wanted share of matched pairs, or a wanted number of pairs.

        Raises:
            ConfigError: Not exactly one of them is given, or there is no such cut.
        """
        if (purity is None) == (keep is None):
            raise ConflictError("one of `purity` and `keep` is needed")
        return self.ranked.purest(purity) if purity is not None else self.ranked.best(keep or 0)

    def cuts(self, purities: Sequence[float] = USUAL_PURITIES) -> list[Cut]:
        """The cuts for some purities, without those that are purer than all pairs or than any cut."""
        _, there = self.ranked.purities
        return [self.ranked.purest(purity) for purity in purities if there[-1] < purity <= there.max()]

    @property
    def table(self) -> pyarrow.Table:
        """A row for each pair: id, scores, `match_score` (the probability that it matches), `is_mismatch`, `status`."""
        import pyarrow

        match = self.match_score
        columns: dict[str, Any] = {"id": self.source.ids}
        columns |= {name: self.source.values[:, place] for place, name in enumerate(self.source.columns)}
        if len(self.source.columns) > 1:
            columns["combined_score"] = self._of_all(self.view.order)
        gaps = np.isnan(match)
        columns["match_score"] = pyarrow.array(match.astype(np.float32), mask=gaps)
        columns["is_mismatch"] = pyarrow.array(match < MATCH_THRESHOLD, mask=gaps)
        columns["status"] = np.where(gaps, "no score", "ok")
        return pyarrow.table(columns)

    def to_parquet(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes the table of all pairs; the file is named .parquet."""
        write_table(path, [self.table], overwrite=overwrite)

    def _repr_html_(self) -> str:
        """The usual cuts, for a notebook."""
        cuts = self.cuts()
        rows = [(cut.least, cut.match_score, f"{cut.kept:,}", cut.purity, cut.lost) for cut in cuts]
        columns = ["least score", "match_score", "pairs kept", "share that matches", "share of the matched pairs lost"]
        return html_table(rows, columns, repr(self)[1:-1])


def calibrate(
    scores: Any,
    score: str | Sequence[str] = (),
    *,
    left: Any = None,
    right: Any = None,
    shuffled: Any = None,
    audit: Audit | str | Path | None = None,
    checked: Mapping[str, bool] | npt.ArrayLike | str | Path | None = None,
    weight: str | npt.ArrayLike | None = None,
) -> Calibration:
    """Turn scores such as CLIP's into the probability that each pair matches, with a noise rate and cuts.

        found = mispair.calibrate("pairs.parquet", "clip", left="images.npy", right="texts.npy")
        found.cut(purity=0.95)
        found = mispair.calibrate(frame, ["clip", "vlm"], checked="checked.csv")

    Scores say nothing about right and wrong by themselves; at least one kind of evidence is needed. Higher scores must
    mean better pairs. Several columns are combined.

    Args:
        scores: The path of a table (parquet, CSV) or of a folder of parquet files (Hugging Face, DataComp); a table of
            pandas, polars, pyarrow or datasets; or an array (N,) or (N, columns).
        score: The columns of a table.
        left: The vectors that the score is the cosine of: an array (N, D), or the path of an .npy file. mispair
            compares with shuffled pairs of them.
        right: Those of the other side.
        shuffled: Scores of shuffled pairs, made in the same way: a table with the same columns, or an array.
        audit: An audit of the same rows, or its folder.
        checked: Rows that people have checked, drawn at random: True or False by id; an array (N,) of 1 (right), 0
            (wrong) and NaN; the name of a column; or a CSV with the columns id and right.
        weight: How many rows each checked one stands for, if some were drawn more often: a column, or an array (N,).

    Raises:
        ConfigError: There is no evidence, or it contradicts the scores.
        DataError: The scores or the evidence cannot be read, or are too few.
    """
    source = open_scores(scores, [score] if isinstance(score, str) else list(score))
    if (left is None) != (right is None):
        raise ConflictError("one of `left` and `right`", expected="both")
    if left is None and shuffled is None and audit is None and checked is None:
        names = listed_columns(source.columns)
        raise ConflictError(f"{names} alone cannot say which pairs are wrong: any noise rate fits", advice=SETTLES)
    readable = np.asarray(~np.isnan(source.values).any(axis=1))
    values, columns = source.values[readable], source.columns
    views: list[View] = []
    if audit is not None:
        match, rate = of_audit(audit, source)
        known = ~np.isnan(match)
        readable = readable & known
        values = source.values[readable]
        views.append(by_audit(values, match[readable], rate, columns))
    if left is not None:
        if len(columns) > 1:
            raise ConflictError("`left` and `right` belong to one score", where="score", expected="one column")
        sides = [open_vectors(side, name, len(source)) for side, name in ((left, "left"), (right, "right"))]
        views.append(by_vectors(values[:, 0], sides[0][readable], sides[1][readable], columns[0]))
    elif shuffled is not None:
        null = open_scores(shuffled, columns).values
        if null.shape[1] != len(columns):
            raise ShapeError(f"{null.shape[1]} columns", where="shuffled", expected=f"{len(columns)}, as the scores")
        views.append(by_shuffled(values, null[~np.isnan(null).any(axis=1)], columns))
    if checked is not None:
        rows, matched, stands_for = checked_rows(source, checked, weight, readable)
        views.append(by_checked(values, rows, matched, columns, stands_for, views[-1] if views else None))
    found = Calibration(source, readable, tuple(views), ())
    notes = [*_gaps(found), *filter(None, [disagreement(views)]), *_limits(found.view)]
    return Calibration(source, readable, tuple(views), tuple(notes))


def listed_columns(columns: Sequence[str]) -> str:
    return " and ".join(map(repr, columns))


def _gaps(found: Calibration) -> list[str]:
    missing = len(found) - int(found.readable.sum())
    return [f"{missing:,} of {len(found):,} pairs have no score and get no probability."] if missing else []


def _limits(view: View) -> list[str]:
    """What the evidence cannot see."""
    if view.evidence == "checked":
        return [f"The rate rests on {view.count:,} checked pairs and holds if they were drawn at random."]
    about = [
        "The rate counts pairs that have nothing to do with each other. Wrong pairs that are about the same subject do "
        "not look like shuffled ones, and are not in it: check 100 random rows to know what you would call wrong."
    ]
    return about + [
        f"Pairs with the partner of a look-alike: {one.found:.0%} fall below a match score of 0.5, and up to "
        f"{one.at_most:.1%} of all pairs can be such."
        for one in view.detections
        if one.kind == "similar"
    ]
