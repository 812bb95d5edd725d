"""Write messages as a dataset of tokens: one row per message, its length, and the vocabulary beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from macbook_optimization.errors import ConfigError, DataError
from macbook_optimization.input_files import read_input
from trm.arrays import Float32Array, IntArray
from trm.batch import IGNORE_LABEL
from trm.tasks.base import DataSpec, Progress
from trm.tasks.dataset import Split, read_spec
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.documents.collecting import Document, Documents
from trm.tasks.documents.cooccurrence import word_vectors
from trm.tasks.documents.tokens import (
    FILE_NAME,
    MAX_FILE_BYTES,
    SEP_TOKEN,
    MailTokenizer,
    TokenOptions,
    padded,
)

ROWS_AT_A_TIME = 1000

# Documents, their tokens (n, L) and the number of the first row -> inputs and labels, (n, L) each.
Labelled: TypeAlias = Callable[[Sequence[Document], IntArray, int], tuple[IntArray, IntArray]]


@dataclass(frozen=True, slots=True)
class Form:
    """What a task makes of messages."""

    task: str
    labelled: Labelled
    class_names: tuple[str, ...] = ()  # without any, the outputs are tokens


class HasMailVocabulary:
    """What `HasVocabulary` asks of tasks over tokens of mail."""

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
    made_by = {"task": form.task, "options": settings.model_dump(mode="json")}
    num_outputs = len(form.class_names) or vocab_size
    spec = DataSpec(settings.length, vocab_size, num_outputs, class_names=form.class_names)
    with DatasetWriter(directory, made_by) as writer:
        for name, chosen in (("train", documents.train), ("test", documents.test)):
            split = writer.split(name, spec, IGNORE_LABEL)
            for start in range(0, len(chosen), ROWS_AT_A_TIME):
                progress(f"writing {name}", start, len(chosen))
                part = chosen[start : start + ROWS_AT_A_TIME]
                tokens, lengths = padded(
                    tokenizer.encode([each.mail for each in part], settings.length), settings.length
                )
                split.add_examples(*form.labelled(part, tokens, start), lengths=lengths)
            progress(f"writing {name}", len(chosen), len(chosen))
        writer.write_json(FILE_NAME, json.loads(tokenizer.to_json()))
    return tokenizer


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
    tokenizer = MailTokenizer.train([each.mail for each in documents.train], settings.vocab_size)
    progress("training the tokenizer", 1, 1)
    return tokenizer
