from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw, ImageFilter

from mispair.encoders.encoders import load_image
from mispair.encoders.image_hash import DifferenceHash, as_hashes


def photo(seed: int, side: int = 200) -> Image.Image:
    """Clouds of colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)


def bits_of(image: Image.Image) -> npt.NDArray[np.uint8]:
    return np.unpackbits(DifferenceHash().prepare(image))


def test_bits_are_the_signs_of_differences_between_neighbours() -> None:
    cells = np.random.default_rng(0).integers(0, 256, (9, 9))
    image = Image.fromarray(np.kron(cells, np.ones((8, 8))).astype(np.uint8)).convert("RGB")
    along, down = (np.asarray(image.convert("L").resize(size, Image.Resampling.BICUBIC)) for size in ((9, 8), (8, 9)))
    expected = [along[row, column + 1] > along[row, column] for row in range(8) for column in range(8)]
    expected += [down[row + 1, column] > down[row, column] for row in range(8) for column in range(8)]
    assert (bits_of(image) != np.array(expected)).sum() <= 2  # PIL reduces large images before it resizes them


def test_a_drawing_on_white_has_no_hash() -> None:
    drawing = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(drawing).ellipse((70, 80, 130, 120), fill="black")
    assert not bits_of(drawing).any()
    assert bits_of(photo(0)).any()


@pytest.mark.parametrize("edit", ["small", "large", "jpeg", "watermark", "blurred", "grey"])
def test_copies_differ_in_few_bits(edit: str, tmp_path: Path) -> None:
    for seed in range(20):
        image = copy = photo(seed)
        if edit in ("small", "large"):
            copy = image.resize((60, 60) if edit == "small" else (900, 700))
        elif edit == "jpeg":
            image.save(tmp_path / "a.jpg", quality=20)
            copy = load_image(tmp_path / "a.jpg")
        elif edit == "watermark":
            copy = image.copy()
            ImageDraw.Draw(copy).text((20, 90), "EXAMPLE", fill="white", font_size=24)
        elif edit == "blurred":
            copy = image.filter(ImageFilter.GaussianBlur(3))
        else:
            copy = image.convert("L").convert("RGB")
        assert (bits_of(image) != bits_of(copy)).sum() <= 11
        assert (bits_of(image) != bits_of(photo(seed + 100))).sum() > 32


def test_hashes_pass_through_the_cache_of_encodings() -> None:
    encoder = DifferenceHash()
    items = [encoder.prepare(photo(seed)) for seed in range(3)]
    found = as_hashes(encoder.encode(items).astype(np.float16))
    assert found.shape == (3, 2)
    np.testing.assert_array_equal(found.view(np.uint8), np.stack(items))
