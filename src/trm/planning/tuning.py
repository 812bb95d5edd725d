"""The one search over micro-batch sizes and parallelism.

It is a generator that has neither a clock nor a process: it requests trials and receives what they took. Two
drivers run it. The probe computes a few slots of each size in a child process; the warm-up uses the first
training steps themselves.

A larger micro-batch must be faster by more than the measured spread, or it is not worth its memory; where it
hardly takes more memory, the fastest reading decides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trm.planning.measurements import Measurements, Parallelism, SizeResult, memory_model

NEARLY_AS_FAST = 0.95
LEAST_SPEED = 0.85  # however much readings differ, a size below this share of the best is not taken
HARDLY_MORE_MEMORY = 1.1
CONTENDER = 0.8  # sizes below this share of the best throughput are not measured again
CONFIRMING_ROUNDS = 2
PARALLELISM_ROUNDS = 2
LARGE_ENOUGH = 32  # beyond this size, larger micro-batches were never measured to be faster

Phase = Literal["sizes", "between", "confirm", "parallelism"]


@dataclass(frozen=True, slots=True)
class Trial:
    micro_batch_size: int
    parallelism: Parallelism
    phase: Phase  # memory has to be measured in phase "sizes" only


# Requests trials, and receives their results; None if a trial did not fit or there is no more time.
Search = Generator[Trial, SizeResult | None, Measurements]
NextSize = Callable[[Sequence[SizeResult]], int | None]


def search(choices: Sequence[Parallelism], next_size: NextSize) -> Search:
    """Measure growing sizes with all threads, then the other kinds of parallelism at the best size."""
    widest = max(choices)
    sizes: list[SizeResult] = []
    while (size := next_size(sizes)) is not None:
        result = yield Trial(size, widest, "sizes")
        if result is None:
            break
        sizes.append(result)
    rates = {each.micro_batch_size: [each.samples_per_second] for each in sizes}
    if rates:
        yield from _measure_between(rates, widest)
        yield from _confirm(rates, widest)
    by_parallelism: dict[Parallelism, float] = {}
    if rates:
        size = best_size(rates, sizes)
        possible = [each for each in choices if each.workers <= size]
        by_parallelism = yield from _compare_parallelism(size, possible)
    return Measurements(tuple(sizes), rates, by_parallelism)


def _measure_between(
    rates: dict[int, list[float]], widest: Parallelism
) -> Generator[Trial, SizeResult | None, None]:
    """Add the throughput of sizes between the two largest, by doubling."""
    *smaller, largest = sorted(rates)
    size = 2 * smaller[-1] if smaller else largest
    while size < largest:
        result = yield Trial(size, widest, "between")
        if result is None:
            return
        rates[size] = [result.samples_per_second]
        size *= 2


def _confirm(rates: dict[int, list[float]], widest: Parallelism) -> Generator[Trial, SizeResult | None, None]:
    """Measure the fast sizes again, interleaved, which also shows how much readings differ by chance."""
    best = max(max(readings) for readings in rates.values())
    contenders = [size for size in sorted(rates) if max(rates[size]) >= CONTENDER * best]
    if len(contenders) < 2:
        return
    for _ in range(CONFIRMING_ROUNDS):
        for size in contenders:
            result = yield Trial(size, widest, "confirm")
            if result is None:
                return
            rates[size].append(result.samples_per_second)


def _compare_parallelism(
    size: int, choices: Sequence[Parallelism]
) -> Generator[Trial, SizeResult | None, dict[Parallelism, float]]:
    """Return the best of several interleaved rounds, as noise only ever slows a step down."""
    best: dict[Parallelism, float] = {}
    if len(choices) < 2:
        return best
    for _ in range(PARALLELISM_ROUNDS):
        for each in choices:
            result = yield Trial(size, each, "parallelism")
            if result is None:
                return best
            best[each] = max(best.get(each, 0.0), result.samples_per_second)
    return best


def spread(rates: Mapping[int, Sequence[float]]) -> float:
    """Return the median relative difference between the readings of one size; 0 if none was repeated."""
    repeated = sorted(1 - min(each) / max(each) for each in rates.values() if len(each) > 1)
    return repeated[len(repeated) // 2] if repeated else 0.0


def smallest_fast_size(rates: Mapping[int, Sequence[float]]) -> int:
    """Return the smallest size that is about as fast as any, as far as the readings can distinguish them."""
    best = max(max(readings) for readings in rates.values())
    needed = best * min(NEARLY_AS_FAST, max(LEAST_SPEED, 1 - spread(rates)))
    return min(size for size, readings in rates.items() if max(readings) >= needed)


def best_size(rates: Mapping[int, Sequence[float]], sizes: Sequence[SizeResult]) -> int:
    """Return the smallest size that is about as fast as any, or the fastest that hardly takes more memory."""
    smallest = smallest_fast_size(rates)
    if len(sizes) < 2:
        return smallest
    memory = memory_model(sizes)
    most = HARDLY_MORE_MEMORY * memory.peak_bytes(smallest)
    similar = [size for size in sorted(rates) if size >= smallest and memory.peak_bytes(size) <= most]
    return max(similar, key=lambda size: max(rates[size]))
