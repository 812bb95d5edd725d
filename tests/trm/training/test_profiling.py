"""`trm train --profile`: a summary and a trace of a few steps, and the same run as without it."""

import json

import pytest
import torch
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import NonFiniteError
from trm.backends.base import Allocation, Recording, Span
from trm.config import load_config
from trm.runs.directory import EVENTS, Run
from trm.training.loop import Limits
from trm.training.profile_summary import PYTHON, allocated_bytes, operations
from trm.training.profiling import MAX_STEPS, STEPS_BEFORE, StepProfiler, steps_without_evaluation
from trm.training.start import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def profiled(dataset, **changes):
    return run_config(dataset, plan={"threads": 1, "profile": True}, **changes)


def tensors(path):
    return Run(path).checkpoints().newest_intact().load_all()


@pytest.fixture
def summary(tmp_path, dataset):
    run(profiled(dataset), tmp_path / "run")
    return json.loads((tmp_path / "run" / "profile" / "summary.json").read_text())


def test_a_profile_has_phases_operations_and_memory(summary):
    assert summary["num_steps"] == MAX_STEPS
    assert summary["step_seconds"] > 0
    assert summary["step_seconds_before"] > 0
    assert list(summary["phase_seconds"]) == ["data", "forward", "backward", "optimizer"]
    assert all(seconds > 0 for seconds in summary["phase_seconds"].values())
    by_phase = {each["phase"] for each in summary["operations"]}
    assert {"data", "forward", "backward", "optimizer"} <= by_phase
    assert any(each["name"] == "aten::mm" for each in summary["operations"])
    assert len(summary["memory"]) == 1 + MAX_STEPS
    assert all(each["peak_bytes"] >= each["resident_bytes"] // 2 > 0 for each in summary["memory"])
    assert summary["allocated_bytes"]["forward"] > 0


def test_a_profile_is_recorded_as_text_trace_and_event(tmp_path, dataset):
    config = profiled(dataset)
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    directory = tmp_path / "run" / "profile"
    assert sorted(file.name for file in directory.iterdir()) == ["summary.json", "summary.txt", "trace.json"]
    text = (directory / "summary.txt").read_text()
    assert text.startswith(f"Profile of steps {STEPS_BEFORE + 1} to {STEPS_BEFORE + MAX_STEPS}\n")
    assert "None" not in text
    trace = json.loads((directory / "trace.json").read_text())
    assert sum(event["name"] == "step" for event in trace["traceEvents"]) == MAX_STEPS
    (event,) = [row for row in Run(tmp_path / "run").rows(EVENTS) if row["event"] == "profiled"]
    assert (event["step"], event["steps"]) == (STEPS_BEFORE + MAX_STEPS, MAX_STEPS)
    assert any(message.startswith("Profile: data ") for message in display.messages)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_profile_changes_nothing_that_is_learned(tmp_path, dataset, supervision):
    run(run_config(dataset, training__supervision=supervision), tmp_path / "plain")
    run(profiled(dataset, training__supervision=supervision), tmp_path / "profiled")
    plain = tensors(tmp_path / "plain")
    other = tensors(tmp_path / "profiled")
    for group, named in plain.items():
        for name, tensor in named.items():
            assert torch.equal(tensor, other[group][name]), f"{group} {name}"


def test_a_run_that_is_resumed_is_not_profiled_again(tmp_path, dataset):
    run(profiled(dataset), tmp_path / "run", max_step=12)
    recipe = load_config(tmp_path / "run")
    assert recipe.plan.profile is False
    run(recipe, tmp_path / "run")
    events = [row["event"] for row in Run(tmp_path / "run").rows(EVENTS)]
    assert events.count("profiled") == 1


def test_no_evaluation_falls_between_the_recorded_steps(dataset):
    config = run_config(dataset, evaluation__every_steps=10)
    assert [steps_without_evaluation(config, step) for step in (0, 3, 9, 10, 18)] == [10, 7, 1, 10, 2]
    never = run_config(dataset, evaluation__every_steps=None)
    assert steps_without_evaluation(never, 3) == 17


@pytest.mark.parametrize("every", [1, 2, 7])
def test_frequent_evaluations_leave_fewer_steps_to_record(tmp_path, dataset, every):
    run(profiled(dataset, evaluation__every_steps=every), tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "profile" / "summary.json").read_text())
    assert facts["num_steps"] == min(MAX_STEPS, every)
    assert (facts["last_step"] - 1) // every == (facts["last_step"] - facts["num_steps"]) // every


