"""Everything before the first step that needs no backend: data, checks, hardware, plan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.durable_files import exclusive_lock, make_directory
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.performance_reporting import available_cores
from macbook_optimization.training_config_adapter import TrainingConfigAdapter, profile_for
from trm.backends.bounds import check_inference, check_training, smallest_program
from trm.config import RunConfig, differences
from trm.display import Display, Silent
from trm.feed import require_kind, require_target
from trm.plan import Plan
from trm.planning.device_choice import REFERENCE, Place, Verdict, choose_device, fitted_on_cpu, wanted_place
from trm.planning.fitting import too_large
from trm.planning.planner import Planner
from trm.runs.directory import Run, is_run, open_run, set_aside
from trm.tasks.base import DataSpec, MadeFromFiles, Options, Task
from trm.tasks.dataset import complete_spec
from trm.tasks.registry import TASK_NAMES, build_dataset, load_task
from trm.training.finished import finished_outcome
from trm.training.hosting import Hosting
from trm.training.log import show_plan
from trm.training.loop import Outcome
from trm.training.start import Digests, data_manager, open_splits
from trm.training.state import PLAN_FACTS

LOCK_SECONDS = 0.5  # between two attempts to lock a dataset
_READING = {"memory": "held in memory", "mapped": "memory-mapped", "streaming": "streaming"}


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to be supervised."""

    config: RunConfig
    run: Run
    plan: Plan
    planner: Planner
    verified: Digests  # of the splits, so that the trainer need not verify them again
    quiet: bool = False  # the trainer shows no progress
    hosting: Hosting | None = None  # of other machines that take part
    rejected: tuple[Verdict, ...] = ()  # devices that failed the check before a run
    requested: Place = REFERENCE  # which the recipe of the run keeps: a later start may find more
    on_start: Callable[[int], None] = lambda pid: None  # called with the PID of each trainer


def prepare(
    config: RunConfig, path: Path, display: Display, *, fresh: bool = False, fit: bool = False
) -> Job:
    task = load_task(config.task)
    config = with_model(config, None if fresh else path, display)
    require_kind(config, task)
    require_target(config, task)
    if config.data.build is not None:
        task.check_options(config.data.build)  # even where nothing is built
        if not config.data.path.exists():
            check_sizes(config, _least_spec(task, config.data.build), fit=fit)
    build_if_missing(config, task, display)
    display.status("Verifying the dataset")
    train_split, test_split = open_splits(config, task)
    reading = data_manager(config).analyze_dataset_requirements(config.data.path)
    display.message(f"Data: {_READING[reading.recommended_strategy]}. {reading.reason}")
    if fresh and (aside := set_aside(path)):
        display.message(f"The earlier run is now {aside}.")
    display.status("Choosing a plan")
    hardware = HardwareDetector().detect(with_torch=False)
    config = _as_fitted(config, path, display) if fit else config
    planner = Planner(config, complete_spec(task, train_split), hardware, display)
    check_sizes(config, planner.data, fit=fit)
    run = open_run(path, planner.config)
    requested = wanted_place(planner)
    choice = choose_device(fitted_on_cpu(planner) if fit else planner)
    planner = choice.planner
    plan = _earlier_plan(run, planner) or (None if fit else planner.without_probe()) or planner.choose()
    if plan is None:
        raise too_large(planner)
    if choice.reason is not None:
        plan = plan.with_execution({"device": choice.reason})
    _show(plan, planner, display)
    verified = {"train": train_split.digests, "test": test_split.digests}
    return Job(planner.config, run, plan, planner, verified, rejected=choice.rejected, requested=requested)


def outcome_if_finished(config: RunConfig, path: Path, *, fit: bool = False) -> Outcome | None:
    """Return how a run ended if nothing of it is left to train, before anything that takes time."""
    if not is_run(path):
        return None
    config = with_model(config, path, Silent())
    config = _as_fitted(config, path, Silent()) if fit else config
    return finished_outcome(Run(path), config)


