"""Ranks that are real processes, connected by a backend on the loopback interface."""

import multiprocessing
import os
import socket
from functools import partial

from trm.backends.base import load_backend
from trm.backends.world import Address, Member
from trm.plan import Execution

TIMEOUT_SECONDS = 120


def free_address():
    """Return an address that is free now; a listening socket does not pass through a fork server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1])


def run_ranks(compute, shares, *arguments, timeout_seconds=30.0, backend="pytorch"):
    """Return what `compute(world, *arguments)` returns in each of the processes, in the order of ranks.

    The function must be one of a module. A process that fails raises here.
    """
    how = {"timeout_seconds": timeout_seconds, "backend": backend}
    processes, queue = start_ranks(compute, shares, *arguments, **how)
    found = dict(queue.get(timeout=TIMEOUT_SECONDS) for _ in processes)
    for process in processes:
        process.join(TIMEOUT_SECONDS)
        assert process.exitcode == 0
    return [found[rank] for rank in range(len(shares))]


def start_ranks(compute, shares, *arguments, timeout_seconds, backend):
    """Return the processes, and the queue that receives (rank, result) from each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trm.backends.pytorch.rendezvous", "trm.backends.pytorch.learner"])
    queue = context.Queue()
    how = (shares, free_address(), timeout_seconds, Execution(backend=backend))
    target = partial(_rank, compute, how, queue, arguments)
    processes = [context.Process(target=target, args=(rank,)) for rank in range(len(shares))]
    for process in processes:
        process.start()
    return processes, queue


def _rank(compute, how, queue, arguments, rank):
    import torch

    torch.set_num_threads(1)
    meeting, world = _join(*how, rank)
    queue.put((world.rank, compute(world, *arguments)))
    queue.close()
    queue.join_thread()
    assert world.close(world.rank) == world.size - 1
    meeting.close()


def _join(shares, address, timeout_seconds, execution, rank):
    """Return the meeting, whose store lives as long as it, and the world."""
    backend = load_backend(execution)
    if rank:
        meeting = backend.guest_meeting(address, "host", timeout_seconds, address.host)
        return meeting, meeting.join(Member(f"guest {rank}"), on_lost)
    listener = socket.create_server((address.host, address.port))
    meeting = backend.host_meeting(address, listener.detach(), "host", timeout_seconds, {})
    guests = meeting.members(len(shares) - 1, 60.0)
    return meeting, meeting.form([Member("host"), *guests], shares, on_lost)


def on_lost(names, cause):
    os._exit(1)
