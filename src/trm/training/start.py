"""One start of a run, in the process that trains: recipe and plan -> data -> state -> trainer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from macbook_optimization.children import Send
from macbook_optimization.dataset_management import DatasetManager, DatasetSettings
from macbook_optimization.errors import AllocationFailed, DataError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.backends.base import Backend, Program, load_backend
from trm.backends.world import Member, PeerLost, SingleProcess, World
from trm.config import RunConfig
from trm.display import Display, Forwarded, Silent
from trm.feed import Feed
from trm.plan import Plan
from trm.planning.device_choice import Place, recipe_at
from trm.planning.planner import Planner
from trm.runs.directory import Run, begin, open_run
from trm.runs.events import DataOpened, DeviceRejected, LimitsSet, StageChanged, Stopped
from trm.tasks.base import Task
from trm.tasks.dataset import SPLITS, Split, complete_spec, open_split
from trm.tasks.registry import load_task
from trm.training.checkpointing import BestSoFar, Checkpointer
from trm.training.evaluation import Evaluator, evaluation_settings
from trm.training.log import RunLog
from trm.training.loop import Limits, Outcome, Trainer
from trm.training.machines import (
    Membership,
    Seat,
    check_facts,
    facts_of,
    guest_membership,
    host_membership,
    introduce,
    own_member,
)
from trm.training.profiling import QUIET_ENVIRONMENT, ProfiledState, StepProfiler
from trm.training.resources import HeldMemory, Resources
from trm.training.row_length import RowLength
from trm.training.shared_checkpoints import SharedCheckpoints
from trm.training.signals import StopRequest, stop_signals
from trm.training.state import TrainingState
from trm.training.together import LEFT, REGROUPING, Together
from trm.training.tuner import Tuner

OUT_OF_MEMORY = 75  # exit code of a trainer that has nothing smaller to try

Digests = Mapping[str, Mapping[str, str]]  # split -> array -> sha256


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings of a trainer beside its recipe and plan.

    `verified` has the digests of the splits if another process has just verified the data. `seat` is a place
    among several machines, `send` reports to the supervisor, and `rejected` are devices that failed the check
    before the run. The recipe of the run keeps the backend and device that were `requested`.
    """

    display: Display
    verified: Digests | None = None
    seat: Seat | None = None
    send: Send = lambda row: None
    rejected: tuple[DeviceRejected, ...] = ()
    requested: Place | None = None

    @property
    def writes(self) -> bool:
        return self.seat is None or self.seat.is_host


def train_in_child(
    config: JsonMapping,
    run: str,
    plan: JsonMapping,
    start: JsonMapping,
    verified: Digests,
    send: Send,
) -> JsonObject:
    """Train as a child of the supervisor. Running out of memory ends the process, not the run.

    `start` has the limits of this start, whether it is quiet, the seat among several machines, the devices
    that were rejected, and the place that was requested.
    """
    display = Silent() if start["quiet"] else Forwarded(send)
    seat = None if start.get("seat") is None else Seat.from_json(start["seat"])
    try:
        display.status("Starting the trainer")
        recipe = RunConfig.model_validate(config)
        limits = Limits(**start["limits"])
        rejected = tuple(DeviceRejected(**each) for each in start.get("rejected", ()))
        requested = Place(*start["requested"]) if "requested" in start else None
        here = Surroundings(display, verified, seat, send, rejected, requested)
        outcome = train_with_others(recipe, Path(run), Plan.from_json(plan), limits, here)
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
    """Train on this machine until a limit, the target or the last step.

    `verified` has the digests of the splits if another process has just verified the data.
    """
    return train_with_others(config, path, plan, limits, Surroundings(display, verified))


def train_with_others(
    config: RunConfig, path: Path, plan: Plan, limits: Limits, here: Surroundings
) -> Outcome:
    """Train on this machine alone, or from a seat among several. Only the host has a run at `path`."""
    hardware = HardwareDetector().detect(with_torch=False)  # before anything takes memory
    # The plan may be that of an earlier process: nothing is compiled yet, and the recipe may have changed.
    plan = plan.with_execution(compiled_size=None, deterministic=config.training.deterministic)
    profiled = config.plan.profile
    config = config.without_profile()
    display = here.display
    task = load_task(config.task)
    train_split, test_split = open_splits(config, task, data_manager(config), here.verified)
    data = complete_spec(task, train_split)
    log = RunLog(open_run(path, config) if here.writes else Run(path), display, here.writes)
    if profiled:
        os.environ.update(QUIET_ENVIRONMENT)
    display.status(f"Loading {plan.execution.library}")
    backend = load_backend(plan.execution)
    profiler = StepProfiler(backend.recorder, log) if profiled else None
    program = Program.of(config, data)
    own = None if here.seat is None else own_member(here.seat, backend, program, plan)
    membership = _membership(here, backend, config, own, log)
    try:
        feed = Feed(config, task, train_split)
        state = _state(backend, plan, feed, program, _Place(membership.world, profiler))
        tuner = Tuner(config, data, plan, log, partial(backend.peak_bytes, plan.execution))
        trainer = _trainer(state, tuner, log, test_split, backend)
        _connect(trainer, membership)
        trainer.resume()
        if plan.provisional:
            trainer.tune_with(Planner(config, data, hardware, display).corrected()[0])
        _begin(trainer, plan, limits, here)
        introduce(membership, state.learner, state.step, log)
        with stop_signals() as stop, trainer.resources, profiler or nullcontext():
            outcome = trainer.run(limits, stop)
            leaving = trainer.together.agreed.leave
            host_stops = membership.close(leaving=leaving, stops=stop.arrived)
        return _as_seen_here(outcome, trainer, stop, host_stops)
    except PeerLost as loss:
        membership.end_after_loss(loss)
        raise


