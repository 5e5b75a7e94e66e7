import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.pairs.batches import Augmentation, Items, PairLoader, SideLoader, corrupt, pad_tokens, prefetch
from mispair.pairs.pairs import Pairs, Regions, Vectors
from small_data import WORDS, lengths_of, one_to_one, regions, token_items, tokens, vectors

CPU = torch.device("cpu")
ragged = st.lists(st.integers(1, 9), min_size=1, max_size=6)


# ---------------------------------------------------------------- batches


@given(ragged, st.data())
def test_token_padding_equals_a_loop(lengths: list[int], data: st.DataObject) -> None:
    side = tokens(lengths)
    rows = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8)))
    values, found = pad_tokens(side, rows)
    assert found.tolist() == [lengths[row] for row in rows]
    assert values.dtype == np.int64
    assert values.shape == (len(rows), max(lengths[row] for row in rows))
    for place, row in enumerate(rows):
        text = side.ids[side.offsets[row] : side.offsets[row + 1]].tolist()
        assert values[place].tolist() == text + [0] * (values.shape[1] - len(text))


def test_a_batch_holds_what_the_link_says() -> None:
    images, texts = regions(3), tokens([4, 1, 2, 6])
    pairs = Pairs(images, texts, link=np.array([2, 0, 0, 1]))
    batch = PairLoader(pairs, CPU).batch(np.array([3, 0, 2]))
    assert len(batch) == len(batch.left) == len(batch.right) == 3
    assert batch.pairs.tolist() == [3, 0, 2]
    assert batch.left_rows.tolist() == batch.left_groups.tolist() == [1, 2, 0]
    grouped = PairLoader(replace(pairs, groups=np.array([7, 7, 9])), CPU).batch(np.array([3, 0, 2]))
    assert (grouped.left_rows.tolist(), grouped.left_groups.tolist()) == ([1, 2, 0], [7, 9, 7])
    assert torch.equal(batch.left.values, torch.from_numpy(images.features[[1, 2, 0]]))
    assert batch.left.lengths is None  # all five regions of each are real
    expected, lengths = pad_tokens(texts, np.array([3, 0, 2]))
    assert batch.right.values.tolist() == expected.tolist()
    assert batch.right.lengths is not None
    assert batch.right.lengths.tolist() == lengths.tolist() == [6, 4, 2]


def test_vectors_have_no_lengths() -> None:
    batch = PairLoader(one_to_one(vectors(4), vectors(4, 9)), CPU).batch(np.array([1, 1]))
    assert batch.left.lengths is None
    assert batch.left.values.shape == (2, 7)
    assert batch.right.values.shape == (2, 9)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", [Regions, Vectors])
def test_mapped_features_come_out_float32_on_a_cpu(tmp_path: Path, dtype: Any, kind: Any) -> None:
    features = np.random.default_rng(0).standard_normal((6, 2, 3) if kind is Regions else (6, 3)).astype(dtype)
    np.save(tmp_path / "f.npy", features)
    mapped = np.load(tmp_path / "f.npy", mmap_mode="r")
    loader = SideLoader(kind(mapped), CPU)
    rows = np.array([5, 0, 0, 3])
    values = loader.items(rows).values
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.from_numpy(features[rows].astype(np.float32)))
    assert not loader.on_host
    values.zero_()  # a copy: the file cannot be written
    assert np.array_equal(np.load(tmp_path / "f.npy"), features)


def test_a_gpu_gets_regions_in_half_precision_and_vectors_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors may have any offset, such as years; where they come in half precision, nothing is lost by it."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 0))
    monkeypatch.setattr("mispair.pairs.batches.send", lambda tensor, _: tensor)
    years = np.array([[2001.25], [2001.5]])
    cases = ((Vectors, np.float64, np.float32), (Vectors, np.float16, np.float16), (Regions, np.float32, np.float16))
    for kind, stored, moved in cases:
        features = years.astype(stored).reshape(2, *(1,) * (1 if kind is Vectors else 2))
        values = SideLoader(kind(features), torch.device("cuda")).items(np.arange(2)).values.numpy()
        assert values.dtype == moved
        assert (values == features.astype(moved)).all()


# ---------------------------------------------------------------- augmentation


def augmentation(seed: int = 0, rate: float = 0.2) -> Augmentation:
    return Augmentation(np.random.default_rng(seed), mask_id=WORDS, rate=rate)


