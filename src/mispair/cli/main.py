"""The command line: parses, calls, prints. Heavy imports wait until a command needs them, so that help is instant."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from mispair import __version__
from mispair.cli.audit import audit, encode
from mispair.cli.bench import bench_audit, bench_epoch, bench_report, bench_run, bench_scale, bench_speed
from mispair.cli.data import data_check, data_get, data_make, data_noise
from mispair.cli.output import console, print_json, print_table
from mispair.config import RENAMED, Config, current_name, read_recipe
from mispair.errors import ConfigError, DataError, MispairError

if TYPE_CHECKING:
    from mispair.data.pairs import Pairs
    from mispair.retrieval.matcher import Matcher


@dataclass(frozen=True)
class TrainArguments:
    """Train a matching model. The same command again goes on where an interrupted run stopped."""

    config: OmitArgPrefixes[Config]
    out: Path
    """Run folder: settings, log, checkpoints and the best model."""
    recipe: str | None = None
    """TOML file with settings, or the name of one that comes with mispair; flags win over it."""
    json: bool = False
    """Print figures for machines."""


def train(argv: Sequence[str]) -> int:
    """Train a matching model."""
    argv = [_current_flag(word) for word in argv]
    defaults = read_recipe(_peek(argv, "--recipe")) if _peek(argv, "--recipe") else Config()
    arguments = tyro.cli(
        TrainArguments, args=argv, prog="mispair train", default=TrainArguments(defaults, out=tyro.MISSING)
    )
    from mispair.training.fit import train_and_test

    config = _absolute(arguments.config)
    result = train_and_test(config, arguments.out, console())
    if arguments.json:
        print_json(result)
    else:
        rows = {name: figures for name, figures in result.items() if isinstance(figures, dict)}
        _print_retrieval(f"{config.method} {config.model}, tested on {result['tested_on']}", rows)
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
        json: Print figures for machines.
    """
    from mispair.retrieval.matcher import Matcher, check_alike, evaluate_together, model_file

    if folds < 1:
        raise ConfigError(f"--folds is {folds} but must be at least 1.")
    if other is not None and model_file(other).resolve() == model_file(run).resolve():
        raise ConfigError(f"--with is {other}, which is the run itself; give another one.")
    matcher = Matcher.load(run, device)
    if other is None:
        pairs = _load_for(matcher, data, split, captions_per_image)
        figures = matcher.evaluate(pairs, folds).figures()
    else:
        check_alike(matcher, partner := Matcher.load(other, device))
        pairs = _load_for(matcher, data, split, captions_per_image)
        figures = evaluate_together([matcher, partner], pairs, folds).figures(_row_names(run, other, json))
    if json:
        runs = {"run": str(run)} if other is None else {"run": str(run), "with": str(other)}
        print_json({**runs, "data": pairs.name, "images": len(pairs.left), "texts": len(pairs), **figures})
    else:
        _print_retrieval(f"{pairs.name}: {len(pairs.left):,} images, {len(pairs):,} texts", figures)
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
        image: Name or row number of an image: finds texts.
        top: How many to show.
        data: Data set to search; the one it was trained on when not given.
        split: Split to search.
        captions_per_image: Of --data, where its files leave it open.
        device: auto, cpu, cuda or mps.
        json: Print figures for machines.
    """
    from mispair.retrieval.matcher import Matcher
    from mispair.retrieval.search import find_images, find_texts

    if top < 1:
        raise ConfigError(f"--top is {top} but must be at least 1.")
    if (query is None) == (image is None):
        raise ConfigError('Give either --query "some words" to find images or --image ID to find texts.')
    matcher = Matcher.load(run, device)
    pairs = _load_for(matcher, data, split, captions_per_image)
    hits = find_images(matcher, pairs, query, top) if query is not None else find_texts(matcher, pairs, str(image), top)
    if json:
        print_json({"query": query, "image": image, "hits": [asdict(hit) for hit in hits]})
        return 0
    from rich.table import Table

    table = Table("rank", "score", "image", "text", title=query or image)
    for rank, hit in enumerate(hits, 1):
        table.add_row(str(rank), f"{hit.score:.3f}", hit.image, hit.text)
    print_table(table)
    return 0


def demo(*, out: Path = Path("demo"), seed: int = 0, json: bool = False) -> int:
    """See in four minutes how REPAIR survives 40 % wrong pairs: a table, and a page with pictures and queries.

    Args:
        out: Folder for the page and the runs.
        seed: Seed of the training and of the noise.
        json: Print figures for machines.
    """
    from mispair.demo import run_demo

    result = run_demo(out, seed, console())
    if json:
        print_json(result.figures())
    else:
        print_table(result.table())
        print(f"Page: {result.page}")
    return 0


def methods(*, json: bool = False) -> int:
    """List the training methods.

    Args:
        json: Print them for machines.
    """
    from mispair.methods import METHODS

    about = {name: _title(sys.modules[kind.__module__]) for name, kind in METHODS.items()}
    if json:
        print_json({name: {"networks": METHODS[name].networks, "about": title} for name, title in about.items()})
        return 0
    for name, title in about.items():
        print(f"  {name:<8} {title}")
    return 0


def _title(module: ModuleType) -> str:
    """The first paragraph of what a module says of itself, in one line."""
    return " ".join((module.__doc__ or "").partition("\n\n")[0].split())


COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "eval": evaluate,
    "search": search,
    "audit": audit,
    "encode": encode,
    "demo": demo,
    "methods": methods,
    "data get": data_get,
    "data check": data_check,
    "data noise": data_noise,
    "data make": data_make,
    "bench run": bench_run,
    "bench report": bench_report,
    "bench speed": bench_speed,
    "bench epoch": bench_epoch,
    "bench audit": bench_audit,
    "bench scale": bench_scale,
}
GROUPS = ("data", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a mistake of the user's becomes a sentence on stderr and an exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    warnings.showwarning = lambda message, *_, **__: print(f"Note: {message}", file=sys.stderr)
    if isinstance(sys.stdout, TextIOWrapper):  # captions and names may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(argv)
    except MispairError as error:
        print(f"mispair: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("mispair: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `mispair ... | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"mispair: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return 2


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] == "--version":
        print(f"mispair {__version__}")
        return 0
    words = 2 if argv[0] in GROUPS else 1
    name = " ".join(argv[:words])
    if words == 2 and (len(argv) < 2 or argv[1] in ("-h", "--help")):
        print(_help(argv[0]))
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f' Did you mean "mispair {near[0]}"?' if near else ""
        raise ConfigError(f'There is no command "{name}".{hint} `mispair --help` lists them.')
    if name == "train":
        return train(argv[words:])
    return tyro.cli(COMMANDS[name], args=argv[words:], prog=f"mispair {name}")


def _help(group: str = "") -> str:
    chosen = {name: call for name, call in COMMANDS.items() if name.startswith(group)}
    lines = [f"  {name:<12} {(call.__doc__ or '').splitlines()[0]}" for name, call in chosen.items()]
    head = f"mispair {__version__}: finds, mends and survives mismatched pairs.\n\nUsage: mispair COMMAND [OPTIONS]\n\n"
    return head + "\n".join(lines) + "\n\n`mispair COMMAND --help` explains a command."


def _absolute(config: Config) -> Config:
    """With whole paths, because a run must be resumable and testable from anywhere."""
    is_folder = config.data != "shapes" and Path(config.data).is_dir()
    data = str(Path(config.data).resolve()) if is_folder else config.data
    vocab, noise = (None if path is None else str(Path(path).resolve()) for path in (config.vocab, config.noise_file))
    return replace(config, data=data, vocab=vocab, noise_file=noise)


def _current_flag(word: str) -> str:
    """A flag of the version before by its name of today, with a note."""
    flag, equals, value = word.partition("=")
    key = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or key not in RENAMED:
        return word
    return f"--{current_name(key).replace('_', '-')}{equals}{value}"


def _peek(argv: Sequence[str], flag: str) -> str:
    """Value of a flag before the real parsing, because it sets the other flags' defaults."""
    for here, following in zip(argv, [*argv[1:], ""], strict=True):
        if here == flag:
            return following
        if here.startswith(f"{flag}="):
            return here.partition("=")[2]
    return ""


