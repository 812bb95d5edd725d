"""Compare predicted with real peak memory: `python bench/memory_prediction.py [--only NUMBER]`.

Each recipe is probed as `trm train` does it. The fitted line predicts the peak with larger micro-batches. A
real trainer then runs with them: steps, an evaluation, a checkpoint. `--recipe NAME [KEY=VALUE ...]` measures
that recipe instead of the Sudoku models below, for example one whose rows have different lengths.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from macbook_optimization.children import run_in_child
from macbook_optimization.cpu_optimization import environment
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB
from trm.config import RunConfig, load_config
from trm.plan import EVALUATION_FACTOR, Plan
from trm.planning.measurements import RunMemory
from trm.planning.planner import Planner
from trm.runs.directory import EVENTS, Run
from trm.tasks.dataset import open_split
from trm.tasks.registry import load_task


@dataclass(frozen=True, slots=True)
class Case:
    grid_size: int
    hidden_size: int
    mixer: str
    supervision: str
    num_slots: int
    predicted_sizes: tuple[int, ...]  # micro-batches


CASES = (
    Case(6, 128, "mlp", "terminal", 128, (32, 128)),
    Case(6, 256, "attention", "deep", 32, (16, 32)),
    Case(6, 512, "mlp", "deep", 24, (12, 24)),
    Case(9, 128, "attention", "terminal", 64, (16, 64)),
    Case(9, 256, "mlp", "deep", 24, (12, 24)),
    Case(9, 512, "attention", "deep", 16, (8, 16)),
)


class StandardErrorDisplay:
    """A display that prints messages only."""

    def update(self, what: str, done: int, total: int, facts: str = "") -> None:
        return None

    def message(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


def make_recipe(directory: Path, case: Case) -> RunConfig:
    dataset = directory / f"sudoku-{case.grid_size}"
    if not dataset.exists():
        options = {"size": case.grid_size, "difficulty": "easy", "train": 512, "test": 512}
        load_task("sudoku").build(options, dataset, lambda what, done, total: None)
    model: dict[str, object] = {
        "hidden_size": case.hidden_size,
        "mixer": case.mixer,
        "pos_encodings": "rope" if case.mixer == "attention" else "none",
    }
    if case.supervision == "terminal":
        model |= {"L_cycles": 1, "width_multiple": 32}
    else:
        model |= {"puzzle_emb_ndim": case.hidden_size}
    training = {
        "supervision": case.supervision,
        "effective_batch_size": case.num_slots,
        "max_steps": 3,
    }
    return RunConfig.model_validate(
        {
            "task": "sudoku",
            "data": {"path": str(dataset)},
            "model": model,
            "training": training,
            "inference": {"depth": 2},
            # As many as an evaluation computes at a time, which the probe measures too.
            "evaluation": {"examples": EVALUATION_FACTOR * max(case.predicted_sizes)},
        }
    )


def real_peak_bytes(config: RunConfig, directory: Path, plan: Plan) -> int:
    """Train in a new process and return its peak."""
    run_in_child(
        "trm.training.start:train_in_child",
        {
            "config": config.model_dump(mode="json"),
            "run": str(directory),
            "plan": plan.to_json(),
            "start": {"limits": {}, "quiet": False},
            "verified": {},
        },
        environment=environment(plan.execution.threads),
    )
    return int(Run(directory).rows(EVENTS)[-1]["peak_bytes"])


def compare(config: RunConfig, sizes: tuple[int, ...], directory: Path, facts: JsonObject) -> list[float]:
    """Print one row per predicted size, and return the errors in percent."""
    data = load_task(config.task).complete(open_split(config.data.path, "train").spec)
    hardware = HardwareDetector().detect(with_torch=False)
    planner = Planner(config, data, hardware, StandardErrorDisplay())
    execution = planner.execution()
    measured = planner.measurer.measure(execution)
    assert measured is not None, "not even one example fits"
    memory = RunMemory.of(measured, execution.workers)
    errors = []
    for size in sizes:
        plan = Plan.of(execution, size, config.training.effective_batch_size)
        run = Path(tempfile.mkdtemp(dir=directory)) / "run"
        real = real_peak_bytes(config, run, plan)
        predicted = memory.peak_bytes(size)
        errors.append(round(100 * (predicted / real - 1), 1))
        row = {
            **facts,
            "measured_sizes": [each.micro_batch_size for each in measured.sizes],
            "micro_batch_size": size,
            "predicted_mib": round(predicted / MIB),
            "real_mib": round(real / MIB),
            "error_percent": errors[-1],
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", type=int, help=f"run one case, from 1 to {len(CASES)} (default: all)")
    parser.add_argument("--recipe", nargs="+", metavar="RECIPE", help="a recipe, and overrides of its keys")
    parser.add_argument("--sizes", default="8,16", help="micro-batches to predict for it")
    arguments = parser.parse_args()
    cases = CASES if arguments.only is None else CASES[arguments.only - 1 : arguments.only]
    errors = []
    with tempfile.TemporaryDirectory() as directory:
        if arguments.recipe:
            config = load_config(arguments.recipe[0], arguments.recipe[1:])
            sizes = tuple(map(int, arguments.sizes.split(",")))
            errors = compare(config, sizes, Path(directory), {"recipe": arguments.recipe[0]})
        else:
            for case in cases:
                config = make_recipe(Path(directory), case)
                errors += compare(config, case.predicted_sizes, Path(directory), asdict(case))
    sys.stdout.write(f"errors from {min(errors)} % to {max(errors)} %\n")


if __name__ == "__main__":
    main()
