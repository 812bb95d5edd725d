"""Documents as weighted bags of n-grams: TF-IDF rows in compressed form.

The vocabulary is sorted, so the same documents give the same columns on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trm.arrays import Float32Array, IntArray

MAX_FEATURES = 400_000
MIN_DOCUMENTS = 2


@dataclass(frozen=True, slots=True)
class Bags:
    """Sparse rows: row i has the columns `indices[starts[i]:starts[i + 1]]` with their weights."""

    starts: IntArray  # (n + 1,)
    indices: IntArray
    weights: Float32Array
    num_columns: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self, chosen: IntArray) -> Bags:
        """Return some of the rows, in the given order."""
        counts = (self.starts[1:] - self.starts[:-1])[chosen]
        starts = np.concatenate([[0], np.cumsum(counts)])
        positions = np.repeat(self.starts[:-1][chosen] - starts[:-1], counts) + np.arange(starts[-1])
        return Bags(starts, self.indices[positions], self.weights[positions], self.num_columns)

    def scores(self, table: Float32Array, bias: Float32Array) -> Float32Array:
        """Return rows times table (columns, outputs), plus bias."""
        products = table[self.indices] * self.weights[:, None]
        sums = np.zeros((len(self), table.shape[1]), dtype=np.float32)
        filled = np.flatnonzero(self.starts[1:] > self.starts[:-1])
        if len(filled):  # `reduceat` takes an empty range for its first element
            sums[filled] = np.add.reduceat(products, self.starts[:-1][filled], axis=0)
        return sums + bias


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The n-grams that are columns, and how rare each of them is."""

    columns: dict[str, int]
    idf: Float32Array

    def bags(self, documents: Iterable[Counter[str]]) -> Bags:
        """Return new documents as rows; n-grams that are not in the vocabulary are left out."""
        rows = [self._row(document) for document in documents]
        return _weighed(rows, self.idf)

    def _row(self, document: Counter[str]) -> tuple[IntArray, IntArray]:
        """Return the columns of a document, in their order, and its counts."""
        column_of = self.columns.get
        columns = np.array([column_of(name, -1) for name in document], dtype=np.int64)
        counts = np.fromiter(document.values(), dtype=np.int64, count=len(document))
        return _in_order(columns, counts)


class Corpus:
    """Collects the n-grams of the documents of a training set in compact form.

    Where there are more different n-grams than `max_names`, those that only one document had until then are
    forgotten. They can come back, so at worst a rare n-gram is counted as rarer than it is.
    """

    def __init__(self, max_names: int = 6_000_000) -> None:
        self.max_names = max_names
        self._ids: dict[str, int] = {}
        self._frequency: Counter[int] = Counter()
        self._next_id = 0
        self._rows: list[tuple[IntArray, IntArray]] = []  # identifiers and counts of a document

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, document: Counter[str]) -> None:
        ids = self._ids
        for name in document:
            if name not in ids:
                ids[name] = self._next_id
                self._next_id += 1
        found = np.fromiter((ids[name] for name in document), dtype=np.int64, count=len(document))
        counts = np.fromiter(document.values(), dtype=np.int64, count=len(document))
        self._rows.append((found.astype(np.int32), np.minimum(counts, 2**15 - 1).astype(np.int16)))
        self._frequency.update(found.tolist())
        if len(ids) > self.max_names:
            self._forget_rare_names()

    def _forget_rare_names(self) -> None:
        """Forget the names of one document, whose identifiers are not used again, and their frequencies."""
        frequency = self._frequency
        self._ids = {name: each for name, each in self._ids.items() if frequency[each] > 1}
        self._frequency = Counter({each: frequency[each] for each in self._ids.values()})

    def vocabulary(
        self, rows: IntArray, min_documents: int = MIN_DOCUMENTS, limit: int = MAX_FEATURES
    ) -> Vocabulary:
        """Return the n-grams of several of these documents: the most frequent ones if there are too many."""
        found = np.concatenate([np.zeros(0, dtype=np.int32), *(self._rows[row][0] for row in rows)])
        frequency = np.bincount(found, minlength=self._next_id)
        kept = [(int(frequency[each]), name) for name, each in self._ids.items()]
        kept = [pair for pair in kept if pair[0] >= min_documents]
        if len(kept) > limit:
            kept = sorted(kept, key=lambda pair: (-pair[0], pair[1]))[:limit]
        names = sorted(name for _, name in kept)
        counts = frequency[[self._ids[name] for name in names]].astype(np.float64)
        idf = (np.log((1 + len(rows)) / (1 + counts)) + 1).astype(np.float32)
        return Vocabulary({name: column for column, name in enumerate(names)}, idf)

    def bags(self, vocabulary: Vocabulary, rows: IntArray) -> Bags:
        """Return documents as weighed rows."""
        column_of = np.full(self._next_id, -1, dtype=np.int64)
        for name, column in vocabulary.columns.items():
            column_of[self._ids[name]] = column
        return _weighed([self._row(column_of, self._rows[row]) for row in rows], vocabulary.idf)

    @staticmethod
    def _row(column_of: IntArray, row: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
        return _in_order(column_of[row[0]], row[1])


def _in_order(columns: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Sort by column, and leave out what has none (-1)."""
    known = np.flatnonzero(columns >= 0)
    order = known[np.argsort(columns[known], kind="stable")]
    return columns[order], counts[order]


def _weighed(rows: Sequence[tuple[IntArray, IntArray]], idf: Float32Array) -> Bags:
    """Weigh every document: (1 + log count) * idf, scaled to length 1."""
    starts = np.concatenate([[0], np.cumsum([len(columns) for columns, _ in rows])]).astype(np.int64)
    empty = np.zeros(0, dtype=np.int64)
    columns = np.concatenate([empty, *(columns for columns, _ in rows)])
    counts = np.concatenate([empty, *(counts for _, counts in rows)])
    weights = (1 + np.log(counts.astype(np.float64))) * idf[columns]
    return Bags(starts, columns, _unit_length(starts, weights), len(idf))


def _unit_length(starts: IntArray, weights: np.ndarray) -> Float32Array:
    squares = np.concatenate([[0.0], np.cumsum(weights**2)])
    norms = np.sqrt(np.maximum(squares[starts[1:]] - squares[starts[:-1]], 0.0))
    norms[norms == 0] = 1.0
    scaled: Float32Array = (weights / np.repeat(norms, starts[1:] - starts[:-1])).astype(np.float32)
    return scaled
