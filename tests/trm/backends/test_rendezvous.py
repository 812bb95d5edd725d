"""Machines meet in the host's store; one that ends, freezes or cannot connect does not hold up the others."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from rank_processes import free_address

from trm.backends.base import load_backend
from trm.backends.pytorch import rendezvous, world
from trm.backends.world import Address, FormingFailed, Member, PeerLost
from trm.plan import Execution
from trm.training.joining import _Reports
from trm.training.machines import GUESTS, LOST, LOST_PEER, Seat, guest_membership, host_membership

FACTS = {"recipe": {"training": {"effective_batch_size": 6}}}
PATIENCE_SECONDS = 60.0


@contextmanager
def host_of(timeout_seconds=30.0, address=None):
    listener = socket.create_server(("127.0.0.1", 0) if address is None else (address.host, address.port))
    address = Address(*listener.getsockname())
    host = rendezvous.host_meeting(address, listener.detach(), "host", timeout_seconds, FACTS)
    try:
        yield host
    finally:
        host.close()


def guest_of(address, timeout_seconds=30.0):
    return rendezvous.guest_meeting(address, "host", timeout_seconds, address.host)


def in_thread(compute):
    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    return thread


def nobody(names, cause):
    return None


def form(host, *guests):
    """Form a world without connections; return it when the signs of life of all have begun."""
    for number, guest in enumerate(guests, 1):
        guest.connect = lambda store, place: place
        in_thread(lambda guest=guest, number=number: guest.join(Member(f"guest {number}"), nobody))
        while host.arrivals() < number:
            time.sleep(0.01)
    host.connect = lambda store, place: place
    members = [Member("host"), *host.members(len(guests), PATIENCE_SECONDS)]
    place = host.form(members, [1] * len(members), nobody)
    while not all(host.store.check([f"beat/{number}"]) for number in range(len(members))):
        time.sleep(0.01)
    return place


@pytest.mark.slow
def test_only_who_shows_no_sign_of_life_is_lost_even_if_others_still_compute():
    with host_of() as host:
        computing, ended = guest_of(host.address), guest_of(host.address)
        form(host, computing, ended)
        time.sleep(0.5)
        ended.watchdog.stop()  # as if its process had ended
        time.sleep(0.5)
        assert host.lost_names() == ["guest 2"]
        computing.close()


@pytest.mark.slow
def test_a_guest_that_ended_before_it_described_itself_is_left_out():
    with host_of() as host:
        host.store.add("arrivals", 1)  # the first guest ends here
        guest = guest_of(host.address)
        guest.connect = lambda store, place: place
        joined = []
        thread = in_thread(lambda: joined.append(guest.join(Member("air"), nobody)))
        started = time.monotonic()
        members = host.members(2, PATIENCE_SECONDS)
        assert time.monotonic() - started < 20
        assert [member.name for member in members] == ["air"]
        host.connect = lambda store, place: place
        place = host.form([Member("host"), *members], [3, 3], nobody)
        thread.join(PATIENCE_SECONDS)
        assert (place.rank, joined[0].rank) == (0, 1)
        host.checked_at = 0.0
        assert not host.has_newcomers()
        host.store.set("arrival/1", json.dumps({"name": "late"}))  # it was only slow
        host.checked_at = 0.0
        assert host.has_newcomers()
        guest.close()


@pytest.mark.slow
def test_machines_that_cannot_connect_give_up_and_name_a_likely_cause(monkeypatch):
    monkeypatch.setattr(world, "FORMING_SECONDS", 1.0)
    with host_of() as host:
        guest = guest_of(host.address)
        guest.connect = lambda store, place: time.sleep(PATIENCE_SECONDS)  # its packets never arrive
        in_thread(lambda: guest.join(Member("air"), nobody))
        members = [Member("host"), *host.members(1, PATIENCE_SECONDS)]
        started = time.monotonic()
        with pytest.raises(FormingFailed, match="firewall"):
            host.form(members, [3, 3], nobody)
        assert time.monotonic() - started < 20
        assert host.lost_names() == []  # all of them are there
        guest.close()


def listen_only(address):
    with host_of(address=address):
        time.sleep(600)


@pytest.mark.slow
def test_a_guest_that_waits_to_be_included_notices_a_host_that_freezes():
    address = free_address()
    process = multiprocessing.get_context("forkserver").Process(target=listen_only, args=(address,))
    process.start()
    lost, noticed = [], threading.Event()

    def on_lost(names, cause):
        lost.extend([*names, cause])
        noticed.set()

    def join(guest):
        with pytest.raises(PeerLost):
            guest.join(Member("air"), on_lost)

    try:
        guest = connected(address)
        thread = in_thread(lambda: join(guest))
        while guest.watchdog is None:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGSTOP)
        assert noticed.wait(20)
        assert lost == ["host", "no sign of life for 2 s"]
    finally:
        process.kill()
        process.join()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_guest_does_not_wait_long_for_a_host_that_freezes_while_nobody_watches_it():
    """Between its connection and its first sign of life, and after the last one."""
    address = free_address()
    process = multiprocessing.get_context("forkserver").Process(target=listen_only, args=(address,))
    process.start()
    try:
        joining, closing = connected(address), connected(address)
        closing.names, closing.beats = ["host", "air"], ["beat/0", "beat/1"]
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PeerLost):
            joining.join(Member("air"), nobody)
        assert closing.lost_names() == ["host"]
        assert time.monotonic() - started < 20
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_guest_does_not_wait_long_for_a_host_that_says_nothing_about_its_run():
    with host_of() as host:
        host.store.delete_key("facts")
        started = time.monotonic()
        with pytest.raises(PeerLost, match="does not answer"):
            guest_of(host.address, timeout_seconds=1.0)
        assert time.monotonic() - started < 20


def connected(address):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return guest_of(address, timeout_seconds=2.0)
        except PeerLost:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def guest_that_joins(address, rows):
    world.FORMING_SECONDS = 1.0
    seat = Seat(address, "air", 60.0, wait_seconds=PATIENCE_SECONDS)
    backend = load_backend(Execution())
    guest_membership(seat, backend, lambda facts: None, Member("air"), rows.send).meeting.close()


def cannot_connect(store, place):
    raise PeerLost("connection refused")


@pytest.mark.slow
def test_a_guest_reports_every_attempt_to_connect_and_whether_it_succeeded():
    context = multiprocessing.get_context("forkserver")
    reports = _Reports()
    for connects, attempts in ((False, 1), (False, 2), (True, 0)):
        rows, theirs = context.Pipe(duplex=False)
        with host_of() as host:
            guest = context.Process(target=guest_that_joins, args=(host.address, theirs))
            guest.start()
            theirs.close()
            members = [Member("host"), *host.members(1, PATIENCE_SECONDS)]
            if connects:
                host.form(members, [3, 3], nobody)
            else:
                host.connect = cannot_connect
                with pytest.raises(FormingFailed, match="refused"):
                    host.form(members, [3, 3], nobody)
            with suppress(EOFError):
                while True:
                    assert reports.receive(rows.recv())
            guest.join(PATIENCE_SECONDS)
        assert guest.exitcode == (0 if connects else LOST_PEER)
        assert reports.attempts == attempts


def host_that_forms(address, rows):
    world.FORMING_SECONDS = 1.0
    listener = socket.create_server((address.host, address.port))
    seat = Seat(address, "host", 60.0, listener.detach(), guests=1, wait_seconds=PATIENCE_SECONDS)
    host_membership(seat, load_backend(Execution()), FACTS, Member("host"), rows.send)


def guest_that_ends(address):
    guest = connected(address)
    guest.connect = lambda store, place: os._exit(1)
    guest.join(Member("air"), nobody)


@pytest.mark.slow
@pytest.mark.parametrize("supervised", [True, False])
def test_a_guest_that_ends_while_the_group_forms_is_lost_and_the_trainer_ends(supervised):
    context = multiprocessing.get_context("forkserver")
    address = free_address()
    rows, theirs = context.Pipe(duplex=False)
    host = context.Process(target=host_that_forms, args=(address, theirs))
    guest = context.Process(target=guest_that_ends, args=(address,))
    host.start()
    theirs.close()
    if supervised:
        guest.start()
        found = [rows.recv() for _ in range(2)]
        assert found[0] == [GUESTS, 1]
        assert found[1][:2] == [LOST, ["air"]]
    else:
        rows.close()  # the supervisor has ended: nobody receives what the trainer sends
        guest.start()
    host.join(PATIENCE_SECONDS)
    guest.join(PATIENCE_SECONDS)
    assert (host.exitcode, guest.exitcode) == (LOST_PEER, 1)
