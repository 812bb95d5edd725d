"""The busiest other program is named; what the command itself started is not another program."""

import os

from trm.reports.other_programs import Snapshot, Usage, compare, take_snapshot

OWN = 100


def snapshot(time, **seconds):
    parents = {"command": (OWN, 1), "trainer": (101, OWN), "compiler": (102, 101), "browser": (200, 1)}
    known = {"hog": (201, 1), **parents}
    processes = {(known[name][0], 1.0): Usage(name, known[name][1], spent) for name, spent in seconds.items()}
    return Snapshot(time, processes)


def test_the_busiest_other_program_is_named():
    before = snapshot(10.0, command=5, trainer=100, browser=50, hog=1)
    after = snapshot(20.0, command=5, trainer=110, browser=51, hog=10)
    programs = compare(before, after, OWN)
    assert programs.busiest.name == "hog (PID 201)"
    assert programs.busiest.cores == 0.9
    assert programs.own_cores == 1.0


def test_what_the_command_started_is_its_own():
    before = snapshot(10.0, command=5, trainer=100, browser=50)
    after = snapshot(20.0, command=5, trainer=110, browser=50, compiler=8)  # started in between
    programs = compare(before, after, OWN)
    assert programs.busiest.cores == 0
    assert programs.own_cores == 1.8


def test_the_processes_of_this_machine_are_listed():
    pids = {pid for pid, _ in take_snapshot().processes}
    assert os.getpid() in pids
