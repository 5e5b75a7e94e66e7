"""Tables for other programs: Markdown, LaTeX, and all raw numbers as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import Any

from mispair.bench.report.tables import ReportTable
from mispair.bench.suite.record import Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Part, digest
from mispair.support.terminal import COLUMNS

CSV_HEADS = (
    "part", "row", "noise", "value", "seed", "cell", "config_digest", "status", "error", "networks",
    "test_set", "dev_protocol", "mismatch", "noise_file_sha256",
    *(f"{kind}_{column}" for kind in ("averaged", "alone", "folds") for column in COLUMNS),
    "seconds", "memory_bytes", "bank_bytes", "device", "mispair", "torch",
)  # fmt: skip


def markdown(table: ReportTable) -> str:
    """As GitHub shows it: the title, the table, its notes."""
    texts = [[plain_markdown(text) for text in row] for row in table.rows]
    for row, column in table.bold:
        texts[row][column] = f"**{texts[row][column]}**"
    rule = ["---", *["---:"] * (len(table.heads) - 1)]
    rows = [[plain_markdown(head) for head in table.heads], rule, *texts]
    lines = [f"**{plain_markdown(table.title)}**", "", *(f"| {' | '.join(row)} |" for row in rows)]
    if table.notes:
        lines += ["", *(f"- {plain_markdown(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


_MARKDOWN = re.compile(r"[\\`*|<\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # bank_size is no emphasis


def plain_markdown(text: str) -> str:
    """
    >>> print(plain_markdown("a|b *c* bank_size _d_"))
    a\\|b \\*c\\* bank_size \\_d\\_
    """
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def latex(table: ReportTable) -> str:
    """A table with booktabs and graphicx, its notes below."""
    texts = [[_latex(text) for text in row] for row in table.rows]
    for row, column in table.bold:
        texts[row][column] = rf"\textbf{{{texts[row][column]}}}"
    return "\n".join(
        [
            r"\begin{table}[ht]",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{_latex(table.title)}}}",
            rf"\label{{tab:{re.sub(r'[^A-Za-z0-9.-]', '-', table.name)}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",  # a wide table is scaled down
            rf"\begin{{tabular}}{{l{'r' * (len(table.heads) - 1)}}}",
            r"\toprule",
            _latex_row([_latex(head) for head in table.heads]),
            r"\midrule",
            *(_latex_row(row) for row in texts),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\par\smallskip\raggedright",
            *(rf"{_latex(note)}\par" for note in table.notes),
            r"\end{table}",
            "",
        ]
    )


def _latex_row(texts: Iterable[str]) -> str:
    return rf"{' & '.join(texts)} \\"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "±": r"$\pm$",
    "[": "{[}", "]": "{]}", "*": "{*}",  # at the start of a row they would belong to the line break before
}  # fmt: skip
_LATEX_TEXT = re.compile(
    rf"(?P<infinite>VSE-inf\b)|(?P<minus>(?<![\w.])-(?=[\d.]))|(?P<special>[{re.escape(''.join(_LATEX))}])"
)


def _latex(text: str) -> str:
    r"""
    >>> print(_latex("VSE-inf, 40 % & bank_size #1 ± 2.5"), _latex("-3.0"))
    VSE$\infty$, 40 \% \& bank\_size \#1 $\pm$ 2.5 $-$3.0
    """

    def escaped(match: re.Match[str]) -> str:
        if match["infinite"]:
            return r"VSE$\infty$"
        return "$-$" if match["minus"] else _LATEX[match["special"]]

    return _LATEX_TEXT.sub(escaped, " ".join(text.split()))


def csv_rows(results: Results, part: Part) -> list[dict[str, Any]]:
    """One row for each training of a part, with all raw numbers by the names in CSV_HEADS; None where there is none.

    `averaged` is of the only network where `networks` is 1.
    """
    rows = []
    for key, cell in part.cells(results.suite, results.seeds).items():
        row = dict[str, Any].fromkeys(CSV_HEADS)
        row |= {"part": part.name, "row": key.row, "noise": key.noise_ratio, "value": key.value, "seed": key.seed}
        row |= {"cell": cell.name, "config_digest": digest(cell.config), "status": "missing"}
        if cell.name in results.records:
            row |= _record_columns(results.records[cell.name])
        rows.append(row)
    return rows


def results_csv(results: Results) -> str:
    """All trainings of all parts as a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_HEADS, lineterminator="\n")
    writer.writeheader()
    for part in results.suite.parts:
        writer.writerows(csv_rows(results, part))
    return text.getvalue()


def _record_columns(record: Record) -> dict[str, Any]:
    kinds = {"averaged": record.averaged(), "alone": record.single()} if record.networks else {}
    kinds |= {"folds": record.test["folds"]} if "folds" in record.test else {}
    return {
        "status": record.status,
        "error": record.error,
        "networks": record.networks or None,
        "test_set": record.data.tested_on,
        "dev_protocol": record.data.dev_protocol,
        "mismatch": record.data.mismatch,
        "noise_file_sha256": record.data.noise_file,
        **{f"{kind}_{column}": metrics[column] for kind, metrics in kinds.items() for column in COLUMNS},
        "seconds": record.seconds if record.validation else None,
        "memory_bytes": record.memory,
        "bank_bytes": record.bank_bytes,
        **{name: getattr(record.environment, name, None) for name in ("device", "mispair", "torch")},
    }
