"""One run: recipe and plan -> task arrays -> state -> resume -> [cut, step, watch, adjust, evaluate, save]*.

A step either happened as a whole or not at all, so stopping is allowed between any two micro-batches:
what is saved then is the state after the last whole step, and resuming repeats the broken one exactly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from macbook_optimization.checkpoint_management import Checkpoint
from macbook_optimization.children import Tell
from macbook_optimization.errors import AllocationFailed, DataError, RunError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.memory_management import (
    peak_bytes,
)
from macbook_optimization.progress_monitoring import ProgressDisplay
from trm.backends.base import Learner, StepBatch, StepResult, StepSettings, load_backend
from trm.batches import Order, Slots
from trm.config import RunConfig
from trm.runs import Plan, Run, begin, check_recipe, open_run
from trm.tasks import load_task
from trm.tasks.base import Split, Task, fingerprint, open_split
from trm.training.evaluation import evaluate
from trm.training.interruption import Interrupted, stop_signals
from trm.training.schedule import cycles_of_step, learning_rate_factor
from trm.training.watching import Display, MemoryWatch, MetricsLog

EVALUATION_CUT = 4  # without gradients there is memory for at least so many micro-batches
NO_MEMORY = 75  # exit code of a trainer that has nothing smaller to try


@dataclass(frozen=True, slots=True)
class Limits:
    """Where this start ends, if not earlier; the schedule does not notice."""

    max_seconds: float | None = None
    max_step: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Path
    reason: str  # "target", "max_steps", "limit" or "interrupted"
    step: int
    seconds: float
    best: dict[str, Any] | None
    target: float | None


def train_in_child(
    config: Mapping[str, Any], run: str, plan: Mapping[str, Any], limits: Mapping[str, Any], tell: Tell
) -> dict[str, Any]:
    """What the supervisor starts. A step that cannot be had in memory ends the process, not the run."""
    recipe = RunConfig.model_validate(config)
    try:
        with ProgressDisplay() as display:
            outcome = train(recipe, Path(run), Plan.from_json(plan), Limits(**limits), display)
    except (AllocationFailed, MemoryError):
        sys.exit(NO_MEMORY)
    return {**asdict(outcome), "run": str(outcome.run)}


def train(config: RunConfig, path: Path, plan: Plan, limits: Limits, display: Display) -> Outcome:
    task = load_task(config.task)
    splits = open_splits(config, task)
    run, backend = open_run(path, config), load_backend()
    backend.prepare(threads=plan.threads, deterministic=config.training.deterministic)
    learner = backend.learner(
        config.model_in(plan.precision), config.training, splits[0].shape, config.seed,
        plan.gradient_checkpointing,
    )  # fmt: skip
    trainer = Trainer(config, plan, task, splits, learner, run, display)
    trainer.resume()
    begin(run, config, plan)
    run.write("hardware.json", json.dumps(describe_machine(), indent=2))
    with stop_signals() as check, trainer.watch.monitor:
        return trainer.run(limits, check)


def describe_machine() -> dict[str, Any]:
    detector = HardwareDetector()
    platform = detector.detect_platform_capabilities(measure_precision=False)
    return replace(detector.detect(with_torch=False), platform=platform).to_json()


def open_splits(config: RunConfig, task: Task) -> tuple[Split, Split]:
    train_split, test_split = (open_split(config.data.path, name) for name in ("train", "test"))
    if train_split.shape != test_split.shape:
        raise DataError(f"The train and test halves of {config.data.path} have different shapes")
    task.check(train_split.shape)
    return train_split, test_split


class Trainer:
    """The state of one run while it is going on."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        task: Task,
        splits: tuple[Split, Split],
        learner: Learner,
        run: Run,
        display: Display,
    ) -> None:
        self.config, self.plan, self.task, self.learner = config, plan, task, learner
        self.watch = MemoryWatch(config.plan, plan, run, display)
        self.train_split, self.test_split = splits
        self.directory, self.display = run, display
        self.checkpoints = run.checkpoints(config.checkpoints.keep)
        self.order = Order(
            seed=config.seed,
            num_slots=config.training.effective_batch_size,
            group_indices=self.train_split.group_indices,
            puzzle_indices=self.train_split.puzzle_indices,
        )
        self.data_fingerprint = fingerprint(self.train_split)
        self.judged_by = {
            **config.evaluation.model_dump(include={"depth", "settle", "examples"}),
            "data": fingerprint(self.test_split),
        }
        self.slots = Slots.new(self.order.num_slots)
        self.step = 0
        self.seconds_before = 0.0  # spent training in earlier starts
        self.started = time.monotonic()
        self.saved: Checkpoint | None = None
        self.saved_at = self.started
        self.evaluated = 0  # the last step whose weights were evaluated
        self.best: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def resume(self) -> None:
        checkpoint, damaged = self.checkpoints.recover()
        for problem in damaged:
            self.directory.event("damaged", checkpoint=problem)
            self.display.message(f"A checkpoint is damaged: {problem}.")
        if checkpoint is None:
            return
        check_recipe(self.config, checkpoint)
        metadata = checkpoint.metadata
        if metadata["data"] not in (None, self.data_fingerprint):  # None: imported weights
            raise RunError(
                f"{self.directory.path} was trained on other data than {self.config.data.path}",
                hint="Use the same dataset, another --run directory, or --fresh.",
            )
        self.learner.restore(checkpoint.load_all())
        self.slots = Slots.from_lists(metadata["slots"])
        self.step, self.seconds_before, self.saved = checkpoint.step, metadata["seconds"], checkpoint
        self.evaluated = metadata["evaluated"]
        best = self.checkpoints.best()
        if best is not None and best.get("judged_by") == self.judged_by:
            self.best = best  # otherwise its accuracy is of another test, and says nothing here
        self.directory.event("resumed", step=self.step)
        self.display.message(f"Resuming {self.directory.path} after step {self.step}.")

    def run(self, limits: Limits, check: Callable[[], None]) -> Outcome:
        self.started = self.saved_at = time.monotonic()
        log = MetricsLog(self.directory)
        try:
            while True:
                if self._evaluation_is_due():
                    self._evaluate(check)
                if self._save_is_due():
                    self._save()
                if (reason := self._finished(limits)) is not None:
                    break
                check()
                before = time.monotonic()
                rate, result = self._one_step(check)
                took, size = time.monotonic() - before, self.watch.memory.batch_size
                log.add(self.step, result, rate, took, self.seconds, size)
                self._show(log)
                self.watch.collect_garbage(self.step)
        except Interrupted:
            reason = "interrupted"
        self._save()
        log.write()
        self.directory.event("stopped", reason=reason, step=self.step, peak_bytes=peak_bytes())
        target = self.config.evaluation.target_accuracy
        return Outcome(self.directory.path, reason, self.step, self.seconds, self.best, target)

    def _finished(self, limits: Limits) -> str | None:
        target = self.config.evaluation.target_accuracy
        if target is not None and self.best is not None and self.best["exact_accuracy"] >= target:
            return "target"
        if self.step >= self.config.training.max_steps:
            return "max_steps"
        if limits.max_step is not None and self.step >= limits.max_step:
            return "limit"
        if limits.max_seconds is not None and time.monotonic() - self.started >= limits.max_seconds:
            return "limit"
        return None

    def _evaluation_is_due(self) -> bool:
        """Asked before each step and not after it, so that an evaluation that was interrupted comes again."""
        last = self.step >= self.config.training.max_steps
        return self.evaluated != self.step and (last or self.step % self.config.evaluation.every_steps == 0)

    def batch(self, slots: Slots) -> StepBatch:
        """A pure function of where the slots are."""
        examples, puzzles = self.order.examples(slots.k)
        inputs, labels = self.train_split.rows(examples)
        if self.config.data.augment:
            draws = self.order.augmentation_draws(slots.k, self.task.num_draws)
            inputs, labels = self.task.augment(inputs, labels, draws)
        return StepBatch(inputs, labels, self.train_split.puzzle_identifiers[puzzles], slots.fresh)

    def _one_step(self, check: Callable[[], None]) -> tuple[float, StepResult]:
        config, training = self.config, self.config.training
        slots, step = self.slots.refilled(), self.step + 1
        factor = learning_rate_factor(step, training)
        settings = StepSettings(
            step=step,
            cycles=cycles_of_step(step, config.model, training, config.seed),
            learning_rate=factor * training.learning_rate,
            puzzle_emb_lr=factor * training.puzzle_emb_lr,
        )
        batch = self.batch(slots)
        result = None
        while result is None:
            result = self._whole_step(batch, settings, check)
        max_steps = config.model.halt_max_steps if training.supervision == "deep" else 1
        self.slots = slots.supervised_once(
            result.halt_margins, config.seed, max_steps, config.model.halt_exploration_prob
        )
        self.step = step
        return settings.learning_rate, result

    def _whole_step(
        self, batch: StepBatch, settings: StepSettings, check: Callable[[], None]
    ) -> StepResult | None:
        """None if there was too little memory for it, and smaller cuts are to be tried."""

        def next_cut(slots_done: int) -> int:
            if slots_done:
                check()
                self.display.update("this step", slots_done, self.order.num_slots, f"step {settings.step}")
            return self.watch.micro_batch_size(self.step)

        try:
            return self.learner.step(batch, settings, next_cut)
        except AllocationFailed as failure:
            if failure.torn:
                raise
        self.watch.make_room(self.step)
        return None

    def _show(self, log: MetricsLog) -> None:
        best = f"  exact {self.best['exact_accuracy']:.1%}" if self.best else ""
        facts = f"loss {log.loss:.3f}  {log.samples_per_second:.0f} samples/s{best}"
        self.display.update("training", self.step, self.config.training.max_steps, facts)

    def _evaluate(self, check: Callable[[], None]) -> None:
        def after_chunk(done: int, total: int) -> None:
            self.display.update("evaluating", done, total)
            check()

        found = None
        while found is None:
            with suppress(AllocationFailed):
                found = evaluate(
                    self.learner.answerer(),
                    self.test_split,
                    self.config.evaluation,
                    EVALUATION_CUT * self.watch.memory.batch_size,
                    after_chunk,
                )
            if found is None:
                self.watch.make_room(self.step)
        self.evaluated = self.step
        row = {"step": self.step, "seconds": self.seconds, **asdict(found)}
        self.directory.append("metrics.jsonl", row)
        if self.best is None or found.exact_accuracy > self.best["exact_accuracy"]:
            saved = self._save()
            self.best = {"checkpoint": saved.path.name, **row, "judged_by": self.judged_by}
            self.checkpoints.mark_best(self.best)
        self.display.message(
            f"step {self.step:6d}  {row['seconds']:6.1f} s  exact {found.exact_accuracy:6.1%}  "
            f"cells {found.token_accuracy:6.1%}  on {found.examples} unseen puzzles"
        )

    def _save_is_due(self) -> bool:
        settings = self.config.checkpoints
        by_step = settings.every_steps is not None and self.step % settings.every_steps == 0
        return by_step or time.monotonic() - self.saved_at >= settings.every_seconds

    def _save(self) -> Checkpoint:
        if self.saved is None or self.saved.step != self.step:
            metadata = {
                "recipe": self.config.what_is_learned(),
                "shape": asdict(self.train_split.shape),
                "data": self.data_fingerprint,
                "slots": self.slots.to_lists(),
                "seconds": self.seconds,
                "evaluated": self.evaluated,
                "plan": self.plan.to_json(),
                "versions": {name: version(name) for name in ("torch", "numpy", "safetensors")},
            }
            self.saved = self.checkpoints.save(self.step, self.learner.tensors(), metadata)
        self.saved_at = time.monotonic()
        return self.saved
