"""TensorBoard's own reader finds in our event files what is in the run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import BEGAN, append_all, eval_row, recorded_run, resource_row, train_row
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from macbook_optimization.errors import RunError
from trm.reports.tensorboard import write_event_files
from trm.reports.tfevents import crc32c, scalar_event, text_event
from trm.runs.directory import METRICS, RESOURCES, Run


def read(directory):
    everything = {"scalars": 0, "tensors": 0}
    accumulator = EventAccumulator(str(directory), size_guidance=everything)
    accumulator.Reload()
    return accumulator


def scalars(accumulator, tag):
    """Return steps, values and times; TensorBoard 2.15 and later migrate scalars to tensors."""
    if tag in accumulator.Tags()["scalars"]:
        found = accumulator.Scalars(tag)
        return (
            [each.step for each in found],
            [each.value for each in found],
            [each.wall_time for each in found],
        )
    found = accumulator.Tensors(tag)
    values = [each.tensor_proto.float_val[0] for each in found]
    return [each.step for each in found], values, [each.wall_time for each in found]


@pytest.mark.parametrize(
    ("content", "checksum"),
    [(b"", 0), (b"123456789", 0xE3069283), (b"\x00" * 32, 0x8A9136AA), (bytes(range(32)), 0x46DD794E)],
)
def test_checksums_are_those_of_rfc_3720(content, checksum):
    assert crc32c(content) == checksum


@given(
    time=st.floats(0, 4e9),
    step=st.integers(0, 2**62),
    values=st.dictionaries(st.text(max_size=20), st.floats(width=32, allow_nan=False), max_size=4),
)
def test_a_scalar_event_is_what_protocol_buffers_decode(time, step, values):
    event = Event.FromString(scalar_event(time, step, values))
    assert (event.wall_time, event.step) == (time, step)
    assert {each.tag: each.simple_value for each in event.summary.value} == values


@given(step=st.integers(0, 2**62), text=st.text())
def test_a_text_event_is_what_protocol_buffers_decode(step, text):
    event = Event.FromString(text_event(1.0, step, "events/x", text))
    (value,) = event.summary.value
    assert value.metadata.plugin_data.plugin_name == "text"
    assert list(value.tensor.string_val) == [text.encode()]


def test_tensorboard_reads_the_values_of_metrics_jsonl(tmp_path):
    run = recorded_run(tmp_path / "run")
    written = write_event_files(run)
    assert written.directory == tmp_path / "run" / "tensorboard"
    found = read(written.directory)
    rows = {"train": [], "eval": []}
    for row in run.rows():
        rows[row["kind"]].append(row)
    for kind, names in (
        ("train", ("loss", "grad_norm", "samples_per_second", "learning_rate", "rss_bytes", "cpu_percent")),
        ("eval", ("exact_accuracy", "token_accuracy", "evaluation_seconds")),
    ):
        for name in names:
            steps, values, times = scalars(found, f"{kind}/{name}")
            assert steps == [row["step"] for row in rows[kind]]
            assert values == [np.float32(row[name]) for row in rows[kind]]
            assert times == [row["time"] for row in rows[kind]]
    steps, values, _ = scalars(found, "seconds/forward")
    assert values == [np.float32(row["spent"]["forward"]) for row in rows["train"]]


def test_samples_of_the_machine_are_at_their_seconds(tmp_path):
    run = recorded_run(tmp_path / "run")
    found = read(write_event_files(run).directory)
    steps, values, times = scalars(found, "resources/battery_percent")
    rows = run.rows(RESOURCES)
    assert steps == list(range(len(rows)))
    assert values == [np.float32(row["battery_percent"]) for row in rows]
    assert times == [row["time"] for row in rows]
    assert scalars(found, "resources/machine_cpu_percent")[1] == [60.0] * len(rows)


def test_events_are_texts(tmp_path):
    found = read(write_event_files(recorded_run(tmp_path / "run")).directory)
    (event,) = found.Tensors("events/resumed")
    assert event.step == 10
    assert event.tensor_proto.string_val == [b"resumed after step 10"]
    assert "events/stopped" in found.Tags()["tensors"]


def test_rows_of_earlier_versions_get_their_time_from_their_seconds(tmp_path):
    run = recorded_run(tmp_path / "run")
    rows = [{key: value for key, value in train_row(step).items() if key != "time"} for step in (1, 2, 3)]
    (run.path / METRICS).unlink()
    append_all(run, METRICS, rows)
    times = scalars(read(write_event_files(run).directory), "train/loss")[2]
    first_event = BEGAN + 5
    assert times == [first_event + step for step in (1, 2, 3)]


def test_steps_that_were_lost_and_repeated_appear_once(tmp_path):
    run = Run(tmp_path)
    append_all(run, METRICS, [train_row(step) for step in (1, 2, 3)] + [eval_row(3, 0.1)])
    repeated = [train_row(step, loss=9.0, time=BEGAN + 100 + step) for step in (2, 3, 4)]
    append_all(run, METRICS, [*repeated, eval_row(3, 0.2)])
    found = read(write_event_files(run).directory)
    assert scalars(found, "train/loss")[0] == [1, 2, 3, 4]
    assert scalars(found, "train/loss")[1][1:] == [9.0] * 3
    assert scalars(found, "eval/exact_accuracy")[:2] == ([3], [np.float32(0.2)])


def test_a_second_call_replaces_the_files(tmp_path):
    run = recorded_run(tmp_path / "run", num_steps=10)
    first = write_event_files(run).directory
    append_all(run, METRICS, [train_row(11)])
    second = write_event_files(run).directory
    assert first == second
    assert len(list(second.iterdir())) == 1
    assert scalars(read(second), "train/loss")[0][-1] == 11
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".")) == []


def test_a_directory_with_other_files_is_refused(tmp_path):
    run = recorded_run(tmp_path / "run", num_steps=3)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"thesis\.tex"):
        write_event_files(run, other)
    assert (other / "thesis.tex").read_text() == "years of work"


def test_a_run_without_rows_gets_a_file_that_opens(tmp_path):
    found = read(write_event_files(Run(tmp_path)).directory)
    assert found.Tags()["scalars"] == []


def test_numbers_that_float32_cannot_hold_become_infinite(tmp_path):
    run = Run(tmp_path)
    append_all(
        run, METRICS, [train_row(1, loss=1e300, grad_norm=float("nan")), {"kind": "train", "step": -5}]
    )
    append_all(run, RESOURCES, [resource_row(1, rss_bytes=10**400, cpu_percent=[]), {"kind": "resources"}])
    found = read(write_event_files(run).directory)
    assert scalars(found, "train/loss")[1] == [float("inf")]
