"""`Pairs`: two sides, the link between them, and the true link where it is known.

Pair i joins right item i with left item `link[i]`. A data set with five captions per image has five times as many
right items as left ones; a data set of vectors usually has `link = 0, 1, 2, ...`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mispair.errors import ShapeError
from mispair.pairs.npy import refuse_masked
from mispair.pairs.origin import Origin
from mispair.pairs.source import Source
from mispair.pairs.tables import Roles
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.arrays import FloatArray, IntArray

Kind = Literal["regions", "tokens", "vectors"]
MATCH_THRESHOLD = 0.5  # a pair with a lower match score is flagged as mismatched
UNKNOWN = 0.5  # match score of a pair that could not be read
SHOWN = 5  # rows in a notebook
HELD_OUT = 5000  # left items that validate, at most; and that test, of data that does not say which
SAMPLE = 16  # items that a fingerprint holds as a whole, and about as many numbers of all others


@dataclass(frozen=True)
class Regions:
    """A set of local features per item, such as 36 detected objects of an image."""

    features: FloatArray  # (N, R, D)
    kind: Kind = field(default="regions", init=False)

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True)
class Tokens:
    """One text per item, as token ids of one vocabulary, without padding."""

    ids: npt.NDArray[np.int32]  # all texts one after the other
    offsets: IntArray  # (N + 1,): text i is ids[offsets[i]:offsets[i + 1]]
    vocabulary: Vocabulary
    texts: Sequence[str] = ()  # as read, for display; empty where only ids are known
    kind: Kind = field(default="tokens", init=False)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Vectors:
    """One vector per item: an embedding from any frozen encoder."""

    features: FloatArray  # (N, D)
    kind: Kind = field(default="vectors", init=False)

    def __len__(self) -> int:
        return len(self.features)


Side = Regions | Tokens | Vectors


@dataclass(frozen=True, repr=False)
class Pairs:
    """Two sides and the link between them.

    Attributes:
        left: The side that several right items may share (images).
        right: The side with one item per pair (captions).
        link: Left row of each pair as used for training; some pairs may be mismatched.
        truth: True left row of each right item, where it is known. Used for reports; only the methods `oracle` and
            `mscn`, and `mend` with `trust="truth"`, train with it.
        match_score: Probability that each pair is matched, estimated by an audit.
        flagged: Which pairs the audit flags as mismatched; by default those with a match score below 0.5. Networks
            warm up on the others; any other use is up to the method.
        groups: Group of each left item. Items of one group count as correct for each other in the evaluation (the
            same image stored twice). Every item is its own group by default.
        left_ids: Names of the left items for display, such as file names; empty where unknown.
        right_ids: The same for the right items, where they are not texts themselves.
        name: Source of the pairs, for messages.
        origin: How the features were made from files; None if unknown.
        source: What the pairs were read from, row by row: ids, captions, image files. An audit reads it; images and
            captions are encoded only then, or by `mispair.fit`, and until then both sides have vectors of width 0.
    """

    left: Side
    right: Side
    link: IntArray
    truth: IntArray | None = None
    groups: IntArray | None = None
    left_ids: Sequence[str] = ()
    right_ids: Sequence[str] = ()
    name: str = "pairs"
    match_score: FloatArray | None = None
    flagged: npt.NDArray[np.bool_] | None = None
    origin: Origin | None = None
    source: Source | None = field(default=None, compare=False)

    @classmethod
    def from_arrays(
        cls,
        left: Any,
        right: Any,
        *,
        ids: Any = None,
        captions: Sequence[str] | None = None,
        groups: Any = None,
        name: str = "the given arrays",
    ) -> Pairs:
        """Pairs of two sets of vectors; row i of both is one pair.

        Args:
            left: Vectors (N, D) of numpy, torch, pandas, polars or pyarrow, or a list; or a list of the vectors of
                several encoders.
            right: Vectors (N, E), likewise.
            ids: One name a pair; by default its number.
            captions: One text a pair, for people.
            groups: One value a pair; pairs with the same one share their left item.
            name: Source of the pairs, for messages.

        >>> Pairs.from_arrays(np.eye(3), np.eye(3), ids=["a", "b", "c"])
        <Pairs "the given arrays": 3 pairs of vectors and vectors>
        """
        from mispair.pairs.layouts.arrays import from_memory, in_memory

        source = from_memory(left, right, ids=ids, groups=groups, texts=captions)
        return cls(
            Vectors(in_memory(source.left)),
            Vectors(in_memory(source.right)),
            np.arange(len(source)),
            groups=source.groups,
            left_ids=() if ids is None else source.ids(),
            right_ids=() if captions is None else source.texts(),
            name=name,
            source=source,
        )

    @classmethod
    def from_table(
        cls,
        table: Any,
        images: str | Path | None = None,
        *,
        image_column: str = "",
        caption_column: str = "",
        id_column: str = "",
    ) -> Pairs:
        """Pairs of images and captions in a table of pandas, polars, pyarrow or datasets, or in a file.

        Args:
            table: One row for each pair: an image or its path, a caption, and perhaps an id.
            images: Folder that the image paths start from.
            image_column: Column of images, if its name is unusual.
            caption_column: Column of captions, likewise.
            id_column: Column of ids, likewise.
        """
        from mispair.pairs.layouts.opening import open_raw
        from mispair.pairs.layouts.table import open_table_given

        known: Roles = {"image_path": image_column, "caption": caption_column, "id": id_column}
        columns: Roles = {role: column for role, column in known.items() if column}
        if isinstance(table, str | Path):
            return cls._of(open_raw(Path(table), None if images is None else Path(images), columns))
        return cls._of(open_table_given(table, images, columns))

    @classmethod
    def from_files(cls, path: str | Path, images: str | Path | None = None, *, split: str | None = None) -> Pairs:
        """Pairs of a file or folder in any layout: images and captions, vectors, or features.

        Args:
            path: A table, a JSON file, tars, or a folder.
            images: Folder that the image paths start from.
            split: Split of a folder that has several; train by default.
        """
        from mispair.pairs.layouts import opening

        if opening.is_data_set(Path(path)):
            return opening.load(path, split or "train")
        return cls._of(opening.open_source(path, images))

    @classmethod
    def _of(cls, source: Source) -> Pairs:
        """Pairs of all rows; images and captions have vectors of width 0 until they are encoded."""
        if source.is_encoded:
            rows = np.arange(len(source))
            left, right = map(Vectors, source.gather(rows))
            return cls(left, right, rows, name=source.name, right_ids=source.texts(), source=source)
        images = np.arange(len(source)) if source.groups is None else source.groups
        left, right = (Vectors(np.empty((count, 0), np.float32)) for count in (int(images.max()) + 1, len(source)))
        return cls(left, right, images, name=source.name, source=source)

    def __repr__(self) -> str:
        kinds = "images and captions" if self._unencoded else f"{self.left.kind} and {self.right.kind}"
        flagged = "" if self.flagged is None else f", {self.flagged.sum():,} flagged"
        return f'<Pairs "{self.name}": {len(self):,} pairs of {kinds}{flagged}>'

    def _repr_html_(self) -> str:
        """The first rows, with thumbnails where there are image files."""
        from mispair.support.html import html_table, image_cell

        rows, source = range(min(len(self), SHOWN)), self.source
        columns: dict[str, list[Any]] = {"row": list(rows)}
        if source is not None:
            columns["id"] = source.ids(rows)
            if source.has_images:
                columns["image"] = [image_cell(source.image(row)) for row in rows]
            columns["caption"] = source.texts(rows)
        else:
            texts = self.texts
            columns["left"] = [self.left_ids[self.link[row]] if self.left_ids else int(self.link[row]) for row in rows]
            columns["right"] = [texts[row] if texts else row for row in rows]
        if self.match_score is not None and self.flagged is not None:
            columns["match score"] = [float(self.match_score[row]) for row in rows]
            columns["flagged"] = ["yes" if self.flagged[row] else "" for row in rows]
        return html_table(zip(*columns.values(), strict=True), list(columns), repr(self)[1:-1])

    @property
    def _unencoded(self) -> bool:
        return self.source is not None and not self.source.is_encoded

    def __post_init__(self) -> None:
        for label, side in (("left", self.left), ("right", self.right)):
            _check_side(side, f"the {label} side of {self.name}")
        count = len(self.right)
        for label, wanted in {"link": count, "truth": count, "groups": len(self.left)}.items():
            rows = getattr(self, label)
            if rows is None:
                continue
            where = f"{label} of {self.name}"
            refuse_masked(rows, where)
            if not (isinstance(rows, np.ndarray) and rows.shape == (wanted,) and rows.dtype.kind in "iu"):
                raise ShapeError(described(rows), where=where, expected=f"a numpy array of {wanted:,} whole numbers")
            if label != "groups" and wanted and not (rows.min() >= 0 and rows.max() < len(self.left)):
                found = f"left rows {rows.min():,} to {rows.max():,}"
                raise ShapeError(found, where=where, expected=f"rows 0 to {len(self.left) - 1:,}")
            # torch takes neither every kind of whole number nor every order in memory
            object.__setattr__(self, label, np.require(rows, np.int64, ["C", "W"]))
        if self.match_score is not None:
            refuse_masked(self.match_score, f"match_score of {self.name}")
            score, expected = self.match_score, f"a numpy array of {count:,} probabilities; 0.5 stands for not known"
            if not (isinstance(score, np.ndarray) and score.shape == (count,) and score.dtype.kind == "f"):
                raise ShapeError(described(score), where=f"match_score of {self.name}", expected=expected)
            if not ((score >= 0) & (score <= 1)).all():
                raise ShapeError("not all between 0 and 1", where=f"match_score of {self.name}", expected=expected)
            if self.flagged is None:
                object.__setattr__(self, "flagged", score < MATCH_THRESHOLD)
        if self.flagged is not None and (self.flagged.shape != (count,) or self.flagged.dtype != np.bool_):
            raise ShapeError(described(self.flagged), where=f"flagged of {self.name}", expected=f"{count:,} booleans")
        for label, ids, side in (("left_ids", self.left_ids, self.left), ("right_ids", self.right_ids, self.right)):
            if ids and len(ids) != len(side):
                raise ShapeError(f"{len(ids):,} ids", where=f"{label} of {self.name}", expected=f"{len(side):,}")

    def __len__(self) -> int:
        return len(self.link)

    @property
    def texts(self) -> Sequence[str]:
        """The texts of the right items; empty if unknown."""
        return self.right.texts if isinstance(self.right, Tokens) else self.right_ids

    @property
    def left_groups(self) -> IntArray:
        """Group of each left item."""
        return np.arange(len(self.left)) if self.groups is None else self.groups

    @property
    def right_groups(self) -> IntArray:
        """Group of each right item, by its true partner if known."""
        return self.left_groups[self.link if self.truth is None else self.truth]

    @property
    def mismatched(self) -> npt.NDArray[np.bool_] | None:
        """(N,) whether each pair is mismatched; None if the truth is unknown."""
        if self.truth is None:
            return None
        return np.asarray(self.left_groups[self.link] != self.left_groups[self.truth])

    def with_link(self, link: IntArray) -> Pairs:
        """The same items with another link; the present link becomes the truth, unless one is known already."""
        return replace(
            self,
            link=link,
            truth=self.link if self.truth is None else self.truth,
            match_score=None,
            flagged=None,
            source=None,
        )

    def with_audit(self, match_score: FloatArray, flagged: npt.NDArray[np.bool_] | None = None) -> Pairs:
        """The same pairs with an audit's columns.

        Args:
            match_score: (N,) probability that each pair matches; NaN, for a pair that could not be read, becomes 0.5.
            flagged: (N,) whether each pair is flagged; by default those with a match score below 0.5.
        """
        known = np.where(np.isnan(match_score), match_score.dtype.type(UNKNOWN), match_score)
        return replace(self, match_score=known, flagged=flagged)


def _check_side(side: Any, where: str) -> None:
    """Raise if a value is not a side, or its features have the wrong type or number of dimensions."""
    if not isinstance(side, Side):
        advice = "An array of embeddings goes in as mispair.Vectors(array)."
        raise ShapeError(described(side), where=where, expected="Vectors, Regions or Tokens", advice=advice)
    if isinstance(side, Tokens):
        return
    ndim = 3 if isinstance(side, Regions) else 2
    features = side.features
    refuse_masked(features, where)
    if not (isinstance(features, np.ndarray) and features.dtype.kind in "fiu" and features.ndim == ndim):
        expected = f"{side.kind} in a numpy array of numbers with {ndim} dimensions"
        raise ShapeError(described(features), where=where, expected=expected)


def described(value: Any) -> str:
    """Type of a value for messages; of an array also its dtype and shape.

    >>> described(np.zeros((2, 3)))
    'an array of float64 with shape (2, 3)'
    >>> described([1, 2])
    'a value of type list'
    """
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return f"a value of type {type(value).__name__}"


def fingerprint(pairs: Pairs, *, truth: bool = False) -> str:
    """Hash of link, groups, scores, texts and some of the features, and optionally of the truth."""
    digest = hashlib.sha256(np.ascontiguousarray(pairs.link).tobytes())
    if pairs.groups is not None:
        digest.update(np.ascontiguousarray(pairs.groups).tobytes())
    if truth and pairs.truth is not None:  # with a name, because without groups it stands in their place
        digest.update(b"truth" + np.ascontiguousarray(pairs.truth).tobytes())
    if pairs.match_score is not None:
        digest.update(b"match_score" + np.ascontiguousarray(pairs.match_score).tobytes())
    if pairs.flagged is not None:
        digest.update(b"flagged" + np.ascontiguousarray(pairs.flagged).tobytes())
    for side in (pairs.left, pairs.right):
        if isinstance(side, Tokens):
            digest.update(np.ascontiguousarray(side.ids).tobytes())
        else:
            sample = np.linspace(0, len(side) - 1, SAMPLE, dtype=np.int64)
            digest.update(np.ascontiguousarray(side.features[sample]).tobytes())
            if len(side) > SAMPLE:
                digest.update(np.ascontiguousarray(_some_numbers(side.features)).tobytes())
    return digest.hexdigest()


def _some_numbers(features: FloatArray) -> FloatArray:
    """Some numbers of the first and of other regions of each item; reading all takes minutes from a disk."""
    rows = features if features.ndim == 2 else features[:, :: max(1, features.shape[1] // 2)]
    return rows[..., :: max(1, rows.shape[-1] // SAMPLE)]


def select(side: Side, rows: IntArray) -> Side:
    """The items at `rows`, in that order."""
    if isinstance(side, Tokens):
        lengths = side.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        take = np.repeat(side.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        texts = [side.texts[row] for row in rows] if side.texts else ()
        return Tokens(side.ids[take], offsets, side.vocabulary, texts)
    return replace(side, features=side.features[rows])


def subset(pairs: Pairs, rows: IntArray) -> Pairs:
    """The pairs at ascending `rows` with their present and true left items."""
    named = [pairs.link[rows]] if pairs.truth is None else [pairs.link[rows], pairs.truth[rows]]
    left = np.unique(np.concatenate(named))
    return replace(
        pairs,
        left=select(pairs.left, left),
        right=select(pairs.right, rows),
        link=np.searchsorted(left, pairs.link[rows]),
        truth=None if pairs.truth is None else np.searchsorted(left, pairs.truth[rows]),
        groups=None if pairs.groups is None else pairs.groups[left],
        left_ids=[pairs.left_ids[row] for row in left] if pairs.left_ids else (),
        right_ids=[pairs.right_ids[row] for row in rows] if pairs.right_ids else (),
        match_score=None if pairs.match_score is None else pairs.match_score[rows],
        flagged=None if pairs.flagged is None else pairs.flagged[rows],
        source=None,
    )


def with_first_items(pairs: Pairs, most: int) -> Pairs:
    """Only the pairs of the first `most` linked left items."""
    if len(pairs.left) <= most:
        return pairs
    last = np.unique(pairs.link)[:most][-1]
    return subset(pairs, np.flatnonzero(pairs.link <= last))


def unflagged(pairs: Pairs) -> Pairs:
    """Pairs without the flagged ones; all pairs if there was no audit or fewer than two are left."""
    if pairs.flagged is None:
        return pairs
    rows = np.flatnonzero(~pairs.flagged)
    return pairs if len(rows) in (0, 1, len(pairs)) else subset(pairs, rows)
