"""Open the input of an audit: paths, arrays, lists, and tables of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mispair.auditing.from_training import from_run, is_run
from mispair.auditing.options import InputOptions
from mispair.encoders.cache import FETCHED, cache_folder, writable_cache
from mispair.encoders.encode import Encoders, encode
from mispair.encoders.image_hash import as_hashes
from mispair.errors import ConflictError, NotFoundError
from mispair.pairs.layouts.arrays import from_memory, from_pairs, open_arrays
from mispair.pairs.layouts.opening import is_raw, open_source
from mispair.pairs.layouts.table import open_table_given
from mispair.pairs.origin import Origin, check_as_encoded
from mispair.pairs.other_libraries import as_pairs, as_table
from mispair.pairs.pairs import Pairs, Vectors, subset
from mispair.pairs.remote import fetch, url_of
from mispair.pairs.source import Source
from mispair.support.row_order import check_order, labels_of

Check = Callable[[Source], None]


@dataclass(frozen=True)
class AuditInput(InputOptions):
    """The place of the pairs."""

    source: Path | None = None
    """Folder of embeddings, of features or of a training run; or images and captions."""
    urls: Mapping[Path, tuple[str, str]] = field(default_factory=dict)
    """URLs and versions of copies in the cache; see `fetched`."""

    @property
    def models(self) -> Encoders:
        """Encoder names, for images and captions."""
        return Encoders(self.image_model, self.text_model)

    def fetched(self) -> AuditInput:
        """Fetch the files at URLs to the cache; return the input with their copies."""
        folder = cache_folder(self.cache) / FETCHED
        copies = {place: fetch(url, folder) for place in self.places if (url := url_of(place))}
        # A query may be a signature, which is secret and changes each time, so the copy is recognised by its path.
        named = {copies[place]: url for place in copies if "?" not in (url := str(url_of(place)))}
        urls = {copy: (url, copy.parent.name) for copy, url in named.items()}
        left, right = (tuple(copies.get(path, path) for path in side) for side in (self.left, self.right))
        source, ids = (None if place is None else copies.get(place, place) for place in (self.source, self.ids))
        return replace(self, urls=urls, source=source, left=left, right=right, ids=ids)

    @property
    def places(self) -> list[Path]:
        """All paths of the input."""
        return [place for place in (self.source, *self.left, *self.right, self.ids) if place is not None]

    def check(self) -> None:
        """Raise if arguments contradict each other, or a file is not there."""
        if self.source is None:
            if not self.left or not self.right:
                raise ConflictError("no pairs", expected="images and captions, a folder, or both `left` and `right`")
        elif self.left or self.right or self.ids is not None:
            raise ConflictError("a folder and `left`, `right` or `ids`", expected="one of them")
        elif str(self.source) != "shapes" and url_of(self.source) is None and not self.source.exists():
            raise NotFoundError("no such file or folder", where=self.source)
        elif self.source.suffix == ".npy" and self.source.is_file():
            advice = "Give those of both as `left` and `right`."
            raise ConflictError("the vectors of one side", where=self.source, advice=advice)
        if self.split is not None and (self.source is None or self.is_run or self.is_raw):
            expected = "a folder of embeddings or features that has parts"
            raise ConflictError(repr(self.split), where="split", expected=expected)
        if self.columns and not (self.is_raw or self.ids is not None):
            what = "`image_column`, `caption_column` and `id_column` are for tables of images and captions and `ids`"
            raise ConflictError(what, advice="Leave them out.")

    @property
    def is_run(self) -> bool:
        """Whether these are the pairs of a training run."""
        return self.source is not None and is_run(self.source)

    @property
    def is_raw(self) -> bool:
        """Whether these are images and captions, to be encoded."""
        return self.source is not None and url_of(self.source) is None and not self.is_run and is_raw(self.source)

    def open(self, device: str) -> Source:
        """Open the pairs, without encoding images and captions; networks of a training run use `device`.

        Raises:
            ConfigError: Images are given, but the data names none.
            DataError: The data cannot be read.
        """
        if self.source is None:
            source = open_arrays(self.left, self.right, self.ids, self.images, self.columns)
        elif self.is_run:
            source = from_run(self.source, device, self.images)
        else:
            place, outside = self.source, self.allow_outside
            source = open_source(place, self.images, self.split, self.vectors, self.columns, allow_outside=outside)
        if self.images is not None and not source.has_images:
            raise _unused_images(source)
        return source

    def encoded(self, source: Source, device: str, console: Console | None = None) -> Source:
        """Return the opened pairs with vectors; encode images and captions."""
        if source.is_encoded:
            return source
        return encoded(source, replace(self.models, device=device), self.cache, console)


def encoded(pairs: Source, encoders: Encoders, cache: Path | None = None, console: Console | None = None) -> Source:
    """Encode images and captions; the vectors of several encoders are views of a side."""
    place = writable_cache(cache)
    loaded = encoders.views()
    if console is not None:
        for line in (f"Encoding {pairs.name}: {len(pairs):,} pairs", *(f"Note: {note}" for note in pairs.notes)):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    found = encode(pairs, loaded, place, console=console)
    hashes = as_hashes(found.hashes.read(slice(None)))
    return pairs.with_vectors(*found.sides(pairs.name), found.problems, hashes=hashes)


def open_given(
    left: Any,
    right: Any,
    ids: Any,
    groups: Any,
    texts: Sequence[str] | None,
    data: AuditInput,
    check: Check,
    device: str = "auto",
) -> Source:
    """Open the arguments of `mispair.audit`; call `check` before anything is encoded."""
    if right is None and isinstance(left, str | Path):
        data = replace(data, source=Path(left))
    elif (one := array_paths(left)) and (other := array_paths(right)):
        data = replace(data, left=one, right=other, ids=None if ids is None else Path(ids))
    if data.places:
        data = data.fetched()
        data.check()
        if data.source is not None and not data.is_raw:
            check_as_encoded(data.source)
        source = data.open(device)
        if not source.is_encoded:
            check(source)
        return data.encoded(source, device)
    encoders = replace(data.models, device=device)
    if isinstance(left, Pairs):
        if any(part is not None for part in (right, ids, groups, texts)):
            raise ConflictError("more than Pairs", expected="Pairs alone, which have both sides")
        return open_pairs_given(left, encoders, data.cache, check)
    rows = {"left": left, "right": right, "ids": ids, "groups": groups, "texts": texts}
    check_order({name: labels_of(part) for name, part in rows.items()})
    given = as_table(left) if right is None else as_pairs(left, right, ids)
    if given is None and right is None:
        kinds = "a path, a table of images and captions (pandas, polars, pyarrow, datasets), or two sides"
        raise ConflictError(f"one {type(left).__name__}", expected=f"{kinds}: vectors, or image paths and captions")
    if given is None:
        return from_memory(left, right, ids, groups, texts)
    pairs = open_table_given(given, data.images, data.columns)
    check(pairs)
    return encoded(pairs, encoders, data.cache)


def array_paths(side: Any) -> tuple[Path, ...]:
    """Return the files of vectors of a side, one an encoder; none if the side is something else."""
    if isinstance(side, str | Path):
        return (Path(side),)
    several = isinstance(side, list | tuple) and all(isinstance(path, str | Path) for path in side)
    return tuple(map(Path, side)) if several and all(Path(path).suffix == ".npy" for path in side) else ()


def open_pairs_given(
    pairs: Pairs, encoders: Encoders | None = None, cache: Path | None = None, check: Check = lambda _: None
) -> Source:
    """Open pairs in memory; encode pairs of image files."""
    if pairs.source is None:
        return from_pairs(pairs)
    if pairs.source.is_encoded:
        return pairs.source
    check(pairs.source)
    return encoded(pairs.source, encoders or Encoders(), cache)


def encoded_pairs(pairs: Pairs, device: str = "auto", console: Console | None = None) -> Pairs:
    """Encode pairs of image files and captions by the default encoders, without unreadable pairs; keep other pairs."""
    if pairs.source is None or pairs.source.is_encoded:
        return pairs
    encoders = Encoders(device=device)
    source = encoded(pairs.source, encoders, None, console)
    images = np.arange(len(source)) if source.groups is None else source.groups
    _, first, link = np.unique(images, return_index=True, return_inverse=True)
    found = replace(
        pairs,
        left=Vectors(source.left.gather(first)),
        right=Vectors(source.right.block(0, len(source))),
        link=link,
        left_ids=source.image_texts(first),
        right_ids=source.texts(),
        origin=Origin(encoders.image_model, encoders.text_model),
        source=source,
    )
    bad = source.known_rows
    return found if not len(bad) else subset(found, np.delete(np.arange(len(found)), bad))


def _unused_images(source: Source) -> ConflictError:
    if source.table is not None:
        found = f"{source.table.parts[0].path}: {source.table.found()}"
        return ConflictError(found, where="images", expected="a column image_path, image or path")
    where = {
        "arrays": "Give a table with a column image_path as `ids`",
        "clip": f"Add metadata/metadata_0.csv with a column image_path to {source.name}",
        "precomp": f"Add {source.split}_ids.txt with the name of an image on each line",
    }.get(source.layout, "Its data has no names of images")
    what = f"it is unknown which image belongs to which pair of {source.name}"
    return ConflictError(what, where="images", advice=f"{where}, or leave `images` out.")
