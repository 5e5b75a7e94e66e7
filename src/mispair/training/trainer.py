"""The training loop for one or two networks and any method, bit-exact after a restart.

An epoch is: the method chooses the pairs, every network goes once over its own, the result is validated. The place in
that plan (`Cursor`), the networks, the optimizers, the method and the random numbers are the whole state. The order of
the pairs and the augmentation are functions of seed, epoch, network and position, so they need no saving.
"""

from __future__ import annotations

import io
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from mispair import methods
from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import autocast, pick_device
from mispair.compute.distributed import Ranks
from mispair.compute.optimizer import make as make_optimizer
from mispair.compute.optimizer import restore, set_lr
from mispair.config import Config
from mispair.errors import (
    ChangedError,
    CollapseError,
    ConflictError,
    DamagedError,
    DataError,
    MispairError,
    NonFiniteError,
    NotFoundError,
    ShapeError,
    StoppedError,
    TooFewError,
)
from mispair.methods.base import EpochPairs, StepInputs, StepPlan
from mispair.methods.epoch_metrics import MethodReport
from mispair.models import Network, SideSpec, build, weight_bytes
from mispair.pairs.batches import PairLoader, prefetch
from mispair.pairs.pairs import Pairs, Tokens, fingerprint
from mispair.retrieval.matcher import Matcher
from mispair.support.memory import is_out_of_memory
from mispair.support.progress import RowProgress
from mispair.support.signals import stop_signals
from mispair.training import checkpoint
from mispair.training.checkpoint import Checkpoint, Cursor
from mispair.training.events import MethodEvent, StepEvent, ValidationEvent
from mispair.training.monitor import READ_EVERY, StepMetrics, StepMonitor
from mispair.training.plan import plan_epoch
from mispair.training.run_folder import Run, RunResult
from mispair.training.validation import Validation

INITIAL_WEIGHTS, ORDER, NOISY_ORDER, AUGMENTATION, DROPOUT = range(5)  # independent streams of random numbers


@dataclass
class Learner:
    """A network in training."""

    config: Config
    net: Network
    optimizer: torch.optim.Optimizer
    monitor: StepMonitor
    updates: tuple[CudaGraphStep[StepMetrics], CudaGraphStep[StepMetrics]]  # its steps: warming up, in main epochs


