"""How packages are installed that only some of mispair needs."""

from __future__ import annotations


def install_command(extra: str, *others: str) -> str:
    """How to install an extra of mispair, as the README installs it, and other packages with it.

    >>> install_command("remote", "s3fs")
    "pip install -c constraints.txt '.[remote]' s3fs (in the clone of mispair)"
    """
    return " ".join(["pip install -c constraints.txt", f"'.[{extra}]'", *others, "(in the clone of mispair)"])


def import_problem(error: ImportError, library: str, command: str) -> str:
    """Why an adapter for a library cannot be used: something is not installed, or the library cannot be imported.

    >>> import_problem(ModuleNotFoundError(name="transformers"), "transformers", "pip install transformers")
    'This adapter needs transformers; install it: pip install transformers'
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"This adapter needs {error.name}; install it: {command}"
    cause: BaseException = error  # transformers raises an error without a name, from another and another
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"This adapter needs {library}, and {library} cannot be imported: {cause}"
