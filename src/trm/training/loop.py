"""The training loop: evaluate, save, cool down, step, tune; until there is a reason to stop.

A step either happened completely or not at all, so stopping is allowed between any two micro-batches: the
state after the last complete step is saved, and resuming repeats the interrupted one exactly. NaN and Inf are
never checkpointed (see `recovery`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from macbook_optimization.children import parent_is_gone
from macbook_optimization.errors import AllocationFailed, NonFiniteError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import counted
from trm.backends.base import StepResult
from trm.backends.world import StepAbandoned
from trm.config import RunConfig
from trm.plan import Plan
from trm.planning.planner import Planner
from trm.runs.events import EARLY_STOPPING, Initialised, LearningRateLowered, Regrouping, Resumed, Stopped
from trm.runs.metric import metric_label
from trm.runs.rows import EvalRow
from trm.tasks.metrics import shown_value
from trm.training import recovery
from trm.training.checkpointing import BestSoFar, Checkpointer
from trm.training.crashes import describe_crash, find_crash
from trm.training.early_stopping import EarlyStopping
from trm.training.evaluation import Checks, Evaluator
from trm.training.leaks import LeakWatch
from trm.training.log import RunLog, StepMetrics, StepTiming
from trm.training.resources import OwnSpeed, Resources, StepTook, Stopwatch
from trm.training.signals import Interrupted, StopRequest
from trm.training.state import TrainingState
from trm.training.together import REGROUPING, Together, Wishes
from trm.training.tuner import Tuner


@dataclass(frozen=True, slots=True)
class Limits:
    """The latest end of this start of a run; the schedule does not depend on it."""

    max_seconds: float | None = None
    max_step: int | None = None

    def reached(self, step: int, seconds: float) -> bool:
        by_step = self.max_step is not None and step >= self.max_step
        return by_step or (self.max_seconds is not None and seconds >= self.max_seconds)


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Path
    reason: str  # as in the event `stopped`
    step: int
    seconds: float
    best: JsonObject | None
    target: float | None
    slots_per_second: float | None = field(default=None, compare=False)  # of this machine's own compute


def describe_early_stop(state: TrainingState, best: BestSoFar) -> str:
    stopping = state.early_stopping
    metric = metric_label(best.metric).capitalize()
    evaluations = counted(stopping.waited, "evaluation")
    best_value = shown_value(best.metric, stopping.best or 0)
    return f"{metric} has not improved on {best_value} for {evaluations}: training ends early."


def lower_on_plateau(state: TrainingState, best: BestSoFar, evaluation: EvalRow, log: RunLog) -> None:
    """Lower the learning rate if the primary metric has stopped improving, and record that."""
    before = state.plateau.scale
    state.after_evaluation(best.value_of(evaluation))
    plateau = state.plateau
    if plateau.scale < before and plateau.best is not None:
        log.event(LearningRateLowered(state.step, plateau.scale, plateau.best))
        log.message(
            f"{metric_label(best.metric).capitalize()} has not improved on "
            f"{shown_value(best.metric, plateau.best)}: the learning rate is {plateau.scale:.3g} of its "
            "schedule now."
        )


@dataclass
class Trainer:
    """One start of a run. What happens between two steps is in `run`, in the order in which it happens."""

    state: TrainingState
    checkpointer: Checkpointer
    best: BestSoFar
    resources: Resources
    tuner: Tuner
    log: RunLog
    evaluator: Evaluator
    together: Together
    seconds_before: float = 0.0  # of training, in earlier starts
    started_from: str | None = None  # what a new run has beside random weights
    own_speed: OwnSpeed = field(default_factory=OwnSpeed)

    @property
    def config(self) -> RunConfig:
        return self.state.config

    def elapsed(self) -> float:
        """Return the seconds of training over all starts, without pauses."""
        return self.seconds_before + self.resources.training_seconds

    def resume(self) -> None:
        checkpoint = self.checkpointer.recover()
        crash = find_crash(self.log.run, 0 if checkpoint is None else checkpoint.step)
        if crash is not None:
            self.log.event(crash)
            self.log.message(describe_crash(crash))
        if checkpoint is None:
            self.checkpointer.manager.check_space(self.state.learner.state())
            self.log.display.status("Setting the initial weights")
            self.started_from = self.state.initialise(self.log.message)
            return
        saved = self.state.restore(checkpoint)
        self.checkpointer.saved_step = checkpoint.step
        self.resources.memory.resume(self.state.max_length)
        self.seconds_before = saved.seconds
        self.evaluator.evaluated = saved.evaluated
        self.best.restore(saved.best)
        if self.best.row is None:  # evaluations with other settings are not comparable
            self.state.early_stopping = EarlyStopping()
        changes = self.state.changes_since(saved) if self.log.writes else []  # of the host's plan
        self.log.event(Resumed(checkpoint.step, changes))
        with_changes = f" ({', '.join(changes)})" if changes else ""
        self.log.message(f"Resuming {self.log.run.path} after step {checkpoint.step}{with_changes}.")
        self.checkpointer.warn_if_full(self.state.learner.state())

    def tune_with(self, planner: Planner) -> None:
        # The peak of a process that has read a checkpoint, or computed its start, says less about its steps.
        is_new = self.state.step == 0 and self.started_from is None
        self.tuner.start_warmup(planner, self._try_out, cache=is_new)

    def run(self, limits: Limits, stop: StopRequest) -> Outcome:
        leaks = LeakWatch(cache_mb=self.config.data.loading.chunk_size_mb)
        driver_bytes = self.resources.memory.held.driver_bytes
        metrics = StepMetrics(self.log, self.state.stage, self.state.phase, leaks, driver_bytes)
        self.checkpointer.saved_at = time.monotonic()
        if self.started_from is not None:
            self.log.event(Initialised(self.started_from))
            self.log.message(f"{self.started_from}.")
            self._save()  # so that resuming needs nothing that the initial weights came from
        try:
            while True:
                self._run_due_tasks(stop)  # evaluate, save, cool down
                self.together.agree(self._wishes(limits), stop)
                reason = self._reason_to_stop()
                if reason is not None and self._saved_at_end(reason, stop):
                    break
                self.together.check_agreed(stop)
                if self.together.waits(self.resources.power, self.state.step, stop):
                    continue
                watch = Stopwatch(self.resources)
                try:
                    rate, result = self._train_step(stop)
                except NonFiniteError as error:
                    if error.torn or recovery.skip_step(self.state, self.log, error):
                        self._roll_back(error)
                    continue
                except StepAbandoned:  # the step is repeated after an agreement
                    continue
                took = watch.read()
                self._log_step(metrics, rate, took.without_rests(result), took.seconds)
                self._adapt(took.without_waiting(result), limits)
        except Interrupted:
            reason = REGROUPING if self.together.regroups else "interrupted"
            self.checkpointer.save_interrupted(self._save, self.together.check_parents)
        metrics.write()
        return self._finished(reason)

    def _finished(self, reason: str) -> Outcome:
        if reason == EARLY_STOPPING:
            self.log.message(describe_early_stop(self.state, self.best))
        seconds = self.elapsed()
        if reason == REGROUPING and not parent_is_gone():
            self.log.event(Regrouping(self.state.step))
        else:
            ended = "interrupted" if reason == REGROUPING else reason
            self.log.event(Stopped(ended, self.state.step, seconds, self.tuner.read_peak()))
        best = self.best
        speed = self.own_speed.slots_per_second
        return Outcome(self.log.run.path, reason, self.state.step, seconds, best.row, best.target, speed)

    def _run_due_tasks(self, stop: StopRequest) -> None:
        """Nothing is due while steps are skipped: the weights are those of the last checkpoint, or as suspect
        as the loss."""
        if self.state.skipped_in_a_row:
            return
        power = self.resources.power
        step = self.state.step
        check_alone = partial(self.together.check_alone, stop)
        try:
            self.together.compare_weights(step, self.state.learner, self.log)
            if self.evaluator.is_due():
                checks = Checks(
                    partial(power.check_and_rest, check_alone), partial(self.together.check, stop)
                )
                evaluation = self.evaluator.run(self.elapsed, checks)
                lower_on_plateau(self.state, self.best, evaluation, self.log)  # a save contains the decision
                self.best.offer(evaluation, self._save)
            if self._save_is_due():
                self._save()
            power.react(step, self._save_soon, check_alone)
        except NonFiniteError as error:  # in the weights, so there is nothing to continue with
            self._roll_back(error)

    def _wishes(self, limits: Limits) -> Wishes:
        """Return what depends on the clock and the sensors of this machine."""
        return Wishes(
            limit=int(limits.reached(self.state.step, self.resources.clock.seconds)),
            save=int(self.together.save_requested or self.checkpointer.is_due_by_time()),
            pause=int(self.resources.power.wants_to_wait),
        )

    def _save_is_due(self) -> bool:
        if self.together.is_alone:
            return self.checkpointer.is_due(self.state.step)
        return bool(self.together.agreed.save) or self.checkpointer.is_due_by_step(self.state.step)

    def _save_soon(self) -> bool:
        """Save or, with several ranks, request that all of them save after the next agreement."""
        if self.together.is_alone:
            return self._save()
        self.together.save_requested = True
        return True

    def _reason_to_stop(self) -> str | None:
        if self.best.reached_target:
            return "target"
        if self.state.step >= self.config.training.last_step:
            return "max_steps"
        if self.state.stops_early:
            return EARLY_STOPPING
        agreed = self.together.agreed
        if agreed.limit:
            return "limit"
        return REGROUPING if agreed.regroup and not agreed.stop else None

    def _train_step(self, stop: StopRequest) -> tuple[float, StepResult]:
        """Take one step; after a failed allocation, repeat it with a smaller micro-batch or shorter rows."""
        memory = self.resources.memory
        step = self.state.step
        num_slots = self.state.own_slots

        def next_size(slots_done: int) -> int:
            if slots_done:
                self.resources.power.check_and_rest(stop.check)
                self.log.display.update("this step", slots_done, num_slots, f"step {step + 1}")
            return memory.micro_batch_size(step)

        while True:
            self.state.max_length = memory.max_length
            try:
                return self.state.advance(next_size)
            except AllocationFailed as failure:
                if failure.torn:
                    raise
            except Interrupted:
                if self.together.is_alone:
                    raise
                raise StepAbandoned from None
            memory.make_room(step, may_cut_rows=True)
            if not self.together.is_alone:
                raise StepAbandoned

    def _log_step(self, metrics: StepMetrics, rate: float, result: StepResult, took: float) -> None:
        size = self.resources.memory.manager.batch_size
        state = self.state
        timing = StepTiming(
            state.step, took, self.elapsed(), rate, size, state.cycles, state.phase, state.max_length
        )
        metrics.add(result, timing, state.stage)
        num_slots = state.own_slots
        facts = (f"loss {metrics.loss:.3f}", self.best.described(), metrics.speed())
        self.log.display.update("this step", num_slots, num_slots)
        self.log.display.update("training", self.state.step, self.config.training.last_step, *facts)

    def _adapt(self, took: StepTook, limits: Limits) -> None:
        """React to what the step took, and to the machine."""
        step = self.state.step
        self.resources.memory.collect_garbage(step)
        manager = self.resources.memory.manager
        self.own_speed.add(self.state.own_slots, took.wall_seconds)
        self.together.computed_seconds = took.wall_seconds
        # A pause makes this step slow, not fast: the tuner keeps the best of several. It counts all slots.
        seconds = took.wall_seconds * self.state.num_slots / self.state.own_slots
        plan = self.tuner.after_step(step, seconds, manager, self.state.learner, limits.max_seconds)
        if plan is not None:
            self._use(plan)
            self.resources.threads.restart()
            self.own_speed = OwnSpeed()  # steps that were trials say little about this machine
            self.log.plan(plan)
        elif self.tuner.warmup is None:
            self.resources.watch_speed(self.state, took)
            threads = self.resources.threads.after_step(step)
            if threads is not None:
                self.state.learner.reconfigure(replace(self.state.plan.execution, threads=threads))

    def _try_out(self, trial: Plan) -> None:
        """Put a trial into effect. Checkpoints keep the provisional plan: a trial is not a decision."""
        self.state.learner.reconfigure(trial.execution)
        self.resources.memory.apply(trial)
        self.resources.threads.apply(trial)

    def _use(self, plan: Plan) -> None:
        if plan.execution.compiled_size is None:  # a compile trial has already reconfigured the learner
            self.state.learner.reconfigure(plan.execution)
        memory = self.resources.memory
        if (plan.micro_batch_size, plan.memory) != (memory.plan.micro_batch_size, memory.plan.memory):
            memory.apply(plan)  # the same size keeps what memory pressure made of it
        self.resources.threads.apply(plan)
        self.state.plan = plan

    def _save(self) -> bool:
        state = self.state
        past = state.rolled_back_from is not None and state.step > state.rolled_back_from
        if past and not state.skipped_in_a_row:
            state.rolled_back_from = None  # training got past what had stopped it
        self.together.save_requested = False
        saved = state.saved(self.elapsed(), self.evaluator.evaluated, self.best.row)
        return self.checkpointer.save(state.step, state.learner.state(), saved)

    def _saved_at_end(self, reason: str, stop: StopRequest) -> bool:
        """Return whether this start may end.

        After non-finite weights it continues from the last good ones. If the disk is full, machines that
        arrive wait, and those who are here train.
        """
        try:
            if reason == REGROUPING and not self._save():
                self.together.check_parents()
                return False
            self.checkpointer.save_or_wait(self._save, partial(self.together.check_host, stop))
        except NonFiniteError as error:
            self._roll_back(error)
            return False
        self.best.mark_at_end(self.state.step)
        return True

    def _roll_back(self, error: NonFiniteError) -> None:
        recovery.roll_back(self.state, self.checkpointer, self.best, self.log, error)
        self.resources.threads.apply(self.state.plan)  # as the learner is configured now
        self.evaluator.evaluated = min(self.evaluator.evaluated, self.state.step)
