"""`trm runs --compare`: what differs, and which run was better at equal steps and at equal time."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny import TRM, run, run_config, sudoku_dataset

from macbook_optimization.errors import RunError
from trm.reports.comparison import Point, compare_runs, differ_clearly
from trm.reports.comparison_text import ASCII_BLOCKS, BLOCKS, describe_comparison, sparkline
from trm.reports.differences import differences
from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run, begin

EARLIER = Path(__file__).parents[2] / "fixtures" / "earlier"


@pytest.fixture
def make_run(tmp_path):
    """Write a run with a loss per step and an evaluation every ten steps, at a chosen speed."""

    def make(name, accuracies=(), *, step_seconds=1.0, steps=40, losses=None, examples=1000, **changes):
        path = tmp_path / name
        config = run_config(tmp_path / "set", **changes)
        begin(Run(path), config)
        with (path / METRICS).open("w") as file:
            for step in range(1, steps + 1):
                row = {
                    "kind": "train", "step": step, "seconds": step * step_seconds,
                    "loss": losses(step) if losses else 2.0 - step / steps, "grad_norm": 1.0,
                    "samples_per_second": 6 / step_seconds, "learning_rate": 0.01, "micro_batch_size": 6,
                    "train_token_accuracy": 0.5, "train_exact_accuracy": 0.1, "rss_bytes": 3 * 2**20,
                    "cpu_percent": 100.0,
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
                if step % 10 == 0 and step // 10 <= len(accuracies):
                    value = accuracies[step // 10 - 1]
                    row = {
                        "kind": "eval", "step": step, "seconds": step * step_seconds, "examples": examples,
                        "exact_accuracy": value, "token_accuracy": 0.9, "mean_steps": 1.0,
                        "accuracy_by_depth": [value], "evaluation_seconds": 0.0,
                    }  # fmt: skip
                    file.write(json.dumps(row) + "\n")
        return path

    return make


def test_a_slower_run_may_be_better_at_equal_steps_and_worse_at_equal_time(make_run):
    fast = make_run("fast", [0.1, 0.2, 0.3, 0.4])
    slow = make_run("slow", [0.2, 0.4, 0.6, 0.8], step_seconds=4.0)
    found = compare_runs(fast, slow)
    assert found.metric == "exact_accuracy"
    by_steps = found.at_equal_steps
    assert (by_steps.at, by_steps.first, by_steps.second, by_steps.better) == (40, 0.4, 0.8, "second")
    by_time = found.at_equal_time
    assert (by_time.at, by_time.first, by_time.second, by_time.better) == (40.0, 0.4, 0.2, "first")
    assert by_steps.is_clear
    text = describe_comparison(found)
    assert "After the same 40 steps: B was better, exact accuracy 40.0% and 80.0%." in text
    assert "After the same 40.0 s of training: A was better, exact accuracy 40.0% and 20.0%." in text


def test_runs_of_different_length_are_compared_as_far_as_both_go(make_run):
    short = make_run("short", [0.1, 0.5], steps=20)
    long = make_run("long", [0.1, 0.2, 0.9, 0.9])
    found = compare_runs(short, long)
    assert (found.at_equal_steps.at, found.at_equal_steps.better) == (20, "first")
    assert [row.step for row in found.table] == [10, 20]
    assert found.table[1].metrics == (0.5, 0.2)


def test_the_losses_of_the_table_are_means_over_a_tenth_of_the_steps(make_run):
    def noisy(step):
        return 1.0 if step % 2 else 3.0

    found = compare_runs(make_run("a", losses=noisy, steps=400), make_run("b", steps=400))
    assert [row.losses[0] for row in found.table] == pytest.approx([2.0] * 8, abs=0.2)


def test_the_peak_memory_is_that_of_all_starts(make_run):
    """The first start was killed, so only its rows and the samples of the machine say what it used."""
    path = make_run("a")
    rows = (path / METRICS).read_text().splitlines()
    lost = [{**json.loads(row), "rss_bytes": 7 * 2**20} for row in rows[10:20]]
    (path / METRICS).write_text(
        "".join([f"{json.dumps(row)}\n" for row in lost] + [f"{row}\n" for row in rows])
    )
    sample = {"kind": "resources", "time": 1e9, "rss_bytes": 9 * 2**20, "cpu_percent": [1.0]}
    (path / RESOURCES).write_text(json.dumps(sample) + "\n")
    stopped = {"time": 1e9, "event": "stopped", "step": 40, "peak_bytes": 5 * 2**20}
    (path / EVENTS).write_text(json.dumps(stopped) + "\n")
    assert compare_runs(path, make_run("b")).first.peak_bytes == 9 * 2**20


def test_the_best_evaluation_until_then_counts_because_its_checkpoint_is_used(make_run):
    found = compare_runs(make_run("a", [0.9, 0.1]), make_run("b", [0.5, 0.8]))
    assert (found.at_equal_steps.first, found.at_equal_steps.second) == (0.9, 0.8)


def test_an_evaluation_counts_from_the_time_at_which_its_weights_were_trained(make_run):
    first, second = make_run("a", [0.1, 0.2, 0.3, 0.9]), make_run("b", [0.1, 0.2, 0.3, 0.4])
    rows = [json.loads(line) for line in (first / METRICS).read_text().splitlines()]
    rows[-1] |= {"seconds": 52.0, "evaluation_seconds": 12.0}  # 40 s of training, then 12 s of evaluation
    (first / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare_runs(first, second)
    assert (found.at_equal_time.at, found.at_equal_time.first) == (40.0, 0.9)


def test_a_difference_that_few_examples_explain_may_be_chance(make_run):
    found = compare_runs(make_run("a", [0.50], examples=20), make_run("b", [0.55], examples=20))
    assert (found.at_equal_steps.better, found.at_equal_steps.is_clear) == ("second", False)
    assert "with 20 examples, the difference may be chance" in describe_comparison(found)
    found = compare_runs(make_run("c", [0.50], examples=20), make_run("d", [0.55], examples=30))
    assert "with 20 and 30 examples, the difference may be chance" in describe_comparison(found)
    assert differ_clearly((0.5, 1000), (0.55, 1000))
    assert not differ_clearly((0.5, 100), (0.55, 100))
    assert differ_clearly((0.5, None), (0.9, 100)) is None


def test_without_evaluations_the_loss_decides(make_run):
    better = make_run("better", losses=lambda step: 1.0 / step)
    worse = make_run("worse", losses=lambda step: 2.0 / step)
    found = compare_runs(worse, better)
    assert found.metric == "loss"
    assert found.at_equal_steps.better == "second"
    assert found.at_equal_steps.is_clear is None
    assert "the training loss decides" in describe_comparison(found)


def test_losses_of_different_kinds_are_not_compared(make_run):
    other = make_run("b", training__loss="softmax_cross_entropy")
    found = compare_runs(make_run("a"), other)
    assert (found.metric, found.at_equal_steps) == (None, None)
    assert "the losses are of different kinds" in describe_comparison(found)


def test_what_differs_in_the_recipe_is_listed(make_run):
    first = make_run("a", [0.1], training__depths={0: 1, 5: 3})
    second = make_run("b", [0.1], training__learning_rate=0.5)
    found = compare_runs(first, second)
    listed = {each.key: (each.first, each.second) for each in found.recipe}
    assert listed == {
        "training.learning_rate": (0.01, 0.5),
        "training.depths": ({"0": 1, "5": 3}, {"0": 1}),
    }
    assert "Plan: no difference" in describe_comparison(found)
    assert differences({"a": {"b": 1}}, {"a": {"c": 2}})[0].key == "a.b"


def test_speed_and_memory_are_beside_each_other(make_run):
    found = compare_runs(make_run("a", [0.1]), make_run("b", [0.1], step_seconds=0.5))
    assert (found.first.samples_per_second, found.second.samples_per_second) == (6.0, 12.0)
    assert (found.first.step_seconds, found.second.step_seconds) == (1.0, 0.5)
    assert found.first.peak_bytes == 3 * 2**20
    text = describe_comparison(found)
    assert any(line.split() == ["samples", "per", "second", "6.0", "12.0"] for line in text.splitlines())


def test_runs_of_different_tasks_are_compared_by_speed_and_memory_only(make_run):
    found = compare_runs(make_run("a", [0.5]), make_run("b", [0.9], task="maze"))
    assert (found.metric, found.at_equal_steps, found.at_equal_time) == (None, None, None)
    text = describe_comparison(found)
    assert "The tasks differ (sudoku and maze)" in text
    assert "was better" not in text
    assert "samples per second" in text


def test_a_run_without_rows_is_an_error(make_run):
    empty = make_run("b")
    (empty / METRICS).write_text("")
    with pytest.raises(RunError, match="b has no row of metrics that can be read"):
        compare_runs(make_run("a", [0.5]), empty)
    with pytest.raises(RunError, match="is not a run"):
        compare_runs(empty, empty.parent / "missing")


@pytest.mark.parametrize(
    "damage",
    [
        b"garbage\n",
        b'{"kind": "eval", "step": "many", "seconds": null, "exact_accuracy": 0.99}\n',
        b'{"kind": "eval", "step": 41, "seconds": 1e999, "exact_accuracy": 0.99}\n',
        b'{"kind": "train", "step": 41, "seconds": 41, "loss": NaN}\n',
        b'{"kind": "eval", "step": 42, "secon',
        b"[1, 2]\n5\n",
    ],
)
def test_damaged_rows_are_left_out(make_run, damage):
    first, second = make_run("a", [0.1, 0.2, 0.3, 0.4]), make_run("b", [0.1, 0.2, 0.3, 0.5])
    before = compare_runs(first, second)
    with (second / METRICS).open("ab") as file:
        file.write(damage)
    (second / "plan.json").write_text("{")
    (second / "hardware.json").write_text("[]")
    found = compare_runs(first, second)
    assert found.at_equal_steps == before.at_equal_steps
    assert describe_comparison(found)


def test_runs_of_an_earlier_version_are_compared(tmp_path):
    found = compare_runs(EARLIER / "mixer", EARLIER / "candidates")
    assert found.metric == "exact_accuracy"
    assert found.at_equal_steps is not None
    assert found.recipe
    assert describe_comparison(found)
    other = shutil.copytree(EARLIER / "mixer", tmp_path / "copy")
    (other / EVENTS).unlink()
    assert compare_runs(EARLIER / "mixer", other).at_equal_steps.better is None


def test_a_million_rows_are_compared_at_as_many_points_as_a_curve_has(make_run):
    long = make_run("long", [0.1], steps=5000)
    assert len(compare_runs(long, make_run("b", [0.1])).first.losses) <= 2000


def test_a_sparkline_shows_the_scale_and_where_a_run_ends():
    points = [Point(step, step, step) for step in range(1, 41)]
    whole = sparkline(points, 40, (1, 40))
    assert len(whole) == 40
    assert (whole[0], whole[-1]) == (BLOCKS[0], BLOCKS[-1])
    half = sparkline(points, 80, (1, 40))
    assert half.rstrip() == half[:20]
    assert set(sparkline(points, 40, (1, 40), ASCII_BLOCKS)) <= set(ASCII_BLOCKS)
    assert set(sparkline(points[:1], 1, (1, 1))) == {" ", BLOCKS[0]}
    two = sparkline([points[0], points[-1]], 80, (1, 40))
    assert two == BLOCKS[0] * 19 + BLOCKS[-1] + " " * 20, "a value holds until the next"


@pytest.mark.slow
def test_the_command_prints_text_json_and_ascii(make_run, tmp_path):
    make_run("a", [0.1, 0.2])
    make_run("b\x1b[2J", [0.1, 0.3])

    def trm(*options, **environment):
        command = [TRM, "runs", "--compare", "a", "b\x1b[2J", *options]
        env = {**__import__("os").environ, **environment}
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, env=env, timeout=60, check=True
        ).stdout

    text = trm(PYTHONIOENCODING="utf-8").decode()
    assert BLOCKS[-1] in text
    assert "\x1b" not in text
    assert ASCII_BLOCKS[-1] in trm(PYTHONIOENCODING="ascii").decode("ascii")
    facts = json.loads(trm("--json"))
    assert facts["metric"] == "exact_accuracy"
    assert facts["at_equal_steps"]["better"] == "second"
    assert facts["first"]["evaluations"]["exact_accuracy"][0] == [10, 10.0, 0.1]


def test_a_root_beside_two_runs_is_wrong_usage(tmp_path):
    done = subprocess.run(
        [TRM, "runs", ".", "--compare", "a", "b"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--compare takes two runs and no ROOT" in done.stderr


def test_two_real_runs_are_compared(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")
    run(run_config(dataset), tmp_path / "a")
    run(run_config(dataset, model__hidden_size=16), tmp_path / "b")
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert {each.key for each in found.recipe} == {"model.hidden_size"}
    assert found.machine == []
    assert found.metric == "exact_accuracy"
    assert found.first.peak_bytes > 0
    assert found.at_equal_steps is not None
    # The faster run may have ended before the other one was evaluated for the first time.
    evaluated = max(run.evaluations[found.metric][0].seconds for run in (found.first, found.second))
    both = min(found.first.seconds, found.second.seconds)
    assert (found.at_equal_time is not None) == (evaluated <= both * 1.01)
