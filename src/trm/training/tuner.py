"""Finding a better plan while training runs: auto-tuning during warm-up, then a compile trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from macbook_optimization.memory_management import MemoryManager
from trm.backends.base import Learner
from trm.config import RunConfig
from trm.plan import Plan
from trm.planning.compile_trial import CompileResult, CompileTrial
from trm.planning.measurements import Parallelism
from trm.planning.planner import Planner
from trm.planning.warmup import WarmUp
from trm.runs.events import CompileTried
from trm.tasks.base import DataSpec
from trm.training.log import RunLog, show_plan


@dataclass
class Tuner:
    config: RunConfig
    data: DataSpec
    plan: Plan
    log: RunLog
    read_peak: Callable[[], int]  # memory as the backend counts it
    warmup: WarmUp | None = None
    compile_trial: CompileTrial = field(init=False)

    def __post_init__(self) -> None:
        self.compile_trial = CompileTrial(self.config, self.plan, self.data)

    def start_warmup(self, planner: Planner, apply: Callable[[Plan], None], *, cache: bool) -> None:
        """Replace the provisional plan by trials; `apply` puts each into effect."""

        def try_out(size: int, parallelism: Parallelism) -> None:
            num_slots = self.config.training.effective_batch_size
            trial = self.plan.with_micro_batch(size, num_slots, "tried during warm-up")
            apply(trial.with_execution(**parallelism._asdict()))

        self.warmup = WarmUp(planner, self.plan, try_out, cache=cache, read_peak=self.read_peak)
        self.warmup.begin()

    def after_step(
        self,
        step: int,
        seconds: float,
        memory: MemoryManager,
        learner: Learner,
        max_seconds: float | None,
    ) -> Plan | None:
        """Return a new plan, if there is one."""
        tuned = None
        if self.warmup is not None:
            tuned = self.warmup.after_step(step, seconds, memory)
            if tuned is None:
                return None
            self.warmup = None
            self.plan = tuned
            self.compile_trial = CompileTrial(self.config, tuned, self.data)
            show_plan(self.log.display, self.config, tuned)
        result = self.compile_trial.after_step(learner, max_seconds)
        if result is None:
            return tuned
        self._report(result, step)
        self.plan = result.plan
        return result.plan if result.in_use else tuned

    def _report(self, result: CompileResult, step: int) -> None:
        if result.in_use:
            why = f"measured {result.gain:.2f} times as fast" if result.gain else "set by hand"
            self.log.message(f"The compiled block is in use from step {step + 1} on ({why}).")
        elif result.problem is not None:
            self.log.message(f"Compiling failed; training continues without it. {result.problem}")
        self.log.event(CompileTried(step, result.gain, result.problem))
