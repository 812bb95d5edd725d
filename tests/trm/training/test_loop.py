"""Whole runs: neither the plan nor interruptions change what is learned, and runs stop where they should."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny import Recorder, make_learner, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import DataError, MemoryBudgetError, RunError
from trm.runs.directory import EVENTS, METRICS, Run, set_aside
from trm.runs.listing import list_runs
from trm.schedule import learning_rate_factor
from trm.tasks.dataset import open_split
from trm.training.log import FIRST_ROW_STEPS
from trm.training.loop import Limits
from trm.training.preparation import prepare
from trm.training.start import train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def state(path):
    checkpoint = Run(path).checkpoints().newest_intact()
    return checkpoint.step, checkpoint.load_all(), checkpoint.metadata["slots"]


def assert_same_run(one, other):
    """Bit for bit."""
    first = state(one)
    second = state(other)
    assert first[0] == second[0]
    assert first[2] == second[2]
    for group, tensors in first[1].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[1][group][name]), f"{group} {name}"


@pytest.fixture
def float64():
    """Compute nearly without rounding errors. This tiny model amplifies them about sixfold per step: 1e-18
    after the first step, 1e-9 after twelve (measured); in float32, twelve steps would show nothing."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same_up_to_rounding(one, other):
    first, second = state(one), state(other)
    assert first[2] == second[2]
    for name, tensor in first[1]["weights"].items():
        torch.testing.assert_close(second[1]["weights"][name], tensor, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("stop_at", [1, 7, 10])
def test_stopping_and_resuming_changes_nothing(tmp_path, dataset, supervision, stop_at):
    config = run_config(dataset, training__supervision=supervision, training__depths={0: 1, 5: 3})
    run(config, tmp_path / "whole")
    outcome = run(config, tmp_path / "resumed", max_step=stop_at)
    assert (outcome.reason, outcome.step) == ("limit", stop_at)
    assert run(config, tmp_path / "resumed").reason == "max_steps"
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_how_the_dataset_is_read_changes_nothing_even_in_the_middle_of_an_epoch(
    tmp_path, dataset, supervision
):
    """Held in memory, mapped, streamed with a cache of one row, and each of them for a third of the run."""

    def reading(**loading):
        supervised = {"training__supervision": supervision, "model__halt_max_steps": 3}
        return run_config(dataset, data={"path": str(dataset), "loading": loading}, **supervised)

    configs = {
        "memory": reading(),
        "mapped": reading(enable_caching=False),
        "streaming": reading(force_streaming_mode=True, chunk_size_mb=1e-6),
    }
    for stop_at, (name, config) in zip((7, 13, 20), configs.items(), strict=True):
        run(config, tmp_path / name)
        run(config, tmp_path / "mixed", max_step=stop_at)
    for other in ("mapped", "streaming", "mixed"):
        assert_same_run(tmp_path / "memory", tmp_path / other)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_curriculum_widens_and_resumes_where_it_was(tmp_path, dataset, supervision):
    stages = {"share": 0.2, "threshold": 0.0, "widen": 2.0, "every_steps": 4}
    config = run_config(
        dataset, training__curriculum=stages, training__supervision=supervision, model__halt_max_steps=3
    )
    run(config, tmp_path / "whole")
    for stop_at in (3, 10, 20):
        run(config, tmp_path / "parts", max_step=stop_at)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    saved = Run(tmp_path / "whole").checkpoints().newest_intact().metadata
    assert saved["curriculum"]["stage"] == 3  # 0.2, 0.4, 0.8, all
    assert max(saved["slots"]["stage"]) == 3
    for name in ("whole", "parts"):  # a resumed run repeats no stage
        stages = [row for row in Run(tmp_path / name).rows(EVENTS) if row["event"] == "curriculum"]
        assert [(row["step"], row["stage"], row["share"]) for row in stages] == [
            (0, 0, 0.2), (4, 1, 0.4), (8, 2, 0.8), (12, 3, 1.0),
        ]  # fmt: skip


def test_the_stage_of_a_curriculum_is_shown_and_in_the_rows(tmp_path, dataset):
    stages = {"share": 0.2, "threshold": 0.0, "widen": 4.0, "every_steps": 4}
    config = run_config(dataset, training__curriculum=stages)
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=6), display)
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert [text for text in display.messages if text.startswith("Curriculum")] == [
        "Curriculum: stage 0, the easiest 20% of the examples.",
        "Curriculum: stage 1, the easiest 80% of the examples from step 5 on.",
        "Curriculum: stage 1, the easiest 80% of the examples.",
        "Curriculum: stage 2, all training examples from step 9 on.",
    ]
    rows = [row for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    assert [(row["step"], row["curriculum_stage"]) for row in rows] == [(6, 1), (20, 2)]


PHASES = (
    {"name": "warm-up", "share": 0.2, "learning_rate_factor": 0.5, "label_smoothing": 0.1},
    {"name": "main", "share": 0.5},
    {"name": "fine-tune", "learning_rate_factor": 0.1},
)


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_phases_are_a_function_of_the_step_alone(tmp_path, dataset, supervision):
    config = run_config(
        dataset, training__phases=PHASES, training__supervision=supervision, training__lr_min_ratio=0.2
    )
    run(config, tmp_path / "whole")
    for stop_at in (4, 7, 14, 20):  # two of them where a phase ends
        run(config, tmp_path / "parts", max_step=stop_at)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    for name in ("whole", "parts"):  # a resumed run repeats no phase
        began = [row for row in Run(tmp_path / name).rows(EVENTS) if row["event"] == "phase"]
        assert [(row["step"], row["phase"], row["learning_rate_factor"]) for row in began] == [
            (1, "warm-up", 0.5), (5, "main", 1.0), (15, "fine-tune", 0.1),
        ]  # fmt: skip
    rows = [row for row in Run(tmp_path / "parts").rows() if row["kind"] == "train"]
    assert [(row["step"], row["phase"]) for row in rows] == [
        (4, "warm-up"), (7, "main"), (14, "main"), (20, "fine-tune"),
    ]  # fmt: skip
    rates = [row["learning_rate"] for row in rows]
    assert rates == pytest.approx(
        [1e-2 * learning_rate_factor(step, config.training) for step in (4, 7, 14, 20)]
    )


def test_phases_that_change_nothing_change_no_bit(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "plain")
    run(run_config(dataset, training__phases=({"name": "main"},)), tmp_path / "phased")
    assert_same_run(tmp_path / "plain", tmp_path / "phased")


def test_how_the_data_is_read_is_recorded_at_every_start(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=5)
    run(run_config(dataset, data__loading={"force_streaming_mode": True}), tmp_path / "run")
    opened = [row for row in Run(tmp_path / "run").rows(EVENTS) if row["event"] == "data"]
    assert [(row["step"], row["strategy"]) for row in opened] == [(0, "memory"), (5, "streaming")]


def test_a_listed_run_took_as_long_as_training_said(tmp_path, dataset):
    config = run_config(dataset)
    for stop_at in (10, 20):  # an evaluation comes after the last step
        outcome = run(config, tmp_path / "run", max_step=stop_at)
        (listed,) = list_runs(tmp_path)
        assert listed.seconds == outcome.seconds
    (tmp_path / "run" / EVENTS).unlink()  # as if it was killed
    (listed,) = list_runs(tmp_path)
    assert listed.seconds == Run(tmp_path / "run").rows()[-1]["seconds"]


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 5])
def test_the_micro_batch_size_changes_neither_the_order_nor_what_is_learned(
    tmp_path, dataset, supervision, micro_batch_size
):
    for path, size in (("whole", 6), ("split", micro_batch_size)):
        settings = {"training__supervision": supervision, "model__halt_max_steps": 3}
        run(run_config(dataset, plan__micro_batch_size=size, **settings), tmp_path / path, max_step=12)
    assert_same_up_to_rounding(tmp_path / "whole", tmp_path / "split")


