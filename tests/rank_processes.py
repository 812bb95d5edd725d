"""Ranks that are real processes, connected by gloo on the loopback interface."""

import multiprocessing
import os
import socket
from functools import partial

from trm.backends.world import Address, Member

TIMEOUT_SECONDS = 120


def free_address():
    """Return an address that is free now; a listening socket does not pass through a fork server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1])


def run_ranks(compute, shares, *arguments, timeout_seconds=30.0):
    """Return what `compute(world, *arguments)` returns in each of the processes, in the order of ranks.

    The function must be one of a module. A process that fails raises here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trm.backends.pytorch.rendezvous", "trm.backends.pytorch.learner"])
    queue = context.Queue()
    address = free_address()
    target = partial(_rank, compute, shares, address, timeout_seconds, queue, arguments)
    processes = [context.Process(target=target, args=(rank,)) for rank in range(len(shares))]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=TIMEOUT_SECONDS) for _ in processes)
    for process in processes:
        process.join(TIMEOUT_SECONDS)
        assert process.exitcode == 0
    return [found[rank] for rank in range(len(shares))]


def _rank(compute, shares, address, timeout_seconds, queue, arguments, rank):
    import torch

    from trm.backends.pytorch.rendezvous import guest_meeting, host_meeting

    torch.set_num_threads(1)
    if rank == 0:
        listener = socket.create_server((address.host, address.port))
        meeting = host_meeting(address, listener.detach(), "host", timeout_seconds, {})
        guests = meeting.members(len(shares) - 1, 60.0)
        world = meeting.form([Member("host"), *guests], shares, on_lost)
    else:
        meeting = guest_meeting(address, "host", timeout_seconds, address.host)
        world = meeting.join(Member(f"guest {rank}"), on_lost)
    queue.put((world.rank, compute(world, *arguments)))
    queue.close()
    queue.join_thread()
    world.close()


def on_lost(names):
    os._exit(1)
