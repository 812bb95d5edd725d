"""How a run reacts to the machine: busy cores, memory, and pauses of the process."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import wait_for
from tiny import HELD, Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import AllocationFailed, NonFiniteError
from macbook_optimization.resource_monitoring import LoadReading, RunningClock
from trm.backends.base import StepResult
from trm.backends.world import SingleProcess
from trm.runs.directory import EVENTS, Run
from trm.runs.rows import memory_of
from trm.training import resources
from trm.training.log import RunLog, StepMetrics, StepTiming
from trm.training.loop import Limits, Trainer
from trm.training.resources import MemoryControl, Resources, StepTook, ThreadControl
from trm.training.together import Together


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def events(path, *names):
    return [row for row in Run(path).rows(EVENTS) if row["event"] in names]


def test_a_row_has_what_the_driver_of_a_gpu_holds(tmp_path):
    ones = np.ones(6, dtype=bool)
    result = StepResult(0.5, 1.0, 0.9, ones, 6, ones.astype(np.float32), {})
    log = RunLog(Run(tmp_path), Recorder())
    for driver_bytes in (lambda: 2**20, lambda: 0):
        metrics = StepMetrics(log, driver_bytes=driver_bytes)
        metrics.add(result, StepTiming(1, 2.0, 2.0, 1e-3, 6, cycles=1))
    with_gpu, without = Run(tmp_path).rows()
    assert with_gpu["device_bytes"] == 2**20
    assert memory_of(with_gpu) == with_gpu["rss_bytes"] + 2**20
    assert "device_bytes" not in without
    assert memory_of(without) == without["rss_bytes"]


# Threads


class Load:
    """Readings of two cores: how many are busy, and how many of these with this process."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        busy, own = self.readings.pop(0)
        return LoadReading(cores=2, own_cores=own, other_cores=busy - own)


def thread_control(tmp_path, dataset, plan, load):
    control = ThreadControl(run_config(dataset), plan, RunLog(Run(tmp_path), Recorder()))
    control.load = load
    return control


def shared_threads(dataset, **changes):
    """Return a plan whose two threads share every product."""
    plan = plan_of(run_config(dataset))
    size = changes.pop("micro_batch_size", plan.micro_batch_size)
    execution = replace(plan.execution, **{"threads": 2, "workers": 1, **changes})
    return replace(plan, execution=execution, micro_batch_size=size)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2, 1, 1, 1, 2, 2]),
        ({"workers": 2}, [2] * 6),
        ({"workers": 2, "micro_batch_size": 1}, [2, 1, 1, 1, 2, 2]),  # too few examples for two workers
        ({"threads": 1}, [1] * 6),
        ({"compiled_size": 6}, [2] * 6),
    ],
)
def test_shared_threads_are_reduced_while_other_programs_are_busy(tmp_path, dataset, changes, expected):
    plan = shared_threads(dataset, **changes)
    load = Load((2.0, 1.9), (2.0, 1.3), (2.0, 1.0), (1.8, 1.4), (1.1, 1.0), (2.0, 1.9))
    control = thread_control(tmp_path, dataset, plan, load)
    threads = [plan.execution.threads]
    seen = []
    for _ in range(6):
        control.checked_at -= ThreadControl.INTERVAL_SECONDS
        if (changed := control.after_step(step=7)) is not None:
            threads.append(changed)
        seen.append(threads[-1])
    assert seen == expected
    assert len(events(tmp_path, "threads")) == len(threads) - 1 == len(control.log.display.messages)


def test_a_compiled_block_runs_with_the_threads_that_it_was_compiled_for(tmp_path, dataset):
    """Even if the child process that compiled it had occupied a core."""
    plan = shared_threads(dataset)
    control = thread_control(tmp_path, dataset, plan, Load((2.0, 0.5)))
    control.checked_at -= ThreadControl.INTERVAL_SECONDS
    assert control.after_step(step=7) == 1
    compiled = plan.with_execution(compiled_size=6)
    control.apply(compiled)
    assert control.threads == compiled.execution.threads == 2
    control.checked_at -= ThreadControl.INTERVAL_SECONDS
    assert control.after_step(step=8) is None


