"""Messages as tokens, for a model that reads them in order.

A message becomes [CLS] subject [SEP] header features [SEP] body. Subject and body are pieces of words
(byte-pair encoding, trained on the user's own mail); a header feature, a linked domain or a kind of
attachment is one token each. Of a long body, the beginning and the end are kept. Words never contain `:` or
`[`, so no text of a message can be mistaken for a feature or a mark.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_input
from macbook_optimization.units import MIB
from trm.arrays import IntArray
from trm.batch import PAD_TOKEN
from trm.config import Count, Section
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.tokenizer_library import tokenizer_library
from trm.tasks.documents.words import words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"
MAX_FILE_BYTES = 64 * MIB
MAX_SUBJECT_TOKENS = 64
MAX_FEATURE_TOKENS = 64
_TAIL_SHARE = 0.25  # of the room for a long body; the rest is its beginning
_FEATURE_SHARE = 0.25  # of the vocabulary at most
MIN_MAILS = 2  # that have a feature; one that is rarer says only which kind it is
_MAX_LETTERS = 1000  # different characters that words are made of; the others are unknown
_CHARACTERS_PER_TOKEN = 10  # read for each token that may be kept, spaces and punctuation included
TRAINING_TOKENS = 4096  # of a message that the vocabulary is trained on
_MAX_DIFFERENT_CHARACTERS = 1_300_000  # of different words: the library takes 110 to 120 bytes for each
_MAX_DIFFERENT_FEATURES = 400_000  # that are counted at a time
_LONG_CODE = 4
_DIGIT = re.compile(r"\d")
_START = "\u2581"  # begins a word. The library's own marks are numbered in random order, so we add this one
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # the first tokens
UNK_TOKEN, CLS_TOKEN, SEP_TOKEN = 1, 2, 3
_RARE = "*"


class TokenOptions(Section):
    """Options of the tokens of messages."""

    length: Count = 384
    """Most tokens per message; of a long body, the beginning and the end are kept."""
    vocab_size: Count = 16_000
    """Tokens in the vocabulary: pieces of words, header features and marks."""
    min_df: Count = MIN_MAILS
    """Leave out domains and header words of fewer messages than this."""
    tokenizer: str | None = None
    """Dataset whose vocabulary is used, with its size; null makes one of this mail."""


class Encoded(NamedTuple):
    """One message."""

    tokens: IntArray
    total: int  # tokens before a long body was cut, of the text that is read at all


@dataclass(frozen=True, slots=True)
class MailTokenizer:
    """A trained vocabulary. The same mail gives the same vocabulary on every machine."""

    tokenizer: Tokenizer
    features: dict[str, int]

    @classmethod
    def train(cls, mails: Iterable[Mail], vocab_size: int, min_mails: int = MIN_MAILS) -> MailTokenizer:
        """Make a vocabulary of these messages, which are iterated over several times rather than held.

        A header feature that fewer than `min_mails` messages have is not in it.
        """
        library = tokenizer_library()
        known = _known_features(mails, int(_FEATURE_SHARE * vocab_size), min_mails)
        letters = _letters(map(_text, mails), min(_MAX_LETTERS, vocab_size // 8))
        tokenizer = library.Tokenizer(library.models.BPE(unk_token=_MARKS[1]))
        tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=max(2, min_mails),
            initial_alphabet=letters,
            limit_alphabet=len(letters),
            special_tokens=[*_MARKS, *known],
            show_progress=False,
        )
        tokenizer.train_from_iterator(_training_texts(mails), trainer)
        return cls._with(tokenizer)

    @classmethod
    def load(cls, path: Path) -> MailTokenizer:
        try:
            return cls.from_json(read_input(path, MAX_FILE_BYTES).decode(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"Cannot read the tokenizer {path}: {error}") from error

    @classmethod
    def from_json(cls, text: str, origin: str = FILE_NAME) -> MailTokenizer:
        library = tokenizer_library()
        try:
            tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower class
            raise DataError(f"{origin} is not a tokenizer: {error}") from error
        if [tokenizer.token_to_id(mark) for mark in _MARKS] != list(range(len(_MARKS))):
            raise DataError(f"{origin} is not a tokenizer of this program: its first tokens are not {_MARKS}")
        return cls._with(tokenizer)

    @classmethod
    def _with(cls, tokenizer: Tokenizer) -> MailTokenizer:
        features = {name: token for name, token in tokenizer.get_vocab().items() if ":" in name}
        return cls(tokenizer, features)

    def to_json(self) -> str:
        text: str = self.tokenizer.to_str()
        return text

    def __len__(self) -> int:
        size: int = self.tokenizer.get_vocab_size()
        return size

    def encode(self, mails: Sequence[Mail], length: int) -> list[IntArray]:
        """Return the tokens of each message, at most `length`."""
        return [each.tokens for each in self.encode_and_count(mails, length)]

    def encode_and_count(self, mails: Sequence[Mail], length: int) -> list[Encoded]:
        texts = chain.from_iterable((_subject(mail), _body(mail, length)) for mail in mails)
        encoded = [
            each.ids for each in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        pairs = zip(encoded[::2], encoded[1::2], strict=True)
        return [
            self._joined(mail, subject, body, length)
            for mail, (subject, body) in zip(mails, pairs, strict=True)
        ]

    def _joined(self, mail: Mail, subject: list[int], body: list[int], length: int) -> Encoded:
        tokens = [CLS_TOKEN, *subject[:MAX_SUBJECT_TOKENS], SEP_TOKEN, *self._feature_tokens(mail), SEP_TOKEN]
        total = len(tokens) + len(body)
        room = max(0, length - len(tokens))
        if len(body) > room:
            tail = int(_TAIL_SHARE * room)
            body = body[: room - tail] + body[len(body) - tail :]
        return Encoded(np.array([*tokens, *body][:length], dtype=np.int64), total)

    def _feature_tokens(self, mail: Mail) -> list[int]:
        """Return one token per feature, each once, in the order of the message."""
        found: dict[int, None] = {}
        for name in features(mail):
            token = self.features.get(name) or self.features.get(_rare(name))
            if token is not None:
                found[token] = None
        return list(found)[:MAX_FEATURE_TOKENS]


def features(mail: Mail) -> Iterator[str]:
    """Yield what is known about a message beside its text, each marked with where it comes from."""
    yield from mail.header_words
    yield from (f"link:{domain}" for domain in mail.link_domains)
    yield from (f"attachment:{kind}" for kind in mail.attachments)


def padded(rows: Sequence[IntArray], length: int) -> tuple[IntArray, IntArray]:
    """Return rows as one array (n, length), and how many tokens each has."""
    tokens = np.full((len(rows), length), PAD_TOKEN, dtype=np.int64)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    return tokens, np.array([len(row) for row in rows], dtype=np.int64)


def _known_features(mails: Iterable[Mail], limit: int, min_mails: int) -> list[str]:
    """Return one feature per kind for the rare ones, and those of several messages, most frequent first."""
    mails_with: Counter[str] = Counter()
    kinds: set[str] = set()
    for mail in mails:
        found = set(features(mail))
        mails_with.update(found)
        kinds.update(map(_rare, found))
        if len(mails_with) > _MAX_DIFFERENT_FEATURES:  # forget those of one message so far
            mails_with = Counter({name: count for name, count in mails_with.items() if count > 1})
    rare = sorted(kinds)
    common = [(-count, name) for name, count in mails_with.items() if count >= min_mails]
    return [*rare, *(name for _, name in sorted(common) if name not in rare)][:limit]


def _letters(texts: Iterable[str], limit: int) -> list[str]:
    """Return the most frequent characters. The library would choose among equally frequent ones at random."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    del counts[" "]
    return sorted(counts, key=lambda letter: (-counts[letter], letter))[:limit]


