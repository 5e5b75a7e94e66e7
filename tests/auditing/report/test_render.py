"""The report of an audit: all of it there, all of it escaped, nothing from elsewhere."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from html_reader import Reader
from mispair.auditing.report import charts
from mispair.auditing.report.page import Flagged, Item, NearDuplicates, Page, Partner, render
from mispair.auditing.summary import AuditSummary, MeasureSummary, NoiseEstimate, Part
from mispair.support.thumbnails import MOST_BYTES, thumbnail

DOT = "data:image/jpeg;base64,/9j/4AAQ"
HOSTILE = (
    "</div><script>alert(1)</script>\"'><img src=x onerror=alert(1)> {{ 7 * 7 }} &amp; "
    "\x00\x1b\x85\udce9\ud83d\uffff\u202e\u2066"
)

PAGE = Page(
    name="pets",
    summary=AuditSummary(
        pairs=7000,
        scored=6988,
        flagged=2598,
        noise_rate=0.3881,
        noise_rate_low=0.3712,
        noise_rate_high=0.4062,
        unreadable={"zero vector": 7, "not finite": 5},
        near_duplicates_left=300,
        near_duplicates_right=12,
        suggested_right=1,
        suggested_left=1,
        measures={
            "contrast": MeasureSummary(weight=0.62, separation=0.79),
            "evidence": MeasureSummary(weight=0.38, separation=0.51),
        },
        notes=["There is no joint model."],
        seconds=75.0,
        stages={},
    ),
    histogram=[2000, 598, 390, 4000],
    expected_matched=[20.5, 200.0, 300.0, 3900.0],
    observed=[0, 900, 1500, 4000, 588],
    shuffled=[10.5, 880.0, 1400.0, 400.0, 0.0],
    lowest=-4.0,
    highest=8.5,
    worst=[
        Flagged(
            "pair-1",
            0.0312,
            "No neighbour agrees.",
            Item(image=DOT, name="one.jpg"),
            Item(text="A cat on a mat"),
            (Partner("pair-7", Item(image=DOT, name="seven.jpg"), 0.911),),
            (Partner("pair-8", Item(text="A dog in the fog"), 0.322), Partner("pair-9", Item(text="A hound"), 0.871)),
        )
    ],
    near_duplicates=[NearDuplicates("left", ("pair-3", "pair-4"), (Item(image=DOT), Item(image=DOT)), more=1200)],
    near_duplicate_pairs=312,
    unreadable_rows=[("pair-5", "zero vector"), ("", "not finite")],
    command="mispair audit pets --out out",
    versions={"mispair": "0.1.0", "numpy": "2.1"},
)


def changed(page: Page, **changes: Any) -> Page:
    """The page with other values of its own or of its summary."""
    own = {name: value for name, value in changes.items() if name in Page.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in own}
    return replace(page, summary=page.summary.model_copy(update=rest), **own)


NOTHING: dict[str, Any] = {
    "worst": [], "measures": {}, "near_duplicates": [], "near_duplicate_pairs": 0, "unreadable": {},
    "unreadable_rows": [], "notes": [], "command": "", "versions": {}, "seconds": 0.0,
}  # fmt: skip
SMALL = changed(
    PAGE, name="few", pairs=1, scored=1, flagged=0, noise_rate=0.0, noise_rate_low=0.0, noise_rate_high=1.0,
    histogram=[0, 1], expected_matched=[0.0, 0.9], observed=[0, 1], shuffled=[0.0, 0.0], lowest=0.0, highest=1.0,
    **NOTHING,
)  # fmt: skip


class Checker(Reader):
    def all(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and (not name or name in (a.get("class") or "").split())]


def read(page: Page) -> Checker:
    html = render(page)
    checker = Checker()
    checker.feed(html.encode().decode())
    checker.close()
    assert not checker.open
    assert html.startswith("<!doctype html>")
    check_alone(html, checker)
    check_accessible(checker)
    return checker


def check_alone(html: str, checker: Checker) -> None:
    """Nothing is fetched from anywhere and nothing runs."""
    assert {tag for tag, _ in checker.tags}.isdisjoint({"script", "link", "iframe", "object", "form", "base", "use"})
    ids = {attributes.get("id") for _, attributes in checker.tags}
    for tag, attributes in checker.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href", "action", "data", "srcset", "poster", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:image/") or value.removeprefix("#") in ids - {value}
    style = html.split("<style>")[1].split("</style>")[0]
    assert set(re.findall(r"url\(([^)]*)\)", style)) <= {"#hatch"}
    assert "@import" not in style
    (policy,) = (a["content"] for a in checker.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")


def check_accessible(checker: Checker) -> None:
    levels = [int(tag[1]) for tag, _ in checker.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(attributes.get("alt") for attributes in checker.all("img"))
    assert all(attributes.get("scope") in ("row", "col") for attributes in checker.all("th"))
    for attributes in checker.all("svg"):
        assert attributes.get("aria-hidden") or (attributes["role"] == "img" and attributes["aria-label"])


def test_all_of_it_is_there() -> None:
    words = read(PAGE).words
    for expected in (
        "Audit of pets",
        "About 39 % of the pairs have nothing to do with each other (37 % to 41 %).",
        "Pairs 7,000",
        "Flagged as mismatched 2,598 37 % have",
        "Unrelated pairs 39 % 37 % to 41 % with 95 % confidence",
        "Could not be read 12 12 without a score",
        "The 1 worst of 2,598 flagged pairs",
        "Pair pair-1 match score 0.03",
        "image caption A cat on a mat No neighbour agrees.",
        "Suggested captions for this image A dog in the fog 0.32 from pair pair-8 A hound 0.87 from pair pair-9",
        "Suggested images for this caption 0.91 from pair pair-7",
        "312 pairs have an item that also occurs in another pair",
        "1,202 pairs with nearly the same image pair pair-3 pair pair-4 and 1,200 more",
        "zero vector 7 not finite 5",
        "The first 2 of them",
        "pair-5 zero vector no id not finite",
        "than to the best rival of either. 62 % very well (0.79)",  # 0.81 is the most that is possible
        "than as a random pair, in the learned space. 38 % hardly at all (0.51)",
        "about 0.81 the best possible with 39 % mismatched pairs",
        "There is no joint model.",
        "mispair audit pets --out out",
        "mispair 0.1.0 · numpy 2.1 · 1 min 15 s",
    ):
        assert expected in words
    assert "{{" not in words
    assert "{%" not in words


def test_images_have_names() -> None:
    names = [attributes["alt"] for attributes in read(PAGE).all("img")]
    assert names == ["one.jpg", "seven.jpg", "image of pair pair-3", "image of pair pair-4"]


EMPTY = {**NOTHING, "scored": 7000}
HEADINGS: dict[str, dict[str, Any]] = {
    "Scores": {"histogram": [], "expected_matched": [], "observed": []},
    "flagged pairs": {"worst": []},
    "Near-duplicates": {"near_duplicates": [], "near_duplicate_pairs": 0},
    "Pairs that could not be read": {"unreadable": {}, "unreadable_rows": [], "scored": 7000},
    "How it was measured": {"measures": {}},
    "Notes": {"notes": []},
    "Made by": {"command": "", "versions": {}, "seconds": 0.0},
}


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_part_without_content_is_gone(heading: str) -> None:
    assert heading in read(PAGE).words
    words = read(changed(PAGE, **HEADINGS[heading])).words
    assert heading not in words
    assert all(other in words for other in HEADINGS if other != heading)


def test_nothing_but_figures() -> None:
    page = read(changed(PAGE, **EMPTY))
    assert not any(heading in page.words for heading in list(HEADINGS)[1:])
    assert "Could not be read 0 every pair has a score" in page.words
    assert not page.all("a")


def headline(page: Page) -> str:
    html = render(page)
    return html.split("<h1>")[1].split("</h1>")[0].replace("\xa0", " ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scored": 7000}, "About 39 % of the pairs have nothing to do with each other (37 % to 41 %)."),
        (
            {
                "scored": 10_000_000,
                "pairs": 10_000_000,
                "noise_rate": 0.0312,
                "noise_rate_low": 0.03,
                "noise_rate_high": 0.033,
            },
            "About 3.1 % of the pairs have nothing to do with each other (3.0 % to 3.3 %).",
        ),
        (
            {"scored": 7000, "noise_rate": 0.0004, "noise_rate_low": 0.0, "noise_rate_high": 0.0008},
            "About 0.04 % of the pairs have nothing to do with each other (0 % to 0.08 %).",
        ),
        (
            {"scored": 7000, "flagged": 0, "noise_rate": 0.0, "noise_rate_low": 0.0, "noise_rate_high": 0.004},
            "At most 0.4 % of the pairs have nothing to do with each other.",
        ),
        (
            {"scored": 7000, "noise_rate": 0.0, "noise_rate_low": 0.0, "noise_rate_high": 0.0},
            "At most 0.01 % of the pairs have nothing to do with each other.",
        ),
        (
            {"decided": NoiseEstimate(decisions=100, rate=0.56, low=0.46, high=0.66)},
            "By 100 decisions on drawn pairs, 56 % are mismatched (46 % to 66 %).",
        ),
        ({"pairs": 1, "scored": 1, "flagged": 1}, "The only pair is flagged."),
        ({"pairs": 4, "scored": 1, "flagged": 0}, "The only pair that could be scored is not flagged."),
        ({"scored": 0, "flagged": 0, "noise_rate": float("nan")}, "None of the 7,000 pairs could be scored."),
        ({"pairs": 0, "scored": 0, "flagged": 0}, "There are no pairs."),
    ],
)
def test_the_headline(changes: dict[str, float], expected: str) -> None:
    assert headline(changed(PAGE, **changes)) == expected


def test_nothing_could_be_scored() -> None:
    nan = float("nan")
    rates = dict.fromkeys(("noise_rate", "noise_rate_low", "noise_rate_high", "lowest"), nan)
    empty: dict[str, Any] = {"histogram": [], "observed": [], "expected_matched": [], "shuffled": []}
    words = read(changed(SMALL, pairs=3, scored=0, **rates, **empty)).words
    assert "nan" not in words
    assert "3 pairs without a score" in words


def test_one_pair() -> None:
    assert "The only pair is not flagged." in read(SMALL).words


@pytest.mark.parametrize(
    ("left", "right", "title"),
    [
        (Item(image=DOT), Item(text="b"), "Suggested captions for this image"),
        (Item(text="a"), Item(image=DOT), "Suggested images for this caption"),
        (Item(text="a"), Item(text="b"), "Suggested right texts for this left text"),
        (Item(image=DOT), Item(image=DOT), "Suggested right images for this left image"),
        (Item(name="a"), Item(name="b"), "Suggested right items for this left item"),
        (Item(name="a"), Item(text="b"), "Suggested captions for this item"),
    ],
)
def test_either_side_may_be_anything(left: Item, right: Item, title: str) -> None:
    pair = replace(PAGE.worst[0], left=left, right=right, new_lefts=(), new_rights=(Partner("p", right, 0.9),))
    page = read(changed(PAGE, worst=[pair], near_duplicates=[]))
    assert title in page.words
    assert len(page.all("img")) == bool(left.image) + 2 * bool(right.image)


def everywhere(text: str, image: str = DOT) -> Page:
    item = Item(text=text, image=image, name=text)
    partner = Partner(text, item, 0.9)
    return changed(
        PAGE,
        name=text,
        worst=[Flagged(text, 0.1, text, item, item, (partner,), (partner,))],
        near_duplicates=[NearDuplicates("right", (text,), (item,))],
        unreadable={text: 1},
        unreadable_rows=[(text, text)],
        notes=[text],
        command=text,
        versions={text: text},
    )


@example(" ")
@given(st.text(st.characters(), max_size=40))
def test_any_text_anywhere(text: str) -> None:
    assert "script" not in [tag for tag, _ in read(everywhere(text)).tags]  # and `read` refuses what is not well formed


def test_hostile_text_is_only_text() -> None:
    plain, hostile = read(everywhere("plain")), read(everywhere(HOSTILE))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert hostile.words.count("</div><script>alert(1)</script>\"'><img src=x onerror=alert(1)> {{ 7 * 7 }}") > 10
    assert not re.search("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\uffff]", hostile.words)


def test_long_texts_are_folded() -> None:
    text = "many words " * 60
    page = read(everywhere(text))
    assert "whole text" in page.words
    assert text.strip() in page.words
    assert len(page.all("details", "long")) == 5  # both sides, a suggestion for either, a near-duplicate
    assert not read(everywhere("few words")).all("details", "long")
    endless = render(everywhere("many words " * 100_000, ""))
    assert "more characters)" in endless
    (pair,) = everywhere("x " * 100_000).worst
    assert len(read(changed(PAGE, worst=[replace(pair, reason="")])).words) < 40_000


def test_text_runs_in_its_own_direction() -> None:
    page = read(changed(PAGE, worst=[replace(PAGE.worst[0], right=Item(text="كلب أسود"))]))
    assert "كلب أسود" in page.words
    assert all(attributes["dir"] == "auto" for attributes in page.all("div", "text") if "dir" in attributes)
    assert len([a for a in page.all("div", "text") if a.get("dir") == "auto"]) == 3


def test_two_hundred_thumbnails_stay_small() -> None:
    image = "data:image/jpeg;base64," + "A" * (MOST_BYTES * 4 // 3)  # the largest that a thumbnail can be
    pair = PAGE.worst[0]
    partners = tuple(Partner(str(i), Item(image=image), 0.9) for i in range(3))
    texts = tuple(Partner(str(i), Item(text="some twenty words " * 7), 0.9) for i in range(3))
    worst = [replace(pair, left=Item(image=image), new_lefts=partners, new_rights=texts)] * 50
    html = render(changed(PAGE, worst=worst, near_duplicates=[]))
    assert html.count("<img") == 200
    assert len(html.encode()) < 5_000_000


def test_thumbnails_of_real_files_fit_in(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("images") / "a.png"
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue())
    item = Item(image=thumbnail(path).uri)
    page = read(changed(PAGE, worst=[replace(PAGE.worst[0], left=item)]))
    assert page.all("img")[0]["src"] == item.image


def bars(page: Checker, name: str) -> list[float]:
    return [float(a["height"] or 0) for a in page.all("rect", name) if a["height"] not in ("12", "13")]  # the legend's


@given(st.lists(st.tuples(st.integers(0, 10_000_000), st.floats(0, 1)), min_size=1, max_size=60))
def test_bars_add_up(bins: list[tuple[int, float]]) -> None:
    numbers = [number for number, _ in bins]
    if not sum(numbers):
        return
    rights = [number * share for number, share in bins]
    drawn = charts.histogram(numbers, rights)
    top = float(drawn.axes.ys[-1][1].replace(",", ""))
    assert top >= max(numbers)
    unit = charts.HEIGHT / top
    assert sum(bar.matched for bar in drawn.bars) == pytest.approx(sum(rights) * unit)
    for bar, number in zip(drawn.bars, numbers, strict=True):
        assert bar.matched + bar.mismatched == pytest.approx(number * unit)
        assert bar.matched + bar.mismatched <= charts.HEIGHT + 1e-6
        assert bar.width > 0
    assert drawn.bars[-1].x + drawn.bars[-1].width <= charts.WIDTH
    heights = [y for y, _ in drawn.axes.ys]
    assert (heights[0], heights[-1]) == (charts.HEIGHT, 0)
    assert len(heights) <= 7


def test_the_bars_on_the_page_add_up() -> None:
    page = read(PAGE)
    unit = charts.HEIGHT / 4000
    assert sum(bars(page, "matched")) == pytest.approx(sum(PAGE.expected_matched) * unit, abs=0.1)
    assert sum(bars(page, "matched") + bars(page, "mismatched")) == pytest.approx(sum(PAGE.histogram) * unit, abs=0.1)
    assert len(page.all("line", "half")) == 1


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1e7)), min_size=1, max_size=80).filter(
        lambda bins: bins[0][0]
    ),
    st.floats(-1e3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_curves_stay_inside(bins: list[tuple[int, float]], lowest: float, span: float) -> None:
    observed, shuffled = [a for a, _ in bins], [b for _, b in bins]
    drawn = charts.curves(observed, shuffled, lowest, lowest + span)
    for path, numbers in ((drawn.observed, observed), (drawn.shuffled, shuffled)):
        heights = [float(y) for y in re.findall(r"V(-?[\d.]+)", path)]
        assert len(heights) == len(numbers) + 1  # and back to the base line
        expected = [charts.HEIGHT * (1 - number / drawn.axes.top) for number in numbers]
        assert heights[:-1] == pytest.approx(expected, abs=0.06)
        assert min(heights) >= -0.06
        assert float(re.findall(r"H([\d.]+)", path)[-1]) == pytest.approx(charts.WIDTH, abs=0.06)
    places = [x for x, _ in drawn.axes.xs]
    assert all(-1e-3 <= x <= charts.WIDTH + 1e-3 for x in places)
    assert 1 <= len(places) <= 6
    labels = [label for _, label in drawn.axes.xs]
    assert len(set(labels)) == len(labels)


def test_the_page_says_what_to_do_next() -> None:
    text = " ".join(render(PAGE).split())
    assert "What to do next" in text
    assert "--clean FOLDER" in text
    parts = [
        Part(value=name, pairs=9, flagged=1, noise_rate=rate, noise_rate_low=0, noise_rate_high=1)
        for name, rate in (("web", 0.4), ("album", 0.1))
    ]
    several = PAGE.summary.model_copy(
        update={
            "by": "source",
            "parts": parts,
            "flag_below": 0.2,
            "close_rate": 0.1,
            "close_rate_low": 0.05,
            "close_rate_high": 0.15,
        }
    )
    text = " ".join(render(replace(PAGE, summary=several)).split())
    assert "Look at <code>web</code> first: 40 % of its pairs" in text.replace("\xa0", " ").replace("&nbsp;", " ")
    assert "pairs below 0.20 are flagged" in text
    assert "are close but wrong" in text
    none = PAGE.summary.model_copy(update={"flagged": 0, "nothing_in_common": True})
    assert "row i of both sides" in render(replace(PAGE, summary=none))
