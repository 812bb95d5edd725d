"""The text of docs/commands.md, from the commands themselves: `make docs` writes it, a test compares it."""

import sys
from collections.abc import Iterator

import click
from click.testing import CliRunner

from trm.cli import cli


def commands(command: click.Command, name: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for child, inner in sorted(command.commands.items()):
            yield from commands(inner, f"{name} {child}")
    else:
        yield name


def reference() -> str:
    parts = ["# Commands\n\nWritten by `make docs` from `--help`.\n"]
    for name in commands(cli, "trm"):
        arguments = [*name.split()[1:], "--help"]
        shown = CliRunner().invoke(cli, arguments, prog_name="trm", terminal_width=100).output
        parts.append(f"## {name}\n\n```text\n{shown}```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
