"""Recipe x hardware -> plan, with a reason for every choice.

A plan describes how this machine executes a recipe, never what is learned. A smaller recipe for a small
machine is a different recipe, which the user requests and sees as a list of changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from macbook_optimization.errors import MemoryBudgetError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import MARGIN, MemoryModel
from macbook_optimization.units import GIB, MIB, counted

Checkpointing = Literal["none", "alternate", "all"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A model and plan for machines of one memory size. The values are documented ones, not measured."""

    name: str
    memory_gb: int
    hidden_size: int
    num_heads: int
    L_layers: int
    expansion: float
    max_sequence_length: int
    batch_size: int
    gradient_accumulation_steps: int
    memory_limit_mb: int
    threads: int


PROFILES = (
    Profile("8gb", 8, 256, 8, 2, 2.0, 256, 2, 16, 5500, 2),
    Profile("16gb", 16, 384, 12, 2, 4.0, 512, 4, 8, 12000, 4),
    Profile("32gb", 32, 512, 16, 3, 4.0, 768, 8, 4, 24000, 8),
)

# Adam's step size hardly depends on the size of the gradient. The noise of the gradient, not its mean, limits
# the learning rate, which therefore grows with the square root of the batch size. The paper's rate belongs to
# its batch of 768.
PAPER_BATCH = 768
PAPER_LEARNING_RATE = 1e-4


def profile_for(total_memory: int) -> Profile:
    """Return the largest profile that fits; firmware may reserve up to a tenth of the nominal memory."""
    fitting = [p for p in PROFILES if 0.9 * p.memory_gb * GIB <= total_memory]
    return fitting[-1] if fitting else PROFILES[0]


def scaled_learning_rate(learning_rate: float, batch_before: int, batch_after: int) -> float:
    return learning_rate * math.sqrt(batch_after / batch_before)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    micro_batch_size: int
    accumulation_steps: int


def plan_batches(
    effective_batch_size: int, memory: MemoryModel, budget_bytes: int, at_most: int | None = None
) -> BatchPlan:
    """Split one effective batch into the fewest micro-batches of nearly equal size that fit with a margin."""
    largest = memory.largest_batch(budget_bytes * (1 - MARGIN))
    if largest < 1:
        needed = math.ceil(memory.needed_bytes() / MIB)
        raise MemoryBudgetError(
            f"One example at a time needs {needed} MiB, but the budget is {budget_bytes // MIB} MiB.",
            hint=f"Close other programs, or raise the limit: limits.memory_limit_mb={needed}",
        )
    steps = math.ceil(effective_batch_size / min(largest, at_most or largest))
    return BatchPlan(math.ceil(effective_batch_size / steps), steps)


