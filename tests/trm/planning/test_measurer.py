"""What is said about a measurement, and which ones are kept for the next start."""

import pytest
from tiny import Recorder, run_config, sudoku_dataset

from macbook_optimization.children import ChildDied
from macbook_optimization.errors import ConfigError
from macbook_optimization.hardware_detection import HardwareDetector
from trm.config import RunConfig
from trm.plan import Execution, Plan
from trm.planning.measurer import Measurer
from trm.planning.planner import Planner
from trm.tasks.registry import load_task
from trm.training.log import show_plan
from trm.training.start import open_splits

ROW = {"micro_batch_size": 1, "peak_bytes": 2**28, "peak_address_space": None, "samples_per_second": 10.0}


class FakeProbe(Measurer):
    """Returns the measurements of a machine of which other programs use `busy` percent."""

    busy = 0.0
    death: ChildDied | None = None

    def _run_probe(self, execution, rows, timeout_seconds):
        if self.death is not None:
            raise self.death
        rows.append(ROW)
        return {"complete": True, "other_cpu_percent": self.busy}


class BusyProbe(FakeProbe):
    busy = 43.2


class EndlessProbe(FakeProbe):
    death = ChildDied(-9, traceback_shown=False, last_output="", timed_out=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def planner(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    config = run_config(dataset, plan={})
    task = load_task(config.task)
    spec = task.complete(open_splits(config, task)[0].spec)
    return Planner(config, spec, HardwareDetector().detect(with_torch=False), Recorder())


def measure(planner, kind=FakeProbe, subject="", **execution):
    display = Recorder()
    measurer = kind(planner.config, planner.data, planner.hardware, display, {}, subject)
    measured = measurer.measure(Execution(**execution))
    return measured, display.messages


def test_a_measurement_on_quiet_cores_is_kept(planner):
    assert measure(planner)[1] == ["Measuring what a step takes on this machine."]
    assert measure(planner)[1] == []


def test_a_measurement_on_busy_cores_is_repeated_once_and_the_reason_is_said(planner):
    measure(planner, BusyProbe)
    again, messages = measure(planner)
    assert messages == [
        "Measuring once more: the earlier measurement was made while other programs used 43 % of the CPU.",
        "Measuring what a step takes on this machine.",
    ]
    assert again.other_cpu_percent == 0
    assert measure(planner)[1] == []


def test_on_a_machine_that_is_always_busy_the_second_measurement_is_kept_with_its_load(planner):
    measure(planner, BusyProbe)
    assert len(measure(planner, BusyProbe)[1]) == 2
    kept, messages = measure(planner, BusyProbe)
    assert messages == []
    assert kept.other_cpu_percent == 43.2
    planner.tuned(kept, cache=True)
    planner.tuned(kept, cache=True)
    assert planner.measurer.measured_in_warmup(planner.execution()).other_cpu_percent == 43.2
    assert planner.display.messages == []


def test_a_message_says_which_recipe_and_which_configuration_is_measured(planner):
    how = {"gradient_checkpointing": "all", "allocator": "compact", "precision": "bfloat16"}
    _, (message,) = measure(planner, subject="smaller recipe 2 of 5: model.hidden_size=64", **how)
    assert message == (
        "Measuring what a step takes on this machine (smaller recipe 2 of 5: model.hidden_size=64; in "
        "bfloat16; every layer recomputed in the backward pass; compact allocator)."
    )


def test_an_example_that_takes_longer_than_a_probe_may_is_an_error_that_names_the_keys(planner):
    with pytest.raises(ConfigError, match="more than 10 minutes") as refused:
        measure(planner, EndlessProbe)
    assert "training.depths" in refused.value.hint


def test_a_warm_up_on_busy_cores_is_repeated_and_the_reason_is_said(planner):
    measured, _ = measure(planner, BusyProbe)
    planner.tuned(measured, cache=True)
    assert planner.without_probe().provisional
    assert planner.display.messages == [
        "Tuning once more: the earlier measurement was made while other programs used 43 % of the CPU."
    ]


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (None, "A step takes about 600 ms; all"),
        (43.2, "A step takes about 600 ms (measured while other programs used 43 % of the CPU); all"),
    ],
)
def test_the_time_of_a_step_is_shown_with_the_load_under_which_it_was_measured(planner, load, said):
    config: RunConfig = planner.config
    display = Recorder()
    plan = Plan.of(Execution(), 1, 6, samples_per_second=10.0, other_cpu_percent=load)
    show_plan(display, config, plan)
    assert display.messages[-1].startswith(said)
