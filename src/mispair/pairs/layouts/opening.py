"""Recognises the layout of a data set, and opens it, or reads a split of it to train on.

| source | layout |
|---|---|
| .csv, .tsv, .txt, .psv, .parquet | table of image paths, or of images, and captions |
| .json | COCO's or Karpathy's captions |
| .jsonl, .ndjson; a folder with `metadata.jsonl` | lines in JSON |
| .tar; a folder with tars | WebDataset, img2dataset |
| a folder with .parquet | Hugging Face's datasets |
| a folder with one other table and no .txt | that table, as an export of it |
| any other folder | images, each with a text file of the same name |
| a folder with `train_ims.npy`, or the word shapes | SCAN: region features and captions |
| a folder with `img_emb` and `text_emb`, or such folders in it | clip-retrieval: vectors |
| a folder with .parquet beside .npz | DataComp: vectors of two models |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, get_args

from mispair.config import Config
from mispair.errors import (
    ConflictError,
    DamagedError,
    InvalidValueError,
    NotFoundError,
    TooFewError,
)
from mispair.pairs.layouts import clip_retrieval, precomp
from mispair.pairs.layouts.arrays import image_places
from mispair.pairs.layouts.captions_json import open_json
from mispair.pairs.layouts.copies import COPY_MARK, MANIFEST
from mispair.pairs.layouts.datacomp import find_datacomp, open_datacomp
from mispair.pairs.layouts.image_folder import METADATA, JsonLines, TextFiles
from mispair.pairs.layouts.precomp import DevProtocol
from mispair.pairs.layouts.table import open_files
from mispair.pairs.layouts.tars import Tars, check_unpacked
from mispair.pairs.origin import check_as_encoded
from mispair.pairs.pairs import Pairs
from mispair.pairs.source import ImageFiles, Source
from mispair.pairs.tables import IMAGE_SUFFIXES, SETTINGS, Roles
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.files import unreadable

FeatureLayout = Literal["precomp", "vectors"]
SHAPES = "shapes"
_NATURAL_ORDER = ("train", "dev", "test", "testall")
_LISTED = 6


class Layout(NamedTuple):
    """A way to store images and captions."""

    # Arguments: files, their folder (None for a single file), the folder of the images (None for the same), and columns
    # without usual names.
    open: Callable[[list[Path], Path | None, Path | None, Roles], Source]
    suffixes: tuple[str, ...]
    found: tuple[str, ...] = ()  # patterns that find the files in a folder; by default it may have a single file
    has_columns: bool = True  # whether columns can be named


LAYOUTS = (
    Layout(JsonLines, (".jsonl", ".ndjson"), (f"**/{METADATA}",)),
    Layout(Tars, (".tar",), ("*.tar", "**/*.tar"), has_columns=False),
    Layout(open_files, (".parquet", ".pq"), ("**/*.parquet",)),
    Layout(open_files, (".csv", ".tsv", ".psv", ".txt")),
    Layout(open_json, (".json",), has_columns=False),
)
TEXTS = Layout(TextFiles, (), has_columns=False)
_BY_SUFFIX = {suffix: layout for layout in LAYOUTS for suffix in layout.suffixes}
_AUDIT_FILES = ("audit.json", "pairs.parquet")  # what makes a folder that of an audit
_ALONE = (".csv", ".tsv", ".psv", ".json", ".jsonl", ".ndjson")  # may be the one table of a folder
_INSIDE = (".txt", ".tar", ".parquet", ".jsonl", ".ndjson", *IMAGE_SUFFIXES)


# Modules with `found_splits`, `open_split` and `load`: folders of region features or vectors, in splits.
FEATURES: dict[FeatureLayout, ModuleType] = {"precomp": precomp, "vectors": clip_retrieval}


def open_source(
    path: str | Path,
    images: str | Path | None = None,
    split: str | None = None,
    vectors: str | None = None,
    columns: Roles | None = None,
    *,
    allow_outside: bool = False,
) -> Source:
    """Open a data set in any layout, to be audited; see the table above.

    Args:
        path: A file or folder, or "shapes".
        images: Folder that the image paths start from; by default that of the file. Of vectors and features: by default
            `images` in the folder, the folder itself or the working directory.
        split: Split of a folder of vectors or features that has several; train by default.
        vectors: Model of DataComp's vectors; by default the better one.
        columns: Columns of a table that have no usual names.
        allow_outside: Read images outside their folder too.
    """
    path = Path(path)
    if is_raw(path):
        return open_raw(path, None if images is None else Path(images), columns, allow_outside=allow_outside)
    if find_datacomp(path):
        return open_datacomp(path, vectors)
    root = find_folder(path)
    kind = layout(root)
    if kind == "vectors" and clip_retrieval.is_embedding_folder(root):
        if split is not None:
            what = f"no parts such as {split}; all pairs are audited together"
            raise NotFoundError(what, where=root, advice="Leave out `split`.")
    else:
        split = split or "train"
        require_split(root, split)
    # The image folder comes first: a name without ending must not find a text file of the data set.
    places = image_places(images) or (root / "images", *((root / split,) if split else ()), root, Path())
    source: Source = FEATURES[kind].open_split(root, split)
    return replace(source, images=places)


def open_raw(
    path: Path, images: Path | None = None, columns: Roles | None = None, *, allow_outside: bool = False
) -> Source:
    """Open images and captions of a file or folder, in its order; see `open_source`."""
    if not path.exists():
        raise NotFoundError("no such file or folder", where=path)
    image_places(images)
    try:
        layout, files, root = _recognise(path)
        if columns and not layout.has_columns:
            what = f"{' and '.join(SETTINGS[role] for role in columns)} cannot be used: not a table"
            raise ConflictError(what, where=path, advice="Leave them out.")
        pairs = layout.open(files, root, images, columns or {})
    except OSError as error:
        raise unreadable(error.filename or path, error) from None
    if not any(pairs.texts()):
        raise TooFewError("all captions are blank", where=pairs.name, expected="texts to compare the images with")
    pairs.allow_outside, pairs.folder = allow_outside, path if path.is_dir() else None
    if isinstance(pairs, ImageFiles):
        pairs.check_places()
    return pairs


def is_raw(path: Path) -> bool:
    """Whether these are images and captions rather than vectors or features."""
    if not path.is_dir():
        return str(path) != SHAPES
    if find_datacomp(path) or recognised(path) or any(path.glob("*.npy")):
        return False
    return any(file.suffix.lower() in _INSIDE for file in path.rglob("*")) or _only_table(path) is not None


def _recognise(path: Path) -> tuple[Layout, list[Path], Path | None]:
    """The layout, its files and their folder; None for a single file."""
    if path.is_dir():
        if all((path / name).is_file() for name in _AUDIT_FILES):
            raise ConflictError("the results of an audit", where=path, advice="Give the data that was audited.")
        for layout in LAYOUTS:
            if files := next(filter(None, (sorted(path.glob(pattern)) for pattern in layout.found)), None):
                return layout, files, path
        table = _only_table(path)
        return (TEXTS, [path], path) if table is None else _recognise(table)
    if not path.is_file():
        raise DamagedError("neither a file nor a folder", where=path)
    if not path.stat().st_size:
        raise DamagedError("the file is empty", where=path, expected="pairs of an image and a caption")
    check_unpacked(path)
    if (known := _BY_SUFFIX.get(path.suffix.lower())) is None:
        raise DamagedError(
            "a file of an unknown kind",
            where=path,
            expected="a table (.csv, .tsv, .txt or .parquet), a COCO or Karpathy .json, lines in JSON (.jsonl), a "
            ".tar, or a folder of these or of images and text files",
        )
    return known, [path], None


def _only_table(folder: Path) -> Path | None:
    """The only table in a folder without text files, except the manifest of an export."""
    files = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    tables = [path for path in files if path.suffix.lower() in _ALONE and path.name != MANIFEST]
    return tables[0] if len(tables) == 1 and not any(folder.rglob("*.txt")) else None


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
        split: Name of the split, such as train, dev or test.
        vocabulary: The words to use, or their file. By default the file beside the data, else built from the captions
            of train and dev. Evaluation needs the vocabulary of the training.
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
    if kind == "vectors":
        refuse_for_vectors(f"{folder} holds vectors", vocabulary, dev_protocol, captions_per_image)
        return clip_retrieval.load(folder, split, finite=finite)
    return precomp.load(folder, split, vocabulary, dev_protocol, captions_per_image, finite=finite)


def refuse_for_vectors(
    found: str, vocabulary: Vocabulary | str | Path | None, dev_protocol: DevProtocol, captions_per_image: int | None
) -> None:
    """Raise if a setting says how to read region features and captions, because it would have no effect."""
    refused = {
        "rows of one image are known by an equal image_path in metadata/": ("captions_per_image", captions_per_image),
        "vectors validate on all of dev": ("dev_protocol", dev_protocol != "full"),
        "vectors have no words": ("vocabulary", isinstance(vocabulary, str | Path)),
    }
    for how, (name, given) in refused.items():
        if given:
            what = f"for region features and captions, but {found}: {how}"
            raise ConflictError(what, where=name, advice="Leave it out.")


def splits(data: str | Path) -> list[str]:
    """The complete splits: train, dev, test, testall, then others by the alphabet."""
    return [split for split, missing in found_splits(data).items() if not missing]


def found_splits(data: str | Path) -> dict[str, list[Path]]:
    """The splits with any file, and their missing files."""
    folder = find_folder(data)
    found = FEATURES[layout(folder)].found_splits(folder)
    return {split: found[split] for split in natural_order(list(found))}


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
    """Advice to use the content of a folder instead."""
    if set(_AUDIT_FILES) <= set(entries):
        return f"This is an audit; train on its pairs with: mispair train {folder}"
    tables = (name for name in entries if Path(name).suffix.lower() in (*_ALONE, ".parquet"))
    table = next((name for name in tables if name not in (MANIFEST, COPY_MARK)), None)
    if {"left.npy", "right.npy"} <= set(entries):  # as an export of two arrays
        ids = "" if table is None else f" `ids={folder / table}`"
        arrays = f"`left={folder / 'left.npy'}` `right={folder / 'right.npy'}`{ids}"
        return f"Audit two arrays (mispair audit {arrays}), and train on the output of the audit."
    if table is not None:
        return f"Give a table of images and captions itself: {folder / table}, with `images=FOLDER`."
    if any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in entries):
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
    return next((name for name, one in FEATURES.items() if one.found_splits(folder)), None)


def is_data_set(place: Path) -> bool:
    """Whether training can read a place directly."""
    return str(place) == SHAPES or (place.is_dir() and recognised(place) is not None)


def require_split(folder: Path, split: str) -> None:
    """Raise if the folder does not have a split."""
    found = found_splits(folder)
    names = [name for name, missing in found.items() if not missing]
    if split in names:
        return
    if split in found:
        raise NotFoundError(f"the split {split} has no {found[split][0].name}", where=folder)
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


def with_absolute_paths(config: Config) -> Config:
    """The paths become absolute, so a run can be resumed and tested from any folder."""
    is_folder = config.data != SHAPES and Path(config.data).is_dir()
    data = str(Path(config.data).resolve()) if is_folder else config.data
    vocab, noise = (None if path is None else str(Path(path).resolve()) for path in (config.vocab, config.noise_file))
    return replace(config, data=data, vocab=vocab, noise_file=noise)
