"""Small datasets on disk, and the batches that a correct loader must produce from them."""

import numpy as np

from macbook_optimization.dataset_files import FIELDS


def write_set(directory, examples_per_puzzle, row_len=16, dtype=np.uint8, seed=0):
    """Write puzzles of several examples each, with identifiers that differ from their positions."""
    rng = np.random.default_rng(seed)
    count = sum(examples_per_puzzle)
    arrays = {
        "inputs": rng.integers(0, 100, (count, row_len)).astype(dtype),
        "labels": rng.integers(0, 100, (count, row_len)).astype(dtype),
        "puzzle_identifiers": np.arange(len(examples_per_puzzle), dtype=np.int32) * 3 + 5,
        "puzzle_indices": np.cumsum([0, *examples_per_puzzle], dtype=np.int32),
        "group_indices": np.array([0, len(examples_per_puzzle)], dtype=np.int32),
    }
    for split in ("train", "test"):
        (directory / split).mkdir(parents=True)
        (directory / split / "dataset.json").write_text('{"sets": ["all"]}')
        for field, array in arrays.items():
            np.save(directory / split / f"all__{field}.npy", array)
    return directory


def together(batches):
    batches = list(batches)
    return {field: np.concatenate([batch[field] for batch in batches]) for field in batches[0]}


def expected(dataset, split="train"):
    arrays = {field: np.load(dataset / split / f"all__{field}.npy") for field in FIELDS}
    identifiers = np.repeat(arrays["puzzle_identifiers"], np.diff(arrays["puzzle_indices"]))
    return {"inputs": arrays["inputs"], "labels": arrays["labels"], "puzzle_identifiers": identifiers}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for field in wanted:
        np.testing.assert_array_equal(found[field], wanted[field])
