"""Compare this checkout with an earlier commit: same learning bit for bit, and the same speed.

Run `python bench/against_commit.py --before DIR`, where DIR is a checkout of the earlier commit, for example
from `git worktree add DIR COMMIT`. Nothing is installed: each side is `trm train` of this interpreter with
the checkout's own `src` and recipes. Overrides use the key names of the earlier commit.

Learning: both sides train the same deterministic steps, and this checkout also resumes a run that the earlier
commit left half-way. Checkpoints must be equal byte for byte. Speed: two runs take turns of some seconds, one
paused (SIGSTOP) while the other trains, so that noise affects both alike; the ratio is the median over
several pairs of processes. Processor time per step is shown beside it: it counts everything that both sides
do, and varies less. The exit code is 1 if a tensor differs or a median ratio of speeds is below 0.98.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple, Self

import psutil
import torch
from safetensors.torch import load_file

LOWEST_RATIO = 0.98
TURN_SECONDS = 4.0
STEPS_PER_TURN = 4  # at least, where steps are long
WARM_UP_ROWS = 3
POLL_SECONDS = 0.01  # the resolution of a row's time
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
    "checkpoints.every_seconds=100000",
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

    @property
    def environment(self) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH")
        paths = [str(self.checkout / "src"), *([inherited] if inherited else [])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def python(self, arguments: Sequence[str], directory: Path) -> str:
        """Run this interpreter on the checkout's modules and return what it prints."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"The {self.name} side failed: {' '.join(arguments)}\n{done.stderr}")
        return done.stdout

    def train(self, case: Case, run: Path, *limit: str) -> None:
        self.python((*_train_arguments(case, run), *limit, "--json"), run.parent)

    def start(self, case: Case, run: Path, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *_train_arguments(case, run)],
            cwd=run.parent,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )

    def check(self) -> None:
        """Raise unless the modules are those of the checkout: an import hook could put others first."""
        source = (self.checkout / "src").resolve()
        printed = self.python(("-c", "import trm; print(trm.__file__)"), source)
        if source not in Path(printed.strip()).resolve().parents:
            raise SystemExit(f"The {self.name} side imports {printed.strip()}, which is not in {source}.")


def _train_arguments(case: Case, run: Path) -> tuple[str, ...]:
    return (*ENTRY, "train", case.recipe, *case.overrides, "--run", str(run))


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


class Turn(NamedTuple):
    steps_per_second: float
    cpu_ms_per_step: float


