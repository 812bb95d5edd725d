"""Slots: the N places of an effective batch, and which example each one holds.

No random generator is kept. Every draw is a hash of (seed, purpose, slot, k, ...), so slot i's k-th example
and its augmentation are the same for every micro-batch size, every split over ranks, and every interruption.
The state of a slot is a few integers; everything else follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from macbook_optimization.errors import CheckpointError
from trm.arrays import BoolArray, Float32Array, FloatArray, IntArray, IntegerArray, WordArray


class Purpose(IntEnum):
    """The purpose of a random number; different purposes draw independent numbers."""

    ORDER = 1
    CHOICE = 2
    AUGMENT = 3
    EXPLORE = 4
    DEPTH = 5
    NOISE = 6
    HINTS = 7
    WORDS = 8


def _mix(words: WordArray) -> WordArray:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words that passes BigCrush as a hash."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(*counters: IntArray | int) -> WordArray:
    """Return one 64-bit word per combination of counters, which broadcast against each other."""
    with np.errstate(over="ignore"):
        words = np.zeros((), dtype=np.uint64)
        for counter in counters:
            words = _followed_by(words, np.asarray(counter, dtype=np.int64).astype(np.uint64))
        return words


def _followed_by(words: WordArray, counters: WordArray) -> WordArray:
    """Extend the hash of `random_words` by one counter."""
    return _mix(np.asarray(words + counters + np.uint64(0x9E3779B97F4A7C15)))


def uniforms(*counters: IntArray | int) -> FloatArray:
    """Return numbers in [0, 1) with 53 random bits."""
    return np.asarray((random_words(*counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permuted(positions: IntArray, size: int, keys: WordArray) -> IntArray:
    """Map each position of 0..size-1 through the pseudo-random permutation that its key selects.

    A four-round Feistel network on the smallest even number of bits that covers `size` is applied again until
    the result is below `size`. No permutation is ever held in memory.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    words = positions.astype(np.uint64)
    rounds = [random_words(keys.astype(np.int64), turn) for turn in range(4)]
    outside = np.arange(len(words))
    while len(outside):
        left, right = words[outside] >> half_bits, words[outside] & mask
        for keyed in rounds:
            left, right = right, left ^ (_followed_by(keyed[outside], right) & mask)
        words[outside] = moved = (left << half_bits) | right
        outside = outside[moved >= np.uint64(size)]
    return words.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of examples: which one a slot takes.

    Each group is used once per epoch; the puzzle of a group and the example of that puzzle are then drawn
    (public datasets store the augmented copies of a puzzle as a group).
    """

    seed: int
    num_slots: int  # of the whole effective batch, on all ranks
    group_indices: IntegerArray  # group g has the puzzles group_indices[g] : group_indices[g + 1]
    puzzle_indices: IntegerArray  # puzzle p has the examples puzzle_indices[p] : puzzle_indices[p + 1]
    easiest: IntArray | None = None  # groups by difficulty, for a curriculum
    open_groups: Callable[[int], int] | None = None  # stage of the curriculum -> number of groups in use

    def examples(self, slots: Slots) -> tuple[IntArray, IntArray]:
        """Return (example, puzzle) that each of these slots holds."""
        groups = np.empty(len(slots.ids), dtype=np.int64)
        for stage in np.unique(slots.stage):
            here = slots.stage == stage
            groups[here] = self._groups(slots.k[here], slots.ids[here], int(stage))
        draws = self.draws(Purpose.CHOICE, slots, 2)
        puzzles = _draw_between(self.group_indices, groups, draws[:, 0])
        return _draw_between(self.puzzle_indices, puzzles, draws[:, 1]), puzzles

    def _groups(self, k: IntArray, slot_ids: IntArray, stage: int) -> IntArray:
        num_groups = len(self.group_indices) - 1
        if self.easiest is not None and self.open_groups is not None:
            num_groups = self.open_groups(stage)
        epoch, position = np.divmod(k * self.num_slots + slot_ids, num_groups)
        counters = (epoch, stage) if stage else (epoch,)
        groups = permuted(position, num_groups, random_words(self.seed, Purpose.ORDER, *counters))
        return groups if self.easiest is None else self.easiest[groups]

    def draws(self, purpose: Purpose, slots: Slots, count: int) -> FloatArray:
        """Return `count` numbers from [0, 1) for the present example of each slot."""
        return uniforms(self.seed, purpose, slots.ids[:, None], slots.k[:, None], np.arange(count))

    def noise_seeds(self, slots: Slots) -> IntArray:
        words = random_words(self.seed, Purpose.NOISE, slots.ids, slots.k)
        return (words >> np.uint64(1)).astype(np.int64)


def _draw_between(bounds: IntegerArray, which: IntArray, draws: FloatArray) -> IntArray:
    start = bounds[which].astype(np.int64)
    stop = bounds[which + 1].astype(np.int64)
    return np.asarray(start + (draws * (stop - start)).astype(np.int64))


_SAVED = ("k", "stage", "supervised", "halted")


@dataclass(frozen=True, slots=True)
class Slots:
    """The progress of some slots. Saved in every checkpoint; nothing else about the data has to be."""

    ids: IntArray  # global slot ids; a rank owns a range of them
    k: IntArray  # which example, counted from 0; -1 before the first
    stage: IntArray  # of the curriculum, when the example was taken
    supervised: IntArray  # supervision steps that this example has had
    halted: BoolArray  # takes its next example at the next step

    @classmethod
    def new(cls, num_slots: int) -> Slots:
        return cls(
            ids=np.arange(num_slots, dtype=np.int64),
            k=np.full(num_slots, -1, dtype=np.int64),
            stage=np.zeros(num_slots, dtype=np.int64),
            supervised=np.zeros(num_slots, dtype=np.int64),
            halted=np.ones(num_slots, dtype=bool),
        )

    @classmethod
    def from_lists(cls, lists: Mapping[str, list[int]], num_slots: int) -> Slots:
        lists = {"stage": [0] * num_slots, **lists}  # absent in earlier versions
        wrong = [name for name in _SAVED if len(lists.get(name, ())) != num_slots]
        if wrong:
            raise CheckpointError(f"The slots' {', '.join(wrong)} are not {num_slots} numbers")
        return cls(
            ids=np.arange(num_slots, dtype=np.int64),
            k=np.array(lists["k"], dtype=np.int64),
            stage=np.array(lists["stage"], dtype=np.int64),
            supervised=np.array(lists["supervised"], dtype=np.int64),
            halted=np.array(lists["halted"], dtype=bool),
        )

    def to_lists(self) -> dict[str, list[int]]:
        return {
            "k": self.k.tolist(),
            "stage": self.stage.tolist(),
            "supervised": self.supervised.tolist(),
            "halted": self.halted.astype(int).tolist(),
        }

    def __getitem__(self, rows: slice) -> Slots:
        return Slots(self.ids[rows], self.k[rows], self.stage[rows], self.supervised[rows], self.halted[rows])

    def refilled(self, stage: int = 0) -> Slots:
        """Give every halted slot its next example, from the present stage of the curriculum."""
        return replace(
            self,
            k=self.k + self.halted,
            stage=np.where(self.halted, stage, self.stage),
            supervised=np.where(self.halted, 0, self.supervised),
            halted=np.zeros_like(self.halted),
        )

    def all_halted(self) -> Slots:
        return replace(self, halted=np.ones_like(self.halted))

    def same_examples(self, other: Slots) -> bool:
        pairs = ((self.ids, other.ids), (self.k, other.k), (self.stage, other.stage))
        return all(np.array_equal(ours, theirs) for ours, theirs in pairs)

    @property
    def fresh(self) -> BoolArray:
        return np.asarray(self.supervised == 0)

    def supervised_once(
        self, halt_margins: Float32Array, seed: int, max_steps: int, exploration: float
    ) -> Slots:
        """Return the slots after a supervision step.

        A slot halts when the model says so or its steps are used up. With probability `exploration` it must
        first reach a drawn number of steps, so that late steps are learned too.
        """
        supervised = self.supervised + 1
        draws = uniforms(
            seed, Purpose.EXPLORE, self.ids[:, None], self.k[:, None], supervised[:, None], np.arange(2)
        )
        least = np.where(draws[:, 0] < exploration, 2 + (draws[:, 1] * (max_steps - 1)).astype(np.int64), 0)
        wants_to_halt = (halt_margins > 0) & (supervised >= least)
        halted = np.asarray((supervised >= max_steps) | wants_to_halt)
        return replace(self, supervised=supervised, halted=halted)
