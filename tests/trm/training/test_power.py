"""How a run reacts to heat and batteries: it saves, rests or waits, and learns the same."""

import os
import signal
import threading
import time
from collections import Counter

import numpy as np
import psutil
import pytest
import torch
from tiny import Recorder, plan_of, run_config, sudoku_dataset

from macbook_optimization.hardware_detection import PowerSpecs
from macbook_optimization.keep_awake import KeepAwake
from macbook_optimization.resource_monitoring import PowerMonitor, RunningClock, ThermalState
from trm.backends.base import StepResult
from trm.runs.directory import EVENTS, Run
from trm.training import resources
from trm.training.log import RunLog
from trm.training.loop import Limits
from trm.training.power import PowerControl
from trm.training.resources import StepTook
from trm.training.start import train

COOL = ThermalState(False, 60.0, None, None)
HOT = ThermalState(True, 101.0, None, None)
MAINS = PowerSpecs(False, 80.0)
BATTERY = PowerSpecs(True, 80.0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def events(path, *names):
    return [row for row in Run(path).rows(EVENTS) if row["event"] in names]


class Sensor(PowerMonitor):
    """A stand-in whose readings the test sets; nothing is sampled."""

    def __init__(self, power=MAINS, thermal=COOL):
        super().__init__()
        self.power = power
        self.thermal = thermal

    def sample(self):
        pass


def control(tmp_path, dataset, sensor, **limits):
    """Return a control that reacts at once: a break takes no time, and a minute has passed."""
    config = run_config(dataset, limits={"cooling_delay_seconds": 0.0, **limits})
    made = PowerControl(config, sensor, RunLog(Run(tmp_path), Recorder()), RunningClock())
    made.HEAT_INTERVAL_SECONDS = made.RECOVERY_SECONDS = 0.0
    return made


def react(control, times=1):
    """React after some steps and return how often the state was saved."""
    saves = []

    def save():
        saves.append(True)
        return True

    for step in range(times):
        control.react(step, save, lambda: None)
    return len(saves)


# Battery


def test_a_low_battery_causes_a_save_each_time_that_it_falls(tmp_path, dataset):
    made = control(tmp_path, dataset, Sensor())
    seen = []
    readings = [(11, True), (9, True), (9, True), (8, True), (8, False), (9, True), (None, None)]
    for percent, on_battery in readings:
        fraction = percent and percent + 0.3  # Linux reports fractions
        made.monitor.power = PowerSpecs(on_battery, fraction)
        seen.append(made.battery_fell())
    assert seen == [None, 9, None, 8, None, 9, None]


def test_slow_on_battery_rests_until_mains_power_is_back(tmp_path, dataset):
    made = control(tmp_path, dataset, Sensor(), on_battery="slow", on_battery_factor=0.4)
    shares = []
    for power in (MAINS, BATTERY, BATTERY, PowerSpecs(None, None), None):
        made.monitor.power = power
        react(made)
        shares.append(made.duty.share)
    assert shares == [1, 0.4, 0.4, 1, 1]
    changes = events(tmp_path, "duty cycle")
    assert [(row["before"], row["after"], row["reason"]) for row in changes] == [
        (1.0, 0.4, "the machine is on battery"),
        (0.4, 1.0, "mains power is back"),
    ]
    assert made.log.display.messages == [
        "Training rests 60% of the time: the machine is on battery.",
        "Training computes all the time again: mains power is back.",
    ]


@pytest.mark.parametrize("on_battery", ["continue", "slow"])
def test_only_pause_waits_for_mains_power(tmp_path, dataset, on_battery):
    made = control(tmp_path, dataset, Sensor(BATTERY), on_battery=on_battery)
    assert not made.waits(3, lambda: None)


class Cable(Sensor):
    """On battery while the test has unplugged it."""

    unplugged = threading.Event()

    @property
    def power(self):
        return BATTERY if self.unplugged.is_set() else MAINS

    @power.setter
    def power(self, value):
        pass


@pytest.fixture
def unplugged(monkeypatch):
    monkeypatch.setattr(resources, "PowerMonitor", Cable)
    monkeypatch.setattr(PowerControl, "WAIT_SECONDS", 0.05)
    yield Cable.unplugged
    Cable.unplugged.clear()


def pausing(dataset, **changes):
    return run_config(dataset, limits={"on_battery": "pause"}, training__deterministic=True, **changes)


def tensors(path):
    return Run(path).checkpoints().newest_intact().load_all()


def assert_same_weights(one, other):
    for group, found in tensors(one).items():
        for name, tensor in found.items():
            assert torch.equal(tensor, tensors(other)[group][name]), f"{group} {name}"


@pytest.mark.slow
def test_a_pause_on_battery_ends_with_mains_power_and_changes_nothing(tmp_path, dataset, unplugged):
    """The state is saved, the display says that it waits, and the time of the pause is not training time."""
    config = pausing(dataset)
    saved = []

    def react(facts, done):
        if facts.startswith("loss") and done == 5:
            unplugged.set()
        if facts == "waiting for mains power":
            saved.append(Run(tmp_path / "paused").checkpoints().newest_step())
            if len(saved) == 3:
                time.sleep(1.0)
                unplugged.clear()

    display = Recorder(react)
    started = time.monotonic()
    outcome = train(config, tmp_path / "paused", plan_of(config), Limits(), display)
    assert outcome.reason == "max_steps"
    assert outcome.seconds < time.monotonic() - started - 1.0
    assert saved == [5, 5, 5]
    (paused,) = events(tmp_path / "paused", "paused")
    (continued,) = events(tmp_path / "paused", "continued")
    assert paused["reason"] == "the machine is on battery"
    assert (paused["step"], continued["step"]) == (5, 5)
    assert continued["waited_seconds"] > 1.0
    assert "Mains power is back: training continues." in display.messages
    rows = [row for row in Run(tmp_path / "paused").rows() if row["kind"] == "train"]
    assert sum(row["spent"].get("waiting", 0.0) for row in rows) > 0.1
    train(config, tmp_path / "plugged", plan_of(config), Limits(), Recorder())
    assert_same_weights(tmp_path / "paused", tmp_path / "plugged")


def test_a_time_limit_ends_a_pause(tmp_path, dataset, unplugged):
    config = pausing(dataset)
    unplugged.set()
    outcome = train(config, tmp_path / "run", plan_of(config), Limits(max_seconds=0.5), Recorder())
    assert (outcome.reason, outcome.step) == ("limit", 0)
    assert outcome.seconds < 0.45, "waiting is not training"
    assert events(tmp_path / "run", "continued") == []


def test_a_request_to_stop_ends_a_pause_and_the_run_can_be_resumed(tmp_path, dataset, unplugged):
    config = pausing(dataset)
    unplugged.set()

    def stop(facts, done):
        os.kill(os.getpid(), signal.SIGINT)

    outcome = train(config, tmp_path / "run", plan_of(config), Limits(), Recorder(stop))
    assert (outcome.reason, outcome.step) == ("interrupted", 0)
    unplugged.clear()
    assert train(config, tmp_path / "run", plan_of(config), Limits(), Recorder()).reason == "max_steps"


def test_training_that_has_ended_does_not_wait(tmp_path, dataset, unplugged):
    config = pausing(dataset, training__max_steps=2)

    def unplug(facts, done):
        if facts.startswith("loss") and done == 2:
            unplugged.set()

    assert train(config, tmp_path / "run", plan_of(config), Limits(), Recorder(unplug)).step == 2
    assert events(tmp_path / "run", "paused") == []


class Tool(KeepAwake):
    """Records when it is held, in place of a process."""

    def __init__(self):
        self.calls = []

    def hold(self):
        self.calls.append("hold")

    def release(self):
        self.calls.append("release")


def test_a_machine_that_only_waits_may_sleep(tmp_path, dataset):
    made = control(tmp_path, dataset, Sensor(BATTERY), on_battery="pause")
    made.awake = Tool()
    assert made.waits(3, lambda: None)
    assert made.awake.calls == ["release"]
    made.monitor.power = MAINS
    assert not made.waits(3, lambda: None)
    assert made.awake.calls == ["release", "hold"]


# Heat


@pytest.mark.parametrize(
    ("limit", "thermal", "hot"),
    [
        (None, ThermalState(True, 60.0, None, None), True),
        (None, ThermalState(False, 99.0, None, None), False),
        (None, ThermalState(False, 100.0, None, None, is_at_limit=True), True),
        (85.0, ThermalState(None, 86.0, None, None), True),
        (85.0, ThermalState(None, 84.0, None, None), False),
        (85.0, ThermalState(None, None, "nominal", None), False),
        (85.0, ThermalState(True, None, "heavy", None), True),
        (85.0, ThermalState(True, 60.0, None, None), True),
        (None, None, False),
    ],
)
def test_too_hot_is_above_a_limit_or_throttled_by_the_system(tmp_path, dataset, limit, thermal, hot):
    sensor = Sensor(thermal=thermal)
    made = control(tmp_path, dataset, sensor, thermal_throttle_threshold=limit)
    assert (made.too_hot() is not None) == hot
    unmonitored = {"thermal_throttle_threshold": limit, "enable_thermal_monitoring": False}
    assert control(tmp_path, dataset, sensor, **unmonitored).too_hot() is None


def test_heat_lowers_the_share_of_the_time_step_by_step_and_cooling_raises_it(tmp_path, dataset):
    made = control(tmp_path, dataset, Sensor(thermal=HOT))
    shares = []
    for thermal in [HOT] * 7 + [COOL] * 7:
        made.monitor.thermal = thermal
        react(made)
        shares.append(round(made.duty.share, 3))
    assert shares == [0.75, 0.562, 0.422, 0.316, 0.25, 0.25, 0.25, 0.316, 0.422, 0.562, 0.75, 1, 1, 1]
    changes = events(tmp_path, "duty cycle")
    assert changes[0]["reason"] == "the system throttles the processor"
    assert (changes[-1]["after"], changes[-1]["reason"]) == (1.0, "the processor has cooled")
    rests = [text for text in made.log.display.messages if "Pausing" not in text]
    assert rests == [
        "Training rests 25% of the time: the system throttles the processor.",
        "Training computes all the time again: the processor has cooled.",
    ], "one line when it begins and one when it ends"


def test_without_thermal_batch_reduction_there_are_only_breaks(tmp_path, dataset):
    made = control(tmp_path, dataset, Sensor(thermal=HOT), thermal_batch_reduction=False)
    react(made, times=3)
    assert made.duty.share == 1
    assert len(events(tmp_path, "cooling break")) == 3


def test_a_break_comes_at_most_once_per_minute_with_a_save_before_the_first(tmp_path, dataset):
    made = control(tmp_path, dataset, Sensor(thermal=HOT))
    made.HEAT_INTERVAL_SECONDS = made.RECOVERY_SECONDS = 60.0
    assert react(made, times=3) == 1
    assert len(events(tmp_path, "cooling break")) == 1
    made.cooled_at -= 60
    assert react(made) == 0, "later saves come when they are due"
    assert len(events(tmp_path, "cooling break")) == 2
    made.monitor.thermal = COOL
    made.hot_at -= 60
    react(made)
    made.monitor.thermal = HOT
    assert react(made) == 1, "the machine had cooled: this is heat of its own"


class HotAndLow(Sensor):
    def __init__(self):
        super().__init__(PowerSpecs(True, 5.0), HOT)


@pytest.mark.slow
def test_a_run_saves_before_it_cools_and_when_the_battery_is_low(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(resources, "PowerMonitor", HotAndLow)
    config = run_config(
        dataset,
        limits={"cooling_delay_seconds": 0.1},
        evaluation__every_steps=100,
        training__max_steps=60,
    )
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    (low,) = events(tmp_path / "run", "low battery")
    (pause,) = events(tmp_path / "run", "cooling break")  # at most once per minute
    assert low["percent"] == 5.0
    assert pause["reason"] == "the system throttles the processor"
    assert pause["seconds"] == 0.1
    assert any("The battery is at 5 %; saving." in text for text in display.messages)
    assert (tmp_path / "run" / "checkpoints" / f"step-{pause['step']:08d}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_rests_change_nothing_that_is_learned(tmp_path, dataset, monkeypatch, deterministic):
    config = run_config(dataset, limits={"cooling_delay_seconds": 0.0}, training__deterministic=deterministic)
    train(config, tmp_path / "cool", plan_of(config), Limits(), Recorder())
    monkeypatch.setattr(resources, "PowerMonitor", HotAndLow)
    monkeypatch.setattr(PowerControl, "HEAT_INTERVAL_SECONDS", 0.02)
    for last_step in (7, 20):
        train(config, tmp_path / "hot", plan_of(config), Limits(max_step=last_step), Recorder())
    assert events(tmp_path / "hot", "duty cycle")
    assert_same_weights(tmp_path / "cool", tmp_path / "hot")


def test_rests_within_a_step_are_not_counted_as_computation():
    took = StepTook(seconds=1.0, wall_seconds=1.0, cpu_seconds=1.0, rested_seconds=0.5)
    times = {"forward": 0.4, "backward": 1.2, "optimizer": 0.1}
    corrected = took.without_rests(StepResult(1.0, 1.0, 0.5, np.zeros(6), 0, np.zeros(6), times))
    assert corrected.seconds["forward"] + corrected.seconds["backward"] == pytest.approx(1.1)
    assert corrected.seconds["optimizer"] == 0.1


class OnBattery(Sensor):
    def __init__(self):
        super().__init__(BATTERY)


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_that_rests_uses_less_of_the_processor(tmp_path, dataset, monkeypatch):
    """CPU time over time, from the first step to the last; one thread cannot use more than the share of it,
    however busy the machine is."""
    monkeypatch.setattr(resources, "PowerMonitor", OnBattery)
    config = run_config(
        dataset,
        limits={"on_battery": "slow", "on_battery_factor": 0.3},
        training__max_steps=10**6,
        evaluation__every_steps=50,
    )
    times = []

    def measure(facts, done):
        times.append((time.monotonic(), time.process_time()))

    train(config, tmp_path / "run", plan_of(config), Limits(max_seconds=2.0), Recorder(measure))
    passed, used = (last - first for first, last in zip(times[0], times[-1], strict=True))
    assert used / passed < 0.3 + 0.15, "monitors and rounding add a little"
    rows = [row for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    spent = sum((Counter(row["spent"]) for row in rows), Counter())
    assert spent["waiting"] / spent.total() == pytest.approx(0.7, abs=0.15)


def test_a_run_holds_the_machine_awake_until_it_ends(tmp_path, dataset, monkeypatch):
    """With a stand-in on PATH that writes its PID and reads its standard input to the end."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("systemd-inhibit", "caffeinate"):
        (tools / name).write_text('#!/bin/sh\necho $$ > "$0.pid"\nexec cat\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    was_running = []

    def look(facts, done):
        (pid,) = (int(path.read_text()) for path in tools.glob("*.pid"))
        was_running.append(psutil.pid_exists(pid))

    config = run_config(dataset, plan__keep_awake=True, training__max_steps=3)
    display = Recorder(look)
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert was_running
    assert all(was_running)
    (pid,) = (int(path.read_text()) for path in tools.glob("*.pid"))
    assert not psutil.pid_exists(pid)
    assert not [text for text in display.messages if "keep_awake" in text]
