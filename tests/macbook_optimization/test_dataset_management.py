"""Every strategy reads the same rows with bounded memory, and errors name the damaged file."""

import os
import threading
from contextlib import suppress
from itertools import islice

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_datasets import assert_same, expected, together, write_set
from tiny import sudoku_dataset

from macbook_optimization.dataset_files import FIELDS
from macbook_optimization.dataset_management import (
    MIB,
    DatasetManager,
    DatasetSettings,
    choose_strategy,
)
from macbook_optimization.errors import ConfigError, DataError
from trm.tasks.dataset import open_split

STRATEGIES = {
    "memory": DatasetSettings(),
    "mapped": DatasetSettings(enable_caching=False),
    "streaming": DatasetSettings(force_streaming_mode=True, chunk_size_mb=7 * 36 / MIB),
}


@pytest.fixture
def dataset(tmp_path):
    return write_set(tmp_path / "set", [3, 1, 4, 1, 5, 9, 2, 6])


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("chunk-reader")]


@pytest.mark.parametrize("batch_size", [1, 4, 7, 31, 100])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_same_batches(dataset, strategy, batch_size):
    loader = DatasetManager(STRATEGIES[strategy]).create_memory_efficient_dataloader(dataset, batch_size)
    assert loader.strategy == strategy
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(len(batch["labels"]) == batch_size for batch in batches[:-1])
        assert_same(together(batches), expected(dataset))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_may_be_changed_without_changing_the_next_pass(dataset, strategy):
    loader = DatasetManager(STRATEGIES[strategy]).create_memory_efficient_dataloader(dataset, 8)
    for batch in loader:
        for array in batch.values():
            array[:] = 0
    assert_same(together(loader), expected(dataset))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_built_dataset_is_read_as_the_trainer_reads_it(tmp_path, strategy):
    dataset = sudoku_dataset(tmp_path / "sudoku")
    manager = DatasetManager(STRATEGIES[strategy])
    found = together(manager.create_memory_efficient_dataloader(dataset, 5, split="test"))
    split = open_split(dataset, "test")
    np.testing.assert_array_equal(found["inputs"], split.inputs)
    np.testing.assert_array_equal(found["labels"], split.labels)
    np.testing.assert_array_equal(found["puzzle_identifiers"], split.identifiers(np.arange(len(split))))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_column_major_array_gives_the_same_rows(dataset, strategy):
    wanted = expected(dataset)
    np.save(dataset / "train" / "all__inputs.npy", np.asfortranarray(wanted["inputs"]))
    loader = DatasetManager(STRATEGIES[strategy]).create_memory_efficient_dataloader(dataset, 4)
    assert_same(together(loader), wanted)


@pytest.mark.parametrize("rows", [1, 5, 31, 1000])
def test_a_stream_repeats_its_examples_in_order(dataset, rows):
    stream = DatasetManager(DatasetSettings(chunk_size_mb=rows * 36 / MIB)).implement_data_streaming(dataset)
    wanted = expected(dataset)
    assert len(stream) == 31
    assert next(len(chunk["inputs"]) for chunk in stream.chunks()) == min(rows, 31)
    for _ in range(2):
        assert_same(together(stream.chunks()), wanted)
        examples = list(stream)
        assert_same({field: np.stack([e[field] for e in examples]) for field in wanted}, wanted)


def test_the_reading_thread_ends_with_the_iteration(dataset):
    stream = DatasetManager(STRATEGIES["streaming"]).implement_data_streaming(dataset)
    list(stream.chunks())
    assert not readers()
    chunks = stream.chunks()
    next(chunks)
    assert len(readers()) == 1
    chunks.close()
    assert not readers()
    for _ in stream:
        break
    assert not readers()
    loader = DatasetManager(STRATEGIES["streaming"]).create_memory_efficient_dataloader(dataset, 2)
    for _ in loader:
        break
    assert not readers()


