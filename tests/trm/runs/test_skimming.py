"""A long file of rows is read as a sample with exact sums, a short one as a whole."""

import json
from collections import Counter

import pytest
from recorded import SPENT, eval_row, train_row

from trm.runs.reading import Follower
from trm.runs.skimming import MAX_SAMPLED_ROWS, WHOLE_BYTES


def write(path, rows):
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """More training rows than are sampled, with evaluations among them."""
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    line = json.dumps(train_row(7, waited_for={"air": 0.25}))
    assert line.startswith('{"kind": "train"')
    with open(path, "w", encoding="utf-8") as file:
        for step in range(1, 2 * MAX_SAMPLED_ROWS + 1):
            file.write(line.replace('"step": 7', f'"step": {step}') + "\n")
            if step % 7000 == 0:
                file.write(json.dumps(eval_row(step, 0.5)) + "\n")
    assert path.stat().st_size > 2 * WHOLE_BYTES
    return path


def test_a_short_file_is_read_as_a_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [train_row(1), eval_row(1, 0.5), train_row(2)])
    assert list(Follower((path,)).skim()) == Follower((path,)).read()


def test_of_a_long_file_a_sample_of_the_training_rows_is_read(long_file):
    rows = list(Follower((long_file,)).skim())
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert len(steps) < 1.2 * MAX_SAMPLED_ROWS
    assert steps == sorted(set(steps))
    assert steps[:3] == [1, 2, 3], "the loss of the first steps is compared with that of the last ones"
    assert steps[-100:] == list(range(2 * MAX_SAMPLED_ROWS - 99, 2 * MAX_SAMPLED_ROWS + 1))


def test_every_evaluation_of_a_long_file_is_read(long_file):
    found = [row["step"] for row in Follower((long_file,)).skim() if row["kind"] == "eval"]
    assert found == list(range(7000, 2 * MAX_SAMPLED_ROWS + 1, 7000))


def test_the_time_spent_is_that_of_all_rows(long_file):
    spent, waited_for = Counter(), Counter()
    for row in Follower((long_file,)).skim():
        spent.update(row.get("spent", {}))
        waited_for.update(row.get("waited_for", {}))
    for activity, seconds in SPENT.items():
        assert spent[activity] == pytest.approx(2 * MAX_SAMPLED_ROWS * seconds)
    assert waited_for == {"air": 2 * MAX_SAMPLED_ROWS * 0.25}


def test_a_follower_continues_after_what_it_has_skimmed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [train_row(1)])
    follower = Follower((path,))
    assert [row["step"] for row in follower.skim()] == [1]
    with open(path, "a") as file:
        file.write(json.dumps(train_row(2)) + "\n" + json.dumps(train_row(3)))
    assert [row["step"] for row in follower.skim()] == [2]
    with open(path, "a") as file:
        file.write("\n")
    assert [row["step"] for row in follower.read()] == [3]


def test_damaged_lines_and_an_incomplete_last_line_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(train_row(1)).encode()
    path.write_bytes(b"\xff\xfe\n[1]\n{\n" + good + b"\n" + good[:50])
    assert [row["step"] for row in Follower((path,)).skim()] == [1]


def test_a_missing_file_has_no_rows(tmp_path):
    assert list(Follower((tmp_path / "none.jsonl",)).skim()) == []


@pytest.mark.slow
def test_one_damaged_row_among_many_costs_only_its_own_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(train_row(step)) for step in range(1, 2 * MAX_SAMPLED_ROWS)]
    lines[101] = lines[101].replace('"data": 0.01', '"data": 0.0.1')
    path.write_text("\n".join(lines) + "\n")
    total = sum(row["spent"]["forward"] for row in Follower((path,)).skim())
    assert total == pytest.approx((len(lines) - 1) * SPENT["forward"])
