"""The recursive path of a mail model: small recursive networks over the tokens of a message.

There is usually one network; the probabilities of several, which differ in their seed, are averaged. They are
loaded when the first message needs them: most messages never do.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.backends.base import Program
from trm.config import RunConfig
from trm.inference.predict import execution_of, search_with
from trm.inference.search import Search
from trm.mail.compression import restored
from trm.runs.saved_state import SavedSpec
from trm.tasks.base import DataSpec
from trm.tasks.documents.email import LABELLED_POSITION, question_batch
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.tokens import FILE_NAME as TOKENIZER_FILE
from trm.tasks.documents.tokens import MailTokenizer

WEIGHTS_FILE = "recursive.safetensors"
_BATCH_SIZE = 64
_SMALLEST_PROBABILITY = 1e-12


def weights_file(member: int) -> str:
    """Return the name of the file with the weights of one network of several."""
    return f"recursive-{member}.safetensors" if member else WEIGHTS_FILE


def file_names(num_members: int) -> tuple[str, ...]:
    return (*(weights_file(member) for member in range(num_members)), TOKENIZER_FILE)


@dataclass(frozen=True)
class Network:
    """Trained networks of one recipe, with everything that they need to read a message."""

    recipe: JsonObject
    spec: JsonObject  # what they were trained on: lengths, vocabulary, categories
    files: dict[str, bytes]  # by name, as they are on disk
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def num_members(self) -> int:
        return len(self.files) - 1

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.recipe)

    @cached_property
    def data(self) -> DataSpec:
        return DataSpec(**SavedSpec.model_validate(self.spec).model_dump())

    @cached_property
    def tokenizer(self) -> MailTokenizer:
        return MailTokenizer.from_json(self.files[TOKENIZER_FILE].decode())

    @property
    def length(self) -> int:
        """The most tokens that are read of a message."""
        return self.data.max_len

    @cached_property
    def searches(self) -> list[Search]:
        program = Program.of(self.config, self.data)
        how = execution_of(self.config)
        return [
            search_with(program, self.config.inference, how, partial(self.weights, member))
            for member in range(self.num_members)
        ]

    def weights(self, member: int) -> dict[str, Float32Array]:
        """Return the weights of one network, as its predictor takes them."""
        from safetensors.numpy import load

        return restored(load(self.files[weights_file(member)]))

    def log_probabilities(self, mails: Sequence[Mail]) -> FloatArray:
        """Return the logarithms of the probabilities of all categories, one row per message."""
        found = self.probabilities_of(self.tokenizer.encode(mails, self.length))
        logarithms: FloatArray = np.log(np.maximum(found, _SMALLEST_PROBABILITY))
        return logarithms

    def probabilities_of(self, rows: Sequence[IntArray], members: Sequence[int] | None = None) -> FloatArray:
        """Return the probabilities of all categories for tokens of messages; `members` are all by default.

        Threads take turns: a predictor holds the latents of the rows that it computes.
        """
        with self.lock:
            return self._probabilities_of(rows, members)

    def _probabilities_of(self, rows: Sequence[IntArray], members: Sequence[int] | None) -> FloatArray:
        chosen_members = range(self.num_members) if members is None else members
        found = np.zeros((len(rows), self.data.num_outputs))
        by_length = np.argsort([-len(row) for row in rows], kind="stable")  # little of a batch is padding
        for start in range(0, len(rows), _BATCH_SIZE):
            chosen = by_length[start : start + _BATCH_SIZE].tolist()
            batch = question_batch([rows[i] for i in chosen], self.length).trimmed()
            for member in chosen_members:
                answers = self.searches[member].answer(batch, probabilities=True)
                assert answers.probabilities is not None
                found[chosen] += answers.probabilities[:, LABELLED_POSITION] / len(chosen_members)
        return found
