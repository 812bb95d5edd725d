"""Several processes that train one run together, connected by the ring of `mlx.distributed`.

They meet as in the PyTorch backend, with the same signs of life; the host's store passes on the address at
which each rank listens. MLX reports a closed connection but waits forever for a frozen machine; then missing
signs of life end the process. Every process reports its result to its own supervisor, so a crash is never
mistaken for a finished run.

Only sums of arrays in NumPy's memory cross the wire. What one rank has is passed on as a sum of integers to
which the others add zeros, so that every bit arrives.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import ConfigError
from macbook_optimization.json_types import JsonObject
from trm.backends.world import Address, GuestMeeting, HostMeeting, PeerLost, Place

CLOSING_SECONDS = 60.0  # until all ranks have arrived at the end; then nobody watches for signs of life
FORMING_SECONDS = 60.0  # until all neighbours have connected
Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RingWorld:
    rank: int
    shares: tuple[int, ...]
    writer: int
    group: Any  # of MLX
    before_closing: Callable[[], None]

    @property
    def size(self) -> int:
        return len(self.shares)

    @property
    def writes(self) -> bool:
        return self.rank == self.writer

    def sum(self, message: Numbers) -> None:
        message[...] = self._sum(message)

    def agree(self, wishes: Sequence[int]) -> list[int]:
        own = mx.array(np.array(wishes, dtype=np.int64))
        most = _received(mx.distributed.all_max(own, group=self.group, stream=mx.cpu))
        return [int(each) for each in most]

    def broadcast(self, facts: Any) -> Any:
        own = json.dumps(facts).encode() if self.writes else b""
        (length,) = self.agree([len(own)])
        content = np.frombuffer(own.ljust(length), dtype=np.uint8)
        return json.loads(self._of_rank(self.writer, content).tobytes())

    def copy_from_writer(self, array: Numbers) -> None:
        array[...] = self._of_rank(self.writer, array)

    def gather(self, own: Numbers, dim: int) -> Numbers | None:
        whole = np.empty(_with_length(own, dim, sum(self.shares)), own.dtype) if self.writes else None
        for rank, share in enumerate(self.shares):
            like = own if rank == self.rank else np.zeros(_with_length(own, dim, share), own.dtype)
            part = self._of_rank(rank, like)
            if whole is not None:
                whole[self._range_of(rank, dim)] = part
        return whole

    def scatter(self, whole: Numbers | None, own: Numbers, dim: int) -> None:
        for rank, share in enumerate(self.shares):
            if whole is None:
                part = np.zeros(_with_length(own, dim, share), own.dtype)
            else:
                part = whole[self._range_of(rank, dim)]
            received = self._of_rank(self.writer, part)
            if rank == self.rank:
                own[...] = received

    def close(self, wish: int = 0) -> int:
        """Wait for the others, so that none of them loses this process while it still needs it.

        The first time, signs of life are still expected, as MLX has no time limit.
        """
        (found,) = self.agree([wish])
        self.before_closing()
        with _time_limit(CLOSING_SECONDS):
            self.agree([0])
        return found

    def _of_rank(self, rank: int, array: Numbers) -> Numbers:
        """Return the array that one rank has; those of the others only have its shape."""
        bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")
        if rank != self.rank:
            bits = np.zeros_like(bits)
        return self._sum(bits).view(array.dtype).reshape(array.shape)

    def _sum(self, array: Numbers) -> Numbers:
        own = mx.array(array, dtype=getattr(mx, array.dtype.name))
        return _received(mx.distributed.all_sum(own, group=self.group, stream=mx.cpu))

    def _range_of(self, rank: int, dim: int) -> tuple[slice, ...]:
        first = sum(self.shares[:rank])
        return (slice(None),) * dim + (slice(first, first + self.shares[rank]),)


def _with_length(array: Numbers, dim: int, length: int) -> tuple[int, ...]:
    return (*array.shape[:dim], length, *array.shape[dim + 1 :])


def _received(array: mx.array) -> Numbers:
    try:
        mx.eval(array)
    except RuntimeError as error:
        raise PeerLost(_reason(error)) from error
    return np.array(array)


def _reason(error: RuntimeError) -> str:
    return str(error).removeprefix("[ring] ")


def ring_world(store: Any, place: Place) -> RingWorld:
    """Connect to both neighbours; the store passes on at which address each rank listens."""
    ranks = range(len(place.shares))
    with closing(_reserved(place.address)) as reserved:
        store.set(f"ring/{place.rank}", "{}:{}".format(*reserved.getsockname()))
        addresses = [[store.get(f"ring/{rank}").decode()] for rank in ranks]  # waits for each
        with _environment(addresses, place.rank), _time_limit(FORMING_SECONDS):
            try:
                group = mx.distributed.init(strict=True, backend="ring")
            except RuntimeError as error:
                raise PeerLost(_reason(error)) from error
    return RingWorld(place.rank, place.shares, place.writer, group, place.before_closing)


def _reserved(address: str) -> socket.socket:
    """Return a socket that keeps a port free for MLX: both may bind to it, and only MLX listens."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind((address, 0))
    return reserved


@contextmanager
def _environment(addresses: list[list[str]], rank: int) -> Iterator[None]:
    """Set the environment variables from which MLX reads the addresses of the ranks."""
    with tempfile.TemporaryDirectory() as directory:
        hosts = Path(directory) / "hosts.json"
        hosts.write_text(json.dumps(addresses))
        names = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        os.environ.update(names)
        try:
            yield
        finally:
            for name in names:
                del os.environ[name]


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End the process by SIGALRM if this takes longer.

    MLX waits for its neighbours without releasing Python's lock, so no thread could end it. Supervisors take
    this as the loss of another machine.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _require_ipv4(address: str) -> None:
    if ":" in address:
        raise ConfigError(
            f"MLX connects machines by IPv4 only, and {address} is IPv6.",
            hint="Use an IPv4 address, or plan.backend=pytorch on all machines.",
        )


# The meetings are those of the PyTorch backend, as only torch has the store; it is loaded when machines meet.


def host_meeting(
    address: Address, descriptor: int, host: str, timeout_seconds: float, facts: JsonObject
) -> HostMeeting:
    from trm.backends.pytorch import rendezvous

    _require_ipv4(address.host)
    meeting = rendezvous.host_meeting(address, descriptor, host, timeout_seconds, facts)
    meeting.connect = ring_world
    return meeting


def guest_meeting(address: Address, host: str, timeout_seconds: float, local: str) -> GuestMeeting:
    from trm.backends.pytorch import rendezvous

    _require_ipv4(local)
    meeting = rendezvous.guest_meeting(address, host, timeout_seconds, local)
    meeting.connect = ring_world
    return meeting
