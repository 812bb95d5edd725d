"""Histories of runs that never ran, second by second, for diagnoses that need minutes of rows."""

from dataclasses import dataclass, field

import numpy as np
from tiny import run_config

from trm.plan import Execution, Plan
from trm.reports.diagnosis import Watchdog
from trm.reports.history import History
from trm.reports.samples import work_of_steps
from trm.reports.thresholds import Thresholds
from trm.runs.directory import Run
from trm.runs.events import PlanChosen

GIB = 2**30
BUDGET = 8 * GIB
UPDATE_SECONDS = 5
BEGAN = 1e9


@dataclass
class Story:
    """A run on a machine with two cores. `tell` adds seconds of it and returns what the watchdog finds."""

    run: Run
    config: object
    seed: int = 0
    noise: float = 0.1  # relative standard deviation of the time of a step
    thresholds: Thresholds = field(default_factory=Thresholds)
    history: History = field(default_factory=History)
    now: float = BEGAN
    step: int = 0
    plan: Plan = field(default_factory=lambda: plan_on(2))

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.watchdog = Watchdog(self.run, self.config, self.thresholds, since=0.0, own_pid=-1)
        self.choose(self.plan)

    def choose(self, plan):
        self.plan = plan
        self.event(PlanChosen(plan.to_json()).to_row())

    def event(self, row):
        self.history.add([{"kind": "event", **row, "time": self.now}])

    def evaluate(self, value):
        row = {"kind": "eval", "time": self.now, "step": self.step, "exact_accuracy": value}
        self.history.add([row])

    def tell(self, seconds, slowness=0.02, row=None, resources=None):
        """Add rows; `slowness` is the seconds per recursion, `row` and `resources` change what rows have."""
        found = []
        for second in range(seconds):
            self.now += 1
            self.history.add([self.train_row(slowness, row or {}), self.resource_row(resources or {})])
            if second % UPDATE_SECONDS == UPDATE_SECONDS - 1:
                found += self.watchdog.update(self.history)
        return found

    def kinds(self, *arguments, **changes):
        return [finding.kind for finding in self.tell(*arguments, **changes)]

    def train_row(self, slowness, changes):
        begin = self.step
        took = 0.0
        while took < 1:
            self.step += 1
            work = work_of_steps(self.step, self.step, self.config)
            took += work * slowness * np.exp(self.rng.normal(0, self.noise))
        slots = self.config.training.effective_batch_size
        facts = {
            "kind": "train",
            "time": self.now,
            "step": self.step,
            "seconds": self.now,
            "loss": (2 if self.step < 100 else 1) + self.rng.normal(0, 0.03),
            "grad_norm": 1.0,
            "samples_per_second": (self.step - begin) * slots / took,
            "learning_rate": 1e-3,
            "micro_batch_size": self.plan.micro_batch_size,
            "rss_bytes": GIB,
            "cpu_percent": 190 + self.rng.normal(0, 5),
            "spent": {"data": 0.03, "forward": 0.4, "backward": 0.5, "optimizer": 0.07},
        }
        return changed(facts, changes)

    def resource_row(self, changes):
        own = 190 + self.rng.normal(0, 5)
        facts = {
            "kind": "resources",
            "time": self.now,
            "cpu_percent": [97.0, 98.0],
            "process_cpu_percent": own,
            "rss_bytes": GIB,
            "available_bytes": 10 * GIB,
            "total_bytes": 16 * GIB,
            "swap_bytes": GIB,
            "temperature": None,
            "thermal_level": None,
            "is_throttling": None,
            "speed_limit_percent": None,
            "battery_percent": None,
            "on_battery": None,
        }
        return changed(facts, changes)


def changed(facts, changes):
    """Replace facts by values, or by what functions make of them."""
    return {**facts, **{key: value(facts) if callable(value) else value for key, value in changes.items()}}


def plan_on(threads, size=4, **execution):
    how = Execution(threads=threads, workers=threads, **execution)
    return Plan.of(how, size, 6, budget_bytes=BUDGET)


def story(tmp_path, seed=0, noise=0.1, **changes):
    config = run_config(tmp_path / "set", **{"training__max_steps": 10**6, **changes})
    return Story(Run(tmp_path / "run"), config, seed, noise)
