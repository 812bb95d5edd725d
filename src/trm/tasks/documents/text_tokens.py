"""Text as tokens: characters, bytes, or pieces of words (byte-pair encoding over bytes).

A vocabulary is made of the training text only. Each token stands for some bytes, so that sampled tokens can
be shown as they arrive, whichever the vocabulary.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_input
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB
from trm.arrays import IntArray, IntegerArray
from trm.tasks.base import Tokenizer
from trm.tasks.dataset_writer import smallest_dtype
from trm.tasks.documents.tokenizer_library import tokenizer_library

FILE_NAME = "tokenizer.json"
MAX_FILE_BYTES = 64 * MIB
UNKNOWN = 0  # of a vocabulary of characters: one that the training text does not have
_CHARACTERS_AT_A_TIME = 2**20
_PARTS_AT_A_TIME = 4  # which the library encodes on as many cores

TokenizerName: TypeAlias = Literal["char", "bytes", "bpe"]


class TextTokenizer(Tokenizer, Protocol):
    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> IntArray: ...

    def encode_parts(self, parts: Sequence[str]) -> list[IntegerArray]:
        """Return the tokens of each part of a text."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return what a token stands for, in UTF-8; a character may be spread over several tokens."""
        ...

    def to_json(self) -> JsonObject: ...


@dataclass(frozen=True, slots=True)
class Characters:
    """One token per character of the training text, and one for all others."""

    characters: str  # in the order of their tokens, which begin after UNKNOWN

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + 1

    def encode(self, text: str) -> IntArray:
        known = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
        return np.where(known[places] == codes, places + 1, UNKNOWN).astype(np.int64)

    def encode_parts(self, parts: Sequence[str]) -> list[IntegerArray]:
        return [self.encode(part) for part in parts]

    def bytes_of(self, token: int) -> bytes:
        return ("\ufffd" if token == UNKNOWN else self.characters[token - 1]).encode()

    def to_json(self) -> JsonObject:
        return {"kind": "char", "characters": self.characters}


@dataclass(frozen=True, slots=True)
class Bytes:
    """One token per byte of UTF-8: 256 of them, whatever the language."""

    vocab_size: int = 256

    def encode(self, text: str) -> IntArray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def encode_parts(self, parts: Sequence[str]) -> list[IntegerArray]:
        return [self.encode(part) for part in parts]

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])

    def to_json(self) -> JsonObject:
        return {"kind": "bytes"}


class BytePairs:
    """Pieces of words, trained on the text by the package `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        byte_of = {character: byte for byte, character in _byte_characters().items()}
        pieces = tokenizer.get_vocab()
        self.pieces = [b""] * len(pieces)
        for piece, token in pieces.items():
            self.pieces[token] = bytes(byte_of[character] for character in piece)

    @classmethod
    def train(cls, texts: Sequence[str], vocab_size: int) -> BytePairs:
        library = tokenizer_library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=sorted(_byte_characters().values()),
            show_progress=False,
        )
        tokenizer.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> IntArray:
        return encode_texts(self, [text]).astype(np.int64)

    def encode_parts(self, parts: Sequence[str]) -> list[IntegerArray]:
        return [np.array(each.ids, dtype=np.int32) for each in self.tokenizer.encode_batch_fast(list(parts))]

    def bytes_of(self, token: int) -> bytes:
        return self.pieces[token]

    def to_json(self) -> JsonObject:
        return {"kind": "bpe", "tokenizer": json.loads(self.tokenizer.to_str())}


def train_tokenizer(name: TokenizerName, texts: Sequence[str], vocab_size: int) -> TextTokenizer:
    """Make a vocabulary of the training text. `vocab_size` is the most tokens of byte-pair encoding."""
    if name == "char":
        return Characters("".join(sorted(set().union(*texts))))
    return Bytes() if name == "bytes" else BytePairs.train(texts, vocab_size)


def encode_texts(tokenizer: TextTokenizer, texts: Sequence[str]) -> IntegerArray:
    """Return the tokens of long texts, side by side, in the smallest type that holds them.

    What encoding takes besides (100 MiB and more per part) is freed after every few parts.
    """
    dtype = smallest_dtype(0, tokenizer.vocab_size - 1)
    found = [np.zeros(0, dtype)]
    for text in texts:
        parts = _parts(text)
        while taken := list(islice(parts, _PARTS_AT_A_TIME)):
            found += [tokens.astype(dtype) for tokens in tokenizer.encode_parts(taken)]
    return np.concatenate(found)


def load_tokenizer(dataset: Path) -> TextTokenizer:
    """Read the vocabulary of a dataset."""
    path = dataset / FILE_NAME
    try:
        facts = json.loads(read_input(path, MAX_FILE_BYTES))
        if facts["kind"] == "char":
            return Characters(facts["characters"])
        if facts["kind"] == "bytes":
            return Bytes()
        return BytePairs(tokenizer_library().Tokenizer.from_str(json.dumps(facts["tokenizer"])))
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: the text cannot be turned into tokens",
            hint="Run this where the run was trained, or name its dataset with --data.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"Cannot read the tokenizer {path}: {error}") from error


def decoded(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of tokens as soon as whole characters are known."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if text := decoder.decode(tokenizer.bytes_of(token)):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest


def _parts(text: str) -> Iterator[str]:
    """Yield a long text in parts that end with a line, as the library takes many times a part's memory."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _CHARACTERS_AT_A_TIME)
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _byte_characters() -> dict[int, str]:
    """Return the printable character that byte-level encodings write for each byte, as GPT-2 chose them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable}
    return {**shown, **{byte: chr(256 + number) for number, byte in enumerate(others)}}
