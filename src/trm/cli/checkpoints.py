"""`trm checkpoint`: check checkpoints, and exchange weights."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from trm.cli.common import PATH, json_option, show


@click.group()
def checkpoint() -> None:
    """Check checkpoints, and exchange weights."""


@checkpoint.command("verify")
@click.argument("run", type=PATH)
@json_option
def verify_checkpoints(run: Path, as_json: bool) -> None:
    """Read every checkpoint of RUN to its last byte, and say which one would be resumed.

    Changes nothing. The exit code is 1 if one is damaged that was not set aside yet.
    """
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.runs import verdict, verify

    with ProgressDisplay() as display:
        found = verify(run, display.update)
    show(asdict(found), as_json, verdict(found))
    if any(each["damage"] and each["name"].startswith("step-") for each in found.checkpoints):
        sys.exit(1)


@checkpoint.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run", type=PATH, required=True, help="New run directory.")
@click.option("--new-head", is_flag=True, help="Begin the head anew, and token embeddings that do not fit.")
@json_option
def import_checkpoint(
    source: Path, recipe: str, overrides: tuple[str, ...], run: Path, new_head: bool, as_json: bool
) -> None:
    """Make a run for RECIPE that starts with the weights of SOURCE: another run, or a state dict that the
    public code saved.

    A file is described by a child process that can read names and sizes and nothing else.
    """
    from trm.config import load_config

    config = load_config(recipe, overrides)
    if source.is_file():
        from trm.backends.state_dict_files import stored_tensors

        stored_tensors(source)  # refuses what is not weights before torch is loaded
    from trm.backends.pytorch.exchange import import_weights

    new = import_weights(source, config, run, new_head=new_head)
    text = f"{run} holds the weights of {source}; try: trm eval {run}"
    if new:
        text = f"{run} holds the weights of {source}, but for these, which are new: {', '.join(new)}"
    show({"run": str(run), "step": 0, "new": new}, as_json, text)


@checkpoint.command("export")
@click.argument("run", type=PATH)
@click.argument("file", type=PATH)
@click.option(
    "--averaged/--raw", default=True, show_default=True, help="Averaged weights, or those of the step."
)
@click.option(
    "--compiled/--eager", default=True, show_default=True, help="Names of a compiled model, or not."
)
@json_option
def export_checkpoint(run: Path, file: Path, averaged: bool, compiled: bool, as_json: bool) -> None:
    """Write the best weights of RUN to FILE under the names that the public code loads.

    That code compiles its model by default; with DISABLE_COMPILE set, it needs --eager names.
    """
    from trm.backends.pytorch.exchange import export_reference

    step = export_reference(run, file, averaged=averaged, compiled=compiled)
    show({"file": str(file), "step": step}, as_json, f"{file} holds the weights of {run}, step {step}")
