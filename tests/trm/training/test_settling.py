"""The first steps of a run that nobody has measured: what they try, what they find, and that they count."""

import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import trainer_of
from tiny import FOUR, TINY, TRM, Recorder, plan_of, run_config, sudoku_dataset

from macbook_optimization.hardware_detection import GIB, HardwareDetector
from macbook_optimization.memory_management import MARGIN, MIB, MemoryManager, peak_bytes
from trm.runs import Run
from trm.tasks.base import open_split
from trm.training.loop import Limits, train
from trm.training.measuring import Measured
from trm.training.planning import LARGE_ENOUGH, Planner
from trm.training.probe import TRAINERS_OWN_BYTES, Size
from trm.training.settling import Settling, trials
from trm.training.supervisor import prepare
from trm.training.watching import MetricsLog

EMPTY, EXAMPLE = 300 * MIB, 100 * MIB  # of a process and of an example
WAYS = [(1, 1), (2, 1), (2, 2)]


def played(rate_of, num_slots=64, budget_bytes=10**12, ways=WAYS):
    """What is asked for, and what is made of the answers."""
    game, asked = trials(ways, num_slots, budget_bytes), []
    try:
        trial = next(game)
        while True:
            asked.append(trial)
            size, way = trial
            trial = game.send(Size(size, EMPTY + EXAMPLE * size, None, rate_of(size, way)))
    except StopIteration as end:
        return asked, end.value


def test_sizes_grow_from_one_example_a_lane_and_ways_are_tried_with_the_best():
    asked, found = played(lambda size, way: {2: 50, 4: 90, 8: 100, 16: 101, 32: 102}[size] + way[1])
    assert [size for size, way in asked[:5]] == [2, 4, 8, 16, 32]
    assert all(way == (2, 2) for _, way in asked[:5])
    assert asked[5:] == [(8, way) for way in WAYS] * 2
    assert found.by_size == {2: 52, 4: 92, 8: 102, 16: 103, 32: 104}
    assert found.by_way == {(1, 1): 101, (2, 1): 101, (2, 2): 102}


def test_nothing_larger_is_tried_than_what_is_clearly_slower():
    asked, _ = played(lambda size, way: {2: 90, 4: 100, 8: 80}[size])
    assert max(size for size, _ in asked) == 8


@given(
    rates=st.lists(st.floats(0.1, 1e6), min_size=5, max_size=5),
    num_slots=st.integers(1, 100),
    room=st.integers(0, 100),
    threads=st.integers(1, 8),
)
def test_no_trial_is_larger_than_the_batch_or_than_memory_promises(rates, num_slots, room, threads):
    budget = (EMPTY + EXAMPLE * room + TRAINERS_OWN_BYTES) / (1 - MARGIN)
    ways = sorted({(1, 1), (threads, 1), (threads, threads)})
    asked, found = played(lambda size, way: rates[size % 5], num_slots, budget, ways)
    sizes = [size.micro_batch_size for size in found.sizes]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == min(threads, num_slots)
    assert max(sizes) <= min(num_slots, max(LARGE_ENOUGH, threads))
    assert max(sizes) <= max(room, sizes[0])
    assert all(way in ways and size <= num_slots for size, way in asked)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def planner_of(config, display):
    shape = open_split(config.data.path, "train").shape
    return Planner(config, shape, HardwareDetector().detect(with_torch=False), display)


def test_the_first_steps_are_steps_of_the_run(tmp_path, dataset, monkeypatch):
    """Terminal ones: latents that are carried from step to step would blow rounding up."""
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("trm.training.settling.BUSY_PERCENT", 101)
    monkeypatch.setattr("trm.training.settling.SECONDS_FOR_A_TRIAL", 0.0)  # a step for every trial
    losses = []
    add = MetricsLog.add
    heard = lambda log, step, result, *more: losses.append(result.loss) or add(log, step, result, *more)  # noqa: E731
    monkeypatch.setattr(MetricsLog, "add", heard)
    config = run_config(dataset, plan={}, training__supervision="terminal", training__max_steps=30)
    train(config, tmp_path / "fixed", plan_of(config), Limits(), Recorder())
    display = Recorder()
    begun = planner_of(config, display).at_once()
    assert begun.settling
    train(config, tmp_path / "settled", begun, Limits(), display)
    torch.set_num_threads(1)
    assert len(losses) == 60
    assert losses[30:] == pytest.approx(losses[:30], rel=1e-4)
    plan = Run(tmp_path / "settled").plan
    assert not plan.settling
    assert plan.predicted_peak_bytes < plan.budget_bytes
    assert {"micro_batch_size", "threads", "memory", "precision"} <= set(plan.reasons)
    assert any(text.startswith("Plan: ") for text in display.messages)
    again = planner_of(config, display).at_once()
    assert not again.settling  # it is remembered
    assert (again.micro_batch_size, again.threads, again.lanes) == (
        plan.micro_batch_size, plan.threads, plan.lanes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"memory_limit_mb": 4000}},
        {"plan": {"micro_batch_size": 2}},
        {"plan": {"precision": "auto"}},
        {"plan": {"gradient_checkpointing": "all"}},
        {"plan": {"compile": True}},
        {"plan": {}, "training__deterministic": True},
        {"plan": {}, "training__effective_batch_size": 10**8},
    ],
)
def test_what_the_first_steps_cannot_tell_is_for_a_probe(dataset, changes):
    assert planner_of(run_config(dataset, **changes), Recorder()).at_once() is None


