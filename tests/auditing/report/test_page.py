from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mispair
from audit_cases import Case, make_case
from mispair.auditing.audit import Audit, Settings, audit_source
from mispair.auditing.report import page
from mispair.auditing.report.page import make_page, render
from mispair.auditing.scoring.near_duplicates import Groups
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.summary import score_range
from mispair.pairs.layouts.arrays import open_arrays
from mispair.support.thumbnails import thumbnail

pytest.importorskip("pyarrow")

HOSTILE = "</code><script>alert(1)</script>\"'><img src=x onerror=alert(1)> {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def case() -> Case:
    made = make_case(120, 0.3)
    made.left[[50, 51, 52, 53, 54, 55]] = made.left[50]  # a image that is there six times
    made.right[61] = made.right[60]
    made.right[70] = 0
    return made


@pytest.fixture(scope="module")
def plain(case: Case) -> Audit:
    return mispair.audit(case.left, case.right, device="cpu")


@pytest.fixture(scope="module")
def illustrated(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """With images, one of which is no image, and hostile ids and captions."""
    folder = tmp_path_factory.mktemp("photos")
    lines = ["id\tcaption\timage_path"]
    for row in range(120):
        Image.new("RGB", (8, 6), (2 * row, 255 - row, 7)).save(folder / f"{row}.png")
        text = HOSTILE.replace('"', "")
        lines.append(f"{text} {row}\tcaption {row} {text}\t{row}.png")
    (folder / "0.png").write_text("no image")
    (folder / "t.tsv").write_text("\n".join(lines))
    np.save(folder / "a.npy", case.left)
    np.save(folder / "b.npy", case.right)
    source = open_arrays(folder / "a.npy", folder / "b.npy", folder / "t.tsv")
    return audit_source(source, Settings(device="cpu"), command=f"mispair audit {HOSTILE}")


def test_counts(plain: Audit) -> None:
    page = make_page(plain.reported)
    match = plain.match_score[~np.isnan(plain.match_score)]
    assert (page.summary.pairs, page.summary.scored, page.summary.flagged) == (120, 119, int((match < 0.5).sum()))
    assert sum(page.histogram) == sum(page.observed) == page.summary.scored
    assert sum(page.histogram[: len(page.histogram) // 2]) == page.summary.flagged  # 0.5 is between two bars
    assert sum(page.expected_matched) == pytest.approx(float(match.sum()), rel=1e-5)
    assert sum(page.shuffled) == pytest.approx(page.summary.noise_rate * page.summary.scored)
    assert page.lowest < page.highest
    assert page.summary.unreadable == {"the right vector is zero": 1}
    assert page.unreadable_rows == [("70", "the right vector is zero")]
    assert list(page.summary.measures) == plain.judge.names
    assert (page.summary.notes, page.image_notes) == (list(plain.notes), [])
    assert page.versions["mispair"] == mispair.__version__


def test_the_worst_pairs_come_first(plain: Audit) -> None:
    worst = make_page(plain.reported).worst
    order = np.argsort(plain.match_score, kind="stable")[: len(worst)]  # NaN is last
    assert len(worst) == min(page.WORST, plain.summary.flagged) > 5
    assert [pair.id for pair in worst] == [str(row) for row in order]
    for place, pair in enumerate(worst):
        assert pair.reason
        assert [partner.id for partner in pair.new_rights] == [
            str(row) for row in plain.new_rights.rows[place] if row >= 0
        ]
        assert [partner.score for partner in pair.new_lefts] == [
            float(score) for score in plain.new_lefts.scores[place] if not np.isnan(score)
        ]


def test_near_duplicates_are_shown(plain: Audit) -> None:
    page = make_page(plain.reported)
    first = page.near_duplicates[0]
    assert (first.side, first.ids, first.more) == ("left", ("50", "51", "52", "53"), 2)
    assert ("right", ("60", "61")) in {(group.side, group.ids) for group in page.near_duplicates}
    rows = {int(row) for groups in plain.near_duplicates for group in groups for row in group}
    assert page.near_duplicate_pairs == len(rows) >= 8


def test_without_images_and_texts_there_are_names(plain: Audit) -> None:
    for pair in make_page(plain.reported).worst:
        assert (pair.left.image, pair.left.text, pair.left.name) == ("", "", pair.id)
        assert (pair.right.image, pair.right.text, pair.right.name) == ("", "", pair.id)
    assert "<img" not in render(make_page(plain.reported))


def test_images_and_texts(illustrated: Audit) -> None:
    page = make_page(illustrated.reported)
    for pair in page.worst:
        row = int(pair.id.split()[-1])
        assert pair.right.text.startswith(f"caption {row} ")
        assert bool(pair.left.image) == (row != 0)
        for partner in pair.new_rights:
            assert partner.item.text.startswith(f"caption {partner.id.split()[-1]} ")
        for partner in pair.new_lefts:
            assert partner.item.image.startswith("data:image/jpeg;base64,") or partner.id.endswith(" 0")


@pytest.mark.posix
def test_images_outside_their_folder_are_not_embedded(illustrated: Audit, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (folder,) = {
        path.parent for path in [illustrated.source.image_file(row) for row in range(len(illustrated.table))] if path
    }
    for image in folder.iterdir():
        (tmp_path / "images" / image.name).symlink_to(image)
    for images in (tmp_path / "images", tmp_path):  # links that lead out, and names that do
        source = replace(illustrated.source, images=(images,))
        assert "data:image/jpeg" not in render(make_page(replace(illustrated, source=source).reported))


def test_what_is_hostile_is_escaped(illustrated: Audit) -> None:
    html = render(make_page(illustrated.reported))
    assert "<script" not in html
    assert "<img src=x" not in html
    assert "{{ 7 * 7 }}" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_a_report_stays_below_five_megabytes(
    illustrated: Audit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even of images that hardly compress, as many as a page may hold."""
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG", quality=95)
    (tmp_path / "noise.jpg").write_bytes(buffer.getvalue())
    worst = thumbnail(tmp_path / "noise.jpg")
    monkeypatch.setattr(page, "thumbnail", lambda _: worst)
    assert len(render(make_page(illustrated.reported))) < 5_000_000
    most = page.WORST * 4 + page.GROUPS // 2 * page.MEMBERS
    assert len(worst.uri) * most < 4_500_000


def test_nothing_flagged(plain: Audit) -> None:
    nobody = Partners.none(0)
    quiet = replace(
        plain,
        match_score=np.ones_like(plain.match_score),
        suggested=np.arange(0),
        new_rights=nobody,
        new_lefts=nobody,
        items=replace(plain.items, near_duplicates=(Groups.none(), Groups.none())),
    )
    page = make_page(quiet.reported)
    assert (page.summary.flagged, page.worst, page.near_duplicates, page.near_duplicate_pairs) == (0, [], [], 0)
    html = render(page)
    assert "Worst pairs" not in html
    assert "Near-duplicates" not in html


def test_equal_scores_have_a_range() -> None:
    judge: Any = SimpleNamespace(observed=np.full(5, 2.0), null=np.full(5, 2.0))
    low, high = score_range(judge)
    assert low < 2 < high


def test_images_that_are_not_there_are_counted(illustrated: Audit, tmp_path: Path) -> None:
    assert not any("not found" in note for note in make_page(illustrated.reported).image_notes)
    odd = tmp_path / "caf\udce9"  # a name that is no UTF-8
    lost = replace(illustrated, source=replace(illustrated.source, images=(tmp_path, odd)))
    page = make_page(lost.reported)
    shown = {item.name for group in page.near_duplicates if group.side == "left" for item in group.items}
    shown |= {pair.left.name for pair in page.worst} | {one.id for pair in page.worst for one in pair.new_lefts}
    places = f"{tmp_path.resolve()}, {tmp_path.resolve()}/caf?"
    assert f"{len(shown)} images were not found in {places}; give their folder." in page.image_notes
    lost.to_html(tmp_path / "report.html")
    assert "images were not found in" in (tmp_path / "report.html").read_text()