def test_an_error_while_reading_ahead_reaches_the_consumer(dataset):
    stream = DatasetManager(STRATEGIES["streaming"]).implement_data_streaming(dataset)
    os.truncate(dataset / "train" / "all__labels.npy", 128 + 16 * 10)
    chunks = stream.chunks()
    assert len(next(chunks)["labels"]) == 7
    with pytest.raises(DataError, match=r"all__labels\.npy was truncated while it was in use"):
        next(chunks)
    assert not readers()


def test_no_more_than_two_chunks_are_in_memory(tmp_path):
    dataset = write_set(tmp_path / "set", [1] * 8192, row_len=2048)
    stream = DatasetManager(DatasetSettings(chunk_size_mb=1)).implement_data_streaming(dataset)
    process = psutil.Process()
    chunks = stream.chunks()
    next(chunks)
    before = process.memory_info().rss
    most = max(process.memory_info().rss for chunk in chunks if chunk["inputs"].max() >= 0)
    assert most - before < 8 * MIB, "the files have 32 MiB"


def test_the_analysis_counts_what_the_files_hold(dataset):
    manager = DatasetManager(available_memory=4 * MIB)
    analysis = manager.analyze_dataset_requirements([dataset, str(dataset)], split="train")
    # Twice: 31 examples of two rows of 16 bytes, 8 identifiers, 9 puzzle and 2 group indices of 4 bytes.
    num_bytes = 2 * (31 * 2 * 16 + (8 + 9 + 2) * 4)
    assert analysis["total_size_mb"] == analysis.total_size_mb == num_bytes / MIB
    assert analysis["memory_utilization_percent"] == pytest.approx(100 * num_bytes / (4 * MIB))
    assert (analysis["recommended_strategy"], analysis["num_examples"]) == ("memory", 62)
    with pytest.raises(KeyError):
        analysis["size"]


def test_an_analysis_reads_headers_and_not_data(dataset):
    """The file is sparse: half a terabyte of zeros that takes no disk space."""
    path = dataset / "train" / "all__inputs.npy"
    header = {"descr": "|u1", "fortran_order": False, "shape": (31, 2**34)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 31 * 2**34)
    analysis = DatasetManager().analyze_dataset_requirements(dataset)
    assert analysis.total_size_mb == pytest.approx(31 * 2**14, rel=1e-6)
    assert analysis.recommended_strategy == "streaming"


def test_the_available_memory_of_this_machine_is_the_default(dataset):
    used = DatasetManager().analyze_dataset_requirements(dataset).memory_utilization_percent
    assert 0 < used < 1


@pytest.mark.parametrize(
    ("size_mb", "available_mb", "changes", "strategy", "reason"),
    [
        (50, 1000, {}, "memory", "fits into memory"),
        (150, 1000, {}, "mapped", "cache_threshold_mb = 100"),
        (250, 1000, {}, "streaming", "streaming_threshold_mb = 200"),
        (50, 90, {}, "streaming", "more than half of the 90.0 MB"),
        (50, 90, {"auto_fallback_streaming": False}, "mapped", "auto_fallback_streaming is off"),
        (50, 1000, {"enable_caching": False}, "mapped", "enable_caching is off"),
        (50, 1000, {"force_streaming_mode": True}, "streaming", "force_streaming_mode is set"),
        (300, 1000, {"streaming_threshold_mb": 400, "cache_threshold_mb": 300}, "memory", "fits into memory"),
    ],
)
def test_the_strategy_follows_from_size_memory_and_settings(size_mb, available_mb, changes, strategy, reason):
    found, why = choose_strategy(size_mb * MIB, available_mb * MIB, DatasetSettings(**changes))
    assert found == strategy
    assert reason in why


