"""Measure saving and resuming the paper's 7-million-weight model, with 16 and with all 768 slots.

Run it as `python bench/checkpoints.py`; it takes about three minutes. The first step of a resumed run starts
when `hardware.json` has been rewritten. A step with 768 slots takes minutes and is not part of the result.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from macbook_optimization.checkpoint_files import find_damage
from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.units import MIB
from trm.runs.directory import Run

TRM = str(Path(sys.executable).with_name("trm"))
RECIPE = "sudoku-extreme"
OVERRIDES = (
    "data.path=set",
    "data.build={size: 9, difficulty: hard, train: 1000, test: 16}",
    "plan.micro_batch_size=8",
    "plan.threads=2",
)


class SaveTimes(NamedTuple):
    save_seconds: list[float]
    verify_seconds: list[float]
    size_bytes: int


def train(directory: Path, num_slots: int, *more: str) -> subprocess.Popen[bytes]:
    command = [TRM, "train", RECIPE, *OVERRIDES, f"training.effective_batch_size={num_slots}", *more]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure_resume(directory: Path, num_slots: int) -> float:
    """Return the seconds from the start of the command to the first step of the resumed run."""
    mark = directory / "runs" / RECIPE / "hardware.json"
    before = mark.stat().st_mtime_ns
    started = time.monotonic()
    process = train(directory, num_slots)
    while mark.stat().st_mtime_ns == before:
        assert process.poll() is None, "the run ended before its first step"
        time.sleep(0.01)
    seconds = time.monotonic() - started
    trainers = psutil.Process(process.pid).children()
    process.kill()
    for trainer in trainers:
        trainer.kill()
    process.wait()
    psutil.wait_procs(trainers)
    return seconds


def measure_saves(run: Run, directory: Path, rounds: int) -> SaveTimes:
    checkpoint = run.checkpoints().newest_intact()
    assert checkpoint is not None
    tensors = {
        group: {name: tensor.clone() for name, tensor in named.items()}
        for group, named in checkpoint.load_all().items()
    }
    manager = CheckpointManager(directory / "copies", keep=1)
    saves = []
    checks = []
    for step in range(1, rounds + 2):
        started = time.monotonic()
        saved = manager.save(step, tensors, checkpoint.metadata)
        saves.append(time.monotonic() - started)
        started = time.monotonic()
        assert find_damage(saved.path) is None
        checks.append(time.monotonic() - started)
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    return SaveTimes(saves[1:], checks[1:], size)  # the first save removes no older checkpoint


def format_spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def measure(num_slots: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory(prefix="trm-bench-") as temporary:
        directory = Path(temporary)
        first = train(directory, num_slots, "--max-minutes", "1e-9")  # saves before the first step
        assert first.wait() == 0, "the first start failed"
        run = Run(directory / "runs" / RECIPE)
        resumes = [measure_resume(directory, num_slots) for _ in range(rounds)]
        times = measure_saves(run, directory, rounds)
    return (
        f"{num_slots} slots, {times.size_bytes / MIB:.0f} MiB per checkpoint\n"
        f"  save, read back, remove the oldest  {format_spread(times.save_seconds)}\n"
        f"  verify every byte                   {format_spread(times.verify_seconds)}\n"
        f"  command to first step               {format_spread(resumes)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 768], help="(default: 16 768)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for num_slots in arguments.slots:
        sys.stdout.write(measure(num_slots, arguments.rounds))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
