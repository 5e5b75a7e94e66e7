"""What a model beside people saves, and whether the interval of the noise rate still holds.

`make bench-annotators ARGS="--data f8k_pairs --out annotators"` makes the tables in benchmarks/results/annotators.md.

The audits are those of bench_noise_rate.py. A person, who knows the truth, decides on 100 drawn pairs; a plan says how
many answers of the annotator pay off; it answers on so many pairs; and the person decides on until half of the 95 %
interval is 1.5 points or less. The annotator errs at random, as often as it is told to.

--http makes the second table: the annotator answers over HTTP, as a local server with time-outs, lost answers, 429, 503
and nonsense; each run has a limit of money, and is a process that is killed once and started again. The runs are small:
1,200 of the audited pairs, others each time, and an interval of 3 points. --jobs runs several at a time. Each run is a
line of http.jsonl in the folder, so that the same command resumes. --repeats makes the same runs without a server, so
that hundreds of them say how often the interval holds; 2 % of the answers are nonsense.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
from PIL import Image

from bench_noise_rate import LEAP, audited
from common import run
from mispair.auditing.summary import NoiseEstimate
from mispair.functional.logistic import FloatArray, probability
from mispair.reviewing.annotate import EVERY
from mispair.reviewing.decisions import Decision, Mode, Verdict
from mispair.reviewing.noise_estimate import LEAST, NO_ANSWERS, Draw
from mispair.reviewing.review import PRECISION, Review

ERRORS = {
    "5 %": (0.05, 0.05),
    "15 %": (0.15, 0.15),
    "30 %": (0.3, 0.3),
    "2 % of matches, 30 % of mismatches": (0.02, 0.3),
    "30 % of matches, 2 % of mismatches": (0.3, 0.02),
}  # shares of the matched and of the mismatched pairs on which the annotator errs
FIRST = 100  # decisions before the annotator is asked
PRICE = 0.01
HTTP_ERRORS = 0.05, 0.15, 0.3
HTTP_PAIRS, HTTP_PRECISION = 1200, 0.03
HTTP_CALLS = 250, 500  # that a run may make, at least and at most
OVERDRAWN = 1e-6
NONSENSE = 0.02  # share of the answers
TIMEOUT = 0.5  # seconds that the process waits for an answer


def scored(data: Path, folder: Path, noise_ratio: float, seed: int) -> tuple[FloatArray, FloatArray]:
    """What `audited` returns, which is kept in the folder."""
    file = folder / "scores.npz"
    if not file.exists():
        odds, mismatched = audited(data, folder, noise_ratio, seed)
        np.savez(file, odds=odds, mismatched=mismatched)
    with np.load(file) as found:
        return found["odds"], found["mismatched"]


def answers_of(mismatched: FloatArray, errors: tuple[float, float], rng: np.random.Generator) -> FloatArray:
    """(N,) what an annotator says who errs so often."""
    errs = rng.random(len(mismatched)) < np.where(mismatched == 1, errors[1], errors[0])
    return np.where(errs, 1 - mismatched, mismatched)


def decide(
    draw: Draw, mismatched: FloatArray, answers: FloatArray = NO_ANSWERS, precision: float = PRECISION
) -> NoiseEstimate:
    """The estimate of a person who decides on the drawn pairs until it is precise enough."""
    decisions, count = mismatched[draw.order], LEAST
    while True:
        found = draw.estimate(decisions[:count], answers)
        assert found is not None
        if found.half_width <= precision or count >= len(decisions):
            return found
        missing = count * ((found.half_width / precision) ** 2 - 1)
        count += max(1, count // 100, int(LEAP * missing))


def calls_of(draw: Draw, decisions: FloatArray, answers: FloatArray) -> int:
    """How many calls `mispair annotate` makes: as many as pay off, by the errors so far."""
    planned, calls = draw.plan(PRECISION, decisions).calls, 0
    while calls < planned:
        calls = min(planned, calls + EVERY)
        if calls >= LEAST and draw.plan(PRECISION, decisions, answers[:calls]).calls <= calls:
            break
    return calls


def holds(found: NoiseEstimate, mismatched: FloatArray) -> bool:
    return bool(found.low <= mismatched.mean() <= found.high)


def simulate(audits: Sequence[tuple[FloatArray, FloatArray]], reviewers: int) -> list[str]:
    """Cells of a row: without an annotator, and with each."""
    alone, with_one = [], {name: [] for name in ERRORS}  # type: ignore[var-annotated]
    for number, (odds, mismatched) in enumerate(audits):
        for reviewer in range(reviewers):
            draw = Draw(probability(odds), reviewer)
            found = decide(draw, mismatched)
            alone.append((0, found.decisions, holds(found, mismatched)))
            for name, errors in ERRORS.items():
                rng = np.random.default_rng([1, number, reviewer])  # not that of the draw
                answers = answers_of(mismatched, errors, rng)[draw.order]
                calls = calls_of(draw, mismatched[draw.order[:FIRST]], answers)
                found = decide(draw, mismatched, answers[:calls])
                with_one[name].append((calls, found.decisions, holds(found, mismatched)))
    cells = []
    for trials in (alone, *with_one.values()):
        calls, decided, held = np.mean(trials, axis=0)
        head = f"{calls:,.0f} calls, {decided:.0f}" if calls else f"{decided:.0f}"
        cells.append(f"{head}, {held:.1%}".replace("%", " %"))
    return cells


@dataclass
class Model:
    """The server's side: what it says, and what it charges for."""

    mismatched: npt.NDArray[np.float64]
    errs: npt.NDArray[np.bool_]
    charged: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    rng: random.Random = field(default_factory=lambda: random.Random(0))


