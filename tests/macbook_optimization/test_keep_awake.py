"""The machine stays awake while it is held, with a tool that ends with the process; stand-ins on PATH."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from macbook_optimization.keep_awake import KeepAwake, inhibitor

# `caffeinate -i -w PID` ends when the process PID does; `systemd-inhibit ... cat` when `cat` does.
CAFFEINATE = '#!/bin/sh\necho "$@" > "$0.called"\nwhile kill -0 "$3" 2>/dev/null; do sleep 0.05; done\n'
SYSTEMD_INHIBIT = '#!/bin/sh\necho "$@" > "$0.called"\nshift 4\n"$@"\n'
TOOLS = {True: ("caffeinate", CAFFEINATE), False: ("systemd-inhibit", SYSTEMD_INHIBIT)}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a script on PATH in place of a tool of the system."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def put(name, script):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
        return tmp_path / name

    return put


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("macos", [True, False])
def test_the_tool_runs_while_the_machine_is_held_awake(install, macos):
    tool = install(*TOOLS[macos])
    warnings = []
    with KeepAwake(warnings.append, macos=macos) as awake:
        process = awake.process
        assert process.poll() is None
    assert wait_until(lambda: process.poll() is not None)
    assert warnings == []
    called = tool.with_name(f"{tool.name}.called").read_text().split()
    assert called == list(inhibitor(os.getpid(), macos=macos)[1:])


def test_the_commands_are_those_of_the_manuals():
    assert inhibitor(42, macos=True) == ("caffeinate", "-i", "-w", "42")
    assert inhibitor(42, macos=False)[:2] == ("systemd-inhibit", "--what=idle:sleep")


@pytest.mark.parametrize("macos", [True, False])
def test_the_tool_ends_with_a_process_that_is_killed(install, tmp_path, macos):
    install(*TOOLS[macos])
    script = f"""
        import time
        from macbook_optimization.keep_awake import KeepAwake
        awake = KeepAwake(print, macos={macos})
        awake.hold()
        print(awake.process.pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        tool = int(trainer.stdout.readline())
        below = [child.pid for child in psutil.Process(tool).children(recursive=True)]
        assert psutil.pid_exists(tool)
        trainer.send_signal(signal.SIGKILL)
    assert wait_until(lambda: is_gone(tool)), "the tool outlived the trainer"
    assert macos or wait_until(lambda: all(is_gone(pid) for pid in below))


@pytest.mark.parametrize("macos", [True, False])
def test_a_missing_tool_is_a_warning(tmp_path, monkeypatch, macos):
    monkeypatch.setenv("PATH", str(tmp_path))
    warnings = []
    with KeepAwake(warnings.append, macos=macos) as awake:
        assert awake.process is None
    name = TOOLS[macos][0]
    expected = f"warning: plan.keep_awake: {name} does not work here (No such file or directory)."
    assert warnings == [expected]


def test_a_tool_that_fails_is_a_warning_with_its_reason(install):
    install("systemd-inhibit", '#!/bin/sh\necho "Failed to inhibit: Access denied" >&2\nexit 1\n')
    warnings = []
    with KeepAwake(warnings.append, macos=False):
        pass
    assert warnings == [
        "warning: plan.keep_awake: systemd-inhibit does not work here (Failed to inhibit: Access denied)."
    ]


def test_a_tool_that_ends_early_is_a_warning(install):
    install("systemd-inhibit", "#!/bin/sh\nsleep 0.6\nexit 3\n")
    warnings = []
    with KeepAwake(warnings.append, macos=False) as awake:
        awake.process.wait()
    assert warnings == [
        "warning: plan.keep_awake: systemd-inhibit does not work here (it ended early, with status 3)."
    ]


def test_it_can_be_released_and_held_again(install):
    install(*TOOLS[False])
    awake = KeepAwake(print, macos=False)
    with awake:
        first = awake.process
        awake.release()
        assert first.poll() is not None
        awake.hold()
        second = awake.process
        assert second.poll() is None
    assert second.poll() is not None
