"""The commands `mispair data ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from mispair.cli.output import print_json, say, with_flags
from mispair.errors import ExistsError
from mispair.support.flags import OrNone
from mispair.support.formatting import percent


def data_check(
    data: Positional[str],
    *,
    vocab: OrNone[Path] = None,
    noise_file: tuple[Path, ...] = (),
    captions_per_image: OrNone[int] = None,
    json: bool = False,
) -> int:
    """Describe a data set and its problems.

    Args:
        data: Folder of the data set, or "shapes".
        vocab: Vocabulary file, if it is not beside the data.
        noise_file: Noise index files to examine.
        captions_per_image: Only where the files leave it open; found from the data by default.
        json: Print JSON.
    """
    from mispair.pairs.check import check

    found = check(data, vocabulary=vocab, noise_file=noise_file, captions_per_image=captions_per_image)
    if json:
        print_json(found.to_json())
    else:
        for line in found.lines:
            say(line)
        say()
        for problem in found.problems:
            say(f"PROBLEM  {with_flags(problem, ('vocab', 'captions_per_image', 'overwrite'))}")
        say("This data set is ready." if not found.problems else f"{len(found.problems)} to fix before training.")
    return 1 if found.problems else 0


def data_noise(
    data: Positional[str],
    *,
    noise_ratio: float,
    out: Path,
    seed: int = 0,
    kind: Literal["caption", "image", "near", "group"] = "caption",
    captions_per_image: OrNone[int] = None,
    json: bool = False,
) -> int:
    """Make a noise index: the new image of each training caption.

    Args:
        data: Folder of the data set, or "shapes".
        noise_ratio: Share of the captions (or images) to move.
        out: File to write; NCR's, BiCro's and MSCN's code reads it (all kinds but image), or DECL's (kind image).
        seed: The same seed gives the same file.
        kind: caption: each caption on its own (NCR); image: all captions of an image together (DECL); near: exchanged
            between similar images; group: exchanged between whole groups of images.
        captions_per_image: Only where the files leave it open; found from the data by default.
        json: Print JSON.
    """
    from mispair.pairs.layouts.opening import load
    from mispair.pairs.noise import load_noise, mismatch, noise_index, save_noise

    if out.exists():
        raise ExistsError("the file exists", where=out, advice="Give another `out`, or remove it first.")
    pairs = load(data, "train", captions_per_image=captions_per_image, finite=False)
    save_noise(out, noise_index(pairs, noise_ratio=noise_ratio, seed=seed, kind=kind))
    found = mismatch(load_noise(out, pairs.link, len(pairs.left)), pairs.link, pairs.groups)
    if json:
        print_json({"file": str(out), "kind": kind, "pairs": len(pairs), "noise_ratio": noise_ratio, "mismatch": found})
    else:
        say(f"{out}: {len(pairs):,} pairs, of which {percent(found)} are now mismatched.")
    return 0


def data_make(
    name: Positional[Literal["shapes"]], out: Positional[Path], *, seed: int = 0, train: int = 600, dev: int = 200,
    test: int = 500,
) -> int:  # fmt: skip
    """Make the built-in data set as files to look at.

    Args:
        name: Only "shapes" so far.
        out: Folder to write.
        seed: The same seed gives the same files.
        train: Training images.
        dev: Validation images.
        test: Test images.
    """
    from mispair.pairs.shapes.dataset import make

    say(f"{name}: {train + dev + test:,} images in {make(out, seed=seed, train=train, dev=dev, test=test)}")
    return 0
