"""When a difference between two measurements counts, and which conditions are reported."""

import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_reports import STEADY, make_report

from macbook_optimization.units import GIB
from trm.machine.benchmark_comparison import compare, judge, mann_whitney_p_value


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (0.8, "slower"),
        (1.25, "faster"),
        (1.0, "no difference beyond the noise"),
        (1.01, "no difference beyond the noise"),
    ],
)
def test_a_clear_difference_counts_and_a_small_one_does_not(factor, verdict):
    assert judge([factor * rate for rate in STEADY], STEADY).verdict == verdict


def test_a_clear_difference_below_three_percent_does_not_count():
    found = judge([10.20, 10.21, 10.22, 10.23, 10.24], [10.0, 10.01, 10.02, 10.03, 10.04])
    assert found.verdict == "no difference beyond the noise"
    assert found.p_value < 0.01


def test_a_large_difference_within_the_noise_does_not_count():
    found = judge([6.0, 8.0, 9.0, 13.0, 14.0], [5.0, 7.0, 10.0, 12.0, 15.0])
    assert found.verdict == "no difference beyond the noise"
    assert found.ratio == 0.9


def test_noise_alone_is_called_a_difference_at_most_once_in_twenty_times():
    rng = random.Random(0)
    samples = [[rng.gauss(10, 2) for _ in range(5)] for _ in range(2000)]
    found = [judge(now, before).verdict for now, before in zip(samples[::2], samples[1::2], strict=True)]
    assert sum(verdict in ("faster", "slower") for verdict in found) <= 50


def test_three_repeats_are_too_few():
    """Two of the 20 orders of three and three values are the clearest: one in ten."""
    assert judge([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]).verdict == "too few repeats to decide"


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_p_value_is_the_share_of_all_orders_that_are_as_lopsided(m, n, rng):
    values = rng.sample(range(100), m + n)

    def lopsidedness(chosen):
        others = [value for value in values if value not in chosen]
        wins = sum(a > b for a in chosen for b in others)
        return abs(wins - m * n / 2)

    ours = lopsidedness(values[:m])
    all_orders = [lopsidedness(chosen) for chosen in combinations(values, m)]
    expected = sum(each >= ours for each in all_orders) / len(all_orders)
    assert mann_whitney_p_value(values[:m], values[m:]) == pytest.approx(expected)


def test_a_comparison_on_the_same_machine_has_no_warnings():
    found = compare(make_report([0.8 * rate for rate in STEADY]), make_report(STEADY), Path("before.json"))
    assert found.verdicts["8gb"].verdict == "slower"
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ({"machine": {"brand": "Another CPU"}}, "brand is 'Some CPU' now and was 'Another CPU'"),
        ({"machine": {"memory_bytes": 16 * GIB}}, "memory in GiB is 8 now and was 16"),
        ({"versions": {"torch": "2.2.2"}}, "version of torch is '2.13.0' now and was '2.2.2'"),
        ({"threads": 4}, "8gb: threads is 8 now and was 4"),
        ({"product_rate": 2e11}, "a plain matrix product is 0.50 times as fast as before"),
    ],
)
def test_a_comparison_warns_about_every_condition_that_differs(before, words):
    found = compare(make_report(STEADY), make_report(STEADY, **before), Path("before.json"))
    (warning,) = found.warnings
    assert words in warning


def test_a_comparison_warns_if_other_programs_were_busy_before():
    busy = make_report(STEADY).model_copy(update={"busy_percent": 60.0})
    found = compare(make_report(STEADY), busy, Path("before.json"))
    assert found.warnings == ("other programs used 60 % of the CPU at that time",)


def test_only_profiles_that_both_reports_have_are_compared():
    now = make_report(STEADY, ("8gb", "16gb"))
    before = make_report(STEADY, ("16gb", "32gb"))
    assert list(compare(now, before, Path("before.json")).verdicts) == ["16gb"]
