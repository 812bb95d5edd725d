"""Results come in order, from one process or several."""

import os
import signal
import subprocess
import sys
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


def test_workers_do_not_run_the_script_that_started_them(tmp_path):
    """A script that trains without asking for its name would train in every worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from macbook_optimization.worker_pool import ordered\n"
        "print('the script runs')\n"
        "assert list(ordered(os.path.basename, ['a/b', 'c/d'], 2)) == ['b', 'd']\n"
        "print(__file__ is not None, __spec__)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the script runs\nTrue None\n"
