"""Plain text as a task: a decoder predicts every token from those before it.

A row is a window of `context` tokens, and its labels are the same tokens one place further on. Windows do not
overlap, so an evaluation predicts every token of the test split once; which window a slot takes is decided as
for every other task. The end of each file is the test split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import read_input
from macbook_optimization.units import MIB
from trm.arrays import FloatArray, IntArray, IntegerArray
from trm.batch import IGNORE_LABEL, Batch
from trm.config import Count, Rate, Section, parse_section
from trm.tasks.base import DataSpec, Options, Progress, Scorer, Tokenizer
from trm.tasks.dataset import Split
from trm.tasks.dataset_writer import DatasetWriter, SplitWriter
from trm.tasks.documents.text_tokens import (
    FILE_NAME,
    TextTokenizer,
    TokenizerName,
    encode_texts,
    load_tokenizer,
    train_tokenizer,
)
from trm.tasks.metrics import LOSS, TextLoss

_ROWS_AT_A_TIME = 4096


class TextOptions(Section):
    """The text that a dataset is made of, and its tokens."""

    source: list[str] = Field(alias="from", min_length=1)
    """Text files in UTF-8."""
    tokenizer: TokenizerName = "bpe"
    """`char` (one token per character), `bytes`, or `bpe` (pieces of words, trained on the text)."""
    vocab_size: Annotated[Count, Field(ge=256)] = 8192
    """Most tokens of the `bpe` vocabulary."""
    context: Annotated[Count, Field(le=2**20)] = 256
    """Tokens per window: how far back a prediction can look."""
    test_share: Rate = 0.1
    """Share of every file, at its end, that is the test split."""
    max_input_mb: Count = 4096
    """Most MiB to read from one file."""


@dataclass(frozen=True, slots=True)
class _Texts:
    train: list[str]
    test: list[str]


class TextTask:
    name = "text"
    num_draws = 0
    primary_metric = LOSS

    def build(self, options: Options, directory: Path, progress: Progress, jobs: int = 1) -> None:
        settings = parse_section(TextOptions, options, "data.build")
        texts = _read(settings, progress)
        progress("training the tokenizer", 0, 1)
        tokenizer = train_tokenizer(settings.tokenizer, texts.train, settings.vocab_size)
        spec = DataSpec(settings.context, tokenizer.vocab_size, tokenizer.vocab_size)
        made_by = {"task": self.name, "options": settings.model_dump(mode="json", by_alias=True)}
        with DatasetWriter(directory, made_by) as writer:
            for name, parts in (("train", texts.train), ("test", texts.test)):
                progress(f"writing {name}", 0, 1)
                tokens = encode_texts(tokenizer, parts)
                _require_a_window(tokens, name, settings.context)
                ignored = IGNORE_LABEL if name == "test" else None
                _write_windows(writer.split(name, spec, ignored), tokens, settings.context)
            writer.write_json(FILE_NAME, tokenizer.to_json())

    def check_options(self, options: Options) -> None:
        parse_section(TextOptions, options, "data.build")

    def least_spec(self) -> DataSpec:
        return DataSpec(max_len=1, vocab_size=1, num_outputs=1)

    def spec(self, options: Options) -> DataSpec:
        raise DataError(
            "The number of tokens is not known before the text has been read.",
            hint="Build the dataset first: trm data build text FILE --out DIRECTORY",
        )

    def complete(self, spec: DataSpec) -> DataSpec:
        if spec.num_outputs != spec.vocab_size or spec.class_names or spec.num_puzzle_identifiers > 1:
            raise DataError(
                f"The outputs of {self.name} are its {spec.vocab_size} tokens",
                hint=f"Build one: trm data build {self.name} FILE --out DIRECTORY",
            )
        return spec

    def augment(self, batch: Batch, draws: FloatArray) -> Batch:
        return batch

    def scorer(self, split: Split) -> Scorer:
        return TextLoss()

    def tokenizer(self, dataset: Path) -> TextTokenizer:
        return load_tokenizer(dataset)

    def vocabulary(self, dataset: Path) -> str | None:
        """Return a digest of a dataset's vocabulary, None if there is none."""
        try:
            return hashlib.sha256(str(load_tokenizer(dataset).to_json()).encode()).hexdigest()
        except DataError:
            if (dataset / FILE_NAME).exists():
                raise
            return None


def _read(settings: TextOptions, progress: Progress) -> _Texts:
    texts = _Texts([], [])
    for number, source in enumerate(settings.source):
        progress("reading text", number, len(settings.source))
        text = _text_of(Path(source), settings.max_input_mb)
        cut = len(text) - int(settings.test_share * len(text))
        texts.train.append(text[:cut])
        texts.test.append(text[cut:])
    return texts


def _text_of(path: Path, max_mib: int) -> str:
    try:
        return read_input(path, max_mib * MIB).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start:,}",
            hint="Convert it first, for example: iconv -f latin1 -t utf-8 FILE",
        ) from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {reason_of(error)}", hint=hint_for(error)) from error


def _require_a_window(tokens: IntegerArray, split: str, context: int) -> None:
    if len(tokens) <= context:
        raise DataError(
            f"The {split} split has {len(tokens):,} tokens, and one window takes {context + 1:,}",
            hint="Use more text, or a smaller --context.",
        )


def _write_windows(writer: SplitWriter, tokens: IntegerArray, context: int) -> None:
    """Write windows side by side, and one more for the tokens that are left where a label can be ignored."""
    whole = (len(tokens) - 1) // context
    starts = context * np.arange(whole)
    for part in np.array_split(starts, max(1, -(-whole // _ROWS_AT_A_TIME))):
        places = part[:, None] + np.arange(context)
        writer.add_examples(tokens[places], tokens[places + 1])
    left = len(tokens) - 1 - whole * context
    if left and writer.ignore_label is not None:
        inputs, labels = tokens[-context - 1 : -1], tokens[-context:].astype(np.int64)
        labels[:-left] = writer.ignore_label
        writer.add_examples(inputs[None], labels[None])


def encode_prompt(tokenizer: Tokenizer, text: str) -> IntArray:
    """Return the tokens of a prompt; raise `DataError` for characters that the vocabulary does not have."""
    tokens = tokenizer.encode(text)
    if not len(tokens):
        raise DataError("The prompt is empty", hint='Give some text, such as "Once upon a time".')
    back = b"".join(tokenizer.bytes_of(int(token)) for token in tokens).decode(errors="replace")
    unknown = sorted(set(_first_difference(text, back)))
    if unknown:
        shown = ", ".join(map(repr, unknown[:5]))
        raise DataError(f"The vocabulary of this model has no {shown}", hint="Leave these characters out.")
    return tokens


def _first_difference(text: str, back: str) -> Sequence[str]:
    return [before for before, after in zip(text, back, strict=False) if before != after]


TASK = TextTask()
