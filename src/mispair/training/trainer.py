"""The training loop: one or two networks, any method, exact to the bit after a restart.

An epoch is: the method chooses the pairs, every network goes once over its own, the result is validated. The place in
that plan (`Cursor`), the networks, the optimizers, the method and the random numbers are the whole state. The order of
the pairs and the augmentation are functions of seed, epoch, network and position, so they need no saving.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from mispair import methods
from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import autocast, pick_device
from mispair.compute.optimizer import make as make_optimizer
from mispair.compute.optimizer import set_lr
from mispair.config import Config
from mispair.data.batches import PairLoader, SideLoader, prefetch
from mispair.data.pairs import Pairs, Tokens, fingerprint, unflagged
from mispair.errors import CollapseError, ConfigError, DataError, NonFiniteError, StoppedError
from mispair.methods.base import EpochPairs, StepInputs, StepPlan
from mispair.methods.report import MethodReport
from mispair.models import SideSpec, build
from mispair.models.inference import average, similarities
from mispair.retrieval.evaluation import evaluate
from mispair.retrieval.matcher import Matcher
from mispair.support.progress import TrainingProgress
from mispair.support.signals import stop_signals
from mispair.training import checkpoint
from mispair.training.checkpoint import Best, Checkpoint, Cursor
from mispair.training.events import MethodEvent, StepEvent, ValidationEvent
from mispair.training.monitor import READ_EVERY, StepMetrics, StepMonitor
from mispair.training.plan import plan_epoch
from mispair.training.run_folder import Run, RunResult

INITIAL_WEIGHTS, ORDER, NOISY_ORDER, AUGMENTATION, DROPOUT = range(5)  # independent streams of random numbers


class Trainer:
    """Trains what `config` says on `train`; keeps the networks that are best on `dev` (the last ones without it)."""

    def __init__(
        self, config: Config, train: Pairs, dev: Pairs | None, run: Run, console: Console | None = None
    ) -> None:
        method = methods.select(config)
        config = method.adapted(config)
        self.config, self.train_pairs, self.run = config, train, run
        self.dev = None if dev is None else unflagged(dev)  # mismatched pairs shall not decide the best epoch
        self.device = pick_device(config.device)
        self.specs = SideSpec.of(train.left), SideSpec.of(train.right)
        self.vocabulary = next((s.vocabulary for s in (train.right, train.left) if isinstance(s, Tokens)), None)
        self.configs = method.network_configs(config)
        self.nets = [
            build(own, *self.specs, self._seed(INITIAL_WEIGHTS, number)).to(self.device).train()
            for number, own in enumerate(self.configs)
        ]
        self.optimizers = [
            make_optimizer(own, list(net.parameters())) for own, net in zip(self.configs, self.nets, strict=True)
        ]
        self.loader = PairLoader(train, self.device)
        self._dev_loaders: tuple[SideLoader, SideLoader] | None = None
        self._dev_scores: dict[int, Tensor] = {}  # by network, for those that do not train any more
        self.method = method(config, self.nets, self.loader)
        self.cursor = Cursor(main_steps=[0] * len(self.nets), first_steps=[0] * len(self.nets))
        self.epoch_pairs: list[EpochPairs] = []
        self.report: MethodReport | None = None  # of this epoch
        self.best = Best()
        self.monitors = [StepMonitor(self.device) for _ in self.nets]
        records = self.device.type == "cuda" and self.method.repeatable
        pool = torch.cuda.graph_pool_handle() if records else None
        self._updates = {
            (number, main): CudaGraphStep(partial(self._update, number, main), on=records, pool=pool)
            for number in range(len(self.nets))
            for main in (False, True)
        }
        for optimizer, monitor in zip(self.optimizers, self.monitors, strict=True):
            optimizer.found_inf = monitor.non_finite  # type: ignore[attr-defined]
        self.progress = TrainingProgress(self._total_steps(), console, f"{config.method} {config.model}")
        self.selection_seconds = 0.0  # seconds that the method took to choose the pairs of this epoch
        self._saved_at = time.monotonic()
        self._signal: int | None = None

    # ------------------------------------------------------------------ the loop

    def fit(self) -> Matcher:
        """Trains to the end, from the newest checkpoint if there is one."""
        if (ended := self.run.result) is not None:
            self._refuse_other_pairs(ended.fingerprint)
            self.progress.line("This run has ended already; nothing was trained.")
            return Matcher.load(self.run.best, self.config.device)
        own = [self.device] if self.device.type == "cuda" else []
        # The caller's random numbers are not ours.
        with stop_signals(self.stop), self.progress, torch.random.fork_rng(own):
            self._resume()
            self.run.write_environment(self.device)
            while self.cursor.epoch < self.config.total_epochs:
                self.epoch()
        if self.dev is None:
            self._matcher().save(self.run.best)
        result = RunResult(best=self.best, steps=self.cursor.step, fingerprint=self._trained_on, report=self.report)
        self.run.finish(result, self.method.examples(np.arange(len(self.train_pairs))))
        return Matcher.load(self.run.best, self.config.device)

    def epoch(self) -> None:
        """Trains and validates an epoch, or what is left of it."""
        cursor, started = self.cursor, time.monotonic()
        if cursor.network == 0 and cursor.position == 0:
            self.begin(cursor.epoch)
        while cursor.network < len(self.nets):
            for _ in self.steps():
                self._pause()
            cursor.network, cursor.position = cursor.network + 1, 0
        if self.report is not None:
            metrics = self.report.model_dump(exclude_unset=True)
            self.run.log(MethodEvent(epoch=cursor.epoch, step=cursor.step, **metrics))
        self.validate(time.monotonic() - started)
        cursor.epoch, cursor.network, cursor.position = cursor.epoch + 1, 0, 0
        cursor.first_steps = list(cursor.main_steps)
        self._checkpoint()

    def begin(self, epoch: int) -> None:
        """Goes to the start of an epoch: the method chooses the pairs of every network."""
        cursor, started = self.cursor, time.monotonic()
        cursor.epoch, cursor.network, cursor.position = epoch, 0, 0
        main = self._main_epoch
        with autocast(self.device, self.config.precision):
            self.epoch_pairs = self.method.begin_warmup() if main is None else self.method.begin_epoch(main)
        self.report = None if main is None else self.method.report()
        self._check_epoch_pairs()
        self.selection_seconds = time.monotonic() - started

    def steps(self, first: int | None = None, most: int | None = None) -> Iterator[StepPlan]:
        """Makes `most` steps of the network in turn, from position `first` of this epoch; gives each once it is made.

        By default all, from where it is. In the end the metrics are read: so everything has been done on the GPU, too.
        """
        cursor, number = self.cursor, self.cursor.network
        cursor.position = cursor.position if first is None else first
        plans = self.plans(number)
        for plan, inputs in islice(self._inputs(plans[cursor.position :]), most):
            place = cursor.epoch + plan.position / len(plans)
            set_lr(self.optimizers[number], self.method.learning_rate(number, place))
            self._step(plan, inputs)
            yield plan
        self._flush_metrics()

    def _step(self, plan: StepPlan, inputs: StepInputs) -> None:
        cursor, main = self.cursor, plan.main_step is not None
        metrics = self._updates[cursor.network, main](inputs)
        monitor = self.monitors[cursor.network]
        monitor.add(cursor.step, metrics, len(plan.pairs))
        cursor.step, cursor.position = cursor.step + 1, plan.position + 1
        if main:
            cursor.main_steps[cursor.network] += not plan.on_noisy
            self.method.after_step(cursor.network, plan)
        self.progress.step(self._phase)
        if monitor.unread >= READ_EVERY:
            self._flush_metrics()

    def _update(self, number: int, main: bool, inputs: StepInputs) -> StepMetrics:
        """One step of network `number`: loss, gradients, new weights."""
        net, optimizer = self.nets[number], self.optimizers[number]
        loss = self.method.loss if main else self.method.warmup_loss
        optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            result = loss(number, inputs)
        result.loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), self.config.grad_clip)
        metrics = self.monitors[number].measure(result, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # so that recorded steps share the memory of the gradients
        return metrics

    def validate(self, seconds: float = 0.0) -> None:
        """Keeps the networks if they are the best so far, or other ones make the model from this epoch on.

        Args:
            seconds: What the epoch took, for the log.
        """
        if self.dev is None:
            return
        if self._dev_loaders is None:
            self._dev_loaders = SideLoader(self.dev.left, self.device), SideLoader(self.dev.right, self.device)
        epoch = self.cursor.epoch
        kept = tuple(self.method.kept_networks(epoch))
        nets = [self.nets[number] for number in kept]
        trained = self.method.trained_networks(epoch)
        with autocast(self.device, self.config.precision):
            for number in kept:
                if number in trained or number not in self._dev_scores:
                    (self._dev_scores[number],) = similarities([self.nets[number]], *self._dev_loaders)
        matrices = [self._dev_scores[number] for number in kept]
        result = evaluate(matrices, self.dev, average=average(nets, matrices))
        rsum = result.averaged.rsum
        if rsum > self.best.rsum or kept != self.best.networks:
            self.best = Best(rsum, epoch, kept)
            self._matcher().save(self.run.best)
        event = {
            "epoch": epoch,
            "step": self.cursor.step,
            **result.averaged.metrics(),
            "networks_rsum": [network.rsum for network in result.networks],
            "seconds": round(seconds, 2),
            "selection_seconds": round(self.selection_seconds, 2),
        }
        self.run.log(ValidationEvent.model_validate(event))
        best = " (best)" if self.best.epoch == epoch else ""
        self.progress.line(f"{self._phase}  validation rSum {rsum:.1f}{best}  {seconds:.1f} s")

    # ------------------------------------------------------------------ batches

    def _inputs(self, plans: Sequence[StepPlan]) -> Iterator[tuple[StepPlan, StepInputs]]:
        """These steps of this epoch with what the network in turn needs for them."""
        cursor, net = self.cursor, self.nets[self.cursor.network]
        epoch, number = cursor.epoch, cursor.network

        def make(plan: StepPlan) -> tuple[StepPlan, StepInputs]:
            augment = self._rng(AUGMENTATION, epoch, number, plan.position) if net.augments else None
            return plan, self.method.inputs(number, plan, augment)

        return prefetch(plans, make) if self.loader.on_host else map(make, plans)

    def plans(self, number: int) -> list[StepPlan]:
        """The steps of this epoch of one network."""
        orders = [self._rng(stream, self.cursor.epoch, number) for stream in (ORDER, NOISY_ORDER)]
        first = None if self._main_epoch is None else self.cursor.first_steps[number]
        return plan_epoch(self.epoch_pairs[number], self.config.batch_size, orders[0], orders[1], first)

    def _total_steps(self) -> int:
        """About how many steps the whole run takes; a method may use fewer pairs."""
        epochs = sum(len(self.method.trained_networks(epoch)) for epoch in range(self.config.total_epochs))
        return epochs * math.ceil(len(self.method.unflagged) / self.config.batch_size)

    # ------------------------------------------------------------------ monitoring

    def _flush_metrics(self) -> None:
        """Reads and logs the metrics of the steps since the last time; stops a run that has gone wrong."""
        cursor = self.cursor
        if cursor.network == len(self.nets) or not self.monitors[cursor.network].unread:
            return  # each network's are read at the end of its steps
        monitor = self.monitors[cursor.network]
        metrics, bad_step = monitor.read()
        if bad_step is not None:
            self._refuse_non_finite(bad_step)
        loss, spread, grad_norm = (metrics.pop(name) for name in ("loss", "spread", "grad_norm"))
        self.run.log(
            StepEvent(
                epoch=cursor.epoch,
                step=cursor.step,
                network=cursor.network,
                loss=loss,
                spread=spread,
                grad_norm=grad_norm,
                metrics=metrics,
            )
        )
        self.progress.metrics(loss, spread)
        if monitor.health.collapsed:
            self._refuse_collapse()

    def _check_epoch_pairs(self) -> None:
        """An epoch may have nothing to train on, with a note; a run may not begin like that."""
        if any(len(pairs.clean) > 1 for pairs in self.epoch_pairs):
            return
        found = f"the method {self.config.method} chose fewer than 2 of {len(self.train_pairs):,} pairs to train on"
        if not self.cursor.step:
            raise DataError(f"{self.train_pairs.name}: {found}; give more pairs that are right, or another --method.")
        self.progress.line(f"{self._phase}  {found}, so nothing is learned in this epoch")

    def _refuse_other_pairs(self, trained_on: str | None) -> None:
        """Runs of earlier versions have no fingerprint with their result, or one of the training pairs alone."""
        learned = fingerprint(self.train_pairs), fingerprint(self.train_pairs, truth=self.method.uses_truth)
        if trained_on not in (None, self._trained_on, *learned):
            raise ConfigError(
                f"{self.run.path} was trained on other pairs: the data set or its noise has changed since; "
                "put the old files back or give another --out."
            )

    def _refuse_non_finite(self, step: int) -> None:
        """Names the pairs of the step, found again from the plan."""
        position = self.cursor.position - (self.cursor.step - step)
        plan = self.plans(self.cursor.network)[position]
        pairs = ", ".join(map(str, np.unique(self.method.pairs_used(self.cursor.network, plan))))
        raise NonFiniteError(
            f"The loss or its gradient is not a finite number at step {step}; the update was not made. Pairs of that "
            f"batch: {pairs}. Look for extreme features with `mispair data check`, or lower --lr."
        )

    def _refuse_collapse(self) -> None:
        kept = checkpoint.find(self.run.checkpoints)
        config, health = self.config, self.monitors[self.cursor.network].health
        state = f"The last good state is {kept[0]}." if kept else "There was no good state to keep yet."
        raise CollapseError(
            f"The network has collapsed at step {self.cursor.step}: all similarities are equal (spread "
            f"{health.spread:.1e}, it was {health.peak:.2g}). The negatives harden too fast for this data set: try "
            f"--negatives-end {max(4, 2 * config.negatives_end)} (now {config.negatives_end}), more --hardening-steps "
            f"(now {config.hardening_steps}) or a lower --lr (now {config.lr:g}), with another --out. {state}"
        )

    # ------------------------------------------------------------------ state

    def stop(self, number: int) -> None:
        """Ends the run after the step in hand, as the signal of this number does."""
        self._signal = number

    def _pause(self) -> None:
        """Between two steps: stops after a signal, saves if it is time."""
        if self._signal is not None:
            self._flush_metrics()
            self._save()
            raise StoppedError(f"Stopped at step {self.cursor.step} and saved.", 128 + self._signal)
        if time.monotonic() - self._saved_at >= self.config.checkpoint_seconds:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._flush_metrics()
        if all(monitor.health.healthy for monitor in self.monitors):
            self._save()

    def _save(self) -> None:
        state = Checkpoint(
            cursor=self.cursor,
            networks=[net.state_dict() for net in self.nets],
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
            method=self.method.state_dict(),
            epoch_pairs=self.epoch_pairs,
            report=self.report,
            best=self.best,
            health=[monitor.health for monitor in self.monitors],
            random_state=torch.get_rng_state(),
            cuda_random_state=torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            logged_bytes=self.run.logged_bytes,
            fingerprint=self._trained_on,
        )
        checkpoint.save(self.run.checkpoints, state)
        self._saved_at = time.monotonic()

    def _resume(self) -> None:
        torch.manual_seed(self._seed(DROPOUT))
        state = checkpoint.load_newest(self.run.checkpoints)
        if state is None:
            self.run.forget_after(0)
            return
        self._refuse_other_pairs(state.fingerprint)
        if state.best.networks and not self.run.best.is_file():
            raise DataError(
                f"{self.run.best} is gone, and the checkpoints do not hold it; put it back, or give another --out."
            )
        try:
            self._restore(state)
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError):
            raise DataError(
                f"{self.run.checkpoints}: the newest checkpoint is not of this run, whatever its name says; delete it, "
                "or give another --out."
            ) from None
        self.run.forget_after(state.logged_bytes)
        self.progress.resume(self.cursor.step)

    def _restore(self, state: Checkpoint) -> None:
        self.cursor, self.best = state.cursor, state.best
        self.epoch_pairs, self.report = state.epoch_pairs, state.report
        for net, weights in zip(self.nets, state.networks, strict=True):
            net.load_state_dict(weights)
        for optimizer, saved in zip(self.optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(saved)
        self.method.load_state_dict(state.method)
        for monitor, health in zip(self.monitors, state.health, strict=True):
            monitor.health = health
        torch.set_rng_state(state.random_state)
        if state.cuda_random_state is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state.cuda_random_state, self.device)

    def _matcher(self) -> Matcher:
        """The networks that make the model, as copies that training does not change any more."""
        kept = self.method.kept_networks(min(self.cursor.epoch, self.config.total_epochs - 1))
        copies = []
        for number in kept:
            copy = build(self.configs[number], *self.specs, seed=0).to(self.device)
            copy.load_state_dict(self.nets[number].state_dict())
            copies.append(copy)
        models = [self.configs[number].model for number in kept]
        origin = self.train_pairs.origin
        return Matcher(self.config, self.specs, copies, self.vocabulary, self.device, models, origin)

    @property
    def _trained_on(self) -> str:
        """Fingerprint of the pairs that are learned, and of those that choose the best epoch."""
        learned = fingerprint(self.train_pairs, truth=self.method.uses_truth)
        return learned if self.dev is None else f"{learned}+{fingerprint(self.dev)}"

    @property
    def _main_epoch(self) -> int | None:
        """Number of the main epoch; None while warming up."""
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


def check_pairs(train: Pairs, dev: Pairs | None) -> None:
    """Refuses pairs that cannot be trained on, and validation pairs that are not of the same kind."""
    images = len(np.unique(train.left_groups[train.link]))
    if len(train) < 2 or images < 2:
        raise DataError(
            f"{train.name}: {len(train):,} training pairs with {images} different left items; at least 2 of each are "
            "needed, because the other pairs are the negatives."
        )
    words = [side.vocabulary for side in (train.left, train.right) if isinstance(side, Tokens)]
    if len(words) == 2 and words[0] != words[1]:
        raise DataError(
            f"{train.name}: both sides are texts, but of different vocabularies ({len(words[0]):,} and "
            f"{len(words[1]):,} words), and a model keeps one; encode both sides with one vocabulary."
        )
    if dev is not None and not len(dev):
        raise DataError(f"{dev.name}: there are no validation pairs; leave them out and the last epoch is kept.")
    for name in ("left", "right") if dev is not None else ():
        ours, theirs = getattr(train, name), getattr(dev, name)
        if SideSpec.of(ours) != SideSpec.of(theirs):
            raise DataError(
                f"The {name} side has {SideSpec.of(ours)} for training but {SideSpec.of(theirs)} for validation."
            )
        if isinstance(ours, Tokens) and ours.vocabulary != theirs.vocabulary:
            raise DataError(
                f"The {name} side has other words for training than for validation: load both with one vocabulary, "
                'as in load(data, "dev", vocabulary=train.right.vocabulary).'
            )
