"""Mail as a task: one message is one row of tokens, and its category is the label of the first position.

The dataset has the layout of every other task, with a length per row and the vocabulary in `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from macbook_optimization.errors import DataError
from trm.arrays import FloatArray, IntArray
from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch
from trm.config import parse_section
from trm.tasks.base import DataSpec, Options, Progress, Scorer
from trm.tasks.dataset import Split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.documents.collecting import Document, Documents, MailBuildOptions, collect_documents
from trm.tasks.documents.tokens import (
    FILE_NAME,
    SEP_TOKEN,
    Encoded,
    MailTokenizer,
    TokenOptions,
    padded,
)
from trm.tasks.metrics import ACCURACY, Classification

LABELLED_POSITION = 0  # of [CLS]
_ROWS_AT_A_TIME = 1000


def write_documents(
    documents: Documents,
    directory: Path,
    settings: TokenOptions,
    progress: Progress = lambda what, done, total: None,
) -> MailTokenizer:
    """Train a tokenizer on the training split, and write both splits as a dataset."""
    if len(documents.categories) < 2:
        raise DataError(f"A classifier needs two categories or more; there is {documents.categories}")
    unknown = sorted(
        {each.category for each in (*documents.train, *documents.test)} - set(documents.categories)
    )
    if unknown:
        raise DataError(f"These categories are not in the list of categories: {', '.join(unknown)}")
    progress("training the tokenizer", 0, 1)
    mails = [each.mail for each in documents.train]
    tokenizer = MailTokenizer.train(mails, settings.vocab_size, settings.min_df)
    progress("training the tokenizer", 1, 1)
    made_by = {"task": EmailTask.name, "options": settings.model_dump(mode="json")}
    spec = spec_of(settings, documents.categories)
    with DatasetWriter(directory, made_by) as writer:
        for name, chosen in (("train", documents.train), ("test", documents.test)):
            split = writer.split(name, spec, IGNORE_LABEL)
            for start in range(0, len(chosen), _ROWS_AT_A_TIME):
                progress(f"writing {name}", start, len(chosen))
                part = chosen[start : start + _ROWS_AT_A_TIME]
                encoded = tokenizer.encode_and_count([each.mail for each in part], settings.length)
                tokens, lengths = padded([each.tokens for each in encoded], settings.length)
                labels = _labels(part, documents.categories, tokens)
                split.add_examples(tokens, labels, _difficulties(encoded), lengths)
            progress(f"writing {name}", len(chosen), len(chosen))
        writer.write_json(FILE_NAME, json.loads(tokenizer.to_json()))
    return tokenizer


def spec_of(settings: TokenOptions, categories: tuple[str, ...]) -> DataSpec:
    return DataSpec(settings.length, settings.vocab_size, len(categories), class_names=categories)


def question_batch(rows: Sequence[IntArray], length: int) -> Batch:
    """Return tokens of messages as a batch without labels."""
    tokens, lengths = padded(rows, length)
    return Batch(
        slots=np.arange(len(tokens)),
        inputs=tokens,
        labels=np.full_like(tokens, IGNORE_LABEL),
        puzzle_identifiers=np.zeros(len(tokens), dtype=np.int64),
        fresh=np.ones(len(tokens), dtype=bool),
        lengths=lengths,
    )


def _labels(part: Sequence[Document], categories: tuple[str, ...], tokens: IntArray) -> IntArray:
    labels = np.full_like(tokens, IGNORE_LABEL)
    labels[:, LABELLED_POSITION] = [categories.index(each.category) for each in part]
    return labels


def _difficulties(encoded: Sequence[Encoded]) -> IntArray:
    """Rate each message by its length in tokens, for a curriculum.

    Length is known before any model is trained, and a step with short rows takes less time. It counts what
    was cut off as well: otherwise all long messages would be equal, and their order would be that of the
    folders.
    """
    return np.array([each.total for each in encoded], dtype=np.int64)


class EmailTask:
    name = "email"
    num_draws = 0
    primary_metric = ACCURACY

    def build(self, options: Options, directory: Path, progress: Progress, jobs: int = 1) -> None:
        settings = parse_section(MailBuildOptions, options, "data.build")
        documents = collect_documents(settings, progress, jobs)
        write_documents(documents, directory, settings, progress)

    def check_options(self, options: Options) -> None:
        parse_section(MailBuildOptions, options, "data.build")

    def least_spec(self) -> DataSpec:
        return DataSpec(max_len=1, vocab_size=1, num_outputs=2)

    def spec(self, options: Options) -> DataSpec:
        raise DataError(
            "The number of categories is not known before the mail has been read.",
            hint="Build the dataset first: trm data build email --from MAIL --out DIRECTORY",
        )

    def complete(self, spec: DataSpec) -> DataSpec:
        if len(spec.class_names) != spec.num_outputs:
            raise DataError(
                f"A dataset of mail names its categories; this one has {spec.num_outputs} outputs and "
                f"{len(spec.class_names)} names"
            )
        return spec

    def augment(self, batch: Batch, draws: FloatArray) -> Batch:
        return batch

    def without_words(self, batch: Batch, draws: FloatArray, share: float) -> Batch:
        """Leave out this share of the tokens and, in this share of the rows, all header features; marks stay.

        Without the latter, a message that came through a known mailing list is hardly read any further.
        """
        is_feature = (batch.inputs == SEP_TOKEN).cumsum(1) == 1
        without_features = is_feature & (draws[:, :1] < share)  # the draw of [CLS], which always stays
        dropped = ((draws < share) | without_features) & (batch.inputs > SEP_TOKEN)
        kept_first = np.argsort(dropped, axis=1, kind="stable")
        inputs = np.take_along_axis(np.where(dropped, PAD_TOKEN, batch.inputs), kept_first, axis=1)
        lengths = None if batch.lengths is None else batch.lengths - dropped.sum(1)
        return replace(batch, inputs=inputs, lengths=lengths)

    def scorer(self, split: Split) -> Scorer:
        return Classification(split.spec.num_outputs)


TASK = EmailTask()
