"""Several processes that train one run: each owns some slots, and all of them make the same update."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import ThreadWorld, gloo_worlds, thread_worlds, together
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config

from macbook_optimization.errors import NonFiniteError
from trm.backends.base import StepSettings
from trm.backends.world import SingleProcess, StepAbandoned, owned_slots

NUM_SLOTS = 6
SHARES = [(2, 4), (5, 1), (1, 2, 3)]


def ranks_of(shares, **learner):
    return [make_learner(world=world, **learner) for world in thread_worlds(shares)]


def take_step(ours, batch, step=1, learning_rate=3e-3):
    settings = StepSettings(step, 2, learning_rate=learning_rate, puzzle_emb_lr=1e-2)
    own = replace(batch, all_puzzle_identifiers=batch.puzzle_identifiers)[owned_slots(ours.world)]
    return ours.step(own.trimmed(1), settings, lambda done: 2 + ours.world.rank)


def setup_of(supervision, variant="attention, rotary", **training):
    return {
        "model": model_config(**VARIANTS[variant]),
        "training": training_config(supervision=supervision, effective_batch_size=NUM_SLOTS, **training),
    }


def steps_of(num_steps):
    return [(step, make_batch(NUM_SLOTS, seed=step)) for step in range(1, num_steps + 1)]


def assert_same_update(ours, theirs, **tolerance):
    for group, expected in shared_state(theirs).items():
        for name, tensor in expected.items():
            torch.testing.assert_close(shared_state(ours)[group][name], tensor, msg=name, **tolerance)


def shared_state(learner):
    """Return what is the same on all ranks, as this one has it."""
    state = {"weights": learner.model.state_dict(), "optimizer": learner.optimizer.moments}
    return {**state, "ema": learner.averaged.state_dict()}


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
    message = torch.tensor([1.5, -2.0])
    world.sum(message)
    assert owned_slots(world) == slice(0, NUM_SLOTS)
    assert message.tolist() == [1.5, -2.0]
    assert world.agree([1, 0]) == [1, 0]
    assert world.broadcast({"step": 3}) == {"step": 3}
    assert world.gather(message, 0) is message
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
    states = []
    for ours in ranks:
        groups = {name: dict(tensors) for name, tensors in single.state().items()}
        states.append(groups if ours.world.writes else {})
    together(ranks, lambda ours: ours.load_state(states[ours.world.rank]))
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
def test_a_result_is_that_of_all_slots_on_every_rank(shares):
    setup = setup_of("terminal", max_grad_norm=0.1)
    single, ranks = make_learner(**setup), ranks_of(shares, **setup)
    alone = make_learner(setup["model"], training_config(supervision="terminal", effective_batch_size=1))
    batch = make_batch(NUM_SLOTS)
    losses = [
        take_step(alone, replace(batch[i : i + 1], slots=np.array([0])), learning_rate=0.0).loss
        for i in range(NUM_SLOTS)
    ]
    expected = take_step(single, batch)
    for result in together(ranks, partial(take_step, batch=batch)):
        assert result.loss == pytest.approx(np.mean(losses), abs=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, abs=1e-12)
        assert result.token_accuracy == pytest.approx(expected.token_accuracy, abs=1e-12)
        np.testing.assert_array_equal(result.exact, expected.exact)
        np.testing.assert_allclose(result.halt_margins, expected.halt_margins, rtol=1e-6)


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


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_complete_a_step_abandons_it_everywhere(broken):
    ranks = ranks_of((2, 4), **setup_of("deep", "attention, puzzle prefix"))
    untouched = ranks_of((2, 4), **setup_of("deep", "attention, puzzle prefix"))[0]

    def step(ours):
        batch = replace(
            make_batch(NUM_SLOTS), all_puzzle_identifiers=make_batch(NUM_SLOTS).puzzle_identifiers
        )

        def next_size(done):
            if done and ours.world.rank == broken:
                raise KeyboardInterrupt
            return 1

        return ours.step(batch[owned_slots(ours.world)], StepSettings(1, 2, 1e-2, 1e-2), next_size)

    outcomes = together(ranks, step)
    assert isinstance(outcomes.pop(broken), KeyboardInterrupt)
    assert isinstance(outcomes[0], StepAbandoned)
    for ours in ranks:
        assert_same_update(ours, untouched, rtol=0, atol=0)
    results = together(ranks, partial(take_step, batch=make_batch(NUM_SLOTS)))
    assert results[0].loss == results[1].loss


@pytest.mark.parametrize("writer", [0, 1])
def test_a_state_is_whole_at_the_writer_and_loads_into_any_number_of_ranks(writer):
    setup = setup_of("deep", "attention, puzzle prefix")
    first = [make_learner(world=world, **setup) for world in thread_worlds((2, 4), writer)]
    together(first, partial(take_step, batch=make_batch(NUM_SLOTS)))
    whole = together(first, lambda ours: ours.state())[writer]
    assert whole["latents"]["latents"].shape[2] == NUM_SLOTS
    second = ranks_of((1, 2, 3), **setup)
    together(second, lambda ours: ours.load_state(dict(whole) if ours.world.writes else {}))
    for ours in second:
        assert_same_update(ours, first[writer], rtol=0, atol=0)
    again = together(second, lambda ours: ours.state())[0]
    assert torch.equal(again["latents"]["latents"], whole["latents"]["latents"])


@pytest.mark.parametrize("precisions", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_latents_have_the_precision_of_each_rank_whatever_that_of_others_and_of_the_checkpoint(precisions):
    setup = setup_of("deep")
    ranks = together(
        gloo_worlds((2, 4)),
        lambda world: make_learner(world=world, precision=precisions[world.rank], **setup),
    )
    together(ranks, partial(take_step, batch=make_batch(NUM_SLOTS)))
    whole = together(ranks, lambda ours: ours.state())[0]["latents"]["latents"]
    assert torch.equal(whole, torch.cat([ours.latents.to(whole.dtype) for ours in ranks], 2))
    for written_with in ("float32", "bfloat16"):
        single = make_learner(precision=written_with, **setup)
        take_step(single, make_batch(NUM_SLOTS, seed=1))
        states = [single.state(), {}]
        together(ranks, lambda ours, states=states: ours.load_state(states[ours.world.rank]))
        for ours, precision in zip(ranks, precisions, strict=True):
            assert ours.latents.dtype == getattr(torch, precision)
            own = single.latents[:, :, owned_slots(ours.world)]
            assert torch.equal(ours.latents, own.to(ours.latents.dtype))


def test_weights_that_differ_are_noticed_and_replaced_by_those_of_the_writer():
    ranks = ranks_of((2, 4), **setup_of("deep"))
    assert ranks[0].digest() == ranks[1].digest()
    with torch.no_grad():
        next(iter(ranks[1].parameters.values())).view(-1)[0] += 1e-3
    assert ranks[0].digest() != ranks[1].digest()
    together(ranks, lambda ours: ours.copy_from_writer())
    assert_same_update(ranks[1], ranks[0], rtol=0, atol=0)


def test_gradients_in_bfloat16_are_rounded_alike_on_every_rank():
    setup = setup_of("terminal", gradient_message="bfloat16")
    ranks, exact = ranks_of((2, 4), **setup), make_learner(**setup)
    expected = take_step(exact, make_batch(NUM_SLOTS))
    results = together(ranks, partial(take_step, batch=make_batch(NUM_SLOTS)))
    assert results[0].grad_norm == results[1].grad_norm
    assert results[0].loss == pytest.approx(expected.loss, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    assert results[0].grad_norm != expected.grad_norm
    assert_same_update(ranks[1], ranks[0], rtol=0, atol=0)


@pytest.mark.usefixtures("float64")
def test_with_the_whole_gradient_topk_learns_what_one_process_learns():
    setup = setup_of("terminal", "attention, puzzle prefix", gradient_message="topk", gradient_share=1.0)
    single, ranks = make_learner(**setup), ranks_of((1, 2, 3), **setup)
    for step, batch in steps_of(3):
        take_step(single, batch, step)
        together(ranks, partial(take_step, batch=batch, step=step))
    for ours in ranks:
        assert_same_update(ours, single, rtol=0, atol=1e-12)
        assert not ours.message.sparse.remainder.any()


def gradient_of(ours):
    return torch.cat([each.grad.view(-1) for each in ours.parameters.values()])


def test_topk_sends_the_largest_entries_of_every_rank_and_the_others_later():
    """Two steps with the same weights: what is sent, and what remains, is exactly twice the gradient."""
    setup = setup_of("terminal", gradient_message="topk", gradient_share=0.1)
    ranks = ranks_of((2, 4), **setup)
    whole = ranks_of((2, 4), **setup_of("terminal"))
    batch = make_batch(NUM_SLOTS)
    step = partial(take_step, batch=batch, learning_rate=0.0)
    together(whole, step)
    expected = gradient_of(whole[0])
    sent = []
    for _ in range(2):
        results = together(ranks, step)
        assert results[0].grad_norm == results[1].grad_norm
        assert torch.equal(gradient_of(ranks[0]), gradient_of(ranks[1]))
        sent.append(gradient_of(ranks[0]))
    num_sent = round(0.1 * len(expected))
    assert num_sent <= int(sent[0].count_nonzero()) <= 2 * num_sent
    remainders = sum(each.message.sparse.remainder for each in ranks)
    torch.testing.assert_close(sum(sent) + remainders, 2 * expected)
    assert torch.linalg.vector_norm(sent[0]) > 0.5 * torch.linalg.vector_norm(expected)


def test_a_step_that_did_not_happen_leaves_the_remainder_as_it_was():
    setup = setup_of("deep", gradient_message="topk", gradient_share=0.1)
    ranks = ranks_of((2, 4), **setup)
    together(ranks, partial(take_step, batch=make_batch(NUM_SLOTS)))
    before = [each.message.sparse.remainder.clone() for each in ranks]
    ranks[1].latents.fill_(float("nan"))
    batch = replace(make_batch(NUM_SLOTS), fresh=np.arange(NUM_SLOTS) != 5)
    for outcome in together(ranks, partial(take_step, batch=batch)):
        assert isinstance(outcome, NonFiniteError)
    for ours, expected in zip(ranks, before, strict=True):
        assert torch.equal(ours.message.sparse.remainder, expected)
        assert expected.any()
    state = together(ranks, lambda ours: ours.state())[0]
    together(ranks, lambda ours: ours.load_state(dict(state) if ours.world.writes else {}))
    assert not any(each.message.sparse.remainder.any() for each in ranks)
