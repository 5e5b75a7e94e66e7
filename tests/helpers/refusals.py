"""Checks errors by their class and fields, so that their wording can change."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mispair.errors import MispairError


@contextmanager
def refused(kind: type[MispairError], where: str | Path | None = None, names: str = "") -> Iterator[None]:
    """Expect an error of exactly this class.

    Args:
        kind: The class.
        where: The file, folder or setting that it must be about.
        names: A value of the user's that the message must contain, such as a file name, an id or a number; never prose.
    """
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    assert where is None or str(caught.value.where) == str(where), f"{caught.value.where!r}: {caught.value}"
    assert names in str(caught.value)
