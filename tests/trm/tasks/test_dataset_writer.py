"""What the writer stores is what `open_split` returns, and what it cannot store it refuses."""

import json
import resource
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import DataError
from trm.batch import IGNORE_LABEL
from trm.tasks.base import DataSpec
from trm.tasks.dataset import open_split
from trm.tasks.dataset_writer import DatasetWriter, smallest_dtype

MADE_BY = {"task": "test"}


def write(directory, spec, inputs, labels, ignore_label=IGNORE_LABEL, **more):
    with DatasetWriter(directory, MADE_BY) as writer:
        writer.split("train", spec, ignore_label).add_examples(np.array(inputs), np.array(labels), **more)
    return directory


def read(directory):
    split = open_split(directory, "train")
    return split.batch(np.arange(len(split)))


def test_a_large_token_and_class_zero_survive(tmp_path):
    spec = DataSpec(max_len=3, vocab_size=65_000, num_outputs=4, class_names=("a", "b", "c", "d"))
    inputs = [[60_000, 1, 0], [64_999, 255, 256]]
    labels = [[0, IGNORE_LABEL, IGNORE_LABEL], [3, IGNORE_LABEL, IGNORE_LABEL]]
    dataset = write(tmp_path / "set", spec, inputs, labels)
    batch = read(dataset)
    assert batch.inputs.tolist() == inputs
    assert batch.labels.tolist() == labels
    assert open_split(dataset, "train").spec == spec
    assert np.load(dataset / "train" / "all__inputs.npy").dtype == np.uint16
    assert np.load(dataset / "train" / "all__labels.npy").dtype == np.int8


def test_lengths_survive_and_a_dataset_without_them_has_none(tmp_path):
    spec = DataSpec(max_len=4, vocab_size=9, num_outputs=9)
    tokens = [[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]
    dataset = write(tmp_path / "set", spec, tokens, tokens, 0, lengths=np.array([2, 4, 1]))
    assert read(dataset).lengths.tolist() == [2, 4, 1]
    np.testing.assert_array_equal(read(dataset).padding, np.array(tokens) == 0)
    assert read(write(tmp_path / "full", spec, tokens, tokens, 0)).lengths is None
    assert not (tmp_path / "full" / "train" / "all__lengths.npy").exists()


@pytest.mark.parametrize("lengths", [[0, 4, 1], [2, 5, 1]])
def test_a_length_that_no_row_can_have_is_refused(tmp_path, lengths):
    tokens = np.ones((3, 4), dtype=np.int64)
    with pytest.raises(DataError, match="Lengths must be between 1 and 4"):
        write(tmp_path / "set", DataSpec(4, 9, 9), tokens, tokens, lengths=np.array(lengths))
    assert not (tmp_path / "set").exists()


def test_lengths_of_some_examples_only_are_refused(tmp_path):
    tokens = np.ones((2, 4), dtype=np.int64)

    def write_both():
        with DatasetWriter(tmp_path / "set", MADE_BY) as writer:
            split = writer.split("train", DataSpec(4, 9, 9), 0)
            split.add_examples(tokens, tokens)
            split.add_examples(tokens, tokens, lengths=np.array([1, 2]))

    with pytest.raises(DataError, match="2 of 4 examples have a length"):
        write_both()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("inputs", 300, "inputs hold 1 to 300; this dataset has 0 to 299"),
        ("inputs", 300 + 2**16, "inputs hold 1 to 65836"),  # would wrap around to an allowed token
        ("inputs", -1, "inputs hold -1 to 1"),
        ("labels", 2, "labels hold 0 to 2; this dataset has -100 to 1"),
        ("labels", -101, "labels hold -101 to 0"),
        ("labels", 256, "labels hold 0 to 256"),  # would wrap around to class 0
    ],
)
def test_a_value_outside_of_the_vocabulary_is_refused_instead_of_wrapping(tmp_path, field, value, message):
    arrays = {"inputs": np.ones((2, 4), dtype=np.int64), "labels": np.zeros((2, 4), dtype=np.int64)}
    arrays[field][1, 2] = value
    with pytest.raises(DataError, match=message):
        write(tmp_path / "set", DataSpec(4, 300, 2), **arrays)
    assert list(tmp_path.iterdir()) == []


def test_groups_are_held_to_the_vocabulary_too(tmp_path):
    tokens = np.full((1, 2, 4), 9)
    with (
        pytest.raises(DataError, match="inputs hold 9 to 9"),
        DatasetWriter(tmp_path / "set", MADE_BY) as writer,
    ):
        writer.split("train", DataSpec(4, 9, 10), 0).add_group(np.array([0]), tokens, tokens)


def test_the_ignore_label_of_grids_is_stored_as_the_reference_implementation_stores_it(tmp_path):
    labels = [[0, 1, 2, 3]]
    dataset = write(tmp_path / "set", DataSpec(4, 5, 5), labels, labels, ignore_label=0)
    assert json.loads((dataset / "train" / "dataset.json").read_text())["ignore_label_id"] == 0
    assert read(dataset).labels.tolist() == [[IGNORE_LABEL, 1, 2, 3]]


