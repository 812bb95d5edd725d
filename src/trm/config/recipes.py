"""The recipes that ship with the package, and where other recipes are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.errors import ConfigError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import TooLargeError, read_input
from trm.config.values import did_you_mean
from trm.config.yaml_text import MAX_LENGTH, parse_yaml


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    name: str
    task: str | None
    description: str  # the first sentence of the comment at the top of the file
    problem: str | None = None  # why the task is unknown


def shipped_recipes() -> dict[str, Path]:
    package = Path(__file__).parents[1]
    places = (package / "recipes", package.parents[1] / "recipes")  # installed, or in a checkout
    directory = next((place for place in places if place.is_dir()), places[0])
    return dict(sorted((path.stem, path) for path in directory.glob("*.yaml")))


def find_shipped_recipe(name: str) -> Path:
    shipped = shipped_recipes()
    if name not in shipped:
        raise _no_recipe(name, shipped, "Use")
    return shipped[name]


def find_recipe(recipe: str) -> Path:
    """Return the file of a shipped recipe or of a run, or the path itself."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    path = Path(recipe)
    for file in (path, path / "recipe.yaml"):
        if file.is_file():
            return file
    raise _no_recipe(recipe, shipped, "Give a run, a YAML file or")


def _no_recipe(name: str, shipped: dict[str, Path], advice: str) -> ConfigError:
    return ConfigError(
        f"There is no recipe {name!r}{did_you_mean(name, shipped)}",
        hint=f"{advice} one of: {', '.join(shipped)}",
    )


def read_recipe(path: Path) -> str:
    """Return the text of a recipe; raise `ConfigError` if it cannot be one."""
    try:
        return read_input(path, 4 * MAX_LENGTH).decode()
    except TooLargeError as error:
        raise ConfigError(f"{path} is too large for a recipe") from error
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {reason_of(error)}", hint_for(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"Cannot read {path}: {error}") from error


def summarise_recipe(name: str, path: Path) -> RecipeSummary:
    """Summarise a recipe for a list, which one file that is not a recipe must not stop."""
    try:
        text = read_recipe(path)
    except ConfigError as error:
        return RecipeSummary(name, None, "", str(error))
    comment = re.match(r"(#.*\n)*", text)
    words = "" if comment is None else " ".join(comment[0].replace("#", " ").split())
    sentence = re.match(r".*?[.](?=\s|$)", words)
    description = sentence[0] if sentence else words
    try:
        tree = parse_yaml(text, str(path))
    except ConfigError as error:
        return RecipeSummary(name, None, description, str(error))
    task = tree.get("task") if isinstance(tree, dict) else None
    if not isinstance(task, str):
        return RecipeSummary(name, None, description, f"{path} is not a recipe: it names no task")
    return RecipeSummary(name, task, description)
