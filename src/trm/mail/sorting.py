"""Move the messages of a Maildir into the folders of their categories, and take that back.

A message is moved by one rename that never replaces a file. Mail readers and delivery programs may work on
the Maildir at the same time: a message that they have renamed is found by its unique part, and one that they
have removed is counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from macbook_optimization.durable_files import sync
from macbook_optimization.exclusive_rename import rename_exclusively
from trm.mail.journal import JournalWriter, Move, Sort, appended_sort, locked, read_journal, write_journal
from trm.mail.maildir import Listing, Place, folder_of, make_folder, remove_empty_folder
from trm.mail.model import Decision
from trm.mail.reading import Read
from trm.tasks.documents.mailboxes import Message, read_maildir_folder

_BATCH_MOVES = 64  # that one sync of the journal announces

Decided = Iterable[tuple[Read, Decision | None]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A move, and why."""

    move: Move
    category: str
    confidence: float


@dataclass(slots=True)
class Outcome:
    """The outcome for the messages of one folder."""

    moved: list[Choice] = field(default_factory=list)
    unsure: int = 0  # they stay
    skipped: int = 0  # they could not be read, and stay
    in_place: int = 0
    gone: int = 0  # removed by another program in the meantime
    occupied: int = 0  # a message of this name is in the folder already; they stay

    @property
    def by_category(self) -> dict[str, int]:
        return dict(sorted(Counter(choice.category for choice in self.moved).items()))


def messages_of_folder(root: Path, folder: str) -> Iterator[Message]:
    return read_maildir_folder(root / folder, root)


def sort_folder(root: Path, folder: str, decided: Decided, dry_run: bool = False) -> Outcome:
    """Move the decided messages of one folder; with `dry_run`, only return what would be moved."""
    outcome = Outcome()
    listing = Listing(root)
    choices = _choices(folder, decided, outcome)
    if dry_run:
        outcome.moved = [each for each in choices if not _is_occupied(listing, each.move.target, outcome)]
        return outcome
    with locked(root), appended_sort(root) as journal:
        while batch := list(islice(choices, _BATCH_MOVES)):
            free = [each for each in batch if not _is_occupied(listing, each.move.target, outcome)]
            _announce(root, free, journal)
            outcome.moved += [each for each in free if _carry_out(listing, each.move, outcome)]
            for directory in {each.move.target.below(root).parent for each in free}:
                sync(directory)
    return outcome


def _choices(folder: str, decided: Decided, outcome: Outcome) -> Iterator[Choice]:
    """Yield the moves of the messages that are decided, and count the others."""
    for read, decision in decided:
        if decision is None:
            outcome.skipped += 1
        elif decision.unsure:
            outcome.unsure += 1
        elif (target := folder_of(decision.category)) == folder:
            outcome.in_place += 1
        else:
            path = Path(read.message.path)
            source = Place(folder, path.parent.name, path.name)
            move = Move(source, Place(target, source.part, source.name))
            yield Choice(move, decision.category, decision.confidence)


def _is_occupied(listing: Listing, target: Place, outcome: Outcome) -> bool:
    if listing.has(target.folder, target.unique):
        outcome.occupied += 1
        return True
    listing.add(target)
    return False


def _announce(root: Path, choices: list[Choice], journal: JournalWriter) -> None:
    """Write the journal, and then create the folders that are missing."""
    folders = {choice.move.target.folder: None for choice in choices}  # in their order
    missing = [folder for folder in folders if not os.path.lexists(root / folder)]
    if choices:
        journal.record(missing, [choice.move for choice in choices])
    for folder in folders:
        make_folder(root, folder)


def _carry_out(listing: Listing, move: Move, outcome: Outcome) -> bool:
    """Move a message, and again if a mail reader has just renamed it; return whether it was moved."""
    if _rename(listing, move):
        return True
    listing.refresh(move.source.folder)
    found = listing.find(move.source)
    if found is not None and found != move.source:
        renamed = Place(move.target.folder, found.part, found.name)
        if _rename(listing, Move(found, renamed)):
            return True
    if found is None:
        outcome.gone += 1
    else:
        outcome.occupied += 1
    return False


def _rename(listing: Listing, move: Move) -> bool:
    try:
        rename_exclusively(move.source.below(listing.root), move.target.below(listing.root))
    except (FileExistsError, FileNotFoundError):
        return False
    return True


@dataclass(slots=True)
class Undone:
    """The outcome for the moves of a sort."""

    moved_back: int = 0
    with_other_flags: int = 0  # of those, how many a mail reader had renamed
    in_place: int = 0  # they had not been moved, or were moved back before
    gone: list[Place] = field(default_factory=list)  # where they had been moved to
    occupied: list[Place] = field(default_factory=list)  # something else is where they were
    kept_folders: list[str] = field(default_factory=list)  # created by the sort, but no longer empty
    earlier_sorts: int = 0  # that can still be taken back

    @property
    def is_complete(self) -> bool:
        return not (self.gone or self.occupied)


def undo_sort(root: Path) -> Undone | None:
    """Move the messages of the last sort back; None if there is nothing to take back.

    If this is interrupted, it can be called again: what is back already stays there. Moves whose place is
    occupied stay in the journal.
    """
    with locked(root):
        sorts = read_journal(root)
        if not sorts:
            return None
        last = sorts.pop()
        undone = Undone(earlier_sorts=len(sorts))
        listing = Listing(root)
        left = [move for move in reversed(last.moves) if not _take_back(listing, move, undone)]
        kept = [folder for folder in last.folders if not remove_empty_folder(root, folder)]
        undone.kept_folders = kept
        for directory in {move.source.below(root).parent for move in last.moves}:
            with suppress(FileNotFoundError):
                sync(directory)
        write_journal(root, [*sorts, Sort(last.started, kept, left[::-1])] if left else sorts)
    return undone


def _take_back(listing: Listing, move: Move, undone: Undone) -> bool:
    """Move a message back; return False if its place is occupied."""
    root = listing.root
    found = listing.find(move.target)
    if found is None:
        if listing.find(move.source) is None:
            undone.gone.append(move.target)
        else:
            undone.in_place += 1
        return True
    is_renamed = found != move.target
    place = Place(move.source.folder, found.part, found.name) if is_renamed else move.source
    if not place.below(root).parent.is_dir():
        make_folder(root, place.folder)
    try:
        rename_exclusively(found.below(root), place.below(root))
    except FileExistsError:
        if not os.path.samefile(found.below(root), place.below(root)):
            undone.occupied.append(move.target)
            return False
        os.unlink(found.below(root))  # a crash left the message with two names
    undone.moved_back += 1
    undone.with_other_flags += is_renamed
    return True
