"""What `trm runs` says of runs whose files are damaged."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from faults.operations import in_fork

from macbook_optimization.errors import RunError
from trm.runs.directory import EVENTS, METRICS
from trm.runs.listing import describe_runs, list_runs

EARLIER = Path(__file__).parents[2] / "fixtures" / "earlier"


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(EARLIER / "mixer", tmp_path / "run")


def describe(found):
    (line,) = describe_runs([found])
    return line


def the_summary(run):
    (found,) = list_runs(run.parent)
    return found


def test_an_intact_run_has_seconds_and_no_problem(run):
    found = the_summary(run)
    assert found.seconds is not None
    assert found.problem is None
    assert "(" not in describe(found)


def test_a_run_is_listed_alone_when_it_is_named_itself(run):
    assert list_runs(run) == list_runs(run.parent)


def test_the_columns_of_several_runs_are_aligned(run):
    shutil.copytree(run, run.parent / "a-run-with-a-long-name")
    other = shutil.copytree(run, run.parent / "unreadable")
    (other / "recipe.yaml").write_text("- garbage")
    lines = describe_runs(list_runs(run.parent))
    assert len(lines) == 3
    for column in ("step 20/", " s  ", "exact accuracy"):
        assert len({line.index(column) for line in lines}) == 1
    assert lines[0].index("sudoku") == lines[1].index("sudoku") == lines[2].index("?")


def test_a_name_cannot_imitate_another_line_or_control_the_terminal(run):
    run.rename(run.parent / "\x1b[2Ja\nb")
    (line,) = describe_runs(list_runs(run.parent))
    assert line.startswith(rf"{run.parent}/\x1b[2Ja\nb  sudoku  finished")


@pytest.mark.parametrize(
    "content", [b"garbage\n" * 100, b'{"seconds": "many"}\n', b'{"seconds": 1e999}\n', b"5"]
)
def test_metrics_that_cannot_be_read_are_mentioned(run, content):
    (run / METRICS).write_bytes(content)
    found = the_summary(run)
    assert found.seconds is None
    assert describe(found).endswith("(metrics.jsonl has no row that can be read)")
    assert found.accuracy is not None, "the rest is known"


@pytest.mark.parametrize("prepare", [os.unlink, lambda path: os.truncate(path, 0)], ids=["missing", "empty"])
def test_a_run_without_metrics_yet_has_no_problem(run, prepare):
    prepare(run / METRICS)
    assert (the_summary(run).seconds, the_summary(run).problem) == (None, None)


def test_metrics_that_are_a_pipe_or_huge_do_not_stop_the_listing(run):
    (run / METRICS).unlink()
    os.mkfifo(run / METRICS)
    assert the_summary(run).seconds is None
    (run / METRICS).unlink()
    (run / METRICS).touch()
    os.truncate(run / METRICS, 1 << 33)
    assert the_summary(run).problem == "metrics.jsonl has no row that can be read"


def test_a_recipe_that_cannot_be_read_is_mentioned(run):
    (run / "recipe.yaml").write_text("- garbage")
    found = the_summary(run)
    assert (found.state, found.task, found.max_steps) == ("finished", None, None)
    assert "recipe.yaml is not a recipe" in describe(found)


def test_a_long_problem_takes_one_line_of_the_table(run):
    (run / "recipe.yaml").write_text("task: sudoku\nmodle: {}\ndata: 5\n")
    found = the_summary(run)
    assert "\n" in found.problem
    assert "\n" not in describe(found)


def test_the_seconds_are_those_of_the_newest_stop_whatever_is_recorded_after_it(run):
    before = the_summary(run).seconds
    with (run / EVENTS).open("a") as file:
        file.write('{"event": "stopped", "seconds": 5000.5}\n{"event": "plan"}\n')
    assert before < the_summary(run).seconds == 5000.5


def test_seconds_after_the_newest_stop_count(run):
    with (run / EVENTS).open("a") as file:
        file.write('{"event": "stopped", "seconds": 5000.5}\n')
    with (run / METRICS).open("a") as file:
        file.write('{"seconds": 6000}\n')
    assert the_summary(run).seconds == 6000


def as_another_user(function):
    """Call the function in a fork without root's rights; return whether it raised nothing."""

    def call():
        if os.geteuid() == 0:
            os.seteuid(65534)
        function()

    return in_fork(call) == 0


def test_a_directory_that_must_not_be_entered_does_not_stop_the_listing():
    with tempfile.TemporaryDirectory() as name:  # every parent can be entered
        root = Path(name)
        root.chmod(0o755)
        (root / "closed").mkdir(mode=0)
        assert as_another_user(lambda: list_runs(root))


def test_a_place_that_is_not_a_directory_is_an_error(run, tmp_path):
    with pytest.raises(RunError, match="There is no directory"):
        list_runs(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a directory"):
        list_runs(run / METRICS)
