"""Self-contained HTML pages from templates, and tables for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from mispair.support.formatting import beginning, clean, duration
from mispair.support.thumbnails import thumbnail

LONGEST_CELL = 200  # characters of a cell of a table in a notebook


def environment(*, autoescape: bool) -> jinja2.Environment:
    """The templates of this package; a missing value is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("mispair"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=clean,
    )


def template(name: str, **filters: Callable[..., Any]) -> jinja2.Template:
    """A template with every text escaped."""
    pages = environment(autoescape=True)
    pages.filters.update(beginning=beginning, duration=duration, **filters)
    return pages.get_template(name)


def html_table(rows: Iterable[Sequence[Any]], columns: Sequence[str], title: str = "") -> str:
    """A table for `_repr_html_`: every text is escaped and cut to a few lines, numbers have three decimals.

    Cells are texts, numbers, None, or results of `image_cell`.

    >>> print(html_table([[1, "a <b>", 0.5]], ["row", "text", "score"], "1 pair"))
    <table><caption>1 pair</caption><thead><tr><th>row</th><th>text</th><th>score</th></tr></thead><tbody>
    <tr><td>1</td><td>a &lt;b&gt;</td><td>0.500</td></tr>
    </tbody></table>
    """
    head = Markup("").join(Markup("<th>{}</th>").format(clean(column)) for column in columns)
    caption = Markup("<caption>{}</caption>").format(clean(title)) if title else ""
    body = Markup("\n").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(_cell(value)) for value in row))
        for row in rows
    )
    table = "<table>{}<thead><tr>{}</tr></thead><tbody>\n{}\n</tbody></table>"
    return str(Markup(table).format(caption, head, body))


def image_cell(source: Path | bytes | None, size: int = 96) -> Markup:
    """A thumbnail of an image file or its content as a cell of `html_table`; empty if it cannot be read."""
    uri = "" if source is None else thumbnail(source, size).uri
    return Markup('<img src="{}" alt="">').format(uri) if uri else Markup("")


def _cell(value: Any) -> str:
    if value is None or isinstance(value, Markup):
        return value or ""
    if isinstance(value, float | np.floating):
        return f"{value:.3f}"
    return str(clean(beginning(str(value), LONGEST_CELL)))
