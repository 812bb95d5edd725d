"""Which micro-batch sizes a probe measures: few where a step takes long, and none beyond memory."""

import sys

import pytest

from trm.planning.measurements import SizeResult
from trm.planning.probe import ProbeSizes

EMPTY, EXAMPLE = 300, 100  # bytes of the empty process, and of one example


def measured_sizes(samples_per_second, num_slots=768, budget_bytes=sys.maxsize):
    next_size = ProbeSizes(num_slots, EMPTY, budget_bytes)
    results = []
    while (size := next_size(results)) is not None:
        results.append(SizeResult(size, EMPTY + EXAMPLE * size, None, samples_per_second))
    return [result.micro_batch_size for result in results]


@pytest.mark.parametrize(
    ("samples_per_second", "sizes"),
    [(0.01, [1, 2]), (1.4, [1, 2]), (1.6, [1, 4, 8]), (10, [1, 4, 26]), (1e6, [1, 4, 128])],
)
def test_the_longer_an_example_takes_the_fewer_are_measured(samples_per_second, sizes):
    assert measured_sizes(samples_per_second) == sizes


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("samples_per_second", [0.1, 100])
def test_no_size_is_larger_than_the_batch(samples_per_second, num_slots):
    sizes = measured_sizes(samples_per_second, num_slots)
    assert max(sizes) <= num_slots
    assert len(sizes) >= min(2, num_slots)


def test_the_largest_size_fits_the_budget():
    assert measured_sizes(1e6, budget_bytes=EMPTY + 50 * EXAMPLE) == [1, 4, 50]
    # The first two sizes do not depend on the budget: the probe's own address space limit ends them.
    assert measured_sizes(1e6, budget_bytes=EMPTY + 3 * EXAMPLE) == [1, 4]


def test_one_example_beyond_the_budget_ends_the_probe():
    assert measured_sizes(1e6, budget_bytes=EMPTY + EXAMPLE - 1) == [1]
