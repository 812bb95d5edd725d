"""Problems that are really caused in real training: a leak, a slow loader, a CPU hog, slower steps, ..."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import kill_all, trainer_of
from tiny import FOUR, TINY, TRM, Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.background_monitor import BackgroundMonitor
from macbook_optimization.resource_monitoring import BUSY_PERCENT, other_cpu_percent
from macbook_optimization.units import KIB, MIB
from trm.config import load_config
from trm.reports import sampling
from trm.reports.diagnosis import Watchdog
from trm.reports.history import History, read_history
from trm.reports.sampling import SampleFile, Sampler
from trm.reports.thresholds import Thresholds
from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run
from trm.runs.rows import ResourceRow, kind_of
from trm.training.loop import Limits
from trm.training.start import train
from trm.training.throttling_watch import ThrottlingWatch

SOON = Thresholds(machine_seconds=4, slow_seconds=4, loss_seconds=4, min_rows=4, gone_seconds=5)
TASK = """
import time
import numpy as np
from trm.tasks.grids.sudoku import SudokuTask

class Changed(SudokuTask):
    kept = []
    def augment(self, batch, draws):
        {line}
        return super().augment(batch, draws)

TASK = Changed()
"""


# One program on all cores; hashing holds no lock of Python.
HOG = """
import hashlib, threading

def work(block=bytes(2**24)):
    while True:
        hashlib.sha256(block)

for _ in range({threads}):
    threading.Thread(target=work).start()
