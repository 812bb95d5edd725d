"""Compare this checkout with an earlier commit: same learning bit for bit, and the same speed.

Run `python bench/against_commit.py --before DIR`, where DIR is a checkout of the earlier commit, for example
from `git worktree add DIR COMMIT`. Nothing is installed: each side is `trm train` of this interpreter with
the checkout's own `src` and recipes. Overrides use the key names of the earlier commit.

Learning: both sides train the same deterministic steps, and this checkout also resumes a run that the earlier
commit left half-way. Checkpoints must be equal byte for byte. Speed: short runs take turns, so that a noisy
machine is noisy for both; the ratios are those of paired rounds. The exit code is 1 if a tensor differs or a
median ratio is below 0.98.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file

LOWEST_RATIO = 0.98
ROUND_SECONDS = 6.0
MIN_STEPS_PER_ROUND = 4  # a step may take longer than a row of metrics.jsonl: three rows then remain
NUM_DIFFERENCES_SHOWN = 5
ENTRY = ("-c", "from trm.cli import main; main()")
WITHOUT_EVALUATION = ("evaluation.every_steps=1000000", "evaluation.target_accuracy=null")
LEARNING = (
    *WITHOUT_EVALUATION,
    "training.deterministic=true",
    "plan.threads=1",
    "plan.micro_batch_size=4",
)
SPEED = (
    *WITHOUT_EVALUATION,
    "training.max_steps=1000000",  # the last step of a schedule would be evaluated
    "training.depths={0: 1}",  # the same work in every step, so that all rows are comparable
    "plan.threads=2",
    "plan.lanes=2",
    "plan.micro_batch_size=8",
    "plan.compile=false",
    "plan.dynamic_batch_sizing=false",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A shipped recipe with overrides. The names (i) and (ii) are those of bench/against_reference.py."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    learning: bool = True

    @property
    def needs_file(self) -> bool:
        return self.recipe == "sudoku-extreme"

    def with_overrides(self, *overrides: str) -> Self:
        return replace(self, overrides=(*self.overrides, *overrides))


SMALL_BATCH = "training.effective_batch_size=8"
REFERENCE_TRAINING = (
    SMALL_BATCH,
    "training.optimizer=adamw",
    "training.weight_decay=0.1",
    "training.puzzle_emb_weight_decay=0.1",
)
ATTENTION = ("model.mlp_t=false", "model.pos_encodings=rope")
CASES = (
    Case("sudoku-6x6", "sudoku-6x6"),
    Case("sudoku-9x9", "sudoku-9x9"),
    Case("maze-10x10", "maze-10x10"),
    Case("sudoku-extreme", "sudoku-extreme", (SMALL_BATCH,)),
    Case("i", "sudoku-extreme", REFERENCE_TRAINING, learning=False),
    Case("ii", "sudoku-extreme", (*REFERENCE_TRAINING, *ATTENTION), learning=False),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkouts."""

    name: str
    checkout: Path

    def python(self, arguments: Sequence[str], directory: Path) -> str:
        """Run this interpreter on the checkout's modules and return what it prints."""
        inherited = os.environ.get("PYTHONPATH")
        paths = [str(self.checkout / "src"), *([inherited] if inherited else [])]
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"The {self.name} side failed: {' '.join(arguments)}\n{done.stderr}")
        return done.stdout

    def train(self, case: Case, run: Path, *limit: str) -> None:
        arguments = (*ENTRY, "train", case.recipe, *case.overrides, "--run", str(run), *limit, "--json")
        self.python(arguments, run.parent)

    def check(self) -> None:
        """Raise unless the modules are those of the checkout: an import hook could put others first."""
        source = (self.checkout / "src").resolve()
        printed = self.python(("-c", "import trm; print(trm.__file__)"), source)
        if source not in Path(printed.strip()).resolve().parents:
            raise SystemExit(f"The {self.name} side imports {printed.strip()}, which is not in {source}.")


@dataclass(frozen=True, slots=True)
class Sides:
    before: Side
    after: Side


@contextmanager
def scratch_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="against-commit-") as directory:
        yield Path(directory)


def report_progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def with_small_dataset(case: Case, directory: Path, puzzles: Path | None) -> Case:
    """Add the overrides of a small dataset, which the first run of a recipe builds."""
    source = [f"data.build.from={puzzles}"] if case.needs_file else []
    path = f"data.path={directory / case.recipe}"
    return case.with_overrides(path, "data.build.train=200", "data.build.test=16", *source)


