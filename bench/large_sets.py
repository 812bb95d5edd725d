"""Training from a set that is larger than memory should be: `python bench/large_sets.py --directory DIR`.

Builds a set of random tokens there (900 cells a row, as mazes and ARC have), and one of the same shape that
fits into memory, and trains a small model on them: held in memory, mapped, and read row by row. A small
model, so that the reading would show. Speed: the three take turns, step by step, in one process, from sets
that the page cache was told to forget; ratios are of the steps of one turn, their median with the spread of
the medians of every repeat. Memory: of a `trm train` for each.
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

import numpy as np

from trm.backends.base import load_backend
from trm.config import load_config
from trm.runs import DEFAULT_PLAN
from trm.tasks import load_task
from trm.tasks.dataset_writer import DatasetWriter
from trm.training.loop import data_manager, open_splits
from trm.training.state import TrainingState

SEQ_LEN, VOCAB = 900, 6
BLOCK = 20_000  # rows written at a time
TRM = Path(sys.executable).with_name("trm")
RECIPE = (
    "model.variant=transformer", "model.H_layers=1", "model.hidden_size=32", "model.expansion=0.25",
    "model.width_multiple=32", "model.mlp_t=true", "model.pos_encodings=none", "model.puzzle_emb_ndim=0",
    "data.augment=false",
    "training.supervision=terminal", "training.depths={0: 1}", "training.effective_batch_size=32",
    "evaluation.examples=1", "evaluation.every_steps=100000", "evaluation.target_accuracy=null",
    "plan.threads=1", "plan.micro_batch_size=32", "plan.compile=false", "training.max_steps=100000",
)  # fmt: skip
WAYS = {
    "memory": ("small", ("data.loading.cache_threshold_mb=1000",)),
    "mapped": ("large", ("data.loading.cache_threshold_mb=0", "data.loading.streaming_threshold_mb=1e6")),
    # Other rows than those that the map has just read.
    "streaming": ("large", ("data.loading.force_streaming_mode=true", "seed=1")),
}


def build(directory: Path, num_bytes: float) -> None:
    if directory.exists():
        return
    rng = np.random.default_rng(0)
    rows = max(BLOCK, int(num_bytes / (2 * SEQ_LEN)))
    with DatasetWriter(directory, {"task": "random tokens"}) as writer:
        train, test = (writer.split(name, SEQ_LEN, VOCAB) for name in ("train", "test"))
        for start in range(0, rows, BLOCK):
            tokens = rng.integers(1, VOCAB, (min(BLOCK, rows - start), SEQ_LEN), dtype=np.uint8)
            train.add_examples(tokens, tokens[::-1])
        test.add_examples(tokens[:100], tokens[:100])


def forget(dataset: Path) -> None:
    for file in dataset.glob("*/*.npy") if hasattr(os, "posix_fadvise") else ():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def states(directory: Path) -> dict[str, TrainingState]:
    backend, found = load_backend(), {}
    backend.prepare(threads=1, deterministic=False)
    for way, (name, overrides) in WAYS.items():
        forget(directory / name)
        config = load_config("maze-hard", [*RECIPE, f"data.path={directory / name}", *overrides])
        task = load_task(config.task)
        train, _ = open_splits(config, task, data_manager(config), {"train": {}, "test": {}})
        learner = partial(backend.learner, config.model, config.training, train.shape, config.seed, "none", 1)
        found[way] = TrainingState(config, DEFAULT_PLAN, task, train, learner)
    return found


def seconds_of_steps(learning: dict[str, TrainingState], steps: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in learning}
    for _ in range(steps):
        for way, state in learning.items():
            started = time.perf_counter()
            state.advance(lambda done: 32)
            seconds[way].append(time.perf_counter() - started)
    return seconds


def resident(dataset: Path, overrides: tuple[str, ...], steps: int) -> float:
    """MiB, the most of all steps."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [TRM, "train", "maze-hard", *RECIPE, f"data.path={dataset}", *overrides]
        subprocess.run([*command, "--run", run, "--max-steps", str(steps)], check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(max(row["rss_bytes"] for row in rows if "rss_bytes" in row) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where the sets are, or will be")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of each way, in a repeat")
    asked = parser.parse_args()
    for name, gigabytes in (("small", 0.09), ("large", asked.gigabytes)):
        build(asked.directory / name, gigabytes * 2**30)
    learning = states(asked.directory)
    seconds_of_steps(learning, steps=10)
    repeats = [seconds_of_steps(learning, asked.steps) for _ in range(asked.repeats)]
    for way, (name, overrides) in WAYS.items():
        ratios = [np.divide(seconds["memory"], seconds[way]) for seconds in repeats]
        medians = [float(np.median(each)) for each in ratios]
        step = statistics.median(second for seconds in repeats for second in seconds[way])
        sys.stdout.write(
            f"{way:9}  {step * 1e3:6.1f} ms a step, {np.median(np.concatenate(ratios)):.3f} of the speed in "
            f"memory ({min(medians):.3f} to {max(medians):.3f}), "
            f"{resident(asked.directory / name, overrides, asked.steps):.0f} MiB resident\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
