"""`trm email classify`, `filter` and `explain`, and the server that answers the first two."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from macbook_optimization.errors import DataError
from macbook_optimization.output_files import OutputFile
from macbook_optimization.units import counted
from trm.cli.common import PATH, OutputOption, force_option, json_option, show, showing
from trm.cli.email_options import (
    MAX_ERROR,
    SOURCES,
    error_option,
    format_named,
    format_option,
    jobs_option,
    num_jobs,
    opened_classifier,
    page_facts,
    page_line,
)
from trm.mail.page import MAIL_PAGE

if TYPE_CHECKING:
    from types import FrameType

    from trm.mail.answers import Answer
    from trm.mail.serving import Server

socket_option = click.option(
    "--socket", "socket_path", type=PATH,
    help="Use the server at this socket (`trm email serve`) instead of loading a model; leave RUN out.",
)  # fmt: skip


@click.command()
@click.argument("run", type=PATH, required=False)
@click.argument("paths", nargs=-1, type=SOURCES)
@socket_option
@click.option("--full", is_flag=True,
              help="Use the recursive path also where the linear path is certain; slower.")  # fmt: skip
@error_option
@format_option
@jobs_option
@json_option
def classify(
    run: Path | None,
    paths: tuple[str, ...],
    socket_path: Path | None,
    full: bool,
    max_error: float,
    format_: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Classify the messages of PATHS: files, directories, mailboxes, or - for standard input.

    Unsure answers are marked with a question mark. With --json, one object per message.
    """
    if socket_path is not None:
        _refuse_options_of_the_server(MAX_ERROR, "jobs", "full")
        sources = paths if run is None else (str(run), *paths)
        _require(sources, "PATHS")
        for answer in _answers_of_server(sources, socket_path, format_):
            show(answer.to_json(), as_json, answer.text())
        return
    _require(run, "RUN")
    _require(paths, "PATHS")
    assert run is not None
    with opened_classifier(run, jobs, full=full) as classifier:
        from trm.mail.answers import answer_of
        from trm.tasks.documents.sources import messages_of

        for read, decision in classifier.decide(messages_of(paths, format_named(format_)), max_error):
            answer = answer_of(read, decision)
            show(answer.to_json(), as_json, answer.text())


@click.command("filter")
@click.argument("run", type=PATH, required=False)
@socket_option
@error_option
def filter_message(run: Path | None, socket_path: Path | None, max_error: float) -> None:
    """Copy one message from standard input to standard output, with headers that say its category.

    X-TRM-Category, X-TRM-Confidence and X-TRM-Unsure come before all other headers; every other byte stays as
    it is. If something is wrong, nothing is written and the exit code is 1: mail programs then keep the
    original.
    """
    from trm.mail.filtering import with_headers
    from trm.tasks.documents.mime import MAX_MESSAGE_BYTES

    if socket_path is not None:
        _refuse_options_of_the_server(MAX_ERROR, "run")
    else:
        _require(run, "RUN")
    raw = sys.stdin.buffer.read(MAX_MESSAGE_BYTES + 1)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise DataError(f"The message is larger than {MAX_MESSAGE_BYTES // 2**20} MiB")
    if socket_path is not None:
        from trm.mail.sockets import request_answer

        sys.stdout.buffer.write(with_headers(raw, request_answer(socket_path, raw, "-").choice))
        return
    assert run is not None
    with opened_classifier(run, 1) as classifier:
        from trm.tasks.documents.mailboxes import Message

        ((_, decision),) = classifier.decide([Message("-", raw)], max_error)
    sys.stdout.buffer.write(with_headers(raw, decision))


def _require(value: object, name: str) -> None:
    if not value:
        raise click.UsageError(f"Missing argument '{name}'.")


def _refuse_options_of_the_server(*names: str) -> None:
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            shown = "RUN" if name == "run" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{shown} is set by the server: it cannot be given with --socket.")


