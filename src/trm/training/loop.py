"""One run: recipe and plan -> task arrays -> state -> resume -> [cut, step, watch, adjust, evaluate, save]*.

A step either happened as a whole or not at all, so stopping is allowed between any two micro-batches:
what is saved then is the state after the last whole step, and resuming repeats the broken one exactly.
Numbers that are no numbers never enter a checkpoint: such a step is passed over, three in a row go back to
the last good checkpoint with half the learning rate, and if that does not help the run stops.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from macbook_optimization.checkpoint_files import Checkpoint
from macbook_optimization.children import Tell
from macbook_optimization.dataset_management import DatasetManager, DatasetSettings
from macbook_optimization.errors import AllocationFailed, DataError, NonFiniteError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.memory_management import peak_bytes
from macbook_optimization.progress_monitoring import ProgressDisplay
from macbook_optimization.resource_monitoring import PowerMonitor
from trm.backends.base import StepResult, load_backend
from trm.config import RunConfig
from trm.runs import Plan, Run, begin, open_run
from trm.tasks import load_task
from trm.tasks.base import Split, Task, fingerprint, open_split
from trm.training.compiling import Compiling
from trm.training.evaluation import EVALUATION_CUT, Evaluation, evaluate
from trm.training.interruption import Interrupted, stop_signals
from trm.training.planning import Planner
from trm.training.probe import Way
from trm.training.saving import BestSoFar, Saver
from trm.training.settling import Settling
from trm.training.state import TrainingState
from trm.training.watching import (
    Display,
    Journal,
    MemoryWatch,
    MetricsLog,
    PowerWatch,
    ThreadWatch,
    show_plan,
)

SKIPS_IN_A_ROW = 3
NO_MEMORY = 75  # exit code of a trainer that has nothing smaller to try


@dataclass(frozen=True, slots=True)
class Limits:
    """Where this start ends, if not earlier; the schedule does not notice."""

    max_seconds: float | None = None
    max_step: int | None = None

    def reached(self, step: int, seconds: float) -> bool:
        by_step = self.max_step is not None and step >= self.max_step
        return by_step or (self.max_seconds is not None and seconds >= self.max_seconds)


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Path
    reason: str  # "target", "max_steps", "limit" or "interrupted"
    step: int
    seconds: float
    best: dict[str, Any] | None
    target: float | None


def train_in_child(
    config: Mapping[str, Any],
    run: str,
    plan: Mapping[str, Any],
    limits: Mapping[str, Any],
    data: Mapping[str, Mapping[str, str]],
    tell: Tell,
) -> dict[str, Any]:
    """What the supervisor starts. A step that cannot be had in memory ends the process, not the run."""
    recipe = RunConfig.model_validate(config)
    try:
        with ProgressDisplay() as display:
            outcome = train(recipe, Path(run), Plan.from_json(plan), Limits(**limits), display, data)
    except (AllocationFailed, MemoryError):
        sys.exit(NO_MEMORY)
    return {**asdict(outcome), "run": str(outcome.run)}


def train(
    config: RunConfig,
    path: Path,
    plan: Plan,
    limits: Limits,
    display: Display,
    data: Mapping[str, Mapping[str, str]] | None = None,
) -> Outcome:
    """`data` are the digests of the halves of the dataset, from who has just read and checked it."""
    hardware = HardwareDetector().detect(with_torch=False)  # before anything takes memory
    task = load_task(config.task)
    splits = open_splits(config, task, data_manager(config), data)
    run, backend = open_run(path, config), load_backend()

    def set_threads(threads: int) -> None:
        backend.prepare(threads=threads, deterministic=config.training.deterministic)

    set_threads(plan.threads)
    make_learner = partial(
        backend.learner, config.model_in(plan.precision), config.training, splits[0].shape, config.seed,
        plan.gradient_checkpointing, plan.lanes,
    )  # fmt: skip
    if plan.settling:  # nobody has tried whether the model fits
        needed = backend.state_bytes(config.model, config.training, splits[0].shape)
        if plan.budget_bytes is not None and needed > plan.budget_bytes / 2:
            raise AllocationFailed(torn=False)
    state = TrainingState(config, plan, task, splits[0], make_learner)
    trainer = Trainer(config, state, splits[1], run, display, set_threads)
    trainer.resume()
    if plan.settling:
        trainer.settle_with(Planner(config, splits[0].shape, hardware, display).corrected()[0])
    begin(run, config)
    write_plan(trainer.journal, plan)
    trainer.journal.write("hardware.json", json.dumps(describe_machine(), indent=2))
    with stop_signals() as check, trainer.watch.monitor, trainer.power.monitor:
        return trainer.run(limits, check)


def write_plan(journal: Journal, plan: Plan) -> None:
    journal.write("plan.json", json.dumps(plan.to_json(), indent=2))
    journal.event("plan", **plan.to_json())  # the events are the history of how a run was carried out


def describe_machine() -> dict[str, Any]:
    detector = HardwareDetector()
    platform = detector.detect_platform_capabilities(measure_precision=False)
    return replace(detector.detect(with_torch=False), platform=platform).to_json()


def data_manager(config: RunConfig) -> DatasetManager:
    return DatasetManager(DatasetSettings(**config.data.loading.model_dump()))


def open_splits(
    config: RunConfig,
    task: Task,
    manager: DatasetManager | None = None,
    trusted: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[Split, Split]:
    """To train on, as the manager would read them on this machine; to look at, without one."""
    train_split, test_split = (
        open_split(config.data.path, name, manager=manager, trusted=(trusted or {}).get(name))
        for name in ("train", "test")
    )
    if train_split.shape != test_split.shape:
        raise DataError(f"The train and test halves of {config.data.path} have different shapes")
    task.check(train_split.shape)
    return train_split, test_split


class Trainer:
    """One run while it is going on: what is looked at, answered and kept between two steps."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainingState,
        test_split: Split,
        run: Run,
        display: Display,
        set_threads: Callable[[int], None],
    ) -> None:
        self.config, self.state, self.test_split, self.display = config, state, test_split, display
        self.directory, self.journal = run, Journal(run, display)
        release = state.split.reader.fall_back
        self.watch = MemoryWatch(config, state.plan, self.journal, display, release)
        self.power = PowerWatch(config.plan, PowerMonitor())
        self.threads = ThreadWatch(config, state.plan, set_threads, self.journal, display)
        self.compiling = Compiling(config, state.plan, state.split.shape, self.journal, display)
        settings = config.checkpoints
        self.checkpoints = run.checkpoints(settings.keep, settings.keep_every_hours)
        self.saver = Saver(settings, self.checkpoints, self.journal, display)
        judged_by = config.evaluation.model_dump(exclude={"every_steps", "target_accuracy"})
        judged_by["data"] = fingerprint(test_split)
        target, headline = config.evaluation.target_accuracy, state.task.headline
        self.best = BestSoFar(self.saver, judged_by, target, headline)
        self.seconds_before = 0.0  # spent training in earlier starts
        self.started = time.monotonic()
        self.evaluated = 0  # the last step whose weights were evaluated
        self.set_threads, self.lanes = set_threads, state.plan.lanes
        self.settling: Settling | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def settle_with(self, planner: Planner) -> None:
        def apply(size: int, way: Way) -> None:
            self._compute_by(*way)
            self.watch.follow(replace(self.state.plan, micro_batch_size=size))

        # The peak of a process that has read a checkpoint says less about its steps.
        self.settling = Settling(planner, self.state.plan, apply, keep=not self.state.step)
        self.settling.begin()

    def _compute_by(self, threads: int, lanes: int) -> None:
        self.set_threads(threads)
        self.lanes = lanes
        self.state.learner.set_lanes(lanes)

    def _settle(self, seconds: float) -> None:
        if self.settling is None:
            return
        plan = self.settling.after_step(self.state.step, seconds, self.watch.memory)
        if plan is None:
            return
        self.settling, self.state.plan = None, plan
        self._compute_by(plan.threads, plan.lanes)
        self.watch.follow(plan)
        config, shape = self.config, self.state.split.shape
        self.threads = ThreadWatch(config, plan, self.set_threads, self.journal, self.display)
        self.compiling = Compiling(config, plan, shape, self.journal, self.display)
        write_plan(self.journal, plan)
        show_plan(self.display, config, plan)

    def resume(self) -> None:
        checkpoint = self._recover()
        if checkpoint is None:
            self.checkpoints.check_space(self.state.learner.tensors())
            return
        saved = self.state.restore(checkpoint)
        self.saver.step = checkpoint.step
        self.seconds_before, self.evaluated = saved.seconds, saved.evaluated
        self.best.restore(saved.best)
        changes = self.state.changes_since(saved)
        self.journal.event("resumed", step=checkpoint.step, changes=changes)
        with_changes = f" ({', '.join(changes)})" if changes else ""
        self.display.message(f"Resuming {self.directory.path} after step {checkpoint.step}{with_changes}.")
        self.saver.warn_if_full(self.state.learner.tensors())

    def _recover(self) -> Checkpoint | None:
        checkpoint, damaged = self.checkpoints.recover()
        for problem in damaged:
            self.journal.event("damaged", checkpoint=problem)
            self.display.message(f"A checkpoint is damaged: {problem}.")
        return checkpoint

    def run(self, limits: Limits, check: Callable[[], None]) -> Outcome:
        self.started = self.saver.at = time.monotonic()
        log = MetricsLog(self.journal)
        try:
            while True:
                self._keep(check)
                if (reason := self._finished(limits)) is not None and self._is_kept(check):
                    break
                check()
                before = time.monotonic()
                try:
                    rate, result = self._step(check)
                except NonFiniteError as trouble:
                    self._pass_over(trouble)
                    continue
                took, size = time.monotonic() - before, self.watch.memory.batch_size
                log.add(self.state.step, result, rate, took, self.seconds, size)
                self._show(log)
                self.watch.collect_garbage(self.state.step)
                self._settle(took)
                self.compiling.go_on(self.state.learner, self.state.step, limits.max_seconds)
                if self.settling is None:
                    self.threads.look(self.state.step, self.compiling.in_use)
        except Interrupted:
            reason = "interrupted"
            try:
                self.saver.insist(self._save, check, stopping=True)
            except NonFiniteError as trouble:
                self.display.message(f"{trouble} {self.saver.what_is_safe.capitalize()}.")
        log.write()
        self.journal.event("stopped", reason=reason, step=self.state.step, peak_bytes=peak_bytes())
        step, best = self.state.step, self.best
        return Outcome(self.directory.path, reason, step, self.seconds, best.row, best.target)

    def _is_kept(self, check: Callable[[], None]) -> bool:
        """At the end. Weights that are no numbers are not what was asked for, so it goes on then."""
        try:
            self.saver.insist(self._save, check)
        except NonFiniteError as trouble:
            self._roll_back(trouble)
            return False
        self.best.mark_at_last(self.state.step)
        return True

    def _keep(self, check: Callable[[], None]) -> None:
        """What is due between two steps. Nothing is, while steps are skipped: the weights are those of the
        last checkpoint or as suspect as the loss."""
        if self.state.skipped_in_a_row:
            return
        try:
            if self._evaluation_is_due():
                self._evaluate(check)
            if (percent := self.power.battery_fell()) is not None:
                self.journal.event("low battery", percent=percent, step=self.state.step)
                self.display.message(f"The battery is at {percent:.0f} %; saving.")
                self._save()
            if self.saver.is_due(self.state.step):
                self._save()
            if (reason := self.power.too_hot()) is not None:
                self._cool(reason, check)
        except NonFiniteError as trouble:  # found in the weights, so there is nothing to go on with
            self._roll_back(trouble)

    def _cool(self, reason: str, check: Callable[[], None]) -> None:
        if self.power.cooled_at is None:  # the beginning of it; later saves come as they are due
            self._save()
        seconds = self.config.plan.cooling_delay_seconds
        self.journal.event("cooling break", reason=reason, seconds=seconds, step=self.state.step)
        self.display.message(f"A pause of {seconds:g} s: {reason}.")
        self.power.cool(check)

    def _finished(self, limits: Limits) -> str | None:
        if self.best.reached_target:
            return "target"
        if self.state.step >= self.config.training.max_steps:
            return "max_steps"
        return "limit" if limits.reached(self.state.step, time.monotonic() - self.started) else None

    def _evaluation_is_due(self) -> bool:
        """Asked before each step and not after it, so that an evaluation that was interrupted comes again."""
        step, last = self.state.step, self.state.step >= self.config.training.max_steps
        return self.evaluated != step and (last or step % self.config.evaluation.every_steps == 0)

    def _step(self, check: Callable[[], None]) -> tuple[float, StepResult]:
        def next_cut(slots_done: int) -> int:
            if slots_done:
                check()
                facts = f"step {self.state.step + 1}"
                self.display.update("this step", slots_done, self.state.order.num_slots, facts)
            return self.watch.micro_batch_size(self.state.step)

        while True:
            try:
                return self.state.advance(next_cut)
            except AllocationFailed as failure:
                if failure.torn:
                    raise
            self.watch.make_room(self.state.step)

    def _pass_over(self, trouble: NonFiniteError) -> None:
        self.state.skip()
        self.journal.event("step skipped", step=self.state.step, cause=str(trouble))
        self.display.message(f"{trouble} It is skipped.")
        if self.state.skipped_in_a_row >= SKIPS_IN_A_ROW:
            self._roll_back(trouble)

    def _roll_back(self, trouble: NonFiniteError) -> None:
        state, step = self.state, self.state.step
        if state.rolled_back_from is not None:
            raise NonFiniteError(
                f"{trouble} Going back to the last good checkpoint with {state.learning_rate_scale:g} of the "
                "learning rate did not help. That checkpoint is intact.",
                hint="Start a new run with a lower training.learning_rate; `trm checkpoint import` takes the "
                "weights of this one along.",
            )
        self._recover()
        sound = (each for each in self.checkpoints.good_ones() if not each.metadata.get("skipped_in_a_row"))
        state.go_back(checkpoint := next(sound, None))
        state.learner.set_lanes(self.lanes)  # it may be a new one
        self.checkpoints.abandon_after(state.step)
        self.saver.step = None if checkpoint is None else checkpoint.step
        self.evaluated = min(self.evaluated, state.step)
        self.best.restore(self.best.row)
        scale = state.learning_rate_scale
        self.journal.event("rolled back", step=step, to=state.step, learning_rate_scale=scale)
        self.display.message(f"Going back to step {state.step} with {scale:g} of the learning rate.")

    def _show(self, log: MetricsLog) -> None:
        headline = self.best.headline
        name = headline.removesuffix("_accuracy")
        best = f"  {name} {self.best.row[headline]:.1%}" if self.best.row else ""
        rate = log.samples_per_second
        facts = f"loss {log.loss:.3f}  {rate:.{2 if rate < 10 else 0}f} samples/s{best}"
        self.display.update("this step", self.state.order.num_slots, self.state.order.num_slots)
        self.display.update("training", self.state.step, self.config.training.max_steps, facts)

    def _evaluate(self, check: Callable[[], None]) -> None:
        found = self._answers(check)
        self.evaluated = self.state.step
        row = {"step": self.state.step, "seconds": self.seconds, **found.row()}
        self.journal.append("metrics.jsonl", row)
        self.best.offer(row, self._save)
        self.display.message(
            f"step {row['step']:6d}  {row['seconds']:6.1f} s  {found.described()}  "
            f"cells {found.token_accuracy:6.1%}  on {found.examples} unseen puzzles"
        )

    def _answers(self, check: Callable[[], None]) -> Evaluation:
        def after_chunk(done: int, total: int) -> None:
            self.display.update("evaluating", done, total)
            check()

        answerer, settings = self.state.learner.answerer(), self.config.evaluation
        while True:
            size = EVALUATION_CUT * self.watch.memory.batch_size
            with suppress(AllocationFailed):
                scorer = self.state.task.scorer(self.config.data.path)
                return evaluate(answerer, self.test_split, settings, size, after_chunk, scorer)
            self.watch.make_room(self.state.step)

    def _save(self) -> bool:
        state = self.state
        past = state.rolled_back_from is not None and state.step > state.rolled_back_from
        if past and not state.skipped_in_a_row:
            state.rolled_back_from = None  # of what stopped it
        saved = state.saved(self.seconds, self.evaluated, self.best.row)
        return self.saver.save(state.step, state.learner.tensors(), saved)
