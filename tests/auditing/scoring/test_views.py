"""Several views of a side: joined, filled, weighted, never worse than the best pair of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
from hypothesis import given
from hypothesis import strategies as st

import mispair
from mispair import Auditor
from mispair.auditing.folder import read_input
from mispair.auditing.scoring.views import LEAST, RIDGE, ViewJoin, joined, joins_of
from mispair.cli.main import main
from mispair.errors import ConflictError, ShapeError, TooFewError
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.pairs import Vectors
from mispair.pairs.shards import unit, views_of
from refusals import refused

PAIRS, NOISE = 600, 2.5
Array = npt.NDArray[np.float32]


def made(seed: int = 0, wrong: float = 0.3) -> tuple[dict[str, Array], npt.NDArray[np.bool_]]:
    """Vectors by two encoders of either side, of which each sees one half of what partners share, and noise."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((PAIRS, 12)).astype(np.float32)
    partner = np.arange(PAIRS)
    chosen = rng.permutation(PAIRS)[: int(wrong * PAIRS)]
    partner[chosen] = np.roll(chosen, 1)

    def seen(part: slice, width: int, rows: npt.NDArray[np.int64]) -> Array:
        mixed = common[rows][:, part] @ rng.standard_normal((len(range(12)[part]), width))
        return np.asarray(mixed + NOISE * rng.standard_normal((PAIRS, width)), dtype=np.float32)

    every = np.arange(PAIRS)
    vectors = {
        "a": seen(slice(0, 6), 20, every),
        "b": 100 * seen(slice(6, 12), 24, every) + 50,
        "c": seen(slice(0, 6), 16, partner),
        "d": seen(slice(6, 12), 18, partner),
        "noise": rng.standard_normal((PAIRS, 30)).astype(np.float32),
        "more noise": rng.standard_normal((PAIRS, 30)).astype(np.float32),
    }
    return vectors, partner == every


@cache
def audited(left: str, right: str) -> mispair.Audit:
    vectors, _ = made()
    return mispair.audit([vectors[name] for name in left], [vectors[name] for name in right], device="cpu")


def quality(score: npt.NDArray[np.floating]) -> float:
    found = auroc(score, made()[1])
    assert found is not None
    return found


@given(st.integers(0, 10_000))
def test_join_against_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths, rows = rng.integers(1, 5, 3), int(rng.integers(1, 6))
    views = [rng.standard_normal((rows, width)).astype(np.float32) for width in widths]
    for view in views:
        view[rng.random(rows) < 0.4] = rng.choice([0, np.nan, np.inf])
    means = tuple(rng.standard_normal(width).astype(np.float32) for width in widths)
    scales = tuple(rng.random(3).tolist())
    fills = {(u, v): rng.standard_normal((widths[u], widths[v])) for u in range(3) for v in range(3) if (u + v) % 3}
    starts = np.cumsum([0, *widths[:2]])
    join = ViewJoin(means, scales, tuple(starts.tolist()), int(sum(widths)), fills)
    again = ViewJoin.of({name: np.array(value) for name, value in join.state().items()})
    expected = np.zeros((rows, sum(widths)))
    for row in range(rows):
        have = {v: view[row] / np.linalg.norm(view[row]) for v, view in enumerate(views)
                if np.isfinite(view[row]).all() and view[row].any()}  # fmt: skip
        for v in range(3) if have else ():
            filled = [(have[u] - means[u]) @ fills[u, v] for u in have if (u, v) in fills]
            block = have.get(v, means[v] + (filled[0] if filled else 0))
            expected[row, starts[v] : starts[v] + widths[v]] = scales[v] * block
    for one in (join, again):
        np.testing.assert_allclose(one(views), expected, rtol=1e-4, atol=1e-5)


def test_units_of_any_length() -> None:
    values = np.array([[1.5e38, 2e38], [3e-30, 4e-30], [0, 0], [np.nan, 1], [np.inf, 1]], dtype=np.float32)
    units, there = unit(values)
    assert there.tolist() == [True, True, False, False, False]
    np.testing.assert_allclose(units, np.array([[0.6, 0.8], [0.6, 0.8], [0, 0], [0, 0], [0, 0]]), rtol=1e-5)


def test_views_that_complement_each_other_find_more_than_one() -> None:
    single = max(quality(audited(x, y).match_score) for x, y in ("ac", "bd"))
    assert quality(audited("ab", "cd").match_score) > single + 0.03


def test_a_view_of_noise_is_left_out() -> None:
    vectors, _ = made()
    left, right = [vectors["noise"], vectors["a"]], [vectors["c"], vectors["more noise"]]
    auditor = Auditor(device="cpu").fit(left, right)
    used = [transform.columns for transform in auditor.judge.transforms]
    assert [side is not None and side.tolist() for side in used] == [list(range(30, 50)), list(range(16))]
    single = quality(audited("a", "c").auditor.score(left[1], right[0]))
    assert abs(quality(auditor.score(left, right)) - single) < 0.002


def test_rows_that_one_view_lacks_are_judged_by_the_others() -> None:
    vectors, matched = made()
    both = [vectors["a"], vectors["b"]]
    gaps = [view.copy() for view in both]
    gaps[0][:150], gaps[1][100:250] = np.nan, 0
    audit = mispair.audit(gaps, [vectors["c"], vectors["d"]], device="cpu")
    bad = np.isnan(audit.match_score)
    assert np.flatnonzero(bad).tolist() == list(range(100, 150))
    assert audit.table["status"].to_pylist()[120] != "ok"
    some = np.r_[0:100, 150:250]
    known = auroc(audit.match_score[some], matched[some])
    assert known is not None
    assert known > 0.7


