"""What watches a run beside the trainer survives a machine that refuses it files for a while."""

import errno
import os
import resource
import sys
import time

import pytest
from recorded import recorded_run
from tiny import Recorder

from trm.reports.monitor import RunMonitor
from trm.runs.directory import RESOURCES


def until(condition, seconds=10.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def monitor(tmp_path):
    run = recorded_run(tmp_path / "run")
    made = RunMonitor(run, run.config, Recorder())
    made.start_monitoring(interval=0.01)
    yield made
    made.stop_monitoring()


@pytest.mark.skipif(sys.platform != "linux", reason="limits the open files of this process")
def test_a_shortage_of_open_files_costs_samples_and_is_said_once(monitor):
    def size():
        return os.path.getsize(monitor.view.run.path / RESOURCES)

    begin = size()
    until(lambda: size() > begin)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        until(lambda: monitor.display.messages)
        time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (message,) = monitor.display.messages
    assert os.strerror(errno.EMFILE) in message
    assert "Training continues. Raise the limit of open files" in message
    begin = size()
    until(lambda: size() > begin)


def test_the_view_is_read_while_sampling_fails(monitor):
    def refuse():
        raise OSError(errno.EIO, "Input/output error")

    until(lambda: monitor.view.history.step == 40)
    monitor.sampler.sample = refuse
    until(lambda: monitor.display.messages)
    assert "Input/output error" in monitor.display.messages[0]
    monitor.view.history.recent.clear()
    monitor.view.run.append("metrics.jsonl", {"kind": "train", "step": 41})
    until(lambda: monitor.view.history.step == 41)
