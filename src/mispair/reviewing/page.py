"""The page of a review, served by this process: `mispair.review(audit)` and `mispair review`."""

from __future__ import annotations

import html
import secrets
import socket
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mispair.auditing.output_files import AUDIT, SUGGESTIONS, TABLE
from mispair.errors import ExistsError, InvalidValueError, MissingPackageError
from mispair.pairs.result_tables import write_table
from mispair.reviewing.decisions import FILE, Decision, read_current
from mispair.reviewing.pair_table import read_audit
from mispair.reviewing.review import Review
from mispair.support.extras import install_command

if TYPE_CHECKING:
    from mispair.auditing.audit import Audit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of this machine
HTTP = 80  # the port that browsers do not name


class ReviewPage:
    """A page on which people decide on the pairs of an audit.

    Attributes:
        folder: The output of the audit; decisions are written to `decisions.sqlite` in it.
        url: The address to open, with a token unless `host` is this machine alone.
        images_gone: The folder of the images, if it is not there any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        images: Path | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        reviewer: str = "",
    ) -> None:
        try:
            import uvicorn

            from mispair.reviewing.server import make_app
        except ImportError as error:
            advice = f"Install it with: {install_command('review')}"
            raise MissingPackageError(f"The page needs the package {error.name}", advice=advice) from None
        if port is not None and not 1 <= port <= 65535:
            raise InvalidValueError(str(port), where="port", expected="1 to 65535")
        self.folder = folder
        self._socket = bound(host, port or 0)
        port = self._socket.getsockname()[1]
        token = None if host in LOOPBACK else secrets.token_urlsafe(16)
        self.url = f"http://{in_url(host)}:{port}/" + ("" if token is None else f"?token={token}")
        try:
            self._review = Review(folder, images)
        except BaseException:
            self._socket.close()
            raise
        self.images_gone = self._review.images_gone
        app = make_app(self._review, names_of(host, port), token, reviewer)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False))
        self._thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        """Serve the page until Ctrl-C, SIGTERM or `close`."""
        self._server.run([self._socket])

    def start(self) -> Self:
        """Serve the page from a thread of its own."""
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.01)
        return self

    def close(self) -> None:
        """End the server; the decisions stay in the folder."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._review.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def decisions(self) -> dict[str, Decision]:
        """The decisions that count, by the ids of the pairs."""
        return read_current(self.folder / FILE)

    def __repr__(self) -> str:
        return f"<Review of {self.folder} at {self.url}>"

    def _repr_html_(self) -> str:
        return f'<a href="{html.escape(self.url)}" target="_blank">Review of {html.escape(str(self.folder))}</a>'


def review(
    audit: Audit | str | Path,
    folder: str | Path | None = None,
    *,
    images: str | Path | None = None,
    port: int | None = None,
    reviewer: str = "",
    browser: bool = True,
) -> ReviewPage:
    """Open a page in your browser, on this machine, to decide on the doubtful pairs of an audit.

    Args:
        audit: The result of `mispair.audit`, or the folder of `mispair audit`.
        folder: Folder for an audit in memory and its decisions; `review` by default.
        images: Folder of the images, if they have been moved since the audit.
        port: Port of the page; by default a free one.
        reviewer: Name beside the decisions.
        browser: Open the page in a browser.

    Returns:
        The page, with its `url` and `decisions`; `close()` ends it.

    Raises:
        DataError: The folder is not the output of an audit, holds another audit, or cannot be written.
        ConfigError: The page cannot be at this port, or a package is not installed.
    """
    place, images = audit_folder(audit, folder, images)
    page = ReviewPage(place, images=images, port=port, reviewer=reviewer).start()
    if browser:
        webbrowser.open(page.url)
    return page


def audit_folder(
    audit: Audit | str | Path, folder: str | Path | None, images: str | Path | None
) -> tuple[Path, Path | None]:
    """The folder of an audit, written for one in memory, and that of its images."""
    if isinstance(audit, str | Path):
        return Path(audit), Path(images) if images else None
    place, images = _written(audit, Path(folder or "review")), images or audit.source.image_folder
    return place, Path(images) if images else None


def _written(audit: Audit, folder: Path) -> Path:
    """The folder with the tables of an audit in memory; decisions on an equal one stay."""
    if (folder / TABLE).exists():
        is_other = read_audit(folder, "id")["id"].to_pylist() != audit.table.column("id").to_pylist()
        if is_other or (folder / AUDIT.mark).exists():
            raise ExistsError("an audit is there already", where=folder, advice="Give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    audit.to_parquet(folder / TABLE, overwrite=True)
    write_table(folder / SUGGESTIONS, [audit.suggestions], overwrite=True)
    return folder


def bound(host: str, port: int) -> socket.socket:
    """Open a socket at an address; port 0 takes a free one. The port may belong to another review."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        what = f"the page cannot be at {host}, port {port} ({reason})"
        advice = "Give another `port` or `host`, or end what uses it"
        raise InvalidValueError(what, where="port", advice=advice) from None


def names_of(host: str, port: int) -> frozenset[str] | None:
    """The allowed names of a server at an address; None for any.

    >>> sorted(names_of("localhost", 8700))
    ['127.0.0.1:8700', '[::1]:8700', 'localhost:8700']
    """
    if host in EVERYWHERE:
        return None
    names = [in_url(name).lower() for name in (LOOPBACK if host in LOOPBACK else (host,))]
    return frozenset([*(f"{name}:{port}" for name in names), *(names if port == HTTP else ())])


def in_url(host: str) -> str:
    """A host as URLs spell it."""
    return f"[{host}]" if ":" in host else host
