"""How wide the rows of a step are, from the lengths of the examples."""

import numpy as np
import pytest
from tiny import run_config, sudoku_dataset
from tiny_mail import email_config

from trm.planning.row_widths import computed_positions, row_widths
from trm.slots import uniforms
from trm.tasks.base import DataSpec
from trm.tasks.dataset_writer import DatasetWriter

NUM_SLOTS = 16  # of `email_config`


def dataset_of(directory, lengths, max_len=500):
    with DatasetWriter(directory, {"task": "email"}) as writer:
        split = writer.split("train", DataSpec(max_len, 9, 2), -100)
        rows = np.full((len(lengths), max_len), 5)
        split.add_examples(rows, np.zeros_like(rows), lengths=np.asarray(lengths))
    return directory


def with_training(config, **settings):
    tree = config.model_dump()
    return config.model_validate({**tree, "training": {**tree["training"], **settings}})


def test_full_rows_have_no_widths(tmp_path):
    assert row_widths(run_config(sudoku_dataset(tmp_path / "set"))) is None
    assert row_widths(run_config(tmp_path / "missing")) is None


def test_steps_are_rarely_wider_and_the_widest_are_about_as_wide(tmp_path):
    lengths = 1 + (uniforms(np.arange(400)) ** 4 * 499).astype(np.int64)
    widths = np.array(row_widths(email_config(dataset_of(tmp_path / "set", lengths))))
    assert len(widths) == NUM_SLOTS
    assert widths[0] >= lengths.max()
    drawn = lengths[(uniforms(1, np.arange(2000)[:, None], np.arange(NUM_SLOTS)) * 400).astype(int)]
    drawn = -np.sort(-drawn, axis=1)
    assert (drawn > widths).any(1).mean() < 0.02
    assert widths.mean() < 1.25 * drawn.max(0).mean()


def test_widths_are_rounded_as_micro_batches_are_and_end_at_the_longest_row(tmp_path):
    assert row_widths(email_config(dataset_of(tmp_path / "set", [33, 40, 64]))) == (64,) * NUM_SLOTS
    assert row_widths(email_config(dataset_of(tmp_path / "full", [500]))) == (500,) * NUM_SLOTS


def test_one_long_example_may_be_in_every_step(tmp_path):
    widths = row_widths(email_config(dataset_of(tmp_path / "set", [480] + [20] * 5000)))
    assert widths == (480,) + (32,) * (NUM_SLOTS - 1)


@pytest.mark.parametrize("settings", [{"supervision": "deep"}, {"curriculum": {"share": 0.5}}])
def test_steps_that_keep_or_choose_examples_may_consist_of_the_longest(tmp_path, settings):
    config = email_config(dataset_of(tmp_path / "set", [480] + [20] * 50))
    assert row_widths(with_training(config, **settings)) == (480,) * NUM_SLOTS


def test_dropped_words_make_rows_shorter_unless_a_later_phase_drops_none(tmp_path):
    config = email_config(dataset_of(tmp_path / "set", [500] * 10))
    dropping = with_training(config, word_dropout=0.5)
    assert row_widths(dropping) == (288,) * NUM_SLOTS  # 250 + 3 * 11, rounded up
    phases = [{"name": "first", "share": 0.5}, {"name": "last", "share": 0.5, "word_dropout": 0.0}]
    assert row_widths(with_training(dropping, phases=phases)) == (500,) * NUM_SLOTS


@pytest.mark.parametrize(
    ("size", "workers", "positions"),
    [(1, 1, 9), (4, 1, 36), (4, 2, 2 * 9 + 2 * 7), (5, 2, 2 * 9 + 2 * 7), (1, 2, 9), (6, 3, 2 * (9 + 7 + 2))],
)
def test_every_worker_trims_its_rows_to_their_longest(size, workers, positions):
    assert computed_positions((9, 8, 7, 3, 2, 1), size, workers) == positions
