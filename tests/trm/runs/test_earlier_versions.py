"""Runs of earlier versions are read and resumed. The names are those that such a run has on disk."""

import pytest
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.checkpoint_files import Checkpoint
from trm.runs.directory import EVENTS, METRICS, Run, begin
from trm.runs.listing import list_runs
from trm.runs.metric import primary_metric
from trm.runs.saved_state import SavedState, read_state
from trm.tasks.dataset import open_split
from trm.training.loop import Limits
from trm.training.start import train

EARLIER_SPEC = {"max_len": "seq_len", "num_outputs": "output_vocab_size"}
EARLIER_PLAN = {"workers": "lanes", "provisional": "settling"}
NEW_IN_PLANS = {"backend", "device", "deterministic", "compiled_size"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def renamed(facts, names):
    return {names.get(name, name): value for name, value in facts.items()}


def earlier_plan(plan):
    return renamed({name: value for name, value in plan.items() if name not in NEW_IN_PLANS}, EARLIER_PLAN)


def earlier_best(best):
    facts = dict(best)
    del facts["kind"]
    with_ = facts.pop("evaluated_with")
    facts["headline"] = facts.pop("primary_metric")
    facts["judged_by"] = {
        "depth": with_["depth"],
        "settle": with_["converged_after"],
        "halt": with_["halt"],
        "tries": with_["retries"] + 1,
        "noise": with_["noise"],
        "guesses": with_["guesses"],
        "examples": with_["examples"],
        "data": with_["data"],
    }
    return facts


def earlier_recipe(recipe):
    model = dict(recipe["model"])
    mixer = model.pop("mixer")
    model.pop("neighbourhood_size", None)
    model.update(mlp_t=mixer == "mlp", neighbourhood=None, candidates=mixer == "candidates")
    return {**recipe, "model": model}


def earlier_state(state):
    """Rename what `state.json` contains to what an earlier version wrote."""
    facts = {name: value for name, value in state.items() if name not in ("spec", "step")}
    spec = {name: value for name, value in state["spec"].items() if name != "class_names"}
    return {
        **facts,
        "recipe": earlier_recipe(state["recipe"]),
        "shape": renamed(spec, EARLIER_SPEC),
        "plan": earlier_plan(state["plan"]),
        "best": None if state["best"] is None else earlier_best(state["best"]),
    }


@pytest.fixture
def earlier_run(tmp_path, dataset):
    """A run after 12 of 20 steps, rewritten as an earlier version would have left it."""
    config = run_config(dataset)
    run(config, tmp_path / "now", max_step=12)
    now, earlier = Run(tmp_path / "now"), Run(tmp_path / "earlier")
    begin(earlier, config)
    for each in reversed(list(now.checkpoints().intact_checkpoints())):
        earlier.checkpoints().save(each.step, each.load_all(), earlier_state(each.metadata))
    earlier.checkpoints().mark_best(earlier_best(now.checkpoints().best()))
    for row in now.rows():
        earlier.append(METRICS, {name: value for name, value in row.items() if name != "kind"})
    for row in now.rows(EVENTS):
        if row["event"] != "limits":  # which earlier versions did not record
            earlier.append(EVENTS, earlier_plan(row) if row["event"] == "plan" else row)
    return earlier


@pytest.mark.slow
def test_an_earlier_run_resumes_where_it_was_and_learns_the_same(tmp_path, dataset, earlier_run):
    config = earlier_run.config
    display = Recorder()
    outcome = train(config, earlier_run.path, plan_of(config), Limits(), display)
    assert display.messages[0] == f"Resuming {earlier_run.path} after step 12."
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    run(config, tmp_path / "whole")
    whole, resumed = (run_.checkpoints().newest_intact() for run_ in (Run(tmp_path / "whole"), earlier_run))
    assert resumed.metadata["slots"] == whole.metadata["slots"]
    for group, tensors in whole.load_all().items():
        theirs = resumed.load(group)
        assert all((tensor == theirs[name]).all() for name, tensor in tensors.items())


def test_the_best_of_an_earlier_run_is_still_its_best(earlier_run):
    config = earlier_run.config
    outcome = train(config, earlier_run.path, plan_of(config), Limits(max_step=12), Recorder())
    assert outcome.best["step"] == 10
    assert outcome.best["headline"] == "exact_accuracy"


def test_a_best_with_another_depth_is_not_compared_in_an_earlier_run_either(earlier_run, dataset):
    deeper = run_config(dataset, inference__depth=4)
    outcome = train(deeper, earlier_run.path, plan_of(deeper), Limits(max_step=12), Recorder())
    assert outcome.best is None


def test_an_earlier_run_is_listed_with_its_metric(earlier_run):
    found = {summary.path: summary for summary in list_runs(earlier_run.path.parent)}
    now, earlier = (found[str(earlier_run.path.parent / name)] for name in ("now", "earlier"))
    assert (earlier.step, earlier.seconds, earlier.state) == (now.step, now.seconds, "stopped")
    assert (earlier.primary_metric, earlier.accuracy) == (now.primary_metric, now.accuracy)


def test_the_rows_of_an_earlier_run_are_followed_with_their_kinds(earlier_run):
    kinds = [row["kind"] for row in earlier_run.follow().read()]
    assert kinds == ["eval", "train", "event", "event", "event"]


def test_the_state_of_an_earlier_version_has_the_present_names(dataset, earlier_run):
    checkpoint = earlier_run.checkpoints().newest_intact()
    assert {"shape", "plan"} <= set(checkpoint.metadata)
    state = read_state(checkpoint)
    spec = open_split(dataset, "train").spec
    assert state.data_spec() == spec
    assert set(state.model_dump()["spec"]) == {
        "max_len", "vocab_size", "num_outputs", "num_puzzle_identifiers", "class_names",
    }  # fmt: skip


def test_a_state_that_was_saved_during_an_earlier_warm_up_is_read(earlier_run):
    metadata = earlier_run.checkpoints().newest_intact().metadata
    settling = {**metadata, "plan": {**metadata["plan"], "settling": True, "lanes": 2}}
    assert SavedState.model_validate(settling).plan["lanes"] == 2
    assert isinstance(read_state(Checkpoint(earlier_run.path, 12, settling)), SavedState)


@pytest.mark.parametrize(
    ("best", "metric"),
    [
        ({"primary_metric": "correct", "correct": 0.25, "exact_accuracy": 1}, ("correct", 0.25)),
        ({"headline": "task_accuracy", "task_accuracy": 0.5}, ("task_accuracy", 0.5)),
        ({"exact_accuracy": 0.75}, ("exact_accuracy", 0.75)),  # the first versions stored no name
        ({"headline": "task_accuracy"}, None),
        ({}, None),
    ],
)
def test_the_primary_metric_is_found_under_every_name_that_it_had(best, metric):
    assert primary_metric(best) == metric
