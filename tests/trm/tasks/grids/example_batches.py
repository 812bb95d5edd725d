"""Batches and answers of given tokens."""

import numpy as np

from trm.batch import Batch
from trm.tasks.base import AnswerBatch


def batch_of(inputs, labels, identifiers=None):
    count = len(inputs)
    return Batch(
        slots=np.arange(count),
        inputs=np.asarray(inputs, dtype=np.int64),
        labels=np.asarray(labels, dtype=np.int64),
        puzzle_identifiers=np.zeros(count, dtype=np.int64) if identifiers is None else identifiers,
        fresh=np.ones(count, dtype=bool),
    )


def answers_of(tokens, halt_logits=None):
    count = len(tokens)
    return AnswerBatch(
        tokens=np.asarray(tokens, dtype=np.int64),
        halt_logits=np.zeros(count, dtype=np.float32) if halt_logits is None else np.float32(halt_logits),
        steps=np.ones(count, dtype=np.int64),
    )
