"""`trm selfcheck`: its checks, its limit of time, and a file in which nothing is personal."""

import getpass
import json
import os
import platform
import re
import subprocess
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tiny import TRM, Recorder

from macbook_optimization import macos_readers as macos
from macbook_optimization.children import ChildDied
from macbook_optimization.errors import DataError, RunError
from macbook_optimization.hardware_detection import HardwareDetector, macos_cpu, on_macos
from trm.machine import checks_hardware as hardware_checks
from trm.machine import checks_system as system_checks
from trm.machine import checks_training as training_checks
from trm.machine import selfcheck
from trm.machine.selfcheck import Check, Finding, failed, passed, skipped
from trm.planning.device_choice import REFERENCE, Place

RECORDED = Path(__file__).parents[2] / "macbook_optimization" / "recorded"
HARDWARE = HardwareDetector().detect(with_torch=False)
# (recorded output of sysctl, cores, threads)
MACS = [("m1_sysctl_hw.txt", "m1_sysctl_machdep_cpu.txt"), ("m3_max_sysctl.txt",), ("intel_16gb_sysctl.txt",)]


def results_of(*checks, **limits):
    return selfcheck.run_checks(checks, HARDWARE, Recorder(), **limits)


def raising(error):
    def check(here):
        raise error

    return Check("raises", check)


def test_checks_pass_fail_or_are_skipped_with_a_reason():
    results = results_of(
        Check("good", lambda here: passed(value=1)),
        Check("bad", lambda here: failed("it is wrong")),
        Check("absent", lambda here: skipped("there is none")),
    )
    assert [each.finding.status for each in results] == ["passed", "failed", "skipped"]
    assert not selfcheck.is_passed(results)
    assert selfcheck.is_passed([results[0], results[2]])
    text = selfcheck.format_results(results)
    assert "bad: failed: it is wrong" in text
    assert "good" not in text
    assert "1 passed, 1 failed, 1 skipped" in text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("no such thing"), "no such thing"),
        (ChildDied(-9, False, ""), "was killed by SIGKILL"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_goes_wrong_in_a_check_fails_it(error, words):
    (result,) = results_of(raising(error))
    assert result.finding.status == "failed"
    assert words in result.finding.reason


def test_checks_after_the_time_is_up_are_skipped():
    (result,) = results_of(raising(AssertionError()), max_seconds=0)
    assert result.finding == skipped("the time was up")


@pytest.mark.parametrize(
    "error", [ChildDied(-9, False, "", timed_out=True), RunError("A training took too long.")]
)
def test_a_check_that_the_end_of_the_time_interrupts_is_skipped(error):
    def late(here):
        time.sleep(here.seconds_left)
        raise error

    (result,) = results_of(Check("late", late), max_seconds=0.05)
    assert result.finding.status == "skipped"
    assert result.finding.reason.startswith("the time was up")


def examined(place):
    return training_checks._Examined(place)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        partial(training_checks.check_parity, examined(Place("pytorch", "mps"))),
        partial(training_checks.check_speed, examined(REFERENCE)),
        partial(training_checks.check_training, examined(REFERENCE)),
        training_checks.check_memory_prediction,
        training_checks.check_kill_and_resume,
    ],
)
def test_checks_that_train_are_skipped_when_their_time_ends(check, monkeypatch):
    """Not even the libraries are loaded by then."""
    monkeypatch.setattr(training_checks, "BUILD", {**training_checks.BUILD, "train": 8, "test": 4})
    (result,) = results_of(Check("training", check), max_seconds=0.5)
    assert result.finding.status == "skipped", result
    assert result.finding.reason.startswith("the time was up")


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        ([], "there are too few losses to compare: 0"),
        ([1.0], "there are too few losses to compare: 1"),
        ([1.0, 0.5], None),
        ([1.0, 9.0, 0.5], None),
        ([0.5, 1.0], "nothing was learned"),
        ([1.0, 1.0], "nothing was learned"),
    ],
)
def test_losses_show_that_something_was_learned(losses, problem):
    assert training_checks.problem_of(losses) == problem


def recorded_tool(*names):
    """Return a tool that prints recorded output, of which the checks use some lines."""
    text = "\n".join((RECORDED / name).read_text(encoding="utf-8") for name in names)
    return lambda *command: text


@pytest.mark.parametrize("names", MACS)
def test_the_cores_of_recorded_macs_agree_with_sysctl(names):
    tool = recorded_tool(*names)
    cpu = macos_cpu(macos.parse_sysctl(tool()))
    ours = {"cores": cpu.cores, "threads": cpu.threads, "brand": cpu.brand}
    found = hardware_checks.compare(ours, hardware_checks.cpu_of_tools(tool, macos_system=True))
    assert found.status == "passed"
    wrong = hardware_checks.compare({**ours, "cores": 3}, found.facts["tools"])
    assert wrong.status == "failed"
    assert "cores is 3, but the system's tools say" in wrong.reason


