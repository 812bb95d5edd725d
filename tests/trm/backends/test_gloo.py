"""Ranks that are processes learn what one process learns."""

import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from ranks import shared_digest
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config

from trm.backends.base import StepSettings
from trm.backends.pytorch.watchdog import Watchdog
from trm.backends.world import SingleProcess, owned_slots
from trm.config import DecoderConfig
from trm.tasks.base import DataSpec

NUM_SLOTS = 48
NUM_STEPS = 40
DATA = replace(SPEC, num_puzzle_identifiers=7)
TEXT = DataSpec(max_len=9, vocab_size=13, num_outputs=13)
DECODER = DecoderConfig(
    hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24, dropout=0.1
)


class MeanWorld:
    """A world that is wrong: the mean over ranks of different sizes in place of the sum over slots."""

    def __init__(self, world):
        self.world = world
        self.num_weights = 0  # at the beginning of a message

    def __getattr__(self, name):
        return getattr(self.world, name)

    def sum(self, message):
        message[: self.num_weights] *= NUM_SLOTS / (self.size * self.shares[self.rank])
        self.world.sum(message)


def recursive_learner(world, supervision):
    torch.set_default_dtype(torch.float64)
    settings = training_config(
        supervision=supervision, effective_batch_size=NUM_SLOTS, noise=0.1, max_grad_norm=0.5
    )
    model = model_config(**VARIANTS["mixer, puzzle prefix"], halt_max_steps=4)
    return make_learner(model, settings, spec=DATA, world=world)


def decoder_learner(world):
    """Dropout draws from the noise seed of a slot, so it is the same wherever the slot is computed."""
    torch.set_default_dtype(torch.float64)
    settings = training_config(
        supervision="terminal",
        optimizer="adamw",
        loss="softmax_cross_entropy",
        effective_batch_size=NUM_SLOTS,
        max_grad_norm=0.05,
    )
    return make_learner(DECODER, settings, spec=TEXT, world=world)


LEARNERS = {
    "terminal supervision": partial(recursive_learner, supervision="terminal"),
    "decoder": decoder_learner,
}


def take_step(learner, step, learning_rate=3e-3):
    """Take a step of the slots that this rank owns, in micro-batches of another size on every rank."""
    batch = make_batch(NUM_SLOTS, spec=learner.program.data, seed=step)
    seeds = 1000 * step + np.arange(NUM_SLOTS)
    batch = replace(batch, noise_seeds=seeds, all_puzzle_identifiers=batch.puzzle_identifiers)
    settings = StepSettings(step, 2, learning_rate, puzzle_emb_lr=1e-2)
    world = learner.world
    return learner.step(batch[owned_slots(world)], settings, lambda done: 5 + 4 * world.rank)


def losses_of(world, kind):
    learner = LEARNERS[kind](world)
    if isinstance(world, MeanWorld):
        world.num_weights = learner.message.num_weights
    results = [take_step(learner, step) for step in range(1, NUM_STEPS + 1)]
    assert max(each.grad_norm for each in results) > learner.training.max_grad_norm  # some are clipped
    return [each.loss for each in results], shared_digest(learner)


def losses_with_means(world, kind):
    return losses_of(MeanWorld(world), kind)[0]


def losses_from_common_states(world):
    """Compare every step of these ranks with that of one process, from the state of that process."""
    learner = recursive_learner(world, "deep")
    single = recursive_learner(SingleProcess(NUM_SLOTS), "deep") if world.writes else None
    differences = [0.0]
    for step in range(1, NUM_STEPS + 1):
        groups = {name: dict(tensors) for name, tensors in single.state().items()} if single else {}
        learner.load_state(groups)
        found = take_step(learner, step)
        if single is None:
            continue
        expected = take_step(single, step)
        margins = np.abs(found.halt_margins - expected.halt_margins).max()
        differences.append(max(abs(found.loss - expected.loss), float(margins)))
    return differences


@pytest.fixture(scope="module", params=LEARNERS)
def alone(request):
    """A kind of learner whose trajectory is reproducible, and its losses in one process."""
    before = torch.get_default_dtype()
    try:
        losses, _ = losses_of(SingleProcess(NUM_SLOTS), request.param)
        yield request.param, losses
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(32, 16), (24, 16, 8)])
def test_processes_have_the_losses_of_one_process(shares, alone):
    kind, expected = alone
    found = run_ranks(losses_of, shares, kind)
    for losses, digest in found:
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-12)
        assert digest == found[0][1]


@pytest.mark.slow
def test_a_mean_in_place_of_the_sum_learns_something_else(alone):
    kind, expected = alone
    losses = run_ranks(losses_with_means, (32, 16), kind)[0]
    assert losses[0] == pytest.approx(expected[0], abs=1e-12)  # before the first update
    assert np.abs(np.subtract(losses, expected)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(32, 16), (24, 16, 8)])
