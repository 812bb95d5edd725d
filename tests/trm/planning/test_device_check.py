"""What is compared before a run uses anything but PyTorch on the CPU, and what happens if that fails."""

import numpy as np
import pytest
import second_device
from tiny import Recorder, model_config, run_config, sudoku_dataset

from macbook_optimization.children import ChildDied
from macbook_optimization.errors import ConfigError
from macbook_optimization.hardware_detection import HardwareDetector
from trm.backends.base import StepResult
from trm.planning import device_check
from trm.planning.device_choice import (
    REFERENCE,
    Place,
    check,
    choose_device,
    execution_at,
    planner_at,
    wanted_place,
)
from trm.planning.planner import Planner
from trm.runs.directory import EVENTS
from trm.tasks.dataset import open_split
from trm.training.loop import Limits
from trm.training.preparation import prepare
from trm.training.supervisor import supervise


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))


ARRAY = np.linspace(-1, 1, 1000, dtype=np.float32)


def differences(ours, theirs, name="weights/w"):
    before = np.zeros_like(ARRAY)
    states = {name: before}, {name: before}
    return [each.problem for each in device_check._of_states(states, ({name: ours}, {name: theirs}))]


def test_weights_that_were_not_written_are_counted():
    half = ARRAY.copy()
    half[500:] = 0
    assert differences(ARRAY, ARRAY) == []
    assert differences(ARRAY, half) == ["500 of 1000 numbers did not change"]
    assert differences(ARRAY, 1.5 * ARRAY) == ["the update differs by more than 10%"]
    assert differences(ARRAY, 0 * ARRAY, "ema/w") == ["it did not change"]
    assert differences(ARRAY, ARRAY * np.nan) == ["it is not finite"]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [(ARRAY * 1.0005, []), (ARRAY * 1.002, ["norm"]), (ARRAY + 0.02, ["cosine"]), (-ARRAY, ["cosine"])],
)
def test_gradients_are_compared_by_direction_and_size(theirs, words):
    problems = differences(ARRAY, theirs, "optimizer/w.exp_avg")
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_a_gradient_that_is_only_rounding_is_not_compared():
    here = {"optimizer/a.exp_avg": ARRAY, "optimizer/b.exp_avg": ARRAY * 1e-8}
    there = {"optimizer/a.exp_avg": ARRAY, "optimizer/b.exp_avg": -ARRAY * 1e-8}
    assert list(device_check._of_states((here, there), (here, there))) == []


def test_a_step_that_follows_a_gradient_of_rounding_may_have_either_sign():
    small, step = ARRAY * 1e-8, np.sign(ARRAY)
    here = {"optimizer/a.exp_avg": ARRAY, "optimizer/b.exp_avg": small, "weights/b": step}
    there = {"optimizer/a.exp_avg": ARRAY, "optimizer/b.exp_avg": -small, "weights/b": -step}
    before = {name: np.zeros_like(ARRAY) for name in here}
    assert list(device_check._of_states((before, before), (here, there))) == []
    real = {**here, "optimizer/b.exp_avg": ARRAY}
    (found,) = device_check._of_states((before, before), (real, {**there, "optimizer/b.exp_avg": ARRAY}))
    assert (found.tensor, found.problem) == ("weights/b", "the update differs by more than 10%")


@pytest.mark.parametrize("share", [0.5, 1 / 16])
def test_latents_of_which_a_part_was_not_written_differ(share):
    written = ARRAY.copy()
    written[: int(share * len(ARRAY))] = 0
    (problem,) = differences(ARRAY, written, "latents/latents")
    assert problem.startswith("it differs by ")
    assert differences(ARRAY, ARRAY * (1 + 1e-4), "latents/latents") == []
    assert differences(ARRAY, ARRAY * np.nan, "latents/latents") == ["it is not finite"]


def result(exact=(True, False), halt_margins=(-5.0, 0.0)):
    """Return what a step has returned of two slots."""
    margins = np.array(halt_margins, dtype=np.float32)
    return StepResult(1.0, 1.0, 0.5, np.array(exact), sum(exact), margins)


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        (result(halt_margins=(-5.0001, 1e-4)), None),
        (result(halt_margins=(-5.0, 0.01)), "the halting margins of the slots are different"),
        (result(halt_margins=(np.nan, 0.0)), "the halting margins of the slots are different"),
        (result(exact=(False, True)), "different slots are answered exactly"),
    ],
)
def test_what_a_step_returns_is_compared_slot_by_slot(theirs, problem):
    found = [each.problem for each in device_check._of_results(result(), theirs, device_check.FLOAT32)]
    assert found == ([] if problem is None else [problem])


def planner_of(config, display=None):
    hardware = HardwareDetector().detect(with_torch=False)
    return Planner(config, open_split(config.data.path, "train").spec, hardware, display or Recorder())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("plan", [{}, {"device": "auto"}, {"backend": "auto", "device": "auto"}])
def test_with_the_cpu_alone_auto_costs_nothing(dataset, plan, deterministic, monkeypatch):
    monkeypatch.setattr("trm.planning.device_choice.run_in_child", None)  # nothing may be started
    monkeypatch.setattr("trm.planning.device_choice.installed_backends", lambda: ["pytorch"])
    config = run_config(dataset, training__deterministic=deterministic, plan={"threads": 1, **plan})
    planner = planner_of(config)
    choice = choose_device(planner)
    assert wanted_place(choice.planner) == REFERENCE
    assert (choice.verdicts, planner.display.messages) == ((), [])


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_an_unknown_device_is_refused_with_those_that_exist(dataset):
    with pytest.raises(ConfigError, match=r"has no device 'autoo' here; did you mean auto\?") as refused:
        choose_device(planner_of(run_config(dataset, plan={"device": "autoo"})))
    assert refused.value.hint == "Set plan.device to one of: cpu, auto"