@given(
    size=st.integers(1, 2**40),
    available=st.integers(0, 2**36),
    caching=st.booleans(),
    fallback=st.booleans(),
)
def test_a_dataset_held_in_memory_takes_at_most_half_of_it(size, available, caching, fallback):
    settings = DatasetSettings(enable_caching=caching, auto_fallback_streaming=fallback)
    strategy, reason = choose_strategy(size, available, settings)
    if strategy == "memory":
        assert caching
        assert 2 * size <= available
        assert size <= 100 * MIB
    assert reason.endswith(".")


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_file_is_named(dataset, field):
    (dataset / "train" / f"all__{field}.npy").unlink()
    with pytest.raises(DataError, match=f"all__{field}.npy is missing"):
        DatasetManager().analyze_dataset_requirements([dataset])


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_named(dataset, field, keep):
    path = dataset / "train" / f"all__{field}.npy"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(DataError, match=f"all__{field}.npy is truncated"):
        DatasetManager().implement_data_streaming(dataset)


@pytest.mark.parametrize("field", FIELDS)
def test_an_array_of_objects_is_not_loaded(dataset, field):
    """Objects in .npy files are pickles."""
    path = dataset / "train" / f"all__{field}.npy"
    np.save(path, np.array([{}] * 31, dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=f"all__{field}.npy"):
        DatasetManager().create_memory_efficient_dataloader(dataset, 4)


@pytest.mark.filterwarnings("ignore:Reading `.npy`:UserWarning")  # some changes look like Python 2
def test_a_changed_byte_of_a_header_never_crashes(dataset):
    path = dataset / "train" / "all__inputs.npy"
    whole = path.read_bytes()
    for position in range(128):
        for character in b"(}'\n0\xff":
            path.write_bytes(whole[:position] + bytes([character]) + whole[position + 1 :])
            with suppress(DataError):
                DatasetManager().analyze_dataset_requirements(dataset)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("labels", lambda a: a[:-1], r"all__labels\.npy has 30 rows instead of 31 to fit all__inputs\.npy"),
        ("puzzle_indices", lambda a: a[:-1], r"all__puzzle_indices\.npy has 8 rows instead of 9"),
        ("puzzle_identifiers", lambda a: a[:, None], "shape .8, 1. instead of one number per row"),
        ("group_indices", lambda a: a[:0], r"all__group_indices\.npy is empty"),
        ("inputs", lambda a: a[:, :0], r"all__inputs\.npy is empty"),
        ("inputs", lambda a: a.astype(np.float32), "float32 instead of rows of integers"),
        ("inputs", lambda a: np.array(3), "0-dimensional"),
        ("puzzle_indices", lambda a: a + 1, r"all__puzzle_indices\.npy does not count up from 0 to 31"),
        ("puzzle_indices", lambda a: a[[0, 2, 1, *range(3, 9)]], "does not count up from 0 to 31"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(dataset, field, change, message):
    path = dataset / "train" / f"all__{field}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(DataError, match=message):
        DatasetManager().create_memory_efficient_dataloader(dataset, 4)


def test_a_directory_that_is_not_a_dataset_is_refused(dataset, tmp_path):
    manager = DatasetManager()
    with pytest.raises(DataError, match="There is no dataset at"):
        manager.analyze_dataset_requirements([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="there is no train/ in it"):
        manager.preprocess_and_cache(tmp_path, tmp_path / "cache")
    (dataset / "train" / "dataset.json").unlink()
    with pytest.raises(DataError, match=r"dataset\.json is missing"):
        manager.analyze_dataset_requirements([dataset])
    with pytest.raises(DataError, match="no dataset to analyze"):
        manager.analyze_dataset_requirements([])


def test_all_invalid_settings_are_reported_together(dataset):
    with pytest.raises(ConfigError) as caught:
        DatasetSettings(chunk_size_mb=0, cache_threshold_mb=-1, streaming_threshold_mb=float("nan"))
    assert all(name in str(caught.value) for name in ("chunk_size_mb", "cache_thr", "streaming_thr"))
    with pytest.raises(ConfigError, match="batch_size is 0"):
        DatasetManager().create_memory_efficient_dataloader(dataset, 0)


def test_examples_of_a_stream_do_not_keep_their_chunk(dataset):
    stream = DatasetManager(STRATEGIES["streaming"]).implement_data_streaming(dataset)
    assert all(example["inputs"].base is None for example in islice(stream, 3))
