"""The text of docs/commands.md, from the commands themselves: `make docs` writes it, a test compares it."""

import sys
from collections.abc import Iterator

import click

from trm.cli import cli


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child, inner in sorted(command.commands.items()):
            yield from commands(inner, f"{name} {child}")
    else:
        yield name, command


def reference() -> str:
    parts = ["# Commands\n\nWritten by `make docs` from `--help`.\n"]
    for name, command in commands(cli, "trm"):
        context = click.Context(command, info_name=name, terminal_width=100)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