def train_to_step(side: Side, case: Case, run: Path, step: int) -> Path:
    """Train or resume `run` up to this step and return its checkpoint."""
    report_progress(f"{case.name}: {side.name} trains {run.name} to step {step}")
    side.train(case, run, "--max-steps", str(step))
    newest = max((run / "checkpoints").glob("step-*"))
    if int(newest.name.removeprefix("step-")) != step:
        raise SystemExit(
            f"The newest checkpoint of {newest.parent} is {newest.name}, not that of step {step}."
        )
    return newest


def check_resumed(run: Path, step: int) -> None:
    """Raise unless `run` was resumed: one that silently started again would learn the same."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    if not any(event["event"] == "resumed" and event["step"] == step for event in events):
        raise SystemExit(f"{run} has no event that says that it was resumed at step {step}.")


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.glob("*.safetensors"))
    return {
        f"{file.stem}/{name}": tensor for file in files for name, tensor in sorted(load_file(file).items())
    }


def are_same_bytes(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Compare memory and not values: 0.0 is not -0.0 here, and a NaN equals itself."""
    if before.dtype != after.dtype or before.shape != after.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (before, after)))


def describe_difference(name: str, before: torch.Tensor, after: torch.Tensor) -> tuple[float, str]:
    """Return the size of a difference, and a text with it."""
    if before.dtype != after.dtype or before.shape != after.shape:
        kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (before, after)]
        return float("inf"), f"{name} ({kinds[0]} before, {kinds[1]} after)"
    largest = float((before.double() - after.double()).abs().max())
    return largest, f"{name} (by {largest:.2e})"


def tensor_differences(before: Path, after: Path) -> list[str]:
    """Describe every tensor that is missing on one side or differs; the largest difference comes first."""
    tensors = load_tensors(before), load_tensors(after)
    missing = [f"{name} (only before)" for name in tensors[0].keys() - tensors[1].keys()]
    missing += [f"{name} (only after)" for name in tensors[1].keys() - tensors[0].keys()]
    different = [
        describe_difference(name, tensor, tensors[1][name])
        for name, tensor in tensors[0].items()
        if name in tensors[1] and not are_same_bytes(tensor, tensors[1][name])
    ]
    return sorted(missing) + [text for _, text in sorted(different, reverse=True)]


def slot_differences(before: Path, after: Path) -> list[str]:
    states = [json.loads((path / "state.json").read_text(encoding="utf-8")) for path in (before, after)]
    slots = [state["slots"] for state in states]
    return [
        f"slots.{key}" for key in sorted({*slots[0], *slots[1]}) if slots[0].get(key) != slots[1].get(key)
    ]


def describe_differences(found: Sequence[str]) -> str:
    if not found:
        return "identical"
    more = len(found) - NUM_DIFFERENCES_SHOWN
    listed = ", ".join(found[:NUM_DIFFERENCES_SHOWN])
    return f"{len(found)} differ: {listed}" + (f" and {more} more" if more > 0 else "")


