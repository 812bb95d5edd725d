"""Messages that are copies, or nearly copies, of each other.

A fingerprint has a digest of the words of a message, equal for exact copies, and a MinHash signature: the
share of equal entries of two signatures estimates the share of three-word sequences that two messages have in
common. Signatures are compared only where a band of them is equal, and with one message of each band, so that
time is linear in the number of messages.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trm.arrays import IntArray, WordArray
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.words import words

Digests = NDArray[np.uint8]  # (n, 16)
_RowArray = NDArray[np.int32]  # numbers of messages, of which there may be millions
SignaturesOf = Callable[[_RowArray], NDArray[np.uint32]]  # from numbers of messages to signatures (n, 64)

NEAR_SHARE = 0.8  # of sequences in common
_SIGNATURE_LENGTH = 64
DIGEST_BYTES = 16
SIGNATURE_BYTES = 4 * _SIGNATURE_LENGTH
_ROWS_AT_A_TIME = 2**12
_BAND_LENGTH = 4  # a pair with 80 % in common has an equal band with a probability of 99.98 %
_SEQUENCE_LENGTH = 3
_MIN_WORDS = 8  # shorter messages are only compared as a whole
_MAX_WORDS = 2000
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The words of a message in 272 bytes, so that those of a large mailbox fit into memory."""

    digest: bytes  # 16 bytes, equal for equal words; empty without words
    signature: bytes  # 64 numbers of 32 bits; empty for short messages


NO_WORDS = Fingerprint(b"", b"")


def fingerprint(mail: Mail) -> Fingerprint:
    found = (words(mail.subject) + words(mail.text))[: 2 * _MAX_WORDS]
    if not found:
        return NO_WORDS
    digest = hashlib.blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()
    if len(found) < _MIN_WORDS:
        return Fingerprint(digest, b"")
    return Fingerprint(digest, _signature(found[:_MAX_WORDS]).tobytes())


def _signature(of: Sequence[str]) -> NDArray[np.uint32]:
    """Return the smallest of the hashed sequences for each of several hash functions."""
    hashes = np.array([zlib.crc32(word.encode("utf-8", "replace")) for word in of], dtype=np.uint64)
    sequences = hashes[: -(_SEQUENCE_LENGTH - 1)].copy()
    for place in range(1, _SEQUENCE_LENGTH):
        sequences = mixed(sequences) + hashes[place : len(hashes) - (_SEQUENCE_LENGTH - 1) + place]
    sequences = np.unique(mixed(sequences))
    smallest = (sequences[:, None] * _multipliers()).min(axis=0) >> np.uint64(32)
    signature: NDArray[np.uint32] = smallest.astype("<u4")
    return signature


def mixed(values: WordArray) -> WordArray:
    """Spread the bits of each value (the finalizer of SplitMix64)."""
    spread = values * np.uint64(_ODD)
    spread ^= spread >> np.uint64(29)
    spread *= np.uint64(0xBF58476D1CE4E5B9)
    spread ^= spread >> np.uint64(32)
    return spread


def _multipliers() -> WordArray:
    """Return odd multipliers, which permute the numbers of 64 bits. They are the same everywhere."""
    return mixed(np.arange(1, _SIGNATURE_LENGTH + 1, dtype=np.uint64)) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class Groups:
    """Copies among messages, as equal numbers: those of the first message of each group."""

    exact: IntArray
    near: IntArray  # exact copies and near-copies

    @property
    def num_exact_copies(self) -> int:
        """Messages beyond the first of their group."""
        return len(self.exact) - len(np.unique(self.exact))

    @property
    def num_near_copies(self) -> int:
        return len(self.near) - len(np.unique(self.near)) - self.num_exact_copies


def find_duplicates(fingerprints: Sequence[Fingerprint]) -> Groups:
    """Group the messages; the order of the messages does not change which are together with which."""
    digests = b"".join(found.digest or bytes(DIGEST_BYTES) for found in fingerprints)
    packed = b"".join(found.signature or bytes(SIGNATURE_BYTES) for found in fingerprints)
    signatures = as_signatures(packed)
    return group_copies(as_digests(digests), lambda numbers: signatures[numbers])


