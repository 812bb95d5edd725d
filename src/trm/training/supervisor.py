"""`trm train` is a small parent without torch, and a trainer that it starts as a child.

Out of memory is no exception on a real machine: the process is killed. So the parent reads how its child
ended, makes the plan smaller and starts it again from the newest good checkpoint. A recipe learns the same
with any plan, so nothing else changes. It gives up after three deaths at the smallest plan without progress.
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import LaptopError, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareDetector, HardwareSpecs
from macbook_optimization.linux_readers import oom_kills
from macbook_optimization.performance_reporting import available_cores
from macbook_optimization.training_config_adapter import TrainingConfigAdapter, profile_for
from trm.config import TASKS, RunConfig, differences
from trm.runs import Plan, Run, open_run, set_aside
from trm.tasks import load_task
from trm.tasks.base import Task, fingerprint
from trm.training.compiling import compiler_cache
from trm.training.fitting import estimate, fitted, too_large
from trm.training.loop import NO_MEMORY, Limits, Outcome, data_manager, open_splits
from trm.training.planning import Planner
from trm.training.state import PLAN_FACTS
from trm.training.watching import Display, Journal, show_plan

DEATHS_AT_THE_SMALLEST_PLAN = 3  # without a checkpoint between them
KILLS_BY_HAND = 10  # the same; so often, deterministic training keeps its plan
_ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Job:
    config: RunConfig
    run: Run
    plan: Plan
    planner: Planner
    data: dict[str, dict[str, str]]  # digests of the halves of the dataset


def prepare(
    config: RunConfig, path: Path, display: Display, *, fresh: bool = False, fit: bool = False
) -> Job:
    """Everything before the first step that needs no torch of our own: data, checks, hardware, plan."""
    task = load_task(config.task)
    if config.data.build is not None:
        task.check_options(config.data.build)  # also where nothing is built
    build_if_missing(config, task, display)
    train_split, test_split = open_splits(config, task)
    reading = data_manager(config).analyze_dataset_requirements(config.data.path)
    if reading.recommended_strategy != "memory":
        display.message(f"Data: {reading.recommended_strategy}. {reading.reason}")
    if fresh and (aside := set_aside(path)):
        display.message(f"The earlier run is now {aside}.")
    hardware = HardwareDetector().detect(with_torch=False)
    config = _with_model(config, path, hardware, display)
    config = _as_fitted(config, path, display) if fit else config
    planner = Planner(config, train_split.shape, hardware, display)
    run = open_run(path, planner.config)
    planner = fitted(planner) if fit else planner
    plan = _plan_so_far(run, planner) or (None if fit else planner.at_once()) or planner.choose()
    if plan is None:
        raise too_large(planner)
    for warning in plan.warnings:
        display.message(f"warning: {warning}")
    if plan.settling:
        display.message("The first steps are carried out in several ways, to see what is fastest here.")
    else:
        show_plan(display, planner.config, plan)
    data = {"train": fingerprint(train_split), "test": fingerprint(test_split)}
    return Job(planner.config, run, plan, planner, data)


def _plan_so_far(run: Run, planner: Planner) -> Plan | None:
    """Deterministic training goes on with the plan that it has: another cut or thread rounds otherwise."""
    config, plan = planner.config, run.plan
    if not config.training.deterministic or plan is None or plan.settling:
        return None
    by_hand = {name: getattr(config.plan, name) for name in PLAN_FACTS}
    kept = all(value in (None, getattr(plan, name)) for name, value in by_hand.items())
    fits = plan.threads <= planner.hardware.cpu.compute_threads
    if plan.predicted_peak_bytes is not None:
        fits = fits and plan.predicted_peak_bytes <= planner.budget.resident_bytes
    return plan if kept and fits else None


def build_if_missing(config: RunConfig, task: Task, display: Display) -> None:
    if config.data.build is not None and not config.data.path.exists():
        display.message(f"There is no {config.data.path} yet; building it.")
        jobs = available_cores() if config.task in TASKS else 1  # workers cannot import a user's file
        task.build(config.data.build, config.data.path, display.update, jobs)


def _with_model(config: RunConfig, path: Path, hardware: HardwareSpecs, display: Display) -> RunConfig:
    """A recipe without a model gets the size for this machine, or the one that its run already has."""
    if "model" in config.model_fields_set:
        return config
    if (path / "recipe.yaml").exists():
        return config.model_copy(update={"model": Run(path).config.model})
    sizes = TrainingConfigAdapter(hardware).adapt_model_config({})
    chosen = ", ".join(f"{name} {value:g}" for name, value in sizes.items())
    profile = profile_for(hardware.memory.total_memory).name
    display.message(f"The recipe names no model; for this machine ({profile} profile): {chosen}.")
    return config.model_copy(update={"model": config.model.model_copy(update=sizes)})


def _as_fitted(config: RunConfig, path: Path, display: Display) -> RunConfig:
    """With the sizes that --fit chose when this run began, whatever is free now."""
    if not (path / "recipe.yaml").exists():
        return config
    before = Run(path).config
    model = {name: getattr(before.model, name) for name in ("hidden_size", "num_heads", "puzzle_emb_ndim")}
    training = {name: getattr(before.training, name) for name in ("effective_batch_size", "learning_rate")}
    fitted_before = config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "training": config.training.model_copy(update=training),
        }
    )
    changed = differences(fitted_before.what_is_learned(), config.what_is_learned())
    if changed:
        display.message(f"{path} keeps what it was fitted to:\n  " + "\n  ".join(changed))
    return fitted_before


def supervise(job: Job, limits: Limits, lock: int | None = None) -> Outcome:
    """Trains to the end, whatever kills the trainer on the way. Both hold the lock of the run."""
    plan, deaths, kept, step = job.plan, 0, 0, job.run.checkpoints().newest_step()
    started = time.monotonic()
    while True:
        kills_before, plan_before = oom_kills(), job.run.plan
        try:
            facts = run_in_child(
                "trm.training.loop:train_in_child",
                {
                    "config": job.config.model_dump(mode="json"),
                    "run": str(job.run.path),
                    "plan": plan.to_json(),
                    "limits": asdict(_remaining(limits, time.monotonic() - started)),
                    "data": job.data,
                },
                environment={
                    **environment(plan.threads, compact=plan.allocator == "compact"),
                    **compiler_cache(),
                },
                in_front=True,
                inherited=() if lock is None else (lock,),
            )
            return Outcome(**{**facts, "run": Path(facts["run"])})
        except MemoryBudgetError:  # a plan by hand, for a model that cannot even be built
            raise too_large(job.planner) from None
        except ChildDied as death:
            if death.signal == signal.SIGBUS:  # what a file does that was cut short under a map
                open_splits(job.config, load_task(job.config.task))
            if plan.settling and (told := job.run.plan) not in (None, plan_before):
                plan = told  # by the first steps
            reached = job.run.checkpoints().newest_step()
            if reached != step:
                deaths, kept, step = 0, 0, reached
            # Another plan would round otherwise, and here nothing says that it would help.
            by_hand = job.config.training.deterministic and _killed_by_hand(death, kills_before)
            if by_hand and kept < KILLS_BY_HAND:
                smaller, kept = plan, kept + 1
            else:
                smaller = plan_after(death, plan, job.config.training.effective_batch_size)
                if plan.settling:  # then a probe tells what fits, in a process of its own
                    measured = job.planner.choose()
                    if measured is None:
                        raise too_large(job.planner) from None
                    smaller = measured
                deaths += smaller == plan
            hopeless = smaller == plan and death.code == NO_MEMORY  # it would fail in the same place
            if hopeless or deaths >= DEATHS_AT_THE_SMALLEST_PLAN:
                raise _given_up(job, death, deaths) from None
            _note(job, death, smaller)
            plan = smaller


def _killed_by_hand(death: ChildDied, kills_before: int | None) -> bool:
    """Or by a program: Linux counts those that it kills for want of memory. Elsewhere nobody knows."""
    return death.signal == signal.SIGKILL and oom_kills() == kills_before


def _remaining(limits: Limits, seconds: float) -> Limits:
    if limits.max_seconds is None:
        return limits
    return replace(limits, max_seconds=max(0.0, limits.max_seconds - seconds))


def plan_after(death: ChildDied, plan: Plan, num_slots: int) -> Plan:
    """The next smaller plan, or the same one if there is none; raises where no plan would help."""
    if death.code == 130 or death.signal in _ASKED_TO_STOP:  # a second Ctrl-C, or one before the first step
        raise KeyboardInterrupt
    if death.traceback_shown and not death.of_memory:
        raise RunError(
            "The trainer ended with an unexpected error, shown above; its checkpoints are intact.",
            hint="This is a bug. The same command goes on from the newest checkpoint.",
        )
    if death.signal == signal.SIGILL:
        if plan.precision == "float32":
            raise RunError(
                "This CPU lacks an instruction that the installed PyTorch uses.",
                hint="Install a PyTorch made for this CPU; see `trm doctor`.",
            )
        reasons = {**plan.reasons, "precision": f"the trainer {death}"}
        return replace(plan, precision="float32", memory=None, reasons=reasons)
    if plan.micro_batch_size > 1:
        return plan.cut_to(plan.micro_batch_size // 2, num_slots, f"the trainer {death}")
    if plan.gradient_checkpointing != "all":
        reasons = {**plan.reasons, "gradient_checkpointing": f"the trainer {death}"}
        return replace(plan, gradient_checkpointing="all", memory=None, reasons=reasons)
    return plan


def _note(job: Job, death: ChildDied, plan: Plan) -> None:
    what = "ran out of memory" if death.code == NO_MEMORY else str(death)
    job.planner.say.message(
        f"The trainer {what}. Going on from the newest checkpoint with {plan.accumulation_steps} x "
        f"{plan.micro_batch_size} examples."
    )
    if (job.run.path / "recipe.yaml").exists():
        journal = Journal(job.run, job.planner.say)
        journal.event("restarted", cause=str(death), micro_batch_size=plan.micro_batch_size)


def _given_up(job: Job, death: ChildDied, deaths: int) -> LaptopError:
    try:
        (needed,) = estimate(job.planner, [job.config])
    except ChildDied:
        return MemoryBudgetError("There is too little memory to load PyTorch.")
    times = f", {deaths} times" if deaths > 1 else ""
    return MemoryBudgetError(
        f"The trainer {death}{times} with the smallest plan there is. This recipe needs about {needed} MiB.",
        hint="Allow more, close other programs, or take a smaller recipe with --fit.",
    )
