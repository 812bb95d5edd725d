"""Samples of the machine, and the file that keeps them in bounded space."""

import os
import resource
import time

import pytest
from tiny import run_config

from trm.reports.history import History
from trm.reports.sampling import SampleFile, Sampler
from trm.runs.directory import RESOURCES, Run, begin


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    begin(run, run_config(tmp_path))
    return run


@pytest.fixture
def row():
    sampler = Sampler()
    sampler.begin()
    return sampler.sample()


def test_a_sample_has_every_core_and_this_process():
    sampler = Sampler()
    sampler.begin()
    sampler.watch(os.getpid())
    sampler.sample()
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:
        pass
    row = sampler.sample()
    assert len(row.cpu_percent) == os.cpu_count()
    assert row.process_cpu_percent > 0
    assert 2**20 < row.rss_bytes < row.total_bytes
    assert 0 < row.available_bytes <= row.total_bytes


def test_a_trainer_that_has_ended_is_not_reported(row):
    sampler = Sampler()
    sampler.begin()
    sampler.watch(2**22 + 5)  # no such process
    assert sampler.sample().rss_bytes is None
    assert row.process_cpu_percent is None


def test_nothing_is_written_before_the_run_exists(tmp_path, row):
    (tmp_path / "mail").mkdir()
    SampleFile(Run(tmp_path)).append(row)
    assert os.listdir(tmp_path) == ["mail"]


def test_a_long_run_keeps_a_bounded_file_whose_newest_samples_are_complete(run, row):
    one = len(str(row.to_json()))
    file = SampleFile(run, max_bytes=100 * one, kept_rows=20)
    times = []
    for _ in range(500):
        file.append(row)
        times.append(run.last_row(RESOURCES)["time"])
    assert (run.path / RESOURCES).stat().st_size <= 101 * one
    kept = [each["time"] for each in run.rows(RESOURCES)]
    assert kept == sorted(set(kept))
    assert kept[-20:] == times[-20:]
    assert kept[0] == times[0]


def test_a_reader_counts_no_sample_twice_when_the_file_is_thinned(run, row):
    file = SampleFile(run, max_bytes=20 * len(str(row.to_json())), kept_rows=5)
    follower, history = run.follow(), History()
    for _ in range(60):
        file.append(row)
        history.add(follower.read())
    assert len(history.recent_resources) == 60


def test_a_full_disk_loses_samples_and_nothing_else(run, row):
    file = SampleFile(run)
    file.append(row)
    size = (run.path / RESOURCES).stat().st_size
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        file.append(row)
        file.append(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(run.rows(RESOURCES)) == 1
    file.append(row)
    assert [each["total_bytes"] for each in run.rows(RESOURCES)] == 2 * [row.total_bytes]


def test_something_else_in_the_place_of_the_file_loses_samples(run, row):
    (run.path / RESOURCES).mkdir()
    SampleFile(run).append(row)
    assert os.listdir(run.path / RESOURCES) == []
