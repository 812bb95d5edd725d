"""Pieces of a batch, computed side by side.

Two cores that share every small product wait for each other hundreds of times a step. Cores that each take a
piece of the slots through the whole recursion meet once a step and keep their numbers in their own cache. If
there are more pieces than lanes, one that another program slows down takes fewer. Results are taken in the
order of the slots, so how fast the lanes were changes no bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Lanes:
    """So many threads, each with its share of the cores that torch was given.

    Where fewer slots than lanes may be computed at a time, all cores work on the same products instead."""

    def __init__(self, count: int) -> None:
        self.count, self.all_threads = count, torch.get_num_threads()
        self.threads = max(1, self.all_threads // count)  # of each
        self.pool: ThreadPoolExecutor | None = None
        if count > 1:
            self.pool = ThreadPoolExecutor(count, "lane", torch.set_num_threads, (self.threads,))

    def piece(self, at_a_time: int) -> tuple[int, int]:
        """Slots of one lane, of so many that may be computed at a time, and its threads."""
        if at_a_time < self.count:
            return at_a_time, self.all_threads
        return at_a_time // self.count, self.threads

    def each(
        self,
        num_slots: int,
        next_cut: Callable[[int], int],
        compute: Callable[[slice], T],
        add: Callable[[T], None],
    ) -> None:
        """`compute` on every piece; `add` hears the results one at a time, in the order of the slots.

        `next_cut` is told how many slots are taken, and tells how many may be computed at a time.
        """
        if self.pool is None or next_cut(0) < self.count:
            _Pieces(num_slots, next_cut, 1, compute, add).work()
            return
        pieces = _Pieces(num_slots, next_cut, self.count, compute, add)
        lanes = [self.pool.submit(pieces.work) for _ in range(self.count)]
        wait(lanes)  # also after a failure: nobody may be computing when it is answered
        for lane in lanes:
            lane.result()


class _Pieces(Generic[T]):
    def __init__(
        self,
        num_slots: int,
        next_cut: Callable[[int], int],
        lanes: int,
        compute: Callable[[slice], T],
        add: Callable[[T], None],
    ) -> None:
        self.num_slots, self.next_cut, self.lanes = num_slots, next_cut, lanes
        self.compute, self.add = compute, add
        self.lock = threading.Lock()
        self.taken_slots = self.taken = self.added = 0
        self.waiting: dict[int, T] = {}  # done before an earlier one
        self.failed = False

    def work(self) -> None:
        try:
            while (piece := self._take()) is not None:
                index, slots = piece
                self._put(index, self.compute(slots))
        except BaseException:
            self.failed = True
            raise

    def _take(self) -> tuple[int, slice] | None:
        with self.lock:
            if self.failed or self.taken_slots >= self.num_slots:
                return None
            at_a_time = self.next_cut(self.taken_slots)
            if at_a_time < self.lanes:  # which is at least one; there is no room for this lane
                self.lanes -= 1
                return None
            size = max(1, at_a_time // self.lanes)
            slots = slice(self.taken_slots, min(self.taken_slots + size, self.num_slots))
            self.taken_slots, self.taken = slots.stop, self.taken + 1
            return self.taken - 1, slots

    def _put(self, index: int, result: T) -> None:
        with self.lock:
            self.waiting[index] = result
            while self.added in self.waiting:
                self.add(self.waiting.pop(self.added))
                self.added += 1
