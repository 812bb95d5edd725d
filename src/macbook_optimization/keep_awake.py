"""Prevent the machine from sleeping, with the tool that its system has for this.

The tool runs as a child and ends with this process, even if that is killed: `caffeinate -w` waits for a PID,
and below `systemd-inhibit` runs a `cat` that reads from us until the system closes our end of the pipe. The
macOS command is written from its manual page; it has not been run on a Mac yet. Neither tool prevents the
sleep that follows a closed lid, and a missing tool is a warning, never an error.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from types import TracebackType
from typing import Self

from macbook_optimization.hardware_detection import on_macos

FAILURE_SECONDS = 0.3  # a tool that fails does so within this time
END_SECONDS = 5.0


def inhibitor(pid: int, *, macos: bool) -> tuple[str, ...]:
    """Return the command that keeps the system awake as long as the process `pid` exists."""
    if macos:
        return ("caffeinate", "-i", "-w", str(pid))
    return ("systemd-inhibit", "--what=idle:sleep", "--who=trm", "--why=Training", "--mode=block", "cat")


class KeepAwake:
    """Keeps the machine awake while it is held. Problems are passed to `warn`."""

    def __init__(self, warn: Callable[[str], None], *, macos: bool | None = None) -> None:
        self.warn = warn
        self.command = inhibitor(os.getpid(), macos=on_macos() if macos is None else macos)
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def hold(self) -> None:
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is for us
            )
        except OSError as error:
            self._warn(error.strerror or str(error))
            return
        try:
            process.wait(FAILURE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process = process
            return
        self._warn(_last_line(process) or f"it ended with status {process.returncode}")

    def release(self) -> None:
        """End the tool; if it had already ended, the machine may have slept."""
        process = self.process
        self.process = None
        if process is None:
            return
        if process.poll() is not None:
            self._warn(_last_line(process) or f"it ended early, with status {process.returncode}")
            return
        assert process.stdin is not None
        process.stdin.close()  # ends `cat`
        if self.command[0] == "caffeinate":
            process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process)

    def _warn(self, cause: str) -> None:
        self.warn(f"warning: plan.keep_awake: {self.command[0]} does not work here ({cause}).")


def _last_line(process: subprocess.Popen[str]) -> str:
    """Return the last line that an ended tool wrote about its failure."""
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.close()  # `cat` may have outlived the tool that started it
    lines = process.stderr.read().strip().splitlines()
    _close(process)
    return lines[-1] if lines else ""


def _close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stderr):
        if stream is not None:
            stream.close()
