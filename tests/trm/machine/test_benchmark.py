"""`trm bench`: profiles, real small measurements, and the command."""

import json
import subprocess
from dataclasses import replace

import pytest
from sample_reports import make_report
from tiny import TRM, Recorder

from macbook_optimization.errors import MemoryBudgetError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.output_files import OutputFile
from macbook_optimization.training_config_adapter import PROFILES, Profile
from macbook_optimization.units import GIB
from trm.machine.benchmark import measure, random_batch, select_profiles, take_steps, workload_of
from trm.machine.benchmark_file import BENCHMARK
from trm.machine.benchmark_report import read_report, report_to_json, write_report
from trm.tasks.base import DataSpec

TINY = Profile("tiny", 1, 16, 2, 1, 2.0, 8, 2, 1, 500, 1)


def test_here_is_the_profile_of_this_machine_and_each_profile_is_measured_once():
    names = ["here", "32gb", "16gb", "32gb"]
    assert [profile.name for profile in select_profiles(names, 24 * GIB)] == ["16gb", "32gb"]


@pytest.mark.parametrize(("threads", "workers"), [(1, 1), (2, 2), (3, 1), (4, 2), (8, 2)])
def test_workers_divide_both_the_threads_and_the_micro_batch(threads, workers):
    assert workload_of(TINY, threads, timed_steps=1).workers == workers


def test_a_random_batch_contains_every_slot_and_no_padding():
    batch = random_batch(3, DataSpec(max_len=50, vocab_size=4, num_outputs=7))
    assert batch.slots.tolist() == [0, 1, 2]
    assert set(batch.inputs.flat) == {1, 2, 3}
    assert set(batch.labels.flat) == {1, 2, 3, 4, 5, 6}
    assert batch.fresh.all()


def test_every_timed_step_is_measured_and_reported():
    reported = []
    found = take_steps(workload_of(TINY, threads=1, timed_steps=2).model_dump(), reported.append)
    assert reported == [1, 2, 3]
    assert len(found["samples_per_second"]) == 2
    assert found["resident_peak_bytes"] >= found["resident_mean_bytes"] > 2**20
    assert found["product_rate"] > 1e7


def trm(*arguments, cwd):
    return subprocess.run([TRM, "bench", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [("--compare", "bad.json"), ("--compare", "missing.json"), ("--out", "nowhere/out.json")]
)
def test_the_command_refuses_files_before_it_measures(arguments, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    done = trm(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


@pytest.mark.slow
@pytest.mark.alone
def test_a_small_measurement_interleaves_profiles_and_starts_a_process_for_each():
    updates = []
    display = Recorder(lambda what, done: updates.append((what, done)))
    other = replace(TINY, name="other", hidden_size=32)
    found = measure([TINY, other], 2, HardwareDetector().detect(with_torch=False), display, timed_steps=2)
    order = list(dict.fromkeys(what for what, _ in updates))
    assert order == [f"repeat {number} of 2, {name}" for number in (1, 2) for name in ("tiny", "other")]
    assert updates[-1][1] == 2 * 2 * 3
    repeats = [repeat for results in found.profiles.values() for repeat in results.repeats]
    assert [repeat.first_of_command for repeat in repeats] == [True, False, False, False]
    for repeat in repeats:
        assert len(repeat.samples_per_second) == 2
        assert repeat.resident_peak_bytes >= repeat.resident_mean_bytes > 50 * 2**20
        assert 0 < repeat.cpu_percent <= 110
        assert repeat.start_seconds > 0.5
    assert report_to_json(found, None)["summary"]["other"]["first_start_seconds"] is None


@pytest.mark.slow
def test_a_profile_that_does_not_fit_is_refused_before_it_is_measured():
    hardware = HardwareDetector().detect(with_torch=False)
    small = replace(hardware.memory, total_memory=8 * GIB, available_memory=GIB)
    with pytest.raises(MemoryBudgetError, match=r"32gb profile needs about .* MiB; 1,024 MiB is free"):
        measure([PROFILES[2]], 1, replace(hardware, memory=small), Recorder())


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_measures_saves_and_compares(tmp_path):
    write_report(make_report([1000.0] * 60), OutputFile(tmp_path / "before.json", BENCHMARK))
    options = ("--profile", "8gb", "--repeats", 1, "--compare", "before.json", "--out", "now.json", "--json")
    done = trm(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    saved = read_report(tmp_path / "now.json").model_dump(mode="json")
    assert {key: printed[key] for key in saved} == saved
    assert printed["comparison"]["verdicts"]["8gb"]["verdict"] == "slower"  # 1 against 60 suffices
    assert any("brand" in warning for warning in printed["comparison"]["warnings"])
    assert 0 < printed["summary"]["8gb"]["share_of_product_peak"]["median"] < 1.5
