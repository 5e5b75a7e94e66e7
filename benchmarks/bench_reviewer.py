"""What the decisions of a review are worth: a simulated reviewer decides, and a model is trained on what comes out.

`make bench-reviewer ARGS="--data f8k_pairs --out reviewer"` makes all rows of the table in docs/review.md with seeds 0,
1 and 2, and prints it. Rows that are in the folder already are not made again; --rows and --seeds make some of them,
so that several processes can share the work.

The pairs of a folder of embeddings are cut into train, dev and test. A share of the training pairs exchange their
images, and the audit of these is reviewed: the reviewer, who knows the truth, decides on all pairs with a match score
below 0.9, in the order of the page. It keeps those that match. The others it re-pairs where the true partner is among
the suggestions that the page shows, and else drops, or gives their true caption; or it gives all of them their true
captions. Where it looks twice, the audit learns from these decisions, and it looks at the dropped pairs with their new
suggestions again.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from common import check_names, run
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.config import Config
from mispair.pairs.layouts import clip_retrieval
from mispair.pairs.noise import caption_noise
from mispair.reviewing.decisions import Decision, Verdict, read_answers, read_partnered
from mispair.reviewing.pair_table import Filter, Pair
from mispair.reviewing.review import Review, State
from mispair.reviewing.reviewed import export
from mispair.reviewing.transfer import read_decisions, write_decisions
from mispair.support.arrays import IntArray
from mispair.support.files import write_atomically
from mispair.training.from_files import train_from_files

SURE = 0.9  # match score from which on the reviewer does not look at a pair
RESULT = "result.json"


@dataclass(frozen=True)
class Trial:
    """One training: a row of the table with one seed.

    Attributes:
        data: Folder of embeddings.
        folder: Where its files are made.
        seed: Of the noise and of the training.
        noise_ratio: Share of the training pairs that exchange their images.
        held_out: How many pairs validate, and as many test.
    """

    data: Path
    folder: Path
    seed: int
    noise_ratio: float
    held_out: int

    def make_set(self, noise_ratio: float) -> tuple[Path, IntArray]:
        """Writes the pairs as train, dev and test, and gives the true pair of each training image."""
        table = clip_retrieval.open_split(self.data)
        cuts = len(table) - 2 * self.held_out, len(table) - self.held_out
        images = np.arange(len(table))
        images[: cuts[0]] = caption_noise(images[: cuts[0]], noise_ratio, self.seed)
        left, right = (side.block(0, len(table), side.dtype) for side in (table.left, table.right))
        out = self.folder / "set"
        for split, rows in zip(clip_retrieval.SPLITS, np.split(np.arange(len(table)), cuts), strict=True):
            for stem in ("img_emb", "text_emb", "metadata"):
                (out / split / stem).mkdir(parents=True, exist_ok=True)
            np.save(out / split / "img_emb/img_emb_0.npy", left[images[rows]])
            np.save(out / split / "text_emb/text_emb_0.npy", right[rows])
            names = {
                "image_path": table.image_texts(images[rows]),
                "caption": table.texts(rows),
            }
            pyarrow.parquet.write_table(pyarrow.table(names), out / split / "metadata/metadata_0.parquet")
        return out, images[: cuts[0]]

    def reviewed(self, decide: Decide | None) -> tuple[Path, Counter[str]]:
        """The audit of the mismatched set with decisions, and how many there are of each kind."""
        pairs, images = self.make_set(self.noise_ratio)
        audit = self.folder / "audit"
        audit_path(AuditInput(pairs), audit, Settings(device="cpu"))
        if decide is None:
            return audit, Counter()
        with closing(Review(audit)) as review:
            return audit, _decide_all(review, decide, images, Filter(high=SURE, flagged=False), "any")

    def reviewed_twice(self, decide: Decide) -> tuple[Path, Counter[str]]:
        """The same after an audit that has learned from these decisions, with another look at the dropped pairs."""
        first, _ = self.reviewed(decide)
        pairs, images = self.make_set(self.noise_ratio)
        audit, file = self.folder / "audit_2", self.folder / "decisions.csv"
        settings = Settings(checked=read_answers(first), device="cpu", partnered=read_partnered(first))
        audit_path(AuditInput(pairs), audit, settings)
        write_decisions(first, file)
        with closing(Review(audit)) as review:
            read_decisions(review.decisions, file)
            return audit, _decide_all(review, decide, images, Filter(flagged=False), "drop")

    def exported(self, audit: Path) -> Path:
        export(audit, self.folder / "export", device="cpu")
        return self.folder / "export"

    def train(self, source: Path) -> float:
        """Test rSum of `mispair train SOURCE --seed SEED`."""
        config = Config(seed=self.seed, device="cpu")
        run = train_from_files(source, config, self.folder / "run", given={"seed", "device"})
        return run.evaluation.averaged.rsum


Decide = Callable[[Pair, IntArray, list[str]], Decision]


def _decide_all(review: Review, decide: Decide, images: IntArray, wanted: Filter, state: State) -> Counter[str]:
    ids = [pair.id for pair in review.table.read(range(len(review.table)))]
    review.decisions.add([decide(review.view(int(row)), images, ids) for row in review.rows(wanted, state)])
    return review.progress()


def find_partner(pair: Pair, images: IntArray, ids: list[str]) -> Decision:
    """Keeps a pair that matches, re-pairs one whose true partner is suggested, and drops any other.

    Args:
        pair: As the page shows it.
        images: The true pair of the image of each row.
        ids: Of all pairs.
    """
    if images[pair.row] == pair.row:
        return Decision(pair.id, Verdict.KEEP)
    for one in pair.suggestions:
        if one.row == images[pair.row] if one.replaced == "right" else images[one.row] == pair.row:
            return Decision(pair.id, Verdict.REPAIR, one.replaced, ids[one.row])
    return Decision(pair.id, Verdict.DROP)


def write_caption(pair: Pair, images: IntArray, ids: list[str]) -> Decision:
    """Keeps a pair that matches, and gives any other its true caption, by its vector."""
    if images[pair.row] == pair.row:
        return Decision(pair.id, Verdict.KEEP)
    return Decision(pair.id, Verdict.REPAIR, "right", ids[images[pair.row]])


def find_partner_or_write(pair: Pair, images: IntArray, ids: list[str]) -> Decision:
    """As `find_partner`, but gives pairs that it would drop their true captions."""
    found = find_partner(pair, images, ids)
    return write_caption(pair, images, ids) if found.verdict is Verdict.DROP else found


def _clean(trial: Trial) -> tuple[Path, Counter[str]]:
    return trial.make_set(0.0)[0], Counter()


def _mismatched(trial: Trial) -> tuple[Path, Counter[str]]:
    return trial.make_set(trial.noise_ratio)[0], Counter()


def _export(decide: Decide | None) -> Callable[[Trial], tuple[Path, Counter[str]]]:
    def made(trial: Trial) -> tuple[Path, Counter[str]]:
        audit, counts = trial.reviewed(decide)
        return trial.exported(audit), counts

    return made


def _export_twice(trial: Trial) -> tuple[Path, Counter[str]]:
    audit, counts = trial.reviewed_twice(find_partner)
    return trial.exported(audit), counts


ROWS: dict[str, tuple[str, Callable[[Trial], tuple[Path, Counter[str]]]]] = {
    "mismatched": ("the mismatched set itself", _mismatched),
    "export": ("export without decisions", _export(None)),
    "export-partners": ("export with these decisions", _export(find_partner)),
    "review-partners": ("the review with these decisions", lambda trial: trial.reviewed(find_partner)),
    "export-twice": ("export after another look at dropped pairs", _export_twice),
    "review-twice": (
        "the review after another look at them",
        lambda trial: trial.reviewed_twice(find_partner),
    ),
    "export-both": ("export with new captions where no partner is suggested", _export(find_partner_or_write)),
    "export-captions": ("export with new captions", _export(write_caption)),
    "clean": ("all pairs as they were before the noise", _clean),
}  # what to train on


def _results(out: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for name in ROWS:
        for path in sorted(out.glob(f"{name}_*/{RESULT}")):
            yield name, int(path.parent.name.rpartition("_")[2]), json.loads(path.read_bytes())


def print_table(out: Path) -> None:
    """All that the folder has."""
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in ROWS}
    for name, seed, result in _results(out):
        found[name][seed] = result
    print("| training set | test rSum | decisions |\n|---|---|---|")
    for name, (title, _) in ROWS.items():
        results = [found[name][seed] for seed in sorted(found[name])]
        figures = ", ".join(f"{result['rsum']:.1f}" for result in results)
        decisions = "; ".join(
            ", ".join(f"{count} {kind}" for kind, count in one["decisions"].items()) for one in results
        )
        print(f"| {title} | {figures} | {decisions.strip('; ')} |")


def main(
    *,
    data: Path,
    out: Path,
    rows: tuple[str, ...] = tuple(ROWS),
    seeds: tuple[int, ...] = (0, 1, 2),
    noise_ratio: float = 0.2,
    held_out: int = 500,
) -> None:
    """Make the rows that are not in the folder yet, and print the table.

    Args:
        data: Folder of embeddings, one pair an image.
        out: Folder of the results.
        rows: Names of rows, all by default.
        seeds: Of noise and training.
        noise_ratio: Fraction of the training pairs that exchange their images.
        held_out: Pairs that validate, and as many that test.
    """
    check_names(rows, ROWS, "rows")
    for name in rows:
        for seed in seeds:
            folder = out / f"{name}_{seed}"
            if (folder / RESULT).exists():
                continue
            trial = Trial(data, folder, seed, noise_ratio, held_out)
            source, counts = ROWS[name][1](trial)
            result = {"rsum": trial.train(source), "decisions": counts}
            write_atomically(folder / RESULT, f"{json.dumps(result)}\n".encode())
    print_table(out)


if __name__ == "__main__":
    sys.exit(run(main))
