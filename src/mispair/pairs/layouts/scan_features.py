"""Regions and captions in the SCAN layout."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mispair.pairs.edits import Edits
from mispair.pairs.layouts import precomp
from mispair.pairs.layouts.embeddings import copy_files, copy_origin, other_splits, write_rows
from mispair.pairs.npy import open_array
from mispair.pairs.origin import BASIS, MARK
from mispair.pairs.pairs import IntArray
from mispair.pairs.source import Source
from mispair.support.files import write_atomically

PARTS = ("ims.npy", "caps.txt", "caps.tsv", "ids.txt")


@dataclass(frozen=True)
class ScanFeatures:
    """The audited split of a data set; the others are copied as they are, so that the copy can be trained on.

    Where all images keep equally many captions, there is one row of features an image; else one row a caption, with the
    features of its image repeated, because the layout has no other way to say whose caption it is.
    """

    source: Source

    @property
    def _split(self) -> str:
        assert self.source.split is not None
        return self.source.split

    def owns(self, name: str) -> bool:
        splits = (self._split, *self._others)
        return name in ("vocab.json", MARK, BASIS) or name in [f"{split}_{part}" for split in splits for part in PARTS]

    def size(self, edits: Edits) -> int:
        parts = self._arranged()
        images, counts, _ = _by_image(edits, parts.link)
        rows = int(counts.sum()) if _uneven(counts) else len(images)
        return rows * int(parts.features[0].nbytes) + sum(path.stat().st_size for path in self._other_files())

    @property
    def _others(self) -> list[str]:
        """The splits that were not audited."""
        folder = self.source.folder
        return [] if folder is None else other_splits(self.source, precomp.found_splits(folder))

    def _other_files(self) -> list[Path]:
        folder = self.source.folder
        places = [] if folder is None else [folder / f"{split}_{part}" for split in self._others for part in PARTS]
        return [path for path in places if path.is_file()]

    def order(self, edits: Edits) -> IntArray:
        """The rows in the order in which they are written: the captions of an image together."""
        return _by_image(edits, self._arranged().link)[2]

    def write(self, edits: Edits, out: Path) -> None:
        source, split = self.source, self._split
        assert source.folder is not None
        copy_origin(source.folder, out)
        copy_files(self._other_files(), source.folder, out)
        parts = self._arranged()
        regions = parts.features
        images, counts, rows = _by_image(edits, parts.link)
        uneven = _uneven(counts)
        texts = source.texts(edits.caption_from[rows])
        texts = [edits.rewritten.get(int(row), text) for row, text in zip(rows, texts, strict=True)]
        owners = edits.image_from[rows]
        write_rows(
            out / f"{split}_ims.npy", lambda wanted: np.array(regions[wanted]), images, counts if uneven else None
        )
        captions = precomp.captions_path(source.folder, split)
        if captions.suffix == ".tsv":
            text = io.StringIO(newline="")
            csv.writer(text, delimiter="\t").writerows(zip(self._image_names(owners, parts.link), texts, strict=True))
            write_atomically(out / captions.name, text.getvalue().encode())
        else:
            _write_lines(out / captions.name, texts)
            first = np.unique(parts.link, return_index=True)[1]  # a caption of each image
            _write_lines(out / f"{split}_ids.txt", self._image_names(owners if uneven else first[images], parts.link))
        if any(precomp.captions_path(source.folder, part).exists() for part in ("train", "dev")):
            # Words of all captions, so that the copy is read with the same numbers as the data it came from.
            precomp.find_vocabulary(source.folder)[0].save(out / "vocab.json")

    def _arranged(self) -> precomp.Arranged:
        """The features of each image (still mapped), and the image of each caption."""
        folder, split = self.source.folder, self._split
        assert folder is not None
        features = open_array(precomp.features_path(folder, split), ndim=3)
        return precomp.arranged(folder, split, features, precomp.read_captions(folder, split))

    def _image_names(self, rows: IntArray, link: IntArray) -> list[str]:
        names = self.source.image_names
        return [str(image) for image in link[rows]] if names is None else names(rows)


def _by_image(edits: Edits, link: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Images that have a caption, how many each, and the rows in the order of the images."""
    rows = edits.rows
    owners = link[edits.image_from[rows]]
    rows = rows[np.argsort(owners, kind="stable")]
    images, counts = np.unique(owners, return_counts=True)
    if _uneven(counts) and counts.sum() % precomp.USUAL_CAPTIONS_PER_IMAGE == 0:
        # The reader takes one row a caption for five rows an image where the first rows repeat like that. An image with
        # another number of captions at the start rules that out.
        odd = int(np.argmax(counts % precomp.USUAL_CAPTIONS_PER_IMAGE > 0))
        start = int(counts[:odd].sum())
        first = np.arange(start, start + counts[odd])
        rows = np.concatenate([rows[first], np.delete(rows, first)])
        images, counts = (np.concatenate([part[[odd]], np.delete(part, odd)]) for part in (images, counts))
    return images, counts, rows


def _uneven(counts: IntArray) -> bool:
    return bool((counts != counts[0]).any())


def _write_lines(path: Path, lines: list[str]) -> None:
    write_atomically(path, "".join(f"{' '.join(line.splitlines())}\n" for line in lines).encode())
