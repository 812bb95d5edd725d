"""The memory model, budgets, and the controller that reacts to memory pressure."""

import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError, MemoryBudgetError
from macbook_optimization.hardware_detection import GIB, MemorySpecs
from macbook_optimization.memory_management import (
    MARGIN,
    MIB,
    AdaptiveSequenceLength,
    MemoryManager,
    MemoryModel,
    MemoryMonitor,
    MemoryStats,
    PressureSettings,
    line_through,
    memory_budget,
    own_bytes,
    peak_bytes,
    read_memory,
    read_stall,
    return_freed_memory,
)
from macbook_optimization.training_config_adapter import plan_batches

memories = st.builds(MemoryModel, st.integers(0, 2**34), st.integers(1, 2**30))


@given(
    examples=st.integers(1, 4096), memory=memories, spare=st.integers(1, 2**34), at_most=st.integers(1, 5000)
)
def test_a_plan_covers_the_step_and_fits_the_budget_with_a_margin(examples, memory, spare, at_most):
    budget = memory.needed_bytes() + spare
    plan = plan_batches(examples, memory, budget, at_most)
    assert plan.micro_batch_size * plan.accumulation_steps >= examples
    assert plan.micro_batch_size * (plan.accumulation_steps - 1) < examples, (
        "the last micro-batch is not empty"
    )
    assert memory.peak_bytes(plan.micro_batch_size) <= budget * (1 - MARGIN) + 1
    assert plan.micro_batch_size <= at_most


@given(memory=memories, share=st.floats(0.01, 0.99))
def test_an_error_about_the_budget_says_how_much_is_needed(memory, share):
    budget = int(memory.needed_bytes() * share) - 2
    with pytest.raises(MemoryBudgetError, match=rf"needs {math.ceil(memory.needed_bytes() / MIB)} MiB"):
        plan_batches(8, memory, budget)
    plan_batches(8, memory, memory.needed_bytes() + 2)


@given(memory=memories, sizes=st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True))
def test_the_fit_through_points_of_a_line_is_that_line(memory, sizes):
    found = line_through([(n, memory.peak_bytes(n)) for n in sizes])
    for n in (1, 1000):
        assert found.peak_bytes(n) == pytest.approx(memory.peak_bytes(n), rel=1e-6, abs=2000)


@given(st.lists(st.tuples(st.integers(1, 512), st.integers(1, 2**36)), min_size=1, max_size=8))
def test_no_measured_peak_is_above_the_line(points):
    line = line_through(points)
    assert all(line.peak_bytes(n) >= peak - 1 for n, peak in points)
    assert line.bytes_per_example >= 0


MACHINE = MemorySpecs(16 * GIB, 10 * GIB, None, None, None, None, None)


def test_a_budget_is_a_share_of_the_available_memory_or_the_users_limit():
    assert memory_budget(MACHINE).resident_bytes == 8 * GIB
    assert memory_budget(MACHINE, limit_mb=2000).resident_bytes == 2000 * MIB
    assert "10,240 MiB available" in memory_budget(MACHINE).reason


def test_the_documented_calculation_is_safe_and_follows_a_measured_line():
    manager = MemoryManager()
    assert manager.calculate_optimal_batch_size(100, 6000, 0.8) == 10  # (4800 - 300 - 500) / 400
    line = MemoryModel(1000 * MIB, 100 * MIB)
    assert manager.calculate_optimal_batch_size(100, 6000, 0.8, memory_model=line) == 38
    assert manager.calculate_optimal_batch_size(5000, 1000) == 1


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"model_size_mb": 0, "available_memory_mb": 6000}, "model_size_mb is 0"),
        ({"model_size_mb": 100, "available_memory_mb": -6000}, "available_memory_mb is -6000"),
        ({"model_size_mb": math.nan, "available_memory_mb": 6000}, "model_size_mb is nan"),
        ({"model_size_mb": 100, "available_memory_mb": math.inf}, "available_memory_mb is inf"),
        ({"model_size": -1, "available_memory": 2**32}, "model_size is -1"),
        ({"model_size": 100, "available_memory": 6000}, "available_memory is 6000 bytes"),
        ({"model_size_mb": 100, "model_size": 1, "available_memory_mb": 1}, "model_size is given twice"),
        ({"model_size_mb": 100}, "available_memory is missing"),
        ({"model_size_mb": 1, "available_memory_mb": 1, "safety_margin": 0}, "safety_margin is 0"),
        ({"model_size_mb": 1, "available_memory_mb": 1, "safety_margin": math.nan}, "safety_margin is nan"),
    ],
)
def test_the_documented_calculation_refuses_sizes_that_mean_nothing(sizes, problem):
    manager = MemoryManager(batch_size=4)
    with pytest.raises(ConfigError, match=problem) as refused:
        manager.calculate_optimal_batch_size(**sizes)
    assert refused.value.hint
    assert manager.batch_size == 4


