"""Which files of the published data sets mispair needs, and where people get them.

Everything here was read in the published codes and their issue threads, or computed from files at hand; what was
inferred says so, and what nobody states is None and shown as unknown. Sizes follow from shapes: the numbers alone,
without the 80 to 128 bytes of header.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal

from mispair.errors import ConfigError

Kind = Literal["features", "captions", "ids", "vocabulary", "noise"]

BUILT_IN = "shapes"
NO_DOWNLOADS = (
    "mispair downloads nothing: pictures and captions come under their publishers' terms, which everyone who fetches "
    "them accepts for themselves."
)
_REGIONS, _WIDTH = 36, 2048  # bottom-up attention features, in all three data sets
_ITEM_BYTES = {"float32": 4, "int64": 8}


@dataclass(frozen=True)
class Source:
    """Where people get files today."""

    name: str
    address: str
    about: str


@dataclass(frozen=True)
class Split:
    """How many pictures and captions a split has, and in how many rows the pictures are published."""

    name: str
    images: int
    captions: int
    rows: int

    @property
    def repeated(self) -> bool:
        """Whether each picture is published once a caption."""
        return self.rows == self.captions != self.images


@dataclass(frozen=True)
class File:
    """One published file.

    Attributes:
        name: Inside the folder of the data set.
        kind: What mispair reads it as.
        holds: The same in words.
        source: Name of the `Source`.
        needed: Whether a comparison needs it.
        split: The split that it belongs to, if it belongs to one.
        shape: Of an array.
        dtype: Of an array.
        lines: Number of lines, of a text.
        words: Number of words, of a vocabulary.
        size: Bytes of the whole file, where known.
        sha256: Where known.
        repacked: Whether size and checksum are of a copy that may not equal the published file byte for byte.
        places: Where else it may lie, seen from the folder.
        without: What mispair does where an optional file is missing.
    """

    name: str
    kind: Kind
    holds: str
    source: str
    needed: bool = True
    split: Split | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    lines: int | None = None
    words: int | None = None
    size: int | None = None
    sha256: str | None = None
    repacked: bool = False
    places: tuple[str, ...] = ()
    without: str = ""

    @property
    def n_bytes(self) -> int | None:
        """Bytes of an array without its header, which differs between versions of numpy; else of the whole file."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype] if self.shape else self.size

    def figures(self) -> dict[str, Any]:
        """Everything about the file, ready for JSON; null is unknown or does not apply."""
        return {
            "name": self.name,
            "kind": self.kind,
            "needed": self.needed,
            "holds": self.holds,
            "shape": list(self.shape) or None,
            "dtype": self.dtype or None,
            "lines": self.lines,
            "words": self.words,
            "bytes": self.n_bytes,
            "file_bytes": self.size,
            "sha256": self.sha256,
            "source": self.source,
            "other_places": list(self.places),
        }


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        name: As the command line knows it.
        title: As people write it.
        folder: What the published codes call its folder.
        suite: Name of the comparison that trains on it.
        about: One sentence.
        files: The needed ones first.
        sources: Where they come from.
    """

    name: str
    title: str
    folder: str
    suite: str
    about: str
    files: tuple[File, ...]
    sources: tuple[Source, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes of the needed files, as far as they are known: nearly all of it is features."""
        return sum(file.n_bytes or 0 for file in self.files if file.needed)

    def figures(self) -> dict[str, Any]:
        """The whole list, ready for JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "folder": self.folder,
            "about": self.about,
            "downloads": NO_DOWNLOADS,
            "needed_bytes": self.needed_bytes,
            "files": [file.figures() for file in self.files],
            "sources": [vars(source) for source in self.sources],
        }


def _features(split: Split, source: str, *, needed: bool = True, note: str = "") -> File:
    way = "one row a caption: each picture five times" if split.repeated else "one row a picture"
    holds = f"regions of {split.images:,} pictures, {way}{note}"
    return File(
        f"{split.name}_ims.npy", "features", holds, source, needed, split,
        shape=(split.rows, _REGIONS, _WIDTH), dtype="float32", without="mispair tests on testall",
    )  # fmt: skip


def _captions(split: Split, source: str, *, needed: bool = True, **known: Any) -> File:
    return File(
        f"{split.name}_caps.txt", "captions", "a caption a line, those of one picture together", source, needed, split,
        lines=split.captions, without="mispair tests on testall", **known,
    )  # fmt: skip


def _tabbed_captions(split: Split, source: str) -> File:
    holds = "a line a caption: image id, tab, caption"
    return File(f"{split.name}_caps.tsv", "captions", holds, source, split=split, lines=split.captions)


def _ids(split: Split, source: str) -> File:
    return File(
        f"{split.name}_ids.txt", "ids", "the id of the picture in each row", source, False, split, lines=split.rows,
        without="pictures then go by their row number",
    )  # fmt: skip


def _vocabulary(folder: str, source: str, words: int | None, **known: Any) -> File:
    name = f"{folder}_vocab.json"
    return File(
        name, "vocabulary", "the numbers of the words", source, False, words=words,
        places=(f"../vocab/{name}", f"../{name}"),
        without="mispair builds one from the train and dev captions; the words get other numbers", **known,
    )  # fmt: skip


def _noise(name: str, level: str, entries: int, source: str, *places: str, **known: Any) -> File:
    ratio = float(name.removesuffix(".npy").rpartition("_")[2])
    return File(
        name, "noise", f"{ratio:.0%} noise of {level} level, an image row each", source, False, shape=(entries,),
        dtype="int64", places=places, without="`mispair data noise` makes one", **known,
    )  # fmt: skip


def _caption_noise(folder: str, ratio: float, captions: int, source: str, **known: Any) -> File:
    name = f"{folder}_{ratio}.npy"
    return _noise(f"noise_index/{name}", "caption", captions, source, name, f"../noise_index/{name}", **known)


def _image_noise(short: str, ratio: float, images: int, source: str, **known: Any) -> File:
    name = f"noise_inx_{ratio}.npy"
    return _noise(name, "image", images, source, f"../noise_file/{short}/{name}", **known)


SCAN = Source(
    "SCAN", "https://www.kaggle.com/datasets/kuanghueilee/scan-features",
    "Features, captions and ids by SCAN's first author, who moved them here in February 2023 (kuanghuei/SCAN, issues "
    "52, 55, 57 and 58). The older addresses at scanproject.blob.core.windows.net and iudata.blob.core.windows.net are "
    "dead, though READMEs still name them. Copies: a Google Drive folder in the README of Paranioar/SGRAF, and one "
    "file in issue 8 of woodfrog/vse_infty, with other folder names.",
)  # fmt: skip
SGRAF = Source(
    "SGRAF", "https://github.com/Paranioar/SGRAF/tree/main/vocab",
    "SCAN's vocabularies of Flickr30K and MS-COCO, as files of the repository.",
)  # fmt: skip
NCR = Source(
    "NCR", "https://ncr-paper.cdn.bcebos.com/data/NCR-data.tar",
    "Features, captions and vocabulary by NCR's authors; the READMEs of BiCro, DECL, CRCL and L2RM name the same "
    "address. Whether it still answers is unknown, and we know of no copy. NCR's repository lists the addresses of the "
    "pictures (cc152k/*_caps_img_urls.csv), of which many are gone (its issue 5).",
)  # fmt: skip
BICRO = Source(
    "BiCro", "https://github.com/xu5zhao/BiCro/tree/main/noise_index",
    "Caption-level noise as NCR makes it. hhc1997/L2RM has files of the same names for 0.2, 0.4, 0.6 and 0.8; whether "
    "they are equal is unknown, so name the one that you used. For MS-COCO its author speaks of coco_precomp_0.4.npy "
    "(issue 1); the copy of the repository that we read does not have it.",
)  # fmt: skip
DECL = Source(
    "DECL", "https://drive.google.com/file/d/1-PJTDZRMo68mtY-hzPXheaakOVRkY5Ie/view",
    "Image-level noise of DECL, from its README; which ratios there are besides those listed is unknown.",
)  # fmt: skip


def _flickr30k() -> DataSet:
    train = Split("train", 29_000, 145_000, 29_000)
    dev, test = Split("dev", 1_014, 5_070, 5_070), Split("test", 1_000, 5_000, 5_000)
    folder = "f30k_precomp"
    train_captions = _captions(
        train, "SCAN", size=9_489_026, repacked=True,
        sha256="658f9d1a2b3b8510b2d73a49099ee97b96333b13fc03121c76065b2c8d23fff0",
    )  # fmt: skip
    words = _vocabulary(
        folder, "SGRAF", 8_481, size=297_827, sha256="ece46633bedb157d3430716d2fe8c90d2631895c97eb5eebfc5c1c3e04ebca44"
    )
    known_caption_noise = _caption_noise(
        folder, 0.4, train.captions, "BiCro", size=1_160_128,
        sha256="702bd86f858d04957723b04425e8f2677d5d2c65ae66ec7dc63cd22981ba6993",
    )  # fmt: skip
    known_image_noise = _image_noise(
        "f30k", 0.4, train.images, "DECL", size=232_128,
        sha256="fcc76de55d2c2559f89f01d8c43c8b0ac53651a8d44f45578a372853d79c06ef",
    )  # fmt: skip
    return DataSet(
        "flickr30k", "Flickr30K", folder, "f30k",
        "29,000 training pictures, 1,014 for validation and 1,000 for the test, with five captions each.",
        (
            _features(train, "SCAN"), train_captions,
            *(make(split, "SCAN") for split in (dev, test) for make in (_features, _captions)),
            *(_ids(split, "SCAN") for split in (train, dev, test)),
            words,
            _caption_noise(folder, 0.2, train.captions, "BiCro"), known_caption_noise,
            *(_caption_noise(folder, ratio, train.captions, "BiCro") for ratio in (0.5, 0.6)),
            _image_noise("f30k", 0.2, train.images, "DECL"), known_image_noise,
        ),
        (SCAN, SGRAF, BICRO, DECL),
    )  # fmt: skip


def _coco() -> DataSet:
    train = Split("train", 113_287, 566_435, 113_287)
    dev, test = Split("dev", 1_000, 5_000, 5_000), Split("test", 1_000, 5_000, 5_000)
    testall = Split("testall", 5_000, 25_000, 25_000)
    folder = "coco_precomp"
    return DataSet(
        "coco", "MS-COCO", folder, "coco",
        "113,287 training pictures, 1,000 for validation and 5,000 for the test, with five captions each.",
        (
            *(make(split, "SCAN") for split in (train, dev) for make in (_features, _captions)),
            _features(testall, "SCAN", note=" (the rows are inferred from how the published codes evaluate)"),
            _captions(testall, "SCAN"),
            _features(test, "SCAN", needed=False), _captions(test, "SCAN", needed=False),
            *(_ids(split, "SCAN") for split in (train, dev, testall)),
            _vocabulary(folder, "SGRAF", 11_353),
            _caption_noise(folder, 0.4, train.captions, "BiCro"),
            _image_noise("coco", 0.2, train.images, "DECL"),
        ),
        (SCAN, SGRAF, BICRO, DECL),
    )  # fmt: skip


def _cc152k() -> DataSet:
    sizes = {"train": 150_000, "dev": 1_000, "test": 1_000}
    splits = [Split(name, size, size, size) for name, size in sizes.items()]
    return DataSet(
        "cc152k", "CC152K", "cc152k_precomp", "cc152k",
        "150,000 training pairs of Conceptual Captions, 1,000 for validation and 1,000 for the test. They are noisy as "
        "they come from the web: there are no noise files.",
        (
            *(make(split, "NCR") for split in splits for make in (_features, _tabbed_captions)),
            _vocabulary("cc152k_precomp", "NCR", None),
        ),
        (NCR,),
    )  # fmt: skip


DATA_SETS = {data_set.name: data_set for data_set in (_flickr30k(), _coco(), _cc152k())}
_OTHER_NAMES = {"f30k": "flickr30k", "f30k_precomp": "flickr30k", "mscoco": "coco", "coco_precomp": "coco"}


def find_data_set(name: str) -> DataSet:
    """The data set of a name.

    Raises:
        ConfigError: There is none; it names the nearest one.
    """
    if name in DATA_SETS:
        return DATA_SETS[name]
    known = {**{one: one for one in (*DATA_SETS, BUILT_IN)}, **_OTHER_NAMES}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f' Did you mean "{known[near[0]]}"?' if near else ""
    raise ConfigError(f'There is no data set "{name}".{hint} Known are {", ".join(DATA_SETS)} and {BUILT_IN}.')
