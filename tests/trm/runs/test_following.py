"""Reading a run while it is being written: new rows, incomplete lines, replaced files."""

import json
import os
from pathlib import Path

import pytest

from trm.runs import reading
from trm.runs.directory import EVENTS, METRICS, Run, set_aside
from trm.runs.events import SavedAgain

TRAIN = {"kind": "train", "step": 1, "loss": 2.0, "samples_per_second": 9.0}
EVAL = {"kind": "eval", "step": 2, "exact_accuracy": 0.5}


def write(path: Path, *rows, end=b"\n"):
    with path.open("ab") as file:
        file.write(b"\n".join(json.dumps(row).encode() for row in rows) + end)


def steps(rows):
    return [row["step"] for row in rows]


def test_a_run_that_has_written_nothing_yet_has_no_rows(tmp_path):
    follower = Run(tmp_path / "run").follow()
    assert follower.read() == []
    assert follower.read() == []


def test_every_row_is_delivered_once_as_it_is_appended(tmp_path):
    run = Run(tmp_path)
    follower = run.follow()
    run.append(METRICS, TRAIN)
    assert follower.read() == [TRAIN]
    assert follower.read() == []
    run.append(METRICS, EVAL)
    run.append(METRICS, {**TRAIN, "step": 3})
    assert steps(follower.read()) == [2, 3]
    assert follower.read() == []


def test_a_follower_that_starts_late_reads_everything_from_the_start(tmp_path):
    run = Run(tmp_path)
    run.append(METRICS, TRAIN)
    assert steps(run.follow().read()) == [1]
    assert steps(run.follow().read()) == [1]


def test_events_are_rows_of_kind_event(tmp_path):
    run = Run(tmp_path)
    run.append(METRICS, TRAIN)
    run.record(SavedAgain(step=7))
    first, second = run.follow().read()
    assert first == TRAIN
    assert (second["kind"], second["event"], second["step"]) == ("event", "saved again", 7)
    assert second["time"] > 0


def test_an_incomplete_last_line_is_delivered_when_it_is_complete(tmp_path):
    follower = Run(tmp_path).follow()
    text = json.dumps(EVAL).encode()
    write(tmp_path / METRICS, TRAIN)
    with (tmp_path / METRICS).open("ab", buffering=0) as file:
        file.write(text[:9])
        assert follower.read() == [TRAIN]
        assert follower.read() == []
        file.write(text[9:])
        assert follower.read() == []  # more digits could follow, so only the newline ends a row
        file.write(b"\n")
    assert follower.read() == [EVAL]


def test_a_line_that_a_kill_left_incomplete_is_skipped_and_the_next_row_is_delivered(tmp_path):
    run = Run(tmp_path)
    follower = run.follow()
    write(tmp_path / METRICS, TRAIN)
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"kind": "train", "step": 2, "lo')
    assert steps(follower.read()) == [1]
    run.append(METRICS, EVAL)  # by the next start of the run
    assert follower.read() == [EVAL]


def test_a_truncated_file_is_read_from_its_start(tmp_path):
    follower = Run(tmp_path).follow()
    write(tmp_path / METRICS, TRAIN, EVAL)
    assert steps(follower.read()) == [1, 2]
    os.truncate(tmp_path / METRICS, 0)
    assert follower.read() == []
    write(tmp_path / METRICS, {**TRAIN, "step": 5})
    assert steps(follower.read()) == [5]


def test_a_replaced_file_is_read_from_its_start_even_if_it_is_longer(tmp_path):
    follower = Run(tmp_path).follow()
    write(tmp_path / METRICS, TRAIN)
    assert steps(follower.read()) == [1]
    write(tmp_path / "new", *({**TRAIN, "step": step} for step in (10, 11, 12)))
    (tmp_path / "new").replace(tmp_path / METRICS)
    assert steps(follower.read()) == [10, 11, 12]


def test_a_follower_survives_a_fresh_start_in_the_same_place(tmp_path):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (run.path / "recipe.yaml").write_text("task: sudoku")
    follower = run.follow()
    run.append(METRICS, TRAIN)
    assert steps(follower.read()) == [1]
    set_aside(run.path)
    assert follower.read() == []
    run.path.mkdir()
    run.append(METRICS, {**TRAIN, "step": 4})
    run.append(METRICS, {**TRAIN, "step": 5})
    assert steps(follower.read()) == [4, 5]


@pytest.mark.parametrize(
    ("name", "row", "kind"),
    [
        (METRICS, {"step": 1, "loss": 2.0, "samples_per_second": 9.0}, "train"),
        (METRICS, {"step": 1, "examples": 12, "exact_accuracy": 0.5, "mean_steps": 3.0}, "eval"),
        (EVENTS, {"time": 1.0, "event": "stopped", "reason": "limit", "step": 2}, "event"),
        # A plan has a throughput too.
        (EVENTS, {"time": 1.0, "event": "plan", "samples_per_second": 9.0}, "event"),
    ],
)
def test_rows_of_earlier_versions_get_their_kind(tmp_path, name, row, kind):
    write(tmp_path / name, row)
    assert Run(tmp_path).follow().read() == [{"kind": kind, **row}]


@pytest.mark.parametrize("line", [b"", b"null", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_lines_that_are_not_rows_are_skipped(tmp_path, line):
    (tmp_path / METRICS).write_bytes(line + b"\n" + json.dumps(EVAL).encode() + b"\n")
    assert Run(tmp_path).follow().read() == [EVAL]
    assert Run(tmp_path).rows() == [EVAL]
    assert Run(tmp_path).last_row() == EVAL


# The last row


def test_the_last_row_of_a_run_that_has_none_is_none(tmp_path):
    assert Run(tmp_path).last_row() is None
    (tmp_path / METRICS).write_text('{"step": 1')
    assert Run(tmp_path).last_row() is None


def test_the_last_row_is_the_last_complete_one(tmp_path):
    write(tmp_path / METRICS, TRAIN, EVAL)
    assert Run(tmp_path).last_row() == EVAL
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"step": 3')
    assert Run(tmp_path).last_row() == EVAL


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    parsed = []
    parse = reading._parse
    monkeypatch.setattr(reading, "_parse", lambda content: parsed.append(len(content)) or parse(content))
    write(tmp_path / METRICS, *({**TRAIN, "step": step} for step in range(20_000)))
    assert (tmp_path / METRICS).stat().st_size > 10 * reading._TAIL_BYTES
    assert Run(tmp_path).last_row()["step"] == 19_999
    assert sum(parsed) <= reading._TAIL_BYTES


def test_a_last_row_that_is_longer_than_the_end_that_is_read_first_is_found(tmp_path):
    """An evaluation with large tables, for example a confusion matrix."""
    large = {**EVAL, "tables": {"confusion": [[0.5] * 200] * 200}}
    assert len(json.dumps(large)) > reading._TAIL_BYTES
    write(tmp_path / METRICS, *[TRAIN] * 100, large)
    assert Run(tmp_path).last_row() == large
    (tmp_path / METRICS).unlink()
    write(tmp_path / METRICS, large)
    assert Run(tmp_path).last_row() == large
