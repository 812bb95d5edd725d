"""The search itself: the recipe first, equal time, what is given up, refused or continued, and the result."""

import json
import os

import pytest
from tiny import Recorder, run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError, LaptopError, MemoryBudgetError, RunError
from trm.config import load_config
from trm.runs.directory import METRICS, only_trainer
from trm.tuning import search as searching
from trm.tuning.fit import why_it_does_not_fit
from trm.tuning.result import describe_result, result_of, write_result
from trm.tuning.search import Budget, tune
from trm.tuning.space import start_values, with_values
from trm.tuning.study import STUDY_FILE, Asked
from trm.tuning.trial import Candidate, Trained, _outcome, score, train_candidate

pytest.importorskip("optuna")
BUDGET = Budget(minutes=10, trials=10)


@pytest.fixture
def recipe(tmp_path):
    return run_config(sudoku_dataset(tmp_path / "set", train=60))


class Trainer:
    """Trains nothing: a candidate's accuracy follows from its learning rate, evaluated ten times."""

    def __init__(self, accuracy=lambda config: 0.5, outcome=None):
        self.accuracy = accuracy
        self.outcome = outcome
        self.candidates = []
        self.stop_before = None

    def __call__(self, candidate, observe, progress):
        if self.stop_before == len(self.candidates):
            self.stop_before = None
            raise KeyboardInterrupt
        config = load_config(candidate.recipe)
        self.candidates.append((candidate.run.name, config))
        if self.outcome is not None and len(self.candidates) > 1:
            return self.outcome
        candidate.run.mkdir(exist_ok=True)
        for tenth in range(1, 11):
            row = {
                "kind": "eval", "step": tenth, "seconds": tenth * candidate.seconds / 10, "examples": 40,
                "exact_accuracy": self.accuracy(config) * tenth / 10, "token_accuracy": 0.5,
            }  # fmt: skip
            with (candidate.run / METRICS).open("a") as file:
                file.write(json.dumps(row) + "\n")
            progress(row)
            if observe(row):
                return Trained("given up", tenth, row["seconds"])
        return Trained("time", 10, candidate.seconds)


@pytest.fixture
def opened(tmp_path, recipe):
    """Open a search in the same directory, as each start of the command does."""

    def open_search(trainer, config=recipe, budget=BUDGET):
        found = searching._open(config, tmp_path / "tuning", budget, Recorder())
        found.train = trainer
        return found

    return open_search


def try_some(search, count):
    """Try this many candidates, however short they are."""
    for _ in range(count):
        asked = search.study.ask()
        trained = search._train(asked, 60.0)
        search._record(asked, trained, 1.0)


def result(search):
    return result_of(search.facts, search.study, is_interrupted=False)


@pytest.mark.slow
def test_the_recipe_itself_is_the_first_candidate_and_the_best_one_becomes_a_recipe(opened, recipe):
    search = opened(Trainer(lambda config: 10 * config.training.learning_rate))
    try_some(search, 12)
    found = result(search)
    write_result(found, search.facts, search.study)
    assert dict(found.trials[0].values) == start_values(recipe)
    assert found.start == found.trials[0]
    assert found.best.score > found.start.score
    assert found.best.score == max(each.score for each in found.trials if each.state == "complete")
    best = load_config(found.recipe)
    assert best == with_values(recipe, found.best.values)
    assert best.data == recipe.data
    assert best.evaluation.target_accuracy == recipe.evaluation.target_accuracy
    assert {each.key for each in found.changes} >= {"training.learning_rate"}
    with open(found.picture, "rb") as picture:
        assert picture.read(4) == b"\x89PNG"
    assert json.loads((search.facts.directory / "result.json").read_text())["metric"] == "exact_accuracy"
    text = describe_result(found)
    assert "12 candidates" in text
    assert f"trm train {found.recipe}" in text


def test_candidates_are_trained_on_the_held_out_data_for_equal_time(opened):
    trainer = Trainer()
    search = opened(trainer)
    try_some(search, 3)
    assert [name for name, _ in trainer.candidates] == ["000", "001", "002"]
    for _, config in trainer.candidates:
        assert config.data.path == search.facts.directory / "data"
        assert config.evaluation.target_accuracy is None
    assert search.facts.seconds == 60
    later = opened(trainer, budget=Budget(minutes=90, trials=10))
    assert later.facts.seconds == 60, "more minutes are more candidates, not longer ones"