def as_digests(packed: bytes) -> Digests:
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def as_signatures(packed: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(packed, dtype="<u4").reshape(-1, _SIGNATURE_LENGTH)


def group_copies(digests: Digests, signatures_of: SignaturesOf) -> Groups:
    """Group messages by their fingerprints. A missing digest or signature is zeros.

    Signatures are read in parts, so that those of a large mailbox can stay on disk.
    """
    parents, firsts = _join_exact(digests)
    del digests  # it may be the only reference, and memory is needed for what follows
    exact = parents.copy()
    _join_near(parents, firsts, signatures_of)
    return Groups(exact.astype(np.int64), roots(parents).astype(np.int64))


def _join_exact(digests: Digests) -> tuple[_RowArray, _RowArray]:
    """Return for each message the first one with its digest, and these first ones in the order of digests."""
    words = [digests.view(">u8")[:, place].astype(np.uint64) for place in (0, 1)]
    num_empty = len(digests) - int(np.count_nonzero(words[0] | words[1]))
    order = np.lexsort((words[1], words[0])).astype(np.int32)  # equal digests: in the order of the messages
    is_first = np.zeros(len(order), dtype=np.bool_)
    is_first[:1] = True
    for word in words:
        in_order = word[order]
        is_first[1:] |= in_order[1:] != in_order[:-1]
    is_first[:num_empty] = True  # messages without words are not copies of each other
    del words, in_order
    firsts = order[is_first]
    parents = np.empty(len(order), dtype=np.int32)
    parents[order] = firsts[np.cumsum(is_first, dtype=np.int32) - 1]
    return parents, firsts


def _join_near(parents: _RowArray, numbers: _RowArray, signatures_of: SignaturesOf) -> None:
    """Join messages with similar signatures; of those with an equal band, only with the first in `numbers`.

    `numbers` is in the order of digests, so the groups do not depend on the order of the messages.
    """
    rank = np.argsort(numbers).astype(np.int32)
    numbers = numbers[rank]  # read in the order in which they are stored
    kept = np.zeros(len(numbers), dtype=np.bool_)
    for part in _parts(len(numbers)):
        kept[part] = signatures_of(numbers[part]).any(axis=1)
    numbers, rank = numbers[kept], rank[kept]
    band = np.zeros(len(numbers), dtype=np.uint64)
    for start in range(0, _SIGNATURE_LENGTH, _BAND_LENGTH):
        for part in _parts(len(numbers)):
            band[part] = _band(signatures_of(numbers[part]), start)
        representatives, others = _equal_bands(band, rank)
        _join_similar(parents, numbers[representatives], numbers[others], signatures_of)


def _equal_bands(band: WordArray, rank: _RowArray) -> tuple[_RowArray, _RowArray]:
    """Return pairs of places with an equal band: that of the lowest rank, and each of the others."""
    order = np.lexsort((rank, band)).astype(np.int32)
    in_order = band[order]
    is_like_previous = np.zeros(len(order), dtype=np.bool_)
    is_like_previous[1:] = in_order[1:] == in_order[:-1]
    del in_order
    others = np.flatnonzero(is_like_previous)
    begins = np.flatnonzero(~is_like_previous)
    return order[begins[np.searchsorted(begins, others, side="right") - 1]], order[others]


def _join_similar(
    parents: _RowArray, ones: _RowArray, others: _RowArray, signatures_of: SignaturesOf
) -> None:
    needed = int(np.ceil(NEAR_SHARE * _SIGNATURE_LENGTH))
    forest = parents.data
    for part in _parts(len(ones)):
        common = (signatures_of(ones[part]) == signatures_of(others[part])).sum(axis=1)
        similar = common >= needed
        for one, other in zip(ones[part][similar].tolist(), others[part][similar].tolist(), strict=True):
            join(forest, one, other)


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_A_TIME) for start in range(0, count, _ROWS_AT_A_TIME))


def _band(signatures: NDArray[np.uint32], start: int) -> WordArray:
    band = np.zeros(len(signatures), dtype=np.uint64)
    for column in range(start, start + _BAND_LENGTH):
        band = mixed(band + signatures[:, column])
    return band


def join(parents: memoryview, one: int, other: int) -> None:
    """Put two members into one group; the smaller number represents it."""
    low, high = sorted((_root(parents, one), _root(parents, other)))
    parents[high] = low


def _root(parents: memoryview, number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def roots(parents: _RowArray) -> _RowArray:
    """Return the number that represents the group of each member."""
    while True:
        above = parents[parents]
        if np.array_equal(above, parents):
            return above
        parents = above
