"""The division of the slots among ranks: by measured speed, within what fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

from trm.backends.world import Member


def shares_of(members: Sequence[Member], num_slots: int) -> tuple[int, ...]:
    """Return how many slots each machine owns; one whose speed is unknown counts as the mean of others.

    There are at least as many slots as machines.
    """
    known = [each.slots_per_second for each in members if each.slots_per_second]
    typical = sum(known) / len(known) if known else 1.0
    weights = [each.slots_per_second or typical for each in members]
    limits = [num_slots if each.max_slots is None else max(1, each.max_slots) for each in members]
    if sum(limits) < num_slots:  # estimates of memory must not end a run that works on one machine
        limits = [num_slots] * len(members)
    return split_slots(num_slots, weights, limits)


def split_slots(num_slots: int, weights: Sequence[float], limits: Sequence[int]) -> tuple[int, ...]:
    """Divide slots in proportion to the weights, at least one and at most its limit to each.

    Where this moves slots, they go to the machine that would need the least time for one more.
    """
    places = range(len(weights))
    proportional = largest_remainder(num_slots, weights)
    shares = [min(max(1, share), limit) for share, limit in zip(proportional, limits, strict=True)]
    while sum(shares) < num_slots:
        free = (place for place in places if shares[place] < limits[place])
        shares[min(free, key=lambda place: (shares[place] + 1) / weights[place])] += 1
    while sum(shares) > num_slots:
        several = (place for place in places if shares[place] > 1)
        shares[max(several, key=lambda place: shares[place] / weights[place])] -= 1
    return tuple(shares)


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Round proportional shares so that they add up to `total`; none is further than one from its quota."""
    whole = sum(weights)
    quotas = [total * weight / whole for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda place: shares[place] - quotas[place])
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares
