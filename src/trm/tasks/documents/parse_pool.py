"""Apply a function to hostile messages in worker processes, each within limits of time and memory.

The parser has bounds of its own. This is the second line: whatever a message does to a worker, it costs that
message and no other. A worker stops itself after some seconds of CPU time, or when it needs too much memory;
a worker that can do neither is killed. Results come back in groups, so when a worker ends, the messages whose
results were lost are sent again, one result at a time: the one that ends the next worker is to be skipped.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Generic, TypeVar

import psutil

from macbook_optimization.errors import LaptopError
from macbook_optimization.worker_pool import initialize_worker, without_main_module
from trm.tasks.documents.mailboxes import Message

Result = TypeVar("Result")

_BATCH_MESSAGES = 64
_BATCH_BYTES = 2**20
_MAX_PENDING_MESSAGES = 32 * _BATCH_MESSAGES  # that wait for an earlier message, so that order is kept
_MAX_PENDING_BYTES = 32 * 2**20  # one message may be up to 25 MiB, and is copied a few times on its way
_FLUSH_SECONDS = 0.02
_POLL_SECONDS = 0.25
_START_SECONDS = 120.0
_TOO_MUCH_MEMORY = 77  # an exit status that nothing else uses


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one message."""

    seconds: float = 2.0  # of CPU time
    extra_bytes: int = 256 * 2**20  # beyond what the worker has before the first message

    @property
    def silent_seconds(self) -> float:
        """The seconds that a worker may take, on a busy machine, before it is killed."""
        return 2.5 * self.seconds

    @property
    def too_slow(self) -> str:
        return f"takes longer than {self.seconds:g} s"

    @property
    def too_much_memory(self) -> str:
        return f"needs more than {self.extra_bytes // 2**20} MiB"


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that has no result, and why."""

    reason: str


@dataclass(slots=True)
class _Item(Generic[Result]):
    message: Message
    results: list[Result | Failure] = field(default_factory=list)  # one, when it is done


@dataclass(slots=True)
class _Worker(Generic[Result]):
    process: BaseProcess
    connection: Connection
    is_ready: bool = False
    is_careful: bool = False  # it sends each result by itself
    items: deque[_Item[Result]] = field(default_factory=deque)  # without a result so far
    silent_seconds: float = 0.0

    def send(self, items: Iterable[_Item[Result]], careful: bool) -> None:
        self.items = deque(items)
        self.is_careful = careful
        self.silent_seconds = 0.0
        with suppress(ConnectionError):  # it has ended, which the next read reports
            self.connection.send((careful, [item.message.raw for item in self.items]))

    def end(self, wait_seconds: float = 0.0) -> int:
        """End the process, and kill it if it does not end by itself. Return its exit code."""
        self.process.join(wait_seconds)
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode or 0


class ParsePool(Generic[Result]):
    """Worker processes that stay between calls of `map`. They are started when they are needed."""

    def __init__(self, function: Callable[[bytes], Result], jobs: int, limits: Limits | None = None) -> None:
        self._function = function
        self._jobs = jobs
        self._limits = limits or Limits()
        self._workers: list[_Worker[Result]] = []
        self._again: deque[_Item[Result]] = deque()  # to be sent one result at a time

    def __enter__(self) -> ParsePool[Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def map(self, messages: Iterable[Message]) -> Iterator[tuple[Message, Result | Failure]]:
        """Yield each message and its result, in the order of the messages, which may be infinite."""
        source = iter(messages)
        pending: deque[_Item[Result]] = deque()
        unsent: list[_Item[Result]] = []
        is_exhausted = False
        try:
            while not (is_exhausted and not pending):
                while pending and pending[0].results:
                    item = pending.popleft()
                    yield item.message, item.results[0]
                if not unsent and not is_exhausted and _has_room(pending):
                    batch: list[_Item[Result]] = _next_batch(source)
                    is_exhausted = not batch
                    pending.extend(batch)
                    unsent = [item for item in batch if not item.results]
                if self._dispatch(unsent):
                    unsent = []
                elif pending and not pending[0].results:
                    self._collect()
        finally:  # the caller may stop early
            self._again.clear()
            for worker in [worker for worker in self._workers if worker.items]:
                worker.end()
                self._workers.remove(worker)

    def _dispatch(self, unsent: list[_Item[Result]]) -> bool:
        """Send messages to an idle worker, those to repeat first. Return whether `unsent` was sent."""
        while (self._again or unsent) and (worker := self._idle_worker()) is not None:
            if not self._again:
                worker.send(unsent, careful=False)
                return True
            worker.send(self._again, careful=True)
            self._again.clear()
        return False

    def _idle_worker(self) -> _Worker[Result] | None:
        """Return a worker without messages. If there is none, start one, which is ready later."""
        for worker in self._workers:
            if worker.is_ready and not worker.items:
                return worker
        if len(self._workers) < self._jobs and all(worker.is_ready for worker in self._workers):
            context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
            ours, theirs = context.Pipe()
            arguments = (theirs, self._function, self._limits)
            process = context.Process(target=_work, args=arguments, daemon=True)
            with without_main_module():
                process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        return None

    def _collect(self) -> None:
        """Wait a moment for results. Only this is counted: a suspended laptop is not a slow message."""
        busy = [worker for worker in self._workers if worker.items or not worker.is_ready]
        started = time.monotonic()
        readable = wait([worker.connection for worker in busy], _POLL_SECONDS)
        elapsed = min(time.monotonic() - started, 2 * _POLL_SECONDS)
        for worker in busy:
            if worker.connection in readable:
                self._receive(worker)
                continue
            worker.silent_seconds += elapsed
            if worker.silent_seconds > (self._limits.silent_seconds if worker.is_ready else _START_SECONDS):
                worker.end()
                self._lose(worker, self._limits.too_slow)

    def _receive(self, worker: _Worker[Result]) -> None:
        try:
            results: list[Result | Failure] = worker.connection.recv()
        except (EOFError, OSError):
            self._lose(worker, self._reason(worker.end(wait_seconds=5.0)))
            return
        worker.silent_seconds = 0.0
        worker.is_ready = True
        for result in results:
            worker.items.popleft().results.append(result)

    def _lose(self, worker: _Worker[Result], reason: str) -> None:
        """Remove a worker that has ended. Its message is known if it sent each result by itself."""
        self._workers.remove(worker)
        if not worker.is_ready:
            raise LaptopError(f"A worker process did not start: it {reason}.")
        if worker.items and worker.is_careful:
            worker.items.popleft().results.append(Failure(reason))
        self._again.extend(worker.items)

    def _reason(self, exit_code: int) -> str:
        if exit_code == _TOO_MUCH_MEMORY:
            return self._limits.too_much_memory
        if exit_code < 0:
            return f"ended its worker process by {signal.Signals(-exit_code).name}"
        return f"ended its worker process with exit status {exit_code}"


def _has_room(pending: deque[_Item[Result]]) -> bool:
    if len(pending) >= _MAX_PENDING_MESSAGES:
        return False
    return sum(len(item.message.raw) for item in pending) < _MAX_PENDING_BYTES


def _next_batch(source: Iterator[Message]) -> list[_Item[Result]]:
    """Take some messages; those that could not be read are done."""
    batch: list[_Item[Result]] = []
    num_bytes = 0
    for message in islice(source, _BATCH_MESSAGES):
        item = _Item[Result](message)
        if message.problem:
            item.results.append(Failure(message.problem))
        batch.append(item)
        num_bytes += len(message.raw)
        if num_bytes > _BATCH_BYTES:
            break
    return batch


class _TooSlow(BaseException):
    """Raised in the middle of whatever a worker is doing."""


def _raise_too_slow(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlow


def _work(connection: Connection, function: Callable[[bytes], Result], limits: Limits) -> None:
    """Run in a worker process until the connection is closed. An unexpected exception ends the process."""
    initialize_worker()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _raise_too_slow)
    _limit_memory(limits.extra_bytes)
    connection.send([])  # ready
    while True:
        try:
            is_careful, raws = connection.recv()
        except EOFError:
            return
        results: list[Result | Failure] = []
        sent = time.monotonic()
        for raw in raws:
            results.append(_apply(function, raw, limits))
            if is_careful or time.monotonic() - sent > _FLUSH_SECONDS:
                connection.send(results)
                results = []
                sent = time.monotonic()
        if results:
            connection.send(results)


def _apply(function: Callable[[bytes], Result], raw: bytes, limits: Limits) -> Result | Failure:
    try:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds, _POLL_SECONDS)
        try:
            return function(raw)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooSlow:
        return Failure(limits.too_slow)
    except MemoryError:  # what the message took may not all be free again, and the next one needs it
        os._exit(_TOO_MUCH_MEMORY)
    except RecursionError:
        return Failure("is nested too deeply")


def _limit_memory(extra_bytes: int) -> None:
    """Bound what this process may allocate from now on. macOS has no such limit: memory is watched."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    else:
        watch_memory(extra_bytes)


def watch_memory(extra_bytes: int, every_seconds: float = 0.05) -> None:
    """End this process from a thread when its resident memory has grown too much."""
    process = psutil.Process()
    limit = process.memory_info().rss + extra_bytes

    def watch() -> None:
        while process.memory_info().rss < limit:
            time.sleep(every_seconds)
        os._exit(_TOO_MUCH_MEMORY)

    threading.Thread(target=watch, daemon=True).start()
