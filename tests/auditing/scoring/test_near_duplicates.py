import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_marks import needs_gpu
from mispair.auditing.scoring import near_duplicates
from mispair.auditing.scoring.near_duplicates import SEEN, Codes, find_near_duplicate_images, find_near_duplicates
from mispair.errors import ConfigError
from mispair.support.arrays import FloatArray, IntArray, Mask


def random_vectors(n: int, width: int = 32, seed: int = 0) -> FloatArray:
    return np.asarray(np.random.RandomState(seed).standard_normal((n, width)), dtype=np.float32)


def beside(vectors: FloatArray, cosine: float, seed: int = 1) -> FloatArray:
    """For each vector another of exactly this cosine to it."""
    away = random_vectors(len(vectors), vectors.shape[1], seed).astype(np.float64)
    along = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    away -= along * (away * along).sum(axis=1, keepdims=True)
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    return np.asarray(cosine * along + math.sqrt(1 - cosine**2) * away, dtype=np.float32)


def sketch(vectors: FloatArray, mean: FloatArray | None = None, block: int = 1000) -> Codes:
    centre = torch.zeros(vectors.shape[1]) if mean is None else torch.from_numpy(mean)
    blocks = [vectors[start : start + block] for start in range(0, len(vectors) or 1, block)]
    return np.concatenate([near_duplicates.sketch(torch.from_numpy(values), centre) for values in blocks])


def careful(vectors: FloatArray, taken: list[int]) -> Callable[[IntArray], FloatArray]:
    """A gather that holds `find_near_duplicates` to its promises and counts the rows."""

    def gather(rows: IntArray) -> FloatArray:
        assert 0 < len(rows) <= 8192
        assert (np.diff(rows) > 0).all()
        taken.append(len(rows))
        return np.asarray(vectors[rows])

    return gather


def groups_of(
    vectors: FloatArray, threshold: float = 0.98, mean: FloatArray | None = None, leave_out: Mask | None = None
) -> list[list[int]]:
    found = find_near_duplicates(sketch(vectors, mean), careful(vectors, []), threshold, mean=mean, leave_out=leave_out)
    return [group.tolist() for group in found]


def cosine(a: FloatArray, b: FloatArray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not a.any() and not b.any():
        return 1.0
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-300))


def hangs_together(group: list[int], vectors: FloatArray, threshold: float) -> bool:
    """Whether every row of the group is reached over links of the threshold, by brute force."""
    reached, rest = [group[0]], set(group[1:])
    for row in reached:
        linked = {other for other in rest if cosine(vectors[row], vectors[other]) >= threshold - 1e-5}
        reached += sorted(linked)
        rest -= linked
    return not rest


def chance(cosine: float, most_bits: int) -> float:
    """Probability that at least 3 of 8 bytes agree and at most so many bits differ, byte after byte."""
    p = math.acos(cosine) / math.pi
    states = {(0, 0): 1.0}
    for _ in range(8):
        following: dict[tuple[int, int], float] = {}
        for (equal, bits), probability in states.items():
            for differ in range(9):
                state = (equal + (differ == 0), bits + differ)
                step = math.comb(8, differ) * p**differ * (1 - p) ** (8 - differ)
                following[state] = following.get(state, 0) + probability * step
        states = following
    return sum(value for (equal, bits), value in states.items() if equal >= 3 and bits <= most_bits)


def test_the_table_of_probabilities_is_right() -> None:
    assert chance(0.99, most_bits=7) > 0.95
    lines = {
        line.split()[0]: line.split()[1:] for line in (near_duplicates.__doc__ or "").splitlines() if "    " in line
    }
    assert [f"{chance(float(value), most_bits=7):.3f}" for value in lines["cosine"]] == lines["compared"]