def numbered_regions(lengths: list[int], extra: int = 0) -> Items:
    """Region k of item i holds 100 i + k + 1 in both of its channels; 0 where padded."""
    values = torch.zeros(len(lengths), max(lengths) + extra, 2)
    for row, length in enumerate(lengths):
        values[row, :length] = (100 * row + torch.arange(length) + 1)[:, None]
    return Items(values, torch.tensor(lengths))


def checked_lengths(items: Items) -> list[int]:
    assert items.lengths is not None
    lengths: list[int] = items.lengths.tolist()
    assert min(lengths) >= 1
    assert items.values.shape[1] == max(lengths)
    for row, length in enumerate(lengths):
        assert (items.values[row, length:] == 0).all()
    return lengths


@given(ragged, st.integers(0, 2), st.integers(0, 10**6), st.sampled_from([0.2, 0.9, 1.0]))
def test_regions_lose_some_and_keep_their_order(lengths: list[int], extra: int, seed: int, rate: float) -> None:
    before = numbered_regions(lengths, extra)
    untouched = before.values.clone()
    after = augmentation(seed, rate)(before)
    assert torch.equal(before.values, untouched)
    for row, length in enumerate(checked_lengths(after)):
        left = after.values[row, :length, 0].tolist()
        assert left == sorted(left)
        assert len(set(left)) == length <= lengths[row]
        assert set(left) <= set(before.values[row, : lengths[row], 0].tolist())
        assert torch.equal(after.values[row, :, 0], after.values[row, :, 1])


@given(ragged, st.integers(0, 2), st.integers(0, 10**6), st.sampled_from([0.2, 0.9, 1.0]))
def test_tokens_are_masked_replaced_or_dropped(lengths: list[int], extra: int, seed: int, rate: float) -> None:
    before = token_items(lengths, extra=extra, seed=seed)
    untouched = before.values.clone()
    after = augmentation(seed, rate)(before)
    assert torch.equal(before.values, untouched)
    assert after.values.dtype == torch.long
    for row, length in enumerate(checked_lengths(after)):
        assert length <= lengths[row]
        assert int(after.values[row].max()) <= WORDS
        assert int(after.values[row].min()) >= 0


@given(ragged, st.integers(0, 10**6))
def test_the_same_random_numbers_give_the_same_batch(lengths: list[int], seed: int) -> None:
    for items in (numbered_regions(lengths), token_items(lengths)):
        first, second = augmentation(seed)(items), augmentation(seed)(items)
        assert torch.equal(first.values, second.values)
        assert checked_lengths(first) == checked_lengths(second)


def test_another_seed_gives_another_batch() -> None:
    items = numbered_regions([30, 30])
    assert augmentation(0)(items).values.tolist() != augmentation(1)(items).values.tolist()


def test_vectors_are_left_alone() -> None:
    items = Items(torch.randn(3, 4))
    assert augmentation()(items) is items


def test_a_fifth_of_the_regions_goes() -> None:
    lengths = checked_lengths(augmentation()(numbered_regions([36] * 500)))
    assert np.mean(lengths) / 36 == pytest.approx(0.8, abs=0.01)  # five standard deviations
    assert np.var(lengths) == pytest.approx(36 * 0.2 * 0.8, rel=0.3)  # each region for itself


def test_a_fifth_of_the_tokens_is_touched_half_masked_a_tenth_random_the_rest_dropped() -> None:
    word, n = 7, 500 * 40
    items = Items(torch.full((500, 40), word), torch.full((500,), 40))
    after = augmentation()(items)
    kept = sum(checked_lengths(after))
    real = torch.cat([after.values[row, :length] for row, length in enumerate(checked_lengths(after))])
    masked, same = int((real == WORDS).sum()), int((real == word).sum())
    replaced = kept - masked - same
    assert 1 - kept / n == pytest.approx(0.2 * 0.4, abs=0.01)
    assert masked / n == pytest.approx(0.2 * 0.5, abs=0.011)
    assert replaced / n == pytest.approx(0.2 * 0.1 * (WORDS - 1) / WORDS, abs=0.005)
    others = torch.bincount(real[(real != WORDS) & (real != word)], minlength=WORDS)
    assert set(others.nonzero().squeeze(1).tolist()) == set(range(WORDS)) - {word}  # any word of the vocabulary


