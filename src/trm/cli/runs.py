"""`trm runs`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from trm.cli.common import PATH, json_option, show


@click.command()
@click.argument("root", type=PATH, required=False)
@click.option(
    "--compare",
    nargs=2,
    type=PATH,
    metavar="A B",
    help="Compare two runs: what differs in the recipe, the curves, and which was better.",
)
@json_option
def runs(root: Path | None, compare: tuple[Path, Path] | None, as_json: bool) -> None:
    """List the runs under ROOT [default: runs]; a ROOT that is a run itself is shown alone."""
    if compare is not None:
        if root is not None:
            raise click.UsageError("--compare takes two runs and no ROOT.")
        _compare(*compare, as_json)
        return
    from trm.runs.listing import describe_runs, list_runs

    directory = root or Path("runs")
    is_new = root is None and not directory.exists()  # nothing has been trained here yet
    found = [] if is_new else list_runs(directory)
    text = "\n".join(describe_runs(found)) or f"There are no runs in {directory}."
    show([asdict(run) for run in found], as_json, text)


def _compare(first: Path, second: Path, as_json: bool) -> None:
    from trm.reports.comparison import compare_runs
    from trm.reports.comparison_text import ASCII_BLOCKS, BLOCKS, describe_comparison

    found = compare_runs(first, second)
    blocks = BLOCKS if _can_print(BLOCKS) else ASCII_BLOCKS
    show(found.to_json(), as_json, describe_comparison(found, blocks))


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