@pytest.mark.usefixtures("float64")
def test_the_plan_may_change_in_the_middle_of_a_run(tmp_path, dataset):
    config = run_config(dataset)
    run(config, tmp_path / "whole", max_step=12)
    run(config, tmp_path / "changed", max_step=5)
    run(run_config(dataset, plan__micro_batch_size=2), tmp_path / "changed", max_step=12)
    assert_same_up_to_rounding(tmp_path / "whole", tmp_path / "changed")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_in_the_middle_of_a_step_saves_the_last_complete_one(tmp_path, dataset, number):
    config = run_config(dataset, plan__micro_batch_size=2)
    run(config, tmp_path / "whole")

    def interrupt(facts, done):
        if facts == "step 8" and done == 2:
            os.kill(os.getpid(), number)

    outcome = run(config, tmp_path / "interrupted", interrupt)
    assert (outcome.reason, outcome.step) == ("interrupted", 7)
    assert run(config, tmp_path / "interrupted").reason == "max_steps"
    assert_same_run(tmp_path / "whole", tmp_path / "interrupted")


def test_a_run_under_nohup_outlives_its_terminal(tmp_path, dataset):
    def hang_up(facts, done):
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(run_config(dataset), tmp_path / "run", hang_up).reason == "max_steps"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_handlers_are_restored_after_a_run(tmp_path, dataset):
    before = signal.getsignal(signal.SIGINT)
    run(run_config(dataset), tmp_path / "run", max_step=1)
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_shows_the_best_value_and_says_that_it_is_the_best(tmp_path, dataset):
    shown = []
    outcome = run(run_config(dataset), tmp_path / "run", lambda facts, step: shown.append((step, facts)))
    value = outcome.best["exact_accuracy"]
    facts = [facts for step, facts in shown if "loss" in facts and step > outcome.best["step"]]
    assert facts
    assert all(re.search(rf"  best {value:.1%}  \d+", text) for text in facts)


