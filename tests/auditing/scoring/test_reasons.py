"""Captions that describe nothing and images that show nothing."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mispair.auditing.scoring import reasons
from mispair.auditing.scoring.reasons import (
    EMPTY,
    FILE_NAME,
    KINDS,
    LANGUAGE,
    NO_WORDS,
    SHORT,
    TINY,
    UNIFORM,
    UNREADABLE,
    URL,
    Usual,
    caption_reason,
    caption_reasons,
    image_reason,
    image_reasons,
    in_words,
)

ENGLISH = Usual("Latin", "English", 9)


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("", EMPTY), (" \n", EMPTY),
        ("IMG_2041.JPG", FILE_NAME), ("my holiday (1).png", FILE_NAME),
        ("Screen Shot 2026-01-02 at 10.20.30 AM.png", FILE_NAME), ("two-dogs-run-over-the-grass.jpg", ""),
        ("DSC_0012", FILE_NAME), ("image0001", FILE_NAME),
        ("https://example.org/a?b=1", URL), ("see www.example.org/long/way/there", URL),
        ("12345", NO_WORDS), ("***", NO_WORDS), ("😀", NO_WORDS),
        ("dog", SHORT), ("Dog 12", SHORT),
        ("Ein Hund läuft über die Wiese", LANGUAGE), ("Un perro corre por la hierba", LANGUAGE),
        ("Un chien court dans l'herbe", LANGUAGE), ("Собака бежит", LANGUAGE), ("一只狗在草地上奔跑", LANGUAGE),
        ("A dog runs over the grass .", ""), ("two dogs", ""), ("A café in Zürich", ""), ("Black dog swimming", ""),
        ("A man in front of a sign that says www.example.org", ""), ("El Camino parked near the la Brea pits", ""),
    ],
)  # fmt: skip
def test_captions_among_english_ones(caption: str, reason: str) -> None:
    assert caption_reason(caption, ENGLISH) == reason


def test_captions_are_odd_only_among_others() -> None:
    names = Usual.of(["dog", "cat", "red car"] * 10)
    assert names.words == 1
    assert caption_reason("bird", names) == ""
    german = Usual.of(["Ein Hund läuft über die Wiese", "Zwei Kinder spielen mit dem Ball"] * 10)
    assert (german.script, german.language) == ("Latin", "German")
    assert caption_reason("Der Mann ist auf dem Dach", german) == ""
    assert caption_reason("The man is on the roof", german) == LANGUAGE
    russian = Usual.of(["Собака бежит по траве"] * 10)
    assert caption_reason("The man is on the roof", russian) == LANGUAGE
    assert caption_reason("Мужчина на крыше", russian) == ""
    mixed = Usual.of(["Собака бежит по траве", "The man is on the roof of the house"] * 10)
    assert (mixed.script, mixed.language) == ("", "")
    assert caption_reason("Ein Hund läuft über die Wiese", mixed) == ""
    assert caption_reason("犬", Usual.of(["犬が走る"] * 10)) == ""
    assert Usual.of(["", "12"]) == Usual()


@given(st.text(max_size=40))
def test_any_text_has_one_of_the_reasons(text: str) -> None:
    for usual in (ENGLISH, Usual(), Usual("Han", "", 1)):
        assert caption_reason(text, usual) in ("", *KINDS)


@given(st.integers(0, 2 ** len(KINDS) - 1))
def test_bits_in_words(bits: int) -> None:
    assert sum(1 << KINDS.index(kind) for kind in in_words(bits)) == bits


def test_many_captions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "AT_ONCE", 7)
    captions = ["A dog runs over the grass ."] * 50
    captions[3], captions[49] = "", "IMG_2041.JPG"
    found = caption_reasons(np.arange(50), lambda rows: [captions[row] for row in rows])
    assert {row: in_words(int(bits)) for row, bits in enumerate(found) if bits} == {3: [EMPTY], 49: [FILE_NAME]}


def content(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images(kind: str) -> None:
    assert image_reason(content(Image.fromarray(NOISE), kind)) == ""
    assert image_reason(content(Image.fromarray(NOISE[:20]), kind)) == TINY
    assert image_reason(content(Image.new("RGB", (400, 300), (200, 20, 20)), kind)) == UNIFORM
    halves = np.zeros((300, 400, 3), dtype=np.uint8)
    halves[:, 200:] = 255
    assert image_reason(content(Image.fromarray(halves), kind)) == ""  # a small file, too
    assert image_reason(content(Image.fromarray(NOISE), kind)[:50]) == UNREADABLE


def test_images_of_rows() -> None:
    files = {0: content(Image.fromarray(NOISE)), 4: b"no image", 9: content(Image.new("L", (64, 64)))}
    found = image_reasons(np.array([0, 2, 4, 9]), files.get)
    assert [in_words(int(bits)) for bits in found] == [[], [], [UNREADABLE], [UNIFORM]]
