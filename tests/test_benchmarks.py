"""The scripts in bench/ fit the code that they measure."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import append_all, event_row, train_row
from tiny import run_config

from trm.runs.directory import EVENTS, METRICS, Run, begin
from trm.runs.events import LimitsSet, Stopped

BENCH = Path(__file__).parents[1] / "bench"
OURS = ("trm", "macbook_optimization")


@pytest.mark.parametrize("script", sorted(BENCH.glob("*.py")), ids=lambda script: script.stem)
def test_every_name_that_a_benchmark_imports_exists(script):
    """Imports inside functions count as well, and none of the script is run."""
    missing = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names if each.name.partition(".")[0] in OURS]
            assert all(map(importlib.import_module, modules))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            known = names_in(node.module)
            missing += [
                f"{node.module}.{each.name}"
                for each in node.names
                if known is not None and each.name not in known
            ]
    assert not missing


def names_in(module):
    """Return what can be imported from a module of this project or of bench/; None for any other."""
    beside = BENCH / f"{module}.py"
    if beside.exists():
        tree = ast.parse(beside.read_text(encoding="utf-8"))
        stored = (each.id for each in ast.walk(tree) if isinstance(each, ast.Name))
        return {getattr(each, "name", None) for each in tree.body} | set(stored)
    if module.partition(".")[0] not in OURS:
        return None
    found = importlib.import_module(module)
    folders = [Path(folder) for folder in getattr(found, "__path__", [])]
    return set(dir(found)) | {each.stem for folder in folders for each in folder.iterdir()}


def steady_run(path, num_steps, *, ended=True, **settings):
    """Write a run that takes one second per step, whatever its recipe allows."""
    run = Run(path)
    begin(run, run_config(path / "set", evaluation={"every_steps": None}, **settings))
    slots = run.config.training.effective_batch_size
    append_all(run, METRICS, [train_row(step, samples_per_second=slots) for step in range(1, num_steps + 1)])
    append_all(run, EVENTS, [event_row(LimitsSet(0, 300, None), 0)])
    if ended:
        append_all(run, EVENTS, [event_row(Stopped("limit", num_steps, float(num_steps), 0), num_steps)])
    return path


def judge_estimates(*runs):
    command = [sys.executable, BENCH / "eta.py", "--runs", *runs]
    found = subprocess.run(command, capture_output=True, text=True)
    assert not found.stderr
    return found


def test_the_eta_of_a_run_with_a_limit_is_judged_by_its_events(tmp_path):
    """The recipe alone would have ten times as many steps."""
    limited = steady_run(tmp_path / "limited", 300, training__max_steps=3000)
    running = steady_run(tmp_path / "running", 300, ended=False)
    found = judge_estimates(limited, running)
    assert found.returncode == 0, found.stdout
    assert "passed: 270 of 270 estimates" in found.stdout
    assert "1 of 1 judged runs passed, 1 were not judged" in found.stdout


def test_an_eta_that_is_wrong_or_cannot_be_judged_fails(tmp_path):
    early = steady_run(tmp_path / "early", 200, training__max_steps=3000)  # the limit said 300
    short = steady_run(tmp_path / "short", 1, training__max_steps=3000)
    found = judge_estimates(early, short)
    assert found.returncode == 1
    assert "relative to the whole run: worst +50.0% (+100.0 s" in found.stdout
    assert "0 of 2 judged runs passed" in found.stdout
    assert judge_estimates(tmp_path).returncode == 1
