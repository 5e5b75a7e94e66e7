"""The commands `mispair review` and `mispair export`. Heavy imports wait until they run."""

from __future__ import annotations

import errno
import getpass
import secrets
import socket
import sys
import webbrowser
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from mispair.cli.output import console, print_json, say
from mispair.errors import ConfigError
from mispair.support.extras import install_command

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of this machine
HTTP = 80  # the port that browsers do not name


def review(
    out: Positional[Path],
    *,
    port: int = 8700,
    images: Path | None = None,
    host: str = "127.0.0.1",
    reviewer: str | None = None,
    export_decisions: Path | None = None,
    import_decisions: Path | None = None,
    open: bool = True,  # noqa: A002 (the name of the flag)
) -> int:
    """Decide on the doubtful pairs of an audit, on a web page of this machine.

    Args:
        out: Folder that an audit has written.
        port: Of the page.
        images: Folder of the images, if they have been moved since the audit.
        host: Address to listen at, 0.0.0.0 for all of this machine; unless it is 127.0.0.1, the page asks for a token.
        reviewer: Name beside the decisions; that of the user by default.
        export_decisions: Write all decisions to this CSV, and end.
        import_decisions: Add the decisions of this CSV, or of what Label Studio or Argilla has exported, and end.
        open: Open the page in a browser.
    """
    from mispair.reviewing.decisions import FILE
    from mispair.reviewing.review import Review
    from mispair.reviewing.transfer import read_decisions, write_decisions
    from mispair.support.memory import spare_memory

    name = reviewer or _user()
    if import_decisions is not None:
        opened = Review(out, console=console())
        count = read_decisions(
            opened.decisions, import_decisions, name, opened.table, takes_captions=opened.takes_captions
        )
        opened.close()
        say(f"{count:,} decisions were added to {out / FILE}.")
    if export_decisions is not None:
        count = write_decisions(out, export_decisions)
        say(f"{count:,} decisions were written to {export_decisions}.")
    if export_decisions is not None or import_decisions is not None:
        return 0
    spare_memory()
    try:
        import uvicorn

        from mispair.reviewing.server import make_app
    except ImportError as error:
        raise ConfigError(
            f"The page needs the package {error.name}; install it with: {install_command('review')}"
        ) from None
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}; expected 1 to 65535.")
    check_free(host, port)
    local = host in LOOPBACK
    token = None if local else secrets.token_urlsafe(16)
    opened = Review(out, images, console())
    app = make_app(opened, names_of(host, port), token, name)
    address = f"http://{_in_url(host)}:{port}/" + ("" if token is None else f"?token={token}")
    say(f"Review of {out}: {address}\nDecisions are kept in {out / FILE}. Ctrl-C ends the server.", flush=True)
    if host in EVERYWHERE:
        say(f"On other machines write this machine's name or address in the place of {_in_url(host)}.", flush=True)
    if (gone := opened.images_gone) is not None:
        say(
            f"Note: {gone} is not there any more, so images are missing; move it back, or give the folder of the "
            "images with --images.",
            flush=True,
        )
    if open and local and sys.stdout.isatty():
        webbrowser.open(address)
    uvicorn.run(app, host=host, port=port, log_level="warning", server_header=False)
    return 0


def check_free(host: str, port: int) -> None:
    """Refuses an address that the page cannot have, before anybody is told of it: another review may be there.

    Raises:
        ConfigError: It is in use, not one of this machine, or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in found:
            try:
                socket.create_server(place[:2], family=family).close()
            except OSError as error:
                if len(found) == 1 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # no IPv6 here
                    raise
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"The page cannot be at {host}, port {port} ({reason}); give another --port or --host, or end what uses it."
        ) from None


def names_of(host: str, port: int) -> frozenset[str] | None:
    """Names under which browsers call a server at an address; None for any.

    >>> sorted(names_of("localhost", 8700))
    ['127.0.0.1:8700', '[::1]:8700', 'localhost:8700']
    """
    if host in EVERYWHERE:
        return None
    names = [_in_url(name).lower() for name in (LOOPBACK if host in LOOPBACK else (host,))]
    return frozenset([*(f"{name}:{port}" for name in names), *(names if port == HTTP else ())])


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def export(
    out: Positional[Path],
    *,
    to: Path,
    policy: Literal["flagged", "decided"] = "flagged",
    mend: bool = False,
    overwrite: bool = False,
    images: Path | None = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Write an audited data set as it is after the decisions, in the layout it came in.

    Args:
        out: Folder that an audit has written.
        to: Folder for the data set, with a manifest of what became of each pair.
        policy: Pairs that nobody has decided on: flagged leaves out the flagged and unreadable ones, decided keeps all.
        mend: Give flagged pairs their better partners where these are sure enough.
        overwrite: Replace an earlier copy in the folder.
        images: Folder of the images, if they have been moved since the audit.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print the counts as JSON.
    """
    from mispair.reviewing.export import export as export_set

    done = export_set(
        out, to, policy=policy, mend=mend, overwrite=overwrite, images=images, device=device, console=console()
    )
    if json:
        print_json({"folder": str(done.folder), **done.counts})
    else:
        say(f"{to}: {', '.join(f'{count:,} {what}' for what, count in sorted(done.counts.items()))}.")
        if mend and done.counts.get("dropped") and not done.counts.get("re-paired"):
            say(f"No better partner of a flagged pair is sure enough for --mend; decide with: mispair review {out}")
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user, as in some containers
        return ""
