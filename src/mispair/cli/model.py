"""The commands `mispair train`, `eval` and `search`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from mispair.cli.output import console, print_json, print_table
from mispair.config import RENAMED, Config, read_recipe
from mispair.errors import ConfigError
from mispair.support.renamed import current_flag

if TYPE_CHECKING:
    from mispair.data.pairs import Pairs
    from mispair.retrieval.matcher import Matcher
    from mispair.retrieval.search import TextEncoder


@dataclass(frozen=True)
class TrainArguments:
    """Train a matching model. The same command again goes on where an interrupted run stopped."""

    config: OmitArgPrefixes[Config]
    out: Path
    """Run folder: settings, log, checkpoints and the best model."""
    recipe: str | None = None
    """TOML file with settings, or the name of one that comes with mispair; flags win over it."""
    json: bool = False
    """Print the result as JSON."""


def train(argv: Sequence[str]) -> int:
    """Train a matching model."""
    argv = [current_flag(word, RENAMED) for word in argv]
    defaults = read_recipe(_peek(argv, "--recipe")) if _peek(argv, "--recipe") else Config()
    arguments = tyro.cli(
        TrainArguments, args=argv, prog="mispair train", default=TrainArguments(defaults, out=tyro.MISSING)
    )
    from mispair.data.loading import with_absolute_paths
    from mispair.training.fit import train_and_test

    config = with_absolute_paths(arguments.config)
    result = train_and_test(config, arguments.out, console())
    if arguments.json:
        print_json(result.metrics())
    else:
        title = f"{config.method} {config.model}, tested on {result.tested_on}"
        _print_retrieval(title, result.evaluation.metrics())
        print(f"Run folder: {arguments.out}")
    return 0


def evaluate(
    run: Positional[Path],
    *,
    other: Annotated[Path | None, tyro.conf.arg(name="with")] = None,
    data: str | None = None,
    split: str = "test",
    captions_per_image: int | None = None,
    folds: int = 1,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Test a trained model: R@K and rSum in both directions.

    Args:
        run: Run folder, or a saved .safetensors file.
        other: Another one, to average the similarities of both (SGRAF: one run with --model sgr, one with saf).
        data: Data set; the one it was trained on when not given.
        split: Split to test on.
        captions_per_image: Of --data, where its files leave it open.
        folds: Also average over so many slices of the images (COCO 1K: --split testall --folds 5).
        device: auto, cpu, cuda or mps.
        json: Print the result as JSON.
    """
    from mispair.retrieval.matcher import Matcher, check_alike, evaluate_together, model_file

    if folds < 1:
        raise ConfigError(f"--folds is {folds} but must be at least 1.")
    if other is not None and model_file(other).resolve() == model_file(run).resolve():
        raise ConfigError(f"--with is {other}, which is the run itself; give another one.")
    matcher = Matcher.load(run, device)
    if other is None:
        pairs = _load_pairs(matcher, split, data, captions_per_image)
        metrics = matcher.evaluate(pairs, folds).metrics()
    else:
        check_alike(matcher, partner := Matcher.load(other, device))
        pairs = _load_pairs(matcher, split, data, captions_per_image)
        metrics = evaluate_together([matcher, partner], pairs, folds).metrics(_row_names(run, other, json))
    if json:
        runs = {"run": str(run)} if other is None else {"run": str(run), "with": str(other)}
        print_json({**runs, "data": pairs.name, "images": len(pairs.left), "texts": len(pairs), **metrics})
    else:
        _print_retrieval(f"{pairs.name}: {len(pairs.left):,} images, {len(pairs):,} texts", metrics)
    return 0


def _row_names(run: Path, other: Path, whole: bool) -> Sequence[str]:
    """What to call the rows of two runs: by the folder alone where that tells them apart, as a table is narrow."""
    taken = {"run", "with", "data", "images", "texts", "averaged", "folds"}
    runs = run, other
    choices = [[str(path) for path in runs], [str(path.resolve()) for path in runs]]
    if not whole:
        choices.insert(0, [path.resolve().name for path in runs])
    return next(names for names in choices if len(taken.union(names)) == len(taken) + 2)


def search(
    run: Positional[Path],
    *,
    query: str | None = None,
    image: str | None = None,
    top: int = 5,
    data: str | None = None,
    split: str = "test",
    captions_per_image: int | None = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Find the images for a text, or the texts for an image.

    Args:
        run: Run folder, or a saved .safetensors file.
        query: A text: finds images.
        image: Path or the end of it, name or row number of an image: finds texts.
        top: How many to show.
        data: Data set to search; the one it was trained on when not given.
        split: Split to search.
        captions_per_image: Of --data, where its files leave it open.
        device: auto, cpu, cuda or mps.
        json: Print the result as JSON.
    """
    from mispair.retrieval.matcher import Matcher
    from mispair.retrieval.search import find_images, find_texts

    if top < 1:
        raise ConfigError(f"--top is {top} but must be at least 1.")
    if (query is None) == (image is None):
        raise ConfigError('Give either --query "some words" to find images or --image ID to find texts.')
    matcher = Matcher.load(run, device)
    pairs = _load_pairs(matcher, split, data, captions_per_image)
    if query is not None:
        encode = _text_encoder(Path(data or matcher.config.data), device)
        hits = find_images(matcher, pairs, query, top, encode=encode)
    else:
        hits = find_texts(matcher, pairs, str(image), top)
    if json:
        print_json({"query": query, "image": image, "hits": [asdict(hit) for hit in hits]})
        return 0
    from rich.table import Table

    table = Table("rank", "score", "image", "text", title=query or image)
    for rank, hit in enumerate(hits, 1):
        table.add_row(str(rank), f"{hit.score:.3f}", hit.image, hit.text)
    print_table(table)
    return 0


def _text_encoder(data: Path, device: str) -> TextEncoder | None:
    """What made the vectors of the captions of a folder, where `mispair encode` has written it."""
    from mispair.auditing.encoding.encode import EMBEDDINGS
    from mispair.auditing.encoding.encoders import text_encoder
    from mispair.support.owned_folder import read_mark

    mark = read_mark(data, EMBEDDINGS)
    model = None if mark is None else mark.request.get("text model")
    if not isinstance(model, str):
        return None
    return lambda texts: text_encoder(model, device).encode(texts).astype("float32")


def _load_pairs(matcher: Matcher, split: str, data: str | None, captions_per_image: int | None) -> Pairs:
    """The pairs that a command names; prints a note where the model knows few of their words."""
    from mispair.data.check import mostly_unknown
    from mispair.retrieval.model_data import load_for

    pairs = load_for(matcher, split, data, captions_per_image)
    if unknown := mostly_unknown(pairs.right):
        print(
            f"Note: {unknown:.0%} of the words of {pairs.name} are not in the model's vocabulary, so its scores for "
            "these captions mean next to nothing.",
            file=sys.stderr,
        )
    return pairs


def _peek(argv: Sequence[str], flag: str) -> str:
    """Value of a flag before the real parsing, because it sets the other flags' defaults."""
    for here, following in zip(argv, [*argv[1:], ""], strict=True):
        if here == flag:
            return following
        if here.startswith(f"{flag}="):
            return here.partition("=")[2]
    return ""


def _print_retrieval(title: str, figures: dict[str, Any]) -> None:
    from mispair.support.terminal import retrieval_table

    print_table(retrieval_table(title, figures))
