"""A compiled level, tried in the background: training begins at once, without it.

A child compiles, and measures what it gains; what it compiled lies on the disk then. If it is faster, the
trainer loads it between two steps. What came out is kept, so a second run knows after its first step.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict
from typing import Any

from macbook_optimization.children import ChildDied, Tell, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import CompilationError, LaptopError
from macbook_optimization.hardware_detection import HardwareDetector
from trm.backends.base import Learner
from trm.config import RunConfig
from trm.runs import Plan
from trm.tasks.base import TaskShape
from trm.training.measuring import cache_directory, keep_measurement
from trm.training.probe import Stepper
from trm.training.state import versions
from trm.training.watching import Journal, Say

WORTH_IT = 1.05  # times as fast; below that it is noise, or not worth the seconds that loading takes
LONG_SECONDS = 600.0  # a run that is over sooner would lose more to the compiler than it gains
ROUNDS = 7
AT_MOST_SECONDS = 900.0


def compiler_cache() -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_directory() / "compiled")}


def measure_gain(config: dict[str, Any], plan: dict[str, Any], tell: Tell) -> float:
    """Times as fast as without, by the best of interleaved steps: noise only slows. The body of the child.

    Of two recursions, one without and one with gradient: the level is the same in all of them. What is not
    compiled weighs more then, so that a gain looks rather smaller than larger."""
    recipe, chosen = shallow(RunConfig.model_validate(config)), Plan.from_json(plan)
    size = chosen.micro_batch_size
    way = chosen.threads, chosen.lanes
    stepper = Stepper(recipe, chosen.precision, chosen.gradient_checkpointing, way)
    stepper.begin()
    stepper.some_slots(size, cuts=1)
    stepper.learner.compile(size)
    stepper.some_slots(size, cuts=1)
    plain, compiled = [], []
    for _ in range(ROUNDS):
        stepper.learner.compile(None)
        plain.append(stepper.some_slots(size, cuts=1))
        stepper.learner.compile(size)
        compiled.append(stepper.some_slots(size, cuts=1))
    return min(plain) / min(compiled)


def shallow(config: RunConfig) -> RunConfig:
    model = config.model.model_copy(update={"H_cycles": 2, "L_cycles": 1})
    training = config.training.model_copy(update={"depths": {0: 3}})  # 2 is typical then
    return config.model_copy(update={"model": model, "training": training})


class Compiling:
    """The state of that trial, asked between steps."""

    def __init__(self, config: RunConfig, plan: Plan, shape: TaskShape, journal: Journal, say: Say) -> None:
        self.config, self.plan, self.journal, self.say = config, plan, journal, say
        self.gain: float | None = None
        self.problem: str | None = None
        self.file = cache_directory() / "compiled" / f"{_key(config, plan, shape)}.json"
        self.thread: threading.Thread | None = None
        self.settled = not self._is_wanted()
        self.in_use = False

    def go_on(self, learner: Learner, step: int, max_seconds: float | None) -> None:
        """Between two steps, the first of which is not to wait for anything."""
        if self.settled:
            return
        if self.thread is None:
            if self.config.plan.compile or self._is_known():
                self._settle(learner, step)
            elif max_seconds is not None and max_seconds < LONG_SECONDS:
                self.settled = True
            else:
                self.thread = threading.Thread(target=self._try, daemon=True)
                self.thread.start()
        elif not self.thread.is_alive():
            self._settle(learner, step)

    def _is_wanted(self) -> bool:
        asked, plan = self.config.plan.compile, self.plan
        # Compiled steps round otherwise, and the moment of the change is never the same twice.
        if asked is False or self.config.training.deterministic or plan.gradient_checkpointing != "none":
            return False
        if asked:
            return True
        if plan.samples_per_second is None or plan.predicted_peak_bytes is None or not plan.budget_bytes:
            return False
        slots = self.config.training.effective_batch_size * self.config.training.max_steps
        is_long = slots / plan.samples_per_second >= LONG_SECONDS
        return is_long and 2 * plan.predicted_peak_bytes <= plan.budget_bytes  # the child takes as much again

    def _is_known(self) -> bool:
        try:
            self.gain = float(json.loads(self.file.read_text(encoding="utf-8"))["gain"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _try(self) -> None:
        arguments = {"config": self.config.model_dump(mode="json"), "plan": self.plan.to_json()}
        variables = {**environment(self.plan.threads), **compiler_cache()}
        try:
            self.gain = run_in_child(
                f"{__name__}:measure_gain", arguments,
                environment=variables, timeout_seconds=AT_MOST_SECONDS,
            )  # fmt: skip
            keep_measurement(self.file, {"gain": self.gain})
        except (LaptopError, ChildDied) as error:
            self.problem = str(error)

    def _settle(self, learner: Learner, step: int) -> None:
        """Takes the compiled level over, if it is faster or asked for."""
        self.settled = True
        if self.problem is None and (self.config.plan.compile or (self.gain or 0) >= WORTH_IT):
            try:
                learner.compile(self.plan.micro_batch_size)
                self.in_use = True
                why = f"measured {self.gain:.2f} times as fast" if self.gain else "set by hand"
                self.say.message(f"The compiled level is in use from step {step + 1} on ({why}).")
            except CompilationError as error:
                self.problem = str(error)
        if self.problem is not None:
            self.say.message(f"Compiling failed; training goes on without it. {self.problem}")
        self.journal.event("compiled", step=step, gain=self.gain, problem=self.problem)


def _key(config: RunConfig, plan: Plan, shape: TaskShape) -> str:
    """Of everything that a compiled level and its speed depend on."""
    how = [plan.precision, plan.micro_batch_size, plan.threads, plan.lanes]
    brand = HardwareDetector().detect_cpu_specs().brand
    facts = [config.model.model_dump(mode="json"), asdict(shape), how, brand, versions()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