def _load_for(matcher: Matcher, data: str | None, split: str, captions_per_image: int | None) -> Pairs:
    """The pairs that a command asks for; a note is printed where the model knows few of their words."""
    from mispair.data.loading import load_split
    from mispair.retrieval.matcher import load_for

    config, otherwise = matcher.config, "give --data with the folder of the data set"
    if data:
        if captions_per_image is None and Path(data).resolve() == Path(config.data):
            captions_per_image = config.captions_per_image
        elsewhere = replace(config, data=data, captions_per_image=captions_per_image)
        pairs = load_split(elsewhere, split, matcher.vocabulary)
    elif captions_per_image is not None:
        raise ConfigError("--captions-per-image is of --data, which is not given; the model knows that of its own.")
    elif Path(config.data).is_absolute() and not Path(config.data).exists():
        raise DataError(f"{config.data}, which the model was trained on, is not there any more; {otherwise}.")
    else:
        pairs = load_for(matcher, split, otherwise)
    _note_unknown_words(pairs)
    return pairs


def _note_unknown_words(pairs: Pairs) -> None:
    from mispair.data.check import mostly_unknown

    if unknown := mostly_unknown(pairs.right):
        print(
            f"Note: the model does not know {unknown:.0%} of the words of {pairs.name}, so what it says of these "
            "captions means next to nothing.",
            file=sys.stderr,
        )


def _print_retrieval(title: str, figures: dict[str, Any]) -> None:
    from mispair.support.terminal import retrieval_table

    print_table(retrieval_table(title, figures))


if __name__ == "__main__":
    sys.exit(main())
