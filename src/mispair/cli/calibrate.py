"""The commands `mispair calibrate` and `mispair filter`. Heavy imports wait until they run."""

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
    score: tuple[str, ...] = (),
    left: OrNone[Path] = None,
    right: OrNone[Path] = None,
    shuffled: OrNone[Path] = None,
    audit: OrNone[Path] = None,
    checked: OrNone[str] = None,
    purity: OrNone[float] = None,
    keep: OrNone[int] = None,
    draw: OrNone[Path] = None,
    out: Path = Path("calibrated"),
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Find the threshold for your scores, such as CLIP's: a probability for each pair, the noise rate, a page.

    Args:
        table: Table with the scores (parquet, CSV), or folder of parquet files (Hugging Face, DataComp).
        score: Columns of scores; higher is better. Several are combined.
        left: Vectors (.npy) that the score is the cosine of.
        right: Vectors of the other side.
        shuffled: Table with the same columns for shuffled pairs, scored in the same way.
        audit: Folder of an audit of the same rows.
        checked: Column, or CSV with id and right (yes or no), of random rows that you have checked; or the folder of a
            review, whose pairs drawn for the noise rate count.
        purity: Find the threshold with this share of right pairs among the kept ones, such as 0.95.
        keep: Find the threshold that keeps this number of pairs; fewer if pairs with equal scores would exceed it.
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
    found = calibrate_scores(table, score, left=left, right=right, shuffled=shuffled, audit=audit, checked=checked)
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


def filter_pairs(
    source: Positional[Path],
    *,
    purity: OrNone[float] = None,
    keep: OrNone[int] = None,
    probability: OrNone[float] = None,
    least: OrNone[float] = None,
    score: OrNone[str] = None,
    by: OrNone[str] = None,
    to: OrNone[Path] = None,
    mask: OrNone[Path] = None,
    uids: OrNone[Path] = None,
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Keep the best pairs of a calibration, an audit or a table: as a copy, a mask or DataComp's uids.

    Args:
        source: Folder of a calibration or an audit; or a table or folder of parquet files, with --score and --least.
        purity: Keep as many pairs as possible with this share of right ones, such as 0.95.
        keep: Keep this number of pairs; fewer if pairs with equal scores would exceed it.
        probability: Keep pairs that are right with at least this probability.
        least: Keep pairs with at least this score.
        score: Column of a table that is not calibrated.
        by: Column of the input: cut the pairs of each of its values by themselves.
        to: Write the kept pairs to this folder, in the layout of the data.
        mask: Write whether each pair is kept to this .npy file.
        uids: Write the uids of the kept pairs to this .npy file, as DataComp reads them.
        overwrite: Replace earlier results.
        json: Print the counts as JSON.
    """
    from mispair.calibrating.filtering import choose, open_scored, write_kept

    scored = open_scored(source, score)
    kept = choose(scored, by, purity=purity, keep=keep, probability=probability, least=least)
    write_kept(scored.source, kept.mask, to, mask, uids, overwrite=overwrite)
    counts = {name: 0 if cut is None else cut.kept for name, cut in kept.cuts.items()}
    if json:
        print_json({"pairs": len(kept.mask), "kept": sum(counts.values()), **({"by": counts} if by else {})})
        return 0
    say(f"{sum(counts.values()):,} of {len(kept.mask):,} pairs are kept.")
    for name, cut in kept.cuts.items() if by else ():
        how = "no such cut" if cut is None else f"from {cut.least:.4g} up"
        say(f"{name}: {counts[name]:,} of {kept.pairs[name]:,} ({how})")
    return 0
