"""How long a training step takes: `python bench/training_step.py [RECIPE [KEY=VALUE ...]]`.

Random tokens in the recipe's shape. The thread counts are interleaved, so that a noisy machine is noisy for
both; medians of seven with the spread.
"""

import statistics
import sys
import time

import psutil

from trm.backends.base import Learner, StepBatch, StepSettings, load_backend
from trm.config import load_config
from trm.tasks import load_task
from trm.training.benchmark import random_batch


def seconds_of_step(learner: Learner, batch: StepBatch, cycles: int, micro_batch_size: int) -> float:
    settings = StepSettings(1, cycles, learning_rate=0.0, puzzle_emb_lr=0.0)
    started = time.perf_counter()
    learner.step(batch, settings, lambda done: micro_batch_size)
    return time.perf_counter() - started


def main(recipe: str, overrides: list[str]) -> None:
    config = load_config(recipe, overrides)
    backend = load_backend()
    shape = load_task(config.task).shape(config.data.build or {})
    learner = backend.learner(config.model, config.training, shape, config.seed)
    slots = config.training.effective_batch_size
    batch = random_batch(slots, shape)
    micro_batch_size = min(slots, config.plan.micro_batch_size or 32)
    threads = range(1, (psutil.cpu_count(logical=False) or 1) + 1)
    terminal = config.training.supervision == "terminal"
    greatest = max(config.training.depths.values())
    for cycles in (1, greatest) if terminal else (config.model.cycles_per_step,):
        times: dict[int, list[float]] = {count: [] for count in threads}
        for repeat in range(8):
            for count in threads:
                backend.prepare(threads=count, deterministic=False)
                seconds = seconds_of_step(learner, batch, cycles, micro_batch_size)
                if repeat:  # the first one warms up
                    times[count].append(seconds)
        for count, measured in times.items():
            median, spread = statistics.median(measured), (1000 * min(measured), 1000 * max(measured))
            sys.stdout.write(
                f"{recipe}, {cycles} cycles, {count} threads: {1000 * median:.0f} ms a step "
                f"({spread[0]:.0f} to {spread[1]:.0f}), {slots / median:.0f} samples/s\n"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sudoku-6x6", sys.argv[2:])
