"""How good the estimated time of a run is: `python bench/eta.py [--recipes A,B] [--hog C]`.

Every recipe is trained to its end by `trm train`. Afterwards its rows are given to the estimator one by one,
as the live view receives them, and each estimate is compared with the time that the run really took from
there. During the middle third of the recipe `--hog`, another program keeps one core busy. `KEY=VALUE` after
the recipe, separated by spaces, overrides a key; `--runs` evaluates runs that exist already.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from trm.reports.monitor import view_of
from trm.runs.directory import EVENTS, Run
from trm.runs.events import Stopped
from trm.runs.rows import kind_of

TRM = Path(sys.executable).with_name("trm")
WITHIN = 0.15
FROM_SHARE = 0.1  # of the run, before which an estimate is not judged
LAST_SHARE = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", default="sudoku-6x6 evaluation.target_accuracy=null", help="to train")
    parser.add_argument("--hog", help="a recipe to train beside a busy program")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="runs that exist already")
    arguments = parser.parse_args()
    for path in arguments.runs:
        show(str(path), Run(path))
    with tempfile.TemporaryDirectory(prefix="eta-") as directory:
        for number_, recipe in enumerate(filter(None, arguments.recipes.split(","))):
            show(recipe, train(recipe, Path(directory) / str(number_)))
        if arguments.hog:
            show(f"{arguments.hog}, hog", train(arguments.hog, Path(directory) / "hog", hog=True))


def train(recipe: str, root: Path, *, hog: bool = False) -> Run:
    root.mkdir()
    os.chdir(root)  # recipes name their data relative to it
    command = [TRM, "train", *shlex.split(recipe), "--run", "run", "--quiet"]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL))
        run = Run(root / "run")
        busy = None
        while process.poll() is None:
            time.sleep(1.0)
            share = _share_done(run) if hog else 0.0
            if hog and busy is None and 1 / 3 <= share < 2 / 3:
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(busy.kill)
            elif busy is not None and share >= 2 / 3:
                busy.kill()
        if process.returncode:
            raise SystemExit(f"{recipe} failed")
    return run


def _share_done(run: Run) -> float:
    if not (run.path / "recipe.yaml").exists() or (row := run.last_row()) is None:
        return 0.0
    return row["step"] / run.config.training.last_step


def show(name: str, run: Run) -> None:
    """Print the errors of the estimates from a tenth of the run on."""
    rows = [{"kind": kind_of(row), **row} for row in run.rows()]
    stopped = run.last_row(EVENTS, lambda row: row.get("event") == Stopped.name)
    first, end = rows[0]["time"], stopped["time"]
    view = view_of(run, run.config)
    of_run, of_rest, late = [], [], []
    for row in rows:
        view.eta.add([row])
        done = (row["time"] - first) / (end - first)
        left = end - row["time"]
        eta = view.eta.estimate(row["time"])
        if eta is None or not FROM_SHARE <= done < 1:
            continue
        error = eta.about_seconds - left
        of_run.append(error / (end - first))
        if done >= 1 - LAST_SHARE:
            late.append(error / (end - first))
        if done < 1 - FROM_SHARE:
            of_rest.append(error / left)
    within = sum(abs(error) <= WITHIN for error in of_rest)
    print(  # noqa: T201
        f"{name}: {end - first:.0f} s. Error as a share of the run {span(of_run)}, in its last quarter "
        f"{span(late)}; as a share of what was left {span(of_rest)}, {within} of {len(of_rest)} within 15 %",
        flush=True,
    )


def span(errors: list[float]) -> str:
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


if __name__ == "__main__":
    main()
