"""Every backend and device of this machine: whether it agrees with the CPU, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

from trm.planning.device_choice import AUTO, REFERENCE, Place, candidates, check, rate_of
from trm.planning.planner import Planner


@dataclass(frozen=True, slots=True)
class DeviceResult:
    backend: str
    device: str
    problem: str | None  # None: it agrees with the CPU, or it is the CPU
    tensor: str | None  # the first one that differs, if it is a single one
    samples_per_second: float | None  # None: not measured

    @property
    def place(self) -> Place:
        return Place(self.backend, self.device)


def examine_devices(planner: Planner) -> tuple[DeviceResult, ...]:
    """Check and measure every backend and device that exists here, with the recipe of the planner."""
    places = candidates(Place(AUTO, AUTO), planner.display.message)
    return tuple(examine_device(planner, place) for place in places)


def examine_device(planner: Planner, place: Place) -> DeviceResult:
    verdict = None if place == REFERENCE else check(planner, place)
    if verdict is not None and verdict.problem is not None:
        return DeviceResult(*place, verdict.problem, verdict.tensor, None)
    return DeviceResult(*place, None, None, rate_of(planner, place))
