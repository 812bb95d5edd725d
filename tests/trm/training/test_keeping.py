"""What is kept of a run when numbers are none, the disk is full, the battery is low or it is too hot."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
import torch
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import CheckpointError, NonFiniteError, RunError
from macbook_optimization.hardware_detection import PowerSpecs
from macbook_optimization.resource_monitoring import PowerMonitor, ThermalState
from trm.config import CheckpointsConfig, PlanSettings
from trm.runs import Run, set_aside
from trm.training import loop
from trm.training.loop import Limits, train
from trm.training.saving import Saver
from trm.training.watching import Journal, PowerWatch, SilentDisplay, ThreadWatch


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def events(path, *names):
    rows = Run(path).rows("events.jsonl")
    return [row for row in rows if not names or row["event"] in names]


# Numbers that are none


class Poisoned:
    """A real learner whose gradient is no number at the given steps: its weights are poisoned for the time
    of the step, with a learning rate above the given one only."""

    def __init__(self, learner, steps, above):
        self.learner, self.steps, self.above = learner, steps, above

    def __getattr__(self, name):
        return getattr(self.learner, name)

    def step(self, batch, settings, next_cut):
        if settings.step not in self.steps or settings.learning_rate <= self.above:
            return self.learner.step(batch, settings, next_cut)
        weight = self.learner.model.lm_head.weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        try:
            return self.learner.step(batch, settings, next_cut)
        finally:
            with torch.no_grad():
                weight.copy_(before)


@pytest.fixture
def poison(monkeypatch):
    def at(*steps, above=0.0):
        real = loop.load_backend()

        class Backend:
            prepare = staticmethod(real.prepare)

            @staticmethod
            def learner(*arguments):
                return Poisoned(real.learner(*arguments), steps, above)

        monkeypatch.setattr(loop, "load_backend", lambda: Backend)

    return at


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_step_without_a_number_is_skipped_and_noted(tmp_path, dataset, poison, supervision):
    poison(4, 5, 9)
    outcome = run(run_config(dataset, training__supervision=supervision), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    skipped = events(tmp_path / "run", "step skipped")
    assert [row["step"] for row in skipped] == [4, 5, 9]
    assert "loss is nan" in skipped[0]["cause"]
    assert [row["step"] for row in Run(tmp_path / "run").rows() if row.get("loss") != row.get("loss")] == []


def test_a_skipped_step_moves_the_data_and_not_the_weights(tmp_path, dataset, poison):
    config = run_config(dataset)
    run(config, tmp_path / "three", max_step=3)
    poison(4)
    run(config, tmp_path / "four", max_step=4)
    three, four = (Run(tmp_path / name).checkpoints().newest_good() for name in ("three", "four"))
    for group in ("weights", "ema", "optimizer"):
        for name, tensor in three.load(group).items():
            assert torch.equal(tensor, four.load(group)[name])
    assert all(four.metadata["slots"]["halted"])


def test_three_in_a_row_go_back_with_half_the_learning_rate(tmp_path, dataset, poison):
    config = run_config(dataset, checkpoints={"every_steps": 4})
    poison(10, 11, 12, above=0.006)
    display = Recorder()
    outcome = train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert outcome.step == 20
    (back,) = events(tmp_path / "run", "rolled back")
    assert (back["step"], back["to"], back["learning_rate_scale"]) == (12, 8, 0.5)
    assert any("Going back to step 8 with 0.5" in text for text in display.messages)
    rates = {row["step"]: row["learning_rate"] for row in Run(tmp_path / "run").rows() if "loss" in row}
    assert rates[20] == pytest.approx(0.5 * config.training.learning_rate)
    newest = Run(tmp_path / "run").checkpoints().newest_good()
    assert newest.metadata["learning_rate_scale"] == 0.5
    assert newest.metadata["rolled_back_from"] is None, "it is past that"


def test_without_a_checkpoint_it_goes_back_to_the_beginning(tmp_path, dataset, poison):
    poison(1, 2, 3, above=0.006)
    assert run(run_config(dataset), tmp_path / "run").step == 20
    (back,) = events(tmp_path / "run", "rolled back")
    assert (back["step"], back["to"]) == (3, 0)


def test_if_that_does_not_help_it_stops_and_says_so(tmp_path, dataset, poison):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    poison(*range(10, 100))
    with pytest.raises(NonFiniteError, match=r"did not help. That checkpoint is intact") as stopped:
        run(config, tmp_path / "run")
    assert "training.learning_rate" in stopped.value.hint
    assert len(events(tmp_path / "run", "rolled back")) == 1
    newest = Run(tmp_path / "run").checkpoints().newest_good()
    assert newest.step == 8
    for group in newest.load_all().values():
        assert all(torch.isfinite(tensor).all() for tensor in group.values())


def test_no_checkpoint_is_made_of_weights_whose_steps_are_skipped(tmp_path, dataset, poison):
    """Otherwise a rollback would lead to the very weights that it is to lead away from."""
    config = run_config(dataset, checkpoints={"every_steps": 1, "keep": 2}, evaluation__every_steps=100)
    poison(*range(10, 100))
    with pytest.raises(NonFiniteError, match="did not help"):
        run(config, tmp_path / "run")
    assert [row["to"] for row in events(tmp_path / "run", "rolled back")] == [9]
    assert Run(tmp_path / "run").checkpoints().newest_good().step == 9


def test_a_stop_between_skipped_steps_does_not_change_where_it_goes_back_to(tmp_path, dataset, poison):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    poison(10, 11, 12, above=0.006)
    for max_step in (11, 20):
        outcome = run(config, tmp_path / "halves", max_step=max_step)
    assert outcome.step == 20
    run(config, tmp_path / "whole")
    assert [row["to"] for row in events(tmp_path / "halves", "rolled back")] == [8]
    one, other = (Run(tmp_path / name).checkpoints().newest_good().load_all() for name in ("halves", "whole"))
    for group, named in one.items():
        assert all(torch.equal(tensor, other[group][name]) for name, tensor in named.items())
    assert (tmp_path / "halves" / "checkpoints" / "abandoned-step-00000011").is_dir()


@pytest.fixture
def infinite(monkeypatch):
    """Once, after the given step, a moment of the optimizer is infinite."""

    def after(number):
        real, done = loop.Trainer._step, []

        def step(self, check):
            result = real(self, check)
            if self.state.step == number and not done:
                moments = self.state.learner.optimizer.moments
                done.append(moments["lm_head.weight.exp_avg_sq"].fill_(float("inf")))
            return result

        monkeypatch.setattr(loop.Trainer, "_step", step)

    return after


@pytest.mark.parametrize("at", [8, 20], ids=["on the way", "at the end"])
def test_a_weight_without_a_number_is_not_saved(tmp_path, dataset, infinite, at):
    """Found when it is to be saved, so the run goes back at once."""
    infinite(at)
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    (back,) = events(tmp_path / "run", "rolled back")
    assert (back["step"], back["to"]) == (at, at - 4)


def test_an_evaluation_of_such_weights_is_no_best(tmp_path, dataset, infinite):
    infinite(10)
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__target_accuracy=0.0)
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 10)
    (back,) = events(tmp_path / "run", "rolled back")
    assert (back["step"], back["to"]) == (10, 8)
    assert Run(tmp_path / "run").checkpoints().best_or_newest().step == 10


def test_a_rollback_past_a_damaged_checkpoint_saves_that_step_again(tmp_path, dataset, poison, monkeypatch):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=100)
    poison(10, 11, 12, above=0.006)
    real = loop.Trainer._roll_back

    def damaged_by_then(self, trouble):
        (self.checkpoints.path(8) / "ema.safetensors").write_bytes(b"")
        real(self, trouble)

    monkeypatch.setattr(loop.Trainer, "_roll_back", damaged_by_then)
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    assert not [text for text in display.messages if text.startswith("warning")]
    assert [row["to"] for row in events(tmp_path / "run", "rolled back")] == [4]
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-00000008").is_dir()


# Full disks


def test_a_new_run_that_has_no_room_for_a_checkpoint_does_not_begin(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: 2**19)
    with pytest.raises(CheckpointError, match=r"A checkpoint needs 1.0 MiB, and 0.5 MiB are free"):
        run(run_config(dataset), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_begun_warns_goes_on_and_saves_when_there_is_room(tmp_path, dataset, monkeypatch):
    config = run_config(dataset, checkpoints={"every_steps": 2})
    run(config, tmp_path / "run", max_step=4)
    free = 2**19
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: free)
    monkeypatch.setattr("trm.training.saving.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("trm.training.saving.SHARE", 1e9)

    def make_room(facts, done):
        nonlocal free
        if done == 15:
            free = 2**40

    display = Recorder(make_room)
    assert train(config, tmp_path / "run", plan_of(config), Limits(), display).step == 20
    assert any("Nothing can be saved until there is room" in text for text in display.messages)
    warnings = [text for text in display.messages if text.startswith("warning: step")]
    assert len(warnings) == 1
    assert "step 4 is safe" in warnings[0]
    assert [row["step"] for row in events(tmp_path / "run", "not saved", "saved again")] == [6, 15]


@pytest.mark.parametrize("room", [True, False], ids=["and then has room", "and stays full"])
def test_ctrl_c_on_a_full_disk_waits_for_room_or_a_second_one(tmp_path, dataset, monkeypatch, room):
    config = run_config(dataset, checkpoints={"every_steps": 2})
    run(config, tmp_path / "run", max_step=4)
    free = 0
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: free)
    monkeypatch.setattr("trm.training.saving.RETRY_SECONDS", 0.2)

    def interrupt(facts, done):
        if done == 9:
            os.kill(os.getpid(), signal.SIGINT)

    class Patient(Recorder):
        def message(self, text):
            nonlocal free
            if "Ctrl-C again gives up, and step 4 is safe" in text:
                free = 2**40 if room else free
                if not room:
                    os.kill(os.getpid(), signal.SIGINT)

    child = os.fork()  # the second one ends the process
    if child == 0:
        reason = train(config, tmp_path / "run", plan_of(config), Limits(), Patient(interrupt)).reason
        os._exit(0 if reason == "interrupted" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if room else 130)
    assert Run(tmp_path / "run").checkpoints().newest_good().step == (9 if room else 4)


def test_ctrl_c_while_it_waits_says_what_is_lost(tmp_path, dataset, monkeypatch):
    config = run_config(dataset, checkpoints={"every_steps": 2})
    run(config, tmp_path / "run", max_step=4)
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: 0)

    class Impatient(Recorder):
        def message(self, text):
            if "Ctrl-C gives up" in text:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(CheckpointError, match=r"is lost: step 4 is safe"):
        train(config, tmp_path / "run", plan_of(config), Limits(), Impatient())


def test_rows_wait_for_room(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()  # in the way
    display = Recorder()
    journal = Journal(Run(tmp_path), display)
    journal.append("metrics.jsonl", {"step": 1})
    journal.event("something", step=2)
    assert len(display.messages) == 1
    assert "Training goes on" in display.messages[0]
    (tmp_path / "metrics.jsonl").rmdir()
    journal.append("metrics.jsonl", {"step": 3})
    assert Run(tmp_path).rows() == [{"step": 1}, {"step": 3}]
    assert Run(tmp_path).rows("events.jsonl")[0]["event"] == "something"


# When to save


def saver(tmp_path, **settings):
    manager = Run(tmp_path).checkpoints()
    return Saver(
        CheckpointsConfig(**settings), manager, Journal(Run(tmp_path), SilentDisplay()), SilentDisplay()
    )


def test_saving_takes_little_of_the_time_however_long_a_save_takes(tmp_path):
    ours = saver(tmp_path, every_seconds=60)
    assert ours.every_seconds == 60
    ours.save_seconds = 3.0  # a slow disk
    assert ours.save_seconds / ours.every_seconds < 0.01
    ours.at -= 300
    assert not ours.is_due(7)
    ours.at -= 400
    assert ours.is_due(7)


def test_a_failed_save_is_tried_again_soon_and_not_at_every_step(tmp_path, monkeypatch):
    ours = saver(tmp_path, every_seconds=60, every_steps=1)
    monkeypatch.setattr("macbook_optimization.checkpoint_management.free_bytes", lambda path: 0)
    assert not ours.save(3, {"weights": {"w": torch.zeros(2)}}, {})
    assert not ours.is_due(4)
    ours.failed_at -= 11
    assert ours.is_due(4)


def power(percent, on_battery=True):
    monitor = PowerMonitor()
    monitor.power = PowerSpecs(on_battery, percent)
    return monitor


def test_a_low_battery_saves_each_time_that_it_falls(tmp_path):
    watch = PowerWatch(PlanSettings(), power(50))
    seen = []
    looks = [(11, True), (9, True), (9, True), (8, True), (8, False), (9, True), (None, None)]
    looks = [(percent and percent + 0.3, on_battery) for percent, on_battery in looks]  # as Linux tells it
    for percent, on_battery in looks:
        watch.monitor.power = PowerSpecs(on_battery, percent)
        seen.append(watch.battery_fell())
    assert seen == [None, 9, None, 8, None, 9, None]


@pytest.mark.parametrize(
    ("limit", "thermal", "hot"),
    [
        (None, ThermalState(True, 60.0, None, None), True),
        (None, ThermalState(False, 99.0, None, None), False),
        (85.0, ThermalState(None, 86.0, None, None), True),
        (85.0, ThermalState(None, 84.0, None, None), False),
        (85.0, ThermalState(None, None, "nominal", None), False),
    ],
)
def test_heat_is_what_the_system_says_or_the_user(limit, thermal, hot):
    watch = PowerWatch(PlanSettings(thermal_throttle_threshold=limit), power(50))
    watch.monitor.thermal = thermal
    assert (watch.too_hot() is not None) == hot
    watch.settings = PlanSettings(thermal_throttle_threshold=limit, enable_thermal_monitoring=False)
    assert watch.too_hot() is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2, 1, 1, 1, 2, 2]),
        ({"lanes": 2}, [2] * 6),
        ({"lanes": 2, "micro_batch_size": 1}, [2, 1, 1, 1, 2, 2]),  # no room for two lanes, so a team
        ({"threads": 1}, [1] * 6),
    ],
)
def test_a_team_of_threads_gives_way_to_other_programs(tmp_path, dataset, monkeypatch, changes, expected):
    """Readings of two cores, made up: how many are busy, and how many of these with us."""
    config = run_config(dataset)
    chosen = replace(plan_of(config), **{"threads": 2, "lanes": 1, **changes})
    journal, display, threads = Journal(Run(tmp_path), Recorder()), Recorder(), []
    threads.append(chosen.threads)
    watch = ThreadWatch(config, chosen, threads.append, journal, display)
    monkeypatch.setattr(psutil, "cpu_count", lambda *logical: 2)
    seen = []
    for look in [(2.0, 1.9), (2.0, 1.3), (2.0, 1.0), (1.8, 1.4), (1.1, 1.0), (2.0, 1.9)]:
        watch.looked_at -= ThreadWatch.EVERY_SECONDS
        watch.busy_cores = lambda look=look: look
        watch.look(step=7, compiled=False)
        seen.append(threads[-1])
    assert seen == expected
    assert len(events(tmp_path, "threads")) == len(threads) - 1 == len(display.messages)


def test_a_compiled_level_has_the_threads_that_it_was_made_for(tmp_path, dataset, monkeypatch):
    """Also when the child that compiled it had taken a core."""
    config, threads = run_config(dataset), []
    chosen = replace(plan_of(config), threads=2, lanes=1)
    watch = ThreadWatch(config, chosen, threads.append, Journal(Run(tmp_path), Recorder()), Recorder())
    monkeypatch.setattr(psutil, "cpu_count", lambda *logical: 2)
    watch.busy_cores = lambda: (2.0, 0.5)
    for compiled in (False, True, True):
        watch.looked_at -= ThreadWatch.EVERY_SECONDS
        watch.look(step=7, compiled=compiled)
    assert threads == [1, 2]


class Hot(PowerMonitor):
    def look(self):
        self.power, self.thermal = PowerSpecs(True, 5.0), ThermalState(True, 101.0, None, None)


def test_a_run_saves_before_it_cools_and_when_the_battery_is_low(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(loop, "PowerMonitor", Hot)
    plan = {"threads": 1, "cooling_delay_seconds": 0.1}
    config = run_config(dataset, plan=plan, evaluation__every_steps=100, training__max_steps=200)
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(), display)
    (low,) = events(tmp_path / "run", "low battery")
    (pause,) = events(tmp_path / "run", "cooling break")  # at most once a minute
    assert low["percent"] == 5.0
    assert pause["reason"] == "the system slows the processor down"
    assert any("The battery is at 5 %; saving." in text for text in display.messages)


# The best


def test_a_target_that_was_reached_just_before_a_kill_is_not_forgotten(tmp_path, dataset, monkeypatch):
    """Killed between the checkpoint and the file that says it is the best."""
    config = run_config(dataset, evaluation__target_accuracy=0.0)
    monkeypatch.setattr(Saver, "mark_best", lambda self, best: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if child == 0:
        run(config, tmp_path / "run")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    monkeypatch.undo()
    assert Run(tmp_path / "run").checkpoints().best() is None
    outcome = run(config, tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 10)
    assert Run(tmp_path / "run").checkpoints().best()["checkpoint"] == "step-00000010"


def test_a_best_that_could_not_be_marked_is_marked_before_it_could_be_removed(tmp_path, dataset):
    evaluation = {"every_steps": 5, "depth": 3}
    config = run_config(dataset, checkpoints={"every_steps": 2, "keep": 1}, evaluation=evaluation)
    in_the_way = tmp_path / "run" / ".best.partial"

    def block(facts, done):
        if facts.startswith("loss") and done == 3:
            in_the_way.mkdir()
        if facts.startswith("loss") and done == 6:
            in_the_way.rmdir()

    display = Recorder(block)
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=9), display)
    assert [text for text in display.messages if text.startswith("warning: Cannot write")]
    checkpoints = Run(tmp_path / "run").checkpoints()
    assert checkpoints.best()["checkpoint"] == "step-00000005"
    assert checkpoints.best_or_newest().step == 5


def test_a_best_whose_weights_are_lost_is_no_best(tmp_path, dataset):
    config = run_config(dataset, checkpoints={"every_steps": 4}, evaluation__every_steps=10)
    run(config, tmp_path / "run", max_step=10)
    (tmp_path / "run" / "checkpoints" / "step-00000010" / "ema.safetensors").write_bytes(b"")
    outcome = run(config, tmp_path / "run", max_step=12)
    assert outcome.best["step"] == 10
    assert Run(tmp_path / "run").checkpoints().best_or_newest().step == 10, "evaluated and saved again"


# Starts


def test_a_start_that_was_killed_before_its_recipe_was_written_is_no_obstacle(tmp_path, dataset):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.yaml.partial").write_text("task: su")
    assert set_aside(tmp_path / "run") is None
    assert run(run_config(dataset), tmp_path / "run", max_step=1).step == 1


# What may change, and what may not


def test_a_resumed_run_notes_what_is_carried_out_otherwise(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=2)
    display = Recorder()
    config = run_config(dataset, plan__micro_batch_size=2)
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=3), display)
    assert any(text.endswith("after step 2 (micro_batch_size 6 -> 2).") for text in display.messages)
    assert events(tmp_path / "run", "resumed")[0]["changes"] == ["micro_batch_size 6 -> 2"]


def test_other_data_are_refused_with_every_difference(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    larger = sudoku_dataset(tmp_path / "larger", size=6)
    with pytest.raises(RunError, match="other data") as refused:
        run(run_config(larger), tmp_path / "run")
    assert "shape.vocab_size is 8 here and 6 in the run" in str(refused.value)
    assert "shape.seq_len is 36 here and 16 in the run" in str(refused.value)
    assert "fingerprint.inputs is" in str(refused.value)
    assert "trm checkpoint import" in refused.value.hint