def test_a_step_that_finds_no_room_while_sizes_are_tried_settles_for_less(tmp_path, dataset, monkeypatch):
    from trm.backends.pytorch import step

    real = step.TinyRecursiveModel.forward

    def starved(self, inputs, *more):
        if len(inputs) > 3 and torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return real(self, inputs, *more)

    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(step.TinyRecursiveModel, "forward", starved)
    monkeypatch.setattr("trm.training.settling.SECONDS_FOR_A_TRIAL", 0.0)
    monkeypatch.setattr("trm.training.settling.CLEARLY_SLOWER", 0.0)  # noise is not to end it
    config = run_config(dataset, plan={"threads": 1})
    train(config, tmp_path / "run", planner_of(config, Recorder()).at_once(), Limits(), Recorder())
    plan = Run(tmp_path / "run").plan
    assert not plan.settling
    assert plan.micro_batch_size <= 3
    assert "no room" in plan.reasons["micro_batch_size"]
    assert Run(tmp_path / "run").checkpoints().newest_good().step == 20


def test_a_run_that_is_prepared_without_measuring_says_so(tmp_path, dataset, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    display = Recorder()
    assert prepare(run_config(dataset, plan={}), tmp_path / "run", display).plan.settling
    assert any("first steps" in text for text in display.messages)


@pytest.mark.slow
def test_a_trainer_that_is_killed_in_its_first_steps_goes_on_with_a_measured_plan(tmp_path):
    command = [TRM, "train", "sudoku-6x6", *FOUR, *TINY, "--run", "run"]
    started = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    trainer_of(started).send_signal(signal.SIGKILL)
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 0, errors
    assert "was killed by SIGKILL. Going on" in errors
    assert "Measuring what a step takes" in errors
    assert not Run(tmp_path / "run").plan.settling


def with_available(planner, available_bytes):
    memory = replace(planner.hardware.memory, available_memory=available_bytes)
    return replace(planner, hardware=replace(planner.hardware, memory=memory))


def test_first_steps_that_fit_no_longer_leave_it_to_a_probe(dataset):
    planner = planner_of(run_config(dataset, plan={}), Recorder())
    one = Measured((Size(1, 300 * MIB, None, 10.0),), {1: 10.0}, {})
    assert with_available(planner, 500 * MIB).settled(one, keep=False).micro_batch_size == 1
    assert with_available(planner, 300 * MIB).settled(one, keep=False) is None


@pytest.mark.parametrize(("room", "kept"), [(400 * GIB, True), (0, False)])
def test_sizes_that_ended_where_memory_did_are_not_remembered(tmp_path, dataset, monkeypatch, room, kept):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("trm.training.settling.SECONDS_FOR_A_TRIAL", 0.0)
    monkeypatch.setattr("trm.training.settling.BUSY_PERCENT", 101)
    enough_for_one = int(1.5 * peak_bytes()) + room
    planner = with_available(planner_of(run_config(dataset, plan={"threads": 1}), Recorder()), enough_for_one)
    memory = MemoryManager()

    def apply(size, way):
        memory.batch_size = memory.largest = size

    settling = Settling(planner, planner.at_once(), apply, keep=True)
    settling.begin()
    for step in range(1, 100):
        if (plan := settling.after_step(step, 0.1, memory)) is not None:
            break
    assert not plan.settling
    assert planner._question().first_steps.exists() == kept


def test_while_other_programs_leave_no_room_nothing_is_measured(dataset, monkeypatch):
    monkeypatch.setattr("trm.training.settling.SECONDS_FOR_A_TRIAL", 0.0)
    planner, memory = planner_of(run_config(dataset, plan={}), Recorder()), MemoryManager(4, 4)
    settling = Settling(planner, planner.at_once(), lambda size, way: None, keep=False)
    settling.begin()
    settling.trial = (4, (1, 1))
    memory.batch_size = 2  # which it grows back from
    assert settling.after_step(1, 0.1, memory) is None
    assert settling.rates == []
    memory.after_failed_allocation()  # which it does not
    assert settling.after_step(2, 0.1, memory).micro_batch_size == 1


def test_trials_keep_to_the_threads_that_there_are(dataset):
    planner, warnings = planner_of(run_config(dataset, plan={"threads": 640}), Recorder()).corrected()
    assert max(planner.ways())[0] < 640
    assert len(warnings) == 1


def test_deterministic_training_does_not_go_on_with_a_plan_to_begin_with(tmp_path, dataset):
    config = run_config(dataset, plan={})
    begun = planner_of(config, Recorder()).at_once() or replace(plan_of(config), settling=True)
    train(config, tmp_path / "run", begun, Limits(max_step=1), Recorder())
    assert Run(tmp_path / "run").plan.settling
    exact = run_config(dataset, plan={"threads": 1, "micro_batch_size": 2}, training__deterministic=True)
    assert not prepare(exact, tmp_path / "run", Recorder()).plan.settling
