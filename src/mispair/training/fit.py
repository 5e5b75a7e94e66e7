"""`mispair.fit(pairs) -> Matcher`, and training from settings alone."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from rich.console import Console

from mispair import methods
from mispair.compute.devices import give_back_memory
from mispair.compute.distributed import connect
from mispair.config import Config
from mispair.errors import ChangedError, ConflictError, DataError, StoppedError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.npy import chunks
from mispair.pairs.pairs import Pairs, Side, Tokens, unflagged
from mispair.retrieval.evaluation import Evaluation
from mispair.retrieval.matcher import Matcher, check_content, check_is_pairs
from mispair.support.progress import at_work
from mispair.training.defaults import check_method, first_line, fitted, note_unused
from mispair.training.run_folder import AUDITED, Run, check_place, own_features, read_result
from mispair.training.settings import Settings, all_names, complete, override
from mispair.training.splits import Splits, check_tested, load_splits
from mispair.training.trainer import Trainer, check_networks, check_pairs, check_ranks

TRAIN, DEV, TEST = AUDITED
SAMPLE = 16  # items of a side that are compared before all of them are
READING = ("data", "vocab", "dev_protocol", "captions_per_image")  # settings of which data `mispair train` reads ...
NOISE = ("noise_ratio", "noise_kind", "noise_file", "noise_seed")  # ... and which pairs it mismatches


def fit(
    pairs: Pairs,
    dev: Pairs | None = None,
    *,
    out: str | Path | None = None,
    console: Console | None = None,
    **settings: Unpack[Settings],
) -> Matcher:
    """Train a matching model.

    Args:
        pairs: Training pairs.
        dev: Pairs to choose the best epoch by; without them the last one is kept.
        out: Run folder; an interrupted run in it is continued. Without it nothing is kept on disk.
        console: Console for progress; by default nothing is shown.
        **settings: Settings such as `method="repair"`, `model="sgr"`, `epochs=10`, `tau=0.2`. Others follow
            the data and the device.
    """
    given = {"pairs": pairs} if dev is None else {"pairs": pairs, "dev": dev}
    for name, value in given.items():
        check_is_pairs(value, f"fit: {name}")
    _refuse_data_settings(settings)
    from mispair.auditing.inputs import encoded_pairs

    device = settings.get("device", "auto")
    given = {name: encoded_pairs(value, device, console) for name, value in given.items()}
    pairs, dev = given["pairs"], given.get("dev")
    config = fitted(override(Config(data=pairs.name), settings, "fit"), settings, pairs)
    note_unused(config, settings)
    for name, value in given.items():
        check_content(value.left, f"fit: the left side of {name}")
        check_content(value.right, f"fit: the right side of {name}")
    if out is None:
        with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
            return _train(config, pairs, dev, Path(folder) / "run", console, "Nothing is kept, as no `out` was given.")
    return _train(config, pairs, dev, Path(out), console, f"Call fit again with out={str(out)!r} to go on.")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run and its test result; tested on dev or train if there are no test pairs."""

    run: Path
    noise_ratio: float | None  # measured; None where the truth is not known
    tested_on: str
    evaluation: Evaluation
    unflagged: Evaluation | None = None  # on the test pairs that the audit did not flag, where it flagged any
    flagged: int = 0  # test pairs that it flagged

    def metrics(self) -> dict[str, Any]:
        """Return flat metrics for `--json`."""
        about = {"run": str(self.run), "mismatch": self.noise_ratio, "tested_on": self.tested_on}
        flagged = {} if self.unflagged is None else {"flagged": self.flagged, "unflagged": self.unflagged.metrics()}
        return {**about, **self.evaluation.metrics(), **flagged}


def train_and_test(
    config: Config, out: Path, console: Console | None = None, given: Collection[str] | None = None
) -> TrainedRun:
    """Read the data, inject noise, train, and test the best model, as `mispair train` does.

    Settings that are not `given` follow the data and the device; by default all were given.
    """
    given = all_names() if given is None else given
    with connect(config.device) as ranks:
        check_ranks(config, ranks)
        check_method(config, given)
        ranks.by_first(lambda: check_place(out))
        if ranks.is_first:
            note_unused(config, given)
        if not Path(config.data).exists():  # as in the settings of a run that has been moved
            config = replace(config, data=own_features(out, config.data) or config.data)
        splits = ranks.first_before_others(lambda: load_splits(config, console))
        config = fitted(config, given, splits.train)
        if console is not None and read_result(out) is None:
            console.print(first_line(config, len(splits.train)), soft_wrap=True)
        recipe, folder = shlex.quote(str(out / "config.toml")), shlex.quote(str(out))
        run_again = f"Go on with: mispair train --recipe {recipe} --out {folder}"
        matcher = train_splits(config, splits, out, console, run_again)

        def tested() -> TrainedRun:
            trusted = unflagged_by(out, splits.tested, "test")
            found = None if trusted is None else replace(splits, tested=trusted).test(matcher)
            flagged = 0 if trusted is None else len(splits.tested) - len(trusted)
            return TrainedRun(out, splits.noise_ratio, splits.tested.name, splits.test(matcher), found, flagged)

        return ranks.by_first(tested)


