"""Measure length grouping: `python bench/length_grouping.py DATASET [RECIPE [KEY=VALUE ...]]`.

The same steps of one dataset are computed in three ways that take turns, so a disturbance affects all of
them: every row padded to the full width, each micro-batch as wide as its longest row in the order of the
slots, and rows grouped by length. Losses of the same step must agree. Each result is the median of the
rounds, by wall time and by the CPU time of the process, which other programs disturb less.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from trm.backends.base import Program, SingleProcess, StepSettings, load_backend
from trm.batch import Batch
from trm.config import load_config
from trm.feed import Feed
from trm.plan import Execution
from trm.slots import Slots
from trm.tasks.dataset import open_split
from trm.tasks.registry import load_task

ROUNDS = 15
TOLERANCE = 1e-4  # relative, of the losses of one step


def fully_padded(batch: Batch) -> Batch:
    """Give every row the full width; its padding is then attended to, so losses differ."""
    return replace(batch, lengths=np.full(len(batch), batch.inputs.shape[1]))


class InSlotOrder(Batch):
    """A batch that is computed in the order of its slots."""

    def by_length(self) -> None:
        return None


def in_slot_order(batch: Batch) -> Batch:
    fields = (getattr(batch, name) for name in Batch.__slots__)
    return InSlotOrder(*fields)


WAYS: dict[str, Callable[[Batch], Batch]] = {
    "full padding": fully_padded,
    "trimmed": in_slot_order,
    "grouped": lambda batch: batch,
}


def main(dataset: str, recipe: str, overrides: list[str]) -> None:
    config = load_config(recipe, [*overrides, f"data.path={dataset}"])
    execution = Execution(threads=config.plan.threads or 1, workers=config.plan.workers or 1)
    task = load_task(config.task)
    split = open_split(Path(dataset), "train")
    program = Program.of(config, task.complete(split.spec))
    backend = load_backend(execution)
    backend.prepare(execution)
    learner = backend.learner(program, execution, SingleProcess(program.num_slots))
    feed = Feed(config, task, split)
    size = min(program.num_slots, config.plan.micro_batch_size or 8)
    cycles = max(config.training.depths.values())
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}  # by wall and CPU time
    slots = Slots.new(program.num_slots)
    for step in range(1, 2 + ROUNDS):
        slots = slots.all_halted().refilled()
        batch = feed.batch(slots, step)
        losses = {}
        for name, arranged in WAYS.items():
            started = time.perf_counter(), time.process_time()
            settings = StepSettings(step, cycles, learning_rate=0.0, puzzle_emb_lr=0.0)
            losses[name] = learner.step(arranged(batch), settings, lambda done: size).loss
            if step > 1:  # the first round is the warm-up
                took = time.perf_counter() - started[0], time.process_time() - started[1]
                rates[name].append((len(batch) / took[0], len(batch) / took[1]))
        if not np.isclose(losses["grouped"], losses["trimmed"], rtol=TOLERANCE):
            raise SystemExit(f"step {step}: losses differ: {losses}")
    lengths = split.lengths
    if lengths is None:
        raise SystemExit(f"{dataset} has no lengths")
    sys.stdout.write(f"{dataset}: mean length {lengths.mean():.0f} of {split.spec.max_len}\n")
    before = np.median(rates["full padding"], axis=0)
    for name, measured in rates.items():
        wall, cpu = np.median(measured, axis=0)
        sys.stdout.write(
            f"{name:12} {wall:6.1f} samples/s ({wall / before[0]:.2f}x), "
            f"{cpu:6.1f} per CPU second ({cpu / before[1]:.2f}x)\n"
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "email", sys.argv[3:])
