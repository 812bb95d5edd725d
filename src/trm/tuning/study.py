"""The search itself: Optuna proposes candidates and remembers them in a file of JSON lines.

Optuna is an optional dependency. Everything that a candidate needs to be continued is in the study: after an
interruption, an unfinished candidate is proposed again with the run that it has begun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from macbook_optimization.errors import LaptopError, RunError
from macbook_optimization.json_types import JsonObject
from trm.runs.rows import Row
from trm.tuning.space import LEARNING_RATE, Space, Values

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.jsonl"
CHECKPOINTS = 10  # parts of a candidate's time, after each of which it may be given up
STARTUP_TRIALS = 4  # that are never given up, to have something to compare with
LEAST_FOR_IMPORTANCE = 8  # complete candidates; with fewer, chance decides
WARMUP_CHECKPOINTS = 2  # in which no candidate is given up

State = Literal["complete", "given up", "not tried", "failed"]


def require_packages() -> None:
    """Raise `LaptopError` if what a search needs is not installed."""
    for name in ("optuna", "matplotlib"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise LaptopError(
                f"`trm tune` needs the Python package {name}, which is not installed.",
                hint="python -m pip install -c constraints/dev.txt -e '.[tune]'",
            ) from error


@dataclass(frozen=True, slots=True)
class TrialSummary:
    """A candidate that was trained, given up or refused."""

    number: int
    state: State
    values: Mapping[str, int | float]
    score: float | None
    run: str | None  # None if it was never trained
    step: int
    seconds: float  # of training
    wall_seconds: float  # with everything around it
    evaluation: Row | None  # the best one
    reason: str | None  # why it was not trained to the end


@dataclass
class Asked:
    """A candidate to train, and how its training goes."""

    trial: optuna.Trial
    values: dict[str, int | float]
    run: str
    is_start: bool
    best: float | None = None
    _reported: int = field(default=-1)

    def observe(self, value: float, share: float) -> bool:
        """Report the best score after this share of the time; return whether to give the candidate up.

        Checkpoints since the evaluation before this one get the best score of that time. Those before the
        first evaluation get none: with its score, they would make others look bad that are evaluated earlier.
        """
        before = self.best
        self.best = value if before is None else max(before, value)
        reached = min(CHECKPOINTS, int(share * CHECKPOINTS))
        if before is not None:
            for checkpoint in range(self._reported + 1, reached):
                self.trial.report(before, checkpoint)
        if reached > self._reported:
            self.trial.report(self.best, reached)
            self._reported = reached
        return not self.is_start and self.trial.should_prune()


class Study:
    """All candidates of one search."""

    def __init__(self, directory: Path, space: Space, start: Values, seed: int) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.start = dict(start)
        file = directory / STUDY_FILE
        _repair(file)
        with _named(file):
            storage = JournalStorage(JournalFileBackend(str(file)))
            self.study = optuna.create_study(
                storage=storage,
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, WARMUP_CHECKPOINTS),
            )
        # A sampler that is seeded alike would propose the same candidates again after each resumption.
        known = self.study.trials
        self.study.sampler = optuna.samplers.TPESampler(
            seed=(seed + len(known)) % 2**32, n_startup_trials=2 * STARTUP_TRIALS
        )
        if not known:
            self.study.enqueue_trial(self.start)
        self._propose_unfinished_again()

    def _propose_unfinished_again(self) -> None:
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            if trial.params:
                run = trial.user_attrs.get("run")
                wall = trial.user_attrs.get("wall_seconds", 0.0)
                self.study.enqueue_trial(trial.params, {"run": run, "wall_seconds": wall})

    @property
    def seconds_per_trial(self) -> float | None:
        """The time of each candidate, fixed when the search began."""
        value = self.study.user_attrs.get("seconds_per_trial")
        return None if value is None else float(value)

    @seconds_per_trial.setter
    def seconds_per_trial(self, seconds: float) -> None:
        self.study.set_user_attr("seconds_per_trial", seconds)

    def ask(self) -> Asked:
        """Return the next candidate: the recipe itself first."""
        trial = self.study.ask()
        low, high = self.space.learning_rates
        values: dict[str, int | float] = {
            LEARNING_RATE: trial.suggest_float(LEARNING_RATE, low, high, log=True),
            **{name: trial.suggest_categorical(name, each) for name, each in self.space.choices.items()},
        }
        run = trial.user_attrs.get("run") or f"trials/{len(self.trials()):03d}"
        trial.set_user_attr("run", run)
        return Asked(trial, values, run, is_start=values == self.start)

    def tell(self, asked: Asked, state: State, wall_seconds: float, facts: JsonObject) -> None:
        """Record how a candidate ended."""
        from optuna.trial import TrialState

        before = asked.trial.user_attrs.get("wall_seconds", 0.0)
        for name, value in {**facts, "state": state, "wall_seconds": before + wall_seconds}.items():
            asked.trial.set_user_attr(name, value)
        if state == "complete" and asked.best is not None:
            self.study.tell(asked.trial, asked.best)
        else:
            self.study.tell(asked.trial, state=TrialState.PRUNED)

    def keep_for_later(self, asked: Asked, wall_seconds: float) -> None:
        """Note the time that an interrupted candidate has taken; the next start continues it."""
        before = asked.trial.user_attrs.get("wall_seconds", 0.0)
        asked.trial.set_user_attr("wall_seconds", before + wall_seconds)

    def trials(self) -> list[TrialSummary]:
        """Return the candidates that have ended, in their order."""
        ended = [trial for trial in self.study.trials if "state" in trial.user_attrs]
        return [_summary(number, trial) for number, trial in enumerate(ended)]

    def wall_seconds(self) -> float:
        """Return the time that the search has taken so far, interrupted candidates included."""
        from optuna.trial import TrialState

        counted = [trial for trial in self.study.trials if trial.state != TrialState.FAIL]
        return sum(float(trial.user_attrs.get("wall_seconds", 0.0)) for trial in counted)

    def importances(self) -> dict[str, float]:
        """Return how much each key decides the score; nothing where too few candidates are known."""
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        scores = [trial.score for trial in self.trials() if trial.state == "complete"]
        if len(scores) < LEAST_FOR_IMPORTANCE or len(set(scores)) < 2:
            return {}
        return get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator())


def _summary(number: int, trial: optuna.trial.FrozenTrial) -> TrialSummary:
    facts: dict[str, Any] = trial.user_attrs
    is_tried = facts["state"] != "not tried"
    return TrialSummary(
        number=number,
        state=facts["state"],
        values=dict(trial.params),
        score=trial.value,
        run=facts["run"] if is_tried else None,
        step=facts.get("step", 0),
        seconds=facts.get("seconds", 0.0),
        wall_seconds=facts.get("wall_seconds", 0.0),
        evaluation=facts.get("evaluation"),
        reason=facts.get("reason"),
    )


def _repair(file: Path) -> None:
    """Remove what a killed process may leave: half a line at the end, and a lock that nobody holds.

    Only one process searches in a directory at a time, so the lock is not that of another one.
    """
    with suppress(FileNotFoundError):
        os.unlink(f"{file}.lock")
    if not file.exists():
        return
    content = file.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(file, len(complete))


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in the error of a library that cannot read it."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is not the study of a search, or it is damaged", hint="Use another --run directory."
        ) from error
