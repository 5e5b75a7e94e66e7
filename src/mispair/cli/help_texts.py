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
    """The first paragraph of a command's docstring, with examples."""
    about = " ".join((inspect.getdoc(command) or "").partition("\n\nArgs:")[0].split())
    examples = EXAMPLES.get(name, ())
    return "\n\n".join([about, "\n".join(["Examples:", *(f"  {line}" for line in examples)])] if examples else [about])


def completion_script(shell: str, options: Mapping[str, Sequence[str]]) -> str:
    """A script to complete commands and options.

    Args:
        shell: bash or zsh.
        options: Options of each command, such as "data check".
    """
    from mispair.support.html import environment

    names: dict[str, list[str]] = {}
    for group, _, name in (name.partition(" ") for name in options):
        names.setdefault(group, []).append(name)
    first = sorted(names)
    groups = {group: names[group] for group in first if names[group] != [""]}
    script = environment(autoescape=False).get_template("completion.sh")
    return script.render(shell=shell, options=options, first=first, groups=groups)
