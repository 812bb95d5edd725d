"""A function in a process of its own, so that whatever kills it costs nothing.

Probes of memory, precision and speed run like this, and so does the trainer. The function is named
`module:name`, takes JSON-able keyword arguments, may `tell` rows on its way, and returns a JSON-able value.
An error that a user can fix crosses over and is raised in the parent; a death is `ChildDied`, which says how.

A child is a process group of its own: a terminal's Ctrl-C then reaches it exactly once, through its parent.
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
from types import FrameType, TracebackType
from typing import IO, Any

from macbook_optimization import errors

Tell = Callable[[Any], None]
# How libraries and the interpreter put it; a shared library that cannot be mapped is an ImportError.
_NO_MEMORY = (
    "emory",
    "map segment",
    "bad_alloc",
    "returned NULL without setting",
    "Resource temporarily unavailable",
)
_SAME_SIGNAL_SECONDS = 0.2  # `timeout` and some terminals send one signal twice


class ChildDied(Exception):  # noqa: N818 - what happened, for whoever started it to judge
    """The child ended without an answer: `signal` is what killed it, or None and `code` says more."""

    def __init__(
        self, returncode: int, traceback_shown: bool, last_words: str, timed_out: bool = False
    ) -> None:
        self.signal = signal.Signals(-returncode) if returncode < 0 else None
        self.code, self.traceback_shown, self.last_words = returncode, traceback_shown, last_words
        self.timed_out = timed_out
        how = f"was killed by {self.signal.name}" if self.signal else f"ended with exit code {returncode}"
        how = "took too long" if timed_out else how
        super().__init__(f"{how}{': ' + last_words if last_words else ''}")

    @property
    def of_memory(self) -> bool:
        """Whether too little memory may have done it: the system kills, libraries abort or leave."""
        if self.timed_out:
            return False
        if self.traceback_shown:
            # Under a limit, a module whose import got no memory half-way lacks names later.
            limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
            half_loaded = limited and "ImportError" in self.last_words
            return half_loaded or any(words in self.last_words for words in _NO_MEMORY)
        return self.signal not in (signal.SIGILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_in_child(
    target: str,
    arguments: Mapping[str, Any],
    *,
    tell: Tell = lambda row: None,
    environment: Mapping[str, str] | None = None,
    in_front: bool = False,
    timeout_seconds: float | None = None,
    inherited: Sequence[int] = (),
) -> Any:
    """The value of `target(**arguments, tell=...)`, with `tell` hearing the rows that it tells on its way.

    A child `in_front` behaves as if it were this process: it writes to our terminal and gets our signals.
    Any other is silent, and ends with us. It keeps the `inherited` descriptors open as long as it lives.
    """
    read_end, write_end = os.pipe()
    spoken = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    manner = "in front" if in_front else "silent"
    command = [sys.executable, "-P", "-m", __name__, target, str(write_end), str(os.getpid()), manner]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=None if in_front else subprocess.DEVNULL,
        stderr=None if in_front else spoken,
        env={**os.environ, **(environment or {})},
        pass_fds=(write_end, *inherited),
        process_group=0,
        text=True,
    )
    os.close(write_end)
    late = threading.Event()

    def end_it() -> None:
        late.set()
        child.kill()

    alarm = threading.Timer(timeout_seconds or 0, end_it)
    alarm.daemon = True
    if timeout_seconds is not None:
        alarm.start()
    try:
        signals = _forwarded_signals(child) if in_front else nullcontext()
        with os.fdopen(read_end, encoding="utf-8") as answers, signals:
            _send(child, arguments)
            return _answer(child, answers, spoken, tell, late)
    finally:
        alarm.cancel()
        child.kill()  # it has ended by itself, unless we were interrupted
        child.wait()
        spoken.close()


def _send(child: subprocess.Popen[str], arguments: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:  # it died at once, which its exit code tells
        json.dump(arguments, child.stdin)


def _answer(
    child: subprocess.Popen[str], answers: Iterable[str], spoken: IO[str], tell: Tell, late: threading.Event
) -> Any:
    crash = ""
    for line in answers:
        kind, value = json.loads(line)
        if kind == "row":
            tell(value)
        elif kind == "result":
            child.wait()
            return value
        elif kind == "error":
            child.wait()
            raise getattr(errors, value["kind"])(value["message"], value["hint"])
        elif kind == "crash":
            crash = value
    returncode = child.wait()
    spoken.seek(0)
    if os.isatty(2):
        os.write(2, b"\033[?25h")  # a live display of the child's may have hidden the cursor
    last_words = crash or " ".join(spoken.read().strip().splitlines()[-1:])
    raise ChildDied(returncode, bool(crash), last_words, late.is_set())


@contextmanager
def _forwarded_signals(child: subprocess.Popen[str]) -> Iterator[None]:
    """What asks us to stop or pause is for the child; we follow it."""
    last = {"number": 0, "time": 0.0}

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number == last["number"] and now - last["time"] < _SAME_SIGNAL_SECONDS
        last.update(number=number, time=now)
        if not again:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def pause(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        with suppress(ProcessLookupError):  # here somebody has continued us
            os.kill(child.pid, signal.SIGCONT)

    handlers = {signal.SIGINT: forward, signal.SIGTERM: forward, signal.SIGTSTP: pause}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: both outlive the terminal
        handlers[signal.SIGHUP] = forward
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parent_is_gone() -> bool:
    """True in a child whose parent was killed: nobody waits for the answer any more."""
    return _parent is not None and os.getppid() != _parent


_parent: int | None = None


def _end_with_parent() -> None:
    while not parent_is_gone():
        time.sleep(1)
    os._exit(1)


def _main(target: str, descriptor: str, parent: str, manner: str) -> None:
    global _parent
    _parent = int(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved before the function says so
    if manner == "silent":
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background group may still write to the terminal
    module, _, name = target.partition(":")
    arguments = json.load(sys.stdin)
    answers = os.fdopen(int(descriptor), "w", encoding="utf-8")

    def write(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]) + "\n")
        answers.flush()

    def on_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(BrokenPipeError):
            write("crash", repr(error))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = on_crash
    try:
        function = getattr(importlib.import_module(module), name)
        result = function(**arguments, tell=lambda row: write("row", row))
        with suppress(BrokenPipeError):  # nobody waits for it any more
            write("result", result)
    except errors.LaptopError as error:
        write("error", {"kind": type(error).__name__, "message": str(error), "hint": error.hint})


if __name__ == "__main__":
    # Run as a module this file is `__main__`; the functions it calls import it under its name.
    from macbook_optimization import children

    children._main(*sys.argv[1:])
