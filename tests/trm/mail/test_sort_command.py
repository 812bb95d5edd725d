"""`trm email sort` as a user meets it."""

import json
import os

import click
import pytest
from click.testing import CliRunner
from letters import write_mailbox

from macbook_optimization.errors import DataError
from trm.cli import cli


def sort(*arguments):
    """Return the exit code and the result."""
    command = ["email", "sort", *map(str, arguments), "--json"]
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value or 0, json.loads(done.output)


def names_in(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def maildir(trained, tmp_path):
    """Return a Maildir whose inbox has all messages."""
    source = write_mailbox(tmp_path / "mail", num_each=4, seed=31)
    code, facts = sort(trained[0], source, "--out", tmp_path / "Maildir", "--max-error", "0", "--jobs", 1)
    assert (code, facts["unsure"], facts["categories"]) == (0, 12, {})
    return tmp_path / "Maildir"


@pytest.mark.slow
def test_a_maildir_is_sorted_and_taken_back(trained, maildir):
    before = names_in(maildir)
    options = (trained[0], maildir, "--max-error", "50%", "--jobs", 1)
    _, planned = sort(*options, "--dry-run")
    assert names_in(maildir) == before
    assert planned["dry_run"]
    _, done = sort(*options)
    assert done["moved"] == planned["moved"]
    assert done["moved"]
    for move in done["moved"]:
        assert (maildir / move["to"]).exists()
        assert not (maildir / move["from"]).exists()
    _, elsewhere = sort(*options, "--from-folder", "work")
    assert (elsewhere["moved"], elsewhere["in_place"]) == ([], 4)
    code, undone = sort("--undo", maildir)
    assert (code, undone["moved_back"]) == (0, len(done["moved"]))
    assert names_in(maildir) == before
    assert sort("--undo", maildir) == (0, {"path": str(maildir), "moved_back": 0})


def test_what_cannot_be_taken_back_has_an_exit_code(trained, maildir):
    _, done = sort(trained[0], maildir, "--max-error", "50%", "--jobs", 1)
    gone = done["moved"][0]["to"]
    os.unlink(maildir / gone)
    code, undone = sort("--undo", maildir)
    assert (code, undone["gone"]) == (1, [gone])


def test_other_mail_and_missing_folders_are_refused(trained, maildir, tmp_path):
    with pytest.raises(DataError, match="is not a Maildir"):
        sort(trained[0], tmp_path / "mail")
    with pytest.raises(DataError, match="is not a Maildir"):
        sort("--undo", tmp_path / "mail")
    with pytest.raises(DataError, match=r"has no folder \.nowhere"):
        sort(trained[0], maildir, "--from-folder", "nowhere")
    with pytest.raises(DataError, match="already exists"):
        sort(trained[0], tmp_path / "mail", "--out", maildir)


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("run",), ("run", "mail", "--undo", "mail"), ("--undo", "mail", "--dry-run"),
        ("run", "mail", "--out", "new", "--from-folder", "Work"),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused(arguments):
    with pytest.raises(click.UsageError):
        sort(*arguments)
