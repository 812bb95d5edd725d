"""`trm join` on the command line."""

import subprocess

import click
import pytest
from tiny import TRM

from trm.cli.join import Duration


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("5", 5.0)])
def test_a_duration_has_a_unit(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["soon", "-1m", "10 m", "1d", ""])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


def join(*arguments):
    return subprocess.run([TRM, "join", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_an_error_with_a_hint():
    found = join("127.0.0.1:9/abcde", "--wait", "0s")
    assert found.returncode == 1
    assert "error: 127.0.0.1:9 does not answer" in found.stderr
    assert "--listen" in found.stderr


@pytest.mark.slow
def test_a_public_host_is_refused():
    found = join("8.8.8.8/abcde")
    assert found.returncode == 2
    assert "public address" in found.stderr
