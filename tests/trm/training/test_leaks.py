"""A leak is found within 200 steps, whatever a step takes; thousands of clean steps report none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.training.leaks import LeakWatch

MIB = 2**20


def leaks(resident_mb, **settings):
    readings = iter(resident_mb)
    watch = LeakWatch(read_bytes=lambda: int(next(readings) * MIB), **settings)
    found = [watch.after_step(step) for step in range(1, len(resident_mb) + 1)]
    return [leak for leak in found if leak is not None]


@given(st.integers(0, 2**32 - 1), st.floats(0, 4), st.integers(0, 3000))
def test_a_leak_of_1_mb_per_step_is_found_within_200_steps(seed, noise_mb, begin):
    steps = np.arange(begin + 200)
    noise = np.random.default_rng(seed).normal(0, noise_mb, len(steps))
    leak, *_ = leaks(300 + np.maximum(0, steps - begin) + noise)
    assert leak.last_step > begin
    assert leak.mb_per_step_low <= leak.mb_per_step * 1.001
    assert leak.mb_per_step_high >= leak.mb_per_step * 0.999
    assert leak.mb_per_step == pytest.approx(1, rel=0.35)


@pytest.mark.parametrize(("mb_per_step", "num_steps"), [(0.1, 2000), (0.01, 20_000)])
def test_a_slower_leak_takes_longer_to_find(mb_per_step, num_steps):
    noise = np.random.default_rng(0).normal(0, 3, num_steps)
    leak, *_ = leaks(300 + mb_per_step * np.arange(num_steps) + noise)
    assert leak.mb_per_step == pytest.approx(mb_per_step, rel=0.3)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32 - 1),
    noise_mb=st.floats(0, 50),
    warm_up=st.floats(0, 600),
    tooth=st.tuples(st.integers(2, 90), st.floats(0, 500)),
    jumps=st.integers(0, 6),
)
def test_5000_clean_steps_report_none(seed, noise_mb, warm_up, tooth, jumps):
    """With noise of the allocator, a warm-up that bends, garbage collections and larger micro-batches."""
    rng = np.random.default_rng(seed)
    steps = np.arange(5000)
    period, height = tooth
    jump_at = rng.integers(0, 200, jumps)
    jumped = sum((steps >= place) * 2.0**number * 5 for number, place in enumerate(sorted(jump_at)))
    ramp = warm_up * (1 - np.exp(-steps / 20))
    resident = 400 + ramp + height * (steps % period) / period + jumped + rng.normal(0, noise_mb, len(steps))
    assert leaks(resident) == []


def test_a_cache_that_fills_is_not_a_leak():
    filling = 300 + np.minimum(np.arange(2000) * 0.5, 50)
    assert leaks(filling) == []
    assert leaks(filling, cache_mb=10)


def test_a_leak_that_continues_is_reported_a_few_times_only():
    found = leaks(300 + np.arange(20_000.0))
    assert 3 < len(found) < 10
    growth = [leak.growth_mb for leak in found]
    assert growth == sorted(growth)
