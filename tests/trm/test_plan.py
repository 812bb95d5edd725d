"""Plans: written, read back, and made smaller."""

from macbook_optimization.memory_management import MemoryModel
from trm.plan import Execution, Plan


def test_a_plan_can_be_written_and_read_back():
    plan = Plan(
        Execution(threads=2, workers=2, precision="bfloat16"),
        micro_batch_size=4,
        accumulation_steps=3,
        memory=MemoryModel(10, 2),
        reasons={"threads": "measured"},
        warnings=("x",),
        provisional=True,
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_of_an_earlier_version_is_read():
    earlier = {
        "micro_batch_size": 4,
        "accumulation_steps": 3,
        "threads": 2,
        "lanes": 2,
        "settling": True,
        "unknown_key": 1,
    }
    plan = Plan.from_json(earlier)
    assert plan.execution == Execution(threads=2, workers=2)
    assert plan.provisional


def test_a_plan_with_smaller_micro_batches_covers_the_batch_and_gives_the_reason():
    plan = Plan(Execution(), 8, 2, memory=MemoryModel(100, 10))
    smaller = plan.with_micro_batch(3, 16, "the trainer was killed")
    assert (smaller.micro_batch_size, smaller.accumulation_steps) == (3, 6)
    assert smaller.predicted_peak_bytes == 130
    assert smaller.explain() == ["6 x 3 examples (the trainer was killed)"]
