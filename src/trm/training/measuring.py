"""What a step takes on this machine: measured by a child or in first steps, and kept for the next start."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import AllocationFailed, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.memory_management import MIB
from macbook_optimization.training_config_adapter import Checkpointing
from trm.config import RunConfig
from trm.tasks.base import TaskShape
from trm.training.probe import Size, Way
from trm.training.watching import Say

PROBE_SECONDS = 600
BUSY_PERCENT = 25  # of all cores; speeds that are measured beside such a program are not worth keeping


@dataclass(frozen=True, slots=True)
class Measured:
    sizes: tuple[Size, ...]  # that the line is drawn through
    by_size: dict[int, float]  # samples per second
    by_way: dict[Way, float]  # the same; empty if there was only one choice

    def to_json(self) -> dict[str, Any]:
        by_way = [(*way, rate) for way, rate in self.by_way.items()]
        return {"sizes": [asdict(size) for size in self.sizes], "by_size": self.by_size, "by_way": by_way}


@dataclass(frozen=True, slots=True)
class Question:
    config: RunConfig
    shape: TaskShape
    hardware: HardwareSpecs
    precision: str
    gradient_checkpointing: Checkpointing
    allocator: str
    ways: tuple[Way, ...]

    @property
    def file(self) -> Path:
        """Where a probe's answer is kept."""
        return cache_directory() / "probes" / f"{self.key()}.json"

    @property
    def first_steps(self) -> Path:
        """Where a run keeps what its first steps told; of memory they know less than a probe."""
        return self.file.with_suffix(".first-steps.json")

    def key(self) -> str:
        """Of everything that memory and speed depend on."""
        config, cpu = self.config, self.hardware.cpu
        facts = {
            "model": config.model.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json", exclude={"learning_rate", "max_steps"}),
            "shape": [asdict(self.shape), _mapped_mib(config.data.path)],
            "how": [self.precision, self.gradient_checkpointing, self.allocator, self.ways],
            "machine": [cpu.brand, cpu.architecture, cpu.cores, cpu.quota, self.hardware.memory.total_memory],
            "versions": [version(name) for name in ("torch", "numpy", "macbook-trm")] + [sys.version],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _mapped_mib(dataset: Path) -> int:
    """Mapped files count as memory of the process, as far as they have been read."""
    return sum(file.stat().st_size for file in dataset.glob("*/*.npy")) // MIB


def measure(question: Question, budget_bytes: int, say: Say, keep: bool) -> Measured | None:
    """From the cache or by a probe; None if no size survived."""
    if (known := read_measurement(question.file)) is not None:
        return known
    busy = psutil.cpu_percent(interval=0.2) > BUSY_PERCENT
    hint = " Other programs are busy, so it will be measured again at the next start." if busy else ""
    say.message(f"Measuring what a step takes on this machine.{hint}")
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    try:
        found = _probe(question, budget_bytes, rows)
    except (MemoryBudgetError, AllocationFailed):
        pass  # what was told before still holds
    except ChildDied as death:
        if not (death.of_memory or death.signal == signal.SIGILL):
            raise RunError(f"The probe of a step {death}.", hint="This is a bug.") from death
    if not rows:
        return None
    measured = _measured(rows, found)
    if found.get("whole") and keep and not busy:  # not what a tight budget or a death left unfinished
        keep_measurement(question.file, measured.to_json())
    return measured


def _probe(question: Question, budget_bytes: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    arguments = {
        "config": question.config.model_dump(mode="json"),
        "precision": question.precision,
        "gradient_checkpointing": question.gradient_checkpointing,
        "ways": question.ways,
        "budget_bytes": budget_bytes,
        "available_bytes": question.hardware.memory.available_memory,
    }
    variables = environment(max(question.ways)[0], compact=question.allocator == "compact")
    answer: dict[str, Any] = run_in_child(
        "trm.training.probe:probe",
        arguments,
        tell=rows.append,
        environment=variables,
        timeout_seconds=PROBE_SECONDS,
    )
    return answer


def cache_directory() -> Path:
    """Where measurements are kept; deleting it costs a few seconds."""
    if "TRM_CACHE_DIR" in os.environ:
        return Path(os.environ["TRM_CACHE_DIR"])
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME", default)) / "macbook-trm"


def read_measurement(file: Path) -> Measured | None:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        return _measured(facts["sizes"], {"rates": facts["by_size"], "ways": facts["by_way"]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measured(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Measured:
    """From JSON, whose keys are strings. A probe that died before its end has told its sizes only."""
    sizes = tuple(Size(**row) for row in rows)
    rates = found.get("rates") or {size.micro_batch_size: size.samples_per_second for size in sizes}
    return Measured(
        sizes,
        {int(size): rate for size, rate in rates.items()},
        {(threads, lanes): rate for threads, lanes, rate in found.get("ways", ())},
    )


def keep_measurement(file: Path, facts: Mapping[str, Any]) -> None:
    """One that cannot be written only means measuring again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(file)
