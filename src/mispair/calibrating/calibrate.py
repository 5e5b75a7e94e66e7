"""`mispair.calibrate(scores) -> Calibration`: probabilities, a noise rate and cuts from scores that people have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.calibrating.cuts import Cut
from mispair.calibrating.evidence import View, by_audit, by_checked, by_shuffled, by_vectors, disagreement
from mispair.calibrating.page import render
from mispair.calibrating.scores import Scores, checked_rows, of_audit, open_scores, open_vectors
from mispair.errors import ConflictError, ExistsError, ShapeError
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.result_tables import TABLE, defused, write_table
from mispair.support.files import Json, write_atomically
from mispair.support.formatting import percent
from mispair.support.html import html_table
from mispair.support.owned_folder import FolderKind, OwnedFolder

if TYPE_CHECKING:
    import pyarrow

    from mispair.auditing.audit import Audit

REPORT, SUMMARY, COMBINED = "report.html", "summary.json", "combined_score"
CALIBRATION = FolderKind("a calibration", "calibration.json", (TABLE, REPORT, SUMMARY))
TO_CHECK = 200  # random rows for people to check
USUAL_PURITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
SETTLES = (
    "Give the vectors that the score was made of (`left` and `right`), the scores of a few hundred shuffled pairs "
    "(`shuffled`), an audit of the same rows (`audit`), or at least 60 random rows that you have checked (`checked`); "
    "mispair calibrate --draw check.csv writes 200 rows to check."
)


@dataclass(frozen=True)
class Calibration:
    """Scores with the probability that each pair matches.

    Attributes:
        source: The scores of all N pairs.
        readable: (N,) whether each pair has all scores.
        views: Estimates of each kind of evidence for the readable pairs; the last one is used.
        notes: Notes for the reader.
    """

    source: Scores
    readable: npt.NDArray[np.bool_]
    views: tuple[View, ...]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.readable)

    def __repr__(self) -> str:
        rate, low, high = (percent(share, self.view.high) for share in self.view.rates)
        return (
            f"<Calibration of {', '.join(self.source.columns)}: {int(self.readable.sum()):,} of {len(self):,} pairs, "
            f"noise rate {rate} ({low} to {high})>"
        )

    @property
    def column(self) -> str:
        """The column of scores, or the combination of several."""
        return self.source.columns[0] if len(self.source.columns) == 1 else COMBINED

    @property
    def sentence(self) -> str:
        """The noise rate in words."""
        rate, low, high = (percent(share, self.view.high) for share in self.view.rates)
        return f"About {rate} of the pairs are wrong ({low} to {high}): {self.view.wrong}."

    def describe(self, cut: Cut) -> str:
        """A cut in words."""
        low, high = percent(cut.purity_low, cut.purity_high), percent(cut.purity_high)
        return (
            f"{self.column} >= {cut.least:.4g} keeps {cut.kept:,} pairs, {percent(cut.purity)} of them right ({low} to "
            f"{high}), and loses {percent(cut.lost)} of the right ones."
        )

    def summary(self, cut: Cut | None = None) -> dict[str, Json]:
        """The metrics, as in `summary.json`."""
        views: list[Json] = [
            {
                "evidence": view.evidence, "count": view.count, "wrong": view.wrong, "noise_rate": view.rate,
                "noise_rate_low": view.low, "noise_rate_high": view.high, "at_most": view.at_most,
            }
            for view in self.views
        ]  # fmt: skip
        cuts: list[Json] = [asdict(one) for one in self.cuts()]
        return {
            "columns": list(self.source.columns), "pairs": len(self), "scored": int(self.readable.sum()),
            "evidence": views, "cut": None if cut is None else asdict(cut), "cuts": cuts, "notes": list(self.notes),
        }  # fmt: skip

    def write(self, out: str | Path, cut: Cut | None = None, *, overwrite: bool = False, command: str = "") -> None:
        """Write a folder with the page, the table of all pairs and `summary.json`.

        Args:
            out: The folder.
            cut: A cut to show on the page.
            overwrite: Replace a calibration of other scores.
            command: The command line, for the page.

        Raises:
            DataError: The folder holds something else, or cannot be written.
        """
        where = None if self.source.path is None else str(self.source.path.resolve())
        request: dict[str, Json] = {"table": where, "score": list(self.source.columns)}
        with OwnedFolder(Path(out), CALIBRATION, request, overwrite=overwrite) as folder:
            folder.begin()
            write_table(folder.path / TABLE, [self.table], overwrite=True)
            write_atomically(folder.path / SUMMARY, json.dumps(self.summary(cut), indent=2).encode())
            page = render(
                cut, self.views, source=self.source.name, column=self.column, cuts=self.cuts(),
                notes=self.notes, command=command,
            )  # fmt: skip
            write_atomically(folder.path / REPORT, page.encode())
            folder.finish()

    @property
    def view(self) -> View:
        """The evidence behind the probabilities."""
        return self.views[-1]

    @property
    def noise_rate(self) -> float:
        """Estimated share of wrong pairs; `view` has its interval and the meaning of wrong."""
        return self.view.rate

    @property
    def match_score(self) -> FloatArray:
        """(N,) probability of a match; NaN without a score."""
        return self._of_all(self.view.match)

    def _of_all(self, values: FloatArray) -> FloatArray:
        found = np.full(len(self), np.nan)
        found[self.readable] = values
        return found

    def cut(self, *, purity: float | None = None, keep: int | None = None) -> Cut:
        """The cut for a wanted share of matched pairs, or a wanted number of pairs.

        Raises:
            ConfigError: None or both are given, or no threshold reaches the purity or number.
        """
        return self.view.cut(purity=purity, keep=keep)

    def cuts(self, purities: Sequence[float] = USUAL_PURITIES) -> list[Cut]:
        """The different cuts for some purities, without impossible ones and those keeping all pairs."""
        _, there = self.view.purities
        found = [self.view.cut(purity=purity) for purity in purities if there[-1] < purity <= there.max()]
        return list({cut.kept: cut for cut in found}.values())

    @property
    def table(self) -> pyarrow.Table:
        """A row for each pair: id, scores, `match_score` (the probability that it matches), `is_mismatch`, `status`."""
        import pyarrow

        match = self.match_score
        columns: dict[str, Any] = {"id": self.source.ids}
        columns |= {name: self.source.values[:, place] for place, name in enumerate(self.source.columns)}
        if len(self.source.columns) > 1:
            columns[COMBINED] = self._of_all(self.view.order)
        gaps = np.isnan(match)
        columns["match_score"] = pyarrow.array(match.astype(np.float32), mask=gaps)
        columns["is_mismatch"] = pyarrow.array(match < MATCH_THRESHOLD, mask=gaps)
        columns["status"] = np.where(gaps, "no score", "ok")
        return pyarrow.table(columns)

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
            (wrong) and NaN; the name of a column; a CSV with the columns id and right; or the folder of a review, whose
            decisions on pairs that were drawn for the noise rate count.

    Raises:
        ConfigError: There is no evidence, or it contradicts the scores.
        DataError: The scores or the evidence cannot be read, or are too few.
    """
    source = open_scores(scores, [score] if isinstance(score, str) else list(score))
    if (left is None) != (right is None):
        raise ConflictError("one of `left` and `right`", expected="both")
    if all(part is None for part in (left, shuffled, audit, checked)):
        names = " and ".join(map(repr, source.columns))
        raise ConflictError(f"{names} alone cannot say which pairs are wrong: any noise rate fits", advice=SETTLES)
    readable = np.asarray(~np.isnan(source.values).any(axis=1))
    values, columns = source.values[readable], source.columns
    views: list[View] = []
    if audit is not None:
        match, rate, at_most = of_audit(audit, source)
        readable = readable & ~np.isnan(match)
        values = source.values[readable]
        views.append(by_audit(values, match[readable], rate, columns, at_most))
    if left is not None:
        if len(columns) > 1:
            raise ConflictError("`left` and `right` belong to one score", where="score", expected="one column")
        sides = [open_vectors(side, name, len(source)) for side, name in ((left, "left"), (right, "right"))]
        left, right = (side if readable.all() else side[readable] for side in sides)  # a file may exceed the memory
        views.append(by_vectors(values[:, 0], left, right, columns[0]))
    elif shuffled is not None:
        null = open_scores(shuffled, columns).values
        if null.shape[1] != len(columns):
            raise ShapeError(f"{null.shape[1]} columns", where="shuffled", expected=f"{len(columns)}, as the scores")
        views.append(by_shuffled(values, null[~np.isnan(null).any(axis=1)], columns))
    if checked is not None:
        known = checked_rows(source, checked).among(readable)
        base = views[-1] if views else None
        views.append(by_checked(values, known.rows, known.matched, columns, known.stands_for, base))
    missing = int(np.count_nonzero(~readable))
    gaps = f"Without a score, and so without a probability: {missing:,} of {len(source):,} pairs." if missing else ""
    notes = filter(None, [gaps, disagreement(views), *_limits(views[-1])])
    return Calibration(source, readable, tuple(views), tuple(notes))


