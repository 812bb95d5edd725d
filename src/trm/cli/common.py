"""What commands have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import DataError

PATH = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")


def show(facts: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(facts) if as_json else text)


def write_json(file: Path, value: Any) -> None:
    try:
        replace_file(file, json.dumps(value).encode())
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror or error}") from error