@pytest.mark.parametrize("usage", [-0.5, 101, math.nan, math.inf])
def test_an_impossible_memory_usage_is_refused(usage):
    with pytest.raises(ConfigError, match="current_usage is"):
        MemoryManager(batch_size=4).adjust_batch_size_dynamically(usage)


def test_the_documented_calculation_takes_bytes_under_the_names_without_a_unit():
    manager = MemoryManager()
    assert manager.calculate_optimal_batch_size(model_size=100 * MIB, available_memory=6000 * MIB) == 10
    assert manager.calculate_optimal_batch_size(100, available_memory=6000 * MIB) == 10


def test_the_documented_calculation_refuses_an_unknown_keyword():
    with pytest.raises(TypeError, match="modelsize"):
        MemoryManager().calculate_optimal_batch_size(100, 6000, modelsize=1)


class Machine:
    """A clock and a memory that a test sets by hand."""

    def __init__(self, **settings):
        self.now = 0.0
        self.available = 10 * GIB
        self.process = 2 * GIB
        self.stall = 0.0
        self.pressure = None
        self.swap = 0
        self.manager = MemoryManager(
            batch_size=settings.pop("batch_size", 16),
            largest=16,
            model=settings.pop("model", MemoryModel(1 * GIB, 64 * MIB)),
            settings=PressureSettings(**settings),
            clock=lambda: self.now,
            collect=lambda: 0,
        )

    def sample(self, seconds=1.0):
        self.now += seconds
        stats = MemoryStats(16 * GIB, self.available, self.process, self.swap, self.stall, self.pressure)
        return self.manager.react(stats)

    def sizes(self, seconds):
        return [(self.sample(), self.manager.batch_size)[1] for _ in range(seconds)]


def test_without_pressure_the_batch_does_not_change():
    assert set(Machine().sizes(100)) == {16}


def test_what_is_kept_for_speed_is_released_before_the_batch_shrinks():
    machine = Machine()
    kept = [100 * MIB, 100 * MIB]
    machine.manager.relieve = lambda: kept.pop() if kept else 0
    machine.sample()
    machine.stall = 50.0
    assert machine.sample() is None
    assert len(kept) == 1, "it was released once"
    found = machine.sample()
    assert (found.before, found.after) == (16, 8), "that was not enough"
    assert machine.sizes(9)[-1] == 8
    assert kept == [], "later it is released again, before the next shrink"
    assert machine.sizes(1) == [4]


def test_a_failed_allocation_releases_what_is_kept_for_speed():
    machine = Machine()
    released = []
    machine.manager.relieve = lambda: released.append(1) or 0
    machine.manager.after_failed_allocation()
    assert released == [1]


def test_the_batch_shrinks_to_what_fits_and_grows_back():
    machine = Machine()
    machine.sample()
    machine.available = 0  # leaves the 2 GiB of this process: 0.9 of it, minus 1 GiB fixed
    found = machine.sample()
    assert (found.before, found.after) == (16, 12)
    assert "2,048 MiB is left" in found.reason
    machine.available = 10 * GIB
    assert machine.sizes(40)[-1] == 16


def test_the_batch_halves_once_when_other_programs_take_most_of_the_memory():
    machine = Machine(model=None)
    machine.sample()
    machine.available = int(0.3 * machine.available)
    assert "other programs took" in machine.sample().reason
    assert set(machine.sizes(60)) == {8}, "once, without growing back while the memory is taken"
    machine.available = 10 * GIB
    sizes = machine.sizes(40)
    assert sizes[10] == 8, "not immediately"
    assert sizes[-1] == 16


@pytest.mark.parametrize(
    ("name", "value"), [("stall", 40.0), ("pressure", "warning"), ("pressure", "critical")]
)
def test_pressure_halves_the_batch_step_by_step(name, value):
    machine = Machine()
    machine.sample()
    setattr(machine, name, value)
    assert machine.sample().after == 8
    assert machine.sample() is None, "memory is not released immediately"
    assert machine.sizes(60)[-1] == 1
    setattr(machine, name, 0.0 if name == "stall" else "normal")
    assert machine.sizes(120)[-1] == 16


