"""The batch of a step: a pure function of its slots and of the schedule."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import run_config, sudoku_dataset

from macbook_optimization.errors import ConfigError
from trm.batch import IGNORE_LABEL, LENGTH_MULTIPLE, PAD_TOKEN
from trm.feed import Feed
from trm.slots import Slots
from trm.tasks.base import DataSpec
from trm.tasks.dataset import open_split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.grids.sudoku import TASK

NUM_SLOTS = 12
EVERYTHING = {
    "training__effective_batch_size": NUM_SLOTS,
    "training__hints": {0: 0.5},
    "training__noise": 1.0,
}
FIELDS = ("slots", "inputs", "labels", "puzzle_identifiers", "fresh", "noise_seeds")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("feed") / "sudoku")


def feed_of(dataset, **changes):
    return Feed(run_config(dataset, **changes), TASK, open_split(dataset, "train"))


def write_rows(directory, spec, lengths):
    """Write one example per length, with random tokens, which are their own labels."""
    tokens = np.random.default_rng(0).integers(
        1, min(spec.vocab_size, spec.num_outputs), (len(lengths), spec.max_len)
    )
    with DatasetWriter(directory, {}) as writer:
        for name in ("train", "test"):
            writer.split(name, spec, 0).add_examples(tokens, tokens, lengths=np.array(lengths))
    return directory, tokens


def test_the_slots_of_a_rank_receive_the_same_rows_as_in_the_whole_batch(dataset):
    feed = feed_of(dataset, **EVERYTHING)
    slots = Slots.new(NUM_SLOTS).refilled()
    for step in (1, 2, 3):
        whole = feed.batch(slots, step)
        for owned in (slice(0, 5), slice(5, 6), slice(6, 12)):
            own_feed = feed_of(dataset, **EVERYTHING)  # another process
            part = own_feed.batch(slots[owned], step)
            for name in FIELDS:
                np.testing.assert_array_equal(getattr(part, name), getattr(whole[owned], name), err_msg=name)
        margins = np.sin(np.arange(NUM_SLOTS) * step).astype(np.float32)
        slots = slots.supervised_once(margins, 0, 16, 0.1).refilled()
    assert len(set(slots.k)) > 1, "all slots are equally far, so this shows little"


def test_rows_that_were_read_ahead_are_used_for_their_own_slots_only(dataset):
    """Two ranges of slots are equally far; one was read ahead."""
    feed, plain = feed_of(dataset, **EVERYTHING), feed_of(dataset, **EVERYTHING)
    slots = Slots.new(NUM_SLOTS)
    assert feed.split.reader.reads_ahead
    for read_ahead in (slice(0, 6), slice(6, 12)):
        feed.read_ahead(slots[read_ahead], stage=0)
        for requested in (slice(0, 6), slice(6, 12)):
            found = feed.batch(slots[requested].refilled(), 1)
            expected = plain.batch(slots[requested].refilled(), 1)
            for name in FIELDS:
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_a_batch_is_as_wide_as_its_longest_row_rounded_up(tmp_path):
    spec = DataSpec(max_len=80, vocab_size=9, num_outputs=9)
    lengths = [1, 20, 32, 33, 60, 80]
    path, tokens = write_rows(tmp_path / "rows", spec, lengths)
    config = run_config(
        path,
        data={"path": str(path), "augment": False},
        model__mixer="attention",
        training__effective_batch_size=1,
    )
    feed = Feed(config, TASK, open_split(path, "train"))
    widths = {}
    for k in range(6):
        batch = feed.batch(replace(Slots.new(1).refilled(), k=np.array([k])), 1).trimmed()
        length = int(batch.lengths[0])
        widths[length] = batch.inputs.shape[1]
        row = tokens[lengths.index(length), :length]
        np.testing.assert_array_equal(batch.inputs[0, :length], row)
        np.testing.assert_array_equal(batch.labels[0, :length], row)
        assert (batch.labels[0, length:] == IGNORE_LABEL).all()
    assert LENGTH_MULTIPLE == 32
    assert widths == {1: 32, 20: 32, 32: 32, 33: 64, 60: 64, 80: 80}


def test_hints_are_given_at_labelled_positions_only(tmp_path):
    spec = DataSpec(max_len=8, vocab_size=9, num_outputs=9)
    path, _ = write_rows(tmp_path / "rows", spec, [3] * 40)
    inputs = path / "train" / "all__inputs.npy"
    np.save(inputs, np.full_like(np.load(inputs), PAD_TOKEN))
    config = run_config(
        path,
        data={"path": str(path), "augment": False},
        model__mixer="attention",
        training__effective_batch_size=40,
        training__hints={0: 1.0},
    )
    split = open_split(path, "train", verified={})
    batch = Feed(config, TASK, split).batch(Slots.new(40).refilled(), 1)
    given = batch.inputs != PAD_TOKEN
    assert given.any()
    assert not given[batch.padding].any()
    np.testing.assert_array_equal(batch.inputs[given], batch.labels[given])


@pytest.mark.parametrize("hints", [{0: 0.5}, {0: 0.0, 100: 0.5}])
def test_hints_need_one_vocabulary_for_inputs_and_labels(tmp_path, hints):
    spec = DataSpec(max_len=4, vocab_size=9, num_outputs=5)
    path, _ = write_rows(tmp_path / "rows", spec, [4, 4])
    split = open_split(path, "train")
    with pytest.raises(ConfigError, match=r"training\.hints.*9 input tokens and 5 outputs") as refused:
        Feed(run_config(path, model__mixer="attention", training__hints=hints), TASK, split)
    assert "training.hints" in refused.value.hint
    Feed(run_config(path, model__mixer="attention", training__hints={0: 0.0}), TASK, split)


def test_a_mixer_that_needs_rows_of_one_length_is_refused_before_the_first_step(tmp_path):
    path, _ = write_rows(tmp_path / "rows", DataSpec(max_len=4, vocab_size=9, num_outputs=9), [2, 4])
    with pytest.raises(ConfigError, match=r"model\.mixer=mlp needs rows of one length"):
        Feed(run_config(path), TASK, open_split(path, "train"))
