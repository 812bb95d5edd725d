"""`trm join`: take part in a run of another machine.

The host sends the recipe; plan, limits and the place of the dataset are those of this machine. The supervisor
here does what that of the host does: it starts a trainer again whenever a world has ended, with a smaller
plan if the trainer ran out of memory.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.errors import ConfigError, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.backends.base import load_backend
from trm.backends.world import CLOSED_PORTS, Address
from trm.config import RunConfig, config_from_text
from trm.config.kinds import check_several_machines
from trm.display import Display, show_forwarded
from trm.plan import Execution, Plan
from trm.planning.device_choice import choose_device
from trm.planning.fitting import too_large
from trm.planning.planner import Planner
from trm.tasks.dataset import complete_spec
from trm.tasks.registry import TASK_NAMES, load_task
from trm.training.log import show_plan
from trm.training.loop import Limits, Outcome
from trm.training.machines import (
    CONNECTED,
    CONNECTING,
    LOST,
    LOST_PEER_CODES,
    STARTED,
    Seat,
    check_backend,
    check_facts,
    check_version,
    other_versions,
    reach,
)
from trm.training.preparation import build_if_missing, check_sizes
from trm.training.start import Digests, open_splits
from trm.training.supervisor import GiveUp, History, ProbeFirst, next_plan, run_trainer
from trm.training.together import REGROUPING

DEFAULT_WAIT_SECONDS = 600.0
CONNECT_SECONDS = 10.0  # until a host that does not answer is tried again
MAX_ATTEMPTS = 3  # to connect to the other machines, in a row
_OWN_KEYS = ("plan.", "limits.", "data.path", "data.loading.")


@dataclass(frozen=True, slots=True)
class _Guest:
    config: RunConfig
    planner: Planner
    verified: Digests
    host: str


@dataclass
class _Reports:
    """The reports of the trainers of this machine about the worlds that they belong to."""

    cause: str | None = None  # of the end of the last one
    attempts: int = 0  # to connect to the other machines, since this last succeeded
    step: int | None = None  # at which the last world started that trained

    def receive(self, row: list[Any]) -> bool:
        """Note what a trainer reports; return whether the row was such a report."""
        kind, *values = row
        if kind == LOST:
            self.cause = values[-1]
        elif kind == CONNECTING:
            self.attempts += 1
        elif kind == CONNECTED:
            self.attempts = 0
        elif kind == STARTED:
            self.step = values[0]
        return kind in (LOST, CONNECTING, CONNECTED, STARTED)


def join(
    address: Address, token: str, overrides: Sequence[str], wait_seconds: float, display: Display
) -> Outcome:
    """Train a run of another machine until it ends, or until this machine leaves.

    `token` is that of the run, or empty for the run that listens there now. `wait_seconds`: how long to wait
    for a host that does not answer, at the start and whenever it is lost.
    """
    seat = Seat(address, socket.gethostname(), CONNECT_SECONDS, wait_seconds=wait_seconds, token=token)
    display.status(f"Waiting for {address}")
    facts: JsonObject = run_in_child("trm.training.joining:facts_in_child", {"seat": seat.to_json()})
    guest = _prepare(facts, overrides, display)
    plan = guest.planner.without_probe()
    if plan is None or plan.provisional:  # a measured speed decides about the share of this machine
        plan = guest.planner.choose()
    if plan is None:
        raise too_large(guest.planner)
    show_plan(display, guest.config, plan)
    seat = replace(seat, timeout_seconds=facts["timeout_seconds"], token=facts["token"])
    return _supervise(guest, seat, plan)


def facts_in_child(seat: JsonMapping, send: Send) -> JsonObject:
    """Return what the host says about its run, in a child, because that needs torch."""
    return reach(Seat.from_json(seat), load_backend(Execution())).facts


def _prepare(facts: JsonObject, overrides: Sequence[str], display: Display) -> _Guest:
    config = guest_config(facts, overrides)
    check_backend(facts, config)
    task = load_task(config.task)
    build_if_missing(config, task, display)
    display.status("Verifying the dataset")
    train_split, test_split = open_splits(config, task)
    verified = {"train": train_split.digests, "test": test_split.digests}
    check_facts(facts, config, verified)
    if (different := other_versions(facts)) is not None:
        display.message(f"warning: {different}")
    display.message(f"Joining {facts['host']}; the dataset is {config.data.path}.")
    hardware = HardwareDetector().detect(with_torch=False)
    planner = Planner(config, complete_spec(task, train_split), hardware, display)
    check_sizes(config, planner.data, fit=False)
    choice = choose_device(planner)
    planner = choice.planner
    if planner.config.plan.backend != facts["backend"]:
        raise RunError(
            f"{facts['host']} trains with the backend {facts['backend']}, which cannot be used here: "
            f"{choice.reason}",
            hint=f"Train with plan.backend=pytorch on {facts['host']}.",
        )
    return _Guest(planner.config, planner, verified, str(facts["host"]))


def guest_config(facts: JsonObject, overrides: Sequence[str]) -> RunConfig:
    """Return the recipe of the host with what belongs to this machine."""
    check_version(facts)
    for override in overrides:
        if not override.startswith(_OWN_KEYS):
            raise ConfigError(
                f"{override!r} cannot be set here: the host decides what is learned",
                hint=f"A machine that joins may set {', '.join(_OWN_KEYS)}",
            )
    keys = [f"plan.backend={facts['backend']}", *overrides]
    config = config_from_text(json.dumps(facts["recipe"]), f"The recipe of {facts['host']}", keys)
    check_several_machines(config.training, config.plan)
    if config.task not in TASK_NAMES:
        raise ConfigError(
            f"{facts['host']} trains the task {config.task}, which is code of its user",
            hint="Only the tasks that ship with this program can be trained on several machines.",
        )
    is_own = any(override.startswith("data.path=") for override in overrides)
    if ".." in config.data.path.parts and not is_own:
        raise ConfigError(
            f"{facts['host']} names the dataset {config.data.path}, which is not below this directory",
            hint="Name its place on this machine with data.path=DIRECTORY.",
        )
    return config


def _supervise(guest: _Guest, seat: Seat, plan: Plan) -> Outcome:
    display = guest.planner.display
    history = History()
    reports = _Reports()
    while True:
        reports.cause = None
        try:
            outcome = _run(guest, seat, plan, reports)
        except ChildDied as death:
            if death.code in LOST_PEER_CODES:
                _require_connections(guest, reports)
                lost = f"The group of machines has changed ({_cause(reports, death)})"
                display.message(f"{lost}; connecting to {seat.address} again.")
                continue
            plan, history = _after_death(guest, death, plan, history.at(reports.step))
            continue
        if outcome.reason != REGROUPING:
            return outcome
        seat = replace(seat, slots_per_second=outcome.slots_per_second)


def _require_connections(guest: _Guest, reports: _Reports) -> None:
    """Raise `RunError` when it makes no sense to try again, as the others wait during every attempt."""
    if reports.attempts >= MAX_ATTEMPTS:
        raise RunError(
            f"{guest.host} has included this machine {reports.attempts} times in a row, but {CLOSED_PORTS}",
            hint="Allow the machines to connect to each other at any port, and join again.",
        ) from None


def _cause(reports: _Reports, death: ChildDied) -> str:
    if reports.cause is not None:
        return reports.cause
    return CLOSED_PORTS if death.signal == signal.SIGALRM else "a connection was lost"


def _run(guest: _Guest, seat: Seat, plan: Plan, reports: _Reports) -> Outcome:
    display = guest.planner.display

    def on_row(row: list[Any]) -> None:
        if not reports.receive(row):
            show_forwarded(display, row)

    arguments = {
        "config": guest.config.model_dump(mode="json"),
        "run": f"the run of {guest.host}",  # for messages: nothing is written here
        "start": {"limits": asdict(Limits()), "quiet": False, "seat": seat.to_json()},
        "verified": {name: dict(digests) for name, digests in guest.verified.items()},
    }
    return run_trainer(arguments, plan, display, on_row)


def _after_death(guest: _Guest, death: ChildDied, plan: Plan, history: History) -> tuple[Plan, History]:
    num_slots = guest.config.training.effective_batch_size
    decision = next_plan(death, plan, history, num_slots, keep_plan=False)
    if isinstance(decision, GiveUp):
        raise MemoryBudgetError(
            f"The trainer {death} with the smallest possible plan.",
            hint="Raise limits.memory_limit_mb, or close other programs.",
        ) from None
    if isinstance(decision, ProbeFirst):
        measured = guest.planner.choose()
        if measured is None:
            raise too_large(guest.planner) from None
        return measured, decision.history
    guest.planner.display.message(f"The trainer {death}. Trying again.")
    return decision.plan, decision.history
