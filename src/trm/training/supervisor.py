"""`trm train` is a small parent without torch, and a trainer that it starts as a child process.

Running out of memory is not an exception on a real machine: the process is killed. So the parent interprets
how its child ended, lowers the plan and starts it again from the newest intact checkpoint. A recipe learns
the same with every plan, so nothing else changes. It gives up after three deaths at the smallest plan without
progress.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import LaptopError, MemoryBudgetError, RunError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.linux_readers import oom_kills
from trm.display import Display, show_forwarded
from trm.plan import Plan
from trm.planning.compile_trial import compiler_cache
from trm.planning.fitting import too_large
from trm.runs.events import Restarted
from trm.tasks.registry import load_task
from trm.training.log import RunLog
from trm.training.loop import Limits, Outcome
from trm.training.machines import LOST_PEER_CODES
from trm.training.preparation import Job
from trm.training.profiling import QUIET_ENVIRONMENT
from trm.training.start import OUT_OF_MEMORY, open_splits
from trm.training.together import REGROUPING

MAX_DEATHS_AT_SMALLEST_PLAN = 3  # without a checkpoint between them
MAX_KEPT_PLANS = 10  # likewise: this often, deterministic training keeps its plan after a kill
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class History:
    """The deaths since the newest checkpoint."""

    step: int | None = None  # of that checkpoint
    at_smallest_plan: int = 0
    kept_plans: int = 0

    def at(self, step: int | None) -> History:
        """Forget the deaths if there is a newer checkpoint."""
        return self if step == self.step else History(step)


@dataclass(frozen=True, slots=True)
class Restart:
    plan: Plan
    history: History


@dataclass(frozen=True, slots=True)
class ProbeFirst:
    """The plan was provisional: a probe must find out what fits."""

    history: History


@dataclass(frozen=True, slots=True)
class GiveUp:
    deaths: int


Decision = Restart | ProbeFirst | GiveUp


def next_plan(death: ChildDied, plan: Plan, history: History, num_slots: int, *, keep_plan: bool) -> Decision:
    """Decide what follows a death. Raises where no plan would help.

    `keep_plan`: another plan would change rounding, and nothing indicates that memory was the cause.
    """
    if keep_plan and history.kept_plans < MAX_KEPT_PLANS:
        return Restart(plan, replace(history, kept_plans=history.kept_plans + 1))
    smaller = smaller_plan(death, plan, num_slots)
    if plan.provisional:
        return ProbeFirst(history)
    if smaller != plan:
        return Restart(smaller, history)
    deaths = history.at_smallest_plan + 1
    if death.code == OUT_OF_MEMORY or deaths >= MAX_DEATHS_AT_SMALLEST_PLAN:
        return GiveUp(deaths)  # the first would fail in the same place again
    return Restart(plan, replace(history, at_smallest_plan=deaths))


def smaller_plan(death: ChildDied, plan: Plan, num_slots: int) -> Plan:
    """Return the next smaller plan, or the same one if there is none; raise where no plan would help."""
    if death.code == 130 or death.signal in _STOP_SIGNALS:  # a second Ctrl-C, or one before the first step
        raise KeyboardInterrupt
    if death.traceback_shown and not death.may_be_out_of_memory:
        raise RunError(
            "The trainer ended with an unexpected error, shown above; its checkpoints are intact.",
            hint="This is a bug. The same command resumes from the newest checkpoint.",
        )
    cause = f"the trainer {death}"
    if death.signal == signal.SIGILL:
        if plan.execution.precision == "float32":
            raise RunError(
                "This CPU lacks an instruction that the installed PyTorch uses.",
                hint="Install a PyTorch made for this CPU; see `trm doctor`.",
            )
        return replace(plan.with_execution({"precision": cause}, precision="float32"), memory=None)
    if plan.micro_batch_size > 1:
        return plan.with_micro_batch(plan.micro_batch_size // 2, num_slots, cause)
    if plan.execution.gradient_checkpointing != "all":
        smaller = plan.with_execution({"gradient_checkpointing": cause}, gradient_checkpointing="all")
        return replace(smaller, memory=None)
    return plan


def supervise(job: Job, limits: Limits, lock: int | None = None) -> Outcome:
    """Train to the end, whatever kills the trainer on the way. Both processes hold the run's lock."""
    plan = job.plan
    history = History(job.run.checkpoints().newest_step())
    started = time.monotonic()
    while True:
        kills_before = oom_kills()
        plan_before = job.run.plan
        try:
            outcome = _run_trainer(job, plan, _remaining(limits, time.monotonic() - started), lock)
            if outcome.reason != REGROUPING:
                return outcome
            plan = _tuned(job, plan, plan_before)
            if job.hosting is not None:
                job.hosting.slots_per_second = outcome.slots_per_second
        except MemoryBudgetError:  # a plan by hand, for a model that cannot even be built
            raise too_large(job.planner) from None
        except ChildDied as death:
            if death.signal == signal.SIGBUS:  # a mapped file was truncated: say which
                open_splits(job.config, load_task(job.config.task))
            plan = _tuned(job, plan, plan_before)
            if death.code in LOST_PEER_CODES:  # which is not a death of this machine's making
                if death.signal == signal.SIGALRM and job.hosting is not None:
                    job.hosting.not_formed(RunLog(job.run, job.planner.display))
                continue
            history = history.at(job.run.checkpoints().newest_step())
            deterministic = job.config.training.deterministic
            keep_plan = deterministic and _killed_by_hand(death, kills_before)
            num_slots = job.config.training.effective_batch_size
            decision = next_plan(death, plan, history, num_slots, keep_plan=keep_plan)
            plan, history = _carry_out(job, decision, death)