def test_growing_swap_and_a_process_over_its_budget_shrink_the_batch():
    machine = Machine()
    machine.sample()
    machine.swap = GIB
    assert "moved 1,024 MiB to swap" in machine.sample().reason
    assert machine.sample(10) is None, "swap that does not grow is not pressure"
    machine.manager.budget_bytes = 2 * GIB
    machine.process = 3 * GIB
    assert "uses 3,072 of 2,048 MiB" in machine.sample().reason


def test_readings_between_the_thresholds_neither_shrink_nor_grow():
    machine = Machine(batch_size=8, taken_share=0.99)
    machine.available = int(0.15 * 16 * GIB)
    assert set(machine.sizes(100)) == {8}


def test_the_threshold_of_usage_holds_while_other_programs_have_a_third_of_the_memory():
    machine = Machine(shrink_above_percent=60.0, grow_below_percent=60.0)
    machine.sample()
    machine.available = 6 * GIB
    assert machine.sizes(60)[-1] == 1
    machine.available = int(6.8 * GIB)  # below the threshold, but too little to grow
    assert set(machine.sizes(100)) == {1}


def test_a_fixed_batch_stays_fixed():
    machine = Machine(dynamic=False)
    machine.sample()
    machine.available = 0
    assert set(machine.sizes(10)) == {16}


@given(st.lists(st.tuples(st.integers(0, 10 * GIB), st.integers(0, 4 * GIB), st.floats(0, 100)), max_size=60))
def test_the_batch_is_always_between_one_and_the_plan(readings):
    machine = Machine()
    for machine.available, machine.process, machine.stall in readings:
        machine.sample()
        assert 1 <= machine.manager.batch_size <= 16


def test_usage_is_a_share_or_a_percentage():
    for usage in (0.97, 97.0):
        assert MemoryManager(batch_size=8, largest=8).adjust_batch_size_dynamically(usage) == 4


def test_one_spike_of_usage_changes_nothing():
    manager = MemoryManager(batch_size=8, largest=8)
    manager.adjust_batch_size_dynamically(50.0)
    assert manager.adjust_batch_size_dynamically(99.0) == 8


def test_a_failed_allocation_halves_the_batch_immediately_down_to_one():
    manager = MemoryManager(batch_size=5, largest=5)
    assert [manager.after_failed_allocation().after for _ in range(2)] == [2, 1]
    assert manager.after_failed_allocation() is None
    assert manager.largest == 1, "a larger batch would fail again, and every failure costs a step"


def test_freed_memory_is_returned_to_the_system():
    """The blocks are small enough to be allocated on the heap."""
    blocks = [bytearray(50_000) for _ in range(2000)]
    before = own_bytes()
    del blocks
    return_freed_memory()
    assert own_bytes() < before - 50 * MIB
    assert peak_bytes() >= before - MIB, "the counter lags a little"


def test_the_real_memory_is_read():
    stats = read_memory()
    assert 0 < stats.available_memory <= stats.total_memory
    assert 0 < stats.percent_used < 100
    assert stats.process_bytes > 10 * MIB


@pytest.mark.parametrize(
    ("text", "stall"),
    [
        ("some avg10=1.53 avg60=0.87 avg300=0.20 total=123\nfull avg10=0.00 avg60=0.00\n", 1.53),
        ("some avg10=much", None),
        ("", None),
        (None, None),
    ],
)
def test_linux_pressure_is_read_or_unknown(tmp_path, text, stall):
    if text is not None:
        (tmp_path / "memory").write_text(text)
    assert read_stall(tmp_path / "memory") == stall


def test_a_monitor_calls_callbacks_only_above_its_threshold():
    full = MemoryStats(100, 5, 1, None, None, None)
    calls = []
    threads = threading.active_count()
    for threshold in (0.9, 0.96):
        monitor = MemoryMonitor(threshold, read=lambda: full)
        monitor.callbacks.append(lambda share, threshold=threshold: calls.append((threshold, share)))
        with monitor:
            deadline = time.monotonic() + 5
            while monitor.latest is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
    assert set(calls) == {(0.9, 0.95)}
    assert threading.active_count() == threads


def test_a_sequence_gets_shorter_under_pressure_and_recovers():
    length = AdaptiveSequenceLength(base_seq_len=512, min_seq_len=128)
    assert length.adjust_for_memory_pressure(90) == 384
    assert [length.adjust_for_memory_pressure(99) for _ in range(9)][-1] == 128
    assert length.adjust_for_memory_pressure(70) == 128
    assert [length.adjust_for_memory_pressure(10) for _ in range(30)][-1] == 512
    with pytest.raises(ValueError, match="min_seq_len 600"):
        AdaptiveSequenceLength(512, 600)
