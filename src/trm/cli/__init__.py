"""The command line: parse, call one function, print.

Torch, pydantic and rich are imported inside the commands, so that `trm --help` answers immediately.
"""

from __future__ import annotations

import sys

import click

from macbook_optimization.errors import LaptopError
from trm.cli.checkpoints import checkpoint
from trm.cli.data import data
from trm.cli.evaluate import evaluate
from trm.cli.machine import bench, doctor
from trm.cli.predict import predict
from trm.cli.runs import runs
from trm.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="macbook-trm", prog_name="trm")
def cli() -> None:
    """Train a Tiny Recursive Model on the laptop you own."""


for command in (data, checkpoint, doctor, bench, train, evaluate, predict, runs):
    cli.add_command(command)


def main() -> None:
    """Run a command; this is the one place where errors become text and exit codes."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C where nothing had to be saved
        click.echo("Stopped.", err=True)
        sys.exit(130)
    except PermissionError as error:  # the path says it all, wherever it came from
        click.echo(f"error: Permission denied: {error.filename}", err=True)
        sys.exit(1)
    except LaptopError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
