"""Train one candidate as a run of its own: `trm train` in a child process, followed through the run's files.

A candidate is stopped as Ctrl-C stops a run, so its checkpoint is complete and its training can be resumed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.errors import RunError
from macbook_optimization.json_types import JsonObject
from trm.runs.directory import EVENTS, Run, is_run, only_trainer
from trm.runs.events import Stopped
from trm.runs.reading import Follower
from trm.runs.rows import Row
from trm.tasks.metrics import goodness

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0  # for a run to save after a request to stop
_COMMAND = (sys.executable, "-P", "-c", "from trm.cli import main; main()", "train")
_LOG_BYTES = 20_000  # of its end
_TIE_WEIGHT = 1e-3  # of the accuracy per token, which distinguishes candidates whose answers are all wrong

Observe = Callable[[Row], bool]  # receives an evaluation; returns whether to give the candidate up


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate to train, and for how long."""

    recipe: Path
    run: Path
    seconds: float  # of training, over all starts
    evaluate_at_end: bool = True  # False where evaluations decide the learning rate, and cannot be added


@dataclass(frozen=True, slots=True)
class Trained:
    """The end of the training of a candidate."""

    reason: str  # "time" or "steps" (it is over), "given up", "failed" or "not tried"
    step: int = 0
    seconds: float = 0.0
    problem: str | None = None  # why it failed
    hint: str | None = None


def train_candidate(candidate: Candidate, observe: Observe, progress: Callable[[Row], None]) -> Trained:
    """Train until the time is over, then evaluate the weights of the last step.

    Raises `RunError` if the run is still being trained, as it is for a while if a search was killed.
    """
    with only_trainer(candidate.run):
        pass
    left = candidate.seconds - seconds_trained(candidate.run)
    if left > 0:
        trained = _train(candidate, ["--max-minutes", f"{left / 60:.6f}"], observe, progress)
        if trained.reason != "time":
            return trained
    step = Run(candidate.run).checkpoints().newest_step() or 0
    seconds = seconds_trained(candidate.run)
    last = Run(candidate.run).last_row(accept=lambda row: row.get("kind") == "eval")
    is_evaluated = last is not None and last.get("step") == step
    if step and not is_evaluated and candidate.evaluate_at_end:
        now = (f"evaluation.every_steps={step}", "--max-steps", str(step))
        _train(candidate, now, observe, progress)  # if it fails, the evaluations before it count
    return Trained("time", step, seconds)


def seconds_trained(path: Path) -> float:
    """Return the training time of a run so far, which may not have begun."""
    if not is_run(path):
        return 0.0
    stopped = Run(path).last_row(EVENTS, lambda event: event.get("event") == Stopped.name)
    value = (stopped or {}).get("seconds")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def score(row: Row, metric: str) -> float | None:
    """Return by what candidates are compared: the primary metric and, between equal ones, that per token."""
    value = row.get(metric)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    per_token = row.get("token_accuracy")
    tie = per_token if isinstance(per_token, int | float) and math.isfinite(per_token) else 0.0
    return goodness(metric, float(value)) + _TIE_WEIGHT * float(tie)


def best_evaluation(path: Path, metric: str) -> Row | None:
    """Return the evaluation with the best score of a run."""
    scored = [(score(row, metric), row) for row in Run(path).rows() if row.get("kind") == "eval"]
    known = [(value, row) for value, row in scored if value is not None]
    return max(known, key=lambda each: each[0])[1] if known else None


def _train(
    candidate: Candidate, arguments: Sequence[str], observe: Observe, progress: Callable[[Row], None]
) -> Trained:
    log = candidate.run.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*_COMMAND, str(candidate.recipe), "--run", str(candidate.run)]
    follower = Run(candidate.run).follow()
    follower.read()  # what an earlier start has recorded
    with log.open("ab") as errors:
        child = subprocess.Popen(
            [*command, *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # Ctrl-C reaches this process only, which stops the child in its own time
            text=True,
        )
        try:
            is_given_up = _follow(child, follower, observe, progress)
            output, _ = child.communicate()
        except BaseException:
            _stop(child)
            raise
    if is_given_up:
        return Trained("given up", *_reached(candidate.run))
    if child.returncode:
        return _failed(child.returncode, log)
    return _outcome(output)


def _follow(
    child: subprocess.Popen[str], follower: Follower, observe: Observe, progress: Callable[[Row], None]
) -> bool:
    """Pass on what the run records until it ends. Return whether the candidate was given up."""
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        for row in follower.read():
            progress(row)
            if row["kind"] == "eval" and observe(row):
                _stop(child)
                return True
    for row in follower.read():
        if row["kind"] == "eval":
            observe(row)
    return False


def _stop(child: subprocess.Popen[str]) -> None:
    """Request the run to save and end, and wait for that."""
    if child.poll() is not None:
        return
    os.kill(child.pid, signal.SIGINT)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # its trainer notices that, and saves
        child.wait()


def _reached(path: Path) -> tuple[int, float]:
    return Run(path).checkpoints().newest_step() or 0, seconds_trained(path)


def _outcome(output: str) -> Trained:
    try:
        facts: JsonObject = json.loads(output)
        reason = "time" if facts["reason"] == "limit" else "steps"
        return Trained(reason, int(facts["step"]), float(facts["seconds"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"`trm train` of a candidate reported {output[:200]!r}", hint="This is a bug."
        ) from error


def _failed(code: int, log: Path) -> Trained:
    """Read the reason from the messages of the command."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    problem = next(
        (line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None
    )
    hint = next((line.removeprefix("hint: ") for line in reversed(lines) if line.startswith("hint: ")), None)
    return Trained("failed", problem=problem or f"`trm train` ended with code {code}; see {log}", hint=hint)
