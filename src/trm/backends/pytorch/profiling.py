"""Recording what every thread does during training steps, for a profile.

`torch.profiler` follows the thread that started it, but worker threads do the computing; asked for all
threads, it reports no allocations (torch 2.13). So every thread records itself with the profiler that torch
had before. It measures with one clock on all threads, reports allocations, and exists in torch 2.2 to 2.13.
A version without it gets a recording by `torch.profiler`, without allocations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB
from trm.backends.base import Allocation, Learner, Recording, Span, StepRecorder
from trm.backends.pytorch.learner import TorchLearner, not_recorded

_MEMORY = "[memory]"  # what torch calls an allocation among the operations
_OWN = "profiler::"  # operations of the profiler itself
_MAX_CURVE_POINTS = 5000


def recorder(learner: Learner) -> StepRecorder:
    """Return what records the steps of a learner on all of its threads."""
    assert isinstance(learner, TorchLearner)
    has_earlier_profiler = hasattr(torch.autograd, "_enable_profiler_legacy")
    return EachThreadRecorder(learner) if has_earlier_profiler else AllThreadsRecorder(learner)


class EachThreadRecorder:
    """A recording per thread, by the earlier profiler of torch."""

    def __init__(self, learner: TorchLearner) -> None:
        self.learner = learner
        self.workers = learner.workers

    def start(self) -> None:
        self.workers = self.learner.workers
        _start_on_this_thread()
        self.workers.on_each_thread(_start_on_this_thread)
        self.learner.phase = record_function

    def phase(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)

    def stop(self, trace: Path | None) -> Recording:
        self.learner.phase = not_recorded
        threads = [_stop_on_this_thread(), *self.workers.on_each_thread(_stop_on_this_thread)]
        records = list(chain.from_iterable(threads))
        began = next(each for each in chain.from_iterable(records) if each.name() == "__start_profile")
        spans: list[Span] = []
        allocations: list[Allocation] = []
        for of_thread in records:
            _read_records(of_thread, began, spans, allocations)
        if trace is not None:
            trace.write_text(json.dumps(trace_of(Recording(spans, allocations))), encoding="utf-8")
        return Recording(spans, allocations)


def _start_on_this_thread() -> None:
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined]


def _stop_on_this_thread() -> Sequence[Sequence[Any]]:
    stopped: Sequence[Sequence[Any]] = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
    return stopped


def _read_records(
    records: Iterable[Any], began: Any, spans: list[Span], allocations: list[Allocation]
) -> None:
    """Join the beginnings and ends of operations on one thread."""
    open_records: dict[tuple[int, int], Any] = {}
    for record in records:
        key = record.handle(), record.node_id()
        if record.kind() == "push":
            open_records[key] = record
        elif record.kind() == "memory_alloc":
            allocations.append(Allocation(began.cpu_elapsed_us(record), record.cpu_memory_usage()))
        elif record.kind() == "pop" and key in open_records:
            first = open_records.pop(key)
            if not first.name().startswith(_OWN):
                start = began.cpu_elapsed_us(first)
                spans.append(Span(first.name(), first.thread_id(), start, began.cpu_elapsed_us(record)))


def trace_of(recording: Recording) -> JsonObject:
    """Return a recording in the format of chrome://tracing, with a curve of the allocated memory."""
    process = os.getpid()
    threads = sorted({span.thread for span in recording.spans})
    main = next((span.thread for span in recording.spans if span.name == "step"), None)
    events: list[JsonObject] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": "trm"}}]
    for thread in threads:
        name = "training loop" if thread == main else f"worker {thread}"
        events.append(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        )
    for span in recording.spans:
        place = {"pid": process, "tid": span.thread, "ts": span.start, "dur": span.end - span.start}
        events.append({"ph": "X", "cat": "cpu_op", "name": span.name, **place})
    for time, allocated in _allocated(recording.allocations):
        curve = {"name": "allocated", "pid": process, "ts": time, "args": {"MiB": allocated / MIB}}
        events.append({"ph": "C", **curve})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _allocated(allocations: Sequence[Allocation]) -> Iterator[tuple[float, int]]:
    """Yield the memory that is allocated above that at the beginning, at a bounded number of times."""
    every = max(1, len(allocations) // _MAX_CURVE_POINTS)
    allocated = 0
    for number, each in enumerate(sorted(allocations)):
        allocated += each.num_bytes
        if number % every == 0:
            yield each.time, allocated


class AllThreadsRecorder:
    """One recording of all threads, by `torch.profiler` of a newer version than 2.2."""

    def __init__(self, learner: TorchLearner) -> None:
        self.learner = learner
        self.profile: Any = None

    def start(self) -> None:
        self.profile = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self.profile.start()
        self.learner.phase = record_function

    def phase(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)

    def stop(self, trace: Path | None) -> Recording:
        self.learner.phase = not_recorded
        self.profile.stop()
        if trace is not None:
            self.profile.export_chrome_trace(str(trace))
        spans = []
        allocations = []
        for event in self.profile.profiler.kineto_results.events():
            start = event.start_ns() / 1000
            if event.name() == _MEMORY:
                allocations.append(Allocation(start, event.nbytes()))
            elif not event.name().startswith(_OWN):
                end = start + event.duration_ns() / 1000
                spans.append(Span(event.name(), event.start_thread_id(), start, end))
        self.profile = None
        return Recording(spans, allocations)
