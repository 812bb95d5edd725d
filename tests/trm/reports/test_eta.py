"""The time that is left, from rows whose true costs are known."""

import pytest
from tiny import run_config

from trm.reports.eta import EtaEstimator
from trm.runs.events import LimitsSet, Resumed
from trm.schedule import cycles_of_step

METRIC = "exact_accuracy"


def rows_of(config, costs, first=1, last=None, every=5, now=0.0):
    """Rows of a run in which `costs(step)` gives the seconds of a recursion and of the rest of a step."""
    rows = []
    seconds = {"forward": 0.0, "backward": 0.0}
    slots = config.training.effective_batch_size
    for step in range(first, (last or config.training.last_step) + 1):
        cycle, rest = costs(step)
        seconds["forward"] += cycle * cycles_of_step(step, config.model, config.training, config.seed)
        seconds["backward"] += rest
        if step % every == 0:
            took = sum(seconds.values())
            now += took
            rate = every * slots / took
            rows.append(
                {"kind": "train", "step": step, "samples_per_second": rate, "spent": seconds, "time": now}
            )
            seconds = {"forward": 0.0, "backward": 0.0}
    return rows


def seconds_of(rows, step):
    return sum(sum(row["spent"].values()) for row in rows if row["step"] > step)


@pytest.fixture
def config(tmp_path):
    return run_config(
        tmp_path,
        training__max_steps=600,
        training__supervision="terminal",
        training__depths={0: 1, 100: 2, 300: 8},
        evaluation={"every_steps": None},
    )


def test_recursions_that_become_deeper_are_foreseen(config):
    rows = rows_of(config, lambda step: (0.1, 0.2))
    for share in (0.1, 0.3, 0.5, 0.9):
        estimator = EtaEstimator(config, METRIC)
        estimator.add([row for row in rows if row["step"] <= share * 600])
        truth = seconds_of(rows, share * 600)
        assert estimator.estimate().about_seconds == pytest.approx(truth, rel=0.06)  # depths are drawn


def test_steps_of_different_depth_show_what_deeper_ones_will_cost(tmp_path):
    """A recursion without gradient is cheap beside the one with it, which is part of the forward pass."""
    config = run_config(
        tmp_path,
        training__max_steps=600,
        training__supervision="terminal",
        training__depths={0: 2, 100: 4, 300: 8},
        evaluation={"every_steps": None},
    )
    rows = rows_of(config, lambda step: (0.02, 0.25))
    for row in rows:
        steps = range(row["step"] - 4, row["step"] + 1)
        cycles = [cycles_of_step(step, config.model, config.training, config.seed) for step in steps]
        row["by_cycles"] = {str(c): [cycles.count(c), cycles.count(c) * (0.25 + 0.02 * c)] for c in {*cycles}}
        row["spent"] = {"forward": 5 * 0.15 + 0.02 * sum(cycles), "backward": 5 * 0.1}
    estimator = EtaEstimator(config, METRIC)
    for row in rows[:-1]:
        estimator.add([row])
        if row["step"] >= 60:
            left = seconds_of(rows, row["step"])
            assert estimator.estimate().about_seconds == pytest.approx(left, rel=0.08, abs=0.1)


DAMAGED = [
    3,
    {"two": [1, 1.0]},
    {"1": 5},
    {"1": [1, "x"]},
    {"1": [-5, 1.0]},
    {"9" * 50: [5, 1.0]},
    {"2": [4, 1.0]},  # of five steps
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=str)
def test_damaged_depths_of_a_row_are_ignored(config, damaged):
    rows = rows_of(config, lambda step: (0.1, 0.2), last=50)
    expected, found = EtaEstimator(config, METRIC), EtaEstimator(config, METRIC)
    expected.add(rows)
    found.add([{**row, "by_cycles": damaged} for row in rows])
    assert found.estimate() == expected.estimate()


def test_another_program_is_taken_into_account_soon_and_forgotten_soon(config):
    rows = rows_of(config, lambda step: (0.25, 0.5) if 200 < step <= 400 else (0.1, 0.2))
    estimator = EtaEstimator(config, METRIC)
    wrong = []
    for row in rows:
        estimator.add([row])
        truth = seconds_of(rows, row["step"])
        if truth and not 0.85 < estimator.estimate().about_seconds / truth < 1.15:
            wrong.append(row["step"])
    # What nobody can foresee: before it comes that it will come, and meanwhile that it will go.
    assert all(step <= 460 for step in wrong)  # a tenth of the run after it has gone


def test_evaluations_that_are_left_are_counted(tmp_path):
    config = run_config(tmp_path, training__max_steps=95, evaluation={"every_steps": 20})
    estimator = EtaEstimator(config, METRIC)
    estimator.add(rows_of(config, lambda step: (0.0, 1.0), last=50))
    without = estimator.estimate().about_seconds
    estimator.add([{"kind": "eval", "step": 40, METRIC: 0.5, "evaluation_seconds": 7.0}])
    assert estimator.estimate().about_seconds == pytest.approx(without + 3 * 7.0)  # after 60, 80 and 95


def test_an_evaluation_that_never_ran_is_estimated_from_the_recursions(tmp_path):
    config = run_config(tmp_path, training__max_steps=100, evaluation={"every_steps": 50})
    rows = rows_of(config, lambda step: (1.0, 0.0), last=10)
    without, with_examples = EtaEstimator(config, METRIC), EtaEstimator(config, METRIC, num_examples=60)
    without.add(rows)
    with_examples.add(rows)
    slots, depth = config.training.effective_batch_size, config.inference.depth
    cycles = config.model.cycles_per_step
    expected = 2 * depth * cycles * 60 / slots
    difference = with_examples.estimate().about_seconds - without.estimate().about_seconds
    assert difference == pytest.approx(expected)


