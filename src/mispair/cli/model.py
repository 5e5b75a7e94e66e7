"""The commands `mispair train`, `eval` and `search`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from mispair.cli.help_texts import description
from mispair.cli.output import console, print_json, print_table, say, taken
from mispair.encoders.options import Files
from mispair.errors import ConfigError
from mispair.support.flags import OrNone
from mispair.support.formatting import percent

if TYPE_CHECKING:
    from rich.console import Console

    from mispair.config import Config
    from mispair.pairs.pairs import Pairs
    from mispair.retrieval.matcher import Matcher
    from mispair.training.fit import TrainedRun


@dataclass(frozen=True)
class TrainArguments:
    """Train a matching model. Run it again to resume.

    Settings that you leave out follow the data and the device.
    """

    files: OmitArgPrefixes[Files]
    out: Path
    """Run folder: settings, log, checkpoints and the best model."""
    source: Positional[OrNone[Path]] = None
    """Images and captions, or whatever else `mispair audit` reads: encoded, audited, and trained with mend.
    Or the folder of an audit: its pairs with the decisions of a review."""
    recipe: OrNone[str] = None
    """TOML file with settings, or the name of one that comes with mispair; flags win over it."""
    json: bool = False
    """Print the result as JSON."""


def train(argv: Sequence[str]) -> int:
    """Train a matching model."""
    from mispair.config import RUN_SETTINGS, Config, RunSettings
    from mispair.training.settings import read_recipe

    recipe = taken(list(argv), "--recipe")
    defaults = read_recipe(recipe) if recipe else Config()
    kind = train_arguments()
    own = {name: defaults.of(group) for name, group in _groups().items()}
    run = RunSettings(**{name: getattr(defaults, name) for name in RUN_SETTINGS})
    groups: dict[str, Any] = {"run": run, **own}
    arguments = tyro.cli(
        kind,
        args=argv,
        prog="mispair train",
        description=description("train", TrainArguments),
        default=kind(files=Files(), out=tyro.MISSING, **groups),
    )
    values = asdict(arguments)
    config = Config(**values["run"], own={name: value for group in own for name, value in values[group].items()})
    given = None if arguments.recipe else _given(argv)
    from mispair.compute.distributed import connect

    with connect(config.device) as ranks:
        result = _trained(arguments, config, given, console() if ranks.is_first else None)
        if not ranks.is_first:
            return 0
    if arguments.json:
        print_json(result.metrics())
        return 0
    from mispair.retrieval.matcher import Matcher

    config = Matcher.load(arguments.out, "cpu").config
    title = f"{config.method} {config.model}, tested on {result.tested_on}"
    unflagged = None if result.unflagged is None else result.unflagged.metrics()
    _print_retrieval(title, result.evaluation.metrics(), unflagged, result.flagged)
    say(f"Run folder: {arguments.out}")
    return 0


def train_arguments() -> type[TrainArguments]:
    """`TrainArguments` with all settings, a group of flags for each class of them."""
    from mispair.config import RunSettings

    kinds: dict[str, type[Any]] = {"run": RunSettings, **_groups()}
    groups = [(name, Annotated[kind, OmitArgPrefixes], field(default=kind())) for name, kind in kinds.items()]
    return make_dataclass(
        "TrainArguments", groups, bases=(TrainArguments,), namespace={"__doc__": TrainArguments.__doc__}, frozen=True
    )


def _groups() -> dict[str, type[Any]]:
    """The classes of settings of all methods and models by short names, such as repair."""
    from mispair.training.settings import setting_classes

    found: dict[str, type[Any]] = {}
    for kind in setting_classes():
        name = kind.__name__.removesuffix("Settings").lower()
        found[name if name not in found else f"{name}_{len(found)}"] = kind
    return found


def _trained(arguments: TrainArguments, config: Config, given: set[str] | None, shown: Console | None) -> TrainedRun:
    from mispair.pairs.layouts.opening import with_absolute_paths
    from mispair.training.fit import train_and_test
    from mispair.training.settings import all_names

    if arguments.source is None:
        if arguments.files != Files():
            what = "Flags about images and captions need them, as in: mispair train photos.csv --images photos/"
            raise ConfigError(what)
        return train_and_test(with_absolute_paths(config), arguments.out, shown, given)
    from mispair.training.from_files import train_from_files

    if given is not None and "data" in given:
        raise ConfigError("Give either the files to train on or --data, not both.")
    given_names = all_names() if given is None else given
    return train_from_files(arguments.source, config, arguments.out, shown, given_names, files=arguments.files)


def evaluate(
    run: Positional[Path],
    *,
    other: Annotated[OrNone[Path], tyro.conf.arg(name="with")] = None,
    data: OrNone[str] = None,
    split: str = "test",
    captions_per_image: OrNone[int] = None,
    folds: int = 1,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Test a trained model: R@K and rSum in both directions.

    Args:
        run: Run folder, or a saved .safetensors file.
        other: Another one, to average the similarities of both (SGRAF: one run with --model sgr, one with saf).
        data: Data set; by default the training data of the model.
        split: Split to test on.
        captions_per_image: Captions per image of --data, if its files leave it open.
        folds: Also average over this number of slices of the images (COCO 1K: --split testall --folds 5).
        device: auto, cpu, cuda or mps.
        json: Print the result as JSON.
    """
    from mispair.retrieval.matcher import Matcher, check_alike, evaluate_together, model_file
    from mispair.training.fit import unflagged_by
    from mispair.training.run_folder import own_features

    if folds < 1:
        raise ConfigError(f"--folds is {folds} but must be at least 1.")
    if other is not None and model_file(other).resolve() == model_file(run).resolve():
        raise ConfigError(f"--with is {other}, which is the run itself; give another one.")
    matcher = Matcher.load(run, device)
    trusted = None
    if other is None:
        pairs = _load_pairs(matcher, split, data or own_features(run, matcher.config.data), captions_per_image)
        metrics = matcher.evaluate(pairs, folds).metrics()
        trusted = unflagged_by(run, pairs, split) if data is None else None
    else:
        data = data or own_features(run, matcher.config.data)
        check_alike(matcher, partner := Matcher.load(other, device))
        pairs = _load_pairs(matcher, split, data, captions_per_image)
        metrics = evaluate_together([matcher, partner], pairs, folds).metrics(_row_names(run, other, json))
    flagged = 0 if trusted is None else len(pairs) - len(trusted)
    unflagged = None if trusted is None else matcher.evaluate(trusted).metrics()
    if json:
        runs = {"run": str(run)} if other is None else {"run": str(run), "with": str(other)}
        found = {} if unflagged is None else {"flagged": flagged, "unflagged": unflagged}
        print_json({**runs, "data": pairs.name, "images": len(pairs.left), "texts": len(pairs), **metrics, **found})
    else:
        _print_retrieval(f"{pairs.name}: {len(pairs.left):,} images, {len(pairs):,} texts", metrics, unflagged, flagged)
    return 0


