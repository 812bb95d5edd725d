"""The screen about a run: what it shows, in any width, from files in any state."""

import json
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import plan_of, run_config

from trm.reports.eta import Eta
from trm.reports.event_groups import GROUP_OF_EVENT
from trm.reports.event_text import WITH_TEXT, describe_event
from trm.reports.monitor import view_of
from trm.reports.view import describe_eta, sparkline
from trm.reports.watching import Watched
from trm.runs import events
from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run, begin, only_trainer
from trm.runs.rows import EvalRow, ResourceRow, TrainRow

SAMPLE = ResourceRow([91.0, 97.0], 188.0, 2**30, 3 * 2**30, 8 * 2**30, 0, None, None, None, None, 81.0, False)


def train_row(step, **changes):
    facts = {
        "step": step, "seconds": step / 2, "loss": 3.0 / step, "grad_norm": 1.0, "samples_per_second": 40.0,
        "learning_rate": 1e-3, "micro_batch_size": 4, "train_token_accuracy": 0.5,
        "train_exact_accuracy": 0.1, "rss_bytes": 2**30, "cpu_percent": 190.0,
        "spent": {"forward": 0.3, "backward": 0.1},
    }  # fmt: skip
    return TrainRow(**{**facts, **changes}).to_json()


def eval_row(step, value):
    return EvalRow(step, step / 2, 12, {"exact_accuracy": value}, {}, 2.0, [value], 0.1).to_json()


