"""Errors about optional packages, with the command to install them."""

from __future__ import annotations

from mispair.errors import MissingPackageError


def install_command(extra: str, *others: str) -> str:
    """Command to install an extra of mispair, as in the README, and other packages with it.

    >>> install_command("remote", "s3fs")
    "pip install -c constraints.txt '.[remote]' s3fs (in the clone of mispair)"
    """
    return " ".join(["pip install -c constraints.txt", f"'.[{extra}]'", *others, "(in the clone of mispair)"])


def missing_package(package: str, extra: str) -> MissingPackageError:
    """The error for a package of an extra of mispair.

    >>> print(missing_package("usearch", "index"))
    usearch: not installed. Install it: pip install -c constraints.txt '.[index]' (in the clone of mispair).
    """
    return MissingPackageError("not installed", where=package, advice=f"Install it: {install_command(extra)}")


def cannot_import(error: ImportError, library: str, command: str) -> MissingPackageError:
    """The error for the library of an adapter: it or a package of its own is missing, or it is broken.

    >>> print(cannot_import(ModuleNotFoundError(name="transformers"), "transformers", "pip install transformers"))
    transformers: not installed. Install it: pip install transformers.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        return MissingPackageError("not installed", where=error.name, advice=f"Install it: {command}")
    cause: BaseException = error  # transformers raises an error without a name, from another and another
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return MissingPackageError(f"cannot be imported: {cause}", where=library)
