"""The page in Chromium, as a person uses it: by keyboard, by mouse, in two browsers, on a telephone."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image

from audited import write_audit
from mispair.reviewing.answers import Answer, AnswerKind
from mispair.reviewing.decisions import FILE, Decision, Verdict, read_current
from mispair.reviewing.review import Review
from mispair.reviewing.server import make_app

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("MISPAIR_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path; MISPAIR_CHROMIUM may name one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Served:
    """A review that a server shows."""

    def __init__(self, review: Review) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.review, self.address = review, f"http://127.0.0.1:{port}"
        app = make_app(review, frozenset({f"127.0.0.1:{port}"}), reviewer="ana")
        self.server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def verdicts(self) -> dict[str, str]:
        return {name: str(one.verdict) for name, one in read_current(self.review.folder / FILE).items()}

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        Image.new("RGB", (320, 240), (60 * number, 80, 90)).save(images / f"{number}.jpg")
    served = Served(Review(write_audit(tmp_path / "audit", images=True), images))
    yield served
    served.stop()


@pytest.fixture
def open_page(browser: Any, served: Served) -> Iterator[Any]:
    """Opens pages of which each has a session of its own; no script may fail and nothing may leave the machine."""
    contexts, problems = [], []

    def open_page(path: str = "/", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(served.address) else problems.append(sent.url))
        page.goto(served.address + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def message(page: Any, expected: str) -> None:
    sync_api.expect(page.locator(".message")).to_contain_text(expected)


def test_all_by_keyboard(open_page: Any, served: Served) -> None:
    page = open_page()
    page.keyboard.press("k")
    message(page, "p0: kept.")
    page.keyboard.press("d")
    message(page, "p1: dropped.")
    page.keyboard.press("1")
    message(page, "p2: re-paired.")
    page.keyboard.press("u")
    message(page, "p3: unsure.")
    page.keyboard.press("c")
    sync_api.expect(page.locator("textarea")).to_be_focused()
    page.keyboard.type("a kind dog")  # k, d and 1 are letters here, and the old caption was selected
    sync_api.expect(page.locator("textarea")).to_have_value("a kind dog")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("textarea")).to_be_hidden()
    assert "p4" not in served.verdicts()
    page.keyboard.press("c")
    page.keyboard.press("End")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("a kind one")
    page.keyboard.press("Control+Enter")
    message(page, "p4: rewritten.")
    assert served.verdicts() == {"p0": "keep", "p1": "drop", "p2": "re-pair", "p3": "unsure", "p4": "rewrite"}
    assert served.review.decisions.current["p4"].caption == "caption 4 of a dog\na kind one"
    page.keyboard.press("z")
    message(page, "Undone")
    assert "p4" not in served.verdicts()
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p4")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p3")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p4")
    page.keyboard.press("?")
    sync_api.expect(page.locator("dialog")).to_be_visible()
    assert "Enter saves it, Escape leaves without a decision" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.reload()
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p4")
    page.go_back()
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p3")
    sync_api.expect(page.get_by_role("heading", name="Review of audit")).to_be_visible()  # not the pair alone
    page.keyboard.press("?")
    sync_api.expect(page.locator("dialog")).to_be_visible()


def test_keys_that_come_quickly_each_reach_the_next_pair(open_page: Any, served: Served) -> None:
    page = open_page()
    for key in "k9d8kd7u":  # there are no suggestions 7 to 9
        page.keyboard.press(key)
    message(page, "p4: unsure.")
    assert list(served.verdicts().values()) == ["keep", "drop", "keep", "drop", "unsure"]
    for _ in range(5):
        page.keyboard.press("z")
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p0")
    page.wait_for_function("document.querySelector('.undo').innerText.includes('0 decided')")
    assert not served.verdicts()
    page.goto(f"{served.address}/?at=29")  # the last one: what was pressed for the next pair is not for this one
    page.evaluate(
        "for (const key of 'kd') document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))"
    )
    message(page, "p29: kept. That was the last one.")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(page.locator("article")).to_have_attribute("aria-label", "Pair p28")
    assert served.verdicts() == {"p29": "keep"}


def test_a_key_that_is_held_decides_once(open_page: Any, served: Served) -> None:
    page = open_page()
    for _ in range(4):
        page.keyboard.down("k")
    page.keyboard.up("k")
    page.keyboard.press("d")
    message(page, "p1: dropped.")
    assert served.verdicts() == {"p0": "keep", "p1": "drop"}


def test_many_at_once_with_filters(open_page: Any, served: Served) -> None:
    page = open_page("/?view=grid")
    page.keyboard.press("d")
    assert "Select at least one pair" in page.locator("#problem").inner_text()
    page.get_by_label("Select pair p1", exact=True).click()
    page.get_by_label("Select pair p4", exact=True).click(modifiers=["Shift"])
    sync_api.expect(page.locator(".selected")).to_have_text("4 selected")
    page.keyboard.press("d")
    message(page, "4 pairs: dropped.")
    page.get_by_text("Filters and order").click()
    page.locator("select[name=state]").select_option("undecided")
    page.get_by_label("Search captions").fill("cat")
    with page.expect_navigation():
        page.get_by_role("button", name="Show").click()
    page.keyboard.press("a")
    page.keyboard.press("k")
    message(page, "9 pairs: kept.")
    verdicts = served.verdicts()
    assert {name for name, verdict in verdicts.items() if verdict == "drop"} == {"p1", "p2", "p3", "p4"}
    assert {name for name, verdict in verdicts.items() if verdict == "keep"} == {
        f"p{row}" for row in range(0, 30, 3) if row != 3
    }
    page.keyboard.press("z")
    message(page, "Undone: 9 decisions.")
    assert len(served.verdicts()) == 4
    page.get_by_label("Open pair p6", exact=True).click()
    sync_api.expect(page.locator("header [aria-current]")).to_have_text("One by one")
    assert page.locator("header input[name=view]").get_attribute("value") == "one"


def test_two_browsers_lose_nothing(open_page: Any, served: Served) -> None:
    one, other = open_page(), open_page("/?sort=-score")
    one.keyboard.press("k")
    message(one, "p0: kept.")
    other.keyboard.press("d")
    message(other, "p29: dropped.")
    one.keyboard.press("z")
    message(one, "Undone")
    assert served.verdicts() == {"p29": "drop"}


def test_the_noise_rate_hides_the_score(open_page: Any, served: Served) -> None:
    page = open_page("/?mode=rate")
    assert page.locator(".one .tag").count() == 0
    page.keyboard.press("k")
    message(page, "kept.")
    assert "1 decision on pairs that were drawn" in page.locator(".panel").inner_text()
    assert len(served.review.decisions.history()) == 1


def test_m_accepts_what_a_model_suggests(open_page: Any, served: Served) -> None:
    for name, kind in (("p0", AnswerKind.MISMATCHED), ("p1", AnswerKind.UNCLEAR), ("p2", AnswerKind.MATCHED)):
        caption = served.review.views([int(name[1:])])[0].caption
        served.review.answers.add(Answer(name, "one", "a model", name, caption, kind))
    page = open_page()
    assert page.inner_text(".tag.model") == "model a model says: wrong"
    page.keyboard.press("m")
    page.get_by_role("article", name="Pair p1").wait_for()
    page.keyboard.press("m")  # it has not answered on this pair
    page.keyboard.press("k")
    page.get_by_role("article", name="Pair p2").wait_for()
    page.keyboard.press("m")
    page.get_by_role("article", name="Pair p3").wait_for()
    assert served.verdicts() == {"p0": "drop", "p1": "keep", "p2": "keep"}
    accepted = {name: one.accepted for name, one in served.review.decisions.current.items()}
    assert accepted == {"p0": "a model", "p1": "", "p2": "a model"}


def test_a_server_that_has_gone_is_told(open_page: Any, served: Served, browser: Any) -> None:
    page = browser.new_context().new_page()
    page.goto(served.address)
    served.server.should_exit = True
    served.thread.join()
    page.keyboard.press("k")
    sync_api.expect(page.locator("#problem")).to_contain_text("nothing was written")
    assert not served.verdicts()
    assert open_page is not None


PATHS = ["/", "/?view=grid", "/?mode=rate", "/?mode=teach"]
SEEN = [*zip(PATHS, ["light", "dark", "dark", "light"], strict=True)]


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        pytest.param(path, scheme, marks=[] if (path, scheme) in SEEN else [pytest.mark.slow])
        for path in PATHS
        for scheme in ("light", "dark")
    ],
)
def test_on_a_telephone_and_for_a_screen_reader(open_page: Any, served: Served, path: str, scheme: str) -> None:
    for row, verdict in enumerate((Verdict.KEEP, Verdict.DROP, Verdict.UNSURE)):
        served.review.decide([row], Decision("", verdict))
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(path, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.keyboard.press("c")  # with the form for a caption, where there is one
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_a_script_in_a_caption_is_text(open_page: Any, served: Served) -> None:
    page = open_page()
    page.locator(".rewrite summary").click()
    sync_api.expect(page.locator("textarea")).to_be_focused()
    assert "Enter saves it" in page.locator(".rewrite").inner_text()
    page.keyboard.insert_text("<script>document.title='x'</script><img src=x onerror=alert(1)>")
    page.keyboard.down("Enter")
    page.keyboard.down("Enter")  # held: it is saved once
    message(page, "p0: rewritten.")
    new = served.review.decisions.history()
    assert [one.caption for one in new] == ["<script>document.title='x'</script><img src=x onerror=alert(1)>"]
    page.goto(f"{served.address}/?at=0")
    assert page.title() == "Review of audit"
