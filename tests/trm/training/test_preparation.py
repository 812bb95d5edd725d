"""Everything before the first step: data, checks, and the plan."""

import json
from itertools import groupby

import psutil
import pytest
import torch
from tiny import Recorder, run, run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError, DataError, MemoryBudgetError, RunError
from trm.config import load_config
from trm.runs.directory import Run, set_aside
from trm.runs.listing import list_runs
from trm.training.preparation import prepare

BUILD_FILE = {"size": 4, "difficulty": "easy", "train": 40, "test": 12}
BY_HAND = {"threads": 1, "micro_batch_size": 6}  # so that nothing is measured


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


# Data


def test_a_missing_dataset_is_built_if_the_recipe_says_how(tmp_path):
    config = run_config(tmp_path, data={"path": str(tmp_path / "set"), "build": BUILD_FILE}, plan=BY_HAND)
    display = Recorder()
    assert prepare(config, tmp_path / "run", display).plan.micro_batch_size == 6
    assert (tmp_path / "set" / "train").is_dir()
    assert display.messages[0] == f"There is no {tmp_path / 'set'} yet; building it."
    with pytest.raises(DataError, match="There is no dataset"):
        prepare(run_config(tmp_path / "nowhere"), tmp_path / "other", Recorder())
    misspelt = run_config(tmp_path, data={"path": str(tmp_path / "third"), "build": {"sise": 4}})
    with pytest.raises(ConfigError, match="unknown key sise; did you mean size"):
        prepare(misspelt, tmp_path / "other", Recorder())


class Announcements(Recorder):
    """Records what is announced, and progress only as such."""

    def __init__(self):
        super().__init__(lambda what, done: self.announced.append("progress"))
        self.announced = []

    def status(self, text, *, plain=False):
        self.announced.append(text)


def test_every_stage_is_announced_before_it_begins(tmp_path):
    config = run_config(tmp_path, data={"path": str(tmp_path / "set"), "build": BUILD_FILE}, plan=BY_HAND)
    display = Announcements()
    prepare(config, tmp_path / "run", display)
    stages = [stage for stage, _ in groupby(display.announced)]
    assert stages == [
        "Building the dataset",
        "progress",
        "Writing the dataset",
        "Verifying the dataset",
        "Choosing a plan",
    ]


