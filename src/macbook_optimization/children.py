"""Run a function in a child process, so that a crash or an OOM kill does not take the caller down.

Probes of memory, precision and speed run this way, and so does the trainer. The function is named
`module:name` and takes JSON-able keyword arguments. It may report rows through `send` while it runs, and
returns a JSON-able value. A `LaptopError` in the child is raised again in the parent; any other end is a
`ChildDied`.

Each child has its own process group, so that a terminal's Ctrl-C reaches it exactly once: through its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO, Any, TypedDict, Unpack

from macbook_optimization import errors
from macbook_optimization.json_types import JsonMapping
from macbook_optimization.progress_lines import CLEAR_LIVE_LINES

Send = Callable[[Any], None]  # reports one JSON-able row to the parent
Write = Callable[[str], object]  # like `write` of a file
# Phrases in which libraries and the interpreter report an OOM. "map segment" is the ImportError of a shared
# library that cannot be mapped.
_OOM_PHRASES = (
    "emory",
    "map segment",
    "bad_alloc",
    "returned NULL without setting",
    "error return without exception set",
    "Resource temporarily unavailable",
    "can't start new thread",
)
_NOT_OOM_SIGNALS = (signal.SIGILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_LINES_SECONDS = 2.0  # a process that the child has left behind may keep standard error open
_SAME_SIGNAL_SECONDS = 0.2  # `timeout` and some terminals send one signal twice
_LAST_CHANCE_SECONDS = 3.0  # after a second signal; a child that waits in a library runs no handler


class ChildDied(Exception):  # noqa: N818 - an observation; the caller decides whether it is an error
    """The child ended without returning a value.

    `signal` is the signal that killed it, or None when it exited by itself with exit status `code`.
    `last_output` is its exception, or the last line that it wrote to standard error.
    """

    def __init__(
        self, returncode: int, traceback_shown: bool, last_output: str, timed_out: bool = False
    ) -> None:
        self.signal = signal.Signals(-returncode) if returncode < 0 else None
        self.code = returncode
        self.traceback_shown = traceback_shown
        self.last_output = last_output
        self.timed_out = timed_out
        super().__init__(self._description())

    def _description(self) -> str:
        if self.timed_out:
            cause = "took too long"
        elif self.signal is not None:
            cause = f"was killed by {self.signal.name}"
        else:
            cause = f"ended with exit code {self.code}"
        return f"{cause}: {self.last_output}" if self.last_output else cause

    @property
    def may_be_out_of_memory(self) -> bool:
        """Return whether an OOM is likely: the system kills, libraries abort or exit, Python raises."""
        if self.timed_out:
            return False
        if not self.traceback_shown:
            return self.signal not in _NOT_OOM_SIGNALS
        # Under an address space limit, an import that ran out of memory midway leaves a module without some
        # of its names, which shows up later as an ImportError.
        is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        if is_limited and "ImportError" in self.last_output:
            return True
        return any(phrase in self.last_output for phrase in _OOM_PHRASES)


class ChildOptions(TypedDict, total=False):
    """Options of the child process.

    `in_front`: it writes to our terminal and receives our signals, as if it were this process. By default a
    child is silent and ends with its parent. `timeout_seconds`: kill it after this time (default: never).
    `inherited`: file descriptors that it keeps open while it lives. `write_line`: receives the lines that a
    child in front writes to standard error, which then do not reach the terminal directly. `on_start`:
    receives its PID. `on_stop`: called when a signal that stops is passed on to it; after the second one,
    it is killed unless it ends within a few seconds.
    """

    in_front: bool
    timeout_seconds: float | None
    inherited: Sequence[int]
    write_line: Write | None
    on_start: Callable[[int], None]
    on_stop: Callable[[], None]


def run_in_child(
    target: str,
    arguments: JsonMapping,
    *,
    on_row: Send = lambda row: None,
    environment: Mapping[str, str] | None = None,
    **options: Unpack[ChildOptions],
) -> Any:
    """Return the value of `target(**arguments, send=...)`, computed in a child process.

    `on_row` is called here with each row that the function sends. `environment` is added to our own.
    """
    in_front = options.get("in_front", False)
    write_line = options.get("write_line")
    read_end, write_end = os.pipe()
    stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    mode = "in front" if in_front else "silent"
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, target, str(write_end), str(os.getpid()), mode],
        stdin=subprocess.PIPE,
        stdout=None if in_front else subprocess.DEVNULL,
        stderr=(None if write_line is None else subprocess.PIPE) if in_front else stderr,
        env={**os.environ, **(environment or {})},
        pass_fds=(write_end, *options.get("inherited", ())),
        process_group=0,
        text=True,
        errors="replace",
    )
    os.close(write_end)
    options.get("on_start", int)(child.pid)
    timeout_seconds = options.get("timeout_seconds")
    timeout = _Timeout(child, timeout_seconds or 0.0)
    if timeout_seconds is not None:
        timeout.start()
    try:
        on_stop = options.get("on_stop", lambda: None)
        signals = _forwarded_signals(child, on_stop) if in_front else nullcontext()
        lines = nullcontext() if write_line is None else _copied_lines(child, write_line)
        with os.fdopen(read_end, encoding="utf-8") as messages, signals, lines:
            _send(child, arguments)
            return _receive(child, messages, stderr, on_row, timeout)
    finally:
        timeout.cancel()
        child.kill()  # has no effect unless we were interrupted: otherwise it has already ended
        child.wait()
        stderr.close()


@contextmanager
def _copied_lines(child: subprocess.Popen[str], write_line: Write) -> Iterator[None]:
    """Pass on what the child writes to standard error, until it has ended."""
    stderr = child.stderr
    assert stderr is not None

    def copy() -> None:
        for line in stderr:
            with suppress(OSError):  # our terminal was closed; the child must not wait for us
                write_line(line)

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    try:
        yield
    finally:
        copier.join(_LAST_LINES_SECONDS)


class _Timeout:
    """Kills the child some seconds after the start."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        self.child = child
        self.has_expired = False
        self.timer = threading.Timer(seconds, self._expire)
        self.timer.daemon = True

    def start(self) -> None:
        """Start the timer, unless it has been started."""
        if self.timer.ident is None:
            self.timer.start()

    def _expire(self) -> None:
        self.has_expired = True
        self.child.kill()

    def cancel(self) -> None:
        self.timer.cancel()


