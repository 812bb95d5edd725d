"""Slower steps at equal work are recorded as inferred throttling, when it begins and when it ends."""

import pytest
from tiny import Recorder

from macbook_optimization.resource_monitoring import LoadReading
from macbook_optimization.throttling import TimedStep
from trm.runs.directory import EVENTS, Run
from trm.training.log import RunLog
from trm.training.throttling_watch import ThrottlingWatch

STEPS = ThrottlingWatch.MIN_STEPS


class Load:
    """What other programs use of eight cores."""

    other_cores = 0.0

    def read(self):
        return LoadReading(cores=8, own_cores=2.0, other_cores=self.other_cores)


@pytest.fixture
def watch(tmp_path):
    made = ThrottlingWatch(RunLog(Run(tmp_path), Recorder()))
    made.WINDOW_SECONDS = 0.0
    made.load = Load()
    return made


def take(watch, factor, windows=1, configuration="plan", cycles=(1, 2)):
    """Take windows of steps that are slower by a factor than the first."""
    for number in range(windows * STEPS):
        work = cycles[number % len(cycles)]
        step = TimedStep(work, 0.01 * work * factor, 0.02 * work * factor)
        watch.after_step(number, step, configuration, threads=2)


def recorded(watch):
    return [(row["event"], row.get("factor")) for row in watch.log.run.rows(EVENTS)]


def events_of(watch):
    return recorded(watch) if (watch.log.run.path / EVENTS).exists() else []


def test_throttling_is_recorded_when_it_begins_and_ends(watch):
    for factor, windows in ((1.0, 3), (1.5, 4), (1.0, 2)):
        take(watch, factor, windows)
    assert recorded(watch) == [("throttling inferred", pytest.approx(1.5)), ("throttling over", None)]
    evidence = watch.log.run.rows(EVENTS)[0]["evidence"]
    assert "1.50 times as long and 1.50 times the CPU time of earlier steps with equal work" in evidence
    assert "other programs kept 0.0 of 8 cores busy" in evidence


def test_one_slow_window_is_not_enough(watch):
    for factor in (1.0, 2.0, 1.0, 2.0):
        take(watch, factor)
    assert events_of(watch) == []


def test_other_programs_explain_slower_steps(watch):
    take(watch, 1.0)
    watch.load.other_cores = 3.0
    take(watch, 2.0, windows=4)
    assert events_of(watch) == []


def test_a_window_beside_other_programs_is_not_what_later_ones_are_compared_with(watch):
    watch.load.other_cores = 3.0
    take(watch, 0.5)
    watch.load.other_cores = 0.0
    take(watch, 1.0, windows=4)
    assert events_of(watch) == []


def test_another_configuration_is_compared_with_itself(watch):
    take(watch, 1.0)
    take(watch, 2.0, windows=4, configuration="half the micro-batch")
    assert events_of(watch) == []


def test_depths_that_come_later_are_compared_once_they_are_known(watch):
    take(watch, 1.0)
    take(watch, 1.0, cycles=(3, 4))
    take(watch, 1.5, windows=2, cycles=(3, 4))
    assert recorded(watch) == [("throttling inferred", pytest.approx(1.5))]


def test_depths_that_are_rare_in_a_window_are_collected_over_several(watch):
    take(watch, 1.0, windows=4, cycles=range(1, STEPS))  # one step of each, two of the first
    take(watch, 1.5, windows=2, cycles=range(1, STEPS))
    assert recorded(watch) == [("throttling inferred", pytest.approx(1.5))]


def test_a_window_that_cannot_be_compared_does_not_end_throttling(watch):
    take(watch, 1.0)
    take(watch, 1.5, windows=2)
    take(watch, 1.5, cycles=range(10, 10 + STEPS))
    take(watch, 1.5)
    assert [event for event, _ in recorded(watch)] == ["throttling inferred"]
    take(watch, 1.0)
    assert [event for event, _ in recorded(watch)] == ["throttling inferred", "throttling over"]


def test_other_programs_do_not_end_throttling(watch):
    take(watch, 1.0)
    take(watch, 1.5, windows=2)
    watch.load.other_cores = 3.0
    take(watch, 1.5, windows=3)
    assert [event for event, _ in recorded(watch)] == ["throttling inferred"]


def test_throttling_lasts_through_another_configuration_until_its_steps_become_faster(watch):
    take(watch, 1.0)
    take(watch, 1.5, windows=2)
    take(watch, 1.5, windows=4, configuration="half the micro-batch")
    assert [event for event, _ in recorded(watch)] == ["throttling inferred"]
    take(watch, 1.0, windows=3, configuration="half the micro-batch")
    assert [event for event, _ in recorded(watch)] == ["throttling inferred", "throttling over"]
    take(watch, 1.5, windows=2, configuration="half the micro-batch")
    assert recorded(watch)[2:] == [("throttling inferred", pytest.approx(1.5))]
