"""Names that others chose cannot control the terminal: whatever prints them, their codes are shown."""

import re
import shutil
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[3]
EARLIER = ROOT / "tests" / "fixtures" / "earlier"
HOSTILE = "\x1b]0;title\x07\x1b[2J\rname"
SHOWN = r"\x1b]0;title\x07\x1b[2J\rname"


def trm(*arguments, cwd, given=""):
    return forked.run(arguments, cwd, given, timeout=60)


@pytest.fixture
def workspace(tmp_path):
    shutil.copytree(EARLIER / "mixer", tmp_path / HOSTILE)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["runs", "."],
        ["runs", f"{HOSTILE}/nowhere"],
        ["predict", HOSTILE, HOSTILE],
        ["predict", f"{HOSTILE}/nowhere", "1"],
        ["predict", HOSTILE, "1", HOSTILE],
        ["eval", HOSTILE, "--data", HOSTILE],
        ["checkpoint", "verify", f"{HOSTILE}/nowhere"],
        ["checkpoint", "export", HOSTILE, HOSTILE],
        ["data", "info", HOSTILE],
        ["data", "build", "sudoku", "--from", HOSTILE, "--out", "new"],
        ["data", "build", "sudoku", "--size", "4", "--train", "2", "--test", "2", "--out", f"{HOSTILE}.set"],
        ["recipes", "show", HOSTILE],
        ["recipes", "copy", "sudoku-6x6", f"{HOSTILE}.yaml"],
        ["train", "sudoku-6x6", f"data.path={HOSTILE}", "--run", "new"],
        ["train", HOSTILE, f"{HOSTILE}=1"],
        ["email", "samples", f"{HOSTILE}.mail"],
        ["email", "classify", HOSTILE, HOSTILE],
        [HOSTILE],
    ],
    ids=" ".join,
)
def test_codes_in_names_are_shown_and_not_sent(workspace, arguments):
    done = trm(*arguments, cwd=workspace)
    text = done.stdout + done.stderr
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert r"\x1b" in text
    assert r"\x07" in text


def test_json_has_the_exact_name(workspace):
    done = trm("runs", ".", "--json", cwd=workspace)
    assert r"\u001b]0;title\u0007\u001b[2J\rname" in done.stdout


def test_a_bad_line_of_standard_input_is_shown_with_codes(workspace):
    done = trm("predict", HOSTILE, "-", cwd=workspace, given="\x1b[31m" + "." * 11 + "\n")
    assert done.returncode == 1
    assert "line 1: " in done.stderr
    assert "\x1b" not in done.stderr


def test_commands_print_through_one_function():
    """Which shows control characters as codes."""
    sources = [*(ROOT / "src").rglob("*.py")]
    assert len(sources) > 100
    printing = [
        path.name for path in sources if re.search(r"\bclick\.s?echo|(?<![.\w])print\(", path.read_text())
    ]
    assert printing == ["common.py"]
