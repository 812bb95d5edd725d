"""Auto-tuning during warm-up: what the first steps try and find, and that they are steps of the run."""

import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from processes import trainer_of
from tiny import FOUR, TINY, TRM, Recorder, plan_of, run_config, sudoku_dataset

from macbook_optimization.hardware_detection import GIB, HardwareDetector
from macbook_optimization.memory_management import MIB, MemoryManager, peak_bytes
from macbook_optimization.resource_monitoring import RunningClock
from trm.planning.measurements import Measurements, Parallelism, SizeResult
from trm.planning.planner import Planner
from trm.planning.tuning import Trial
from trm.planning.warmup import WarmUp
from trm.runs.directory import Run
from trm.tasks.registry import load_task
from trm.training.log import StepMetrics
from trm.training.loop import Limits
from trm.training.preparation import prepare
from trm.training.start import open_splits, train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def one_step_per_trial(monkeypatch):
    monkeypatch.setattr("trm.planning.warmup.TRIAL_SECONDS", 0.0)


@pytest.fixture
def quiet_machine(monkeypatch):
    monkeypatch.setattr("trm.planning.measurements.BUSY_PERCENT", 101)


def planner_of(config, display=None):
    task = load_task(config.task)
    train_split, _ = open_splits(config, task)
    hardware = HardwareDetector().detect(with_torch=False)
    return Planner(config, task.complete(train_split.spec), hardware, display or Recorder())


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache", "one_step_per_trial", "quiet_machine")
def test_the_first_steps_are_steps_of_the_run(tmp_path, dataset, monkeypatch):
    """With terminal supervision: latents that are carried from step to step would amplify rounding."""
    losses = []
    add = StepMetrics.add

    def record(metrics, result, timing, stage):
        losses.append(result.loss)
        add(metrics, result, timing, stage)

    monkeypatch.setattr(StepMetrics, "add", record)
    config = run_config(dataset, plan={}, training__supervision="terminal", training__max_steps=30)
    train(config, tmp_path / "fixed", plan_of(config), Limits(), Recorder())
    display = Recorder()
    provisional = planner_of(config).without_probe()
    assert provisional.provisional
    train(config, tmp_path / "tuned", provisional, Limits(), display)
    torch.set_num_threads(1)
    assert len(losses) == 60
    assert losses[30:] == pytest.approx(losses[:30], rel=1e-4)
    plan = Run(tmp_path / "tuned").plan
    assert not plan.provisional
    assert plan.predicted_peak_bytes < plan.budget_bytes
    assert {"micro_batch_size", "threads", "memory", "precision"} <= set(plan.reasons)
    assert any(text.startswith("Plan: ") for text in display.messages)
    cached = planner_of(config).without_probe()
    assert not cached.provisional
    assert cached.micro_batch_size == plan.micro_batch_size
    assert cached.execution == plan.execution


@pytest.mark.usefixtures("empty_cache", "one_step_per_trial", "quiet_machine")
def test_a_pause_of_the_process_does_not_make_a_trial_look_fast(tmp_path, dataset, monkeypatch):
    """The clock of training time may not advance during a step in which the process was paused."""
    seconds = []
    after_step = WarmUp.after_step

    def record(warmup, step, took, memory):
        seconds.append(took)
        return after_step(warmup, step, took, memory)

    class Stopped(RunningClock):
        @property
        def seconds(self):
            return 0.0

    monkeypatch.setattr(WarmUp, "after_step", record)
    monkeypatch.setattr("trm.training.resources.RunningClock", Stopped)
    config = run_config(dataset, plan={"threads": 1})
    train(config, tmp_path / "run", planner_of(config).without_probe(), Limits(max_step=3), Recorder())
    assert len(seconds) == 3
    assert min(seconds) > 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {}, "limits": {"memory_limit_mb": 4000}},
        {"plan": {"micro_batch_size": 2}},
        {"plan": {"precision": "auto"}},
        {"plan": {"gradient_checkpointing": "all"}},
        {"plan": {"compile": True}},
        {"plan": {}, "training__deterministic": True},
        {"plan": {}, "training__effective_batch_size": 10**8},
    ],
)
def test_what_the_first_steps_cannot_find_out_needs_a_probe(dataset, changes):
    assert planner_of(run_config(dataset, **changes)).without_probe() is None


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache", "one_step_per_trial")
def test_a_size_that_does_not_fit_ends_the_search_with_a_smaller_one(tmp_path, dataset, monkeypatch):
    from trm.backends.pytorch.model import TinyRecursiveModel

    forward = TinyRecursiveModel.forward

    def starved(self, inputs, *more):
        if len(inputs) > 3 and torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return forward(self, inputs, *more)

    monkeypatch.setattr(TinyRecursiveModel, "forward", starved)
    monkeypatch.setattr("trm.planning.warmup.CLEARLY_SLOWER", 0.0)  # noise must not end the search
    config = run_config(dataset, plan={"threads": 1})
    train(config, tmp_path / "run", planner_of(config).without_probe(), Limits(), Recorder())
    plan = Run(tmp_path / "run").plan
    assert not plan.provisional
    assert plan.micro_batch_size <= 3
    assert plan.reasons["micro_batch_size"] == "there was no room for more"
    assert Run(tmp_path / "run").checkpoints().newest_intact().step == 20


