"""Throttling is inferred from equal work that takes more time and more CPU time, without other programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.resource_monitoring import LoadReading
from macbook_optimization.throttling import (
    MIN_FACTOR,
    Slowdown,
    TimedStep,
    inferred_throttling,
    slowdown_at_equal_work,
)

QUIET = LoadReading(cores=8, own_cores=4.0, other_cores=0.3)


def steps(cycles, factor=1.0, cpu_factor=None):
    """Return steps of 0.1 s and 0.4 s of CPU time per recursion, slowed by a factor."""
    cpu = factor if cpu_factor is None else cpu_factor
    return [TimedStep(each, 0.1 * each * factor, 0.4 * each * cpu) for each in cycles]


def test_steps_are_compared_with_earlier_ones_of_equal_work():
    slow = slowdown_at_equal_work(steps([1, 2, 4] * 5), steps([4, 4, 2, 4, 1, 4], factor=1.5))
    assert slow == Slowdown(pytest.approx(1.5), pytest.approx(1.5), 6)
    assert inferred_throttling(slow, QUIET, threads=4) == pytest.approx(1.5)


def test_deeper_steps_are_not_slower():
    """They take longer because they do more, which a schedule of depths decides."""
    assert slowdown_at_equal_work(steps([1, 2] * 10), steps([8, 7, 6, 8, 5])) is None
    mixed = slowdown_at_equal_work(steps([1, 2] * 10), steps([8, 1, 2, 1, 7, 1, 2]))
    assert mixed == Slowdown(pytest.approx(1), pytest.approx(1), 5)


def test_few_steps_say_nothing():
    assert slowdown_at_equal_work(steps([1, 1]), steps([1] * 9, factor=3)) is None
    assert slowdown_at_equal_work(steps([1] * 9), steps([1] * 4, factor=3)) is None
    assert slowdown_at_equal_work([], []) is None


def test_single_slow_steps_do_not_count():
    recent = steps([1] * 6) + steps([1] * 3, factor=20)
    assert slowdown_at_equal_work(steps([1] * 9), recent).by_time == pytest.approx(1)


@pytest.mark.parametrize(
    ("slowdown", "load", "factor"),
    [
        (Slowdown(1.6, 1.5, 9), QUIET, 1.5),
        (Slowdown(1.2, 1.2, 9), QUIET, None),
        (Slowdown(2.0, 1.0, 9), QUIET, None),  # it waited: for a disk, for memory
        (Slowdown(2.0, 2.0, 9), LoadReading(8, 4.0, 2.0), None),  # other programs
        (Slowdown(1.5, 1.5, 9), LoadReading(2, 1.6, 0.4), None),  # 2 threads on 1.6 cores take 1.25 times
        (Slowdown(2.0, 2.0, 9), LoadReading(2, 1.6, 0.4), 1.6),
    ],
)
def test_throttling_is_what_waiting_and_other_programs_do_not_explain(slowdown, load, factor):
    found = inferred_throttling(slowdown, load, threads=2)
    assert found == (None if factor is None else pytest.approx(factor))


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 16), st.floats(0, 16))
def test_the_factor_is_never_more_than_what_was_measured(by_time, by_cpu_time, cores, others):
    load = LoadReading(cores, 0.0, min(others, cores))
    factor = inferred_throttling(Slowdown(by_time, by_cpu_time, 9), load, threads=cores)
    assert factor is None or MIN_FACTOR <= factor <= min(by_time, by_cpu_time)
