"""Web servers that make the mistakes that servers and networks make."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

FAULTS = ("busy", "cut", "short", "broken", "slow")
Answer = tuple[int, dict[str, str], bytes]


class FaultyServer(ThreadingHTTPServer):
    """Each request takes the first of `faults` away; then every `every`-th one has one of `FAULTS`, in turn."""

    block_on_close = False
    every = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.requests = self.injected = 0
        self.go_on = threading.Event()
        self._lock = threading.Lock()

    def fault(self) -> str:
        with self._lock:
            self.requests += 1
            if self.faults:
                return self.faults.pop(0)
            if self.every and self.requests % self.every == 0:
                self.injected += 1
                return FAULTS[self.injected % len(FAULTS)]
            return ""

    def answer(self, request: Handler) -> Answer:
        """Status, headers and body."""
        raise NotImplementedError


class Server(FaultyServer):
    """Serves `content`."""

    version, ranges = '"1"', True

    def __init__(self, content: bytes) -> None:
        self.content = content
        super().__init__()
        self.served: list[tuple[int, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/a/left.npy"

    def answer(self, request: Handler) -> Answer:
        about = {"ETag": self.version}
        if request.command == "HEAD":
            return 200, {"Content-Length": str(len(self.content)), **about}, b""
        if not self.ranges:
            return 200, about, self.content
        start, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        self.served.append((start, last + 1))
        place = f"bytes {start}-{last}/{len(self.content)}"
        return 206, {"Content-Range": place, **about}, self.content[start : last + 1]


class Proxy(FaultyServer):
    """Asks another server of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, request: Handler) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in ("connection", "expect")
        }
        connection.request(request.command, request.path, request.body, headers)
        with connection.getresponse() as found:
            body = found.read()
            kept = {name: value for name, value in found.getheaders() if name.lower() not in _HOP_BY_HOP}
        connection.close()
        return found.status, kept, body


_OWN = ("connection", "expect")
_HOP_BY_HOP = ("connection", "transfer-encoding", "date", "server")


class Handler(BaseHTTPRequestHandler):
    server: FaultyServer
    body: bytes

    def do_GET(self) -> None:
        server = self.server
        fault = server.fault()
        if fault == "busy" or fault.isdecimal():
            self.send_error(503 if fault == "busy" else int(fault))
            return
        if fault == "broken":
            self.connection.close()
            return
        if fault == "slow":
            server.go_on.wait(5)
            return
        if self.headers.get("Expect") == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, body = server.answer(self)
        if fault == "cut" and self.command in ("PUT", "POST", "DELETE"):  # it was done, and nobody hears of it
            self.connection.close()
            return
        sent = body[: len(body) // 2] if fault in ("cut", "short") else body
        length = {"Content-Length": str(len(sent if fault == "short" else body))}
        self.send_response(status)
        for name, value in (length | headers if self.command == "HEAD" else headers | length).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


Kind = TypeVar("Kind", bound=FaultyServer)


@contextmanager
def running(server: Kind) -> Iterator[Kind]:
    """The server, until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


@contextmanager
def serve(content: bytes) -> Iterator[Server]:
    """A server of one file, until the block ends."""
    with running(Server(content)) as server:
        yield server
