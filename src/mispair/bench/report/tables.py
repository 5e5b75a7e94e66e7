"""The tables of a suite: what was measured, its spread over the seeds, and the paper's numbers beside it.

Everything here is a pure function of a suite and the records that there are. A training that is missing or has failed
leaves its place in the table empty, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mispair.bench.report.notes import alone_note, common_notes, paper_notes, result_notes
from mispair.bench.report.rows import FAILED, MISSING, NoiseLevel, ResultRow, bank_bytes, paper_data, shares
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Part, Suite
from mispair.support.terminal import COLUMNS

REFERENCE = "REPAIR"  # the row that the others are compared with, where there is one
RESULT_HEADS = [
    "networks", "seeds", "i2t R@1", "i2t R@5", "i2t R@10", "t2i R@1", "t2i R@5", "t2i R@10", "rSum", "spread", "alone"
]  # fmt: skip
COST_HEADS = ["seeds", "minutes", "seconds an epoch", "MB of banks", "GB of GPU memory"]


@dataclass(frozen=True)
class Table:
    """A table for people, in words and figures.

    Attributes:
        name: Of a file.
        title: What it shows.
        heads: Of the columns.
        rows: A text for every column.
        notes: What a reader has to know.
        bold: Row and column of the best results.
    """

    name: str
    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]
    bold: frozenset[tuple[int, int]] = frozenset()


def part_tables(suite: Suite, part: Part, seeds: int, records: Mapping[str, Record]) -> list[Table]:
    """The tables of a part, for each share of noise; none for parts that are figures.

    Args:
        suite: The comparison.
        part: One of its parts.
        seeds: How many of each training there should be.
        records: Those that have ended, by the name of the cell.
    """
    tables = []
    for share in shares(suite, part, seeds, records):
        if part.kind in ("retrieval", "ablation"):
            tables.append(_retrieval_table(share))
            if len(share.lines) > 1:
                tables.append(_paired_table(share))
        elif part.kind == "sweep":
            tables.append(_sweep_table(share))
        elif part.kind == "cost":
            tables.append(_cost_table(share))
    return tables


def _retrieval_table(share: NoiseLevel) -> Table:
    rows = [[line.label, *_result_texts(line), *_paper_texts(share, line)] for line in share.lines]
    return _with_best(share, ["method", *RESULT_HEADS, *_paper_heads(share)], rows)


def _sweep_table(share: NoiseLevel) -> Table:
    several = len(share.part.rows) > 1
    heads = ["method"] if several else []
    rows = [[*([line.label] if several else []), str(line.value), *_result_texts(line)] for line in share.lines]
    return _with_best(share, [*heads, str(share.part.setting), *RESULT_HEADS], rows)


def _with_best(share: NoiseLevel, heads: list[str], rows: list[list[str]]) -> Table:
    competing = {number: row for number, row in enumerate(rows) if not share.lines[number].is_ceiling}
    bold = _best(competing, heads.index("rSum"))
    return Table(share.name, share.title, heads, rows, [*result_notes(share), *common_notes(share)], bold)


def _best(rows: Mapping[int, Sequence[str]], column: int) -> frozenset[tuple[int, int]]:
    """Where the highest number of a column stands, as far as a reader can tell."""
    values = {number: float(row[column]) for number, row in rows.items() if row[column] not in (MISSING, FAILED)}
    return frozenset((number, column) for number, value in values.items() if value == max(values.values()))


def _result_texts(line: ResultRow) -> list[str]:
    """The columns of RESULT_HEADS."""
    results = list(line.results.values())
    if not results:
        return [line.empty] * len(RESULT_HEADS)
    figures = [_mean([result.shown[column] for result in results]) for column in COLUMNS]
    networks = "/".join(str(number) for number in sorted({result.networks for result in results}))
    spread = _spread([result.shown["rsum"] for result in results])
    return [networks, line.count(len(results)), *figures, spread, _mean([result.alone for result in results])]


def _paper_heads(share: NoiseLevel) -> list[str]:
    if not share.has_paper:
        return []
    return ["paper", "difference"] if share.is_papers_data else [f"paper, {paper_data(share.suite, share.part)}"]


def _paper_texts(share: NoiseLevel, line: ResultRow) -> list[str]:
    if not share.has_paper:
        return []
    found = share.published(line)
    rsum = found.rsum if found else None
    shown = MISSING if found is None or rsum is None else f"{rsum:.1f}{'*' if found.star else ''}"
    if not share.is_papers_data:
        return [shown]
    return [shown, _difference(share, line, "rsum", rsum)]


def _difference(share: NoiseLevel, line: ResultRow, column: str, paper: float | None) -> str:
    """Ours minus the paper's; none where data set or network is another."""
    ours = [result.shown[column] for result in line.results.values()]
    return _signed(fmean(ours) - paper) if ours and paper is not None and share.comparable(line) else MISSING


