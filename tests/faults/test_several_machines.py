"""Whatever happens to one of two machines, training goes on with who is there, or stops on both."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from machines import (
    TIMEOUT_SECONDS,
    Machines,
    listening_by_psutil,
    listening_by_ss,
    stop,
    trainer_of,
    wait_until,
)
from processes import kill, kill_all
from tiny import TRM

SHORT_TIMEOUT_SECONDS = 1.0
OLDEST_SIGN_SECONDS = 2.0  # the last sign of life before a fault; there are two per second

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two machines for several faults: each test begins when both of them train."""
    found = Machines(tmp_path_factory.mktemp("machines"))
    try:
        found.start_host()
        found.start_guest()
        yield found
    finally:
        found.close()


@pytest.fixture
def both(machines, tally):
    machines.tally = tally
    if machines.guest.poll() is not None:
        machines.start_guest()
    wait_until(lambda: machines.num_worlds() and len(machines.events("machines")[-1]["machines"]) == 2)
    wait_until(lambda: not machines.left_over())
    return machines


def test_after_the_trainer_of_a_guest_is_killed_both_train_again(both):
    worlds, lost = both.num_worlds(), len(both.events("machine lost"))
    kill(trainer_of(both.guest))
    with both.recovery("trainer of a guest killed, both train"):
        both.train_as(2, after=worlds)
    assert len(both.events("machine lost")) == lost + 1
    assert both.events("machine lost")[-1]["machines"] == [guest_in(both, worlds)]


def guest_in(machines, num_worlds):
    """Return the name of the guest in the newest of the first groups."""
    return machines.events("machines")[num_worlds - 1]["machines"][1]


def test_after_the_trainer_of_the_host_is_killed_both_train_again(both):
    worlds = both.num_worlds()
    silent = both.log("guest").count("no sign of life")
    kill(trainer_of(both.host))
    with both.recovery("trainer of the host killed, both train"):
        wait_until(lambda: both.num_worlds() > worlds)
        both.train_as(2)
    assert "was killed by SIGKILL" in both.events("restarted")[-1]["cause"]
    assert both.log("guest").count("no sign of life") == silent  # the connection was closed


def test_a_guest_that_was_killed_is_named_and_may_come_back(both):
    worlds = both.num_worlds()
    step = both.step()
    kill_all(both.guest)
    with both.recovery("guest killed, the host trains alone"):
        both.train_as(1, after=worlds)
    assert both.events("machine lost")[-1]["machines"] == [guest_in(both, worlds)]
    both.start_guest()
    with both.recovery("guest started again, both train"):
        both.train_as(2, after=worlds)
    assert both.step() > step


def test_a_frozen_guest_is_left_behind_and_comes_back(both):
    worlds = both.num_worlds()
    trainer = trainer_of(both.guest)
    trainer.send_signal(signal.SIGSTOP)
    stopped = time.time()
    with both.recovery("guest frozen, the host trains alone"):
        both.train_as(1, after=worlds)
    lost = both.events("machine lost")[-1]
    assert lost["machines"] == [guest_in(both, worlds)]
    assert lost["cause"] == f"no sign of life for {TIMEOUT_SECONDS:g} s"
    assert lost["time"] - stopped > TIMEOUT_SECONDS - OLDEST_SIGN_SECONDS
    trainer.send_signal(signal.SIGCONT)
    with both.recovery("guest continued, both train"):
        both.train_as(2, after=worlds)


def test_a_frozen_host_is_noticed_by_the_guest_and_both_train_again(both):
    worlds = both.num_worlds()
    noticed = f"The group of machines has changed (no sign of life for {TIMEOUT_SECONDS:g} s)"
    before = both.log("guest").count(noticed)
    trainer = trainer_of(both.host)
    trainer.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    with both.recovery("host frozen, the guest notices"):
        wait_until(lambda: both.log("guest").count(noticed) > before, both.guest)
    assert time.monotonic() - stopped > TIMEOUT_SECONDS - OLDEST_SIGN_SECONDS
    trainer.send_signal(signal.SIGCONT)
    with both.recovery("host no longer frozen, both train"):
        both.train_as(2, after=worlds)
    assert both.guest.poll() is None


