"""Two `trm` processes that train one run together, as two machines would."""

import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import psutil
import pytest
from processes import find_trainer, kill_all
from tiny import TRM

from trm.runs.directory import Run

TIMEOUT_SECONDS = 5.0  # without a sign of life
PATIENCE_SECONDS = 120.0  # the tests run beside others
RECOVERY_SECONDS = 30.0  # beyond the timeout, at most
RECIPE = (
    "model.mixer=mlp", "model.H_layers=2", "model.hidden_size=16", "data.path=set", "plan.threads=1",
    "data.build={size: 4, difficulty: easy, train: 60, test: 12}", "plan.micro_batch_size=2",
    "training.effective_batch_size=6", "training.max_steps=1000000", "training.depths={0: 2}",
    "evaluation.every_steps=100", "inference.depth=2", "evaluation.target_accuracy=null",
    "checkpoints.every_steps=20", "plan.report=false", f"plan.peer_timeout_seconds={TIMEOUT_SECONDS:g}",
)  # fmt: skip


class Machines:
    """A host and a guest; each has a directory of its own, and the guest builds its own dataset."""

    def __init__(self, directory, address="127.0.0.1", on_host=(), on_guest=()):
        self.directory = directory
        self.path = directory / "host" / "run"
        self.address = address
        self.on_host = on_host  # the command that runs another command there
        self.on_guest = on_guest
        self.host = None
        self.guest = None
        self.place = None  # that the host named to the guest
        self.tally = None  # of faults
        for name in ("host", "guest"):
            (directory / name).mkdir()

    @property
    def run(self):
        return Run(self.path)

    def start_host(self, *arguments, where=None):
        """Start the host; when it is started again, other machines find it at the same place."""
        line = self.join_line() if (self.directory / "host" / "log").exists() else None
        place = f"{self.address}:0" if line is None else line.partition("/")[0]
        listen = ("--listen", place) if where is None else where
        command = ("train", "sudoku-6x6", *RECIPE, *arguments, "--run", "run", *listen)
        self.host = self._start("host", (*self.on_host, TRM, *command))

    def start_guest(self, *arguments):
        where = wait_until(self.join_line, self.host)
        self.place = where
        command = (*self.on_guest, TRM, "join", where, "plan.threads=1", "plan.micro_batch_size=1")
        self.guest = self._start("guest", (*command, *arguments))

    def _start(self, name, command):
        directory = self.directory / name
        with (directory / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)

    def join_line(self):
        found = re.findall(r"trm join (\S+)", self.log("host"))
        return found[-1] if found else None

    def log(self, name):
        return (self.directory / name / "log").read_text(errors="replace")

    def events(self, name):
        file = self.run.path / "events.jsonl"
        return [row for row in self.run.rows(file.name) if row["event"] == name] if file.exists() else []

    def step(self):
        rows = self.run.rows() if (self.run.path / "metrics.jsonl").exists() else []
        return max((row["step"] for row in rows if row["kind"] == "train"), default=0)

    def train_as(self, size, after=0):
        """Wait until a world of this size, formed after so many others, takes steps."""

        def trains():
            worlds = self.events("machines")
            return (
                len(worlds) > after
                and len(worlds[-1]["machines"]) == size
                and self.step() > worlds[-1]["step"] + 5
            )

        wait_until(trains, self.host)

    def num_worlds(self):
        return len(self.events("machines"))

    @contextmanager
    def recovery(self, what):
        """Check that what is waited for happens in time, and report the seconds."""
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        fault = self.tally(what)
        fault.remark(f"{seconds:.1f} s")
        assert fault.add(seconds < TIMEOUT_SECONDS + RECOVERY_SECONDS)

    def left_over(self):
        """Return processes of these machines that belong to none of the commands."""
        commands = [process.pid for process in (self.host, self.guest) if process is not None]
        found = []
        for process in psutil.process_iter(["cwd", "cmdline"]):
            with suppress(psutil.NoSuchProcess):
                ancestors = [process.pid, *(each.pid for each in process.parents())]
                inside = (process.info["cwd"] or "").startswith(str(self.directory))
                if inside and not set(ancestors) & set(commands):
                    found.append(process.info["cmdline"])
        return found

    def all_processes_end(self):
        wait_until(lambda: not self.left_over())
        assert self.host.poll() is not None
        assert self.guest.poll() is not None

    def close(self):
        for process in (self.guest, self.host):
            if process is not None and process.poll() is None:
                kill_all(process)


def wait_until(condition, process=None, seconds=PATIENCE_SECONDS):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        assert process is None or process.poll() is None, "the command ended"
        time.sleep(0.1)
    return found


def trainer_of(process):
    return wait_until(lambda: find_trainer(process), process)


def stop(process, signal_number=signal.SIGINT):
    """Stop a command, and return its exit code when it and its trainer are gone."""
    trainer = find_trainer(process)
    process.send_signal(signal_number)
    code = process.wait(PATIENCE_SECONDS)
    assert trainer is None or not trainer.is_running()
    return code


def listening_by_psutil(process):
    """Return the addresses at which a command or its children listen."""
    found = (connection for each in _tree(process) for connection in each.net_connections())
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def listening_by_ss(process):
    if shutil.which("ss") is None:
        pytest.skip("the command ss (iproute2) is not installed")
    lines = subprocess.run(["ss", "-ltnpH"], check=True, capture_output=True, text=True).stdout.splitlines()
    ours = {each.pid for each in _tree(process)}
    found = (line for line in lines if ours & {int(pid) for pid in re.findall(r"pid=(\d+)", line)})
    return {line.split()[3].rpartition(":")[0] for line in found}


def _tree(process):
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
