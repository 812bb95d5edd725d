"""Every strategy returns the same rows, in any order."""

import os

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.dataset_files import array_file
from macbook_optimization.dataset_management import DatasetManager, DatasetSettings
from macbook_optimization.dataset_rows import RowCache, RowReader
from macbook_optimization.errors import DataError

STRATEGIES = ("memory", "mapped", "streaming")


def files(directory, rows=100, width=30, order="C", dtype=np.uint8):
    rng = np.random.default_rng(0)
    arrays = {
        name: np.asarray(rng.integers(0, 9, (rows, width), dtype), order=order)
        for name in ("inputs", "labels")
    }
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    return {name: array_file(directory / f"{name}.npy") for name in arrays}, arrays


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), order=st.sampled_from("CF"), dtype=st.sampled_from([np.uint8, np.int32]))
def test_every_strategy_gives_the_same_rows(tmp_path_factory, seed, order, dtype):
    stored, arrays = files(tmp_path_factory.mktemp("set"), order=order, dtype=dtype)
    rng = np.random.default_rng(seed)
    readers = [RowReader(stored, strategy, cache_bytes=500) for strategy in STRATEGIES]
    for _ in range(5):
        examples = rng.integers(0, 100, 7)
        upcoming = rng.integers(0, 100, 7)
        for reader in readers:
            inputs, labels = reader.take(examples)
            np.testing.assert_array_equal(inputs, arrays["inputs"][examples])
            np.testing.assert_array_equal(labels, arrays["labels"][examples])
            reader.read_ahead(upcoming)
            np.testing.assert_array_equal(reader.take(upcoming)[0], arrays["inputs"][upcoming])
    for reader in readers:
        reader.close()


def test_rows_are_copies_that_the_caller_may_change(tmp_path):
    stored, arrays = files(tmp_path)
    for strategy in STRATEGIES:
        reader = RowReader(stored, strategy, cache_bytes=10**6)
        first, _ = reader.take(np.array([3, 4]))
        first[:] = 77
        np.testing.assert_array_equal(reader.take(np.array([3, 4]))[0], arrays["inputs"][[3, 4]])


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 400))
def test_a_cache_keeps_the_most_recently_used_rows_within_its_budget(requests, budget):
    cache = RowCache(budget)
    used = []
    for example in requests:
        if cache.get(example) is None:
            cache.put(example, (np.zeros(20, np.uint8), np.zeros(20, np.uint8)))
        used = [other for other in used if other != example] + [example]
        fitting = max(1, budget // 40)
        assert list(cache.rows) == used[-fitting:][-len(cache.rows) :]
        assert cache.bytes == 40 * len(cache.rows) <= max(budget, 40)


def test_a_file_truncated_while_in_use_is_named(tmp_path):
    stored, _ = files(tmp_path)
    reader = RowReader(stored, "streaming")
    os.truncate(tmp_path / "labels.npy", 500)
    with pytest.raises(DataError, match=r"labels\.npy was truncated"):
        reader.take(np.array([90]))
    reader.read_ahead(np.array([91]))
    with pytest.raises(DataError, match="truncated"):
        reader.take(np.array([0]))


def test_a_read_error_names_the_file(tmp_path):
    stored, _ = files(tmp_path)
    reader = RowReader(stored, "streaming")
    for descriptor in reader.descriptors:
        os.close(descriptor)
    with pytest.raises(DataError, match=r"Cannot read .*inputs\.npy: Bad file descriptor"):
        reader.take(np.array([0]))


def test_a_loaded_dataset_can_release_its_memory(tmp_path):
    stored, arrays = files(tmp_path, rows=20_000, width=1000)
    reader = RowReader(stored, "memory")
    loaded = psutil.Process().memory_info().rss
    assert reader.release_memory()
    assert loaded - psutil.Process().memory_info().rss > 30 * 2**20
    assert not reader.release_memory()
    np.testing.assert_array_equal(reader.take(np.array([19_999]))[1], arrays["labels"][19_999:])


@pytest.mark.slow
def test_reading_all_of_a_map_takes_no_memory(tmp_path):
    stored, _ = files(tmp_path, rows=150_000, width=900)
    reader = RowReader(stored, "mapped")
    order = np.random.default_rng(0).permutation(150_000)
    before = psutil.Process().memory_info().rss
    highest = 0
    for start in range(0, 150_000, 1000):
        reader.take(order[start : start + 1000])
        highest = max(highest, psutil.Process().memory_info().rss)
    assert highest - before < 74 * 2**20  # of 257


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [({}, "memory"), ({"cache_threshold_mb": 0.0}, "mapped"), ({"force_streaming_mode": True}, "streaming")],
)
def test_the_manager_opens_rows_by_its_strategy(tmp_path, changes, strategy):
    stored, _ = files(tmp_path)
    reader = DatasetManager(DatasetSettings(**changes)).open_rows(stored)
    assert reader.strategy == strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pipe_that_replaced_an_array_is_refused_by_every_strategy(tmp_path, strategy):
    stored, _ = files(tmp_path)
    stored["labels"].path.unlink()
    os.mkfifo(stored["labels"].path)
    with pytest.raises(DataError, match="it is a pipe"):
        RowReader(stored, strategy)
