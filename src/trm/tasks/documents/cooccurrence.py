"""Vectors of words from what they occur beside: words with similar neighbours get similar vectors.

The positive pointwise mutual information of tokens that are a few positions apart is reduced by a truncated
singular value decomposition, with the settings that Levy, Goldberg and Dagan (2015) recommend. The vectors
are a function of the dataset alone: counts are exact, and the decomposition starts from fixed numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from macbook_optimization.errors import LaptopError
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.slots import uniforms
from trm.tasks.dataset import Split

WINDOW = 5  # positions between two tokens that occur together, at most
MIN_PAIRS = 50  # of a token, which occurs five times then; the neighbours of a rarer one say little
_MAX_TOKENS = 2**21  # that are read, from rows spread evenly over the split. This bounds memory to 0.4 GB
_TOKENS_AT_A_TIME = 2**18
_PAIRS_AT_A_TIME = 2**18
_SMOOTHING = 0.75  # exponent of the neighbours' frequencies, without which rare ones would weigh most
_SPARE_COLUMNS = 16  # of the iteration, beyond those that are wanted
_ITERATIONS = 6


def word_vectors(split: Split, width: int, first_word: int) -> tuple[IntArray, Float32Array]:
    """Return tokens (n,) and their vectors (n, width) of length 1, which random embeddings have on average.

    Tokens below `first_word` are marks. Neither they nor tokens without known neighbours have vectors.
    """
    information = _information(*_counted_pairs(split, first_word), split.spec.vocab_size)
    vectors = _left_vectors(information, width)
    known = np.flatnonzero(information.getnnz(1))
    if not len(known):
        return known, np.zeros((0, width), dtype=np.float32)
    centred = vectors[known] - vectors[known].mean(0)  # what all words share distinguishes none
    lengths = np.linalg.norm(centred, axis=1)
    has_direction = lengths > 1e-6 * lengths.max()
    chosen = centred[has_direction] / lengths[has_direction, None]
    return known[has_direction], chosen.astype(np.float32)


def _counted_pairs(split: Split, first_word: int) -> tuple[IntArray, IntArray]:
    """Return pairs of tokens that occur together, as a x vocab_size + b with a <= b, and how often."""
    pairs = np.zeros(0, dtype=np.int64)
    counts = np.zeros(0, dtype=np.int64)
    for examples in _chunks(split):
        found = _pairs(split.batch(examples).inputs, first_word, split.spec.vocab_size)
        new, new_counts = np.unique(found, return_counts=True)
        del found
        places = np.searchsorted(pairs, new)
        is_known = np.append(pairs, -1)[places] == new
        counts[places[is_known]] += new_counts[is_known]
        others = ~is_known
        pairs = np.insert(pairs, places[others], new[others])
        counts = np.insert(counts, places[others], new_counts[others])
    return pairs, counts


def _chunks(split: Split) -> Iterator[IntArray]:
    """Yield rows that are spread evenly over the split, a bounded number of tokens at a time."""
    length = split.spec.max_len
    num_tokens = len(split) * length if split.lengths is None else int(split.lengths.sum(dtype=np.int64))
    num_rows = max(1, int(len(split) * min(1.0, _MAX_TOKENS / num_tokens)))
    rows = np.arange(num_rows) * len(split) // num_rows
    for start in range(0, num_rows, size := max(1, _TOKENS_AT_A_TIME // length)):
        yield rows[start : start + size]


def _pairs(tokens: IntArray, first_word: int, vocab_size: int) -> IntArray:
    """Return the pairs in rows of tokens; padding is one of the marks."""
    found = []
    for distance in range(1, min(WINDOW, tokens.shape[1] - 1) + 1):
        left, right = tokens[:, :-distance], tokens[:, distance:]
        both = (left >= first_word) & (right >= first_word)
        left, right = left[both], right[both]
        found.append(np.minimum(left, right) * vocab_size + np.maximum(left, right))
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _information(pairs: IntArray, counts: IntArray, vocab_size: int) -> Any:
    """Return the positive pointwise mutual information of tokens (rows) and neighbours, a sparse matrix."""
    sparse = _library()
    left, right = (each.astype(np.int32) for each in np.divmod(pairs, vocab_size))
    occurrences: FloatArray = np.zeros(vocab_size)
    for tokens in (left, right):
        occurrences += np.bincount(tokens, weights=counts, minlength=vocab_size)
    smoothed = occurrences**_SMOOTHING
    is_known = occurrences >= MIN_PAIRS

    def informative(rows: Any, columns: Any, together: FloatArray) -> tuple[Any, Any, Any]:
        expected = occurrences[rows] * smoothed[columns] / max(1.0, smoothed.sum())
        is_more = (together > expected) & is_known[rows] & is_known[columns]
        information = np.log(together[is_more] / expected[is_more]).astype(np.float32)
        return rows[is_more], columns[is_more], information

    parts = [(left[:0], left[:0], np.zeros(0, dtype=np.float32))]
    for start in range(0, len(pairs), _PAIRS_AT_A_TIME):
        a, b, times = (each[start : start + _PAIRS_AT_A_TIME] for each in (left, right, counts))
        differ = a != b  # a token beside another of its kind is a neighbour of both
        parts.append(informative(a, b, np.where(differ, times, 2 * times).astype(np.float64)))
        parts.append(informative(b[differ], a[differ], times[differ].astype(np.float64)))
    rows, columns, information = (np.concatenate(each) for each in zip(*parts, strict=True))
    return sparse.csr_matrix((information, (rows, columns)), shape=(vocab_size, vocab_size))


def _left_vectors(matrix: Any, width: int) -> Float32Array:
    """Return the singular vectors of the largest singular values, scaled by the roots of those.

    This is a subspace iteration. Columns beyond the rank of the matrix are zero.
    """
    size = matrix.shape[0]
    columns = min(size, width + _SPARE_COLUMNS)
    start = uniforms(np.arange(size)[:, None], np.arange(columns)) - 0.5
    basis = np.linalg.qr(start.astype(np.float32))[0]
    transposed = matrix.T.tocsr()
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(matrix @ (transposed @ basis))[0]
    _, values, rotation = np.linalg.svd(transposed @ basis, full_matrices=False)
    found = min(width, columns)
    vectors = np.zeros((size, width), dtype=np.float32)
    vectors[:, :found] = (basis @ rotation.T)[:, :found] * np.sqrt(values[:found])
    return vectors


def _library() -> Any:
    try:
        import scipy.sparse
    except ModuleNotFoundError as error:
        raise LaptopError(
            f"The Python package {error.name} is missing; training.initial_embeddings=cooccurrence needs it.",
            hint="Install it: python -m pip install scipy",
        ) from error
    return scipy.sparse
