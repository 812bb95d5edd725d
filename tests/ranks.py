"""Ranks that are threads of one process, for tests of what several processes do together."""

import copy
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

TIMEOUT_SECONDS = 60


class Exchange:
    """Where ranks leave values for each other."""

    def __init__(self, num_ranks):
        self.values = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_SECONDS)

    def __call__(self, rank, value):
        """Return the values of all ranks, once each has left one."""
        self.barrier.wait()  # nobody replaces a value that another rank still reads
        self.values[rank] = value
        self.barrier.wait()
        return list(self.values)


@dataclass
class ThreadWorld:
    """One rank. Messages are summed in the order of the ranks, so that every rank gets the same bits."""

    rank: int
    shares: tuple[int, ...]
    exchange: Exchange
    writer: int = 0

    @property
    def size(self):
        return len(self.shares)

    @property
    def writes(self):
        return self.rank == self.writer

    def sum(self, message):
        values = self.exchange(self.rank, copy.deepcopy(message))
        message[...] = sum(values[1:], values[0])

    def agree(self, wishes):
        return [max(column) for column in zip(*self.exchange(self.rank, list(wishes)), strict=True)]

    def broadcast(self, facts):
        return self.exchange(self.rank, facts)[self.writer]

    def copy_from_writer(self, tensor):
        tensor.copy_(self.exchange(self.rank, tensor.clone())[self.writer])

    def gather(self, own, dim):
        parts = self.exchange(self.rank, own.clone())
        return torch.cat(parts, dim) if self.writes else None

    def scatter(self, whole, own, dim):
        whole = self.exchange(self.rank, whole)[self.writer]
        own.copy_(torch.split(whole, self.shares, dim)[self.rank])

    def close(self, wish=0):
        return self.agree([wish])[0]


def thread_worlds(shares, writer=0):
    exchange = Exchange(len(shares))
    return [ThreadWorld(rank, tuple(shares), exchange, writer) for rank in range(len(shares))]


def gloo_worlds(shares, writer=0):
    """Ranks that are connected by gloo, through sockets of this machine."""
    from trm.backends.pytorch.world import c10d, gloo_world
    from trm.backends.world import Place

    store = c10d.HashStore()
    places = [Place(rank, tuple(shares), writer, "127.0.0.1") for rank in range(len(shares))]
    return together(places, lambda place: gloo_world(store, place))


def shared_digest(learner):
    """Return a hash of all that ranks share to the last bit: weights with the table of puzzle embeddings,
    moments, and the moving average."""
    found = hashlib.sha256()
    for group in (learner.model.state_dict(), learner.optimizer.moments, learner.averaged.state_dict()):
        for tensor in group.values():
            found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def together(ranks, compute):
    """Call `compute` with all ranks at the same time; return results or exceptions in their order."""
    with ThreadPoolExecutor(len(ranks), initializer=partial(torch.set_num_threads, 1)) as pool:
        futures = [pool.submit(compute, ours) for ours in ranks]
    return [future.exception() or future.result() for future in futures]
