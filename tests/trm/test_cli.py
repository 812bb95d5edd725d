"""The command line as a user meets it: real processes, exit codes, one error line and a hint."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import forked
import pytest
from tiny import FOUR, TINY, TRM

from macbook_optimization.errors import DataError, RunError
from trm.cli import cli
from trm.cli.common import OutputOption

ROOT = Path(__file__).parents[2]


def trm(*arguments, cwd, stdin=""):
    return forked.run(arguments, cwd, stdin)


def ok(*arguments, cwd, stdin=""):
    done = trm(*arguments, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fails(code, *arguments, cwd, stdin=""):
    done = trm(*arguments, cwd=cwd, stdin=stdin)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    return done.stderr


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A directory with a short run and its dataset."""
    directory = tmp_path_factory.mktemp("workspace")
    ok("train", "sudoku-6x6", *FOUR, *TINY, "--run", "run", cwd=directory)
    return directory


def test_help_is_shown_immediately():
    """Compared with the start of the interpreter alone; best of five, because machines are noisy."""

    def best_of_five(command):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            times.append(time.perf_counter() - started)
        return min(times)

    assert best_of_five([TRM, "--help"]) - best_of_five([sys.executable, "-c", "pass"]) < 0.3


@pytest.mark.mlx
def test_help_loads_nothing_that_computes():
    code = "import sys, trm.cli; print({'torch', 'mlx', 'numpy', 'pydantic', 'rich'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize(
    "command", ["train", "eval", "predict", "runs", "data build sudoku", "checkpoint import"]
)
def test_every_command_has_help(command, tmp_path):
    assert "Usage: trm" in ok(*command.split(), "--help", cwd=tmp_path)


def test_a_dataset_is_built_once(tmp_path):
    build = ("data", "build", "sudoku", "--size", 4, "--train", 30, "--test", 8, "--out", "set")
    assert json.loads(ok(*build, "--json", cwd=tmp_path)) == {"path": "set", "train": 30, "test": 8}
    assert "set already exists" in fails(1, *build, cwd=tmp_path)


@pytest.mark.slow
def test_the_outcome_of_training_is_available_as_json(workspace):
    facts = json.loads(ok("train", "sudoku-6x6", *FOUR, *TINY, "--run", "run", "--json", cwd=workspace))
    assert (facts["reason"], facts["step"]) == ("max_steps", 40)
    assert 0 <= facts["best"]["exact_accuracy"] <= 1


def test_runs_are_listed(workspace):
    (found,) = json.loads(ok("runs", ".", "--json", cwd=workspace))
    assert (found["path"], found["task"], found["step"], found["max_steps"]) == ("run", "sudoku", 40, 40)
    assert "run  sudoku  finished  step 40/40" in ok("runs", ".", cwd=workspace)
    assert "There are no runs" in ok("runs", cwd=workspace)
    assert ok("runs", "run", cwd=workspace) == ok("runs", ".", cwd=workspace)


@pytest.mark.slow
def test_eval_reports_accuracy_by_depth(workspace):
    facts = json.loads(ok("eval", "run", "--depth", 5, "--json", cwd=workspace))
    assert facts["examples"] == 12
    assert len(facts["accuracy_by_depth"]) == 5
    assert facts["mean_steps"] <= 5
    options = "--depth", 6, "--converged-after", 2, "--retries", 2, "--noise", 1, "--guesses", 2
    text = ok("eval", "run", *options, cwd=workspace)
    assert re.search(r"exact \s*\d+\.\d%.*token \s*\d+\.\d+%.*halting head right", text)
    assert "exact by depth:" in text


@pytest.mark.slow
def test_earlier_option_names_mean_the_same_but_are_not_shown(workspace):
    """--tries counted the first attempt; --retries does not."""
    common = ("--depth", 6, "--noise", 1, "--guesses", 2, "--json")
    present = json.loads(ok("eval", "run", *common, "--converged-after", 2, "--retries", 2, cwd=workspace))
    earlier = json.loads(ok("eval", "run", *common, "--settle", 2, "--tries", 3, cwd=workspace))
    for changing in ("evaluation_seconds", "time"):
        assert present.pop(changing) > 0
        assert earlier.pop(changing) > 0
    assert earlier == present
    for command in ("eval", "predict"):
        text = ok(command, "--help", cwd=workspace)
        assert "--retries" in text
        assert "--settle" not in text
        assert "--tries" not in text


