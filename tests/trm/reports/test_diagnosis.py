"""Each problem is found when it lasts, is reported once, and a healthy run gets no alarm."""

import json
import math
import re
import time

import key_reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import BEGAN, BUDGET, GIB, plan_on, story

from trm.reports.diagnosis import diagnose
from trm.reports.earlier_runs import EarlierRun
from trm.reports.finding import UNKNOWN_GAIN
from trm.reports.history import MAX_POINTS
from trm.reports.speed_problems import slower_run
from trm.runs.directory import Run, begin
from trm.runs.events import (
    BatchShrunk,
    MemoryGrows,
    Resumed,
    RolledBack,
    StepSkipped,
    ThreadsChanged,
    ThrottlingInferred,
    ThrottlingOver,
)

TERMINAL = {
    "training__supervision": "terminal",
    "training__depths": {0: 1, 800: 2, 4000: 4, 9000: 8},
    "training__hints": {0: 0.5, 2000: 0.0},
}
BUSY = {"cpu_percent": [100.0, 100.0], "process_cpu_percent": 100.0}
STARVED = {"spent": {"data": 0.5, "forward": 0.2, "backward": 0.25, "optimizer": 0.05}}
HALF_IDLE = {"cpu_percent": 120.0}
HOUR = 3600.0


@pytest.fixture
def told(tmp_path):
    """Some healthy minutes have passed."""
    healthy = story(tmp_path)
    assert healthy.tell(200) == []
    return healthy


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, TERMINAL], ids=["deep", "terminal"])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.3))
def test_a_healthy_run_gets_no_alarm(tmp_path_factory, changes, seed, noise):
    healthy = story(tmp_path_factory.getbasetemp(), seed, noise, **changes)
    assert healthy.tell(200) == []
    healthy.choose(plan_on(2, size=2))
    assert healthy.tell(100, slowness=0.04) == []  # which is how fast the new plan is
    assert healthy.watchdog.evidence.step > 1000


def test_auto_tuning_and_evaluations_are_not_alarming(tmp_path):
    healthy = story(tmp_path)
    for size in (1, 2, 4):
        healthy.choose(plan_on(2, size))
        assert healthy.tell(3, slowness=0.02 * (1 + size)) == []
    assert healthy.tell(100, slowness=0.02) == []
    evaluation = {"spent": {"data": 0.03, "forward": 1.0, "evaluation": 8.0}, "cpu_percent": 90.0}
    for _ in range(10):
        assert healthy.tell(2, row=evaluation) == []
        assert healthy.tell(20) == []


def test_other_programs_on_cores_that_training_needs_are_contention(told):
    (finding,) = told.tell(60, row={"cpu_percent": 100.0}, resources=BUSY)
    assert finding.kind == "contention"
    assert "Other programs keep 1.0 of 2 cores busy" in finding.evidence
    assert "training needs 2 and gets 1.0" in finding.evidence
    assert finding.gain == "Up to 2.0 times as fast."


def test_other_programs_on_free_cores_are_not_contention(tmp_path):
    quiet = story(tmp_path)
    quiet.choose(plan_on(1))
    assert quiet.tell(200, row={"cpu_percent": 100.0}, resources=BUSY) == []


def test_slow_steps_beside_a_busy_program_are_reported_as_contention_only(told):
    assert told.kinds(200, slowness=0.05, row={"cpu_percent": 100.0}, resources=BUSY) == ["contention"]


def test_a_problem_is_reported_again_only_after_it_was_gone(told):
    assert told.kinds(300, resources=BUSY) == ["contention"]
    assert told.tell(20) == []
    assert told.tell(200, resources=BUSY) == []  # not gone for long enough
    assert told.tell(100) == []
    assert told.kinds(200, resources=BUSY) == ["contention"]


def test_a_short_disturbance_is_not_reported(told):
    for _ in range(3):
        assert told.tell(10, slowness=0.1, row={**STARVED, **HALF_IDLE}, resources=BUSY) == []
        assert told.tell(60) == []


