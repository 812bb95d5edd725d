"""Slots and the order of examples are pure functions of the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.errors import CheckpointError
from trm.batches import Order, Purpose, Slots, permuted, random_words, uniforms


def order(num_slots: int, num_groups: int, seed: int = 0) -> Order:
    ends = np.arange(num_groups + 1)
    return Order(seed, num_slots, group_indices=ends, puzzle_indices=ends)


@given(size=st.integers(1, 300), key=st.integers(0, 2**62))
def test_a_permutation_visits_every_position_once(size, key):
    positions = np.arange(size)
    keys = np.full(size, key, dtype=np.uint64)
    assert sorted(permuted(positions, size, keys)) == list(range(size))


def test_permutations_of_two_epochs_differ():
    positions = np.arange(200)
    first, second = (
        permuted(positions, 200, random_words(0, Purpose.ORDER, np.full(200, epoch))) for epoch in (0, 1)
    )
    assert (first == second).mean() < 0.1


@given(num_slots=st.integers(1, 20), num_groups=st.integers(1, 50))
def test_an_epoch_takes_every_puzzle_once(num_slots, num_groups):
    """Slots that all move on at every step pass through the set in epochs."""
    ours = order(num_slots, num_groups)
    steps = -(-num_groups // num_slots)
    taken = np.concatenate([ours.examples(np.full(num_slots, k))[0] for k in range(steps)])
    assert sorted(taken[:num_groups]) == list(range(num_groups))


def test_a_slots_example_does_not_depend_on_the_other_slots():
    ours = order(8, 100)
    k = np.arange(8)
    together, _ = ours.examples(k)
    for slot in range(8):
        others = np.zeros(8, dtype=np.int64)
        others[slot] = k[slot]
        assert ours.examples(others)[0][slot] == together[slot]


def test_examples_come_from_the_group_and_puzzle_that_was_drawn():
    ours = Order(3, 50, group_indices=np.array([0, 2, 5]), puzzle_indices=np.array([0, 4, 5, 6, 9, 10]))
    examples, puzzles = ours.examples(np.arange(50))
    start, stop = ours.puzzle_indices[puzzles], ours.puzzle_indices[puzzles + 1]
    assert ((start <= examples) & (examples < stop)).all()
    assert set(puzzles) == set(range(5))


def test_uniform_draws_are_uniform_and_independent_of_their_neighbours():
    draws = uniforms(7, np.arange(1000)[:, None], np.arange(50))
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    # 50,000 draws in 20 bins: chi-square with 19 degrees of freedom exceeds 43.8 once in a thousand.
    assert (((counts - 2500) ** 2) / 2500).sum() < 43.8
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02


def test_noise_is_drawn_anew_for_every_slot_and_example():
    ours = order(8, 100)
    seeds = np.concatenate([ours.noise_seeds(np.full(8, k)) for k in range(100)])
    assert len(set(seeds)) == 800
    assert seeds.min() >= 0
    k = np.arange(8)
    assert (ours.noise_seeds(k) == np.diagonal(seeds[:64].reshape(8, 8))).all()


def test_another_seed_is_another_order():
    first, second = (order(100, 1000, seed).examples(np.zeros(100, dtype=np.int64))[0] for seed in (0, 1))
    assert (first != second).mean() > 0.9


def test_new_slots_start_with_their_first_example():
    slots = Slots.new(4).refilled()
    assert slots.k.tolist() == [0, 0, 0, 0]
    assert slots.fresh.all()


def test_a_slot_moves_on_when_the_model_halts_and_at_the_last_step():
    slots = Slots(
        k=np.array([5, 5, 5]),
        stage=np.zeros(3, dtype=np.int64),
        supervised=np.array([0, 0, 3]),
        halted=np.zeros(3, dtype=bool),
    )
    after = slots.supervised_once(np.array([1.0, -1.0, -1.0], dtype=np.float32), 0, 4, exploration=0.0)
    assert after.halted.tolist() == [True, False, True]
    moved = after.refilled()
    assert moved.k.tolist() == [6, 5, 6]
    assert moved.supervised.tolist() == [0, 1, 0]


def test_exploration_keeps_some_slots_thinking():
    slots = Slots.new(2000).refilled()
    eager = np.ones(2000, dtype=np.float32)
    halted = slots.supervised_once(eager, 0, 16, exploration=0.25).halted
    # A slot that explores has to take at least two steps, so none of them stops at the first.
    assert halted.mean() == pytest.approx(0.75, abs=0.03)


@given(st.integers(1, 30))
def test_slots_survive_being_saved(num_slots):
    slots = Slots.new(num_slots).refilled()
    slots = slots.supervised_once(np.linspace(-1, 1, num_slots, dtype=np.float32), 0, 16, 0.1)
    again = Slots.from_lists(slots.to_lists(), num_slots)
    for field in ("k", "supervised", "halted"):
        np.testing.assert_array_equal(getattr(again, field), getattr(slots, field))
    with pytest.raises(CheckpointError, match="are not"):
        Slots.from_lists(slots.to_lists(), num_slots + 1)