def _answers_of_server(sources: Iterable[str], socket_path: Path, format_: str) -> Iterable[Answer]:
    from trm.mail.answers import skipped
    from trm.mail.sockets import request_answer
    from trm.tasks.documents.mailboxes import read_messages

    for source in sources:
        for message in read_messages(source, format_named(format_)):
            if message.problem:
                yield skipped(message.key, message.problem)
            else:
                yield request_answer(socket_path, message.raw, message.key)


@click.command()
@click.argument("run", type=PATH)
@click.argument("path", type=SOURCES)
@click.option("--html", type=OutputOption(MAIL_PAGE), help="Also write the reasons to this page.")
@force_option
@error_option
@format_option
@json_option
def explain(
    run: Path, path: str, html: OutputFile | None, max_error: float, format_: str, as_json: bool
) -> None:
    """Show which words and fields decided about the first message of PATH."""
    from trm.mail.answers import answer_of
    from trm.mail.explain import as_html, as_text
    from trm.mail.explain import explain as find_reasons
    from trm.tasks.documents.sources import messages_of

    with opened_classifier(run, 1) as classifier:
        found = classifier.decide(messages_of([path], format_named(format_)), max_error)
        read, decision = next(found, (None, None))
        if read is None or decision is None:
            reason = "there is no message" if read is None else read.features.mail.reason
            raise DataError(f"{path} cannot be classified: {reason}")
        rival, reasons = find_reasons(classifier.model, read.features)
    if html is not None:
        html.write(as_html(read.message.key, decision, rival, reasons).encode(errors="backslashreplace"))
    facts = {
        **answer_of(read, decision).to_json(),
        "rival": rival,
        "reasons": [asdict(reason) for reason in reasons],
        **page_facts(html),
    }
    show(facts, as_json, as_text(decision, rival, reasons) + page_line(html))


@click.command()
@click.argument("run", type=PATH)
@click.option("--socket", "socket_path", type=PATH, required=True, help="Path of the new Unix socket.")
@click.option(
    "--idle-seconds", type=click.FloatRange(0.1, 1e8),
    help="End after N seconds without a request [default: never].",
)  # fmt: skip
@error_option
@jobs_option
@json_option
def serve(
    run: Path,
    socket_path: Path,
    idle_seconds: float | None,
    max_error: float,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Load the model of RUN once, and answer requests at a Unix socket that only you can use.

    `trm email classify` and `trm email filter` use it with --socket PATH. What `learn` and `forget` change is
    noticed. Ctrl-C or SIGTERM ends the server and removes the socket.
    """
    from trm.mail.sockets import listening

    facts = {"run": str(run), "socket": str(socket_path)}
    with _exit_on_sigterm(), listening(socket_path) as listener, ExitStack() as stack:
        with showing("Loading the model") as display:
            from trm.mail.serving import ServerLimits, open_server

            classifier = stack.enter_context(opened_classifier(run, 1))
            display.status("Starting the parsers")
            limits = ServerLimits(idle_seconds=idle_seconds)
            server = stack.enter_context(open_server(classifier, num_jobs(jobs), max_error, limits))
        show(facts, as_json, f"Listening at {socket_path}. Ctrl-C ends the server.")
        sys.stdout.flush()
        with _stopped_by_signals(server) as received:
            server.run(listener)
    counts = server.counts
    text = f"Answered {counted(counts.answered, 'request')}; {counts.refused} refused, {counts.lost} lost."
    show({**facts, **asdict(counts)}, as_json, text)
    if signal.SIGINT in received:
        raise KeyboardInterrupt


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, as Ctrl-C does, so that the socket is removed."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    with _handling(handle, signal.SIGTERM):
        yield


@contextmanager
def _stopped_by_signals(server: Server) -> Iterator[list[int]]:
    """Stop the server on SIGINT or SIGTERM; yield the signals. A second one does not wait for answers."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        server.stop()

    with _handling(handle, signal.SIGINT, signal.SIGTERM):
        yield received
