"""Rows are computed from the longest to the shortest, which changes how much is padding and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_padding import WIDE, gradients, padded_batch, take_step
from test_padding import learner as padded_learner
from tiny import make_batch, make_learner, model_config, training_config

from trm.backends.base import StepSettings
from trm.batch import Batch
from trm.slots import Slots

MIXED = (2, 7, 1, 5, 3, 7, 4, 1)


def in_slot_order(monkeypatch):
    """Compute rows in the order of their slots, as if all were full."""
    monkeypatch.setattr(Batch, "by_length", lambda batch: None)


def shapes_of(ours):
    """Record the (rows, positions) of every micro-batch."""
    shapes = []
    forward = ours.model.embed
    ours.model.embed = lambda inputs, rows: shapes.append(tuple(inputs.shape)) or forward(inputs, rows)
    return shapes


@pytest.mark.parametrize("variant", ["rotary", "learned positions, puzzle prefix", "singlez"])
@pytest.mark.parametrize(("size", "workers"), [(8, 1), (3, 1), (2, 1), (4, 2)])
def test_grouping_by_length_changes_neither_gradients_nor_results(variant, size, workers, monkeypatch):
    batch = padded_batch(MIXED)
    grouped = padded_learner(8, variant, execution={"workers": workers, "threads": workers})
    found = take_step(grouped, batch, size=size)
    with monkeypatch.context() as patch:
        in_slot_order(patch)
        plain = padded_learner(8, variant)
        expected = take_step(plain, batch, size=size)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    np.testing.assert_array_equal(found.exact, expected.exact)
    np.testing.assert_allclose(found.halt_margins, expected.halt_margins, rtol=0, atol=1e-6)
    assert len(set(np.round(expected.halt_margins, 4))) > 4, "slots are alike, so their order shows little"
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(grouped)[name], gradient, rtol=0, atol=1e-6, msg=name)
    prefix_len = grouped.model.config.prefix_len
    for slot, length in enumerate(MIXED):
        here = np.s_[:, : prefix_len + length, slot]
        torch.testing.assert_close(grouped.latents[here], plain.latents[here], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_grouping_by_length_learns_the_same_over_many_steps(supervision, monkeypatch):
    """Slots halt and take new examples by their own margins, so a swapped result would show."""

    def trained():
        ours, slots = padded_learner(8, supervision=supervision, noise=0.1), Slots.new(8)
        for step in range(1, 13):
            slots = slots.refilled()
            lengths = tuple(1 + (slots.ids * 3 + slots.k * 5) % 7)
            batch = padded_batch(lengths, seed=0)
            batch = replace(batch, fresh=slots.fresh, noise_seeds=slots.ids * 100 + slots.k)
            result = take_step(ours, batch, step, learning_rate=3e-3, size=3)
            slots = slots.supervised_once(result.halt_margins, 0, 4, 0.1)
        return ours, slots

    grouped, grouped_slots = trained()
    in_slot_order(monkeypatch)
    plain, plain_slots = trained()
    np.testing.assert_array_equal(grouped_slots.k, plain_slots.k)
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(grouped.parameters[name], parameter, rtol=0, atol=1e-9, msg=name)


def test_each_micro_batch_is_as_wide_as_its_own_longest_row():
    spec = replace(WIDE, max_len=128)
    lengths = np.array([3, 120, 40, 70, 30, 128, 33, 1])
    batch = Batch(
        slots=np.arange(8),
        inputs=np.ones((8, 128), dtype=np.int64),
        labels=np.ones((8, 128), dtype=np.int64),
        puzzle_identifiers=np.zeros(8, dtype=np.int64),
        fresh=np.ones(8, dtype=bool),
        lengths=lengths,
    )
    ours = make_learner(model_config(), training_config(effective_batch_size=8), spec)
    shapes = shapes_of(ours)
    take_step(ours, batch, size=2)
    assert shapes == [(2, 128), (2, 96), (2, 64), (2, 32)]


def test_rows_of_equal_length_stay_in_the_order_of_their_slots():
    assert padded_batch((3, 5, 3, 5)).by_length().tolist() == [1, 3, 0, 2]
    assert padded_batch((7, 7, 7)).by_length().tolist() == [0, 1, 2]


def test_a_dataset_without_lengths_is_computed_in_the_order_of_its_slots():
    batch = make_batch()
    assert batch.by_length() is None
    ours = make_learner()
    taken = []
    embed = ours.model.embed
    ours.model.embed = lambda inputs, rows: taken.append(inputs.numpy().copy()) or embed(inputs, rows)
    settings = StepSettings(1, 2, learning_rate=1e-2, puzzle_emb_lr=1e-2)
    ours.step(batch, settings, lambda done: 4)
    np.testing.assert_array_equal(np.concatenate(taken), batch.inputs)
