"""A duty cycle really lowers the load: measured as CPU time of this process over the time that passed."""

import time

import pytest

from macbook_optimization.duty_cycle import DutyCycle, sleep_with_checks

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def compute(seconds):
    """Use this much CPU time, however long it takes on a busy machine."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def busy_share(share, rounds=40, work_seconds=0.01):
    """Return the CPU time over the time that passed, and over the time outside rests.

    The second is 1 on an idle machine and lower beside other programs, whatever the duty cycle does.
    """
    duty = DutyCycle()
    duty.set_share(share)
    started, cpu_started = time.monotonic(), time.process_time()
    for _ in range(rounds):
        compute(work_seconds)
        duty.rest()
    passed = time.monotonic() - started
    used = time.process_time() - cpu_started
    return used / passed, used / (passed - duty.rested_seconds)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_load_is_the_share_that_was_set(share):
    busy, without_rests = busy_share(share)
    assert busy / without_rests == pytest.approx(share, abs=0.08)
    assert busy < share + 0.05


def test_without_a_share_there_is_no_rest():
    duty = DutyCycle()
    compute(0.05)
    assert duty.rest() == 0.0 == duty.rested_seconds


def test_short_rests_are_collected():
    duty = DutyCycle()
    duty.set_share(0.5)
    assert duty.rest() == 0.0
    compute(0.03)
    assert duty.rest() >= 0.02


def test_work_before_a_share_was_set_or_another_wait_owes_no_rest():
    duty = DutyCycle()
    time.sleep(0.05)
    duty.set_share(0.5)
    assert duty.rest() == 0.0
    time.sleep(0.05)
    duty.restart()
    assert duty.rest() == 0.0


def test_a_pause_of_the_process_that_the_clock_leaves_out_owes_no_rest():
    now = 0.0
    duty = DutyCycle(lambda: now)
    duty.set_share(0.25)
    time.sleep(0.05)
    assert duty.rest() == 0.0
    now = 0.01
    assert 0.03 <= duty.rest() < 1.0


def test_a_check_ends_a_long_rest():
    duty = DutyCycle()
    duty.set_share(0.0001)
    compute(0.01)

    def stop():
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        duty.rest(stop)
    with pytest.raises(KeyboardInterrupt):
        sleep_with_checks(100.0, stop)
    assert time.monotonic() - started < 5
