"""Several machines that train one run: where this process sits, and how it takes part in a world.

The host has the run directory. Its supervisor listens, and its trainer forms a world with the guests who have
arrived. When a machine arrives, leaves or is lost, every trainer ends, and every supervisor starts one again:
a world never changes, so there is nothing to repair.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import NoReturn

from macbook_optimization.children import Send, parent_is_gone
from macbook_optimization.errors import DataError, RunError
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.backends.base import LIBRARIES, Backend, Learner, Program
from trm.backends.world import (
    Address,
    FormingFailed,
    GuestMeeting,
    HostMeeting,
    Meeting,
    Member,
    PeerLost,
    SingleProcess,
    World,
)
from trm.config import RunConfig, differences
from trm.plan import Plan
from trm.planning.cache import versions
from trm.runs.events import WorldFormed
from trm.training.log import RunLog
from trm.training.shares import shares_of

LOST_PEER = 76  # exit code of a trainer that has lost another machine
LOST_PEER_CODES = (LOST_PEER, -signal.SIGALRM)  # likewise, if its backend waited too long for others
TIMED_MESSAGES = 3
LEAST_EFFICIENCY = 0.8  # predicted; below it, there is a warning
RETRY_SECONDS = 0.5  # between two attempts to reach the host
Check = Callable[[JsonObject], None]
LOST, GUESTS = "lost", "guests"  # rows that a trainer sends to its supervisor
CONNECTING, CONNECTED, STARTED = "connecting", "connected", "started"  # likewise, that of a guest


@dataclass(frozen=True, slots=True)
class Seat:
    """The part of a trainer among machines: host if it has a descriptor of a listening socket, else guest."""

    address: Address
    name: str  # of this machine
    timeout_seconds: float  # without a sign of life, until a machine is lost
    descriptor: int | None = None
    guests: int = 0  # whom the host waits for
    wait_seconds: float = 0.0  # for these guests, or for the host
    slots_per_second: float | None = None  # of this machine, measured before
    token: str = ""  # of the run

    @property
    def is_host(self) -> bool:
        return self.descriptor is not None

    def to_json(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: JsonMapping) -> Seat:
        return cls(**{**facts, "address": Address(**facts["address"])})


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of this process in a world."""

    world: World
    members: Sequence[Member] = ()  # by rank; only the host knows them
    meeting: Meeting | None = None
    host: HostMeeting | None = None  # the same, at the host
    send: Send = lambda row: None

    def has_newcomers(self) -> bool:
        return self.host is not None and self.host.has_newcomers()

    def close(self, *, leaving: int = 0, stops: bool = False) -> bool:
        """End this world; return whether the host stops, which passes this as `stops`.

        The host expects all who have arrived again, except for those who leave.
        """
        if self.host is not None:
            _report(self.send, [GUESTS, self.host.arrivals() - leaving])
        host_stops = self.world.close(int(stops and self.world.writes))
        if self.meeting is not None:
            self.meeting.close()
        return bool(host_stops)

    def end_after_loss(self, loss: PeerLost) -> None:
        """End this process after another machine was lost: the supervisor starts it again."""
        names = [] if self.meeting is None else self.meeting.lost_names()
        _end_after_loss(self.send, names, str(loss))


def _end_after_loss(send: Send, names: Sequence[str], cause: str) -> NoReturn:
    """Checkpoints are complete or absent, so a process may end anywhere, in any thread."""
    _report(send, [LOST, list(names), cause])
    os._exit(LOST_PEER)


def _report(send: Send, row: list[object]) -> None:
    """Send a row to the supervisor. If that has ended, this process ends soon as well."""
    with suppress(OSError):
        send(row)


def facts_of(config: RunConfig, digests: JsonMapping, seat: Seat) -> JsonObject:
    """Return what a guest needs: recipe (without plan and limits), hashes of the data, backend, versions."""
    return {
        "program": version("macbook-trm"),
        "host": seat.name,
        "token": seat.token,
        "timeout_seconds": seat.timeout_seconds,
        "recipe": config.model_dump(mode="json", exclude={"plan", "limits"}),
        "data": {name: dict(each) for name, each in digests.items()},
        "backend": config.plan.backend,
        "versions": versions(config.plan.backend),
    }


