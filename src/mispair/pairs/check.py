"""Check a data set before training: its contents, and all of its problems."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import DataError, NotFoundError
from mispair.pairs.layouts import clip_retrieval, opening, precomp
from mispair.pairs.layouts.opening import FeatureLayout
from mispair.pairs.noise import load_noise, mismatch
from mispair.pairs.npy import absolute_maximum, check_finite, open_array
from mispair.pairs.origin import check_as_encoded
from mispair.pairs.pairs import Pairs, Side, Tokens, Vectors
from mispair.pairs.vocabulary import MOST_WORDS, SPECIAL_WORDS, UNK, Vocabulary, tokenizer_name
from mispair.support.arrays import FloatArray, IntArray
from mispair.support.formatting import byte_size

_HALF_MAXIMUM = float(np.finfo(np.float16).max)
_NOISE_PATTERNS = ("*_0.[0-9]*.npy", "noise_inx_*.npy", "noise_index/*.npy")
MOSTLY_UNKNOWN = 0.5  # share of unknown words above which captions carry almost no information
_ENTITY = re.compile(r"&(?:[a-z]+|#[0-9]+);")


# What is known of a split; None is unknown or does not apply. `repeated`: each image is stored once a caption; `named`:
# image paths are known; `words`: the fewest, mean and most of a caption.
_OF_SPLIT = (
    "rows", "images", "captions", "captions_per_image", "repeated", "named", "words", "unknown_share", "empty_captions",
    "captions_with_html_entities", "features", "images_features", "texts_features",
)  # fmt: skip
Report = dict[str, Any]


@dataclass
class Check:
    """Contents and problems of a data set."""

    data: str
    layout: FeatureLayout
    vocabulary: Report | None = None
    splits: dict[str, Report] = field(default_factory=dict)
    noise: dict[str, Report] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # the contents in plain words, by split
    problems: list[str] = field(default_factory=list)  # a sentence each; empty if the data can be trained on

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Records a `DataError` of the block as a problem and goes on; the same sentence is recorded once."""
        try:
            yield
        except DataError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))

    def to_json(self) -> dict[str, Any]:
        """Convert for `--json`: everything but the lines."""
        return {name: value for name, value in vars(self).items() if name != "lines"}


def check(
    data: str | Path,
    *,
    vocabulary: Vocabulary | str | Path | None = None,
    noise_file: str | Path | Sequence[str | Path] | None = None,
    captions_per_image: int | None = None,
) -> Check:
    """Examine every split of a data set, its vocabulary, and given and found noise index files; see `opening.load`."""
    folder = opening.find_folder(data)
    found = Check(str(folder), opening.layout(folder))
    with found.collecting():
        check_as_encoded(folder)
    train = None
    if found.layout == "precomp":
        _check_precomp(folder, vocabulary, captions_per_image, found)
    else:
        train = _check_vectors(folder, found)
    _check_widths(found)
    given = [noise_file] if isinstance(noise_file, str | Path) else noise_file or ()
    similar = (path for pattern in _NOISE_PATTERNS for path in sorted(folder.glob(pattern)))
    for path in dict.fromkeys(map(Path, (*given, *similar))):
        with found.collecting():
            _check_noise(path, train, found)
    return found


def _check_precomp(
    folder: Path, vocabulary: Vocabulary | str | Path | None, captions_per_image: int | None, found: Check
) -> None:
    words = None
    with found.collecting():
        words, source = precomp.find_vocabulary(folder, vocabulary)
        found.lines.append(f"vocabulary: {len(words):,} words, {source}; words cut by nltk's {tokenizer_name()}")
        found.vocabulary = {"size": len(words), "source": source, "tokenizer": tokenizer_name()}
    names = opening.natural_order(list(precomp.found_splits(folder)))
    arrays: dict[str, FloatArray] = {}
    for split in names:
        report = found.splits[split] = dict.fromkeys(_OF_SPLIT)
        features = captions = None
        with found.collecting():
            features = open_array(precomp.features_path(folder, split), ndim=3)
        with found.collecting():
            captions = precomp.read_captions(folder, split)
        if features is not None:
            images = arrays[split] = _check_rows(
                folder, split, features, captions or ([], []), captions_per_image, found
            )
            name = str(precomp.features_path(folder, split))
            report["features"] = _check_features(split, name, images, features.nbytes, found)
        if captions is not None:
            _check_captions(split, captions[0], words, found)
    _note_training_images(arrays, found)
    if "dev" not in names:
        found.lines.append("dev: there is none, so training keeps its last epoch instead of its best")
    if "train" not in names:
        found.problems.append(
            f"{folder}: there is no train split, so nothing can be trained; it has {', '.join(names)}."
        )


def _check_rows(
    folder: Path,
    split: str,
    features: npt.NDArray[Any],
    captions: tuple[list[str], list[str]],
    captions_per_image: int | None,
    found: Check,
) -> npt.NDArray[Any]:
    """Checks rows against captions and their ids; returns the rows without repetitions."""
    report = found.splits[split]
    report["rows"] = rows = len(features)
    texts, _ = captions
    if not texts:
        return features
    with found.collecting():
        parts = precomp.arranged(folder, split, features, captions, captions_per_image)
        features, per_image = parts.features, parts.per_image
        repeated = len(features) < rows
        report |= {"images": len(features), "captions_per_image": per_image, "repeated": repeated}
        repeats = f"{rows:,} rows, each image repeated {per_image} times: " if repeated else ""
        found.lines.append(f"{split}: {repeats}{_count(len(features), 'image')} with {_captions_each(parts)}")
        if per_image is not None:
            precomp.read_ids(folder, split, len(features), per_image)
    return features


def _captions_each(parts: precomp.Arranged) -> str:
    if parts.per_image is not None:
        return f"{_count(parts.per_image, 'caption')} each"
    counts = np.bincount(parts.link)
    return f"{counts.min()} to {counts.max()} captions (mean {counts.mean():.1f})"


def _check_features(label: str, name: str, features: npt.NDArray[Any], on_disk: int, found: Check) -> Report:
    """Type, shape, size and range of one array of features."""
    half, highest = 2 * features.size, absolute_maximum(features)
    finite = math.isfinite(highest)
    found.lines.append(
        f"{label}: features {' x '.join(f'{n:,}' for n in features.shape)} {features.dtype}, {byte_size(on_disk)} "
        f"on disk, {byte_size(half)} in memory in half precision, absolute maximum {highest:.4g}"
    )
    if not finite:
        with found.collecting():
            check_finite(features, name)
    elif not highest:
        found.problems.append(f"{name}: every value is 0, so nothing can be learned; compute the features again.")
    elif highest > _HALF_MAXIMUM:
        found.problems.append(
            f"{name}: the absolute maximum is {highest:.4g}, above the half-precision range of {_HALF_MAXIMUM:,.0f} "
            "that a GPU computes in; scale the features down."
        )
    return {
        "shape": list(features.shape), "dtype": str(features.dtype), "bytes_on_disk": on_disk,
        "bytes_in_half_precision": half, "absolute_maximum": highest if finite else None, "finite": finite,
    }  # fmt: skip


def _check_captions(split: str, texts: list[str], words: Vocabulary | None, found: Check) -> None:
    """Lengths, unknown words and oddities of the captions; the words are counted even without a vocabulary."""
    report = found.splits[split]
    report["captions"] = len(texts)
    if not texts:
        found.problems.append(f"{split}: the caption file is empty; copy or write it again.")
        return
    ids, offsets = (words or Vocabulary(SPECIAL_WORDS)).encode(texts)
    lengths = np.diff(offsets) - 2  # without start and end
    unknown = unknown_share(ids, offsets) if words else None
    empty = [number for number, text in enumerate(texts, 1) if not text]
    entities = sum(bool(_ENTITY.search(text)) for text in texts)
    report["words"] = {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())}
    report |= {"unknown_share": unknown, "empty_captions": len(empty), "captions_with_html_entities": entities}
    found.lines.append(
        f"{split}: {_count(len(texts), 'caption')} of {lengths.min()} to {lengths.max()} words (mean "
        f"{lengths.mean():.1f})" + ("" if unknown is None else f", {unknown:.2%} of the words unknown")
    )
    if long := int((lengths == MOST_WORDS).sum()):
        found.lines.append(
            f"{split}: {_count(long, 'caption')} of {MOST_WORDS} words or more; networks read the first {MOST_WORDS}"
        )
    if entities:
        found.lines.append(
            f"{split}: {_count(entities, 'caption')} with HTML entities such as &apos; which are read as words; "
            "published vocabularies were built without them"
        )
    if unknown is not None and unknown > MOSTLY_UNKNOWN:
        found.problems.append(
            f"{split}: {unknown:.0%} of the words are not in the vocabulary, so the captions carry almost no "
            "information; give the vocabulary that belongs to them as `vocab`."
        )
    if empty:
        found.problems.append(
            f"{split}: {_count(len(empty), 'caption')} without a word, the first on line {empty[0]:,}; "
            "they can match nothing."
        )