def test_a_run_stops_at_its_target(tmp_path, dataset):
    outcome = run(run_config(dataset, evaluation__target_accuracy=0.0), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 10)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.0, None])
def test_an_interrupted_evaluation_is_repeated(tmp_path, dataset, target):
    """Whether a run stops at its target must not depend on when Ctrl-C was pressed."""
    step = 10 if target is not None else 20
    config = run_config(
        dataset,
        evaluation={"every_steps": step, "target_accuracy": target},
        plan__micro_batch_size=2,
    )

    def interrupt(what, done):
        if what == "evaluating":
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(config, tmp_path / "run", interrupt)
    assert (outcome.reason, outcome.step, outcome.best) == ("interrupted", step, None)
    again = run(config, tmp_path / "run")
    assert (again.reason, again.step) == ("target" if target is not None else "max_steps", step)
    assert again.best["step"] == step


def test_a_best_with_other_evaluation_settings_is_not_compared(tmp_path, dataset):
    """An accuracy on other puzzles, or at another depth, is not comparable."""
    run(run_config(dataset), tmp_path / "run", max_step=10)
    deeper = run_config(dataset, evaluation__every_steps=5, inference__depth=4)
    outcome = run(deeper, tmp_path / "run", max_step=15)
    assert (outcome.best["step"], outcome.best["evaluated_with"]["depth"]) == (15, 4)


def test_a_run_that_is_never_evaluated_uses_its_newest_checkpoint(tmp_path, dataset):
    outcome = run(run_config(dataset, evaluation__every_steps=None), tmp_path / "run")
    assert (outcome.reason, outcome.step, outcome.best) == ("max_steps", 20, None)
    finished = Run(tmp_path / "run")
    assert [row for row in finished.rows() if row["kind"] == "eval"] == []
    assert finished.checkpoints().best_or_newest().step == 20


