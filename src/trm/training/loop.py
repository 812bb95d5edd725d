"""One run: recipe -> plan -> task arrays -> state -> resume -> [cut, step, evaluate, save]*.

A step either happened as a whole or not at all, so stopping is allowed between any two micro-batches:
what is saved then is the state after the last whole step, and resuming repeats the broken one exactly.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import psutil

from macbook_optimization.checkpoint_management import Checkpoint
from macbook_optimization.errors import DataError, RunError
from trm.backends.base import Learner, StepBatch, StepResult, StepSettings, load_backend
from trm.batches import Order, Slots
from trm.config import RunConfig
from trm.runs import Plan, Run, begin, check_recipe, choose_plan, open_run, set_aside
from trm.tasks import load_task
from trm.tasks.base import Split, Task, fingerprint, open_split
from trm.training.evaluation import evaluate
from trm.training.schedule import cycles_of_step, learning_rate_factor


class Display(Protocol):
    def update(self, what: str, done: int, total: int, facts: str = "") -> None: ...
    def message(self, text: str) -> None: ...


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


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """Ctrl-C or SIGTERM arrived; the state is that of the last whole step."""


def train(config: RunConfig, path: Path, limits: Limits, display: Display, *, fresh: bool = False) -> Outcome:
    task = load_task(config.task)
    build_if_missing(config, task, display)
    train_split, test_split = (open_split(config.data.path, name) for name in ("train", "test"))
    if train_split.shape != test_split.shape:
        raise DataError(f"The train and test halves of {config.data.path} have different shapes")
    task.check(train_split.shape)
    if fresh and (aside := set_aside(path)):
        display.message(f"The earlier run is now {aside}.")
    run, plan, backend = open_run(path, config), choose_plan(config), load_backend()
    backend.prepare(threads=plan.threads, deterministic=config.training.deterministic)
    learner = backend.learner(config.model_here, config.training, train_split.shape, config.seed)
    trainer = Trainer(config, plan, task, (train_split, test_split), learner, run, display)
    trainer.resume()
    begin(run, config, plan)
    with stop_signals() as check:
        return trainer.run(limits, check)


def build_if_missing(config: RunConfig, task: Task, display: Display) -> None:
    if config.data.build is not None and not config.data.path.exists():
        display.message(f"There is no {config.data.path} yet; building it.")
        task.build(config.data.build, config.data.path, display.update)


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Yields a function that raises `Interrupted` once Ctrl-C, SIGTERM or a closed terminal has arrived. A
    second one leaves at once, which is safe: the last checkpoint is already complete.

    The handler may interrupt any line of ours, a print included, so it writes to the terminal by itself.
    """
    arrived = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        with suppress(OSError):  # the terminal may be gone
            if arrived and os.isatty(2):
                os.write(2, b"\033[?25h\n")  # a live display had hidden the cursor
            elif not arrived:
                os.write(2, b"\nStopping; saving the last whole step (Ctrl-C again leaves at once).\n")
        if arrived:
            os._exit(130)
        arrived = True

    def check() -> None:
        if arrived:
            raise Interrupted

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks us to outlive the terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        log = MetricsLog(self.directory, self.plan)
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
                log.add(self.step, result, rate, time.monotonic() - before, self.seconds)
                self._show(log)
        except Interrupted:
            reason = "interrupted"
        self._save()
        log.write()
        self.directory.event("stopped", reason=reason, step=self.step)
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
            micro_batch_size=self.plan.micro_batch_size,
        )

        def after_cut(slots_done: int) -> None:
            if self.plan.accumulation_steps > 1:
                self.display.update("this step", slots_done, self.order.num_slots, f"step {step}")
            if slots_done < self.order.num_slots:  # after the last cut the step may as well finish
                check()

        result = self.learner.step(self.batch(slots), settings, after_cut)
        max_steps = config.model.halt_max_steps if training.supervision == "deep" else 1
        self.slots = slots.supervised_once(
            result.halt_margins, config.seed, max_steps, config.model.halt_exploration_prob
        )
        self.step = step
        return settings.learning_rate, result

    def _show(self, log: MetricsLog) -> None:
        best = f"  exact {self.best['exact_accuracy']:.1%}" if self.best else ""
        facts = f"loss {log.loss:.3f}  {log.samples_per_second:.0f} samples/s{best}"
        self.display.update("training", self.step, self.config.training.max_steps, facts)

    def _evaluate(self, check: Callable[[], None]) -> None:
        def after_chunk(done: int, total: int) -> None:
            self.display.update("evaluating", done, total)
            check()

        found = evaluate(
            self.learner.answerer(),
            self.test_split,
            self.config.evaluation,
            4 * self.plan.micro_batch_size,  # without gradients there is memory for at least so many
            after_chunk,
        )
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
                "plan": asdict(self.plan),
                "versions": {name: version(name) for name in ("torch", "numpy", "safetensors")},
            }
            self.saved = self.checkpoints.save(self.step, self.learner.tensors(), metadata)
        self.saved_at = time.monotonic()
        return self.saved


class MetricsLog:
    """Averages over the steps since the last row, and writes a row about once a second."""

    def __init__(self, run: Run, plan: Plan, every_seconds: float = 1.0) -> None:
        self.run, self.plan, self.every_seconds = run, plan, every_seconds
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call only starts the measurement
        self.loss = self.samples_per_second = 0.0
        self.row: dict[str, Any] = {}
        self.results: list[StepResult] = []
        self.step_seconds = 0.0

    def add(
        self, step: int, result: StepResult, learning_rate: float, step_seconds: float, seconds: float
    ) -> None:
        """`step_seconds` is this step's own; evaluations and saves do not count against the rate."""
        self.results.append(result)
        self.step_seconds += step_seconds
        self.loss = float(np.mean([r.loss for r in self.results]))
        self.samples_per_second = sum(len(r.exact) for r in self.results) / self.step_seconds
        self.row = {
            "step": step,
            "seconds": seconds,
            "loss": self.loss,
            "grad_norm": result.grad_norm,
            "samples_per_second": self.samples_per_second,
            "learning_rate": learning_rate,
            "micro_batch_size": self.plan.micro_batch_size,
        }
        if self.step_seconds >= self.every_seconds:
            self.write()

    def write(self) -> None:
        if not self.results:
            return
        more = {
            "train_token_accuracy": float(np.mean([r.token_accuracy for r in self.results])),
            "train_exact_accuracy": float(np.mean([r.exact.mean() for r in self.results])),
            "rss_bytes": self.process.memory_info().rss,
            "cpu_percent": self.process.cpu_percent(),
        }
        self.run.append("metrics.jsonl", {**self.row, **more})
        self.results, self.step_seconds = [], 0.0
