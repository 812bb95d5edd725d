"""Problems of a run: for a report, and while it trains.

Each problem is a function of the evidence that returns a finding or None. Problems that explain each other
are reported once: slow steps beside a busy program are contention, not throttling.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trm.config import RunConfig
from trm.reports.earlier_runs import EarlierRun, find_earlier_run
from trm.reports.evidence import Evidence
from trm.reports.finding import Finding
from trm.reports.history import History
from trm.reports.learning_problems import instability, memory_leak, plateau
from trm.reports.machine_problems import (
    CONTENTION,
    contention,
    cpu_underuse,
    inferred_throttling,
    memory_bottleneck,
    reported_throttling,
    swapping,
)
from trm.reports.other_programs import Snapshot, compare, take_snapshot
from trm.reports.speed_problems import data_starvation, slower_run, slower_steps
from trm.reports.thresholds import Thresholds
from trm.runs.directory import Run
from trm.runs.metric import primary_metric

Diagnose = Callable[[Evidence], Finding | None]
INDEPENDENT: tuple[Diagnose, ...] = (memory_leak, instability, plateau)
# What makes steps slow, and with it cores idle: one of these explains the problems below.
CAUSES: tuple[Diagnose, ...] = (
    swapping,
    memory_bottleneck,
    data_starvation,
    contention,
    reported_throttling,
    inferred_throttling,
)


def find_problems(evidence: Evidence, earlier: EarlierRun | None = None) -> list[Finding]:
    """Return every problem that the evidence shows now."""
    independent = [problem(evidence) for problem in INDEPENDENT]
    causes = [problem(evidence) for problem in CAUSES]
    symptoms = []
    if not any(causes):
        symptoms = [slower_steps(evidence), cpu_underuse(evidence)]
        if symptoms[0] is None:
            symptoms.append(slower_run(evidence, earlier))
    return [found for found in (*independent, *causes, *symptoms) if found is not None]


def diagnose(run: Run, history: History) -> list[Finding]:
    """Return the problems that a run has at its end. A monitor recorded earlier ones as events.

    Contention is left to those events: only while a run is trained can other programs be distinguished
    from what `trm train` itself started, and be named.
    """
    config = run.config
    evidence = Evidence(config, metric=metric_of(run))
    evidence.update(history)
    found = find_problems(evidence, find_earlier_run(run, config, evidence.plan, evidence.began))
    return [finding for finding in found if finding.kind != CONTENTION]


def metric_of(run: Run) -> str | None:
    """Return the name of the primary metric; None before the first evaluation."""
    best = run.checkpoints().best()
    found = None if best is None else primary_metric(best)
    return None if found is None else found[0]


@dataclass
class Watchdog:
    """Diagnoses a run while it trains. Call `update` every few seconds, in a process that trains nothing.

    Rows before `since` belong to an earlier start. `own_pid` is the command that trains: what it started,
    such as a compiler in the background, is not another program.
    """

    run: Run
    config: RunConfig
    thresholds: Thresholds = field(default_factory=Thresholds)
    since: float = field(default_factory=time.time)
    own_pid: int = field(default_factory=os.getpid)
    evidence: Evidence = field(init=False)
    _last_seen: dict[str, float] = field(default_factory=dict)  # kind -> when its cause was last there
    _programs: Snapshot | None = None  # at the last call, while other programs seem to be busy
    _earlier: EarlierRun | None = None
    _num_evaluations: int = 0

    def __post_init__(self) -> None:
        self.evidence = Evidence(self.config, self.thresholds, self.since)

    def update(self, history: History) -> list[Finding]:
        """Return what is new. Each kind is returned once until its cause has been gone for a while."""
        evidence = self.evidence
        had_baseline = evidence.has_baseline
        if not evidence.update(history):
            return []
        if len(history.evaluations) != self._num_evaluations:
            self._num_evaluations = len(history.evaluations)
            evidence.metric = metric_of(self.run) or evidence.metric
        if evidence.has_baseline and not had_baseline:
            self._earlier = find_earlier_run(self.run, self.config, evidence.plan, evidence.began)
        found = self._without_our_own(find_problems(evidence, self._earlier))
        return self._new(found)

    def _new(self, found: list[Finding]) -> list[Finding]:
        new = [finding for finding in found if not self._is_known(finding.kind)]
        self._last_seen.update({finding.kind: self.evidence.now for finding in found})
        return new

    def _is_known(self, kind: str) -> bool:
        """Return whether this kind was reported and its cause has not been gone for long."""
        seen = self._last_seen.get(kind)
        return seen is not None and self.evidence.now - seen <= self.thresholds.gone_seconds

    def _without_our_own(self, found: list[Finding]) -> list[Finding]:
        """Confirm contention, and name the program, by what ran from the last call to this one."""
        if self._is_known(CONTENTION):
            return found
        others = [finding for finding in found if finding.kind != CONTENTION]
        if len(others) == len(found):
            self._programs = None
            return found
        before = self._programs
        self._programs = take_snapshot()
        if before is None:
            return others
        confirmed = contention(self.evidence, compare(before, self._programs, self.own_pid))
        return others if confirmed is None else [*others, confirmed]
