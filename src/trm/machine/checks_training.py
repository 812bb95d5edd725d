"""Checks that train: every backend and device against the CPU, their speed, memory, and a kill.

They run the command line in processes of its own, as a user does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from macbook_optimization.children import run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import RunError
from macbook_optimization.json_types import JsonObject
from trm.config import load_config
from trm.machine.selfcheck import TIME_IS_UP, Check, Finding, Surroundings, failed, passed, skipped
from trm.planning.device_choice import (
    AUTO,
    CHECK_SECONDS,
    REFERENCE,
    Place,
    Verdict,
    candidates,
    check,
    execution_at,
    installed_backends,
    rate_of,
)
from trm.planning.measurer import PROBE_SECONDS
from trm.planning.planner import Planner
from trm.runs.directory import EVENTS, Run
from trm.runs.events import Restarted, Resumed, Stopped
from trm.tasks.registry import load_task

RECIPE = "sudoku-6x6"
BUILD = {"size": 6, "blanks": 22, "train": 300, "test": 32}
NUM_STEPS = 30
LEARNING_STEPS = 100  # at least two rows of losses: one is written after 50 steps, and one at the end
KILLED_STEPS = 100
MAX_MEMORY_ERROR = 0.15
PATIENCE_SECONDS = 240.0  # of one training
_FAILED_THE_CHECK = "it failed the comparison with the CPU"
STOP_SECONDS = 30.0  # for a training to save and end


def training_checks() -> list[Check]:
    """List the checks of every place that exists here, and name what does not."""
    broken: list[str] = []
    places = candidates(Place(AUTO, AUTO), broken.append)
    checks = [Check("backends", partial(_failed, text)) for text in broken]
    for place in places:
        examined = _Examined(place)
        if place != REFERENCE:
            checks.append(Check(f"{place} against the CPU", partial(check_parity, examined)))
            checks.append(Check(f"memory of {place}", partial(check_device_memory, examined)))
        checks.append(Check(f"speed of {place}", partial(check_speed, examined)))
        checks.append(Check(f"training with {place}", partial(check_training, examined)))
    checks += [
        Check("memory prediction", check_memory_prediction),
        Check("kill and resume", check_kill_and_resume),
    ]
    if Place("pytorch", "mps") not in places:
        missing = "PyTorch has no GPU of a Mac here"
        checks.append(Check("pytorch on mps against the CPU", lambda here: skipped(missing)))
    if "mlx" not in installed_backends():
        checks.append(Check("mlx against the CPU", lambda here: skipped("mlx is not installed")))
    return checks


def _failed(reason: str, here: Surroundings) -> Finding:
    return failed(reason)


class _Examined:
    """A place and the verdict about it, once for all checks: it may take minutes to fail."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.known = Verdict(*REFERENCE) if place == REFERENCE else None

    def verdict(self, here: Surroundings) -> Verdict:
        if self.known is None:
            self.known = check(planner_of(here), self.place, here.at_most(CHECK_SECONDS))
        return self.known


def check_parity(examined: _Examined, here: Surroundings) -> Finding:
    found = examined.verdict(here)
    if found.problem is None:
        return passed()
    if found.timed_out and here.seconds_left <= 0:
        return skipped(TIME_IS_UP)
    return failed(f"{found.tensor or 'a step'}: {found.problem}")


def check_device_memory(examined: _Examined, here: Surroundings) -> Finding:
    """Record what the system and the driver count after a step: whether one contains the other is open."""
    if examined.verdict(here).problem is not None:
        return skipped(_FAILED_THE_CHECK)
    planner = planner_of(here)
    facts: JsonObject = run_in_child(
        "trm.planning.device_check:occupied",
        {
            "config": planner.config.model_dump(mode="json"),
            "execution": asdict(execution_at(planner, examined.place)),
        },
        environment=environment(_threads(here)),
        timeout_seconds=here.at_most(PATIENCE_SECONDS),
    )
    return passed(**facts)


def check_speed(examined: _Examined, here: Surroundings) -> Finding:
    if examined.verdict(here).problem is not None:
        return skipped(_FAILED_THE_CHECK)
    rate = rate_of(planner_of(here), examined.place, here.at_most(PROBE_SECONDS))
    if here.seconds_left <= 0:  # a measurement that was cut short has seen the smallest sizes only
        return skipped(TIME_IS_UP)
    if rate is None:
        return failed("no step could be measured")
    return passed(samples_per_second=round(rate, 2), recipe=RECIPE)


def planner_of(here: Surroundings) -> Planner:
    """Return the planner of a recipe whose dataset is built once for all checks."""
    config = load_config(RECIPE, [f"data.path={_dataset(here)}", f"plan.threads={_threads(here)}"])
    task = load_task(config.task)
    return Planner(config, task.complete(task.spec(BUILD)), here.hardware, here.display)


def _dataset(here: Surroundings) -> Path:
    path = here.directory / "puzzles"
    if not path.exists():
        load_task("sudoku").build(BUILD, path, lambda what, done, total: None)
    return path


def _threads(here: Surroundings) -> int:
    return here.hardware.cpu.compute_threads


