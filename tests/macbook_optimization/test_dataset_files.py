"""Arrays are read once for their values and their hashes, and lengths of examples are optional."""

import errno
import hashlib
import json
import os
import resource
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from small_datasets import write_set

from macbook_optimization import dataset_files
from macbook_optimization.dataset_files import (
    BUILD_FILE,
    FIELDS,
    array_file,
    cannot_read,
    check_digests,
    digests,
    read_headers,
    scan,
)
from macbook_optimization.dataset_management import MIB, DatasetManager, DatasetSettings
from macbook_optimization.errors import DataError


@pytest.fixture
def dataset(tmp_path):
    path = write_set(tmp_path / "set", [3, 1, 4])
    (path / BUILD_FILE).write_text(json.dumps({"sha256": digests(path)}))
    return path


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.uint8, ">i4"])
@pytest.mark.parametrize("extra", [b"", b"bytes after the last row"])
def test_a_scan_hashes_the_values_and_the_file(tmp_path, monkeypatch, order, dtype, extra):
    monkeypatch.setattr(dataset_files, "_SCAN_BYTES", 50)  # several chunks
    values = np.random.default_rng(0).integers(3, 90, (31, 5)).astype(dtype)
    path = tmp_path / "array.npy"
    np.save(path, np.asarray(values, order=order))
    with path.open("ab") as file:
        file.write(extra)
    content = scan(array_file(path))
    assert content.sha256 == hashlib.sha256(values.tobytes()).hexdigest()
    assert content.file_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (content.least, content.most) == (values.min(), values.max())


def test_files_whose_hashes_are_known_are_not_read_again(dataset, monkeypatch):
    scanned = {
        f"all__{field}.npy": scan(array_file(dataset / "train" / f"all__{field}.npy")).file_sha256
        for field in FIELDS
    }
    read = []
    real = dataset_files._sha256
    monkeypatch.setattr(dataset_files, "_sha256", lambda path: (read.append(path.name), real(path))[1])
    check_digests(dataset, "train", scanned)
    assert read == []
    del scanned["all__labels.npy"]
    check_digests(dataset, "train", scanned)
    assert read == ["all__labels.npy"]
    check_digests(dataset, "train")
    assert len(read) == 1 + len(FIELDS)


def test_a_wrong_hash_is_found_whether_it_was_computed_before_or_not(dataset):
    path = dataset / "train" / "all__labels.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for computed in (None, {}, {path.name: scan(array_file(path)).file_sha256}):
        with pytest.raises(DataError, match=r"all__labels\.npy is not what was built"):
            check_digests(dataset, "train", computed)


def test_a_file_that_shrinks_during_a_scan_is_named(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros((100, 5), np.uint8))
    file = array_file(tmp_path / "array.npy")
    os.truncate(file.path, 200)
    with pytest.raises(DataError, match=r"array\.npy was truncated"):
        scan(file)
    os.unlink(file.path)
    with pytest.raises(DataError, match=r"Cannot read .*array\.npy"):
        scan(file)


STRATEGIES = {
    "memory": DatasetSettings(),
    "mapped": DatasetSettings(enable_caching=False),
    "streaming": DatasetSettings(force_streaming_mode=True, chunk_size_mb=100 / MIB),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_hold_the_lengths_of_examples_where_there_are_any(dataset, tmp_path, strategy):
    manager = DatasetManager(STRATEGIES[strategy])
    assert "lengths" not in next(iter(manager.create_memory_efficient_dataloader(dataset, 3)))
    lengths = np.array([16, 3, 5, 1, 9, 16, 2, 7], np.uint16)
    np.save(dataset / "train" / "all__lengths.npy", lengths)
    for path in (dataset, manager.preprocess_and_cache(dataset, tmp_path / "cache")):
        loader = manager.create_memory_efficient_dataloader(path, 3)
        assert loader.strategy == strategy
        np.testing.assert_array_equal(np.concatenate([batch["lengths"] for batch in loader]), lengths)
        assert [int(example["lengths"]) for example in manager.implement_data_streaming(path)] == list(
            lengths
        )


def test_lengths_count_towards_the_size_of_a_dataset(dataset):
    before = read_headers(dataset, "train")
    np.save(dataset / "train" / "all__lengths.npy", np.ones(8, np.uint16))
    after = read_headers(dataset, "train")
    assert after.num_bytes == before.num_bytes + 8 * 2
    assert after.bytes_per_example == before.bytes_per_example + 2


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.ones(7, np.uint8), r"all__lengths\.npy has 7 rows instead of 8 to fit all__inputs\.npy"),
        (np.ones((8, 2), np.uint8), r"all__lengths\.npy has shape \(8, 2\) instead of one number per row"),
        (np.ones(8, np.float32), "float32 instead of rows of integers"),
    ],
)
def test_lengths_that_do_not_fit_the_examples_are_refused(dataset, lengths, message):
    np.save(dataset / "train" / "all__lengths.npy", lengths)
    with pytest.raises(DataError, match=message):
        read_headers(dataset, "train")


def test_recorded_hashes_cover_the_lengths(dataset):
    path = dataset / "train" / "all__lengths.npy"
    np.save(path, np.ones(8, np.uint8))
    (dataset / BUILD_FILE).write_text(json.dumps({"sha256": digests(dataset)}))
    np.save(path, np.zeros(8, np.uint8))
    with pytest.raises(DataError, match=r"all__lengths\.npy is not what was built"):
        check_digests(dataset, "train")


@pytest.mark.parametrize("name", ["train/all__inputs.npy", "train/all__lengths.npy", BUILD_FILE])
def test_a_pipe_in_the_place_of_a_file_is_refused_immediately(dataset, name):
    (dataset / name).unlink(missing_ok=True)
    os.mkfifo(dataset / name)
    with pytest.raises(DataError, match=rf"Cannot read .*{name}: it is a pipe, not a regular file"):
        dataset_files.open_files(dataset, "train")


def test_a_pipe_that_replaced_an_array_is_refused_immediately(dataset):
    array = array_file(dataset / "train" / "all__inputs.npy")
    array.path.unlink()
    os.mkfifo(array.path)
    for read in (lambda: array.rows(0, 1), lambda: scan(array), array.mapped):
        with pytest.raises(DataError, match="it is a pipe"):
            read()


def test_too_many_open_files_is_not_the_fault_of_the_dataset(dataset):
    opened = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 5, hard))
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(DataError, match="Too many open files") as refused:
            array_file(dataset / "train" / "all__inputs.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)
    assert "ulimit -n" in refused.value.hint


def test_a_shortage_of_memory_stays_one_and_is_not_blamed_on_the_data():
    """The supervisor resumes with a smaller plan after it; an error of the data would end the run."""
    shortage = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "set/train/dataset.json")
    assert isinstance(cannot_read(Path("set/train/dataset.json"), shortage), MemoryError)
    assert isinstance(cannot_read(Path("set"), OSError(errno.EIO, "damaged")), DataError)