def _tuned(job: Job, plan: Plan, before: Plan | None) -> Plan:
    """Return the plan that the warm-up of a trainer has found, or the one that it had."""
    tuned = job.run.plan
    return tuned if plan.provisional and tuned is not None and tuned != before else plan


def _run_trainer(job: Job, plan: Plan, limits: Limits, lock: int | None) -> Outcome:
    hosting = job.hosting
    log = RunLog(job.run, job.planner.display)

    def on_row(row: list[Any]) -> None:
        if hosting is None or not hosting.receive(row, log):
            show_forwarded(log.display, row)

    arguments = {
        "config": job.config.model_dump(mode="json"),
        "run": str(job.run.path),
        "start": {
            "limits": asdict(limits),
            "quiet": job.quiet,
            "rejected": [each.event_fields for each in job.rejected],
            "requested": list(job.requested),
            "seat": None if hosting is None else hosting.seat().to_json(),
        },
        "verified": {name: dict(digests) for name, digests in job.verified.items()},
    }
    descriptors = (lock, None if hosting is None else hosting.descriptor)
    inherited = tuple(each for each in descriptors if each is not None)
    return run_trainer(arguments, plan, log.display, on_row, inherited, job.on_start)


def run_trainer(
    arguments: JsonObject,
    plan: Plan,
    display: Display,
    on_row: Callable[[list[Any]], None],
    inherited: tuple[int, ...] = (),
    on_start: Callable[[int], None] = lambda pid: None,
) -> Outcome:
    """Run one trainer to its end. Its messages and signals are those of this process.

    Raise `KeyboardInterrupt` if it received a signal to stop, but has lost other machines, or waited for them
    until it was killed: then it could not react.
    """
    display.status("Starting the trainer", plain=True)
    how = plan.execution
    in_a_group = arguments["start"]["seat"] is not None
    variables = {
        **environment(how.threads, compact=how.allocator == "compact"),
        **compiler_cache(),
        **(QUIET_ENVIRONMENT if in_a_group else {}),  # a lost connection is expected
    }
    stops: list[float] = []
    try:
        facts: JsonObject = run_in_child(
            "trm.training.start:train_in_child",
            {**arguments, "plan": plan.to_json()},
            on_row=on_row,
            environment=variables,
            in_front=True,
            write_line=None if sys.stderr is None else sys.stderr.write,
            inherited=inherited,
            on_start=on_start,
            on_stop=lambda: stops.append(time.monotonic()),
        )
    except ChildDied as death:
        if stops and death.code in (*LOST_PEER_CODES, -signal.SIGKILL):
            raise KeyboardInterrupt from None
        raise
    outcome = Outcome(**{**facts, "run": Path(facts["run"])})
    if stops and outcome.reason == REGROUPING:  # it arrived after the last agreement
        raise KeyboardInterrupt
    return outcome


def _carry_out(job: Job, decision: Decision, death: ChildDied) -> tuple[Plan, History]:
    if isinstance(decision, GiveUp):
        raise _given_up(job, death, decision.deaths) from None
    if isinstance(decision, ProbeFirst):
        measured = job.planner.choose()
        if measured is None:
            raise too_large(job.planner) from None
        decision = Restart(measured, decision.history)
    plan = decision.plan
    what = "ran out of memory" if death.code == OUT_OF_MEMORY else str(death)
    display = job.planner.display
    display.message(
        f"The trainer {what}. Resuming from the newest checkpoint with {plan.accumulation_steps} x "
        f"{plan.micro_batch_size} examples."
    )
    if (job.run.path / "recipe.yaml").exists():
        RunLog(job.run, display).event(Restarted(str(death), plan.micro_batch_size))
    return plan, decision.history


def _killed_by_hand(death: ChildDied, kills_before: int | None) -> bool:
    """Return whether the kill was not an OOM kill. Linux counts those; elsewhere this cannot be known."""
    return death.signal == signal.SIGKILL and oom_kills() == kills_before


def _remaining(limits: Limits, seconds: float) -> Limits:
    if limits.max_seconds is None:
        return limits
    return replace(limits, max_seconds=max(0.0, limits.max_seconds - seconds))


def _given_up(job: Job, death: ChildDied, deaths: int) -> LaptopError:
    try:
        needed = job.planner.estimates().least.mib
    except MemoryBudgetError as error:
        return error
    times = f", {deaths} times" if deaths > 1 else ""
    return MemoryBudgetError(
        f"The trainer {death}{times} with the smallest possible plan. This recipe needs about {needed} MiB.",
        hint="Raise limits.memory_limit_mb, close other programs, or use --fit to train a smaller model.",
    )