# Memory


def memory_control(tmp_path, dataset, plan, release=lambda: False, **changes):
    log = RunLog(Run(tmp_path), Recorder())
    return MemoryControl(run_config(dataset, **changes), plan, log, HELD._replace(release_data=release))


def test_what_a_driver_holds_counts_as_memory_of_the_process():
    held = HELD._replace(driver_bytes=lambda: 2**40)
    assert held.read().process_bytes > 2**40 > HELD.read().process_bytes


def test_a_failed_allocation_halves_the_micro_batch_until_nothing_is_smaller(tmp_path, dataset):
    control = memory_control(tmp_path, dataset, plan_of(run_config(dataset)))
    sizes = []
    for _ in range(2):
        control.make_room(step=3)
        sizes.append(control.micro_batch_size(step=3))
    assert sizes == [3, 1]
    with pytest.raises(AllocationFailed):
        control.make_room(step=3)
    assert [row["after"] for row in events(tmp_path, "batch shrunk")] == [3, 1]


def test_a_dataset_that_is_held_in_memory_is_released_with_the_first_reduction(tmp_path, dataset):
    releases = [True, False]
    control = memory_control(tmp_path, dataset, plan_of(run_config(dataset)), lambda: releases.pop(0))
    control.make_room(step=3)
    control.make_room(step=4)
    assert [row["step"] for row in events(tmp_path, "data mapped")] == [3]
    assert "The dataset is no longer held in memory" in control.log.display.messages[0]


def test_requested_garbage_collection_stops_when_it_returns_nothing(tmp_path, dataset):
    plan = plan_of(run_config(dataset))
    control = memory_control(tmp_path, dataset, plan, limits={"garbage_collection_frequency": 2})
    returned = [5 * 2**20, 100]
    control.manager.collect = lambda: returned.pop(0)
    for step in range(1, 9):
        control.collect_garbage(step)
    (stopped,) = events(tmp_path, "garbage collection returns nothing")
    assert (stopped["step"], stopped["returned_bytes"]) == (4, 100)


# A new plan, which a running trainer adopts


class Learner:
    def __init__(self):
        self.executions = []

    def reconfigure(self, execution):
        self.executions.append(execution)


NOTHING = {"max_length": None, "stage": None, "phase": None, "own_slots": 6, "num_slots": 6}
TOOK = StepTook(seconds=0.1, wall_seconds=0.1, cpu_seconds=0.1, rested_seconds=0.0)


def trainer_with(tmp_path, dataset, plan, tuner=None):
    """Return a trainer that has only what it needs to change its plan."""
    config = run_config(dataset)
    log = RunLog(Run(tmp_path), Recorder())
    return Trainer(
        state=SimpleNamespace(config=config, plan=plan, learner=Learner(), step=3, cycles=1, **NOTHING),
        checkpointer=None,
        best=None,
        resources=Resources(config, plan, log, HELD),
        tuner=tuner,
        log=log,
        evaluator=SimpleNamespace(evaluated=0),
        together=Together(SingleProcess(6)),
    )


def test_a_compiled_block_that_is_known_when_tuning_ends_gets_the_tuned_micro_batch_size(tmp_path, dataset):
    """The last trial had another size, for which nothing was compiled."""
    trial = shared_threads(dataset, micro_batch_size=2)
    trainer = trainer_with(tmp_path, dataset, trial)
    trainer._use(shared_threads(dataset, micro_batch_size=6, compiled_size=6))
    assert trainer.resources.memory.micro_batch_size(step=3) == 6


def test_a_compiled_block_does_not_undo_a_reduction_of_the_micro_batch(tmp_path, dataset):
    plan = shared_threads(dataset)
    trainer = trainer_with(tmp_path, dataset, plan)
    trainer.resources.memory.make_room(step=3)
    trainer._use(plan.with_execution(compiled_size=6))
    assert trainer.resources.memory.micro_batch_size(step=3) == 3