@pytest.mark.parametrize("value", [0.999, 0.99, 0.982])
def test_planted_near_duplicates_are_found_as_often_as_promised(value: float) -> None:
    n = 3000
    vectors = random_vectors(n)
    groups = groups_of(np.concatenate([vectors, beside(vectors, value)]))
    assert all(group[1] == group[0] + n for group in groups if len(group) == 2)
    deviation = math.sqrt(n * chance(value, 7) * (1 - chance(value, 7)))
    assert abs(len(groups) - n * chance(value, 7)) <= 4 * deviation + 2


def test_bits_differ_by_the_angle() -> None:
    vectors = random_vectors(2000)
    for value in (0.99, 0.9, 0.5, -0.5):
        differ = sketch(vectors) ^ sketch(beside(vectors, value))
        share = np.mean([number.bit_count() for number in differ.tolist()]) / 64
        assert share == pytest.approx(math.acos(value) / math.pi, abs=0.01)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.integers(0, 99))
def test_codes_depend_neither_on_blocks_nor_on_order(n: int, block: int, width: int, seed: int) -> None:
    vectors, mean = random_vectors(n, width, seed), random_vectors(1, width, seed + 1)[0]
    whole = sketch(vectors, mean, block=n)
    np.testing.assert_array_equal(sketch(vectors, mean, block), whole)
    order = np.random.RandomState(seed).permutation(n)
    np.testing.assert_array_equal(sketch(vectors[order], mean, block), whole[order])
    np.testing.assert_array_equal(sketch(np.asfortranarray(vectors), mean, block), whole)


def test_rows_in_half_precision_are_read() -> None:
    vectors = random_vectors(50).astype(np.float16)
    np.testing.assert_array_equal(sketch(vectors), sketch(vectors.astype(np.float32)))
    assert groups_of(np.concatenate([vectors, vectors[:5]])) == [[row, row + 50] for row in range(5)]


