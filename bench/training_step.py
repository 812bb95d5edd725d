"""Measure a training step: `python bench/training_step.py [RECIPE [KEY=VALUE ...]]`.

The tokens are random, in the shape of the recipe's data; those of a text have the shape of its dataset, which
must exist. Thread counts take turns, so a disturbance affects all of them. Each result is the median of seven
steps, with the spread, and the share of what products of large matrices reach. The peak is that of the whole
process, with all thread counts.
"""

import statistics
import sys
import time
from dataclasses import replace

import psutil

from macbook_optimization.cpu_optimization import time_products
from macbook_optimization.memory_management import peak_bytes
from macbook_optimization.units import MIB
from trm.backends.base import Learner, Program, SingleProcess, StepSettings, load_backend
from trm.backends.sizes import flops_per_sample
from trm.batch import Batch
from trm.config import RunConfig, load_config
from trm.machine.benchmark import random_batch
from trm.plan import Execution
from trm.tasks.base import DataSpec, Generative
from trm.tasks.dataset import complete_spec, open_split
from trm.tasks.registry import load_task

ROUNDS = 7
PRODUCT = (1024, 1024, 1024)


def spec_of(config: RunConfig) -> DataSpec:
    task = load_task(config.task)
    if isinstance(task, Generative):
        return complete_spec(task, open_split(config.data.path, "train"))
    return task.complete(task.spec(config.data.build or {}))


def recipe_learner(config: RunConfig, execution: Execution) -> tuple[Learner, Batch]:
    """Return a learner of the recipe, and random tokens for all of its slots."""
    program = Program.of(config, spec_of(config))
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
    settings = config.plan
    execution = Execution(
        precision=settings.precision or "float32",
        gradient_checkpointing=settings.gradient_checkpointing or "none",
    )
    learner, batch = recipe_learner(config, execution)
    num_slots, length = batch.inputs.shape
    micro_batch_size = min(num_slots, settings.micro_batch_size or 32)
    cores = settings.threads or psutil.cpu_count(logical=False) or 1
    thread_counts = range(1, cores + 1)
    peaks = time_products(execution.precision, list(thread_counts), PRODUCT)
    for cycles in cycles_to_measure(config):
        times: dict[int, list[float]] = {count: [] for count in thread_counts}
        for round_number in range(1 + ROUNDS):
            for count in thread_counts:
                learner.reconfigure(replace(execution, threads=count))
                seconds = seconds_of_step(learner, batch, cycles, micro_batch_size)
                if round_number:  # the first round is the warm-up
                    times[count].append(seconds)
        flops = num_slots * flops_per_sample(config.model, spec_of(config), cycles)
        for count, measured in times.items():
            median = statistics.median(measured)
            sys.stdout.write(
                f"{recipe}, {cycles} cycles, {count} threads: {1000 * median:.0f} ms per step "
                f"({1000 * min(measured):.0f} to {1000 * max(measured):.0f}), "
                f"{num_slots / median:.0f} samples/s, {num_slots * length / median:.0f} tokens/s, "
                f"{flops / median / peaks[count]:.0%} of {peaks[count] / 1e9:.0f} GFLOP/s\n"
            )
    sys.stdout.write(f"peak {peak_bytes() / MIB:.0f} MiB\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sudoku-6x6", sys.argv[2:])
