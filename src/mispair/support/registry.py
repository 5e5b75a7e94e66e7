"""Classes by name: mispair's own, and those of installed packages by entry points."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from mispair.errors import ConfigError, UnknownNameError

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Subclasses of one class by name. Ours come first."""

    what: str  # such as method; a setting of this name chooses one
    kind: type[T]
    built_in: dict[str, type[T]]

    def find(self, name: str) -> type[T]:
        """The class of this name."""
        if name in self.built_in:
            return self.built_in[name]
        installed = entries(self.what)
        if name in installed:
            return self._load(installed[name])
        known = [*self.built_in, *installed]
        near = difflib.get_close_matches(name, known, n=1)
        advice = f'Did you mean "{near[0]}"?' if near else f"The {self.what}s are {', '.join(known)}."
        raise UnknownNameError(f'there is no {self.what} "{name}"', where=self.what, advice=advice)

    def all(self) -> dict[str, type[T]]:
        return self.built_in | self.installed()

    def installed(self) -> dict[str, type[T]]:
        """Classes of installed packages; warns of those with import errors, and leaves them out."""
        found = {}
        for name, entry in entries(self.what).items():
            if name not in self.built_in:
                try:
                    found[name] = self._load(entry)
                except ConfigError as error:
                    warnings.warn(str(error), stacklevel=2)
        return found

    def titles(self) -> dict[str, str]:
        """The description of each class, in one line."""
        return {name: _title(kind) for name, kind in self.all().items()}

    def _load(self, entry: EntryPoint) -> type[T]:
        origin = f'the {self.what} "{entry.name}" ({entry.value})'
        try:
            found = entry.load()
        except Exception as error:  # whatever the code of another package raises
            raise ConfigError(
                f"{origin} cannot be imported: {type(error).__name__}: {error}", where=self.what
            ) from error
        if not (isinstance(found, type) and issubclass(found, self.kind)):
            expected = f"a subclass of {self.kind.__module__}.{self.kind.__name__}"
            raise ConfigError(f"{origin} is {found!r}", where=self.what, expected=expected)
        return found


def entries(what: str) -> dict[str, EntryPoint]:
    """The entry points of installed packages for methods or models."""
    return _entries(f"mispair.{what}s", tuple(sys.path))


@lru_cache
def _entries(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """They are searched again when the import path changes."""
    return {entry.name: entry for entry in entry_points(group=group)}


def _title(kind: type[Any]) -> str:
    """The first sentence of the class or, without one, of its module."""
    text = kind.__doc__ or getattr(sys.modules[kind.__module__], "__doc__", None) or ""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
