"""`mispair.audit(left, right) -> Audit`, and the same for files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from rich.console import Console

from mispair import __version__
from mispair.auditing.clean_copy import write_table
from mispair.auditing.findings import THRESHOLD, Audit, match_scores
from mispair.auditing.folder import ENDED, WRITTEN
from mispair.auditing.scoring.folds import fold_numbers, sample
from mispair.auditing.scoring.judge import Judge, learn
from mispair.auditing.scoring.near_duplicates import Groups, find_alike
from mispair.auditing.scoring.partners import find_partners
from mispair.auditing.scoring.scan import READABLE, Scan, faults, scan
from mispair.auditing.sources.source import Source, from_memory
from mispair.compute.devices import pick_device
from mispair.data.pairs import IntArray
from mispair.errors import DataError
from mispair.functional.logistic import FloatArray
from mispair.support.files import write_atomically
from mispair.support.formatting import listed, plain
from mispair.support.progress import RowProgress, progress

SAMPLE = 1 << 15  # pairs that the judge learns from
LEAST = 50  # pairs, below which there is nothing to learn from
GPU_WORKERS = 4  # enough to read while others compute
MAX_SUGGESTED = 10_000  # flagged pairs that get suggestions, the most suspicious first
FEW_PAIRS = 1000  # below, the audit says that it is unsure
UNFINISHED, MARK, JUDGE = "unfinished", "audit.json", "judge.safetensors"  # folder of work to go on with, files in it


@dataclass(frozen=True)
class Settings:
    """What an audit may be told.

    Attributes:
        joint: Both sides come from encoders with a common space, such as CLIP.
        checked: Ids of pairs that a person has looked at, and whether they are right.
        device: auto, cpu, cuda, cuda:1, mps.
        workers: Blocks of pairs measured at the same time; by default as many as there are cores, or 4 on a GPU.
    """

    joint: bool = False
    checked: Mapping[str, bool] | None = None
    device: str = "auto"
    workers: int | None = None


def audit(
    left: Any,
    right: Any,
    ids: Any = None,
    groups: Any = None,
    *,
    texts: Sequence[str] | None = None,
    joint: bool = False,
    checked: Mapping[str, bool] | None = None,
    device: str = "auto",
) -> Audit:
    """Finds the wrong pairs among two sets of embeddings.

    Args:
        left: (N, D) vectors, numpy or torch, such as those of the images.
        right: (N, E) vectors of their partners. The two need not share a space or a width.
        ids: Names of the pairs (a list, an array or a series); by default their numbers.
        groups: One value a pair, likewise; pairs with the same one share their left item, as five captions of one
            image do.
        texts: Captions, for the report.
        joint: Whether both come from encoders with a common space, such as CLIP.
        checked: Pairs that a person has looked at: id, and whether it is right.
        device: auto, cpu, cuda, cuda:1, mps.

    Raises:
        DataError: The arrays do not belong together, or there are too few pairs.
    """
    return audit_source(from_memory(left, right, ids, groups, texts), Settings(joint, checked, device))


def audit_source(
    source: Source,
    settings: Settings,
    *,
    work: Path | None = None,
    console: Console | None = None,
    command: str = "",
) -> Audit:
    """Audits pairs from wherever they are.

    Args:
        source: The pairs.
        settings: How.
        work: Folder in which unfinished work is kept; an audit that was killed goes on with what is there.
        console: Where to show progress.
        command: The command line, for the report.
    """
    device, groups = pick_device(settings.device), source.groups
    with progress(console, len(source)) as show:
        judge, found = _measured(source, settings, device, work, show)
        checked = checked_rows(source, settings)
        match = match_scores(judge, found, checked)
        flagged = np.flatnonzero(match < THRESHOLD)
        mended = flagged[match[flagged].argsort(kind="stable")][:MAX_SUGGESTED]
        show.say("looking for better partners")
        new_rights, new_lefts = (
            find_partners(source, judge, mended, match, groups, keep_left=keep_left, device=device)
            for keep_left in (True, False)
        )
        show.say("looking for near-duplicates")
        unread = found.status != READABLE
        alike = [_alike(source, judge, side, found.codes[side], groups, unread) for side in range(2)]
        found = replace(found, codes=found.codes[:, :0].copy())  # which nobody needs any more
        show.end()
    notes = tuple(_notes(judge, int((~unread).sum()), len(flagged)))
    both = alike[0], alike[1]
    return Audit(source, judge, found, mended, new_rights, new_lefts, both, notes, command, show.stages, checked)


def score_source(source: Source, settings: Settings, console: Console | None = None) -> npt.NDArray[np.float32]:
    """The match score of each pair (N,), NaN where it cannot be read, and nothing else of what an audit finds."""
    with progress(console, len(source)) as show:
        judge, found = _measured(source, settings, pick_device(settings.device), None, show)
    return match_scores(judge, found, checked_rows(source, settings))


def _measured(
    source: Source, settings: Settings, device: torch.device, work: Path | None, show: RowProgress
) -> tuple[Judge, Scan]:
    """Learns what a right pair is like, then looks at all pairs."""
    _check(source, settings)
    show.say("learning what a right pair is like")
    judge = _judge(source, settings, device, work)
    show.say("measuring all pairs")
    workers = settings.workers or (GPU_WORKERS if device.type == "cuda" else os.cpu_count() or 1)
    found = scan(source, judge, source.groups, workers=workers, device=device, folder=work, step=show.step)
    return judge, found


def _check(source: Source, settings: Settings) -> None:
    if len(source) < LEAST:
        raise DataError(
            f"{source.name}: {len(source):,} pairs; an audit needs at least {LEAST} to learn what right pairs are like."
        )
    if settings.joint and source.widths[0] != source.widths[1]:
        raise DataError(
            f"{source.name}: the left vectors have {source.widths[0]} numbers and the right ones {source.widths[1]}; "
            "encoders with a common space give equally many, so leave out --joint."
        )
    if settings.workers is not None and settings.workers < 1:
        raise DataError(f"--workers is {settings.workers}; expected at least 1.")
    checked_rows(source, settings)  # refuses ids that are not there, and answers that are none


def _judge(source: Source, settings: Settings, device: torch.device, work: Path | None) -> Judge:
    """What was learned before an interruption, else learned now."""
    if work is None:
        return _learn(source, settings, device)
    path = work / JUDGE
    state = _saved(path)
    if state is None:
        for part in work.glob("part-*.npz"):  # by a judge that is lost
            part.unlink()
        write_atomically(path, safetensors.torch.save(_learn(source, settings, device).state()))
        # Read back although it was learned now: an audit that goes on cannot have another judge than an unbroken one.
        state = _saved(path)
    assert state is not None
    return Judge.of(state, device)


def _saved(path: Path) -> dict[str, torch.Tensor] | None:
    """The tensors of a file; None if it is not there or not whole."""
    try:
        return safetensors.torch.load(path.read_bytes())  # a format that holds tensors only
    except (OSError, safetensors.SafetensorError):
        return None


def _learn(source: Source, settings: Settings, device: torch.device) -> Judge:
    groups = np.arange(len(source)) if source.groups is None else source.groups
    readable = np.ones(len(source), dtype=bool)
    readable[list(source.known)] = False
    rows = sample(np.flatnonzero(readable), SAMPLE)
    told = checked_rows(source, settings)
    rows = np.union1d(rows, np.fromiter(told, dtype=np.int64, count=len(told)))
    left, right = source.gather(rows)
    good = np.flatnonzero(faults(left, right) == READABLE)
    if len(good) < LEAST:
        raise DataError(
            f"{source.name}: only {len(good):,} of {min(len(source), SAMPLE):,} sampled pairs can be used: have no bad "
            f"status or id, and vectors that are finite and not zero. At least {LEAST} are needed; look at how the "
            "embeddings were made."
        )
    rows, left, right = rows[good], left[good], right[good]
    checked: FloatArray | None = None
    if told:
        checked = np.array([told.get(int(row), np.nan) for row in rows])
    for name, side in (("left", left), ("right", right)):
        if not (side != side[0]).any():
            raise DataError(f"{source.name}: all {name} vectors are the same, so nothing can be learned from them.")
    sides = torch.from_numpy(left).to(device), torch.from_numpy(right).to(device)
    own, said = groups[rows], source.opinion
    opinion = None if said is None else lambda lefts, rights: said(rows[lefts], rows[rights])
    return learn(*sides, fold_numbers(own), own, joint=settings.joint, checked=checked, opinion=opinion)


def checked_rows(source: Source, settings: Settings) -> dict[int, float]:
    """Rows that a person has checked: 1 right, 0 wrong."""
    answers = _answers(settings.checked)
    rows = source.find(list(answers)) if answers else np.arange(0)
    known = source.known
    told = zip(rows.tolist(), answers.values(), strict=True)
    return {row: float(right) for row, right in told if row not in known}


def _answers(checked: Mapping[str, bool] | None) -> dict[str, bool]:
    """What a person has found, by id.

    Raises:
        DataError: Something is neither right nor wrong, or is both.
    """
    if checked is None:
        return {}
    if not isinstance(checked, Mapping):
        raise DataError(f"checked is a {type(checked).__name__}; expected a dict of ids and True (right) or False.")
    answers: dict[str, bool] = {}
    for name, right in checked.items():
        if not isinstance(right, bool | int | float | np.generic) or right not in (0, 1):
            raise DataError(f"checked says {right!r} for the pair {name!r}; expected True (right) or False (wrong).")
        if answers.setdefault(plain(str(name)), bool(right)) != bool(right):
            raise DataError(f"checked says both right and wrong for the pair {str(name)!r}; give one answer a pair.")
    return answers


def _alike(source: Source, judge: Judge, side: int, codes: Any, groups: IntArray | None, unread: Any) -> Groups:
    """Groups of near-duplicates on one side; rows that are known to share their left item are not news."""
    mean = judge.frames[side].mean.double().cpu().numpy()
    vectors = (source.left, source.right)[side]
    leave_out = unread.copy()
    if side == 0 and groups is not None:
        readable = np.flatnonzero(~unread)
        leave_out[:] = True
        leave_out[readable[np.unique(groups[readable], return_index=True)[1]]] = False  # one row a left item
    return find_alike(codes, vectors.gather, mean=mean, leave_out=leave_out)


def _notes(judge: Judge, readable: int, flagged: int) -> list[str]:
    notes = []
    best = float(judge.separations.max())
    if readable < FEW_PAIRS:
        notes.append(f"{readable:,} pairs are few to learn from: take the scores as an order rather than as odds.")
    if best < 0.6:
        notes.append(
            "Hardly any measure tells the pairs from shuffled ones: either nearly all pairs are wrong, or these "
            "embeddings say too little about what the two sides share."
        )
    if flagged > MAX_SUGGESTED:
        notes.append(
            f"Partners were looked for only for the {MAX_SUGGESTED:,} most suspicious of {flagged:,} flagged pairs."
        )
    notes.append(
        "The noise rate is estimated against random pairs. Partners that were exchanged among look-alikes are harder "
        "to notice and are counted only in part."
    )
    return notes


# ---------------------------------------------------------------------- folders


def audit_to_folder(
    source: Source,
    out: Path,
    settings: Settings,
    *,
    overwrite: bool = False,
    console: Console | None = None,
    command: str = "",
) -> Audit:
    """Audits and writes `pairs.parquet`, `pairs.csv`, `suggestions.csv`, `summary.json` and `report.html`.

    An audit that was interrupted goes on when it is called again with the same input and settings.
    """
    _claim(source, out, settings, overwrite)
    (out / ENDED).unlink(missing_ok=True)
    work = out / UNFINISHED
    try:
        audit = audit_source(source, settings, work=work, console=console, command=command)
    except DataError:
        if not (work / JUDGE).exists():  # nothing to go on with, and the mended input must not be refused for it
            shutil.rmtree(work)
        raise
    audit.to_parquet(out / "pairs.parquet", overwrite=True)
    audit.to_csv(out / "pairs.csv", overwrite=True)
    write_table(out / "suggestions.csv", [audit.suggestions], overwrite=True)
    audit.to_html(out / "report.html")
    write_atomically(out / "summary.json", (json.dumps(audit.summary, indent=2) + "\n").encode())
    shutil.rmtree(work)
    return audit


def _claim(source: Source, out: Path, settings: Settings, overwrite: bool) -> None:
    """Takes the folder for this audit, or says why not."""
    _check(source, settings)
    pick_device(settings.device)
    check_free(out, overwrite)
    if any(path.resolve().is_relative_to(out.resolve()) for path in source.files):
        raise DataError(f"{out}: this is where the audited data is, which is never changed; choose another --out.")
    _tidy(out)
    mark = out / UNFINISHED / MARK
    checked = sorted(_answers(settings.checked).items())
    own = {"mispair": __version__, "input": source.fingerprint(), "joint": settings.joint, "checked": checked}
    own = json.loads(json.dumps(own))
    there = _read(mark)
    if there == own:
        return  # the same audit, which goes on
    if overwrite:
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    elif mark.exists():
        raise DataError(
            f"{out} holds an unfinished audit of other pairs or with other settings{_changed(there, own)}; give "
            "another --out, or --overwrite to drop it."
        )
    write_atomically(mark, json.dumps(own).encode())


def _changed(there: Any, own: dict[str, Any]) -> str:
    """What has changed since, in brackets; nothing if that cannot be known."""
    names = {"mispair": "the version of mispair", "input": "the input", "joint": "--joint", "checked": "--checked"}
    changed = [names[name] for name in own if isinstance(there, dict) and there.get(name) != own[name]]
    return f" ({listed(changed)} changed since)" if changed else ""


def _leftovers(folder: Path) -> list[Path]:
    """What writers of our files have left there when they were killed."""
    names = (*WRITTEN, ENDED, MARK)
    return [path for name in names for path in folder.glob(f".{name}.*.tmp") if path.suffixes[-2][1:].isdecimal()]


def _tidy(out: Path) -> None:
    """Takes away what killed writers have left."""
    for path in (*_leftovers(out), *_leftovers(out / UNFINISHED)):
        path.unlink(missing_ok=True)


def _is_empty(out: Path) -> bool:
    """Whether nothing is in a folder, apart from what an audit that was killed at once has left."""
    left, work = _leftovers(out), out / UNFINISHED
    if work.is_dir() and set(work.iterdir()) == set(_leftovers(work)):
        left.append(work)
    return set(out.iterdir()) == set(left)


def check_free(out: Path, overwrite: bool) -> None:
    """Refuses a folder that holds something else than an audit to go on with.

    Raises:
        DataError: It does, and may not be replaced; or it is a file.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: this is a file; --out must be a folder.")
    if not overwrite and out.exists() and not _is_empty(out) and not (out / UNFINISHED / MARK).exists():
        raise DataError(f"{out} is not empty; give another --out, or --overwrite to replace the audit in it.")


def _read(mark: Path) -> Any:
    try:
        return json.loads(mark.read_bytes())
    except (OSError, ValueError):
        return None
