from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mispair.data.noise import add_noise, caption_noise, image_noise, load_noise, mismatch, save_noise
from mispair.data.pairs import IntArray, Pairs, Vectors
from mispair.errors import DataError

FORMATS = Path(__file__).parents[3] / "shared/data/formats"
published = pytest.mark.skipif(not FORMATS.exists(), reason="needs the published files")

images = st.integers(1, 60)
per_image = st.integers(1, 6)
ratios = st.floats(0, 1)
seeds = st.integers(0, 2**32 - 1)


def make_pairs(n_images: int = 20, captions: int = 5) -> Pairs:
    n = n_images * captions
    return Pairs(Vectors(np.zeros((n_images, 2))), Vectors(np.zeros((n, 3))), np.arange(n) // captions)


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


@settings(deadline=None)
@given(images, per_image, ratios, seeds)
def test_caption_noise_equals_the_peers_protocol(n: int, im_div: int, ratio: float, seed: int) -> None:
    noisy = caption_noise(np.arange(n * im_div) // im_div, ratio, seed)
    np.testing.assert_array_equal(noisy, protocol_of_ncr(n * im_div, im_div, ratio, seed))


@settings(deadline=None)
@given(images, ratios, seeds)
def test_image_noise_equals_the_peers_protocol(n: int, ratio: float, seed: int) -> None:
    np.testing.assert_array_equal(image_noise(n, ratio, seed), protocol_of_decl(n, ratio, seed))


@settings(deadline=None)
@given(images, per_image, ratios, seeds)
def test_caption_noise_only_moves_images_around(n: int, im_div: int, ratio: float, seed: int) -> None:
    link = np.arange(n * im_div) // im_div
    before = link.copy()
    noisy = caption_noise(link, ratio, seed)
    assert noisy.dtype == np.int64
    np.testing.assert_array_equal(link, before)
    np.testing.assert_array_equal(np.sort(noisy), link)
    assert np.count_nonzero(noisy != link) <= int(ratio * len(link))


@settings(deadline=None)
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


@settings(deadline=None)
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
    ("index", "sentence"),
    [
        (np.zeros(99, np.int64), r"99 entries; expected 100 \(one a pair\) or 20 \(one an image\)"),
        (np.zeros((20, 5), np.int64), "expected 1 dimension"),
        (np.zeros(100, np.float64), "float64; expected whole numbers"),
        (np.zeros(100, np.bool_), "expected whole numbers"),
        (np.full(100, 20), "rows 20 to 20, but the training set has rows 0 to 19"),
        (np.full(100, -1), "rows -1 to -1"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: npt.NDArray[Any], sentence: str) -> None:
    np.save(tmp_path / "noise.npy", index)
    with pytest.raises(DataError, match=sentence):
        load_noise(tmp_path / "noise.npy", np.arange(100) // 5, 20)


def test_truncated_and_pickled_indices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.npy"
    save_noise(path, np.arange(100) // 5)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="truncated"):
        load_noise(path, np.arange(100) // 5, 20)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="pickled"):
        load_noise(path, np.arange(100) // 5, 20)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, 40, float("nan")])
def test_a_ratio_outside_zero_to_one_is_refused(ratio: float) -> None:
    with pytest.raises(DataError, match="from 0 to 1"):
        add_noise(make_pairs(), ratio=ratio, seed=0)


def test_a_seed_that_numpy_cannot_take_is_refused() -> None:
    with pytest.raises(DataError, match="noise seed is -1"):
        add_noise(make_pairs(), ratio=0.4, seed=-1)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DataError, match="'word'; expected 'caption' or 'image'"):
        add_noise(make_pairs(), ratio=0.4, seed=0, kind="word")  # type: ignore[arg-type]


def test_add_noise_keeps_the_truth() -> None:
    pairs = make_pairs()
    noisy = add_noise(pairs, ratio=0.4, seed=1)
    assert noisy.truth is pairs.link
    assert noisy.mismatched is not None
    assert noisy.mismatched.mean() == mismatch(noisy.link, pairs.link) > 0


def test_image_noise_moves_all_captions_of_an_image_together() -> None:
    link = add_noise(make_pairs(), ratio=0.5, seed=1, kind="image").link.reshape(20, 5)
    assert (link == link[:, :1]).all()
    assert (link[:, 0] != np.arange(20)).any()


@pytest.mark.parametrize(("kind", "length"), [("caption", 100), ("image", 20)])
def test_an_absent_file_is_made_and_then_read(tmp_path: Path, kind: Any, length: int) -> None:
    path = tmp_path / "out" / "set_0.4.npy"
    made = add_noise(make_pairs(), ratio=0.4, seed=3, kind=kind, file=path)
    stored = np.load(path, allow_pickle=False)
    assert stored.shape == (length,)
    assert stored.dtype == np.int64
    again = add_noise(make_pairs(), ratio=0, seed=99, file=path)  # seed and kind no longer matter
    np.testing.assert_array_equal(again.link, made.link)


def test_an_implausible_file_is_used_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "set_0.4.npy"
    save_noise(path, caption_noise(np.arange(100) // 5, 0.8, 0))
    with pytest.warns(UserWarning, match=r"are mismatched by this noise index, but a ratio of 40\.0%"):
        add_noise(make_pairs(), ratio=0.4, seed=0, file=path)


def test_a_mistyped_file_with_no_ratio_is_refused_instead_of_training_clean(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such noise index"):
        add_noise(make_pairs(), ratio=0, seed=0, file=tmp_path / "typo.npy")


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        save_noise(tmp_path / "file" / "noise.npy", np.arange(3))


@published
@pytest.mark.parametrize("name", ["f30k_precomp_0.4.npy", "noise_inx_0.4.npy"])
def test_published_files_have_their_mismatch(name: str) -> None:
    clean = np.arange(145_000) // 5
    assert mismatch(load_noise(FORMATS / name, clean, 29_000), clean) == pytest.approx(0.4, abs=1e-4)
