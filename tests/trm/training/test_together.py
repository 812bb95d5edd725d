"""Several ranks, which are threads here, run one training: they decide together and stay identical."""

import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import gloo_worlds, shared_digest, thread_worlds, together
from tiny import Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import AllocationFailed, CheckpointError
from macbook_optimization.memory_readings import MemoryStats
from macbook_optimization.units import GIB
from trm.backends.base import Program, load_backend
from trm.backends.world import Member
from trm.config import RunConfig
from trm.feed import Feed
from trm.plan import Execution
from trm.reports.history import read_history
from trm.reports.machines import machines_of
from trm.runs.directory import Run, begin, open_run
from trm.tasks.dataset import complete_spec
from trm.tasks.registry import load_task
from trm.training import start
from trm.training.log import RunLog
from trm.training.loop import Limits
from trm.training.machines import Membership, efficiency, with_own_names
from trm.training.shares import largest_remainder, shares_of, split_slots
from trm.training.signals import StopRequest
from trm.training.together import DIGEST_STEPS, LEFT, REGROUPING
from trm.training.tuner import Tuner

EARLIER = Path(__file__).parents[2] / "fixtures" / "earlier"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def trainer_of(config, path, world):
    """Return the trainer of one rank; only the writer gets the path of the run."""
    task = load_task(config.task)
    train_split, test_split = start.open_splits(config, task)
    data = complete_spec(task, train_split)
    plan = replace(plan_of(config), micro_batch_size=1 + world.rank)
    run_path = open_run(path, config) if world.writes else Run(Path("not here"))
    log = RunLog(run_path, Recorder(), world.writes)
    backend = load_backend(Execution())
    program = Program.of(config, data)
    place = start._Place(world, None)
    state = start._state(backend, plan, Feed(config, task, train_split), program, place)
    tuner = Tuner(config, data, plan, log, partial(backend.peak_bytes, plan.execution))
    trainer = start._trainer(state, tuner, log, test_split, backend)
    trainer.resume()
    if world.writes:
        begin(log.run, config)
    return trainer


def train_ranks(config, path, shares=(4, 2), writer=0, **options):
    """Train with ranks, and return their trainers and outcomes."""
    prepare = options.pop("prepare", lambda trainer, stop: None)
    worlds = options.pop("worlds", thread_worlds)(shares, writer)
    limits = Limits(**options)

    def train(world):
        trainer = trainer_of(config, path, world)
        stop = StopRequest()
        prepare(trainer, stop)
        return trainer, trainer.run(limits, stop)

    results = together(worlds, train)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [trainer for trainer, _ in results], [outcome for _, outcome in results]


def digest(trainer):
    return shared_digest(trainer.state.learner)


def messages_of(trainer):
    return trainer.log.display.messages


def before_step(trainer, steps):
    """Call `steps[n](trainer)` before the n-th step is taken."""
    advance = trainer.state.advance

    def advance_after(next_size):
        action = steps.pop(trainer.state.step + 1, None)
        if action is not None:
            action(trainer)
        return advance(next_size)

    trainer.state.advance = advance_after


def tensors_of(path, step):
    checkpoint = next(each for each in Run(path).checkpoints().intact_checkpoints() if each.step == step)
    return checkpoint.load_all()


def assert_close(ours, theirs, **tolerance):
    for group, named in theirs.items():
        for name, tensor in named.items():
            torch.testing.assert_close(ours[group][name], tensor, msg=f"{group} {name}", **tolerance)


def recipe(dataset, **changes):
    puzzle_rows = {"puzzle_emb_ndim": 8, "puzzle_emb_len": 1}
    config = run_config(dataset, evaluation__every_steps=None, **changes)
    model = config.model.model_copy(update=puzzle_rows)
    return config.model_copy(update={"model": model})


