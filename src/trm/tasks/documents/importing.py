"""Read mail of any size into a spool, in bounded memory, and continue where an earlier import stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from macbook_optimization.errors import LaptopError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.memory_readings import return_freed_memory
from macbook_optimization.output_files import check_new_directory
from trm.display import Display
from trm.tasks.documents.parse_pool import Failure, ParsePool
from trm.tasks.documents.records import FORMAT, Facts, Record, record_of
from trm.tasks.documents.sources import describe_source, messages_of
from trm.tasks.documents.spool import Spool, SpoolWriter, open_spool, remove_spool
from trm.tasks.documents.tokens import TRAINING_TOKENS

CHECKPOINT_SECONDS = 5.0  # what a power failure costs at most


@contextmanager
def imported(
    sources: Sequence[str], length: int, directory: Path, display: Display, jobs: int, seconds: float
) -> Iterator[Spool]:
    """Import mail for a dataset that is to be written to `directory`, and yield it as a spool.

    The spool is beside that directory. It is removed when the dataset has been written, and kept after an
    exception, so that the next call continues, unless it has nothing to continue with. `seconds` is the time
    between two checkpoints.
    """
    check_new_directory(directory)
    spooled = spool_of(directory)
    with open_spool(spooled, identity_of(sources, length), display.message) as spool:
        try:
            import_mail(spool, sources, display, jobs, seconds)
            return_freed_memory()
            yield spool
        except LaptopError:
            if not spool.state.num_documents:
                remove_spool(spooled)
            raise
        remove_spool(spooled)


def spool_of(directory: Path) -> Path:
    return Path(f"{directory}.import")


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