def recipe_that_builds(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    tree = run_config(tmp_path, data={"path": str(tmp_path / "set"), "build": BUILD_FILE}, plan=BY_HAND)
    recipe.write_text(tree.to_yaml())
    return recipe


def test_a_misspelt_data_path_is_an_error_and_nothing_is_built_there(tmp_path):
    path = tmp_path / "sett"
    config = load_config(recipe_that_builds(tmp_path), [f"data.path={path}"])
    with pytest.raises(DataError, match="There is no dataset at") as refused:
        prepare(config, tmp_path / "run", Recorder())
    assert f"trm data build TASK --out {path}" in refused.value.hint
    assert not path.exists()
    assert not (tmp_path / "run").exists()


def test_a_data_path_with_build_options_is_built(tmp_path):
    path = tmp_path / "other"
    options = [f"data.path={path}", "data.build={size: 4, difficulty: easy, train: 20, test: 4}"]
    prepare(load_config(recipe_that_builds(tmp_path), options), tmp_path / "run", Recorder())
    assert (path / "train").is_dir()
    assert not (tmp_path / "set").exists()


def test_a_data_path_with_one_changed_build_option_is_built_with_the_other_options(tmp_path):
    options = [f"data.path={tmp_path / 'other'}", "data.build.train=20"]
    config = load_config(recipe_that_builds(tmp_path), options)
    assert config.data.build == {**BUILD_FILE, "train": 20}


def test_a_data_path_that_exists_needs_no_build_options(tmp_path, dataset):
    config = load_config(recipe_that_builds(tmp_path), [f"data.path={dataset}"])
    assert config.data.build is None
    prepare(config, tmp_path / "run", Recorder())


@pytest.mark.parametrize(
    ("loading", "shown"),
    [
        ({}, "Data: held in memory. The dataset has"),
        ({"enable_caching": False}, "Data: memory-mapped. The dataset has"),
        ({"force_streaming_mode": True}, "Data: streaming. The dataset has"),
    ],
)
def test_how_the_dataset_is_read_is_shown_with_the_reason(tmp_path, dataset, loading, shown):
    data = {"path": str(dataset), "loading": loading}
    display = Recorder()
    prepare(run_config(dataset, data=data, plan=BY_HAND), tmp_path / "run", display)
    (text,) = (text for text in display.messages if text.startswith("Data"))
    assert text.startswith(shown)


# Runs


def test_a_fresh_start_sets_the_earlier_run_aside(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    other = run_config(dataset, seed=1, plan=BY_HAND)
    prepare(other, tmp_path / "run", Recorder(), fresh=True)
    assert [summary.path for summary in list_runs(tmp_path)] == [str(tmp_path / "run.1")]


def test_a_directory_that_is_not_a_run_is_not_set_aside(tmp_path):
    letters = tmp_path / "letters"
    letters.mkdir()
    assert set_aside(letters) is None, "an empty directory needs no room"
    (letters / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="is not a run, so it stays"):
        set_aside(letters)


def test_a_recipe_without_a_model_gets_the_size_for_this_machine(tmp_path, dataset):
    config = run_config(dataset, plan={"threads": 1, "micro_batch_size": 2})
    tree = config.model_dump(mode="json", exclude={"model"})
    display = Recorder()
    job = prepare(type(config).model_validate(tree), tmp_path / "run", display)
    assert job.config.model.hidden_size in (256, 384, 512)
    assert any("has no model section" in text for text in display.messages)
    run(config, tmp_path / "other", max_step=1)
    again = prepare(type(config).model_validate(tree), tmp_path / "other", Recorder())
    assert again.config.model == config.model, "a run keeps its model"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model__L_layers": 100_000}, ConfigError),
        ({"model__L_cycles": 2**31 - 1}, ConfigError),
        ({"model__hidden_size": 2**16}, MemoryBudgetError),
        ({"training__supervision": "terminal", "training__depths": {0: 10**9}}, ConfigError),
        ({"training__effective_batch_size": 2**31 - 1}, MemoryBudgetError),
        ({"inference": {"depth": 2**31 - 1}}, ConfigError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_absurd_sizes_are_refused_before_anything_is_built_or_measured(tmp_path, changes, error):
    display = Recorder()
    data = {"path": str(tmp_path / "set"), "build": BUILD_FILE}
    with pytest.raises(error):
        prepare(run_config(tmp_path, data=data, **changes), tmp_path / "run", display)
    assert display.messages == []
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_without_a_model_is_checked_with_the_size_for_this_machine(tmp_path):
    data = {"path": str(tmp_path / "set"), "build": BUILD_FILE}
    config = run_config(tmp_path, data=data, training__effective_batch_size=2**31 - 1)
    tree = config.model_dump(mode="json", exclude={"model"})
    display = Recorder()
    with pytest.raises(MemoryBudgetError):
        prepare(type(config).model_validate(tree), tmp_path / "run", display)
    (message,) = display.messages
    assert "has no model section" in message
    assert not (tmp_path / "set").exists()


def test_the_files_of_an_arc_recipe_are_read_by_the_build_only(tmp_path):
    data = {"path": str(tmp_path / "set"), "build": {"test": [str(tmp_path / "missing.json")]}}
    display = Recorder()
    with pytest.raises(DataError, match=r"missing\.json"):
        prepare(run_config(tmp_path, task="arc", data=data), tmp_path / "run", display)
    assert display.messages == [f"There is no {tmp_path / 'set'} yet; building it."]
    absurd = run_config(tmp_path, task="arc", data=data, model__hidden_size=2**16)
    with pytest.raises(MemoryBudgetError):
        prepare(absurd, tmp_path / "run", display)


# Plans


def test_impossible_plan_settings_are_corrected_with_a_warning(tmp_path, dataset):
    display = Recorder()
    config = run_config(dataset, plan={"threads": 10_000, "micro_batch_size": 999})
    plan = prepare(config, tmp_path / "run", display).plan
    assert (plan.micro_batch_size, plan.execution.threads) == (6, psutil.cpu_count(logical=False))
    warnings = [text for text in display.messages if text.startswith("warning: ")]
    assert len(warnings) == 2
    assert "plan.threads is" in warnings[0]
    assert "instead of 10000" in warnings[0]


def test_deterministic_training_resumes_with_the_plan_that_it_has(tmp_path, dataset):
    changes = {"training__deterministic": True, "training__effective_batch_size": 8}
    first = run_config(dataset, plan={"threads": 1, "micro_batch_size": 4}, **changes)
    run(first, tmp_path / "run", max_step=1)
    torch.use_deterministic_algorithms(False)
    as_measured = run_config(dataset, plan={}, **changes)
    assert prepare(as_measured, tmp_path / "run", Recorder()).plan.micro_batch_size == 4
    by_hand = run_config(dataset, plan={"threads": 1, "micro_batch_size": 2}, **changes)
    assert prepare(by_hand, tmp_path / "run", Recorder()).plan.micro_batch_size == 2


def test_a_plan_for_another_device_is_not_kept(tmp_path, dataset):
    plan = {"threads": 1, "micro_batch_size": 4}
    config = run_config(dataset, plan=plan, training__deterministic=True)
    run(config, tmp_path / "run", max_step=1)
    torch.use_deterministic_algorithms(False)
    there = Run(tmp_path / "run")
    assert there.plan.execution.device == "cpu"
    there.write("plan.json", json.dumps(there.plan.with_execution(device="mps").to_json()))
    assert prepare(config, tmp_path / "run", Recorder()).plan.execution.device == "cpu"


@pytest.mark.slow
def test_a_plan_is_measured_explained_and_cached(tmp_path, dataset, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("trm.planning.measurements.BUSY_PERCENT", 101)
    display = Recorder()
    config = run_config(dataset, plan={}, limits={"memory_limit_mb": 4000})
    job = prepare(config, tmp_path / "run", display)
    assert job.plan.predicted_peak_bytes < job.plan.budget_bytes
    assert {"micro_batch_size", "threads", "memory", "precision"} <= set(job.plan.reasons)
    assert any("Measuring" in text for text in display.messages)
    again = Recorder()
    assert prepare(config, tmp_path / "run", again).plan.memory == job.plan.memory
    assert not any("Measuring" in text for text in again.messages)


@pytest.mark.slow
def test_a_model_that_cannot_fit_is_refused_with_alternatives_and_fitted_on_request(tmp_path, dataset):
    too_large = {"hidden_size": 1024, "mixer": "mlp", "pos_encodings": "none", "L_cycles": 1, "H_cycles": 1}
    config = run_config(dataset, model=too_large, limits={"memory_limit_mb": 500})
    with pytest.raises(
        MemoryBudgetError, match=r"needs about \d+ MiB.*Changes that should fit: model.hidden"
    ):
        prepare(config, tmp_path / "run", Recorder())
    display = Recorder()
    job = prepare(config, tmp_path / "run", display, fit=True)
    assert 128 <= job.config.model.hidden_size < 1024
    assert job.plan.predicted_peak_bytes < 500 * 2**20
    assert any("(smaller recipe 1 of " in text for text in display.messages)
    assert any("--fit changes it:\n  model.hidden_size=" in text for text in display.messages)
