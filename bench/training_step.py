"""Measure a training step: `python bench/training_step.py [RECIPE [KEY=VALUE ...]]`.

The tokens are random, in the shape of the recipe's data. Thread counts take turns, so a disturbance affects
all of them. Each result is the median of seven steps, with the spread.
"""

import statistics
import sys
import time
from dataclasses import replace

import psutil

from trm.backends.base import Learner, Program, SingleProcess, StepSettings, load_backend
from trm.batch import Batch
from trm.config import RunConfig, load_config
from trm.machine.benchmark import random_batch
from trm.plan import Execution
from trm.tasks.registry import load_task

ROUNDS = 7


def recipe_learner(config: RunConfig, execution: Execution) -> tuple[Learner, Batch]:
    """Return a learner of the recipe, and random tokens for all of its slots."""
    task = load_task(config.task)
    program = Program.of(config, task.complete(task.spec(config.data.build or {})))
    backend = load_backend(execution)
    backend.prepare(execution)
    learner = backend.learner(program, execution, SingleProcess(program.num_slots))
    return learner, random_batch(program.num_slots, program.data)


def seconds_of_step(learner: Learner, batch: Batch, cycles: int, micro_batch_size: int) -> float:
    settings = StepSettings(1, cycles, learning_rate=0.0, puzzle_emb_lr=0.0)
    started = time.perf_counter()
    learner.step(batch, settings, lambda done: micro_batch_size)
    return time.perf_counter() - started


def cycles_to_measure(config: RunConfig) -> list[int]:
    """Return the fewest and the most recursions per step."""
    if config.training.supervision == "deep":
        return [config.model.cycles_per_step]
    return sorted({1, max(config.training.depths.values())})


def main(recipe: str, overrides: list[str]) -> None:
    config = load_config(recipe, overrides)
    execution = Execution()
    learner, batch = recipe_learner(config, execution)
    num_slots = len(batch)
    micro_batch_size = min(num_slots, config.plan.micro_batch_size or 32)
    thread_counts = range(1, (psutil.cpu_count(logical=False) or 1) + 1)
    for cycles in cycles_to_measure(config):
        times: dict[int, list[float]] = {count: [] for count in thread_counts}
        for round_number in range(1 + ROUNDS):
            for count in thread_counts:
                learner.reconfigure(replace(execution, threads=count))
                seconds = seconds_of_step(learner, batch, cycles, micro_batch_size)
                if round_number:  # the first round is the warm-up
                    times[count].append(seconds)
        for count, measured in times.items():
            median = statistics.median(measured)
            sys.stdout.write(
                f"{recipe}, {cycles} cycles, {count} threads: {1000 * median:.0f} ms per step "
                f"({1000 * min(measured):.0f} to {1000 * max(measured):.0f}), "
                f"{num_slots / median:.0f} samples/s\n"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sudoku-6x6", sys.argv[2:])
