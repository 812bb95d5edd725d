"""Measure accuracy at equal steps: `python bench/accuracy_at_steps.py RECIPE KEYS [--variant KEYS ...]`.

Runs `trm train` with the recipe and with variants of it, for several seeds, and prints one row of a table per
variant: the primary metric after some steps and after the last one, and the minutes of CPU time, of every
seed. Nothing is chosen by the metric, neither a checkpoint nor a step. CPU time covers the whole command, and
other programs disturb it less than wall time. KEYS are overrides separated by semicolons.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from trm.config import load_config
from trm.runs.directory import Run
from trm.runs.rows import Row, kind_of
from trm.tasks.registry import load_task

TRAIN = [sys.executable, "-c", "from trm.cli import main; main()", "train"]


@dataclass(frozen=True)
class Trained:
    evaluations: list[Row]
    cpu_seconds: float


def train(recipe: str, overrides: list[str], directory: Path) -> Trained:
    command = [*TRAIN, recipe, *overrides, "--run", str(directory), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Trained([row for row in Run(directory).rows() if kind_of(row) == "eval"], cpu_seconds)


def described(name: str, runs: list[Trained], metric: str, steps: list[int]) -> str:
    """Return a row of a Markdown table."""
    columns = []
    for step in steps:
        found = [row for run in runs for row in run.evaluations if row["step"] == step]
        columns.append(", ".join(f"{100 * row[metric]:.1f}" for row in found))
    columns.append(", ".join(f"{run.cpu_seconds / 60:.1f}" for run in runs))
    return f"| {name} | " + " | ".join(columns) + " |"


def keys_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", help="recipe file, or name of a shipped recipe")
    parser.add_argument("keys", nargs="?", default="", help="overrides of all variants")
    parser.add_argument("--variant", action="append", default=[], help="overrides of one variant")
    parser.add_argument("--at", type=int, action="append", default=[], help="a step to show as well")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds (default: 2)")
    parser.add_argument("--skip-baseline", action="store_true", help="train the variants only")
    parser.add_argument("--out", type=Path, help="file to append every evaluation to, as JSON Lines")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    variants = {} if arguments.skip_baseline else {"as it is": []}
    variants |= {f"`{text}`": keys_of(text) for text in arguments.variant}
    fixed = keys_of(arguments.keys)
    config = load_config(arguments.recipe, fixed)
    metric = load_task(config.task).primary_metric
    steps = [*arguments.at, config.training.last_step]
    runs: dict[str, list[Trained]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(arguments.seeds):
            for number, (name, overrides) in enumerate(variants.items()):
                directory = Path(scratch) / f"run-{number}-{seed}"
                trained = train(arguments.recipe, [*fixed, f"seed={seed}", *overrides], directory)
                runs[name].append(trained)
                sys.stderr.write(f"seed {seed}: {described(name, [trained], metric, steps)}\n")
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps({"variant": name, "seed": seed, **asdict(trained)}) + "\n")
    titles = ["keys", *(f"{metric} at {step}, %" for step in steps), "CPU minutes"]
    sys.stdout.write(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n")
    sys.stdout.write("\n".join(described(name, each, metric, steps) for name, each in runs.items()) + "\n")


if __name__ == "__main__":
    main()