def unflagged_by(run: Path, pairs: Pairs, split: str) -> Pairs | None:
    """Return the pairs of a split without those flagged by the audit of a run; None if it has flagged none."""
    path = run / {"dev": DEV, "test": TEST}.get(split, "")
    if not path.is_file() or len(columns := AuditColumns.read(path)) != len(pairs):
        return None
    audited = columns.attached_to(pairs)
    trusted = unflagged(audited)
    return None if trusted is audited else trusted


def train_splits(config: Config, splits: Splits, out: Path, console: Console | None, after_stop: str) -> Matcher:
    """Train in the run folder `out`, or resume there; `after_stop` tells the user how to resume."""
    check_tested(config, splits)
    return _train(config, splits.train, splits.dev, out, console, after_stop, splits.parts.get(TEST))


def _refuse_data_settings(settings: Mapping[str, Any]) -> None:
    """Raise for settings without effect on existing pairs."""
    for name in settings:
        if name in READING:
            raise ConflictError("fit reads no files", where=name, advice="Read the pairs with mispair.load before.")
        if name in NOISE:
            advice = "Before fit, mismatch pairs with mispair.add_noise(pairs, noise_ratio=0.4, seed=0)."
            raise ConflictError("fit does not add noise", where=name, advice=advice)


def _train(
    config: Config,
    train: Pairs,
    dev: Pairs | None,
    out: Path,
    console: Console | None,
    after_stop: str,
    tested: Pairs | None = None,
) -> Matcher:
    methods.select(config).check(config)
    config = complete(config)
    check_pairs(train, dev)
    audits = (config.audit or methods.select(config).audits) and train.match_score is None
    if audits:
        check_networks(config, train)  # as the trainer does, but before the audit
    _refuse_equal_items(train)
    try:
        with (
            connect(config.device) as ranks,
            ranks.first_before_others(lambda: Run(out, config, writes=ranks.is_first)) as run,
        ):
            check_ranks(config, ranks)
            if audits:
                found = ranks.by_first(lambda: _audited(config, train, dev, tested, run, console))
                train = found[TRAIN].attached_to(train)
                dev = found[DEV].attached_to(dev) if dev is not None and DEV in found else dev
            matcher = Trainer(config, train, dev, run, console, ranks).fit()
            if matcher.device.type == "cuda":  # its features and recorded steps would still lie there
                give_back_memory()
            return matcher
    except StoppedError as stop:
        raise StoppedError(f"{stop.what}. {after_stop}", stop.code) from None


def _audited(
    config: Config, train: Pairs, dev: Pairs | None, tested: Pairs | None, run: Run, console: Console | None
) -> dict[str, AuditColumns]:
    """Audit the pairs once, keep the result in the run folder, and return it by file name.

    The test pairs are audited with them, so that their results can be given without flagged pairs, too.
    """
    parts = {name: pairs for name, pairs in ((TRAIN, train), (DEV, dev), (TEST, tested)) if pairs is not None}
    if not (run.path / TRAIN).exists():
        save_columns(run.path, audit_splits(parts, config, console))
    found = {name: AuditColumns.read(run.path / name) for name in parts if (run.path / name).exists()}
    for name, columns in found.items():
        if len(columns) != len(parts[name]):
            what = f"{len(columns):,} audited pairs, but {parts[name].name} has {len(parts[name]):,}"
            raise ChangedError(what, where=run.path / name, advice="Audit these pairs")
        if console is not None:
            console.print(f"{parts[name].name}: {(~columns.flagged).mean():.0%} of the pairs match by the audit")
    return found


def audit_splits(parts: Mapping[str, Pairs], config: Config, console: Console | None) -> dict[str, AuditColumns]:
    """Audit training pairs and other splits of the same data; omit too small splits."""
    from mispair.auditing.audit import score_splits

    with advising_no_audit(config), at_work(console or Console(quiet=True), "auditing the pairs"):
        scores = score_splits(list(parts.values()), config.device, console)
    return {name: AuditColumns.of_scores(one) for name, one in zip(parts, scores, strict=True) if one is not None}


def save_columns(run: Path, found: Mapping[str, AuditColumns]) -> None:
    """Save audit columns in a run folder, by file name."""
    for name in reversed(AUDITED):  # that of the training pairs last: it says that the others are there
        if name in found and not (run / name).exists():
            found[name].save(run / name)


@contextmanager
def advising_no_audit(config: Config) -> Iterator[None]:
    """Add advice on training without an audit to errors about the audit."""
    try:
        yield
    except DataError as error:
        other = "leave out `audit`" if config.audit else f"give another `method`, because {config.method} audits first"
        error.advice = f"{error.advice} Or {other}.".strip()
        raise


def _refuse_equal_items(pairs: Pairs) -> None:
    """Raise if all items of a side are equal: dropout can hide the lack of learning for a whole run."""
    for name, side in (("left", pairs.left), ("right", pairs.right)):
        if _all_equal(side):
            advice = "Check the input with mispair data check, and make the features again."
            raise DataError(f"all {len(side):,} items of the {name} side are the same", where=pairs.name, advice=advice)


def _all_equal(side: Side) -> bool:
    if isinstance(side, Tokens):
        words = side.ids[side.offsets[0] : side.offsets[-1]]
        return bool(np.ptp(side.lengths) == 0 and (words.reshape(len(side), -1) == words[: side.lengths[0]]).all())
    first, some = side.features[0], side.features[np.linspace(0, len(side) - 1, SAMPLE, dtype=np.int64)]
    return bool((some == first).all()) and all((part == first).all() for _, part in chunks(side.features))