def check_version(facts: JsonObject) -> None:
    """Raise `RunError` unless the host runs this version of the program."""
    own = version("macbook-trm")
    if facts["program"] != own:
        raise RunError(
            f"{facts['host']} runs version {facts['program']} of this program, and this machine {own}",
            hint="Install the same version on both machines.",
        )


def other_versions(facts: JsonObject) -> str | None:
    """Return which libraries of the host have another version here, and what may follow; None if none has."""
    backend = facts["backend"]
    own = versions(backend)
    theirs = facts["versions"]
    names = [each for each in (LIBRARIES[backend], "numpy") if _public(own[each]) != _public(theirs[each])]
    if not names:
        return None
    here, there = (" and ".join(f"{each} {found[each]}" for each in names) for found in (own, theirs))
    return f"{facts['host']} has {there}, and this machine {here}; they may round differently."


def _public(version: str) -> str:
    """Return a version without the build (`+cpu`), which differs between platforms."""
    return version.partition("+")[0]


def check_backend(facts: JsonObject, config: RunConfig) -> None:
    """Raise `RunError` unless this machine is to compute with the backend of the host."""
    if config.plan.backend != facts["backend"]:
        raise RunError(
            f"{facts['host']} trains with the backend {facts['backend']}, and this machine with "
            f"{config.plan.backend}; they cannot exchange messages",
            hint=f"Set plan.backend={facts['backend']} on this machine.",
        )


def check_facts(facts: JsonObject, config: RunConfig, digests: JsonMapping) -> None:
    """Refuse what would not learn the same as the host: another program, recipe or dataset."""
    check_version(facts)
    check_backend(facts, config)
    theirs = RunConfig.model_validate({**facts["recipe"], "plan": {}, "limits": {}})
    if different := differences(config.what_is_learned(), theirs.what_is_learned()):
        listed = "\n  ".join(different)
        raise RunError(f"{facts['host']} trains another recipe now:\n  {listed}", hint="Join again.")
    if facts["data"] != {name: dict(each) for name, each in digests.items()}:
        raise DataError(
            f"The dataset in {config.data.path} is not that of {facts['host']}",
            hint="Remove it, so that it is built again, or copy that of the host; `trm data info` compares.",
        )


def host_membership(seat: Seat, backend: Backend, facts: JsonObject, own: Member, send: Send) -> Membership:
    """Listen, wait for the guests of the last world, and form a world with those who have arrived."""
    assert seat.descriptor is not None
    num_slots = facts["recipe"]["training"]["effective_batch_size"]
    meeting = backend.host_meeting(seat.address, seat.descriptor, seat.name, seat.timeout_seconds, facts)
    guests = meeting.members(seat.guests, seat.wait_seconds) if seat.wait_seconds else []
    members = with_own_names([own, *guests])[:num_slots]
    _report(send, [GUESTS, len(members) - 1])
    world: World = SingleProcess(num_slots)
    if len(members) > 1:
        try:
            world = meeting.form(members, shares_of(members, num_slots), partial(_end_after_loss, send))
        except PeerLost as loss:
            names = meeting.lost_names()
            if not names:  # all are there, but cannot connect: the next group does not wait for them
                _report(send, [GUESTS, 0])
            _end_after_loss(send, names, str(loss))
    return Membership(world, members, meeting, meeting, send)


def guest_membership(seat: Seat, backend: Backend, check: Check, own: Member, send: Send) -> Membership:
    """Find the host, and wait until it forms a world with this machine; `check` may refuse its facts."""
    while True:
        meeting = reach(seat, backend)
        check(meeting.facts)
        try:
            world = meeting.join(own, partial(_end_after_loss, send), lambda: _report(send, [CONNECTING]))
            _report(send, [CONNECTED])
            return Membership(world, (), meeting, send=send)
        except FormingFailed as loss:
            _end_after_loss(send, meeting.lost_names(), str(loss))
        except PeerLost:  # the host forms another world
            meeting.close()
            if parent_is_gone():
                sys.exit(LOST_PEER)


