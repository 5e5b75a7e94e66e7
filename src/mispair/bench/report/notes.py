"""What the reader of a table has to know: how to read it, what is not there, what the rest comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mispair.bench.report.rows import NoiseLevel, paper_data
from mispair.bench.suite.record import Record

MODELS = {"vse": "VSE-inf", "sgr": "SGR", "saf": "SAF", "scan": "SCAN", "two-tower": "two towers"}


def result_notes(share: NoiseLevel) -> list[str]:
    """How to read a table of results."""
    tested = "the mean over slices of 1,000 test images, " if share.part.folds else ""
    return [
        f"R@K in per cent and rSum: {tested}the mean over the seeds, of two networks' averaged similarities where"
        " networks is 2. i2t: image to text, t2i: text to image.",
        "spread: sample standard deviation of rSum over the seeds; alone: rSum of a network by itself.",
        *alone_note(share),
        *paper_notes(share),
    ]


def alone_note(share: NoiseLevel) -> list[str]:
    alone = [result.alone for line in share.lines for result in line.results.values()]
    return ["alone is not measured on slices where there are two networks."] if None in alone else []


def paper_notes(share: NoiseLevel) -> list[str]:
    """Where the paper's numbers are of something else than ours."""
    notes = []
    if share.part.paper is not None and not share.is_papers_data:
        beside = f"; the paper's numbers are of {paper_data(share.suite, share.part)}" if share.has_paper else ""
        notes.append(f"Another data set than the paper's{beside}.")
    beside_ours = [(line, share.published(line)) for line in share.lines] if share.part.setting is None else []
    models: dict[tuple[str, str], list[str]] = {}
    for line, found in beside_ours:
        if found is not None and found.model != line.config.model:
            models.setdefault((found.model, line.config.model), []).append(line.label)
    for (theirs, ours), labels in models.items():
        notes.append(f"{', '.join(labels)}: the paper's numbers are with {MODELS[theirs]}, ours with {MODELS[ours]}.")
    if any(found is not None and found.star for _, found in beside_ours):
        notes.append("*: trained by the paper's authors with the public code of the method.")
    return notes


def common_notes(share: NoiseLevel) -> list[str]:
    """What every table has to say: what is not there, and what the rest comes from."""
    return [*_absence_notes(share), *_source_notes(share)]


def _absence_notes(share: NoiseLevel) -> list[str]:
    total = sum(len(line.cells) for line in share.lines)
    missing = total - sum(len(line.records) for line in share.lines)
    notes = [f"{missing} of {total} trainings {'is' if missing == 1 else 'are'} missing."] if missing else []
    for line in share.lines:
        notes += [
            f"{share.says(line)}, seed {seed} failed: {one.error or 'for no known reason'}"
            for seed, one in line.failed.items()
        ]
    if any(len(line.results) < len(line.done) for line in share.lines):
        notes.append("Some trainings have no result on slices of 1,000 images: that takes several whole thousands.")
    return notes


def _source_notes(share: NoiseLevel) -> list[str]:
    """Data, noise, machine and versions behind a table."""
    if not any(line.done for line in share.lines):
        return []

    def said(pick: Callable[[Record], str]) -> str:
        return _by_row([(line.label, pick(record)) for line in share.lines for record in line.done])

    hashes = [
        f"{share.says(line)}: {', '.join(record.digest[:8] for record in line.records.values())}"
        for line in share.lines
        if line.records
    ]
    return [
        f"Dev protocol: {said(lambda record: str(record.data.get('dev_protocol', 'unknown')))}.",
        f"Wrong training pairs, as measured: {_measured(record for line in share.lines for record in line.done)}.",
        f"Noise: {said(lambda record: _noise(record, share.noise))}.",
        f"Test set: {said(lambda record: str(record.data.get('tested_on', 'unknown')))}.",
        f"Device: {said(lambda record: str(record.environment.get('device', 'unknown')))}.",
        f"Versions: {said(_versions)}.",
        f"Settings by their hash: {'; '.join(hashes)}.",
    ]


def _by_row(said: Iterable[tuple[str, str]]) -> str:
    """What all rows have in common; where they differ, which rows have what.

    >>> _by_row([("NCR", "full"), ("REPAIR", "full")])
    'full'
    >>> _by_row([("NCR", "ncr"), ("DECL", "ncr"), ("REPAIR", "full")])
    'ncr (NCR, DECL), full (REPAIR)'
    """
    labels: dict[str, dict[str, None]] = {}
    for label, text in said:
        labels.setdefault(text, {})[label] = None
    if len(labels) == 1:
        return next(iter(labels))
    return ", ".join(f"{text} ({', '.join(rows)})" for text, rows in labels.items())


def _measured(records: Iterable[Record]) -> str:
    """The share of wrong pairs; from the lowest to the highest where the seeds differ."""
    shares = [share for record in records if (share := record.data.get("mismatch")) is not None]
    if not shares:
        return "unknown"
    low, high = (f"{100 * share:.2f} %" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def _noise(record: Record, noise: float) -> str:
    file = record.data.get("noise_file")
    if file:
        return f"file with SHA-256 {str(file)[:12]}"
    return "drawn by seed" if noise else "none put in"


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {record.environment.get(name, 'unknown')}" for name in ("mispair", "torch"))
