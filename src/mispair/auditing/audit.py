"""`mispair.audit(left, right) -> Audit`: audits of pairs in memory or from any source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from mispair.auditing.auditor import Auditor, check_count, checked_answers, checked_rows, workers_of
from mispair.auditing.findings import Findings
from mispair.auditing.inputs import AuditInput, open_given
from mispair.auditing.match_scores import MatchScores
from mispair.auditing.options import AuditOptions, InputOptions, Options
from mispair.auditing.output_files import LEARNED
from mispair.auditing.report.page import Reported, make_page, render
from mispair.auditing.scoring.exchanges import search_exchanges
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.partners import find_partners
from mispair.auditing.scoring.reasons import KINDS, LANGUAGE, Bits, caption_reasons, image_reasons, wordless
from mispair.auditing.scoring.scan import READABLE, Scan, scan
from mispair.auditing.scoring.shared_items import SharedItems, find_shared_items
from mispair.auditing.scoring.siblings import find_siblings
from mispair.auditing.scoring.views import joined
from mispair.auditing.summary import SIDES, AuditSummary, Checked, NoiseEstimate, check_cut, threshold, values_by
from mispair.auditing.tool_files import Tool, export
from mispair.compute.devices import pick_device
from mispair.errors import ConflictError, DataError, InvalidValueError
from mispair.pairs.layouts.arrays import from_pairs, item_vectors, pair_ids
from mispair.pairs.layouts.copies import SURE, clean_edits, mended_edits, write_copy
from mispair.pairs.pairs import Pairs, Vectors
from mispair.pairs.result_tables import defused, write_table
from mispair.pairs.shards import views_of
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.files import write_atomically
from mispair.support.formatting import plain
from mispair.support.html import html_table, image_cell
from mispair.support.progress import RowProgress

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

    from mispair import AnnotationResult, ReviewPage

LOADED_WORKERS = 2  # on a GPU, where nothing is left to read
WORST = 10  # pairs that a notebook shows
MAX_SUGGESTED = 10_000  # flagged pairs that get suggestions, the lowest match scores first
FEW_PAIRS = 1000  # below, a note warns that the scores are uncertain
FEW_CAPTIONS = 20  # in another language; no note on fewer
ITEMS = "items.npz"
COMMON_SPACE = (
    "Both sides have the same width, and pairs have higher cosines than shuffled pairs. The encoders seem to share a "
    "space, as in CLIP, so the audit also uses the cosine (as with `joint`)."
)


@dataclass(frozen=True, kw_only=True)
class Settings(AuditOptions):
    """Settings of an audit, with the decisions of people."""

    checked: Mapping[str, bool] | None = None
    """Ids of checked pairs, and whether they match."""
    decided: NoiseEstimate | None = None
    """The noise rate by decisions on drawn pairs."""
    partnered: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Ids of pairs with a re-paired left item, and with a re-paired right item; these are not suggested again."""


class Results(Protocol):
    """What is written of an audit."""

    @property
    def reported(self) -> Reported: ...
    @property
    def summary(self) -> AuditSummary: ...
    @property
    def suggestions(self) -> pyarrow.Table: ...
    def parts(self) -> Iterator[tuple[str, Iterator[pyarrow.Table]]]: ...


