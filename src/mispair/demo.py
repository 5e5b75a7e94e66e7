"""`mispair demo`: the effect of mismatched pairs and of an audit on a training, as one page.

Drawn images and their texts become plain vectors first, as an encoder would give them, so that all of it takes seconds.
Two trainings have the same settings; the second leaves out the pairs that the audit flags.

    DEMO/data/       the pairs, of which some are mismatched     DEMO/audit/   what `mispair audit` finds
    DEMO/images/     their images, and those of the test         DEMO/runs/    the two trainings
"""

from __future__ import annotations

import base64
import shlex
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import torch
from rich.console import Console
from rich.table import Table

from mispair import __version__
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import REPORT
from mispair.auditing.summary import AuditSummary
from mispair.bench.suite.suite import digest
from mispair.config import Config
from mispair.encoders.encoders import SHAPES
from mispair.errors import ExistsError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.layouts import opening
from mispair.pairs.noise import add_noise
from mispair.pairs.origin import Origin
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors, fingerprint
from mispair.pairs.shapes import dataset
from mispair.pairs.shapes.features import image_vectors, word_counts
from mispair.pairs.shapes.scene import CAPTIONS_PER_IMAGE
from mispair.retrieval.matcher import Matcher
from mispair.retrieval.search import best
from mispair.support.arrays import IntArray
from mispair.support.files import replacing, write_atomically
from mispair.support.formatting import percent, slug
from mispair.support.html import template
from mispair.support.terminal import COLUMNS, retrieval_table
from mispair.training.fit import train_splits
from mispair.training.run_folder import read_result
from mispair.training.settings import override
from mispair.training.splits import Splits

NOISE = 0.4
IMAGES, SENTENCES = 1200, 3  # to train with, and in the text of each
EXAMPLES, SUGGESTIONS, QUERIES, FOUND = 4, 4, 3, 5  # on the page: pairs, suggestions, queries, images for each
QUERY = "a striped purple moon"
MARK = ".demo"  # in the folder of a demo: files of other folders are not replaced
# Settings of both trainings, chosen for plain training: on seeds 0 and 1 no other tried setting is more than 3 points
# of rSum better. For fewer pairs the epochs are stretched, so that both have about as many steps.
PLAIN, AUDITED = "Plain training", "Audit first"
SETTINGS: dict[str, Any] = {
    "model": "two-tower", "embed_size": 256, "dropout": 0.9, "batch_size": 64, "lr": 2e-3, "margin": 1.0,
    "warmup_epochs": 1, "epochs": 14, "lr_decay_epochs": 10,
    "negatives_start": 32, "negatives_end": 16, "hardening_steps": 300,
}  # fmt: skip
STRETCHED = ("warmup_epochs", "epochs", "lr_decay_epochs")


@dataclass(frozen=True)
class Training:
    """One training of the demo and its results."""

    name: str
    folder: Path
    pairs: int  # that it trained on
    steps: int
    test: dict[str, float]


@dataclass(frozen=True)
class Audited:
    """The audit compared with the truth."""

    pairs: int
    mismatched: int
    flagged: int
    precision: float  # share of the flagged pairs that are mismatched
    recall: float  # share of the mismatched pairs that are flagged
    noise_rate: float  # its estimate
    suggested: int  # mismatched pairs for whose text it suggests another image
    restored: int  # of these, how often it is the image that the text was written for
    seconds: float
    report: str  # path from the page


@dataclass(frozen=True)
class DemoResult:
    """The content of the page, and commands to continue with."""

    page: Path
    audited: Audited
    trainings: list[Training]
    commands: dict[str, str]  # by what each is for

    @property
    def gap(self) -> float:
        """By how many points of rSum the training after the audit is ahead."""
        plain, audited = (training.test["rsum"] for training in self.trainings)
        return audited - plain

    def metrics(self) -> dict[str, Any]:
        trainings = {training.name: training.test for training in self.trainings}
        return {"page": str(self.page), "audit": asdict(self.audited), **trainings, "gap": self.gap}

    def table(self) -> Table:
        rows = {training.name: training.test for training in self.trainings}
        return retrieval_table(f"Trained with {NOISE:.0%} mismatched pairs, tested on matched ones", rows)


@dataclass(frozen=True)
class ShownImage:
    """An image on the page."""

    source: str
    name: str
    right: bool  # whether the text was written for it


