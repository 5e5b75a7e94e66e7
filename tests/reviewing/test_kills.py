"""The server is killed again and again while a reviewer decides: what it has acknowledged is there."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from audited import write_audit
from mispair.reviewing.decisions import FILE, Decisions

KILLS = 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL"),
]


def test_a_killed_server_loses_no_acknowledged_decision(tmp_path: Path) -> None:
    audit = write_audit(tmp_path / "audit", 4000)
    rng, acknowledged = random.Random(0), set()
    row = 0
    for _ in range(KILLS):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "mispair", "review", str(audit), "--port", str(port), "--no-open"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        page = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Origin": f"http://127.0.0.1:{port}"})
        while True:
            try:
                page.get("/favicon.ico")
                break
            except httpx.TransportError:
                assert server.poll() is None
                time.sleep(0.02)
        end = time.monotonic() + rng.uniform(0, 0.1)
        while time.monotonic() < end:
            assert page.post("/decide", data={"row": str(row), "verdict": "keep"}).status_code == 200
            acknowledged.add(f"p{row}")
            row += 1
        server.kill()
        server.wait()
        page.close()
    decisions = Decisions(audit / FILE)
    assert acknowledged
    assert acknowledged <= set(decisions.current)
    decisions.close()
