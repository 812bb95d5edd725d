"""Mail as a task: one message is one row of tokens, and its category is the label of the first position.

The dataset has the layout of every other task, with a length per row and the vocabulary in `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_readings import return_freed_memory
from trm.arrays import FloatArray, IntArray
from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch
from trm.config import parse_section
from trm.display import Display, ProgressOnly
from trm.tasks.base import DataSpec, Options, Progress, Scorer
from trm.tasks.dataset import Split
from trm.tasks.documents.collecting import Document, Documents, MailBuildOptions, collect_documents
from trm.tasks.documents.importing import CHECKPOINT_SECONDS, imported, spool_of
from trm.tasks.documents.labels import load_map
from trm.tasks.documents.spool import remove_spool
from trm.tasks.documents.tokens import SEP_TOKEN, MailTokenizer, TokenOptions, padded
from trm.tasks.documents.writing import Form, HasMailVocabulary, check_vocabulary, is_built, write_mail
from trm.tasks.metrics import ACCURACY, Classification

LABELLED_POSITION = 0  # of [CLS]


def write_documents(
    documents: Documents,
    directory: Path,
    settings: TokenOptions,
    progress: Progress = lambda what, done, total: None,
) -> MailTokenizer:
    """Write both splits as a dataset of categories."""
    if len(documents.categories) < 2:
        raise DataError(f"A classifier needs two categories or more; there is {documents.categories}")

    def labelled(part: Sequence[Document], tokens: IntArray, start: int) -> tuple[IntArray, IntArray]:
        return tokens, _labels(part, documents.categories, tokens)

    form = Form(EmailTask.name, labelled, documents.categories)
    return write_mail(documents, form, directory, settings, progress)


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
    unknown = sorted({each.category for each in part} - set(categories))
    if unknown:
        raise DataError(f"These categories are not in the list of categories: {', '.join(unknown)}")
    labels = np.full_like(tokens, IGNORE_LABEL)
    labels[:, LABELLED_POSITION] = [categories.index(each.category) for each in part]
    return labels


class EmailTask(HasMailVocabulary):
    name = "email"
    num_draws = 0
    primary_metric = ACCURACY
    checkpoint_seconds = CHECKPOINT_SECONDS

    def build(self, options: Options, directory: Path, progress: Progress, jobs: int = 1) -> None:
        self.build_shown(options, directory, ProgressOnly(progress), jobs)

    def build_shown(self, options: Options, directory: Path, display: Display, jobs: int = 1) -> JsonObject:
        """Import the mail, show what it is like, and write the dataset; continue an interrupted import."""
        settings = parse_section(MailBuildOptions, options, "data.build")
        check_vocabulary(settings)
        if settings.mapping is not None:
            load_map(Path(settings.mapping))  # before anything that takes time
        if is_built(self.name, settings, directory):
            remove_spool(spool_of(directory))
        given = (settings.source, settings.length, directory)
        with imported(*given, display, jobs, self.checkpoint_seconds) as spool:
            documents, report = collect_documents(spool, settings, display)
            return_freed_memory()
            write_documents(documents, directory, settings, display.update)
        return {"quality": report.to_json()}

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
