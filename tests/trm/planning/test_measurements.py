"""The peak memory of a run, where rows are full and where they differ in length."""

from hypothesis import given
from hypothesis import strategies as st
from tiny import run_config

from macbook_optimization.memory_management import MARGIN, MIB, Budget
from trm.plan import Execution
from trm.planning.choice import make_plan
from trm.planning.measurements import TRAINER_BYTES, Measurements, Parallelism, RunMemory, SizeResult
from trm.planning.row_widths import computed_positions

PROCESS, PER_POSITION = 300 * MIB, 10_000
NUM_SLOTS = 64
all_widths = st.lists(st.integers(1, 32), min_size=NUM_SLOTS, max_size=NUM_SLOTS).map(
    lambda found: tuple(32 * each for each in sorted(found, reverse=True))
)


def step_bytes(widths, size, workers):
    return PROCESS + PER_POSITION * computed_positions(widths, size, workers)


def measured(widths, workers=2, per_evaluated_example=None):
    """Return what a probe measures of a step whose memory is proportional to the computed positions."""
    sizes = []
    for size in (1, 4, 32):
        steps = step_bytes(widths, size, workers)
        if per_evaluated_example is None:
            sizes.append(SizeResult(size, steps, None, 10.0))
        else:
            peak = max(steps, PROCESS + per_evaluated_example * size)
            sizes.append(SizeResult(size, peak, None, 10.0, step_bytes=steps))
    rates = {each.micro_batch_size: [1.0 * each.micro_batch_size] for each in sizes}
    return Measurements(tuple(sizes), rates, row_widths=widths, workers=workers)


@given(widths=all_widths, workers=st.integers(1, 4), size=st.integers(1, NUM_SLOTS))
def test_no_size_takes_more_than_predicted(widths, workers, size):
    memory = RunMemory.of(measured(widths), workers)
    real = step_bytes(widths, size, workers) + TRAINER_BYTES
    assert real <= memory.peak_bytes(size) <= 1.001 * real


@given(widths=all_widths, budget=st.integers(200 * MIB, 1000 * MIB))
def test_every_size_up_to_the_largest_fits(widths, budget):
    memory = RunMemory.of(measured(widths, per_evaluated_example=9 * MIB), 2)
    largest = memory.largest_batch(budget)
    assert all(memory.peak_bytes(size) <= budget for size in range(1, largest + 1))
    assert largest == NUM_SLOTS or memory.peak_bytes(largest + 1) > budget


def test_an_evaluation_counts_where_it_needs_more_than_a_step():
    widths = (256,) * NUM_SLOTS
    steps = RunMemory.of(measured(widths), 2)
    small = RunMemory.of(measured(widths, per_evaluated_example=MIB), 2)
    large = RunMemory.of(measured(widths, per_evaluated_example=9 * MIB), 2)
    assert small.peak_bytes(16) == steps.peak_bytes(16)
    assert large.peak_bytes(16) == PROCESS + TRAINER_BYTES + 16 * 9 * MIB


def test_a_plan_has_the_memory_of_its_own_workers_and_a_line_to_its_own_size(tmp_path):
    widths = (1024,) * 8 + (64,) * (NUM_SLOTS - 8)
    config = run_config(tmp_path, plan={}, training__effective_batch_size=NUM_SLOTS)
    budget = Budget(resident_bytes=600 * MIB, address_space_bytes=None, reason="as requested")
    sizes = {}
    for workers in (1, 2):
        choices = [Parallelism(2, workers)]
        plan = make_plan(config, budget, measured(widths), Execution(), choices)
        real = step_bytes(widths, plan.micro_batch_size, workers) + TRAINER_BYTES
        assert real <= plan.predicted_peak_bytes <= budget.resident_bytes * (1 - MARGIN)
        assert abs(plan.memory.peak_bytes(plan.micro_batch_size) - plan.predicted_peak_bytes) < 1000
        sizes[workers] = plan.micro_batch_size
    assert sizes[1] < sizes[2]  # a single worker computes all rows as wide as the longest
