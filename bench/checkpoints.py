"""What saving and resuming take, for the paper's 7-million-weight model with all its 768 slots and with 16.

Run it as `python bench/checkpoints.py`: about three minutes. The first step begins when `hardware.json` has
been written anew; a step itself takes minutes with 768 slots, and is not part of the figure.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from macbook_optimization.checkpoint_files import find_damage
from macbook_optimization.checkpoint_management import CheckpointManager
from trm.runs import Run

TRM = Path(sys.executable).with_name("trm")
ROUNDS = 5
DATA = ("data.path=set", "data.build={size: 9, difficulty: hard, train: 1000, test: 16}")
PLAN = ("plan.micro_batch_size=8", "plan.threads=2")


def train(directory: Path, slots: int, *more: str) -> subprocess.Popen[bytes]:
    command = [TRM, "train", "sudoku-extreme", *DATA, *PLAN, f"training.effective_batch_size={slots}", *more]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def resume_seconds(directory: Path, slots: int) -> float:
    """From the start of the command to the first step of the resumed run."""
    mark = directory / "runs" / "sudoku-extreme" / "hardware.json"
    before, started = mark.stat().st_mtime_ns, time.monotonic()
    process = train(directory, slots)
    while mark.stat().st_mtime_ns == before:
        assert process.poll() is None, "it ended before its first step"
        time.sleep(0.01)
    seconds = time.monotonic() - started
    trainers = psutil.Process(process.pid).children()
    for each in (process, *trainers):
        each.kill()
    process.wait()
    psutil.wait_procs(trainers)
    return seconds


def save_seconds(run: Run, directory: Path) -> tuple[list[float], list[float], int]:
    checkpoint = run.checkpoints().newest_good()
    assert checkpoint is not None
    tensors = {group: {name: t.clone() for name, t in named.items()}
               for group, named in checkpoint.load_all().items()}  # fmt: skip
    manager, saves, checks = CheckpointManager(directory / "copies", keep=1), [], []
    for step in range(ROUNDS + 1):
        started = time.monotonic()
        saved = manager.save(step + 1, tensors, checkpoint.metadata)
        saves.append(time.monotonic() - started)
        started = time.monotonic()
        assert find_damage(saved.path) is None
        checks.append(time.monotonic() - started)
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    return saves[1:], checks[1:], size  # the first one removes nothing


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    torch.set_num_threads(1)
    for slots in (16, 768):
        with tempfile.TemporaryDirectory(prefix="trm-bench-") as temporary:
            directory = Path(temporary)
            train(directory, slots, "--max-minutes", "1e-9").wait()  # saves before the first step
            run = Run(directory / "runs" / "sudoku-extreme")
            resumes = [resume_seconds(directory, slots) for _ in range(ROUNDS)]
            saves, checks, size = save_seconds(run, directory)
        lines = [
            f"{slots} slots, {size / 2**20:.0f} MiB a checkpoint",
            f"  save, read back, remove the oldest  {spread(saves)}",
            f"  check every byte                    {spread(checks)}",
            f"  command to first step               {spread(resumes)}",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
