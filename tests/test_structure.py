"""The source has the structure that CONTRIBUTING.md and pyproject.toml describe, in files of limited size."""

import ast
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if path.stem != "__init__"]
BACKENDS = {"torch": "trm.backends.pytorch", "mlx": "trm.backends.mlx"}
MAX_FILE_LINES = 350
MAX_CLASS_LINES = 200
MAX_PARAMETERS = 6
LONG_CLASSES = {"Trainer": "the order of what happens in a step must be readable in one place"}


def nodes_of(kind: type[ast.AST], paths: list[Path]) -> Iterator[ast.AST]:
    for path in paths:
        yield from (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kind))


def test_no_file_is_too_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_class_is_too_long_but_those_with_a_reason():
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in nodes_of(ast.ClassDef, MODULES)}
    assert {name for name, length in lengths.items() if length > MAX_CLASS_LINES} == set(LONG_CLASSES)


def test_only_commands_have_many_parameters():
    """An option of a command is a parameter. Outside of cli, ruff counts them."""
    commands = [path for path in MODULES if path.parent.name == "cli"]
    for function in nodes_of(ast.FunctionDef, commands):
        given = function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if not function.decorator_list:
            assert len([name for name in names if name != "self"]) <= MAX_PARAMETERS, function.name


def map_of_modules() -> dict[str, list[str]]:
    """Return the names and patterns in the map of CONTRIBUTING.md, by directory."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"^## Map$.*?^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    assert max(map(len, block.splitlines())) <= 120
    parts = re.split(r"^(src/\S+)/", block, flags=re.MULTILINE)[1:]
    found = {}
    for directory, lines in zip(parts[::2], parts[1::2], strict=True):
        without_labels = re.sub(r"^  [\w -]+: ", "", lines, flags=re.MULTILINE)
        found[directory] = re.findall(r"[\w*]+", re.sub(r"\([^()]*\)", "", without_labels))
    return found


def test_the_map_names_every_module_and_nothing_else():
    mapped = map_of_modules()
    directories = {str(path.parent.relative_to(ROOT)) for path in MODULES}
    assert directories == set(mapped)
    for directory, names in mapped.items():
        modules = [path.stem for path in MODULES if path.parent == ROOT / directory]
        assert [each for each in names if not any(fnmatch(module, each) for module in modules)] == []
        assert [each for each in modules if not any(fnmatch(each, name) for name in names)] == []


@pytest.mark.parametrize("library", BACKENDS)
def test_every_module_has_an_import_contract(library):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (covered,) = (each["source_modules"] for each in contracts if each.get("forbidden_modules") == [library])
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in MODULES]
    known = (*covered, BACKENDS[library])
    assert [name for name in names if not any(f"{name}.".startswith(f"{each}.") for each in known)] == []
