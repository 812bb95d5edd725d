"""From YAML and overrides to a validated recipe, with every problem reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from macbook_optimization.errors import ConfigError
from macbook_optimization.json_types import JsonMapping
from trm.config.recipes import find_recipe, read_recipe
from trm.config.renamed import Tree, with_current_keys
from trm.config.sections import RunConfig
from trm.config.values import Section, did_you_mean
from trm.config.yaml_text import parse_yaml

S = TypeVar("S", bound=Section)


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    path = find_recipe(str(recipe))
    return config_from_text(read_recipe(path), str(path), overrides)


def config_from_text(text: str, origin: str, overrides: Sequence[str] = ()) -> RunConfig:
    tree = parse_yaml(text, origin)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{origin} is not a recipe: it must be a mapping with task, data, model and training"
        )
    try:
        tree = with_current_keys(tree)
        for override in overrides:
            _apply_override(tree, override)
            tree = with_current_keys(tree, earlier_wins=True)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error
    _build_only_where_asked(tree, overrides)
    return parse_section(RunConfig, tree, origin)


def parse_section(section: type[S], tree: JsonMapping, origin: str) -> S:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(problem, section) for problem in error.errors()]
    if len(problems) == 1:
        raise ConfigError(f"{origin}: {problems[0]}")
    raise ConfigError(f"{origin} has {len(problems)} problems:\n  " + "\n  ".join(problems))


def differences(ours: JsonMapping, theirs: JsonMapping, prefix: str = "") -> list[str]:
    """List `key is X here and Y in the run` for every leaf that differs."""
    found = []
    for key in sorted({*ours, *theirs}):
        here = ours.get(key)
        there = theirs.get(key)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += differences(here, there, f"{prefix}{key}.")
        elif here != there:
            found.append(f"{prefix}{key} is {_as_yaml(here)} here and {_as_yaml(there)} in the run")
    return found


def _as_yaml(value: object) -> str:
    """Return a value as a recipe has it: null, true and false instead of Python's names."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _build_only_where_asked(tree: Tree, overrides: Sequence[str]) -> None:
    """Forget `data.build` when only `data.path` was overridden.

    A recipe builds its dataset at its own path. A path given by hand names an existing dataset, and a typing
    error must not build a new one there.
    """
    keys = {override.partition("=")[0] for override in overrides}
    data = tree.get("data")
    if (
        "data.path" in keys
        and not any(key.startswith("data.build") for key in keys)
        and isinstance(data, dict)
    ):
        data.pop("build", None)


def _apply_override(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not an override", hint="Write key=value, for example model.hidden_size=256"
        )
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[leaf] = parse_yaml(text, f"the value of {override!r}")


def _describe(problem: Any, section: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *parents, key = problem["loc"]
        known = _fields_at(section, parents)
        # A key that was put into the wrong section is the next most likely mistake.
        elsewhere = [f"{name}.{key}" for name in section.model_fields if key in _fields_at(section, [name])]
        suggestion = f"; did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(str(key), known)
        return f"unknown key {where}{suggestion}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if "it should" in message:
        given = problem["input"]
        return f"{where} is {repr(given) if isinstance(given, str) else _as_yaml(given)}: {message}"
    return f"{where}: {message}".removeprefix(": ")  # a problem of several keys together has no place


def _fields_at(section: type[BaseModel], parents: Sequence[Any]) -> list[str]:
    for parent in parents:
        annotation = section.model_fields[parent].annotation if parent in section.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return list(section.model_fields)
