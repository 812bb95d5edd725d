"""Measure training from a dataset larger than memory should be: `python bench/large_sets.py --directory DIR`.

Builds two datasets of random tokens in DIR, with 900 cells per row as mazes and ARC have: one that fits into
memory and a large one. A model that is small enough for reading to matter is trained on them in three
configurations: held in memory, memory-mapped, and streamed row by row.

For speed, the configurations take turns step by step in one process, from datasets that were dropped from
the page cache. Ratios compare steps of the same turn; the result is their median, with the spread of the
medians of each repeat. For memory, each configuration runs `trm train`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from macbook_optimization.units import GIB, MIB
from trm.backends.base import Program, SingleProcess, load_backend
from trm.config import load_config
from trm.feed import Feed
from trm.plan import Execution, Plan
from trm.tasks.base import DataSpec
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.registry import load_task
from trm.training.start import data_manager, open_splits
from trm.training.state import TrainingState

SPEC = DataSpec(max_len=900, vocab_size=6, num_outputs=6)
ROWS_PER_BLOCK = 20_000  # written at a time
SMALL_GIB = 0.09
MICRO_BATCH_SIZE = 32
WARM_UP_STEPS = 10
TRM = str(Path(sys.executable).with_name("trm"))
OVERRIDES = (
    "model.variant=transformer", "model.H_layers=1", "model.hidden_size=32", "model.expansion=0.25",
    "model.width_multiple=32", "model.mixer=mlp", "model.pos_encodings=none", "model.puzzle_emb_ndim=0",
    "data.augment=false",
    "training.supervision=terminal", "training.depths={0: 1}", "training.effective_batch_size=32",
    "training.max_steps=100000",
    "evaluation.examples=1", "evaluation.every_steps=100000", "evaluation.target_accuracy=null",
    "plan.threads=1", f"plan.micro_batch_size={MICRO_BATCH_SIZE}", "plan.compile=false",
)  # fmt: skip


class Configuration(NamedTuple):
    dataset: str
    overrides: tuple[str, ...]


CONFIGURATIONS = {
    "memory": Configuration("small", ("data.loading.cache_threshold_mb=1000",)),
    "mapped": Configuration(
        "large", ("data.loading.cache_threshold_mb=0", "data.loading.streaming_threshold_mb=1e6")
    ),
    # The other seed reads other rows than those that the memory map has just read.
    "streaming": Configuration("large", ("data.loading.force_streaming_mode=true", "seed=1")),
}


def build(directory: Path, num_bytes: float) -> None:
    if directory.exists():
        return
    rng = np.random.default_rng(0)
    num_rows = max(ROWS_PER_BLOCK, int(num_bytes / (2 * SPEC.max_len)))
    with DatasetWriter(directory, {"task": "random tokens"}) as writer:
        train = writer.split("train", SPEC)
        test = writer.split("test", SPEC)
        for start in range(0, num_rows, ROWS_PER_BLOCK):
            shape = (min(ROWS_PER_BLOCK, num_rows - start), SPEC.max_len)
            tokens = rng.integers(1, SPEC.vocab_size, shape, dtype=np.uint8)
            train.add_examples(tokens, tokens[::-1])
        test.add_examples(tokens[:100], tokens[:100])


def drop_from_page_cache(dataset: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for file in dataset.glob("*/*.npy"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_state(directory: Path, configuration: Configuration) -> TrainingState:
    dataset = directory / configuration.dataset
    drop_from_page_cache(dataset)
    config = load_config("maze-hard", [*OVERRIDES, f"data.path={dataset}", *configuration.overrides])
    task = load_task(config.task)
    not_verified: dict[str, dict[str, str]] = {"train": {}, "test": {}}  # reading would fill the page cache
    train, _ = open_splits(config, task, data_manager(config), not_verified)
    program = Program.of(config, task.complete(train.spec))
    plan = Plan.of(Execution(), MICRO_BATCH_SIZE, program.num_slots)
    world = SingleProcess(program.num_slots)
    backend = load_backend(plan.execution)
    backend.prepare(plan.execution)
    learner = partial(backend.learner, program, plan.execution, world)
    return TrainingState(config, plan, Feed(config, task, train), world, learner)


def seconds_of_steps(states: dict[str, TrainingState], steps: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(steps):
        for name, state in states.items():
            started = time.perf_counter()
            state.advance(lambda done: MICRO_BATCH_SIZE)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def resident_mib(directory: Path, configuration: Configuration, steps: int) -> float:
    """Train in a new process and return the highest resident memory of all steps."""
    dataset = directory / configuration.dataset
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        command = [TRM, "train", "maze-hard", *OVERRIDES, f"data.path={dataset}", *configuration.overrides]
        command += ["--run", str(run), "--max-steps", str(steps)]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(max(row["rss_bytes"] for row in rows if "rss_bytes" in row) / MIB)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where the datasets are, or are built")
    parser.add_argument("--gigabytes", type=float, default=10, help="size of the large one (default: 10)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--steps", type=int, default=100, help="per configuration and repeat (default: 100)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    directory = arguments.directory
    for name, size in (("small", SMALL_GIB), ("large", arguments.gigabytes)):
        build(directory / name, size * GIB)
    states = {name: make_state(directory, each) for name, each in CONFIGURATIONS.items()}
    seconds_of_steps(states, WARM_UP_STEPS)
    repeats = [seconds_of_steps(states, arguments.steps) for _ in range(arguments.repeats)]
    for name, configuration in CONFIGURATIONS.items():
        ratios = [np.divide(seconds["memory"], seconds[name]) for seconds in repeats]
        medians = [float(np.median(each)) for each in ratios]
        step = statistics.median(second for seconds in repeats for second in seconds[name])
        memory = resident_mib(directory, configuration, arguments.steps)
        sys.stdout.write(
            f"{name:9}  {step * 1e3:6.1f} ms per step, {np.median(np.concatenate(ratios)):.3f} times the "
            f"speed from memory ({min(medians):.3f} to {max(medians):.3f}), {memory:.0f} MiB resident\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
