"""Search by an index: exact, approximate, and on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import mispair
from kills import killed_runs
from mispair.errors import (
    ChangedError,
    ConflictError,
    DamagedError,
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


@pytest.mark.parametrize("kept", [False, True])
def test_an_index_finds_what_the_scores_say(matcher: mispair.Matcher, tmp_path: Path, kept: bool) -> None:
    pairs = tiny_pairs(30, seed=3)
    score = matcher.score(pairs.left, ["a b"])[:, 0]
    index = matcher.index(pairs.left, out=tmp_path / "index" if kept else None)
    rows, scores = index.search("a b", top=5)
    assert np.allclose(scores, np.sort(score)[::-1][:5], atol=2e-3)  # vectors are kept in half precision
    assert np.allclose(score[rows], scores, atol=2e-3)
    assert not index.approximate
    assert "exact" in repr(index)


def test_texts_are_found_by_an_item(matcher: mispair.Matcher) -> None:
    pairs = tiny_pairs(30, seed=3)
    rows, _ = matcher.index(pairs.right, "right").search(pairs.left.features[2], 3)  # type: ignore[union-attr]
    assert rows[0] == matcher.score(pairs.left, pairs.right)[2].argmax()


def test_an_index_is_opened_again_by_its_model_and_side(matcher: mispair.Matcher, tmp_path: Path) -> None:
    index = matcher.index(tiny_pairs(30, seed=3).left, out=tmp_path / "index")
    opened = matcher.open_index(tmp_path / "index")
    assert isinstance(opened.vectors, np.memmap)
    assert np.array_equal(opened.search("a b", 5)[0], index.search("a b", 5)[0])
    other = mispair.fit(tiny_pairs(16), model="vse", seed=1, **SMALL)
    for open_other in (other.open_index, partial(matcher.open_index, side="right")):
        with refused(ChangedError, tmp_path / "index"):
            open_other(tmp_path / "index")


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


def test_items_may_be_added_in_any_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("usearch", reason="usearch is not installed")
    for name, added in (("whole", 500), ("parts", 7)):
        monkeypatch.setattr(vector_index, "ADDED", added)
        build_index(units(500), np.asarray, tmp_path / name, approximate=True, console=Console(quiet=True))
    whole, parts = ((tmp_path / name / "graph.usearch").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.parametrize("name", ["vectors.npy", "graph.usearch"])
@pytest.mark.parametrize("place", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_a_flipped_bit_is_named_and_the_same_call_makes_the_index_again(
    tmp_path: Path, name: str, place: float
) -> None:
    pytest.importorskip("usearch", reason="usearch is not installed")
    vectors, out = units(300), tmp_path / "index"
    build_index(vectors, lambda items: items, out, approximate=True)
    before = flip(out / name, place)
    with refused(DamagedError, out / name):
        open_index(out, lambda items: items)
    index = build_index(vectors, lambda items: items, out, approximate=True)
    assert (out / name).read_bytes() == before
    assert index.nearest(vectors[7], 1)[0] == [7]
    assert sorted(path.name for path in out.iterdir()) == [".lock", "graph.usearch", "index.json", "vectors.npy"]


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


def test_a_model_that_compares_regions_has_no_index(matcher: mispair.Matcher) -> None:
    config = replace(matcher.config, model="sgr")
    sgr = mispair.Matcher(config, matcher.specs, [build(config, *matcher.specs, seed=0)], None, matcher.device)
    with refused(ConflictError, "index", "sgr"):
        sgr.index(tiny_pairs(16).left)


MARK: dict[str, Any] = {"request": {}, "finished": True, "files": {"vectors.npy": ""}}


@pytest.mark.parametrize(
    "mark",
    ["", "[]", "{}", '{"request": 3}', json.dumps({**MARK, "files": {}}), json.dumps({**MARK, "finished": False})],
)
def test_a_folder_without_a_whole_mark_is_no_index(mark: str, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((3, 16), np.float16))
    with refused(NotFoundError, tmp_path):
        open_index(tmp_path, lambda items: items)
    (tmp_path / "index.json").write_text(mark)
    with refused(NotFoundError, tmp_path):
        open_index(tmp_path, lambda items: items)


HEADER = b"(" + b" " * 117 + b"\n"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER, b"\x80\x04pickle"]
)
def test_damaged_vectors_are_refused(content: bytes, verify: bool, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps(MARK))
    (tmp_path / "vectors.npy").write_bytes(content)
    with refused(DamagedError, tmp_path / "vectors.npy"):
        open_index(tmp_path, lambda items: items, verify=verify)


def test_vectors_of_another_shape_are_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps(MARK))
    np.save(tmp_path / "vectors.npy", np.ones(3, np.float16))
    with refused(ShapeError, tmp_path / "vectors.npy"):
        open_index(tmp_path, lambda items: items, verify=False)


def test_wrong_queries_are_refused(matcher: mispair.Matcher) -> None:
    index = matcher.index(tiny_pairs(16).left)
    with refused(InvalidValueError, "top", "0"):
        index.search("a", 0)
    with refused(ShapeError, "query", "list"):
        index.search(["a b", "c"])  # type: ignore[arg-type]
    with refused(ShapeError, "query", "16"):
        index.nearest(np.ones(3), 2)


def test_a_folder_of_others_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(ExistsError, tmp_path):
        build_index(units(30), lambda items: items, tmp_path, approximate=False)


def test_without_usearch_there_is_no_approximate_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "_usearch", lambda: None)
    with refused(MissingPackageError, "usearch", "'.[index]'"):
        build_index(units(30), lambda items: items, None, approximate=True)