def test_surviving_tokens_keep_their_order() -> None:
    items = Items(torch.arange(1, 26).repeat(200, 1), torch.full((200,), 25))
    after = Augmentation(np.random.default_rng(0), mask_id=10**6)(items)  # so a random word is hardly ever below 26
    for row, length in enumerate(checked_lengths(after)):
        ids = [token for token in after.values[row, :length].tolist() if token <= 25]
        assert sum(a >= b for a, b in pairwise(ids)) <= 1  # one random word may be below 26


def test_both_sides_of_a_batch_are_augmented() -> None:
    loader = PairLoader(one_to_one(regions(4, per_item=36), tokens([30] * 4)), CPU)
    plain, small = loader.batch(np.arange(4)), loader.batch(np.arange(4), np.random.default_rng(0))
    for before, after in ((plain.left, small.left), (plain.right, small.right)):
        assert sum(checked_lengths(after)) < sum(lengths_of(before))
    assert small.pairs.tolist() == plain.pairs.tolist()


# ---------------------------------------------------------------- corrupted items and crossed pairs


@given(ragged, st.integers(0, 3), st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0]))
def test_words_become_unknown_and_marks_stay(lengths: list[int], extra: int, seed: int, rate: float) -> None:
    items = token_items(lengths, seed=seed, extra=extra)
    torch.manual_seed(seed)
    found = corrupt(items, rate, 3)
    assert found.lengths is items.lengths
    changed = found.values != items.values
    assert (found.values[changed] == 3).all()
    assert not changed[items.values <= 3].any()
    if rate == 1:
        assert changed[items.values > 3].all()
    if rate == 0:
        assert not changed.any()


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_regions_become_other_regions_of_their_item(rate: float) -> None:
    items = numbered_regions([40] * 50)
    values = corrupt(replace(items, lengths=None), rate, 3).values
    own = items.values
    same = (values == own).all(dim=-1)
    assert all(any(torch.equal(value, region) for region in own[0]) for value in values[0])
    assert float((~same).float().mean()) == pytest.approx(rate * 39 / 40, abs=0.05)


def test_vectors_are_not_corrupted() -> None:
    items = Items(torch.rand(4, 6))
    assert corrupt(items, 1.0, 3) is items


def test_a_crossed_batch_has_items_of_different_pairs() -> None:
    pairs = Pairs(regions(3), tokens([4, 1, 2, 6]), link=np.array([2, 0, 0, 1]))
    loader = PairLoader(pairs, CPU)
    batch = loader.crossed_batch(np.array([0, 3]), np.array([2, 1]))
    assert torch.equal(batch.left.values, loader.batch(np.array([0, 3])).left.values)
    assert torch.equal(batch.right.values, loader.batch(np.array([2, 1])).right.values)
    assert batch.pairs.tolist() == [2, 1]
    assert batch.left_rows.tolist() == batch.left_groups.tolist() == [2, 1]


# ---------------------------------------------------------------- prefetch


@given(st.integers(0, 12), st.integers(1, 5))
def test_prefetch_is_map(count: int, depth: int) -> None:
    assert list(prefetch(range(count), lambda job: job * job, depth)) == [job * job for job in range(count)]
    assert not [thread for thread in threading.enumerate() if "work" in thread.name]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_an_error_surfaces_where_its_batch_would_have(bad: int, depth: int) -> None:
    def make(job: int) -> int:
        if job == bad:
            raise KeyError(f"job {job}")
        return job

    results = prefetch(range(5), make, depth)
    assert [next(results) for _ in range(bad)] == list(range(bad))
    with pytest.raises(KeyError, match=f"job {bad}"):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize("taken", [1, 3])
def test_leaving_early_stops_the_thread(taken: int) -> None:
    before, made = set(threading.enumerate()), []

    def make(job: int) -> int:
        made.append(job)
        return job

    results = prefetch(range(1000), make, depth=2)
    assert set(threading.enumerate()) == before  # nothing starts before the first batch is asked for
    assert [next(results) for _ in range(taken)] == list(range(taken))
    assert len(set(threading.enumerate()) - before) == 1
    results.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) == before
    assert taken <= len(made) <= taken + 3  # two wait in the queue, one in the hand


def test_leaving_a_for_loop_stops_the_thread() -> None:
    before = set(threading.enumerate())

    def take_one() -> int:
        for result in prefetch(range(1000), lambda job: job):
            return result
        return -1

    assert take_one() == 0
    assert set(threading.enumerate()) == before


def test_work_is_done_beside_the_consumer() -> None:
    threads = set(prefetch(range(3), lambda _: threading.get_ident()))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
