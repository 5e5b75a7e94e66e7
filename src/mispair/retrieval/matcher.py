"""`Matcher`: a trained model of one or several networks, with its vocabulary."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from mispair.compute.devices import autocast, pick_device
from mispair.config import BEST, Config, naming_source
from mispair.errors import ConflictError, DamagedError, InvalidValueError, NotFoundError, ShapeError, TooFewError
from mispair.models import CosineNetwork, Network, SideSpec, build, find, weight_bytes
from mispair.models.inference import alike, average, encode_side, similarities
from mispair.pairs.batches import SideLoader
from mispair.pairs.layouts.opening import SHAPES, load_split
from mispair.pairs.npy import check_finite
from mispair.pairs.origin import Origin, Projection
from mispair.pairs.pairs import Pairs, Regions, Side, Tokens, Vectors, described
from mispair.pairs.vocabulary import Vocabulary
from mispair.retrieval.evaluation import Evaluation, check_folds, evaluate, evaluate_in_blocks
from mispair.retrieval.onnx_export import export_onnx
from mispair.retrieval.vector_index import Encode, VectorIndex, build_index, open_index
from mispair.support.arrays import FloatArray
from mispair.support.html import html_table
from mispair.support.tensor_files import load_tensors, save_tensors

FORMAT = 1
MOST_NETWORKS = 100  # in a file
HELD = 1 << 28  # similarities of a network in memory: 1 GiB
_MEAN, _BASIS = "origin.mean", "origin.basis"  # names of tensors
SideName = Literal["left", "right"]
Items = Side | FloatArray | Sequence[str]


class Matcher:
    """Score how well items of two sides match.

    >>> matcher = mispair.Matcher.load("runs/mine")  # doctest: +SKIP
    >>> matcher.score(images, ["a red bicycle"])  # doctest: +SKIP

    Attributes:
        config: Settings of the training.
        specs: Kind and size of the left and the right side.
        networks: The trained networks; their similarities are averaged.
        models: The model of each network.
        vocabulary: Words of the text side; None if missing.
        origin: Encoders of the training features, for new files; None if unknown.
        evaluations: Results of `evaluate`, by the name of the pairs.
    """

    def __init__(
        self,
        config: Config,
        specs: tuple[SideSpec, SideSpec],
        networks: Sequence[Network],
        vocabulary: Vocabulary | None,
        device: torch.device,
        models: Sequence[str] = (),
        origin: Origin | None = None,
    ) -> None:
        self.config, self.specs, self.vocabulary, self.device = config, specs, vocabulary, device
        self.origin = origin
        self.evaluations: dict[str, Evaluation] = {}
        self.models = list(models) or [config.model] * len(networks)
        # Not moved to the device, even if they are there: a GRU would get new memory for its weights, and the recorded
        # CUDA graphs of a training that continues would change the old one.
        self.networks = [network.eval() for network in networks]

    def __repr__(self) -> str:
        models = ", ".join(dict.fromkeys(self.models))
        count = "1 network" if len(self.networks) == 1 else f"{len(self.networks)} networks"
        sides = " with ".join(str(spec) for spec in self.specs)
        by = "" if self.origin is None else f" by {self.origin}"
        return f"<Matcher: {models}, {count}, method {self.config.method}, {sides}{by}, on {self.device}>"

    def _repr_html_(self) -> str:
        """Show the model and the results of its evaluations as tables."""
        weights = sum(weight.numel() for network in self.networks for weight in network.parameters())
        rows = [
            ("model", ", ".join(self.models)),
            ("method", self.config.method),
            ("left side", self.specs[0]),
            ("right side", self.specs[1]),
            ("encoders", self.origin or "unknown"),
            ("weights", f"{weights:,}"),
            ("device", self.device),
        ]
        evaluated = [result.to_html(name) for name, result in self.evaluations.items()]
        return "\n".join([html_table(rows, ["Matcher", ""]), *evaluated])

    def score(self, left: Items, right: Items) -> FloatArray:
        """Score every left item with every right item, (l, r); higher is better.

        A side is one of `mispair.load`, an array of features, or a list of texts.
        """
        matrices = self._matrices(self._side(left, "left"), self._side(right, "right"))
        scores: FloatArray = average(self.networks, matrices).cpu().numpy()
        return scores

    def encode(self, items: Items, side: SideName) -> FloatArray:
        """Return one unit vector an item, (N, D); vectors of several networks are joined."""
        if side not in ("left", "right"):
            raise InvalidValueError(repr(side), where="side", expected="left or right")
        loader = SideLoader(self._side(items, side), self.device)
        with autocast(self.device, self.config.precision):
            encoded = [encode_side(network, loader, left=side == "left").pooled() for network in self.networks]
        vectors: FloatArray = (torch.cat(encoded, dim=1) / math.sqrt(len(encoded))).cpu().numpy()
        return vectors

    def index(
        self,
        items: Items,
        side: SideName = "left",
        *,
        out: str | Path | None = None,
        approximate: bool | None = None,
        overwrite: bool = False,
        console: Console | None = None,
    ) -> VectorIndex:
        """Index many items, so `.search("a red bicycle")` takes milliseconds; only for vse and two-tower.

        Args:
            items: Items to search, by default images.
            side: Their side; queries are of the other one.
            out: Folder of the index, for `open_index`; by default it is in memory only.
            approximate: Use usearch (extra `index`); by default for more than 20,000 items.
            overwrite: Replace another index in `out`.
            console: Console for progress; by default nothing is shown.
        """
        self._check_vectors("index")
        vectors, encode, made_by = self.encode(items, side), self._query_encoder(side), self._digest(side)
        folder = None if out is None else Path(out)
        return build_index(vectors, encode, folder, approximate, made_by=made_by, overwrite=overwrite, console=console)

    def open_index(self, folder: str | Path, side: SideName = "left", *, verify: bool = True) -> VectorIndex:
        """Open an index written by `index(..., out=folder)` of this model, mapped into memory.

        Args:
            folder: Folder of the index.
            side: Side of the items.
            verify: Read it once to notice damage (about a second a gigabyte).
        """
        self._check_vectors("open_index")
        return open_index(folder, self._query_encoder(side), verify=verify, made_by=self._digest(side))

    def to_onnx(self, out: str | Path) -> list[Path]:
        """Write `left.onnx` and `right.onnx` to a folder (extra `onnx`). Only for vse and two-tower.

        The input `items` has vectors (N, D) or regions (N, n, D), as in the training. Texts are word ids (N, n),
        padded with 0, and their `lengths` (N,): `words.json` has the words by id, and a text is `<start>`, its first
        250 lower-case words (`mispair.pairs.vocabulary.tokenize`) and `<end>`. The output `vectors` equals `encode`:
        the score of two items is the dot product.
        """
        return export_onnx(self._check_vectors("to_onnx"), self.specs, self.vocabulary, Path(out))

    def _digest(self, side: SideName) -> str:
        """Digest the side and all weights: vectors of two models cannot be compared."""
        digest = hashlib.sha256(side.encode())
        for network in self.networks:
            for name, tensor in network.state_dict().items():
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _query_encoder(self, side: SideName) -> Encode:
        other: SideName = "right" if side == "left" else "left"
        return lambda items: self.encode(items, other)

    def _check_vectors(self, what: str) -> list[CosineNetwork]:
        """Return the networks; raise if one has no vectors."""
        networks = [network for network in self.networks if isinstance(network, CosineNetwork)]
        if len(networks) < len(self.networks):
            found = f"the model {', '.join(dict.fromkeys(self.models))} compares regions with words"
            expected = "a model with one vector an item (vse, two-tower)"
            raise ConflictError(found, where=what, expected=expected, advice="Use score")
        return networks

    def evaluate(self, pairs: Pairs, folds: int = 1) -> Evaluation:
        """Measure retrieval in both directions over all items of `pairs`, and the mean over `folds` slices of them."""
        check_is_pairs(pairs, "evaluate: pairs")
        check_folds(pairs, folds)
        left, right = self._side(pairs.left, "left"), self._side(pairs.right, "right")
        if len(left) * len(right) > HELD:
            with autocast(self.device, self.config.precision):
                found = evaluate_in_blocks(self.networks, replace(pairs, left=left, right=right), self.device, folds)
        else:
            matrices = self._matrices(left, right)
            found = evaluate(matrices, pairs, folds, average(self.networks, matrices))
        self.evaluations[pairs.name] = found
        return found

    def save(self, path: str | Path) -> None:
        """Write one safetensors file for `load`."""
        tensors = {
            f"{number}.{name}": tensor.detach().cpu().contiguous()
            for number, network in enumerate(self.networks)
            for name, tensor in network.state_dict().items()
        }
        about: dict[str, Any] = {
            "format": FORMAT,
            "config": self.config.flat(),
            "specs": [asdict(spec) for spec in self.specs],
            "networks": len(self.networks),
            "vocabulary": list(self.vocabulary.words) if self.vocabulary else None,
        }
        if len(set(self.models)) > 1:
            about["models"] = self.models
        if (origin := self.origin) is not None:
            about["origin"] = {name: getattr(origin, name) for name in ("image_model", "text_model", "grid")}
            if origin.projection is not None:
                tensors[_MEAN] = torch.from_numpy(origin.projection.mean)
                tensors[_BASIS] = torch.from_numpy(np.ascontiguousarray(origin.projection.basis))
        save_tensors(path, tensors, about)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Matcher:
        """Read a saved matcher, or the best one of a run folder."""
        file = model_file(path)
        about, tensors = _read_model(file)
        where = pick_device(device)
        try:
            with naming_source(str(file)):
                config = Config().changed(about["config"])
            left, right = (SideSpec(**spec) for spec in about["specs"])
            vocabulary = Vocabulary(tuple(about["vocabulary"])) if about["vocabulary"] else None
            words = len(vocabulary) if vocabulary else 0
            if wrong := [spec.size for spec in (left, right) if spec.kind == "tokens" and spec.size != words]:
                raise ValueError(f"its vocabulary has {words} words, not {wrong[0]}")
            if about["networks"] not in range(1, MOST_NETWORKS + 1):
                raise ValueError(f"{about['networks']} networks")
            models = about.get("models", [config.model] * about["networks"])
            if len(models) != about["networks"]:
                raise ValueError(f"{len(models)} models")
            there = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in tensors.values())
            if sum(weight_bytes(replace(config, model=model), left, right) for model in models) > there:
                raise ValueError("its settings belong to larger networks")
            networks = [build(replace(config, model=model), left, right, seed=0).to(where) for model in models]
            origin = _origin(about.get("origin"), tensors)
            for number, network in enumerate(networks):
                prefix = f"{number}."
                network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            cause = textwrap.shorten(str(error), 160, placeholder=" ...")
            what = f"the file is not a complete mispair model ({cause})"
            raise DamagedError(what, where=file, advice="Copy it again, or train it again") from None
        return cls(config, (left, right), networks, vocabulary, where, models, origin)

    def _matrices(self, left: Side, right: Side) -> list[torch.Tensor]:
        with autocast(self.device, self.config.precision):
            return similarities(self.networks, SideLoader(left, self.device), SideLoader(right, self.device))

    def _side(self, items: Items, name: SideName) -> Side:
        """Turn items into a side for the networks."""
        spec = self.specs[0 if name == "left" else 1]
        side = self._texts(items) if spec.kind == "tokens" else _features(items)
        if side is None:
            form = "a list of texts" if spec.kind == "tokens" else "a numpy array of numbers"
            by = f" by {self.origin}" if self.origin is not None and spec.kind != "tokens" else ""
            advice = "`mispair search` makes them of files and texts" if by else ""
            raise ShapeError(described(items), where=name, expected=f"{spec}{by}, as {form}", advice=advice)
        found = SideSpec.of(side)
        if not all(takes(model, spec, found) for model in self.models):
            raise ShapeError(str(found), where=name, expected=str(spec))
        if not len(side):
            raise TooFewError("no items to score", where=name)
        check_content(side, f"The {name} side")
        return side

    def _texts(self, items: Items) -> Tokens | None:
        """Read texts with the vocabulary of the model; None if the items are not texts."""
        if isinstance(items, Tokens) and items.vocabulary == self.vocabulary:
            return items
        texts = items.texts if isinstance(items, Tokens) else items
        if not isinstance(texts, Sequence) or isinstance(texts, str) or self.vocabulary is None:
            return None
        only_ids = isinstance(items, Tokens) and len(texts) != len(items)
        if only_ids or not all(isinstance(text, str) for text in texts):
            return None
        return Tokens(*self.vocabulary.encode(texts), self.vocabulary, texts)


def load_for(
    matcher: Matcher,
    split: str,
    data: str | None = None,
    captions_per_image: int | None = None,
    *,
    advice: str = "Give `data` with the folder of the data set",
) -> Pairs:
    """Read one split of `data`, by default of the training data of a model, with the vocabulary of the model.

    The `advice` is for the error if its training data was in memory, or is gone.
    """
    config = matcher.config
    if data:
        if captions_per_image is None and Path(data).resolve() == Path(config.data):
            captions_per_image = config.captions_per_image
        config = replace(config, data=data, captions_per_image=captions_per_image)
    elif captions_per_image is not None:
        what = "it belongs to `data`, which is not given; by default the model uses its own training data"
        raise ConflictError(what, where="captions_per_image")
    elif config.data != SHAPES and not Path(config.data).is_absolute():  # `mispair train` keeps absolute paths
        raise NotFoundError(
            "the model was trained from Python, on pairs of this name", where=config.data, advice=advice
        )
    elif config.data != SHAPES and not Path(config.data).exists():
        what = "the model was trained on this data, which is no longer there"
        raise NotFoundError(what, where=config.data, advice=advice)
    return load_split(config, split, matcher.vocabulary)


def model_file(path: str | Path) -> Path:
    """Find the file of a saved model: the best one of a run folder, or the file itself."""
    path = Path(path)
    file = path / BEST if path.is_dir() else path
    if file.is_file():
        return file
    if (path / "config.toml").is_file():
        advice = "Run the same `mispair train` again to resume"
        raise NotFoundError("the run has no model yet", where=path, advice=advice)
    advice = "Give a run folder of `mispair train` or a saved .safetensors file"
    raise NotFoundError("no such file", where=file, advice=advice)


def _read_model(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the description of a saved model and its weights."""
    tensors, about = load_tensors(file)
    if about is None:
        advice = "Give a run folder, or a file of Matcher.save"
        raise DamagedError("not a model saved by mispair", where=file, advice=advice)
    if about.get("format") != FORMAT:
        raise DamagedError("another format", where=file, expected=f"format {FORMAT}", advice="Update mispair")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DamagedError(f"{name} has weights that are not finite", where=file, advice="Copy the file again")
    return about, tensors


