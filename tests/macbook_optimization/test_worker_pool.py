"""Results come in order, from one process or several."""

import os
import signal
from contextlib import closing
from itertools import count, islice

import pytest

from macbook_optimization.errors import DataError, LaptopError
from macbook_optimization.worker_pool import ordered


def squared(number):
    return number * number


def refused(number):
    if number == 3:
        raise DataError("three is refused", hint="Use four.")
    return os.getpid()


def killed(number):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted(number):
    os.kill(os.getpid(), signal.SIGINT)
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_order_even_of_infinitely_many_items(jobs):
    with closing(ordered(squared, count(), jobs)) as results:
        assert list(islice(results, 20)) == [number * number for number in range(20)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_worker_is_raised_where_the_results_are_read(jobs):
    with closing(ordered(refused, range(10), jobs)) as results:
        workers = {next(results), next(results), next(results)}
        with pytest.raises(DataError, match="three is refused") as found:
            next(results)
    assert found.value.hint == "Use four."
    assert (os.getpid() in workers) == (jobs == 1)


def test_a_worker_that_is_killed_is_an_error_with_a_hint():
    with pytest.raises(LaptopError, match="A worker process was killed") as found:
        list(ordered(killed, range(4), 2))
    assert "--jobs" in found.value.hint


def test_workers_ignore_an_interruption():
    assert list(ordered(interrupted, range(4), 2)) == [0, 1, 2, 3]
