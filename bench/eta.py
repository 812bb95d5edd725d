"""How good the estimated time of a run is: `python bench/eta.py [--recipes A,B] [--hog C] [--runs RUN ...]`.

Every recipe is trained to its end by `trm train`. Afterwards its rows and events are given to the estimator
one by one, as the live view receives them, and each estimate is compared with the time that the run really
took from there. During the middle third of the steps of the recipe `--hog`, another program keeps one core
busy; estimates before and during it cannot foresee that it comes and goes, so those from a tenth of the run
after its end decide. `KEY=VALUE` after the recipe, separated by spaces, overrides a key; `--runs` evaluates
runs that exist already, from their last start.

A run passes if every estimate from a tenth of it on is within 15 % of the time that was left, or within 2 s
of it, as rows come once per second. The exit code is 0 if at least one run was judged and all of those
passed. A run that was interrupted or has not ended is not judged: how long it would have taken is not known.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from trm.reports.eta import EtaEstimator
from trm.reports.monitor import view_of
from trm.runs.directory import EVENTS, Run, is_run
from trm.runs.events import STARTS
from trm.runs.rows import Row, kind_of, number
from trm.runs.state import read_last

TRM = Path(sys.executable).with_name("trm")
DEFAULT_RECIPE = "sudoku-6x6 evaluation.target_accuracy=null"
WITHIN = 0.15
WITHIN_SECONDS = 2.0
FROM_SHARE = 0.1  # of the run, before which an estimate is not judged


class Estimate(NamedTuple):
    time: float  # since the run or its last start began, in seconds
    left: float  # seconds that were really left
    error: float  # the estimate minus those


class Outcome(NamedTuple):
    seconds: float  # that the run took
    began: float  # seconds since the epoch
    estimates: list[Estimate]

    def between(self, begin: float, end: float) -> list[Estimate]:
        return [each for each in self.estimates if begin <= each.time < end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", help=f"to train (default: {DEFAULT_RECIPE}, if nothing else is given)")
    parser.add_argument("--hog", help="a recipe to train beside a busy program")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="runs that exist already")
    arguments = parser.parse_args()
    recipes = arguments.recipes
    if recipes is None:
        recipes = "" if arguments.runs or arguments.hog else DEFAULT_RECIPE
    results = [show(str(path), Run(path)) for path in arguments.runs]
    with tempfile.TemporaryDirectory(prefix="eta-") as directory:
        for place, recipe in enumerate(filter(None, recipes.split(","))):
            run, _ = train(recipe, Path(directory) / str(place))
            results.append(show(recipe, run))
        if arguments.hog:
            run, busy = train(arguments.hog, Path(directory) / "hog", hog=True)
            results.append(show(f"{arguments.hog}, hog", run, busy))
    judged = [passed for passed in results if passed is not None]
    say(f"{sum(judged)} of {len(judged)} judged runs passed, {len(results) - len(judged)} were not judged")
    sys.exit(not judged or not all(judged))


def train(recipe: str, root: Path, *, hog: bool = False) -> tuple[Run, tuple[float, float] | None]:
    """Train a recipe to its end; return the run, and when the other program began and ended."""
    root.mkdir()
    os.chdir(root)  # recipes name their data relative to it
    command = [TRM, "train", *shlex.split(recipe), "--run", "run", "--quiet"]
    began = ended = None
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL))
        run = Run(root / "run")
        while process.poll() is None:
            time.sleep(1.0)
            share = _share_done(run) if hog else 0.0
            if began is None and 1 / 3 <= share < 2 / 3:
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(busy.kill)
                began = time.time()
            elif began is not None and ended is None and share >= 2 / 3:
                busy.kill()
                ended = time.time()
        if process.returncode:
            raise SystemExit(f"{recipe} failed")
    return run, None if began is None else (began, ended or time.time())


def _share_done(run: Run) -> float:
    if not (run.path / "recipe.yaml").exists() or (row := run.last_row()) is None:
        return 0.0
    return row["step"] / run.config.training.last_step


def show(name: str, run: Run, busy: tuple[float, float] | None = None) -> bool | None:
    """Print the errors of the estimates; return whether the run passed, or None if it cannot be judged.

    `busy` is when another program began and ended.
    """
    if (problem := why_not_judged(run)) is not None:
        say(f"{name}: not judged, {problem}")
        return None
    outcome = replay(run)
    say(f"{name}: {outcome.seconds:.0f} s")
    margin = FROM_SHARE * outcome.seconds
    if busy is None:
        decisive = outcome.between(margin, outcome.seconds)
        show_errors("from 10 % of the run on", decisive, outcome)
    else:
        began, ended = (moment - outcome.began for moment in busy)
        shares = [f"{moment / outcome.seconds:.0%}" for moment in (began, ended)]
        say(f"  another program was busy from {shares[0]} to {shares[1]} of the run")
        during = outcome.between(began + margin, ended)
        show_errors("from 10 % of the run after it began until it ended, for information", during, outcome)
        decisive = outcome.between(ended + margin, outcome.seconds)
        show_errors("from 10 % of the run after it ended", decisive, outcome)
    num_right = sum(abs(each.error) <= max(WITHIN * each.left, WITHIN_SECONDS) for each in decisive)
    passed = 0 < num_right == len(decisive)
    verdict = "passed" if passed else "FAILED"
    say(
        f"  {verdict}: {num_right} of {len(decisive)} estimates are within {WITHIN:.0%} of the time left or "
        f"{WITHIN_SECONDS:g} s"
    )
    return passed


def why_not_judged(run: Run) -> str | None:
    if not is_run(run.path):
        return "it is not a run"
    stop = read_last(run).clean_stop
    if stop is None:
        return "it has not ended"
    if stop.get("reason") == "interrupted":
        return f"it was interrupted at step {stop['step']}"
    return None


def replay(run: Run) -> Outcome:
    """Estimate at each row of the last start what was left then."""
    rows = [row for row in (*run.rows(), *run.rows(EVENTS)) if number(row.get("time")) > 0]
    rows.sort(key=lambda row: row["time"])
    starts = [row["time"] for row in rows if row.get("event") in STARTS]
    began = starts[-1] if starts else rows[0]["time"]
    end = read_last(run).stop["time"]
    estimator = estimator_of(run, rows)
    estimates = []
    for row in rows:
        kind = kind_of(row)
        estimator.add([{**row, "kind": kind}])
        now = row["time"]
        eta = estimator.estimate(now)
        if eta is not None and kind != "event" and began <= now < end:
            left = end - now
            estimates.append(Estimate(now - began, left, eta.about_seconds - left))
    return Outcome(end - began, began, estimates)


def estimator_of(run: Run, rows: Sequence[Row]) -> EtaEstimator:
    """Return the estimator of the live view. The dataset of a copied run may be missing; its rows are not."""
    view = view_of(run, run.config)
    evaluated = (row["examples"] for row in rows if kind_of(row) == "eval")
    num_examples = next(evaluated, None) if view.num_examples is None else view.num_examples
    return EtaEstimator(view.config, view.metric, num_examples)


def show_errors(when: str, estimates: Sequence[Estimate], outcome: Outcome) -> None:
    """Print the worst errors. Shortly before the end, half a second is many percent of what is left."""
    say(f"  {when}: {len(estimates)} estimates")
    early = [each for each in estimates if each.time < (1 - FROM_SHARE) * outcome.seconds]
    show_worst("the time left", [(each.error / each.left, each) for each in estimates], outcome)
    show_worst("the time left, until 90 %", [(each.error / each.left, each) for each in early], outcome)
    show_worst("the whole run", [(each.error / outcome.seconds, each) for each in estimates], outcome)


def show_worst(what: str, errors: Sequence[tuple[float, Estimate]], outcome: Outcome) -> None:
    if not errors:
        return
    share, worst = max(errors, key=lambda error: abs(error[0]))
    num_within = sum(abs(error) <= WITHIN for error, _ in errors)
    say(
        f"    relative to {what}: worst {share:+.1%} ({worst.error:+.1f} s, at "
        f"{worst.time / outcome.seconds:.0%} of the run), {num_within} of {len(errors)} within {WITHIN:.0%}"
    )


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