def test_a_candidate_behind_the_median_is_given_up(opened, recipe):
    trainer = Trainer(lambda config: 0.9 if config == start else 0.5)
    search = opened(trainer)
    start = search.facts.candidate(start_values(recipe))
    trainer.accuracy = lambda config: 0.9 - 0.1 * len(trainer.candidates) / 10
    try_some(search, 8)
    states = [each.state for each in search.study.trials()]
    assert states[:4] == ["complete"] * 4, "there must be some to compare with"
    assert "given up" in states[4:]
    given_up = next(each for each in search.study.trials() if each.state == "given up")
    assert given_up.seconds < 60
    assert "median" in given_up.reason


@pytest.fixture
def asked():
    import optuna

    return Asked(optuna.create_study().ask(), {}, "trials/000", is_start=False)


def test_a_score_counts_from_the_time_of_its_evaluation_on(asked):
    for value, share in ((0.5, 0.31), (0.4, 0.62), (0.9, 0.91), (0.95, 0.99)):
        asked.observe(value, share)
    best_by_tenth = asked.trial.study.trials[0].intermediate_values
    assert best_by_tenth == {3: 0.5, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.5, 8: 0.5, 9: 0.9}
    assert asked.best == 0.95


def test_a_candidate_that_does_not_fit_is_never_tried(opened, monkeypatch):
    trainer = Trainer()
    search = opened(trainer)
    try_some(search, 1)
    monkeypatch.setattr(searching, "why_it_does_not_fit", lambda config, data: "It needs 9 MiB")
    try_some(search, 1)
    assert len(trainer.candidates) == 1
    refused = search.study.trials()[1]
    assert (refused.state, refused.reason, refused.run) == ("not tried", "It needs 9 MiB", None)
    assert "1 not tried" in describe_result(result(search))


def test_a_recipe_that_does_not_fit_is_refused_with_the_reason(opened, monkeypatch):
    monkeypatch.setattr(searching, "why_it_does_not_fit", lambda config, data: "It needs 9 MiB")
    with pytest.raises(MemoryBudgetError, match="The recipe itself does not fit: It needs 9 MiB"):
        try_some(opened(Trainer()), 1)


def test_a_candidate_that_fails_is_recorded_and_three_in_a_row_end_the_search(opened):
    trainer = Trainer(outcome=Trained("failed", problem="The disk is full", hint="Free some space."))
    search = opened(trainer)
    with pytest.raises(RunError, match=r"The last 3 candidates failed.*The disk is full") as error:
        search.run(6000.0)
    assert error.value.hint == "Free some space."
    assert [each.state for each in search.study.trials()] == ["complete", "failed", "failed", "failed"]


def test_an_interrupted_candidate_is_continued_in_its_own_run(opened):
    trainer = Trainer()
    search = opened(trainer)
    trainer.stop_before = 2
    with pytest.raises(KeyboardInterrupt):
        search.run(6000.0)
    assert len(search.study.trials()) == 2
    (unfinished,) = [trial for trial in search.study.study.trials if not trial.state.is_finished()]
    again = opened(trainer)
    try_some(again, 2)
    trials = again.study.trials()
    assert [each.run for each in trials] == ["trials/000", "trials/001", "trials/002", "trials/003"]
    assert dict(trials[2].values) == unfinished.params
    assert len({each.values["learning_rate"] for each in trials}) == 4, "nothing is proposed twice"


def test_the_search_ends_when_no_candidate_fits_into_its_time_any_more(opened):
    search = opened(Trainer())
    asked = search.study.ask()
    search._record(asked, search._train(asked, 600.0), 62.0)
    assert search._has_time(600.0)
    assert search._has_time(118.0)
    assert not search._has_time(117.0)


def test_what_a_killed_process_leaves_does_not_matter(opened, tmp_path):
    search = opened(Trainer())
    try_some(search, 2)
    file = tmp_path / "tuning" / STUDY_FILE
    with file.open("a") as journal:
        journal.write('{"op_code": 5, "wor')
    os.symlink(file, f"{file}.lock")
    again = opened(Trainer())
    assert len(again.study.trials()) == 2
    try_some(again, 1)
    assert len(again.study.trials()) == 3