@pytest.mark.usefixtures("empty_cache")
def test_a_run_that_starts_without_a_probe_says_so(tmp_path, dataset):
    display = Recorder()
    assert prepare(run_config(dataset, plan={}), tmp_path / "run", display).plan.provisional
    assert any("the first steps try different batch sizes" in text for text in display.messages)


@pytest.mark.slow
def test_a_trainer_that_is_killed_during_warm_up_resumes_with_a_probed_plan(tmp_path):
    command = [TRM, "train", "sudoku-6x6", *FOUR, *TINY, "--run", "run"]
    started = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    trainer_of(started).send_signal(signal.SIGKILL)
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 0, errors
    assert "was killed by SIGKILL. Resuming" in errors
    assert "Measuring what a step takes" in errors
    assert not Run(tmp_path / "run").plan.provisional


def with_available(planner, available_bytes):
    memory = replace(planner.hardware.memory, available_memory=available_bytes)
    return replace(planner, hardware=replace(planner.hardware, memory=memory))


def test_measurements_that_no_longer_fit_are_left_to_a_probe(dataset):
    planner = planner_of(run_config(dataset, plan={}))
    measured = Measurements((SizeResult(1, 300 * MIB, None, 10.0),), {1: [10.0]})
    assert with_available(planner, 500 * MIB).tuned(measured, cache=False).micro_batch_size == 1
    assert with_available(planner, 300 * MIB).tuned(measured, cache=False) is None


@pytest.mark.usefixtures("empty_cache", "one_step_per_trial", "quiet_machine")
@pytest.mark.parametrize(("room", "cached"), [(400 * GIB, True), (0, False)])
def test_a_search_that_memory_ended_is_not_cached(dataset, room, cached):
    enough_for_one = int(1.5 * peak_bytes()) + room
    planner = with_available(planner_of(run_config(dataset, plan={"threads": 1})), enough_for_one)
    memory = MemoryManager()

    def apply(size, parallelism):
        memory.batch_size = memory.largest = size

    warmup = WarmUp(planner, planner.without_probe(), apply, cache=True)
    warmup.begin()
    for step in range(1, 100):
        if (plan := warmup.after_step(step, 0.1, memory)) is not None:
            break
    assert not plan.provisional
    assert planner.warmup_file().exists() == cached


@pytest.mark.usefixtures("empty_cache", "one_step_per_trial")
def test_nothing_is_measured_while_other_programs_leave_no_room(dataset):
    planner = planner_of(run_config(dataset, plan={}))
    memory = MemoryManager(4, 4)
    warmup = WarmUp(planner, planner.without_probe(), lambda size, parallelism: None, cache=False)
    warmup.begin()
    warmup.trial = Trial(4, Parallelism(1, 1), "sizes")
    memory.batch_size = 2  # because of memory pressure, so it may grow again
    assert warmup.after_step(1, 0.1, memory) is None
    assert warmup.rates == []
    memory.after_failed_allocation()  # which is final
    assert warmup.after_step(2, 0.1, memory).micro_batch_size == 1


def test_trials_use_no_more_threads_than_there_are(dataset):
    planner, warnings = planner_of(run_config(dataset, plan={"threads": 640})).corrected()
    assert max(planner.choices()).threads < 640
    assert len(warnings) == 1


@pytest.mark.usefixtures("empty_cache")
def test_deterministic_training_does_not_resume_with_a_provisional_plan(tmp_path, dataset):
    config = run_config(dataset, plan={})
    train(config, tmp_path / "run", planner_of(config).without_probe(), Limits(max_step=1), Recorder())
    torch.set_num_threads(1)
    assert Run(tmp_path / "run").plan.provisional
    exact = run_config(dataset, plan={"threads": 1, "micro_batch_size": 2}, training__deterministic=True)
    assert not prepare(exact, tmp_path / "run", Recorder()).plan.provisional
