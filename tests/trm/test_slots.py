"""Slots and the order of examples are pure functions of the seed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.errors import CheckpointError
from trm.slots import Order, Purpose, Slots, permuted, random_words, uniforms


def order(num_slots: int, num_groups: int, seed: int = 0) -> Order:
    ends = np.arange(num_groups + 1)
    return Order(seed, num_slots, group_indices=ends, puzzle_indices=ends)


def slots_at(k, ids=None) -> Slots:
    """Return slots that hold their k-th example."""
    k = np.asarray(k, dtype=np.int64)
    count = len(k)
    return Slots(
        ids=np.arange(count) if ids is None else np.asarray(ids),
        k=k,
        stage=np.zeros(count, dtype=np.int64),
        supervised=np.zeros(count, dtype=np.int64),
        halted=np.zeros(count, dtype=bool),
    )


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
def test_an_epoch_uses_every_puzzle_once(num_slots, num_groups):
    """Slots that take a new example at every step go through the dataset in epochs."""
    ours = order(num_slots, num_groups)
    steps = -(-num_groups // num_slots)
    taken = np.concatenate([ours.examples(slots_at([k] * num_slots))[0] for k in range(steps)])
    assert sorted(taken[:num_groups]) == list(range(num_groups))


def test_the_example_of_a_slot_does_not_depend_on_the_other_slots():
    ours = order(8, 100)
    k = np.arange(8)
    together, _ = ours.examples(slots_at(k))
    for slot in range(8):
        others = np.zeros(8, dtype=np.int64)
        others[slot] = k[slot]
        assert ours.examples(slots_at(others))[0][slot] == together[slot]


@pytest.mark.slow
@given(
    shares=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_groups=st.integers(1, 40),
    seed=st.integers(0, 99),
    steps=st.integers(1, 4),
)
def test_every_split_over_ranks_draws_the_same_for_each_slot(shares, num_groups, seed, steps):
    """Examples, puzzles, augmentation, noise and halting, over several steps with an uneven progress."""
    num_slots = sum(shares)
    ours = order(num_slots, num_groups, seed)
    ends = np.cumsum([0, *shares])
    whole = Slots.new(num_slots)
    parts = [whole[start:stop] for start, stop in pairwise(ends)]
    for step in range(steps):
        margins = np.sin(np.arange(num_slots) + step).astype(np.float32)
        whole = whole.refilled()
        parts = [part.refilled() for part in parts]
        of_ranks = [
            (*ours.examples(part), ours.draws(Purpose.AUGMENT, part, 3), ours.noise_seeds(part), part.fresh)
            for part in parts
        ]
        of_whole = (
            *ours.examples(whole), ours.draws(Purpose.AUGMENT, whole, 3), ours.noise_seeds(whole), whole.fresh
        )  # fmt: skip
        for joined, expected in zip(zip(*of_ranks, strict=True), of_whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(joined), expected)
        whole = whole.supervised_once(margins, seed, 4, exploration=0.5)
        parts = [part.supervised_once(margins[part.ids], seed, 4, exploration=0.5) for part in parts]
        for name in ("ids", "k", "stage", "supervised", "halted"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(whole, name))


def test_slots_hold_the_same_examples_only_if_they_are_the_same_slots():
    """Two ranks are equally far and have examples of their own."""
    assert slots_at([3, 4], ids=[0, 1]).same_examples(slots_at([3, 4], ids=[0, 1]))
    assert not slots_at([3, 4], ids=[0, 1]).same_examples(slots_at([3, 5], ids=[0, 1]))
    assert not slots_at([3, 4], ids=[0, 1]).same_examples(slots_at([3, 4], ids=[2, 3]))


def test_examples_come_from_the_group_and_puzzle_that_was_drawn():
    ours = Order(3, 50, group_indices=np.array([0, 2, 5]), puzzle_indices=np.array([0, 4, 5, 6, 9, 10]))
    examples, puzzles = ours.examples(slots_at(np.arange(50)))
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


def test_every_slot_and_example_has_noise_of_its_own():
    ours = order(8, 100)
    seeds = np.concatenate([ours.noise_seeds(slots_at([k] * 8)) for k in range(100)])
    assert len(set(seeds)) == 800
    assert seeds.min() >= 0
    expected = np.diagonal(seeds[:64].reshape(8, 8))
    assert (ours.noise_seeds(slots_at(np.arange(8))) == expected).all()


def test_another_seed_is_another_order():
    first, second = (order(100, 1000, seed).examples(slots_at([0] * 100))[0] for seed in (0, 1))
    assert (first != second).mean() > 0.9


def test_new_slots_start_with_their_first_example():
    slots = Slots.new(4).refilled()
    assert slots.ids.tolist() == [0, 1, 2, 3]
    assert slots.k.tolist() == [0, 0, 0, 0]
    assert slots.fresh.all()


def test_a_slot_takes_its_next_example_when_the_model_halts_and_after_the_last_step():
    slots = Slots(
        ids=np.arange(3),
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


def test_exploration_keeps_some_slots_from_halting():
    slots = Slots.new(2000).refilled()
    eager = np.ones(2000, dtype=np.float32)
    halted = slots.supervised_once(eager, 0, 16, exploration=0.25).halted
    # A slot that explores has to take at least two steps, so none of them stops at the first.
    assert halted.mean() == pytest.approx(0.75, abs=0.03)


@given(st.integers(1, 30))
def test_saved_slots_are_restored(num_slots):
    slots = Slots.new(num_slots).refilled()
    slots = slots.supervised_once(np.linspace(-1, 1, num_slots, dtype=np.float32), 0, 16, 0.1)
    again = Slots.from_lists(slots.to_lists(), num_slots)
    for field in ("ids", "k", "stage", "supervised", "halted"):
        np.testing.assert_array_equal(getattr(again, field), getattr(slots, field))
    with pytest.raises(CheckpointError, match="are not"):
        Slots.from_lists(slots.to_lists(), num_slots + 1)