def test_the_load_is_measured_anew_after_tuning(tmp_path, dataset):
    """Trials used other numbers of threads, so what they left unused must not count as other programs."""
    plan = shared_threads(dataset)
    tuner = SimpleNamespace(after_step=lambda *arguments: plan, warmup=None)
    trainer = trainer_with(tmp_path, dataset, plan, tuner)
    control = trainer.resources.threads
    control.load = Load((2.0, 0.5))  # the average over the trials: half a core of ours
    control.checked_at -= ThreadControl.INTERVAL_SECONDS
    trainer._adapt(TOOK, Limits())
    tuner.after_step = lambda *arguments: None
    trainer._adapt(TOOK, Limits())
    assert events(tmp_path, "threads") == []
    assert control.threads == 2


def test_after_a_rollback_the_thread_control_agrees_with_the_learner(tmp_path, dataset, monkeypatch):
    """A rollback configures the learner as planned, also while other programs had reduced its threads."""
    plan = shared_threads(dataset)
    trainer = trainer_with(tmp_path, dataset, plan)
    control = trainer.resources.threads
    control.load = Load((2.0, 0.5), (2.0, 0.5))
    control.checked_at -= ThreadControl.INTERVAL_SECONDS
    assert control.after_step(step=3) == 1
    monkeypatch.setattr("trm.training.recovery.roll_back", lambda *arguments: None)
    trainer._roll_back(NonFiniteError("The loss is nan."))
    assert control.threads == 2
    control.checked_at -= ThreadControl.INTERVAL_SECONDS
    assert control.after_step(step=4) == 1, "the other programs are still busy"


# Pauses


def test_a_pause_of_the_process_is_not_training_time(tmp_path, dataset, monkeypatch):
    """A time limit does not end a run because the lid was closed, and a resumed run does not count it."""
    paused_seconds = 0.0

    class Clock(RunningClock):
        def __init__(self):
            super().__init__(clock=lambda: time.monotonic() + paused_seconds)

        def start_monitoring(self, interval=0.01):  # after a real pause, the thread ticks immediately
            super().start_monitoring(interval)

    monkeypatch.setattr(resources, "RunningClock", Clock)

    def pause(facts, done):
        nonlocal paused_seconds
        if facts.startswith("loss") and done == 5:
            paused_seconds = 10_000.0
            time.sleep(0.1)

    outcome = run(run_config(dataset), tmp_path / "run", pause, max_seconds=1000)
    assert outcome.reason == "max_steps"
    assert 0 < outcome.seconds < 1000
    assert max(row["seconds"] for row in Run(tmp_path / "run").rows()) < 1000
    rates = [row["samples_per_second"] for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    assert 0.1 < min(rates) <= max(rates) < 1e6
    assert Run(tmp_path / "run").checkpoints().newest_intact().metadata["seconds"] < 1000


@pytest.mark.slow
def test_a_process_that_is_stopped_by_a_signal_does_not_train_meanwhile(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(resources, "RunningClock", partial(RunningClock, pause_seconds=1.0))
    config = run_config(dataset, training__max_steps=10**6, evaluation__every_steps=10**6)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        outcome = run(config, tmp_path / "run", max_seconds=1.5)
        os._exit(0 if outcome.reason == "limit" and outcome.seconds < 2.5 else 1)
    wait_for(lambda: (tmp_path / "run" / "plan.json").exists())
    time.sleep(0.5)
    os.kill(child, signal.SIGSTOP)
    time.sleep(3)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert time.monotonic() - started > 4


# A step that does not fit


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_repeated_with_smaller_micro_batches(tmp_path, dataset, monkeypatch):
    """The allocator refuses more than two examples at a time."""
    from trm.backends.pytorch.model import TinyRecursiveModel

    forward = TinyRecursiveModel.forward

    def starved(self, inputs, *more):
        if len(inputs) > 2 and torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return forward(self, inputs, *more)

    monkeypatch.setattr(TinyRecursiveModel, "forward", starved)
    run(run_config(dataset), tmp_path / "starved")
    shrunk = events(tmp_path / "starved", "batch shrunk")
    assert [(row["before"], row["after"]) for row in shrunk] == [(6, 3), (3, 1)]
    assert Run(tmp_path / "starved").checkpoints().newest_intact().step == 20