class Trainer:
    """Train on `train`, and keep the networks with the best result on `dev`; without `dev` the last ones.

    Several ranks share every step, so each of them has all networks.
    """

    def __init__(
        self,
        config: Config,
        train: Pairs,
        dev: Pairs | None,
        run: Run,
        console: Console | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        method = methods.select(config)
        self.ranks = Ranks() if ranks is None else ranks
        check_ranks(config, self.ranks)
        self.team = self.ranks.world
        self.config = config = method.adapted(config)
        self.train_pairs, self.run, self.device = train, run, pick_device(config.device)
        self.loader = PairLoader(train, self.device)
        configs, specs = method.network_configs(config), SideSpec.of_both(train)
        self.nets = [
            build(own, *specs, self._seed(INITIAL_WEIGHTS, number)).to(self.device).train()
            for number, own in enumerate(configs)
        ]
        for net in self.nets:
            net.share(self.team)
        self.method = method(config, self.nets, self.loader)
        self.learners = self._learners(configs)
        self.validation = Validation(dev, self.device)
        self.cursor = Cursor.start(len(self.nets))
        self.epoch_pairs: list[EpochPairs] = []
        self.report: MethodReport | None = None  # of this epoch
        self.selection_seconds = 0.0  # seconds that the method took to choose the pairs of this epoch
        self._signal, self._saved_at = 0, time.monotonic()  # the signal to stop by, if any; the last checkpoint
        self.progress = RowProgress(console, self._total_steps())

    def _learners(self, configs: Sequence[Config]) -> list[Learner]:
        records = self.device.type == "cuda" and self.method.repeatable and self.ranks.size == 1
        pool = torch.cuda.graph_pool_handle() if records else None
        learners = []
        for number, (own, net) in enumerate(zip(configs, self.nets, strict=True)):
            optimizer, monitor = make_optimizer(own, list(net.parameters())), StepMonitor(self.device)
            optimizer.found_inf = monitor.non_finite  # type: ignore[attr-defined]
            warmup, main = (
                CudaGraphStep(partial(self._update, number, main), on=records, pool=pool) for main in (False, True)
            )
            learners.append(Learner(own, net, optimizer, monitor, (warmup, main)))
        return learners

    # ------------------------------------------------------------------ the loop

    def fit(self) -> Matcher:
        """Train to the end, from the newest checkpoint if there is one."""
        if (ended := self.ranks.by_first(lambda: self.run.result)) is not None:
            self._refuse_other_pairs(ended.fingerprint)
            self.progress.write("This run has ended already; nothing was trained.")
            return self._load_best()
        own = [self.device] if self.device.type == "cuda" else []
        # The caller's random numbers are not ours.
        with stop_signals(self.stop), self.progress, torch.random.fork_rng(own):
            self._resume()
            if self.ranks.is_first:
                self.run.write_environment(self.device)
            while self.cursor.epoch < self.config.total_epochs:
                self.epoch()
        if self.validation.dev is None and self.ranks.is_first:
            self._save_best()
        best, steps = self.validation.best, self.cursor.step
        result = RunResult(best=best, steps=steps, fingerprint=self._trained_on, report=self.report)
        examples = self.method.examples(np.arange(len(self.train_pairs)))
        self.ranks.by_first(lambda: self.run.finish(result, examples))
        return self._load_best()

    def _load_best(self) -> Matcher:
        """Load the best model; only the first rank has the file."""
        content = None if self.ranks.size == 1 else self.ranks.by_first(self.run.best.read_bytes)
        if content is None or self.ranks.is_first:
            return Matcher.load(self.run.best, self.config.device)
        with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
            copy = Path(folder) / self.run.best.name
            copy.write_bytes(content)
            return Matcher.load(copy, self.config.device)

    def epoch(self) -> None:
        """Train and validate an epoch, or the rest of it."""
        cursor, started = self.cursor, time.monotonic()
        if not cursor.begun:
            self.begin(cursor.epoch)
        while cursor.network < len(self.nets):
            for _ in self.steps():
                self._pause()
            cursor.network += 1
        self._check_equal_weights()
        if self.report is not None:
            metrics = self.report.model_dump(exclude_unset=True)
            self.run.log(MethodEvent(epoch=cursor.epoch, step=cursor.step, **metrics))
        self.validate(time.monotonic() - started)
        cursor.to_epoch(cursor.epoch + 1)
        cursor.first_steps = list(cursor.main_steps)
        self._checkpoint()

    def begin(self, epoch: int) -> None:
        """Start an epoch: the method chooses the pairs of every network."""
        cursor, started = self.cursor, time.monotonic()
        cursor.to_epoch(epoch)
        main = self._main_epoch
        self.progress.note(f"{self._phase}, choosing pairs")
        with autocast(self.device, self.config.precision):
            self.epoch_pairs = self.method.begin_warmup() if main is None else self.method.begin_epoch(main)
        self.report = None if main is None else self.method.report()
        self._agree()
        self._check_epoch_pairs()
        self.selection_seconds = time.monotonic() - started

    def steps(self) -> Iterator[StepPlan]:
        """Make the remaining steps of the current network in this epoch, and yield each.

        At the end the metrics are read, so all work on the GPU is finished.
        """
        cursor, number = self.cursor, self.cursor.network
        plans = self.plans(number)
        for plan, inputs in self._inputs(plans[cursor.position :]):
            place = cursor.epoch + plan.position / len(plans)
            set_lr(self.learners[number].optimizer, self.method.learning_rate(number, place))
            self._step(plan, inputs)
            yield plan
        self._flush_metrics()

    def _step(self, plan: StepPlan, inputs: StepInputs) -> None:
        cursor, main = self.cursor, plan.main_step is not None
        learner = self.learners[cursor.network]
        learner.monitor.add(cursor.step, learner.updates[main](inputs), len(plan.pairs))
        cursor.step += 1
        cursor.positions[cursor.network] = plan.position + 1
        if main:
            cursor.main_steps[cursor.network] += not plan.on_noisy
            self.method.after_step(cursor.network, plan)
        self.progress.step(1)
        if learner.monitor.unread >= READ_EVERY:
            self._flush_metrics()

    def _update(self, number: int, main: bool, inputs: StepInputs) -> StepMetrics:
        """Make one step of network `number`: loss, gradients, update."""
        net, optimizer = self.nets[number], self.learners[number].optimizer
        loss = self.method.loss if main else self.method.warmup_loss
        optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            result = loss(number, inputs)
        result.loss.backward()  # type: ignore[no-untyped-call]
        self.team.add_gradients(net.parameters())
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), self.config.grad_clip)
        metrics = self.learners[number].monitor.measure(result, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # so that recorded steps share the memory of the gradients
        return metrics

    def validate(self, seconds: float = 0.0) -> None:
        """Validate, and keep the networks if they are the best so far or the first of a new set.

        The log has the `seconds` of the epoch.
        """
        if self.validation.dev is None:
            return
        epoch = self.cursor.epoch
        kept = tuple(self.method.kept_networks(epoch))
        trained = self.method.trained_networks(epoch)
        with autocast(self.device, self.config.precision):
            result = self.validation.evaluate(self.nets, kept, trained)
        is_best = self.validation.is_best(result, epoch, kept)
        if is_best and self.ranks.is_first:
            self._save_best()
        event = {
            "epoch": epoch,
            "step": self.cursor.step,
            **result.averaged.metrics(),
            "networks_rsum": [network.rsum for network in result.networks],
            "seconds": round(seconds, 2),
            "selection_seconds": round(self.selection_seconds, 2),
        }
        self.run.log(ValidationEvent.model_validate(event))
        words = " (best)" if list(kept) == self.method.kept_networks(0) else " (best of the new model)"
        best = words if is_best else ""
        self.progress.write(f"{self._phase}  validation rSum {result.averaged.rsum:.1f}{best}  {seconds:.1f} s")

    # ------------------------------------------------------------------ batches

    def _inputs(self, plans: Sequence[StepPlan]) -> Iterator[tuple[StepPlan, StepInputs]]:
        """Yield steps of this epoch with the inputs of the current network."""
        cursor, net = self.cursor, self.nets[self.cursor.network]
        epoch, number = cursor.epoch, cursor.network

        def make(plan: StepPlan) -> tuple[StepPlan, StepInputs]:
            augment = self._rng(AUGMENTATION, epoch, number, plan.position) if net.augments else None
            return plan, self.method.inputs(number, plan, augment)

        return prefetch(plans, make) if self.loader.on_host else map(make, plans)

    def plans(self, number: int) -> list[StepPlan]:
        """Plan the steps of this epoch for one network."""
        orders = [self._rng(stream, self.cursor.epoch, number) for stream in (ORDER, NOISY_ORDER)]
        first = None if self._main_epoch is None else self.cursor.first_steps[number]
        return plan_epoch(self.epoch_pairs[number], self.config.batch_size, orders[0], orders[1], first)

    def _total_steps(self) -> int:
        """Estimate the steps of the whole run; a method may use fewer pairs."""
        epochs = sum(len(self.method.trained_networks(epoch)) for epoch in range(self.config.total_epochs))
        return epochs * math.ceil(len(self.method.unflagged) / self.config.batch_size)

    # ------------------------------------------------------------------ monitoring

    def _flush_metrics(self) -> None:
        """Read and log the metrics of the latest steps; stop a failed run."""
        cursor = self.cursor
        if cursor.network == len(self.nets) or not (monitor := self.learners[cursor.network].monitor).unread:
            return  # each network's are read at the end of its steps
        metrics, bad_step = monitor.read()
        if bad_step is not None:
            self._refuse_non_finite(bad_step)
        usual = {name: metrics.pop(name) for name in ("loss", "spread", "grad_norm")}
        place = {"epoch": cursor.epoch, "step": cursor.step, "network": cursor.network}
        self.run.log(StepEvent.model_validate({**place, **usual, "metrics": metrics}))
        self.progress.note(f"{self._phase}, loss {usual['loss']:.4f}, spread {usual['spread']:.3f}")
        if monitor.health.collapsed:
            self._refuse_collapse()

    def _check_epoch_pairs(self) -> None:
        """Raise if the run starts without pairs to train on; in a later epoch only note it."""
        if any(len(pairs.clean) > 1 for pairs in self.epoch_pairs):
            return
        found = f"the method {self.config.method} chose fewer than 2 of {len(self.train_pairs):,} pairs to train on"
        if not self.cursor.step:
            advice = "Give more pairs that match, or another `method`."
            raise TooFewError(found, where=self.train_pairs.name, advice=advice)
        self.progress.write(f"{self._phase}  {found}, so nothing is learned in this epoch")

    def _refuse_other_pairs(self, trained_on: str | None) -> None:
        if trained_on != self._trained_on:
            what = "trained on other pairs: the data set or its noise has changed"
            raise ChangedError(what, where=self.run.path, advice="Put the old files back, or give another `out`.")

    def _refuse_non_finite(self, step: int) -> None:
        """Raise, naming the pairs of the failed step."""
        position = self.cursor.position - (self.cursor.step - step)
        plan = self.plans(self.cursor.network)[position]
        pairs = ", ".join(map(str, np.unique(self.method.pairs_used(self.cursor.network, plan))))
        what = f"the loss or its gradient is not a finite number at step {step}; the update was not made"
        advice = f"Pairs of that batch: {pairs}. Look for extreme features with mispair data check, or lower `lr`."
        raise NonFiniteError(what, advice=advice)

    def _refuse_collapse(self) -> None:
        kept = checkpoint.find(self.run.checkpoints)
        config, health = self.config, self.learners[self.cursor.network].monitor.health
        state = f"The last good state is {kept[0]}." if kept else "There was no good state to keep yet."
        hardening = (
            "The negatives harden too fast for this data set: try a larger `negatives_end` "
            f"(now {config.negatives_end}), more `hardening_steps` (now {config.hardening_steps}) or"
        )
        advice = "Try" if "negatives_end" in self.method.ignores else hardening
        raise CollapseError(
            f"the network has collapsed at step {self.cursor.step}: all similarities are equal (spread "
            f"{health.spread:.1e}, it was {health.peak:.2g})",
            advice=f"{advice} a lower `lr` (now {config.lr:g}), with another `out`. {state}",
        )

    # ------------------------------------------------------------------ state

    def stop(self, number: int) -> None:
        """Stop the run after the current step, as this signal does."""
        self._signal = number

    def _pause(self) -> None:
        """Stop after a signal to any rank, and save when it is time."""
        late = time.monotonic() - self._saved_at >= self.config.checkpoint_seconds
        signal, save = self.ranks.highest(self._signal, int(late))
        if signal:
            self._flush_metrics()
            self._check_equal_weights()
            self._save()
            raise StoppedError(f"Stopped at step {self.cursor.step} and saved", 128 + signal)
        if save:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._flush_metrics()
        self._check_equal_weights()
        if all(learner.monitor.health.healthy for learner in self.learners):
            self._save()

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        if not self.ranks.is_first:
            return
        state = Checkpoint(
            cursor=self.cursor,
            networks=[net.state_dict() for net in self.nets],
            optimizers=[learner.optimizer.state_dict() for learner in self.learners],
            method=self.method.state_dict(),
            epoch_pairs=self.epoch_pairs,
            report=self.report,
            best=self.validation.best,
            health=[learner.monitor.health for learner in self.learners],
            random_state=torch.get_rng_state(),
            cuda_random_state=torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            logged_bytes=self.run.logged_bytes,
            fingerprint=self._trained_on,
        )
        checkpoint.save(self.run.checkpoints, state)

    def _agree(self) -> None:
        """Copy the first rank's pairs and method state to all ranks, because processors may differ."""
        if self.ranks.size == 1:
            return
        self.epoch_pairs, state = self.ranks.by_first(lambda: (self.epoch_pairs, _packed(self.method.state_dict())))
        if not self.ranks.is_first:
            self.method.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))

    def _check_equal_weights(self) -> None:
        """Raise if the weights differ between ranks."""
        if self.ranks.size == 1:
            return
        checksums = [sum(float(p.detach().double().sum()) for p in net.parameters()) for net in self.nets]
        if any(other != checksums for other in self.ranks.exchange(checksums)):
            advice = "Check that all machines have the same data set and the same versions of torch and mispair."
            raise MispairError("the weights of the ranks differ", advice=advice)

    def _resume(self) -> None:
        torch.manual_seed(self._seed(DROPOUT))
        state = self.ranks.by_first(self._load_checkpoint)
        if state is not None:
            try:
                self._restore(state)
            except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
                if is_out_of_memory(error) or "CUDA error" in str(error):
                    raise
                what = "the newest checkpoint is not of this run"
                advice = "Delete it, or give another `out`."
                raise DamagedError(what, where=self.run.checkpoints, advice=advice) from None
            self.progress.reach(self.cursor.step)
        self.progress.begin(f"{self.config.method} {self.config.model}")
        if self.ranks.is_first:
            self.run.forget_after(0 if state is None else state.logged_bytes)

    def _load_checkpoint(self) -> Checkpoint | None:
        state = checkpoint.resume(self.run.checkpoints)
        if state is None:
            return None
        self._refuse_other_pairs(state.fingerprint)
        if state.best.networks and not self.run.best.is_file():
            what = "missing, and the checkpoints do not hold it"
            raise NotFoundError(what, where=self.run.best, advice="Put it back, or give another `out`.")
        return state

    def _restore(self, state: Checkpoint) -> None:
        self.cursor, self.validation.best = state.cursor, state.best
        self.epoch_pairs, self.report = state.epoch_pairs, state.report
        saved = zip(self.learners, state.networks, state.optimizers, state.health, strict=True)
        for learner, weights, optimizer, health in saved:
            learner.net.load_state_dict(weights)
            restore(learner.optimizer, optimizer)
            learner.monitor.health = health
        self.method.load_state_dict(state.method)
        torch.set_rng_state(state.random_state)
        if state.cuda_random_state is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state.cuda_random_state, self.device)

    def _save_best(self) -> None:
        """Save the networks of the model."""
        kept = self.method.kept_networks(min(self.cursor.epoch, self.config.total_epochs - 1))
        train, nets = self.train_pairs, [self.nets[number] for number in kept]
        specs = SideSpec.of_both(train)
        models = [self.learners[number].config.model for number in kept]
        words = next((side.vocabulary for side in (train.right, train.left) if isinstance(side, Tokens)), None)
        Matcher(self.config, specs, nets, words, self.device, models, train.origin).save(self.run.best)
        for net in nets:  # a matcher takes them out of training
            net.train()

    @cached_property
    def _trained_on(self) -> str:
        """Fingerprint of the training and validation pairs."""
        learned, dev = fingerprint(self.train_pairs, truth=self.method.uses_truth), self.validation.dev
        return learned if dev is None else f"{learned}+{fingerprint(dev)}"

    @property
    def _main_epoch(self) -> int | None:
        """Number of the main epoch; None during warm-up."""
        epoch = self.cursor.epoch - self.config.warmup_epochs
        return epoch if epoch >= 0 else None

    @property
    def _phase(self) -> str:
        main = self._main_epoch
        if main is None:
            return f"warm-up {self.cursor.epoch + 1}/{self.config.warmup_epochs}"
        return f"epoch {main + 1}/{self.config.epochs}"

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, *stream])

    def _seed(self, *stream: int) -> int:
        return int(self._rng(*stream).integers(2**31))


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Raise if several ranks cannot train with these settings."""
    method = methods.select(config)
    if ranks.size > 1 and not method.distributed:
        what = f"{config.method} is a method for one process, but there are {ranks.size}"
        raise ConflictError(what, where="method", advice="Leave out torchrun.")


def _packed(state: dict[str, Any]) -> bytes:
    """Serialize tensors of any device for another process."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def check_networks(config: Config, train: Pairs) -> None:
    """Raise if the networks do not take these pairs."""
    for own in methods.select(config).network_configs(config):
        weight_bytes(own, *SideSpec.of_both(train))


