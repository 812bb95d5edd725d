"""`trm email sort` and `trm email eval`: whole mailboxes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.json_types import JsonObject
from macbook_optimization.output_files import OutputFile, check_new_directory
from macbook_optimization.terminal_text import one_line
from macbook_optimization.units import counted
from trm.cli.common import PATH, OutputOption, echo, force_option, json_option, show, showing
from trm.cli.email_options import (
    SOURCES,
    error_option,
    format_named,
    format_option,
    jobs_option,
    mapping_option,
    opened_classifier,
    page_facts,
    page_line,
)
from trm.mail.page import MAIL_PAGE

if TYPE_CHECKING:
    from trm.mail.evaluation import Comparable
    from trm.mail.sorted_copy import Copied
    from trm.mail.sorting import Outcome, Undone


@click.command()
@click.argument("run", type=PATH, required=False)
@click.argument("path", type=SOURCES, required=False)
@click.option("--out", type=PATH, help="Write a sorted copy to this new Maildir; PATH may then be any mail.")
@click.option("--from-folder", metavar="NAME", help="Sort this folder of the Maildir [default: the inbox].")
@click.option("--dry-run", is_flag=True, help="Print what would be moved or copied, and change nothing.")
@click.option("--undo", type=PATH, metavar="MAILDIR", help="Move the messages of the last sort back.")
@error_option
@format_option
@jobs_option
@json_option
def sort(
    run: Path | None,
    path: str | None,
    out: Path | None,
    from_folder: str | None,
    dry_run: bool,
    undo: Path | None,
    max_error: float,
    format_: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Move the messages in the inbox of the Maildir PATH into a folder per category.

    Unsure ones stay where they are. Names and flags are kept, and nothing is overwritten. A journal in the
    Maildir remembers the moves: `trm email sort --undo MAILDIR` takes the last sort back.
    """
    if undo is not None:
        if run is not None or out is not None or from_folder is not None or dry_run:
            raise click.UsageError(
                "--undo MAILDIR takes no RUN, no PATH and none of the options for sorting."
            )
        _undo(undo, as_json)
        return
    if run is None or path is None:
        raise click.UsageError(f"Missing argument '{'RUN' if run is None else 'PATH'}'.")
    if out is None:
        _sort_maildir((run, jobs), Path(path), from_folder or "Inbox", (max_error, dry_run), as_json)
        return
    if from_folder is not None:
        raise click.UsageError("--from-folder cannot be used with --out, which copies everything.")
    check_new_directory(out)
    with showing("Reading the mail") as display, opened_classifier(run, jobs) as classifier:
        from trm.mail.sorted_copy import copy_sorted
        from trm.tasks.documents.sources import messages_of

        messages = messages_of([path], format_named(format_), display.update)
        copied = copy_sorted(classifier.decide(messages, max_error), out, dry_run)
    for key, reason in copied.left_out.items():
        echo(f"warning: {key} is left out: {reason}", err=True)
    facts = {"path": path, "out": str(out), "dry_run": dry_run, **_copied_facts(copied)}
    show(facts, as_json, _joined(_copied_lines(copied, out, dry_run)))


def _sort_maildir(
    model: tuple[Path, int | None], path: Path, folder: str, how: tuple[float, bool], as_json: bool
) -> None:
    from trm.mail.maildir import check_folder, folder_of, open_maildir

    root = open_maildir(path)
    directory = folder_of(folder)
    check_folder(root, directory)
    max_error, dry_run = how
    with showing("Loading the model") as display, opened_classifier(*model) as classifier:
        from trm.mail.sorting import messages_of_folder, sort_folder

        display.status("Sorting")
        decided = classifier.decide(messages_of_folder(root, directory), max_error)
        outcome = sort_folder(root, directory, decided, dry_run)
    facts = {"path": str(path), "dry_run": dry_run, **_facts(outcome)}
    show(facts, as_json, _joined(_lines(outcome, path, dry_run)))


def _joined(lines: list[str]) -> str:
    return "\n".join(map(one_line, lines))


def _facts(outcome: Outcome) -> JsonObject:
    return {
        "moved": [
            {
                "from": str(choice.move.source),
                "to": str(choice.move.target),
                "category": choice.category,
                "confidence": choice.confidence,
            }
            for choice in outcome.moved
        ],
        "unsure": outcome.unsure,
        "skipped": outcome.skipped,
        "in_place": outcome.in_place,
        "gone": outcome.gone,
        "occupied": outcome.occupied,
    }


def _lines(outcome: Outcome, path: Path, dry_run: bool) -> list[str]:
    lines = []
    if dry_run:
        lines = [
            f"{choice.category:16} {choice.confidence:6.1%}  {choice.move.source} -> {choice.move.target}"
            for choice in outcome.moved
        ]
    lines += _count_lines(outcome.by_category)
    stay = {
        "unsure": outcome.unsure,
        "could not be read": outcome.skipped,
        "in the right folder": outcome.in_place,
        "gone in the meantime": outcome.gone,
        "have a namesake in the folder": outcome.occupied,
    }
    lines += [f"{count:>7,}  {reason}, not moved" for reason, count in stay.items() if count]
    verb = "would be moved" if dry_run else "moved"
    lines.append(f"{counted(len(outcome.moved), 'message')} {verb} in {path}.")
    if outcome.moved and not dry_run:
        lines.append(f"Take it back: trm email sort --undo {path}")
    return lines