@pytest.mark.parametrize("names", MACS)
def test_the_memory_of_recorded_macs_is_read(names):
    tool = recorded_tool(*names)
    found = hardware_checks.memory_of_tools(tool, macos_system=True)["total_bytes"]
    assert (found is not None) == ("hw.memsize:" in tool()), "some recordings are of the processor alone"
    assert (found or 0) % 2**30 == 0


@pytest.mark.parametrize("name", ["m1_batt.txt", "intel_batt.txt", "desktop_batt.txt"])
def test_the_battery_is_read_in_two_ways(name):
    text = (RECORDED / name).read_text(encoding="utf-8")
    ours = {"on_battery": macos.power_source(text)[0]}
    assert hardware_checks.compare(ours, hardware_checks.battery_of_tools(text)).status == "passed"


@pytest.mark.skipif(on_macos(), reason="a Mac has a tool that reports the battery")
def test_a_battery_that_no_tool_reports_is_not_compared(monkeypatch):
    monkeypatch.setattr(
        psutil,
        "sensors_battery",
        lambda: SimpleNamespace(percent=50.0, secsleft=3600, power_plugged=False),
        raising=False,
    )
    (result,) = results_of(Check("battery", hardware_checks.check_battery))
    assert result.finding.status == "skipped"
    assert result.finding.reason == "no tool of the system reports this"
    assert result.finding.facts["read"] == {"on_battery": True}


def test_without_a_tool_nothing_is_compared():
    for read in (hardware_checks.cpu_of_tools, hardware_checks.memory_of_tools):
        for macos_system in (True, False):
            theirs = read(lambda *command: None, macos_system=macos_system)
            assert hardware_checks.compare({"cores": 1, "total_bytes": 1}, theirs).status == "skipped"


def test_the_hardware_checks_hold_on_this_machine():
    assert selfcheck.is_passed(results_of(*hardware_checks.hardware_checks()))


def test_files_are_written_through_to_the_medium():
    (result,) = results_of(Check("durable files", system_checks.check_durable_files))
    assert result.finding.status == "passed"
    assert result.finding.facts["method"] in ("fsync", "F_FULLFSYNC")


@pytest.mark.slow
def test_a_paused_process_does_not_count_the_pause():
    (result,) = results_of(Check("pauses", system_checks.check_pauses))
    assert result.finding.status == "passed", result


def personal_texts():
    """Return what identifies a user or a machine here."""
    node = f"{uuid.getnode():012x}"
    addresses = {
        each.address
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if len(each.address) > 6
    }
    names = {str(Path.home()), tempfile.gettempdir(), os.getcwd(), platform.node(), getpass.getuser()}
    return {*names, *addresses, ":".join(node[i : i + 2] for i in range(0, 12, 2))}


def found_in(text, words):
    return {each for each in words if re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", text)}


def test_names_and_addresses_do_not_reach_the_file():
    said = [f"cannot open {each}/file" for each in personal_texts()]
    finding = Finding("failed", "; ".join(said), {str(Path.home() / "x"): [{"ip": "10.1.2.3", "deep": said}]})
    result = selfcheck.Result("check", 1.0, finding)
    text = selfcheck.to_bytes(selfcheck.report_of([result], HARDWARE)).decode()
    assert found_in(text, personal_texts()) == set()
    assert "10.1.2.3" not in text
    assert json.loads(text)["checks"][0]["name"] == "check"


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_checks_this_machine_and_writes_one_file(tmp_path):
    """About a minute on two cores: it builds puzzles, measures a plan, and trains four times."""
    finished = subprocess.run(
        [TRM, "selfcheck", "--out", "found.json", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    text = (tmp_path / "found.json").read_text(encoding="utf-8")
    report = json.loads(text)
    assert report == json.loads(finished.stdout)
    assert report["passed"]
    by_name = {each["name"]: each for each in report["checks"]}
    for name in (
        "kill and resume",
        "memory prediction",
        "training with pytorch on cpu",
        "speed of pytorch on cpu",
    ):
        assert by_name[name]["status"] == "passed", by_name[name]
    assert all(each["reason"] for each in report["checks"] if each["status"] == "skipped")
    assert len(by_name["training with pytorch on cpu"]["facts"]["losses"]) >= 2
    assert found_in(text, personal_texts()) == set()
    assert "serial" not in text.lower()
    assert "kill and resume: passed" in finished.stderr