def reach(seat: Seat, backend: Backend) -> GuestMeeting:
    """Connect to the host, and try again for as long as the user wants to wait."""
    deadline = time.monotonic() + seat.wait_seconds
    while True:
        try:
            local = local_address(seat.address)
            meeting = backend.guest_meeting(seat.address, str(seat.address), seat.timeout_seconds, local)
        except (OSError, PeerLost) as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"{seat.address} does not answer: {error}",
                    hint="Is `trm train ... --listen` running there? Raise --wait to wait longer.",
                ) from error
            time.sleep(RETRY_SECONDS)
            continue
        check_token(meeting.facts, seat)
        return meeting


def check_token(facts: JsonObject, seat: Seat) -> None:
    """Raise `RunError` if the host trains a different run from the one that the token names."""
    if seat.token and facts.get("token") != seat.token:
        raise RunError(
            f"{facts['host']} at {seat.address} trains another run now: its token is not {seat.token}",
            hint="Copy the line that it shows: trm join ADDR:PORT/TOKEN.",
        )


def local_address(address: Address) -> str:
    """Return the address of this machine from which the host can be reached, if it can."""
    with socket.create_connection((address.host, address.port), timeout=5.0) as connection:
        local: str = connection.getsockname()[0]
        return local


def with_own_names(members: Sequence[Member]) -> list[Member]:
    """Number machines that have the same name."""
    names = [member.name for member in members]
    return [
        replace(each, name=f"{each.name} ({names[:place].count(each.name) + 1})")
        if each.name in names[:place]
        else each
        for place, each in enumerate(members)
    ]


def own_member(seat: Seat, backend: Backend, program: Program, plan: Plan) -> Member:
    speed = seat.slots_per_second or plan.samples_per_second
    return Member(seat.name, speed, max_slots(backend, program, plan.budget_bytes))


def max_slots(backend: Backend, program: Program, budget_bytes: int | None) -> int | None:
    """Return how many slots' latents fit into half of the memory budget; None if slots keep nothing."""
    one, two = (backend.state_bytes(_with_slots(program, number)) for number in (1, 2))
    if budget_bytes is None or one == two:
        return None
    return max(1, (budget_bytes // 2 - one) // (two - one) + 1)


def _with_slots(program: Program, number: int) -> Program:
    training = program.training.model_copy(update={"effective_batch_size": number})
    return replace(program, training=training)


def introduce(membership: Membership, learner: Learner, step: int, log: RunLog) -> None:
    """Time some messages, and say who trains and how efficient that will be."""
    world = membership.world
    if world.size == 1:
        if membership.meeting is not None:
            log.event(WorldFormed(step, [each.name for each in membership.members], [*world.shares], None))
        return
    seconds = exchange_seconds(world, learner)
    facts = world.broadcast(_described(membership, seconds) if world.writes else None)
    log.event(WorldFormed(step, facts["machines"], facts["shares"], facts["efficiency"]))
    log.message(facts["text"])
    if not world.writes:
        _report(membership.send, [STARTED, step])


def exchange_seconds(world: World, learner: Learner) -> float:
    """Return what a step spends on exchanging its message and agreeing, when nobody has to wait."""
    found = []
    for _ in range(TIMED_MESSAGES):
        world.agree([0])  # all begin at the same time
        started = time.monotonic()
        learner.message_seconds()
        world.agree([0])
        found.append(time.monotonic() - started)
    return median(found)


def efficiency(members: Sequence[Member], shares: Sequence[int], seconds: float) -> float | None:
    """Predict the share of a step that the slowest machine computes; None if a speed is unknown."""
    speeds = [member.slots_per_second for member in members]
    computing = [share / speed for share, speed in zip(shares, speeds, strict=True) if speed]
    if len(computing) < len(members):
        return None
    slowest = max(computing)
    return slowest / (slowest + seconds)


def _described(membership: Membership, seconds: float) -> JsonObject:
    shares = membership.world.shares
    predicted = efficiency(membership.members, shares, seconds)
    names = [member.name for member in membership.members]
    split = ", ".join(f"{name} {share}" for name, share in zip(names, shares, strict=True))
    text = (
        f"{len(names)} machines share {sum(shares)} slots: {split}. A message takes {1000 * seconds:.1f} ms"
    )
    if predicted is not None:
        text += f"; predicted efficiency {predicted:.0%}"
    if predicted is not None and predicted < LEAST_EFFICIENCY:
        text = f"warning: {text}; a faster connection or a larger training.effective_batch_size would help"
    return {"machines": names, "shares": list(shares), "efficiency": predicted, "text": f"{text}."}