def test_gaps_are_filled_by_a_regression() -> None:
    vectors, _ = made()
    a, b = vectors["a"], np.concatenate([vectors["a"][:, :5], vectors["b"][:, :2]], axis=1)
    gaps = b.copy()
    gaps[:200] = np.nan
    source = joined(from_memory([a, gaps], vectors["c"]))
    x, y = (unit(side)[0][200:].astype(np.float64) for side in (a, b))
    centred = x - unit(a)[0].mean(0)
    moments = centred.T @ centred
    weights = np.linalg.solve(moments + RIDGE * np.trace(moments) / 20 * np.eye(20), centred.T @ (y - y.mean(0)))
    expected = y.mean(0) + (unit(a)[0][:200] - unit(a)[0].mean(0)) @ weights
    expected /= np.sqrt(np.square(y - y.mean(0)).sum(1).mean())
    np.testing.assert_allclose(source.left.block(0, 200)[:, 20:], expected, rtol=1e-3, atol=1e-4)
    assert len(y) >= LEAST


def test_views_that_share_a_space_have_the_same_columns() -> None:
    rng = np.random.default_rng(1)
    common = rng.standard_normal((PAIRS, 16)).astype(np.float32)
    left = [rng.standard_normal((PAIRS, 8)), common + 0.5 * rng.standard_normal((PAIRS, 16))]
    right = [common + 0.5 * rng.standard_normal((PAIRS, 16)), rng.standard_normal((PAIRS, 8))]
    source = joined(from_memory(left, right))
    joins = joins_of(source)
    assert source.joint
    assert joins is not None
    assert source.widths == (32, 32)
    assert joins[0].blocks == [slice(16, 24), slice(0, 16)]
    assert joins[1].blocks == [slice(0, 16), slice(24, 32)]
    auditor = Auditor(device="cpu").fit(left, right)
    assert auditor.joint_
    single = Auditor(device="cpu").fit(left[1], right[0])
    np.testing.assert_allclose(auditor.score(left, right), single.score(left[1], right[0]), atol=0.02)


def test_an_auditor_of_views_is_saved_and_scores_each_pair_alone(tmp_path: Path) -> None:
    vectors, matched = made()
    left, right = [vectors["a"], vectors["b"]], [vectors["c"], vectors["d"]]
    left[0][:20] = np.nan
    auditor = Auditor(device="cpu").fit(left, right)
    auditor.save(tmp_path / "auditor.safetensors")
    again = Auditor.load(tmp_path / "auditor.safetensors", "cpu")
    scores = auditor.score(left, right)
    assert (again.score(left, right) == scores).all()
    part = again.score([view[10:60] for view in left], [view[10:60] for view in right])
    assert (part == scores[10:60]).all()
    assert (auroc(scores, matched) or 0) > 0.8
    with refused(ShapeError, where="the given arrays"):
        again.score(left[0], right)


def test_files_and_arrays_of_views_give_the_same_scores(tmp_path: Path) -> None:
    vectors, _ = made()
    for name, values in vectors.items():
        np.save(tmp_path / f"{name}.npy", values)
    left, right = ([tmp_path / f"{name}.npy" for name in names] for names in ("ab", "c"))
    flags = ["--left", *map(str, left), "--right", *map(str, right), "--device", "cpu", "--out"]
    assert main(["audit", *flags, str(tmp_path / "audit")]) == 0
    found = pyarrow.parquet.read_table(tmp_path / "audit/pairs.parquet").column("match_score").to_numpy()
    one = mispair.audit(left, tuple(right), device="cpu")
    for score in (found, one.match_score):
        np.testing.assert_array_equal(score, audited("ab", "c").match_score)
    before = read_input(tmp_path / "audit")
    assert [path.name for path in (*before.left, *before.right)] == ["a.npy", "b.npy", "c.npy"]
    one.write_clean(tmp_path / "clean")
    names = sorted(path.name for path in (tmp_path / "clean").glob("*.npy"))
    assert names == ["left_1.npy", "left_2.npy", "right.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "clean/left_2.npy"), vectors["b"][one.kept])
    assert [view.width for view in views_of(one.source.left)] == [20, 24]


def test_refused() -> None:
    vectors, _ = made()
    a, c = vectors["a"], vectors["c"]
    with refused(ShapeError, where="the left side"):
        mispair.audit([a, vectors["b"][:-1]], c, device="cpu")
    with refused(ConflictError, where="the given arrays: left"):
        mispair.audit([a, a], c, device="cpu")
    with refused(TooFewError, where="the given arrays: right"):
        mispair.audit(a, [c, np.full_like(c, np.nan)], device="cpu")


def test_pairs_of_views_are_audited_by_them_and_trained_on_side_by_side() -> None:
    vectors, _ = made()
    pairs = mispair.Pairs.from_arrays([vectors["a"], vectors["b"]], vectors["c"])
    assert isinstance(pairs.left, Vectors)
    np.testing.assert_allclose(pairs.left.features, np.hstack([unit(vectors[name])[0] for name in "ab"]), rtol=1e-6)
    assert isinstance(pairs.right, Vectors)
    np.testing.assert_array_equal(pairs.right.features, vectors["c"])
    one, other = Auditor(device="cpu").fit(pairs), audited("ab", "c").auditor
    np.testing.assert_array_equal(one.score(pairs), other.score([vectors["a"], vectors["b"]], vectors["c"]))
