"""Common parts of the commands of `trm email`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.output_files import OutputFile
from trm.cli.common import PATH, set_environment

if TYPE_CHECKING:
    from trm.mail.deciding import Classifier
    from trm.tasks.documents.mailboxes import Format

SOURCES = click.Path()  # paths, or - for standard input
FORMATS = click.Choice(["auto", "eml", "mbox", "maildir", "directory", "csv", "json", "jsonl"])
MAX_ERROR = "max_error"


def parse_share(context: click.Context, option: click.Parameter, value: str) -> float:
    """Parse a share: `0.01` or `1%`."""
    text = value.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise click.BadParameter(f"{value!r} is not a share such as 1% or 0.01.")
    return share


format_option = click.option("--format", "format_", type=FORMATS, default="auto", show_default=True,
                             help="Format of the mail; auto detects it.")  # fmt: skip
jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 256), help="Processes that parse mail [default: one per core]."
)
error_option = click.option(
    "--max-error", callback=parse_share, default="1%", show_default=True,
    help="Largest share of wrong answers among those that are not unsure.",
)  # fmt: skip
mapping_option = click.option(
    "--mapping", type=PATH, help="YAML file that says which folders and labels are which category."
)


def num_jobs(jobs: int | None) -> int:
    from macbook_optimization.performance_reporting import available_cores

    return jobs or available_cores()


@contextmanager
def opened_classifier(
    run: Path, jobs: int | None, *, full: bool = False, all_paths: bool = False
) -> Iterator[Classifier]:
    from macbook_optimization.performance_reporting import available_cores
    from trm.mail.deciding import open_classifier

    set_environment(available_cores())  # should a message need the recursive path
    with open_classifier(run, num_jobs(jobs), full=full, all_paths=all_paths) as classifier:
        yield classifier


def format_named(name: str) -> Format:
    from trm.tasks.documents.mailboxes import FORMATS

    return next(each for each in FORMATS if each == name)


def page_facts(page: OutputFile | None) -> dict[str, str]:
    """Return where a page was written, as a part of the result."""
    return {} if page is None else {"html": str(page.path)}


def page_line(page: OutputFile | None) -> str:
    return "" if page is None else f"\nPage: {page.path}"
