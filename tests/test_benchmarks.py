"""The scripts in bench/ fit the code that they measure."""

import ast
import importlib
from pathlib import Path

import pytest

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