"""


def write_task(directory, line):
    path = directory / "changed.py"
    path.write_text(TASK.format(line=line))
    return str(path)


def findings(path, config):
    """Return what a watchdog finds in the rows of a run that has ended."""
    watchdog = Watchdog(Run(path), config, SOON, since=0.0)
    return {finding.kind: finding for finding in watchdog.update(read_history(Run(path)))}


def findings_at_any_time(path, config):
    """Return the kinds that a watchdog finds if it looks after every row of a run."""
    watchdog = Watchdog(Run(path), config, SOON, since=0.0)
    history = History()
    found = set()
    rows = [row for name in (METRICS, EVENTS, RESOURCES) for row in Run(path).rows(name)]
    for row in sorted(rows, key=lambda row: row["time"]):
        history.add([{**row, "kind": kind_of(row)}])
        found |= {finding.kind for finding in watchdog.update(history)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [0.0, 0.025], ids=["fast", "slow"])
def test_a_task_that_leaks_1_mb_per_step_is_found_within_200_steps(tmp_path, sleep):
    """Twice as many steps are taken: in the slow run, the command itself records its advice meanwhile."""
    task = write_task(tmp_path, f"time.sleep({sleep}); self.kept.append(np.ones(2**17))")
    changes = (*FOUR, *TINY, f"task={task}", "training.max_steps=400", "evaluation.every_steps=100")
    fixed = ("plan.micro_batch_size=16", "training.effective_batch_size=16", "model.hidden_size=8")
    quiet = ("--run", "run", "plan.report=false")
    command = [TRM, "train", "sudoku-6x6", *changes, *fixed, *quiet]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    config = Run(tmp_path / "run").config
    leak = findings(tmp_path / "run", config)["memory leak"]
    assert "MB per step (95 % confidence" in leak.evidence
    rows = Run(tmp_path / "run").rows(EVENTS)
    event = next(row for row in rows if row["event"] == "memory grows")
    assert event["last_step"] <= 200
    assert 0.7 < event["mb_per_step"] < 1.4
    advised = [row for row in rows if row["event"] == "advice" and row["diagnosis"] == "memory leak"]
    assert len(advised) == 1 or not sleep
    assert all(f"{event['mb_per_step']:.3g} MB per step" in row["evidence"] for row in advised)


@pytest.mark.slow
def test_5000_real_steps_report_neither_a_leak_nor_instability(tmp_path):
    small = {"model__H_cycles": 1, "model__L_cycles": 1, "training__effective_batch_size": 2}
    steps = {"training__max_steps": 5000, "evaluation__every_steps": 1000}
    config = run_config(sudoku_dataset(tmp_path / "set"), **small, **steps)
    run(config, tmp_path / "run")
    assert not {"memory leak", "unstable training"} & findings_at_any_time(tmp_path / "run", config)


@pytest.mark.slow
@pytest.mark.alone
def test_a_slow_loader_is_starvation(tmp_path):
    task = write_task(tmp_path, "time.sleep(0.03)")
    config = run_config(sudoku_dataset(tmp_path / "set"), task=task, training__max_steps=10**6)
    run(config, tmp_path / "run", max_seconds=7)
    found = findings(tmp_path / "run", config)
    assert set(found) == {"data starvation"}


@pytest.mark.slow
def test_a_learning_rate_that_is_too_high_is_instability(tmp_path):
    """Normalised recursions do not diverge: they forget what the first steps learned, or learn nothing."""
    large = {"training__effective_batch_size": 48, "training__learning_rate": 0.5}  # few steps per row
    never = {"training__max_steps": 10**6, "evaluation__every_steps": 10**6}
    config = run_config(sudoku_dataset(tmp_path / "set"), **large, **never)
    found = {}
    for _ in range(4):  # a busy machine needs longer for as many steps
        run(config, tmp_path / "run", max_seconds=9)
        found = findings(tmp_path / "run", config)
        if "unstable training" in found:
            break
    assert "lower training.learning_rate (now 0.5)" in found["unstable training"].advice


@pytest.mark.slow
def test_a_learning_rate_that_is_too_low_is_a_plateau(tmp_path):
    """The task sleeps, so that a fast machine records enough rows, too."""
    task = write_task(tmp_path, "time.sleep(0.05)")
    steps = {"training__max_steps": 200, "evaluation__every_steps": 20}
    dataset = sudoku_dataset(tmp_path / "set")
    config = run_config(dataset, task=task, training__learning_rate=1e-9, **steps)
    run(config, tmp_path / "run")
    found = findings(tmp_path / "run", config)
    assert "has not improved on" in found["plateau"].evidence
    assert "the training loss no longer falls" in found["plateau"].evidence


def resource_row(trainer):
    """Sample as the command does about once per second."""
    memory = psutil.virtual_memory()
    return ResourceRow(
        cpu_percent=psutil.cpu_percent(percpu=True),
        process_cpu_percent=trainer.cpu_percent(),
        rss_bytes=trainer.memory_info().rss,
        available_bytes=memory.available,
        total_bytes=memory.total,
        swap_bytes=psutil.swap_memory().used,
        temperature=None,
        thermal_level=None,
        is_throttling=None,
        speed_limit_percent=None,
        battery_percent=None,
        on_battery=None,
    ).to_json()


def watch(watchdog, follower, trainer, seconds):
    """Sample and update the watchdog until it finds contention or the time is over."""
    history = History()
    end = time.monotonic() + seconds
    with suppress(psutil.NoSuchProcess):
        while time.monotonic() < end:
            time.sleep(0.5)
            history.add(follower.read())
            history.add([resource_row(trainer)])
            for finding in watchdog.update(history):
                if finding.kind == "contention":
                    return finding
    return None


@pytest.mark.slow
@pytest.mark.alone
def test_a_cpu_hog_is_named_as_contention(tmp_path):
    cores = psutil.cpu_count() or 1
    threads = (f"plan.threads={cores}", "plan.micro_batch_size=8", "training.max_steps=1000000")
    arguments = (*FOUR, *TINY[:-1], *threads)
    config = load_config("sudoku-6x6", list(arguments))
    was_busy = other_cpu_percent(1.0) >= BUSY_PERCENT  # then another program may be busier than the hog
    with (tmp_path / "log").open("wb") as log:
        command = [TRM, "train", "sudoku-6x6", *arguments, "--run", "run"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        trainer = trainer_of(process)
        hog = subprocess.Popen([sys.executable, "-c", HOG.format(threads=2 * cores)])
        try:
            directory = Run(tmp_path / "run")
            watchdog = Watchdog(directory, config, SOON, since=0.0, own_pid=process.pid)
            finding = watch(watchdog, directory.follow(), trainer, seconds=40)
        finally:
            hog.kill()
            hog.wait()
            kill_all(process)
    assert finding is not None
    named = re.search(r"most of all .* \(PID (\d+)\)", finding.evidence)
    assert named is not None, finding.evidence
    assert int(named[1]) == hog.pid or was_busy, finding.evidence


# Slower steps


ENDLESS = {"training__max_steps": 10**6, "evaluation__every_steps": 10**6}
IN_TWO_PARTS = {"plan__micro_batch_size": 3}  # so that a step reports its progress once, in the middle of it


def burning(after_seconds=0.0, seconds=0.03):
    """Return what burns CPU time in the middle of each step, from some time after the first one on."""
    began = None

    def react(what, done):
        nonlocal began
        if not what.startswith("step "):
            return
        began = began or time.monotonic()
        end = time.monotonic() + seconds
        while end - seconds - began >= after_seconds and time.monotonic() < end:
            pass

    return react


class Samples(BackgroundMonitor):
    """Samples this process, which trains, as the command that waits for a trainer does."""

    def __init__(self, path, root=Path("/"), before_sample=lambda: None):
        super().__init__()
        self.sampler = Sampler(root)
        self.sampler.watch(os.getpid())
        self.file = SampleFile(Run(path))
        self.before_sample = before_sample

    def begin(self):
        self.sampler.begin()

    def sample(self):
        self.before_sample()
        self.file.append(self.sampler.sample())


def run_sampled(config, path, react=None, plan=None, seconds=7.0, **samples):
    with Samples(path, **samples) as monitor:
        monitor.start_monitoring(interval=0.5)
        train(config, path, plan or plan_of(config), Limits(max_seconds=seconds), Recorder(react))


@pytest.mark.slow
@pytest.mark.alone
def test_steps_that_become_slower_than_the_first_ones_are_a_regression(tmp_path):
    config = run_config(sudoku_dataset(tmp_path / "set"), **ENDLESS, **IN_TWO_PARTS)
    run(config, tmp_path / "run", burning(after_seconds=6.5), max_seconds=12)
    found = findings(tmp_path / "run", config)
    assert "with the same plan and work" in found["regression"].evidence
    assert not {"data starvation", "contention", "throttling"} & set(found)


@pytest.mark.slow
@pytest.mark.alone
def test_steps_that_take_more_time_and_cpu_time_are_inferred_throttling(tmp_path, monkeypatch):
    monkeypatch.setattr(ThrottlingWatch, "WINDOW_SECONDS", 1.0)
    config = run_config(sudoku_dataset(tmp_path / "set"), **ENDLESS, **IN_TWO_PARTS)
    run(config, tmp_path / "run", burning(after_seconds=4), max_seconds=8)
    found = findings(tmp_path / "run", config)
    assert "probably throttled (inferred, the system does not report it)" in found["throttling"].evidence
    assert re.match(r"Up to \d+\.\d times as fast", found["throttling"].gain)


@pytest.mark.slow
@pytest.mark.alone
def test_steps_that_take_longer_than_in_an_earlier_run_are_reported(tmp_path):
    config = run_config(sudoku_dataset(tmp_path / "set"), **ENDLESS, **IN_TWO_PARTS)
    run_sampled(config, tmp_path / "first", seconds=4)
    run_sampled(config, tmp_path / "run", burning(), seconds=8)
    slower = findings(tmp_path / "run", config)["slower than an earlier run"]
    assert "as long as in first, an earlier run of this recipe" in slower.evidence
    assert "slower than an earlier run" not in findings(tmp_path / "first", config)


# The machine


@pytest.mark.slow
@pytest.mark.alone
def test_memory_near_its_limit_is_a_bottleneck(tmp_path):
    """The task takes what the limit leaves, but for a twentieth of it, once the plan has been measured."""
    limit_mb = 1000
    task = write_task(
        tmp_path,
        f"""import psutil
        self.calls = getattr(self, "calls", 0) + 1
        while self.calls > 100 and psutil.Process().memory_info().rss < {0.95 * limit_mb * MIB}:
            self.kept.append(np.ones(2**17))
        time.sleep(0.01)""",
    )
    endless = ("training.max_steps=1000000", "evaluation.every_steps=1000000")
    fixed = (*endless, f"limits.memory_limit_mb={limit_mb}", "plan.micro_batch_size=16", f"task={task}")
    command = [TRM, "train", "sudoku-6x6", *FOUR, *TINY, *fixed, "--run", "run"]
    done = subprocess.run([*command, "--max-minutes", "0.11"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = findings(tmp_path / "run", Run(tmp_path / "run").config)
    assert "of its memory budget of 1,000 MiB" in found["memory bottleneck"].evidence


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
def test_swap_that_grows_and_throttling_that_a_counter_reports(tmp_path, monkeypatch):
    """The real sampler reads files as Linux has them: only root could limit memory so that swap is used."""
    machine = tmp_path / "machine"
    counter = machine / "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    counter.parent.mkdir(parents=True)
    proc = machine / "proc"
    proc.mkdir()
    for name in ("stat", "vmstat", "self", str(os.getpid())):
        (proc / name).symlink_to(f"/proc/{name}")
    known = Path("/proc/meminfo").read_text(encoding="utf-8")
    times = 0

    def heat_and_swap():
        nonlocal times
        times += 1
        counter.write_text(f"{times}\n", encoding="utf-8")
        free = 64 * MIB - times * 100 * KIB  # KiB
        swap = {"SwapTotal": 64 * MIB, "SwapFree": free}
        text = "".join(f"{name}: {kib} kB\n" for name, kib in swap.items())
        others = [line for line in known.splitlines(keepends=True) if not line.startswith("Swap")]
        (proc / "new").write_text("".join([*others, text]), encoding="utf-8")
        (proc / "new").replace(proc / "meminfo")

    heat_and_swap()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    monkeypatch.setattr(sampling, "POWER_SECONDS", 0.0)
    config = run_config(sudoku_dataset(tmp_path / "set"), **ENDLESS)
    run_sampled(config, tmp_path / "run", root=machine, before_sample=heat_and_swap)
    found = findings(tmp_path / "run", config)
    assert "The system reports that it throttled the processor" in found["throttling"].evidence
    assert re.search(r"Swap grew by \d{3,} MiB in \d s", found["swap"].evidence)