def test_waiting_for_data_is_starvation(told):
    (finding,) = told.tell(100, row={**STARVED, **HALF_IDLE})
    assert finding.kind == "data starvation"
    assert re.match(r"(4|5)\d% of the time of a step", finding.evidence)
    assert re.match(r"Up to (1\.[6789]|2\.0) times as fast", finding.gain)


@pytest.mark.parametrize(("strategy", "key"), [("streaming", "streaming_threshold_mb"), ("mapped", "cache_")])
def test_the_advice_for_starvation_depends_on_how_data_is_read(told, strategy, key):
    told.event({"event": "data", "step": 0, "strategy": strategy})
    (finding,) = told.tell(100, row=STARVED)
    assert f"data.loading.{key}" in finding.advice


def test_idle_threads_of_the_plan_are_underuse(told):
    (finding,) = told.tell(100, row=HALF_IDLE)
    assert finding.kind == "CPU under-use"
    assert "at most 1.2 of the 2 cores" in finding.evidence
    assert finding.gain == "Up to 1.7 times as fast."


def test_one_thread_beside_other_programs_is_not_underuse(told):
    """Cores that were busy for a moment only: the trainer has fallen back to one thread, which is busy."""
    told.event(ThreadsChanged(told.step, 2, 1, "other programs keep 1.0 of 2 cores busy").to_row())
    assert told.tell(100, row={"cpu_percent": 98.0}) == []
    told.event(ThreadsChanged(told.step, 1, 2, "the cores are free again").to_row())
    assert told.tell(100) == []
    (finding,) = told.tell(100, row=HALF_IDLE)
    assert finding.kind == "CPU under-use"


def test_growing_swap_is_reported_and_full_swap_is_not(told):
    assert told.tell(60, resources={"swap_bytes": 50 * GIB}) == []
    start = told.now
    growing = {"swap_bytes": lambda row: 50 * GIB + int(1e7 * (row["time"] - start))}
    (finding,) = told.tell(60, slowness=0.03, resources=growing)
    assert finding.kind == "swap"
    assert re.match(r"Up to 1\.[456] times as fast", finding.gain)
    assert re.search(r"Swap grew by \d+ MiB in 3\d s", finding.evidence)


def test_memory_near_the_budget_is_a_bottleneck(told):
    assert told.tell(60, resources={"rss_bytes": 0.89 * BUDGET}) == []
    (finding,) = told.tell(60, resources={"rss_bytes": 0.93 * BUDGET})
    assert finding.kind == "memory bottleneck"
    assert "93% of its memory budget of 8,192 MiB" in finding.evidence
    assert finding.gain == UNKNOWN_GAIN


def test_the_memory_of_a_gpu_counts_against_the_budget(told):
    resident = {"rss_bytes": 0.5 * BUDGET}
    assert told.tell(60, row={"device_bytes": int(0.3 * BUDGET)}, resources=resident) == []
    (finding,) = told.tell(60, row={"device_bytes": int(0.43 * BUDGET)}, resources=resident)
    assert "93% of its memory budget of 8,192 MiB" in finding.evidence


def test_a_micro_batch_that_stays_small_is_a_bottleneck(told):
    told.event(BatchShrunk(told.step, 4, 1, "only 90 MiB is left for this process", 0).to_row())
    (finding,) = told.tell(100, slowness=0.04, row={"micro_batch_size": 1})
    assert finding.kind == "memory bottleneck"
    assert re.match(r"Up to (1\.9|2\.[01]) times as fast", finding.gain)
    assert "is 1 instead of 4: only 90 MiB is left for this process." in finding.evidence
    assert told.tell(100) == []


