"""Which sizes a probe measures: few where a step takes long, none beyond memory. And which one is taken."""

import sys

import pytest

from trm.training.planning import LARGE_ENOUGH, _fast_enough
from trm.training.probe import Size, next_size

EMPTY, EXAMPLE = 300, 100  # bytes, of a process and of an example


def measured(samples_per_second, num_slots=768, budget_bytes=sys.maxsize):
    sizes, size = [], 1
    while not sizes or size > sizes[-1].micro_batch_size:
        sizes.append(Size(size, EMPTY + EXAMPLE * size, None, samples_per_second))
        size = next_size(sizes, num_slots, EMPTY, budget_bytes)
    return [size.micro_batch_size for size in sizes]


@pytest.mark.parametrize(
    ("samples_per_second", "sizes"),
    [(0.01, [1, 2]), (1.4, [1, 2]), (1.6, [1, 4, 8]), (10, [1, 4, 26]), (1e6, [1, 4, 128])],
)
def test_the_longer_an_example_takes_the_fewer_are_measured(samples_per_second, sizes):
    assert measured(samples_per_second) == sizes


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("samples_per_second", [0.1, 100])
def test_no_size_is_larger_than_the_batch(samples_per_second, num_slots):
    sizes = measured(samples_per_second, num_slots)
    assert max(sizes) <= num_slots
    assert len(sizes) >= min(2, num_slots)


def test_the_largest_size_fits():
    assert measured(1e6, budget_bytes=EMPTY + 50 * EXAMPLE) == [1, 4, 50]
    assert measured(1e6, budget_bytes=EMPTY + 3 * EXAMPLE) == [1, 4]  # which its own limit would have ended


@pytest.mark.parametrize(
    ("rates", "num_slots", "taken"),
    [
        ({1: 10, 4: 20, 8: 30}, 768, LARGE_ENOUGH),
        ({1: 10, 4: 20, 8: 30}, 12, 12),
        ({1: 10, 4: 20, 8: 20.5}, 768, 4),
        ({1: 0.2, 2: 0.3}, 768, 2),  # nothing says that 32 of them would be faster
        ({1: 0.2, 2: 0.3}, 2, 2),
        ({1: 5}, 1, 1),
        ({1: 5}, 768, LARGE_ENOUGH),  # more than one did not fit, which is for others to say
    ],
)
def test_the_smallest_size_that_is_about_as_fast_as_any(rates, num_slots, taken):
    assert _fast_enough(rates, num_slots)[0] == taken