def compare_learning(case: Case, sides: Sides, steps: int) -> bool:
    """Print whether both sides learn the same, also when this one resumes the other's run."""
    case = case.with_overrides(*LEARNING, f"checkpoints.every_steps={steps}")
    with scratch_directory() as runs:
        expected = train_to_step(sides.before, case, runs / "before", steps)
        trained = train_to_step(sides.after, case, runs / "after", steps)
        train_to_step(sides.before, case, runs / "resumed", steps // 2)
        resumed = train_to_step(sides.after, case, runs / "resumed", steps)
        check_resumed(runs / "resumed", steps // 2)
        num_tensors = len(load_tensors(expected))
        found = [
            [*slot_differences(expected, other), *tensor_differences(expected, other)]
            for other in (trained, resumed)
        ]
    show(
        f"{case.name:15} {steps} steps, {num_tensors} tensors: {describe_differences(found[0])}; "
        f"resumed at step {steps // 2}: {describe_differences(found[1])}"
    )
    return not any(found)


def train_rows(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "samples_per_second" in row]


def steps_per_round(side: Side, case: Case) -> int:
    """Count the steps that the earlier commit trains in the time of a round."""
    with scratch_directory() as runs:
        side.train(case, runs / "run", "--max-minutes", str(ROUND_SECONDS / 60))
        return max(MIN_STEPS_PER_ROUND, int(train_rows(runs / "run")[-1]["step"]))


def samples_per_second(side: Side, case: Case, steps: int) -> float:
    """Return the median of a new run's rows; the first row contains the warm-up."""
    with scratch_directory() as runs:
        side.train(case, runs / "run", "--max-steps", str(steps))
        rows = train_rows(runs / "run")[1:]
    if not rows:
        raise SystemExit(
            f"{case.name}: {steps} steps on the {side.name} side are too few to measure a speed."
        )
    return statistics.median(row["samples_per_second"] for row in rows)


def compare_speed(case: Case, sides: Sides, rounds: int) -> bool:
    """Print the ratio of the speeds and return whether it is high enough."""
    case = case.with_overrides(*SPEED)
    report_progress(f"{case.name}: calibration")
    steps = steps_per_round(sides.before, case)
    before, after = [], []
    for number in range(1, rounds + 1):
        report_progress(f"{case.name}: round {number} of {rounds}, {steps} steps per side")
        before.append(samples_per_second(sides.before, case, steps))
        after.append(samples_per_second(sides.after, case, steps))
    ratios = [now / then for then, now in zip(before, after, strict=True)]
    ratio = statistics.median(ratios)
    show(
        f"{case.name:15} after/before {ratio:.3f} ({min(ratios):.3f}..{max(ratios):.3f}), samples/s "
        f"{statistics.median(before):.4g} before, {statistics.median(after):.4g} after"
    )
    return ratio >= LOWEST_RATIO


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit")
    parser.add_argument("--learning", action="store_true", help="compare learning [default: both parts]")
    parser.add_argument("--speed", action="store_true", help="compare speed [default: both parts]")
    parser.add_argument("--steps", type=int, default=30, help="steps of a learning run [default: 30]")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a speed comparison [default: 7]")
    parser.add_argument("--sudoku-extreme", type=Path, metavar="FILE", help="puzzles, as CSV or CSV.xz")
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--recipes", help=f"some of: {names} [default: all that need no missing FILE]")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if not (arguments.before / "src" / "trm").is_dir():
        parser.error(f"--before {arguments.before} is not a checkout: it has no src/trm")
    if arguments.steps < 2 or arguments.rounds < 1:
        parser.error("--steps must be 2 or more, and --rounds 1 or more")
    if arguments.sudoku_extreme is not None and not arguments.sudoku_extreme.is_file():
        parser.error(f"--sudoku-extreme {arguments.sudoku_extreme} is not a file")
    if not (arguments.learning or arguments.speed):
        arguments.learning = arguments.speed = True
    arguments.cases = chosen_cases(parser, arguments)


def chosen_cases(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Case]:
    has_file = arguments.sudoku_extreme is not None
    if arguments.recipes is None:
        return [case for case in CASES if has_file or not case.needs_file]
    names = arguments.recipes.split(",")
    if unknown := sorted({*names} - {case.name for case in CASES}):
        parser.error(f"--recipes: unknown {', '.join(unknown)}")
    chosen = [case for case in CASES if case.name in names]
    if not has_file and any(case.needs_file for case in chosen):
        parser.error("--recipes: sudoku-extreme, i and ii need --sudoku-extreme FILE")
    if not arguments.speed and not any(case.learning for case in chosen):
        parser.error("--recipes: i and ii are compared by --speed only")
    return chosen


def compare(arguments: argparse.Namespace, sides: Sides) -> bool:
    """Run the requested parts on every case, also after a failure, and return whether all passed."""
    puzzles = arguments.sudoku_extreme and arguments.sudoku_extreme.resolve()
    with scratch_directory() as directory:
        cases = [with_small_dataset(case, directory, puzzles) for case in arguments.cases]
        by_learning = [case for case in cases if case.learning and arguments.learning]
        by_speed = [case for case in cases if arguments.speed]
        passed = chain(
            (compare_learning(case, sides, arguments.steps) for case in by_learning),
            (compare_speed(case, sides, arguments.rounds) for case in by_speed),
        )
        return all(list(passed))


def main() -> None:
    arguments = parse_arguments()
    before = Side("before", arguments.before.resolve())
    after = Side("after", Path(__file__).resolve().parents[1])
    for side in (before, after):
        side.check()
    if not compare(arguments, Sides(before, after)):
        sys.exit(1)


if __name__ == "__main__":
    main()
