"""The other program that uses the CPU most. Only processes that this user may see can be named."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Busy:
    """A program and the cores that it keeps busy."""

    name: str
    cores: float


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time of one process so far."""

    name: str
    parent: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The CPU time of every process that can be seen, at one moment."""

    time: float
    processes: dict[tuple[int, float], Usage]  # by PID and start time, as PIDs are used again


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs that ran between two snapshots."""

    busiest: Busy | None  # of the other programs
    own_cores: float  # of this command, its trainer and everything else that it started


def take_snapshot() -> Snapshot:
    """List the processes; 13 ms for 100 of them on Linux."""
    processes = {}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                times = process.cpu_times()
                usage = Usage(process.name(), process.ppid(), times.user + times.system)
                processes[process.pid, process.create_time()] = usage
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return Snapshot(time.monotonic(), processes)


def compare(before: Snapshot, after: Snapshot, own_pid: int) -> Programs:
    """Return what ran in between; `own_pid` and the processes that descend from it are our own."""
    seconds = max(after.time - before.time, 1e-9)
    own = _descendants(after, own_pid)
    others = []
    own_cores = 0.0
    for key, usage in after.processes.items():
        earlier = before.processes.get(key)
        cores = (usage.seconds - (0.0 if earlier is None else earlier.seconds)) / seconds
        if key[0] in own:
            own_cores += cores
        else:
            others.append(Busy(f"{usage.name} (PID {key[0]})", cores))
    return Programs(max(others, key=lambda each: each.cores, default=None), own_cores)


def _descendants(snapshot: Snapshot, root: int) -> set[int]:
    """Return a process and all processes that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for (pid, _), usage in snapshot.processes.items():
        children.setdefault(usage.parent, []).append(pid)
    found: set[int] = set()
    waiting: Iterable[int] = [root]
    while new := [pid for pid in waiting if pid not in found]:
        found.update(new)
        waiting = [child for pid in new for child in children.get(pid, [])]
    return found
