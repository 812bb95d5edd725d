"""Addresses, seats and what a machine that joins accepts."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import ThreadWorld
from tiny import Recorder, run_config, sudoku_dataset

from macbook_optimization.children import ChildDied
from macbook_optimization.errors import ConfigError, DataError, MemoryBudgetError, RunError
from trm.backends.world import Address, Member
from trm.config import RunConfig
from trm.plan import Execution, Plan
from trm.runs.directory import JOIN_TOKEN, Run, begin, open_run
from trm.tasks.registry import load_task
from trm.training import joining, machines
from trm.training.hosting import DEFAULT_PORT, listening, parse_address, split_token, token_of
from trm.training.joining import guest_config
from trm.training.loop import Outcome
from trm.training.machines import (
    CONNECTED,
    CONNECTING,
    GUESTS,
    LOST,
    LOST_PEER,
    STARTED,
    Membership,
    Seat,
    check_facts,
    check_token,
    facts_of,
    local_address,
    other_versions,
)
from trm.training.start import open_splits

SEAT = Seat(Address("127.0.0.1", 1), "studio", 60.0, descriptor=3, guests=2, token="abcde")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", Address("127.0.0.1", DEFAULT_PORT)),
        ("192.168.2.1:4000", Address("192.168.2.1", 4000)),
        ("[::1]:4000", Address("::1", 4000)),
        ("::1", Address("::1", DEFAULT_PORT)),
        ("fe80::1", Address("fe80::1", DEFAULT_PORT)),
    ],
)
def test_an_address_may_have_a_port(text, expected):
    assert parse_address(text, allow_public=False) == expected


def test_an_address_is_written_as_it_is_read():
    for address in (Address("10.0.0.1", 4000), Address("::1", 4000)):
        assert parse_address(str(address), allow_public=False) == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8.8.8.8", "public address"),
        ("0.0.0.0", "every interface"),
        ("::", "every interface"),
        ("no such host.invalid", "is not an address"),
        ("10.0.0.1:port", "is not a port"),
        ("10.0.0.1:70000", "is not a port"),
    ],
)
def test_an_address_that_others_could_reach_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_address(text, allow_public=False)


def test_a_public_address_can_be_insisted_on_but_not_every_interface():
    assert parse_address("8.8.8.8", allow_public=True).host == "8.8.8.8"
    with pytest.raises(ConfigError, match="every interface"):
        parse_address("0.0.0.0", allow_public=True)


def test_a_host_listens_at_its_address_only_and_stops_at_the_end():
    with listening("127.0.0.1:0", 5.0, allow_public=False) as hosting:
        assert local_address(hosting.address) == "127.0.0.1"
        if sys.platform != "darwin":  # there, 127.0.0.1 is the only address of the loopback interface
            with pytest.raises(ConnectionRefusedError):
                local_address(Address("127.0.0.2", hosting.address.port))
        again = listening(str(hosting.address), 5.0, allow_public=False)
        with pytest.raises(ConfigError, match="Cannot listen"), again:
            pass
    with pytest.raises(ConnectionRefusedError):
        local_address(hosting.address)


def test_a_run_keeps_its_token_and_every_run_has_another_one(tmp_path, dataset):
    runs = [Run(tmp_path / name) for name in ("first", "second", "third")]
    tokens = [token_of(run) for run in runs]
    assert len(set(tokens)) == 3
    assert [token_of(run) for run in runs] == tokens
    begin(open_run(runs[0].path, run_config(dataset)), run_config(dataset))
    assert token_of(runs[0]) == tokens[0]


@pytest.mark.parametrize("damage", [b"", b"\xff\xff", b"../..", b"a" * 1000])
def test_a_damaged_token_is_drawn_again(tmp_path, damage):
    run = Run(tmp_path / "run")
    token_of(run)
    (run.path / JOIN_TOKEN).write_bytes(damage)
    assert token_of(run) == token_of(run)


def test_a_machine_joins_only_the_run_whose_token_it_names():
    assert split_token("10.0.0.1:4000/abcde") == ("10.0.0.1:4000", "abcde")
    assert split_token("[::1]/abcde") == ("[::1]", "abcde")
    assert split_token("10.0.0.1:4000") == ("10.0.0.1:4000", "")
    check_token({"host": "studio", "token": "abcde"}, SEAT)
    check_token({"host": "studio", "token": "abcde"}, replace(SEAT, token=""))
    for token in ("abcdf", "", None):
        with pytest.raises(RunError, match="trains another run now"):
            check_token({"host": "studio", "token": token}, SEAT)


def test_a_seat_is_the_same_for_the_trainer():
    assert Seat.from_json(json.loads(json.dumps(SEAT.to_json()))) == SEAT


class Log:
    def __init__(self):
        self.events = []
        self.messages = []

    def event(self, event):
        self.events.append(event)

    def message(self, text):
        self.messages.append(text)


def test_a_supervisor_remembers_the_guests_and_records_who_was_lost():
    log = Log()
    with listening("127.0.0.1:0", 5.0, allow_public=False) as hosting:
        assert hosting.receive([GUESTS, 2], log)
        assert hosting.seat().guests == 2
        assert hosting.receive([LOST, ["air"], "no sign of life for 5 s"], log)
        assert not hosting.receive(["message", "text"], log)
    assert log.events[0].machines == ["air"]
    assert "Lost air (no sign of life for 5 s)" in log.messages[0]


@pytest.mark.parametrize(("seconds", "predicted", "warns"), [(0.25, "80%", False), (0.3, "77%", True)])
def test_a_predicted_efficiency_below_80_percent_is_a_warning(seconds, predicted, warns):
    members = [Member("studio", 32.0), Member("air", 16.0)]  # each computes for a second
    membership = Membership(ThreadWorld(0, (32, 16), None), members)
    text = machines._described(membership, seconds)["text"]
    assert "2 machines share 48 slots: studio 32, air 16." in text
    assert f"predicted efficiency {predicted}" in text
    assert text.startswith("warning: ") == warns
    assert ("a faster connection or a larger training.effective_batch_size would help" in text) == warns


def supervise(monkeypatch, config, *ends):
    """Supervise trainers of a guest, each of which reports some rows and then ends; return the outcome."""
    remaining = list(ends)

    def run(guest, seat, plan, reports):
        rows, end = remaining.pop(0)
        assert all(reports.receive(row) for row in rows)
        if isinstance(end, Outcome):
            return end
        raise ChildDied(end, False, "")

    monkeypatch.setattr(joining, "_run", run)
    guest = joining._Guest(config, SimpleNamespace(display=Recorder()), {}, "studio")
    smallest = Plan.of(Execution(gradient_checkpointing="all"), 1, config.training.effective_batch_size)
    outcome = joining._supervise(guest, SEAT, smallest)
    assert not remaining
    return outcome


UNCONNECTED = ([[CONNECTING], [LOST, [], "the connection to studio was closed"]], LOST_PEER)
FINISHED = ([], Outcome(Path("run"), "max_steps", 90, 1.0, None, None))


def trained_from(step):
    return [[CONNECTING], [CONNECTED], [STARTED, step]]


def test_a_guest_that_cannot_connect_ends_after_three_attempts_in_a_row(monkeypatch, dataset):
    config = run_config(dataset)
    lost = ([*trained_from(0), [LOST, ["air"], "no sign of life for 60 s"]], LOST_PEER)
    waited = ([[LOST, ["studio"], "the connection to studio was closed"]], LOST_PEER)
    outlived = [*[UNCONNECTED] * 2, lost, *[UNCONNECTED] * 2, *[waited] * 5, lost]
    assert supervise(monkeypatch, config, *outlived, FINISHED).step == 90
    rang = ([[CONNECTING]], -signal.SIGALRM)  # MLX waited too long
    with pytest.raises(RunError, match="3 times in a row, but the machines could not connect") as ended:
        supervise(monkeypatch, config, *outlived, UNCONNECTED, rang, UNCONNECTED)
    assert "at any port" in ended.value.hint


def test_a_guest_forgets_deaths_before_the_newest_checkpoint_of_the_run(monkeypatch, dataset):
    config = run_config(dataset)

    def killed(step):
        return trained_from(step), -signal.SIGKILL

    steps = [0, 0, 100, 100, 200, 200]
    assert supervise(monkeypatch, config, *map(killed, steps), FINISHED).step == 90
    with pytest.raises(MemoryBudgetError, match="with the smallest possible plan"):
        supervise(monkeypatch, config, *map(killed, [100, 200, 200, 200]))


def facts_and_digests(config):
    splits = open_splits(config, load_task(config.task))
    digests = {name: dict(split.digests) for name, split in zip(("train", "test"), splits, strict=True)}
    return json.loads(json.dumps(facts_of(config, digests, SEAT))), digests


def test_a_guest_takes_the_recipe_of_the_host_and_the_plan_of_its_own_machine(dataset):
    host = run_config(dataset, plan__micro_batch_size=3)
    facts, digests = facts_and_digests(host)
    config = guest_config(facts, ["plan.threads=2", "limits.memory_limit_mb=500"])
    assert config.what_is_learned() == host.what_is_learned()
    assert (config.plan.threads, config.plan.micro_batch_size) == (2, None)
    check_facts(facts, config, digests)


@pytest.mark.mlx
def test_a_guest_takes_the_backend_of_the_host_and_another_is_refused(dataset):
    pytest.importorskip("mlx.core")  # whose version is among the facts
    facts, digests = facts_and_digests(run_config(dataset, plan__backend="mlx"))
    assert guest_config(facts, []).plan.backend == "mlx"
    other = guest_config(facts, ["plan.backend=pytorch"])
    with pytest.raises(RunError, match="trains with the backend mlx, and this machine with pytorch"):
        check_facts(facts, other, digests)


@pytest.mark.mlx
def test_a_guest_with_another_backend_is_refused_before_it_builds_a_dataset(dataset):
    pytest.importorskip("mlx.core")
    facts, _ = facts_and_digests(run_config(dataset, plan__backend="mlx"))
    facts["recipe"]["data"]["path"] = "absent"
    with pytest.raises(RunError, match="trains with the backend mlx") as refused:
        joining._prepare(facts, ["plan.backend=pytorch"], Recorder())
    assert refused.value.hint == "Set plan.backend=mlx on this machine."


def test_a_guest_must_not_change_what_is_learned(dataset):
    facts, _ = facts_and_digests(run_config(dataset))
    with pytest.raises(ConfigError, match="the host decides what is learned"):
        guest_config(facts, ["training.learning_rate=1"])


def test_a_machine_that_updates_in_the_backward_pass_cannot_join(dataset):
    facts, _ = facts_and_digests(run_config(dataset))
    facts["recipe"].update(task="text", model={"kind": "decoder"}, training={"ema": False}, inference={})
    assert not guest_config(facts, []).plan.optimizer_in_backward
    with pytest.raises(ConfigError, match=r"optimizer_in_backward updates the weights before other machines"):
        guest_config(facts, ["plan.optimizer_in_backward=true"])


def test_a_guest_runs_no_code_that_the_host_names(dataset):
    facts, _ = facts_and_digests(run_config(dataset))
    facts["recipe"]["task"] = "/tmp/task.py"
    with pytest.raises(ConfigError, match="code of its user"):
        guest_config(facts, [])


def test_a_guest_looks_for_data_below_its_directory_unless_it_names_a_place_itself(dataset):
    facts, _ = facts_and_digests(run_config(dataset))
    facts["recipe"]["data"]["path"] = "../../set"
    with pytest.raises(ConfigError, match="not below this directory"):
        guest_config(facts, [])
    assert guest_config(facts, ["data.path=../set"]).data.path == Path("../set")


def test_other_versions_of_libraries_are_named_with_those_of_both_machines(dataset):
    facts, _ = facts_and_digests(run_config(dataset))
    assert other_versions(facts) is None
    facts["versions"]["torch"] += "+another.build"
    assert other_versions(facts) is None
    own = facts["versions"]["numpy"]
    facts["versions"]["numpy"] = "1.0"
    assert other_versions(facts) == (
        f"studio has numpy 1.0, and this machine numpy {own}; they may round differently."
    )


def test_other_data_another_recipe_or_version_are_refused(dataset):
    config = run_config(dataset)
    facts, digests = facts_and_digests(config)
    with pytest.raises(DataError, match="is not that of studio"):
        check_facts(facts, config, {**digests, "test": {"inputs": "0" * 64}})
    other = RunConfig.model_validate({**config.model_dump(), "seed": 5})
    with pytest.raises(RunError, match="another recipe now"):
        check_facts(facts, other, digests)
    with pytest.raises(RunError, match="runs version 0"):
        check_facts({**facts, "program": "0"}, config, digests)
