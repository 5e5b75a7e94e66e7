"""Reads a data set from a folder in any of the known layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from mispair.config import Config
from mispair.errors import ConflictError, InvalidValueError, NotFoundError
from mispair.pairs.layouts import clip_retrieval, precomp
from mispair.pairs.layouts.copies import COPY_MARK, MANIFEST
from mispair.pairs.layouts.precomp import DevProtocol
from mispair.pairs.noise import add_noise
from mispair.pairs.origin import check_as_encoded
from mispair.pairs.pairs import Pairs
from mispair.pairs.source import DataSetFolder
from mispair.pairs.vocabulary import Vocabulary

FeatureLayout = Literal["precomp", "vectors"]


class Reader(NamedTuple):
    """How a layout of data sets is read."""

    splits: Callable[[Path], dict[str, bool]]  # whether each split has all of its files
    load: Callable[..., Pairs]  # reads a split to train on
    open: Callable[[Path, str | None], DataSetFolder]  # opens a split to audit, or the whole folder


READERS: dict[FeatureLayout, Reader] = {
    "precomp": Reader(
        lambda folder: {split: len(parts) == 2 for split, parts in precomp.found_splits(folder).items()},
        precomp.load,
        precomp.open_precomp,
    ),
    "vectors": Reader(
        lambda folder: dict.fromkeys(clip_retrieval.found_splits(folder), True),
        clip_retrieval.load,
        clip_retrieval.open_clip,
    ),
}
SHAPES = "shapes"
_NATURAL_ORDER = ("train", "dev", "test", "testall")
_LISTED = 6
_TABLES, _IMAGES = (".csv", ".tsv", ".parquet", ".json", ".jsonl"), (".jpg", ".jpeg", ".png", ".webp")
_NO_TABLES = (MANIFEST, COPY_MARK)  # beside the table of an export


def load(
    data: str | Path,
    split: str = "train",
    *,
    vocabulary: Vocabulary | str | Path | None = None,
    dev_protocol: DevProtocol = "full",
    captions_per_image: int | None = None,
    finite: bool = True,
) -> Pairs:
    """Read one split of a data set.

    Features stay on disk and are mapped into memory.

    Args:
        data: A folder in the SCAN or the clip-retrieval layout, or "shapes" for the built-in data set.
        split: Such as train, dev or test.
        vocabulary: The words to use, or their file. By default the file beside the data, else built from the captions
            of train and dev. Evaluation needs the one that the training used.
        dev_protocol: "full" keeps the first 1,000 images of `dev`; "ncr" the first 1,000 captions (200 images at five
            captions each), as the published NCR, BiCro and MSCN select their models.
        captions_per_image: Only where the files leave it open; found from the data by default.
        finite: Whether to refuse features that are not finite, or not as `mispair encode` wrote them; this reads all
            of them.

    Raises:
        DataError: The files are missing, damaged, or do not belong together.
    """
    if dev_protocol not in get_args(DevProtocol):
        raise InvalidValueError(repr(dev_protocol), where="dev_protocol", expected="'full' or 'ncr'")
    folder = find_folder(data)
    kind = layout(folder)
    require_split(folder, split)
    if finite:
        check_as_encoded(folder)
    reading = {"vocabulary": vocabulary, "dev_protocol": dev_protocol, "captions_per_image": captions_per_image}
    if kind == "vectors":
        refuse_for_vectors(f"{folder} holds vectors", vocabulary, dev_protocol, captions_per_image)
        reading = {}
    return READERS[kind].load(folder, split, finite=finite, **reading)


def refuse_for_vectors(
    found: str, vocabulary: Vocabulary | str | Path | None, dev_protocol: DevProtocol, captions_per_image: int | None
) -> None:
    """Raise if a setting says how to read region features and captions, because it would have no effect."""
    if captions_per_image is not None:
        name, how = "captions_per_image", "rows of one image are known by an equal image_path in metadata/"
    elif dev_protocol != "full":
        name, how = "dev_protocol", "vectors validate on all of dev"
    elif isinstance(vocabulary, str | Path):
        name, how = "vocabulary", "vectors have no words"
    else:
        return
    what = f"for region features and captions, but {found}: {how}"
    raise ConflictError(what, where=name, advice="Leave it out.")


def splits(data: str | Path) -> list[str]:
    """The complete splits: train, dev, test, testall, then others by the alphabet."""
    folder = find_folder(data)
    return natural_order([split for split, whole in READERS[layout(folder)].splits(folder).items() if whole])


def named_splits(data: str | Path) -> list[str]:
    """The splits with any file; loading an incomplete one names the missing file."""
    folder = find_folder(data)
    return natural_order(list(READERS[layout(folder)].splits(folder)))


def natural_order(names: list[str]) -> list[str]:
    """Train, dev, test, testall, then others by the alphabet.

    >>> natural_order(["testall", "meta", "dev", "train"])
    ['train', 'dev', 'testall', 'meta']
    """
    known = [name for name in _NATURAL_ORDER if name in names]
    return known + sorted(set(names) - set(known))


def layout(data: str | Path) -> FeatureLayout:
    """The layout of a folder."""
    folder = find_folder(data)
    found = recognised(folder)
    if found is not None:
        return found
    entries = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    listed = ", ".join(entries[:_LISTED]) + (f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else "")
    inside = next((path for path in sorted(folder.iterdir()) if path.is_dir() and recognised(path)), None)
    raise NotFoundError(
        f"no data set, only {listed or 'an empty folder'}",
        where=folder,
        expected="train_ims.npy with train_caps.txt, or img_emb/ and text_emb/",
        advice=f"Did you mean {inside}?" if inside else _advice(folder, entries),
    )


def _advice(folder: Path, entries: list[str]) -> str:
    """How to use the content of a folder instead."""
    if {"left.npy", "right.npy"} <= set(entries):  # as an export of two arrays
        ids = f" `ids={folder / 'ids.csv'}`" if "ids.csv" in entries else ""
        arrays = f"`left={folder / 'left.npy'}` `right={folder / 'right.npy'}`{ids}"
        return f"Audit two arrays (mispair audit {arrays}), and train on the output of the audit."
    table = next((name for name in entries if Path(name).suffix.lower() in _TABLES and name not in _NO_TABLES), None)
    if table is not None:
        return f"Give a table of images and captions itself: {folder / table}, with `images=FOLDER`."
    if any(Path(name).suffix.lower() in _IMAGES for name in entries):
        return f"Give images with captions without `data`, as in: mispair train {folder}"
    return ""


def find_folder(data: str | Path) -> Path:
    """The folder of a data set; the built-in one is made on first use."""
    if str(data) == SHAPES:
        from mispair.pairs.shapes.dataset import cached  # draws its images on first use

        return cached()
    folder = Path(data)
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise NotFoundError(what, where=folder, expected=f"a folder with a data set, or the word {SHAPES}")
    return folder


def recognised(folder: Path) -> FeatureLayout | None:
    """The layout of a folder to train on; None for other folders."""
    return next((name for name, one in READERS.items() if one.splits(folder)), None)


def is_data_set(place: Path) -> bool:
    """Whether training can read a place as it is."""
    return str(place) == SHAPES or (place.is_dir() and recognised(place) is not None)


def require_split(folder: Path, split: str) -> None:
    """Raise if the folder does not have a split."""
    names = splits(folder)
    if split in names:
        return
    parts = precomp.found_splits(folder).get(split, set())
    if parts:
        there, path = (
            ("captions", precomp.features_path(folder, split))
            if "captions" in parts
            else ("features", precomp.captions_path(folder, split))
        )
        raise NotFoundError(f"the {there} of {split} are there, but {path.name} is missing", where=folder)
    only_testall = split == "test" and "testall" in names
    raise NotFoundError(
        f"no split named {split}",
        where=folder,
        expected=", ".join(names) or "one that is complete",
        advice="For COCO use testall, which holds the 1K folds and the 5K test." if only_testall else "",
    )


def load_split(config: Config, split: str, vocabulary: Vocabulary | None = None) -> Pairs:
    """One split with the settings of a run and the vocabulary of a trained model, if there is one."""
    return load(
        config.data,
        split,
        vocabulary=config.vocab if vocabulary is None else vocabulary,
        dev_protocol=config.dev_protocol,
        captions_per_image=config.captions_per_image,
    )


def with_noise(config: Config, train: Pairs) -> Pairs:
    """The training pairs with the noise of the config."""
    if not config.noise_ratio and config.noise_file is None:
        return train
    seed = config.seed if config.noise_seed is None else config.noise_seed
    return add_noise(train, noise_ratio=config.noise_ratio, seed=seed, kind=config.noise_kind, file=config.noise_file)


def with_absolute_paths(config: Config) -> Config:
    """With absolute paths, because a run must be resumable and testable from anywhere."""
    is_folder = config.data != SHAPES and Path(config.data).is_dir()
    data = str(Path(config.data).resolve()) if is_folder else config.data
    vocab, noise = (None if path is None else str(Path(path).resolve()) for path in (config.vocab, config.noise_file))
    return replace(config, data=data, vocab=vocab, noise_file=noise)