def test_saves_and_cooling_breaks_lengthen_the_rest(config):
    plain, slowed = EtaEstimator(config, METRIC), EtaEstimator(config, METRIC)
    rows = rows_of(config, lambda step: (0.1, 0.2), last=100)
    plain.add(rows)
    slowed.add([{**row, "spent": {**row["spent"], "saving": 0.1, "waiting": 0.4}} for row in rows])
    row_seconds = sum(rows[0]["spent"].values())
    expected = plain.estimate().about_seconds * (1 + 0.5 / row_seconds)
    assert slowed.estimate().about_seconds == pytest.approx(expected, rel=0.05)


def test_a_target_that_comes_near_ends_the_run_earlier_than_the_last_step(tmp_path):
    config = run_config(
        tmp_path, training__max_steps=1000, evaluation={"every_steps": 100, "target_accuracy": 0.9}
    )
    estimator = EtaEstimator(config, METRIC)
    estimator.add(rows_of(config, lambda step: (0.0, 1.0), last=300))
    for step, value in ((100, 0.3), (200, 0.5), (300, 0.7)):
        estimator.add([{"kind": "eval", "step": step, METRIC: value, "evaluation_seconds": 1.0}])
    eta = estimator.estimate()
    assert 100 < eta.about_seconds < 350
    assert eta.at_most_seconds == pytest.approx(700 + 7)


def evaluations(values, every=100):
    steps = range(every, every * len(values) + 1, every)
    return [
        {"kind": "eval", "step": step, METRIC: value, "evaluation_seconds": 0.0}
        for step, value in zip(steps, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("values", "steps_left"),
    [
        ([0.2, 0.3, 0.4, 0.5], 600),
        ([0.2, 0.5, 0.4, 0.4], 200),
        ([0.2, 0.5, 0.4, 0.6], 600),
        ([0.2, 0.2, 0.5, 0.4], 600),
        ([0.2, 0.5, 0.4, 0.4, 0.4], 100),
    ],
    ids=[
        "it improves",
        "half of the patience",
        "it improves again",
        "one evaluation",
        "the last one but one",
    ],
)
def test_early_stopping_ends_the_run_earlier_if_nothing_improves(tmp_path, values, steps_left):
    stopping = {"training__early_stopping": {"patience": 4}, "evaluation": {"every_steps": 100}}
    config = run_config(tmp_path, training__max_steps=1000, **stopping)
    estimator = EtaEstimator(config, METRIC)
    estimator.add(rows_of(config, lambda step: (0.0, 1.0), last=100 * len(values)))
    estimator.add(evaluations(values))
    expected = min(steps_left, 1000 - 100 * len(values))
    assert estimator.estimate().about_seconds == pytest.approx(expected)
    assert estimator.estimate().at_most_seconds == pytest.approx(1000 - 100 * len(values))


def test_evaluations_that_are_repeated_after_a_crash_use_up_no_patience_twice(tmp_path):
    stopping = {"training__early_stopping": {"patience": 4}, "evaluation": {"every_steps": 100}}
    config = run_config(tmp_path, training__max_steps=1000, **stopping)
    estimator = EtaEstimator(config, METRIC)
    estimator.add(rows_of(config, lambda step: (0.0, 1.0), last=300))
    rows = evaluations([0.2, 0.5, 0.4])
    estimator.add([*rows, *rows[1:]])
    assert estimator.estimate().about_seconds == pytest.approx(700)


def limited(**limits):
    return {**LimitsSet(100, **{"max_step": None, "max_seconds": None, **limits}).to_row(), "time": 100.0}


def test_the_limits_of_a_start_end_it_until_another_one_begins(tmp_path):
    config = run_config(tmp_path, training__max_steps=1000, evaluation={"every_steps": None})
    estimator = EtaEstimator(config, METRIC)
    estimator.add(rows_of(config, lambda step: (0.0, 1.0), last=150))
    for limits, left in (({"max_step": 400}, 250), ({"max_seconds": 90.0}, 40), ({"max_seconds": 2e3}, 850)):
        estimator.add([limited(**limits)])
        assert estimator.estimate() == (pytest.approx(left), pytest.approx(left))
    estimator.add([limited(max_seconds=90.0)])
    assert estimator.estimate(now=170.0).at_most_seconds == pytest.approx(20)
    estimator.add([Resumed(150, []).to_row()])
    assert estimator.estimate().at_most_seconds == pytest.approx(850)


def test_time_since_the_last_row_has_passed(config):
    estimator = EtaEstimator(config, METRIC)
    assert estimator.estimate() is None
    rows = rows_of(config, lambda step: (0.1, 0.2), last=100)
    estimator.add(rows)
    left = estimator.estimate().about_seconds
    assert estimator.estimate(now=rows[-1]["time"] + 3).about_seconds == pytest.approx(left - 3)
    assert estimator.estimate(now=rows[-1]["time"] + 10**6).about_seconds == 0


def test_a_run_that_was_resumed_from_before_continues_to_be_estimated(config):
    estimator = EtaEstimator(config, METRIC)
    rows = rows_of(config, lambda step: (0.1, 0.2))
    estimator.add([row for row in rows if row["step"] <= 200])
    estimator.add([row for row in rows if 100 < row["step"] <= 300])
    assert estimator.estimate().about_seconds == pytest.approx(seconds_of(rows, 300), rel=0.06)
