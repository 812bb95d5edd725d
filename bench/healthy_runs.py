"""Report what the watchdog finds in healthy runs: `python bench/healthy_runs.py [RECIPE ...]`.

Nothing is expected, on a machine that does nothing else. Each recipe is trained for some minutes by
`trm train`; a watchdog in this process reads the run directory every 5 seconds, as the command itself does.
A run that ends early, because it reaches its target, is followed by one with another seed. `KEY=VALUE` after
a recipe, in the same argument and separated by spaces, overrides a key, such as the data of a recipe that
does not generate its own.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trm.config import load_config
from trm.reports.diagnosis import Watchdog
from trm.reports.finding import Finding
from trm.reports.history import History
from trm.runs.directory import Run

TRAIN = [sys.executable, "-c", "from trm.cli import main; main()", "train"]
RECIPES = ("sudoku-6x6", "sudoku-9x9", "maze-10x10")
UPDATE_SECONDS = 5.0


@dataclass
class Watched:
    """What was found in one run, and what an update cost."""

    run: Run
    findings: list[Finding] = field(default_factory=list)
    slowest_update_ms: float = 0.0
    num_updates: int = 0
    history: History = field(default_factory=History)

    def watch(self, command: list[str], seconds: float) -> float:
        """Train until the run or the time ends; return the seconds that it took."""
        began = time.monotonic()
        devnull = subprocess.DEVNULL
        directory = self.run.path.parent
        with subprocess.Popen(command, cwd=directory, stdout=devnull, stderr=devnull) as process:
            try:
                self._follow(process, began + seconds)
            finally:
                process.terminate()
        return time.monotonic() - began

    def _follow(self, process: "subprocess.Popen[bytes]", end: float) -> None:
        follower = self.run.follow()
        watchdog: Watchdog | None = None
        while process.poll() is None and time.monotonic() < end:
            time.sleep(UPDATE_SECONDS)
            self.history.add(follower.read())
            if watchdog is None and self.history.recent:
                watchdog = Watchdog(self.run, self.run.config, own_pid=process.pid, since=0.0)
            if watchdog is not None:
                self._update(watchdog)

    def _update(self, watchdog: Watchdog) -> None:
        began = time.process_time()
        found = watchdog.update(self.history)
        self.slowest_update_ms = max(self.slowest_update_ms, 1000 * (time.process_time() - began))
        self.num_updates += 1
        for finding in found:
            sys.stdout.write(f"  {finding.kind} at step {finding.step}: {finding.evidence}\n")
        self.findings += found


def train_recipe(words: str, scratch: Path, seconds: float) -> list[Watched]:
    """Train a recipe for this long, with as many seeds as that takes."""
    recipe, *overrides = shlex.split(words)
    path = load_config(recipe, overrides).data.path
    data = [f"data.path={path.resolve()}"] if path.exists() else []  # otherwise it is built in `scratch`
    watched: list[Watched] = []
    remaining = seconds
    while remaining > UPDATE_SECONDS:
        seed = len(watched)
        each = Watched(Run(scratch / f"{recipe}-{seed}"))
        settings = [*overrides, *data, f"seed={seed}", "--run", str(each.run.path), "--json"]
        remaining -= each.watch([*TRAIN, recipe, *settings], remaining)
        watched.append(each)
        if each.history.step == 0:
            raise SystemExit(f"{recipe} did not train; `trm train {recipe}` says why")
    return watched


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, help=f"default: {' '.join(RECIPES)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="per recipe (default: 10)")
    parser.add_argument("--out", type=Path, help="file to write all findings to, as JSON")
    parser.add_argument(
        "--keep", type=Path, help="new directory for the runs, which remain, e.g. for bench/eta.py"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        if arguments.keep is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            scratch = arguments.keep.resolve()
            scratch.mkdir()
        for recipe in arguments.recipes:
            sys.stdout.write(f"{recipe}\n")
            watched = train_recipe(recipe, scratch, 60 * arguments.minutes)
            steps = sum(each.history.step for each in watched)
            found = [finding for each in watched for finding in each.findings]
            rows = sum(len(each.history.recent_resources) for each in watched)
            slowest = max(each.slowest_update_ms for each in watched)
            sys.stdout.write(
                f"  {len(found)} findings in {steps} steps of {len(watched)} runs; {rows} resource rows; "
                f"slowest update {slowest:.1f} ms\n"
            )
            sys.stdout.flush()
            results[recipe] = {"steps": steps, "findings": [asdict(finding) for finding in found]}
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2))
    sys.exit(any(result["findings"] for result in results.values()))


if __name__ == "__main__":
    main()