PUZZLE = "1.....3..4.....2"
SMALL = ("--size", "4", "--train", "4", "--test", "2")


@pytest.mark.slow
def test_predict_prints_the_grid_with_given_digits_marked(workspace):
    text = ok("predict", "run", PUZZLE, cwd=workspace)
    grid, _, _ = text.partition("\n\n")
    assert len(re.findall(r"\[\d\]|!", grid)) == 4, "one mark for every given digit, kept or changed"
    assert "given digits are in brackets" in text
    assert "solved" in text


@pytest.mark.slow
def test_predict_shows_how_the_answer_forms(workspace):
    text = ok("predict", "run", PUZZLE, "--steps", "--depth", 3, cwd=workspace)
    assert re.findall(r"step \d", text) == ["step 1", "step 2", "step 3"]


@pytest.mark.slow
def test_predict_answers_an_example_of_the_test_set(workspace):
    facts = json.loads(ok("predict", "run", "--example", 3, "--json", cwd=workspace))
    assert len(facts["question"]) == 16
    assert "There is no test example 99" in fails(1, "predict", "run", "--example", 99, cwd=workspace)


@pytest.mark.slow
def test_a_run_is_exported_and_imported(workspace):
    ok("checkpoint", "export", "run", "weights.pt", cwd=workspace)
    ok("checkpoint", "import", "weights.pt", "sudoku-6x6", *FOUR, *TINY, "--run", "imported", cwd=workspace)
    before, after = (json.loads(ok("eval", run, "--json", cwd=workspace)) for run in ("run", "imported"))
    assert after["exact_accuracy"] == before["exact_accuracy"]
    assert after["token_accuracy"] == before["token_accuracy"]
    outcome = ok("train", "sudoku-6x6", *FOUR, *TINY, "--run", "imported", "--max-steps", 1, cwd=workspace)
    assert "the same command resumes from there." in outcome


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ["predict", "run", "12"], "A 4x4 puzzle has 16 cells; this one has 2"),
        (1, ["predict", "run", "11.............."], "row 1 has two 1s"),
        (1, ["predict", "run", "x..............."], "'x' is not allowed"),
        (1, ["predict", "nowhere", PUZZLE], "nowhere is not a run"),
        (1, ["predict", "run", "-"], "no puzzle on standard input"),
        (1, ["eval", "run", "--data", "nowhere"], "There is no dataset at nowhere"),
        (1, ["runs", "nowhere"], "There is no directory nowhere"),
        (1, ["runs", "run/recipe.yaml"], "run/recipe.yaml is not a directory"),
        (1, ["train", "sudoku-6x6", *FOUR, *TINY, "--run", "set", "--fresh"], "is not a run, so it stays"),
        (2, ["train", "sudoku-6x6", f"seed={2**70}"], "less than"),
        (2, ["train", "sudoku-6x6", "training.effective_batch_size=10000000000000"], "less than"),
        (2, ["train", "no-such-recipe"], "There is no recipe"),
        (2, ["train", "sudoku-6x6", "model.hiden_size=3"], "did you mean hidden_size?"),
        (2, ["train", "sudoku-6x6", "training.learning_rate=fast"], "valid number"),
        (2, ["train", "sudoku-6x6", "task=chess"], "There is no task 'chess'"),
        (2, ["eval", "run", "--retries", "2"], "retries are all the same without noise or guesses"),
        (2, ["eval", "run", "--tries", "3"], "retries are all the same without noise or guesses"),
        (2, ["predict", "run", PUZZLE, "--guesses", "2"], "guesses are made in retries only"),
        (1, ["train", "sudoku-6x6", *FOUR, *TINY, "seed=3", "--run", "run"], "seed is 3 here and 0 in"),
        (1, ["train", "sudoku-6x6", *FOUR, *TINY, "--run", "/proc/run"], "Cannot create the run directory"),
        (1, ["data", "build", "sudoku", *SMALL, "--out", "/proc/set"], "Cannot write the dataset"),
        (1, ["data", "build", "sudoku", "--from", "nowhere.csv", "--out", "new"], "There is no puzzle file"),
        (2, ["data", "build", "sudoku", "--blanks", "-3", "--out", "new"], "blanks is -3"),
        (1, ["checkpoint", "import", "set/build.json", "sudoku-6x6", "--run", "new"], "not a zip file"),
        (1, ["train", "sudoku-extreme", "--run", "new"], "There is no puzzle file data/sudoku.csv.xz"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_error_line_and_loses_nothing(workspace, code, arguments, message):
    before = contents(workspace)
    assert message in fails(code, *arguments, cwd=workspace)
    assert contents(workspace) == before


@pytest.mark.slow
@pytest.mark.parametrize("file", [".", "nowhere/weights.pt"])
def test_an_export_to_an_impossible_file_gets_one_error_line_and_loses_nothing(workspace, file):
    before = contents(workspace)
    assert "cannot be written" in fails(1, "checkpoint", "export", "run", file, cwd=workspace)
    assert contents(workspace) == before


OUTPUTS = {
    "predict png": ("predict", "nowhere", "puzzle", "--png"),
    "predict gif": ("predict", "nowhere", "puzzle", "--gif"),
    "eval submission": ("eval", "nowhere", "--submission"),
    "bench out": ("bench", "--out"),
    "report out": ("report", "nowhere", "--out"),
    "export file": ("checkpoint", "export", "nowhere"),
    "copy file": ("recipes", "copy", "nowhere"),
    "explain html": ("email", "explain", "nowhere", "letter", "--html"),
    "selfcheck out": ("selfcheck", "--out"),
    "eval html": ("email", "eval", "nowhere", "letter", "--html"),
}


def output_options(command):
    if isinstance(command, click.Group):
        return [name for child in command.commands.values() for name in output_options(child)]
    options = [parameter.name for parameter in command.params if isinstance(parameter.type, OutputOption)]
    return [f"{command.name} {name}" for name in options]


def test_the_tests_of_outputs_cover_every_option():
    assert sorted(output_options(cli)) == sorted(OUTPUTS)


@pytest.mark.parametrize("option", OUTPUTS)
def test_an_output_is_checked_before_anything_else(tmp_path, option):
    """Before the run is opened, which does not exist, and before anything is measured."""
    (tmp_path / "letter").write_text("dear")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/full")
    for place, message in (
        ("letter", "there is a file that is not|it already exists"),
        ("pipe", "it is a pipe"),
        ("device", "it is a device"),
        ("missing/file", "there is no directory"),
    ):
        with pytest.raises(DataError, match=f"{place} cannot be written: ({message})"):
            cli.main([*OUTPUTS[option], str(tmp_path / place)], standalone_mode=False)
    assert (tmp_path / "letter").read_text() == "dear"


@pytest.mark.parametrize("order", ["first", "last"])
def test_force_is_accepted_in_any_position(tmp_path, order):
    (tmp_path / "letter").write_text("dear")
    command = ["checkpoint", "export", "nowhere", str(tmp_path / "letter")]
    arguments = [*command[:2], "--force", *command[2:]] if order == "first" else [*command, "--force"]
    with pytest.raises(RunError, match="nowhere is not a run"):
        cli.main(arguments, standalone_mode=False)


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "bomb.gz"])
def test_a_file_of_puzzles_that_never_ends_is_refused(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bomb.gz").write_bytes(gzip.compress((b"." * 80 + b"1\n") * 20_000))
    source = tmp_path / path
    options = ["--from", str(source), "--max-input-mb", "1", "--out", str(tmp_path / "set")]
    with pytest.raises(DataError, match=r"not a regular file|has more than 1 MiB of text"):
        cli.main(["data", "build", "sudoku", *options], standalone_mode=False)
    assert not (tmp_path / "set").exists()


def test_the_limits_of_the_command_line_are_those_of_recipes():
    from trm.tasks.documents.text import TextOptions
    from trm.tasks.grids import arc
    from trm.tasks.grids.options import GridOptions

    builds = cli.commands["data"].commands["build"].commands
    defaults = {
        name: next(each.default for each in build.params if each.name == "max_input_mb")
        for name, build in builds.items()
        if not name.startswith("email")  # mail is read message by message, each with limits of its own
    }
    grids = GridOptions().max_input_mb
    text = TextOptions.model_fields["max_input_mb"].default
    assert defaults == {"sudoku": grids, "maze": grids, "arc": arc.MAX_INPUT_MB, "text": text}


def test_predict_needs_exactly_one_puzzle(workspace):
    assert trm("predict", "run", cwd=workspace).returncode == 2
    assert trm("predict", "run", PUZZLE, "--example", "1", cwd=workspace).returncode == 2


def interrupt_after_step(command, cwd, step):
    """Press Ctrl-C once the metrics contain that step."""
    child = subprocess.Popen(
        list(map(str, command)), cwd=cwd, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    metrics = cwd / "long" / "metrics.jsonl"
    while time.monotonic() < deadline and child.poll() is None:
        if metrics.exists() and any(
            json.loads(line)["step"] >= step for line in metrics.read_text().splitlines()
        ):
            child.send_signal(signal.SIGINT)
            break
        time.sleep(0.05)
    output, errors = child.communicate(timeout=60)
    return child.returncode, output, errors


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes(workspace):
    command = [TRM, "train", "sudoku-6x6", *FOUR, *TINY, "training.max_steps=100000", "--run", "long"]
    code, output, errors = interrupt_after_step(command, workspace, 5)
    assert code == 130, errors
    assert "Stopped after step" in output
    saved = sorted((workspace / "long" / "checkpoints").iterdir())[-1]
    step = json.loads((saved / "state.json").read_text())["step"]
    assert f"Stopped after step {step}," in output
    assert "The same command resumes from there." in output
    again = trm(*command[1:], "--max-steps", step + 3, cwd=workspace)
    assert f"Resuming long after step {step}." in again.stderr
    assert f"after step {step + 3}," in again.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_exits_immediately_with_the_last_checkpoint_intact(workspace):
    """During a step of many seconds, the first Ctrl-C waits for the end of a micro-batch."""
    command = [TRM, "train", "sudoku-6x6", *FOUR, *TINY, "--run", "twice"]
    slow = ("training.effective_batch_size=200000", "plan.micro_batch_size=100000")
    child = subprocess.Popen(
        list(map(str, [*command, *slow])),
        cwd=workspace,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    recipe = workspace / "twice" / "recipe.yaml"
    deadline = time.monotonic() + 60
    while not recipe.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)  # now it is inside the first micro-batch
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "Stopping; saving the last complete step" in errors
    assert "Stopped after step" not in output, "it saved, so it did not exit immediately"
    assert not (workspace / "twice" / "checkpoints").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_an_error(workspace, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    arguments = ["train", "sudoku-6x6", *FOUR, *TINY, "--run", closed / "run"]
    assert "Permission denied" in fails(1, *arguments, cwd=workspace)


SHARED = ROOT / ".." / "shared" / "data" / "sudoku.csv.xz"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the real puzzles in ../shared/data")
def test_the_recipe_of_the_paper_trains_on_a_thousand_puzzles_and_resumes(tmp_path):
    """Only the number of slots is smaller, so that a step takes seconds instead of minutes."""
    recipe = (ROOT / "recipes" / "sudoku-extreme.yaml", f"data.build.from={SHARED}", "data.path=set")
    small = ("training.effective_batch_size=4", "plan.micro_batch_size=2", "plan.threads=1", "--run", "run")
    first = ok("train", *recipe, *small, "--max-steps", 1, "--json", cwd=tmp_path)
    second = ok("train", *recipe, *small, "--max-steps", 2, "--json", cwd=tmp_path)
    assert [json.loads(text)["step"] for text in (first, second)] == [1, 2]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["spec"]["max_len"] == 81
    assert state["slots"]["supervised"] == [2, 2, 2, 2]


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trm.backends.base import load_backend\n"
        "from trm.plan import Execution\n"
        "from macbook_optimization.errors import LaptopError\n"
        "try: load_backend(Execution())\n"
        "except LaptopError as error: print(error, error.hint)"
    )
    text = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "The Python package torch is missing" in text
    assert "pip install -c constraints/dev.txt" in text


@pytest.mark.slow
def test_a_mixer_that_the_dataset_does_not_allow_is_refused_before_the_run_exists(tmp_path):
    mazes = ("data.build={size: 6, min_path: 6, train: 20, test: 4}", "data.path=mazes")
    arguments = ("train", "maze-10x10", *mazes, "model.mixer=candidates", "--run", "run")
    assert "model.mixer=candidates is for Sudoku" in fails(2, *arguments, cwd=tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_doctor_describes_this_machine(workspace):
    facts = json.loads(ok("doctor", "--json", cwd=workspace))
    assert facts["cpu"]["cores"] >= 1
    assert facts["measured"]["products"]["float32"]["1"] > 1e8
    assert facts["plan"]["micro_batch_size"] >= 1
