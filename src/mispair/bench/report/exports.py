"""Tables for other programs: Markdown, LaTeX, and all raw numbers as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from typing import Any

import jinja2

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


_MARKDOWN = re.compile(r"[\\`*|<\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # bank_size is no emphasis


def plain_markdown(text: str) -> str:
    """
    >>> print(plain_markdown("a|b *c* bank_size _d_"))
    a\\|b \\*c\\* bank_size \\_d\\_
    """
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


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


def _environment(escape: Callable[[str], str], **settings: str) -> jinja2.Environment:
    """Templates of tables; `escape` is applied to every text."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("mispair"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: escape(value) if isinstance(value, str) else value,
        **settings,  # type: ignore[arg-type]
    )


MARKDOWN = _environment(plain_markdown)
LATEX = _environment(
    _latex, block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
    comment_start_string="<#", comment_end_string="#>",
)  # fmt: skip


def csv_rows(results: Results, part: Part) -> list[dict[str, Any]]:
    """One row for each training of a part, with all raw numbers by the names in CSV_HEADS; None if missing.

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
