"""The processes that train one run together: what they are called, share and exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from macbook_optimization.json_types import JsonObject

CLOSED_PORTS = (
    "the machines could not connect to each other; does a firewall, or a tunnel that forwards a single port, "
    "close the further ports that each of them opens at its own address?"
)


class PeerLost(Exception):  # noqa: N818 - an observation; the supervisor decides what follows
    """Another process of the world has ended, or cannot be reached."""


class FormingFailed(PeerLost):
    """The machines of a world have met, but could not connect to each other."""


class StepAbandoned(Exception):  # noqa: N818 - not an error of this rank
    """Another rank could not complete the step. Nothing has changed, and the step may be repeated."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a host listens."""

    host: str  # a numeric address of one interface
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Member:
    """A machine that takes part in a run."""

    name: str
    slots_per_second: float | None = None  # measured, of its own compute
    max_slots: int | None = None  # that fit into its memory; None: any number


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process in a world that is being formed."""

    rank: int
    shares: tuple[int, ...]
    writer: int
    address: str  # of this machine, where others connect to it
    before_closing: Callable[[], None] = lambda: None  # from then on, a peer that ends is not lost


OnLost = Callable[[list[str], str], None]  # receives the names of the machines that are lost, and the cause


class World(Protocol):
    """The processes that train one run together.

    Every method except `close` is a collective: all ranks call it in the same order, and it raises `PeerLost`
    if one of them is gone. Tensors are those of the backend.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def writes(self) -> bool:
        """Return whether this process holds the run directory."""
        ...

    @property
    def shares(self) -> tuple[int, ...]:
        """Slots per rank; each rank owns a contiguous range."""
        ...

    def sum(self, message: Any) -> None:
        """Replace a flat tensor, or array, by its sum over all ranks, with the same bits on each of them."""
        ...

    def agree(self, wishes: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        ...

    def broadcast(self, facts: Any) -> Any:
        """Return the JSON value that the writer passes; what others pass is ignored."""
        ...

    def copy_from_writer(self, tensor: Any) -> None:
        """Replace a tensor by that of the writer."""
        ...

    def gather(self, own: Any, dim: int) -> Any:
        """Return the tensor of all slots at the writer, from each rank's range in dimension `dim`.

        Other ranks get None.
        """
        ...

    def scatter(self, whole: Any, own: Any, dim: int) -> None:
        """Fill each rank's tensor with its range of the tensor of all slots, which only the writer has."""
        ...

    def close(self, wish: int = 0) -> int:
        """End the world, after a last agreement: return the maximum over all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """The world of an ordinary run: one process owns every slot."""

    num_slots: int
    rank: int = 0
    size: int = 1
    writes: bool = True

    @property
    def shares(self) -> tuple[int, ...]:
        return (self.num_slots,)

    def sum(self, message: Any) -> None:
        return None

    def agree(self, wishes: Sequence[int]) -> list[int]:
        return list(wishes)

    def broadcast(self, facts: Any) -> Any:
        return facts

    def copy_from_writer(self, tensor: Any) -> None:
        return None

    def gather(self, own: Any, dim: int) -> Any:
        return own

    def scatter(self, whole: Any, own: Any, dim: int) -> None:
        own[...] = whole

    def close(self, wish: int = 0) -> int:
        return wish


def owned_slots(world: World) -> slice:
    """Return the range of slots that this rank owns."""
    first = sum(world.shares[: world.rank])
    return slice(first, first + world.shares[world.rank])


class Meeting(Protocol):
    """The meeting of machines. A world is formed once; when it changes, every process starts again."""

    def lost_names(self) -> list[str]:
        """Return who is gone after `PeerLost`: those that still run report to each other."""
        ...

    def close(self) -> None: ...


class HostMeeting(Meeting, Protocol):
    """The side of the machine that has the run."""

    def has_newcomers(self) -> bool:
        """Return whether a guest has arrived since the world was formed."""
        ...

    def arrivals(self) -> int:
        """Return how many guests have arrived since this process listens."""
        ...

    def members(self, number: int, wait_seconds: float) -> list[Member]:
        """Wait until this many guests have arrived, or for this time; return those who have."""
        ...

    def form(self, members: Sequence[Member], shares: Sequence[int], on_lost: OnLost) -> World:
        """Form the world of these machines: this one first, then guests in the order of their arrival."""
        ...


class GuestMeeting(Meeting, Protocol):
    """The side of a machine that joins."""

    @property
    def facts(self) -> JsonObject:
        """The facts about the run that the host publishes."""
        ...

    def join(self, member: Member, on_lost: OnLost, on_forming: Callable[[], None]) -> World:
        """Announce this machine, and wait until the host forms a world with it.

        `on_forming` is called when the host has started to do so, before this machine connects to the others.
        """
        ...