def test_reported_throttling_needs_no_inference(told):
    hot = {"is_throttling": True, "temperature": 99.0, "speed_limit_percent": 60}
    assert told.tell(40, resources={"is_throttling": False}) == []
    (finding,) = told.tell(200, slowness=0.04, resources=hot)
    assert finding.kind == "throttling"
    assert "The system reports" in finding.evidence
    assert "99 °C, speed limit 60 %" in finding.evidence
    assert re.match(r"Up to (1\.9|2\.[01]) times as fast", finding.gain)


def test_throttling_that_the_trainer_inferred_is_reported_as_inferred(told):
    text = "40 steps took 1.50 times as long"
    told.event(ThrottlingInferred(told.step, 1.5, text).to_row())
    (finding,) = told.tell(100, slowness=0.03)
    assert finding.kind == "throttling"
    assert f"(inferred, the system does not report it): {text}." in finding.evidence
    assert finding.gain == "Up to 1.5 times as fast."
    assert told.tell(30) == []
    told.event(ThrottlingOver(told.step).to_row())
    assert told.tell(60) == []
    told.event(ThrottlingInferred(told.step, 1.5, text).to_row())
    assert told.tell(60, resources={"is_throttling": False}) == [], "a sensor says otherwise"


def test_slow_steps_that_nothing_explains_are_a_regression(told):
    (finding,) = told.tell(200, slowness=0.03)
    assert finding.kind == "regression"
    assert re.search(r"1\.[45] times as long", finding.evidence)
    assert "nothing that was measured explains it" in finding.evidence


def test_a_regression_is_explained_by_the_load_of_the_machine(told):
    full = {"is_throttling": False, "available_bytes": GIB}
    (finding,) = told.tell(300, slowness=0.05, resources=full)
    assert "94 % of memory is in use" in finding.evidence
    assert finding.advice.startswith("Close other programs")


@pytest.mark.parametrize(
    ("plan", "percent"), [(plan_on(1), 97.0), (plan_on(1, device="cuda"), 30.0)], ids=["one thread", "GPU"]
)
def test_cores_that_the_plan_leaves_idle_explain_no_regression(tmp_path, plan, percent):
    told = story(tmp_path)
    told.choose(plan)
    load = {"cpu_percent": [percent, 1.0], "process_cpu_percent": percent}
    assert told.tell(100, row={"cpu_percent": percent}, resources=load) == []
    (finding,) = told.tell(200, slowness=0.03, row={"cpu_percent": percent}, resources=load)
    assert finding.kind == "regression"
    assert "nothing that was measured explains it" in finding.evidence


def test_a_regression_is_explained_by_threads_that_are_idle(told):
    half_idle = {"cpu_percent": [45.0, 45.0], "process_cpu_percent": 85.0}
    (finding,) = told.tell(200, slowness=0.05, resources=half_idle)
    assert re.search(r"only 4\d % of the CPU that training may use is busy", finding.evidence)


@pytest.mark.parametrize("rate", [math.inf, 1e308])
def test_a_rate_that_no_machine_has_is_passed_over(told, rate):
    assert told.tell(10, row={"samples_per_second": rate}) == []
    assert told.tell(100) == []


def test_slower_steps_on_battery_are_not_a_problem(told):
    assert told.tell(300, slowness=0.05, resources={"on_battery": True}) == []


def test_more_recursions_per_step_are_not_slower(tmp_path):
    deeper = story(tmp_path, noise=0.0, **TERMINAL)
    assert deeper.tell(600) == []
    rates = [row["samples_per_second"] for row in deeper.history.recent]
    assert min(rates) < 0.6 * max(rates)


def test_a_loss_that_varies_wildly_is_unstable(told):
    noisy = {"loss": lambda row: float(told.rng.choice([1.0, 30.0])), "grad_norm": 1e4}
    (finding,) = told.tell(120, row=noisy)
    assert finding.kind == "unstable training"
    assert "standard deviation" in finding.evidence
    assert "gradient norm 1e+04" in finding.evidence
    assert "training.learning_rate (now 0.01)" in finding.advice
    assert "training.max_grad_norm=1.0" in finding.advice


