"""`trm runs`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from trm.cli.common import PATH, json_option, show


@click.command()
@click.argument("root", type=PATH, required=False)
@json_option
def runs(root: Path | None, as_json: bool) -> None:
    """List the runs under ROOT [default: runs]; a ROOT that is a run itself is shown alone."""
    from trm.runs.listing import describe_runs, list_runs

    directory = root or Path("runs")
    is_new = root is None and not directory.exists()  # nothing has been trained here yet
    found = [] if is_new else list_runs(directory)
    text = "\n".join(describe_runs(found)) or f"There are no runs in {directory}."
    show([asdict(run) for run in found], as_json, text)