@pytest.mark.usefixtures("cache")
def test_deterministic_training_uses_the_cpu(dataset, monkeypatch):
    monkeypatch.setattr("trm.planning.device_choice.devices_of", lambda backend, *, cheaply: ("cpu", "mps"))
    planner = planner_of(run_config(dataset, training__deterministic=True, plan={"device": "mps"}))
    assert wanted_place(choose_device(planner).planner) == REFERENCE
    assert "training.deterministic needs PyTorch on the CPU" in planner.display.messages[0]


def test_what_is_for_the_cpu_is_corrected_elsewhere(dataset):
    plan = {"threads": 2, "workers": 2, "precision": "bfloat16", "compile": True, "device": "mps"}
    planner, warnings = planner_of(run_config(dataset, plan=plan)).corrected()
    settings = planner.config.plan
    assert (settings.workers, settings.precision, settings.compile) == (1, "float32", False)
    assert [text.split()[0] for text in warnings] == ["plan.workers", "plan.compile", "plan.precision"]
    assert [each.workers for each in planner.choices()] == [1]


@pytest.mark.slow
@second_device.needed
@pytest.mark.usefixtures("cache")
def test_the_verdict_is_cached_and_auto_takes_the_fastest(dataset, tmp_path, monkeypatch):
    """Both are measured; the made-up device computes with the same kernels and takes longer."""
    second_device.announce(monkeypatch, tmp_path)
    planner = planner_of(run_config(dataset, plan={"device": "auto", "threads": 1}))
    choice = choose_device(planner)
    assert [(each.place, each.problem) for each in choice.verdicts] == [(Place("pytorch", "second"), None)]
    assert wanted_place(choice.planner) == REFERENCE
    assert planner.display.messages[0].startswith("Checking pytorch on second")
    assert choice.reason.startswith("measured ")
    assert "samples/s with pytorch on second" in choice.reason
    again = planner_of(planner.config)
    assert choose_device(again).verdicts == choice.verdicts
    assert not any(text.startswith("Checking") for text in again.display.messages)


@pytest.mark.slow
@second_device.needed
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("broken", "tensor"),
    [
        ("addcmul_", "exp_avg_sq"),
        ("_safe_softmax", "exp_avg"),
        ("copy_", "latents/latents"),
        ("atan2", None),
        ("", None),
    ],
)
def test_a_run_continues_on_the_cpu_if_the_device_fails(dataset, tmp_path, monkeypatch, broken, tensor):
    second_device.announce(monkeypatch, tmp_path, broken)
    mixer = "attention" if broken == "_safe_softmax" else "mlp"
    model = model_config(mixer=mixer, pos_encodings="none").model_dump()
    config = run_config(dataset, model=model, plan={"device": "second", "threads": 1, "report": False})
    display = Recorder()
    job = prepare(config, tmp_path / "run", display)
    assert job.config.plan.device == ("cpu" if broken else "second")
    outcome = supervise(job, Limits())
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    assert job.run.plan.execution.device == job.config.plan.device
    assert job.run.config.plan.device == "second", "a later start may check it again"
    events = [row for row in job.run.rows(EVENTS) if row["event"] == "device rejected"]
    assert len(events) == bool(broken)
    for event in events:
        assert (event["backend"], event["device"]) == ("pytorch", "second")
        assert f"aten::{broken}" in event["problem"] if tensor is None else tensor in event["tensor"]
        assert any(event["problem"] in text for text in display.messages)
    assert job.plan.explain()[0].startswith(f"pytorch on {job.config.plan.device} (")


def test_a_place_is_part_of_the_plan(dataset):
    planner = planner_of(run_config(dataset))
    assert planner_at(planner, Place("pytorch", "mps")).execution().device == "mps"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (ChildDied(1, True, "NotImplementedError: aten::erfinv"), True),
        (ChildDied(-9, False, "", timed_out=True), False),
        (ChildDied(-9, False, ""), False),
        (ChildDied(1, True, "RuntimeError: out of memory"), False),
        (ConfigError("The backend pytorch has no device 'mps' here"), False),
    ],
)
def test_a_check_that_died_is_repeated_only_if_it_may_end_differently(dataset, monkeypatch, error, is_kept):
    started = []

    def die(*arguments, **how):
        started.append(1)
        raise error

    monkeypatch.setattr("trm.planning.device_choice.run_in_child", die)
    planner = planner_of(run_config(dataset))
    verdicts = [check(planner, Place("pytorch", "mps")) for _ in range(2)]
    assert all(str(error) in each.problem for each in verdicts)
    assert {each.timed_out for each in verdicts} == {getattr(error, "timed_out", False)}
    assert len(started) == (1 if is_kept else 2)


def test_what_will_be_computed_in_bfloat16_is_checked_in_bfloat16(dataset):
    planner = planner_of(run_config(dataset, plan={"precision": "bfloat16", "threads": 1}))
    assert execution_at(planner, Place("mlx", "gpu")).precision == "bfloat16"
    assert execution_at(planner, Place("pytorch", "mps")).precision == "float32", "which mps is corrected to"
