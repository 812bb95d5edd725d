"""Work that is cut into pieces, done by several processes, and put together in order.

A piece is a call with arguments that can be pickled, of which nothing reaches a file. The workers end with
the process that started them, however that ends, and leave Ctrl-C to it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from macbook_optimization.errors import LaptopError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # pieces for each worker that may be waiting: that bounds the memory


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int
) -> Generator[Result, None, None]:
    """The results in the order of the items, of which there may be endlessly many; close it to stop."""
    if jobs == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin)
    coming: deque[Future[Result]] = deque()
    try:
        for item in items:
            coming.append(pool.submit(function, item))
            if len(coming) > _AHEAD * jobs:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    except BrokenProcessPool as error:
        raise LaptopError(
            "A worker process was killed", hint="If memory was short, ask for fewer with --jobs."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