@dataclass(frozen=True, slots=True)
class OptimizedTrainingConfig:
    """All settings of training on this machine in one flat record, for code that has no recipe."""

    batch_size: int
    gradient_accumulation_steps: int
    max_sequence_length: int
    memory_limit_mb: int
    enable_memory_monitoring: bool
    dynamic_batch_sizing: bool
    num_workers: int
    pin_memory: bool
    use_mkl: bool
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    max_steps: int
    checkpoint_interval: int
    max_checkpoints_to_keep: int

    @property
    def effective_batch_size(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The result of validation: problems, and values that replace plan-level settings that cannot work."""

    errors: tuple[str, ...]  # the configuration cannot run on this machine
    warnings: tuple[str, ...]  # one per correction
    suggestions: tuple[str, ...]
    corrections: JsonMapping

    @property
    def is_valid(self) -> bool:
        return not self.errors


class TrainingConfigAdapter:
    """Adapts configurations to a machine; by default the one it runs on."""

    def __init__(self, hardware: HardwareSpecs | None = None) -> None:
        self._hardware = hardware

    @property
    def hardware(self) -> HardwareSpecs:
        if self._hardware is None:
            from macbook_optimization.hardware_detection import HardwareDetector

            self._hardware = HardwareDetector().detect(with_torch=False)
        return self._hardware

    def adapt_model_config(
        self, base_config: JsonMapping, hardware_specs: HardwareSpecs | None = None
    ) -> JsonObject:
        """Limit `base_config` to the profile of the machine, and fill in what it lacks."""
        profile = profile_for((hardware_specs or self.hardware).memory.total_memory)
        adapted = dict(base_config)
        for name in ("hidden_size", "L_layers", "expansion"):
            adapted[name] = min(base_config.get(name, math.inf), getattr(profile, name))
        if "seq_len" in base_config:
            adapted["seq_len"] = min(base_config["seq_len"], profile.max_sequence_length)
        max_heads = min(base_config.get("num_heads", profile.num_heads), adapted["hidden_size"])
        adapted["num_heads"] = fitting_heads(adapted["hidden_size"], max_heads)
        return adapted

    def calculate_training_parameters(
        self, dataset_size: int, hardware_specs: HardwareSpecs | None = None
    ) -> OptimizedTrainingConfig:
        """Take the batch from the profile, the learning rate from the batch, and the steps from the data."""
        hardware = hardware_specs or self.hardware
        profile = profile_for(hardware.memory.total_memory)
        limit_mb = min(profile.memory_limit_mb, int(0.8 * hardware.memory.available_memory / MIB))
        effective = profile.batch_size * profile.gradient_accumulation_steps
        max_steps = max(1000, math.ceil(100 * dataset_size / effective))  # about a hundred epochs
        return OptimizedTrainingConfig(
            batch_size=profile.batch_size,
            gradient_accumulation_steps=profile.gradient_accumulation_steps,
            max_sequence_length=profile.max_sequence_length,
            memory_limit_mb=limit_mb,
            enable_memory_monitoring=True,
            dynamic_batch_sizing=True,
            num_workers=0,  # a mapped file and a thread are safer (workers are reported to be slow on macOS)
            pin_memory=False,  # helps copies to a GPU only
            use_mkl=hardware.cpu.architecture == "x86_64",
            learning_rate=scaled_learning_rate(PAPER_LEARNING_RATE, PAPER_BATCH, effective),
            weight_decay=0.1,
            warmup_steps=min(2000, max_steps // 20),
            max_steps=max_steps,
            checkpoint_interval=max(1, max_steps // 100),
            max_checkpoints_to_keep=3,
        )

    def validate_configuration(self, config: JsonMapping | OptimizedTrainingConfig) -> ValidationResult:
        """Report every setting that cannot run on this machine, and the corrections that make it run.

        Only names of the plan and documented names are checked; the recipe validates its other keys itself.
        """
        values = dict(config) if isinstance(config, Mapping) else asdict(config)
        validator = _Validator(self.hardware)
        for name, value in values.items():
            if value is not None and name in _CHECKS:
                _CHECKS[name](validator, name, value)
        validator.heads(values)
        return ValidationResult(
            errors=tuple(validator.errors),
            warnings=tuple(validator.warnings),
            suggestions=tuple(validator.suggestions),
            corrections=validator.corrections,
        )


def fitting_heads(hidden_size: int, wanted: int) -> int:
    """Return the largest number of heads, up to `wanted`, that gives heads of equal and even size."""
    for heads in range(max(1, wanted), 0, -1):
        head_size, remainder = divmod(hidden_size, heads)
        if remainder == 0 and head_size % 2 == 0:
            return heads
    return 1


class _Validator:
    """Collects the problems of a configuration; each method checks one kind of setting."""

    def __init__(self, hardware: HardwareSpecs) -> None:
        self.cpu = hardware.cpu
        self.memory = hardware.memory
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.suggestions: list[str] = []
        self.corrections: JsonObject = {}

    def correct(self, name: str, value: Any, corrected: Any, reason: str) -> None:
        self.corrections[name] = corrected
        self.warnings.append(f"{name} is {corrected} instead of {value}: {reason}")

    def positive(self, name: str, value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 < value < math.inf:
            return True
        self.errors.append(f"{name} is {value!r}; it must be a number above 0")
        return False

    def threads(self, name: str, value: Any) -> None:
        limit = self.cpu.threads if self.cpu.quota is None else max(1, int(self.cpu.quota))
        if self.positive(name, value) and value > limit:
            reason = f"this machine runs {counted(limit, 'thread')} in parallel"
            self.correct(name, value, self.cpu.compute_threads, reason)

    def workers(self, name: str, value: Any) -> None:
        if not isinstance(value, int) or value < 0:
            self.errors.append(f"{name} is {value!r}; it must be 0 or more")
        elif value > self.cpu.threads:
            reason = f"this machine runs {counted(self.cpu.threads, 'thread')} in parallel"
            self.correct(name, value, self.cpu.threads, reason)

    def limit(self, name: str, value: Any) -> None:
        total_mb = self.memory.total_memory // MIB
        if self.positive(name, value) and value > total_mb:
            self.correct(name, value, total_mb, f"this machine has {total_mb} MiB")

    def pinned(self, name: str, value: Any) -> None:
        if value:
            self.correct(name, value, False, "it only speeds up copies to a GPU")

    def rate(self, name: str, value: Any) -> None:
        if self.positive(name, value) and value >= 1:
            self.errors.append(f"{name} is {value}; it must be between 0 and 1")
            self.suggestions.append(
                f"{name}={PAPER_LEARNING_RATE:g} is the paper's, for a batch of {PAPER_BATCH}"
            )

    def size(self, name: str, value: Any) -> None:
        """Suggest the size of the profile. A larger one may still fit; only a measurement shows that."""
        profile = profile_for(self.memory.total_memory)
        suggested = getattr(profile, {"num_layers": "L_layers"}.get(name, name))
        if self.positive(name, value) and value > suggested:
            machine = f"a machine of this size ({profile.name} profile)"
            self.suggestions.append(f"{name}={suggested:g} suits {machine}")

    def heads(self, values: JsonMapping) -> None:
        hidden_size = values.get("hidden_size") or 0
        num_heads = values.get("num_heads") or 0
        are_integers = isinstance(hidden_size, int) and isinstance(num_heads, int)
        if are_integers and num_heads > 0 and hidden_size % num_heads:
            self.errors.append(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}")
            self.suggestions.append(f"num_heads={fitting_heads(hidden_size, num_heads)}")


_CHECKS = {
    **dict.fromkeys(("threads", "cpu_threads", "torch_threads"), _Validator.threads),
    **dict.fromkeys(("num_workers", "preprocessing_workers"), _Validator.workers),
    **dict.fromkeys(("hidden_size", "L_layers", "num_layers", "max_sequence_length"), _Validator.size),
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "gradient_accumulation_steps", "max_steps", "num_heads"),
        _Validator.positive,
    ),
    "memory_limit_mb": _Validator.limit,
    "pin_memory": _Validator.pinned,
    "learning_rate": _Validator.rate,
}
