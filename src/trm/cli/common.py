"""Common parts of the commands: options, output, and preparing the process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from macbook_optimization.json_types import JsonMapping
from macbook_optimization.output_files import FileKind, OutputFile
from macbook_optimization.terminal_text import visible, wrap_words

if TYPE_CHECKING:
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.config import InferenceConfig

Command = Callable[..., None]
PATH = click.Path(path_type=Path)
_FORCE = "trm.force"  # where the context of a command keeps --force
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def with_options(command: Command, options: Iterable[Callable[[Command], Command]]) -> Command:
    for option in reversed(list(options)):
        command = option(command)
    return command


def for_terminal(text: str, stream: TextIO | None) -> str:
    """Wrap text between words if the stream is a terminal; elsewhere a line stays a line."""
    text = visible(text)
    if stream is None or stream.closed or not stream.isatty():
        return text
    return wrap_words(text, shutil.get_terminal_size().columns - 1)


@contextmanager
def showing(activity: str) -> Iterator[ProgressDisplay]:
    """Open a display that shows what is happening, before the imports that take time."""
    from macbook_optimization.progress_monitoring import ProgressDisplay

    with ProgressDisplay() as display:
        display.status(activity)
        yield display


def echo(text: str, *, err: bool = False, styled: bool = False, newline: bool = True) -> None:
    """Print text, which may contain names that others chose: control characters are shown as codes.

    Every command prints through this function. `styled` text keeps its colours.
    """
    click.echo(visible(text, keep_styles=styled), err=err, nl=newline)


def show(facts: Any, as_json: bool, text: str, *, styled: bool = False) -> None:
    echo(json.dumps(facts) if as_json else text, styled=styled)


def warn_on(display: ProgressDisplay) -> Callable[[str], None]:
    """Return a function that shows a warning above the progress."""
    return lambda text: display.message(f"warning: {text}")


class OutputOption(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A file to write. It is checked when the command line is parsed, before anything that takes time."""

    name = "file"

    def __init__(self, kind: FileKind) -> None:
        self.kind = kind

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> OutputFile:
        force = ctx is not None and ctx.meta.get(_FORCE, False)
        file = OutputFile(Path(value), self.kind, force)
        file.check()
        return file


def force_option(command: Command) -> Command:
    """Add --force, which the files of the command read; it is parsed before them, in any position."""
    return click.option(
        "--force",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=lambda ctx, param, value: ctx.meta.update({_FORCE: value}),
        help="Replace an existing file, whatever it holds.",
    )(command)


def write_json(file: OutputFile, value: Any) -> None:
    file.write(json.dumps(value).encode())


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
