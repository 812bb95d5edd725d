"""Standard streams that are closed, full or not read: an error line where possible, and never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import FOUR, TINY, TRM

EARLIER = Path(__file__).parents[2] / "fixtures" / "earlier"
RUNS = ("runs", EARLIER)
UNBUFFERED = "export PYTHONUNBUFFERED=1; "
needs_full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")


def shell(script, cwd, *arguments):
    """Run a script in which "$@" is the command."""
    command = ["sh", "-c", script, "sh", TRM, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code", "reason"),
    [
        ('"$@" >&-', 1, "Bad file descriptor"),
        pytest.param('"$@" >/dev/full', 1, "No space left on device", marks=needs_full_device),
        ('"$@" <&-', 0, None),
        ('"$@" >&- 2>&- <&-', 1, None),
        ('"$@" 2>&-', 0, None),
        pytest.param('"$@" 2>/dev/full', 0, None, marks=needs_full_device),
        pytest.param('"$@" nowhere 2>/dev/full', 2, None, marks=needs_full_device),
    ],
)
def test_output_that_cannot_be_written_is_one_error_line(redirection, code, reason, tmp_path):
    done = shell(redirection, tmp_path, *RUNS)
    assert done.returncode == code
    hint = "hint: Free some disk space.\n" if redirection.endswith(" >/dev/full") else ""
    expected = "" if reason is None else f"error: Cannot write to standard output: {reason}\n{hint}"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("setting", "arguments"),
    [("", ("--help",)), ("", ("train", "--help")), ("", ("--version",)), (UNBUFFERED, ("--help",))],
)
def test_help_that_cannot_be_written_is_one_error_line(setting, arguments, tmp_path):
    done = shell(f'{setting}"$@" >&-', tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr == "error: Cannot write to standard output: Bad file descriptor\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "arguments"), [("", RUNS), (UNBUFFERED, RUNS), (UNBUFFERED, ("--help",))]
)
def test_a_reader_that_leaves_early_ends_the_command_quietly(setting, arguments, tmp_path):
    script = f'{setting}(sleep 0.1; "$@"; echo $? >code) | true'
    done = shell(script, tmp_path, *arguments)
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "code").read_text() == "1\n"


def test_files_do_not_take_the_place_of_closed_streams(tmp_path):
    """Otherwise a message would be written into whatever file is opened first."""
    code = (
        "import os, sys\n"
        "for descriptor in (0, 1, 2): os.close(descriptor)\n"
        "sys.stdin = sys.stdout = sys.stderr = None\n"
        "from trm.cli.streams import flush, open_closed_streams\n"
        "open_closed_streams()\n"
        "with open('file', 'w') as file:\n"
        "    print('a message', file=sys.stderr)\n"
        "    print('a result')\n"
        "    problem = flush(sys.stdout)\n"
        "    file.write(f'{file.fileno() > 2} {problem.strerror} {sys.stdin.read()!r}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "True Bad file descriptor ''"


@pytest.mark.parametrize("arguments", [("runs",), ("train", "sudoku-6x6"), ("doctor",)], ids=" ".join)
def test_a_deleted_working_directory_is_named(arguments, tmp_path):
    (tmp_path / "gone").mkdir()
    done = shell('cd gone && rmdir ../gone && "$@"', tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr == (
        "error: The working directory has been deleted.\nhint: Change to a directory that exists.\n"
    )


@pytest.mark.parametrize(
    "error", ["MemoryError", "ImportError('liba.so: failed to map segment from shared object')"]
)
def test_too_little_memory_is_one_error_line(error, tmp_path):
    done = command_that_raises(error, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: There is not enough memory.\nhint: ")


def command_that_raises(error, cwd):
    code = (
        "import sys, click\n"
        "from trm import cli\n"
        "@cli.cli.command()\n"
        f"def burst(): raise {error}\n"
        "sys.argv = ['trm', 'burst']\n"
        "cli.main()\n"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("error", ["BrokenPipeError(32, 'Broken pipe')", "OSError('a bug')"])
def test_an_error_of_the_system_without_a_path_keeps_its_traceback(error, tmp_path):
    """A broken pipe to a child is not one of standard output."""
    done = command_that_raises(error, tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in burst" in done.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("OSError(28, 'No space left on device')", "No space left on device\nhint: Free some disk space.\n"),
        (
            "PermissionError(13, 'Permission denied', 'file')",
            "Permission denied: file\nhint: Check the permi",
        ),
        ("FileNotFoundError(2, 'No such file or directory', 'x')", "No such file or directory: x\n"),
    ],
)
def test_an_error_of_the_system_that_a_user_can_fix_is_one_error_line(error, text, tmp_path):
    done = command_that_raises(error, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {text}")


def test_an_error_of_the_system_names_the_path(tmp_path):
    done = shell('"$@"', tmp_path, "runs", "x" * 5000)
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert "x" * 5000 in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_not_text_can_be_shown(tmp_path):
    done = shell('"$@" "$(printf "\\377")"', tmp_path, "runs", "--json")
    assert done.returncode == 1
    assert done.stderr.startswith("error: There is no directory \\udcff")


@pytest.mark.slow
@needs_full_device
def test_training_is_saved_when_its_outcome_cannot_be_written(tmp_path):
    done = shell('"$@" >/dev/full', tmp_path, "train", "sudoku-6x6", *FOUR, *TINY, "--run", "run")
    assert done.returncode == 1
    assert "\nerror: Cannot write to standard output: No space left on device\n" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000040" / "manifest.json").is_file()
