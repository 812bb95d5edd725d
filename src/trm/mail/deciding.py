"""Decide about messages: a model with its corrections, and workers that parse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from trm.arrays import FloatArray
from trm.mail.corrections import (
    Correction,
    apply_corrections,
    changing,
    check_category,
    correction_of,
    key_of,
    load_corrections,
    with_corrections,
)
from trm.mail.loading import model_directory
from trm.mail.model import DEFAULT_MAX_ERROR, Decision, MailModel, load_model
from trm.mail.reading import Features, Read, features_of, read_features
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.parse_pool import ParsePool

_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True)
class Compared:
    """The answers of every path, of both together and of the baseline for one message."""

    columns: dict[str, FloatArray]  # a number per category
    is_decided: bool


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model that is ready to decide. Open one with `open_classifier`."""

    directory: Path
    fitted: MailModel  # without corrections
    corrections: list[Correction]
    model: MailModel  # with corrections
    pool: ParsePool[Features]
    full: bool = False  # use the recursive path also where the linear one is certain

    def decide(
        self, messages: Iterable[Message], max_error: float = DEFAULT_MAX_ERROR
    ) -> Iterator[tuple[Read, Decision | None]]:
        """Yield each message with its decision, in order; None for one that was skipped."""
        reads = read_features(messages, self.pool)
        while batch := list(islice(reads, _BATCH_SIZE)):
            decisions = self.model.decide([read.features for read in batch], max_error, full=self.full)
            for read, decision in zip(batch, decisions, strict=True):
                yield read, None if read.features.mail.verdict == "skipped" else decision

    def compare(
        self, messages: Iterable[Message], max_error: float = DEFAULT_MAX_ERROR
    ) -> Iterator[tuple[Read, Compared | None]]:
        """Yield each message with what every path of the model says about it, for an evaluation."""
        model = self.model
        reads = read_features(messages, self.pool)
        while batch := list(islice(reads, _BATCH_SIZE)):
            bags = model.bags([read.features.counts for read in batch])
            columns = model.columns(bags, [read.features.mail for read in batch])
            known_shares = np.array([model.known_share(read.features.counts) for read in batch])
            unsure = model.unsure(columns[model.main_column], known_shares, max_error).tolist()
            for row, read in enumerate(batch):
                said = Compared({name: found[row] for name, found in columns.items()}, not unsure[row])
                yield read, None if read.features.mail.verdict == "skipped" else said

    def learn(self, messages: Iterable[Message], category: str) -> tuple[int, int]:
        """Learn the category of messages that were decided wrongly or unsurely, and save it.

        Returns how many were learned, and how many were right already (train on error). Messages that cannot
        be read are neither.
        """
        check_category(self.fitted, category)
        known = {(each.key, self.fitted.categories[each.category]) for each in self.corrections}
        learned: list[Correction] = []
        num_right = 0
        for read, decision in self.decide(messages):
            key = key_of(read.message.raw)
            if decision is None:
                continue
            if decision.category == category and (not decision.unsure or (key, category) in known):
                num_right += 1
                continue
            learned.append(correction_of(self.fitted, read.features, key, category))
        if learned:
            with changing(self.directory, len(self.fitted.vocabulary.idf)) as current:
                current[:] = with_corrections(current, learned)
        return len(learned), num_right

    def forget(self, keys: Iterable[str]) -> int:
        """Take back the corrections of these messages, and return how many there were."""
        unwanted = set(keys)
        with changing(self.directory, len(self.fitted.vocabulary.idf)) as current:
            num_before = len(current)
            current[:] = [each for each in current if each.key not in unwanted]
            return num_before - len(current)


@contextmanager
def open_classifier(
    run: Path, jobs: int = 1, *, full: bool = False, all_paths: bool = False
) -> Iterator[Classifier]:
    """Load a model and its corrections. `all_paths`: keep what `Classifier.compare` needs of a message."""
    directory = model_directory(run)
    fitted = load_model(directory)
    corrections = load_corrections(directory, len(fitted.vocabulary.idf))
    num_tokens = fitted.network.length if all_paths and fitted.network else fitted.num_tokens
    with ParsePool(partial(features_of, num_tokens=num_tokens), jobs) as pool:
        yield Classifier(directory, fitted, corrections, apply_corrections(fitted, corrections), pool, full)
