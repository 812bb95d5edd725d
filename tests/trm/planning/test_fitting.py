"""What is clearly too large is refused by its estimate; measurements decide the rest."""

import pytest
from tiny import Recorder, model_config, run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError, MemoryBudgetError
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.memory_management import MIB, Budget, MemoryModel
from trm.planning.estimates import Estimates, Need, need
from trm.planning.fitting import fitted, too_large
from trm.planning.measurements import Measurements, SizeResult
from trm.planning.planner import Planner
from trm.planning.smaller import smaller_recipes
from trm.tasks.registry import load_task
from trm.training.start import open_splits

LIMIT = 500
LEVELS = ("none", "alternate", "all")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def planner(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    config = run_config(dataset, model__hidden_size=64, limits={"memory_limit_mb": LIMIT})
    task = load_task(config.task)
    train_split, _ = open_splits(config, task)
    hardware = HardwareDetector().detect(with_torch=False)
    return Planner(config, task.complete(train_split.spec), hardware, Recorder())


def estimated_at(planner, *mib, smaller=()):
    """Give the planner estimates, so that none is made."""
    needs = (Need(each, LIMIT, "limits.memory_limit_mb is 500") for each in mib)
    estimates = Estimates(dict(zip(LEVELS, needs, strict=True)), smaller)
    planner.estimated[planner.config.model_dump_json()] = estimates


def measured_at(planner, mib, checkpointing="none", allocator="system"):
    """Give the planner the peak of one example, so that it is not measured; None if it did not survive."""
    size = SizeResult(1, mib * MIB, None, 10.0)
    key = planner.measurer._key(planner.execution(checkpointing=checkpointing, allocator=allocator))
    planner.known[key] = Measurements((size,), {1: [10.0]})


def test_a_recipe_whose_estimate_is_far_above_the_limit_is_refused_without_a_measurement(planner):
    smaller = tuple(smaller_recipes(planner.config))[:2]
    estimated_at(planner, 900, 850, 800, smaller=smaller)
    assert planner.choose() is None
    assert planner.display.messages == []
    refused = too_large(planner)
    assert "needs about 800 MiB even with one example at a time; 500 MiB is allowed" in str(refused)
    assert "Changes that should fit: model.hidden_size=48" in str(refused)


def test_near_the_limit_a_measurement_decides(planner):
    estimated_at(planner, 900, 850, 650)
    measured_at(planner, 430, checkpointing="all")
    plan = planner.choose()
    assert plan.execution.gradient_checkpointing == "all"
    assert plan.reasons["gradient_checkpointing"] == "needed to fit the memory budget"


def test_one_example_that_leaves_no_margin_is_too_large(planner):
    estimated_at(planner, 500, 490, 480)
    for level, allocator in (*((each, "system") for each in LEVELS), ("all", "compact")):
        measured_at(planner, 460, level, allocator)
    assert planner.choose() is None


def test_nothing_more_is_measured_once_no_saving_can_suffice(planner):
    estimated_at(planner, 600, 580, 570)
    measured_at(planner, 620)
    assert planner.choose() is None
    assert planner.display.messages == []


def test_a_recipe_in_a_roomy_budget_is_not_even_estimated(planner):
    roomy = planner.config.model_copy(
        update={"limits": planner.config.limits.model_copy(update={"memory_limit_mb": 8000})}
    )
    wide = type(planner)(roomy, planner.data, planner.hardware, planner.display)
    measured_at(wide, 300)
    assert wide.choose().micro_batch_size == 1
    assert wide.estimated == {}


def test_the_scarcer_kind_of_memory_decides():
    step = MemoryModel(100 * MIB, 80 * MIB)
    process = {"resident": 270 * MIB, "address_space": 1170 * MIB}
    assert need(step, process, Budget(1000 * MIB, None, "a limit")) == Need(500, 1000, "a limit")
    limited = need(step, process, Budget(1000 * MIB, 1200 * MIB, "a limit"))
    assert (limited.mib, limited.limit_mib) == (1500, 1200)
    assert "ulimit -v" in limited.reason
    assert need(step, process, Budget(100 * MIB, 9000 * MIB, "a limit")).reason == "a limit"


def test_fit_takes_the_first_smaller_recipe_that_fits_and_numbers_its_attempts(planner):
    first, second = tuple(smaller_recipes(planner.config))[:2]
    estimated_at(planner, 900, 850, 800, smaller=(first, second))
    for (_, config), peak in ((first, 620), (second, 300)):
        candidate = type(planner)(
            config, planner.data, planner.hardware, planner.display, "", planner.known, planner.estimated
        )
        estimated_at(candidate, 500, 490, 480)
        measured_at(candidate, peak)
    found = fitted(planner)
    assert found.config == second[1]
    assert found.subject == "smaller recipe 2 of 2: model.hidden_size=32"
    assert planner.display.messages == ["The recipe does not fit; --fit changes it:\n  model.hidden_size=32"]


def test_fit_does_not_look_for_smaller_recipes_where_only_other_keys_are_absurd(planner):
    deep = model_config(mixer="mlp", pos_encodings="none", L_layers=100_000)
    absurd = planner.config.model_copy(update={"model": deep})
    with pytest.raises(ConfigError, match="the limit is 1,000 layers"):
        fitted(type(planner)(absurd, planner.data, planner.hardware, planner.display))
    assert planner.display.messages == []


@pytest.mark.slow
def test_one_process_estimates_the_recipe_and_smaller_ones(planner):
    wide = {"hidden_size": 2048, "mixer": "mlp", "pos_encodings": "none"}
    config = planner.config.model_copy(update={"model": model_config(**wide)})
    large = type(planner)(config, planner.data, planner.hardware, planner.display)
    estimates = large.estimates()
    assert list(estimates.by_checkpointing) == list(LEVELS)
    assert estimates.least.is_clearly_too_large
    assert [changes for changes, _ in estimates.smaller][-1] == ["model.hidden_size=16"]
    assert large.estimates() is estimates
    with pytest.raises(MemoryBudgetError, match="Changes that should fit"):
        raise too_large(large)
