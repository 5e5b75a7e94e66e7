"""The command line: parses, calls, prints. Heavy imports wait until a command needs them, so that help is instant."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import tyro
from rich.table import Table
from tyro.conf import Positional

from mispair import __version__
from mispair.cli.audit import audit, encode
from mispair.cli.bench import bench_report, bench_run
from mispair.cli.calibrate import calibrate, filter_pairs
from mispair.cli.data import data_check, data_make, data_noise
from mispair.cli.help_texts import completion_script, description
from mispair.cli.model import TrainArguments, evaluate, search, train, train_arguments
from mispair.cli.output import console, print_json, print_table, say, taken, with_flags
from mispair.cli.review import annotate, export, review
from mispair.errors import ConfigError, MispairError
from mispair.support.cores import share_cores
from mispair.support.memory import is_out_of_memory, out_of_memory


def demo(*, out: Path = Path("demo"), seed: int = 0, json: bool = False) -> int:
    """Show in a minute the effect of 40 % mismatched pairs and of an audit on a training, as a web page.

    Args:
        out: Folder for the page, the audit and the models.
        seed: Seed of the training and of the noise.
        json: Print the result as JSON.
    """
    from mispair.demo import run_demo

    result = run_demo(out, seed, console(), _program())
    if json:
        print_json(result.metrics())
        return 0
    print_table(result.table())
    say("Go on with:")
    for what, command in result.commands.items():
        say(f"\n  # {what}\n  {command}")
    say(f"\nPage: {result.page}")
    return 0


def _program() -> str:
    """The name of this program, or its path if it is not on PATH."""
    called = Path(sys.argv[0])
    return "mispair" if called.name != "mispair" or shutil.which("mispair") else shlex.quote(str(called))


def methods(*, json: bool = False) -> int:
    """List the training methods.

    Args:
        json: Print the list as JSON.
    """
    from mispair.methods import find_all, list_methods

    about = list_methods()
    if json:
        kinds = find_all()
        print_json({name: {"networks": kinds[name].networks, "about": title} for name, title in about.items()})
        return 0
    for name, title in about.items():
        say(f"  {name:<8} {title}")
    return 0


def encoders(*, json: bool = False) -> int:
    """List the encoders of images and captions: size, licence, speed on this machine, and AUROC.

    Args:
        json: Print the list as JSON.
    """
    from mispair.encoders.encoders import KINDS
    from mispair.encoders.listing import profiles, table

    rows, chosen = table(), profiles()
    if json:
        print_json({"encoders": rows, "profiles": chosen})
        return 0
    found = Table("encoder", "of", "MB", "licence", "a second here", "AUROC random", "near", box=None)
    for row in rows:
        speed = f"{row['per_second']:.0f}" if row["installed"] else "not installed"
        seen = [f"{row[name]:.3f}" for name in ("auroc_random", "auroc_near")]
        found.add_row(row["name"], row["side"], f"{row['megabytes']}", row["licence"], speed, *seen)
    print_table(found)
    say("AUROC: of audits of 1,000 COCO photos, with the usual encoder of the other side; captions were exchanged at")
    say("random or between look-alikes (near). Differences below .02 are not significant.")
    for install in dict.fromkeys(row["install"] for row in rows if not row["installed"]):
        say(f"To install them all: {install}")
    say("Profiles (`--encoder NAME`):")
    for name, about in chosen.items():
        say(f"  {name:<12} {about}")
    say("Others: " + ", ".join(name for name, kind in KINDS.items() if not kind.megabytes))
    return 0


def completion(shell: Positional[Literal["bash", "zsh"]]) -> int:
    """Print the completion of commands and options for a shell.

    Args:
        shell: bash or zsh.
    """
    say(completion_script(shell, {name: _options(name) for name in COMMANDS}))
    return 0


def _options(name: str) -> list[str]:
    flags = dict(_flags(train_arguments() if name == "train" else _arguments(COMMANDS[name])))
    negated = [f"no_{flag}" for flag, kind in flags.items() if kind is bool]
    return sorted(f"--{flag.replace('_', '-')}" for flag in ("help", *flags, *negated))


def _arguments(command: Callable[..., int]) -> Callable[..., Any]:
    """The dataclass of a command's arguments, or the command itself."""
    kind: Callable[..., Any] = get_type_hints(command).get("arguments", command)
    return kind


COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "eval": evaluate,
    "search": search,
    "audit": audit,
    "review": review,
    "annotate": annotate,
    "export": export,
    "calibrate": calibrate,
    "filter": filter_pairs,
    "encode": encode,
    "demo": demo,
    "methods": methods,
    "encoders": encoders,
    "completion": completion,
    "data check": data_check,
    "data noise": data_noise,
    "data make": data_make,
    "bench run": bench_run,
    "bench report": bench_report,
}
GROUPS = ("data", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user's becomes a sentence on stderr and an exit code."""
    alone, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    warnings.showwarning = lambda message, *_, **__: say(f"Note: {message}", file=sys.stderr)
    if isinstance(sys.stdout, TextIOWrapper):  # captions and names may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        threads = taken(argv, "--threads")
        if alone:
            share_cores(threads)
        return _dispatch(argv, alone)
    except MispairError as error:
        if not error.silent:
            say(f"mispair: {with_flags(str(error), _settings(argv))}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        say("mispair: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `mispair ... | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        say(f"mispair: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say(f"mispair: {with_flags(out_of_memory(error), _settings(argv))}", file=sys.stderr)
        return 2


def _settings(argv: Sequence[str]) -> set[str]:
    """All settings with a flag; those of methods and models for `train` alone."""
    from mispair.config import RUN_SETTINGS

    kinds = [TrainArguments if name == "train" else _arguments(command) for name, command in COMMANDS.items()]
    names = {"threads", *RUN_SETTINGS, *(name for kind in kinds for name, _ in _flags(kind))}
    if argv[:1] != ["train"]:
        return names
    from mispair.training.settings import owners

    return names | set(owners())


def _flags(kind: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The name and the type of each flag, of nested dataclasses, too."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        extras = getattr(hint, "__metadata__", ())
        plain = hint.__origin__ if extras else hint
        if isinstance(plain, type) and dataclasses.is_dataclass(plain):
            yield from _flags(plain)
        elif tyro.conf.Positional not in extras and name != "return":
            yield next((extra.name for extra in extras if getattr(extra, "name", None)), name), plain


def _dispatch(argv: list[str], alone: bool) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        say(_help())
        return 0
    if argv[0] == "--version":
        say(f"mispair {__version__}")
        return 0
    words = 2 if argv[0] in GROUPS else 1
    name = " ".join(argv[:words])
    if words == 2 and (len(argv) < 2 or argv[1] in ("-h", "--help")):
        say(_help(argv[0]))
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f' Did you mean "mispair {near[0]}"?' if near else ""
        raise ConfigError(f'There is no command "{name}".{hint} `mispair --help` lists them.')
    from mispair.support.progress import FIRST_SECONDS, at_work

    with at_work(console(), f"mispair {name}", FIRST_SECONDS if alone else None):
        if name == "train":
            return train(argv[words:])
        arguments = argv[words:]
        command = COMMANDS[name]
        kind = _arguments(command)
        _refuse_repeated(kind, arguments)
        read = tyro.cli(kind, args=arguments, prog=f"mispair {name}", description=description(name, command))
        return read if kind is command else command(read)


def _refuse_repeated(kind: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse a repeated option for several values: only the last one would count."""
    given = Counter(word.partition("=")[0] for word in arguments)
    for name, hint in _flags(kind):
        flag = f"--{name.replace('_', '-')}"
        if get_origin(hint) is tuple and given[flag] > 1:
            raise ConfigError(f"{flag} is given {given[flag]} times; give all its values after one: {flag} A B.")


def _help(group: str = "") -> str:
    chosen = {name: call for name, call in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, chosen)) + 1
    lines = [f"  {name:<{width}} {(call.__doc__ or '').splitlines()[0]}" for name, call in chosen.items()]
    what = "find and fix mismatched pairs, and train models that tolerate them"
    head = f"mispair {__version__}: {what}.\n\nUsage: mispair COMMAND [OPTIONS]\n\n"
    tail = "`mispair COMMAND --help` explains a command. `--threads N` goes with each: how many cores it may use."
    return head + "\n".join(lines) + f"\n\n{tail}"


if __name__ == "__main__":
    sys.exit(main())