def write(run, name, rows):
    (run.path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def config(tmp_path):
    return run_config(tmp_path, training__max_steps=100)


@pytest.fixture
def run(tmp_path, config):
    run = Run(tmp_path / "run")
    begin(run, config)
    write(
        run, METRICS, [train_row(step) for step in range(5, 41, 5)] + [eval_row(20, 0.25), eval_row(40, 0.5)]
    )
    rows = [
        events.PlanChosen({**plan_of(config).to_json(), "budget_bytes": 4 * 2**30}),
        events.ThreadsChanged(12, 2, 1, "other programs keep 1.0 of 2 cores busy"),
    ]
    write(run, EVENTS, [row.to_row() for row in rows])
    write(run, RESOURCES, [SAMPLE.to_json()])
    return run


def screen(run, columns=100, **options):
    watched = Watched.open(run.path)
    return "\n".join(watched.lines(columns, ascii_only=options.get("ascii_only", False)))


def test_one_screen_shows_everything_that_matters(run):
    with only_trainer(run.path):
        text = screen(run)
    for fact in (
        "run: running", "step 40 of 100, 40%", "about", "left", "loss 0.075 █", "exact accuracy 50.0%",
        "best 50.0%", "learning rate 0.001", "40 samples/s now, 40 on average", "1.00 of 4.0 GiB",
        "CPU 91 97 %",
        "heat: not reported", "battery 81 %, on mains power", "plan: 1 x", "float32",
        "threads: 1 instead of 2, as other programs keep 1.0 of 2 cores busy",
    ):  # fmt: skip
        assert fact in text


@pytest.mark.parametrize("columns", [10, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(run, columns):
    assert all(len(line) <= columns for line in screen(run, columns).splitlines())


def test_a_terminal_without_unicode_gets_ascii(run):
    assert screen(run, ascii_only=True).isascii()


def test_a_run_without_news_is_still_running_while_its_trainer_lives(run, config):
    with only_trainer(run.path):
        view = view_of(run, config)
        view.read()
        assert view.described_state() == "running"
        assert view.described_state(time.time() + 200) == "running, no sign of life for 3 min"
    view.read()
    assert view.described_state() == "crashed"
    assert view.described_state(time.time() + 200) == "crashed, no sign of life for 3 min"


def test_the_view_follows_stops_and_resumptions(run, config):
    view = view_of(run, config)
    run.record(events.Stopped("interrupted", 40, 20.0, 0))
    view.read()
    assert view.state.name == "stopped"
    with only_trainer(run.path):
        view.read()
        assert view.state.name == "running", "it has started again and has recorded nothing yet"
        run.append(METRICS, train_row(100))
        view.read()
        assert view.state.name == "running"
        run.record(events.Stopped("max_steps", 100, 50.0, 0))
        view.read()
        assert view.state.name == "finished", "its command still writes the report"
        assert view.facts()["reason"] == "max_steps"


def test_a_run_that_is_replaced_is_read_again(run, config):
    watched = Watched.open(run.path)
    other = run_config(run.path.parent, training__max_steps=77)
    run.write("recipe.yaml", other.to_yaml())
    write(run, METRICS, [train_row(3)])
    watched.update()
    assert "step 3 of 77" in "\n".join(watched.lines(80, ascii_only=True))


def test_a_view_is_not_formatted_while_it_is_brought_up_to_date(run):
    """A display formats in its own thread, several times per second."""
    watched = Watched.open(run.path)
    errors, stop = [], threading.Event()

    def format_all_the_time():
        try:
            while not stop.is_set():
                watched.lines(80, ascii_only=False)
        except RuntimeError as error:  # such as "deque mutated during iteration"
            errors.append(error)

    thread = threading.Thread(target=format_all_the_time)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for step in range(300):
            run.record(events.LowBattery(7.0, step))
            watched.update()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def test_a_recipe_that_cannot_be_read_for_a_moment_changes_nothing(run):
    watched = Watched.open(run.path)
    (run.path / "recipe.yaml").write_text("{")
    watched.update()
    assert "step 40 of 100" in "\n".join(watched.lines(80, ascii_only=True))


WHOLE = {
    METRICS: [train_row(5), train_row(10), eval_row(10, 0.5), train_row(15)],
    EVENTS: [events.ThreadsChanged(1, 2, 1, "x").to_row(), events.Stopped("max_steps", 15, 2.0, 1).to_row()],
    RESOURCES: [SAMPLE.to_json(), SAMPLE.to_json()],
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_torn_and_growing_files_never_crash_the_view(tmp_path_factory, data):
    """Any prefix of a file, with any bytes in any place, may be on disk at the moment of reading."""
    root = tmp_path_factory.mktemp("torn")
    run = Run(root / "run")
    begin(run, run_config(root, training__max_steps=100))
    watched = Watched.open(run.path)
    for _ in range(data.draw(st.integers(1, 3))):
        for name, rows in WHOLE.items():
            lines = [json.dumps({**row, "time": 1.7e9}) for row in rows]
            content = "".join(f"{line}\n" for line in lines).encode()
            cut = content[: data.draw(st.integers(0, len(content)))]
            place = data.draw(st.integers(0, len(cut)))
            noise = data.draw(st.binary(max_size=12))
            (run.path / name).write_bytes(cut[:place] + noise + cut[place + len(noise) :])
        watched.update()
        watched.lines(data.draw(st.integers(1, 120)), ascii_only=False)
        json.dumps(watched.facts())


KEYS = (
    "step", "time", "loss", "samples_per_second", "spent", "exact_accuracy", "evaluation_seconds", "event",
    "rss_bytes", "cpu_percent", "temperature", "reason", "seconds",
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
CHANGES = st.tuples(st.integers(0, 3), st.sampled_from(KEYS), SCALARS | st.lists(SCALARS, max_size=2))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, max_size=8))
def test_rows_with_any_values_never_crash_the_view(tmp_path_factory, changes):
    root = tmp_path_factory.mktemp("odd")
    run = Run(root / "run")
    begin(run, run_config(root, evaluation__target_accuracy=0.9))
    rows = [train_row(5), eval_row(10, 0.5), SAMPLE.to_json(), events.Stopped("limit", 9, 1.0, 1).to_row()]
    for index, key, value in changes:
        rows[index][key] = value
    write(run, METRICS, [rows[0], rows[1], *(eval_row(step, 0.6) for step in (20, 30, 40))])
    write(run, RESOURCES, [rows[2]])
    write(run, EVENTS, [rows[3]])
    watched = Watched.open(run.path)
    watched.lines(80, ascii_only=False)
    json.dumps(watched.facts())


def names_of_events(kind=events.Event):
    """Return the names of all events, also of those that share a base."""
    own = {kind.name} if hasattr(kind, "name") else set()
    return own.union(*(names_of_events(each) for each in kind.__subclasses__()))


def test_every_event_has_a_text_and_a_group_of_its_own():
    names = names_of_events()
    assert {"duty cycle", "batch shrunk", "throttling over"} < names
    assert names == WITH_TEXT
    assert names == set(GROUP_OF_EVENT)


def test_an_event_whose_fields_are_missing_is_shown_by_its_name():
    without_fields = {events.GarbageCollectionStopped.name, events.ThrottlingOver.name}
    for name in names_of_events() - without_fields:
        assert describe_event({"event": name}) == name


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (events.LowBattery(7.0, 3), "battery at 7 %; saved"),
        (
            events.DeviceRejected("pytorch", "mps", "it did not change in step 1", "ema/q_head.bias"),
            "pytorch on mps is not used: ema/q_head.bias: it did not change in step 1",
        ),
        (
            events.DeviceRejected("mlx", "gpu", "the check took too long", None),
            "mlx on gpu is not used: the check took too long",
        ),
        (events.Stopped("target", 3, 1.0, 1), "stopped after step 3: the target is reached"),
        (
            events.DutyCycleChanged(3, 1.0, 0.75, "the system throttles the processor"),
            "training computes 75% of the time instead of 100%: the system throttles the processor",
        ),
        (events.LimitsSet(0, 4000, 125.0), "this start ends at step 4,000 or after 2 min 05 s at the latest"),
        (events.LimitsSet(0, None, 125.0), "this start ends after 2 min 05 s at the latest"),
        (events.TrainingPaused(3, "the machine is on battery"), "training waits: the machine is on battery"),
        (events.TrainingContinued(3, 125.0), "training continues after 2 min 05 s"),
        (
            events.ThrottlingInferred(3, 1.5, "evidence"),
            "the processor seems 1.50 times as slow as at the start (inferred)",
        ),
        (events.Advised(3, "swap", "Swap grew.", "Close it."), "swap: Swap grew. Close it."),
        (events.Advised(3, "swap", "Swap grew.", "Close it.", "A lot."), "swap: Swap grew. Close it. A lot."),
    ],
)
def test_events_are_described_in_words(event, text):
    assert describe_event(event.to_row()) == text


def test_advice_of_an_earlier_version_has_no_gain():
    row = events.Advised(3, "swap", "Swap grew.", "Close it.").to_row()
    del row["gain"]
    assert describe_event(row) == "swap: Swap grew. Close it."


def test_one_thread_is_not_several():
    row = {"event": "plan", "accumulation_steps": 2, "micro_batch_size": 4, "threads": 1}
    assert describe_event(row) == "plan: 2 x 4 examples, 1 thread"
    assert describe_event({**row, "threads": 3}) == "plan: 2 x 4 examples, 3 threads"


def test_times_and_curves_are_short():
    assert describe_eta(Eta(840, 1320)) == "about 14 min left, at most 22 min"
    assert describe_eta(Eta(50, 50)) == "about 50 s left"
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([1.0]) == ""
    assert len(sparkline(list(range(1000)))) == 16
