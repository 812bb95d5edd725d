"""`trm email`: train a private mail classifier, and use it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.output_files import check_new_directory
from macbook_optimization.terminal_text import align
from macbook_optimization.units import counted
from trm.cli.common import PATH, json_option, show, showing
from trm.cli.email_classify import classify, explain, filter_message, serve
from trm.cli.email_export import export
from trm.cli.email_mailbox import evaluate, sort
from trm.cli.email_options import (
    SOURCES,
    error_option,
    format_named,
    format_option,
    jobs_option,
    mapping_option,
    num_jobs,
    opened_classifier,
    parse_share,
)

if TYPE_CHECKING:
    from trm.mail.network_training import Profile


@click.group()
def email() -> None:
    """Train a private classifier on your own mail, and use it. Nothing leaves this machine."""


@email.command()
@click.argument("directory", type=PATH)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed gives other messages.")
@json_option
def samples(directory: Path, seed: int, as_json: bool) -> None:
    """Write a small made-up mailbox to DIRECTORY, to try the other commands with."""
    from trm.mail.samples import CATEGORIES, write_samples

    check_new_directory(directory)
    count = write_samples(directory, seed=seed)
    facts = {"path": str(directory), "messages": count, "categories": list(CATEGORIES)}
    show(facts, as_json, f"{directory}: {count} messages in {len(CATEGORIES)} folders")


@email.command()
@click.argument("mail", nargs=-1, required=True, type=SOURCES)
@click.option("--out", type=PATH, default=Path("mapping.yaml"), show_default=True, help="New file to write.")
@format_option
@jobs_option
@json_option
def mapping(mail: tuple[str, ...], out: Path, format_: str, jobs: int | None, as_json: bool) -> None:
    """Write a mapping of the folders and labels of MAIL to categories, to be edited and used with --mapping.

    It has every folder and label with its number of messages; common ones are in one of ten categories.
    """
    with showing("Reading the mail") as display:
        from trm.tasks.documents.labels import LabelCounts, write_starter_map
        from trm.tasks.documents.mail import parse_mail
        from trm.tasks.documents.parse_pool import Failure, ParsePool
        from trm.tasks.documents.sources import messages_of

        check_new_directory(out)
        counts = LabelCounts()
        messages = messages_of(mail, format_named(format_), display.update)
        with ParsePool(parse_mail, num_jobs(jobs)) as pool:
            for message, parsed in pool.map(messages):
                if not isinstance(parsed, Failure) and parsed.verdict != "skipped":
                    counts.add(message.labels, parsed.labels)
        write_starter_map(out, counts)
    facts = {"path": str(out), "messages": counts.num_messages}
    described = f"{out} describes {counted(counts.num_messages, 'message')}."
    show(facts, as_json, f"{described} Edit it, then: trm email train MAIL --run RUN --mapping {out}")


@email.command("train")
@click.argument("mail", nargs=-1, required=True, type=SOURCES)
@click.option("--run", "run", type=PATH, required=True, help="New run directory.")
@mapping_option
@click.option(
    "--held-out", callback=parse_share, default="10%", show_default=True,
    help="Share of the messages to measure on instead of training.",
)  # fmt: skip
@click.option(
    "--split", type=click.Choice(["random", "time", "thread"]), default="random", show_default=True,
    help="Choice of the messages that are held out: at random, the newest, or whole conversations.",
)  # fmt: skip
@click.option("--min-df", type=click.IntRange(1, 1000), default=2, show_default=True,
              help="Keep n-grams of at least this many messages: more reveals less.")  # fmt: skip
@click.option("--linear", is_flag=True,
              help="Train the linear path alone: seconds instead of minutes.")  # fmt: skip
@click.option("--profile", type=click.Choice(["compact", "8gb", "16gb", "32gb"]), default="compact",
              show_default=True, help="Size of the recursive path.")  # fmt: skip
@click.option("--recipe", default="email", show_default=True, help="Recipe of the recursive path.")
@click.option("--ensemble", type=click.IntRange(1, 20), default=1, show_default=True, metavar="N",
              help="Train N networks with different seeds, and average them.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override a key of that recipe; may be repeated.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, show_default=True,
              help="Seed of what is held out, and of the recursive path.")  # fmt: skip
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
    linear: bool,
    profile: Profile,
    recipe: str,
    ensemble: int,
    overrides: tuple[str, ...],
    seed: int,
    max_error: float,
    format_: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Train on MAIL: an mbox, a Maildir, a directory whose folders are the categories, or a table.

    The categories are the folders, the labels of a Google Takeout, or what a mapping makes of both. The
    linear path is fitted first, and can be used while the recursive path is still being trained.
    """
    with showing("Reading the mail") as display:
        from trm.mail.network_training import NetworkOptions
        from trm.mail.training import MailOptions, train_mail
        from trm.tasks.documents.labels import load_map
        from trm.tasks.documents.splits import SplitRules

        options = MailOptions(
            format=format_named(format_),
            mapping=None if mapping is None else load_map(mapping),
            min_documents=min_df,
            held_out=SplitRules(split, held_out, seed),  # type: ignore[arg-type]
            max_error=max_error,
            jobs=num_jobs(jobs),
            network=None if linear else NetworkOptions(recipe, profile, overrides, seed, ensemble),
        )
        _, report = train_mail(mail, run, options, display)
    show(report.to_json(), as_json, f"{report.text()}\nTry: trm email classify {run} PATH...")


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

    with opened_classifier(run, jobs) as classifier:
        learned, right = classifier.learn(messages_of(paths, format_named(format_)), category)
    facts = {"run": str(run), "category": category, "learned": learned, "right_already": right}
    show(facts, as_json, f"Learned {counted(learned, 'message')} as {category}; {right} right already.")


