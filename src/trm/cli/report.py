"""`trm report`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.input_files import open_input
from macbook_optimization.output_files import FileKind, OutputFile, page_of
from trm.cli.common import PATH, OutputOption, echo, force_option, json_option, show, showing

if TYPE_CHECKING:
    from trm.reports.examples import Examples
    from trm.runs.directory import Run

# Of pages of earlier versions, which do not name their generator.
_EARLIER_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>"""
_MARKDOWN = re.compile(rb"# Report: [^\n]+\n\n\*\*(new|running|finished|stopped early|stopped|crashed)\*\*: ")
_MARKDOWN_BYTES = 16 * 1024  # its title has a path
_is_page = page_of("trm report", _EARLIER_HEAD)


def _is_report(path: Path) -> bool:
    with open_input(path) as file:
        is_markdown = _MARKDOWN.match(file.read(_MARKDOWN_BYTES)) is not None
    return is_markdown or _is_page(path)


REPORT = FileKind("a report", _is_report)


@click.command()
@click.argument("run", type=PATH, required=False, metavar="RUN")
@click.option(
    "--out", type=OutputOption(REPORT), help="File to write [default: RUN/report.html; Markdown is printed]."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "markdown"]),
    default="html",
    help="Format [default: html].",
)
@click.option(
    "--examples/--no-examples",
    default=None,
    help="Draw answers of the best checkpoint, within 60 s [default: unless the run is being trained].",
)
@click.option(
    "--tensorboard",
    is_flag=False,
    flag_value="",
    metavar="[DIR]",
    help="Also write event files for TensorBoard [default directory: RUN/tensorboard].",
)
@click.option("--wandb", is_flag=True, help="Also write an offline run of Weights & Biases to RUN/wandb.")
@click.option("--trackio", is_flag=True, help="Also add the run to the local database of trackio.")
@force_option
@json_option
@click.pass_context
def report(
    context: click.Context,
    run: Path | None,
    out: OutputFile | None,
    form: str,
    examples: bool | None,
    tensorboard: str | None,
    wandb: bool,
    trackio: bool,
    as_json: bool,
) -> None:
    """Report on RUN, whether it has finished, is being trained, or died.

    The page has curves, the time by activity, the plan and its reasons, resources beside their targets, and
    advice. It is one file that loads nothing. With --json, nothing is written without --out.
    """
    run, tensorboard = _run_and_directory(context, run, tensorboard)
    with showing("Reading the run") as display:
        from trm.reports.facts import gather, open_reported_run
        from trm.reports.markdown import as_markdown
        from trm.reports.report import FILE_NAME, as_html

        opened = open_reported_run(run)
        display.status("Drawing examples")
        found = gather(opened, _examples(opened, examples))
        display.status("Writing the report")
        text = as_html(found) if form == "html" and (out or not as_json) else ""
        if form == "markdown":
            text = as_markdown(found)
        written: dict[str, str] = {}
        if out is not None:
            out.write(text.encode())
            written["report"] = str(out.path)
        elif form == "html" and not as_json:
            opened.write(FILE_NAME, text)
            written["report"] = str(run / FILE_NAME)
        if tensorboard is not None:
            display.status("Writing event files")
            written["tensorboard"] = _write_event_files(opened, tensorboard)
        if wandb:
            from trm.reports.exporters import export_to_wandb

            display.status("Writing an offline run of W&B")
            written["wandb"] = str(export_to_wandb(opened))
        if trackio:
            from trm.reports.exporters import export_to_trackio

            display.status("Writing to trackio")
            written["trackio"] = export_to_trackio(opened)
    if form == "markdown" and out is None and not as_json:
        echo(text.rstrip("\n"))
    lines = [f"{name}: {path}" for name, path in written.items()]
    if as_json or lines:
        show({**found.to_json(), "written": written}, as_json, "\n".join(lines))


def _run_and_directory(
    context: click.Context, run: Path | None, tensorboard: str | None
) -> tuple[Path, str | None]:
    """Return the run and the directory for TensorBoard; in `--tensorboard RUN`, the option has no value."""
    if run is not None:
        return run, tensorboard
    if not tensorboard:
        name = context.command.params[0]
        raise click.MissingParameter(ctx=context, param=name)
    return Path(tensorboard), ""


def _examples(run: Run, wanted: bool | None) -> Examples:
    from trm.reports.examples import find_examples, no_examples
    from trm.runs.state import is_locked

    if wanted is False:
        return no_examples("They were switched off by --no-examples.")
    if wanted is None and is_locked(run.path):
        return no_examples(
            "The run is being trained, and drawing them would slow it down: --examples draws them."
        )
    return find_examples(run.path)


def _write_event_files(run: Run, directory: str) -> str:
    from trm.reports.tensorboard import write_event_files

    return str(write_event_files(run, Path(directory) if directory else None).directory)
