"""Rendezvous of the processes of one world: JSON in torch's TCPStore, served by the host's trainer.

A world is formed once and never changes: when a machine arrives, leaves or is lost, every process ends, and
its supervisor starts it again. The store ends with the host's trainer, so nothing in it is ever stale. The
listening socket belongs to the host's supervisor and is bound to one address; torch would bind to all of
them. torch's own rendezvous is not used, because it unpickles what it finds in its store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from macbook_optimization.children import parent_is_gone
from macbook_optimization.json_types import JsonObject
from trm.backends.pytorch.watchdog import Watchdog
from trm.backends.pytorch.world import c10d, gloo_world, within
from trm.backends.world import Address, FormingFailed, Member, OnLost, PeerLost, Place, World

POLL_SECONDS = 0.1
NEWCOMERS_SECONDS = 0.5  # between two checks of who has arrived
WAIT_SECONDS = 1.0  # for the host, between two checks that the supervisor of this process still runs
SURVIVORS_SECONDS = 3.0  # to show a sign of life after a connection was lost; there is one per second
INTRODUCTION_SECONDS = 2.0  # between the arrival of a guest and its description
Connect = Callable[[Any, Place], World]  # connects the ranks of a world, which find each other in a store
_WAIT = timedelta(seconds=3600)  # a watchdog ends a process that waits for a machine that is gone


class _Meeting:
    """Common parts of host and guests: a rank, heartbeats, and who survived a lost connection."""

    def __init__(self, address: Address, host: str, timeout_seconds: float) -> None:
        self.address = address
        self.host = host
        self.timeout_seconds = timeout_seconds
        self.store: Any
        self.watchdog: Watchdog | None = None
        self.connect: Connect = gloo_world  # another backend has one of its own
        self.names: list[str] = []  # by rank, once the world is formed
        self.beats: list[str] = []  # likewise, the keys of heartbeats
        self.rank = 0

    def _start_watchdog(self, key: str, on_lost: OnLost) -> None:
        store = client(self.address, self.timeout_seconds)
        self.watchdog = Watchdog(store, key, self.host, self.timeout_seconds, on_lost)
        self.watchdog.start()

    def _world(self, group: JsonObject, arrival: int, local: str) -> World:
        """Connect to the others. Arrival 0 is the host; ranks are in the order of `group`."""
        arrivals: list[int] = group["arrivals"]
        self.names = group["names"]
        self.beats = [_beat(each) for each in arrivals]
        self.rank = arrivals.index(arrival)
        assert self.watchdog is not None
        peers = zip(self.beats, self.names, strict=True)
        self.watchdog.watch({beat: name for beat, name in peers if beat != _beat(arrival)})
        place = Place(
            self.rank, tuple(group["shares"]), arrivals.index(0), local, before_closing=self.watchdog.stop
        )
        try:
            return self.connect(client(self.address, self.timeout_seconds), place)
        except PeerLost as loss:
            raise FormingFailed(str(loss)) from loss

    def lost_names(self) -> list[str]:
        """Return who is gone after a lost connection.

        A process that has noticed the loss reports to the store before it ends. Another one may still
        compute; then its heartbeats continue. If the store is gone or does not answer, the host is.
        """
        try:
            missing: list[int] = within(2 * SURVIVORS_SECONDS, self._missing)
        except (RuntimeError, TimeoutError):
            return [self.host]
        return [self.names[rank] for rank in missing]

    def _missing(self) -> list[int]:
        deadline = time.monotonic() + SURVIVORS_SECONDS
        self.store.set(f"survivor/{self.rank}", "")
        before = {rank: self._count(rank) for rank in range(len(self.names))}
        missing = list(before)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._lives(rank, before[rank])]
            time.sleep(POLL_SECONDS)
        return missing

    def _lives(self, rank: int, count: int) -> bool:
        reported: bool = self.store.check([f"survivor/{rank}"])
        return reported or self._count(rank) > count

    def _count(self, rank: int) -> int:
        found: int = self.store.add(self.beats[rank], 0)
        return found

    def close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()


class Host(_Meeting):
    """The host's side. `descriptor` is a listening socket; `facts` is what a guest must know to prepare."""

    def __init__(
        self, address: Address, descriptor: int, host: str, timeout_seconds: float, facts: JsonObject
    ) -> None:
        super().__init__(address, host, timeout_seconds)
        self.store = c10d.TCPStore(
            address.host,
            address.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_WAIT,
            master_listen_fd=descriptor,
            use_libuv=False,
        )
        self.store.set("facts", json.dumps(facts))
        self.num_known = 0  # guests when the world was formed
        self.present: list[int] = []  # those of them that have described themselves
        self.checked_at = time.monotonic()

    def arrivals(self) -> int:
        """Return how many guests have arrived since the store was opened."""
        found: int = self.store.add("arrivals", 0)
        return found

    def has_newcomers(self) -> bool:
        """Return whether a guest has arrived since the world was formed; read twice per second."""
        now = time.monotonic()
        if now - self.checked_at < NEWCOMERS_SECONDS:
            return False
        self.checked_at = now
        late = set(range(1, self.num_known + 1)) - set(self.present)
        return self.arrivals() > self.num_known or any(map(self._is_described, late))

    def _is_described(self, arrival: int) -> bool:
        found: bool = self.store.check([_description(arrival)])
        return found

    def members(self, number: int, wait_seconds: float) -> list[Member]:
        deadline = time.monotonic() + wait_seconds
        while self.arrivals() < number and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.num_known = self.arrivals()
        arrived = range(1, self.num_known + 1)
        deadline = time.monotonic() + INTRODUCTION_SECONDS  # a guest may have ended in between
        while not all(map(self._is_described, arrived)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.present = [each for each in arrived if self._is_described(each)]
        return [Member(**json.loads(self.store.get(_description(each)))) for each in self.present]

    def form(self, members: Sequence[Member], shares: Sequence[int], on_lost: OnLost) -> World:
        """Form the world of these machines: the host first, then guests in the order of their arrival."""
        group = {
            "arrivals": [0, *self.present][: len(members)],
            "names": [member.name for member in members],
            "shares": list(shares),
        }
        self._start_watchdog(_beat(0), on_lost)
        self.store.set("group", json.dumps(group))
        return self._world(group, 0, self.address.host)


class Guest(_Meeting):
    """A guest's side, connected to the host. `local` is the address of this machine."""

    def __init__(self, address: Address, host: str, timeout_seconds: float, local: str) -> None:
        super().__init__(address, host, timeout_seconds)
        self.local = local
        self.store = client(address, timeout_seconds)
        # The time is limited here and in `join` until the watchdog runs, in case the host freezes.
        self.facts: JsonObject = json.loads(within(timeout_seconds, lambda: self.store.get("facts")))

    def join(self, member: Member, on_lost: OnLost, on_forming: Callable[[], None] = lambda: None) -> World:
        """Announce this machine, and wait until the host forms a world with it."""
        try:
            arrival = within(self.timeout_seconds, lambda: self._announce(member))
            self._start_watchdog(_beat(arrival), on_lost)  # the host may be lost before it forms a world
            self._wait_for("group")
            group = json.loads(self.store.get("group"))
            if arrival not in group["arrivals"]:  # the host is training; it will end this world soon
                self._wait_for("never")
            on_forming()
            return self._world(group, arrival, self.local)
        except (RuntimeError, TimeoutError) as error:  # the store is gone
            raise PeerLost(f"{self.host} has ended this world") from error

    def _announce(self, member: Member) -> int:
        arrival: int = self.store.add("arrivals", 1)
        self.store.set(_description(arrival), json.dumps(asdict(member)))
        return arrival

    def _wait_for(self, key: str) -> None:
        while not parent_is_gone():
            try:
                self.store.wait([key], timedelta(seconds=WAIT_SECONDS))
                return
            except c10d.DistStoreError:  # not there yet
                continue
        raise PeerLost("the supervisor of this process has ended")


def _beat(arrival: int) -> str:
    return f"beat/{arrival}"


def _description(arrival: int) -> str:
    return f"arrival/{arrival}"


def client(address: Address, timeout_seconds: float) -> Any:
    """Connect to the store of the host; raise `PeerLost` if it does not answer.

    torch waits forever for a machine that accepts a connection and then disappears.
    """

    def connect() -> Any:
        options = {"is_master": False, "wait_for_workers": False, "use_libuv": False}
        timeout = timedelta(seconds=timeout_seconds)
        store = c10d.TCPStore(address.host, address.port, timeout=timeout, **options)
        store.set_timeout(_WAIT)
        return store

    try:
        return within(timeout_seconds + 1, connect)
    except (RuntimeError, TimeoutError) as error:
        raise PeerLost(f"{address} does not answer") from error


def host_meeting(
    address: Address, descriptor: int, host: str, timeout_seconds: float, facts: JsonObject
) -> Host:
    return Host(address, descriptor, host, timeout_seconds, facts)


def guest_meeting(address: Address, host: str, timeout_seconds: float, local: str) -> Guest:
    try:
        return Guest(address, host, timeout_seconds, local)
    except (RuntimeError, TimeoutError) as error:
        raise PeerLost(f"{address} does not answer") from error
