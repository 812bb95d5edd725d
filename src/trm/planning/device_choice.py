"""The backend and device of a run: those that the recipe names or, with `auto`, the fastest one.

Every other place is used only after `device_check` has compared it with PyTorch on the CPU; the verdict is
cached per recipe, version and machine. What fails the check is named, and the CPU takes its place.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.errors import ConfigError, LaptopError
from macbook_optimization.hardware_detection import on_macos
from macbook_optimization.json_types import JsonObject
from trm.backends.base import LIBRARIES, Program, is_installed
from trm.config import RunConfig, did_you_mean
from trm.config.kinds import check_backend
from trm.plan import Execution
from trm.planning.cache import cache_directory, cache_key, read_cached, write_cached
from trm.planning.fitting import fitted
from trm.planning.measurer import PROBE_SECONDS
from trm.planning.planner import Planner

AUTO = "auto"
CHECK_SECONDS = 900.0
LISTING_SECONDS = 120.0  # for importing a backend
_CHECK_VERSION = 4  # of what is compared; a verdict by another version is not used


class Place(NamedTuple):
    """A backend and a device, on which a recipe is computed."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}"


REFERENCE = Place("pytorch", "cpu")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the check; without a problem the place may be used."""

    backend: str
    device: str
    problem: str | None = None
    tensor: str | None = None  # the first one that differs, if it is a single one
    timed_out: bool = False  # before anything was found

    @property
    def place(self) -> Place:
        return Place(self.backend, self.device)

    @property
    def event_fields(self) -> dict[str, str | None]:
        """Return the fields of the event `device rejected`."""
        return {
            "backend": self.backend,
            "device": self.device,
            "problem": self.problem,
            "tensor": self.tensor,
        }

    def __str__(self) -> str:
        if self.problem is None:
            return "agrees with the CPU"
        where = "" if self.tensor is None else f"{self.tensor}: "
        return f"failed the check: {where}{self.problem}"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    planner: Planner  # whose recipe names one backend and one device
    reason: str | None = None  # None: there was no choice
    verdicts: tuple[Verdict, ...] = ()  # of this start

    @property
    def rejected(self) -> tuple[Verdict, ...]:
        return tuple(each for each in self.verdicts if each.problem is not None)


def choose_device(planner: Planner) -> DeviceChoice:
    """Resolve `auto`, and replace what fails the check by the CPU. With only a CPU, this does nothing."""
    wanted = wanted_place(planner)
    if wanted == REFERENCE:
        return DeviceChoice(planner)
    others = [each for each in candidates(wanted, planner.display.message) if each != REFERENCE]
    if not others:
        return DeviceChoice(planner_at(planner, REFERENCE))
    unfit = {each: why for each in others if (why := unsuitable(planner, each)) is not None}
    for place, why in unfit.items():
        planner.display.message(f"warning: {why}; {place} is not used.")
    verdicts = tuple(check(planner, each) for each in others if each not in unfit)
    for verdict in verdicts:
        if verdict.problem is not None:
            planner.display.message(f"warning: {verdict.place} {verdict}. It is not used.")
    usable = [each.place for each in verdicts if each.problem is None]
    if AUTO in wanted and matches(REFERENCE, wanted):
        usable.insert(0, REFERENCE)
    if len(usable) > 1:
        chosen, reason = _fastest(planner, usable)
    elif usable and usable[0] != REFERENCE:
        chosen, reason = usable[0], "it agrees with the CPU in a check"
    else:
        chosen = REFERENCE
        reason = "; ".join([*unfit.values(), *(f"{each.place} {each}" for each in verdicts)])
    return DeviceChoice(planner_at(planner, chosen), reason, verdicts)


def fitted_on_cpu(planner: Planner) -> Planner:
    """Make the recipe small enough for this machine; which device it is for is decided afterwards."""
    return planner_at(fitted(planner_at(planner, REFERENCE)), wanted_place(planner))


def wanted_place(planner: Planner) -> Place:
    return Place(planner.config.plan.backend, planner.config.plan.device)


def planner_at(planner: Planner, place: Place) -> Planner:
    """Return the planner of the same recipe at another place."""
    return replace(planner, config=recipe_at(planner.config, place))


def recipe_at(config: RunConfig, place: Place) -> RunConfig:
    plan = config.plan.model_copy(update=place._asdict())
    return config.model_copy(update={"plan": plan})


def unsuitable(planner: Planner, place: Place) -> str | None:
    """Return why a recipe cannot be computed elsewhere than on the CPU, or None."""
    if planner.config.training.deterministic:
        return "training.deterministic needs PyTorch on the CPU, which alone promises the same bits again"
    in_bfloat16 = getattr(planner.config.model, "weights_dtype", "float32") != "float32"
    if in_bfloat16 and place.backend == "pytorch":
        return f"model.weights_dtype=bfloat16 is for the CPU; {place.device} computes in float32 only"
    try:
        check_backend(planner.config.training, planner_at(planner, place).config.plan)
    except ValueError as error:
        return str(error)
    return None


def matches(place: Place, wanted: Place) -> bool:
    return all(want in (AUTO, have) for have, want in zip(place, wanted, strict=True))


def candidates(wanted: Place, on_broken: Callable[[str], None]) -> list[Place]:
    """List what exists on this machine and matches; `auto` leaves out the CPU of a backend with a GPU.

    With `auto`, a backend that cannot be loaded is left out, and `on_broken` receives the reason.
    """
    backends = installed_backends() if wanted.backend == AUTO else [wanted.backend]
    found = []
    for backend in backends:
        try:
            devices = devices_of(backend, cheaply=wanted.device == AUTO)
        except LaptopError as error:
            if wanted.backend != AUTO:
                raise
            on_broken(f"warning: {error}; it is not used.")
            continue
        if wanted.device == AUTO and backend != REFERENCE.backend:
            devices = devices[-1:]
        found += [Place(backend, device) for device in devices if matches(Place(backend, device), wanted)]
        if wanted.device not in (AUTO, *devices) and wanted.backend != AUTO:
            raise ConfigError(
                f"The backend {backend} has no device {wanted.device!r} here"
                f"{did_you_mean(wanted.device, (*devices, AUTO))}",
                hint=f"Set plan.device to one of: {', '.join((*devices, AUTO))}",
            )
    if not found:
        raise ConfigError(f"No backend has a device {wanted.device!r} here", hint="Set plan.device to auto.")
    return found


def installed_backends() -> list[str]:
    return [name for name in LIBRARIES if is_installed(name)]


def devices_of(backend: str, *, cheaply: bool) -> tuple[str, ...]:
    """List the devices of a backend; importing it takes seconds, so the answer is cached.

    `cheaply`: PyTorch has another device than the CPU only on a Mac, or where a package adds one.
    """
    added = sorted(each.value for each in importlib.metadata.entry_points(group="torch.backends"))
    if cheaply and backend == REFERENCE.backend and not on_macos() and not added:
        return (REFERENCE.device,)
    if not is_installed(backend):
        return _listed(backend)  # which says what is missing
    library = importlib.metadata.version(LIBRARIES[backend])
    known = "-".join((backend, library, platform.machine(), platform.release(), *added))
    file = cache_directory() / "devices" / f"{known.replace('/', '_').replace(':', '_')}.json"
    facts = read_cached(file)
    if facts is None:
        facts = {"devices": _listed(backend)}
        write_cached(file, facts)
    return tuple(str(each) for each in facts["devices"])


_CHECK = "trm.planning.device_check"


def _listed(backend: str) -> tuple[str, ...]:
    try:
        return tuple(
            run_in_child(f"{_CHECK}:list_devices", {"backend": backend}, timeout_seconds=LISTING_SECONDS)
        )
    except ChildDied as death:
        raise LaptopError(
            f"The backend {backend} cannot be loaded: its process {death}",
            hint="Set plan.backend=pytorch.",
        ) from death


def check(planner: Planner, place: Place, timeout_seconds: float = CHECK_SECONDS) -> Verdict:
    """Return the verdict about a place, from the cache or by the check."""
    file = _verdict_file(planner, place)
    known = read_cached(file)
    if known is not None and {"problem", "tensor"} <= known.keys():
        return Verdict(*place, known["problem"], known["tensor"])
    planner.display.message(f"Checking {place} against PyTorch on the CPU, with steps of this recipe.")
    try:
        found: JsonObject | None = run_in_child(
            f"{_CHECK}:compare",
            {
                "config": planner.config.model_dump(mode="json"),
                "execution": asdict(execution_at(planner, place)),
            },
            environment=environment(_threads(planner)),
            timeout_seconds=timeout_seconds,
        )
    except LaptopError as error:  # such as memory that was short, or a device that is gone
        return Verdict(*place, str(error))
    except ChildDied as death:
        found = {"problem": f"the check {death}", "tensor": None}
        if not death.traceback_shown or death.may_be_out_of_memory:  # another time it may succeed
            return Verdict(*place, **found, timed_out=death.timed_out)
    verdict = Verdict(*place, **(found or {}))
    write_cached(file, {"problem": verdict.problem, "tensor": verdict.tensor})
    return verdict


def execution_at(planner: Planner, place: Place) -> Execution:
    return Execution(
        threads=_threads(planner),
        backend=place.backend,
        device=place.device,
        precision=_precision(planner, place),
        gradient_checkpointing=planner.config.plan.gradient_checkpointing or "none",
        optimizer_in_backward=planner.config.plan.optimizer_in_backward,
    )


def _precision(planner: Planner, place: Place) -> str:
    """Return what the recipe is computed in; where a measurement chooses, the more exact one."""
    wanted = planner.config.plan.precision or planner.config.model.forward_dtype
    return wanted if wanted == "bfloat16" and place.backend != REFERENCE.backend else "float32"


def _threads(planner: Planner) -> int:
    return planner.config.plan.threads or planner.hardware.cpu.compute_threads


def _verdict_file(planner: Planner, place: Place) -> Path:
    program = Program.of(planner.config, planner.data)
    # A driver belongs to the release of the system.
    how = [_CHECK_VERSION, platform.release(), asdict(execution_at(planner, place))]
    key = cache_key(program, planner.hardware, backend=place.backend, check=how)
    return cache_directory() / "checks" / f"{key}.json"


def _fastest(planner: Planner, places: list[Place]) -> tuple[Place, str]:
    """Measure every place with the probe that plans use, and return the fastest; the CPU if there is none."""
    measured = {place: rate_of(planner, place) for place in places}
    rates = {place: rate for place, rate in measured.items() if rate is not None}
    if not rates:
        return REFERENCE, "no step could be measured"
    readings = ", ".join(f"{rate:.3g} samples/s with {place}" for place, rate in rates.items())
    return max(rates, key=lambda place: rates[place]), f"measured {readings}"


def rate_of(planner: Planner, place: Place, timeout_seconds: float = PROBE_SECONDS) -> float | None:
    """Return the samples per second of the recipe at a place, or None if no step survives there."""
    there, _ = planner_at(planner, place).corrected()
    measured = replace(there, subject=str(place)).measurer.measure(there.execution(), timeout_seconds)
    return None if measured is None else measured.best_rate