def unknown_share(ids: npt.NDArray[np.int32], offsets: IntArray) -> float:
    """Share of unknown words in encoded texts, without start and end.

    >>> unknown_share(np.array([1, 4, 3, 3, 2, 1, 3, 2]), np.array([0, 5, 8]))
    0.75
    """
    return float((ids == UNK).sum() / max(1, len(ids) - 2 * (len(offsets) - 1)))


def mostly_unknown(side: Side) -> float | None:
    """Share of unknown words if it is too high to train on; otherwise None."""
    share = unknown_share(side.ids, side.offsets) if isinstance(side, Tokens) else 0.0
    return share if share > MOSTLY_UNKNOWN else None


def _check_vectors(folder: Path, found: Check) -> Pairs | None:
    """Returns the training pairs, if they can be read."""
    train = None
    arrays: dict[str, FloatArray] = {}
    for split in opening.splits(folder):
        report = found.splits[split] = dict.fromkeys(_OF_SPLIT)
        with found.collecting():
            pairs = clip_retrieval.load(folder, split, finite=False)
            train = pairs if split == "train" else train
            groups = len(np.unique(pairs.left_groups))
            report |= {"rows": len(pairs), "captions": len(pairs), "images": groups, "named": bool(pairs.left_ids)}
            names = _count(groups, "different image path") if pairs.left_ids else _why_no_names(folder, split)
            found.lines.append(f"{split}: {_count(len(pairs), 'pair')} of vectors, {names}")
            for label, side in (("images", pairs.left), ("texts", pairs.right)):
                assert isinstance(side, Vectors)
                name, size = f"{pairs.name} {label}", side.features.nbytes
                report[f"{label}_features"] = _check_features(f"{split} {label}", name, side.features, size, found)
                arrays.setdefault(split, side.features)
    _note_training_images(arrays, found)
    return train


def _note_training_images(arrays: Mapping[str, FloatArray], found: Check) -> None:
    """Says how many images of the other splits have the features of a training image."""
    known = set(_digests(arrays["train"])) if len(arrays) > 1 and "train" in arrays else set()
    for split, array in arrays.items() if known else ():
        shared = sum(digest in known for digest in _digests(array)) if split != "train" else 0
        if shared:
            found.lines.append(
                f"{split}: {shared:,} of {_count(len(array), 'image')} are in train, too, so results on them say "
                "little about new images"
            )


def _digests(features: FloatArray) -> Iterator[bytes]:
    """Hashes of all images, without those of zeros."""
    return (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in features if row.any())


def _check_widths(found: Check) -> None:
    """All splits must have features of the width of the training features."""
    for key in ("features", "images_features", "texts_features"):
        widths = {name: report[key]["shape"][-1] for name, report in found.splits.items() if report[key] is not None}
        for name, width in widths.items():
            if width != widths.get("train", width):
                found.problems.append(
                    f"{name}: {key.replace('_', ' ')} of width {width:,}, but {widths['train']:,} for training; make "
                    "the features of all splits in the same way."
                )


def _why_no_names(folder: Path, split: str) -> str:
    places = folder / "metadata", folder / split / "metadata"
    unused = any(path for place in places for path in place.glob("metadata_*"))
    return "no image paths known" + ", though there is metadata: it needs a column image_path" * unused


def _check_noise(path: Path, train: Pairs | None, found: Check) -> None:
    """Level and true mismatch of one noise index; `train` are the training pairs of vectors."""
    entries = len(open_array(path, ndim=1, kind="integer"))
    report = found.noise[str(path)] = {"entries": entries, "level": None, "mismatch": None}
    link, n_images, assumed = _train_link(found) if train is None else (train.link, len(train.left), "")
    noisy = load_noise(path, link, n_images, by_row=train is not None)
    level = "caption" if entries == len(link) else "image"
    share = mismatch(noisy, link, None if train is None else train.groups)
    report |= {"level": level, "mismatch": share}
    found.lines.append(f"noise {path}: {level} level, {entries:,} entries, true mismatch {share:.2%}{assumed}")


def _train_link(found: Check) -> tuple[IntArray, int, str]:
    """The link of the training pairs without noise, the number of images, and a note on assumptions."""
    train = found.splits.get("train", dict.fromkeys(_OF_SPLIT))
    usual = precomp.USUAL_CAPTIONS_PER_IMAGE
    captions, images, assumed = train["captions"], train["images"], ""
    if not images:
        assumed = f" (taking {usual} captions an image, as the files of train do not say)"
        images = captions // usual if captions else train["rows"]
        captions = images * usual if images else None
    if not captions or not images:
        raise NotFoundError("the train split could not be read, so its noise index files cannot be judged")
    return np.arange(captions) // (captions // images), images, assumed


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
