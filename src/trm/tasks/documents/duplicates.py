"""Messages that are copies, or nearly copies, of each other.

A fingerprint has a digest of the words of a message, equal for exact copies, and a MinHash signature: the
share of equal entries of two signatures estimates the share of three-word sequences that two messages have in
common. Signatures are compared only where a band of them is equal, and with one message of each band, so that
time is linear in the number of messages.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trm.arrays import IntArray, WordArray
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.words import words

NEAR_SHARE = 0.8  # of sequences in common
_SIGNATURE_LENGTH = 64
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


def fingerprint(mail: Mail) -> Fingerprint:
    found = (words(mail.subject) + words(mail.text))[: 2 * _MAX_WORDS]
    if not found:
        return Fingerprint(b"", b"")
    digest = hashlib.blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=16).digest()
    if len(found) < _MIN_WORDS:
        return Fingerprint(digest, b"")
    return Fingerprint(digest, _signature(found[:_MAX_WORDS]).tobytes())


def _signature(of: Sequence[str]) -> NDArray[np.uint32]:
    """Return the smallest of the hashed sequences for each of several hash functions."""
    hashes = np.array([zlib.crc32(word.encode("utf-8", "replace")) for word in of], dtype=np.uint64)
    sequences = hashes[: -(_SEQUENCE_LENGTH - 1)].copy()
    for place in range(1, _SEQUENCE_LENGTH):
        sequences = _mixed(sequences) + hashes[place : len(hashes) - (_SEQUENCE_LENGTH - 1) + place]
    sequences = np.unique(_mixed(sequences))
    smallest = (sequences[:, None] * _multipliers()).min(axis=0) >> np.uint64(32)
    signature: NDArray[np.uint32] = smallest.astype("<u4")
    return signature


def _mixed(values: WordArray) -> WordArray:
    """Spread the bits of each value (the finalizer of SplitMix64)."""
    mixed = values * np.uint64(_ODD)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _multipliers() -> WordArray:
    """Return odd multipliers, which permute the numbers of 64 bits. They are the same everywhere."""
    return _mixed(np.arange(1, _SIGNATURE_LENGTH + 1, dtype=np.uint64)) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class Groups:
    """Which messages are copies of each other: equal numbers, those of the first message of each group."""

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
    parents = list(range(len(fingerprints)))
    firsts: dict[bytes, int] = {}
    for number, found in enumerate(fingerprints):
        if found.digest:
            join(parents, firsts.setdefault(found.digest, number), number)
    exact = roots(parents)
    # In the order of their digests: which one represents a band must not depend on the order of the messages.
    with_signature = [number for _, number in sorted(firsts.items()) if fingerprints[number].signature]
    if with_signature:
        _join_near(parents, with_signature, fingerprints)
    return Groups(exact, roots(parents))


def _join_near(parents: list[int], numbers: list[int], fingerprints: Sequence[Fingerprint]) -> None:
    packed = b"".join(fingerprints[number].signature for number in numbers)
    signatures = np.frombuffer(packed, dtype="<u4").reshape(len(numbers), _SIGNATURE_LENGTH)
    needed = int(np.ceil(NEAR_SHARE * _SIGNATURE_LENGTH))
    for start in range(0, _SIGNATURE_LENGTH, _BAND_LENGTH):
        band = np.zeros(len(numbers), dtype=np.uint64)
        for column in range(start, start + _BAND_LENGTH):
            band = _mixed(band + signatures[:, column])
        _, first, bucket = np.unique(band, return_index=True, return_inverse=True)
        representative = first[bucket.ravel()]
        common = (signatures == signatures[representative]).sum(axis=1)
        for place in np.flatnonzero((common >= needed) & (representative != np.arange(len(numbers)))):
            join(parents, numbers[int(representative[place])], numbers[int(place)])


def join(parents: list[int], one: int, other: int) -> None:
    """Put two members into one group; the smaller number represents it."""
    low, high = sorted((_root(parents, one), _root(parents, other)))
    parents[high] = low


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def roots(parents: list[int]) -> IntArray:
    return np.array([_root(parents, number) for number in range(len(parents))], dtype=np.int64)
