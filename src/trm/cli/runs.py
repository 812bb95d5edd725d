"""`trm runs`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from trm.cli.common import PATH, json_option, show


@click.command()
@click.argument("root", type=PATH, default=Path("runs"))
@json_option
def runs(root: Path, as_json: bool) -> None:
    """List the runs under ROOT [default: runs]."""
    from trm.runs.listing import list_runs, metric_label

    found = list_runs(root)
    lines = [
        f"{run.path}  {run.task or '?'}  {run.state}  step {run.step}/{run.max_steps or '?'}"
        + (f"  {run.seconds:.0f} s" if run.seconds is not None else "")
        + (f"  {metric_label(run.primary_metric)} {run.accuracy:.1%}" if run.accuracy is not None else "")
        for run in found
    ]
    show([asdict(run) for run in found], as_json, "\n".join(lines) or f"There are no runs in {root}.")
