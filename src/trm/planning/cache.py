"""Measurements that are kept for the next start. Deleting them costs a few seconds."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MIB
from trm.backends.base import LIBRARIES, Program
from trm.planning.measurements import Measurements

CACHE_VARIABLE = "TRM_CACHE_DIR"  # names another directory for all measurements
_SCHEMA = 3  # of what is stored
_MAX_BYTES = MIB  # of one file; measurements take a few KiB
_OF_NO_CONSEQUENCE = {
    "learning_rate",
    "max_steps",
    "extensions",
    "early_stopping",
    "initial_embeddings",
    "initial_weights",
}


def cache_directory() -> Path:
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE])
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME", default)) / "macbook-trm"


def versions(backend: str = "pytorch") -> dict[str, str]:
    """Return the versions that decide about speed and rounding."""
    packages = {name: version(name) for name in (LIBRARIES[backend], "numpy", "safetensors")}
    return {"python": platform.python_version(), **packages}


def cache_key(program: Program, hardware: HardwareSpecs, backend: str, **how: Any) -> str:
    """Return a hash of everything that memory and speed depend on."""
    cpu = hardware.cpu
    facts = {
        "schema": _SCHEMA,
        "model": program.model.model_dump(mode="json"),
        "training": program.training.model_dump(mode="json", exclude=_OF_NO_CONSEQUENCE),
        "data": asdict(program.data),
        "machine": [cpu.brand, cpu.architecture, cpu.cores, cpu.quota, hardware.memory.total_memory],
        "versions": [*versions(backend).values(), version("macbook-trm"), sys.version],
        "how": how,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def mapped_mib(dataset: Path) -> int:
    """Return the size of a dataset: mapped files count as memory of the process, as far as they were read."""
    return sum(file.stat().st_size for file in dataset.glob("*/*.npy")) // MIB


def read_cached(file: Path) -> JsonObject | None:
    try:
        facts = read_json(file, _MAX_BYTES)
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def read_measurements(file: Path) -> Measurements | None:
    facts = read_cached(file)
    try:
        return None if facts is None else Measurements.from_json(facts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_measurements(file: Path, measured: Measurements) -> None:
    """Store measurements, and whether they replace disturbed ones."""
    earlier = read_measurements(file)
    is_repeated = earlier is not None and earlier.is_disturbed
    write_cached(file, replace(measured, is_repeated=is_repeated).to_json())


def write_cached(file: Path, facts: JsonMapping) -> None:
    """Store facts; if that fails, they are only measured again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(file)
