"""Tables of metrics in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

COLUMNS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")
HEADS = ("R@1", "R@5", "R@10", "R@1", "R@5", "R@10", "rSum")


def retrieval_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per name: image to text, text to image, and their sum."""
    table = Table(title=title, caption="left R@K: image to text, right R@K: text to image")
    table.add_column("", overflow="fold")
    for head in HEADS:
        table.add_column(head, justify="right", overflow="fold")  # a narrow terminal hides no digits
    for name, metrics in rows.items():
        table.add_row(name, *(f"{metrics[column]:.1f}" for column in COLUMNS))
    return table