class Audit(Findings):
    """The result of an audit, and how to write it."""

    def to_parquet(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the table of all pairs to a .parquet file."""
        _check_ending(path, ".parquet")
        write_table(path, self.pieces(), overwrite=overwrite)

    def to_csv(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the table of all pairs, safe for spreadsheets (see `result_tables.defused`), to a .csv file."""
        _check_ending(path, ".csv")
        write_table(path, map(defused, self.pieces()), overwrite=overwrite)

    def to_html(self, path: str | Path) -> None:
        """Write the report: one self-contained page."""
        write_atomically(path, render(make_page(self.reported)).encode())

    def write_clean(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Write a copy of the input, in its own layout, without flagged and unreadable pairs."""
        return write_copy(self.source, clean_edits(self.table), out, overwrite)

    def write_mended(self, out: str | Path, *, least: float = SURE, overwrite: bool = False) -> Path:
        """Write a copy of the input with the best suggested partners for flagged pairs.

        Leave out unreadable pairs, and flagged ones without a partner of a probability of at least `least`.
        """
        edits = mended_edits(self.table, self.source, least).each_once(self.source.groups)
        return write_copy(self.source, edits, out, overwrite)

    def export(self, tool: Tool, out: str | Path) -> list[Path]:
        """Write files for FiftyOne, Label Studio or Argilla; see `mispair.auditing.tool_files`."""
        return export(self.pieces(), tool, Path(out), self.source.image_folder)

    def review(
        self, folder: str | Path = "review", *, port: int | None = None, reviewer: str = "", browser: bool = True
    ) -> ReviewPage:
        """Open a page to decide on the doubtful pairs; see `mispair.review`."""
        import mispair

        return mispair.review(self, folder, port=port, reviewer=reviewer, browser=browser)

    def annotate(
        self, annotator: Callable[[bytes, str], object], folder: str | Path = "review", **options: Any
    ) -> AnnotationResult | None:
        """Ask a model to help with the noise rate; see `mispair.annotate`."""
        import mispair

        return mispair.annotate(self, annotator, folder, **options)

    def to_pandas(self) -> pandas.DataFrame:
        """The table of all pairs as a DataFrame of pandas."""
        return self.table.to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """The table of all pairs as a DataFrame of polars."""
        import polars

        frame = polars.from_arrow(self.table)
        assert isinstance(frame, polars.DataFrame)
        return frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the table of all pairs to any Arrow library, as in `pyarrow.table(audit)`."""
        return self.table.__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        """The worst pairs, for a notebook."""
        source, rows = self.source, self.suggested[:WORST]
        read = source.image_reader(rows)
        images = {row: image_cell(read(row)) for row in rows.tolist()} if source.has_images else {}
        columns: dict[str, list[Any]] = {
            "id": source.ids(rows),
            **({"image": list(images.values())} if images else {}),
            **({"caption": source.texts(rows)} if source.has_texts else {}),
            "match_score": self.match_score[rows].tolist(),
            "reason": self.reasons(rows),
        }
        return html_table(zip(*columns.values(), strict=True), list(columns), repr(self)[1:-1])

    def attach_to(self, pairs: Pairs) -> Pairs:
        """Attach the match scores of this audit: `mispair.fit` then warms up on matching pairs.

        Captions and image names must equal the audited ones, in the same order or, with ids on both sides, in any
        order. A pair that could not be read gets 0.5.

        Raises:
            DataError: The pairs differ from the audited ones.
        """
        return self.columns.take(self._rows_of(pairs)).attached_to(pairs)

    def _rows_of(self, pairs: Pairs) -> IntArray:
        rows = np.arange(len(self))
        if len(pairs) == len(self) and self._agree(pairs, rows):
            return rows
        ids = pair_ids(pairs)
        if ids is not None and self.source.names.ids is not None:
            rows = self.source.find(ids.to_pylist())
            if self._agree(pairs, rows):
                return rows
        what = f"these {len(pairs):,} pairs are not the {len(self):,} audited ones of {self.source.name}"
        raise DataError(what, where=pairs.name, advice="Give the audited pairs, or audit these.")

    def _agree(self, pairs: Pairs, rows: IntArray) -> bool:
        """Whether the pairs and the rows have the same captions and image names, as far as these are known."""
        source, texts, images = self.source, pairs.texts, pairs.left_ids
        for start in range(0, len(rows), 1 << 16):
            part = rows[start : start + (1 << 16)]
            here = range(start, start + len(part))
            if texts and source.has_texts and source.texts(part) != [plain(texts[i]) for i in here]:
                return False
            names = [plain(images[pairs.link[i]]) for i in here] if images else []
            if names and source.image_names is not None and source.image_names(part) != names:
                return False
        return True


def _check_ending(path: str | Path, ending: str) -> None:
    if Path(path).suffix.lower() != ending:
        raise DataError(f"{path}: the file name must end in {ending}.")


def audit(
    left: Any,
    right: Any = None,
    ids: Any = None,
    groups: Any = None,
    *,
    texts: Sequence[str] | None = None,
    checked: Mapping[str, bool] | None = None,
    **options: Unpack[Options],
) -> Audit:
    """Find the mismatched pairs of a data set.

        mispair.audit("photos.csv", images="photos/")       # a path, as for the command `mispair audit`
        mispair.audit(frame, images="photos/")              # a table: pandas, polars, pyarrow, datasets
        mispair.audit(image_paths, captions)                # two lists of texts
        mispair.audit(image_vectors, text_vectors)          # two sets of embeddings

    Images and captions are encoded; vectors are used as they are.

    Args:
        left: A path; a table of images and captions; image paths; or vectors (N, D) as a numpy array, a torch tensor, a
            list, or of pandas, polars or pyarrow.
        right: Captions, or vectors (N, E); the two sides need not share a space or a width.
        ids: Names of the pairs (a list, an array or a series); by default their numbers, or their images.
        groups: One value a pair, likewise; pairs with the same one share their left item, as five captions of one
            image do. Only for vectors: images are known by their paths.
        texts: Captions of vectors, for the report.
        checked: Pairs that a person has checked: id, and whether it matches.
        **options: Flags of `mispair audit`, such as `images`, `encoder`, `joint`, `keep_best` and `device`.
            `InputOptions` and `AuditOptions` of `mispair.auditing.options` explain them.

    Raises:
        ConfigError: The arguments do not go together, or an encoder is missing.
        DataError: The data cannot be read, the two sides do not belong together, or there are too few pairs.
    """
    given: dict[str, Any] = {**options}
    given |= {name: Path(given[name]) for name in ("images", "cache") if given.get(name) is not None}
    data = AuditInput(**{field.name: given.pop(field.name) for field in fields(InputOptions) if field.name in given})
    settings = Settings(checked=checked, **given)
    settings = replace(settings, joint=settings.joint or data.shares_a_space)
    source = open_given(left, right, ids, groups, texts, data, partial(check_rows, settings=settings), settings.device)
    return audit_source(source, settings)


def audit_source(
    source: Source,
    settings: Settings,
    *,
    work: Path | None = None,
    console: Console | None = None,
    command: str = "",
) -> Audit:
    """Audit opened pairs; a killed audit resumes from the intermediate results in `work`."""
    device = pick_device(settings.device)
    with RowProgress(console, len(source)) as show:
        scaled, items, auditor, measured, scores, seen = judged(source, settings, device, work, show)
        judge, match = auditor.judge, scores.match()
        below = threshold(match, settings.flag_below, settings.keep_best)
        flagged = np.flatnonzero(match < below)
        suggested = flagged[match[flagged].argsort(kind="stable")][:MAX_SUGGESTED]
        show.begin("searching better partners")
        lefts, rights = (source.find(list(ids)) for ids in settings.partnered)
        new_rights, new_lefts = (
            find_partners(
                scaled, judge, suggested, match, items, keep_left=keep_left, device=device,
                partnered=rights if keep_left else lefts, excluded=wordless(seen) & keep_left,
            )
            for keep_left in (True, False)
        )  # fmt: skip
        show.begin("looking at images")
        if source.has_images:
            seen[suggested] |= image_reasons(suggested, source.image_reader(suggested))
        show.end()
    readable = measured.status == READABLE
    space = [COMMON_SPACE] if judge.joint and not (settings.joint or source.joint) else []
    notes = (
        *source.notes,
        *space,
        *notes_on(judge, int(readable.sum()), len(flagged)),
        *language_notes(seen, match < below),
        *shared_notes(items, readable),
    )
    return Audit(
        source=source,
        auditor=auditor,
        scan=measured,
        scores=scores,
        match_score=match,
        suggested=suggested,
        new_rights=new_rights,
        new_lefts=new_lefts,
        items=items,
        seen=seen,
        threshold=below,
        by=settings.by,
        decided=settings.decided,
        notes=notes,
        command=command,
        stages=show.stages,
    )


class Judged(NamedTuple):
    """Pairs with one vector an item, and their match scores."""

    source: Source
    items: SharedItems
    auditor: Auditor
    scan: Scan
    scores: MatchScores
    seen: Bits


def judged(source: Source, settings: Settings, device: torch.device, work: Path | None, show: RowProgress) -> Judged:
    """Learn from the pairs, measure all of them, and look at captions and decisions."""
    found = _measured(source, settings, device, work, show)
    judge, rows = found.auditor.judge, np.arange(len(source))
    show.begin("looking at captions")
    seen = caption_reasons(rows, source.captions) if source.captions else found.seen
    scores = found.scores.informed(judge, found.scan, found.items, checked_rows(source, settings.checked), seen)
    scores = scores.recalibrated(found.source, judge, device)
    found.auditor.recalibration, found.auditor.checked = scores.recalibration, Checked.of_scores(scores)
    return found._replace(scores=scores, seen=seen)


def score_pairs(pairs: Pairs, device: str = "auto", console: Console | None = None) -> npt.NDArray[np.float32]:
    """Return match scores (N,) of pairs by their own features; NaN for unreadable pairs."""
    with RowProgress(console, len(pairs)) as show:
        found = _measured(from_pairs(pairs), Settings(device=device), pick_device(device), None, show)
    return found.scores.match()


def score_splits(
    parts: Sequence[Pairs], device: str = "auto", console: Console | None = None
) -> list[npt.NDArray[np.float32] | None]:
    """Return the match scores of training pairs and of other splits of the same data.

    Splits of vectors are audited together. Others are audited alone, as their vectors depend on the split; None for a
    split with too few pairs.
    """
    train, *others = parts
    if all(isinstance(side, Vectors) for pairs in parts for side in (pairs.left, pairs.right)):
        scores = score_pairs(_joined(parts), device, console)
        return list(np.split(scores, np.cumsum([len(pairs) for pairs in parts])[:-1]))
    enough = [len(pairs) >= FEW_PAIRS for pairs in others]
    return [
        score_pairs(train, device, console),
        *(score_pairs(pairs, device, console) if large else None for pairs, large in zip(others, enough, strict=True)),
    ]


def _joined(parts: Sequence[Pairs]) -> Pairs:
    """Join splits of vectors."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(pairs.left) for pairs in parts)])
    left = np.concatenate([item_vectors(pairs.left) for pairs in parts])
    right = np.concatenate([item_vectors(pairs.right) for pairs in parts])
    link = np.concatenate([pairs.link + start for pairs, start in zip(parts, starts, strict=False)])
    groups = np.concatenate([pairs.left_groups + start for pairs, start in zip(parts, starts, strict=False)])
    texts = [text for pairs in parts for text in pairs.right_ids]
    known = texts if len(texts) == len(right) else ()
    return Pairs(Vectors(left), Vectors(right), link, groups=groups, right_ids=known, name=parts[0].name)


def _measured(source: Source, settings: Settings, device: torch.device, work: Path | None, show: RowProgress) -> Judged:
    """Find shared items, learn from the pairs, then measure all of them."""
    check(source, settings)
    workers = workers_of(settings.workers, device)
    if device.type == "cuda":
        show.begin("loading the vectors")
    source = joined(source, joint=settings.joint).scaled().loaded(device, workers)
    show.begin("searching near-duplicates")
    items = None if work is None else SharedItems.load(work / ITEMS, len(source))
    if items is None:
        items = find_shared_items(source, workers=workers, device=device)
        if work is not None:
            items.save(work / ITEMS)
    show.begin("learning")
    auditor = _auditor(source, settings, items, work)
    judge = auditor.judge
    show.begin("measuring all pairs")
    if device.type == "cuda" and source.is_on(device):
        workers = min(workers, LOADED_WORKERS)
    measured = scan(source, judge, items.groups, workers=workers, device=device, folder=work, step=show.step)
    show.begin("comparing with similar pairs")
    scores = MatchScores.of(judge, measured, items)
    alone = scores.alone()
    siblings = find_siblings(source, items, judge.transforms, alone)
    exchanged, trials = search_exchanges(source, items, judge, alone, device)
    scores = replace(scores, siblings=siblings, exchanged=exchanged, trials=trials)
    return Judged(source, items, auditor, measured, scores, np.zeros(len(source), dtype=np.uint16))


def check(source: Source, settings: Settings) -> None:
    """Raise if the pairs cannot be audited: there are too few, or a setting does not fit them."""
    check_rows(source, settings)
    widths = [views_of(side)[0].width for side in (source.left, source.right)]
    if settings.joint and widths[0] != widths[1]:
        what = "the left vectors of {} have {} numbers and the right ones {}".format(source.name, *widths)
        raise ConflictError(what, where="joint", expected="equal widths, as encoders with a common space give")


def check_rows(pairs: Source, settings: Settings) -> None:
    """Do the part of `check` without vectors."""
    check_count(pairs)
    check_settings(settings)
    for ids in (list(checked_answers(settings.checked)), *map(list, settings.partnered)):
        pairs.find(ids)  # raises for unknown ids
    if settings.by is not None:
        values_by(pairs, settings.by)


def check_settings(settings: Settings) -> None:
    """Do the part of `check` without pairs."""
    check_cut(settings.flag_below, settings.keep_best)
    if settings.workers is not None and settings.workers < 1:
        raise InvalidValueError(str(settings.workers), where="workers", expected="at least 1")


def _auditor(source: Source, settings: Settings, items: SharedItems, work: Path | None) -> Auditor:
    """Load the auditor of an interrupted audit, or fit it now."""
    if work is not None:
        with suppress(DataError):
            return Auditor.load(work / LEARNED, settings.device)
        for part in work.glob("part-*.npz"):  # measured by an auditor that is lost
            part.unlink()
    auditor = Auditor(joint=settings.joint, device=settings.device, workers=settings.workers)
    auditor.fit_source(source, items, checked_rows(source, settings.checked))
    if work is None:
        return auditor
    auditor.save(work / LEARNED)
    return Auditor.load(work / LEARNED, settings.device)  # so that a resumed audit has exactly the same values


def notes_on(judge: Judge, readable: int, flagged: int) -> list[str]:
    """Return warnings for the reader of an audit."""
    notes = []
    best = float(judge.separations.max())
    if readable < FEW_PAIRS:
        notes.append(f"{readable:,} pairs are few to learn from. Use the scores to rank pairs, not as probabilities.")
    if best < 0.6:
        notes.append(
            "No measure separates the pairs from shuffled ones: either nearly all pairs are mismatched, or these "
            "embeddings have too little in common."
        )
    if flagged > MAX_SUGGESTED:
        notes.append(
            f"Only the {MAX_SUGGESTED:,} lowest match scores of {flagged:,} flagged pairs have suggested partners."
        )
    return notes


def language_notes(seen: Bits, flagged: npt.NDArray[np.bool_]) -> list[str]:
    """Return a warning if captions in another language than most are flagged more often, by two standard errors."""
    other = seen >> KINDS.index(LANGUAGE) & 1 == 1
    if other.sum() < FEW_CAPTIONS or other.all():
        return []
    share, usual = float(flagged[other].mean()), float(flagged[~other].mean())
    if share - usual <= 2 * math.sqrt(usual * (1 - usual) / other.sum()):
        return []
    return [
        f"{other.sum():,} captions are in another language than most: {share:.0%} of these pairs are flagged, and "
        f"{usual:.0%} of the others. An encoder that does not read a language flags its captions wrongly. With images "
        "and captions, `encoder=multilingual` reads 16 languages; else audit each language by itself."
    ]


def shared_notes(items: SharedItems, readable: npt.NDArray[np.bool_]) -> list[str]:
    """Return notes on shared items."""
    notes = []
    for side, unlike in zip(SIDES, items.unlike, strict=True):
        rows = np.flatnonzero((unlike > 0) & readable)
        if len(rows):
            count = len(np.unique((items.left, items.right)[SIDES.index(side)][rows]))
            which = f"one {side} item" if count == 1 else f"one of {count:,} {side} items"
            notes.append(
                f"{len(rows):,} pairs share {which} whose partners have nothing in common, as "
                "placeholder images and boilerplate captions do. The audit does not learn from them. All but one "
                "pair of each such item count as mismatched in the noise rate."
            )
    copies = int((~items.is_first & readable).sum())
    if copies:
        notes.append(
            f"{copies:,} {'pair has' if copies == 1 else 'pairs have'} (nearly) the same two items as another pair. "
            "Such pairs count once, in the learning and in the noise rate."
        )
    if items.split:
        notes.append(
            f"{items.split:,} pairs are connected by the items that they share. They are too many for one fold, so "
            "only pairs that share the less common items are judged without each other."
        )
    return notes
