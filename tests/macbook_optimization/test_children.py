"""Children return values, errors and the cause of a crash; none of them outlives its parent."""

import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.errors import DataError
from macbook_optimization.memory_management import peak_bytes

# The functions that the tests run in children.


def double(number, send):
    send({"half": number / 2})
    return 2 * number


def refuse(send):
    raise DataError("no such puzzle", hint="try another")


def crash(send):
    raise ZeroDivisionError


def die(number, send):
    send("last words")
    os.kill(os.getpid(), number)


def leave(code, send):
    sys.stderr.write("libgomp: Thread creation failed\n")
    sys.stderr.flush()
    os._exit(code)


def hang(send):
    send(os.getpid())
    time.sleep(60)


def hang_in_a_library(send):
    """Wait where no handler of Python's runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hang(send)


def environment(name, send):
    return os.environ.get(name)


def occupied(send):
    return peak_bytes()


def complain(send):
    send("before")
    sys.stderr.write("a warning\n")
    os.write(2, b"of a library \xff\n")
    raise ZeroDivisionError


def in_child(function, arguments=None, **settings):
    variables = {**settings.pop("environment", {}), "PYTHONPATH": os.path.dirname(__file__)}
    return run_in_child(f"test_children:{function}", arguments or {}, environment=variables, **settings)


def test_a_child_reports_rows_and_returns_a_value():
    rows = []
    assert in_child("double", {"number": 3}, on_row=rows.append) == 6
    assert rows == [{"half": 1.5}]


def test_an_error_that_a_user_can_fix_is_raised_in_the_parent():
    with pytest.raises(DataError, match="no such puzzle") as caught:
        in_child("refuse")
    assert caught.value.hint == "try another"


def test_an_exception_in_a_child_is_distinguished_from_a_kill():
    with pytest.raises(ChildDied) as caught:
        in_child("crash")
    assert caught.value.traceback_shown
    assert "ZeroDivisionError" in caught.value.last_output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_killed_child_names_the_signal_and_its_rows_are_kept(number):
    rows = []
    with pytest.raises(ChildDied, match=number.name) as caught:
        in_child("die", {"number": number}, on_row=rows.append)
    assert (caught.value.signal, caught.value.traceback_shown) == (number, False)
    assert rows == ["last words"]


def test_the_exit_of_a_library_keeps_its_last_line_of_output():
    with pytest.raises(ChildDied, match="Thread creation failed") as caught:
        in_child("leave", {"code": 1})
    assert (caught.value.code, caught.value.traceback_shown) == (1, False)


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_after_its_timeout():
    started = time.monotonic()
    with pytest.raises(ChildDied, match="took too long") as caught:
        in_child("hang", timeout_seconds=1.0)
    assert not caught.value.may_be_out_of_memory
    assert time.monotonic() - started < 20


def test_variables_reach_the_child_before_anything_is_imported():
    assert in_child("environment", {"name": "OMP_NUM_THREADS"}, environment={"OMP_NUM_THREADS": "3"}) == "3"


def test_the_peak_of_a_child_is_its_own_and_not_that_of_a_large_parent():
    ballast = bytearray(b"x") * (300 * 2**20)
    assert in_child("occupied") < 150 * 2**20
    assert len(ballast) == 300 * 2**20


def test_a_silent_child_ends_with_its_interrupted_parent():
    code = (
        "from macbook_optimization.children import run_in_child\n"
        "run_in_child('test_children:hang', {}, on_row=lambda pid: print(pid, flush=True))"
    )
    variables = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables, text=True
    )
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=20)
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running()


@pytest.mark.slow
def test_a_second_stop_ends_a_child_that_does_not_react():
    code = (
        "from macbook_optimization.children import ChildDied, run_in_child\n"
        "try:\n"
        "    run_in_child('test_children:hang_in_a_library', {}, in_front=True,\n"
        "                 on_stop=lambda: print('stop'), on_row=lambda pid: print(pid, flush=True))\n"
        "except ChildDied as death:\n"
        "    print(death.code)\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((os.path.dirname(__file__), *sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=variables, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGINT)
    time.sleep(4.0)
    assert child.is_running()  # one request to stop may take its time
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=20)
    assert output.split() == ["stop", "stop", str(-signal.SIGKILL)]
    assert not child.is_running()


@pytest.mark.parametrize(("limit", "memory"), [(resource.RLIM_INFINITY, False), (2**32, True)])
def test_an_import_error_is_an_oom_only_under_a_memory_limit(monkeypatch, limit, memory):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert (
        ChildDied(1, True, "ImportError(\"cannot import name 'x' from 'y'\")").may_be_out_of_memory is memory
    )
    assert not ChildDied(1, True, "KeyError('x')").may_be_out_of_memory


def test_what_a_child_in_front_writes_to_standard_error_reaches_its_parent_completely():
    lines, pids = [], []
    with pytest.raises(ChildDied) as died:
        in_child("complain", in_front=True, write_line=lines.append, on_start=pids.append)
    assert lines[:2] == ["a warning\n", "of a library \ufffd\n"]
    assert lines[-1] == "ZeroDivisionError\n"
    assert died.value.traceback_shown
    assert len(pids) == 1


def test_a_parent_whose_terminal_is_closed_does_not_block_its_child():
    def closed(line):
        raise OSError

    arguments = {"number_of_lines": 20_000}
    assert in_child("chatter", arguments, in_front=True, write_line=closed) == "done"


def chatter(number_of_lines, send):
    for number in range(number_of_lines):
        sys.stderr.write(f"line {number}\n")
    return "done"
