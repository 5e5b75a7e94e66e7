"""The page without a browser: what it shows, writes and refuses."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from audited import write_audit, write_audit_of
from mispair.auditing.inputs import AuditInput
from mispair.cli.main import main
from mispair.reviewing.decisions import Decision, Mode, Verdict
from mispair.reviewing.page import names_of
from mispair.reviewing.review import Review
from mispair.reviewing.server import ERROR, Address, make_app

HOST = "127.0.0.1:8700"
ORIGIN = {"Origin": f"http://{HOST}"}


@pytest.fixture
def review(tmp_path: Path) -> Review:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (900, 300), (60 * number, 80, 90)).save(folder / f"{number}.jpg")
    review = Review(write_audit(tmp_path / "audit", images=True), folder)
    review.decisions.setting("seed", "1")  # the draw of the noise rate is random otherwise
    return review


@pytest.fixture
def page(review: Review) -> TestClient:
    return TestClient(make_app(review, frozenset({HOST}), reviewer="ana"), base_url=f"http://{HOST}")


def decide(page: TestClient, address: str, **fields: str | list[str]) -> str:
    answer = page.post("/decide", data={"address": address, **fields}, headers=ORIGIN)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_it_shows_the_lowest_score_first_and_goes_on(page: TestClient, review: Review) -> None:
    assert "Image of pair p0" in page.get("/").text
    found = decide(page, "/", row="0", verdict="keep")
    assert "p0: kept." in found
    assert "Image of pair p1" in found
    assert "<html" not in found  # only the part that changes
    assert review.decisions.current["p0"].reviewer == "ana"
    undone = page.post("/undo", data={"address": "/?at=1"}, headers=ORIGIN)
    assert "Undone" in undone.text
    assert "Image of pair p0" in undone.text
    assert undone.headers["HX-Push-Url"] == "/?at=0"
    assert not review.decisions.current
    assert "nothing of yours to undo" in page.post("/undo", data={}, headers=ORIGIN).text


def test_after_the_server_has_ended_all_decisions_are_in_the_one_file(page: TestClient, review: Review) -> None:
    with page:
        page.get("/")
        decide(page, "/?", row="1", verdict="keep")
    assert sorted(path.name for path in review.folder.glob("*.sqlite*")) == ["decisions.sqlite"]


def test_a_browser_without_cookies_undoes_nothing(review: Review, page: TestClient) -> None:
    review.decide([0], Decision("", Verdict.KEEP, mode=Mode.IMPORT))
    refused = page.post("/undo", data={}, headers=ORIGIN)
    assert (refused.status_code, refused.headers[ERROR]) == (422, "InvalidValueError")
    assert "p0" in review.decisions.current


def test_every_kind_of_decision_is_written(page: TestClient, review: Review) -> None:
    page.get("/")
    drawn_row = review.next_drawn(page.cookies["mispair-session"])
    assert drawn_row is not None
    paired, rewritten, *dropped, unsure = [row for row in range(7) if row != drawn_row]
    decide(page, "/", row=str(paired), verdict="re-pair", replaced="right", partner=f"p{rewritten}")
    decide(page, "/", row=str(rewritten), verdict="rewrite", caption="  a new\r\none ")
    decide(page, "/?view=grid", row=[str(row) for row in dropped], verdict="drop")
    decide(page, "/?mode=teach", row=str(unsure), verdict="unsure")
    decide(page, "/?mode=rate", row=str(drawn_row), verdict="keep")
    current = review.decisions.current
    assert (current[f"p{paired}"].replaced, current[f"p{paired}"].partner) == ("right", f"p{rewritten}")
    assert current[f"p{rewritten}"].caption == "a new\none"
    assert {current[f"p{row}"].batch for row in dropped} == {3}
    assert current[f"p{unsure}"].mode is Mode.TEACH
    drawn = current[f"p{drawn_row}"]
    assert (drawn.mode, drawn.draw) == (Mode.RATE, review.draw_key)
    assert drawn.inclusion is not None
    assert 0 < drawn.inclusion <= 1
    assert "1 decision on pairs that were drawn" in page.get("/?mode=rate").text
    assert f"p{paired},re-pair,right,p{rewritten}" in page.get("/decisions.csv").text


def test_how_many_are_left_is_told(page: TestClient) -> None:
    assert "Pair 1 of 30; 0 decided" in page.get("/").text
    assert "Pair 2 of 30; 1 decided" in decide(page, "/", row="0", verdict="keep")
    decide(page, "/?flagged=0", row="59", verdict="drop")
    assert "Pair 6 of 30; 1 decided" in page.get("/?at=5").text  # pair 59 is not flagged
    assert "30 pairs; 1 decided" in page.get("/?at=59").text
    assert "Pairs 25 to 30 of 30; 1 decided" in page.get("/?view=grid&page=2").text
    assert "Pair 60 of 60; 2 decided" in page.get("/?flagged=0&at=59").text
    assert "Pair 1 of 58 undecided; 2 of 60 decided" in page.get("/?flagged=0&state=undecided").text
    assert "Pairs 1 to 1 of 1 dropped; 2 of 60 decided" in page.get("/?flagged=0&state=drop&view=grid").text
    assert "decided</p>" not in page.get("/?mode=teach").text


def test_decisions_on_pairs_that_are_gone_do_not_count(page: TestClient, review: Review) -> None:
    review.decisions.add([Decision("gone", Verdict.DROP, mode=Mode.IMPORT)])
    assert "1 decided, 1 kept; " in decide(page, "/", row="0", verdict="keep")


@pytest.mark.parametrize("anew", [True, False])
def test_nothing_is_decided_on_an_audit_that_was_replaced(page: TestClient, review: Review, anew: bool) -> None:
    (review.folder / "pairs.parquet").unlink()
    if anew:
        write_audit(review.folder, 70)
    refused = page.post("/decide", data={"row": "0", "verdict": "keep", "address": "/"}, headers=ORIGIN)
    assert (refused.status_code, refused.headers[ERROR]) == (422, "ChangedError")
    assert not review.decisions.current


SHARED = "right item is shared by 5 pairs that have nothing else in common"


def page_of(folder: Path, **columns: list[str] | None) -> TestClient:
    """A page of four pairs with other columns, or without some."""
    table = pyarrow.parquet.read_table(write_audit(folder, 4) / "pairs.parquet")
    for name, cells in columns.items():
        table = (
            table.drop_columns([name])
            if cells is None
            else table.set_column(table.column_names.index(name), name, pyarrow.array(cells))
        )
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    return TestClient(make_app(Review(folder), frozenset({HOST})), base_url=f"http://{HOST}")


def test_a_reason_is_there_once_and_in_words_of_images_and_captions(tmp_path: Path) -> None:
    reason = [f"its {SHARED}", "the other partners of its left item say something else", "", ""]
    reasons = [f"{SHARED}; image is tiny", SHARED, "", ""]
    page = page_of(tmp_path / "photos", reason=reason, reasons=reasons)
    text = page.get("/").text
    assert re.findall("<li>(.*)</li>", text) == [
        "its caption is shared by 5 pairs that have nothing else in common</li><li>image is tiny"
    ]
    assert "its image say something else" in page.get("/?at=1").text
    assert re.findall(r'<option value="([^"]*)" >([^<]*shared[^<]*)<', text) == [
        (SHARED, "caption is shared by 5 pairs that have nothing … (2)")
    ]
    assert "Other captions that may fit this image" in text
    for value in (SHARED, f"its {SHARED}"):  # by the stored value
        found = page.get("/", params={"reason": value}).text
        assert f'<option value="{SHARED}" selected>' in found
        assert f"of {2 - value.startswith('its')}; 0 decided" in found
    text = page_of(tmp_path / "vectors", reason=reason, reasons=reasons, image=None, caption=None).get("/").text
    assert f"<li>its {SHARED}</li>" in text
    assert "Other right items that may fit this left item" in text
    assert re.search(r'class="caption" dir="auto">p1<', text)  # a suggestion without a caption


def test_no_caption_is_asked_for_where_none_can_be_written(tmp_path: Path, page: TestClient) -> None:
    assert "Write a better caption" in page.get("/").text
    for side in ("left", "right"):
        np.save(tmp_path / f"{side}.npy", np.eye(4, dtype=np.float32))
    data = AuditInput(left=(tmp_path / "left.npy",), right=(tmp_path / "right.npy",))
    review = Review(write_audit_of(tmp_path / "vectors", data, list("abcd"), [0]))
    page = TestClient(make_app(review, frozenset({HOST})), base_url=f"http://{HOST}")
    assert "better caption" not in page.get("/").text
    refused = page.post("/decide", data={"row": "0", "verdict": "rewrite", "caption": "new"}, headers=ORIGIN)
    assert (refused.status_code, refused.headers[ERROR]) == (422, "ConflictError")
    assert not review.decisions.history()


def test_a_reload_shows_the_same(page: TestClient) -> None:
    address = "/?view=grid&state=undecided&sort=row&page=2"
    assert page.get(address).text == page.get(address).text
    assert "page 2 of 2" in page.get(address).text


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"row": "0", "verdict": "destroy"}, "InvalidValueError"),
        ({"row": "99", "verdict": "keep"}, "NotFoundError"),
        ({"verdict": "keep"}, "NotFoundError"),
        ({"row": "0", "verdict": "re-pair"}, "InvalidValueError"),
        ({"row": "0", "verdict": "rewrite", "caption": "   "}, "InvalidValueError"),
        ({"row": ["0", "1"], "verdict": "rewrite", "caption": "new"}, "ConflictError"),
        ({"row": "99", "verdict": "keep", "address": "/?mode=rate"}, "NotFoundError"),
        ({"row": "9" * 5000, "verdict": "keep"}, "NotFoundError"),
        ({"row": "0", "verdict": "destroy", "address": "http://["}, "InvalidValueError"),
    ],
)
def test_what_is_no_decision_is_refused(page: TestClient, review: Review, fields: dict[str, Any], error: str) -> None:
    answer = page.post("/decide", data=fields, headers=ORIGIN)
    assert (answer.status_code, answer.headers[ERROR]) == (422, error)
    assert not review.decisions.history()


@pytest.mark.parametrize(
    "origin",
    [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://["}, {"Origin": "http://127.0.0.1"}],
)
def test_another_site_can_decide_nothing(page: TestClient, review: Review, origin: dict[str, str]) -> None:
    fields = {"row": "0", "verdict": "drop"}
    assert page.post("/decide", data=fields, headers=origin).status_code == 403
    assert page.post("/undo", data={}, headers=origin).status_code == 403
    assert not review.decisions.history()


def test_another_name_of_this_machine_is_refused(page: TestClient) -> None:
    assert page.get("/", headers={"Host": "evil.example:8700"}).status_code == 421


def test_a_long_request_is_refused(page: TestClient) -> None:
    assert page.post("/decide", content=b"x" * 2_000_000, headers=ORIGIN).status_code == 413


def test_with_a_token_only_those_who_have_it_come_in(review: Review) -> None:
    app = make_app(review, frozenset({HOST}), token="secret")
    stranger, friend = (TestClient(app, base_url=f"http://{HOST}") for _ in range(2))
    for path in ("/", "/image/0", "/decisions.csv", "/static/review.js", "/?token=wrong"):
        assert stranger.get(path).status_code == 401
    assert stranger.post("/decide", data={"row": "0", "verdict": "keep"}, headers=ORIGIN).status_code == 401
    assert friend.get("/?token=secret").status_code == 200
    assert "secret" not in str(friend.get("/").url)
    assert friend.get("/image/0").status_code == 200


def test_with_a_token_any_name_will_do(review: Review) -> None:
    page = TestClient(make_app(review, None, token="secret"), base_url="http://machine:8700")
    assert page.get("/?token=secret").status_code == 200
    fields = {"row": "0", "verdict": "keep"}
    assert page.post("/decide", data=fields, headers={"Origin": "http://evil.example"}).status_code == 403
    assert page.post("/decide", data=fields, headers={"Origin": "http://machine:8700"}).status_code == 200
    assert page.get("/", headers={"Host": "evil.example:8700", "Cookie": ""}).status_code == 401
    with pytest.raises(ValueError, match="needs a token"):
        TestClient(make_app(review, None)).get("/")


@pytest.mark.parametrize(
    ("host", "port", "name"),
    [
        ("127.0.0.1", 8700, "localhost:8700"),
        ("127.0.0.1", 80, "127.0.0.1"),
        ("FE80::1", 8700, "[fe80::1]:8700"),
        ("Machine", 80, "machine"),
    ],
)
def test_a_server_knows_its_names(host: str, port: int, name: str) -> None:
    known = names_of(host, port)
    assert known is not None
    assert name in known
    assert "evil.example" not in known


def test_an_address_that_is_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = write_audit(tmp_path / "audit", 4)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["review", str(audit), "--port", port, "--no-open"]) == 2
    printed = capsys.readouterr()
    assert port in printed.err
    assert "http://" not in printed.out


def test_headers_forbid_everything_from_elsewhere(page: TestClient) -> None:
    for path in ("/", "/image/0", "/static/review.js", "/nothing"):
        policy = page.get(path).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    text = page.get("/").text
    assert not re.findall(r"(?<![\w-])(?:src|href|action)=\"(?!/|#)", text)
    assert "<script>" not in text
    assert " style=" not in text


def test_images_are_small_jpegs(page: TestClient) -> None:
    for size, width in (("", 200), ("?size=large", 640)):
        answer = page.get(f"/image/1{size}")
        assert answer.headers["content-type"] == "image/jpeg"
        from io import BytesIO

        assert Image.open(BytesIO(answer.content)).width == width
    assert page.get("/image/999").status_code == 404
    # Another audit may be at the same address next time: no image is shown again without asking.
    assert "no-cache" in answer.headers["Cache-Control"]
    assert "no-cache" in page.get("/static/review.js").headers["Cache-Control"]
    known = {"If-None-Match": answer.headers["ETag"]}
    assert page.get("/image/1?size=large", headers=known).status_code == 304
    assert page.get("/image/2?size=large", headers=known).status_code == 200
    assert page.get("/image/..%2f..%2fetc%2fpasswd").status_code == 404
    assert page.get("/static/../review.py").status_code == 404


def test_what_people_wrote_stays_text(tmp_path: Path) -> None:
    folder = write_audit(tmp_path / "audit", 4)
    table = pyarrow.parquet.read_table(folder / "pairs.parquet")
    bad = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
    for name in ("caption", "id", "reason"):
        table = table.set_column(table.column_names.index(name), name, pyarrow.array([bad, "b", "c", "d"]))
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    page = TestClient(make_app(Review(folder), frozenset({HOST})), base_url=f"http://{HOST}")
    for path in ("/", "/?view=grid", "/?mode=rate", "/?text=<script>alert(1)</script>", "/?reason=<img src=x>"):
        text = page.get(path).text
        assert "<script>alert" not in text
        assert "<img src=x" not in text


values = st.text(max_size=30) | st.from_regex(r"\A[0-9]{0,25}\.?[0-9]{1,25}(e-[0-9]{1,4})?x?\Z")


@given(query=st.dictionaries(st.sampled_from([*Address.__dataclass_fields__, "x"]), values))
def test_any_address_gives_a_page(page: TestClient, query: dict[str, str]) -> None:
    assert page.get("/", params=query).status_code == 200


@given(query=st.dictionaries(st.sampled_from(list(Address.__dataclass_fields__)), values))
@example(query={"low": "0.1234567890123456789x"})
@example(query={"low": "0.00001"})
def test_an_address_is_read_as_it_was_written(query: dict[str, str]) -> None:
    from urllib.parse import parse_qsl, urlsplit

    address = Address.of(query)
    assert Address.of(dict(parse_qsl(urlsplit(address.link()).query))) == address


@pytest.mark.parametrize("readable", [0, 3])
def test_the_noise_rate_of_few_pairs(tmp_path: Path, readable: int) -> None:
    folder = write_audit(tmp_path / "audit", 4)
    table = pyarrow.parquet.read_table(folder / "pairs.parquet")
    scores = pyarrow.array([0.1 * (row + 1) if row < readable else None for row in range(4)], pyarrow.float32())
    table = table.set_column(table.column_names.index("match_score"), "match_score", scores)
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    review = Review(folder)
    app = make_app(review, frozenset({HOST}))
    page, other = (TestClient(app, base_url=f"http://{HOST}") for _ in range(2))
    assert ("The first estimate comes after 3." in page.get("/?mode=rate").text) == bool(readable)
    assert ("article" in other.get("/?mode=rate").text) == bool(readable)
    for browser in (page, page, other)[:readable]:
        row = review.next_drawn(browser.cookies["mispair-session"])
        decide(browser, "/?mode=rate", row=str(row), verdict="drop")
        assert ("open in other browsers" in page.get("/?mode=rate").text) == (review.progress().total() == 2)
    assert "All pairs are decided" in page.get("/?mode=rate").text
    assert ("100.0 % mismatched" in page.get("/?mode=rate").text) == bool(readable)


def test_decisions_that_wait_for_another_browser_are_told(review: Review, page: TestClient) -> None:
    first = review.next_drawn("another browser")
    assert first is not None
    page.get("/")
    for waiting in ("1 more counts as soon as", "2 more count as soon as"):
        row = review.next_drawn(page.cookies["mispair-session"])
        assert waiting in decide(page, "/?mode=rate", row=str(row), verdict="keep")
    assert "0 decisions on pairs" in page.get("/?mode=rate").text
    told = decide(page, "/?mode=rate", row=str(first), verdict="keep")
    assert "3 decisions on pairs" in told
    assert "as soon as" not in told


def test_every_verdict_has_words(page: TestClient) -> None:
    for number, verdict in enumerate(Verdict):
        fields = {"re-pair": {"replaced": "left", "partner": "p9"}, "rewrite": {"caption": "new"}}.get(verdict, {})
        assert "p" in decide(page, "/", row=str(number), verdict=verdict, **fields)
    assert page.get("/?state=decided&view=grid").text.count("tag decided") == len(Verdict)


def test_too_little_memory_is_a_sentence(review: Review, page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(review, "decide", fail)
        answer = page.post("/decide", data={"row": "0", "verdict": "keep"}, headers=ORIGIN)
    assert (answer.status_code, answer.text[:30]) == (503, "There was not enough memory, a")
    decide(page, "/", row="0", verdict="keep")


def test_a_full_disk_is_a_sentence_and_the_server_lives_on(page: TestClient, review: Review) -> None:
    file = review.decisions._file
    pages = file.execute("PRAGMA page_count").fetchone()[0]
    file.execute(f"PRAGMA max_page_count = {pages}")  # what a disk without room does
    long = {"row": "0", "verdict": "rewrite", "caption": "long " * 1800}
    refused = page.post("/decide", data=long, headers=ORIGIN)
    assert (refused.status_code, refused.headers[ERROR]) == (422, "DataError")
    assert review.decisions.path.name in refused.text
    file.execute("PRAGMA max_page_count = 100000")
    decide(page, "/", row="59", verdict="drop")
    assert review.decisions.current["p59"].verdict is Verdict.DROP