def test_a_study_holds_no_pickle(opened, tmp_path):
    try_some(opened(Trainer()), 2)
    for line in (tmp_path / "tuning" / STUDY_FILE).read_text().splitlines():
        assert isinstance(json.loads(line), dict)


def test_a_damaged_study_is_an_error_with_its_name(opened, tmp_path):
    try_some(opened(Trainer()), 1)
    file = tmp_path / "tuning" / STUDY_FILE
    file.write_text("garbage\n" + file.read_text())
    with pytest.raises(RunError, match=r"study\.jsonl is not the study of a search"):
        opened(Trainer())


def test_another_recipe_in_the_same_directory_is_refused_with_every_difference(opened, recipe):
    opened(Trainer())
    other = run_config(recipe.data.path, training__learning_rate=0.5)
    with pytest.raises(RunError, match=r"training\.learning_rate is 0\.5 here and 0\.01"):
        opened(Trainer(), config=other)


def test_a_directory_with_other_files_is_not_touched(opened, tmp_path):
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "thesis.txt").write_text("important")
    with pytest.raises(RunError, match="is not empty and not a search"):
        opened(Trainer())


@pytest.mark.parametrize("missing", ["optuna", "matplotlib"])
def test_a_missing_package_is_named_with_how_to_install_it(recipe, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(LaptopError, match=f"package {missing}") as error:
        tune(recipe, tmp_path / "tuning", BUDGET, Recorder())
    assert "'.[tune]'" in error.value.hint
    assert not (tmp_path / "tuning").exists()


def test_between_equal_metrics_the_accuracy_per_token_decides():
    worse = {"exact_accuracy": 0.0, "token_accuracy": 0.2}
    better = {"exact_accuracy": 0.0, "token_accuracy": 0.6}
    much_better = {"exact_accuracy": 0.01, "token_accuracy": 0.1}
    assert score(worse, "exact_accuracy") < score(better, "exact_accuracy")
    assert score(better, "exact_accuracy") < score(much_better, "exact_accuracy")
    assert score({"exact_accuracy": None}, "exact_accuracy") is None
    assert score({"accuracy": 0.5}, "accuracy") == 0.5


@pytest.mark.slow
def test_a_memory_limit_decides_what_fits(recipe):
    from trm.tasks.dataset import complete_spec, open_split
    from trm.tasks.registry import load_task

    data = complete_spec(load_task("sudoku"), open_split(recipe.data.path, "train"))
    assert why_it_does_not_fit(recipe, data) is None
    limited = run_config(recipe.data.path, limits={"memory_limit_mb": 60})
    assert "60 MiB is allowed" in why_it_does_not_fit(limited, data)
    absurd = run_config(recipe.data.path, model__hidden_size=2**16, model__num_heads=2)
    assert "memory" in why_it_does_not_fit(absurd, data)


def test_an_unknown_key_is_an_error_before_anything_happens():
    with pytest.raises(ConfigError):
        load_config("sudoku-6x6", ["training.learning_rat=1"])


def test_no_evaluation_is_added_where_evaluations_decide_the_learning_rate(opened, recipe):
    trainer = Trainer()
    asked_for = []

    def train(candidate, observe, progress):
        asked_for.append(candidate.evaluate_at_end)
        return trainer(candidate, observe, progress)

    search = opened(train, config=run_config(recipe.data.path, training__plateau={"patience": 2}))
    try_some(search, 1)
    assert asked_for == [False]


def test_a_candidate_that_another_process_still_trains_is_an_error_and_not_a_failure(tmp_path):
    candidate = Candidate(tmp_path / "recipe.yaml", tmp_path / "run", seconds=1.0)
    with only_trainer(candidate.run), pytest.raises(RunError, match="is being trained by another process"):
        train_candidate(candidate, lambda row: False, lambda row: None)


@pytest.mark.parametrize("reason", ["max_steps", "target", "a reason of later versions"])
def test_a_candidate_that_ends_before_its_time_is_complete(reason):
    facts = {"reason": reason, "step": 5, "seconds": 1.5}
    assert _outcome(json.dumps(facts)) == Trained("steps", 5, 1.5)
    with pytest.raises(RunError, match="reported"):
        _outcome("nothing")