def test_a_guest_that_is_stopped_leaves_and_the_host_continues(both):
    worlds, lost = both.num_worlds(), len(both.events("machine lost"))
    with both.recovery("Ctrl-C at a guest, the host trains alone"):
        assert stop(both.guest) == 130
        both.train_as(1, after=worlds)
    assert len(both.events("machine lost")) == lost
    assert not both.left_over()
    assert "This machine has left" in both.log("guest")
    assert both.events("resumed")[-1]["step"] >= both.events("machines")[worlds - 1]["step"]


@pytest.mark.parametrize("lost", ["supervisor", "machine"])
def test_after_the_host_was_killed_and_started_again_both_continue(both, lost):
    worlds, step = both.num_worlds(), both.step()
    trainer = trainer_of(both.host)
    if lost == "supervisor":
        kill(both.host)
        trainer.wait(30)  # it saves, and ends by itself
        both.host.wait()
    else:
        kill_all(both.host)
    both.start_host()
    with both.recovery(f"{lost} of the host killed and started again, both train"):
        both.train_as(2, after=worlds)
    assert both.guest.poll() is None
    assert both.step() > step
    assert both.join_line() == both.place  # the token is that of the run
    if lost == "supervisor":
        assert both.events("resumed")[-1]["step"] >= step


@pytest.mark.parametrize("listening", [listening_by_psutil, listening_by_ss])
def test_machines_listen_only_at_the_address_that_was_named(both, listening):
    for process in (both.host, both.guest):
        trainer_of(process)
        assert listening(process) == {"127.0.0.1"}


def test_a_host_that_is_stopped_stops_all_machines_after_the_same_step(both):
    with both.recovery("Ctrl-C at the host, both end"):
        assert stop(both.host) == 130
        assert both.guest.wait(60) == 0
    both.all_processes_end()
    step = both.events("stopped")[-1]["step"]
    assert both.run.checkpoints().newest_step() == step
    assert f"The host has stopped the run after step {step}" in both.log("guest")


@pytest.mark.parametrize(("timeout_seconds", "signals"), [(TIMEOUT_SECONDS, 1), (600.0, 2)])
def test_a_host_that_is_stopped_while_it_waits_for_a_frozen_guest_ends(
    tmp_path, tally, timeout_seconds, signals
):
    machines = Machines(tmp_path)
    machines.tally = tally
    try:
        machines.start_host(f"plan.peer_timeout_seconds={timeout_seconds:g}")
        machines.start_guest()
        machines.train_as(2)
        frozen = trainer_of(machines.guest)
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(1.0)  # the host takes no step without it
        with machines.recovery(f"guest frozen and Ctrl-C at the host ({signals} x), the host ends"):
            if signals == 2:
                machines.host.send_signal(signal.SIGINT)
                time.sleep(1.0)
            assert stop(machines.host) == 130
        frozen.send_signal(signal.SIGCONT)
        assert stop(machines.guest) == 130
        machines.all_processes_end()
    finally:
        machines.close()


def test_nothing_listens_without_the_option(tmp_path):
    machines = Machines(tmp_path)
    try:
        machines.start_host(where=())
        wait_until(lambda: machines.step() > 0, machines.host)
        assert listening_by_psutil(machines.host) == set()
        assert listening_by_ss(machines.host) == set()
    finally:
        machines.close()


def test_the_last_step_ends_the_run_on_both_machines(tmp_path):
    machines = Machines(tmp_path)
    try:
        machines.start_host("--max-steps", "600")
        machines.start_guest()
        assert machines.host.wait(120) == 0
        assert machines.guest.wait(60) == 0
        machines.all_processes_end()
        assert machines.events("stopped")[-1]["step"] == 600
        assert max(len(row["machines"]) for row in machines.events("machines")) == 2
    finally:
        machines.close()


