"""Recordings of steps: every thread that computes is in them, and they change no result."""

import json

import pytest
import torch
from tiny import make_batch, make_learner

from trm.backends.base import StepSettings
from trm.backends.pytorch.profiling import AllThreadsRecorder, EachThreadRecorder, recorder
from trm.training.profile_summary import PHASES, allocated_bytes

pytestmark = pytest.mark.slow

SETTINGS = StepSettings(step=2, cycles=2, learning_rate=1e-3, puzzle_emb_lr=1e-3)


def can_record_all_threads():
    try:
        torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return False
    return True


RECORDERS = [
    EachThreadRecorder,
    pytest.param(
        AllThreadsRecorder,
        marks=pytest.mark.skipif(not can_record_all_threads(), reason="torch 2.2 has no such recording"),
    ),
]


def take_step(learner):
    return learner.step(make_batch(), SETTINGS, lambda done: 2)


def record(kind, learner, trace):
    recording = kind(learner)
    recording.start()
    with recording.phase("step"):
        with recording.phase("data"):
            pass
        take_step(learner)
    return recording.stop(trace)


@pytest.mark.parametrize("kind", RECORDERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_recording_has_the_phases_of_every_thread_that_computes(tmp_path, kind, workers):
    learner = make_learner(threads=2, workers=workers)
    take_step(learner)
    found = record(kind, learner, tmp_path / "trace.json")
    threads = {phase: {span.thread for span in found.spans if span.name == phase} for phase in PHASES}
    assert len(threads["forward"] | threads["backward"]) == workers
    assert len(threads["optimizer"]) == len(threads["data"]) == 1
    products = [span for span in found.spans if span.name == "aten::mm"]
    assert {span.thread for span in products} >= threads["forward"]
    assert all(span.start <= span.end for span in found.spans)


@pytest.mark.parametrize("kind", RECORDERS)
def test_a_trace_is_one_that_perfetto_opens(tmp_path, kind):
    learner = make_learner(threads=2, workers=2)
    take_step(learner)
    record(kind, learner, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in complete:
        assert {"name", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["dur"] >= 0
    names = {event["name"] for event in complete}
    assert {"step", *PHASES, "aten::mm"} <= names
    assert len({event["tid"] for event in complete if event["name"] == "forward"}) == 2


def test_a_trace_names_its_threads_and_has_a_curve_of_allocated_memory(tmp_path):
    learner = make_learner(threads=2, workers=2)
    record(EachThreadRecorder, learner, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert sum(name == "training loop" for name in names) == 1
    assert sum(name.startswith("worker ") for name in names) == 2
    curve = [event for event in events if event["ph"] == "C"]
    assert max(event["args"]["MiB"] for event in curve) > 0


def test_allocations_are_recorded_by_phase():
    learner = make_learner(threads=1, workers=1)
    take_step(learner)
    most = allocated_bytes(record(EachThreadRecorder, learner, None))
    assert most["forward"] > 0
    assert most["backward"] > most["optimizer"]


@pytest.mark.parametrize("kind", RECORDERS)
def test_recording_changes_no_bit(kind):
    plain, recorded = (make_learner(threads=2, workers=2) for _ in range(2))
    for learner in (plain, recorded):
        take_step(learner)
    take_step(plain)
    record(kind, recorded, None)
    take_step(plain)
    take_step(recorded)
    for group, tensors in plain.state().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, recorded.state()[group][name]), name


def test_a_recording_without_a_trace_can_be_followed_by_another(tmp_path):
    learner = make_learner(threads=1, workers=1)
    for _ in range(2):
        assert record(type(recorder(learner)), learner, None).spans
    assert not list(tmp_path.iterdir())
