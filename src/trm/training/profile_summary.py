"""A summary of some recorded steps: time by phase and by operation, and memory.

An operation's time is its own: the operations inside it are not counted twice. Threads overlap, so their
seconds together may exceed those that passed; the times of the phases are those that passed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from macbook_optimization.json_types import JsonObject
from macbook_optimization.terminal_text import align
from macbook_optimization.units import MIB, counted
from trm.backends.base import Allocation, Recording, Span
from trm.plan import Plan

STEP = "step"  # the span around each recorded step
DATA = "data"
PHASES = (DATA, "forward", "backward", "optimizer")
OTHER = "other"  # such as adding up the gradients of micro-batches
PYTHON = "(Python, and waiting for other threads)"  # the time of a phase that no operation explains
MAX_SHOWN = 30  # operations in the text
_MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True)
class Operation:
    """All calls of one operation in one phase."""

    phase: str
    name: str
    calls: int
    seconds: float  # of all threads together, without the operations inside


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory of the process at one moment."""

    when: str
    resident_bytes: int
    peak_bytes: int  # until then


@dataclass(frozen=True, slots=True)
class Profile:
    """A few recorded steps, per step on average where nothing else is said."""

    last_step: int
    num_steps: int
    step_seconds: float
    step_seconds_before: float  # without the recording
    threads: int  # that computed something
    phase_seconds: Mapping[str, float]  # that passed
    operations: Sequence[Operation]  # of all recorded steps, the slowest first
    allocated_bytes: Mapping[str, int]  # most during each phase, above the beginning of the recording
    memory: Sequence[MemoryReading]

    def to_json(self) -> JsonObject:
        return asdict(self)


def operations(spans: Iterable[Span]) -> list[Operation]:
    """Return the own time of every operation by phase, the slowest first."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for phase, name, own_time in _own_times(spans):
        if name == STEP:
            continue
        key = (phase, PYTHON if name in PHASES else name)
        seconds[key] += own_time * _MICROSECOND
        calls[key] += 1
    found = [Operation(*key, calls[key], spent) for key, spent in seconds.items()]
    return sorted(found, key=lambda each: -each.seconds)


def _own_times(spans: Iterable[Span]) -> Iterator[tuple[str, str, float]]:
    """Yield phase, name and own time of every span. Spans of one thread are nested."""
    by_thread: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    for of_thread in by_thread.values():
        around: list[tuple[Span, str, list[float]]] = []  # span, its phase, times of the spans inside
        for span in sorted(of_thread, key=lambda each: (each.start, -each.end)):
            while around and around[-1][0].end < span.end:
                yield _closed(*around.pop())
            if around:
                around[-1][2].append(span.end - span.start)
            outer = around[-1][1] if around else OTHER
            around.append((span, span.name if span.name in PHASES else outer, []))
        while around:
            yield _closed(*around.pop())


def _closed(span: Span, phase: str, inside: list[float]) -> tuple[str, str, float]:
    return phase, span.name, max(0.0, span.end - span.start - sum(inside))


def allocated_bytes(recording: Recording) -> dict[str, int]:
    """Return the most memory that was allocated while any thread was in each phase."""
    points: list[tuple[float, int, str | Allocation]] = []
    for span in recording.spans:
        if span.name in PHASES:
            points.append((span.start, 1, span.name))
            points.append((span.end, -1, span.name))
    points += [(each.time, 0, each) for each in recording.allocations]
    active: Counter[str] = Counter()
    most: dict[str, int] = {}
    allocated = 0
    for _, change, what in sorted(points, key=lambda point: point[0]):
        if isinstance(what, Allocation):
            allocated += what.num_bytes
        else:
            active[what] += change
        for phase in (name for name, threads in active.items() if threads > 0):
            most[phase] = max(most.get(phase, allocated), allocated)
    return {phase: most[phase] for phase in PHASES if phase in most}


def mean_seconds(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of every phase that a step reports."""
    names = [name for name in PHASES if any(name in seconds for seconds in results)]
    return {name: fmean(seconds.get(name, 0.0) for seconds in results) for name in names}


def describe(profile: Profile, plan: Plan) -> str:
    """Return the profile as text: phases, operations, memory."""
    first = profile.last_step - profile.num_steps + 1
    which = f"steps {first} to {profile.last_step}" if profile.num_steps > 1 else f"step {profile.last_step}"
    how = plan.execution
    lines = [
        f"Profile of {which}",
        f"{1000 * profile.step_seconds:.1f} ms per step; {1000 * profile.step_seconds_before:.1f} ms before, "
        "without the recording",
        f"{plan.accumulation_steps} x {plan.micro_batch_size} examples, {counted(how.threads, 'thread')} in "
        f"{counted(how.workers, 'worker')}, {how.precision}; {counted(profile.threads, 'thread')} recorded",
        "",
        *align(_phase_table(profile)),
        "",
        "Own time of each operation, on all threads together:",
        *align(_operation_table(profile)),
        "",
        *align(_memory_table(profile)),
        "The recording itself takes some of this memory, more with every step.",
        "",
        "trace.json opens in https://ui.perfetto.dev and chrome://tracing.",
    ]
    return "\n".join(lines) + "\n"


def _phase_table(profile: Profile) -> list[list[str]]:
    rows = [["phase", "ms per step", "share", "allocated at most"]]
    total = sum(profile.phase_seconds.values())
    for phase, seconds in profile.phase_seconds.items():
        allocated = profile.allocated_bytes.get(phase)
        shown = "not reported" if allocated is None else f"{allocated / MIB:+.1f} MiB"
        rows.append([phase, f"{1000 * seconds:.2f}", f"{seconds / max(total, 1e-9):.1%}", shown])
    return rows


def _operation_table(profile: Profile) -> list[list[str]]:
    rows = [["phase", "ms per step", "share", "calls per step", "operation"]]
    total = sum(each.seconds for each in profile.operations)
    for each in profile.operations[:MAX_SHOWN]:
        rows.append(
            [
                each.phase,
                f"{1000 * each.seconds / profile.num_steps:.2f}",
                f"{each.seconds / max(total, 1e-9):.1%}",
                f"{each.calls / profile.num_steps:.0f}",
                each.name,
            ]
        )
    rest = profile.operations[MAX_SHOWN:]
    if rest:
        seconds = sum(each.seconds for each in rest)
        calls = sum(each.calls for each in rest)
        share = f"{seconds / max(total, 1e-9):.1%}"
        milliseconds = f"{1000 * seconds / profile.num_steps:.2f}"
        rows.append(["", milliseconds, share, f"{calls / profile.num_steps:.0f}", f"{len(rest)} others"])
    return rows


def _memory_table(profile: Profile) -> list[list[str]]:
    rows = [["memory", "resident", "peak until then"]]
    for each in profile.memory:
        rows.append([each.when, f"{each.resident_bytes / MIB:.1f} MiB", f"{each.peak_bytes / MIB:.1f} MiB"])
    return rows
