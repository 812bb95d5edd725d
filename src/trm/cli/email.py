"""`trm email`: train a private mail classifier, and use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.output_files import HTML, OutputFile, check_new_directory
from macbook_optimization.units import counted
from trm.cli.common import PATH, OutputOption, force_option, json_option, show, showing

if TYPE_CHECKING:
    from trm.mail.deciding import Classifier
    from trm.mail.model import Decision
    from trm.mail.reading import Read
    from trm.mail.training import Report
    from trm.tasks.documents.mailboxes import Format

SOURCES = click.Path()  # paths, or - for standard input
FORMATS = click.Choice(["auto", "eml", "mbox", "maildir", "directory", "csv", "json", "jsonl"])


def _share(context: click.Context, option: click.Parameter, value: str) -> float:
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
                             help="What MAIL is, if it is not recognised.")  # fmt: skip
jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 256), help="Processes that parse mail [default: one per core]."
)
error_option = click.option(
    "--max-error", callback=_share, default="1%", show_default=True,
    help="Largest share of wrong answers among those that are not unsure.",
)  # fmt: skip


@click.group()
def email() -> None:
    """Train a private classifier on your own mail, and use it. Nothing leaves this machine."""


@email.command()
@click.argument("directory", type=PATH)
@json_option
def samples(directory: Path, as_json: bool) -> None:
    """Write a small made-up mailbox to DIRECTORY, to try the other commands with."""
    from trm.mail.samples import CATEGORIES, write_samples

    check_new_directory(directory)
    count = write_samples(directory)
    facts = {"path": str(directory), "messages": count, "categories": list(CATEGORIES)}
    show(facts, as_json, f"{directory}: {count} messages in {len(CATEGORIES)} folders")


@email.command("train")
@click.argument("mail", nargs=-1, required=True, type=SOURCES)
@click.option("--run", "run", type=PATH, required=True, help="New run directory.")
@click.option("--mapping", type=PATH, help="YAML file that says which folders and labels are which category.")
@click.option(
    "--held-out", callback=_share, default="10%", show_default=True,
    help="Share of the messages to measure on instead of training.",
)  # fmt: skip
@click.option(
    "--split", type=click.Choice(["random", "time", "thread"]), default="random", show_default=True,
    help="How messages are held out: at random, the newest, or whole conversations.",
)  # fmt: skip
@click.option("--min-df", type=click.IntRange(1, 1000), default=2, show_default=True,
              help="Keep n-grams of at least this many messages: more reveals less.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what is held out.")
@error_option
@format_option
@jobs_option
@json_option
def train_email(
    mail: tuple[str, ...],
    run: Path,
    mapping: Path | None,
    held_out: float,
    split: str,
    min_df: int,
    seed: int,
    max_error: float,
    format_: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Train on MAIL: an mbox, a Maildir, a directory whose folders are the categories, or a table.

    The categories are the folders, the labels of a Google Takeout, or what a mapping makes of both.
    """
    with showing("Reading the mail") as display:
        from macbook_optimization.performance_reporting import available_cores
        from trm.mail.training import MailOptions, train_mail
        from trm.tasks.documents.labels import load_map
        from trm.tasks.documents.splits import SplitRules

        options = MailOptions(
            format=_format(format_),
            mapping=None if mapping is None else load_map(mapping),
            min_documents=min_df,
            held_out=SplitRules(split, held_out, seed),  # type: ignore[arg-type]
            max_error=max_error,
            jobs=jobs or available_cores(),
        )
        _, report = train_mail(mail, run, options, display)
    show(report.to_json(), as_json, _report_text(report))


def _report_text(report: Report) -> str:
    lines = []
    if report.held_out is not None:
        found = report.held_out
        lines += [
            f"On {found.messages:,} messages that were held out:",
            f"  {'':24}{'accuracy':>9}{'macro-F1':>10}",
            f"  {'linear path':24}{found.linear.accuracy:>9.1%}{found.linear.macro_f1:>10.3f}",
            f"  {'TF-IDF + LinearSVC':24}{found.baseline.accuracy:>9.1%}{found.baseline.macro_f1:>10.3f}",
            f"  {found.decided:.1%} decided, {found.error_of_decided:.1%} of those wrong",
        ]
    if report.drift is not None and report.drift.breaks_promise:
        drift = report.drift
        lines.append(
            f"Warning: mail changes with time. A model of the older messages was wrong about "
            f"{drift.newest_error:.1%} of the newest that it decided, instead of {drift.promised_error:.1%}."
        )
    lines.append(f"The model is in {report.run}; it took {report.seconds:.0f} s.")
    lines.append(f"Try: trm email classify {report.run} PATH...")
    return "\n".join(lines)


@email.command()
@click.argument("run", type=PATH)
@click.argument("paths", nargs=-1, required=True, type=SOURCES)
@error_option
@format_option
@jobs_option
@json_option
def classify(
    run: Path, paths: tuple[str, ...], max_error: float, format_: str, jobs: int | None, as_json: bool
) -> None:
    """Classify the messages of PATHS: files, directories, mailboxes, or - for standard input.

    A question mark stands beside an answer that is unsure. With --json, one object per message.
    """
    from trm.tasks.documents.sources import messages_of

    with _classifier(run, jobs) as classifier:
        for read, decision in classifier.decide(messages_of(paths, _format(format_)), max_error):
            show(_facts(read, decision), as_json, _line(read, decision))


