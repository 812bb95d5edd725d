"""The history of a run survives what its files may hold."""

import math

from recorded import eval_row, resource_row, train_row

from trm.reports.history import History
from trm.runs.rows import number


def test_a_damaged_row_does_not_erase_the_curve():
    history = History()
    history.add([train_row(1), train_row(2), {"kind": "train", "loss": 1.0}, train_row(3)])
    assert history.train["step"] == [1.0, 2.0, 3.0]


def test_a_damaged_evaluation_is_passed_over():
    history = History()
    history.add([eval_row(10, 0.5), {"kind": "eval"}, eval_row(20, 0.6)])
    assert [row["step"] for row in history.evaluations] == [10, 20]


def test_an_integer_that_no_float_can_hold_is_not_a_number():
    assert math.isnan(number(10**400))


def test_time_that_is_not_a_number_is_not_counted():
    history = History()
    history.add([train_row(1, spent={"forward": math.nan, "data": 2.0, "saving": -1.0, "waiting": "long"})])
    assert history.spent == {"data": 2.0}


def test_the_load_of_the_machine_is_the_mean_of_its_cores():
    history = History()
    history.add([resource_row(1, cpu_percent=[100.0, 0.0]), resource_row(2, cpu_percent=None)])
    assert history.resources["machine_cpu_percent"][0] == 50.0
    assert math.isnan(history.resources["machine_cpu_percent"][1])
    assert history.thermal_levels == {"nominal": 2}
