"""How packages are installed that only some of mispair needs."""

from __future__ import annotations


def install_command(extra: str, *others: str) -> str:
    """How to install an extra of mispair, as the README installs it, and other packages with it.

    >>> install_command("remote", "s3fs")
    "pip install -c constraints.txt '.[remote]' s3fs (in the clone of mispair)"
    """
    return " ".join(["pip install -c constraints.txt", f"'.[{extra}]'", *others, "(in the clone of mispair)"])
