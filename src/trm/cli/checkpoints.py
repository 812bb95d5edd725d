"""`trm checkpoint`: verify checkpoints, and exchange weights."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from macbook_optimization.output_files import STATE_DICT, OutputFile
from trm.cli.common import PATH, OutputOption, force_option, json_option, show, showing, warn_on


@click.group()
def checkpoint() -> None:
    """Verify checkpoints, and exchange weights."""


@checkpoint.command("verify")
@click.argument("run", type=PATH)
@json_option
def verify_checkpoints(run: Path, as_json: bool) -> None:
    """Read every checkpoint of RUN completely, and show which one would be resumed.

    Changes nothing. The exit code is 1 if a checkpoint is damaged that was not set aside yet.
    """
    with showing("Reading the run") as display:
        from trm.runs.listing import describe_verification, verify

        found = verify(run, display.update)
    show(asdict(found), as_json, describe_verification(found))
    if any(each.damage and each.name.startswith("step-") for each in found.checkpoints):
        sys.exit(1)


@checkpoint.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run", type=PATH, required=True, help="New run directory.")
@click.option(
    "--new-head", is_flag=True, help="Initialise the heads anew, and token embeddings that do not fit."
)
@json_option
def import_checkpoint(
    source: Path, recipe: str, overrides: tuple[str, ...], run: Path, new_head: bool, as_json: bool
) -> None:
    """Create a run of RECIPE that starts with the weights of SOURCE: another run, or a state dict of the
    reference implementation.

    A file is read in a child process that accepts names and sizes of tensors and nothing else.
    """
    with showing("Reading the weights") as display:
        from trm.config import load_config

        config = load_config(recipe, overrides)
        if not source.is_dir():
            from trm.backends.state_dict_files import stored_tensors

            stored_tensors(source)  # refuses what is not weights before torch is imported
        from trm.exchange import import_weights

        display.status("Loading PyTorch and importing the weights")
        new = import_weights(source, config, run, new_head=new_head, warn=warn_on(display))
    text = f"{run} holds the weights of {source}; try: trm eval {run}"
    if new:
        text = f"{run} holds the weights of {source}, except for these new ones: {', '.join(new)}"
    show({"run": str(run), "step": 0, "new": new}, as_json, text)


@checkpoint.command("export")
@click.argument("run", type=PATH)
@click.argument("file", type=OutputOption(STATE_DICT))
@force_option
@click.option(
    "--averaged/--raw", default=True, show_default=True, help="Export the moving average, or the raw weights."
)
@click.option(
    "--compiled/--eager", default=True, show_default=True, help="Use the names of a compiled model, or not."
)
@json_option
def export_checkpoint(run: Path, file: OutputFile, averaged: bool, compiled: bool, as_json: bool) -> None:
    """Write the best weights of RUN to FILE under the names that the reference implementation loads.

    The reference implementation compiles its model by default; with DISABLE_COMPILE set, it needs --eager.
    """
    with showing("Loading PyTorch and exporting the weights") as display:
        from trm.exchange import export_reference

        step = export_reference(run, file, averaged=averaged, compiled=compiled, warn=warn_on(display))
    text = f"{file.path} holds the weights of {run}, step {step}"
    show({"file": str(file.path), "step": step}, as_json, text)
