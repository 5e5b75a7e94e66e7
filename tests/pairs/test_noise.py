import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import ConflictError, DamagedError, DataError, InvalidValueError, NotFoundError, ShapeError
from mispair.pairs import noise
from mispair.pairs.noise import (  # fmt: skip
    add_noise,
    caption_noise,
    group_noise,
    image_noise,
    load_noise,
    mismatch,
    near_noise,
    nearest,
    neighbour_groups,
    noise_index,
    save_noise,
)
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.arrays import FloatArray, IntArray
from refusals import refused

FORMATS = Path(__file__).parents[3] / "shared/data/formats"
published = pytest.mark.skipif(not FORMATS.exists(), reason="needs the published files")

images = st.integers(1, 60)
per_image = st.integers(1, 6)
ratios = st.floats(0, 1)
seeds = st.integers(0, 2**32 - 1)


def make_pairs(n_images: int = 20, captions: int = 5) -> Pairs:
    n = n_images * captions
    return Pairs(Vectors(np.zeros((n_images, 2))), Vectors(np.zeros((n, 3))), np.arange(n) // captions)


def clouds(n: int, width: int = 8, seed: int = 0) -> FloatArray:
    """Vectors with structure: a few centres and something around them."""
    random = np.random.RandomState(seed)
    centres = random.standard_normal((max(1, n // 10), width))
    return np.asarray(centres[random.randint(len(centres), size=n)] + 0.5 * random.standard_normal((n, width)))


def cosines_by_loops(features: FloatArray) -> FloatArray:
    """Cosine of the centred mean-pooled items, one pair of items after the other, in double precision."""
    items = [np.mean(np.atleast_2d(item).astype(np.float64), axis=0) for item in features]
    centre = sum(items) / len(items)
    found = np.zeros((len(items), len(items)))
    for i, a in enumerate(items):
        for j, b in enumerate(items):
            found[i, j] = np.dot(a - centre, b - centre) / np.linalg.norm(a - centre) / np.linalg.norm(b - centre)
    return found


def is_near(cosines: FloatArray, row: int, other: int, k: int = 10) -> bool:
    """Whether fewer than k others are nearer; a hair is left for the rounding of single precision."""
    nearer = sum(cosines[row, item] > cosines[row, other] + 1e-5 for item in range(len(cosines)) if item != row)
    return other != row and nearer < k


def protocol_of_ncr(n_caps: int, im_div: int, ratio: float, seed: int) -> IntArray:
    """The steps of peers.md 1.5 as they stand there, with the global generator."""
    np.random.seed(seed)
    t2i = np.arange(n_caps) // im_div
    perm = np.arange(n_caps)
    np.random.shuffle(perm)
    sel = perm[: int(ratio * n_caps)]
    vals = t2i[sel].copy()
    np.random.shuffle(vals)
    t2i[sel] = vals
    return t2i


def protocol_of_decl(n_images: int, ratio: float, seed: int) -> IntArray:
    np.random.seed(seed)
    inx = np.arange(n_images)
    order = np.arange(n_images)
    np.random.shuffle(order)
    chosen = order[: int(ratio * n_images)]
    shuffled = np.array(chosen)
    np.random.shuffle(shuffled)
    inx[chosen] = shuffled
    return inx


@given(images, per_image, ratios, seeds)
def test_caption_noise_equals_the_peers_protocol(n: int, im_div: int, ratio: float, seed: int) -> None:
    noisy = caption_noise(np.arange(n * im_div) // im_div, ratio, seed)
    np.testing.assert_array_equal(noisy, protocol_of_ncr(n * im_div, im_div, ratio, seed))


@given(images, ratios, seeds)
def test_image_noise_equals_the_peers_protocol(n: int, ratio: float, seed: int) -> None:
    np.testing.assert_array_equal(image_noise(n, ratio, seed), protocol_of_decl(n, ratio, seed))


@given(images, per_image, ratios, seeds)
def test_caption_noise_only_moves_images_around(n: int, im_div: int, ratio: float, seed: int) -> None:
    link = np.arange(n * im_div) // im_div
    before = link.copy()
    noisy = caption_noise(link, ratio, seed)
    assert noisy.dtype == np.int64
    np.testing.assert_array_equal(link, before)
    np.testing.assert_array_equal(np.sort(noisy), link)
    assert np.count_nonzero(noisy != link) <= int(ratio * len(link))


@given(images, ratios, seeds)
def test_the_selected_count_is_the_truncated_product(n: int, ratio: float, seed: int) -> None:
    # With every left row different, only chance fixed points can lower the count below what was selected.
    moved = np.count_nonzero(image_noise(n, ratio, seed) != np.arange(n))
    np.random.seed(seed)
    np.random.shuffle(np.arange(n))
    selected = np.arange(int(ratio * n))
    np.random.shuffle(selected)
    fixed = np.count_nonzero(selected == np.arange(len(selected)))
    assert moved == int(ratio * n) - fixed


@given(n=images, im_div=per_image, ratio=ratios, seed=seeds)
def test_a_saved_index_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, n: int, im_div: int, ratio: float, seed: int
) -> None:
    path = tmp_path_factory.mktemp("noise") / "deep" / "x_0.4.npy"
    link = np.arange(n * im_div) // im_div
    noisy = caption_noise(link, ratio, seed)
    save_noise(path, noisy)
    np.testing.assert_array_equal(load_noise(path, link, n), noisy)
    moved = image_noise(n, ratio, seed)
    save_noise(path, moved)
    np.testing.assert_array_equal(load_noise(path, link, n), moved[link])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (np.zeros(99, np.int64), "99"),
        (np.zeros((20, 5), np.int64), "(20, 5)"),
        (np.zeros(100, np.float64), "float64"),
        (np.zeros(100, np.bool_), "bool"),
        (np.full(100, 20), "20 to 20"),
        (np.full(100, -1), "-1 to -1"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: npt.NDArray[Any], names: str) -> None:
    np.save(tmp_path / "noise.npy", index)
    with refused(ShapeError, tmp_path / "noise.npy", names):
        load_noise(tmp_path / "noise.npy", np.arange(100) // 5, 20)


def test_truncated_and_pickled_indices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.npy"
    save_noise(path, np.arange(100) // 5)
    path.write_bytes(path.read_bytes()[:-8])
    with refused(DamagedError, path):
        load_noise(path, np.arange(100) // 5, 20)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with refused(DamagedError, path):
        load_noise(path, np.arange(100) // 5, 20)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, 40, float("nan")])
def test_a_ratio_outside_zero_to_one_is_refused(ratio: float) -> None:
    with refused(InvalidValueError, "noise_ratio", names="0"):
        add_noise(make_pairs(), noise_ratio=ratio, seed=0)


def test_a_seed_that_numpy_cannot_take_is_refused() -> None:
    with refused(InvalidValueError, "seed", names="-1"):
        add_noise(make_pairs(), noise_ratio=0.4, seed=-1)


def test_an_unknown_kind_is_refused() -> None:
    with refused(InvalidValueError, "kind", names="caption"):
        add_noise(make_pairs(), noise_ratio=0.4, seed=0, kind="word")  # type: ignore[arg-type]


def test_add_noise_keeps_the_truth() -> None:
    pairs = make_pairs()
    noisy = add_noise(pairs, noise_ratio=0.4, seed=1)
    assert noisy.truth is pairs.link
    assert noisy.mismatched is not None
    assert noisy.mismatched.mean() == mismatch(noisy.link, pairs.link) > 0


def test_image_noise_moves_all_captions_of_an_image_together() -> None:
    link = add_noise(make_pairs(), noise_ratio=0.5, seed=1, kind="image").link.reshape(20, 5)
    assert (link == link[:, :1]).all()
    assert (link[:, 0] != np.arange(20)).any()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), ratios, seeds)
def test_image_noise_moves_all_rows_of_an_image_together(rows: list[int], ratio: float, seed: int) -> None:
    groups = np.array(rows)
    moved = image_noise(len(rows), ratio, seed, groups=groups)
    kinds = np.unique(groups)
    went = [set(groups[moved[groups == kind]]) for kind in kinds]
    assert all(len(to) == 1 for to in went)
    assert sorted(next(iter(to)) for to in went) == kinds.tolist()  # images are permuted ...
    expected = protocol_of_decl(len(kinds), ratio, seed)
    np.testing.assert_array_equal(groups[moved], kinds[expected][np.searchsorted(kinds, groups)])
    for kind, to in zip(kinds, went, strict=True):  # ... and all rows of an image are used, as far as they are needed
        sizes = np.count_nonzero(groups == kind), np.count_nonzero(groups == next(iter(to)))
        assert len(set(moved[groups == kind])) == min(sizes)


def test_the_captions_of_an_image_that_is_stored_with_each_stay_together(tmp_path: Path) -> None:
    groups = np.arange(300) // 5
    pairs = Pairs(Vectors(clouds(60).repeat(5, axis=0)), Vectors(np.zeros((300, 3))), np.arange(300), groups=groups)
    noisy = add_noise(pairs, noise_ratio=0.4, seed=0, kind="image", file=tmp_path / "noise.npy")
    now = groups[noisy.link].reshape(60, 5)
    assert (now == now[:, :1]).all()
    assert noisy.mismatched is not None
    assert noisy.mismatched.mean() == pytest.approx(0.4, abs=0.05)
    again = add_noise(pairs, noise_ratio=0.4, seed=0, kind="image", file=tmp_path / "noise.npy")
    np.testing.assert_array_equal(again.link, noisy.link)


def test_a_row_of_the_same_image_is_no_mismatch(tmp_path: Path) -> None:
    groups = np.arange(100) // 50
    pairs = Pairs(Vectors(clouds(100)), Vectors(np.zeros((100, 3))), np.arange(100), groups=groups)
    noisy = add_noise(pairs, noise_ratio=0.8, seed=0, file=tmp_path / "noise.npy")
    assert noisy.mismatched is not None
    found = mismatch(noisy.link, pairs.link, groups)
    assert found == noisy.mismatched.mean() < 0.5 < mismatch(noisy.link, pairs.link)
    with pytest.warns(UserWarning, match=f"{found:.1%} of the pairs are mismatched by this noise index"):
        add_noise(pairs, noise_ratio=0.8, seed=0, file=tmp_path / "noise.npy")


@pytest.mark.parametrize(("kind", "length"), [("caption", 100), ("image", 20)])
def test_an_absent_file_is_made_and_then_read(tmp_path: Path, kind: Any, length: int) -> None:
    path = tmp_path / "out" / "set_0.4.npy"
    made = add_noise(make_pairs(), noise_ratio=0.4, seed=3, kind=kind, file=path)
    stored = np.load(path, allow_pickle=False)
    assert stored.shape == (length,)
    assert stored.dtype == np.int64
    again = add_noise(make_pairs(), noise_ratio=0, seed=99, file=path)  # seed and kind no longer matter
    np.testing.assert_array_equal(again.link, made.link)


def test_an_implausible_file_is_used_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "set_0.4.npy"
    save_noise(path, caption_noise(np.arange(100) // 5, 0.8, 0))
    with pytest.warns(UserWarning, match=r"are mismatched by this noise index, but the noise ratio is 40\.0%"):
        add_noise(make_pairs(), noise_ratio=0.4, seed=0, file=path)


def test_a_mistyped_file_with_no_ratio_is_refused_instead_of_training_clean(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "typo.npy"):
        add_noise(make_pairs(), noise_ratio=0, seed=0, file=tmp_path / "typo.npy")


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError):
        save_noise(tmp_path / "file" / "noise.npy", np.arange(3))


@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 99))
def test_nearest_equals_plain_loops(n: int, k: int, seed: int) -> None:
    vectors = clouds(n, seed=seed)
    found, cosines = nearest(vectors, k), cosines_by_loops(vectors)
    assert found.shape == (n, min(k, n - 1))
    for row in range(n):
        assert len(set(found[row])) == len(found[row])
        assert all(is_near(cosines, row, other, k) for other in found[row])


def test_nearest_is_the_same_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clouds(50)
    whole = np.sort(nearest(vectors, 10))
    monkeypatch.setattr(noise, "_BLOCK", 120)
    np.testing.assert_array_equal(np.sort(nearest(vectors, 10)), whole)


def test_of_many_rows_those_of_one_part_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    whole = nearest(vectors, 3)
    compared: list[int] = []
    compare = noise._nearest

    def comparing(unit: FloatArray, k: int) -> IntArray:
        compared.append(len(unit))
        return compare(unit, k)

    monkeypatch.setattr(noise, "_nearest", comparing)
    monkeypatch.setattr(noise, "_COMPARED", 60)
    found = nearest(vectors, 3)
    assert compared == [50] * 4
    assert (found != np.arange(200)[:, None]).all()
    alike = [len(set(a) & set(b)) for a, b in zip(found.tolist(), whole.tolist(), strict=True)]
    assert np.mean(alike) > 2.5  # all but those beside a cut


@given(images, per_image, ratios, seeds, st.booleans())
def test_near_noise_exchanges_neighbours(n: int, im_div: int, ratio: float, seed: int, regions: bool) -> None:
    features = clouds(3 * n).reshape(n, 3, 8) if regions else clouds(n)
    link = np.random.RandomState(seed).permutation(np.arange(n * im_div) // im_div)
    before = link.copy()
    noisy = near_noise(link, features, ratio, seed)
    assert noisy.dtype == np.int64
    np.testing.assert_array_equal(link, before)
    np.testing.assert_array_equal(np.sort(noisy), np.sort(link))
    moved = np.flatnonzero(noisy != link)
    assert len(moved) <= ratio * len(link)
    cosines = cosines_by_loops(features) if len(moved) else np.zeros((0, 0))  # one item alone has no direction
    assert all(is_near(cosines, link[pair], noisy[pair]) for pair in moved)
    exchanges = np.unique(np.sort(np.stack([link[moved], noisy[moved]]), axis=0), axis=1, return_counts=True)[1]
    assert (exchanges % 2 == 0).all()  # a got b as often as b got a


@given(st.integers(30, 60), per_image, st.floats(0, 0.6), seeds)
def test_near_noise_meets_its_share_within_one_exchange(n: int, im_div: int, ratio: float, seed: int) -> None:
    link = np.arange(n * im_div) // im_div
    moved = np.count_nonzero(near_noise(link, clouds(n), ratio, seed) != link)
    assert ratio * len(link) - 2 < moved <= ratio * len(link)


def test_near_noise_of_everything_stops_where_no_partner_is_left() -> None:
    features, link = clouds(60), np.arange(300) // 5
    noisy, cosines = near_noise(link, features, 1.0, 0), cosines_by_loops(features)
    left = np.flatnonzero(noisy == link)
    assert 0 < len(left) < 100
    for pair in left:
        for other in left:
            a, b = link[pair], link[other]
            assert not (a != b and is_near(cosines, a, b) and is_near(cosines, b, a))


def test_copies_of_an_item_never_exchange() -> None:
    features = np.repeat(clouds(12), 5, axis=0)
    link, photo = np.arange(60), np.arange(60) // 5
    noisy = near_noise(link, features, 1.0, 0)  # copies are known by their features ...
    assert np.count_nonzero(noisy != link) > 40
    assert not ((noisy != link) & (photo[noisy] == photo)).any()
    features += 1e-3 * clouds(60, seed=1)
    noisy = near_noise(link, features, 1.0, 0, groups=photo)  # ... or by their group
    assert np.count_nonzero(noisy != link) > 40
    assert not ((noisy != link) & (photo[noisy] == photo)).any()
    cosines = cosines_by_loops(features[::5])
    assert all(is_near(cosines, photo[row], photo[noisy[row]]) for row in np.flatnonzero(noisy != link))


@given(st.integers(1, 150), per_image, ratios, seeds)
def test_group_noise_lets_whole_groups_change_place(n: int, im_div: int, ratio: float, seed: int) -> None:
    groups = neighbour_groups(clouds(n, seed=seed % 7))
    link = np.random.RandomState(seed).permutation(np.arange(n * im_div) // im_div)
    before = link.copy()
    noisy = group_noise(link, groups, ratio, seed)
    assert noisy.dtype == np.int64
    np.testing.assert_array_equal(link, before)
    np.testing.assert_array_equal(np.sort(noisy), np.sort(link))
    partners: dict[int, set[int]] = {}
    for old, new in zip(groups[link], groups[noisy], strict=True):
        partners.setdefault(int(old), set()).add(int(new))
    moved = {group: new - {group} for group, new in partners.items() if new != {group}}
    for group, new in moved.items():
        (other,) = new
        assert moved[other] == {group}
        sizes = [np.count_nonzero(groups[link] == number) for number in (group, other)]
        assert np.count_nonzero((groups[link] == group) & (noisy != link)) == min(sizes)  # all that find a place
    exchange = 2 * im_div * np.bincount(groups).max()
    reachable = len(link) if n > 1 else 0
    assert abs(np.count_nonzero(noisy != link) - min(ratio * len(link), reachable)) <= exchange


def test_all_captions_of_an_image_stay_together_when_groups_change_place() -> None:
    noisy = group_noise(np.arange(1200) // 5, neighbour_groups(clouds(240)), 0.5, 0).reshape(240, 5)
    assert (noisy == noisy[:, :1]).all()
    assert np.count_nonzero(noisy[:, 0] != np.arange(240)) == 120


def test_given_groups_of_other_sizes_exchange_what_they_can() -> None:
    groups = np.array([5, 5, 5, -1, -1, 7, 7, 7])  # the smallest of three stays alone
    np.testing.assert_array_equal(group_noise(np.arange(8), groups, 1.0, 0), [5, 6, 7, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(group_noise(np.arange(5), groups[:5], 1.0, 0), [3, 4, 2, 0, 1])


@given(st.integers(1, 200), st.integers(1, 4))
def test_neighbour_groups_are_even_in_number_and_cut_along_the_first_direction(n: int, copies: int) -> None:
    along = np.random.RandomState(n).permutation(n).astype(np.float64)
    features = np.stack([along, 0.01 * np.sin(along)], axis=1).repeat(copies, axis=0)
    found, order = neighbour_groups(features), np.argsort(along.repeat(copies), kind="stable")
    turns = np.abs(np.diff(found[order]))
    assert (turns <= np.maximum(1, copies)).all()
    assert (found.reshape(n, copies) == found[::copies, None]).all()  # copies stay together
    assert (np.diff(found[order]) >= 0).all() or (np.diff(found[order]) <= 0).all()
    if copies == 1 and n > 1:
        sizes = np.bincount(found)
        assert len(sizes) % 2 == 0
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == (10 if 10 <= n < 240 else n // 2 * 2)


def test_neighbour_groups_of_a_large_set_have_twenty_items() -> None:
    assert (np.bincount(neighbour_groups(clouds(2000))) == 20).all()


def test_the_first_direction_is_that_of_the_covariance() -> None:
    features = clouds(200) * np.linspace(3, 1, 8)
    centred = features - features.mean(axis=0)
    expected = centred @ np.linalg.eigh(centred.T @ centred)[1][:, -1]
    found = noise._first_direction(features)
    assert abs(np.corrcoef(found, expected)[0, 1]) > 0.999


@pytest.mark.parametrize("kind", ["near", "group"])
def test_hard_noise_is_determined_by_its_seed(kind: Any) -> None:
    pairs = Pairs(Vectors(clouds(240)), Vectors(np.zeros((1200, 3))), np.arange(1200) // 5)
    first, again, other = (add_noise(pairs, noise_ratio=0.5, seed=seed, kind=kind).link for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert mismatch(first, pairs.link) == pytest.approx(0.5)
    np.testing.assert_array_equal(add_noise(pairs, noise_ratio=0, seed=4, kind=kind).link, pairs.link)


@pytest.mark.parametrize("kind", ["near", "group"])
def test_hard_noise_is_stored_with_one_row_a_pair(tmp_path: Path, kind: Any) -> None:
    pairs = Pairs(Regions(clouds(300).reshape(100, 3, 8)), Vectors(np.zeros((500, 3))), np.arange(500) // 5)
    made = add_noise(pairs, noise_ratio=0.4, seed=3, kind=kind, file=tmp_path / "noise.npy")
    assert np.load(tmp_path / "noise.npy", allow_pickle=False).shape == (500,)
    np.testing.assert_array_equal(load_noise(tmp_path / "noise.npy", pairs.link, 100), made.link)


@pytest.mark.parametrize("kind", ["near", "group"])
def test_hard_noise_needs_features_that_are_finite(kind: Any) -> None:
    words = Tokens(np.zeros(4, np.int32), np.arange(5), Vocabulary.build(["a b"]))
    texts = Pairs(words, Vectors(np.zeros((4, 3))), np.arange(4), name="sentences")
    with refused(ConflictError, "kind", names=f"{kind}"):
        add_noise(texts, noise_ratio=0.5, seed=0, kind=kind)
    features = clouds(20)
    features[7, 1] = np.nan
    with refused(DamagedError, names="7"):
        add_noise(Pairs(Vectors(features), Vectors(features), np.arange(20)), noise_ratio=0.5, seed=0, kind=kind)
    with refused(InvalidValueError, "seed", names="-1"):
        add_noise(make_pairs(), noise_ratio=0.4, seed=-1, kind=kind)


@pytest.mark.parametrize("kind", ["near", "group"])
def test_a_share_that_cannot_be_met_is_said(kind: Any) -> None:
    pairs = Pairs(Vectors(clouds(1)), Vectors(clouds(5)), np.zeros(5, np.int64), name="one image")
    with pytest.warns(
        UserWarning, match=rf"one image: noise of kind '{kind}' mismatches 0\.0% of the pairs instead of 60\.0%"
    ):
        link = noise_index(pairs, noise_ratio=0.6, seed=0, kind=kind)
    np.testing.assert_array_equal(link, pairs.link)
    whole = Pairs(Vectors(clouds(240)), Vectors(clouds(240)), np.arange(240))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noise_index(whole, noise_ratio=0.5, seed=0, kind=kind)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"pairs": "my_data"}, "str"),
        ({"noise_ratio": "0.4"}, "'0.4'"),
        ({"noise_ratio": None}, "None"),
        ({"seed": 1.5}, "1.5"),
        ({"seed": None}, "None"),
    ],
)
def test_what_is_no_number_or_no_pairs_is_refused(wrong: dict[str, Any], names: str) -> None:
    with refused(InvalidValueError, next(iter(wrong)), names):
        add_noise(**{"pairs": make_pairs(), "noise_ratio": 0.4, "seed": 0, **wrong})
    add_noise(make_pairs(), noise_ratio=np.float32(0.4), seed=np.int64(3))  # type: ignore[arg-type]


@published
@pytest.mark.parametrize("name", ["f30k_precomp_0.4.npy", "noise_inx_0.4.npy"])
def test_published_files_have_their_mismatch(name: str) -> None:
    clean = np.arange(145_000) // 5
    assert mismatch(load_noise(FORMATS / name, clean, 29_000), clean) == pytest.approx(0.4, abs=1e-4)
