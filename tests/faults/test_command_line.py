"""Every command gets each kind of path that it does not expect in each path option, and standard streams
that are closed, full or narrow: no traceback, no hang, and nothing is written outside the named paths.

The paths are found in the commands themselves, so a new option is covered as soon as it exists.
"""

import fcntl
import gzip
import json
import os
import pty
import random
import shutil
import stat
import struct
import subprocess
import termios
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import forked
import pytest
from tiny import FOUR, TINY, TRM, Recorder, sudoku_dataset

from trm.cli import cli
from trm.cli.common import OutputOption
from trm.mail.samples import write_samples
from trm.mail.training import MailOptions, train_mail

REFUSAL_SECONDS = 10.0
TIMEOUT_SECONDS = 90.0  # of a call that is accepted and does its work
SHORT_SAMPLE = 24  # calls of each test in the short form; more if a kind or a command needs one
MAX_TRAININGS = 2  # in the short form: each takes seconds
GIB = 2**30
UNRELATED = ("home", "tmp")  # directories of the environment, not of the user

# What a valid call needs besides its paths.
SETTINGS = {
    "data build sudoku": ("--size", "4", "--difficulty", "easy", "--train", "6", "--test", "4"),
    "data build maze": ("--size", "5", "--min-path", "3", "--train", "6", "--test", "4"),
    "data build arc": ("--augmentations", "1"),
    "data build email": ("--length", "32", "--vocab-size", "200"),
    "data build email-masked": ("--length", "32", "--vocab-size", "200"),
    "train": ("--max-steps", "1"),
    "eval": ("--depth", "1"),
    "predict": ("--example", "0", "--depth", "1"),
    "bench": ("--repeats", "1"),
    "email serve": ("--idle-seconds", "0.5"),
    "tune": ("--minutes", "0.4", "--trials", "2"),
}
# A valid value for every path of every command; `None` leaves an option out unless it is the one tried.
VALUES = {
    "recipe": "recipe.yaml",
    "dataset": "set",
    "source": "weights.pt",
    "run": "run",
    "train run": "new-run",
    "tune run": "new-run",
    "checkpoint import run": "new-run",
    "checkpoint export file": "new.pt",
    "data build arc test": "tasks.json",
    "out": "new",
    "bench out": None,
    "root": ".",
    "recipes show name": "sudoku-6x6",
    "recipes copy name": "sudoku-6x6",
    "email samples directory": "new",
    "email mapping mail": "mailbox",
    "email mapping out": "new",
    "email train mail": "mailbox",
    "email train run": "new-run",
    **{
        f"email {name} run": "mail-run"
        for name in ("classify", "filter", "explain", "learn", "forget", "sort", "serve", "eval", "export")
    },
    "email export directory": "new",
    "email sort path": "mailbox",
    "email sort out": "new",
    "email serve socket_path": "new",
    "email eval paths": "mailbox",
    "email learn category": "work",
    "paths": "mailbox/work/000.eml",
    "path": "mailbox/work/000.eml",
    "sources": "mailbox",
}
NOT_PATHS = ("name", "category")  # other arguments that a command needs
CHANGED_RUN = "mail-run"  # by corrections
SLOW = ("doctor", "bench", "selfcheck", "tune")  # measure the machine for many seconds, if not refused
OPTIONAL = ("predict dataset", "eval dataset", "train file")


