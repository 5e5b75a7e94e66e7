"""The cache of encodings: by content, for several processes at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.cli.main import main
from mispair.encoders.cache import EncodingCache, Halves, cache_folder, key_of, writable_cache
from mispair.encoders.encode import Encoders
from mispair.encoders.encoders import identity
from mispair.errors import DataError, WriteError
from refusals import refused


def vector(number: int) -> Halves:
    return np.array([number, -number], dtype=np.float16)


def items(*numbers: int) -> dict[bytes, Halves]:
    return {key_of(str(number).encode()): vector(number) for number in numbers}


@given(st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=5), st.lists(st.integers(0, 40), min_size=1))
def test_what_was_added_is_found(
    tmp_path_factory: pytest.TempPathFactory, added: list[list[int]], wanted: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    writers = [EncodingCache(folder, "encoder", 2) for _ in range(2)]  # as two processes that started together
    for number, part in enumerate(added):
        writers[number % 2].add(items(*part))
    cache = EncodingCache(folder, "encoder", 2)
    known = {number for part in added for number in part}
    numbers = np.array([cache.find(key_of(str(number).encode())) for number in wanted])
    assert (numbers > 0).tolist() == [number in known for number in wanted]
    expected = [vector(number) if number in known else np.zeros(2) for number in wanted]
    np.testing.assert_array_equal(cache.rows(numbers).read(slice(None)), expected)
    assert EncodingCache(folder, "another", 2).find(key_of(b"1")) == 0
    assert EncodingCache(folder, "encoder", 3).find(key_of(b"1")) == 0


def test_keys_that_end_in_zeros(tmp_path: Path) -> None:
    keys = [bytes(15) + b"a", b"a" + bytes(15), b"a" * 16, bytes(16)]
    EncodingCache(tmp_path, "encoder", 2).add({key: vector(number) for number, key in enumerate(keys)})
    cache = EncodingCache(tmp_path, "encoder", 2)
    found = cache.rows(np.array([cache.find(key) for key in keys])).read(slice(None))
    assert found[:, 0].tolist() == [0, 1, 2, 3]


def test_keys_without_their_vectors_are_passed_over(tmp_path: Path) -> None:
    EncodingCache(tmp_path, "encoder", 2).add(items(1))
    EncodingCache(tmp_path, "encoder", 2).add(items(2))
    vectors = next(path for path in tmp_path.rglob("*.npy") if not path.name.endswith(".keys.npy"))
    vectors.unlink()  # as a kill between the two files leaves it
    cache = EncodingCache(tmp_path, "encoder", 2)
    assert sum(bool(cache.find(key)) for key in items(1, 2)) == 1


def test_a_cache_that_is_deleted_meanwhile_is_a_sentence(tmp_path: Path) -> None:
    cache = EncodingCache(tmp_path, "encoder", 2)
    cache.add(items(1, 2))
    for path in tmp_path.rglob("*.npy"):
        path.unlink()
    with pytest.raises(DataError):
        cache.rows(np.array([1])).read(slice(None))


def test_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(Path("mine")) == Path("mine")
    monkeypatch.setenv("MISPAIR_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"
    monkeypatch.delenv("MISPAIR_CACHE")
    assert cache_folder().name == "encodings"


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_encoded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("file", "a.jpg"):
        (tmp_path / name).touch()
    (tmp_path / "photos.csv").write_text("image,caption\n" + "a.jpg,a dog\n" * 50)
    monkeypatch.setattr(Encoders, "views", lambda _: pytest.fail("the encoders are loaded"))
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path / "file/cache"))
    for command in ("audit", "encode"):
        assert main([command, str(tmp_path / "photos.csv"), "--out", str(tmp_path / command)]) == 2
        assert "MISPAIR_CACHE" in capsys.readouterr().err
        assert not (tmp_path / command).exists()
    with refused(WriteError, tmp_path / "file/cache"):
        writable_cache(tmp_path / "file/cache")
    # A cache of somebody else may have all that is needed.
    EncodingCache(tmp_path / "full", "encoder", 2).add(items(1, 2))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: pytest.fail("it is written to"))
    assert writable_cache(tmp_path / "full") == tmp_path / "full"


def test_other_weights_of_the_same_name_are_another_encoder(tmp_path: Path) -> None:
    assert identity("efficientnet-lite0") == "efficientnet-lite0"
    (tmp_path / "model.bin").write_bytes(b"one")
    for name in (
        f"transformers:{tmp_path}",
        f"open_clip:ViT-B-32/{tmp_path}/model.bin",
        f"open_clip:local-dir:{tmp_path}",
    ):
        before = identity(name)
        assert before.startswith(name)
        (tmp_path / "model.bin").write_bytes((tmp_path / "model.bin").read_bytes() + b"more")
        assert identity(name) != before
