"""Annotators beside people, over HTTP: what is sent, answered, paid and asked again."""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from annotator_server import AnnotatorServer, decide_drawn, write_photos
from faulty_server import FAULTS, running
from forked import start_command
from mispair.cli.main import main
from mispair.errors import ConflictError, DataError, InvalidValueError, NotFoundError
from mispair.reviewing import annotate as annotating
from mispair.reviewing.annotate import AnnotationResult, Budget, annotate
from mispair.reviewing.annotators import Command, Endpoint, NoAnswerError, _seconds, read_answer
from mispair.reviewing.answers import Answer, AnswerKind, Answers
from mispair.reviewing.decisions import FILE, Decisions
from mispair.reviewing.review import Review
from mispair.reviewing.server import make_app
from mispair.reviewing.transfer import read_decisions
from refusals import refused

COUNT = 300


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotating, "PAUSE", 0.01)


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Path, dict[str, bool]]:
    return write_photos(tmp_path, COUNT)


@pytest.fixture
def server(photos: tuple[Path, dict[str, bool]]) -> Iterator[AnnotatorServer]:
    """Says what is true."""
    with running(AnnotatorServer(lambda caption: "No." if photos[1][caption] else "Yes.")) as found:
        yield found


def ask(audit: Path, server: AnnotatorServer, timeout: float = 30.0, **budget: Any) -> AnnotationResult:
    found = annotate(audit, Endpoint(server.url, "m", timeout=timeout), images=audit.parent / "images", **budget)
    assert found is not None
    return found


def answered(audit: Path) -> dict[str, AnswerKind]:
    with closing(Answers(audit / FILE)) as answers:
        return {name: one.kind for name, one in answers.of(answers.last[1]).items()}


@pytest.mark.parametrize("error", [0.05, 0.3])
def test_its_answers_make_the_interval_shorter(tmp_path: Path, error: float) -> None:
    audit, wrong = write_photos(tmp_path, 1200)
    decide_drawn(audit, wrong, 150)
    with closing(Review(audit)) as review:
        alone = review.rate().estimate
    assert alone is not None
    errs = dict(zip(wrong, np.random.default_rng(1).random(len(wrong)) < error, strict=True))
    with running(AnnotatorServer(lambda caption: "yes" if wrong[caption] == errs[caption] else "no")) as server:
        found = ask(audit, server, half_width=alone.half_width * 0.9, workers=8)
    estimate, errors = found.progress.estimate, found.progress.errors
    assert estimate is not None
    low, high = errors.interval
    assert errors.both == 150
    assert low <= error <= high
    assert estimate.low <= np.mean(list(wrong.values())) <= estimate.high
    assert estimate.half_width < alone.half_width
    if error < 0.3:  # 30 % are hardly worth asking
        assert estimate.half_width <= alone.half_width * 0.9 * 1.1
        assert found.calls == sum(server.asked.values()) > 0
        assert found.calls <= found.forecast.calls


def test_an_annotator_that_guesses_is_not_asked_for_long(tmp_path: Path) -> None:
    audit, wrong = write_photos(tmp_path, 1200)
    decide_drawn(audit, wrong, 150)
    guesses = dict(zip(wrong, np.random.default_rng(2).random(len(wrong)) < 0.5, strict=True))
    with running(AnnotatorServer(lambda caption: "yes" if guesses[caption] else "no")) as server:
        found = ask(audit, server, half_width=0.04)
    assert found.stopped == "no gain"
    assert found.calls < 200 < found.forecast.plan.calls