def test_a_loss_that_swings_and_does_not_fall_is_unstable(told):
    """As `sudoku-6x6` does with ten times its learning rate."""
    swinging = {"loss": lambda row: 1.0 + 0.3 * told.rng.choice([-1, 1])}
    (finding,) = told.tell(120, row=swinging)
    assert finding.kind == "unstable training"
    assert "and does not fall" in finding.evidence


def test_one_spike_of_the_loss_is_not_instability(told):
    assert told.tell(1, row={"loss": 1000.0}) == []
    assert told.tell(200) == []


def test_a_loss_that_stays_where_it_began_is_a_learning_rate_that_does_not_fit(tmp_path):
    stuck = story(tmp_path)
    (finding,) = stuck.tell(200, row={"loss": 2.0})
    assert "The loss is 2 after 2 in the first steps: nothing is learned" in finding.evidence
    assert "lower training.learning_rate (now 0.01)" in finding.advice


def test_a_loss_above_that_of_the_first_steps_is_unstable(told):
    assert told.tell(200, row={"loss": 0.1}) == []
    (finding,) = told.tell(200, row={"loss": 3.5})
    assert "above the 2." in finding.evidence


def test_a_loss_that_diverges_after_hours_is_compared_with_that_of_the_first_steps(tmp_path):
    """By then, the first point of the curve is an average over hundreds of steps."""
    long = story(tmp_path)
    for _ in range(2 * MAX_POINTS):
        long.step += 80
        long.now += 1
        facts = {"step": long.step, "time": long.now, "samples_per_second": 480.0, "num_steps": 80}
        long.history.add([{"kind": "train", "loss": 2.0 if long.step < 300 else 0.1, **facts}])
    assert long.history.train["step"][0] > 100
    (finding,) = long.tell(100, row={"loss": 3.5})
    assert "The loss is 3.5, above the 2 of the first steps" in finding.evidence


def test_a_loss_that_rises_again_is_unstable(told):
    assert told.tell(200, row={"loss": 0.2}) == []
    (finding,) = told.tell(200, row={"loss": 1.5})
    assert finding.kind == "unstable training"
    assert "rose from 0.2 to 1.5" in finding.evidence


@pytest.mark.slow
def test_a_loss_that_rises_with_the_depth_is_not_unstable(tmp_path):
    deeper = story(tmp_path, **TERMINAL)
    assert deeper.tell(60) == []
    while deeper.step < 3900:
        assert deeper.tell(10, row={"loss": 0.2}) == []
    assert deeper.tell(600, row={"loss": lambda row: 0.2 if row["step"] <= 4000 else 1.5}) == []


def test_a_small_loss_may_double(told):
    assert told.tell(200, row={"loss": 0.01}) == []
    assert told.tell(200, row={"loss": 0.03}) == []


def test_nan_in_many_steps_is_unstable(told):
    for number in (1, 2):
        told.event(StepSkipped(told.step + number, "the loss is NaN").to_row())
    assert told.tell(60) == []
    told.event(StepSkipped(told.step + 3, "the loss is NaN").to_row())
    assert told.kinds(10) == ["unstable training"]


def test_a_roll_back_is_unstable(told):
    told.event(RolledBack(900, 800, 0.5).to_row())
    (finding,) = told.tell(10)
    assert "returned to step 800 with 0.5 of the learning rate" in finding.evidence


def test_a_run_that_never_got_past_nan_is_unstable(tmp_path):
    failed = story(tmp_path)
    begin(failed.run, failed.config)
    failed.event(RolledBack(3, 0, 0.5).to_row())
    assert [finding.kind for finding in diagnose(failed.run, failed.history)] == ["unstable training"]


