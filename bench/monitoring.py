"""What watching costs: the speed of a training step with and without monitoring, live view and logging.

Run `python bench/monitoring.py [--recipes sudoku-6x6,maze-10x10] [--turns 40]`. One `trm train` runs on a
terminal of 100 columns. Its parent process samples, reads the run, diagnoses and draws; the bench pauses that
process alone (SIGSTOP) in every other turn, while the trainer continues. What the trainer itself does for
logging (rows, progress, timers) cannot be paused, so it is timed on its own and added. The ratio of each pair
of neighbouring turns is one measurement; the median and its standard error are shown, and beside them what
the processor time of that parent process is of all cores, which noise of the machine does not affect.
"""

import argparse
import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from trm.backends.base import StepResult
from trm.display import Forwarded
from trm.runs.directory import METRICS, Run, begin
from trm.training.log import RunLog, StepMetrics, StepTiming

TURN_SECONDS = 4.0
WARM_UP_SECONDS = 15.0
SAME_WORK = (
    "evaluation.every_steps=null",
    "evaluation.target_accuracy=null",
    "training.max_steps=1000000",
    "training.depths={0: 1}",
    "plan.threads=2",
    "plan.workers=2",
    "plan.micro_batch_size=8",
    "plan.compile=false",
    "checkpoints.every_seconds=100000",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", default="sudoku-6x6,maze-10x10", help="recipes to train")
    parser.add_argument("--turns", type=int, default=40, help="turns with, and as many without")
    arguments = parser.parse_args()
    for recipe in arguments.recipes.split(","):
        print(measure(recipe, arguments.turns), flush=True)  # noqa: T201


def measure(recipe: str, turns: int) -> str:
    with tempfile.TemporaryDirectory(prefix="monitoring-") as directory:
        root = Path(directory)
        terminal, slave = pty.openpty()
        os.environ["COLUMNS"] = "100"
        command = [str(Path(sys.executable).with_name("trm")), "train", recipe, *SAME_WORK, "--run", "run"]
        process = subprocess.Popen(command, cwd=root, stdin=slave, stdout=slave, stderr=slave)
        threading.Thread(target=drain, args=(terminal,), daemon=True).start()
        try:
            metrics = root / "run" / METRICS
            while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
                time.sleep(0.5)
            time.sleep(WARM_UP_SECONDS)
            speeds = {True: [], False: []}
            parent = psutil.Process(process.pid)
            used_before = cpu_seconds(parent)
            for turn in range(2 * turns + 1):
                shown = turn % 2 == 0
                os.kill(process.pid, signal.SIGCONT if shown else signal.SIGSTOP)
                speeds[shown].append(speed(metrics))
            used = cpu_seconds(parent) - used_before
            share = used / (len(speeds[True]) * TURN_SECONDS) / (os.cpu_count() or 1)
            own = logging_seconds(root) * statistics.median(speeds[False])
        finally:
            os.kill(process.pid, signal.SIGCONT)
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
    # A turn without is compared with the mean of the turns with, before and after it.
    ratios = [
        without / ((speeds[True][i] + speeds[True][i + 1]) / 2) - 1 for i, without in enumerate(speeds[False])
    ]
    median = statistics.median(ratios)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
    return (
        f"{recipe}: {statistics.median(speeds[False]):.1f} steps/s; monitoring and view cost {median:+.2%} "
        f"(standard error {error:.2%}, {len(ratios)} turns) and use {share:.2%} of all cores; logging in the "
        f"trainer costs {own:.2%}"
    )


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def speed(metrics: Path) -> float:
    """Return the steps per second of the trainer during one turn, from the times in its own rows."""
    started = time.time()
    time.sleep(TURN_SECONDS)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[-40:]]
    rows = [row for row in rows if row["time"] >= started]
    return (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["time"] - rows[0]["time"])


def logging_seconds(root: Path) -> float:
    """Return the seconds that the trainer itself spends per step on rows, progress and timers."""
    from tiny import run_config

    run = Run(root / "log")
    begin(run, run_config(root))
    log = RunLog(run, Forwarded(lambda row: json.dumps(row)))
    metrics = StepMetrics(log)
    ones = np.ones(16, dtype=bool)
    parts = {"forward": 0.01, "backward": 0.01, "optimizer": 0.001, "data": 0.0001}
    result = StepResult(0.5, 1.0, 0.9, ones, 16, ones.astype(np.float32), parts)
    num_steps = 2000
    started = time.perf_counter()
    for step in range(num_steps):
        for _ in range(16):
            time.monotonic()
        timing = StepTiming(step, 0.02, step * 0.02, 1e-3, 8, cycles=1 + step % 2)
        metrics.add(result, timing)  # a row every fifty steps
        log.display.update("this step", 8, 16)
        log.display.update("this step", 16, 16)
        log.display.update("training", step, num_steps, f"loss {metrics.loss:.3f}", metrics.speed())
    return (time.perf_counter() - started) / num_steps


def drain(terminal: int) -> None:
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    main()