@pytest.mark.alone  # with a short timeout, a busy machine is a lost one
def test_a_step_of_three_times_the_timeout_is_survived_but_not_a_host_that_is_gone(tmp_path, tally):
    num_slots = round(2 * 5 * SHORT_TIMEOUT_SECONDS / seconds_per_slot(tmp_path / "alone"))
    (tmp_path / "both").mkdir()
    machines = Machines(tmp_path / "both")
    machines.tally = tally
    try:
        slow = f"training.effective_batch_size={num_slots}"
        machines.start_host(slow, f"plan.peer_timeout_seconds={SHORT_TIMEOUT_SECONDS:g}")
        machines.start_guest("--wait", "10s")
        wait_until(lambda: machines.num_worlds() and len(machines.events("machines")[-1]["machines"]) == 2)
        worlds, step = machines.num_worlds(), machines.events("machines")[-1]["step"]
        wait_until(lambda: machines.step() >= step + 2)
        seconds = computing_seconds(machines)
        slow = tally(f"a step, with a timeout of {SHORT_TIMEOUT_SECONDS:g} s")
        slow.remark(f"{seconds:.1f} s")
        assert slow.add(not machines.events("machine lost"))
        assert seconds > 3 * SHORT_TIMEOUT_SECONDS
        assert machines.num_worlds() == worlds
        kill_all(machines.host)
        with machines.recovery("host gone, the guest gives up"):
            assert machines.guest.wait(60) == 1
        assert "does not answer" in machines.log("guest")
        machines.all_processes_end()
    finally:
        machines.close()


def seconds_per_slot(directory):
    """Return what a machine that trains alone computes for a slot of a step."""
    directory.mkdir()
    machines = Machines(directory)
    try:
        machines.start_host("training.effective_batch_size=200", where=())
        wait_until(lambda: machines.step() >= 2, machines.host)
        return computing_seconds(machines) / 200
    finally:
        machines.close()


def computing_seconds(machines):
    """Return what the host computed per step, without waiting for others."""
    row = [row for row in machines.run.rows() if row["kind"] == "train"][-1]
    return (row["spent"]["forward"] + row["spent"]["backward"]) / row["num_steps"]


@pytest.mark.mlx
def test_machines_that_compute_with_mlx_survive_faults_and_stop_together(tmp_path):
    """The guest takes the backend of the host; each listens at the named address only."""
    pytest.importorskip("mlx.core")
    machines = Machines(tmp_path)
    try:
        machines.start_host("plan.backend=mlx")
        machines.start_guest()
        machines.train_as(2)
        for process in (machines.host, machines.guest):
            assert listening_by_psutil(process) <= {"127.0.0.1"}
        worlds = machines.num_worlds()
        kill(trainer_of(machines.guest))
        machines.train_as(2, after=worlds)
        worlds = machines.num_worlds()
        trainer_of(machines.guest).send_signal(signal.SIGSTOP)
        machines.train_as(1, after=worlds)
        assert f"no sign of life for {TIMEOUT_SECONDS:g} s" in machines.events("machine lost")[-1]["cause"]
        trainer_of(machines.guest).send_signal(signal.SIGCONT)
        machines.train_as(2, after=worlds)
        assert stop(machines.host) == 130
        assert machines.guest.wait(60) == 0
        assert machines.run.checkpoints().newest_step() == machines.events("stopped")[-1]["step"]
    finally:
        machines.close()