def _membership(
    here: Surroundings, backend: Backend, config: RunConfig, own: Member | None, log: RunLog
) -> Membership:
    seat = here.seat
    if seat is None or own is None:
        return Membership(SingleProcess(config.training.effective_batch_size))
    if not seat.is_host:
        log.display.status(f"Waiting until {seat.address} includes this machine")
        check = partial(check_facts, config=config, digests=here.verified or {})
        return guest_membership(seat, backend, check, own, here.send)
    if log.run.checkpoints().newest_step() is None:  # only this machine has what a run starts from
        seat = replace(seat, guests=0, wait_seconds=0.0)
    facts = facts_of(config, here.verified or {}, seat)
    return host_membership(seat, backend, facts, own, here.send)


def _connect(trainer: Trainer, membership: Membership) -> None:
    together = trainer.together
    # While nothing can be saved, a new group would lose steps; those who have arrived wait.
    together.has_newcomers = lambda: trainer.checkpointer.failed_at is None and membership.has_newcomers()
    if membership.members:
        names = [member.name for member in membership.members]
        together.on_waited = lambda rank, seconds: trainer.log.count_waiting(names[rank], seconds)


def _begin(trainer: Trainer, plan: Plan, limits: Limits, here: Surroundings) -> None:
    """Record how this start begins, where there is a run to record it in."""
    state = trainer.state
    log = trainer.log
    if state.stage is not None:
        log.display.message(f"{state.stage.described()}.")
    if log.writes:
        config = state.config
        begin(log.run, config if here.requested is None else recipe_at(config, here.requested))
    for event in here.rejected:
        log.event(event)
    log.plan(plan)
    if limits != Limits():
        log.event(LimitsSet(state.step, limits.max_step, limits.max_seconds))
    log.event(DataOpened(state.step, state.feed.split.reader.strategy))
    if state.stage is not None and state.step == 0:  # later ones are recorded when they begin
        log.event(StageChanged(state.step, state.stage.number, state.stage.share))
    log.display.status("Taking the first step")
    log.write("hardware.json", json.dumps(describe_machine(), indent=2))


def _as_seen_here(outcome: Outcome, trainer: Trainer, stop: StopRequest, host_stops: bool) -> Outcome:
    """Return the outcome on this machine, which ends if a stop arrived after the last agreement on steps.

    A guest that was asked to stop has left, whatever the others do; without the host, they end as well.
    """
    if outcome.reason != REGROUPING:
        return outcome
    if not trainer.log.writes:
        if stop.requested:
            return replace(outcome, reason=LEFT)
        return replace(outcome, reason="interrupted") if host_stops else outcome
    if not stop.arrived:
        return outcome
    peak = trainer.tuner.read_peak()
    trainer.log.event(Stopped("interrupted", outcome.step, outcome.seconds, peak))
    return replace(outcome, reason="interrupted")


class _Place(NamedTuple):
    world: World
    profiler: StepProfiler | None


def _state(backend: Backend, plan: Plan, feed: Feed, program: Program, place: _Place) -> TrainingState:
    backend.prepare(plan.execution)
    untested = plan.provisional and plan.budget_bytes is not None
    if untested and backend.state_bytes(program) > (plan.budget_bytes or 0) / 2:
        raise AllocationFailed(torn=False)  # a probe must find out what fits
    world, profiler = place
    make_learner = partial(backend.learner, program, plan.execution, world)
    if profiler is not None:
        return ProfiledState(profiler, feed.config, plan, feed, world, make_learner)
    return TrainingState(feed.config, plan, feed, world, make_learner)


def _trainer(state: TrainingState, tuner: Tuner, log: RunLog, test_split: Split, backend: Backend) -> Trainer:
    config = state.config
    settings = config.checkpoints
    manager = log.run.checkpoints(settings.keep, settings.keep_every_hours)
    if state.world.size > 1:
        manager = SharedCheckpoints(manager, state.world)
    checkpointer = Checkpointer(settings, manager, log)
    evaluated_with = evaluation_settings(config, test_split)
    metric = state.feed.task.primary_metric
    best = BestSoFar(checkpointer, evaluated_with, config.evaluation.target, metric)
    split = state.feed.split
    row_length = RowLength.of(config, split, log)

    how = state.plan.execution
    held = HeldMemory(
        partial(backend.held_bytes, how), partial(backend.release_memory, how), split.reader.release_memory
    )
    resources = Resources(config, state.plan, log, held, row_length)
    evaluator = Evaluator(state, resources.memory, log, test_split)
    return Trainer(state, checkpointer, best, resources, tuner, log, evaluator, Together(state.world))


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
