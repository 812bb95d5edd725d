"""A batch: rows travel together, and trimming removes padding only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch, exact_rows

FIELDS = ("slots", "inputs", "labels", "puzzle_identifiers", "fresh", "lengths", "noise_seeds")


def batch_of(lengths, width, with_noise=True):
    """Rows of random tokens, padded to a width; every token is labelled."""
    lengths = np.array(lengths, dtype=np.int64)
    count = len(lengths)
    rng = np.random.default_rng(0)
    is_token = np.arange(width) < lengths[:, None]
    tokens = rng.integers(1, 100, (count, width))
    return Batch(
        slots=np.arange(10, 10 + count),
        inputs=np.where(is_token, tokens, PAD_TOKEN),
        labels=np.where(is_token, tokens + 1, IGNORE_LABEL),
        puzzle_identifiers=rng.integers(0, 5, count),
        fresh=rng.random(count) < 0.5,
        lengths=lengths,
        noise_seeds=rng.integers(0, 2**62, count) if with_noise else None,
    )


def full_batch(count=5, width=4):
    """Without lengths and noise."""
    batch = batch_of([width] * count, width, with_noise=False)
    return Batch(batch.slots, batch.inputs, batch.labels, batch.puzzle_identifiers, batch.fresh)


@st.composite
def padded_batches(draw):
    width = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(1, width), max_size=6))
    return batch_of(lengths, width)


@pytest.mark.parametrize(
    "rows", [slice(1, 3), slice(4, None), np.array([3, 0, 3]), np.array([True, False, True, False, False])]
)
def test_the_arrays_of_a_row_travel_together(rows):
    batch = batch_of([4, 1, 2, 3, 4], 4)
    part = batch[rows]
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(part, name), getattr(batch, name)[rows])
    assert len(part) == len(batch.slots[rows])


def test_a_part_of_a_batch_without_lengths_has_none():
    part = full_batch()[1:3]
    assert part.lengths is None
    assert part.noise_seeds is None
    assert len(part) == 2


@given(batch=padded_batches(), first=st.integers(0, 6), second=st.integers(0, 6))
def test_slices_of_slices_are_slices(batch, first, second):
    one, other = batch[first:][second:], batch[first + second :]
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@given(batch=padded_batches(), multiple=st.integers(1, 64))
def test_trimming_never_removes_a_token_of_any_row(batch, multiple):
    trimmed = batch.trimmed(multiple)
    width = trimmed.inputs.shape[1]
    assert trimmed.labels.shape == trimmed.inputs.shape
    np.testing.assert_array_equal(trimmed.inputs, batch.inputs[:, :width])
    np.testing.assert_array_equal(trimmed.labels, batch.labels[:, :width])
    assert (batch.inputs[:, width:] == PAD_TOKEN).all()
    assert (batch.labels[:, width:] == IGNORE_LABEL).all()
    for name in ("slots", "puzzle_identifiers", "fresh", "lengths", "noise_seeds"):
        assert getattr(trimmed, name) is getattr(batch, name)


@given(batch=padded_batches(), multiple=st.integers(1, 64))
def test_a_trimmed_width_is_the_smallest_multiple_or_the_full_width(batch, multiple):
    full_width = batch.inputs.shape[1]
    width = batch.trimmed(multiple).inputs.shape[1]
    longest = max(batch.lengths.tolist(), default=1)
    assert width == full_width or (width % multiple == 0 and width < full_width)
    assert longest <= width < longest + multiple


@given(batch=padded_batches(), multiple=st.integers(1, 64))
def test_trimming_twice_is_trimming_once(batch, multiple):
    once = batch.trimmed(multiple)
    twice = once.trimmed(multiple)
    np.testing.assert_array_equal(twice.inputs, once.inputs)
    np.testing.assert_array_equal(twice.labels, once.labels)


def test_a_batch_without_lengths_is_not_trimmed():
    batch = full_batch()
    assert batch.trimmed(3) is batch


@given(batch=padded_batches(), multiple=st.integers(1, 64))
def test_padding_is_true_exactly_where_a_row_has_no_token(batch, multiple):
    np.testing.assert_array_equal(batch.padding, batch.inputs == PAD_TOKEN)
    trimmed = batch.trimmed(multiple)
    np.testing.assert_array_equal(trimmed.padding, trimmed.inputs == PAD_TOKEN)


def test_a_batch_without_lengths_has_no_padding():
    assert full_batch().padding is None


def test_a_row_is_exact_if_it_has_labels_and_all_of_them_are_right():
    correct = np.array([3, 2, 0, 0])
    labelled = np.array([3, 3, 1, 0])
    assert exact_rows(correct, labelled).tolist() == [True, False, False, False]
