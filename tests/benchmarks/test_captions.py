"""Captions of a file, for measurements."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from captions import pairs_of, read_captions
from mispair.errors import DamagedError
from refusals import refused


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    lines = [f"the {'big ' * (number % 4)}dog number {number % 7}" for number in range(23)]
    path = tmp_path / "caps.txt.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    return path


def test_captions_of_a_file_come_in_order_and_again(captions: Path) -> None:
    texts = read_captions(captions, 50, seed=0)
    assert texts.lengths[:5].tolist() == [6, 7, 8, 9, 6]  # the, dog, number and a digit, start and end
    assert texts.lengths[23:28].tolist() == texts.lengths[:5].tolist()
    assert read_captions(captions, 10, seed=1).lengths.tolist() == texts.lengths[10:20].tolist()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("caps.txt", None), ("caps.txt", b""), ("caps.txt", b"\xff\xfe\x00bad"), ("caps.txt.gz", b"no archive"),
        ("caps.txt.gz", gzip.compress(b"a dog\n" * 99, mtime=0)[:-12]),
        ("caps.txt.gz", gzip.compress(b"a dog\n", mtime=0)[:10] + b"\xff" * 20),
    ],
)  # fmt: skip
def test_captions_that_cannot_be_read_get_a_sentence(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with refused(DamagedError, path):
        pairs_of(path, 4)
