"""`trm train RUN` resumes a run with its own recipe, and --more-steps trains a finished one longer."""

import shutil
from pathlib import Path

import forked
import pytest

EARLIER = Path(__file__).parents[2] / "fixtures" / "earlier"


def trm(*arguments, cwd):
    return forked.run(arguments, cwd)


@pytest.fixture
def workspace(tmp_path):
    """A directory with a finished run of an earlier version."""
    shutil.copytree(EARLIER / "set", tmp_path / "set")
    shutil.copytree(EARLIER / "mixer", tmp_path / "run")
    return tmp_path


@pytest.mark.slow
def test_a_finished_run_is_trained_longer_with_one_command(workspace):
    longer = trm("train", "run", "--more-steps", "4", cwd=workspace)
    assert longer.returncode == 0, longer.stderr
    assert "Training run from step 20 to step 24" in longer.stderr
    assert longer.stdout.startswith("Trained all steps after step 24,")
    assert longer.stdout.endswith("To train it longer: trm train run --more-steps N\n")
    assert "run  sudoku  finished  step 24/24" in trm("runs", ".", cwd=workspace).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["sudoku-6x6"],
        ["sudoku-6x6", "--run", "run"],
        ["run", "--run", "other"],
        ["run", "--fresh"],
        ["set", "--run", "run"],
    ],
    ids=" ".join,
)
def test_more_steps_need_the_name_of_a_run(workspace, arguments):
    before = (workspace / "run" / "recipe.yaml").read_bytes()
    done = trm("train", *arguments, "--more-steps", "4", cwd=workspace)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert (workspace / "run" / "recipe.yaml").read_bytes() == before
    assert sorted(path.name for path in workspace.iterdir()) == ["run", "set"]
    if arguments == ["sudoku-6x6", "--run", "run"]:
        assert "For example: trm train run --more-steps 4" in done.stderr
    if arguments == ["sudoku-6x6"]:
        assert "`trm runs` lists the runs" in done.stderr
