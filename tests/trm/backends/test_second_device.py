"""Tests on a device that is made up. They need a process of their own, see `second_device.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
import second_device

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@second_device.needed
@pytest.mark.parametrize("module", ["backends/second_device_steps.py", "planning/second_device_checks.py"])
def test_training_and_its_check_work_on_a_second_device(module):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(TESTS / module),
    ]
    done = subprocess.run(command, cwd=TESTS.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
