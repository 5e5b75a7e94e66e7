"""The tables of a suite: metrics, their spread over the seeds, and published numbers beside them.

Everything here is a pure function of a suite and its records. A training that is missing or failed leaves its cells
empty, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mispair.bench.report.rows import FAILED, MISSING, NoiseLevel, ResultRow, noise_levels, percent
from mispair.bench.suite.record import Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Part
from mispair.support.terminal import COLUMNS

REFERENCE = "REPAIR"  # the row that the others are compared with, where there is one
RESULT_HEADS = [
    "networks", "seeds", "i2t R@1", "i2t R@5", "i2t R@10", "t2i R@1", "t2i R@5", "t2i R@10", "rSum", "sd", "single"
]  # fmt: skip
COST_HEADS = ["seeds", "minutes", "seconds an epoch", "MB of banks", "GB of GPU memory"]
READING = [
    "i2t: image to text, t2i: text to image. R@K in per cent and rSum are means over the seeds, of the averaged"
    " similarities where networks is 2 or 3; on folds of 1,000 test images where the part has folds.",
    "sd: sample standard deviation of rSum over the seeds. single: rSum of the networks by themselves; it is not"
    " measured on folds.",
    "Bold: the highest rSum. Where some rows have one network and some have more, the highest of averaged networks, and"
    " in the column single the highest of all.",
    "Paired tables: rSum of one row minus that of another, seed by seed: mean, sample standard deviation, and how many"
    " of the differences are positive. Averaged networks are only compared with averaged ones.",
    "paper: rSum as published, on the same data set and with the same network.",
    "Cost: minutes of all epochs without validation; banks of all networks together; 1 MB = 1,000,000 bytes.",
]


@dataclass(frozen=True)
class ReportTable:
    """A table as texts."""

    name: str  # of a file
    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]  # what is missing
    bold: frozenset[tuple[int, int]] = frozenset()  # row and column of the best results

    @property
    def label(self) -> str:
        """The name as LaTeX takes it in a label."""
        return re.sub(r"[^A-Za-z0-9.-]", "-", self.name)


def part_tables(results: Results, part: Part) -> list[ReportTable]:
    """The tables of a part, for each noise ratio; none for figures."""
    tables = []
    for level in noise_levels(results, part):
        if part.kind in ("retrieval", "ablation"):
            tables.append(_retrieval_table(level))
            if len(level.rows) > 1:
                tables.append(_paired_table(level))
        elif part.kind == "sweep":
            tables.append(_sweep_table(level))
        elif part.kind == "cost":
            tables.append(_cost_table(level))
    return tables


def _retrieval_table(level: NoiseLevel) -> ReportTable:
    rows = [[row.label, *_result_texts(row)] for row in level.rows]
    if not level.part.paper:
        return _with_best(level, ["method", *RESULT_HEADS], rows)
    rows = [[*texts, _mean([level.published(row)])] for texts, row in zip(rows, level.rows, strict=True)]
    return _with_best(level, ["method", *RESULT_HEADS, "paper"], rows)


def _sweep_table(level: NoiseLevel) -> ReportTable:
    several = len(level.part.rows) > 1
    heads = ["method"] if several else []
    rows = [[*([row.label] if several else []), str(row.value), *_result_texts(row)] for row in level.rows]
    return _with_best(level, [*heads, str(level.part.setting), *RESULT_HEADS], rows)


def _with_best(level: NoiseLevel, heads: list[str], rows: list[list[str]]) -> ReportTable:
    """Mark the highest printed results, without the oracle.

    If averaged networks stand beside single ones, rSum marks averaged networks only, and `single` compares all rows.
    """
    compared = {"rSum": level.compared, **({"single": level.ranked} if level.is_mixed else {})}
    bold = frozenset(place for head, of in compared.items() for place in _best(level, heads.index(head), of, rows))
    return ReportTable(level.name, level.title, heads, rows, _missing_notes(level), bold)


def _best(
    level: NoiseLevel, column: int, compared: Sequence[ResultRow], rows: Sequence[Sequence[str]]
) -> list[tuple[int, int]]:
    values = {
        number: float(texts[column])
        for number, (row, texts) in enumerate(zip(level.rows, rows, strict=True))
        if row in compared and texts[column] not in (MISSING, FAILED)
    }
    return [(number, column) for number, value in values.items() if value == max(values.values())]


def _result_texts(row: ResultRow) -> list[str]:
    """The columns of RESULT_HEADS."""
    results = list(row.results.values())
    if not results:
        return [row.placeholder] * len(RESULT_HEADS)
    means = [_mean([result.metrics[column] for result in results]) for column in COLUMNS]
    networks = "/".join(str(number) for number in sorted({result.networks for result in results}))
    return [networks, row.count(len(results)), *means, _sd(row.rsums), _mean([result.single for result in results])]


def _paired_table(level: NoiseLevel) -> ReportTable:
    """Differences between the reference and each other row, over their common seeds."""
    reference = next((row for row in level.rows if row.label == REFERENCE), level.rows[-1])
    kinds = ("averaged", "single")
    heads = [f"{kind}: {what}" for kind in kinds for what in ("seeds", "difference", "sd", "positive")]
    rows = [
        [row.label, *(text for kind in kinds for text in _paired_texts(reference, row, kind))]
        for row in level.rows
        if row is not reference
    ]
    title = f"{level.title}: {reference.label} minus the others, seed by seed"
    return ReportTable(f"{level.name}-paired", title, [f"{reference.label} minus", *heads], rows, _missing_notes(level))


def _paired_texts(reference: ResultRow, row: ResultRow, kind: str) -> list[str]:
    differences = []
    for seed in sorted(reference.results.keys() & row.results.keys()):
        high, low = getattr(reference.results[seed], kind), getattr(row.results[seed], kind)
        if high is not None and low is not None:
            differences.append(high - low)
    if not differences:
        without_results = [one for one in (row, reference) if not one.results]
        return [FAILED if any(one.failed for one in without_results) else MISSING] * 4
    positive = sum(difference > 0 for difference in differences)
    return [row.count(len(differences)), _signed(fmean(differences)), _sd(differences), str(positive)]


def _cost_table(level: NoiseLevel) -> ReportTable:
    rows = [[row.label, *_cost_texts(row)] for row in level.rows]
    return ReportTable(level.name, level.title, ["method", *COST_HEADS], rows, _missing_notes(level))


def _cost_texts(row: ResultRow) -> list[str]:
    """The columns of COST_HEADS."""
    if not row.done:
        return [row.placeholder] * len(COST_HEADS)
    timed = [record for record in row.done if record.validation]
    return [
        row.count(len(row.done)),
        _mean([record.seconds / 60 for record in timed]),
        _mean([record.seconds / len(record.validation) for record in timed]),
        _mean([record.bank_bytes and record.bank_bytes / 1e6 for record in row.done]),
        _mean([record.memory and record.memory / 1e9 for record in row.done]),
    ]


def _missing_notes(level: NoiseLevel) -> list[str]:
    total = sum(len(row.cells) for row in level.rows)
    missing = total - sum(len(row.records) for row in level.rows)
    notes = [f"Missing: {missing} of {total} trainings."] if missing else []
    for row in level.rows:
        for seed, record in row.failed.items():
            notes.append(f"{level.full_label(row)}, seed {seed} failed: {record.error or 'no reason was recorded'}")
    if any(len(row.results) < len(row.done) for row in level.rows):
        notes.append("Some trainings have no result on folds: the test images must be several whole thousands.")
    return notes


def provenance_table(records: Iterable[Record]) -> ReportTable:
    """Data, noise, device and versions behind the numbers: a row for each combination."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        data = record.data
        noise_ratio = float(record.config.get("noise_ratio", 0.0))
        noise = f"file {data.noise_file[:12]}" if data.noise_file else "by seed" if noise_ratio else "none"
        versions = (getattr(record.environment, name, None) for name in ("device", "mispair", "torch"))
        known = (data.tested_on, data.dev_protocol, *versions)
        groups.setdefault((percent(noise_ratio), noise, *(text or "unknown" for text in known)), []).append(record)
    rows = []
    for (ratio, noise, *texts), group in groups.items():
        measured = [record.data.mismatch for record in group if record.data.mismatch is not None]
        rows.append([ratio, str(len(group)), _range(measured), noise, *texts])
    heads = ["noise ratio", "trainings", "measured", "noise", "test set", "dev protocol", "device", "mispair", "torch"]
    notes = [
        "measured: mismatched training pairs. noise: drawn by the seed, or an index file by its SHA-256. results.csv"
        " has this for each training, and the hash of its settings."
    ]
    return ReportTable("provenance", "Provenance", heads, rows, notes)


def _range(ratios: Sequence[float]) -> str:
    """The lowest and the highest ratio, in per cent."""
    ends = dict.fromkeys(f"{100 * ratio:.2f}" for ratio in (min(ratios), max(ratios))) if ratios else {}
    return f"{'–'.join(ends)}\xa0%" if ends else MISSING


def _mean(values: Sequence[float | None]) -> str:
    """The mean of the known values."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.1f}" if known else MISSING


def _sd(values: Sequence[float]) -> str:
    """The sample standard deviation; one value has none."""
    return f"± {stdev(values):.1f}" if len(values) > 1 else MISSING


def _signed(value: float) -> str:
    """
    >>> _signed(1.25), _signed(-0.04), _signed(-3)
    ('+1.2', '0.0', '-3.0')
    """
    text = f"{value:+.1f}"
    return "0.0" if float(text) == 0 else text
