"""The compiled block: tried in the background, used if it is faster, and never required."""

import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import SPEC, TRM, Recorder

from macbook_optimization.children import run_in_child
from macbook_optimization.errors import CompilationError
from trm.config import load_config
from trm.plan import Execution, Plan
from trm.planning import compile_trial
from trm.runs.directory import EVENTS, Run
from trm.schedule import typical_cycles
from trm.training.log import RunLog
from trm.training.tuner import Tuner

OVERRIDES = (
    "data.build={size: 6, blanks: 22, train: 100, test: 16}", "data.path=set", "training.max_steps=100000",
    "training.depths={0: 2}", "evaluation.every_steps=100000", "evaluation.target_accuracy=null",
    "plan.report=false",
)  # fmt: skip
FAST = Plan(
    Execution(threads=2, workers=2), micro_batch_size=8, accumulation_steps=2, budget_bytes=2**31,
    predicted_peak_bytes=2**29, samples_per_second=100.0,
)  # fmt: skip


class Learner:
    def __init__(self, problem=None):
        self.problem = problem
        self.sizes = []

    def reconfigure(self, execution):
        if self.problem is not None:
            raise CompilationError(self.problem)
        self.sizes.append(execution.compiled_size)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes a tuner whose child process returns `gain` immediately."""
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))

    def make(gain=None, plan=FAST, overrides=()):
        started = []

        def child(target, arguments, **how):
            started.append(target)
            if isinstance(gain, Exception):
                raise gain
            return gain

        monkeypatch.setattr(compile_trial, "run_in_child", child)
        config = load_config("sudoku-6x6", [*OVERRIDES, *overrides])
        run, display = Run(tmp_path), Recorder()
        (tmp_path / EVENTS).unlink(missing_ok=True)
        tuner = Tuner(config, SPEC, plan, RunLog(run, display), read_peak=lambda: 0)
        return SimpleNamespace(tuner=tuner, started=started, run=run, display=display)

    return make


def take_steps(made, learner, count=3, max_seconds=None):
    """Return the plans that the steps led to."""
    plans = []
    for step in range(1, count + 1):
        plans.append(made.tuner.after_step(step, 0.1, None, learner, max_seconds))
        if made.tuner.compile_trial.thread is not None:
            made.tuner.compile_trial.thread.join()
    return plans


def events(made):
    rows = made.run.rows(EVENTS)
    return [{name: row[name] for name in ("event", "step", "gain", "problem")} for row in rows]


def test_a_faster_block_is_loaded_between_two_steps_and_cached_for_the_next_run(make):
    learner, made = Learner(), make(gain=1.3)
    plans = take_steps(made, learner)
    assert learner.sizes == [8]
    compiled = replace(FAST, execution=replace(FAST.execution, compiled_size=8))
    assert plans == [None, compiled, None]
    assert made.display.messages == [
        "The compiled block is in use from step 3 on (measured 1.30 times as fast)."
    ]
    assert events(made) == [{"event": "compiled", "step": 2, "gain": 1.3, "problem": None}]
    again = make(gain=None)
    take_steps(again, learner, count=1)
    assert not again.started
    assert learner.sizes == [8, 8]


def test_a_block_that_is_not_clearly_faster_is_not_used(make):
    learner, made = Learner(), make(gain=1.04)
    assert take_steps(made, learner) == [None] * 3
    assert learner.sizes == []
    assert made.display.messages == []
    assert events(made)[0]["gain"] == 1.04


@pytest.mark.parametrize(
    ("changes", "overrides", "max_seconds"),
    [
        ({}, ["plan.compile=false"], None),
        ({}, ["training.deterministic=true"], None),
        ({}, ["training.max_steps=1000"], None),  # finished in a few minutes
        ({}, [], 60),
        ({"gradient_checkpointing": "all"}, [], None),
        ({"predicted_peak_bytes": 2**31 - 1}, [], None),  # no room for a second process
    ],
)
def test_nothing_is_compiled_where_it_does_not_pay(make, changes, overrides, max_seconds):
    learner = Learner()
    made = make(gain=2.0, plan=Plan.from_json({**FAST.to_json(), **changes}), overrides=overrides)
    take_steps(made, learner, max_seconds=max_seconds)
    assert not made.started
    assert learner.sizes == []


@pytest.mark.parametrize("where", ["child", "trainer"])
def test_a_failure_is_one_line_and_training_continues(make, where):
    problem = "There is no compiler."
    made = make(gain=CompilationError(problem) if where == "child" else 1.5)
    plans = take_steps(made, Learner(problem if where == "trainer" else None))
    assert plans == [None] * 3
    assert made.display.messages == [f"Compiling failed; training continues without it. {problem}"]
    assert events(made)[0]["problem"] == problem


@pytest.mark.parametrize("recipe", ["sudoku-extreme", "sudoku-6x6"])  # deep, terminal
def test_the_trial_takes_two_recursions(recipe):
    config = compile_trial.shallow(load_config(recipe))
    assert typical_cycles(config.model, config.training) == 2
    assert config.model.L_cycles == 1


def start(directory, *arguments, run="run", **variables):
    # One layer, because most of the time goes to the compiler.
    command = [TRM, "train", "sudoku-6x6", *OVERRIDES, "model.H_layers=1", *arguments, "--run", run]
    cache = {"TRM_CACHE_DIR": str(directory / "cache")}
    return subprocess.run(
        command, cwd=directory, env={**os.environ, **cache, **variables}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def newest_weights(run):
    return run / "checkpoints" / "step-00000003" / "weights.safetensors"


@pytest.mark.slow
def test_a_real_run_compiles_on_request_learns_the_same_and_works_without_a_compiler(tmp_path, monkeypatch):
    """The block of candidates, whose hidden units are pooled in place, forward and backward."""
    plain = "plan.threads=2", "plan.workers=2", "plan.micro_batch_size=8"
    by_hand = *plain, "plan.compile=true"
    done = start(tmp_path, *by_hand, "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    assert "The compiled block is in use from step 2 on (set by hand)." in done.stderr
    assert any(row["event"] == "compiled" for row in Run(tmp_path / "run").rows(EVENTS))
    assert start(tmp_path, *plain, "--max-steps", "3", run="plain").returncode == 0
    weights = load_file(newest_weights(tmp_path / "run"))
    for name, expected in load_file(newest_weights(tmp_path / "plain")).items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "run")
    gain = run_in_child(  # whether it is faster here is for the measurement to find out
        "trm.planning.compile_trial:measure_gain",
        {"config": run.config.model_dump(mode="json"), "plan": run.plan.to_json()},
        environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "compiled")},
    )
    assert 0.1 < gain < 10
    nothing = tmp_path / "nothing"
    without = start(
        tmp_path, *by_hand, "plan.micro_batch_size=4", "--max-steps", "6",
        CXX=str(nothing), TRM_CACHE_DIR=str(tmp_path / "other"),
    )  # fmt: skip
    assert without.returncode == 0, without.stderr
    assert "Compiling failed; training continues without it." in without.stderr
    rows = [row for row in run.rows() if row["kind"] == "train"]
    assert rows[-1]["step"] == 6
