"""Problems that are really caused in real training: a leak, a slow loader, a CPU hog."""

import re
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from processes import kill_all, trainer_of
from tiny import FOUR, TINY, TRM, run, run_config, sudoku_dataset

from macbook_optimization.resource_monitoring import BUSY_PERCENT, other_cpu_percent
from trm.config import load_config
from trm.reports.diagnosis import Watchdog
from trm.reports.history import History, read_history
from trm.reports.thresholds import Thresholds
from trm.runs.directory import Run
from trm.runs.rows import ResourceRow

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


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [0.0, 0.02], ids=["fast", "slow"])
def test_a_task_that_leaks_1_mb_per_step_is_found_within_200_steps(tmp_path, sleep):
    task = write_task(tmp_path, f"time.sleep({sleep}); self.kept.append(np.ones(2**17))")
    changes = (*FOUR, *TINY, f"task={task}", "training.max_steps=200", "evaluation.every_steps=100")
    fixed = ("plan.micro_batch_size=16", "training.effective_batch_size=16", "model.hidden_size=8")
    quiet = ("--run", "run", "plan.report=false")
    command = [TRM, "train", "sudoku-6x6", *changes, *fixed, *quiet]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    config = Run(tmp_path / "run").config
    leak = findings(tmp_path / "run", config)["memory leak"]
    assert "MB per step (95 % confidence" in leak.evidence
    (event,) = [row for row in Run(tmp_path / "run").rows("events.jsonl") if row["event"] == "memory grows"]
    assert event["last_step"] <= 200
    assert 0.7 < event["mb_per_step"] < 1.4


@pytest.mark.slow
def test_5000_real_steps_report_neither_a_leak_nor_instability(tmp_path):
    small = {"model__H_cycles": 1, "model__L_cycles": 1, "training__effective_batch_size": 2}
    steps = {"training__max_steps": 5000, "evaluation__every_steps": 1000}
    config = run_config(sudoku_dataset(tmp_path / "set"), **small, **steps)
    run(config, tmp_path / "run")
    assert not {"memory leak", "unstable training"} & set(findings(tmp_path / "run", config))


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