Shown = tuple[str, list[ShownImage]]  # a text, the image of its pair and perhaps others


def run_demo(out: Path, seed: int, console: Console, program: str = "mispair") -> DemoResult:
    """Audit pairs with 40 % mismatches, train with and without the flagged ones, write `out/index.html`.

    `program` is how mispair is called in the commands that the page shows.

    Raises:
        ExistsError: The folder has other content.
    """
    if out.exists() and not (out / MARK).exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ExistsError("it exists, and is not the folder of a demo", where=out, advice="Give another `out`.")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    console.print("Drawing the images, if they are not there yet ...")
    folder = dataset.cached(train=IMAGES)
    clean, dev, test = (as_vectors(opening.load(folder, split)) for split in ("train", "dev", "test"))
    pairs = replace(add_noise(clean, noise_ratio=NOISE, seed=seed), origin=Origin(SHAPES, SHAPES))
    shutil.copytree(folder / "images", out / "images", dirs_exist_ok=True)
    _write_pairs(pairs, out / "data")
    console.print(f"Auditing {len(pairs):,} pairs, of which {NOISE:.0%} are mismatched ...")
    data = AuditInput(out / "data", images=out / "images")
    summary = audit_path(data, out / "audit", Settings(), overwrite=True, console=console, command="mispair demo")
    audit = AuditColumns.read(out / "audit")
    console.print("Training twice at the same time: on all pairs, and on those that the audit keeps ...")
    trainings = _train_both(Splits(pairs, dev, test), audit, seed, out / "runs")
    model = trainings[-1].folder
    commands: dict[str, list[str | Path]] = {
        "Decide on the doubtful pairs, in a browser": ["review", out / "audit"],
        "Write the set after your decisions": ["export", out / "audit", "--to", out / "mended", "--mend"],
        "Ask the second model": ["search", model, "--query", QUERY, "--images", out / "images"],
    }
    result = DemoResult(
        page=out / "index.html",
        audited=_judged(audit, summary, pairs),
        trainings=trainings,
        commands={what: f"{program} {shlex.join(map(str, words))}" for what, words in commands.items()},
    )
    page = template("demo.html").render(
        result=result,
        columns=COLUMNS,
        percent=percent,
        examples=_examples(pairs, folder),
        suggestions=_suggestions(audit, pairs, folder, seed),
        queries=_queries(trainings, test, folder, seed),
        tested=len(test),
        sentences=SENTENCES,
        found=FOUND,
        settings=SETTINGS,
        seed=seed,
        version=__version__,
    )
    write_atomically(result.page, page.encode())
    return result


def as_vectors(pairs: Pairs) -> Pairs:
    """One pair an image: a vector of its windows, and one of how often its first sentences have each word."""
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    captions = pairs.right.texts
    firsts = range(0, len(captions), CAPTIONS_PER_IMAGE)
    texts = [" ".join(f"{text.capitalize()}." for text in captions[row : row + SENTENCES]) for row in firsts]
    left, right = Vectors(image_vectors(np.asarray(pairs.left.features))), Vectors(word_counts(texts))
    return Pairs(left, right, np.arange(len(texts)), left_ids=pairs.left_ids, right_ids=texts, name="demo")


def _write_pairs(pairs: Pairs, folder: Path) -> None:
    """The pairs as `mispair audit` reads them: vectors with a table."""
    assert isinstance(pairs.left, Vectors)
    assert isinstance(pairs.right, Vectors)
    for stem, vectors in (("img_emb", pairs.left.features[pairs.link]), ("text_emb", pairs.right.features)):
        with replacing(folder / stem / f"{stem}_0.npy") as file:
            np.save(file, vectors)
    images = [f"{pairs.left_ids[row]}.png" for row in pairs.link]
    table = pyarrow.table({"image_path": images, "caption": list(pairs.right_ids)})
    with replacing(folder / "metadata" / "metadata_0.parquet") as file:
        pyarrow.parquet.write_table(table, file)


def _judged(audit: AuditColumns, summary: AuditSummary, pairs: Pairs) -> Audited:
    mismatched, flagged = _mismatched(pairs), audit.flagged
    precision, recall = (float((mismatched & flagged).sum() / max(1, part.sum())) for part in (flagged, mismatched))
    rows, images = _suggested(audit, pairs)
    return Audited(
        pairs=len(pairs),
        mismatched=int(mismatched.sum()),
        flagged=int(flagged.sum()),
        precision=precision,
        recall=recall,
        noise_rate=summary.noise_rate,
        suggested=int(mismatched[rows].sum()),
        restored=int((images == rows).sum()),  # text i was written for image i; a suggestion is never the present one
        seconds=summary.seconds,
        report=f"audit/{REPORT}",
    )