def _send(child: subprocess.Popen[str], arguments: JsonMapping) -> None:
    assert child.stdin is not None
    # A broken pipe means that the child died immediately; its exit status will say why.
    with suppress(BrokenPipeError), child.stdin:
        json.dump(arguments, child.stdin)


def _receive(
    child: subprocess.Popen[str], messages: Iterable[str], stderr: IO[str], on_row: Send, timeout: _Timeout
) -> Any:
    """Read the child's messages until its result; raise its error, or `ChildDied` if it ends without one."""
    crash = ""
    for line in messages:
        kind, value = json.loads(line)
        if kind == "row":
            on_row(value)
        elif kind == "result":
            child.wait()
            return value
        elif kind == "error":
            child.wait()
            raise getattr(errors, value["kind"])(value["message"], value["hint"])
        elif kind == "crash":
            crash = value
    returncode = child.wait()
    _clear_live_lines()
    stderr.seek(0)
    last_line = stderr.read().strip().splitlines()[-1:]
    last_output = crash or " ".join(last_line)
    raise ChildDied(returncode, bool(crash), last_output, timeout.has_expired)


def _clear_live_lines() -> None:
    """Remove what the live display of a child that cannot do so itself has left on our terminal."""
    if os.isatty(2):
        os.write(2, CLEAR_LIVE_LINES.encode())


@dataclass(slots=True)
class _LastSignal:
    number: int = 0
    time: float = 0.0


@contextmanager
def _forwarded_signals(child: subprocess.Popen[str], on_stop: Callable[[], None]) -> Iterator[None]:
    """Pass signals that stop or pause this process on to the child."""
    last = _LastSignal()
    last_chance = _Timeout(child, _LAST_CHANCE_SECONDS)

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = last.number == 0
        is_repeated = number == last.number and now - last.time < _SAME_SIGNAL_SECONDS
        last.number = number
        last.time = now
        if is_repeated:
            return
        on_stop()
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)
        if not is_first:
            last_chance.start()

    def pause(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGSTOP)
        _clear_live_lines()  # for the shell's prompt
        os.kill(os.getpid(), signal.SIGSTOP)
        # Execution continues here after a SIGCONT to this process.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)

    handlers = {signal.SIGINT: forward, signal.SIGTERM: forward, signal.SIGTSTP: pause}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup, both outlive the terminal
        handlers[signal.SIGHUP] = forward
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        last_chance.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


# PID of the process that started this child; None in a process that is not such a child. It is a property of
# the process, like its standard input, and set once by `_main`.
_parent: int | None = None


def parent_is_gone() -> bool:
    """Return True in a child whose parent has died, so that nobody waits for its result."""
    return _parent is not None and os.getppid() != _parent


def _exit_with_parent() -> None:
    while not parent_is_gone():
        time.sleep(1)
    os._exit(1)


def _main(target: str, descriptor: str, parent: str, mode: str) -> None:
    """Run `target` in the child and write rows, and then a result, an error or a crash, to `descriptor`."""
    global _parent
    _parent = int(parent)
    # Until the function installs its own handler there is nothing to save, so Ctrl-C may kill the child.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if mode == "silent":
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # lets a background process group write to the terminal
    module, _, name = target.partition(":")
    arguments = json.load(sys.stdin)
    messages = os.fdopen(int(descriptor), "w", encoding="utf-8")
    one_at_a_time = threading.Lock()

    def write(kind: str, value: Any) -> None:
        with one_at_a_time:
            messages.write(json.dumps([kind, value]) + "\n")
            messages.flush()

    def on_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(BrokenPipeError):
            write("crash", repr(error))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = on_crash
    try:
        function = getattr(importlib.import_module(module), name)
        result = function(**arguments, send=lambda row: write("row", row))
        with suppress(BrokenPipeError):  # the parent has died
            write("result", result)
    except errors.LaptopError as error:
        write("error", {"kind": type(error).__name__, "message": str(error), "hint": error.hint})


if __name__ == "__main__":
    # Run with -m, this file is the module `__main__`. The functions that it calls import it under its real
    # name, so that module, not this one, must hold the state.
    from macbook_optimization import children

    children._main(*sys.argv[1:])
