"""Training and prediction from Python."""

import subprocess
import sys
import threading

import pytest
from tiny import run, run_config, sudoku_dataset

import trm
from macbook_optimization.errors import ConfigError, DataError, LaptopError, RunError
from trm.api import Start, train_recipe
from trm.runs.directory import Run

PUZZLE = "12.." + "." * 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("api")
    config = run_config(sudoku_dataset(directory / "set"))
    run(config, directory / "run", max_step=2)
    return directory / "run"


def test_importing_the_package_loads_neither_torch_nor_pydantic():
    code = "import sys, trm; print({'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
    assert set(trm.__all__) == {"Answer", "Model", "Outcome", "load", "load_mail", "train"}
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        trm.trian  # noqa: B018


def test_a_loaded_model_answers_one_puzzle_or_several(trained):
    model = trm.load(trained, depth=3)
    answer = model.predict(PUZZLE)
    assert isinstance(answer, trm.Answer)
    assert answer.question == PUZZLE
    assert len(answer.answer) == 16
    assert answer.steps[-1] == answer.answer
    assert len(answer.steps) == 3
    assert answer.valid == (answer.problem is None)
    assert 0 <= answer.confidence <= 1
    assert model.predict([PUZZLE, PUZZLE.encode()]) == [answer, answer]
    assert model.predict([]) == []


def test_an_answer_takes_until_it_converges_unless_a_depth_is_given(trained):
    assert trm.load(trained).search.settings.converged_after == 2
    assert trm.load(str(trained), depth=3, converged_after=1).search.settings.converged_after == 1


def test_errors_of_a_loaded_model_say_what_is_wrong(trained, tmp_path):
    model = trm.load(trained, depth=1)
    with pytest.raises(DataError, match=r"^A 4x4 puzzle has 16 cells; this one has 3"):
        model.predict("123")
    with pytest.raises(DataError, match=r"^Puzzle 2: A 4x4 puzzle has 16 cells"):
        model.predict([PUZZLE, "123"])
    with pytest.raises(ConfigError, match="unknown key dept; did you mean depth"):
        trm.load(trained, dept=3)
    with pytest.raises(ConfigError, match="the limit is 1 hour"):
        trm.load(trained, depth=2**31 - 1)
    with pytest.raises(DataError, match="answers questions and writes no text"):
        model.generate("Once upon a time")
    with pytest.raises(LaptopError):
        trm.load(tmp_path / "nowhere")


def test_options_of_training_are_checked_before_anything_starts(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'fress'"):
        trm.train("sudoku-6x6", run=tmp_path / "run", fress=True)
    with pytest.raises(ConfigError, match="max_steps is 0"):
        trm.train("sudoku-6x6", run=tmp_path / "run", max_steps=0)
    with pytest.raises(ConfigError, match=r"unknown key model\.hiden_size"):
        trm.train("sudoku-6x6", {"model.hiden_size": 8}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more_steps", [0, -5, 2.5, True])
def test_more_steps_are_a_count(trained, more_steps):
    before = (trained / "recipe.yaml").read_bytes()
    with pytest.raises(ConfigError, match=f"more_steps is {more_steps}; it must be an integer above 0"):
        trm.train(trained, more_steps=more_steps)
    assert (trained / "recipe.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "problem"), [({"fresh": True}, "A fresh start"), ({"run": "x"}, "the name of a finished run")]
)
def test_more_steps_continue_the_run_that_is_named(trained, options, problem):
    before = (trained / "recipe.yaml").read_bytes()
    with pytest.raises(ConfigError, match=problem):
        trm.train(trained, more_steps=5, **options)
    assert (trained / "recipe.yaml").read_bytes() == before


def test_training_in_a_thread_is_refused(tmp_path):
    raised = []

    def start():
        try:
            trm.train("sudoku-6x6", run=tmp_path / "run")
        except RunError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in raised[0].hint


@pytest.mark.slow
def test_a_quiet_training_shows_nothing_and_writes_what_the_changes_say(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(run_config(tmp_path / "set").to_yaml())
    changes = {
        "data.path": tmp_path / "set",
        "data.build": {"size": 4, "difficulty": "easy", "train": 60, "test": 12},
        "training.max_steps": 3,
        "training.learning_rate": 1e-5,
        "seed": 7,
    }
    outcome = trm.train("mine.yaml", changes, quiet=True)
    assert (str(outcome.run), outcome.reason, outcome.step) == ("runs/mine", "max_steps", 3)
    assert capfd.readouterr() == ("", "")
    config = Run(outcome.run).config
    assert (config.seed, config.training.learning_rate) == (7, 1e-5)


def test_what_several_machines_cannot_do_is_refused_before_a_host_listens(tmp_path):
    """Neither the dataset nor the run directory exists yet."""
    in_backward = ("plan.optimizer_in_backward=true", "training.max_grad_norm=null")
    overrides = (*in_backward, "plan.micro_batch_size=null", f"data.path={tmp_path / 'set'}")
    start = Start(listen="127.0.0.1:0", quiet=True)
    with pytest.raises(ConfigError, match="optimizer_in_backward updates the weights before other machines"):
        train_recipe("text-1b", overrides, tmp_path / "run", start)
    assert not (tmp_path / "run").exists()