def _command(here: Surroundings, name: str, overrides: Sequence[str]) -> list[str]:
    fixed = (f"data.path={_dataset(here)}", "evaluation.target_accuracy=null", "plan.report=false")
    program = "from trm.cli import main; main()"
    run = str(here.directory / name)
    return [sys.executable, "-P", "-c", program, "train", RECIPE, *fixed, *overrides, "--run", run]


@contextmanager
def _started(here: Surroundings, name: str, overrides: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a training; it ends with the check, whatever happens."""
    process = subprocess.Popen(
        _command(here, name, overrides),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Stop a training; a trainer that hangs in a driver does not stop by itself."""
    trainer = _trainer_of(process)
    process.terminate()
    try:
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        if trainer is not None:
            with suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGKILL)
        process.kill()
        process.communicate()


def _train(here: Surroundings, name: str, overrides: Sequence[str]) -> Run:
    with _started(here, name, overrides) as process:
        _wait(process, here)
    return Run(here.directory / name)


def _wait(process: subprocess.Popen[str], here: Surroundings) -> None:
    """Wait for the end of a training; raise `RunError` with its last words if it fails."""
    try:
        _, said = process.communicate(timeout=here.at_most(PATIENCE_SECONDS))
    except subprocess.TimeoutExpired as late:
        raise RunError("A training took too long.") from late
    if process.returncode:
        last = " ".join(said.strip().splitlines()[-2:])
        raise RunError(f"A training ended with exit code {process.returncode}: {last}")


def check_training(examined: _Examined, here: Surroundings) -> Finding:
    place = examined.place
    if examined.verdict(here).problem is not None:
        return skipped(_FAILED_THE_CHECK)
    overrides = (
        f"plan.backend={place.backend}",
        f"plan.device={place.device}",
        f"training.max_steps={LEARNING_STEPS}",
    )
    run = _train(here, f"short-{place.backend}-{place.device}", overrides)
    losses = [row["loss"] for row in run.rows() if row["kind"] == "train"]
    used = None if run.plan is None else run.plan.execution
    facts: JsonObject = {"losses": [round(loss, 4) for loss in losses], "steps": LEARNING_STEPS}
    if used is None or (used.backend, used.device) != place:
        return failed(f"the run was not computed with {place}", **facts)
    problem = problem_of(losses)
    return passed(**facts) if problem is None else failed(problem, **facts)


def problem_of(losses: Sequence[float]) -> str | None:
    """Return why these losses do not show that something was learned, or None if they do."""
    half = len(losses) // 2
    if not half:
        return f"there are too few losses to compare: {len(losses)}"
    return "nothing was learned" if median(losses[-half:]) >= median(losses[:half]) else None


def check_memory_prediction(here: Surroundings) -> Finding:
    """Compare the predicted peak of a short run with the measured one."""
    overrides = (f"training.max_steps={NUM_STEPS}", "plan.micro_batch_size=4", "limits.memory_limit_mb=4000")
    run = _train(here, "memory", overrides)
    predicted = None if run.plan is None else run.plan.predicted_peak_bytes
    peaks = [row["peak_bytes"] for row in run.rows(EVENTS) if row["event"] == Stopped.name]
    if predicted is None or not peaks:
        return failed("there is no prediction or no measurement")
    error = predicted / peaks[-1] - 1
    facts: JsonObject = {"predicted_bytes": predicted, "measured_bytes": peaks[-1], "error": round(error, 3)}
    if abs(error) > MAX_MEMORY_ERROR:
        return failed(f"the prediction is {error:+.0%} off", **facts)
    return passed(**facts)


def check_kill_and_resume(here: Surroundings) -> Finding:
    """Kill a trainer after its first checkpoint; it has to be restarted and to complete the run."""
    overrides = (
        f"training.max_steps={KILLED_STEPS}",
        "checkpoints.every_steps=10",
        f"evaluation.every_steps={KILLED_STEPS // 2}",
    )
    run = Run(here.directory / "killed")
    with _started(here, "killed", overrides) as process:
        killed_at = _kill_after_checkpoint(process, run, here)
        _wait(process, here)
    names = [row["event"] for row in run.rows(EVENTS)]
    stops = [row for row in run.rows(EVENTS) if row["event"] == Stopped.name]
    facts: JsonObject = {"killed_after_step": killed_at, "events": names}
    if killed_at is None:
        return failed("no trainer could be killed", **facts)
    if not {Restarted.name, Resumed.name} <= set(names):
        return failed("the trainer was not restarted from a checkpoint", **facts)
    if not stops or stops[-1]["step"] != KILLED_STEPS:
        return failed("the run was not completed", **facts)
    return passed(**facts)


def _kill_after_checkpoint(process: subprocess.Popen[str], run: Run, here: Surroundings) -> int | None:
    end = time.monotonic() + here.at_most(PATIENCE_SECONDS)
    while time.monotonic() < end and process.poll() is None:
        step = run.checkpoints().newest_step() if run.path.exists() else None
        trainer = _trainer_of(process)
        if step is not None and trainer is not None:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(trainer, signal.SIGKILL)
                return step
        time.sleep(0.05)
    return None


def _trainer_of(process: subprocess.Popen[str]) -> int | None:
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            if "train_in_child" in " ".join(child.cmdline()):
                return child.pid
    return None
