"""Read mail of any size into a spool, in bounded memory, and continue where an earlier import stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from macbook_optimization.json_types import JsonObject
from trm.display import Display
from trm.tasks.documents.parse_pool import Failure, ParsePool
from trm.tasks.documents.records import FORMAT, Facts, Record, record_of
from trm.tasks.documents.sources import describe_source, messages_of
from trm.tasks.documents.spool import Spool, SpoolWriter
from trm.tasks.documents.tokens import TRAINING_TOKENS

CHECKPOINT_SECONDS = 5.0  # what a power failure costs at most


def identity_of(sources: Sequence[str | Path], length: int) -> JsonObject:
    """Describe what is imported. An import is only continued if this is the same.

    Options that are applied to the records later, such as the split and the mapping, do not count.
    """
    return {
        "format": FORMAT,
        "tokens": _num_tokens(length),
        "sources": [describe_source(source) for source in sources],
    }


def import_mail(
    spool: Spool,
    sources: Sequence[str | Path],
    display: Display,
    jobs: int,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> None:
    """Read, parse and record all messages that the spool does not have yet."""
    if spool.state.is_complete:
        display.message(f"All {spool.state.num_messages:,} messages are in {spool.directory} already.")
        return
    if spool.state.num_messages:
        display.message(
            f"Continuing the import in {spool.directory} after {spool.state.num_messages:,} messages."
        )
    messages = messages_of(sources, progress=display.update, start=spool.state.position)
    function = partial(record_of, num_tokens=spool.state.identity["tokens"])
    with SpoolWriter(spool) as writer, ParsePool(function, jobs) as pool:
        due = time.monotonic() + checkpoint_seconds
        for message, result in pool.map(messages):
            if isinstance(result, Failure):
                writer.append(message, Record(Facts("skipped", result.reason)))
            else:
                writer.append(message, result)
            if time.monotonic() >= due:
                writer.checkpoint()
                due = time.monotonic() + checkpoint_seconds
        writer.complete()


def _num_tokens(length: int) -> int:
    """Return for how many tokens text is kept: those of a row, or those that the vocabulary is made of."""
    return max(length, TRAINING_TOKENS)
