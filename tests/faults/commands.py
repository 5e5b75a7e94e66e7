"""The commands that faults are injected into, each with small inputs of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from audit_cases import hurry, make_case, write_clip
from mispair.cli.main import main
from tiny import tiny_folder

SMALL = ("--epochs", "1", "--warmup-epochs", "1", "--embed-size", "8", "--word-size", "6", "--batch-size", "16")
TRAINING = (*SMALL, "--checkpoint-seconds", "0", "--device", "cpu")


@dataclass(frozen=True)
class Command:
    """A command line of mispair.

    Attributes:
        arguments: Its words; paths are relative to the folder it runs in.
        prepare: Fills that folder with its inputs, and may run other commands in it first.
    """

    arguments: tuple[str, ...]
    prepare: Callable[[Path], None]

    def __call__(self) -> int:
        with hurry():
            return main([*self.arguments])


def _embeddings(folder: Path) -> None:
    case = make_case(60, 0.3)
    write_clip(folder / "in", case.left, case.right, {"id": [f"p{row}" for row in range(60)]}, cuts=(20, 40))


def _audited(folder: Path) -> None:
    _embeddings(folder)
    with hurry():
        assert main(["audit", str(folder / "in"), "--out", str(folder / "audit"), "--device", "cpu"]) == 0
    (folder / "decisions.csv").write_text("id,verdict\np1,drop\np2,keep\np3,drop\n")


def _features(folder: Path) -> None:
    tiny_folder(folder / "data", 24)


COMMANDS = {
    "audit with a clean copy": Command(
        ("audit", "in", "--out", "out", "--clean", "clean", "--device", "cpu"), _embeddings
    ),
    "training, two networks": Command(
        ("train", "--data", "data", "--out", "run", "--method", "repair", "--model", "vse", *TRAINING), _features
    ),
    "training, mend": Command(
        ("train", "--data", "data", "--out", "run", "--method", "mend", "--model", "vse", *TRAINING), _features
    ),
    "export": Command(("export", "audit", "--to", "mended", "--mend", "--device", "cpu"), _audited),
    "import of decisions": Command(("review", "audit", "--import-decisions", "decisions.csv"), _audited),
    "noise file": Command(("data", "noise", "data", "--noise-ratio", "0.4", "--out", "noise.npy"), _features),
}
