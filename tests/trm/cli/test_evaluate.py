"""`trm eval`: which examples, how deep, and what a submission needs."""

import json
import os
import shutil

import pytest
from arc_tasks import arc_dataset
from click.testing import CliRunner
from tiny import model_config, run, run_config, sudoku_dataset

from macbook_optimization.errors import DataError
from trm.cli import cli

NUM_TESTS = [1, 2, 1]


@pytest.fixture
def invoke(monkeypatch):
    """Run the command in this process and return its result; errors are raised."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def invoked(*arguments):
        result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result

    return invoked


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory):
    """A run of one step on three tasks with four tests, in six variants each."""
    directory = tmp_path_factory.mktemp("arc")
    config = run_config(
        arc_dataset(directory, NUM_TESTS, 5),
        task="arc",
        training__effective_batch_size=1,
        inference={"depth": 1},
        evaluation={"every_steps": None, "examples": 5},
    )
    run(config, directory / "run", max_step=1)
    return directory / "run"


@pytest.fixture(scope="module")
def sudoku_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sudoku")
    config = run_config(
        sudoku_dataset(directory / "set"),
        training__max_steps=1,
        model=model_config().model_dump(),  # whose answers converge within five steps
        inference={"depth": 30, "converged_after": 1},
    )
    run(config, directory / "run")
    return directory / "run"


@pytest.mark.parametrize(
    ("options", "examples", "tasks"), [((), 5, 3), (("--examples", 2), 2, 2), (("--examples", "all"), 24, 3)]
)
def test_the_number_of_examples_is_the_recipes_or_as_given(invoke, arc_run, options, examples, tasks):
    facts = json.loads(invoke("eval", arc_run, "--json", *options).stdout)
    assert (facts["examples"], facts["tasks_evaluated"], facts["tasks_total"]) == (examples, tasks, 3)


def test_the_report_says_how_many_of_the_tasks_were_evaluated(invoke, arc_run):
    assert "on 5 test examples of" in (text := invoke("eval", arc_run).stdout)
    assert "set, 3 of 3 tasks:" in text


@pytest.mark.parametrize("value", ["0", "-3", "some", "1.5"])
def test_a_number_of_examples_that_is_none_is_refused(arc_run, value):
    result = CliRunner().invoke(cli, ["eval", str(arc_run), "--examples", value])
    assert result.exit_code == 2
    assert "is neither a number of examples, 1 or more, nor 'all'" in result.stderr


def test_a_submission_covers_every_test_whatever_the_recipe_limits(invoke, arc_run, tmp_path):
    result = invoke("eval", arc_run, "--submission", tmp_path / "submission.json", "--json")
    facts = json.loads(result.stdout)
    assert facts["examples"] == 24
    submission = json.loads((tmp_path / "submission.json").read_text())
    assert [len(submission[f"task{number:02d}"]) for number in range(3)] == NUM_TESTS
    assert all(set(test) == {"attempt_1", "attempt_2"} for tests in submission.values() for test in tests)
    missing = facts["tests_without_answer"]  # of an untrained model
    assert (f"no valid answer to {missing} tests" in result.stderr) == bool(missing)


def test_a_submission_with_too_few_examples_is_refused_before_anything_is_evaluated(
    invoke, arc_run, tmp_path
):
    with pytest.raises(DataError, match="With 3 examples, 1 of 4 tests would have no answer") as refused:
        invoke("eval", arc_run, "--submission", tmp_path / "submission.json", "--examples", 3)
    assert "--examples 4 or more" in refused.value.hint
    assert "all 24 examples" in refused.value.hint
    assert not (tmp_path / "submission.json").exists()
    facts = json.loads(
        invoke(
            "eval", arc_run, "--submission", tmp_path / "submission.json", "--examples", 4, "--json"
        ).stdout
    )
    assert facts["examples"] == 4


def test_a_submission_of_a_dataset_that_does_not_ask_every_test_is_refused(invoke, arc_run, tmp_path):
    """Its tasks are those of another dataset, with one more."""
    other = arc_dataset(tmp_path, [*NUM_TESTS, 1], 1)
    set_ = arc_run.parent / "set"
    kept = (set_ / "test_puzzles.json").read_bytes()
    try:
        (set_ / "test_puzzles.json").write_bytes((other / "test_puzzles.json").read_bytes())
        with pytest.raises(DataError, match="lacks 1 of the 5 tests"):
            invoke("eval", arc_run, "--submission", tmp_path / "submission.json")
    finally:
        (set_ / "test_puzzles.json").write_bytes(kept)


def test_a_dataset_without_any_test_task_is_refused(invoke, arc_run, tmp_path):
    set_ = arc_run.parent / "set"
    kept = (set_ / "test_puzzles.json").read_bytes()
    try:
        (set_ / "test_puzzles.json").write_text("{}")
        with pytest.raises(DataError, match=r"test_puzzles\.json has no test") as refused:
            invoke("eval", arc_run, "--submission", tmp_path / "submission.json")
        assert "again" in refused.value.hint
    finally:
        (set_ / "test_puzzles.json").write_bytes(kept)


def test_a_task_without_a_competition_has_no_submission(invoke, sudoku_run, tmp_path):
    with pytest.raises(DataError, match="has no competition to submit to"):
        invoke("eval", sudoku_run, "--submission", tmp_path / "submission.json")


def test_a_depth_keeps_the_recipes_early_exit_unless_it_is_switched_off(invoke, sudoku_run):
    steps = {
        options: json.loads(invoke("eval", sudoku_run, "--json", *options).stdout)["mean_steps"]
        for options in [
            (),
            ("--depth", 40),
            ("--depth", 40, "--converged-after", 0),
            ("--converged-after", 0),
        ]
    }
    assert steps["--depth", 40] == steps[()] < 30, (
        "the same answers converge, no matter how deep they could go"
    )
    assert steps["--depth", 40, "--converged-after", 0] == 40
    assert steps["--converged-after", 0] == 30


def test_progress_is_shown_within_a_batch(invoke, sudoku_run, monkeypatch):
    """All twelve examples are one batch, so there is nothing to report between batches."""
    shown = []
    monkeypatch.setattr(
        "macbook_optimization.progress_monitoring.ProgressDisplay.update",
        lambda self, what, done, total, facts="": shown.append((what, done, total, facts)),
    )
    invoke("eval", sudoku_run, "--converged-after", 0)
    assert shown[0] == ("evaluating", 0, 12, "step 1/30")
    assert len(shown) == 31


@pytest.fixture
def trained(tmp_path, sudoku_run):
    return shutil.copytree(sudoku_run, tmp_path / "trained")


@pytest.mark.parametrize("command", ["eval", "predict", "export", "import"])
def test_a_command_that_cannot_use_the_best_checkpoint_says_which_one_it_uses(
    invoke, trained, tmp_path, command
):
    (trained / "best").write_text("nonsense")
    arguments = {
        "eval": ("eval", trained, "--json"),
        "predict": ("predict", trained, "--example", 0, "--json"),
        "export": ("checkpoint", "export", trained, tmp_path / "weights.pt", "--json"),
        "import": ("checkpoint", "import", trained, trained / "recipe.yaml", "--run", tmp_path / "new"),
    }[command]
    result = invoke(*arguments)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("warning:"))
    assert "best cannot be read, or does not name a checkpoint; step-00000001, the newest" in line
    if command in ("eval", "predict"):
        assert json.loads(result.stdout)["checkpoint"] == "step-00000001"
    if command == "export":
        assert json.loads(result.stdout)["step"] == 1


def test_a_run_with_its_best_checkpoint_gets_no_warning(invoke, trained):
    assert "warning" not in invoke("eval", trained).stderr
    assert "warning" not in invoke("checkpoint", "verify", trained).stdout


def test_verification_says_that_the_best_checkpoint_cannot_be_used(invoke, trained):
    (trained / "best").write_text("nonsense")
    text = invoke("checkpoint", "verify", trained).stdout
    assert "does not name a checkpoint; the newest intact checkpoint is used for predictions" in text


def test_a_dataset_that_does_not_fit_the_run_is_described_in_words(invoke, trained, tmp_path):
    other = sudoku_dataset(tmp_path / "six", train=4, test=2, size=6)
    with pytest.raises(DataError) as refused:
        invoke("eval", trained, "--data", other)
    assert str(refused.value) == (
        f"{other} does not fit the run: 36 positions, 8 tokens, 8 outputs and 1 puzzle identifier "
        "instead of 16 positions, 6 tokens, 6 outputs and 1 puzzle identifier"
    )


@pytest.mark.parametrize("command", [("eval",), ("predict", "--example", "0")], ids=" ".join)
def test_a_dataset_of_another_task_is_refused_with_its_path(invoke, sudoku_run, arc_run, command):
    other = arc_run.parent / "set"
    with pytest.raises(DataError, match="is not a dataset of the task sudoku: A sequence of 900") as refused:
        invoke(*command, sudoku_run, "--data", other)
    assert str(other) in str(refused.value)
    assert "--data" in refused.value.hint


@pytest.mark.slow
def test_one_example_and_one_task_are_singular(invoke, sudoku_run, tmp_path):
    assert "on 1 test example of" in invoke("eval", sudoku_run, "--examples", 1).stdout
    assert "on 2 test examples of" in invoke("eval", sudoku_run, "--examples", 2).stdout
    config = run_config(
        arc_dataset(tmp_path, [1], 5),
        task="arc",
        training__effective_batch_size=1,
        inference={"depth": 1},
        evaluation={"every_steps": None},
    )
    run(config, tmp_path / "run", max_step=1)
    assert "set, 1 of 1 task:" in invoke("eval", tmp_path / "run").stdout


def test_an_answer_after_one_step_is_singular(invoke, sudoku_run):
    for depth, steps in ((1, "(after 1 step)"), (2, "(after 2 steps)")):
        assert steps in invoke("predict", sudoku_run, "--example", 0, "--depth", depth).stdout
