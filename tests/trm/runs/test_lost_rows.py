"""After a crash, every reader of a run drops the same training rows: those whose steps were repeated."""

import pytest
from recorded import append_all, recorded_run, train_row

from trm.reports.earlier_runs import pace_of
from trm.reports.history import read_history
from trm.reports.scalars import read_recorded
from trm.runs.directory import METRICS
from trm.runs.lost_rows import Place, repetition

# The checkpoint of step 38 of 40; the row reports four steps, 39 to 42, and ends beyond the lost ones.
RESUMED = train_row(42, num_steps=4)
CASES = {
    "as slow as before": {"seconds": 42.0},
    "much slower, so that its time does not go back": {"seconds": 60.0},
    "faster": {"seconds": 39.5},
}


def rows_as_read(run):
    """Return the last step of each training row, as three readers see them."""
    scalars = [point.step for point in read_recorded(run).rows if "train/loss" in point.scalars]
    return {
        "history": [int(step) for step in read_history(run).train["step"]],
        "scalars": scalars,
        "pace": pace_of(run).steps,
    }


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_every_reader_drops_the_rows_that_a_resumed_one_repeats(tmp_path, changes):
    run = recorded_run(tmp_path / "run", stopped=False)
    append_all(run, METRICS, [{**RESUMED, **changes}])
    expected = [*range(1, 39), 42]
    assert rows_as_read(run) == {"history": expected, "scalars": expected, "pace": expected}


def test_rows_of_earlier_versions_show_by_their_time_where_they_began(tmp_path):
    run = recorded_run(tmp_path / "run", stopped=False)
    append_all(run, METRICS, [train_row(42, seconds=39.5, spent={"forward": 1.4})])
    expected = [*range(1, 39), 42]
    assert rows_as_read(run) == {"history": expected, "scalars": expected, "pace": expected}


def test_a_row_that_simply_follows_repeats_nothing():
    assert repetition(Place(40, 40.0), train_row(44, seconds=44.0, num_steps=4)) is None
    assert repetition(Place(40, 40.0), train_row(44, seconds=44.0)) is None
    assert repetition(Place(40, 40.0), train_row(44, seconds=44.0, num_steps=10**6)) is None, "it is damaged"
    assert repetition(Place(40, 44.5), train_row(41, seconds=44.0, num_steps=1)) is None
