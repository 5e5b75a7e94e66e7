"""Examples for the help of each command, and completion for shells."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "mispair train photos.csv --images photos/ --out runs/mine",
        "mispair train audit --out runs/reviewed",
        "mispair train --data f30k_precomp --method mend --model sgr --out runs/sgr",
        "mispair train --recipe f8k/mend-vse --data f8k_precomp --out runs/vse",
    ),
    "eval": ("mispair eval runs/mine", "mispair eval runs/sgr --with runs/saf"),
    "search": (
        'mispair search runs/mine --query "a red bicycle"',
        'mispair search runs/mine --query "a red bicycle" --images other_photos/',
        "mispair search runs/mine --image my.jpg",
    ),
    "audit": (
        "mispair audit photos.csv --images photos/ --out audit",
        "mispair audit --left images.npy --right texts.npy --out audit",
    ),
    "review": ("mispair review audit",),
    "export": ("mispair export audit --to mended --mend",),
    "calibrate": (
        "mispair calibrate pairs.parquet --score clip --left images.npy --right texts.npy --purity 0.95",
        "mispair calibrate pairs.parquet --score clip vlm --checked checked.csv --keep 1000000",
    ),
    "filter": (
        "mispair filter calibrated --purity 0.95 --to kept",
        "mispair filter pairs.parquet --score clip --least 0.28 --mask kept.npy",
    ),
    "encode": (
        "mispair encode photos.csv --images photos/ --out vectors",
        "mispair encode photos.csv --images photos/ --grid 6 --pca 128 --out features",
    ),
}


def description(name: str, command: Any) -> str:
    """The first paragraph of what a command says of itself, with examples."""
    about = " ".join((inspect.getdoc(command) or "").partition("\n\nArgs:")[0].split())
    examples = EXAMPLES.get(name, ())
    return "\n\n".join([about, "\n".join(["Examples:", *(f"  {line}" for line in examples)])] if examples else [about])


def completion_script(shell: str, options: Mapping[str, Sequence[str]]) -> str:
    """A script that completes commands and options.

    Args:
        shell: bash or zsh.
        options: Of each command, such as "data check".
    """
    groups = sorted({name.partition(" ")[0] for name in options if " " in name})
    first = sorted({name.partition(" ")[0] for name in options})
    cases = [f'    "{name}") words="{" ".join(own)}" ;;' for name, own in options.items()]
    cases += [
        f'    "{group}") words="{" ".join(name.split()[1] for name in options if name.startswith(f"{group} "))}" ;;'
        for group in groups
    ]
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
        "_mispair() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""',
        f'  case " {" ".join(groups)} " in *" $command "*)',
        '    [ "$COMP_CWORD" -gt 2 ] && command="$command ${COMP_WORDS[2]}" ;; esac',
        f'  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(first)}"; else case "$command" in',
        *cases,
        "  esac; fi",
        '  case "${COMP_WORDS[COMP_CWORD-1]} $current" in "--"*" ") words="" ;; esac  # a value: mostly a file',
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _mispair mispair",
    ]
    return "\n".join(lines)