def _rare(feature: str) -> str:
    kind, _, _ = feature.partition(":")
    return f"{kind}:{_RARE}"


def _training_texts(mails: Iterable[Mail]) -> Iterator[str]:
    """Yield the texts, without new words when there have been enough different ones to fill memory."""
    known: set[str] = set()
    room = _MAX_DIFFERENT_CHARACTERS
    for mail in mails:
        text = _text(mail)
        found = text.split(" ")
        if room > 0:
            new = set(found) - known
            known |= new
            room -= sum(map(len, new))
            yield text
        else:
            yield " ".join(word for word in found if word in known)


def _text(mail: Mail) -> str:
    return f"{_subject(mail)} {_body(mail, TRAINING_TOKENS)}"


def _subject(mail: Mail) -> str:
    return _marked(words(mail.subject)[:MAX_SUBJECT_TOKENS])


def bounded(mail: Mail, length: int = TRAINING_TOKENS) -> Mail:
    """Return a message with only those parts of its text from which `length` tokens can be made."""
    return replace(mail, text=_ends(mail.text, length))


def _body(mail: Mail, length: int) -> str:
    """Return the words at the beginning and at the end from which tokens can be kept."""
    return _marked(words(_ends(mail.text, length)))


def _ends(text: str, length: int) -> str:
    end = _CHARACTERS_PER_TOKEN * length
    return text if len(text) <= 2 * end else f"{text[:end]} {text[-end:]}"


def _marked(found: list[str]) -> str:
    """Join words, each with its beginning marked.

    Long words with digits are replaced by their length: random codes would take many tokens and say little.
    """
    return " ".join(f"{_START}#{len(word)}" if _is_code(word) else _START + word for word in found)


def _is_code(word: str) -> bool:
    return len(word) > _LONG_CODE and _DIGIT.search(word) is not None
