"""Whatever happens to one of two machines, training goes on with who is there, or stops on both."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from machines import TIMEOUT_SECONDS, Machines, listening_addresses, stop, trainer_of, wait_until
from processes import kill, kill_all

pytestmark = [pytest.mark.slow, pytest.mark.alone]


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
def both(machines):
    if machines.guest.poll() is not None:
        machines.start_guest()
    wait_until(lambda: machines.num_worlds() and len(machines.events("machines")[-1]["machines"]) == 2)
    return machines


def test_after_the_trainer_of_a_guest_is_killed_both_train_again(both):
    worlds, lost = both.num_worlds(), len(both.events("machine lost"))
    kill(trainer_of(both.guest))
    both.train_as(2, after=worlds)
    assert len(both.events("machine lost")) == lost + 1
    assert len(both.events("machine lost")[-1]["machines"]) == 1


def test_after_the_trainer_of_the_host_is_killed_both_train_again(both):
    worlds = both.num_worlds()
    kill(trainer_of(both.host))
    wait_until(lambda: both.num_worlds() > worlds)
    both.train_as(2)


def test_a_guest_that_was_killed_is_named_and_may_come_back(both):
    worlds = both.num_worlds()
    step = both.step()
    kill_all(both.guest)
    both.train_as(1, after=worlds)
    assert both.events("machine lost")[-1]["machines"] == [both.events("machines")[worlds - 1]["machines"][1]]
    both.start_guest()
    both.train_as(2, after=worlds)
    assert both.step() > step


def test_a_frozen_guest_is_left_behind_and_comes_back(both):
    worlds = both.num_worlds()
    trainer = trainer_of(both.guest)
    trainer.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    both.train_as(1, after=worlds)
    assert time.monotonic() - started > TIMEOUT_SECONDS
    assert f"no sign of life for {TIMEOUT_SECONDS:g} s" in both.events("machine lost")[-1]["cause"]
    trainer.send_signal(signal.SIGCONT)
    both.train_as(2, after=worlds)


def test_a_guest_that_is_stopped_leaves_and_the_host_continues(both):
    worlds, lost = both.num_worlds(), len(both.events("machine lost"))
    assert stop(both.guest) == 130
    both.train_as(1, after=worlds)
    assert len(both.events("machine lost")) == lost
    assert "This machine has left" in both.log("guest")
    assert both.events("resumed")[-1]["step"] >= both.events("machines")[worlds - 1]["step"]


def test_machines_listen_only_at_the_address_that_was_named(both):
    for process in (both.host, both.guest):
        trainer_of(process)
        assert {address.ip for address in listening_addresses(process)} == {"127.0.0.1"}


def test_a_host_that_is_stopped_stops_all_machines_after_the_same_step(both):
    assert stop(both.host) == 130
    assert both.guest.wait(60) == 0
    step = both.events("stopped")[-1]["step"]
    assert both.run.checkpoints().newest_step() == step
    assert f"The host has stopped the run after step {step}" in both.log("guest")


def test_nothing_listens_without_the_option(tmp_path):
    machines = Machines(tmp_path)
    try:
        machines.start_host(where=())
        wait_until(lambda: machines.step() > 0, machines.host)
        assert listening_addresses(machines.host) == set()
    finally:
        machines.close()


def test_the_last_step_ends_the_run_on_both_machines(tmp_path):
    machines = Machines(tmp_path)
    try:
        machines.start_host("--max-steps", "600")
        machines.start_guest()
        assert machines.host.wait(120) == 0
        assert machines.guest.wait(60) == 0
        assert machines.events("stopped")[-1]["step"] == 600
        assert max(len(row["machines"]) for row in machines.events("machines")) == 2
    finally:
        machines.close()


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


def test_after_a_cable_was_pulled_and_put_back_both_train_again(tmp_path, cable):
    machines = Machines(tmp_path, "10.77.0.1", *cable)
    try:
        machines.start_host()
        machines.start_guest()
        machines.train_as(2)
        worlds = machines.num_worlds()
        subprocess.run(["ip", "-n", NAMESPACES[0], "link", "set", "cable0", "down"], check=True)
        machines.train_as(1, after=worlds)
        assert machines.events("machine lost")
        subprocess.run(["ip", "-n", NAMESPACES[0], "link", "set", "cable0", "up"], check=True)
        machines.train_as(2, after=worlds)
        assert listening_in(cable[0]) == {"10.77.0.1"}
        assert stop(machines.host) == 130
        assert machines.guest.wait(60) == 0
    finally:
        machines.close()
