"""Data parallelism within one process: worker threads, each taking examples through the whole model.

Two cores that share every small product wait for each other hundreds of times per step. Workers that each
take some slots through the whole recursion meet once per step and keep their data in their own cache. When
there are more micro-batches than workers, a worker that another program slows down takes fewer. Results are
added in the order of the slots, so the speed of a worker changes no bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class ThreadWorkers:
    """Some worker threads, each with its share of the CPU threads.

    When fewer slots than workers may be computed at a time, all CPU threads share the same products instead.
    """

    def __init__(self, threads: int, count: int) -> None:
        self.count = count
        self.all_threads = threads
        self.threads = max(1, threads // count)  # per worker
        self.pool: ThreadPoolExecutor | None = None
        if count > 1:
            self.pool = ThreadPoolExecutor(count, "worker", torch.set_num_threads, (self.threads,))

    def share(self, micro_batch_size: int) -> tuple[int, int]:
        """Return the slots that one worker computes of a micro-batch, and its CPU threads."""
        if micro_batch_size < self.count:
            return micro_batch_size, self.all_threads
        return micro_batch_size // self.count, self.threads

    def on_each_thread(self, function: Callable[[], T]) -> list[T]:
        """Call a function once on every worker thread, for what torch keeps per thread."""
        if self.pool is None:
            return []
        all_are_here = threading.Barrier(self.count)  # so that no thread takes two of the calls

        def call() -> T:
            all_are_here.wait()
            return function()

        futures = [self.pool.submit(call) for _ in range(self.count)]
        return [future.result() for future in futures]

    def map(
        self,
        num_slots: int,
        next_size: Callable[[int], int],
        compute: Callable[[slice], T],
        add: Callable[[T], None],
    ) -> None:
        """Call `compute` for slices that cover all slots, and `add` with each result, in order of the slots.

        `next_size` receives the number of slots already taken and returns how many may be computed at a time.
        """
        if self.pool is None or next_size(0) < self.count:
            _Queue(num_slots, next_size, compute, add).work()
            return
        queue = _Queue(num_slots, next_size, compute, add, workers=self.count)
        futures = [self.pool.submit(queue.work) for _ in range(self.count)]
        wait(futures)  # also after a failure: no worker may still be computing when it is handled
        for future in futures:
            future.result()


@dataclass
class _Queue(Generic[T]):
    """The slots of one step, handed out slice by slice."""

    num_slots: int
    next_size: Callable[[int], int]
    compute: Callable[[slice], T]
    add: Callable[[T], None]
    workers: int = 1

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.slots_taken = 0
        self.slices_taken = 0
        self.added = 0
        self.waiting: dict[int, T] = {}  # computed before an earlier slice
        self.failed = False

    def work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                index, slots = taken
                self._put(index, self.compute(slots))
        except BaseException:
            self.failed = True
            raise

    def _take(self) -> tuple[int, slice] | None:
        with self.lock:
            if self.failed or self.slots_taken >= self.num_slots:
                return None
            at_a_time = self.next_size(self.slots_taken)
            if at_a_time < self.workers:  # there is no room for this worker any more
                self.workers -= 1
                return None
            size = max(1, at_a_time // self.workers)
            slots = slice(self.slots_taken, min(self.slots_taken + size, self.num_slots))
            self.slots_taken = slots.stop
            self.slices_taken += 1
            return self.slices_taken - 1, slots

    def _put(self, index: int, result: T) -> None:
        with self.lock:
            self.waiting[index] = result
            while self.added in self.waiting:
                self.add(self.waiting.pop(self.added))
                self.added += 1
