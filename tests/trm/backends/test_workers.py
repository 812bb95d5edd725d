"""Worker threads: slices cover the slots in order, and no more are computed at a time than allowed."""

import time

import pytest
import torch

from trm.backends.pytorch.workers import ThreadWorkers


def test_workers_without_room_stop():
    busy, most = set(), []

    def compute(slots):
        busy.add(slots.start)
        most.append(len(busy))
        time.sleep(0.02)
        busy.remove(slots.start)
        return slots

    done = []
    ThreadWorkers(3, 3).map(8, lambda taken: 3 if taken < 3 else 1, compute, done.append)
    assert [slots.start for slots in done] == list(range(8))
    assert max(most[:3]) <= 3
    assert most[-1] == 1


def test_all_threads_share_the_products_when_there_is_no_room_for_workers():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        workers, seen = ThreadWorkers(2, 2), []
        workers.map(3, lambda taken: 1, lambda slots: torch.get_num_threads(), seen.append)
        workers.map(2, lambda taken: 2, lambda slots: torch.get_num_threads(), seen.append)
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2, 2, 1, 1]
    assert [workers.share(size) for size in (1, 2, 5)] == [(1, 2), (1, 1), (2, 1)]


def test_an_exception_of_a_worker_is_raised_after_all_workers_have_stopped():
    running = []

    def compute(slots):
        if slots.start == 1:
            raise KeyError("this one")
        running.append(slots.start)
        time.sleep(0.05)
        running.remove(slots.start)

    with pytest.raises(KeyError, match="this one"):
        ThreadWorkers(2, 2).map(100, lambda taken: 2, compute, lambda result: None)
    assert not running
