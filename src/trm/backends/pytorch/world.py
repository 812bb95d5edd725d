"""Several processes that train one run together, connected by torch's own gloo.

Only flat tensors and JSON cross the wire: torch's `*_object` collectives would unpickle what they receive.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from trm.backends.pytorch.device import to_tensor
from trm.backends.world import CLOSED_PORTS, PeerLost, Place

c10d: Any = distributed  # its type hints lack most of what it has
FORMING_SECONDS = 60.0  # until all have connected
HANG_SECONDS = 86400.0  # until a process that lives but takes no part is given up; heartbeats find dead ones
CLOSING_SECONDS = 30.0
_CPU = torch.device("cpu")  # where gloo reads and writes


def gloo_world(store: Any, place: Place) -> GlooWorld:
    """Connect to all other ranks, which find each other in the store, from the address of this machine."""
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=place.address)]
    options._timeout = timedelta(seconds=HANG_SECONDS)

    def connect() -> Any:
        return c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), place.rank, len(place.shares), options)

    try:
        group = within(FORMING_SECONDS, connect)
    except TimeoutError:
        raise PeerLost(CLOSED_PORTS) from None
    except RuntimeError as error:
        raise PeerLost(_reason(error)) from error
    return GlooWorld(place.rank, place.shares, place.writer, group, place.before_closing)


@dataclass(frozen=True, slots=True)
class GlooWorld:
    rank: int
    shares: tuple[int, ...]
    writer: int
    group: Any  # of gloo
    before_closing: Callable[[], None]

    @property
    def size(self) -> int:
        return len(self.shares)

    @property
    def writes(self) -> bool:
        return self.rank == self.writer

    def sum(self, message: Any) -> None:
        shared = to_tensor(message, _CPU) if isinstance(message, np.ndarray) else message
        _wait(lambda: self.group.allreduce([shared]))

    def agree(self, wishes: Sequence[int]) -> list[int]:
        return self._maximum(wishes, HANG_SECONDS)

    def _maximum(self, wishes: Sequence[int], timeout_seconds: float) -> list[int]:
        values = torch.tensor(list(wishes), dtype=torch.int64)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        options.timeout = timedelta(seconds=timeout_seconds)
        _wait(lambda: self.group.allreduce([values], options))
        found: list[int] = values.tolist()
        return found

    def broadcast(self, facts: Any) -> Any:
        content = torch.empty(0, dtype=torch.uint8)
        if self.writes:
            content = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        self.copy_from_writer(length)
        if not self.writes:
            content = torch.empty(int(length), dtype=torch.uint8)
        self.copy_from_writer(content)
        return json.loads(bytes(content.numpy()))

    def copy_from_writer(self, tensor: Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = self.writer
        local = tensor.detach().cpu().contiguous()
        _wait(lambda: self.group.broadcast([local], options))
        if local.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(local)

    def gather(self, own: Tensor, dim: int) -> Tensor | None:
        if not self.writes:
            self._send(own, self.writer)
            return None
        shape = list(own.shape)
        shape[dim] = sum(self.shares)
        whole = torch.empty(shape, dtype=own.dtype)
        for rank, part in enumerate(torch.split(whole, list(self.shares), dim)):
            if rank == self.rank:
                part.copy_(own)
            else:
                part.copy_(self._received(part, rank))
        return whole

    def scatter(self, whole: Tensor | None, own: Tensor, dim: int) -> None:
        if whole is None:
            own.copy_(self._received(own, self.writer))
            return
        for rank, part in enumerate(torch.split(whole, list(self.shares), dim)):
            if rank == self.rank:
                own.copy_(part)
            else:
                self._send(part, rank)

    def _send(self, part: Tensor, rank: int) -> None:
        local = part.detach().to(_CPU, _dtype_on_the_wire(part)).contiguous()
        _wait(lambda: self.group.send([local], rank, 0))

    def _received(self, like: Tensor, rank: int) -> Tensor:
        buffer = torch.empty(like.shape, dtype=_dtype_on_the_wire(like))
        _wait(lambda: self.group.recv([buffer], rank, 0))
        return buffer

    def close(self, wish: int = 0) -> int:
        """Wait for the others, so that none of them loses this process while it still needs it."""
        self.before_closing()
        return self._maximum([wish], CLOSING_SECONDS)[0]


def _dtype_on_the_wire(tensor: Tensor) -> torch.dtype:
    """Return float32 for bfloat16: ranks may compute in either, and must send the same number of bytes."""
    return torch.promote_types(tensor.dtype, torch.float32)


def within(seconds: float, connect: Callable[[], Any]) -> Any:
    """Return the result of `connect`, or raise its `RuntimeError`; after `seconds`, a `TimeoutError`.

    torch may wait forever, or has one time limit for connecting and for all that follows. So a thread waits,
    and is left behind: a process that cannot reach another one soon ends.
    """
    answer: list[Any] = []

    def attempt() -> None:
        try:
            answer.append(connect())
        except RuntimeError as error:
            answer.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        raise TimeoutError
    if isinstance(answer[0], RuntimeError):
        raise answer[0]
    return answer[0]


def _wait(start: Callable[[], Any]) -> None:
    """Start an operation and wait for it. Gloo reports a lost connection as a `RuntimeError`."""
    try:
        start().wait()
    except RuntimeError as error:
        raise PeerLost(_reason(error)) from error


def _reason(error: RuntimeError) -> str:
    """Return what gloo says without the place in its source code and its advice."""
    text = re.sub(r"^\[\S*?\] ", "", str(error).partition("\n")[0])
    return text.partition(". ")[0]