def test_a_run_that_is_too_short_says_why_there_is_no_profile(tmp_path, dataset):
    config = profiled(dataset)
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=2), display)
    assert any(message.startswith("No steps were profiled") for message in display.messages)
    assert not (tmp_path / "run" / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_training(tmp_path, dataset):
    config = profiled(dataset)
    (tmp_path / "run").mkdir()
    run(config, tmp_path / "run", max_step=1)
    (tmp_path / "run" / "profile").write_text("in the way")
    display = Recorder()
    outcome = train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert outcome.reason == "max_steps"
    assert any("no profile can be written" in message for message in display.messages)


class FakeRecorder:
    """Counts how often it was started and stopped."""

    def __init__(self):
        self.started = self.stopped = 0

    def start(self):
        self.started += 1

    def phase(self, name):
        from contextlib import nullcontext

        return nullcontext()

    def stop(self, trace):
        self.stopped += 1
        return Recording([], [])


class SomeState:
    def __init__(self, config):
        self.config = config
        self.plan = plan_of(config)
        self.learner = None
        self.step = 0


def test_a_step_that_fails_is_not_part_of_a_profile(dataset):
    recorder = FakeRecorder()
    profiler = StepProfiler(lambda learner: recorder, log=None)
    state = SomeState(run_config(dataset))
    profiler.seconds_before = [0.01] * STEPS_BEFORE

    def fail():
        raise NonFiniteError("The loss is nan.")

    with pytest.raises(NonFiniteError):
        profiler.step(state, fail)
    assert (recorder.started, recorder.stopped) == (1, 1)
    assert profiler.attempt is None
    assert not profiler.is_done


def test_the_time_of_an_operation_excludes_the_operations_inside_it():
    spans = [
        Span("forward", 1, 0.0, 100.0),
        Span("aten::linear", 1, 10.0, 60.0),
        Span("aten::mm", 1, 20.0, 50.0),
        Span("aten::mm", 1, 70.0, 80.0),
        Span("forward", 2, 0.0, 40.0),
        Span("aten::mm", 2, 0.0, 40.0),
        Span("aten::add_", 2, 45.0, 50.0),
        Span("step", 3, 0.0, 1000.0),
    ]
    found = {(each.phase, each.name): (each.calls, each.seconds) for each in operations(spans)}
    assert found == {
        ("forward", "aten::mm"): (3, pytest.approx(80e-6)),
        ("forward", "aten::linear"): (1, pytest.approx(20e-6)),
        ("forward", PYTHON): (2, pytest.approx(40e-6)),
        ("other", "aten::add_"): (1, pytest.approx(5e-6)),
    }
    assert operations(spans)[0].name == "aten::mm"


def test_the_most_memory_of_a_phase_is_that_while_any_thread_is_in_it():
    spans = [Span("forward", 1, 0.0, 10.0), Span("backward", 1, 10.0, 20.0), Span("forward", 2, 12.0, 14.0)]
    recording = Recording(
        spans,
        allocations=[
            Allocation(1.0, 100), Allocation(11.0, 50), Allocation(13.0, 200), Allocation(15.0, -300),
            Allocation(16.0, 10), Allocation(30.0, 10_000),
        ],
    )  # fmt: skip
    assert allocated_bytes(recording) == {"forward": 350, "backward": 350}
    assert allocated_bytes(Recording([Span("data", 1, 0.0, 1.0)], [])) == {"data": 0}