def _row_names(run: Path, other: Path, whole: bool) -> Sequence[str]:
    """Names of the rows of two runs: short folder names for the narrow table, if they differ."""
    taken = {"run", "with", "data", "images", "texts", "averaged", "folds"}
    runs = run, other
    choices = [[str(path) for path in runs], [str(path.resolve()) for path in runs]]
    if not whole:
        choices.insert(0, [path.resolve().name for path in runs])
    return next(names for names in choices if len(taken.union(names)) == len(taken) + 2)


def search(
    run: Positional[Path],
    *,
    query: OrNone[str] = None,
    image: OrNone[str] = None,
    images: OrNone[Path] = None,
    top: int = 5,
    data: OrNone[str] = None,
    split: OrNone[str] = None,
    captions_per_image: OrNone[int] = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Find the images for a text, or the texts for an image.

    Args:
        run: Run folder, or a saved .safetensors file.
        query: A text: finds images.
        image: An image: finds texts. Its path or the end of it, its name or row number in the data set; any file, if
            the model was trained from images.
        images: Folder of images to search instead of the data set.
        top: Number of results.
        data: Data set to search; by default the training data of the model.
        split: Split to search; test by default, and all of them for a model that was trained from images.
        captions_per_image: Captions per image of --data, if its files leave it open.
        device: auto, cpu, cuda or mps.
        json: Print the result as JSON.
    """
    from mispair.retrieval.matcher import Matcher
    from mispair.retrieval.search import search_files, search_pairs
    from mispair.training.run_folder import own_features

    if top < 1:
        raise ConfigError(f"--top is {top} but must be at least 1.")
    if (query is None) == (image is None):
        raise ConfigError('Give either --query "some words" to find images or --image ID to find texts.')
    if images is not None and (query is None or data is not None):
        raise ConfigError("--images is searched by --query, instead of --data; leave out the others.")
    matcher = Matcher.load(run, device)
    data = data or own_features(run, matcher.config.data)
    if images is not None:
        hits, unreadable = search_files(matcher, str(query), images, top, device, console())
        if unreadable:
            say(f"Note: {unreadable:,} images could not be read.", file=sys.stderr)
    else:
        splits = _searched_splits(matcher, split, data)
        pairs = [_load_pairs(matcher, name, data, captions_per_image) for name in splits]
        hits = search_pairs(matcher, pairs, query, image, top, device)
    if json:
        print_json({"query": query, "image": image, "hits": [asdict(hit) for hit in hits]})
        return 0
    from rich.table import Table

    from mispair.support.formatting import clean

    table = Table("rank", "score", "image", "text", title=clean(query or image))
    for rank, hit in enumerate(hits, 1):
        table.add_row(str(rank), f"{hit.score:.3f}", clean(hit.image), clean(hit.text))
    print_table(table)
    return 0


def _searched_splits(matcher: Matcher, split: str | None, data: str | None) -> list[str]:
    """The given split; by default all splits for a model trained from images, else test."""
    from mispair.pairs.layouts.opening import splits

    if split is not None or matcher.origin is None:
        return [split or "test"]
    return sorted(splits(data or matcher.config.data), key=lambda name: name != "test")


def _load_pairs(matcher: Matcher, split: str, data: str | None, captions_per_image: int | None) -> Pairs:
    """Load the pairs of a command; print a note if the model knows few of their words."""
    from mispair.pairs.check import mostly_unknown
    from mispair.retrieval.matcher import load_for

    pairs = load_for(matcher, split, data, captions_per_image)
    if unknown := mostly_unknown(pairs.right):
        say(
            f"Note: {percent(unknown)} of the words of {pairs.name} are not in the model's vocabulary, so its scores "
            "for these captions are nearly random.",
            file=sys.stderr,
        )
    return pairs


def _given(argv: Sequence[str]) -> set[str]:
    """Names of the given flags."""
    return {word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") for word in argv if word.startswith("--")}


def _print_retrieval(
    title: str, metrics: dict[str, Any], unflagged: dict[str, Any] | None = None, flagged: int = 0
) -> None:
    """Print the results, and those without the flagged pairs below them."""
    from mispair.support.terminal import retrieval_table

    more = {f"{name}, unflagged": row for name, row in (unflagged or {}).items() if name != "folds"}
    print_table(retrieval_table(title, metrics | more))
    if unflagged is not None:
        say(f"unflagged: without the {flagged:,} pairs that the audit flags or people have dropped.")
