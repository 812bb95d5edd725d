"""`trm email classify`: a line per message, whatever the mail and its files are called."""

import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from letters import TOPICS, letter

from trm.cli import cli

HOSTILE = "\x1b]0;title\x07\x1b[2J"


def classify(run, *arguments):
    result = CliRunner().invoke(
        cli, ["email", "classify", str(run), *map(str, arguments)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def hostile_mailbox(directory):
    """Write messages whose subject and whose file name would clear the terminal and begin a new line."""
    plain = letter("work", 5)
    directory.mkdir()
    subject = b"Subject: =?utf-8?q?=1B]0;title=07=1B[2J=0D=0Aspam?="
    (directory / "subject.eml").write_bytes(re.sub(rb"Subject: .*", lambda _: subject, plain))
    (directory / f"{HOSTILE}\nspam 100.0%.eml").write_bytes(plain)
    (directory / f"{HOSTILE}\r.eml").write_bytes(b"")  # which is skipped with a reason
    return directory


@pytest.mark.slow
def test_codes_in_subjects_and_names_of_files_are_shown_and_not_sent(trained, tmp_path):
    text = classify(trained[0], hostile_mailbox(tmp_path / "mailbox"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    lines = text.splitlines()
    assert len(lines) == 3, "a name cannot imitate a line"
    assert all(r"\x1b]0;title\x07\x1b[2J" in line for line in lines)
    assert sum(line.startswith("skipped") for line in lines) == 1


def test_json_has_the_exact_names(trained, tmp_path):
    mailbox = hostile_mailbox(tmp_path / "mailbox")
    found = [json.loads(line)["path"] for line in classify(trained[0], mailbox, "--json").splitlines()]
    assert any(f"{HOSTILE}\nspam 100.0%.eml" in path for path in found)


def test_noise_and_unknown_languages_are_unsure_whatever_their_confidence(trained, tmp_path):
    """They share a few short words with any mail."""
    for size in (30, 3000, 30_000):
        (tmp_path / f"{size}.eml").write_bytes(random.Random(size).randbytes(size))
    text = "Subject: =?utf-8?b?0J/RgNC40LLQtdGC?=\n\n" + "добрый день как ваши дела сегодня вечером " * 9
    (tmp_path / "language.eml").write_bytes(text.encode())
    (tmp_path / "letter.eml").write_bytes(letter("work", 5))
    lines = classify(trained[0], tmp_path, "--max-error", "99%", "--json").splitlines()
    found = {Path(each["path"]).name: each for each in map(json.loads, lines)}
    assert {name for name, each in found.items() if each["unsure"]} == found.keys() - {"letter.eml"}
    assert len(found) == 5
    assert set(found["letter.eml"]["subject"].split()) <= set(TOPICS["work"])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["explain", "eval"])
def test_the_page_that_was_written_is_named(trained, tmp_path, command):
    mailbox = trained[0].parent / "mailbox"
    source = next(mailbox.rglob("*.eml")) if command == "explain" else mailbox
    words = ["email", command, str(trained[0]), str(source), "--html", str(tmp_path / "page.html")]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.stdout.splitlines()[-1] == f"Page: {tmp_path / 'page.html'}"
    facts = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).stdout)
    assert facts["html"] == str(tmp_path / "page.html"), "a page of this command is replaced"
    (tmp_path / "page.html").write_text("<!doctype html><title>My own page</title>")
    assert CliRunner().invoke(cli, words).exit_code == 1
