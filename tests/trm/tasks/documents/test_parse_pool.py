"""Whatever a message does to a worker, it costs that message and no other."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import time

import psutil
import pytest

from macbook_optimization.errors import LaptopError
from trm.tasks.documents import parse_pool
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.parse_pool import Failure, Limits, ParsePool, watch_memory

# On a busy machine, touching 64 MiB took more than 0.2 s.
QUICK = Limits(seconds=1.0, extra_bytes=64 * 2**20)


def spin():
    while True:
        pass


def grow():
    kept = []
    while True:
        kept.append(bytearray(2**20))


def recurse(depth=0):
    return recurse(depth + 1)


HARM = {
    b"spin": (spin, "takes longer than 1 s"),
    b"stuck in C": (lambda: sum(itertools.repeat(0)), "takes longer than 1 s"),
    b"sleep": (lambda: time.sleep(60), "takes longer than 1 s"),
    b"grow": (grow, "needs more than 64 MiB"),
    b"allocate": (lambda: bytearray(2**30), "needs more than 64 MiB"),
    b"recurse": (recurse, "is nested too deeply"),
    b"raise": (lambda: int("x"), "ended its worker process with exit status 1"),
    b"exit": (lambda: os._exit(3), "ended its worker process with exit status 3"),
    b"killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended its worker process by SIGKILL"),
    b"crash": (lambda: ctypes.string_at(0), "ended its worker process by SIGSEGV"),
}


def length_or_harm(raw):
    return HARM[raw][0]() if raw in HARM else len(raw)


def process_id(_raw):
    return os.getpid()


def messages(*raws):
    return [Message(str(number), raw) for number, raw in enumerate(raws)]


def run(raws, jobs=1, limits=QUICK):
    with ParsePool(length_or_harm, jobs, limits) as pool:
        return [result for _, result in pool.map(messages(*raws))]


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_order(jobs):
    raws = [b"x" * (number % 97) for number in range(500)]
    assert run(raws, jobs) == [len(raw) for raw in raws]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [b"spin", b"stuck in C", b"grow"], ids=lambda kind: kind.decode())
def test_harm_costs_only_the_message_that_does_it(kind):
    results = run([b"a", b"bb", kind, b"ccc", b""])
    assert results == [1, 2, Failure(HARM[kind][1]), 3, 0]


@pytest.mark.slow
def test_all_kinds_of_harm_in_one_stream_add_up():
    raws = [raw for kind in HARM for raw in (b"ok", kind, b"fine")]
    results = run(raws, jobs=2)
    assert results == [Failure(HARM[raw][1]) if raw in HARM else len(raw) for raw in raws]


def test_a_message_that_could_not_be_read_keeps_its_reason():
    broken = Message("b", b"", problem="not a regular file")
    with ParsePool(length_or_harm, 1) as pool:
        results = [result for _, result in pool.map([broken, *messages(b"x"), broken])]
    assert results == [Failure("not a regular file"), 1, Failure("not a regular file")]


def test_workers_stay_between_calls_and_only_needed_ones_are_started():
    with ParsePool(process_id, jobs=4) as pool:
        first = [result for _, result in pool.map(messages(b"a", b"b"))]
        second = [result for _, result in pool.map(messages(b"c"))]
    assert len({*first, *second}) == 1
    assert not psutil.pid_exists(first[0])


def test_a_worker_that_is_killed_from_outside_costs_nothing():
    with ParsePool(process_id, 1) as pool:
        [(_, first)] = pool.map(messages(b"a"))
        os.kill(first, signal.SIGKILL)
        [(_, second)] = pool.map(messages(b"a"))
    assert isinstance(second, int)
    assert second != first


def test_a_caller_may_stop_early_and_start_again():
    with ParsePool(length_or_harm, 1, QUICK) as pool:
        endless = (Message("x", b"x") for _ in itertools.count())
        assert list(itertools.islice(pool.map(endless), 3))
        assert [result for _, result in pool.map(messages(b"yy"))] == [2]


def test_memory_is_bounded_by_what_waits(monkeypatch):
    monkeypatch.setattr(parse_pool, "_MAX_PENDING_BYTES", 10_000)
    taken = 0

    def source():
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield Message("x", b"x" * 1000)

    with ParsePool(length_or_harm, 1) as pool:
        for number, _ in enumerate(pool.map(source())):
            assert taken - number < 200


def test_a_function_that_cannot_be_loaded_is_an_error(capfd):
    with ParsePool(Unloadable(), 1) as pool, pytest.raises(LaptopError, match="did not start"):
        list(pool.map(messages(b"a")))
    assert "cannot be loaded" in capfd.readouterr().err


class Unloadable:
    def __call__(self, raw):
        return raw

    def __setstate__(self, state):
        raise ValueError("cannot be loaded")

    def __getstate__(self):
        return {"a": 1}


def grow_watched():
    watch_memory(32 * 2**20, every_seconds=0.01)
    grow()


def test_memory_is_watched_where_the_system_has_no_limit():
    process = multiprocessing.get_context("spawn").Process(target=grow_watched)
    process.start()
    process.join(20)
    assert process.exitcode == parse_pool._TOO_MUCH_MEMORY


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=hold_a_pool, args=(tmp_path / "pid",))
    parent.start()
    end = time.monotonic() + 20
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.02)
    worker = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    worker.wait(10)


def hold_a_pool(path):
    with ParsePool(process_id, 1) as pool:
        [(_, pid)] = pool.map(messages(b"a"))
        path.with_suffix(".new").write_text(str(pid))
        path.with_suffix(".new").rename(path)
        time.sleep(60)
