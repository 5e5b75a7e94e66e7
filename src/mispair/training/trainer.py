"""The training loop: one or two networks, any method, exact to the bit after a restart.

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
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from mispair import methods
from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import autocast, pick_device
from mispair.compute.distributed import ALONE, Ranks, Team
from mispair.compute.optimizer import make as make_optimizer
from mispair.compute.optimizer import restore, set_lr
from mispair.config import Config
from mispair.errors import CollapseError, ConfigError, DataError, MispairError, NonFiniteError, StoppedError
from mispair.methods.base import EpochPairs, StepInputs, StepPlan, StepResult
from mispair.methods.report import MethodReport
from mispair.models import SideSpec, build
from mispair.models.inference import average, similarities
from mispair.pairs.batches import PairLoader, SideLoader, prefetch
from mispair.pairs.pairs import HELD_OUT, Pairs, Tokens, fingerprint, unflagged, with_first_items
from mispair.retrieval.evaluation import evaluate
from mispair.retrieval.matcher import Matcher
from mispair.support.memory import is_out_of_memory
from mispair.support.progress import TrainingProgress
from mispair.support.signals import stop_signals
from mispair.training import checkpoint
from mispair.training.checkpoint import Best, Checkpoint, Cursor
from mispair.training.events import MethodEvent, StepEvent, ValidationEvent
from mispair.training.memory_check import check_memory
from mispair.training.monitor import READ_EVERY, Health, StepMetrics, StepMonitor
from mispair.training.plan import plan_epoch
from mispair.training.run_folder import Run, RunResult

INITIAL_WEIGHTS, ORDER, NOISY_ORDER, AUGMENTATION, DROPOUT = range(5)  # independent streams of random numbers
ROUND_SECONDS, ROUND_STEPS = 1.0, 100  # about how long ranks train before they agree on stopping and saving; at most


class Pause(NamedTuple):
    """What a rank tells the others between two steps."""

    signal: int | None  # that asks it to stop
    save: bool  # whether it is time for a checkpoint
    steps: int  # made since the last time
    seconds: float
    done: bool  # whether its team has no more steps in this epoch
    events: list[StepEvent]  # for the log


class Progress(NamedTuple):
    """What a rank tells the others about the networks of its team."""

    position: int
    health: Health
    checksum: list[float]  # of the weights of each network of its team


class Trainer:
    """Trains what `config` says on `train`; keeps the networks that are best on `dev` (the last ones without it).

    Several ranks train as one team, which shares every step, or as two teams, one for each of two networks. Before an
    epoch and for validation all ranks are one team, and everybody has all networks.
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
        self.teams = self.ranks.teams(2 if method.teams == 2 and self.ranks.size % 2 == 0 else 1)
        self.team = self.teams[self.ranks.rank * len(self.teams) // self.ranks.size]
        self._local = config.local_negatives and not self.team.alone
        config = method.adapted(config)
        self.config, self.train_pairs, self.run = config, train, run
        # Mismatched pairs shall not decide the best epoch, and choosing it shall not take longer than training.
        self.dev = None if dev is None else with_first_items(unflagged(dev), HELD_OUT)
        self.device = pick_device(config.device)
        self.specs = SideSpec.of(train.left), SideSpec.of(train.right)
        self.vocabulary = next((s.vocabulary for s in (train.right, train.left) if isinstance(s, Tokens)), None)
        self.configs = method.network_configs(config)
        check_memory(self.configs, self.specs, self.device)
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
        self.cursor = Cursor.start(len(self.nets))
        self.epoch_pairs: list[EpochPairs] = []
        self.report: MethodReport | None = None  # of this epoch
        self.best = Best()
        self.monitors = [StepMonitor(self.device) for _ in self.nets]
        records = self.device.type == "cuda" and self.method.repeatable and self.ranks.size == 1
        pool = torch.cuda.graph_pool_handle() if records else None
        self._updates = {
            (number, main): CudaGraphStep(partial(self._update, number, main), on=records, pool=pool)
            for number in range(len(self.nets))
            for main in (False, True)
        }
        for optimizer, monitor in zip(self.optimizers, self.monitors, strict=True):
            optimizer.found_inf = monitor.non_finite  # type: ignore[attr-defined]
        self.progress = TrainingProgress(
            self._total_steps() // len(self.teams), console, f"{config.method} {config.model}"
        )
        self.selection_seconds = 0.0  # seconds that the method took to choose the pairs of this epoch
        self._saved_at = self._paused_at = time.monotonic()
        self._signal: int | None = None
        self._first_step = 0  # of this epoch
        self._round, self._round_steps = 1, 0  # steps until the next pause, and made since the last one
        self._on_part = False  # with local negatives: whether the step is on this rank's part of the batch

    # ------------------------------------------------------------------ the loop

    def fit(self) -> Matcher:
        """Trains to the end, from the newest checkpoint if there is one."""
        if (ended := self.ranks.by_first(lambda: self.run.result)) is not None:
            self._refuse_other_pairs(ended.fingerprint)
            self.progress.line("This run has ended already; nothing was trained.")
            return self._load_best()
        own = [self.device] if self.device.type == "cuda" else []
        # The caller's random numbers are not ours.
        with stop_signals(self.stop), self.progress, torch.random.fork_rng(own):
            self._resume()
            self.run.write_environment(self.device)
            while self.cursor.epoch < self.config.total_epochs:
                self.epoch()
        if self.dev is None and self.ranks.is_first:
            self._matcher().save(self.run.best)
        result = RunResult(best=self.best, steps=self.cursor.step, fingerprint=self._trained_on, report=self.report)
        examples = self.method.examples(np.arange(len(self.train_pairs)))
        self.ranks.by_first(lambda: self.run.finish(result, examples))
        return self._load_best()

    def _load_best(self) -> Matcher:
        """The best model, of which only the first rank has the file."""
        content = None if self.ranks.size == 1 else self.ranks.by_first(self.run.best.read_bytes)
        if content is None or self.ranks.is_first:
            return Matcher.load(self.run.best, self.config.device)
        with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
            copy = Path(folder) / self.run.best.name
            copy.write_bytes(content)
            return Matcher.load(copy, self.config.device)

    def epoch(self) -> None:
        """Trains and validates an epoch, or what is left of it."""
        cursor, started = self.cursor, time.monotonic()
        if not cursor.begun:
            self.begin(cursor.epoch)
        self._first_step = cursor.step - sum(cursor.positions)
        self._share(ALONE if self._local else self.team)
        if len(self.teams) == 1:
            while cursor.network < len(self.nets):
                for _ in self.steps():
                    self._pause()
                cursor.network += 1
        else:
            self._train_one()
        self._share(self.ranks.world)
        self._meet()
        if self.report is not None:
            metrics = self.report.model_dump(exclude_unset=True)
            self.run.log(MethodEvent(epoch=cursor.epoch, step=cursor.step, **metrics))
        self.validate(time.monotonic() - started)
        cursor.to_epoch(cursor.epoch + 1)
        cursor.first_steps = list(cursor.main_steps)
        self._first_step = cursor.step
        self._checkpoint()

    def _train_one(self) -> None:
        """The steps of this epoch of this team's network, while the other team makes those of its own."""
        cursor, number = self.cursor, self.teams.index(self.team)
        before = [len(self.plans(other)) for other in range(number)]  # so steps have the numbers as in one process
        cursor.network, cursor.step = number, self._first_step + sum(before) + cursor.positions[number]
        for _ in self.steps():
            self._pause()
        while not self._pause(done=True):
            pass

    def begin(self, epoch: int) -> None:
        """Goes to the start of an epoch: the method chooses the pairs of every network."""
        cursor, started = self.cursor, time.monotonic()
        cursor.to_epoch(epoch)
        main = self._main_epoch
        self._share(self.ranks.world)
        with autocast(self.device, self.config.precision):
            self.epoch_pairs = self.method.begin_warmup() if main is None else self.method.begin_epoch(main)
        self.report = None if main is None else self.method.report()
        self._agree()
        self._check_epoch_pairs()
        self.selection_seconds = time.monotonic() - started

    def steps(self, first: int | None = None, most: int | None = None) -> Iterator[StepPlan]:
        """Makes `most` steps of the network in turn, from position `first` of this epoch; gives each once it is made.

        By default all, from where it is. In the end the metrics are read: so everything has been done on the GPU, too.
        """
        cursor, number = self.cursor, self.cursor.network
        if first is not None:
            cursor.positions[number] = first
        plans = self.plans(number)
        for plan, inputs in islice(self._inputs(plans[cursor.position :]), most):
            place = cursor.epoch + plan.position / len(plans)
            set_lr(self.optimizers[number], self.method.learning_rate(number, place))
            self._step(plan, inputs)
            yield plan
        self._flush_metrics()

    def _step(self, plan: StepPlan, inputs: StepInputs) -> None:
        cursor, main = self.cursor, plan.main_step is not None
        if len(self.teams) > 1 or self._local:  # where ranks do not draw the same numbers one after the other
            place = self.team.rank if self._local else 0
            torch.manual_seed(self._seed(DROPOUT, cursor.epoch, cursor.network, plan.position, place))
        self._on_part = self._own_part(plan) is not plan
        metrics = self._updates[cursor.network, main](inputs)
        monitor = self.monitors[cursor.network]
        monitor.add(cursor.step, metrics, len(plan.pairs))
        cursor.step += 1
        cursor.positions[cursor.network] = plan.position + 1
        self._count(cursor.network, plan)
        self.progress.step(self._phase)
        if monitor.unread >= READ_EVERY:
            self._flush_metrics()

    def _count(self, number: int, plan: StepPlan) -> None:
        """Notes that a network has made a step."""
        if plan.main_step is not None:
            self.cursor.main_steps[number] += not plan.on_noisy
            self.method.after_step(number, plan)

    def _update(self, number: int, main: bool, inputs: StepInputs) -> StepMetrics:
        """One step of network `number`: loss, gradients, new weights."""
        net, optimizer = self.nets[number], self.optimizers[number]
        loss = self.method.loss if main else self.method.warmup_loss
        optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            result = loss(number, inputs)
        (result.loss * self._loss_share(result)).backward()  # type: ignore[no-untyped-call]
        self.team.add_gradients(net.parameters())
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), self.config.grad_clip)
        if self._local:
            norm = norm + 0 * self.team.total(result.loss.detach())  # all ranks must see what is not finite
        metrics = self.monitors[number].measure(result, norm)
        if self._local:
            metrics = StepMetrics(metrics.names, self.team.total(metrics.values) / self.team.size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # so that recorded steps share the memory of the gradients
        return metrics

    def _loss_share(self, result: StepResult) -> float:
        """What a rank's loss counts in the sum over the ranks: with local negatives, means are averaged."""
        return 1 / self.team.size if self._local and (result.logged is not None or not self._on_part) else 1.0

    def _own_part(self, plan: StepPlan) -> StepPlan:
        """With local negatives, this rank's part of a step; all of it where it has too few pairs to share."""
        batches = [pairs for pairs in (plan.pairs, plan.noisy) if pairs is not None]
        if not self._local or min(map(len, batches)) < 2 * self.team.size:
            return plan
        parts = [pairs[self.team.part(len(pairs))] for pairs in batches]
        return replace(plan, pairs=parts[0], noisy=None if plan.noisy is None else parts[1])

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
        result = evaluate(matrices, self.dev, mean=average(nets, matrices))
        rsum = result.averaged.rsum
        if rsum > self.best.rsum or kept != self.best.networks:
            self.best = Best(rsum, epoch, kept)
            if self.ranks.is_first:
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
        student = self.method.student_from(self.config)
        words = " (best)" if student is None or epoch < student else " (best with the student)"
        best = words if self.best.epoch == epoch else ""
        self.progress.line(f"{self._phase}  validation rSum {rsum:.1f}{best}  {seconds:.1f} s")

    # ------------------------------------------------------------------ batches

    def _inputs(self, plans: Sequence[StepPlan]) -> Iterator[tuple[StepPlan, StepInputs]]:
        """These steps of this epoch with what the network in turn needs for them."""
        cursor, net = self.cursor, self.nets[self.cursor.network]
        epoch, number = cursor.epoch, cursor.network

        def make(plan: StepPlan) -> tuple[StepPlan, StepInputs]:
            augment = self._rng(AUGMENTATION, epoch, number, plan.position) if net.augments else None
            return plan, self.method.inputs(number, self._own_part(plan), augment)

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
        """Runs of earlier versions have no fingerprint with their result, or one of less."""
        learned = fingerprint(self.train_pairs, items=False), self._learned(items=False)
        earlier = None, *learned, self._with_dev(learned[1], items=False)
        if trained_on not in (self._trained_on, *earlier):
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
        hardening = (
            f"The negatives harden too fast for this data set: try --negatives-end {max(4, 2 * config.negatives_end)} "
            f"(now {config.negatives_end}), more --hardening-steps (now {config.hardening_steps}) or"
        )
        advice = "Try" if "negatives_end" in self.method.ignores else hardening
        raise CollapseError(
            f"The network has collapsed at step {self.cursor.step}: all similarities are equal (spread "
            f"{health.spread:.1e}, it was {health.peak:.2g}). {advice} a lower --lr (now {config.lr:g}), with another "
            f"--out. {state}"
        )

    # ------------------------------------------------------------------ state

    def stop(self, number: int) -> None:
        """Ends the run after the step in hand, as the signal of this number does."""
        self._signal = number

    def _pause(self, done: bool = False) -> bool:
        """Between two steps: stops after a signal to any rank, saves if it is time. Gives whether all teams are done.

        Several ranks agree on that about once a second.
        """
        self._round_steps += not done
        if not done and self._round_steps < self._round:
            return False
        now = time.monotonic()
        save = now - self._saved_at >= self.config.checkpoint_seconds
        steps = self.run.unsent()
        sent = [] if self.team.rank else steps  # a team's first rank speaks for it
        own = Pause(self._signal, save, self._round_steps, now - self._paused_at, done, sent)
        pauses = self.ranks.exchange(own)
        first = pauses[0]
        if self.ranks.size > 1:
            self._round = min(max(1, int(first.steps * ROUND_SECONDS / max(first.seconds, 1e-3))), ROUND_STEPS)
        self._paused_at, self._round_steps = time.monotonic(), 0
        for event in (event for pause in pauses for event in pause.events if self.ranks.is_first):
            self.run.log(event)
        signal = next((pause.signal for pause in pauses if pause.signal is not None), None)
        if signal is not None:
            self._flush_metrics()
            self._meet()
            self._save()
            raise StoppedError(f"Stopped at step {self._done} and saved.", 128 + signal)
        if first.save:
            self._checkpoint()
        return all(pause.done for pause in pauses)

    def _checkpoint(self) -> None:
        self._flush_metrics()
        self._meet()
        if all(monitor.health.healthy for monitor in self.monitors):
            self._save()

    @property
    def _done(self) -> int:
        """Steps of all networks."""
        return self._first_step + sum(self.cursor.positions)

    def _save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        if len(self.teams) > 1:
            own = self.teams.index(self.team)
            collected = self.ranks.collected(_packed(optimizers[own]) if self.team.rank == 0 else b"")
            if collected is not None:
                optimizers = [_unpacked(collected[team.first]) for team in self.teams]
        self._saved_at = time.monotonic()
        if not self.ranks.is_first:
            return
        network = 0 if len(self.teams) > 1 else self.cursor.network
        state = Checkpoint(
            cursor=replace(self.cursor, network=network, step=self._done),
            networks=[net.state_dict() for net in self.nets],
            optimizers=optimizers,
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

    def _share(self, team: Team) -> None:
        """Lets the ranks of a team share the work on all networks."""
        for net in self.nets:
            net.share(team)

    def _agree(self) -> None:
        """What the first rank has made of the pairs for this epoch counts for all: processors may differ."""
        if self.ranks.size == 1:
            return
        self.epoch_pairs, state = self.ranks.by_first(lambda: (self.epoch_pairs, _packed(self.method.state_dict())))
        if not self.ranks.is_first:
            self.method.load_state_dict(_unpacked(state))

    def _meet(self) -> None:
        """Several ranks: checks that a team has one state, and tells each team about the network of the other."""
        if self.ranks.size == 1:
            return
        numbers = range(len(self.nets)) if len(self.teams) == 1 else [self.teams.index(self.team)]
        if self._local:
            self._average_statistics(numbers)
        checksums = [
            sum(float(p.detach().double().sum()) for p in self.nets[number].parameters()) for number in numbers
        ]
        position = self.cursor.positions[numbers[0]]
        told = self.ranks.exchange(Progress(position, self.monitors[numbers[0]].health, checksums))
        if any(progress.checksum != told[team.first].checksum for team in self.teams for progress in _of(team, told)):
            raise MispairError(
                "The ranks have come to different weights, which must not happen: check that all machines have the "
                "same data set and the same versions of torch and mispair."
            )
        if len(self.teams) == 1:
            return
        for number, team in enumerate(self.teams):
            if team is not self.team:
                position, self.monitors[number].health, _ = told[team.first]
                for plan in self.plans(number)[self.cursor.positions[number] : position]:
                    self._count(number, plan)
                self.cursor.positions[number] = position
            self.ranks.copy_from(team.first, self.nets[number].state_dict().values())
        if self.cursor.positions == [len(self.plans(number)) for number in range(len(self.nets))]:
            self.cursor.network, self.cursor.step = len(self.nets), self._done

    def _average_statistics(self, numbers: Sequence[int]) -> None:
        """With local negatives each rank's normalisation has seen its own pairs."""
        buffers = [b for number in numbers for b in self.nets[number].buffers() if b.is_floating_point()]
        self.team.add_up(buffers)
        for buffer in buffers:
            buffer /= self.team.size

    def _resume(self) -> None:
        torch.manual_seed(self._seed(DROPOUT))
        state = self.ranks.by_first(self._load_checkpoint)
        if state is None:
            self.run.forget_after(0)
            return
        try:
            self._restore(state)
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            if is_out_of_memory(error) or "CUDA error" in str(error):
                raise
            raise DataError(
                f"{self.run.checkpoints}: the newest checkpoint is not of this run, whatever its name says; delete it, "
                "or give another --out."
            ) from None
        self.run.forget_after(state.logged_bytes)
        self.progress.resume(self.cursor.step // len(self.teams))

    def _load_checkpoint(self) -> Checkpoint | None:
        state = checkpoint.resume(self.run.checkpoints)
        if state is None:
            return None
        self._refuse_other_pairs(state.fingerprint)
        if state.best.networks and not self.run.best.is_file():
            raise DataError(
                f"{self.run.best} is gone, and the checkpoints do not hold it; put it back, or give another --out."
            )
        return state

    def _restore(self, state: Checkpoint) -> None:
        self.cursor, self.best = state.cursor, state.best
        self.epoch_pairs, self.report = state.epoch_pairs, state.report
        for net, weights in zip(self.nets, state.networks, strict=True):
            net.load_state_dict(weights)
        for optimizer, saved in zip(self.optimizers, state.optimizers, strict=True):
            restore(optimizer, saved)
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

    @cached_property
    def _trained_on(self) -> str:
        """Fingerprint of the pairs that are learned, and of those that choose the best epoch."""
        return self._with_dev(self._learned(items=True), items=True)

    def _learned(self, *, items: bool) -> str:
        return fingerprint(self.train_pairs, truth=self.method.uses_truth, items=items)

    def _with_dev(self, learned: str, *, items: bool) -> str:
        return learned if self.dev is None else f"{learned}+{fingerprint(self.dev, items=items)}"

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


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Refuses settings that several ranks cannot train with."""
    method = methods.select(config)
    if ranks.size > 1 and not method.teams:
        raise ConfigError(
            f"{config.method} is a method for one process, but there are {ranks.size}; leave out torchrun."
        )
    if ranks.size > 1 and config.local_negatives and not method.repeatable:
        raise ConfigError(
            f"{config.method} needs the whole batch on all ranks with these settings; leave out --local-negatives."
        )


def _of(team: Team, told: list[Progress]) -> list[Progress]:
    return told[team.first : team.first + team.size]


def _packed(state: dict[str, Any]) -> bytes:
    """Tensors and plain values, for another process."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def check_networks(config: Config, train: Pairs) -> None:
    """Refuses pairs that the networks do not take, and networks that do not fit into memory."""
    method = methods.select(config)
    configs = method.network_configs(method.adapted(config))
    check_memory(configs, (SideSpec.of(train.left), SideSpec.of(train.right)), pick_device(config.device))


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
