"""Write messages as a dataset of tokens: one row per message, its length, and the vocabulary beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from macbook_optimization.dataset_files import BUILD_FILE, MAX_JSON_BYTES
from macbook_optimization.errors import ConfigError, DataError
from macbook_optimization.input_files import read_input, read_json
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_readings import return_freed_memory
from trm.arrays import Float32Array, IntArray
from trm.batch import IGNORE_LABEL
from trm.tasks.base import DataSpec, Progress
from trm.tasks.dataset import Split, read_spec
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.documents.collecting import Document, Documents, Part
from trm.tasks.documents.cooccurrence import word_vectors
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.tokens import (
    FILE_NAME,
    MAX_FILE_BYTES,
    SEP_TOKEN,
    Encoded,
    MailTokenizer,
    TokenOptions,
    padded,
)

_ROWS_AT_A_TIME = 1000
_CHARACTERS_AT_A_TIME = 2**21

# Documents, their tokens (n, L) and the number of the first row -> inputs and labels, (n, L) each.
Labelled: TypeAlias = Callable[[Sequence[Document], IntArray, int], tuple[IntArray, IntArray]]


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a task learns from messages."""

    task: str
    labelled: Labelled
    class_names: tuple[str, ...] = ()  # without any, the outputs are tokens


class HasMailVocabulary:
    """The vocabulary of tasks over tokens of mail, for `HasVocabulary`."""

    def vocabulary(self, dataset: Path) -> str | None:
        try:
            return hashlib.sha256(read_input(dataset / FILE_NAME, MAX_FILE_BYTES)).hexdigest()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"Cannot read {dataset / FILE_NAME}: {error}") from error

    def word_vectors(self, split: Split, width: int) -> tuple[IntArray, Float32Array]:
        return word_vectors(split, width, first_word=SEP_TOKEN + 1)


def write_mail(
    documents: Documents, form: Form, directory: Path, settings: TokenOptions, progress: Progress
) -> MailTokenizer:
    """Write both splits, with the vocabulary of the settings or one that is made of the training split."""
    vocab_size = vocab_size_of(settings)
    tokenizer = _tokenizer(documents, settings, progress)
    num_outputs = len(form.class_names) or vocab_size
    spec = DataSpec(settings.length, vocab_size, num_outputs, class_names=form.class_names)
    with DatasetWriter(directory, made_by(form.task, settings)) as writer:
        for name, chosen in (("train", documents.train), ("test", documents.test)):
            split = writer.split(name, spec, IGNORE_LABEL)
            start = 0
            for part in _batches(chosen):
                progress(f"writing {name}", start, len(chosen))
                encoded = tokenizer.encode_and_count([each.mail for each in part], settings.length)
                tokens, lengths = padded([each.tokens for each in encoded], settings.length)
                split.add_examples(*form.labelled(part, tokens, start), _difficulties(encoded), lengths)
                start += len(part)
            progress(f"writing {name}", len(chosen), len(chosen))
        writer.write_json(FILE_NAME, json.loads(tokenizer.to_json()))
    return tokenizer


def made_by(task: str, settings: TokenOptions) -> JsonObject:
    return {"task": task, "options": settings.model_dump(mode="json")}


def is_built(task: str, settings: TokenOptions, directory: Path) -> bool:
    """Return whether the dataset exists already: a build may be killed just before it removes its spool."""
    try:
        facts = read_json(directory / BUILD_FILE, MAX_JSON_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and made_by(task, settings).items() <= facts.items()


@dataclass(frozen=True, slots=True)
class _Mails:
    """The messages of some documents, which may be on disk."""

    documents: Part

    def __iter__(self) -> Iterator[Mail]:
        return (document.mail for document in self.documents)


def _batches(documents: Part) -> Iterator[list[Document]]:
    """Yield documents a thousand at a time, or fewer if they are long: their tokens are all in memory."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.mail.text)
        if len(batch) == _ROWS_AT_A_TIME or num_characters > _CHARACTERS_AT_A_TIME:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


def _difficulties(encoded: Sequence[Encoded]) -> IntArray:
    """Rate each message by its length in tokens, for a curriculum.

    Length is known before any model is trained, and a step with short rows takes less time. It counts what
    was cut off as well: otherwise all long messages would be equal, and their order would be that of the
    folders.
    """
    return np.array([each.total for each in encoded], dtype=np.int64)


def check_vocabulary(settings: TokenOptions) -> None:
    """Raise an error if the vocabulary that the settings name cannot be used, before any mail is read."""
    if settings.tokenizer is not None:
        vocab_size_of(settings)
        MailTokenizer.load(Path(settings.tokenizer) / FILE_NAME)


def vocab_size_of(settings: TokenOptions) -> int:
    """Return the size of the vocabulary, which may be more than the tokens that are found."""
    if settings.tokenizer is None:
        return settings.vocab_size
    size = read_spec(Path(settings.tokenizer)).vocab_size
    if "vocab_size" in settings.model_fields_set and settings.vocab_size != size:
        raise ConfigError(
            f"vocab_size is {settings.vocab_size:,}, but the vocabulary of {settings.tokenizer} has {size:,} "
            "tokens",
            hint="Leave out one of vocab_size and tokenizer.",
        )
    return size


def _tokenizer(documents: Documents, settings: TokenOptions, progress: Progress) -> MailTokenizer:
    if settings.tokenizer is not None:
        return MailTokenizer.load(Path(settings.tokenizer) / FILE_NAME)
    progress("training the tokenizer", 0, 1)
    mails = _Mails(documents.train if documents.sample is None else documents.sample)
    tokenizer = MailTokenizer.train(mails, settings.vocab_size, settings.min_df)
    return_freed_memory()
    progress("training the tokenizer", 1, 1)
    return tokenizer