def test_it_sends_a_small_image_and_the_caption_only_to_this_url(
    photos: tuple[Path, dict[str, bool]], server: AnnotatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, wrong = photos
    monkeypatch.setenv("MY_KEY", "top-secret")
    endpoint = ["--annotator", server.url, "--model", "m", "--key-variable", "MY_KEY"]
    assert (
        main(["annotate", str(audit), *endpoint, "--images", str(audit.parent / "images"), "--calls", "70", "--yes"])
        == 0
    )
    assert sum(server.asked.values()) == 70
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer top-secret"}
    assert all(set(body) == {"model", "messages"} for body in server.bodies)
    assert "jpg" not in json.dumps([body["messages"][0]["content"][0] for body in server.bodies])  # no file name
    assert all(b"top-secret" not in file.read_bytes() for file in audit.iterdir())
    with closing(Review(audit)) as review:
        drawn = review.table.read(review.drawn_rows[:70])
    assert set(server.asked) == {pair.caption for pair in drawn}
    assert answered(audit) == {
        pair.id: AnswerKind.MISMATCHED if wrong[pair.caption] else AnswerKind.MATCHED for pair in drawn
    }


def test_nothing_is_sent_without_consent(
    photos: tuple[Path, dict[str, bool]], server: AnnotatorServer, capsys: pytest.CaptureFixture[str]
) -> None:
    audit, _ = photos
    command = ["annotate", str(audit), "--annotator", server.url, "--model", "m", "--price-per-call", "0.5"]
    command += ["--images", str(audit.parent / "images"), "--calls", "70"]
    assert main([*command, "--limit", "100"]) == 2
    said = capsys.readouterr().out
    assert server.url in said
    assert str(audit.parent / "images") in said
    assert server.requests == 0
    assert (
        annotate(audit, Endpoint(server.url, "m"), images=audit.parent / "images", calls=9, agree=lambda _: False)
        is None
    )
    assert server.requests == 0


def test_a_redirect_is_not_followed(photos: tuple[Path, dict[str, bool]], server: AnnotatorServer) -> None:
    audit, _ = photos
    moved = running(AnnotatorServer(lambda _: (307, {"Location": f"{server.url}/chat/completions"}, b"")))
    with moved as other, refused(DataError, other.url):
        ask(audit, other, calls=70)
    assert server.requests == 0


@pytest.mark.parametrize("workers", [1, 8])
def test_the_money_is_never_exceeded(
    photos: tuple[Path, dict[str, bool]], server: AnnotatorServer, workers: int
) -> None:
    """With retries, lost answers, several requests at a time, and in a second run."""
    audit, _ = photos
    server.every, server.seconds = 5, 0.001
    found = ask(audit, server, timeout=0.2, price_per_call=0.1, limit=8.0, calls=200, workers=workers, half_width=0.001)
    assert found.stopped == "limit"
    assert 0.1 * sum(server.asked.values()) <= found.spent <= 8.0 + 1e-9
    assert server.most_at_a_time <= workers
    again = ask(
        audit, server, timeout=0.2, price_per_call=0.1, limit=8.05, calls=200, workers=workers, half_width=0.001
    )
    assert (again.calls, again.spent) == (0, found.spent)
    more = ask(audit, server, timeout=0.2, price_per_call=0.1, limit=9.0, calls=200, workers=workers, half_width=0.001)
    assert 0.1 * sum(server.asked.values()) <= more.spent <= 9.0 + 1e-9


def test_it_asks_again_after_faults(photos: tuple[Path, dict[str, bool]], server: AnnotatorServer) -> None:
    audit, _ = photos
    server.faults = [*FAULTS, "500", "502"]
    found = ask(audit, server, timeout=0.2, calls=100, workers=1)
    kinds = found.kinds
    assert kinds[AnswerKind.UNCLEAR] == 0  # half an answer is none
    assert found.calls == 100
    server.faults = []
    ask(audit, server, calls=110, workers=1)
    kept = answered(audit)
    assert AnswerKind.FAILED not in kept.values()  # they were asked again


def test_it_waits_as_long_as_a_busy_server_says(photos: tuple[Path, dict[str, bool]]) -> None:
    audit, _ = photos
    refusals = iter([(429, {"Retry-After": "0.2"}, b""), (429, {}, b"")] * 3)
    times: list[float] = []

    def says(_: str) -> str | tuple[int, dict[str, str], bytes]:
        times.append(time.monotonic())
        return next(refusals, "yes")

    with running(AnnotatorServer(says)) as server:
        found = ask(audit, server, calls=70, workers=1, price_per_call=1.0, limit=70.0)
    assert found.calls == 70 == found.spent  # refused calls are not paid
    assert times[1] - times[0] >= 0.2


def test_a_long_pause_ends_the_run(photos: tuple[Path, dict[str, bool]]) -> None:
    busy = running(AnnotatorServer(lambda _: (429, {"Retry-After": "100000"}, b"")))
    with busy as server, refused(DataError):
        ask(photos[0], server, calls=70)


@pytest.mark.parametrize("status", [401, 404, 400])
def test_an_endpoint_that_refuses_ends_the_run(photos: tuple[Path, dict[str, bool]], status: int) -> None:
    with running(AnnotatorServer(lambda _: (status, {}, b"no such key"))) as server:
        with refused(DataError, names="no such key"):
            ask(photos[0], server, calls=70)
        assert server.requests < 40


def test_nonsense_is_counted_and_no_answer(photos: tuple[Path, dict[str, bool]]) -> None:
    audit, wrong = photos
    texts = ["I cannot tell", "yes", "no", "NO.", "Yes and no", "yes", "Yes, a dog.", "No."]
    says = {caption: texts[place % len(texts)] for place, caption in enumerate(wrong)}
    with running(AnnotatorServer(says.__getitem__)) as server:
        found = ask(audit, server, calls=80)
        expected = Counter(read_answer(says[caption]) for caption in server.asked)
        asked = sum(server.asked.values())
        assert found.kinds == expected
        assert found.unclear in texts
        with running(AnnotatorServer(lambda _: "maybe")) as other, refused(DataError, names="maybe"):
            annotate(audit, Endpoint(other.url, "m"), images=audit.parent / "images", calls=200)
        assert sum(server.asked.values()) == asked
        assert other.requests < 40


@pytest.mark.posix
def test_killed_and_resumed_it_asks_nothing_twice(
    photos: tuple[Path, dict[str, bool]], server: AnnotatorServer
) -> None:
    audit, _ = photos
    server.seconds = 0.02
    command = ["annotate", str(audit), "--annotator", server.url, "--model", "m"]
    command += ["--images", str(audit.parent / "images"), "--half-width", "0.001", "--yes"]
    command += ["--price-per-call", "1", "--limit", "250", "--calls", "250"]
    lost = 0
    for goal in (30, 90):
        process = start_command(*command)
        while sum(server.asked.values()) < goal:
            assert process.is_alive()
            time.sleep(0.005)
        process.kill()
        process.join()
        time.sleep(0.1)  # what was under way ends
        kept, asked = answered(audit), sum(server.asked.values())
        assert asked - len(kept) <= 8  # those that were under way, four at a time
        lost = asked - len(kept)
        known = {f"p{caption.split()[1]}" for caption in server.asked}
        assert set(kept) <= known
    server.seconds = 0.0
    assert main(command) == 0
    assert sum(count - 1 for count in server.asked.values()) <= lost
    assert max(server.asked.values()) <= 2
    with closing(Answers(audit / FILE)) as answers:
        spent = answers.spent
    assert sum(server.asked.values()) <= spent <= 250


def test_answers_of_other_questions_do_not_count(photos: tuple[Path, dict[str, bool]], server: AnnotatorServer) -> None:
    audit, _ = photos
    ask(audit, server, calls=70)
    assert ask(audit, server, calls=70).calls == 0
    other = Endpoint(server.url, "m", prompt="Is it so? yes or no.")
    found = annotate(audit, other, images=audit.parent / "images", calls=70)
    assert found is not None
    assert found.calls == 70
    with closing(Review(audit)) as review:
        assert review.rate().answered == 70
        assert review.rate(Endpoint(server.url, "m").identity).answered == 70
        assert review.rate("another").answered == 0


def test_a_pair_without_an_answer_does_not_hide_those_behind_it(photos: tuple[Path, dict[str, bool]]) -> None:
    audit, wrong = photos
    with closing(Review(audit)) as review:
        pairs = review.table.read(review.drawn_rows[:5])
        for place in (0, 2, 4):
            caption = pairs[place].caption if place else "another caption, before it was changed"
            kind = AnswerKind.MISMATCHED if wrong[pairs[place].caption] else AnswerKind.MATCHED
            review.answers.add(Answer(str(place), "one", "m", pairs[place].id, caption, kind))
        says, name = review.answers_in_order()
    expected = [np.nan, np.nan, float(wrong[pairs[2].caption]), np.nan, float(wrong[pairs[4].caption])]
    assert np.array_equal(says, expected, equal_nan=True)
    assert name == "m"


def test_calls_a_minute() -> None:
    pace = annotating._Pace(60_000.0)
    begin = time.monotonic()
    assert all(pace.wait() for _ in range(101))
    assert time.monotonic() - begin >= 0.1
    pace.pause(0.05)
    pace.wait()
    assert time.monotonic() - begin >= 0.15
    pace.stopped.set()
    assert not pace.wait()


def test_a_function_and_a_broken_image(photos: tuple[Path, dict[str, bool]]) -> None:
    audit, wrong = photos
    (audit.parent / "images" / "2.jpg").write_bytes(b"no image")
    seen: list[str] = []

    def model(image: bytes, caption: str) -> bool:
        assert image.startswith(b"\xff\xd8")
        seen.append(caption)
        return not wrong[caption]

    found = annotate(audit, model, images=audit.parent / "images", calls=90)
    assert found is not None
    assert found.kinds[AnswerKind.NO_IMAGE] > 0
    assert found.kinds.total() == found.forecast.plan.calls == len(seen) + found.kinds[AnswerKind.NO_IMAGE] == 90

    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        annotate(audit, broken, images=audit.parent / "images", calls=90)


COMMAND = """
import json, sys
for line in sys.stdin:
    question = json.loads(line)
    assert question["prompt"] and question["image"]
    number = int(question["caption"].split()[1])
    if number % 50 == 7 and not sys.argv[1:]:
        sys.exit(1)
    print(json.dumps({"answer": number % 2 == 0}) if number % 3 else "no", flush=True)
"""


def test_a_command(photos: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    audit, _ = photos
    (tmp_path / "model.py").write_text(COMMAND)
    command = f"{sys.executable} {tmp_path / 'model.py'}"
    found = annotate(audit, Command(command), images=audit.parent / "images", calls=100, workers=2)
    assert found is not None
    for name, kind in answered(audit).items():
        number = int(name[1:])
        ends = AnswerKind.FAILED if number % 50 == 7 else AnswerKind.MATCHED
        assert kind is (ends if number % 50 == 7 or (number % 3 and number % 2 == 0) else AnswerKind.MISMATCHED)
    with refused(NotFoundError, "no-such-program"):
        Command("no-such-program")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    slow = Command(f"{sys.executable} {tmp_path / 'slow.py'}", timeout=0.2)
    with pytest.raises(NoAnswerError):
        slow.ask(b"", "")
    slow.close()


def test_mistakes_are_refused_before_anything_is_asked(photos: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    audit, _ = photos
    for url in ("ftp://a/v1", "https://me:secret@a/v1", "a/v1", "https://a/v1?key=1"):
        with refused(InvalidValueError, "annotator"):
            Endpoint(url, "m")
    with refused(InvalidValueError, "model"):
        Endpoint("https://a/v1", "")
    usual: dict[str, Any] = {
        "half_width": 0.1,
        "price_per_call": 0.0,
        "limit": None,
        "calls": None,
        "rate": None,
        "workers": 1,
    }
    for name, value in (
        ("half_width", 0.0),
        ("price_per_call", -1.0),
        ("rate", 0.0),
        ("workers", 0),
        ("limit", float("nan")),
    ):
        with refused(InvalidValueError, name):
            Budget(**{**usual, name: value})
    with refused(ConflictError, "limit"):
        Budget(**{**usual, "limit": 5.0})
    with refused(NotFoundError):  # no images
        annotate(audit, lambda *_: True, images=tmp_path / "images" / "nowhere")
    assert main(["annotate", str(audit), "--annotator", "no-such-program"]) == 2
    key = ["--annotator", "http://a/v1", "--model", "m", "--key-variable", "NO_SUCH_VARIABLE"]
    assert main(["annotate", str(audit), *key]) == 2
    with sqlite3.connect(audit / FILE) as file:
        assert file.execute("SELECT count(*) FROM calls").fetchone() == (0,)


def test_the_pause_that_a_server_asks_for() -> None:
    assert _seconds("2.5") == 2.5
    assert _seconds(None) is None
    assert _seconds("soon") is None
    assert _seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


HOST = "127.0.0.1:8700"


def test_on_the_page_its_answers_are_suggestions(photos: tuple[Path, dict[str, bool]], server: AnnotatorServer) -> None:
    audit, wrong = photos
    ask(audit, server, calls=70)
    review = Review(audit, audit.parent / "images")
    page = TestClient(make_app(review, frozenset({HOST}), reviewer="ana"), base_url=f"http://{HOST}")
    drawn = review.table.read(review.drawn_rows[:71])
    pair, other = drawn[0], next(one for one in drawn if wrong[one.caption] != wrong[drawn[0].caption])
    shown = page.get(f"/?at={pair.row}&flagged=0").text
    assert 'data-key="m"' in shown
    assert f"model m says: {'wrong' if wrong[pair.caption] else 'right'}" in shown
    assert not review.decisions.current  # they are no decisions
    assert review.rate().decided == 0
    assert 'data-key="m"' not in page.get("/?mode=rate").text  # nor do they influence the decisions that check them
    assert " says: " not in page.get("/?mode=rate").text
    assert " says: " not in page.get(f"/?at={drawn[70].row}&flagged=0").text  # it was not asked about
    assert page.get("/?view=grid&flagged=0&sort=row").text.count(" says: ") > 0

    def accept(row: int, verdict: str, annotator: str) -> int:
        fields = {"address": "/?flagged=0", "row": str(row), "verdict": verdict, "accepted": annotator}
        return page.post("/decide", data=fields, headers={"Origin": f"http://{HOST}"}).status_code

    verdict = "drop" if wrong[pair.caption] else "keep"
    assert accept(other.row, verdict, "m") == 422  # it says something else
    assert accept(pair.row, verdict, "another model") == 422
    assert not review.decisions.current
    assert accept(pair.row, verdict, "m") == 200
    decision = review.decisions.current[pair.id]
    assert (decision.reviewer, decision.accepted, decision.verdict) == ("ana", "m", verdict)
    rows = list(csv.DictReader(page.get("/decisions.csv").text.splitlines()))
    assert [(row["id"], row["reviewer"], row["accepted"]) for row in rows] == [(pair.id, "ana", "m")]
    copy = Decisions(audit.parent / "copy.sqlite")
    (audit.parent / "decisions.csv").write_bytes(page.get("/decisions.csv").content)
    assert read_decisions(copy, audit.parent / "decisions.csv") == 1
    assert copy.current[pair.id].accepted == "m"
    copy.close()
    review.close()
