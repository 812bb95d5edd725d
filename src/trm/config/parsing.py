"""From YAML and overrides to a validated recipe, with every problem reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from macbook_optimization.errors import ConfigError
from macbook_optimization.json_types import JsonMapping
from trm.config.recipes import find_recipe, read_recipe
from trm.config.renamed import Tree, with_current_keys
from trm.config.sections import MODEL_KINDS, RunConfig
from trm.config.values import Section, did_you_mean
from trm.config.yaml_text import parse_yaml

S = TypeVar("S", bound=Section)
KeyPath: TypeAlias = tuple[str, ...]  # ("model", "hidden_size")
_MAX_SHOWN_LENGTH = 80  # of an override, in messages
_MAX_LISTED = 3  # overrides that may together be the cause of a problem


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    path = find_recipe(str(recipe))
    return config_from_text(read_recipe(path), str(path), overrides)


def config_from_text(text: str, origin: str, overrides: Sequence[str] = ()) -> RunConfig:
    tree = parse_yaml(text, origin)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{origin} is not a recipe: it must be a mapping with task, data, model and training"
        )
    tree = _with_current_keys(tree, origin)
    origins = Origins(origin)
    for override in overrides:
        before = dict(_leaves(tree))
        key = _apply_override(tree, override)
        tree = _with_current_keys(tree, _named(override), earlier_wins=True)
        changed = [path for path, value in _leaves(tree) if path not in before or before[path] != value]
        origins.overrides.update(dict.fromkeys([key, *changed], override))
    _build_only_where_asked(tree, overrides)
    return _parse(RunConfig, tree, origins)


def _with_current_keys(tree: Tree, origin: str, *, earlier_wins: bool = False) -> Tree:
    try:
        return with_current_keys(tree, earlier_wins=earlier_wins)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error


def parse_section(section: type[S], tree: JsonMapping, origin: str) -> S:
    return _parse(section, tree, Origins(origin))


def _parse(section: type[S], tree: JsonMapping, origins: Origins) -> S:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        problems = [
            (origins.of(_without_tag(problem["loc"])), _describe(problem, section))
            for problem in error.errors()
        ]
    places = {place for place, _ in problems}
    if len(problems) == 1:
        raise ConfigError(": ".join(problems[0]))
    if len(places) == 1:
        texts = [problem for _, problem in problems]
        raise ConfigError(f"{places.pop()} has {len(problems)} problems:\n  " + "\n  ".join(texts))
    listed = "\n  ".join(": ".join(problem) for problem in problems)
    raise ConfigError(f"{origins.file} with its overrides has {len(problems)} problems:\n  {listed}")


def _without_tag(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the place of a problem without the kind of model that pydantic adds to it."""
    is_tagged = len(location) > 1 and location[0] == "model" and location[1] in MODEL_KINDS
    return (location[0], *location[2:]) if is_tagged else location


@dataclass
class Origins:
    """The origin of each value of a recipe, to name the place of a problem."""

    file: str
    overrides: dict[KeyPath, str] = field(default_factory=dict)  # the last one that set the key

    def of(self, location: Sequence[object]) -> str:
        """Return the override that set the key at a location or a section around it, or else the file.

        A problem of a whole section may be due to the file or to overrides in it, so it names both.
        """
        path = tuple(map(str, location))
        around = [override for key, override in self.overrides.items() if path[: len(key)] == key]
        if around:
            return _named(around[-1])
        inside = {override for key, override in self.overrides.items() if key[: len(path)] == path}
        if not inside:
            return self.file
        listed = ", ".join(map(_shortened, sorted(inside)))
        return f"{self.file} with {listed if len(inside) <= _MAX_LISTED else 'its overrides'}"


def _named(override: str) -> str:
    return f"Override {_shortened(override)}"


def _shortened(override: str) -> str:
    return override if len(override) <= _MAX_SHOWN_LENGTH else f"{override[:_MAX_SHOWN_LENGTH]}..."


def _leaves(tree: Mapping[Any, object], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield every value that is not a section, with its key."""
    for key, value in tree.items():
        path = (*prefix, str(key))
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


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


def _apply_override(tree: Tree, override: str) -> KeyPath:
    """Set a key of the tree, and return which."""
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
    node[leaf] = parse_yaml(text, f"The value of {_shortened(override)!r}")
    return (*parents, leaf)


def _describe(problem: Any, section: type[BaseModel]) -> str:
    location = _without_tag(problem["loc"])
    where = ".".join(map(str, location))
    if problem["type"] == "extra_forbidden":
        *parents, key = location
        if parents == ["model"] and (kinds := [kind for kind in MODEL_KINDS if _has(kind, key)]):
            return f"{where} is a key of model.kind={kinds[0]}, which this model is not"
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


def _has(kind: str, key: object) -> bool:
    return key in MODEL_KINDS[kind].model_fields


def _fields_at(section: type[BaseModel], parents: Sequence[Any]) -> list[str]:
    sections = [section]
    for parent in parents:
        fields = [each.model_fields[parent] for each in sections if parent in each.model_fields]
        sections = [inner for each in fields for inner in _sections_in(each.annotation)]
    return [name for each in sections for name in each.model_fields]


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section that a field holds, or each of several kinds of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType):
        return [inner for each in get_args(annotation) for inner in _sections_in(each)]
    return _sections_in(get_args(annotation)[0]) if get_origin(annotation) is Annotated else []
