"""`trm watch`, on a run that is being trained in another process."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from contextlib import suppress

import forked
import psutil
import pytest
from recorded import recorded_run
from tiny import FOUR, TINY, TRM

from trm.cli.watch import PLAIN_SECONDS
from trm.runs.directory import only_trainer

START = [TRM, "train", "sudoku-6x6", *FOUR, *TINY, "plan.micro_batch_size=16"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("watched")
    done = forked.run([*START[1:], "--run", "run", "--quiet"], root)
    (root / "stdout").write_text(done.stdout)
    (root / "stderr").write_text(done.stderr)
    return root


def watch(root, *options):
    return forked.run(["watch", "run", *options], root, timeout=60)


def test_a_quiet_run_shows_nothing_but_its_result(finished):
    assert (finished / "stderr").read_text() == ""
    assert (finished / "stdout").read_text().startswith("Trained all steps after step 40")


def test_a_finished_run_is_shown_once_and_the_view_ends(finished):
    done = watch(finished)
    assert done.returncode == 0
    assert "run: finished" in done.stdout
    assert "step 40 of 40, 100%" in done.stdout
    assert "stopped after step 40: all steps are taken" in done.stdout


def test_one_frame_as_json(finished):
    facts = json.loads(watch(finished, "--json").stdout)
    assert facts["state"] == "finished"
    assert facts["step"] == facts["last_step"] == 40
    assert facts["primary_metric"] == "exact_accuracy"


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_locale_without_unicode_and_any_width(finished, columns):
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "COLUMNS": columns,
        "NO_COLOR": "1",
    }
    command = [TRM, "watch", "run", "--once"]
    done = subprocess.run(command, cwd=finished, capture_output=True, text=True, env=environment)
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines())) <= int(columns)


@pytest.mark.slow
def test_without_a_terminal_the_first_frame_comes_at_once(tmp_path):
    run = recorded_run(tmp_path / "run", stopped=False)
    with only_trainer(run.path):
        began = time.monotonic()
        command = [TRM, "watch", "run"]
        viewer = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert b"run: running" in viewer.stdout.readline()
            assert time.monotonic() - began < PLAIN_SECONDS
        finally:
            viewer.kill()
            viewer.communicate()


def test_a_directory_that_is_not_a_run_is_refused(tmp_path):
    done = watch(tmp_path, "--once")
    assert done.returncode == 1
    assert "is not a run" in done.stderr


@pytest.mark.slow
def test_a_run_is_watched_through_its_death_and_resumption(tmp_path):
    """The viewer is on a terminal of its own; the trainer and its supervisor are killed and started again."""
    start = [*START, "training.max_steps=4000", "--run", "run", "--quiet"]
    trainer = subprocess.Popen(start, cwd=tmp_path, start_new_session=True)
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    screen, slave = pty.openpty()
    viewer = subprocess.Popen([TRM, "watch", "run"], cwd=tmp_path, stdout=slave, stderr=slave)
    try:
        output = Output(screen)
        until(lambda: output.has("run: running"))
        kill_group(trainer)
        until(lambda: output.has("run: crashed"))
        trainer = subprocess.Popen(start, cwd=tmp_path, start_new_session=True)
        output.text = ""
        until(lambda: output.has("run: running"))
        viewer.send_signal(signal.SIGKILL)
        step = last_step(tmp_path)
        until(lambda: last_step(tmp_path) > step)  # training continues without its viewer
    finally:
        viewer.kill()
        kill_group(trainer)


PLAIN = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3\d|4\d|9\d|10\d)(?:;[\d;]*)?m")


@pytest.mark.slow
def test_training_in_a_terminal_without_unicode_and_colour(tmp_path):
    """The live view of the command that trains, which redraws a real terminal of 60 columns."""
    screen, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    command = [*START, "training.max_steps=500", "--run", "run"]
    environment = {**os.environ, **PLAIN, "TERM": "xterm-256color"}
    trainer = subprocess.Popen(command, cwd=tmp_path, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    output = Output(screen)
    until(lambda: output.has("The run is in") or trainer.poll() is not None, seconds=60)
    assert trainer.wait(30) == 0, output.text
    assert re.search(r"step [\d,]+ of 500", output.text), "the live view"
    assert "learning rate" in output.text
    assert "\x1b[J" in output.text, "it is redrawn in place"
    assert output.text.isascii()
    assert not COLOUR.search(output.text)


@pytest.mark.slow
def test_the_live_view_follows_a_terminal_that_is_resized(tmp_path):
    """The terminal sends SIGWINCH to the command and its trainer, as it is the one that controls them."""
    screen, slave = pty.openpty()
    resize(screen, 200)
    fixed_sizes = ("COLUMNS", "LINES")  # which hide that of the terminal; parallel tests have them
    inherited = {name: value for name, value in os.environ.items() if name not in fixed_sizes}
    trainer = subprocess.Popen(
        [*START, "training.max_steps=1000000", "--run", "run"],
        cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**inherited, "TERM": "xterm-256color"}, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(slave)
    try:
        output = Output(screen)
        for columns in (200, 40, 200):
            resize(screen, columns)
            output.text = ""
            until(lambda columns=columns: fits(output, columns))
            step = last_step(tmp_path)
            output.text = ""
            until(lambda: len(frames(output)) >= 3)
            assert all(max(map(len, frame)) < columns for frame in frames(output))
            until(lambda step=step: last_step(tmp_path) > step)
            until(lambda: "learning rate" in " ".join(frames(output)[-1]))
        trainer.send_signal(signal.SIGINT)
        assert trainer.wait(30) == 130
    finally:
        kill_group(trainer)


def take_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def resize(terminal, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def frames(output):
    """Return the lines of every complete frame of a live view."""
    output.has("")
    complete = re.findall(r"\x1b\[\?7l\r(.*?)\x1b\[J\x1b\[\?7h", output.text, re.DOTALL)
    return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frame).split("\r\n") for frame in complete]


def fits(output, columns):
    """Whether the newest frame of the view was made for this width: a wide terminal has wide lines."""
    newest = (frames(output) or [[""]])[-1]
    widest = max(map(len, newest))
    return "step" in newest[0] and (widest >= 60 if columns > 60 else widest < columns)


@pytest.mark.slow
def test_training_without_a_terminal_unicode_and_colour(tmp_path):
    command = [*START, "training.max_steps=400", "--run", "run"]
    environment = {**os.environ, **PLAIN, "COLUMNS": "60"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, encoding="utf-8", env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Trained all steps after step 400" in done.stdout
    for text in (done.stdout, done.stderr):
        assert text.isascii()
        assert "\x1b" not in text


def kill_group(process):
    for each in [process.pid, *trainers_of(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()


def trainers_of(pid):
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Output:
    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.text = ""
        os.set_blocking(descriptor, False)

    def has(self, words):
        with suppress(OSError):  # nothing to read, or nobody has the terminal open any more
            self.text += os.read(self.descriptor, 1 << 16).decode(errors="replace")
        return words in self.text


def last_step(root):
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["step"]


def until(condition, seconds=30.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.1)