def plateau_story(tmp_path, values, losses=(1.0, 1.0), **changes):
    flat = story(tmp_path, training__max_steps=4000, **changes)
    flat.watchdog.evidence.metric = "exact_accuracy"
    found = []
    for number, value in enumerate(values):
        flat.evaluate(value)
        found += flat.tell(30, row={"loss": losses[0] if number < len(values) / 2 else losses[1]})
        flat.watchdog.evidence.metric = "exact_accuracy"
    return [finding for finding in found if finding.kind == "plateau"]


def test_evaluations_without_improvement_are_a_plateau(tmp_path):
    (finding,) = plateau_story(tmp_path, [0.2, 0.6] + [0.55] * 8)
    assert "Exact accuracy has not improved on 60.0% for 5 evaluations" in finding.evidence
    assert "training.plateau" in finding.advice
    assert re.fullmatch(r"Stopping now saves [\d,]+ of 4,000 steps\.", finding.gain)


@pytest.mark.parametrize(
    ("values", "losses"),
    [
        ([0.1 * number for number in range(10)], (1.0, 1.0)),
        ([1.0] * 10, (1.0, 1.0)),
        ([0.0] * 10, (1.0, 0.5)),
        ([0.5] * 5, (1.0, 1.0)),
    ],
    ids=["it improves", "it is perfect", "the loss falls", "too few evaluations"],
)
def test_no_plateau(tmp_path, values, losses):
    assert plateau_story(tmp_path, values, losses) == []


def test_a_leak_that_the_trainer_measured_is_reported_once(told):
    leak = {"first_step": 1, "last_step": 100, "growth_mb": 91.0, "mb_per_step": 1.01}
    interval = {"mb_per_step_low": 0.98, "mb_per_step_high": 1.04}
    told.event(MemoryGrows({**leak, **interval}).to_row())
    (finding,) = told.tell(10)
    assert finding.kind == "memory leak"
    assert (
        "grew by 91 MB from step 1 to 100: 1.01 MB per step (95 % confidence: 0.98 to 1.04)"
        in finding.evidence
    )
    told.event(MemoryGrows({**leak, "growth_mb": 200.0}).to_row())
    assert told.tell(100) == []
    told.event(Resumed(100, []).to_row())
    assert told.tell(100) == []
    told.event(MemoryGrows(leak).to_row())
    assert told.kinds(10) == ["memory leak"]


def test_the_steps_between_a_crash_and_its_checkpoint_do_not_count_twice(told):
    told.step -= 50
    told.event(Resumed(told.step, []).to_row())
    assert told.tell(200) == []
    samples = told.watchdog.evidence.samples
    assert all(sample.num_steps > 0 for sample in samples)


def test_a_report_has_what_is_wrong_at_the_end(told):
    begin(told.run, told.config)
    told.tell(100, row={"cpu_percent": 50.0})
    assert [finding.kind for finding in diagnose(told.run, told.history)] == ["CPU under-use"]


def test_a_report_leaves_contention_to_what_the_monitor_recorded(told):
    """Afterwards, nobody can say which programs these were, or whether they were our own."""
    begin(told.run, told.config)
    told.tell(100, row={"cpu_percent": 100.0}, resources=BUSY)
    assert diagnose(told.run, told.history) == []


def write_run(told, path):
    """Write a run with the rows of a story."""
    run = Run(path)
    begin(run, told.config)
    run.write("plan.json", json.dumps(told.plan.to_json()))
    for name, rows in (
        ("metrics.jsonl", told.history.recent),
        ("resources.jsonl", told.history.recent_resources),
    ):
        for row in rows:
            run.append(name, row)
    return run


def beside(other, seconds):
    """Return the story of a run in the same directory that begins this long after another one did."""
    late = story(other.run.path.parent)
    late.now = BEGAN + seconds
    late.run = write_run(other, late.run.path)
    late.watchdog.run = late.run
    return late


def test_a_run_that_is_slower_than_an_earlier_one_is_reported(tmp_path):
    fast = story(tmp_path)
    fast.tell(200)
    write_run(fast, tmp_path / "fast")
    other_seed = story(tmp_path, seed=5)
    slow = beside(fast, HOUR)
    (finding,) = slow.tell(200, slowness=0.03)
    assert finding.kind == "slower than an earlier run"
    assert "1.5 times as long as in fast" in finding.evidence
    assert other_seed.tell(200, slowness=0.021) == []