def test_evaluations_do_not_count_against_the_throughput(tmp_path, dataset):
    run(run_config(dataset, evaluation__every_steps=1), tmp_path / "run")
    rows = [row for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    evaluations = [row for row in Run(tmp_path / "run").rows() if row["kind"] == "eval"]
    assert sum(row["evaluation_seconds"] for row in evaluations) > 0
    assert rows[-1]["step"] == 20
    before_the_last = [row["evaluation_seconds"] for row in evaluations if row["step"] < 20]
    spent = rows[-1]["seconds"] - sum(before_the_last)
    steps = [later["step"] - earlier["step"] for earlier, later in pairwise([{"step": 0}, *rows])]
    assert sum(6 * n / row["samples_per_second"] for n, row in zip(steps, rows, strict=True)) <= spent


def test_a_run_stops_when_its_time_is_up(tmp_path, dataset):
    outcome = run(run_config(dataset), tmp_path / "run", max_seconds=1e-9)
    assert (outcome.reason, outcome.step) == ("limit", 0)


def test_a_finished_run_is_not_trained_again(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run")
    again = run(run_config(dataset), tmp_path / "run")
    assert (again.reason, again.step) == ("max_steps", 20)
    assert again.best["examples"] == 12


def test_metrics_and_events_record_what_happened(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run")
    directory = Run(tmp_path / "run")
    evaluations = [row for row in directory.rows() if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == [10, 20]
    assert {"token_accuracy", "halt_accuracy", "mean_steps", "accuracy_by_depth", "seconds"} <= set(
        evaluations[0]
    )
    assert [row["event"] for row in directory.rows(EVENTS)] == ["plan", "data", "stopped"]
    rates = [row["samples_per_second"] for row in directory.rows() if row["kind"] == "train"]
    assert all(rate > 0 for rate in rates)
    assert directory.rows()[-1]["step"] == 20
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["accumulation_steps"] == 1


def test_the_first_row_is_about_few_steps_on_a_fast_machine_too(tmp_path, dataset):
    config = run_config(dataset, training__max_steps=60, evaluation__every_steps=10**6)
    run(config, tmp_path / "run")
    assert Run(tmp_path / "run").rows()[0]["step"] <= FIRST_ROW_STEPS


def test_an_incomplete_last_line_is_ignored(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run")
    metrics = tmp_path / "run" / METRICS
    complete = len(Run(tmp_path / "run").rows())
    metrics.write_text(metrics.read_text() + '{"step": 21, "lo')
    assert len(Run(tmp_path / "run").rows()) == complete
    Run(tmp_path / "run").append(METRICS, {"step": 22})
    assert Run(tmp_path / "run").rows()[-1] == {"step": 22}


def test_another_recipe_in_the_same_directory_is_refused_with_its_difference(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    with pytest.raises(RunError, match=r"training.learning_rate is 0.5 here and 0.01 in the run"):
        run(run_config(dataset, training__learning_rate=0.5), tmp_path / "run")


def test_other_data_is_refused_and_the_run_stays_unchanged(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    other = sudoku_dataset(tmp_path / "other", train=41)
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    with pytest.raises(RunError, match="other data"):
        run(run_config(other), tmp_path / "run")
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


def test_a_recipe_edited_by_hand_is_refused(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    edited = run_config(dataset, training__effective_batch_size=4)
    (tmp_path / "run" / "recipe.yaml").write_text(edited.to_yaml())
    with pytest.raises(RunError, match="effective_batch_size is 4 here and 6 in the run"):
        run(edited, tmp_path / "run")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_resumed(tmp_path, dataset):
    config = run_config(dataset, checkpoints={"every_steps": 3})
    run(config, tmp_path / "whole")
    run(config, tmp_path / "run", max_step=7)
    (tmp_path / "run" / "checkpoints" / "step-00000007" / "weights.safetensors").write_bytes(b"")
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert any("step-00000007" in message for message in display.messages)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_dataset_of_another_task_is_refused_before_anything_is_written(tmp_path, dataset):
    other = shutil.copytree(dataset, tmp_path / "set")
    for name in ("train", "test"):
        description = other / name / "dataset.json"
        description.write_text(description.read_text().replace('"vocab_size": 6', '"vocab_size": 12'))
    with pytest.raises(
        DataError, match="has 6 tokens; this dataset has 12 input tokens and 6 outputs"
    ) as refused:
        run(run_config(other), tmp_path / "run")
    assert str(refused.value).startswith(f"{other} is not a dataset of the task sudoku: ")
    assert "data.path" in refused.value.hint
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_allocated_is_an_error_and_leaves_no_run(tmp_path, dataset):
    with pytest.raises(MemoryBudgetError, match="do not fit into memory"):
        run(run_config(dataset, training__effective_batch_size=2**30), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_precision_may_change_when_a_run_is_resumed(tmp_path, dataset):
    """Checked without a bfloat16 operation, which kills the process on some machines."""
    run(run_config(dataset), tmp_path / "run", max_step=1)
    config = run_config(dataset)
    spec = open_split(dataset, "train").spec
    learner = make_learner(config.model, config.training, spec, precision="bfloat16")
    learner.load_state(Run(tmp_path / "run").checkpoints().newest_intact().load_all())
    assert learner.latents.dtype == torch.bfloat16


def test_a_directory_that_is_not_a_run_is_left_alone(tmp_path, dataset):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty and not a run"):
        run(run_config(dataset), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_a_path_that_cannot_be_a_directory_is_an_error(tmp_path, dataset):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot create the run directory"):
        run(run_config(dataset), tmp_path / "file" / "run")


def test_the_best_checkpoint_is_kept_besides_the_newest_ones(tmp_path, dataset):
    config = run_config(dataset, checkpoints={"every_steps": 2, "keep": 2}, evaluation__every_steps=4)
    run(config, tmp_path / "run")
    manager = Run(tmp_path / "run").checkpoints()
    kept = sorted(path.name for path in manager.directory.iterdir())
    best = manager.best()["checkpoint"]
    assert kept == sorted({best, "step-00000018", "step-00000020"})
    assert manager.best_or_newest().path.name == best


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda run: (run / "best").write_text("nonsense"),
            "does not name a checkpoint; step-00000010 is the best",
        ),
        (lambda run: shutil.rmtree(run / "checkpoints" / "step-00000010"), "is missing; none is known"),
    ],
)
def test_a_resumed_run_says_that_its_best_checkpoint_cannot_be_used(tmp_path, dataset, change, said):
    config = run_config(dataset)
    run(config, tmp_path / "run", max_step=12)
    change(tmp_path / "run")
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=13), display)
    (warning,) = (text for text in display.messages if text.startswith("warning:"))
    assert said in warning


def test_a_run_with_an_unreadable_recipe_is_listed_with_what_is_known_of_it(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=2)
    (tmp_path / "run" / "recipe.yaml").write_bytes(b"\xff")
    (found,) = list_runs(tmp_path)
    assert (found.state, found.step, found.task) == ("stopped", 2, None)
    assert "recipe.yaml" in found.problem


@pytest.mark.slow
def test_deterministic_runs_are_equal_bit_for_bit(tmp_path, dataset):
    config = run_config(dataset, training__deterministic=True, model__puzzle_emb_ndim=8)
    run(config, tmp_path / "a")
    run(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    torch.use_deterministic_algorithms(False)


def test_a_run_may_become_deterministic_when_it_is_resumed(tmp_path, dataset):
    """Its plan, which is kept, was made before, and plans of earlier versions do not mention it at all."""
    run(run_config(dataset), tmp_path / "run", max_step=1)
    config = run_config(dataset, training__deterministic=True)
    kept = prepare(config, tmp_path / "run", Recorder()).plan
    try:
        train(config, tmp_path / "run", kept, Limits(max_step=2), Recorder())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert Run(tmp_path / "run").plan.execution.deterministic


def test_a_plan_says_that_a_block_is_compiled_only_while_it_is(tmp_path, dataset):
    """A process starts without it, even if it resumes with the plan of one that had compiled it."""
    config = run_config(dataset)
    compiled = plan_of(config).with_execution(compiled_size=6)
    train(config, tmp_path / "run", compiled, Limits(max_step=1), Recorder())
    assert Run(tmp_path / "run").plan.execution.compiled_size is None


def test_a_start_that_was_killed_before_its_recipe_was_written_can_be_repeated(tmp_path, dataset):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.yaml.partial").write_text("task: su")
    assert set_aside(tmp_path / "run") is None
    assert run(run_config(dataset), tmp_path / "run", max_step=1).step == 1


def test_a_resumed_run_records_what_changed_in_its_plan(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=2)
    display = Recorder()
    config = run_config(dataset, plan__micro_batch_size=2)
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=3), display)
    assert any(text.endswith("after step 2 (micro_batch_size 6 -> 2).") for text in display.messages)
    (resumed,) = (row for row in Run(tmp_path / "run").rows(EVENTS) if row["event"] == "resumed")
    assert resumed["changes"] == ["micro_batch_size 6 -> 2"]


def test_a_resumed_run_does_not_name_a_plan_that_is_only_provisional(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=2)
    display = Recorder()
    config = run_config(dataset, plan__micro_batch_size=2)
    provisional = replace(plan_of(config), provisional=True)
    train(config, tmp_path / "run", provisional, Limits(max_step=3), display)
    assert any(text.endswith("after step 2.") for text in display.messages)


def test_other_data_is_refused_with_every_difference(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    larger = sudoku_dataset(tmp_path / "larger", size=6)
    with pytest.raises(RunError, match="other data") as refused:
        run(run_config(larger), tmp_path / "run")
    assert "spec.vocab_size is 8 here and 6 in the run" in str(refused.value)
    assert "spec.max_len is 36 here and 16 in the run" in str(refused.value)
    assert "fingerprint.inputs is" in str(refused.value)
    assert "trm checkpoint import" in refused.value.hint


def test_the_limits_of_a_start_are_recorded_for_those_who_watch(tmp_path, dataset):
    config = run_config(dataset, training__max_steps=6)
    run(config, tmp_path / "run", max_step=2, max_seconds=60.0)
    run(config, tmp_path / "run")
    limits = [row for row in Run(tmp_path / "run").rows(EVENTS) if row["event"] == "limits"]
    assert [(row["step"], row["max_step"], row["max_seconds"]) for row in limits] == [(0, 2, 60.0)]