def test_processes_make_every_step_of_one_process_with_deep_supervision(shares):
    for differences in run_ranks(losses_from_common_states, shares):
        assert max(differences) < 1e-12


def digest_with_other_threads(world, optimizer):
    """Train with updates that are large enough to be divided among threads, of which each rank has more."""
    threads = 1 + world.rank
    torch.set_num_threads(threads)
    settings = training_config(supervision="terminal", optimizer=optimizer, effective_batch_size=NUM_SLOTS)
    model = model_config(**VARIANTS["mixer"], hidden_size=130, L_cycles=1, H_cycles=1)
    spec = replace(DATA, vocab_size=1021)  # a prime: the tables are not a whole number of vectors
    learner = make_learner(model, settings, spec=spec, world=world)
    for step in range(1, 11):
        take_step(learner, step)
    assert torch.get_num_threads() == threads
    return shared_digest(learner)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam_atan2", "muon"])
def test_processes_with_different_threads_have_the_same_weights_and_moments(optimizer):
    digests = run_ranks(digest_with_other_threads, (32, 16), optimizer)
    assert digests[0] == digests[1]


def use_every_method(world):
    own = torch.full((2, world.shares[world.rank], 3), float(world.rank))
    whole = world.gather(own, 1)
    copied = torch.full((2,), float(world.rank))
    world.copy_from_writer(copied)
    back = torch.zeros_like(own)
    world.scatter(whole, back, 1)
    return {
        "agreed": world.agree([world.rank, -world.rank]),
        "told": world.broadcast({"rank": world.rank, "text": "ä"}),
        "gathered": None if whole is None else whole[0, :, 0].tolist(),
        "copied": copied.tolist(),
        "scattered": torch.equal(own, back),
    }


@pytest.mark.slow
def test_processes_agree_and_exchange_json_and_tensors():
    host, guest = run_ranks(use_every_method, (2, 3))
    common = {"agreed": [1, 0], "told": {"rank": 0, "text": "ä"}, "copied": [0.0, 0.0], "scattered": True}
    assert host == {**common, "gathered": [0.0, 0.0, 1.0, 1.0, 1.0]}
    assert guest == {**common, "gathered": None}


def sum_after_a_long_step(world, seconds):
    if world.rank == 1:
        time.sleep(seconds)
    message = torch.ones(3)
    world.sum(message)
    return message.tolist()


@pytest.mark.slow
def test_a_step_of_three_times_the_timeout_does_not_end_the_world():
    found = run_ranks(sum_after_a_long_step, (1, 1), 6.0, timeout_seconds=2.0)
    assert found == [[2.0, 2.0, 2.0]] * 2


class Counters:
    """A store of counters, which may stop answering or close its connections."""

    def __init__(self):
        self.counts = {}
        self.answers = threading.Event()
        self.answers.set()
        self.last_answered = 0.0  # when its own sign of life was requested that was answered last
        self.is_closed = False

    def add(self, key, amount):
        requested_at = time.monotonic()
        self.answers.wait()
        if self.is_closed:
            raise RuntimeError("Connection reset by peer")
        self.counts[key] = self.counts.get(key, 0) + amount
        if key == "own":
            self.last_answered = requested_at
        return self.counts[key]


class Losses:
    """Receives what a watchdog reports."""

    def __init__(self):
        self.reported = threading.Event()

    def __call__(self, names, cause):
        self.reported_at = time.monotonic()
        self.names, self.cause = names, cause
        self.reported.set()


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["peer", "host"])
def test_a_watchdog_names_who_shows_no_sign_of_life(silent):
    store, lost = Counters(), Losses()
    watchdog = Watchdog(store, "own", "the host", 4.0, lost)
    watchdog.start()
    watchdog.watch({"other": "a guest"})
    for _ in range(50):
        last_sign = time.monotonic()
        store.add("other", 1)
        time.sleep(0.1)
    assert not lost.reported.is_set()
    if silent == "host":
        store.answers.clear()
        last_sign = store.last_answered
    assert lost.reported.wait(30)
    store.answers.set()
    assert lost.names == ["a guest" if silent == "peer" else "the host"]
    assert lost.cause == "no sign of life for 4 s"
    assert lost.reported_at - last_sign > 4.0


def test_a_watchdog_distinguishes_a_closed_connection_from_a_host_that_shows_no_sign_of_life():
    store, lost = Counters(), Losses()
    store.is_closed = True
    watchdog = Watchdog(store, "own", "the host", 4.0, lost)
    watchdog.start()
    assert lost.reported.wait(30)
    assert (lost.names, lost.cause) == (["the host"], "the connection to the host was closed")


def test_a_watchdog_that_was_stopped_reports_nobody():
    lost = Losses()
    watchdog = Watchdog(Counters(), "own", "the host", 0.2, lost)
    watchdog.start()
    watchdog.watch({"other": "a guest"})
    watchdog.stop()
    time.sleep(0.5)
    assert not lost.reported.is_set()