def test_a_dataset_may_have_a_label_at_every_position(tmp_path):
    labels = [[0, 1, 2, 3]]
    assert read(write(tmp_path / "set", DataSpec(4, 5, 5), labels, labels, None)).labels.tolist() == labels


@st.composite
def datasets(draw):
    """A spec, an ignore label, and arrays that use both ends of every range."""
    num_rows = draw(st.integers(1, 4))
    spec = DataSpec(
        max_len=draw(st.integers(2, 6)),
        vocab_size=draw(st.integers(1, 100_000)),
        num_outputs=draw(st.integers(1, 100_000)),
    )
    ignore_label = draw(st.sampled_from([None, 0, IGNORE_LABEL]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (num_rows, spec.max_len)
    inputs = rng.integers(0, spec.vocab_size, shape)
    labels = rng.integers(0, spec.num_outputs, shape)
    inputs[0, :2] = [0, spec.vocab_size - 1]
    labels[0, :2] = [0, spec.num_outputs - 1]
    if ignore_label is not None:
        labels[-1, -1] = ignore_label
    return spec, ignore_label, inputs, labels


@settings(max_examples=40)
@given(datasets())
def test_every_vocabulary_and_every_range_of_labels_survives(written):
    spec, ignore_label, inputs, labels = written
    with TemporaryDirectory() as directory:
        dataset = write(Path(directory) / "set", spec, inputs, labels, ignore_label)
        batch = read(dataset)
        assert open_split(dataset, "train").spec == spec
    np.testing.assert_array_equal(batch.inputs, inputs)
    expected = labels if ignore_label is None else np.where(labels == ignore_label, IGNORE_LABEL, labels)
    np.testing.assert_array_equal(batch.labels, expected)


@settings(max_examples=40)
@given(datasets(), st.sampled_from(["inputs", "labels"]), st.integers(1, 2**40), st.booleans())
def test_no_value_outside_of_a_range_is_ever_stored(written, field, distance, above):
    spec, ignore_label, inputs, labels = written
    least = 0
    most = spec.vocab_size - 1
    if field == "labels":
        most = spec.num_outputs - 1
        least = min(0, IGNORE_LABEL if ignore_label is None else ignore_label)
        ignore_label = IGNORE_LABEL if ignore_label is None else ignore_label
    arrays = {"inputs": inputs, "labels": labels}
    arrays[field][0, 0] = most + distance if above else least - distance
    with TemporaryDirectory() as directory:
        with pytest.raises(DataError, match=f"{field} hold"):
            write(Path(directory) / "set", spec, inputs, labels, ignore_label)
        assert list(Path(directory).iterdir()) == []


@given(st.integers(-(2**40), 2**40), st.integers(0, 2**40))
def test_the_type_of_an_array_holds_its_range_and_no_smaller_type_does(least, extent):
    most = least + extent
    chosen = np.iinfo(smallest_dtype(least, most))
    assert chosen.min <= least
    assert most <= chosen.max
    smaller = [np.iinfo(name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32")]
    assert not any(
        limits.bits < chosen.bits and limits.min <= least and most <= limits.max for limits in smaller
    )


def test_rows_of_the_wrong_width_and_numbers_beyond_32_bits_are_refused(tmp_path):
    rows = np.ones((2, 4), dtype=np.int64)
    for inputs, labels in ((rows, rows[:, :1]), (rows[:1], rows), (rows[:, :3], rows[:, :3])):
        with pytest.raises(DataError, match="last dimension"), DatasetWriter(tmp_path / "set", {}) as writer:
            writer.split("train", DataSpec(4, 9, 9), 0).add_examples(inputs, labels)
    with pytest.raises(DataError, match="32 bits"), DatasetWriter(tmp_path / "set", {}) as writer:
        writer.split("train", DataSpec(4, 9, 9), 0).add_examples(rows, rows, np.array([1, 2**40]))
    assert not (tmp_path / "set").exists()


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path):
    """The limit on the size of files fails like a full disk: also again when the buffers are flushed."""
    rows = np.ones((1000, 4), dtype=np.int64)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match=r"Cannot write the dataset to .*set: File too large") as refused:
            write(tmp_path / "deep" / "set", DataSpec(4, 9, 9), rows, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert "ulimit -f" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_build_leaves_nothing(tmp_path):
    def interrupted():
        with DatasetWriter(tmp_path / "deep" / "set", MADE_BY) as writer:
            writer.split("train", DataSpec(4, 9, 9), 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_dangling_link_is_not_followed_to_a_new_dataset(tmp_path):
    (tmp_path / "link").symlink_to("missing")
    with pytest.raises(DataError, match="leads nowhere"), DatasetWriter(tmp_path / "link", MADE_BY):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
