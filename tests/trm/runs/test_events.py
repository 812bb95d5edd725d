"""What a run writes: metrics of a known kind, and events that `runs.events` lists with all their fields."""

import os
import signal
from dataclasses import fields

import pytest
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.hardware_detection import PowerSpecs
from macbook_optimization.resource_monitoring import PowerMonitor, ThermalState
from trm.plan import Plan
from trm.runs import events
from trm.runs.directory import EVENTS, Run
from trm.runs.rows import EvalRow, TrainRow
from trm.training import resources
from trm.training.loop import Limits
from trm.training.start import train


def event_fields():
    """Return the fields of every event by the name under which it is recorded."""
    found = {}
    for each in vars(events).values():
        bases = (events.Event, events.MicroBatchChanged)
        if isinstance(each, type) and issubclass(each, events.Event) and each not in bases:
            assert each.name not in found, f"two events are called {each.name}"
            found[each.name] = {field.name for field in fields(each)}
    return found


KNOWN = event_fields()


def check_event(row):
    given = set(row) - {"time", "event"}
    assert row["time"] > 1e9, "seconds since 1970"
    assert row["event"] in KNOWN
    if row["event"] == "plan":
        assert Plan.from_json(row).to_json().keys() == given
    elif row["event"] != "memory grows":
        assert given == KNOWN[row["event"]]


class Hot(PowerMonitor):
    def sample(self):
        self.power = PowerSpecs(True, 5.0)
        self.thermal = ThermalState(True, 101.0, None, None)


@pytest.fixture(scope="module")
def eventful_run(tmp_path_factory):
    """A run that was interrupted, damaged, resumed with another plan, cooled and stopped."""
    path = tmp_path_factory.mktemp("runs") / "run"
    dataset = sudoku_dataset(path.parent / "set")
    config = run_config(dataset, checkpoints={"every_steps": 3}, limits={"cooling_delay_seconds": 0.0})

    def interrupt(facts, done):
        if facts.startswith("loss") and done == 8:
            os.kill(os.getpid(), signal.SIGINT)

    assert run(config, path, interrupt).reason == "interrupted"
    (path / "checkpoints" / "step-00000008" / "weights.safetensors").write_bytes(b"")
    changed = run_config(
        dataset,
        checkpoints={"every_steps": 3},
        limits={"cooling_delay_seconds": 0.0, "garbage_collection_frequency": 1},
        plan__micro_batch_size=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "PowerMonitor", Hot)
        train(changed, path, plan_of(changed), Limits(), Recorder())
    return Run(path)


@pytest.mark.slow
def test_every_event_of_a_run_is_listed_with_its_fields(eventful_run):
    rows = eventful_run.rows(EVENTS)
    for row in rows:
        check_event(row)
    assert {
        "plan", "data", "stopped", "damaged", "resumed", "low battery", "cooling break", "duty cycle",
        "garbage collection returns nothing",
    } <= {row["event"] for row in rows}  # fmt: skip


def test_every_row_of_the_metrics_is_an_average_of_steps_or_an_evaluation(eventful_run):
    rows = eventful_run.rows()
    assert {row["kind"] for row in rows} == {"train", "eval"}
    train_fields = {field.name for field in fields(TrainRow)}
    # Of what this recipe does not use.
    absent = {"by_cycles", "curriculum_stage", "device_bytes", "max_length", "phase", "waited_for"}
    of_groups = {"tasks_evaluated", "tasks_total"}  # Sudoku puzzles are groups of one
    eval_fields = {field.name for field in fields(EvalRow)} - {"metrics", "tables"} - of_groups
    for row in rows:
        if row["kind"] == "train":
            assert set(row) == train_fields - absent | {"kind", "time"}
        else:
            assert set(row) == eval_fields | {
                "kind",
                "time",
                "exact_accuracy",
                "token_accuracy",
                "halt_accuracy",
            }
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [10, 20]


def test_a_follower_delivers_the_same_rows_with_their_kinds(eventful_run):
    followed = eventful_run.follow().read()
    assert [row for row in followed if row["kind"] != "event"] == eventful_run.rows()
    recorded = [{"kind": "event", **row} for row in eventful_run.rows(EVENTS)]
    assert [row for row in followed if row["kind"] == "event"] == recorded


def test_the_scalars_of_an_evaluation_are_entries_of_its_row_and_its_tables_are_not():
    row = EvalRow(3, 1.0, 12, {"exact_accuracy": 0.5}, {"confusion": [[1.0]]}, 2.0, [0.5], 0.1).to_json()
    assert (row["kind"], row["exact_accuracy"], row["tables"]) == ("eval", 0.5, {"confusion": [[1.0]]})
    assert "metrics" not in row
    assert "tables" not in EvalRow(3, 1.0, 12, {}, {}, 2.0, [0.5], 0.1).to_json()