def paper_tables(suite: Suite, part: Part, seeds: int, records: Mapping[str, Record]) -> list[Table]:
    """All figures of the paper with the difference of ours, where data set and network are the paper's."""
    found = shares(suite, part, seeds, records) if part.kind in ("retrieval", "ablation") else []
    return [_paper_table(share) for share in found if any(_recalls(share, line) for line in share.lines)]


def _recalls(share: NoiseLevel, line: ResultRow) -> dict[str, float]:
    found = share.comparable(line)
    return {**found.recalls, "rsum": found.rsum} if found and found.recalls and found.rsum is not None else {}


def _paper_table(share: NoiseLevel) -> Table:
    rows = []
    for line in share.lines:
        paper = {column: _recalls(share, line).get(column) for column in COLUMNS}
        texts = [
            MISSING if value is None else f"{value:.1f} ({_difference(share, line, column, value)})"
            for column, value in paper.items()
        ]
        rows.append([line.label, *texts])
    notes = ["In brackets: ours minus the paper's, means over the seeds."]
    heads = ["method", *RESULT_HEADS[2 : 2 + len(COLUMNS)]]
    return Table(f"{share.name}-paper", f"{share.title}: what the paper reports", heads, rows, notes)


def _paired_table(share: NoiseLevel) -> Table:
    """How much better one row is than each other one, from the seeds that both have."""
    reference = next((line for line in share.lines if line.label == REFERENCE), share.lines[-1])
    kinds = ("averaged", "alone")
    heads = [f"{kind}: {what}" for kind in kinds for what in ("seeds", "difference", "spread", "positive")]
    rows = [
        [line.label, *(text for kind in kinds for text in _paired_texts(reference, line, kind))]
        for line in share.lines
        if line is not reference
    ]
    notes = [
        f"rSum of {reference.label} minus that of the row, seed by seed: mean, sample standard deviation, and how many"
        " of the differences are positive.",
        "averaged: two networks' mean similarity, only against the same; alone: networks by themselves.",
        *alone_note(share),
    ]
    title = f"{share.title}: {reference.label} against the others, seed by seed"
    return Table(
        f"{share.name}-paired", title, [f"{reference.label} minus", *heads], rows, [*notes, *common_notes(share)]
    )


def _paired_texts(reference: ResultRow, line: ResultRow, kind: str) -> list[str]:
    differences = []
    for seed in sorted(reference.results.keys() & line.results.keys()):
        high, low = getattr(reference.results[seed], kind), getattr(line.results[seed], kind)
        if high is not None and low is not None:
            differences.append(high - low)
    if not differences:
        without_results = [one for one in (line, reference) if not one.results]
        return [FAILED if any(one.failed for one in without_results) else MISSING] * 4
    positive = sum(difference > 0 for difference in differences)
    return [line.count(len(differences)), _signed(fmean(differences)), _spread(differences), str(positive)]


def _cost_table(share: NoiseLevel) -> Table:
    rows = [[line.label, *_cost_texts(line), *_paper_cost(share, line)] for line in share.lines]
    notes = ["minutes: all epochs, without validation; banks: of all networks together; 1 MB = 1,000,000 bytes."]
    heads = []
    if share.has_paper:
        data = "" if share.is_papers_data else f", {paper_data(share.suite, share.part)}"
        heads = [f"paper{data}: hours", f"paper{data}: MB of banks"]
        notes.append("The paper trained on one RTX 4090.")
    return Table(
        share.name,
        share.title,
        ["method", *COST_HEADS, *heads],
        rows,
        [*notes, *paper_notes(share), *common_notes(share)],
    )


def _cost_texts(line: ResultRow) -> list[str]:
    """The columns of COST_HEADS."""
    if not line.done:
        return [line.empty] * len(COST_HEADS)
    timed = [record for record in line.done if record.validation]
    return [
        line.count(len(line.done)),
        _mean([record.seconds / 60 for record in timed]),
        _mean([record.seconds / len(record.validation) for record in timed]),
        _mean([_scaled(bank_bytes(record), 1e6) for record in line.done]),
        _mean([_scaled(record.memory, 1e9) for record in line.done]),
    ]


def _paper_cost(share: NoiseLevel, line: ResultRow) -> list[str]:
    if not share.has_paper:
        return []
    found = share.published(line)
    return [_mean([found.hours]), _mean([_scaled(found.extra_bytes, 1e6)])] if found else [MISSING] * 2


# ---------------------------------------------------------------------- numbers


def _mean(values: Sequence[float | None]) -> str:
    """The mean of what there is."""
    found = [value for value in values if value is not None]
    return f"{fmean(found):.1f}" if found else MISSING


def _spread(values: Sequence[float]) -> str:
    """The sample standard deviation; one value has none."""
    return f"± {stdev(values):.1f}" if len(values) > 1 else MISSING


def _signed(value: float) -> str:
    """
    >>> _signed(1.25), _signed(-0.04), _signed(-3)
    ('+1.2', '0.0', '-3.0')
    """
    text = f"{value:+.1f}"
    return "0.0" if float(text) == 0 else text


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