@given(st.data())
def test_groups_are_right_by_brute_force(data: st.DataObject) -> None:
    n, width = data.draw(st.integers(0, 40), "n"), data.draw(st.integers(1, 12), "width")
    threshold = data.draw(st.sampled_from([0.7, 0.9, 0.98, 1.0]), "threshold")
    random = np.random.RandomState(data.draw(st.integers(0, 999), "seed"))
    originals = random.standard_normal((max(1, n // 2), width))
    vectors = originals[random.randint(len(originals), size=n)]
    vectors = vectors + random.choice([0, 0, 0.1], size=(n, 1)) * random.standard_normal((n, width))
    vectors = np.asarray(vectors, dtype=np.float32)
    mean = vectors.mean(axis=0) if n and data.draw(st.booleans(), "centred") else np.zeros(width, np.float32)
    leave_out = random.rand(n) < 0.2
    groups = groups_of(vectors, threshold, mean, leave_out)

    members = [row for group in groups for row in group]
    assert len(members) == len(set(members))
    assert not leave_out[members].any()
    assert all(group == sorted(group) and len(group) > 1 for group in groups)
    assert [len(group) for group in groups] == sorted(map(len, groups), reverse=True)
    assert all(hangs_together(group, vectors - mean, threshold) for group in groups)
    where = {row: number for number, group in enumerate(groups) for row in group}
    for a, b in combinations(np.flatnonzero(~leave_out).tolist(), 2):
        if (vectors[a] == vectors[b]).all():
            assert where[a] == where[b]


@settings(max_examples=4)
@given(st.integers(0, 999))
def test_the_order_of_the_rows_does_not_matter(seed: int) -> None:
    random = np.random.RandomState(seed)
    vectors = random_vectors(30, 6, seed)[random.randint(30, size=300)]
    vectors[:150] += 0.1 * random_vectors(150, 6, seed + 1)
    order = random.permutation(300)
    expected = {frozenset(group) for group in groups_of(vectors, 0.95)}
    assert {frozenset(order[group].tolist()) for group in groups_of(vectors[order], 0.95)} == expected


@pytest.mark.parametrize("centred", [False, True])
def test_very_many_identical_rows_are_linear_work(centred: bool) -> None:
    vectors = np.tile(random_vectors(1), (20_000, 1))  # all of them equal to the mean, where it is taken away
    mean = vectors[0] if centred else None
    taken: list[int] = []
    (group,) = find_near_duplicates(sketch(vectors, mean), careful(vectors, taken), mean=mean)
    np.testing.assert_array_equal(group, np.arange(20_000))
    assert sum(taken) < 2.5 * len(vectors)


def test_very_many_nearly_identical_rows_are_linear_work() -> None:
    vectors = random_vectors(1) + 0.01 * random_vectors(10_000, seed=5)
    taken: list[int] = []
    (group,) = find_near_duplicates(sketch(vectors), careful(vectors, taken))
    assert len(group) == len(vectors)
    assert sum(taken) < 5 * len(vectors)


def test_a_dense_cloud_without_near_duplicates_is_bounded_work() -> None:
    vectors = random_vectors(1, 128) + 0.3 * random_vectors(2000, 128, seed=5)
    taken: list[int] = []
    assert len(find_near_duplicates(sketch(vectors), careful(vectors, taken))) == 0
    assert sum(taken) < 57 * 3 * len(vectors)  # a table lets at most about one pair a row through


def test_exact_duplicates_are_found_even_where_all_codes_are_equal() -> None:
    order = np.random.RandomState(0).permutation(1000)
    vectors = np.concatenate([random_vectors(500), random_vectors(500)])[order]
    found = find_near_duplicates(np.zeros(1000, np.uint64), careful(vectors, []))
    assert {frozenset(order[group] % 500) for group in found} == {frozenset([row]) for row in range(500)}


def test_rows_of_one_code_are_represented_by_one_of_each_set() -> None:
    """Two rows of another code are alike to one of two sets, which share a code and are far longer than the window."""
    one, other = random_vectors(2)
    vectors = np.concatenate([np.tile(one, (200, 1)), np.tile(other, (200, 1)), [one, other]])
    codes = np.array([0] * 400 + [1, 1], np.uint64)
    found = find_near_duplicates(codes, careful(vectors, []))
    assert [group.tolist() for group in found] == [[*range(200), 400], [*range(200, 400), 401]]


@pytest.mark.parametrize("end", [-10, 20])
def test_few_rows_of_one_code_are_all_compared(end: int) -> None:
    """The third row is alike to one of two rows that share a code, whichever of the two stands first."""
    angles = np.radians([0, 10, end])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    (group,) = find_near_duplicates(np.array([0, 0, 1], np.uint64), careful(vectors, []), math.cos(math.radians(11)))
    assert group.tolist() == [0, 1, 2]


def test_rows_that_are_not_finite_are_alone() -> None:
    vectors = np.tile(random_vectors(1), (8, 1))
    vectors[2, 3], vectors[5] = np.nan, np.inf
    assert groups_of(vectors) == [[0, 1, 3, 4, 6, 7]]


def test_zero_rows_are_near_duplicates_only_of_each_other() -> None:
    vectors = np.concatenate([np.zeros((2, 32), np.float32), random_vectors(3)])
    assert groups_of(vectors, 0.6) == [[0, 1]]


def test_empty_single_and_left_out_rows_give_no_group() -> None:
    for n in (0, 1):
        assert groups_of(random_vectors(n)) == []
    assert groups_of(np.tile(random_vectors(1), (5, 1)), leave_out=np.ones(5, np.bool_)) == []


@pytest.mark.parametrize("threshold", [-1.0, 0.5, 1.01, 98, float("nan")])
def test_a_threshold_that_is_no_cosine_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match=r"expected more than 0\.5 and at most 1"):
        find_near_duplicates(np.zeros(3, np.uint64), lambda _: pytest.fail("no work before the check"), threshold)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_finds_the_same_groups() -> None:
    random = np.random.RandomState(0)
    vectors = random_vectors(4000, 64)[random.randint(4000, size=20_000)]
    vectors += random.choice([0, 0.05, 0.1, 1], size=(20_000, 1)) * random_vectors(20_000, 64, seed=1)
    codes = sketch(vectors)
    groups = [
        find_near_duplicates(codes, vectors.__getitem__, device=torch.device(device)) for device in ("cpu", "cuda")
    ]
    np.testing.assert_array_equal(groups[1].rows, groups[0].rows)
    np.testing.assert_array_equal(groups[1].starts, groups[0].starts)


@settings(max_examples=3)
@given(st.integers(0, 999), st.sampled_from([200, 1 << 24]))
def test_neighbours_may_be_compared_several_at_a_time(seed: int, at_once: int) -> None:
    random = np.random.RandomState(seed)
    vectors = random_vectors(10, 4, seed)[random.randint(10, size=300)]
    vectors[:150] += 0.1 * random_vectors(150, 4, seed + 1)
    expected = groups_of(vectors, 0.95)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(near_duplicates._COMPARED, "cpu", at_once)
        assert groups_of(vectors, 0.95) == expected


@given(st.integers(1, 30), st.data())
def test_joined_sets_equal_a_plain_loop(n: int, data: st.DataObject) -> None:
    numbers = st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20)
    sets, label = near_duplicates.DisjointSets(np.arange(n)), list(range(n))
    for links in data.draw(st.lists(numbers, max_size=4)):
        for one, other in links:
            low, high = sorted((label[one], label[other]))
            label = [low if value == high else value for value in label]
        ends = np.array(links, dtype=np.int64).reshape(-1, 2)
        sets.join(ends[:, 0], ends[:, 1])
    assert sets.find(np.arange(n)).tolist() == label


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_bits_are_counted(numbers: list[int]) -> None:
    given = torch.from_numpy(np.array(numbers, np.uint64).view(np.int64))
    assert near_duplicates._count_bits(given).tolist() == [number.bit_count() for number in numbers]


def hashes_near(hashes: Codes, bits: int, random: np.random.RandomState) -> Codes:
    """The same hashes with so many other bits."""
    changed = np.unpackbits(hashes.view(np.uint8), axis=1)
    for row in changed:
        row[random.choice(128, bits, replace=False)] ^= 1
    return np.packbits(changed, axis=1).view(np.uint64)


def alike(hashes: Codes, vectors: FloatArray) -> FloatArray:
    """How alike any two images are by both; -1 for an image and itself, or an earlier one."""
    bits = np.unpackbits(hashes.view(np.uint8), axis=1)
    differ = (bits[:, None] != bits[None]).sum(axis=2)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = (1 - differ / 64 + units @ units.T) / 2
    return np.where(np.tri(len(found), dtype=bool), -1, found)


@given(st.integers(0, 11), st.sampled_from([0.4, 0.55, 0.7, 0.9, 1.0]), st.integers(0, 1000))
def test_images_with_at_most_11_different_bits_are_compared_and_judged_by_both(
    bits: int, near: float, seed: int
) -> None:
    random, count = np.random.RandomState(seed), 60
    hashes = random.randint(2**64, size=(count, 2), dtype=np.uint64)
    vectors = random_vectors(count, 64, seed)
    hashes = np.concatenate([hashes, hashes_near(hashes, bits, random)])
    mean = np.full(64, 0.3)
    vectors = np.concatenate([vectors, beside(vectors, near, seed + 1)]) + np.float32(0.3)
    leave_out = np.zeros(2 * count, dtype=bool)
    leave_out[3] = True
    hashes[4] = 0  # has no hash
    found = find_near_duplicate_images(hashes, careful(vectors, []), mean=mean, leave_out=leave_out)
    groups = {tuple(group.tolist()) for group in found}
    both = alike(hashes, vectors - mean)
    both[[3, 4]] = both[:, [3, 4]] = -1
    rounded = np.abs(both - SEEN) < 1e-6  # rounding decides
    links, expected = (set(map(tuple, np.argwhere(chosen).tolist())) for chosen in (rounded, (both >= SEEN) & ~rounded))
    assert expected - groups == set()
    assert groups - expected - links == set()
    assert (groups != set()) == ((1 - bits / 64 + near) / 2 >= SEEN)
