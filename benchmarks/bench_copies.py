"""Changed copies of photos that an audit finds: `make bench-copies ARGS="PHOTOS.csv IMAGES OUT"`.

PHOTOS.csv has a line for each caption: image_path,caption. A changed copy of every seventh photo is added with another
caption of its photo; an audit for each change.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from PIL import Image, ImageDraw
from tyro.conf import Positional

import mispair
from common import run

STEP = 7


def half(photo: Image.Image) -> Image.Image:
    return photo.resize((photo.width // 2, photo.height // 2))


def marked(photo: Image.Image) -> Image.Image:
    """The photo with a dark bar and a text on its lower sixth."""
    photo, top = photo.copy(), photo.height * 5 // 6
    pen = ImageDraw.Draw(photo)
    pen.rectangle((0, top, photo.width, photo.height), fill=(20, 20, 20))
    pen.text((8, top + photo.height // 20), "example.com 2024", fill=(240, 240, 240))
    return photo


def cropped(share: float) -> Callable[[Image.Image], Image.Image]:
    def crop(photo: Image.Image) -> Image.Image:
        across, down = (round(size * (1 - share) / 2) for size in photo.size)
        return photo.crop((across, down, photo.width - across, photo.height - down))

    return crop


# Each change, and the quality of the JPEG.
CHANGES: dict[str, tuple[Callable[[Image.Image], Image.Image], int]] = {
    "unchanged, saved again": (lambda photo: photo, 90),
    "half the size": (half, 90),
    "JPEG quality 30": (lambda photo: photo, 30),
    "watermark on the lower sixth": (marked, 90),
    "crop to 90 % a side": (cropped(0.9), 90),
    "crop to 75 % a side": (cropped(0.75), 90),
}


def main(photos: Positional[Path], images: Positional[Path], out: Positional[Path]) -> None:
    """Print a row for each change.

    Args:
        photos: Table with a line for each caption: image_path,caption.
        images: Folder of the images.
        out: Folder of the copies.
    """
    captions: dict[str, list[str]] = {}
    with photos.open(encoding="utf-8", newline="") as file:
        for name, caption in list(csv.reader(file))[1:]:
            captions.setdefault(name, []).append(caption)
    names = list(captions)
    copied = names[::STEP]
    print("| change | copies | found | different photos grouped |\n|---|---|---|---|")
    for number, (what, (change, quality)) in enumerate(CHANGES.items()):
        folder = out / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        for name in copied:
            with Image.open(images / name) as photo:
                change(photo.convert("RGB")).save(folder / name, "JPEG", quality=quality)
        paths = [str((images / name).resolve()) for name in names] + [str((folder / name).resolve()) for name in copied]
        texts = [captions[name][0] for name in names] + [captions[name][-1] for name in copied]
        found = mispair.audit(paths, texts)
        photo_of = [*names, *copied]
        pairs = [pair for group in found.near_duplicates[0] for pair in combinations(sorted(group.tolist()), 2)]
        hits = sum(photo_of[one] == photo_of[other] for one, other in pairs)
        print(f"| {what} | {len(copied)} | {hits} | {len(pairs) - hits} |", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
