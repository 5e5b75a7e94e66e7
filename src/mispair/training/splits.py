"""Training, validation and test pairs of a run."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from mispair import methods
from mispair.compute.devices import pick_device
from mispair.config import Config
from mispair.errors import DataError
from mispair.models import SideSpec
from mispair.pairs.check import mostly_unknown
from mispair.pairs.layouts import opening
from mispair.pairs.layouts.clip_retrieval import is_embedding_folder
from mispair.pairs.layouts.opening import load_split
from mispair.pairs.noise import with_noise
from mispair.pairs.pairs import Pairs, Tokens
from mispair.retrieval.evaluation import Evaluation
from mispair.retrieval.matcher import Matcher, takes
from mispair.training.run_folder import AUDITED

SLICE = 1000  # test images


@dataclass(frozen=True)
class Splits:
    """The pairs of a run."""

    train: Pairs
    dev: Pairs | None
    tested: Pairs  # the test pairs; without any those for validation, and without those the training pairs

    @property
    def noise_ratio(self) -> float | None:
        """Measured fraction of mismatched training pairs; None if the truth is unknown."""
        return None if self.train.mismatched is None else float(self.train.mismatched.mean())

    @property
    def parts(self) -> dict[str, Pairs]:
        """The distinct splits, by the file name of their audit columns in a run folder."""
        found = {AUDITED[0]: self.train} if self.dev is None else {AUDITED[0]: self.train, AUDITED[1]: self.dev}
        known = any(self.tested is pairs for pairs in found.values())
        return found if known else {**found, AUDITED[2]: self.tested}

    def test(self, matcher: Matcher) -> Evaluation:
        """Test on all images, and on slices of 1,000 where they divide evenly (MS-COCO 1K)."""
        slices, rest = divmod(len(self.tested.left), SLICE)
        return matcher.evaluate(self.tested, folds=1 if rest else max(1, slices))


def load_splits(config: Config, console: Console | None = None) -> Splits:
    """Read the data of a run and inject its noise."""
    methods.find(config.method)
    pick_device(config.device)
    notes = console or Console(quiet=True)
    found = opening.found_splits(config.data)
    train = load_split(config, "train")
    words = train.right.vocabulary if isinstance(train.right, Tokens) else None
    others = {name: load_split(config, name, words) for name in ("dev", "test", "testall") if name in found}
    train = with_noise(config, train)
    tested = next((others[name] for name in ("testall", "test", "dev") if name in others), train)
    splits = Splits(train, others.get("dev"), tested)
    ratio = splits.noise_ratio
    notes.print(f"{train.name}: {len(train):,} pairs" + (f", {ratio:.2%} of them mismatched" if ratio else ""))
    if "dev" not in others:
        notes.print("There is no dev split, so the last epoch is kept, not the best.")
    if unknown := mostly_unknown(train.right):
        notes.print(
            f"{train.name}: {unknown:.0%} of the words are not in the vocabulary, so the captions say almost nothing. "
            "Give their vocabulary as `vocab`."
        )
    if is_embedding_folder(opening.find_folder(config.data)):
        notes.print(
            "dev and test are the last rows of the training data. If these contain mismatched pairs, so do validation "
            "and test. Make folders train/, dev/ and test/, with checked "
            "pairs in the last two."
        )
    return splits


def check_tested(config: Config, splits: Splits) -> None:
    """Raise if the trained model could not score the test pairs."""
    models = dict.fromkeys(own.model for own in methods.select(config).network_configs(config))
    for name in ("left", "right"):
        ours, theirs = (SideSpec.of(getattr(pairs, name)) for pairs in (splits.train, splits.tested))
        for model in (model for model in models if not takes(model, ours, theirs)):
            raise DataError(
                f"{splits.tested.name}: the {name} side has {theirs}, but {ours} for training, so {model} could "
                "not be tested on it; make the features of all splits in the same way, or take this split away."
            )
