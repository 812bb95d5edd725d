"""Predicted against real peak memory: `python bench/memory_prediction.py`.

Each shape is probed as `trm train` does, the line is read at micro-batches two to eight times as large as
those it was measured at, and a real trainer is then run with them: steps, an evaluation, a checkpoint.
"""

import json
import sys
import tempfile
from pathlib import Path

from macbook_optimization.children import run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.memory_management import MIB
from trm.config import RunConfig
from trm.runs import Plan, Run
from trm.tasks import load_task
from trm.tasks.base import open_split
from trm.training.planning import Planner
from trm.training.probe import memory_line
from trm.training.watching import SilentDisplay

SHAPES = [  # grid size, hidden size, mixer, supervision, slots, micro-batches to predict
    (6, 128, True, "terminal", 128, (32, 128)),
    (6, 256, False, "deep", 32, (16, 32)),
    (6, 512, True, "deep", 24, (12, 24)),
    (9, 128, False, "terminal", 64, (16, 64)),
    (9, 256, True, "deep", 24, (12, 24)),
    (9, 512, False, "deep", 16, (8, 16)),
]


def recipe(
    directory: Path, size: int, hidden_size: int, mixer: bool, supervision: str, slots: int
) -> RunConfig:
    dataset = directory / f"sudoku-{size}"
    if not dataset.exists():
        options = {"size": size, "difficulty": "easy", "train": 512, "test": 128}
        load_task("sudoku").build(options, dataset, lambda what, done, total: None)
    model = {"hidden_size": hidden_size, "mlp_t": mixer, "pos_encodings": "none" if mixer else "rope"}
    if supervision == "terminal":
        model |= {"L_cycles": 1, "width_multiple": 32}
    else:
        model |= {"puzzle_emb_ndim": hidden_size}
    training = {"supervision": supervision, "effective_batch_size": slots, "max_steps": 3}
    tree = {"task": "sudoku", "data": {"path": str(dataset)}, "model": model, "training": training}
    return RunConfig.model_validate({**tree, "evaluation": {"depth": 2, "examples": 4 * min(slots, 16)}})


def real_peak(config: RunConfig, directory: Path, plan: Plan) -> int:
    run_in_child(
        "trm.training.loop:train_in_child",
        {
            "config": config.model_dump(mode="json"),
            "run": str(directory),
            "plan": plan.to_json(),
            "limits": {},
        },
        environment=environment(plan.threads),
    )
    return int(Run(directory).rows("events.jsonl")[-1]["peak_bytes"])


def main() -> None:
    hardware = HardwareDetector().detect(with_torch=False)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for number, (*shape, sizes) in enumerate(SHAPES):
            config = recipe(directory, *shape)
            planner = Planner(config, open_split(config.data.path, "train").shape, hardware, SilentDisplay())
            measured = planner.measure("float32", "none", "system")
            assert measured is not None
            line = memory_line(measured.sizes)
            probed = [size.micro_batch_size for size in measured.sizes]
            for micro_batch_size in sizes:
                plan = Plan(micro_batch_size, 1, hardware.cpu.compute_threads)
                run = directory / f"run-{number}-{micro_batch_size}"
                real, predicted = real_peak(config, run, plan), line.peak_bytes(micro_batch_size)
                row = {
                    "grid": shape[0], "hidden_size": shape[1], "mixer": shape[2], "supervision": shape[3],
                    "probed": probed, "micro_batch_size": micro_batch_size,
                    "predicted_mib": round(predicted / MIB), "real_mib": round(real / MIB),
                    "error_percent": round(100 * (predicted / real - 1), 1),
                }  # fmt: skip
                rows.append(row)
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    errors = [row["error_percent"] for row in rows]
    sys.stdout.write(f"errors from {min(errors)} % to {max(errors)} %\n")


if __name__ == "__main__":
    main()