def check_pairs(train: Pairs, dev: Pairs | None) -> None:
    """Raise if pairs cannot be trained on, or if validation pairs are of another kind."""
    images = len(np.unique(train.left_groups[train.link]))
    if len(train) < 2 or images < 2:
        what = f"{len(train):,} training pairs with {images} different left items"
        expected = "at least 2 of each, because the other pairs are the negatives"
        raise TooFewError(what, where=train.name, expected=expected)
    words = [side.vocabulary for side in (train.left, train.right) if isinstance(side, Tokens)]
    if len(words) == 2 and words[0] != words[1]:
        what = f"both sides are texts, of different vocabularies ({len(words[0]):,} and {len(words[1]):,} words)"
        raise DataError(what, where=train.name, advice="A model keeps one: encode both sides with one vocabulary.")
    if dev is None:
        return
    if not len(dev):
        raise TooFewError("no validation pairs", where=dev.name, advice="Leave them out; the last epoch is then kept.")
    for name in ("left", "right"):
        ours, theirs = getattr(train, name), getattr(dev, name)
        if SideSpec.of(ours) != SideSpec.of(theirs):
            expected = f"{SideSpec.of(ours)}, as for training"
            raise ShapeError(f"the {name} side has {SideSpec.of(theirs)}", where=dev.name, expected=expected)
        if isinstance(ours, Tokens) and ours.vocabulary != theirs.vocabulary:
            advice = 'Load both with one vocabulary: load(data, "dev", vocabulary=train.right.vocabulary).'
            raise DataError(f"the {name} side has other words than for training", where=dev.name, advice=advice)