def decoder_recipe(directory, **changes):
    """Return a recipe of a decoder with the training of the other tests, on a text of numbers."""
    source = directory / "text.txt"
    source.write_text(" ".join(str(number) for number in range(400)))
    options = {"from": [str(source)], "tokenizer": "char", "context": 8}
    load_task("text").build(options, directory / "text", lambda what, done, total: None)
    usual = run_config(directory / "text", evaluation__every_steps=None, **changes)
    training = {"supervision": "terminal", "optimizer": "adamw", "loss": "softmax_cross_entropy"}
    tree = usual.model_dump(mode="json", exclude={"model", "inference"})
    model = {"kind": "decoder", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
    return RunConfig.model_validate(
        {**tree, "task": "text", "model": model, "training": {**tree["training"], **training}}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("writer", "kind"), [(0, "recursion"), (1, "recursion"), (0, "decoder")])
def test_a_run_saved_by_two_ranks_resumes_in_one_and_three_and_back(tmp_path, dataset, writer, kind):
    changes = {"training__supervision": "terminal", "checkpoints": {"every_steps": 5, "keep": 9}}
    config = recipe(dataset, **changes) if kind == "recursion" else decoder_recipe(tmp_path, **changes)
    run(config, tmp_path / "alone")
    path = tmp_path / "together"
    train_ranks(config, path, (4, 2), writer, max_step=5)
    run(config, path, max_step=10)
    train_ranks(config, path, (3, 2, 1), max_step=15)
    _, outcomes = train_ranks(config, path, (1, 5))
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {("max_steps", 20)}
    for step in (5, 10, 15, 20):
        assert_close(tensors_of(path, step), tensors_of(tmp_path / "alone", step), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [thread_worlds, gloo_worlds])
def test_ranks_are_identical_after_skips_a_roll_back_a_resume_and_memory_pressure(tmp_path, dataset, worlds):
    config = recipe(dataset, training__max_steps=DIGEST_STEPS + 5, checkpoints={"every_steps": 10})
    path = tmp_path / "run"

    def spoil_latents(trainer):
        trainer.state.learner.latents.fill_(float("nan"))

    def spoil_weights(trainer):
        with torch.no_grad():
            next(iter(trainer.state.learner.parameters.values())).fill_(float("nan"))

    def fail_to_allocate(trainer):
        learner = trainer.state.learner
        step = learner.step

        def fail_once(batch, settings, next_size):
            learner.step = step

            def failing(done):
                raise AllocationFailed(torn=False)

            return step(batch, settings, failing)

        learner.step = fail_once

    def report_pressure(trainer):
        trainer.resources.memory.monitor.latest = MemoryStats(10 * GIB, GIB, GIB // 2, 0, None, "critical")

    def prepare(trainer, stop):
        if not trainer.state.world.writes:
            faults = {7: spoil_latents, 20: report_pressure, 33: fail_to_allocate, 44: spoil_weights}
            before_step(trainer, faults)

    first, _ = train_ranks(config, path, (4, 2), max_step=30, prepare=prepare, worlds=worlds)
    assert any("is 1 instead of 2: macOS reports memory pressure" in each for each in messages_of(first[1]))
    assert digest(first[0]) == digest(first[1])  # before the checkpoint is read, which makes them equal
    trainers, _ = train_ranks(config, path, (4, 2), prepare=prepare, worlds=worlds)
    assert trainers[0].state.step == trainers[1].state.step == DIGEST_STEPS + 5
    assert digest(trainers[0]) == digest(trainers[1])
    names = [row["event"] for row in Run(path).rows("events.jsonl")]
    assert {"step skipped", "rolled back", "resumed"} <= set(names)
    assert "weights differed" not in names  # which would have made them equal
    assert trainers[1].resources.memory.manager.batch_size < 2
    for trainer in trainers:
        assert any("puzzle_emb" in name for name in trainer.state.learner.model.state_dict())
    assert trainers[0].state.slots.to_lists() == trainers[1].state.slots.to_lists()


@pytest.mark.slow
def test_ranks_with_other_weights_get_those_of_the_writer_and_it_is_recorded(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("trm.training.together.DIGEST_STEPS", 5)
    config = recipe(dataset)

    def change(trainer):
        with torch.no_grad():
            next(iter(trainer.state.learner.parameters.values())).view(-1)[0] += 1e-4

    def prepare(trainer, stop):
        if not trainer.state.world.writes:
            before_step(trainer, {8: change})

    trainers, _ = train_ranks(config, tmp_path / "run", prepare=prepare)
    assert digest(trainers[0]) == digest(trainers[1])
    events = Run(tmp_path / "run").rows("events.jsonl")
    assert [row["step"] for row in events if row["event"] == "weights differed"] == [10]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_an_evaluation_is_shared_and_has_the_metrics_of_one_process(tmp_path, dataset, supervision):
    config = run_config(dataset, training__supervision=supervision, training__max_steps=3)
    alone = run(config, tmp_path / "alone").best
    _, outcomes = train_ranks(config, tmp_path / "ranks", (3, 2, 1))
    best = outcomes[0].best
    for name in ("examples", "exact_accuracy", "token_accuracy", "halt_accuracy", "accuracy_by_depth"):
        assert best[name] == alone[name]
    assert outcomes[1].best["token_accuracy"] == best["token_accuracy"]
    assert [row["kind"] for row in Run(tmp_path / "ranks").rows()].count("eval") == 1


@pytest.mark.parametrize(("stopped", "reason"), [(0, "interrupted"), (1, REGROUPING)])
def test_a_request_to_stop_ends_all_ranks_after_the_same_step(tmp_path, dataset, stopped, reason):
    config = recipe(dataset)

    def prepare(trainer, stop):
        def request(trainer):
            stop.arrived = True

        if trainer.state.world.rank == stopped:
            before_step(trainer, {6: request})

    _, outcomes = train_ranks(config, tmp_path / "run", (3, 3), prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {(reason, 5)}
    assert Run(tmp_path / "run").checkpoints().newest_step() == 5
    names = [row["event"] for row in Run(tmp_path / "run").rows("events.jsonl")]
    assert ("stopped" in names) == (reason == "interrupted")


def test_a_stop_at_a_host_that_trains_alone_takes_precedence_over_a_machine_that_arrives(tmp_path, dataset):
    def prepare(trainer, stop):
        wishes = trainer._wishes

        def stop_after_four_steps(limits):
            stop.arrived = trainer.state.step == 4
            return wishes(limits)

        trainer._wishes = stop_after_four_steps
        trainer.together.has_newcomers = lambda: trainer.state.step == 4

    _, outcomes = train_ranks(recipe(dataset), tmp_path / "run", (6,), prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {("interrupted", 4)}


@pytest.mark.parametrize(
    ("stopped", "reasons"), [(0, ["interrupted", "interrupted"]), (1, [REGROUPING, LEFT])]
)
def test_a_stop_after_the_last_agreement_ends_that_machine_and_at_the_host_all_of_them(
    tmp_path, dataset, stopped, reasons
):
    stops = {}

    def prepare(trainer, stop):
        stops[trainer.state.world.rank] = stop
        if trainer.state.world.writes:
            trainer.together.has_newcomers = lambda: trainer.state.step == 4
        if trainer.state.world.rank == stopped:
            save = trainer._save

            def save_and_stop():
                stop.arrived = trainer.state.step == 4
                return save()

            trainer._save = save_and_stop

    trainers, outcomes = train_ranks(recipe(dataset), tmp_path / "run", prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {(REGROUPING, 4)}

    def close(trainer):
        world = trainer.state.world
        stop = stops[world.rank]
        host_stops = Membership(world).close(stops=stop.arrived)
        return start._as_seen_here(outcomes[world.rank], trainer, stop, host_stops)

    assert [outcome.reason for outcome in together(trainers, close)] == reasons
    events = [row["event"] for row in Run(tmp_path / "run").rows("events.jsonl")]
    assert (events[-1] == "stopped") == (stopped == 0)


@pytest.mark.slow
def test_rows_say_how_long_all_others_waited_for_a_rank(tmp_path, dataset):
    config = recipe(dataset, training__max_steps=6)

    def prepare(trainer, stop):
        names = ("fast", "slow", "fast too")
        trainer.together.on_waited = lambda rank, seconds: trainer.log.count_waiting(names[rank], seconds)
        if trainer.state.world.rank == 1:
            before_step(trainer, dict.fromkeys((2, 3, 4), lambda trainer: time.sleep(1.0)))

    train_ranks(config, tmp_path / "run", (2, 2, 2), prepare=prepare)
    rows = [row for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    seconds = [row.get("waited_for", {}) for row in rows]
    assert 2.0 < sum(each.get("slow", 0.0) for each in seconds) < 25.0
    (machine,) = [each for each in machines_of(read_history(Run(tmp_path / "run"))) if each.name == "slow"]
    assert machine.waited_seconds == pytest.approx(sum(each.get("slow", 0.0) for each in seconds))


def test_a_machine_that_arrives_ends_the_world_after_a_save(tmp_path, dataset):
    def prepare(trainer, stop):
        if trainer.state.world.writes:
            trainer.together.has_newcomers = lambda: trainer.state.step == 4

    _, outcomes = train_ranks(recipe(dataset), tmp_path / "run", prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {(REGROUPING, 4)}
    assert Run(tmp_path / "run").checkpoints().newest_step() == 4
    train_ranks(recipe(dataset), tmp_path / "run", (2, 2, 2), max_step=6)
    names = [row["event"] for row in Run(tmp_path / "run").rows("events.jsonl")]
    assert "regrouping" in names
    assert "crashed" not in names


def test_a_limit_of_time_on_one_rank_ends_all_of_them(tmp_path, dataset):
    def prepare(trainer, stop):
        if not trainer.state.world.writes:
            trainer._wishes = lambda limits: type(trainer.together.agreed)(limit=trainer.state.step >= 3)

    _, outcomes = train_ranks(recipe(dataset), tmp_path / "run", prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {("limit", 3)}


def test_a_full_disk_at_the_writer_lets_all_ranks_wait_and_save_at_last(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("trm.training.checkpointing.RETRY_SECONDS", 0.4)
    config = recipe(dataset, training__max_steps=6, checkpoints={"every_steps": 2})
    failures = []

    def prepare(trainer, stop):
        if not trainer.state.world.writes:
            return
        manager = trainer.checkpointer.manager.manager
        save = manager.save

        def refuse(*arguments):
            if len(failures) < 4:
                failures.append(1)
                raise CheckpointError("No space left on device")
            return save(*arguments)

        manager.save = refuse

    _, outcomes = train_ranks(config, tmp_path / "run", prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {("max_steps", 6)}
    assert Run(tmp_path / "run").checkpoints().newest_step() == 6
    names = [row["event"] for row in Run(tmp_path / "run").rows("events.jsonl")]
    assert "not saved" in names
    assert "saved again" in names


class Arrivals:
    """The store of a host: a guest has arrived."""

    def has_newcomers(self):
        return True


def refuse_saves_while(trainer, is_full):
    manager = trainer.checkpointer.manager.manager
    save = manager.save

    def refuse(*arguments):
        if is_full():
            raise CheckpointError("No space left on device")
        return save(*arguments)

    manager.save = refuse


def test_a_machine_that_arrives_while_the_disk_is_full_waits_and_the_others_train(
    tmp_path, dataset, monkeypatch
):
    monkeypatch.setattr("trm.training.checkpointing.RETRY_SECONDS", 0.2)
    attempts = []

    def prepare(trainer, stop):
        start._connect(trainer, Membership(trainer.state.world, host=Arrivals()))
        if trainer.state.world.writes:

            def is_full():
                attempts.append(trainer.state.step)
                return len(attempts) < 40 and trainer.state.step < 12

            refuse_saves_while(trainer, is_full)
            trainer.together.has_newcomers = partial(_from_step, 4, trainer, trainer.together.has_newcomers)

    _, outcomes = train_ranks(recipe(dataset), tmp_path / "run", prepare=prepare)
    assert {outcome.reason for outcome in outcomes} == {REGROUPING}
    assert {outcome.step for outcome in outcomes} <= set(range(12, 20))
    assert attempts[0] == 4
    assert Run(tmp_path / "run").checkpoints().newest_step() == outcomes[0].step


def _from_step(step, trainer, has_newcomers):
    return trainer.state.step >= step and has_newcomers()


def test_a_guest_that_wants_to_leave_does_not_end_the_wait_for_room(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("trm.training.checkpointing.RETRY_SECONDS", 0.4)
    attempts = []
    requests = {}

    def prepare(trainer, stop):
        requests[trainer.state.world.rank] = stop
        if trainer.state.world.writes:

            def is_full():
                attempts.append(trainer.state.step)
                requests[1].arrived = True
                return len(attempts) <= 2

            refuse_saves_while(trainer, is_full)

    config = recipe(dataset, training__max_steps=6)
    _, outcomes = train_ranks(config, tmp_path / "run", prepare=prepare)
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {("max_steps", 6)}
    assert len(attempts) == 3
    assert Run(tmp_path / "run").checkpoints().newest_step() == 6


def test_a_run_of_an_earlier_version_resumes_on_two_ranks(tmp_path, monkeypatch):
    shutil.copytree(EARLIER, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path / "earlier")
    config = Run(Path("mixer")).config
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"deterministic": False})}
    )
    expected = tensors_of(Path("mixer"), 20)
    shutil.rmtree(Path("mixer") / "checkpoints" / "step-00000020")
    size = config.training.effective_batch_size
    _, outcomes = train_ranks(config, Path("mixer").absolute(), (size - 2, 2))
    assert {(outcome.reason, outcome.step) for outcome in outcomes} == {("max_steps", 20)}
    found = tensors_of(Path("mixer"), 20)
    # Two steps of deep supervision in float32: rounding grows about tenfold per step.
    assert_close({"weights": found["weights"]}, {"weights": expected["weights"]}, rtol=1e-2, atol=1e-3)


speeds = st.floats(0.01, 1000.0)


@given(weights=st.lists(speeds, min_size=1, max_size=8), extra=st.integers(0, 500))
def test_shares_add_up_and_differ_from_their_quota_by_less_than_one(weights, extra):
    total = len(weights) + extra
    shares = largest_remainder(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


@given(data=st.data(), weights=st.lists(speeds, min_size=1, max_size=8))
def test_every_machine_has_a_slot_and_none_has_more_than_fit(data, weights):
    limits = data.draw(st.lists(st.integers(1, 60), min_size=len(weights), max_size=len(weights)))
    total = data.draw(st.integers(len(weights), max(len(weights), sum(limits))))
    shares = split_slots(total, weights, limits)
    assert sum(shares) == total
    assert all(1 <= share <= limit for share, limit in zip(shares, limits, strict=True))


def test_slots_follow_the_measured_speed_within_memory():
    assert shares_of([Member("a", 20.0), Member("b", 10.0)], 48) == (32, 16)
    assert shares_of([Member("a", 30.0), Member("b", 20.0), Member("c", 10.0)], 48) == (24, 16, 8)
    assert shares_of([Member("a", 20.0, max_slots=8), Member("b", 10.0)], 48) == (8, 40)
    assert shares_of([Member("a"), Member("b", 10.0)], 48) == (24, 24)
    assert shares_of([Member("a", 20.0, max_slots=8), Member("b", 10.0, max_slots=8)], 48) == (32, 16)


def test_the_predicted_efficiency_is_the_share_that_the_slowest_machine_computes():
    members = [Member("a", 32.0), Member("b", 16.0)]
    assert efficiency(members, (32, 16), 0.25) == pytest.approx(0.8)
    assert efficiency([*members, Member("c")], (16, 16, 16), 0.25) is None


def test_machines_with_the_same_name_are_numbered():
    found = with_own_names([Member("mac"), Member("mac"), Member("other"), Member("mac")])
    assert [member.name for member in found] == ["mac", "mac (2)", "other", "mac (3)"]