def _suggested(audit: AuditColumns, pairs: Pairs) -> tuple[IntArray, IntArray]:
    """Flagged pairs with a suggested image for their text, and that image."""
    found = audit.new_lefts
    assert found is not None
    return found.rows, pairs.link[found.partners[:, 0]]


def _train_both(splits: Splits, audit: AuditColumns, seed: int, runs: Path) -> list[Training]:
    """Both trainings at once, one thread each: networks as small as these have no work for a second one."""
    scored = replace(splits, train=audit.attached_to(splits.train))
    with ProcessPoolExecutor(2, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.submit(_train, name, given, seed, runs) for name, given in ((PLAIN, splits), (AUDITED, scored))]
        return [job.result() for job in jobs]


def _train(name: str, splits: Splits, seed: int, runs: Path) -> Training:
    pairs = splits.train
    used = len(pairs) if pairs.flagged is None else int((~pairs.flagged).sum())
    stretched = {key: round(SETTINGS[key] * len(pairs) / max(1, used)) for key in STRETCHED}
    usual = Config(data=pairs.name, seed=seed, device="cpu", audit=pairs.match_score is not None)
    config = override(usual, {**SETTINGS, **stretched}, "demo")
    folder = runs / f"{slug(name)}-{digest(config)[:6]}{fingerprint(pairs)[:6]}"  # other pairs: another run
    matcher = train_splits(config, splits, folder, None, "Run `mispair demo` again to resume.")
    result = read_result(folder)
    assert result is not None
    return Training(name, folder, used, result.steps, splits.test(matcher).averaged.metrics())


def _examples(pairs: Pairs, folder: Path) -> list[Shown]:
    """Matched and mismatched pairs in turn."""
    mismatched = _mismatched(pairs)
    firsts = (np.flatnonzero(part)[: EXAMPLES // 2].tolist() for part in (~mismatched, mismatched))
    return [_shown(pairs, folder, pair) for both in zip(*firsts, strict=False) for pair in both]


def _suggestions(audit: AuditColumns, pairs: Pairs, folder: Path, seed: int) -> list[Shown]:
    """Random flagged pairs with a suggested image."""
    rows, images = _suggested(audit, pairs)
    chosen = np.random.default_rng(seed).choice(len(rows), min(SUGGESTIONS, len(rows)), replace=False)
    return [_shown(pairs, folder, int(rows[place]), int(images[place]), int(rows[place])) for place in chosen]


def _queries(
    trainings: list[Training], test: Pairs, folder: Path, seed: int
) -> list[tuple[str, list[tuple[str, list[ShownImage], int]]]]:
    """Random texts of the test set; by each training the images found, and the rank of the right one from 1."""
    assert isinstance(test.right, Vectors)
    chosen = np.random.default_rng(seed).choice(len(test), min(QUERIES, len(test)), replace=False)
    asked = test.right.features[chosen]
    scores = {training.name: Matcher.load(training.folder, "cpu").score(test.left, asked) for training in trainings}
    queries = []
    for column, row in enumerate(chosen.tolist()):
        found = []
        for name, S in scores.items():
            images = [_image(test, folder, image, right=image == row) for image in best(S[:, column], FOUND)]
            found.append((name, images, int((S[:, column] >= S[row, column]).sum())))
        queries.append((test.right_ids[row], found))
    return queries


def _shown(pairs: Pairs, folder: Path, pair: int, *others: int) -> Shown:
    """A pair with its image and with other ones."""
    rows = int(pairs.link[pair]), *others
    return pairs.right_ids[pair], [_image(pairs, folder, row, right=row == pair) for row in rows]


def _image(pairs: Pairs, folder: Path, row: int, *, right: bool) -> ShownImage:
    name = pairs.left_ids[row]
    encoded = base64.b64encode((folder / "images" / f"{name}.png").read_bytes()).decode()
    return ShownImage(f"data:image/png;base64,{encoded}", name, right)


def _mismatched(pairs: Pairs) -> npt.NDArray[np.bool_]:
    """(N,) whether each pair is mismatched."""
    assert pairs.mismatched is not None
    return pairs.mismatched
