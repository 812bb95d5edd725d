"""How long training takes to an accuracy: `python bench/time_to_accuracy.py RECIPE [--variant KEYS ...]`.

Real `trm train` runs of the recipe and of variants of it, for several seeds; seeds are outermost, so that a
noisy machine is noisy for all. Seconds are of training, with the evaluations and saves that a user has too.
The puzzles are built with --data-seed, so that no recipe was chosen on them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trm.config import load_config
from trm.runs import Run

TRAIN = [sys.executable, "-c", "from trm.cli import main; main()", "train"]


def train(recipe: str, overrides: list[str], directory: Path, minutes: float) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    command = [*TRAIN, recipe, *overrides, "--run", str(directory), "--max-minutes", str(minutes), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: {done.stderr}")
    return [row for row in Run(directory).rows() if "exact_accuracy" in row]


def describe(name: str, runs: list[list[dict[str, Any]]], target: float) -> str:
    reached = [next((row for row in rows if row["exact_accuracy"] >= target), None) for rows in runs]
    best = [max(row["exact_accuracy"] for row in rows) for rows in runs]
    seconds = [row["seconds"] if row else float("inf") for row in reached]
    each = ", ".join(f"{row['seconds']:.0f} s (step {row['step']})" if row else "never" for row in reached)
    return (
        f"{name}\n  {target:.0%} after {statistics.median(seconds):.0f} s: {each}; "
        f"best {', '.join(f'{accuracy:.1%}' for accuracy in best)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--variant", action="append", default=[], help="overrides, separated by semicolons")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0, help="at most, for each run")
    parser.add_argument("--data-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write all evaluations as JSON")
    arguments = parser.parse_args()
    variants = {
        "as shipped": [],
        **{text: [part.strip() for part in text.split(";")] for text in arguments.variant},
    }
    build = {**(load_config(arguments.recipe).data.build or {}), "seed": arguments.data_seed}
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as scratch:
        fixed = [f"data.path={scratch}/data", f"data.build={json.dumps(build)}"]
        for seed in range(arguments.seeds):
            for number, (name, overrides) in enumerate(variants.items()):
                sys.stderr.write(f"\rseed {seed}, {name}" + " " * 20)
                settings = [
                    *fixed,
                    f"evaluation.target_accuracy={arguments.target}",
                    f"seed={seed}",
                    *overrides,
                ]
                directory = Path(scratch) / f"run-{number}-{seed}"
                runs[name].append(train(arguments.recipe, settings, directory, arguments.minutes))
                sys.stdout.write(f"\n{describe(name, runs[name], arguments.target)}")
                sys.stdout.flush()
    if arguments.out:
        arguments.out.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
