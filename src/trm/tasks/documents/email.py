"""Mail as a task: one message is one row of tokens, and its category is the label of the first position.

The dataset has the layout of every other task, with a length per row and the vocabulary in `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from macbook_optimization.dataset_files import BUILD_FILE, MAX_JSON_BYTES
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_readings import return_freed_memory
from macbook_optimization.output_files import check_new_directory
from trm.arrays import FloatArray, IntArray
from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch
from trm.config import parse_section
from trm.display import Display, ProgressOnly
from trm.tasks.base import DataSpec, Options, Progress, Scorer
from trm.tasks.dataset import Split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.documents.collecting import Document, Documents, MailBuildOptions, Part, collect_documents
from trm.tasks.documents.importing import CHECKPOINT_SECONDS, identity_of, import_mail
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.spool import open_spool, remove_spool
from trm.tasks.documents.tokens import (
    FILE_NAME,
    SEP_TOKEN,
    MailTokenizer,
    TokenOptions,
    padded,
)
from trm.tasks.metrics import ACCURACY, Classification

LABELLED_POSITION = 0  # of [CLS]
_ROWS_AT_A_TIME = 1000
_CHARACTERS_AT_A_TIME = 2**21


def write_documents(
    documents: Documents,
    directory: Path,
    settings: TokenOptions,
    progress: Progress = lambda what, done, total: None,
) -> MailTokenizer:
    """Train a tokenizer on the training split, and write both splits as a dataset."""
    categories = documents.categories
    if len(categories) < 2:
        raise DataError(f"A classifier needs two categories or more; there is {categories}")
    progress("training the tokenizer", 0, 1)
    mails = _Mails(documents.train if documents.sample is None else documents.sample)
    tokenizer = MailTokenizer.train(mails, settings.vocab_size)
    return_freed_memory()
    progress("training the tokenizer", 1, 1)
    spec = spec_of(settings, categories)
    with DatasetWriter(directory, _made_by(settings)) as writer:
        for name, chosen in (("train", documents.train), ("test", documents.test)):
            split = writer.split(name, spec, IGNORE_LABEL)
            num_written = 0
            for part in _batches(chosen):
                progress(f"writing {name}", num_written, len(chosen))
                tokens, lengths = padded(
                    tokenizer.encode([each.mail for each in part], settings.length), settings.length
                )
                split.add_examples(tokens, _labels(part, categories, tokens), lengths=lengths)
                num_written += len(part)
            progress(f"writing {name}", len(chosen), len(chosen))
        writer.write_json(FILE_NAME, json.loads(tokenizer.to_json()))
    return tokenizer


def _made_by(settings: TokenOptions) -> JsonObject:
    return {"task": EmailTask.name, "options": settings.model_dump(mode="json")}


def _build_facts(directory: Path) -> JsonObject:
    """Return how a dataset was built, or nothing if there is none."""
    try:
        facts: JsonObject = read_json(directory / BUILD_FILE, MAX_JSON_BYTES)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


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


def spec_of(settings: TokenOptions, categories: tuple[str, ...]) -> DataSpec:
    return DataSpec(settings.length, settings.vocab_size, len(categories), class_names=categories)


def questions(tokenizer: MailTokenizer, mails: Sequence[Mail], length: int) -> Iterator[Batch]:
    """Yield messages as batches without labels, a thousand at a time and in their order."""
    for start in range(0, len(mails), _ROWS_AT_A_TIME):
        tokens, lengths = padded(tokenizer.encode(mails[start : start + _ROWS_AT_A_TIME], length), length)
        yield Batch(
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


class EmailTask:
    name = "email"
    num_draws = 0
    primary_metric = ACCURACY
    checkpoint_seconds = CHECKPOINT_SECONDS

    def build(self, options: Options, directory: Path, progress: Progress, jobs: int = 1) -> None:
        self.build_shown(options, directory, ProgressOnly(progress), jobs)

    def build_shown(self, options: Options, directory: Path, display: Display, jobs: int = 1) -> JsonObject:
        """Import the mail, show what it is like, and write the dataset; continue an interrupted import."""
        settings = parse_section(MailBuildOptions, options, "data.build")
        spooled = Path(f"{directory}.import")
        if _made_by(settings).items() <= _build_facts(directory).items():  # killed just before the end
            remove_spool(spooled)
        check_new_directory(directory)
        identity = identity_of(settings.source, settings.length)
        with open_spool(spooled, identity, display.message) as spool:
            import_mail(spool, settings.source, display, jobs, self.checkpoint_seconds)
            return_freed_memory()
            documents, report = collect_documents(spool, settings, display)
            return_freed_memory()
            write_documents(documents, directory, settings, display.update)
            remove_spool(spooled)
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