@pytest.fixture
def small_disk(tmp_path, tally):
    """A file system of 4 MiB that only the host sees; yields the command that runs others on it."""
    place = tmp_path / "host" / "run"
    command = f'mount -t tmpfs -o size=4m tmpfs {place} && exec "$@"'
    if shutil.which("unshare") is None:
        pytest.skip("a small file system needs the command unshare")
    on_host = ("unshare", "--map-root-user", "--mount", "sh", "-c", command, "sh")
    machines = Machines(tmp_path, on_host=on_host)
    machines.tally = tally
    place.mkdir()
    if subprocess.run([*on_host, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield machines
    machines.close()


def test_a_full_disk_at_the_host_ends_nothing_and_what_was_not_saved_is_saved_later(small_disk):
    machines = small_disk
    machines.start_host()
    machines.start_guest()
    machines.path = wait_until(lambda: seen_by(machines.host, machines.run.path), machines.host)
    machines.train_as(2)
    ballast = machines.path / "ballast"
    with pytest.raises(OSError, match="No space left"):
        fill(ballast)
    wait_until(lambda: "is not saved" in machines.log("host"), machines.host)
    evaluations = machines.log("host").count("unseen examples")
    wait_until(lambda: machines.log("host").count("unseen examples") > evaluations + 1, machines.host)
    ballast.unlink()
    with machines.recovery("room on the disk of the host, saved again"):
        wait_until(lambda: "is saved." in machines.log("host"), machines.host)
    worlds = machines.events("machines")
    assert len(worlds[-1]["machines"]) == 2
    assert not machines.events("machine lost")
    assert machines.events("saved again")
    assert stop(machines.host) == 130
    assert machines.guest.wait(60) == 0
    machines.all_processes_end()


def fill(path):
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def seen_by(process, path):
    """Return the path by which everybody finds what this process sees at a path."""
    inside = Path(f"/proc/{process.pid}/root{path}")
    return inside if (inside / "metrics.jsonl").exists() else None


NAMESPACES = ("trm-test-host", "trm-test-guest")
CABLE = ("cable0", "cable1")  # its two ends


@pytest.fixture
def cable(tmp_path):
    """Two network namespaces, connected by one cable; yields how to run commands in each."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "ss"))):
        pytest.skip("network namespaces need root and the commands ip and ss")
    commands = [
        *(f"ip netns add {name}" for name in NAMESPACES),
        f"ip link add cable0 netns {NAMESPACES[0]} type veth peer name cable1 netns {NAMESPACES[1]}",
        f"ip -n {NAMESPACES[0]} addr add 10.77.0.1/24 dev cable0",
        f"ip -n {NAMESPACES[1]} addr add 10.77.0.2/24 dev cable1",
        *(f"ip -n {name} link set {device} up" for name, device in zip(NAMESPACES, CABLE, strict=True)),
        *(f"ip -n {name} link set lo up" for name in NAMESPACES),
    ]
    try:
        for command in commands:
            if subprocess.run(command.split(), check=False).returncode:
                pytest.skip(f"this does not work here: {command}")
        yield [("ip", "netns", "exec", name) for name in NAMESPACES]
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def listening_in(command):
    """Return the addresses at which anything listens in a namespace."""
    lines = subprocess.run([*command, "ss", "-ltnH"], check=True, capture_output=True, text=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in lines.splitlines()}


def test_a_cable_is_pulled_a_machine_killed_and_at_the_end_the_model_answers(tmp_path, cable, tally):
    machines = Machines(tmp_path, "10.77.0.1", *cable)
    machines.tally = tally
    try:
        machines.start_host()
        machines.start_guest()
        machines.train_as(2)
        worlds = machines.num_worlds()
        subprocess.run(["ip", "-n", NAMESPACES[0], "link", "set", "cable0", "down"], check=True)
        guest = machines.events("machines")[-1]["machines"][1]
        with machines.recovery("cable pulled, the host trains alone"):
            machines.train_as(1, after=worlds)
        assert machines.events("machine lost")[-1]["machines"] == [guest]
        subprocess.run(["ip", "-n", NAMESPACES[0], "link", "set", "cable0", "up"], check=True)
        with machines.recovery("cable put back, both train"):
            machines.train_as(2, after=worlds)
        assert listening_in(cable[0]) == {"10.77.0.1"}
        assert listening_in(cable[1]) == {"10.77.0.2"}
        worlds = machines.num_worlds()
        kill_all(machines.guest)
        machines.train_as(1, after=worlds)
        machines.start_guest()
        machines.train_as(2, after=worlds)
        assert stop(machines.host) == 130
        assert machines.guest.wait(60) == 0
        machines.all_processes_end()
        assert listening_in(cable[0]) | listening_in(cable[1]) == set()
        machines.start_host("--max-steps", str(machines.step() + 50))
        assert machines.host.wait(120) == 0
        question = [*cable[0], TRM, "predict", "run", "--example", "0"]
        host = machines.directory / "host"
        answer = subprocess.run(question, cwd=host, check=True, capture_output=True, text=True).stdout
        assert len(re.findall("[1-4]", answer)) >= 16  # a grid of 4 x 4
    finally:
        machines.close()
