"""Run directories as a training would leave them, without the training."""

import json
from dataclasses import replace
from pathlib import Path

from tiny import plan_of, run_config

from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run, begin
from trm.runs.events import CoolingBreak, Resumed, Stopped
from trm.runs.rows import EvalRow, ResourceRow, TrainRow

BEGAN = 1_790_000_000.0
HARDWARE = {
    "cpu": {"brand": "Some CPU", "architecture": "arm64", "cores": 8, "threads": 8, "performance_cores": 4,
            "efficiency_cores": 4},
    "memory": {"total_memory": 16 * 2**30, "available_memory": 12 * 2**30},
    "platform": {"system": "Darwin", "os_version": "15", "python_version": "3.11", "torch_version": "2.2"},
}  # fmt: skip
SPENT = {"forward": 0.3, "backward": 0.5, "optimizer": 0.05, "data": 0.01}


def train_row(step, *, seconds=None, time=None, **changes):
    row = TrainRow(
        step=step,
        seconds=float(step) if seconds is None else seconds,
        loss=3.0 / (1 + step),
        grad_norm=1.0,
        samples_per_second=100.0 + step % 3,
        learning_rate=1e-3,
        micro_batch_size=4,
        train_token_accuracy=0.5,
        train_exact_accuracy=0.25,
        rss_bytes=2**29,
        cpu_percent=400.0,
        spent=SPENT,
    ).to_json()
    return {**row, "time": BEGAN + step if time is None else time, **changes}


def eval_row(step, value, **changes):
    row = EvalRow(
        step=step,
        seconds=float(step),
        examples=12,
        metrics={"exact_accuracy": value, "token_accuracy": (1 + value) / 2},
        tables={},
        mean_steps=3.0,
        accuracy_by_depth=[value],
        evaluation_seconds=0.1,
    ).to_json()
    return {**row, "time": BEGAN + step, **changes}


def resource_row(second, **changes):
    row = ResourceRow(
        cpu_percent=[60.0] * 8,
        process_cpu_percent=400.0,
        rss_bytes=2**29,
        available_bytes=8 * 2**30,
        total_bytes=16 * 2**30,
        swap_bytes=0,
        temperature=None,
        thermal_level="nominal",
        is_throttling=False,
        speed_limit_percent=None,
        battery_percent=90.0 - second / 10,
        on_battery=True,
    ).to_json()
    return {**row, "time": BEGAN + second, **changes}


def event_row(event, second):
    return {**event.to_row(), "time": BEGAN + second}


def append_all(run: Run, name: str, rows) -> None:
    with open(run.path / name, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def recorded_run(path: Path, num_steps: int = 40, *, stopped: bool = True) -> Run:
    """Return a run of `num_steps` steps, one per second, with an evaluation every ten."""
    config = run_config(Path("set"), training__max_steps=num_steps)
    run = Run(path)
    begin(run, config)
    plan = replace(plan_of(config), budget_bytes=2**30, reasons={"threads": "set by hand"})
    run.write("plan.json", json.dumps(plan.to_json()))
    run.write("hardware.json", json.dumps(HARDWARE))
    rows = []
    for step in range(1, num_steps + 1):
        rows.append(train_row(step))
        if step % 10 == 0:
            rows.append(eval_row(step, step / num_steps))
    append_all(run, METRICS, rows)
    append_all(run, RESOURCES, [resource_row(second) for second in range(num_steps)])
    events = [event_row(CoolingBreak("too hot", 3.0, 5), 5), event_row(Resumed(10, ["threads"]), 10)]
    if stopped:
        events.append(event_row(Stopped("max_steps", num_steps, num_steps + 2.0, 2**29), num_steps))
    append_all(run, EVENTS, events)
    return run
