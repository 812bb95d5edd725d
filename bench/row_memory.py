"""Measure what one row needs by its length: `python bench/row_memory.py`.

Each length is measured in a new process: three steps with a row of 32 tokens, then three with the row itself.
The difference of the two peaks is what the longer row added.
"""

import subprocess
import sys

import numpy as np

from macbook_optimization.memory_management import MIB, peak_bytes
from trm.backends.base import Program, SingleProcess, StepSettings, load_backend
from trm.batch import IGNORE_LABEL, Batch
from trm.config import ModelConfig, TrainingConfig
from trm.plan import Execution
from trm.tasks.base import DataSpec

LENGTHS = (1024, 768, 512, 256)
SHORT = 32
SPEC = DataSpec(max_len=LENGTHS[0], vocab_size=8000, num_outputs=2)
MODEL = {"variant": "transformer", "hidden_size": 256, "H_layers": 2, "expansion": 2.0, "width_multiple": 32}
TRAINING = {"supervision": "terminal", "effective_batch_size": 1, "optimizer": "adamw", "warmup_steps": 0}


def row() -> Batch:
    labels = np.full((1, SPEC.max_len), IGNORE_LABEL)
    labels[0, 0] = 1
    return Batch(
        slots=np.arange(1),
        inputs=np.random.default_rng(0).integers(1, SPEC.vocab_size, (1, SPEC.max_len)),
        labels=labels,
        puzzle_identifiers=np.zeros(1, dtype=np.int64),
        fresh=np.ones(1, dtype=bool),
        lengths=np.array([SPEC.max_len]),
    )


def added_bytes(length: int) -> int:
    program = Program(ModelConfig.model_validate(MODEL), TrainingConfig.model_validate(TRAINING), SPEC)
    how = Execution()
    learner = load_backend(how).learner(program, how, SingleProcess(1))
    peaks = []
    for batch in (row().cut(SHORT), row().cut(length)):
        for step in (1, 2, 3):
            learner.step(batch, StepSettings(step, 2, 1e-4, 0.0), lambda done: 1)
        peaks.append(peak_bytes())
    return peaks[1] - peaks[0]


def main() -> None:
    if len(sys.argv) > 1:
        sys.stdout.write(f"{added_bytes(int(sys.argv[1])) / MIB:.1f}\n")
        return
    for length in LENGTHS:
        child = subprocess.run(
            [sys.executable, __file__, str(length)], capture_output=True, text=True, check=True
        )
        sys.stdout.write(f"{length:5d} tokens: {child.stdout.strip()} MiB more than {SHORT} tokens\n")


if __name__ == "__main__":
    main()
