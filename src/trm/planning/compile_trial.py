"""A compiled block, tried in the background: training starts without it.

A child process compiles and measures the gain; what it compiled is then on disk. If it is faster, the trainer
loads it between two steps. The result is cached, so that a second run knows it after its first step.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import CompilationError, LaptopError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.json_types import JsonMapping
from trm.backends.base import Learner, Program
from trm.config import RunConfig
from trm.plan import Plan
from trm.planning.cache import cache_directory, cache_key, read_cached, write_cached
from trm.planning.probe import Stepper
from trm.tasks.base import DataSpec

WORTH_IT = 1.05  # below this speed-up it is noise, or not worth the seconds that loading takes
LONG_RUN_SECONDS = 600.0  # a shorter run would lose more to the compiler than it gains
ROUNDS = 7
COMPILE_TIMEOUT_SECONDS = 900.0


def compiler_cache() -> dict[str, str]:
    """Return environment variables that make processes share what they compile."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_directory() / "compiled")}


def measure_gain(config: JsonMapping, plan: JsonMapping, send: Send) -> float:
    """Return the speed-up, from the best of interleaved steps, as noise only slows. The child's body.

    Steps have two recursions, one without and one with gradient: the block is the same in all of them. What
    is not compiled weighs more then, so the gain is rather underestimated.
    """
    chosen = Plan.from_json(plan)
    size = chosen.micro_batch_size
    stepper = Stepper(shallow(RunConfig.model_validate(config)), chosen.execution)
    stepper.begin()
    stepper.seconds_per_slot(size)
    stepper.compile_for(size)
    stepper.seconds_per_slot(size)
    plain, compiled = [], []
    for _ in range(ROUNDS):
        stepper.compile_for(None)
        plain.append(stepper.seconds_per_slot(size))
        stepper.compile_for(size)
        compiled.append(stepper.seconds_per_slot(size))
    return min(plain) / min(compiled)


def shallow(config: RunConfig) -> RunConfig:
    model = config.model.model_copy(update={"H_cycles": 2, "L_cycles": 1})
    training = config.training.model_copy(update={"depths": {0: 3}})  # which makes 2 the typical depth
    return config.model_copy(update={"model": model, "training": training})


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The end of a trial: the plan with or without the compiled block, and why."""

    plan: Plan
    in_use: bool
    gain: float | None
    problem: str | None


@dataclass
class CompileTrial:
    """The state of the trial, advanced between steps."""

    config: RunConfig
    plan: Plan
    data: DataSpec
    finished: bool = field(init=False)
    thread: threading.Thread | None = field(default=None, init=False)
    gain: float | None = field(default=None, init=False)
    problem: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.finished = not self._is_wanted()

    def after_step(self, learner: Learner, max_seconds: float | None) -> CompileResult | None:
        """Return the result once there is one. The first step never waits for a compiler."""
        if self.finished:
            return None
        if self.thread is not None:
            return None if self.thread.is_alive() else self._finish(learner)
        if self.config.plan.compile or self._is_cached():
            return self._finish(learner)
        if max_seconds is not None and max_seconds < LONG_RUN_SECONDS:
            self.finished = True
            return None
        self.thread = threading.Thread(target=self._measure, daemon=True)
        self.thread.start()
        return None

    def _is_wanted(self) -> bool:
        requested = self.config.plan.compile
        plan = self.plan
        # Compiled steps round differently, and the moment of the change is never the same twice.
        recomputes = plan.execution.gradient_checkpointing != "none"
        on_gpu = plan.execution.backend == "pytorch" and plan.execution.device != "cpu"
        if self.config.model.kind == "decoder" or on_gpu:  # only the block of a recursion is compiled
            return False
        if requested is False or self.config.training.deterministic or recomputes:
            return False
        if requested:
            return True
        if plan.samples_per_second is None or plan.predicted_peak_bytes is None or not plan.budget_bytes:
            return False
        samples = self.config.training.effective_batch_size * self.config.training.last_step
        is_long = samples / plan.samples_per_second >= LONG_RUN_SECONDS
        return is_long and 2 * plan.predicted_peak_bytes <= plan.budget_bytes  # the child takes as much again

    @property
    def _file(self) -> Path:
        how = self.plan.execution
        key = cache_key(
            Program.of(self.config, self.data),
            HardwareDetector().detect(with_torch=False),
            how.backend,
            compiled=[asdict(how), self.plan.micro_batch_size],
        )
        return cache_directory() / "compiled" / f"{key}.json"

    def _is_cached(self) -> bool:
        gain = (read_cached(self._file) or {}).get("gain")
        self.gain = float(gain) if isinstance(gain, int | float) else None
        return self.gain is not None

    def _measure(self) -> None:
        try:
            self.gain = run_in_child(
                f"{__name__}:measure_gain",
                {"config": self.config.model_dump(mode="json"), "plan": self.plan.to_json()},
                environment={**environment(self.plan.execution.threads), **compiler_cache()},
                timeout_seconds=COMPILE_TIMEOUT_SECONDS,
            )
            write_cached(self._file, {"gain": self.gain})
        except (LaptopError, ChildDied, OSError) as error:
            self.problem = str(error)

    def _finish(self, learner: Learner) -> CompileResult:
        """Load the compiled block if it is faster or was requested."""
        self.finished = True
        wanted = self.config.plan.compile or (self.gain or 0) >= WORTH_IT
        if self.problem is not None or not wanted:
            return CompileResult(self.plan, False, self.gain, self.problem)
        compiled = replace(self.plan.execution, compiled_size=self.plan.micro_batch_size)
        try:
            learner.reconfigure(compiled)
        except CompilationError as error:
            return CompileResult(self.plan, False, self.gain, str(error))
        return CompileResult(replace(self.plan, execution=compiled), True, self.gain, None)
