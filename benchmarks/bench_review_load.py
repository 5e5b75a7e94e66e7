"""Measure the load that the page of a review bears: `make bench-review-load ARGS=FOLDER`.

Generates pairs with captions, audits them, and starts `mispair review`. It measures the seconds to the first page, then
300 pages of all kinds one after the other, then 50 requests at a time for a minute. Memory is what the server's process
has resident: its own, and pages of files that are mapped (Linux).
"""

from __future__ import annotations

import csv
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from bench_scale import generate
from common import run

MISPAIR = (sys.executable, "-m", "mispair")
PORT, REQUESTS, CLIENTS, WIDTH, NOISE_RATIO = 8799, 300, 50, 64, 0.2
WORDS = [
    "a",
    "the",
    "red",
    "small",
    "old",
    "dog",
    "child",
    "man",
    "bus",
    "street",
    "ball",
    "plays",
    "sits",
    "on",
    "with",
]


def audited(folder: Path, pairs: int) -> Path:
    """An audit of generated pairs with captions; kept for the next time."""
    out = folder / "audit"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        generate(folder, pairs, WIDTH, NOISE_RATIO)
        rng = random.Random(0)
        with (folder / "ids.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["id", "caption"])
            rows.writerows([f"pair-{row:07}", " ".join(rng.choices(WORDS, k=11))] for row in range(pairs))
        sides = ["--left", str(folder / "left.npy"), "--right", str(folder / "right.npy")]
        subprocess.run([*MISPAIR, "audit", *sides, "--ids", str(folder / "ids.csv"), "--out", str(out)], check=True)
    return out


def get(path: str) -> tuple[int, float]:
    """The status of a page, and the seconds that it took."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status, time.perf_counter() - started
    finally:
        connection.close()


def memory(process: int) -> dict[str, int]:
    """Megabytes of a process: now and at its peak, its own and mapped ones."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    names = {"resident": "VmRSS", "own": "RssAnon", "mapped": "RssFile", "peak": "VmHWM"}
    return {name: int(lines[field].split()[0]) // 1000 for name, field in names.items()}


def address(rng: random.Random, pairs: int) -> str:
    """A page of one kind or another."""
    kinds = [
        f"/?at={rng.randrange(pairs)}&flagged=0",
        f"/?view=grid&page={rng.randrange(1, 1000)}",
        "/?mode=rate",
        "/?mode=teach",
        "/?state=undecided",
        f"/?sort=doubt&view=grid&page={rng.randrange(1, 1000)}",
        f"/?text={rng.choice(WORDS)}+{rng.choice(WORDS)}",
    ]
    return rng.choice(kinds)


def measure(out: Path, pairs: int, seconds: float) -> dict[str, object]:
    started = time.perf_counter()
    server = subprocess.Popen(
        [*MISPAIR, "review", str(out), "--port", str(PORT), "--no-open"], stdout=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                status, _ = get("/")
                break
            except OSError:
                time.sleep(0.01)
        found: dict[str, object] = {"seconds to the first page": round(time.perf_counter() - started, 2)}
        found["memory at the start"] = memory(server.pid)
        rng = random.Random(0)
        statuses, taken = [status], []
        for _ in range(REQUESTS):
            path = address(rng, pairs)
            status, seconds_taken = get(path)
            statuses.append(status)
            taken.append((round(1000 * seconds_taken, 1), path))
        found["milliseconds a page: median, 95 %, most"] = np.percentile(
            [ms for ms, _ in taken], [50, 95, 100]
        ).tolist()
        found["slowest pages"] = sorted(taken, reverse=True)[:5]
        found["memory after these"] = memory(server.pid)
        end = time.perf_counter() + seconds

        def client(seed: int) -> None:
            own = random.Random(seed)
            while time.perf_counter() < end:
                try:
                    statuses.append(get(address(own, pairs))[0])
                except OSError:
                    statuses.append(0)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found["answers"], found["not answered or refused"] = len(statuses), sum(status != 200 for status in statuses)
        return {**found, "memory at the end": memory(server.pid)}
    finally:
        server.terminate()
        server.wait()


def main(folder: Positional[Path], pairs: Positional[int] = 1_000_000, seconds: Positional[float] = 60) -> None:
    """Print what was measured as JSON.

    Args:
        folder: Where the pairs and their audit are generated, and found the next time.
        pairs: How many.
        seconds: Of the 50 requests at a time.
    """
    print(json.dumps(measure(audited(folder, pairs), pairs, seconds), indent=1))


if __name__ == "__main__":
    sys.exit(run(main))