def commands(group=cli, prefix=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield " ".join((*prefix, name)), command
            yield from commands(command, (*prefix, name))
        else:
            yield " ".join((*prefix, name)), command


COMMANDS = dict(commands())


def is_path(parameter):
    return isinstance(parameter.type, click.Path | OutputOption) or parameter.name == "recipe"


def value_of(name, parameter):
    return VALUES.get(f"{name} {parameter.name}", VALUES.get(parameter.name))


def is_given(name, parameter):
    """Return whether a plain call names this path."""
    if f"{name} {parameter.name}" in OPTIONAL:
        return False
    return parameter.required or isinstance(parameter, click.Argument) or f"{name} {parameter.name}" in VALUES


def call(name, tried=None, path=None):
    """Return the arguments of a call in which the parameter `tried` has the value `path`."""
    arguments, options = [], []
    for parameter in COMMANDS[name].params:
        value = path if parameter is tried else None
        is_needed = is_path(parameter) or parameter.name in NOT_PATHS
        if value is None and is_needed and is_given(name, parameter):
            value = value_of(name, parameter)
        if value is None:
            continue
        if isinstance(parameter, click.Argument):
            arguments.append(str(value))
        else:
            options += [parameter.opts[0], str(value)]
    return [*name.split(), *arguments, *options, *SETTINGS.get(name, ())]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Return a directory with a valid file or directory of every kind that a command reads."""
    directory = tmp_path_factory.mktemp("template")
    sudoku_dataset(directory / "set")
    overrides = (*TINY, *FOUR, "evaluation.every_steps=1000", "plan.micro_batch_size=8", "plan.compile=false")
    done = subprocess.run(
        [TRM, "train", "sudoku-6x6", *overrides, "training.max_steps=2", "--run", "run"],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shutil.copyfile(directory / "run" / "recipe.yaml", directory / "recipe.yaml")
    export = [TRM, "checkpoint", "export", "run", "weights.pt"]
    subprocess.run(export, cwd=directory, capture_output=True, check=True)
    pair = {"input": [[1, 2], [3, 4]], "output": [[2, 1], [4, 3]]}
    (directory / "tasks.json").write_text(json.dumps({"task": {"train": [pair], "test": [pair]}}))
    write_samples(directory / "mailbox", num_each=4)
    train_mail([directory / "mailbox"], directory / "mail-run", MailOptions(), Recorder())
    for name in UNRELATED:
        (directory / name).mkdir()
    member = gzip.compress(bytes(GIB // 64))
    (directory / "bomb.csv.gz").write_bytes(member * 64)
    return directory


def make_device(path):
    with suppress(PermissionError):  # /dev/full of its own, so that a fault cannot damage the system's
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        return path
    return Path("/dev/full")


def make_zeros(path):
    with suppress(PermissionError):
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        return path
    return Path("/dev/zero")


def make_unreadable(path):
    path.write_bytes(b"content")
    path.chmod(0)


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(GIB)


KINDS = {
    "missing": lambda path: path / "below",
    "directory": Path.mkdir,
    "fifo": os.mkfifo,
    "full device": make_device,
    "device of zeros": make_zeros,
    "symlink loop": lambda path: path.symlink_to(path.name),
    "dangling symlink": lambda path: path.symlink_to("nowhere/at-all"),
    "unreadable": make_unreadable,
    "empty": Path.touch,
    "1 GiB sparse": make_sparse,
    "gzip bomb": lambda path: path.with_name("bomb.csv.gz"),
    "text": lambda path: path.write_text("a text of the user\n"),
}


@dataclass
class Sandbox:
    directory: Path
    before: dict = field(default_factory=dict)

    @property
    def environment(self):
        inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        own = {"HOME": "home", "TMPDIR": "tmp", "TRM_CACHE_DIR": "home/cache"}
        return inherited | {name: str(self.directory / value) for name, value in own.items()}

    def look(self):
        """Return kind, identity and content marker of every file that belongs to the user."""
        found = {}
        for root, directories, files in os.walk(self.directory):
            if Path(root) == self.directory:
                directories[:] = [name for name in directories if name not in UNRELATED]
            for name in directories + files:
                path = Path(root, name)
                facts = path.lstat()
                is_directory = stat.S_ISDIR(facts.st_mode)
                marker = () if is_directory else (facts.st_ino, facts.st_size, facts.st_mtime_ns)
                found[path.relative_to(self.directory)] = (stat.S_IFMT(facts.st_mode), *marker)
        return found

    def changed(self, named):
        """Return what was created, changed or removed outside the named paths."""
        after = self.look()
        changed = {path for path in {*self.before, *after} if self.before.get(path) != after.get(path)}
        return sorted(
            str(path) for path in changed if not any(path == own or own in path.parents for own in named)
        )


@pytest.fixture
def sandboxes(template, tmp_path):
    """Return a function that copies the template to a new directory."""

    def make(number):
        directory = tmp_path / str(number)
        shutil.copytree(template, directory)
        return Sandbox(directory)

    return make


def sample(calls, full):
    """Return all calls, or in the short form the same few of them in every run.

    The first item of a call is its command, the last is what is tried. The few have every command and every
    trial at least once, and the commands in turn, so that no command with many options fills the sample.
    """
    calls = list(calls)
    if full:
        return calls
    waiting = [each for each in calls if each[0] not in SLOW]
    random.Random(7).shuffle(waiting)
    most = max(SHORT_SAMPLE, len({each[0] for each in waiting}), len({each[-1] for each in waiting}))
    chosen, times = [], Counter()
    while waiting and len(chosen) < most:
        best = min(waiting, key=lambda each: times[each[0]] + times[each[-1]])
        waiting.remove(best)
        chosen.append(best)
        times.update((best[0], best[-1]))
        if times["train"] == MAX_TRAININGS:
            waiting = [each for each in waiting if each[0] != "train"]
    return chosen


def problems_of(attempt, calls, sandboxes, count):
    """Make each call in a sandbox of its own, two at a time; return the problems of those that have any."""

    def run(numbered):
        number, arguments = numbered
        return arguments, attempt(sandboxes(number), *arguments)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, enumerate(calls)))
    for _, problems in results:
        count.add(not problems)
    return {arguments: problems for arguments, problems in results if problems}


def paths_to_try():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if is_path(parameter):
                yield from ((name, parameter.name, kind) for kind in KINDS)


def test_every_command_with_paths_is_known_to_this_test():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if is_path(parameter) and parameter.required:
                assert value_of(name, parameter) is not None, f"{name}: {parameter.name} has no valid value"


def try_path(sandbox, name, parameter_name, kind):
    """Return what went wrong, as a list of texts."""
    parameter = next(each for each in COMMANDS[name].params if each.name == parameter_name)
    odd = sandbox.directory / "odd"
    made = KINDS[kind](odd)
    path = made if isinstance(made, Path) else odd
    sandbox.before = sandbox.look()
    arguments = call(name, parameter, path)
    started = time.monotonic()
    try:
        done = forked.run(arguments, sandbox.directory, env=sandbox.environment, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"hangs: {arguments}"]
    problems = []
    seconds = time.monotonic() - started
    if "Traceback" in done.stderr or done.returncode not in (0, 1, 2):
        problems.append(f"exit code {done.returncode}: {done.stderr[-600:]}")
    if done.returncode and "rror:" not in done.stderr:
        problems.append(f"no error line: {done.stdout[-300:]} {done.stderr[-300:]}")
    if done.returncode and seconds > REFUSAL_SECONDS:
        problems.append(f"refused after {seconds:.1f} s: {done.stderr[-300:]}")
    outputs = {Path(value) for value in ("new", "new-run", "new.pt") if value in arguments}
    is_refused = done.returncode != 0
    named = outputs if is_refused else outputs | {Path("odd"), Path(CHANGED_RUN)}
    if "new.import keeps" in done.stderr:  # an import that the same command continues, as it says
        named = named | {Path("new.import")}
    if changed := sandbox.changed(named):
        problems.append(f"changed: {changed}")
    if is_refused and (left := [each for each in outputs if (sandbox.directory / each).exists()]):
        problems.append(f"left after a refusal: {left}")
    return problems


@pytest.mark.slow
def test_odd_paths_are_refused_or_used_without_harm(sandboxes, full, tally):
    calls = sample(paths_to_try(), full)
    assert not problems_of(try_path, calls, sandboxes, tally("odd paths on the command line"))


STREAMS = {
    "stdout closed": ">&-",
    "stdout full": ">/dev/full",
    "stderr closed": "2>&-",
    "stderr full": "2>/dev/full",
    "both closed": ">&- 2>&-",
    "all closed": "<&- >&- 2>&-",
    "closed pipe": "| true",
    "deleted directory": "",
}


def try_streams(sandbox, name, how):
    """Return what went wrong; messages are collected in a file where standard error stays open."""
    log = sandbox.directory / "tmp" / "log"
    script = f'exec 2>"{log}"; "$@" {STREAMS[how]}'
    if how == "deleted directory":
        script = f'exec 2>"{log}"; mkdir gone && cd gone && rmdir ../gone && "$@"'
    try:
        done = subprocess.run(
            ["bash", "-c", script, "bash", TRM, *call(name)], cwd=sandbox.directory, check=False,
            env=sandbox.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ["hangs"]
    text = log.read_text(errors="replace")
    if "Traceback" in text or "Exception ignored" in text or done.returncode not in (0, 1, 2, 141):
        return [f"exit code {done.returncode}: {text[-800:]}"]
    return []


@pytest.mark.slow
def test_closed_and_full_streams_leave_no_traceback(sandboxes, full, tally):
    calls = sample(((name, how) for name in COMMANDS for how in STREAMS), full)
    assert not problems_of(try_streams, calls, sandboxes, tally("closed and full streams"))


def test_the_short_form_tries_every_kind_and_every_command():
    for calls, trials in (
        (paths_to_try(), KINDS),
        (((name, how) for name in COMMANDS for how in STREAMS), STREAMS),
    ):
        calls = list(calls)
        chosen = sample(calls, full=False)
        assert {each[-1] for each in chosen} == set(trials)
        assert {each[0] for each in chosen} == {each[0] for each in calls} - set(SLOW)
        assert len(chosen) <= 35
        assert sum(each[0] == "train" for each in chosen) <= MAX_TRAININGS


def screen_of(sandbox, arguments, columns):
    """Return the exit code and all that a command writes to a terminal of this width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = sandbox.environment | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [TRM, *arguments], cwd=sandbox.directory, env=environment,
        stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,  # `email filter` waits for a message
    )  # fmt: skip
    os.close(terminal)
    written = b""
    with suppress(OSError):  # the end of a terminal is an error
        while part := os.read(controller, 65536):
            written += part
    os.close(controller)
    return process.wait(TIMEOUT_SECONDS), written.decode(errors="replace")


@pytest.mark.slow
def test_terminals_of_any_width_show_no_traceback_and_no_cut_number(sandboxes, full, tally):
    calls = sample(((name, width) for name in COMMANDS for width in (40, 80, 120)), full)
    count = tally("narrow and wide terminals")
    problems = {}
    for number, (name, columns) in enumerate(calls if full else calls[:6]):
        code, text = screen_of(sandboxes(number), call(name), columns)
        if not count.add(code == 0 and "Traceback" not in text and "…" not in text):
            problems[name, columns] = f"exit code {code}: {text[-800:]}"
    assert not problems