@email.command()
@click.argument("run", type=PATH)
@click.argument("paths", nargs=-1, type=SOURCES)
@format_option
@json_option
def corrections(run: Path, paths: tuple[str, ...], format_: str, as_json: bool) -> None:
    """List what `trm email learn` was taught, or only what it was taught about the messages of PATHS.

    The text of a message is not kept, so it is listed by its hash; with PATHS, by its path.
    """
    from trm.mail.corrections import load_corrections, summarise
    from trm.mail.loading import model_directory
    from trm.mail.model import load_model

    directory = model_directory(run)
    model = load_model(directory)
    found = summarise(model, load_corrections(directory, len(model.vocabulary.idf)))
    names = _names_by_key(paths, format_) if paths else {each.key: each.key[:12] for each in found}
    listed = [each for each in found if each.key in names]
    facts = [{**asdict(each), "path": names[each.key] if paths else None} for each in listed]
    rows = [[names[each.key], each.category, f"instead of {each.before}"] for each in listed]
    show(facts, as_json, "\n".join(align(rows)) or "There are no corrections.")


def _names_by_key(paths: tuple[str, ...], format_: str) -> dict[str, str]:
    from trm.mail.corrections import earlier_key_of, key_of
    from trm.tasks.documents.sources import messages_of

    messages = messages_of(paths, format_named(format_))
    return {find(each.raw): each.key for each in messages for find in (key_of, earlier_key_of)}


@email.command()
@click.argument("run", type=PATH)
@click.argument("paths", nargs=-1, required=True, type=SOURCES)
@format_option
@json_option
def forget(run: Path, paths: tuple[str, ...], format_: str, as_json: bool) -> None:
    """Take back what `trm email learn` learned from the messages of PATHS."""
    from macbook_optimization.errors import DataError

    with opened_classifier(run, 1) as classifier:
        forgotten = classifier.forget(_names_by_key(paths, format_))
    if not forgotten:
        raise DataError(
            "There is no correction of these messages to take back.",
            hint="Give the messages that `trm email learn` was given.",
        )
    show({"run": str(run), "forgotten": forgotten}, as_json, f"Forgot {counted(forgotten, 'correction')}.")


for command in (classify, filter_message, explain, serve, sort, evaluate, export):
    email.add_command(command)
