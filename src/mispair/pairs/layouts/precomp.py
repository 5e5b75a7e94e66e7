"""The SCAN layout: region features of images in `{split}_ims.npy`, captions in `{split}_caps.txt` or `.tsv`.

Published arrays come in three shapes, and nothing in the files tells which: one row per image with five captions
(training sets), every row repeated five times (Flickr30K and COCO dev and test), one row and one caption (CC152K).
With `{split}_ids.txt`, one id a row, a `.tsv` may have any number of captions an image, in any order.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mispair.errors import ConflictError, DamagedError, InvalidValueError, NotFoundError, ShapeError
from mispair.pairs import row_ids
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.arrays import item_vectors
from mispair.pairs.npy import check_finite, open_array, write_rows
from mispair.pairs.origin import Origin, data_name
from mispair.pairs.pairs import Pairs, Regions, Tokens
from mispair.pairs.row_ids import RowIds, Texts
from mispair.pairs.shards import ArrayRows, SideRows, moved
from mispair.pairs.source import Source
from mispair.pairs.tfidf import word_vectors
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.arrays import IntArray
from mispair.support.files import LARGEST_TEXT, at_most, read_regular, take_long_cells, unreadable, write_atomically

DevProtocol = Literal["full", "ncr"]
USUAL_CAPTIONS_PER_IMAGE = 5
VOCABULARY_THRESHOLD = 4
_DEV_SIZE = 1000
_SAMPLED_BLOCKS = 64
FILES = ("ims.npy", "caps.txt", "caps.tsv", "ids.txt")


def found_splits(folder: Path) -> dict[str, list[Path]]:
    """The splits of the folder, and which of their files are missing: of the features or of the captions."""
    found = {path.name.rpartition("_")[0] for end in FILES[:3] for path in folder.glob(f"*_{end}")}
    both = {split: (features_path(folder, split), captions_path(folder, split)) for split in sorted(found)}
    return {split: [path for path in paths if not path.exists()] for split, paths in both.items()}


def features_path(folder: Path, split: str) -> Path:
    """The region features of a split."""
    return folder / f"{split}_ims.npy"


def captions_path(folder: Path, split: str) -> Path:
    """The captions of a split: the tab-separated file where there is no plain one."""
    plain, tabbed = folder / f"{split}_caps.txt", folder / f"{split}_caps.tsv"
    return tabbed if tabbed.exists() and not plain.exists() else plain


def read_captions(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """The captions of a split, and the image id of each where the file has them (.tsv), else no ids."""
    path = captions_path(folder, split)
    if path.suffix == ".txt":
        return _read_lines(path), []
    take_long_cells()
    try:
        with at_most(path, LARGEST_TEXT).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))
    except csv.Error as error:
        raise unreadable(path, error, advice="Look for an unmatched quotation mark.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            what = f"row {number:,} has {len(row)} columns"
            raise ShapeError(what, where=path, expected="an id, a tab and a caption")
    return [row[1].strip() for row in rows], [row[0].strip() for row in rows]


def _read_lines(path: Path) -> list[str]:
    try:
        text = read_regular(path, LARGEST_TEXT).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    # Only at \n: a caption may hold a carriage return or a Unicode line separator, and all later ones would shift.
    return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []


@dataclass(frozen=True)
class Arranged:
    """Images, captions and the link between them."""

    features: npt.NDArray[Any]  # (images, R, D) without repetitions, still memory-mapped
    link: IntArray  # image of each caption
    image_ids: Sequence[str]  # name of each image; empty where unknown
    per_image: int | None  # captions an image; None if not all have equally many
    texts: list[str]


def read(folder: Path, split: str, captions_per_image: int | None = None) -> Arranged:
    """The captions and the features, still on disk, of a split."""
    features = open_array(features_path(folder, split), ndim=3)
    return arranged(folder, split, features, read_captions(folder, split), captions_per_image)


def arranged(
    folder: Path,
    split: str,
    features: npt.NDArray[Any],
    captions: tuple[list[str], list[str]],
    captions_per_image: int | None = None,
) -> Arranged:
    """Joins captions, as `read_captions` gives them, and images: by their ids where both have them, else in order."""
    texts, ids = captions
    if captions_per_image is None and ids and (joined := _joined(folder, split, features, texts, ids)):
        return joined
    images, per_image = arrange(features, len(texts), captions_per_image, f"{folder.name} {split}")
    check_ids(ids, per_image, captions_path(folder, split))
    image_ids = ids[::per_image] if ids else read_ids(folder, split, len(images), per_image)
    return Arranged(images, np.arange(len(texts)) // per_image, image_ids, per_image, texts)


def _joined(
    folder: Path, split: str, features: npt.NDArray[Any], texts: list[str], ids: Sequence[str]
) -> Arranged | None:
    """The link by the ids of the rows in `{split}_ids.txt`; None if they differ from the ids of the captions."""
    path = folder / f"{split}_ids.txt"
    image_ids = _read_lines(path) if path.exists() else []
    rows = {image: row for row, image in enumerate(image_ids)}
    if len(rows) != len(image_ids) or len(rows) != len(features) or not rows.keys() >= set(ids):
        return None
    link = np.array([rows[image] for image in ids])
    counts = np.bincount(link, minlength=len(rows))
    if not counts.all():
        missing = np.flatnonzero(counts == 0)
        what = f"{len(missing):,} images without a caption, the first is {image_ids[missing[0]]}"
        expected = f"those of {captions_path(folder, split).name}"
        raise NotFoundError(what, where=path, expected=expected, advice="Add captions, or take the rows away.")
    return Arranged(features, link, image_ids, None if _uneven(counts) else int(counts[0]), texts)


def arrange(
    features: npt.NDArray[Any], n_captions: int, captions_per_image: int | None, name: str
) -> tuple[npt.NDArray[Any], int]:
    """One row per image (still memory-mapped), and how many captions each has."""
    rows = len(features)
    if captions_per_image is not None and not (isinstance(captions_per_image, int) and captions_per_image >= 1):
        expected = "a whole number from 1 on, usually 5"
        raise InvalidValueError(repr(captions_per_image), where="captions_per_image", expected=expected)
    if not n_captions or n_captions % rows:
        raise ShapeError(
            f"{n_captions:,} captions for {rows:,} image rows",
            where=name,
            expected=f"a whole number of captions an image ({rows:,} or {USUAL_CAPTIONS_PER_IMAGE * rows:,})",
            advice="Look for an empty line at the end, for missing lines, or in a .tsv for unmatched quotation marks. "
            "If images have different numbers of captions, put image id and caption into a _caps.tsv, and the id of "
            "each row into _ids.txt.",
        )
    per_row = n_captions // rows
    if captions_per_image is None:
        repeated = per_row == 1 and _rows_repeat(features, USUAL_CAPTIONS_PER_IMAGE)
        captions_per_image = USUAL_CAPTIONS_PER_IMAGE if repeated else per_row
    if captions_per_image == per_row:
        return features, captions_per_image
    if per_row != 1 or not _blocks_repeat(features, captions_per_image):
        repeats = f", and the rows do not repeat in blocks of {captions_per_image}" if per_row == 1 else ""
        raise ConflictError(
            f"{captions_per_image}, but {rows:,} image rows and {n_captions:,} captions of {name} make {per_row} a "
            f"row{repeats}",
            where="captions_per_image",
            advice="Leave it out, or correct the files.",
        )
    return features[::captions_per_image], captions_per_image


def _rows_repeat(features: npt.NDArray[Any], times: int) -> bool:
    """Whether each row stands there several times. Constant features (a placeholder) say nothing, so they do not."""
    return _blocks_repeat(features, times) and not np.array_equal(features[0], features[-1])


def _blocks_repeat(features: npt.NDArray[Any], times: int) -> bool:
    """Whether each block of `times` rows holds one row, by a sample of blocks from the first to the last."""
    if len(features) % times:
        return False
    blocks = np.unique(np.linspace(0, len(features) // times - 1, _SAMPLED_BLOCKS).astype(np.int64))
    return all(bool((features[b * times : (b + 1) * times] == features[b * times]).all()) for b in blocks)


def find_vocabulary(folder: Path, vocabulary: Vocabulary | str | Path | None = None) -> tuple[Vocabulary, str]:
    """The vocabulary to use and where it comes from: given, found beside the data, or built from train and dev."""
    if isinstance(vocabulary, Vocabulary):
        return vocabulary, "given"
    if vocabulary is not None:
        return Vocabulary.load(vocabulary), str(vocabulary)
    place = folder.resolve()
    name, beside = f"{place.name}_vocab.json", place.parent
    places = [place / "vocab.json", place / name, beside / "vocab" / name, beside / name]
    for path in places:
        if path.exists():
            return Vocabulary.load(path), str(path)
    texts = [
        text
        for split in ("train", "dev")
        if captions_path(folder, split).exists()
        for text in read_captions(folder, split)[0]
    ]
    if not texts:
        raise NotFoundError(
            f"no vocabulary ({places[-1].name}), and no train or dev captions to build one from",
            where=folder,
            advice="Give the `vocabulary` that the training used.",
        )
    return Vocabulary.build(texts, VOCABULARY_THRESHOLD), "built from the train and dev captions"


def read_ids(folder: Path, split: str, n_images: int, per_image: int) -> Sequence[str]:
    """One name per image from `{split}_ids.txt`, with a line per image or per caption; else none."""
    path = folder / f"{split}_ids.txt"
    if not path.exists():
        return ()
    ids = _read_lines(path)
    if len(ids) not in (n_images, n_images * per_image):
        expected = f"{n_images:,} (one an image) or {n_images * per_image:,} (one a caption)"
        raise ShapeError(f"{len(ids):,} ids", where=path, expected=expected, advice="Correct the file or take it away.")
    return ids if len(ids) == n_images else ids[::per_image]


def check_ids(ids: Sequence[str], per_image: int, path: Path) -> None:
    """Raise if image ids contradict `per_image` captions of each image in a row.

    Captions may also have ids of their own, all different.
    """
    if len(set(ids)) == len(ids):
        return
    for first in range(0, len(ids), per_image):
        here = ids[first : first + per_image]
        if len(set(here)) > 1:
            raise DamagedError(
                f"rows {first + 1:,} to {first + len(here):,} have the ids {', '.join(dict.fromkeys(here))}",
                where=path,
                expected=f"the {per_image} captions of one image",
                advice="Sort the rows in the order of the images.",
            )


def load(
    folder: Path,
    split: str,
    vocabulary: Vocabulary | str | Path | None,
    dev_protocol: DevProtocol,
    captions_per_image: int | None,
    *,
    finite: bool,
) -> Pairs:
    """Read one split; see `mispair.pairs.layouts.opening.load`."""
    name = f"{data_name(folder)} {split}"
    found = read(folder, split, captions_per_image)
    texts, left, link, left_ids = found.texts, found.features, found.link, found.image_ids
    if split == "dev":
        kept = min(len(left), _DEV_SIZE if dev_protocol == "full" else _DEV_SIZE * len(left) // len(texts))
        inside = np.flatnonzero(link < kept)
        left, left_ids, link, texts = left[:kept], left_ids[:kept], link[inside], [texts[row] for row in inside]
    if finite:
        check_finite(left, str(features_path(folder, split)))
    words = find_vocabulary(folder, vocabulary)[0]
    tokens = Tokens(*words.encode(texts), words, texts)
    return Pairs(Regions(left), tokens, link, left_ids=left_ids, name=name, origin=Origin.read(folder))


def open_split(folder: Path, split: str | None) -> ScanFeatures:
    """Open a split to be audited: the mean of the regions of each image, and vectors of the words of each caption."""
    split = split or "train"
    parts = read(folder, split)
    others = [folder / f"{other}_{part}" for other in found_splits(folder) if other != split for part in FILES]
    images, link = parts.image_ids, parts.link
    if images:
        known = row_ids.from_images([images[row] for row in link])
    else:
        known = RowIds(groups=link if parts.per_image != 1 else None)
    image_names = Texts.of(images)
    return ScanFeatures(
        left=moved(SideRows.of([ArrayRows(item_vectors(Regions(parts.features)))]), link),
        right=SideRows.of([ArrayRows(word_vectors(parts.texts))]),
        layout="precomp",
        name=f"{folder.name} {split}",
        names=known,
        captions=Texts.of(parts.texts),
        image_names=(lambda rows: image_names(link[rows])) if images else None,
        files=(features_path(folder, split), captions_path(folder, split)),
        folder=folder,
        split=split,
        others=tuple(filter(Path.exists, others)),
    )


class ScanFeatures(Source):
    """The audited split of a data set.

    Where all images keep equally many captions, there is one row of features an image; else one row a caption, with the
    features of its image repeated, because the layout has no other way to say whose caption it is.
    """

    @property
    def root(self) -> Path:
        assert self.folder is not None
        return self.folder

    def order(self, edits: Edits) -> IntArray:
        return _by_image(edits, read(self.root, str(self.split)).link)[2]

    def write(self, edits: Edits, out: Path) -> None:
        self._write_others(out)
        parts = read(self.root, str(self.split))
        regions = parts.features
        images, counts, rows = _by_image(edits, parts.link)
        uneven = _uneven(counts)
        texts = self.final_captions(edits, rows)
        owners = edits.image_from[rows]
        times = counts if uneven else None
        write_rows(out / f"{self.split}_ims.npy", lambda wanted: np.array(regions[wanted]), images, times)
        captions = captions_path(self.root, str(self.split))
        if captions.suffix == ".tsv":
            write_tsv(out / captions.name, self._image_names(owners, parts.link), texts)
        else:
            write_lines(out / captions.name, texts)
            first = np.unique(parts.link, return_index=True)[1]  # a caption of each image
            named = owners if uneven else first[images]
            write_lines(out / f"{self.split}_ids.txt", self._image_names(named, parts.link))
        if any(captions_path(self.root, part).exists() for part in ("train", "dev")):
            # Words of all captions, so that the copy is read with the same numbers as the data it came from.
            find_vocabulary(self.root)[0].save(out / "vocab.json")

    def _image_names(self, rows: IntArray, link: IntArray) -> list[str]:
        names = self.image_names
        return [str(image) for image in link[rows]] if names is None else names(rows)


def _by_image(edits: Edits, link: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Images with a caption, how many each, and the rows in the order of the images."""
    rows = edits.rows
    owners = link[edits.image_from[rows]]
    rows = rows[np.argsort(owners, kind="stable")]
    images, counts = np.unique(owners, return_counts=True)
    if _uneven(counts) and counts.sum() % USUAL_CAPTIONS_PER_IMAGE == 0:
        # The reader takes one row a caption for five rows an image where the first rows repeat like that. An image with
        # another number of captions at the start rules that out.
        odd = int(np.argmax(counts % USUAL_CAPTIONS_PER_IMAGE > 0))
        start = int(counts[:odd].sum())
        first = np.arange(start, start + counts[odd])
        rows = np.concatenate([rows[first], np.delete(rows, first)])
        images, counts = (np.concatenate([part[[odd]], np.delete(part, odd)]) for part in (images, counts))
    return images, counts, rows


def _uneven(counts: IntArray) -> bool:
    return bool((counts != counts[0]).any())


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write captions or names, one a line."""
    write_atomically(path, "".join(f"{' '.join(line.splitlines())}\n" for line in lines).encode("utf-8", "replace"))


def write_tsv(path: Path, ids: Sequence[str], texts: Sequence[str]) -> None:
    """Write captions with the id of the image of each."""
    table = io.StringIO(newline="")
    csv.writer(table, delimiter="\t").writerows(zip(ids, texts, strict=True))
    write_atomically(path, table.getvalue().encode("utf-8", "replace"))