@email.command("filter")
@click.argument("run", type=PATH)
@error_option
def filter_message(run: Path, max_error: float) -> None:
    """Copy one message from standard input to standard output, with headers that say its category.

    X-TRM-Category, X-TRM-Confidence and X-TRM-Unsure come before all other headers; every other byte stays as
    it is. If something is wrong, nothing is written and the exit code is 1: mail programs then keep the
    original.
    """
    from trm.mail.filtering import with_headers
    from trm.tasks.documents.mailboxes import Message
    from trm.tasks.documents.mime import MAX_MESSAGE_BYTES

    raw = sys.stdin.buffer.read(MAX_MESSAGE_BYTES + 1)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise DataError(f"The message is larger than {MAX_MESSAGE_BYTES // 2**20} MiB")
    with _classifier(run, 1) as classifier:
        ((_, decision),) = classifier.decide([Message("-", raw)], max_error)
    sys.stdout.buffer.write(with_headers(raw, decision))


@email.command()
@click.argument("run", type=PATH)
@click.argument("path", type=SOURCES)
@click.option("--html", type=OutputOption(HTML), help="Also write the reasons to this page.")
@force_option
@error_option
@format_option
@json_option
def explain(
    run: Path, path: str, html: OutputFile | None, max_error: float, format_: str, as_json: bool
) -> None:
    """Show which words and fields decided about the first message of PATH."""
    from trm.mail.explain import as_html, as_text
    from trm.mail.explain import explain as find_reasons
    from trm.tasks.documents.sources import messages_of

    with _classifier(run, 1) as classifier:
        found = classifier.decide(messages_of([path], _format(format_)), max_error)
        read, decision = next(found, (None, None))
        if read is None or decision is None:
            reason = "there is no message" if read is None else read.features.mail.reason
            raise DataError(f"{path} cannot be classified: {reason}")
        bags = classifier.model.bags([read.features.counts])
        rival, reasons = find_reasons(classifier.model, bags, 0)
    if html is not None:
        html.write(as_html(read.message.key, decision, rival, reasons).encode())
    facts = {**_facts(read, decision), "rival": rival, "reasons": [asdict(reason) for reason in reasons]}
    show(facts, as_json, as_text(decision, rival, reasons))


@email.command()
@click.argument("run", type=PATH)
@click.argument("category")
@click.argument("paths", nargs=-1, required=True, type=SOURCES)
@format_option
@jobs_option
@json_option
def learn(
    run: Path, category: str, paths: tuple[str, ...], format_: str, jobs: int | None, as_json: bool
) -> None:
    """Correct the model: the messages of PATHS are of CATEGORY.

    Takes seconds, needs no training, and can be taken back with `trm email forget`. Messages that are
    answered right already change nothing.
    """
    from trm.tasks.documents.sources import messages_of

    with _classifier(run, jobs) as classifier:
        learned, right = classifier.learn(messages_of(paths, _format(format_)), category)
    facts = {"run": str(run), "category": category, "learned": learned, "right_already": right}
    show(facts, as_json, f"Learned {counted(learned, 'message')} as {category}; {right} right already.")


@email.command()
@click.argument("run", type=PATH)
@click.argument("paths", nargs=-1, required=True, type=SOURCES)
@format_option
@json_option
def forget(run: Path, paths: tuple[str, ...], format_: str, as_json: bool) -> None:
    """Take back what `trm email learn` learned from the messages of PATHS."""
    from trm.mail.corrections import key_of
    from trm.tasks.documents.sources import messages_of

    with _classifier(run, 1) as classifier:
        forgotten = classifier.forget(key_of(each.raw) for each in messages_of(paths, _format(format_)))
    show({"run": str(run), "forgotten": forgotten}, as_json, f"Forgot {counted(forgotten, 'correction')}.")


@contextmanager
def _classifier(run: Path, jobs: int | None) -> Iterator[Classifier]:
    from macbook_optimization.performance_reporting import available_cores
    from trm.mail.deciding import open_classifier

    with open_classifier(run, jobs or available_cores()) as classifier:
        yield classifier


def _format(name: str) -> Format:
    from trm.tasks.documents.mailboxes import FORMATS

    return next(each for each in FORMATS if each == name)


def _facts(read: Read, decision: Decision | None) -> JsonObject:
    mail = read.features.mail
    return {
        "path": read.message.key,
        "category": None if decision is None else decision.category,
        "confidence": None if decision is None else decision.confidence,
        "unsure": decision is None or decision.unsure,
        "verdict": mail.verdict,
        "reason": mail.reason or None,
    }


def _line(read: Read, decision: Decision | None) -> str:
    mail = read.features.mail
    if decision is None:
        return f"{'skipped':16} {'':6}  {read.message.key}  ({mail.reason})"
    unsure = "?" if decision.unsure else " "
    answer = f"{decision.category:16} {decision.confidence:6.1%}{unsure}"
    return f"{answer} {read.message.key}  {mail.subject[:60]}"
