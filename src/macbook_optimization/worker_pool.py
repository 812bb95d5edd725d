"""Parallel map over several processes, with results in order.

Functions and items must be picklable and write no files. The workers end when the process that started them
ends, for whatever reason, and they ignore Ctrl-C: stopping is the parent's decision.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from macbook_optimization.errors import LaptopError

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_PENDING_PER_WORKER = 2  # bounds the memory that finished and waiting items take


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int
) -> Generator[Result, None, None]:
    """Yield `function(item)` in the order of the items, which may be infinite; close it to stop."""
    if jobs == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(jobs, context, initializer=initialize_worker)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with without_main_module():
                pending.append(pool.submit(function, item))
            if len(pending) > _MAX_PENDING_PER_WORKER * jobs:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise LaptopError(
            "A worker process was killed", hint="If memory was short, use fewer workers with --jobs."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the main module while a worker process is started.

    A new process imports the main module of its parent under another name. If that is a script which trains
    without asking for its `__name__`, every worker would start to train, too. Functions for workers are never
    defined in it, so workers do not need it.
    """
    main = sys.modules["__main__"]
    names: tuple[str, ...] = ("__file__", "__spec__")
    hidden = {name: vars(main).pop(name) for name in names if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def initialize_worker() -> None:
    """Ignore Ctrl-C, and end with the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
