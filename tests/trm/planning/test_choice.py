"""From measurements to a plan: which size, how many threads, and the reasons that a user reads."""

import pytest
from tiny import run_config

from macbook_optimization.memory_management import MIB, Budget
from trm.plan import Execution
from trm.planning.choice import choose_parallelism, fast_enough, make_plan
from trm.planning.measurements import Measurements, Parallelism, SizeResult
from trm.planning.tuning import LARGE_ENOUGH


@pytest.mark.parametrize(
    ("rates", "num_slots", "chosen"),
    [
        ({1: [10], 4: [20], 8: [30]}, 768, LARGE_ENOUGH),
        ({1: [10], 4: [20], 8: [30]}, 12, 12),
        ({1: [10], 4: [20], 8: [20.5]}, 768, 4),
        ({1: [0.2], 2: [0.3]}, 768, 2),  # nothing shows that 32 would be faster
        ({1: [0.2], 2: [0.3]}, 2, 2),
        ({1: [5]}, 1, 1),
        ({1: [5]}, 768, LARGE_ENOUGH),  # whether more than one fits is decided elsewhere
    ],
)
def test_the_smallest_size_that_is_about_as_fast_as_any_is_chosen(rates, num_slots, chosen):
    assert fast_enough(rates, (), num_slots)[0] == chosen


@pytest.mark.parametrize(
    ("rates", "num_slots", "reason"),
    [
        ({1: [10], 4: [20], 8: [20]}, 768, "larger ones are not faster, as measured"),
        (
            {1: [10], 4: [20, 15], 8: [22, 17]},
            768,
            "larger ones are not faster beyond the measured spread of 25%, as measured",
        ),
        ({1: [10], 4: [20], 8: [30]}, 8, "the whole effective batch"),
        ({1: [10], 4: [20], 8: [30]}, 768, "faster with every size up to 8, as measured"),
        ({1: [0.2], 2: [0.3]}, 768, "larger ones were not measured, because one example takes long"),
    ],
)
def test_the_reason_for_a_size_says_what_was_measured(rates, num_slots, reason):
    assert fast_enough(rates, (), num_slots)[1] == reason


CHOICES = [Parallelism(1, 1), Parallelism(4, 1), Parallelism(4, 4)]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ((100, 101, 102), (1, 1)),  # the other cores remain for the user
        ((100, 150, 140), (4, 1)),
        ((100, 150, 160), (4, 4)),
    ],
)
def test_more_threads_must_be_clearly_faster(tmp_path, rates, chosen):
    measured = Measurements((), {1: [1.0]}, dict(zip(CHOICES, rates, strict=True)))
    parallelism, why = choose_parallelism(run_config(tmp_path), measured, CHOICES)
    assert parallelism == chosen
    assert f"{rates[2]} samples/s with 4 in 4 workers" in why


def test_without_a_comparison_all_threads_are_used(tmp_path):
    measured = Measurements((), {1: [1.0]})
    config = run_config(tmp_path, plan={})
    assert choose_parallelism(config, measured, CHOICES) == (
        (4, 4),
        "all cores that compute at full speed",
    )
    by_hand = run_config(tmp_path, plan={"threads": 4})
    assert choose_parallelism(by_hand, measured, CHOICES)[1] == "set by hand"


def test_a_size_that_would_be_faster_but_does_not_fit_is_not_chosen(tmp_path):
    sizes = tuple(SizeResult(size, (100 + 100 * size) * MIB, None, 10.0 * size) for size in (1, 4, 8))
    measured = Measurements(sizes, {each.micro_batch_size: [each.samples_per_second] for each in sizes})
    config = run_config(tmp_path, plan={}, training__effective_batch_size=8)
    budget = Budget(resident_bytes=600 * MIB, address_space_bytes=None, reason="as requested")
    plan = make_plan(config, budget, measured, Execution(), [Parallelism(1, 1)])
    assert plan.predicted_peak_bytes <= 600 * MIB
    assert plan.micro_batch_size == 4
    assert plan.accumulation_steps == 2
    assert plan.reasons["micro_batch_size"] == "a larger one does not fit into 600 MiB: as requested"
