"""`trm selfcheck`: checks that need the real machine, within 15 minutes, and one file with the results.

Every check passes, fails, or is skipped for a reason that it gives. The file is meant to be attached to a
report, so the names of the user, the machine and its directories are removed from it, and nothing reads a
serial number or a network address.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from macbook_optimization.children import ChildDied
from macbook_optimization.errors import LaptopError
from macbook_optimization.hardware_detection import HardwareSpecs
from macbook_optimization.json_types import JsonObject
from trm.display import Display
from trm.planning.cache import CACHE_VARIABLE, versions
from trm.planning.device_choice import installed_backends

SCHEMA_VERSION = 1
KIND = "trm selfcheck"
MAX_SECONDS = 15 * 60.0
TIME_IS_UP = "the time was up"
Status = Literal["passed", "failed", "skipped"]
# Of network hardware, and of IPv4 and IPv6.
_ADDRESS = re.compile(
    r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b|\b\d{1,3}(?:\.\d{1,3}){3}\b"
    r"|(?<![\w:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?(?![\w:])"
)
_PERSONAL_DIRECTORY = re.compile(r"/(?:Users|Volumes|home)/[^/'\"\n]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    reason: str | None = None  # why it failed or was skipped
    facts: JsonObject = field(default_factory=dict)


def passed(**facts: Any) -> Finding:
    return Finding("passed", None, facts)


def failed(reason: str, **facts: Any) -> Finding:
    return Finding("failed", reason, facts)


def skipped(reason: str, **facts: Any) -> Finding:
    return Finding("skipped", reason, facts)


class Surroundings(NamedTuple):
    """The material that checks share."""

    hardware: HardwareSpecs
    directory: Path  # for files of the checks; removed at the end
    display: Display
    deadline: float  # of `time.monotonic`

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def at_most(self, seconds: float) -> float:
        """Return how long a part of a check may take: no longer than the time of all checks lasts."""
        return min(seconds, self.seconds_left)


class Check(NamedTuple):
    name: str
    run: Callable[[Surroundings], Finding]


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    seconds: float
    finding: Finding

    def __str__(self) -> str:
        why = "" if self.finding.reason is None else f": {self.finding.reason}"
        return f"{self.name}: {self.finding.status}{why} ({self.seconds:.1f} s)"

    def to_json(self) -> JsonObject:
        return {"name": self.name, "seconds": round(self.seconds, 2), **asdict(self.finding)}


def run_checks(
    checks: Sequence[Check], hardware: HardwareSpecs, display: Display, max_seconds: float = MAX_SECONDS
) -> list[Result]:
    """Run one check after the other; those that begin after the time is up are skipped."""
    results = []
    with tempfile.TemporaryDirectory(prefix="trm-selfcheck-") as directory, _own_cache(directory):
        here = Surroundings(hardware, Path(directory), display, time.monotonic() + max_seconds)
        for number, check in enumerate(checks):
            display.status(f"Check {number + 1} of {len(checks)}: {check.name}")
            results.append(_run(check, here))
            display.message(str(results[-1]))
    return results


@contextmanager
def _own_cache(directory: str) -> Iterator[None]:
    """Measure everything anew, and leave nothing behind."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(Path(directory) / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before


def _run(check: Check, here: Surroundings) -> Result:
    started = time.monotonic()
    if here.seconds_left <= 0:
        return Result(check.name, 0.0, skipped(TIME_IS_UP))
    try:
        finding = check.run(here)
    except LaptopError as error:
        finding = _interrupted(str(error), here)
    except ChildDied as death:
        finding = _interrupted(f"a process {death}", here)
    except OSError as error:
        finding = _interrupted(error.strerror or type(error).__name__, here)
    return Result(check.name, time.monotonic() - started, finding)


def _interrupted(reason: str, here: Surroundings) -> Finding:
    """Return the result of a check that an error ended: after the time is up, it is no finding."""
    return failed(reason) if here.seconds_left > 0 else skipped(f"{TIME_IS_UP}: {reason}")


def is_passed(results: Sequence[Result]) -> bool:
    return all(each.finding.status != "failed" for each in results)


def report_of(results: Sequence[Result], hardware: HardwareSpecs) -> JsonObject:
    """Return what the file contains, without anything personal."""
    cpu = hardware.cpu
    report: JsonObject = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "passed": is_passed(results),
        "machine": {
            "system": platform.system(),
            "release": platform.release(),
            "brand": cpu.brand,
            "architecture": cpu.architecture,
            "cores": cpu.cores,
            "threads": cpu.threads,
            "memory_bytes": hardware.memory.total_memory,
        },
        "versions": {**_versions(), "macbook-trm": version("macbook-trm")},
        "checks": [each.to_json() for each in results],
    }
    return without_names(report)


def _versions() -> dict[str, str]:
    """Return the versions of every installed backend."""
    return {name: each for backend in installed_backends() for name, each in versions(backend).items()}


def without_names(report: JsonObject) -> JsonObject:
    """Replace the names of the user, the machine and its directories, and network addresses."""
    clean = partial(_without, names=personal_names())
    cleaned: JsonObject = _map_text(report, clean)
    return cleaned


def personal_names() -> dict[str, str]:
    """Return what must not be in the file, longest first, and what replaces it."""
    names = {
        str(Path.home()): "~",
        os.path.realpath(Path.home()): "~",
        os.getcwd(): "(working directory)",
        tempfile.gettempdir(): "(temporary directory)",
        os.path.realpath(tempfile.gettempdir()): "(temporary directory)",
        sys.prefix: "(Python)",
        sys.base_prefix: "(Python)",
        str(Path(__file__).parents[3]): "(program)",
        platform.node(): "(machine)",
        platform.node().partition(".")[0]: "(machine)",
        _user(): "(user)",
    }
    known = {name: text for name, text in names.items() if len(name) > 1}
    return dict(sorted(known.items(), key=lambda item: -len(item[0])))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a process without a name, as in some containers
        return ""


def _without(text: str, names: dict[str, str]) -> str:
    for name, replacement in names.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", replacement, text)
    return _ADDRESS.sub("(address)", _PERSONAL_DIRECTORY.sub("(directory)", text))


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_text(each, change) for each in value]
    if isinstance(value, dict):
        return {change(key): _map_text(each, change) for key, each in value.items()}
    return value


def format_results(results: Sequence[Result]) -> str:
    """Return what failed, and a summary: every result was shown when it was known."""
    failures = [str(each) for each in results if each.finding.status == "failed"]
    counts = {status: sum(each.finding.status == status for each in results) for status in _STATUSES}
    seconds = sum(each.seconds for each in results)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join([*failures, f"{summary} in {seconds:.0f} s."])


_STATUSES: tuple[Status, ...] = ("passed", "failed", "skipped")


def to_bytes(report: JsonObject) -> bytes:
    return (json.dumps(report, indent=2) + "\n").encode()


def with_facts(finding: Finding, **facts: Any) -> Finding:
    return replace(finding, facts={**finding.facts, **facts})
