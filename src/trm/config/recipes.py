"""The recipes that ship with the package, and where other recipes are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.errors import ConfigError
from trm.config.values import did_you_mean
from trm.config.yaml_text import parse_yaml


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    name: str
    task: str
    description: str  # the first sentence of the comment at the top of the file


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


def summarise_recipe(name: str, path: Path) -> RecipeSummary:
    text = path.read_text(encoding="utf-8")
    comment = re.match(r"(#.*\n)*", text)
    words = "" if comment is None else " ".join(comment[0].replace("#", " ").split())
    sentence = re.match(r".*?[.](?=\s|$)", words)
    return RecipeSummary(name, parse_yaml(text, str(path))["task"], sentence[0] if sentence else words)
