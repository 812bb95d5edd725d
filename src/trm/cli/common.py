"""What commands have in common: options, output, and preparing the process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonMapping

if TYPE_CHECKING:
    from trm.config import InferenceConfig

Command = Callable[..., None]
PATH = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def with_options(command: Command, options: Iterable[Callable[[Command], Command]]) -> Command:
    for option in reversed(list(options)):
        command = option(command)
    return command


def show(facts: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(facts) if as_json else text)


def write_json(file: Path, value: Any) -> None:
    try:
        replace_file(file, json.dumps(value).encode())
    except OSError as error:
        raise DataError(f"Cannot write {file}: {error.strerror or error}") from error


def set_environment(threads: int) -> None:
    """Set what has to be set before torch is imported. Only commands do this; a library must not."""
    from macbook_optimization.cpu_optimization import environment

    os.environ.update(environment(threads))


def inference_options(command: Command) -> Command:
    """Add the options that change how a model is applied; the run's recipe has the defaults."""
    options = (
        click.option("--halt", is_flag=True, default=None, help="Stop when the halting head is confident."),
        click.option(
            "--retries",
            type=click.IntRange(0, 1000),
            help="Retry up to N times if the halting head is not confident; keep the most confident answer.",
        ),
        click.option("--tries", type=click.IntRange(1, 1000), hidden=True),  # earlier name: counts the first
        click.option(
            "--noise",
            type=click.FloatRange(0, 100),
            help="Standard deviation of noise added to the initial latents of every retry.",
        ),
        click.option(
            "--guesses",
            type=click.IntRange(0, 1000),
            help="Per retry, fix up to N of the model's own predictions as givens (verified without them).",
        ),
    )
    return with_options(command, options)


def inference_settings(
    recipe: InferenceConfig, options: JsonMapping, steps: Mapping[str, int | None]
) -> InferenceConfig:
    """Return the recipe's settings with the given options and limits of depth."""
    from trm.config import InferenceConfig, parse_section

    given = {name: value for name, value in options.items() if value is not None}
    tries = given.pop("tries", None)
    if tries is not None:
        given.setdefault("retries", tries - 1)
    return parse_section(InferenceConfig, {**recipe.model_dump(), **steps, **given}, "These options")
