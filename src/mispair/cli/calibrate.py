"""The command `mispair calibrate`. Heavy imports wait until it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tyro.conf import Positional

from mispair.cli.output import print_json, say
from mispair.support.flags import OrNone


def calibrate(
    table: Positional[Path],
    *,
    score: tuple[str, ...],
    left: OrNone[Path] = None,
    right: OrNone[Path] = None,
    shuffled: OrNone[Path] = None,
    audit: OrNone[Path] = None,
    decisions: OrNone[Path] = None,
    checked: OrNone[str] = None,
    weight: OrNone[str] = None,
    purity: OrNone[float] = None,
    keep: OrNone[int] = None,
    draw: OrNone[Path] = None,
    out: Path = Path("calibrated"),
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Find the cut for your scores, such as CLIP's: the probability that each pair is right, the noise rate, a page.

    Args:
        table: Table with the scores (parquet, CSV), or folder of parquet files (Hugging Face, DataComp).
        score: Columns of scores; higher is better. Several are combined.
        left: Vectors (.npy) that the score is the cosine of.
        right: Vectors of the other side.
        shuffled: Table with the same columns for shuffled pairs, scored in the same way.
        audit: Folder of an audit of the same rows.
        decisions: Folder of a review, or the CSV that it exports; pairs drawn for the noise rate count.
        checked: Column, or CSV with id and right (yes or no), of random rows that you have checked.
        weight: Column with the number of rows that each checked one stands for, if some were drawn more often.
        purity: Find the cut that keeps this share of right pairs, such as 0.95.
        keep: Find the cut that keeps so many pairs.
        draw: Write 200 random rows to this CSV for you to check, and end.
        out: Folder for the page, the table of all pairs and the summary.
        overwrite: Replace an earlier calibration in the folder.
        json: Print the metrics as JSON.
    """
    from mispair.calibrating.calibrate import calibrate as calibrate_scores
    from mispair.calibrating.calibrate import draw_to_check

    if draw is not None:
        count = draw_to_check(table, score, draw, overwrite=overwrite)
        say(f"{draw} has {count:,} random rows. Write yes or no into its column right, then give --checked {draw}.")
        return 0
    found = calibrate_scores(
        table, score, left=left, right=right, shuffled=shuffled, audit=audit, decisions=decisions, checked=checked,
        weight=weight,
    )  # fmt: skip
    cut = None if purity is None and keep is None else found.cut(purity=purity, keep=keep)
    found.write(out, cut, overwrite=overwrite, command=shlex.join(["mispair", *sys.argv[1:]]))
    if json:
        print_json({"out": str(out), **found.summary(cut)})
        return 0
    say(found.sentence)
    for one in found.cuts() if cut is None else [cut]:
        say(found.describe(one))
    for note in found.notes:
        say(f"Note: {note}")
    say(f"Page:  {out / 'report.html'}\nTable: {out / 'pairs.parquet'}")
    return 0
