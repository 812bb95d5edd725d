"""A cache of a dataset holds the same rows in less space, and is complete or absent."""

import json
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_datasets import assert_same, expected, write_set
from tiny import sudoku_dataset

from macbook_optimization.dataset_files import FIELDS
from macbook_optimization.dataset_management import MIB, DatasetManager, DatasetSettings, narrowest_dtype
from macbook_optimization.errors import DataError
from trm.tasks.dataset import open_split


@pytest.fixture
def dataset(tmp_path):
    return write_set(tmp_path / "set", [3, 1, 4, 1, 5, 9, 2, 6])


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_a_cache_holds_the_same_rows_in_the_narrowest_type(tmp_path, chunk_rows):
    dataset = write_set(tmp_path / "set", [2, 3], dtype=np.int64)
    path = dataset / "train" / "all__labels.npy"
    labels = np.load(path)
    labels[1, 2] = -100
    np.save(path, np.asfortranarray(labels))
    manager = DatasetManager(DatasetSettings(chunk_size_mb=chunk_rows * 128 / MIB))
    cache = manager.preprocess_and_cache(dataset, tmp_path / "cache")
    assert_same(expected(cache), expected(dataset))
    assert_same(expected(cache, "test"), expected(dataset, "test"))
    mapped = {field: np.load(cache / "train" / f"all__{field}.npy", mmap_mode="r") for field in FIELDS}
    assert mapped["labels"].dtype == np.int8
    assert all(mapped[field].dtype == np.uint8 for field in FIELDS if field != "labels")
    assert all(array.flags.c_contiguous for array in mapped.values())


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_counts_up_to_the_total_for_any_number_of_workers(dataset, tmp_path, workers):
    reported = []
    settings = DatasetSettings(chunk_size_mb=1e-3, preprocessing_workers=workers)
    DatasetManager(settings).preprocess_and_cache(dataset, tmp_path, lambda *row: reported.append(row))
    done = [row[1] for row in reported]
    assert len(done) > 10
    assert done == sorted(done)
    assert done[-1] == reported[-1][2]


def test_a_cached_dataset_is_a_dataset(tmp_path):
    dataset = sudoku_dataset(tmp_path / "sudoku")
    cache = DatasetManager().preprocess_and_cache(dataset, tmp_path / "cache")
    assert json.loads((cache / "identifiers.json").read_text()) == ["<blank>"]
    for name in ("train", "test"):
        np.testing.assert_array_equal(open_split(cache, name).inputs, open_split(dataset, name).inputs)


def test_a_second_call_finds_the_cache_and_writes_nothing(dataset, tmp_path):
    first = DatasetManager().preprocess_and_cache(dataset, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    assert DatasetManager().preprocess_and_cache(dataset, tmp_path / "cache") == first
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]
    assert len(first.name) == 64


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_cache_is_refused_when_opened_and_rebuilt_on_the_next_call(dataset, tmp_path, damage):
    manager = DatasetManager()
    cache = manager.preprocess_and_cache(dataset, tmp_path / "cache")
    file = cache / "train" / "all__labels.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(DataError, match=r"all__labels\.npy"):
        manager.create_memory_efficient_dataloader(cache, 4)
    assert manager.preprocess_and_cache(dataset, tmp_path / "cache") == cache
    assert_same(expected(cache), expected(dataset))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]


def test_a_changed_dataset_has_another_cache_and_a_copy_shares_it(dataset, tmp_path):
    manager = DatasetManager()
    first = manager.preprocess_and_cache(dataset, tmp_path / "cache")
    copy = shutil.copytree(dataset, tmp_path / "copy")
    assert manager.preprocess_and_cache(copy, tmp_path / "cache") == first
    labels = np.load(copy / "test" / "all__labels.npy")
    labels[0, 0] += 1
    np.save(copy / "test" / "all__labels.npy", labels)
    assert manager.preprocess_and_cache(copy, tmp_path / "cache") != first


def test_the_leftovers_of_a_killed_call_are_removed_and_never_used(dataset, tmp_path):
    """A call that was killed while writing leaves a temporary directory, which the next call removes."""
    cache = DatasetManager().preprocess_and_cache(dataset, tmp_path / "cache")
    dead_pid = next(pid for pid in range(2**22, 2, -1) if not psutil.pid_exists(pid))
    leftover = cache.rename(cache.with_name(f".{cache.name}.{dead_pid}-1.partial"))
    (leftover / "test" / "all__labels.npy").unlink()
    assert DatasetManager().preprocess_and_cache(dataset, tmp_path / "cache") == cache
    assert_same(expected(cache, "test"), expected(dataset, "test"))
    assert not leftover.exists()


def test_a_cache_that_could_not_be_written_is_absent(dataset, tmp_path):
    """A limit on the size of files simulates a full disk."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        with pytest.raises(DataError, match="Cannot cache"):
            DatasetManager().preprocess_and_cache(dataset, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache").iterdir())


def test_concurrent_calls_write_one_cache(dataset, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(DatasetManager().preprocess_and_cache, dataset, tmp_path / "cache") for _ in range(24)
        ]
    (cache,) = {call.result() for call in calls}
    assert list((tmp_path / "cache").iterdir()) == [cache]
    assert_same(expected(cache), expected(dataset))


@given(least=st.integers(-(2**63), 2**63 - 1), size=st.integers(0, 2**63 - 1))
def test_the_narrowest_type_holds_the_values_and_no_smaller_type_does(least, size):
    most = min(least + size, 2**63 - 1)
    dtype = narrowest_dtype(least, most)
    assert np.iinfo(dtype).min <= least
    assert most <= np.iinfo(dtype).max
    if dtype.itemsize > 1:
        for kind in "iu":
            smaller = np.iinfo(f"{kind}{dtype.itemsize // 2}")
            assert least < smaller.min or most > smaller.max
