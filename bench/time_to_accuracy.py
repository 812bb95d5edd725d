"""Measure the training time to an accuracy: `python bench/time_to_accuracy.py RECIPE [--variant KEYS ...]`.

Runs `trm train` with the recipe and with variants of it, for several seeds. Seeds are the outer loop, so a
disturbance affects all variants. Times are those of training, including evaluations and checkpoints. The
puzzles are built with --data-seed, so no recipe was chosen on them.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trm.config import load_config
from trm.runs.directory import Run
from trm.runs.rows import Row, kind_of

TRAIN = [sys.executable, "-c", "from trm.cli import main; main()", "train"]
AS_SHIPPED = "as shipped"


def train(recipe: str, overrides: list[str], directory: Path, minutes: float) -> list[Row]:
    """Train, and return the rows of the evaluations."""
    command = [*TRAIN, recipe, *overrides, "--run", str(directory), "--max-minutes", str(minutes), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: {done.stderr}")
    return [row for row in Run(directory).rows() if kind_of(row) == "eval"]


def describe(name: str, runs: list[list[Row]], target: float) -> str:
    reached = [next((row for row in rows if row["exact_accuracy"] >= target), None) for rows in runs]
    median = statistics.median(row["seconds"] if row else math.inf for row in reached)
    when = "not reached" if math.isinf(median) else f"after {median:.0f} s"
    each = ", ".join(f"{row['seconds']:.0f} s (step {row['step']})" if row else "never" for row in reached)
    best = ", ".join(f"{max((row['exact_accuracy'] for row in rows), default=0):.1%}" for rows in runs)
    return f"{name}\n  {target:.0%} {when}: {each}; best {best}\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", help="recipe file, or name of a shipped recipe")
    parser.add_argument(
        "--variant", action="append", default=[], help="overrides of one variant, separated by semicolons"
    )
    parser.add_argument("--target", type=float, default=0.95, help="exact accuracy (default: 0.95)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--minutes", type=float, default=10.0, help="limit per run (default: 10)")
    parser.add_argument("--data-seed", type=int, default=1, help="seed of the puzzles (default: 1)")
    parser.add_argument("--out", type=Path, help="file to write all evaluations to, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    variants: dict[str, list[str]] = {AS_SHIPPED: []}
    for text in arguments.variant:
        variants[text] = [part.strip() for part in text.split(";")]
    build: dict[str, Any] = {**(load_config(arguments.recipe).data.build or {}), "seed": arguments.data_seed}
    runs: dict[str, list[list[Row]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as scratch:
        fixed = [
            f"data.path={scratch}/data",
            f"data.build={json.dumps(build)}",
            f"evaluation.target_accuracy={arguments.target}",
        ]
        for seed in range(arguments.seeds):
            for number, (name, overrides) in enumerate(variants.items()):
                sys.stderr.write(f"\rseed {seed}, {name}" + " " * 20)
                settings = [*fixed, f"seed={seed}", *overrides]
                directory = Path(scratch) / f"run-{number}-{seed}"
                runs[name].append(train(arguments.recipe, settings, directory, arguments.minutes))
                sys.stdout.write(f"\n{describe(name, runs[name], arguments.target)}")
                sys.stdout.flush()
    if arguments.out:
        arguments.out.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