def test_a_run_that_went_on_after_this_one_began_is_not_an_earlier_one(tmp_path):
    fast = story(tmp_path)
    fast.tell(200)
    write_run(fast, tmp_path / "fast")
    assert beside(fast, -HOUR).tell(200, slowness=0.03) == []
    assert beside(fast, 100).tell(200, slowness=0.03) == []


def test_an_earlier_run_whose_steps_took_no_time_says_nothing(told):
    """As rows with damaged rates claim."""
    assert slower_run(told.watchdog.evidence, EarlierRun("damaged", [1, 10**6], [5.0, 5.0])) is None


def test_runs_of_other_recipes_or_machines_are_not_compared(tmp_path):
    fast = story(tmp_path, training__learning_rate=0.5)
    fast.tell(150)
    write_run(fast, tmp_path / "other recipe")
    larger = story(tmp_path)
    larger.tell(150, resources={"total_bytes": 32 * GIB})
    write_run(larger, tmp_path / "other machine")
    slow = beside(story(tmp_path), HOUR)
    slow.run.append("resources.jsonl", slow.resource_row({}))
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "recipe.yaml").write_text("[")
    (tmp_path / "unreadable" / "metrics.jsonl").write_text("")
    assert slow.tell(200, slowness=0.03) == []


TRAIN_FIELDS = st.sampled_from(
    ["step", "time", "samples_per_second", "loss", "spent", "cpu_percent", "grad_norm"]
)
RESOURCE_FIELDS = st.sampled_from(["time", "cpu_percent", "rss_bytes", "process_cpu_percent", "swap_bytes"])
VALUES = st.sampled_from([None, "x", "", -3, 0, 3, math.nan, math.inf, 1e308, [], ["x"], True, {"data": "x"}])


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.dictionaries(TRAIN_FIELDS, VALUES, max_size=4), st.dictionaries(RESOURCE_FIELDS, VALUES, max_size=4)
)
def test_damaged_rows_never_stop_the_watchdog(tmp_path_factory, row, resources):
    damaged = story(tmp_path_factory.getbasetemp())
    damaged.tell(40)
    damaged.tell(40, row=row, resources=resources)
    damaged.event({"event": "plan"})
    damaged.event({"event": "memory grows"})
    damaged.tell(40)


def test_every_advice_names_a_key_or_a_command_that_exists(told):
    keys = {*dict(key_reference.keys()), *dict(key_reference.sections())}
    told.event(MemoryGrows({"growth_mb": 91.0, "mb_per_step": 1.01}).to_row())
    told.event(RolledBack(900, 800, 0.5).to_row())
    found = told.tell(100, row={**STARVED, **HALF_IDLE}, resources={**BUSY, "rss_bytes": BUDGET})
    found += told.tell(100)
    found += told.tell(100, row=HALF_IDLE)
    assert len(found) >= 5
    for finding in found:
        named = re.findall(r"(?:plan|limits|training|data|model|evaluation)\.[\w.]*\w", finding.advice)
        assert named or "`trm " in finding.advice or "`task`" in finding.advice, finding
        assert set(named) <= keys, finding
        for text in (finding.evidence, finding.advice, finding.gain):
            assert text.endswith(".")
            assert "nan" not in text.lower().replace("nan or inf", "")


def test_an_update_takes_a_few_milliseconds(told):
    began = time.process_time()
    told.tell(100)
    made = time.process_time() - began
    began = time.process_time()
    calls = 20
    for _ in range(calls):
        told.now += 1
        told.history.add([told.train_row(0.02, {}), told.resource_row({})])
        told.watchdog.update(told.history)
    assert (time.process_time() - began) / calls < 0.01, made
