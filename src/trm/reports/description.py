"""The recipe, the machine and the plan of a run in words, from its recipe, `hardware.json` and `plan.json`.

Every file may be missing or damaged; what cannot be read is left out, and the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.units import MIB, counted
from trm.config import AnyModelConfig, DecoderConfig, RunConfig
from trm.plan import Plan
from trm.reports.wording import NOT_REPORTED, significant, size
from trm.runs.rows import number
from trm.tasks.metrics import shown_value

_MAX_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of the plan."""

    name: str
    value: str
    reason: str


def read_object(path: Path, problems: list[str]) -> JsonObject:
    """Return the object in a JSON file, or an empty one and a line in `problems`."""
    try:
        found = read_json(path, _MAX_BYTES)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing.")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}.")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} holds no JSON object.")
        return {}
    return found


def recipe_facts(config: RunConfig) -> list[Fact]:
    model = config.model
    training = config.training
    schedule = f"{training.optimizer}, learning rate {training.learning_rate:g}"
    target = config.evaluation.target
    loss = config.evaluation.target_loss is not None
    facts = {
        "task": config.task,
        "dataset": str(config.data.path),
        "model": _describe_model(model),
        "supervision": training.supervision,
        "loss and optimizer": f"{training.loss}, {schedule}",
        "effective batch size": f"{training.effective_batch_size:,}",
        "steps": f"{training.last_step:,}",
        "target": "none" if target is None else shown_value("loss" if loss else "accuracy", target),
        "seed": str(config.seed),
    }
    return [Fact(name, value) for name, value in facts.items()]


def _describe_model(model: AnyModelConfig) -> str:
    layers = f"{counted(model.num_layers, 'layer')}, hidden size {model.hidden_size}"
    if isinstance(model, DecoderConfig):
        return f"decoder: {layers}, {model.num_heads} heads of which {model.kv_heads} have keys and values"
    return f"{model.variant} with mixer {model.mixer}: {layers}, {model.H_cycles} x {model.L_cycles} cycles"


def machine_facts(hardware: JsonMapping) -> list[Fact]:
    """Describe `hardware.json`, which another version may have written."""
    cpu = _section(hardware, "cpu")
    memory = _section(hardware, "memory")
    platform = _section(hardware, "platform")
    if not (cpu or memory or platform):
        return []
    system = f"{_known(platform.get('system'))} {_known(platform.get('os_version'))}"
    versions = (
        f"Python {_known(platform.get('python_version'))}, torch {_known(platform.get('torch_version'))}"
    )
    return [
        Fact("model", _known(platform.get("machine_model"))),
        Fact("CPU", f"{_known(cpu.get('brand'))}, {_known(cpu.get('architecture'))}"),
        Fact("cores", _cores(cpu)),
        Fact("memory", size(number(memory.get("total_memory")))),
        Fact("available at the start", size(number(memory.get("available_memory")))),
        Fact("system", system),
        Fact("software", versions),
    ]


def _cores(cpu: JsonMapping) -> str:
    kinds = ""
    if cpu.get("performance_cores"):
        kinds = f", {cpu['performance_cores']} performance and {cpu.get('efficiency_cores')} efficiency cores"
    return f"{_known(cpu.get('cores'))} ({_known(cpu.get('threads'))} threads{kinds})"


def num_cores(hardware: JsonMapping) -> int | None:
    """Return the logical cores, of which `cpu_percent` counts each as 100 %."""
    threads = _section(hardware, "cpu").get("threads")
    return threads if isinstance(threads, int) and threads > 0 else None


def total_memory(hardware: JsonMapping) -> int | None:
    total = _section(hardware, "memory").get("total_memory")
    return total if isinstance(total, int) and total > 0 else None


def plan_choices(plan: Plan) -> list[Choice]:
    how = plan.execution
    reasons = plan.reasons if isinstance(plan.reasons, Mapping) else {}
    speed = plan.samples_per_second
    values = {
        "micro_batch_size": f"{plan.accumulation_steps} x {plan.micro_batch_size} examples",
        "threads": counted(how.threads, "thread"),
        "workers": counted(how.workers, "worker"),
        "precision": how.precision,
        "gradient_checkpointing": how.gradient_checkpointing,
        "allocator": how.allocator,
        "compile": "no" if how.compiled_size is None else f"for micro-batches of {how.compiled_size}",
        "memory": f"{size(plan.predicted_peak_bytes)} predicted, budget {size(plan.budget_bytes)}",
        "samples_per_second": NOT_REPORTED if speed is None else f"{significant(speed)} when it was measured",
        "backend": f"{how.backend} on {how.device}",
    }
    shown = (
        Choice(name.replace("_", " "), value, str(reasons.get(name, ""))) for name, value in values.items()
    )
    return list(shown)


def _section(facts: JsonMapping, name: str) -> JsonMapping:
    found = facts.get(name)
    return found if isinstance(found, Mapping) else {}


def _known(value: object) -> str:
    return NOT_REPORTED if value is None else str(value)
