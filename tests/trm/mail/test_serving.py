"""The server: the answers of `classify`, whatever other clients do at the same time."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
import psutil
import pytest
from letters import TOPICS, letter
from tiny import TRM

from macbook_optimization.errors import DataError
from trm.cli import cli
from trm.mail.answers import MAX_SUBJECT, answer_of
from trm.mail.deciding import open_classifier
from trm.mail.serving import ServerLimits, open_server
from trm.mail.sockets import listening, request_answer
from trm.tasks.documents.mailboxes import Message

LIMITS = ServerLimits(clients=4, message_bytes=100_000, receive_seconds=0.5, stop_seconds=5)
MESSAGES = [letter(category, number, 12) for category in TOPICS for number in range(4)]


@contextmanager
def running(run, limits=LIMITS):
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        listener = stack.enter_context(listening(directory / "s"))
        classifier = stack.enter_context(open_classifier(run))
        server = stack.enter_context(open_server(classifier, 1, 0.01, limits))
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(server.stop)
        yield directory / "s", server, thread


@pytest.fixture(scope="module")
def shared(trained, tmp_path_factory):
    """Return the socket of a server, the server, and its run, which tests may correct."""
    run = shutil.copytree(trained[0], tmp_path_factory.mktemp("serve") / "run")
    with running(run) as (path, server, _):
        yield path, server, run


def expected(run, raws):
    with open_classifier(run) as classifier:
        found = classifier.decide([Message("-", raw) for raw in raws], 0.01)
        return [answer_of(read, decision) for read, decision in found]


def connected(path):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(str(path))
    return client


def test_the_answers_are_those_of_classify(shared):
    path, _, run = shared
    assert [request_answer(path, raw, "-") for raw in MESSAGES] == expected(run, MESSAGES)


def test_the_answer_is_one_json_object_in_a_line(shared):
    with connected(shared[0]) as client:
        client.sendall(MESSAGES[0])
        client.shutdown(socket.SHUT_WR)
        line = client.makefile("rb").read()
    assert line.count(b"\n") == 1
    assert line.endswith(b"}\n")
    names = {"path", "category", "confidence", "unsure", "verdict", "reason", "subject"}
    assert set(json.loads(line)) == names


def test_a_client_shows_the_subject_as_classify_does(shared):
    path = shared[0]
    answer = request_answer(path, MESSAGES[0], "letter.eml")
    assert answer.subject
    assert answer.text().endswith(f"letter.eml  {answer.subject[:60]}")
    long = request_answer(path, b"Subject: " + b"long " * 300 + b"\n\nhello", "-")
    assert len(long.subject) == MAX_SUBJECT


def test_several_clients_are_answered_at_once(shared):
    path, _, run = shared
    with ThreadPoolExecutor(12) as pool:  # more than the server takes at a time
        found = list(pool.map(lambda raw: request_answer(path, raw, "-"), MESSAGES * 4))
    assert found == expected(run, MESSAGES) * 4


def test_an_empty_message_is_skipped(shared):
    answer = request_answer(shared[0], b"", "empty.eml")
    assert (answer.path, answer.verdict, answer.category) == ("empty.eml", "skipped", None)


def refusal(client):
    return json.loads(client.makefile("rb").read())["error"]


def test_hostile_clients_delay_only_themselves(shared):
    path, _, run = shared
    with connected(path), connected(path) as slow, connected(path) as gone:
        slow.sendall(b"Subject: never ends\n")
        gone.sendall(MESSAGES[0][:20])
        gone.close()
        started = time.monotonic()
        assert [request_answer(path, MESSAGES[0], "-")] == expected(run, MESSAGES[:1])
        assert time.monotonic() - started < 10
        assert "did not arrive within 0.5 s" in refusal(slow)


@pytest.mark.slow
def test_more_silent_clients_than_there_are_places_only_delay(shared):
    path, _, run = shared
    silent = [connected(path) for _ in range(2 * LIMITS.clients)]
    assert [request_answer(path, MESSAGES[0], "-")] == expected(run, MESSAGES[:1])
    for client in silent:
        client.close()


def test_an_endless_message_is_refused(shared):
    with connected(shared[0]) as client:
        with pytest.raises(ConnectionError):
            client.sendall(b"x" * 10_000_000)
        assert "larger than" in refusal(client)
    with pytest.raises(DataError, match="larger than"):
        request_answer(shared[0], b"x" * 200_000, "-")


def test_clients_that_never_read_their_answer_are_counted(shared):
    path, server, _ = shared
    before = server.counts.lost + server.counts.answered
    for _ in range(5):
        with connected(path) as client:
            client.sendall(MESSAGES[0])
    deadline = time.monotonic() + 20
    while server.counts.lost + server.counts.answered < before + 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_parser_that_is_killed_is_replaced(shared):
    path, _, run = shared
    parsers = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # one that has just ended
            if "spawn_main" in " ".join(each.cmdline()):
                parsers.append(each)
    assert parsers
    for parser in parsers:
        parser.kill()
    assert [request_answer(path, MESSAGES[0], "-")] == expected(run, MESSAGES[:1])


def test_corrections_are_noticed(shared):
    path, _, run = shared
    raw = letter("travel", 5, 12)
    assert request_answer(path, raw, "-").category == "travel"
    with open_classifier(run) as classifier:
        classifier.learn([Message("-", raw)], "spam")
    assert request_answer(path, raw, "-").category == "spam"
    with open_classifier(run) as classifier:
        classifier.forget([classifier.corrections[0].key])
    assert request_answer(path, raw, "-").category == "travel"


def test_damaged_corrections_are_an_answer_not_an_end(shared):
    path, _, run = shared
    (run / "mail" / "corrections.json").write_text("nonsense")
    with pytest.raises(DataError, match=r"corrections.json is damaged"):
        request_answer(path, MESSAGES[0], "-")
    (run / "mail" / "corrections.json").unlink()
    assert [request_answer(path, MESSAGES[0], "-")] == expected(run, MESSAGES[:1])


@pytest.mark.slow
def test_a_server_without_requests_ends(trained):
    with running(trained[0], ServerLimits(idle_seconds=0.3)) as (path, _, thread):
        assert request_answer(path, MESSAGES[0], "-").category == "work"
        thread.join(20)
        assert not thread.is_alive()


def start(run, path, *options):
    process = subprocess.Popen(
        [TRM, "email", "serve", run, "--socket", path, "--json", "--jobs", "1", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ready = json.loads(process.stdout.readline())
    assert ready == {"run": str(run), "socket": str(path)}
    return process


@pytest.mark.slow
def test_the_commands_work_through_a_server(trained, tmp_path):
    run, path = trained[0], tmp_path / "s"
    files = []
    for number, raw in enumerate(MESSAGES[:3]):
        files.append(tmp_path / f"{number}.eml")
        files[-1].write_bytes(raw)
    process = start(run, path)
    try:
        direct = subprocess.check_output([TRM, "email", "classify", run, *files, "--json"])
        served = subprocess.check_output([TRM, "email", "classify", "--socket", path, *files, "--json"])
        assert served == direct
        for arguments in ([run], ["--socket", path]):
            filtered = subprocess.check_output([TRM, "email", "filter", *arguments], input=MESSAGES[0])
            assert filtered.endswith(MESSAGES[0])
            assert filtered.startswith(b"X-TRM-Category: work\n")
        late = connected(path)  # a client that is there when the server ends
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        late.close()
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    assert json.loads(output)["answered"] == 4
    assert sorted(os.listdir(tmp_path)) == ["0.eml", "1.eml", "2.eml"]
    done = subprocess.run(
        [TRM, "email", "filter", "--socket", path], input=MESSAGES[0], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"No server answers" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_server_and_a_kill_leaves_a_socket_that_is_replaced(trained, tmp_path):
    path = tmp_path / "s"
    killed = start(trained[0], path)
    killed.kill()
    killed.communicate()
    assert path.exists()
    process = start(trained[0], path)
    assert request_answer(path, MESSAGES[0], "-").category == "work"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.strip()) == (130, "Stopped.")
    assert not os.listdir(tmp_path)


def test_a_client_loads_no_model(shared, tmp_path):
    (tmp_path / "letter.eml").write_bytes(MESSAGES[0])
    code = (
        "import sys; from trm.cli import cli\n"
        f"cli.main(['email', 'classify', '--socket', {str(shared[0])!r}, {str(tmp_path / 'letter.eml')!r}], "
        "standalone_mode=False)\n"
        "print({'torch', 'numpy', 'safetensors', 'rich'} & set(sys.modules))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.splitlines()[-1] == "set()"
    assert output.startswith("work")


@pytest.mark.parametrize(
    "arguments",
    [
        ("classify",), ("classify", "run"), ("filter",), ("classify", "--socket", "s"),
        ("classify", "--socket", "s", "a.eml", "--max-error", "5%"), ("filter", "run", "--socket", "s"),
        ("serve", "run"),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused(arguments):
    with pytest.raises(click.UsageError):
        cli.main(["email", *arguments], standalone_mode=False)
