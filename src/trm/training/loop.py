"""One run: recipe -> plan -> task arrays -> state -> resume -> [cut, step, evaluate, save]*.

A step either happened as a whole or not at all, so stopping is allowed between any two micro-batches:
what is saved then is the state after the last whole step, and resuming repeats the broken one exactly.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import psutil

from macbook_optimization.checkpoint_management import Checkpoint
from macbook_optimization.errors import DataError, NonFiniteLossError, RunError
from trm.backends.base import Learner, StepBatch, StepResult, StepSettings, load_backend
from trm.batches import Order, Slots
from trm.config import RunConfig
from trm.runs import Run, open_run
from trm.tasks import load_task
from trm.tasks.base import Split, Task, fingerprint, open_split
from trm.training.evaluation import Evaluation, evaluate
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
class Plan:
    """How this machine carries the recipe out."""

    micro_batch_size: int
    accumulation_steps: int
    threads: int
    precision: str


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Path
    reason: str  # "target", "max_steps", "limit" or "interrupted"
    step: int
    seconds: float
    best: dict[str, Any] | None
    last: Evaluation | None


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """Ctrl-C or SIGTERM arrived; the state is that of the last whole step."""


def choose_plan(config: RunConfig) -> Plan:
    slots = config.training.effective_batch_size
    micro_batch_size = min(config.plan.micro_batch_size or 32, slots)
    return Plan(
        micro_batch_size=micro_batch_size,
        accumulation_steps=-(-slots // micro_batch_size),
        threads=config.plan.threads or psutil.cpu_count(logical=False) or 1,
        precision=config.plan.precision or config.model.forward_dtype,
    )


def train(config: RunConfig, path: Path, limits: Limits, display: Display) -> Outcome:
    task = load_task(config.task)
    build_if_missing(config, task, display)
    train_split, test_split = (open_split(config.data.path, name) for name in ("train", "test"))
    if train_split.shape != test_split.shape:
        raise DataError(f"The train and test halves of {config.data.path} have different shapes")
    run = open_run(path, config)
    plan = choose_plan(config)
    run.write("plan.json", json.dumps(asdict(plan), indent=2))
    backend = load_backend()
    backend.prepare(threads=plan.threads, deterministic=config.training.deterministic)
    model = config.model.model_copy(update={"forward_dtype": plan.precision})
    learner = backend.learner(model, config.training, train_split.shape, config.seed)
    trainer = Trainer(config, plan, task, (train_split, test_split), learner, run, display)
    trainer.resume()
    with stop_signals(display) as check:
        return trainer.run(limits, check)


def build_if_missing(config: RunConfig, task: Task, display: Display) -> None:
    if config.data.build is not None and not config.data.path.exists():
        display.message(f"There is no {config.data.path} yet; building it.")
        task.build(config.data.build, config.data.path, display.update)


@contextmanager
def stop_signals(display: Display) -> Iterator[Callable[[], None]]:
    """Yields a function that raises `Interrupted` once Ctrl-C or SIGTERM has arrived. A second one leaves
    at once, which is safe: the last checkpoint is already complete."""
    arrived = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            os._exit(130)
        arrived = True
        display.message("Stopping; saving the last whole step (Ctrl-C again leaves at once).")

    def check() -> None:
        if arrived:
            raise Interrupted

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
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
        self.slots = Slots.new(self.order.num_slots)
        self.step = 0
        self.seconds_before = 0.0  # spent training in earlier starts
        self.started = time.monotonic()
        self.saved: Checkpoint | None = None
        self.saved_at = self.started
        self.last: Evaluation | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def resume(self) -> None:
        checkpoint = self.checkpoints.newest_good()
        if checkpoint is None:
            return
        metadata = checkpoint.metadata
        if metadata["data"] not in (None, self.data_fingerprint):  # None: imported weights
            raise RunError(
                f"{self.directory.path} was trained on other data than {self.config.data.path}",
                hint="Use the same dataset, another --run directory, or --fresh.",
            )
        self.learner.restore(checkpoint.load_all())
        self.slots = Slots.from_lists(metadata["slots"])
        self.step, self.seconds_before, self.saved = checkpoint.step, metadata["seconds"], checkpoint
        self.directory.event("resumed", step=self.step)
        self.display.message(f"Resuming {self.directory.path} after step {self.step}.")

    def run(self, limits: Limits, check: Callable[[], None]) -> Outcome:
        self.started = self.saved_at = time.monotonic()
        log = MetricsLog(self.directory, self.plan)
        try:
            while (reason := self._finished(limits)) is None:
                check()
                rate, result = self._one_step(check)
                log.add(self.step, result, rate, self.seconds)
                self._show(log)
                if self.step % self.config.evaluation.every_steps == 0:
                    self._evaluate(check)
                if self._save_is_due():
                    self._save()
            if reason == "max_steps" and self.step % self.config.evaluation.every_steps:
                self._evaluate(check)
        except Interrupted:
            reason = "interrupted"
        except NonFiniteLossError:
            self._save()  # the weights before this step are good
            raise
        self._save()
        self.directory.event("stopped", reason=reason, step=self.step)
        best = self.checkpoints.best()
        return Outcome(self.directory.path, reason, self.step, self.seconds, best, self.last)

    def _finished(self, limits: Limits) -> str | None:
        target, best = self.config.evaluation.target_accuracy, self.checkpoints.best()
        if target is not None and best is not None and best["exact_accuracy"] >= target:
            return "target"
        if self.step >= self.config.training.max_steps:
            return "max_steps"
        if limits.max_step is not None and self.step >= limits.max_step:
            return "limit"
        if limits.max_seconds is not None and time.monotonic() - self.started >= limits.max_seconds:
            return "limit"
        return None

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
            result.halt_logits, config.seed, max_steps, config.model.halt_exploration_prob
        )
        self.step = step
        return settings.learning_rate, result

    def _show(self, log: MetricsLog) -> None:
        best = f"  exact {self.last.exact_accuracy:.1%}" if self.last else ""
        facts = f"loss {log.loss:.3f}  {log.samples_per_second:.0f} samples/s{best}"
        self.display.update("training", self.step, self.config.training.max_steps, facts)

    def _evaluate(self, check: Callable[[], None]) -> None:
        self.last = evaluate(
            self.learner.answerer(),
            self.test_split,
            self.config.evaluation,
            4 * self.plan.micro_batch_size,  # without gradients there is memory for at least so many
            lambda done, total: check(),
        )
        row = {"step": self.step, "seconds": self.seconds, **self.last.as_dict()}
        self.directory.append("metrics.jsonl", row)
        best = self.checkpoints.best()
        if best is None or self.last.exact_accuracy > best["exact_accuracy"]:
            self.checkpoints.mark_best(self._save(), row)
        self.display.message(
            f"step {self.step:6d}  {self.seconds:6.1f} s  exact {self.last.exact_accuracy:6.1%}  "
            f"cells {self.last.token_accuracy:6.1%}  on {self.last.examples} unseen puzzles"
        )

    def _save_is_due(self) -> bool:
        settings = self.config.checkpoints
        by_step = settings.every_steps is not None and self.step % settings.every_steps == 0
        return by_step or time.monotonic() - self.saved_at >= settings.every_seconds

    def _save(self) -> Checkpoint:
        if self.saved is None or self.saved.step != self.step:
            metadata = {
                "shape": asdict(self.train_split.shape),
                "data": self.data_fingerprint,
                "slots": self.slots.to_lists(),
                "seconds": self.seconds,
                "plan": asdict(self.plan),
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
        self.row_at = time.monotonic()
        self.results: list[StepResult] = []

    def add(self, step: int, result: StepResult, learning_rate: float, seconds: float) -> None:
        self.results.append(result)
        now = time.monotonic()
        self.loss = float(np.mean([r.loss for r in self.results]))
        self.samples_per_second = sum(len(r.exact) for r in self.results) / (now - self.row_at)
        if now - self.row_at < self.every_seconds:
            return
        row = {
            "step": step,
            "seconds": seconds,
            "loss": self.loss,
            "grad_norm": result.grad_norm,
            "train_token_accuracy": float(np.mean([r.token_accuracy for r in self.results])),
            "train_exact_accuracy": float(np.mean([r.exact.mean() for r in self.results])),
            "samples_per_second": self.samples_per_second,
            "learning_rate": learning_rate,
            "micro_batch_size": self.plan.micro_batch_size,
            "rss_bytes": self.process.memory_info().rss,
            "cpu_percent": self.process.cpu_percent(),
        }
        self.run.append("metrics.jsonl", row)
        self.row_at, self.results = now, []
