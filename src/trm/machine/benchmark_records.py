"""The records of `trm bench`, as `--out` saves and `--compare` reads them.

Every number has bounds, because a report may come from any file.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from trm.backends.base import Program
from trm.backends.sizes import flops_per_sample
from trm.config import Count, CountOrZero, ModelConfig, Positive, PositiveOrZero, Section, TrainingConfig
from trm.plan import Execution
from trm.tasks.base import DataSpec

MAX_REPEATS = 100
SCHEMA_VERSION: Literal[2] = 2  # version 1 called the workers `lanes`
VOCAB_SIZE = 16  # about a Sudoku's; embedding and head are a small part of any step

Measured = Annotated[Positive, Field(ge=1e-9, le=1e18)]
ProfileName = Annotated[str, Field(pattern="^[a-z0-9_]{1,20}$")]


class Workload(Section):
    """The computation of one repeat. Two results are comparable if their workloads are equal."""

    hidden_size: Count
    num_heads: Count
    L_layers: Count
    H_cycles: Count
    L_cycles: Count
    expansion: Positive
    seq_len: Count
    micro_batch_size: Count
    timed_steps: Count
    threads: Count
    workers: Annotated[Count, Field(validation_alias=AliasChoices("workers", "lanes"))]

    @property
    def program(self) -> Program:
        """A model with these sizes and the defaults of a recipe, and steps of a single micro-batch."""
        sizes = self.model_dump(include=set(ModelConfig.model_fields))
        return Program(
            model=ModelConfig(**sizes),
            training=TrainingConfig(effective_batch_size=self.micro_batch_size),
            data=DataSpec(self.seq_len, VOCAB_SIZE, VOCAB_SIZE),
        )

    @property
    def execution(self) -> Execution:
        return Execution(threads=self.threads, workers=self.workers)

    @property
    def flops_per_sample(self) -> int:
        program = self.program
        return flops_per_sample(program.model, program.data)


class Repeat(Section):
    """Measurements of one process: memory and CPU use in the timed steps, the peak over its lifetime."""

    samples_per_second: Annotated[list[Measured], Field(min_length=1)]  # one per timed step
    resident_peak_bytes: CountOrZero
    resident_mean_bytes: CountOrZero
    cpu_percent: PositiveOrZero  # of the cores that this process may use
    product_rate: Measured  # FLOP/s of a large float32 matrix product with the same threads
    start_seconds: Measured  # from the start of the process to the end of its first step
    first_of_command: bool  # PyTorch's files may not have been in the disk cache yet


class Results(Section):
    """The repeats of one profile."""

    work: Workload
    repeats: Annotated[list[Repeat], Field(min_length=1, max_length=MAX_REPEATS)]


class Report(Section):
    """One call of `trm bench`."""

    kind: Literal["trm bench"]
    schema_version: Literal[1, 2]
    date: datetime
    machine: dict[str, str | int | float | None]
    versions: dict[str, str]
    busy_percent: float  # share of all cores that other programs used just before
    profiles: Annotated[dict[ProfileName, Results], Field(min_length=1)]
