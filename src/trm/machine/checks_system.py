"""Checks of what the system does for a run: durable files, pauses, staying awake."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from statistics import median

from macbook_optimization.children import Send, run_in_child
from macbook_optimization.durable_files import sync, write_synced
from macbook_optimization.keep_awake import KeepAwake
from macbook_optimization.resource_monitoring import RunningClock
from trm.machine.selfcheck import Check, Finding, Surroundings, failed, passed, skipped

NUM_WRITES = 10
WRITTEN_BYTES = 2**20
RUNNING_SECONDS = 1.0  # before and after the pause
PAUSE_SECONDS = 3.0
SHORTEST_PAUSE = 1.0  # that the clock of the check notices


def system_checks() -> list[Check]:
    return [
        Check("durable files", check_durable_files),
        Check("pauses", check_pauses),
        Check("staying awake", check_staying_awake),
    ]


def check_durable_files(here: Surroundings) -> Finding:
    """Write some files through to the medium, as checkpoints are."""
    how = "F_FULLFSYNC" if sys.platform == "darwin" else "fsync"
    content = os.urandom(WRITTEN_BYTES)
    seconds = []
    for number in range(NUM_WRITES):
        file = here.directory / f"written-{number}"
        started = time.perf_counter()
        write_synced(file, [content])
        sync(here.directory)
        seconds.append(time.perf_counter() - started)
        if file.read_bytes() != content:
            return failed("the content differs from what was written")
    if sys.platform == "darwin":
        with open(here.directory / "written-0", "rb") as opened:
            fcntl.fcntl(opened, fcntl.F_FULLFSYNC)  # raises where the file system cannot do that
    return passed(method=how, median_seconds=round(median(seconds), 5), bytes=WRITTEN_BYTES)


def count_running_seconds(send: Send) -> dict[str, float]:
    """Count seconds while the parent pauses this process. Runs in a child."""
    with RunningClock(SHORTEST_PAUSE) as clock:
        send("running")
        started = time.monotonic()
        while time.monotonic() - started < 2 * RUNNING_SECONDS + PAUSE_SECONDS:
            time.sleep(0.05)
    return {"counted": clock.seconds, "passed": time.monotonic() - started}


def check_pauses(here: Surroundings) -> Finding:
    """Pause a process, as a sleeping machine does, and see that its clock leaves that out."""
    pids: list[int] = []

    def pause(row: object) -> None:
        threading.Thread(target=_pause, args=(pids[0],), daemon=True).start()

    found = run_in_child(
        f"{__name__}:count_running_seconds", {}, on_row=pause, on_start=pids.append, timeout_seconds=60
    )
    left_out = found["passed"] - found["counted"]
    facts = {name: round(value, 2) for name, value in found.items()}
    if not PAUSE_SECONDS - 0.5 < left_out < PAUSE_SECONDS + 2:
        return failed(f"of a pause of {PAUSE_SECONDS} s, the clock left out {left_out:.1f} s", **facts)
    return passed(**facts)


def _pause(pid: int) -> None:
    time.sleep(RUNNING_SECONDS)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    os.kill(pid, signal.SIGCONT)


def check_staying_awake(here: Surroundings) -> Finding:
    warnings: list[str] = []
    with KeepAwake(warnings.append) as keeper:
        holds = keeper.process is not None
        tool = keeper.command[0]
    if holds:
        return passed(tool=tool)
    return skipped(" ".join(warnings))