class TimedTraining:
    """A training process that can be paused, and that counts the seconds during which it was not."""

    def __init__(self, side: Side, case: Case, run: Path) -> None:
        self.side = side
        self.metrics = run / "metrics.jsonl"
        self.errors = run.with_name(f"{run.name}-errors.txt")
        with self.errors.open("wb") as errors:
            self.process = side.start(case, run, errors)
        self.running_seconds = 0.0
        self.step = 0  # of the newest row
        self.step_seen_at = 0.0  # in running seconds
        self.cpu_seconds = 0.0  # then

    def run_for(self, seconds: float) -> None:
        """Let the process run, then pause it. Rows are timestamped as they appear in metrics.jsonl."""
        started = time.monotonic()
        before = self.running_seconds
        self._send(signal.SIGCONT)
        try:
            while (elapsed := time.monotonic() - started) < seconds:
                self.running_seconds = before + elapsed
                self._read_step()
                time.sleep(POLL_SECONDS)
        finally:
            self._send(signal.SIGSTOP)
            self.running_seconds = before + time.monotonic() - started

    def run_to_row(self) -> None:
        """Run until the next row is written: the first ones contain the start and the warm-up."""
        step = self.step
        while self.step == step:
            self.run_for(1.0)

    def take_turn(self, seconds: float) -> Turn:
        """Measure between the newest row before this turn and the newest one in it."""
        step = self.step
        seen_at = self.step_seen_at
        cpu_seconds = self.cpu_seconds
        self.run_for(seconds)
        while self.step == step:
            self.run_for(1.0)
        steps = self.step - step
        return Turn(steps / (self.step_seen_at - seen_at), 1000 * (self.cpu_seconds - cpu_seconds) / steps)

    def _read_step(self) -> None:
        lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.exists() else []
        steps = [json.loads(line)["step"] for line in lines[-2:] if line.endswith(b"\n")]
        if steps and steps[-1] != self.step:
            self.step = steps[-1]
            self.step_seen_at = self.running_seconds
            self.cpu_seconds = self._read_cpu_seconds()

    def _read_cpu_seconds(self) -> float:
        """Return the processor time of the supervisor and its children so far."""
        supervisor = psutil.Process(self.process.pid)
        times = (process.cpu_times() for process in (supervisor, *supervisor.children(recursive=True)))
        return sum(each.user + each.system for each in times)

    def kill(self) -> None:
        if self.process.poll() is None:
            self._send(signal.SIGKILL)
        self.process.wait()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor and its children, which have process groups of their own."""
        if self.process.poll() is not None:
            errors = self.errors.read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"The {self.side.name} side ended.\n{errors}")
        supervisor = psutil.Process(self.process.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def compare_speed(case: Case, sides: Sides, pairs: int, turns: int) -> bool:
    """Print the ratio of the speeds and return whether it is high enough.

    Two processes of the same version may differ by several per cent for as long as they live, so the ratio is
    the median over several pairs.
    """
    case = case.with_overrides(*SPEED)
    found = []
    for number in range(1, pairs + 1):
        report_progress(f"{case.name}: pair {number} of {pairs}, {turns} turns per side")
        found.append(pair_speeds(case, sides if number % 2 else Sides(sides.after, sides.before), turns))
    before, after = ([turn[side.name] for turn in found] for side in both(sides))
    ratios = [now.steps_per_second / then.steps_per_second for then, now in zip(before, after, strict=True)]
    cpu_ratios = [now.cpu_ms_per_step / then.cpu_ms_per_step for then, now in zip(before, after, strict=True)]
    ratio = statistics.median(ratios)
    speeds = [statistics.median(turn.steps_per_second for turn in turns) for turns in (before, after)]
    show(
        f"{case.name:15} after/before {ratio:.3f} (pairs: {listed(ratios)}), "
        f"steps/s {speeds[0]:.4g} before, {speeds[1]:.4g} after; processor time per step after/before "
        f"{statistics.median(cpu_ratios):.3f} (pairs: {listed(cpu_ratios)})"
    )
    return ratio >= LOWEST_RATIO


def listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{each:.3f}" for each in ratios)


def pair_speeds(case: Case, sides: Sides, turns: int) -> dict[str, Turn]:
    """Return the medians of each side's turns; the sides start in the given order."""
    taken: dict[str, list[Turn]] = {side.name: [] for side in both(sides)}
    with scratch_directory() as runs, ExitStack() as stack:
        trainings = []
        for side in both(sides):
            training = TimedTraining(side, case, runs / side.name)
            stack.callback(training.kill)
            for _ in range(WARM_UP_ROWS):
                training.run_to_row()
            trainings.append(training)
        seconds = max(TURN_SECONDS, STEPS_PER_TURN / trainings[0].take_turn(TURN_SECONDS).steps_per_second)
        for number in range(turns):
            for training in trainings if number % 2 else reversed(trainings):
                taken[training.side.name].append(training.take_turn(seconds))
    return {
        name: Turn(*(statistics.median(values) for values in zip(*turns_of_side, strict=True)))
        for name, turns_of_side in taken.items()
    }


def both(sides: Sides) -> tuple[Side, Side]:
    return sides.before, sides.after


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit")
    parser.add_argument("--learning", action="store_true", help="compare learning [default: both parts]")
    parser.add_argument("--speed", action="store_true", help="compare speed [default: both parts]")
    parser.add_argument("--steps", type=int, default=30, help="steps of a learning run [default: 30]")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes for speed [default: 5]")
    parser.add_argument("--turns", type=int, default=6, help="turns of each process of a pair [default: 6]")
    parser.add_argument("--sudoku-extreme", type=Path, metavar="FILE", help="puzzles, as CSV or CSV.xz")
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--recipes", help=f"some of: {names} [default: all that need no missing FILE]")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if not (arguments.before / "src" / "trm").is_dir():
        parser.error(f"--before {arguments.before} is not a checkout: it has no src/trm")
    if arguments.steps < 2 or arguments.turns < 1 or arguments.pairs < 1:
        parser.error("--steps must be 2 or more, --pairs and --turns 1 or more")
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
            (compare_speed(case, sides, arguments.pairs, arguments.turns) for case in by_speed),
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
