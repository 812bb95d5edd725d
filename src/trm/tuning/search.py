"""The search for a better recipe: candidates in turn, each trained for the same time, until time is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from macbook_optimization.durable_files import make_directory, replace_file
from macbook_optimization.errors import MemoryBudgetError, RunError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import read_input
from macbook_optimization.units import MIB
from trm.config import RunConfig, config_from_text, differences
from trm.display import Display
from trm.runs.directory import only_trainer
from trm.runs.metric import metric_label
from trm.runs.rows import Row
from trm.tasks.metrics import goodness, shown_value
from trm.tasks.registry import load_task
from trm.training.preparation import build_if_missing, with_model
from trm.tuning.facts import Facts
from trm.tuning.fit import why_it_does_not_fit
from trm.tuning.holdout import choosing_data
from trm.tuning.result import Result, result_of, write_result
from trm.tuning.space import described, search_space, start_values
from trm.tuning.study import Asked, State, Study, require_packages
from trm.tuning.trial import Candidate, Observe, Trained, best_evaluation, score, train_candidate

START_FILE = "start.yaml"
DATA = "data"
MAX_FAILURES = 3  # in a row: the cause is not the candidate
_ENOUGH = 0.9  # of a candidate's expected time must be left to begin one
_MAX_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of a search, and the number of candidates of equal time into which it is divided."""

    minutes: float
    trials: int

    @property
    def seconds(self) -> float:
        return 60 * self.minutes


def tune(config: RunConfig, directory: Path, budget: Budget, display: Display) -> Result:
    """Search, or continue a search in this directory; write the best recipe and a picture.

    Ctrl-C ends the search with what was found so far.
    """
    require_packages()
    with only_trainer(directory):
        search = _open(config, directory, budget, display)
        is_interrupted = False
        try:
            with _stopped_by_signals():
                search.run(budget.seconds)
        except KeyboardInterrupt:
            is_interrupted = True
        display.status("Writing the result")
        result = result_of(search.facts, search.study, is_interrupted=is_interrupted)
        write_result(result, search.facts, search.study)
        return result


