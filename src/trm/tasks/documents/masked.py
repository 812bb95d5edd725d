"""Masked tokens: pre-training on mail without categories.

Some tokens of a message are replaced by [UNK], and the model predicts them. A dataset has one choice of
masked tokens, which evaluations use; training draws them anew for every example of a slot, as tasks with
symmetries draw a symmetric copy. `training.initial_weights` then starts a classifier from what was learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from trm.arrays import FloatArray, IntArray
from trm.batch import IGNORE_LABEL, Batch
from trm.config import Fraction, parse_section
from trm.display import Display, ProgressOnly
from trm.slots import random_words, uniforms
from trm.tasks.base import DataSpec, Options, Progress, Scorer
from trm.tasks.dataset import Split
from trm.tasks.documents.collecting import Document, SourceOptions, collect_unlabelled
from trm.tasks.documents.importing import CHECKPOINT_SECONDS, imported, spool_of
from trm.tasks.documents.spool import remove_spool
from trm.tasks.documents.tokens import SEP_TOKEN, UNK_TOKEN
from trm.tasks.documents.writing import (
    Form,
    HasMailVocabulary,
    check_vocabulary,
    is_built,
    vocab_size_of,
    write_mail,
)
from trm.tasks.metrics import TOKENS, ExactMatch

MASKED_SHARE = 0.15  # of the tokens that are not marks; the value of BERT
_BITS_OF_A_DRAW = 53


class MaskedOptions(SourceOptions):
    """The mail that a dataset is made of; its folders and labels do not matter."""

    test_share: Fraction = 0.05
    """Share of the messages in the test set."""


def masked(tokens: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
    """Return inputs with masked tokens and, as labels, what was there; each row's key decides where."""
    draws = uniforms(keys[:, None], np.arange(tokens.shape[1]))
    chosen = (draws < MASKED_SHARE) & (tokens > SEP_TOKEN)
    return np.where(chosen, UNK_TOKEN, tokens), np.where(chosen, tokens, IGNORE_LABEL)


def masked_form(seed: int) -> Form:
    """Return how messages become rows with masked tokens."""

    def labelled(part: Sequence[Document], tokens: IntArray, start: int) -> tuple[IntArray, IntArray]:
        words = random_words(seed, np.arange(start, start + len(part)))
        return masked(tokens, (words >> np.uint64(1)).astype(np.int64))

    return Form(MaskedEmailTask.name, labelled)


class MaskedEmailTask(HasMailVocabulary):
    name = "email-masked"
    num_draws = 1
    primary_metric = TOKENS

    def build(self, options: Options, directory: Path, progress: Progress, jobs: int = 1) -> None:
        self.build_shown(options, directory, ProgressOnly(progress), jobs)

    def build_shown(self, options: Options, directory: Path, display: Display, jobs: int = 1) -> JsonObject:
        """Import the mail, show what it is like, and write the dataset; continue an interrupted import."""
        settings = parse_section(MaskedOptions, options, "data.build")
        check_vocabulary(settings)
        if is_built(self.name, settings, directory):
            remove_spool(spool_of(directory))
        given = (settings.source, settings.length, directory)
        with imported(*given, display, jobs, CHECKPOINT_SECONDS) as spool:
            documents, report = collect_unlabelled(spool, settings, display)
            write_mail(documents, masked_form(settings.seed), directory, settings, display.update)
        return {"quality": report.to_json()}

    def check_options(self, options: Options) -> None:
        parse_section(MaskedOptions, options, "data.build")

    def least_spec(self) -> DataSpec:
        return DataSpec(max_len=1, vocab_size=1, num_outputs=1)

    def spec(self, options: Options) -> DataSpec:
        settings = parse_section(MaskedOptions, options, "data.build")
        vocab_size = vocab_size_of(settings)
        return DataSpec(settings.length, vocab_size, vocab_size)

    def complete(self, spec: DataSpec) -> DataSpec:
        if spec.num_outputs != spec.vocab_size or spec.class_names:
            raise DataError(
                f"The outputs of {self.name} are the {spec.vocab_size} tokens; this dataset has "
                f"{spec.num_outputs} outputs",
                hint=f"Build one: trm data build {self.name} --from MAIL --out DIRECTORY",
            )
        return spec

    def augment(self, batch: Batch, draws: FloatArray) -> Batch:
        """Mask other tokens than the dataset does."""
        tokens = np.where(batch.labels == IGNORE_LABEL, batch.inputs, batch.labels)
        inputs, labels = masked(tokens, (draws[:, 0] * 2**_BITS_OF_A_DRAW).astype(np.int64))
        return replace(batch, inputs=inputs, labels=labels)

    def scorer(self, split: Split) -> Scorer:
        return ExactMatch()


TASK = MaskedEmailTask()
