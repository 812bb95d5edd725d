"""Differences between two runs: the keys of their recipes, their plans and their machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.units import MIB
from trm.runs.directory import Run

_MAX_MACHINE_BYTES = MIB
_MACHINE_KEYS = (
    "cpu.brand",
    "cpu.architecture",
    "cpu.cores",
    "cpu.threads",
    "cpu.quota",
    "memory.total_memory",
    "platform.system",
    "platform.os_version",
    "platform.machine_model",
    "platform.python_version",
)
_PLAN_KEYS = (
    "backend",
    "device",
    "micro_batch_size",
    "accumulation_steps",
    "threads",
    "workers",
    "precision",
    "gradient_checkpointing",
    "allocator",
    "compiled_size",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value is not the same; None where a run does not have it."""

    key: str
    first: object
    second: object


def differences(first: JsonMapping, second: JsonMapping) -> list[Difference]:
    """List the leaves that differ, in the order of the first tree."""
    ours = dict(_leaves(first))
    theirs = dict(_leaves(second))
    keys = dict.fromkeys([*ours, *theirs])
    return [
        Difference(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)
    ]


def _leaves(tree: JsonMapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and not all(str(inner).isdigit() for inner in value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:  # also a schedule, whose keys are steps
            yield f"{prefix}{key}", value


def plan_facts(run: Run) -> JsonObject:
    """Return how a run is executed; nothing if its plan cannot be read."""
    plan = run.plan
    if plan is None:
        return {}
    facts = plan.to_json()
    return {key: facts[key] for key in _PLAN_KEYS}


def machine_facts(run: Run) -> JsonObject:
    """Return what does not change from start to start; nothing for a run of an earlier version."""
    try:
        facts = read_json(run.path / "hardware.json", _MAX_MACHINE_BYTES)
    except (OSError, ValueError):
        return {}
    known = dict(_leaves(facts)) if isinstance(facts, Mapping) else {}
    return {key: known.get(key) for key in _MACHINE_KEYS}
