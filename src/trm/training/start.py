"""One start of a run, in the process that trains: recipe and plan -> data -> state -> trainer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from macbook_optimization.children import Send
from macbook_optimization.dataset_management import DatasetManager, DatasetSettings
from macbook_optimization.errors import AllocationFailed, DataError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.backends.base import Backend, Program, SingleProcess, load_backend
from trm.config import RunConfig
from trm.display import Display, Forwarded, Silent
from trm.feed import Feed
from trm.plan import Plan
from trm.planning.planner import Planner
from trm.runs.directory import begin, open_run
from trm.runs.events import DataOpened, StageChanged
from trm.tasks.base import Task
from trm.tasks.dataset import SPLITS, Split, complete_spec, open_split
from trm.tasks.registry import load_task
from trm.training.checkpointing import BestSoFar, Checkpointer
from trm.training.evaluation import Evaluator, evaluation_settings
from trm.training.log import RunLog
from trm.training.loop import Limits, Outcome, Trainer
from trm.training.profiling import QUIET_ENVIRONMENT, ProfiledState, StepProfiler
from trm.training.resources import Resources
from trm.training.row_length import RowLength
from trm.training.signals import stop_signals
from trm.training.state import TrainingState
from trm.training.tuner import Tuner

OUT_OF_MEMORY = 75  # exit code of a trainer that has nothing smaller to try

Digests = Mapping[str, Mapping[str, str]]  # split -> array -> sha256


def train_in_child(
    config: JsonMapping,
    run: str,
    plan: JsonMapping,
    start: JsonMapping,
    verified: Digests,
    send: Send,
) -> JsonObject:
    """Train as a child of the supervisor. Running out of memory ends the process, not the run.

    `start` has the limits of this start, and whether it is quiet.
    """
    display = Silent() if start["quiet"] else Forwarded(send)
    try:
        display.status("Starting the trainer")
        recipe = RunConfig.model_validate(config)
        limits = Limits(**start["limits"])
        outcome = train(recipe, Path(run), Plan.from_json(plan), limits, display, verified)
    except (AllocationFailed, MemoryError):
        sys.exit(OUT_OF_MEMORY)
    return {**asdict(outcome), "run": str(outcome.run)}


def train(
    config: RunConfig,
    path: Path,
    plan: Plan,
    limits: Limits,
    display: Display,
    verified: Digests | None = None,
) -> Outcome:
    """Train until a limit, the target or the last step.

    `verified` has the digests of the splits if another process has just verified the data.
    """
    hardware = HardwareDetector().detect(with_torch=False)  # before anything takes memory
    # The plan may be that of an earlier process: nothing is compiled yet, and the recipe may have changed.
    plan = plan.with_execution(compiled_size=None, deterministic=config.training.deterministic)
    profiled = config.plan.profile
    config = config.without_profile()
    task = load_task(config.task)
    train_split, test_split = open_splits(config, task, data_manager(config), verified)
    data = complete_spec(task, train_split)
    log = RunLog(open_run(path, config), display)
    if profiled:
        os.environ.update(QUIET_ENVIRONMENT)
    display.status("Loading PyTorch")
    backend = load_backend(plan.execution)
    profiler = StepProfiler(backend.recorder, log) if profiled else None
    state = _state(backend, plan, Feed(config, task, train_split), Program.of(config, data), profiler)
    trainer = _trainer(state, Tuner(config, data, plan, log, backend.peak_bytes), log, test_split)
    trainer.resume()
    if state.stage is not None:
        display.message(f"{state.stage.described()}.")
    if plan.provisional:
        trainer.tune_with(Planner(config, data, hardware, display).corrected()[0])
    begin(log.run, config)
    log.plan(plan)
    log.event(DataOpened(state.step, train_split.reader.strategy))
    if state.stage is not None and state.step == 0:  # later ones are recorded when they begin
        log.event(StageChanged(state.step, state.stage.number, state.stage.share))
    display.status("Taking the first step")
    log.write("hardware.json", json.dumps(describe_machine(), indent=2))
    with stop_signals() as stop, trainer.resources, profiler or nullcontext():
        return trainer.run(limits, stop)


def _state(
    backend: Backend, plan: Plan, feed: Feed, program: Program, profiler: StepProfiler | None
) -> TrainingState:
    backend.prepare(plan.execution)
    untested = plan.provisional and plan.budget_bytes is not None
    if untested and backend.state_bytes(program) > (plan.budget_bytes or 0) / 2:
        raise AllocationFailed(torn=False)  # a probe must find out what fits
    world = SingleProcess(program.num_slots)
    make_learner = partial(backend.learner, program, plan.execution, world)
    if profiler is not None:
        return ProfiledState(profiler, feed.config, plan, feed, world, make_learner)
    return TrainingState(feed.config, plan, feed, world, make_learner)


def _trainer(state: TrainingState, tuner: Tuner, log: RunLog, test_split: Split) -> Trainer:
    config = state.config
    settings = config.checkpoints
    checkpointer = Checkpointer(settings, log.run.checkpoints(settings.keep, settings.keep_every_hours), log)
    evaluated_with = evaluation_settings(config, test_split)
    metric = state.feed.task.primary_metric
    best = BestSoFar(checkpointer, evaluated_with, config.evaluation.target, metric)
    split = state.feed.split
    row_length = RowLength.of(config, split, log)
    resources = Resources(config, state.plan, log, split.reader.release_memory, row_length)
    evaluator = Evaluator(state, resources.memory, log, test_split)
    return Trainer(state, checkpointer, best, resources, tuner, log, evaluator)


def describe_machine() -> JsonObject:
    detector = HardwareDetector()
    platform = detector.detect_platform_capabilities(measure_precision=False)
    return replace(detector.detect(with_torch=False), platform=platform).to_json()


def data_manager(config: RunConfig) -> DatasetManager:
    return DatasetManager(DatasetSettings(**config.data.loading.model_dump()))


def open_splits(
    config: RunConfig,
    task: Task,
    manager: DatasetManager | None = None,
    verified: Digests | None = None,
) -> tuple[Split, Split]:
    """Open both splits; a manager decides how they are read, without one they are memory-mapped."""
    train_split, test_split = (
        open_split(config.data.path, name, manager=manager, verified=(verified or {}).get(name))
        for name in SPLITS
    )
    if train_split.spec != test_split.spec:
        raise DataError(f"The train and test splits of {config.data.path} have different shapes")
    complete_spec(task, train_split)
    return train_split, test_split
