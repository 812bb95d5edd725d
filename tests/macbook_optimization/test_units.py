"""Units are defined once; modules that documented them keep them importable."""

import re
from pathlib import Path

import macbook_optimization
from macbook_optimization import (
    dataset_management,
    hardware_detection,
    memory_management,
    performance_reporting,
    units,
)

DEFINITION = re.compile(r"^_?[KMG]I?B = |[*/=] 2\*\*(10|20|30)\b|[*/] 1024\b", re.MULTILINE)


def test_the_units_are_powers_of_1024():
    assert (units.KIB, units.MIB, units.GIB) == (1024, 1024**2, 1024**3)


def test_counts_have_the_right_number():
    counts = [units.counted(number, "step") for number in (0, 1, 2, 1000)]
    assert counts == ["0 steps", "1 step", "2 steps", "1,000 steps"]


def test_no_other_module_defines_a_unit():
    modules = Path(macbook_optimization.__file__).parent.glob("*.py")
    others = [path for path in modules if path.name != "units.py"]
    assert [path.name for path in others if DEFINITION.search(path.read_text(encoding="utf-8"))] == []


def test_the_units_stay_importable_from_the_modules_that_had_them():
    assert memory_management.MIB == dataset_management.MIB == performance_reporting.MIB == units.MIB
    assert hardware_detection.GIB == units.GIB
