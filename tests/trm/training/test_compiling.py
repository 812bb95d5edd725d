"""The compiled level: tried beside a run, used if it is faster, and never needed."""

import os
import subprocess
from types import SimpleNamespace

import pytest
from tiny import SHAPE, TRM

from macbook_optimization.children import run_in_child
from macbook_optimization.errors import CompilationError
from trm.config import load_config
from trm.runs import Plan, Run
from trm.training import compiling
from trm.training.compiling import Compiling
from trm.training.probe import typical_cycles

OVERRIDES = (
    "data.build={size: 6, blanks: 22, train: 100, test: 16}", "data.path=set", "training.max_steps=100000",
    "training.depths={0: 2}", "evaluation.every_steps=100000", "evaluation.target_accuracy=null",
)  # fmt: skip
FAST = Plan(
    micro_batch_size=8, accumulation_steps=2, threads=2, lanes=2, budget_bytes=2**31,
    predicted_peak_bytes=2**29, samples_per_second=100.0,
)  # fmt: skip


class Learner:
    def __init__(self, problem=None):
        self.problem, self.sizes = problem, []

    def compile(self, size):
        if self.problem is not None:
            raise CompilationError(self.problem)
        self.sizes.append(size)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A trial whose child answers at once with `gain`, and what was said and written down."""
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path))

    def make(gain=None, plan=FAST, overrides=()):
        asked, said, events = [], [], []

        def child(target, arguments, **how):
            asked.append(target)
            if isinstance(gain, Exception):
                raise gain
            return gain

        monkeypatch.setattr(compiling, "run_in_child", child)
        config = load_config("sudoku-6x6", [*OVERRIDES, *overrides])
        journal = SimpleNamespace(event=lambda what, **facts: events.append(facts))
        trial = Compiling(config, plan, SHAPE, journal, SimpleNamespace(message=said.append))
        return SimpleNamespace(trial=trial, asked=asked, said=said, events=events)

    return make


def steps(made, learner, count=3, max_seconds=None):
    for step in range(1, count + 1):
        made.trial.go_on(learner, step, max_seconds)
        if made.trial.thread is not None:
            made.trial.thread.join()


def test_a_faster_one_is_taken_over_between_two_steps_and_known_the_next_time(make):
    learner, made = Learner(), make(gain=1.3)
    steps(made, learner)
    assert learner.sizes == [8]
    assert made.said == ["The compiled level is in use from step 3 on (measured 1.30 times as fast)."]
    assert made.events == [{"step": 2, "gain": 1.3, "problem": None}]
    again = make(gain=None)
    steps(again, learner, count=1)
    assert not again.asked
    assert learner.sizes == [8, 8]


def test_one_that_is_not_clearly_faster_is_not_used(make):
    learner, made = Learner(), make(gain=1.04)
    steps(made, learner)
    assert learner.sizes == []
    assert made.said == []
    assert made.events[0]["gain"] == 1.04


@pytest.mark.parametrize(
    ("changes", "overrides", "max_seconds"),
    [
        ({}, ["plan.compile=false"], None),
        ({}, ["training.deterministic=true"], None),
        ({}, ["training.max_steps=1000"], None),  # over in a few minutes
        ({}, [], 60),
        ({"gradient_checkpointing": "all"}, [], None),
        ({"predicted_peak_bytes": 2**31 - 1}, [], None),  # no room for a second process
    ],
)
def test_nothing_is_compiled_where_it_does_not_pay(make, changes, overrides, max_seconds):
    learner = Learner()
    made = make(gain=2.0, plan=Plan.from_json({**FAST.to_json(), **changes}), overrides=overrides)
    steps(made, learner, max_seconds=max_seconds)
    assert not made.asked
    assert learner.sizes == []


@pytest.mark.parametrize("where", ["child", "trainer"])
def test_a_failure_is_one_line_and_training_goes_on(make, where):
    problem = "There is no compiler."
    made = make(gain=CompilationError(problem) if where == "child" else 1.5)
    steps(made, Learner(problem if where == "trainer" else None))
    assert made.said == [f"Compiling failed; training goes on without it. {problem}"]
    assert made.events[0]["problem"] == problem


def run(directory, *arguments, **variables):
    command = [TRM, "train", "sudoku-6x6", *OVERRIDES, *arguments, "--run", "run"]
    cache = {"TRM_CACHE_DIR": str(directory / "cache")}
    return subprocess.run(
        command, cwd=directory, env={**os.environ, **cache, **variables}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("recipe", ["sudoku-extreme", "sudoku-6x6"])  # deep, terminal
def test_the_trial_takes_two_recursions(recipe):
    config = compiling.shallow(load_config(recipe))
    assert typical_cycles(config) == 2
    assert config.model.L_cycles == 1


@pytest.mark.slow
def test_a_real_run_compiles_what_it_is_told_to_and_does_without_a_compiler(tmp_path, monkeypatch):
    by_hand = "plan.threads=2", "plan.micro_batch_size=8", "plan.compile=true"
    done = run(tmp_path, *by_hand, "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    assert "The compiled level is in use from step 2 on (set by hand)." in done.stderr
    assert any(row["event"] == "compiled" for row in Run(tmp_path / "run").rows("events.jsonl"))
    monkeypatch.chdir(tmp_path)
    begun = Run(tmp_path / "run")
    gain = run_in_child(  # whether it pays here is the measurement's business
        "trm.training.compiling:measure_gain",
        {"config": begun.config.model_dump(mode="json"), "plan": begun.plan.to_json()},
        environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "compiled")},
    )
    assert 0.1 < gain < 10
    nothing = tmp_path / "nothing"
    without = run(
        tmp_path, *by_hand, "plan.micro_batch_size=4", "--max-steps", "6",
        CXX=str(nothing), TRM_CACHE_DIR=str(tmp_path / "other"),
    )  # fmt: skip
    assert without.returncode == 0, without.stderr
    assert "Compiling failed; training goes on without it." in without.stderr
    rows = [row for row in Run(tmp_path / "run").rows() if "loss" in row]
    assert rows[-1]["step"] == 6
