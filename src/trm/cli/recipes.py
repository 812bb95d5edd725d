"""`trm recipes`: list, show and copy the recipes that ship with the package."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.output_files import FileKind, OutputFile
from trm.cli.common import OutputOption, echo, force_option, json_option, show

if TYPE_CHECKING:
    from trm.config.recipes import RecipeSummary

_RECIPE_FILE = OutputOption(FileKind("a recipe", matches=None))


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def recipes(context: click.Context, as_json: bool) -> None:
    """List the recipes that ship with the package, show one, or copy one to edit it."""
    from trm.config.recipes import shipped_recipes, summarise_recipe

    if as_json and context.invoked_subcommand is not None:
        raise click.UsageError("Put --json after the subcommand.")
    if context.invoked_subcommand is None:
        found = [summarise_recipe(name, path) for name, path in shipped_recipes().items()]
        show([asdict(recipe) for recipe in found], as_json, _table(found))


@recipes.command("show")
@click.argument("name")
@json_option
def show_recipe(name: str, as_json: bool) -> None:
    """Print the YAML of the recipe NAME."""
    from trm.config.recipes import find_shipped_recipe, read_recipe, summarise_recipe

    source = find_shipped_recipe(name)
    text = read_recipe(source)
    show({**asdict(summarise_recipe(name, source)), "yaml": text}, as_json, text.rstrip())
    _warn_of_problem(name, source)


@recipes.command()
@click.argument("name")
@click.argument("file", type=_RECIPE_FILE, required=False)
@force_option
@json_option
@click.pass_context
def copy(context: click.Context, name: str, file: OutputFile | None, as_json: bool) -> None:
    """Copy the recipe NAME to FILE [default: NAME.yaml] to edit it; `trm train FILE` trains it."""
    from trm.config.recipes import find_shipped_recipe, read_recipe

    source = find_shipped_recipe(name)
    target = file or _RECIPE_FILE.convert(source.name, None, context)
    target.write(read_recipe(source).encode())
    show(
        {"recipe": name, "file": str(target.path)},
        as_json,
        f"{target.path} is a copy of the recipe {name}. Edit it, then: trm train {target.path}",
    )
    _warn_of_problem(name, source)


def _warn_of_problem(name: str, path: Path) -> None:
    """Say that a recipe cannot be trained as it is. It can still be shown and copied, to be corrected."""
    from trm.config.recipes import summarise_recipe

    problem = summarise_recipe(name, path).problem
    if problem is not None:
        echo(f"warning: {problem}", err=True)


def _table(found: list[RecipeSummary]) -> str:
    """Return a line per recipe, which is wrapped on a terminal."""
    names = max((len(recipe.name) for recipe in found), default=0)
    tasks = max((len(recipe.task or "?") for recipe in found), default=0)
    width = max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 10_000
    indent = " " * (names + tasks + 4)
    lines = [
        textwrap.fill(
            f"{recipe.name:<{names}}  {recipe.task or '?':<{tasks}}  {_description(recipe)}",
            width,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        for recipe in found
    ]
    return "\n".join(lines)


def _description(recipe: RecipeSummary) -> str:
    return recipe.description if recipe.problem is None else f"({recipe.problem})"
