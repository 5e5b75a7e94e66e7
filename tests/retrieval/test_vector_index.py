"""Search by an index: exact, approximate, and on disk."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mispair
from kills import killed_runs
from mispair.errors import (
    ChangedError,
    ConflictError,
    DamagedError,
    DataError,
    ExistsError,
    InvalidValueError,
    MissingPackageError,
    NotFoundError,
    ShapeError,
)
from mispair.models import build
from mispair.retrieval import vector_index
from mispair.retrieval.vector_index import build_index, open_index
from refusals import refused
from tiny import tiny_pairs

SMALL: dict[str, Any] = {"embed_size": 16, "word_size": 8, "batch_size": 16, "epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def matcher() -> mispair.Matcher:
    return mispair.fit(tiny_pairs(16), model="vse", **SMALL)


def units(count: int) -> Any:
    x = np.random.default_rng(0).normal(size=(count, 24)).astype(np.float32)
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def test_an_index_finds_what_the_scores_say(matcher: mispair.Matcher, tmp_path: Path) -> None:
    pairs = tiny_pairs(30, seed=3)
    score = matcher.score(pairs.left, ["a b"])[:, 0]
    for index in (matcher.index(pairs.left), matcher.index(pairs.left, out=tmp_path / "index")):
        rows, scores = index.search("a b", top=5)
        assert np.allclose(scores, np.sort(score)[::-1][:5], atol=2e-3)  # vectors are kept in half precision
        assert np.allclose(score[rows], scores, atol=2e-3)
        assert not index.approximate
    opened = matcher.open_index(tmp_path / "index")
    assert isinstance(opened.vectors, np.memmap)
    assert np.array_equal(opened.search("a b", 5)[0], rows)
    rows, _ = matcher.index(pairs.right, "right").search(pairs.left.features[2], 3)  # type: ignore[union-attr]
    assert rows[0] == matcher.score(pairs.left, pairs.right)[2].argmax()
    other = mispair.fit(tiny_pairs(16), model="vse", seed=1, **SMALL)
    for open_other in (other.open_index, partial(matcher.open_index, side="right")):
        with refused(ChangedError, tmp_path / "index"):
            open_other(tmp_path / "index")
    with refused(ShapeError, "query", "list"):
        opened.search(["a b", "c"])  # type: ignore[arg-type]
    assert "exact" in repr(opened)
    assert repr(matcher).startswith("<Matcher: vse, 1 network, method plain, ")


def test_the_approximate_index_agrees_with_the_exact_search(tmp_path: Path) -> None:
    pytest.importorskip("usearch", reason="usearch is not installed")
    vectors = units(1000)
    index = build_index(vectors, lambda items: items, tmp_path / "index", approximate=True)
    assert index.approximate
    agree = 0
    for query in units(1030)[1000:]:
        near, close = index.nearest(query, 10)
        exact, best = index.nearest(query, 10, exact=True)
        agree += len(np.intersect1d(near, exact))
        assert np.allclose(close[np.isin(near, exact)], best[np.isin(exact, near)])
    assert agree >= 0.95 * 300
    (tmp_path / "index" / "vectors.npy").unlink()
    np.save(tmp_path / "index" / "vectors.npy", units(999).astype(np.float16))
    with refused(DamagedError, tmp_path / "index/graph.usearch"):
        open_index(tmp_path / "index", lambda items: items, verify=False)


def flip(path: Path, place: float, bit: int = 3) -> bytes:
    """Flips a bit at a share of a file, and gives its content before."""
    before = path.read_bytes()
    changed = bytearray(before)
    changed[int(place * (len(before) - 1))] ^= 1 << bit
    path.write_bytes(changed)
    return before


def test_no_item_of_an_approximate_index_is_lost() -> None:
    pytest.importorskip("usearch", reason="usearch is not installed")
    vectors = units(3000)
    index = build_index(vectors, lambda items: items, None, approximate=True)
    assert [row for row, vector in enumerate(vectors) if index.nearest(vector, 1)[0] != [row]] == []


@pytest.mark.parametrize("place", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_a_flipped_bit_is_named_and_mended_where_it_can_be(tmp_path: Path, place: float) -> None:
    pytest.importorskip("usearch", reason="usearch is not installed")
    vectors, out = units(300), tmp_path / "index"
    query = build_index(vectors, lambda items: items, out, approximate=True).vectors[7]
    before = flip(out / "vectors.npy", place)
    with pytest.warns(UserWarning, match=r"vectors\.npy"):
        opened = open_index(out, lambda items: items)
    assert (out / "vectors.npy").read_bytes() == before
    assert opened.nearest(query, 1)[0] == [7]
    flip(out / "graph.usearch", place)
    with pytest.warns(UserWarning, match=r"graph\.usearch"):
        opened = open_index(out, lambda items: items)
    assert opened.nearest(query, 1)[0] == [7]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_index(out, lambda items: items)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "graph.usearch", "index.json", "vectors.npy"]
    flip(out / "vectors.npy", place)
    flip(out / "graph.usearch", place)
    with refused(DamagedError, out / "vectors.npy", "vectors.npy and graph.usearch"):
        open_index(out, lambda items: items)
    build_index(vectors, lambda items: items, out, approximate=True)  # the same items: it is made again
    assert (out / "vectors.npy").read_bytes() == before


def test_a_flipped_bit_of_an_exact_index_is_named(tmp_path: Path) -> None:
    vectors, out = units(30), tmp_path / "index"
    build_index(vectors, lambda items: items, out, approximate=False)
    before = flip(out / "vectors.npy", 0.7)
    with refused(DamagedError, out / "vectors.npy"):
        open_index(out, lambda items: items)
    (out / "vectors.npy").write_bytes(before)
    (out / "index.json").write_bytes((out / "index.json").read_bytes()[:-9])
    with refused(NotFoundError, out):
        open_index(out, lambda items: items)
    build_index(vectors, lambda items: items, out, approximate=False, overwrite=True)
    flip(out / "vectors.npy", 0.7)
    build_index(vectors, lambda items: items, out, approximate=False)
    written = (out / "vectors.npy").stat().st_mtime_ns
    build_index(vectors, lambda items: items, out, approximate=False)
    assert (out / "vectors.npy").stat().st_mtime_ns == written
    with refused(ChangedError, out):
        build_index(units(31), lambda items: items, out, approximate=False)
    assert len(build_index(units(31), lambda items: items, out, approximate=False, overwrite=True)) == 31


@pytest.mark.slow
@pytest.mark.posix
def test_killed_at_any_change_the_same_call_makes_the_index(tmp_path: Path) -> None:
    out = tmp_path / "index"

    def build() -> None:
        build_index(units(30), lambda items: items, out, approximate=False)

    for _ in killed_runs(build, tmp_path):
        build()
        assert sorted(path.name for path in out.iterdir()) == [".lock", "index.json", "vectors.npy"]
        assert [path.name for path in tmp_path.iterdir()] == ["index"]
        shutil.rmtree(out)


def test_what_cannot_be_indexed_is_refused(
    matcher: mispair.Matcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tiny_pairs(16)
    config = replace(matcher.config, model="sgr")
    sgr = mispair.Matcher(config, matcher.specs, [build(config, *matcher.specs, seed=0)], None, matcher.device)
    with refused(ConflictError, "index", "sgr"):
        sgr.index(pairs.left)
    with refused(NotFoundError, tmp_path):
        matcher.open_index(tmp_path)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other/vectors.npy", np.ones((3, 16), np.float16))
    begun = b'{"request": {}, "finished": false, "files": {"vectors.npy": ""}}'
    for content in (b"", b"[]", b"{}", b'{"request": 3}', b'{"request": {}, "finished": true, "files": {}}', begun):
        (tmp_path / "other/index.json").write_bytes(content)
        with refused(NotFoundError, tmp_path / "other"):
            matcher.open_index(tmp_path / "other")
    mark = {"request": {"model": matcher._digest("left")}, "finished": True, "files": {"vectors.npy": ""}}
    (tmp_path / "other/index.json").write_text(json.dumps(mark))
    header = b"(" + b" " * 117 + b"\n"
    for content in (b"", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header, b"\x80\x04pickle"):
        (tmp_path / "other/vectors.npy").write_bytes(content)
        for verify in (True, False):
            with pytest.raises(DataError, match=r"vectors\.npy: "):
                matcher.open_index(tmp_path / "other", verify=verify)
    np.save(tmp_path / "other/vectors.npy", np.ones(3, np.float16))
    with pytest.raises(DataError, match="expected 2 dimensions"):
        matcher.open_index(tmp_path / "other", verify=False)
    index = matcher.index(pairs.left)
    with refused(InvalidValueError, "top", "0"):
        index.search("a", 0)
    with refused(ShapeError, "query", "16"):
        index.nearest(np.ones(3), 2)
    (tmp_path / "file").write_text("")
    with refused(ExistsError, tmp_path):
        matcher.index(pairs.left, out=tmp_path)
    monkeypatch.setattr(vector_index, "_usearch", lambda: None)
    with refused(MissingPackageError, "usearch", "'.[index]'"):
        matcher.index(pairs.left, approximate=True)
