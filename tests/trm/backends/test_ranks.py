"""Several processes that train one run: each owns some slots, and all of them make the same update."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config

from macbook_optimization.errors import ConfigError, NonFiniteError
from trm.backends.base import SingleProcess, StepSettings, owned_slots

NUM_SLOTS = 6
SHARES = [(2, 4), (5, 1), (1, 2, 3)]
TIMEOUT_SECONDS = 60


class Exchange:
    """Where ranks, which are threads here, leave their messages for each other."""

    def __init__(self, num_ranks):
        self.messages = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_SECONDS)


@dataclass
class ThreadWorld:
    """One rank. Messages are summed in the order of the ranks, so that every rank gets the same bits."""

    rank: int
    shares: tuple[int, ...]
    exchange: Exchange

    @property
    def size(self):
        return len(self.shares)

    @property
    def writes(self):
        return self.rank == 0

    def sum(self, message):
        self.exchange.messages[self.rank] = message.copy()
        self.exchange.barrier.wait()
        message[:] = reduce(np.add, self.exchange.messages)
        self.exchange.barrier.wait()  # nobody replaces a message that another rank still reads


def ranks_of(shares, **learner):
    exchange = Exchange(len(shares))
    worlds = [ThreadWorld(rank, shares, exchange) for rank in range(len(shares))]
    return [make_learner(world=world, **learner) for world in worlds]


def take_step(ours, batch, step=1, learning_rate=3e-3):
    settings = StepSettings(step, 2, learning_rate=learning_rate, puzzle_emb_lr=0.0)
    own = batch[owned_slots(ours.world)].trimmed(1)
    return ours.step(own, settings, lambda done: 2)


def together(ranks, compute):
    """Call `compute` with all ranks at the same time; return results or exceptions in their order."""
    with ThreadPoolExecutor(len(ranks), initializer=partial(torch.set_num_threads, 1)) as pool:
        futures = [pool.submit(compute, ours) for ours in ranks]
    return [future.exception() or future.result() for future in futures]


def setup_of(supervision, variant="attention, rotary", **training):
    return {
        "model": model_config(**VARIANTS[variant]),
        "training": training_config(supervision=supervision, effective_batch_size=NUM_SLOTS, **training),
    }


def steps_of(num_steps):
    return [(step, make_batch(NUM_SLOTS, seed=step)) for step in range(1, num_steps + 1)]


def assert_same_update(ours, theirs, **tolerance):
    for group in ("weights", "optimizer", "ema"):
        for name, tensor in theirs.state()[group].items():
            torch.testing.assert_close(ours.state()[group][name], tensor, msg=f"{group} {name}", **tolerance)


@given(shares=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_ranks_partition_the_slots(shares):
    owned = [
        np.arange(sum(shares))[owned_slots(ThreadWorld(rank, tuple(shares), None))]
        for rank in range(len(shares))
    ]
    assert [len(slots) for slots in owned] == shares
    assert np.concatenate(owned).tolist() == list(range(sum(shares)))


def test_a_single_process_owns_every_slot_and_adds_nothing():
    world = SingleProcess(NUM_SLOTS)
    message = np.array([1.5, -2.0], dtype=np.float32)
    world.sum(message)
    assert owned_slots(world) == slice(0, NUM_SLOTS)
    assert message.tolist() == [1.5, -2.0]
    assert world.writes


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("variant", ["mixer", "attention, rotary"])
def test_all_ranks_have_the_same_weights_to_the_last_bit(shares, supervision, variant):
    ranks = ranks_of(shares, **setup_of(supervision, variant, max_grad_norm=1.0))
    for step, batch in steps_of(3):
        results = together(ranks, partial(take_step, batch=batch, step=step))
        assert len({(result.loss, result.grad_norm, result.token_accuracy) for result in results}) == 1
    for other in ranks[1:]:
        assert_same_update(other, ranks[0], rtol=0, atol=0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("shares", "optimizer"),
    [*((shares, "adam_atan2") for shares in SHARES), ((1, 2, 3), "adamw"), ((1, 2, 3), "muon")],
)
def test_ranks_learn_what_one_process_learns_with_terminal_supervision(shares, optimizer):
    setup = setup_of("terminal", optimizer=optimizer)
    single, ranks = make_learner(**setup), ranks_of(shares, **setup)
    for step, batch in steps_of(4):
        expected = take_step(single, batch, step)
        for result in together(ranks, partial(take_step, batch=batch, step=step)):
            assert result.loss == pytest.approx(expected.loss, abs=1e-12)
    for ours in ranks:
        assert_same_update(ours, single, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("shares", "variant"),
    [
        *((shares, "attention, learned positions") for shares in SHARES),
        ((1, 2, 3), "mixer"),
        ((1, 2, 3), "transformer"),
    ],
)
def test_ranks_make_the_step_of_one_process_with_deep_supervision(shares, variant):
    """From a common state: a trajectory of deep supervision amplifies rounding."""
    setup = setup_of("deep", variant)
    single, ranks = make_learner(**setup), ranks_of(shares, **setup)
    for step, batch in steps_of(2):
        take_step(single, batch, step)
    for ours in ranks:
        groups = {name: dict(tensors) for name, tensors in single.state().items()}
        groups["latents"] = {"latents": single.latents[:, :, owned_slots(ours.world)]}
        ours.load_state(groups)
    batch = make_batch(NUM_SLOTS, seed=3)
    expected = take_step(single, batch, 3)
    results = together(ranks, partial(take_step, batch=batch, step=3))
    for ours, result in zip(ranks, results, strict=True):
        assert_same_update(ours, single, rtol=0, atol=1e-12)
        own = single.latents[:, :, owned_slots(ours.world)]
        torch.testing.assert_close(ours.latents, own, rtol=0, atol=1e-12)
        assert result.loss == pytest.approx(expected.loss, abs=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shares", SHARES)
def test_a_result_has_the_means_of_all_ranks_and_the_rows_of_its_own_slots(shares):
    setup = setup_of("terminal", max_grad_norm=0.1)
    single, ranks = make_learner(**setup), ranks_of(shares, **setup)
    alone = make_learner(setup["model"], training_config(supervision="terminal", effective_batch_size=1))
    batch = make_batch(NUM_SLOTS)
    losses = [
        take_step(alone, replace(batch[i : i + 1], slots=np.array([0])), learning_rate=0.0).loss
        for i in range(NUM_SLOTS)
    ]
    expected = take_step(single, batch)
    for ours, result in zip(ranks, together(ranks, partial(take_step, batch=batch)), strict=True):
        own = owned_slots(ours.world)
        assert result.loss == pytest.approx(np.mean(losses), abs=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, abs=1e-12)
        assert result.token_accuracy == pytest.approx(expected.token_accuracy, abs=1e-12)
        np.testing.assert_array_equal(result.exact, expected.exact[own])
        np.testing.assert_allclose(result.halt_margins, expected.halt_margins[own], rtol=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shares", SHARES)
def test_every_rank_may_have_rows_of_another_width(shares):
    setup = setup_of("terminal")
    single, ranks = make_learner(**setup), ranks_of(shares, **setup)
    lengths = np.array([4, 1, 2, 1, 3, 2])
    widths = {
        ours.world.rank: make_padded(1, lengths)[owned_slots(ours.world)].trimmed(1).inputs.shape[1]
        for ours in ranks
    }
    assert len(set(widths.values())) > 1
    for step in (1, 2, 3):
        batch = make_padded(step, lengths)
        take_step(single, batch, step)
        together(ranks, partial(take_step, batch=batch, step=step))
    for ours in ranks:
        assert_same_update(ours, single, rtol=0, atol=1e-12)


def make_padded(seed, lengths):
    batch = replace(make_batch(NUM_SLOTS, seed=seed), lengths=lengths)
    return replace(batch, labels=np.where(batch.padding, -100, np.abs(batch.labels) % SPEC.num_outputs))


def test_a_nan_on_one_rank_stops_the_step_on_all_of_them():
    """The latents of one slot of the last rank are NaN; no rank may change its weights."""
    ranks = ranks_of((2, 4), **setup_of("deep"))
    ranks[1].latents.fill_(float("nan"))
    untouched = ranks_of((2, 4), **setup_of("deep"))[0]
    batch = replace(make_batch(NUM_SLOTS), fresh=np.arange(NUM_SLOTS) != 5)
    for outcome in together(ranks, partial(take_step, batch=batch)):
        assert isinstance(outcome, NonFiniteError)
    for ours in ranks:
        assert_same_update(ours, untouched, rtol=0, atol=0)


def test_puzzle_embeddings_are_refused_with_several_ranks():
    setup = setup_of("deep", "attention, puzzle prefix")
    with pytest.raises(ConfigError, match="Puzzle embeddings"):
        ranks_of((2, 4), **setup)
    ranks_of((NUM_SLOTS,), **setup)