def _origin(about: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Origin | None:
    if about is None:
        return None
    projection = Projection(tensors[_MEAN].numpy(), tensors[_BASIS].numpy()) if _BASIS in tensors else None
    return Origin(**about, projection=projection)


def takes(model: str, trained: SideSpec, given: SideSpec) -> bool:
    """Whether a model trained on one kind of side can score another."""
    return given == trained or (not find(model).fixed_regions and replace(given, count=trained.count) == trained)


def check_is_pairs(value: Any, what: str) -> None:
    """Raise a `ShapeError` if a value is not `Pairs`."""
    if not isinstance(value, Pairs):
        raise ShapeError(f"a value of type {type(value).__name__}", where=what, expected="Pairs, as from mispair.load")


def check_content(side: Side, what: str) -> None:
    """Raise for values that are not finite, texts without words, and words outside their vocabulary."""
    if not isinstance(side, Tokens):
        check_finite(side.features, what)
        return
    if len(side) and side.lengths.min() < 1:
        found = f"text {side.lengths.argmin():,} has no words"
        raise ShapeError(found, where=what, advice="Take it out, or give it <unk>")
    size = len(side.vocabulary)
    if len(side.ids) and not (side.ids.min() >= 0 and side.ids.max() < size):
        found = f"words {side.ids.min():,} to {side.ids.max():,}"
        expected = f"words 0 to {size - 1:,} of the vocabulary"
        raise ShapeError(found, where=what, expected=expected, advice="Encode the texts with it again")


def evaluate_together(matchers: Sequence[Matcher], pairs: Pairs, folds: int = 1) -> Evaluation:
    """Evaluate the mean similarities of several models: SGRAF is one SGR and one SAF.

    Returns:
        Like `Matcher.evaluate`; `networks` has one entry for each model.
    """
    if not matchers:
        raise TooFewError("there is no model to evaluate", where="evaluate_together")
    check_is_pairs(pairs, "evaluate_together: pairs")
    check_folds(pairs, folds)
    for other in matchers[1:]:
        check_alike(matchers[0], other)
    sides = [(each._side(pairs.left, "left"), each._side(pairs.right, "right")) for each in matchers]
    bounded = not alike([network for each in matchers for network in each.networks])
    means = [
        average(each.networks, each._matrices(*both), bounded=bounded).to(matchers[0].device)
        for each, both in zip(matchers, sides, strict=True)
    ]
    return evaluate(means, pairs, folds)


def check_alike(one: Matcher, other: Matcher) -> None:
    """Raise a `ConflictError` if two models read different data and cannot be averaged."""
    for name, mine, theirs in zip(("left", "right"), one.specs, other.specs, strict=True):
        if mine.kind != theirs.kind or (mine.kind != "tokens" and mine.size != theirs.size):
            what = f"one model takes {mine} and another {theirs}"
            raise ConflictError(what, where=f"the {name} side", expected="models of the same kind of data")
    if one.vocabulary != other.vocabulary:
        advice = "Train both on the same captions, or give both the same `vocab`"
        raise ConflictError("the models have different vocabularies", advice=advice)


def _features(items: Items) -> Side | None:
    if isinstance(items, np.ndarray) and items.ndim in (2, 3) and items.dtype.kind in "fiu":
        items = items if items.dtype.kind == "f" else items.astype(np.float32)
        return Vectors(items) if items.ndim == 2 else Regions(items)
    return items if isinstance(items, Regions | Vectors) else None