@dataclass
class Search:
    """Candidates one after the other."""

    facts: Facts
    study: Study
    display: Display
    train: Callable[[Candidate, Observe, Callable[[Row], None]], Trained] = train_candidate

    def run(self, total_seconds: float) -> None:
        failures = 0
        while self._has_time(total_seconds):
            asked = self.study.ask()
            started = time.monotonic()
            try:
                trained = self._train(asked, total_seconds)
            except KeyboardInterrupt:
                self.study.keep_for_later(asked, time.monotonic() - started)
                raise
            self._record(asked, trained, time.monotonic() - started)
            failures = failures + 1 if trained.reason == "failed" else 0
            if failures >= MAX_FAILURES:
                raise RunError(
                    f"The last {failures} candidates failed, the last one with: {trained.problem}",
                    hint=trained.hint or "The files trials/*.log have their messages.",
                )

    def _has_time(self, total_seconds: float) -> bool:
        """Return whether another candidate fits; the recipe itself is always tried."""
        trials = self.study.trials()
        if not trials:
            return True
        complete = [each.wall_seconds for each in trials if each.state == "complete"]
        expected = max([self.facts.seconds, *complete])
        return total_seconds - self.study.wall_seconds() >= _ENOUGH * expected

    def _train(self, asked: Asked, total_seconds: float) -> Trained:
        facts = self.facts
        config = facts.candidate(asked.values)
        problem = why_it_does_not_fit(config, facts.spec)
        if problem is not None:
            if asked.is_start:
                raise MemoryBudgetError(
                    f"The recipe itself does not fit: {problem}.",
                    hint="Raise limits.memory_limit_mb, or start from a smaller recipe.",
                )
            return Trained("not tried", problem=problem)
        run = facts.directory / asked.run
        recipe = run.with_suffix(".yaml")
        _write(recipe, config.to_yaml())
        can_add_evaluations = config.training.plateau is None
        candidate = Candidate(recipe, run, facts.seconds, can_add_evaluations)
        progress = self._progress(total_seconds)
        trained = self.train(candidate, self._observer(asked), progress)
        if trained.reason == "failed" and asked.is_start:
            raise RunError(f"The recipe itself cannot be trained: {trained.problem}", hint=trained.hint)
        return trained

    def _observer(self, asked: Asked) -> Observe:
        def observe(row: Row) -> bool:
            value = score(row, self.facts.metric)
            seconds = row.get("seconds")
            if value is None or not isinstance(seconds, int | float):
                return False
            return asked.observe(value, seconds / self.facts.seconds)

        return observe

    def _progress(self, total_seconds: float) -> Callable[[Row], None]:
        trials = self.study.trials()
        before = self.study.wall_seconds()
        started = time.monotonic()
        metric = self.facts.metric
        known = [each.evaluation[metric] for each in trials if each.evaluation is not None]
        best = ""
        if known:
            value = shown_value(metric, max(known, key=partial(goodness, metric)))
            best = f"best {metric_label(metric)} {value}"

        def progress(row: Row) -> None:
            spent = before + time.monotonic() - started
            done = min(int(spent), int(total_seconds) - 1)
            facts = (f"candidate {len(trials)}", f"step {row.get('step', 0)}", best)
            self.display.update("tuning, in seconds", done, int(total_seconds), *facts)

        return progress

    def _record(self, asked: Asked, trained: Trained, wall_seconds: float) -> None:
        best = None
        state: State = "complete"
        reason = trained.problem
        if trained.reason == "not tried":
            state = "not tried"
        elif trained.reason == "failed":
            state = "failed"
        else:
            best = best_evaluation(self.facts.directory / asked.run, self.facts.metric)
            if trained.reason == "given up":
                state = "given up"
                reason = "Behind the median of the candidates before it at the same time"
            elif best is None:
                state = "failed"
                reason = "There was no evaluation in its time; lower evaluation.every_steps"
        if best is not None:
            asked.best = score(best, self.facts.metric)
        facts = {"step": trained.step, "seconds": trained.seconds, "evaluation": best, "reason": reason}
        self.study.tell(asked, state, wall_seconds, facts)
        self._report(asked, state, best, reason)

    def _report(self, asked: Asked, state: State, best: Row | None, reason: str | None) -> None:
        number = len(self.study.trials()) - 1
        found = "no evaluation" if best is None else shown_value(self.facts.metric, best[self.facts.metric])
        name = f"Candidate {number}" + (", the recipe itself" if asked.is_start else "")
        if state == "complete":
            end = f"{found} after {best['step'] if best else 0} steps"
        elif state == "given up":
            end = f"given up with {found}"
        else:
            end = f"{state}: {reason}"
        self.display.message(f"{name}: {end} ({described(asked.values)})")


def _open(config: RunConfig, directory: Path, budget: Budget, display: Display) -> Search:
    task = load_task(config.task)
    config = with_model(config, None, display)
    build_if_missing(config, task, display)
    try:
        make_directory(directory)
    except OSError as error:
        raise RunError(f"Cannot create {directory}: {reason_of(error)}", hint=hint_for(error)) from error
    _check_start(config, directory)
    data = choosing_data(config.data.path, directory / DATA, config.seed, display)
    display.status("Opening the study")
    study = Study(directory, search_space(config), start_values(config), config.seed)
    seconds = study.seconds_per_trial
    if seconds is None:
        seconds = study.seconds_per_trial = budget.seconds / budget.trials
    display.message(f"Each candidate is trained for {seconds:.0f} s and evaluated on {data.description}.")
    facts = Facts(config, directory, data, task.complete(data.spec), task.primary_metric, seconds)
    return Search(facts, study, display)


def _check_start(config: RunConfig, directory: Path) -> None:
    """Keep the recipe that the search starts from; raise `RunError` if another one began here."""
    file = directory / START_FILE
    if not file.exists():
        if any(each.suffix != ".lock" for each in directory.iterdir()):
            raise RunError(f"{directory} is not empty and not a search", hint="Use another --run directory.")
        _write(file, config.to_yaml())
        return
    earlier = config_from_text(read_input(file, _MAX_BYTES).decode(), str(file))
    changed = differences(config.model_dump(mode="json"), earlier.model_dump(mode="json"))
    if changed:
        raise RunError(
            f"{directory} holds a search that started from another recipe:\n  " + "\n  ".join(changed),
            hint="Use another --run directory.",
        )


def _write(file: Path, text: str) -> None:
    try:
        make_directory(file.parent)
        replace_file(file, text.encode())
    except OSError as error:
        raise RunError(f"Cannot write {file}: {reason_of(error)}", hint=hint_for(error)) from error


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the search as Ctrl-C does.

    SIGINT is included because a script's background jobs inherit it as ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