class Handler(BaseHTTPRequestHandler):
    model: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pair = int(body["messages"][0]["content"][0]["text"].rpartition(" ")[2])
        model = self.model
        with model.lock:
            fault = model.rng.random()
            if fault < 0.04:  # before anything is done
                self.send_response(429 if fault < 0.02 else 503)
                self.send_header("Retry-After", "0.01")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            model.charged[pair] += 1
        if fault < 0.05:
            self.close_connection = True  # it is done, and nobody hears of it
            return
        if fault < 0.053:
            time.sleep(2 * TIMEOUT)
        says_wrong = bool(model.mismatched[pair]) != bool(model.errs[pair])
        said = "I am a language model." if fault > 1 - NONSENSE else "No." if says_wrong else "Yes."
        content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(OSError):  # the process was killed, or has waited long enough
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(model: Model) -> Any:
    """The URL of a server of a model."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"model": model})) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


def small_run(odds: FloatArray, mismatched: FloatArray, error: float, seed: int) -> dict[str, float]:
    """A run as over HTTP, without a server."""
    rng = np.random.default_rng([seed, round(100 * error)])
    rows = rng.choice(len(odds), min(HTTP_PAIRS, len(odds)), replace=False)
    odds, mismatched = odds[rows], mismatched[rows]
    draw = Draw(probability(odds), int(rng.integers(1 << 31)))
    answers = answers_of(mismatched, (error, error), rng)
    answers[rng.random(len(answers)) < NONSENSE] = np.nan
    answers = answers[draw.order][: int(rng.integers(*HTTP_CALLS))]
    found, alone = (decide(draw, mismatched, given, HTTP_PRECISION) for given in (answers, NO_ANSWERS))
    first, first_alone = (draw.estimate(mismatched[draw.order[:FIRST]], given) for given in (answers, NO_ANSWERS))
    assert first is not None
    assert first_alone is not None
    return {
        "decided": found.decisions,
        "alone": alone.decisions,
        "holds": holds(found, mismatched),
        "alone holds": holds(alone, mismatched),
        "holds at 100 decisions": holds(first, mismatched),
        "alone holds at 100": holds(first_alone, mismatched),
    }


def print_means(runs: Sequence[dict[str, float]]) -> None:
    """The mean of each number, for each error of the annotator and for all."""
    for error in (*HTTP_ERRORS, None):
        some = [one for one in runs if error in (None, one["error"])]
        mean = {what: round(float(np.mean([one[what] for one in some])), 4) for what in some[0]}
        print(f"{'all' if error is None else error}, {len(some)} runs: {json.dumps(mean)}")


def write_table(folder: Path, odds: FloatArray) -> Path:
    """An audit with these scores, of small pictures."""
    images = folder / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (64, 64), (90, 120, 150)).save(images / "0.jpg")
    rows, score = [str(row) for row in range(len(odds))], 1 - probability(odds)
    table = {
        "id": rows,
        "caption": [f"caption {row}" for row in rows],
        "image": ["0.jpg"] * len(odds),
        "status": ["ok"] * len(odds),
        "match_score": score.astype(np.float32),
        "is_mismatch": score < 0.5,
    }
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "pairs.parquet")
    return folder


def over_http(folder: Path, odds: FloatArray, mismatched: FloatArray, error: float, seed: int) -> dict[str, float]:
    """One review: 100 decisions, the command with a kill, and decisions until it is precise enough."""
    rng = np.random.default_rng([seed, round(100 * error)])
    rows = rng.choice(len(odds), min(HTTP_PAIRS, len(odds)), replace=False)
    odds, mismatched = odds[rows], mismatched[rows]
    write_table(folder, odds)
    with closing(Review(folder, folder / "images")) as review:
        review.decisions.setting("seed", str(rng.integers(1 << 31)))
        draw = review.draw
        pairs = review.table.read(review.drawn_rows[:FIRST])
        verdicts = [Verdict.DROP if mismatched[pair.row] else Verdict.KEEP for pair in pairs]
        review.decisions.add(
            Decision(pair.id, verdict, mode=Mode.RATE, draw=review.draw_key, inclusion=1.0)
            for pair, verdict in zip(pairs, verdicts, strict=True)
        )
    model = Model(mismatched, rng.random(len(mismatched)) < error)
    calls = int(rng.integers(*HTTP_CALLS))
    limit = round(PRICE * calls * rng.uniform(0.7, 1.2), 2)  # it is reached first in half of the runs
    with served(model) as url:
        command = [sys.executable, "-m", "mispair", "annotate", str(folder), "--annotator", url, "--model", "m"]
        command += ["--images", str(folder / "images"), "--timeout", str(TIMEOUT), "--yes", "--workers", "8"]
        command += ["--price-per-call", str(PRICE), "--limit", str(limit), "--calls", str(calls)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        goal = int(rng.integers(50, HTTP_CALLS[0]))
        while process.poll() is None and model.charged.total() < goal:
            time.sleep(0.01)
        process.kill()
        process.wait()
        with closing(Review(folder, folder / "images")) as review:
            kept = {int(name) for name in review.answers.of(review.answers.last[1])}
        before = Counter(model.charged)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with closing(Review(folder, folder / "images")) as review:
        answers, spent = review.answers_in_order()[0], review.answers.spent
    found, alone = (decide(draw, mismatched, given, HTTP_PRECISION) for given in (answers, NO_ANSWERS))
    at_once = draw.estimate(mismatched[draw.order[:FIRST]], answers)
    assert at_once is not None
    return {
        "answers": len(answers),
        "decided": found.decisions,
        "alone": alone.decisions,
        "holds": holds(found, mismatched),
        "holds at 100 decisions": holds(at_once, mismatched),
        "alone holds": holds(alone, mismatched),
        "asked again": sum(model.charged[pair] > before[pair] for pair in kept),
        "kept": len(kept),
        "charged": PRICE * model.charged.total(),
        "overdrawn": PRICE * model.charged.total() > limit + OVERDRAWN or spent > limit + OVERDRAWN,
    }


def main(
    *,
    data: Path,
    out: Path,
    seeds: tuple[int, ...] = (30, 31),
    reviewers: int = 35,
    noise_ratios: tuple[float, ...] = (0.05, 0.2, 0.4),
    http: int = 0,
    repeats: int = 0,
    jobs: int = 1,
) -> None:
    """Print a row of a table for each noise ratio.

    Args:
        data: Folder of embeddings, one pair an image.
        out: Folder of the audits.
        seeds: Of the noise.
        reviewers: Of each audit.
        noise_ratios: Fractions of mismatched pairs.
        http: Runs over HTTP for each error of 5, 15 and 30 %, instead, on parts of the audits in turns.
        repeats: The same number of runs without a server, instead.
        jobs: Runs over HTTP at a time.
    """
    audits = {ratio: [scored(data, out / f"{ratio}_{seed}", ratio, seed) for seed in seeds] for ratio in noise_ratios}
    groups = [one for group in audits.values() for one in group]
    if repeats:
        cases = [(number, error) for number in range(repeats) for error in HTTP_ERRORS]
        print_means([{"error": at, **small_run(*groups[one % len(groups)], at, one)} for one, at in cases])
        return
    if not http:
        print(f"| noise | people alone | {' | '.join(ERRORS)} |\n|{'---|' * (len(ERRORS) + 2)}")
        for ratio, group in audits.items():
            print(f"| {100 * ratio:.0f} % | {' | '.join(simulate(group, reviewers))} |", flush=True)
        return
    file, lock = out / "http.jsonl", threading.Lock()
    lines = file.read_text().splitlines() if file.exists() else []
    made = {(one["error"], one["number"]): one for one in map(json.loads, lines)}

    def trial(error: float, number: int) -> None:
        if (error, number) in made:
            return
        with TemporaryDirectory(dir=out) as folder:
            found = over_http(Path(folder), *groups[number % len(groups)], error, number)
        with lock, file.open("a") as lines:
            made[error, number] = {"error": error, "number": number, **found}
            print(json.dumps(made[error, number]), file=lines)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: trial(*one), [(error, number) for number in range(http) for error in HTTP_ERRORS]))
    print_means(list(made.values()))


if __name__ == "__main__":
    sys.exit(run(main))
