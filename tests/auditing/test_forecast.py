"""What an audit is expected to take."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audit_cases import make_case, write_clip
from layouts import write_tar
from mispair.auditing import forecast as module
from mispair.auditing.forecast import ENCODING, MEASURING, expected
from mispair.cli.main import main
from mispair.encoders import encode

pytest.importorskip("pyarrow")

NEAR, LEARN, PARTNERS = "searching near-duplicates", "learning", "searching better partners"
# Two quiet CPU cores, 512 numbers a side: the rows "after those changes" of docs/performance.md.
MEASURED = {
    1_000: {NEAR: 0.2, LEARN: 1.8, MEASURING: 0.1, PARTNERS: 0.6},
    10_000: {NEAR: 0.5, LEARN: 5.7, MEASURING: 0.7, PARTNERS: 1.8},
}
MILLION = {NEAR: 21.8, LEARN: 12.7, MEASURING: 51.4, PARTNERS: 4.1}


def test_a_million_pairs_are_expected_from_ten_thousand() -> None:
    found = expected(1_000_000, MEASURED)
    for stage, seconds in MILLION.items():
        assert 0.6 * seconds < found[stage] < 1.7 * seconds
    assert sum(found.values()) == pytest.approx(sum(MILLION.values()), rel=0.3)


def test_formulas() -> None:
    samples = {100: {LEARN: 1.0, MEASURING: 1.0, NEAR: 3.0}, 400: {LEARN: 2.0, MEASURING: 2.5, NEAR: 2.0}}
    found = expected(1_000_400, samples, machines=10)
    assert found[MEASURING] == pytest.approx((2.5 + 0.005 * 1_000_000) / 10)
    assert found[LEARN] == pytest.approx(2.0 * (32_768 / 400) ** 0.5)
    assert found[NEAR] == 2.0  # a smaller sample that took longer shows no growth
    assert expected(400, samples) == samples[400]
    assert expected(50, {50: samples[100]}) == samples[100]


def test_expected_seconds_grow_with_the_pairs() -> None:
    sums = [sum(expected(pairs, MEASURED).values()) for pairs in (10_000, 20_000, 10**5, 10**6, 10**8)]
    assert sums == sorted(sums)


def test_a_dry_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGER", 120)
    case = make_case(500, 0.3)
    folder = write_clip(tmp_path / "in", case.left, case.right)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["audit", str(folder), "--out", str(tmp_path / "out"), "--dry-run", "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["parts"], found["bytes"]) == (500, 1, 500 * (16 + 12) * 4)
    assert found["seconds"]["4"][MEASURING] == pytest.approx(found["seconds"]["1"][MEASURING] / 4)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_forecast_in_words() -> None:
    seconds = {machines: expected(1_000_000, MEASURED, machines) for machines in (1, 4)}
    lines = module.Forecast(1_000_000, 2_048_000_000, 16, seconds, 1_400_000_000, 8192, 7.0).lines()
    assert lines[0].startswith("1,000,000 pairs, 2.05 GB of vectors, 16 parts of at most 65,536 rows")
    assert lines[-1] == "Nothing was written."
    assert "searching near-duplicates" in lines[-3]


class Pixels:
    """Colours of an image as its vector."""

    width = 12
    pixels = 1024

    def __init__(self, name: str, _: str) -> None:
        self.name = name

    def prepare(self, image: Image.Image) -> Any:
        return np.asarray(image.resize((2, 2)), dtype=np.float32).reshape(-1)

    def encode(self, items: Sequence[Any], /) -> Any:
        return np.stack(items)


class Letters(Pixels):
    def encode(self, items: Sequence[Any], /) -> Any:
        return np.array([[text.count(chr(97 + number)) for number in range(12)] for text in items], dtype=np.float32)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_photos_are_encoded_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(encode, "image_encoder", Pixels)
    monkeypatch.setattr(encode, "text_encoder", Letters)
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    for tar in range(3):
        samples = []
        for row in range(100 * tar, 100 * tar + 100):
            pixels, photo = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8), io.BytesIO()
            Image.fromarray(pixels).save(photo, "PNG")
            letters = "".join(chr(97 + n) * int(colour // 16) for n, colour in enumerate(pixels.reshape(-1)[:12]))
            samples.append({f"{row:05d}.png": photo.getvalue(), f"{row:05d}.txt": letters.encode()})
        write_tar(tmp_path / "in" / f"{tar}.tar", samples)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["audit", str(tmp_path / "in"), "--dry-run", "--device", "cpu", "--engine", engine]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"] == (300 if engine == "local" else pytest.approx(300, rel=0.01))
    assert found["sample"] == (300 if engine == "local" else 100)
    one, four = (found["seconds"][machines] for machines in ("1", "4"))
    assert one[ENCODING] > 0
    assert four[ENCODING] == pytest.approx(one[ENCODING] / 4)
    assert main(arguments) == 0
    assert "of which encoding " in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
