"""Count the faults of each kind and how many were survived, and print a table at the end."""

import os
import sys
from collections import defaultdict

import pytest

FULL = os.environ.get("TRM_FAULTS") == "full"  # `make faults`; otherwise the short form

_tried: dict[str, list[bool]] = defaultdict(list)
_remarks: dict[str, str] = {}


class Tally:
    """Counts the faults of one kind. `add` returns its argument, so that a test can assert it."""

    def __init__(self, what):
        self.what = what

    def add(self, survived):
        _tried[self.what].append(bool(survived))
        return survived

    def remark(self, text):
        _remarks[self.what] = text


@pytest.fixture
def tally():
    return Tally


@pytest.fixture
def full():
    return FULL


def pytest_sessionfinish(session):
    """Hand the counts of a worker process (pytest-xdist) to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["faults"] = dict(_tried)
        session.config.workeroutput["fault_remarks"] = dict(_remarks)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error is None:
        for what, results in node.workeroutput.get("faults", {}).items():
            _tried[what] += results
        _remarks.update(node.workeroutput.get("fault_remarks", {}))


def pytest_terminal_summary(terminalreporter):
    if not _tried:
        return
    width = max(len(what) for what in _tried)
    terminalreporter.section("faults, full form" if FULL else "faults, short form")
    terminalreporter.write_line(f"{'':{width}}  tried  survived")
    for what, results in _tried.items():
        remark = f"  {_remarks[what]}" if what in _remarks else ""
        terminalreporter.write_line(f"{what:{width}}  {len(results):5d}  {sum(results):8d}{remark}")


def pytest_collection_modifyitems(items):
    """Skip these tests outside Linux: the interceptor finds the path of a descriptor in /proc."""
    if sys.platform != "linux":
        skip = pytest.mark.skip(reason="the fault tests need Linux")
        for item in items:
            if "faults" in item.path.parts:
                item.add_marker(skip)