def _least_spec(task: Task, options: Options) -> DataSpec:
    """Return what is known of a dataset before it is built, without reading what the build will read."""
    return task.least_spec() if isinstance(task, MadeFromFiles) else task.complete(task.spec(options))


def check_sizes(config: RunConfig, data: DataSpec, *, fit: bool) -> None:
    """Refuse absurd sizes before anything is built or measured; --fit may still lower those of training."""
    program = smallest_program(config, data)
    if not fit:
        check_training(program)
    check_inference(program, config.inference)


def _show(plan: Plan, planner: Planner, display: Display) -> None:
    for warning in plan.warnings:
        display.message(f"warning: {warning}")
    if plan.provisional:
        if "device" in plan.reasons:
            display.message(f"Computing with {plan.explain()[0]}.")
        display.message("Tuning: the first steps try different batch sizes and thread counts.")
    else:
        show_plan(display, planner.config, plan)


def _earlier_plan(run: Run, planner: Planner) -> Plan | None:
    """Keep the plan of a deterministic run: another micro-batch size or thread count changes rounding."""
    config = planner.config
    plan = run.plan
    if not config.training.deterministic or plan is None or plan.provisional:
        return None
    facts = plan.to_json()
    by_hand = {name: getattr(config.plan, name) for name in ("backend", "device", *PLAN_FACTS)}
    kept = all(value in (None, facts[name]) for name, value in by_hand.items())
    fits = plan.execution.threads <= planner.hardware.cpu.compute_threads
    if plan.predicted_peak_bytes is not None:
        fits = fits and plan.predicted_peak_bytes <= planner.budget.resident_bytes
    return plan if kept and fits else None


def build_if_missing(config: RunConfig, task: Task, display: Display) -> None:
    if config.data.build is None or config.data.path.exists():
        return
    with _only_builder(config.data.path, display):
        if config.data.path.exists():  # another process has built it meanwhile
            return
        display.message(f"There is no {config.data.path} yet; building it.")
        jobs = available_cores() if config.task in TASK_NAMES else 1  # workers cannot import a user's file
        build_dataset(task, config.data.build, config.data.path, display, jobs)


@contextmanager
def _only_builder(path: Path, display: Display) -> Iterator[None]:
    """Lock a dataset that does not exist yet; wait while another process builds it."""
    path = Path(os.path.realpath(path))
    make_directory(path.parent)
    while True:
        with exclusive_lock(path.with_name(f".{path.name}.lock")) as held:
            if isinstance(held, int):
                yield
                return
        display.status(f"Waiting for another process that builds {path}")
        time.sleep(LOCK_SECONDS)


def with_model(config: RunConfig, path: Path | None, display: Display) -> RunConfig:
    """Give a recipe without a model the size for this machine, or the one that its run already has."""
    if "model" in config.model_fields_set:
        return config
    if path is not None and (path / "recipe.yaml").exists():
        return config.model_copy(update={"model": Run(path).config.model})
    hardware = HardwareDetector().detect(with_torch=False)
    sizes = TrainingConfigAdapter(hardware).adapt_model_config({})
    chosen = ", ".join(f"{name} {value:g}" for name, value in sizes.items())
    profile = profile_for(hardware.memory.total_memory).name
    display.message(f"The recipe has no model section; for this machine ({profile} profile): {chosen}.")
    return config.model_copy(update={"model": config.model.model_copy(update=sizes)})


def _as_fitted(config: RunConfig, path: Path, display: Display) -> RunConfig:
    """Keep the sizes that --fit chose when this run began, whatever is free now."""
    if not (path / "recipe.yaml").exists():
        return config
    before = Run(path).config
    model = {name: getattr(before.model, name) for name in before.model.fitted_keys}
    training = {name: getattr(before.training, name) for name in ("effective_batch_size", "learning_rate")}
    fitted_before = config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "training": config.training.model_copy(update=training),
        }
    )
    changed = differences(fitted_before.what_is_learned(), config.what_is_learned())
    if changed:
        display.message(f"{path} keeps the sizes it was fitted to:\n  " + "\n  ".join(changed))
    return fitted_before
