"""Self-contained HTML pages from templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2

from mispair.support.formatting import beginning, clean, duration


def template(name: str, **filters: Callable[..., Any]) -> jinja2.Template:
    """A template that escapes every text, and to which a value that is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mispair"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=clean,
    )
    environment.filters.update(beginning=beginning, duration=duration, **filters)
    return environment.get_template(name)
