"""Measure how long one answer of `trm email serve` takes: `python bench/mail_server.py RUN MAIL [COUNT]`.

A server with one parser is started as a user would start it. COUNT messages of MAIL (500, spread evenly) are
sent one after the other. A time is measured from before the client connects until it has the answer; reading
the file and starting a client are not part of it. The last lines have the time of whole `trm email filter`
processes, with the server and without.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trm.mail.sockets import request_answer
from trm.tasks.documents.mailboxes import Message, read_messages

TRM = Path(sys.executable).with_name("trm")
WARM_UP = 20
PROCESSES = 20


def chosen_messages(mail: str, count: int) -> list[Message]:
    messages = [message for message in read_messages(mail) if not message.problem]
    step = max(1, len(messages) // count)
    return messages[::step][:count]


def milliseconds(values: list[float]) -> str:
    ordered = sorted(1000 * value for value in values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return (
        f"median {statistics.median(ordered):.1f} ms, 95th percentile {high:.1f} ms, "
        f"maximum {ordered[-1]:.1f} ms over {len(ordered)}"
    )


def seconds_of_answers(socket: Path, messages: list[Message]) -> list[float]:
    times = []
    for message in messages:
        started = time.perf_counter()
        request_answer(socket, message.raw, message.key)
        times.append(time.perf_counter() - started)
    return times


def seconds_of_filters(arguments: list[str], messages: list[Message]) -> list[float]:
    command = [TRM, "email", "filter", *arguments]
    times = []
    for message in messages[:PROCESSES]:
        started = time.perf_counter()
        subprocess.run(command, input=message.raw, capture_output=True, check=True)
        times.append(time.perf_counter() - started)
    return times


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(run: str, mail: str, count: int = 500) -> None:
    messages = chosen_messages(mail, count)
    sizes = sorted(len(message.raw) for message in messages)
    median = sizes[len(sizes) // 2]
    show(f"{len(messages)} messages of {mail}, {sizes[0]:,} to {sizes[-1]:,} bytes, median {median:,}")
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "socket"
        command = [TRM, "email", "serve", run, "--socket", socket, "--jobs", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            server.stdout.readline()
            seconds_of_answers(socket, messages[:WARM_UP])
            show(f"an answer: {milliseconds(seconds_of_answers(socket, messages))}")
            served = seconds_of_filters(["--socket", str(socket)], messages)
            show(f"filter with a server: {milliseconds(served)}")
            server.terminate()
    show(f"filter alone: {milliseconds(seconds_of_filters([run], messages))}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
