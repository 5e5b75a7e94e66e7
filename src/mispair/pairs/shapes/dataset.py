"""`shapes`: the built-in data set. Drawn images, five captions each, features computed from the pixels.

It needs no download, is made in seconds and has the SCAN layout, so code that reads Flickr30K reads it too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from PIL import Image

from mispair.errors import ExistsError, InvalidValueError, WriteError
from mispair.pairs.shapes.drawing import Pixels, draw_scene
from mispair.pairs.shapes.features import FEATURE_SIZE, grid_features, vocabulary
from mispair.pairs.shapes.scene import Scene, describe, sample_scene

VERSION = 1  # of the images, captions and features: raise it whenever any of them changes
TRAIN, DEV, TEST = 600, 200, 500
_SPLITS = ("train", "dev", "test")

_README = """# shapes

Drawn images with five captions each, made by `mispair.pairs.shapes.dataset` (version {version}, seed {seed}):
{train:,} images to train, {dev:,} to validate and {test:,} to test.

| file | content |
|---|---|
| `{{split}}_ims.npy` | features computed from the pixels: float32 (images, 36 windows, {feature_size}) |
| `{{split}}_caps.txt` | captions, one a line; lines 5 i to 5 i + 4 belong to row i of the features |
| `{{split}}_ids.txt` | name of each image, one a row of the features |
| `images/` | the images themselves |
| `vocab.json` | every word that a caption can hold, in the layout of SCAN |

Nothing here comes from a photograph, a person or the web: use it as you like.
"""


@dataclass(frozen=True)
class Example:
    """One image of the data set with its scene and captions."""

    scene: Scene
    captions: list[str]
    pixels: Pixels


def example(seed: int, split: str, index: int) -> Example:
    """Image `index` of a split. It depends on these three only, never on the size of the split."""
    # One stream each: a change of the drawing leaves the scenes and captions as they were.
    for_scene, for_captions, for_pixels = np.random.default_rng([seed, _SPLITS.index(split), index]).spawn(3)
    scene = sample_scene(for_scene)
    return Example(scene, describe(scene, for_captions), draw_scene(scene, for_pixels))


def make(out: Path, *, seed: int = 0, train: int = TRAIN, dev: int = DEV, test: int = TEST) -> Path:
    """Write the data set to a new or empty folder, whole or not at all; the same seed gives the same files."""
    sizes = dict(zip(_SPLITS, (train, dev, test), strict=True))
    for split, size in sizes.items():
        if size < 1:
            raise InvalidValueError(f"{size}", where=split, expected="at least one image")
    if seed < 0:
        raise InvalidValueError(f"{seed}", where="seed", expected="0 or greater")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ExistsError("not an empty folder", where=out, advice="Choose another place, or remove it first.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as scratch:
            unfinished = Path(scratch, out.name)  # inside, so that it has the usual access rights
            _write(unfinished, seed, sizes)
            if out.is_dir():  # empty; Windows replaces no folders
                out.rmdir()
            os.replace(unfinished, out)
    except OSError as error:
        raise WriteError(
            f"the data set cannot be written ({error.strerror or error})",
            where=out,
            advice="To keep shapes elsewhere, set MISPAIR_CACHE to a folder that can be written.",
        ) from None
    return out


def cached(*, seed: int = 0, train: int = TRAIN, dev: int = DEV, test: int = TEST) -> Path:
    """The data set in the user's cache folder, made on the first call.

    The cache is `$MISPAIR_CACHE`, else the user's, such as `~/.cache/mispair`. Processes that ask at the same time may
    each make the set; the first one to finish keeps its folder and the others use it.
    """
    root = Path(os.environ.get("MISPAIR_CACHE") or platformdirs.user_cache_dir("mispair")).expanduser()
    folder = root / f"shapes-v{VERSION}-seed{seed}-{train}-{dev}-{test}" / "shapes"
    if _is_made(folder):
        return folder
    try:
        return make(folder, seed=seed, train=train, dev=dev, test=test)
    except (ExistsError, WriteError):
        if _is_made(folder):  # another process was faster
            return folder
        raise


def _is_made(folder: Path) -> bool:
    return (folder / "vocab.json").is_file()  # any file will do: a folder with one of them has them all


def _write(folder: Path, seed: int, sizes: Mapping[str, int]) -> None:
    (folder / "images").mkdir(parents=True)
    for split, size in sizes.items():
        _write_split(folder, split, seed, size)
    vocabulary().save(folder / "vocab.json")
    readme = _README.format(version=VERSION, seed=seed, feature_size=FEATURE_SIZE, **sizes)
    (folder / "README.md").write_text(readme, encoding="utf-8", newline="\n")


def _write_split(folder: Path, split: str, seed: int, size: int) -> None:
    ids = [f"shapes-{split}-{index:05d}" for index in range(size)]
    examples = [example(seed, split, index) for index in range(size)]
    for name, one in zip(ids, examples, strict=True):
        # Level 9 took ten times as long for 9 % less.
        Image.fromarray(one.pixels).save(folder / "images" / f"{name}.png", compress_level=3)
    np.save(folder / f"{split}_ims.npy", grid_features(np.stack([one.pixels for one in examples])))
    _write_lines(folder / f"{split}_caps.txt", [caption for one in examples for caption in one.captions])
    _write_lines(folder / f"{split}_ids.txt", ids)


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")  # the same bytes everywhere
