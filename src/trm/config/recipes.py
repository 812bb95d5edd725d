"""The recipes that ship with the package."""

from __future__ import annotations

from pathlib import Path

from macbook_optimization.errors import ConfigError
from trm.config.values import did_you_mean


def shipped_recipes() -> dict[str, Path]:
    package = Path(__file__).parents[1]
    places = (package / "recipes", package.parents[1] / "recipes")  # installed, or in a checkout
    directory = next((place for place in places if place.is_dir()), places[0])
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find_recipe(recipe: str) -> Path:
    """Return the file of a shipped recipe, or the path itself."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    raise ConfigError(
        f"There is no recipe {recipe!r}{did_you_mean(recipe, shipped)}",
        hint=f"Give a YAML file or one of: {', '.join(shipped)}",
    )
