"""A web server that makes the mistakes that servers and networks make."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("busy", "cut", "short", "broken", "slow")


class Server(ThreadingHTTPServer):
    """Serves `content`; each request takes the first of `faults` away."""

    version, ranges = '"1"', True
    block_on_close = False

    def __init__(self, content: bytes) -> None:
        self.content = content
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.served: list[tuple[int, int]] = []
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/a/left.npy"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        fault = server.faults.pop(0) if server.faults else ""
        if fault == "busy" or fault.isdecimal():
            self.send_error(503 if fault == "busy" else int(fault))
            return
        if fault == "broken":
            self.connection.close()
            return
        if fault == "slow":
            server.go_on.wait(5)
            return
        if not server.ranges:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(server.content)
            return
        start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = server.content[start : last + 1]
        server.served.append((start, last + 1))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{last}/{len(server.content)}")
        self.send_header("ETag", server.version)
        sent = body[: len(body) // 2] if fault in ("cut", "short") else body
        self.send_header("Content-Length", str(len(sent if fault == "short" else body)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve(content: bytes) -> Iterator[Server]:
    """A server of one file, until the block ends."""
    with Server(content) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()