def _count_lines(by_category: dict[str, int]) -> list[str]:
    return [f"{count:>7,}  {category}" for category, count in by_category.items()]


def _undo(path: Path, as_json: bool) -> None:
    from trm.mail.maildir import open_maildir
    from trm.mail.sorting import undo_sort

    undone = undo_sort(open_maildir(path))
    if undone is None:
        show({"path": str(path), "moved_back": 0}, as_json, f"There is no sort of {path} to take back.")
        return
    facts = {
        "path": str(path),
        "moved_back": undone.moved_back,
        "with_other_flags": undone.with_other_flags,
        "in_place": undone.in_place,
        "gone": [str(place) for place in undone.gone],
        "occupied": [str(place) for place in undone.occupied],
        "kept_folders": undone.kept_folders,
        "earlier_sorts": undone.earlier_sorts,
    }
    show(facts, as_json, _joined(_undone_lines(undone, path)))
    if not undone.is_complete:
        raise click.exceptions.Exit(1)


def _undone_lines(undone: Undone, path: Path) -> list[str]:
    lines = [f"gone: {place}" for place in undone.gone]
    lines += [f"not moved back, as its old place is occupied: {place}" for place in undone.occupied]
    lines += [f"kept, as it is not empty: the folder {folder}" for folder in undone.kept_folders]
    if undone.with_other_flags:
        lines.append(f"{counted(undone.with_other_flags, 'message')} had other flags by now, and kept them.")
    if undone.in_place:
        lines.append(f"{counted(undone.in_place, 'message')} needed no move: not sorted, or already back.")
    lines.append(f"{counted(undone.moved_back, 'message')} moved back in {path}.")
    if undone.earlier_sorts:
        lines.append(f"The same command takes the sort before it back; {undone.earlier_sorts} are left.")
    return lines


def _copied_facts(copied: Copied) -> JsonObject:
    return {
        "categories": dict(sorted(copied.by_category.items())),
        "unsure": copied.unsure,
        "skipped": copied.skipped,
        "left_out": copied.left_out,
    }


def _copied_lines(copied: Copied, out: Path, dry_run: bool) -> list[str]:
    lines = _count_lines(dict(sorted(copied.by_category.items())))
    inbox = {"unsure": copied.unsure, "could not be classified": copied.skipped}
    lines += [f"{count:>7,}  {reason}, in the inbox" for reason, count in inbox.items() if count]
    total = sum(copied.by_category.values()) + copied.unsure + copied.skipped
    verb = "would be copied" if dry_run else "copied"
    return [*lines, f"{counted(total, 'message')} {verb} to the Maildir {out}."]


@click.command("eval")
@click.argument("run", type=PATH)
@click.argument("paths", nargs=-1, required=True, type=SOURCES)
@mapping_option
@click.option(
    "--html", type=OutputOption(MAIL_PAGE), help="Also write the tables and a diagram to this page."
)
@force_option
@error_option
@format_option
@jobs_option
@json_option
def evaluate(
    run: Path,
    paths: tuple[str, ...],
    mapping: Path | None,
    html: OutputFile | None,
    max_error: float,
    format_: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Measure the model of RUN on the messages of PATHS, whose folders or labels are their categories.

    Use messages that it was not trained on: on others, the result is too good.
    """
    with (
        showing("Reading the mail") as display,
        opened_classifier(run, jobs, all_paths=True) as classifier,
    ):
        from trm.mail.evaluation import collect, comparable
        from trm.mail.evaluation import evaluate as compare
        from trm.mail.evaluation_html import as_html
        from trm.mail.evaluation_text import as_text
        from trm.tasks.documents.labels import load_map
        from trm.tasks.documents.sources import messages_of

        rules = None if mapping is None else load_map(mapping)
        messages = messages_of(paths, format_named(format_), display.update)
        found = collect(classifier.compare(messages, max_error))
        model = classifier.model
    compared = comparable(found, model, rules)
    result = compare(compared.columns, compared.labels, model.categories)
    if html is not None:
        html.write(as_html(f"{run} on {', '.join(paths)}", result).encode(errors="backslashreplace"))
    facts = {
        "run": str(run),
        "paths": list(paths),
        **result.to_json(),
        **compared.counts(),
        **page_facts(html),
    }
    text = "\n".join([*_left_out(compared), as_text(result)])
    show({**facts, **page_facts(html)}, as_json, text + page_line(html))


def _left_out(compared: Comparable) -> list[str]:
    lines = [f"{counted(count, 'message')} left out: {reason}" for reason, count in compared.skipped.items()]
    if compared.without_category:
        lines.append(f"{counted(compared.without_category, 'message')} left out: no category")
    for name, count in compared.unknown_categories.items():
        lines.append(f"{counted(count, 'message')} left out: the model has no category {name!r}")
    return lines