def draw_to_check(
    scores: str | Path, score: Sequence[str], path: Path, *, overwrite: bool = False, seed: int = 0
) -> int:
    """Write random rows to check and return their number: id, image, caption, an empty `right`.

    The scores are left out: who sees them agrees with them.
    """
    source = open_scores(Path(scores), score)
    if path.exists() and not overwrite:
        raise ExistsError("the file is there already", where=path, advice="Give another name.")
    assert source.table is not None
    import pyarrow

    rows = np.sort(
        np.random.default_rng(seed).permutation(np.flatnonzero(~np.isnan(source.values).any(axis=1)))[:TO_CHECK]
    )
    roles = (source.table.find("image_path"), source.table.find("caption"))
    shown = {name: source.table.cells(name, rows) for name in roles if name is not None}
    columns = {"id": source.ids.take(rows), "right": [""] * len(rows), **shown}
    write_table(path, [defused(pyarrow.table(columns))], overwrite=overwrite)
    return len(rows)


def _limits(view: View) -> list[str]:
    """Limits of the evidence, as notes."""
    if view.evidence == "checked":
        return [f"The rate rests on {view.count:,} checked pairs and holds if they were drawn at random."]
    about = "The rate counts pairs that have nothing to do with each other. Wrong pairs about the same subject "
    more = "do not look like shuffled ones and are not counted"
    if view.at_most is not None:
        more += f": up to {percent(view.at_most)} of all pairs can be wrong"
    notes = [f"{about}{more}. Check 100 random rows to measure the rate by your own standard."]
    if view.look_alikes_found is not None:
        seen = percent(view.look_alikes_found)
        notes.append(f"Of pairs with the partner of a look-alike, {seen} get a match score below 0.5.")
    return notes
