"""Errors for users to fix: sentences on the command line, classes and fields for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class MispairError(Exception):
    """An error for the user to fix; the command line prints it and exits with `code`.

    Settings are named in backticks, as in Python: `keep_best`. The command line prints them as flags.

    Attributes:
        what: What was found.
        where: The file, folder, URL or setting that it is about.
        expected: The expected value.
        advice: Advice for the user.
        silent: Whether another process prints it.

    >>> print(DataError("2 columns", where="a.npy", expected="vectors (N, D)", advice="Transpose it"))
    a.npy: 2 columns; expected vectors (N, D). Transpose it.
    """

    code = 2
    silent = False

    def __init__(self, what: str, *, where: str | Path | None = None, expected: str = "", advice: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.expected, self.advice = what, where, expected, advice

    def __str__(self) -> str:
        is_setting = isinstance(self, ConfigError) and str(self.where).isidentifier()
        place = f"`{self.where}`" if is_setting and not isinstance(self, MissingPackageError) else self.where
        head = self.what if self.where is None else f"{place}: {self.what}"
        text = f"{head}; expected {self.expected}" if self.expected else head
        sentences = [text, self.advice] if self.advice else [text]
        return " ".join(part if part.endswith((".", "?", "!")) else f"{part}." for part in sentences)


class DataError(MispairError):
    """The data is missing, damaged or inconsistent."""


class NotFoundError(DataError):
    """A file, folder, column, split or id does not exist."""


class DamagedError(DataError):
    """A file cannot be read, or its content is corrupted."""


class ShapeError(DataError):
    """An array or table has the wrong shape, type, or number or order of rows."""


class TooFewError(DataError):
    """There are too few pairs."""


class ExistsError(DataError):
    """The output would replace existing files; `overwrite` allows it."""


class WriteError(DataError):
    """A file or folder cannot be written."""


class ChangedError(DataError):
    """A folder was made from other data or settings than those given now."""


class InUseError(DataError):
    """Another process is writing to the folder."""


class ConfigError(MispairError):
    """A setting is wrong; `where` is its name."""


class UnknownNameError(ConfigError):
    """There is no setting, method, model, encoder, recipe or command of this name."""


class InvalidValueError(ConfigError):
    """The value of a setting has the wrong type or is out of range."""


class ConflictError(ConfigError):
    """Settings contradict each other, or do not fit the data."""


class MissingPackageError(ConfigError):
    """An optional package is not installed; `where` is its name."""


class TrainingError(MispairError):
    """A training ended before its last step."""


class CollapseError(TrainingError):
    """All similarities became equal: the network no longer tells any pair from any other."""

    code = 3


class NonFiniteError(TrainingError):
    """A loss or a gradient is not a finite number; the update was not made."""

    code = 3


class StoppedError(TrainingError):
    """A signal stopped the work; finished work is saved."""

    def __init__(self, what: str, code: int = 143, **fields: Any) -> None:
        super().__init__(what, **fields)
        self.code = code


class RankLostError(TrainingError):
    """Another process of the training has ended."""

    code = 1
