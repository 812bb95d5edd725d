"""Facts about a dataset, computed from its files: sizes, duplicates, and how this machine would read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from macbook_optimization.dataset_files import BUILD_FILE, MAX_JSON_BYTES, cannot_read
from macbook_optimization.dataset_management import MIB, DatasetManager
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_json
from macbook_optimization.units import counted
from trm.arrays import WordArray
from trm.tasks.base import Progress
from trm.tasks.dataset import SPLITS, Split, open_split

_ROWS_PER_CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class SplitFacts:
    examples: int
    puzzles: int
    groups: int
    size_bytes: int
    repeated: int  # examples whose question occurred before


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    path: str
    task: str | None  # None for a dataset that was not built by this program
    max_len: int
    vocab_size: int
    num_outputs: int
    num_puzzle_identifiers: int
    splits: dict[str, SplitFacts]
    in_both: int  # test examples whose question is also in the training split
    strategy: str
    reason: str


def inspect_dataset(dataset: Path, progress: Progress) -> DatasetFacts:
    names = [name for name in SPLITS if (dataset / name).is_dir()] or ["train"]
    splits = {name: open_split(dataset, name) for name in names}
    hashes = {name: _question_hashes(split, name, progress) for name, split in splits.items()}
    spec = splits[names[0]].spec
    analysis = DatasetManager().analyze_dataset_requirements(dataset, names[0])
    in_both = 0
    if len(hashes) == 2:
        in_both = int(np.isin(hashes["test"], hashes["train"]).sum())
    return DatasetFacts(
        path=str(dataset),
        task=_task_name(dataset),
        max_len=spec.max_len,
        vocab_size=spec.vocab_size,
        num_outputs=spec.num_outputs,
        num_puzzle_identifiers=spec.num_puzzle_identifiers,
        splits={name: _split_facts(split, hashes[name]) for name, split in splits.items()},
        in_both=in_both,
        strategy=analysis.recommended_strategy,
        reason=analysis.reason,
    )


def format_facts(facts: DatasetFacts) -> str:
    """Return the facts as lines for a terminal."""
    outputs = ""
    if facts.num_outputs != facts.vocab_size:
        outputs = f"{counted(facts.num_outputs, 'output')}, "
    lines = [
        f"{facts.path}: {facts.task or 'not built here'}, {counted(facts.max_len, 'position')}, "
        f"{counted(facts.vocab_size, 'token')}, {outputs}"
        f"{counted(facts.num_puzzle_identifiers, 'puzzle identifier')}"
    ]
    for name, split in facts.splits.items():
        lines.append(
            f"{name:6} {counted(split.examples, 'example')} of {counted(split.puzzles, 'puzzle')} in "
            f"{counted(split.groups, 'group')}, "
            f"{split.size_bytes / MIB:,.1f} MiB; {split.repeated:,} with a question that occurred before"
        )
    if len(facts.splits) == 2:
        are = "is" if facts.in_both == 1 else "are"
        lines.append(f"{counted(facts.in_both, 'test question')} {are} also in the training split")
    lines.append(f"On this machine: {facts.strategy}. {facts.reason}")
    return "\n".join(lines)


def _split_facts(split: Split, hashes: WordArray) -> SplitFacts:
    return SplitFacts(
        examples=len(split),
        puzzles=len(split.puzzle_identifiers),
        groups=len(split.group_indices) - 1,
        size_bytes=split.inputs.nbytes + split.labels.nbytes,
        repeated=len(hashes) - len(np.unique(hashes)),
    )


def _question_hashes(split: Split, name: str, progress: Progress) -> WordArray:
    """Return a 64-bit polynomial hash of every question and its puzzle identifier, computed in chunks."""
    rng = np.random.Generator(np.random.Philox(0))
    factors = rng.integers(1, 2**63, split.spec.max_len + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashes = np.empty(len(split), dtype=np.uint64)
    for start in range(0, len(split), _ROWS_PER_CHUNK):
        progress(f"reading {name}", start, len(split))
        examples = np.arange(start, min(start + _ROWS_PER_CHUNK, len(split)))
        batch = split.batch(examples)
        words = np.column_stack((batch.inputs, batch.puzzle_identifiers)).astype(np.uint64) + np.uint64(1)
        words = (words ^ (words << np.uint64(29))) * factors
        hashes[examples] = (words ^ (words >> np.uint64(32))).sum(1, dtype=np.uint64)
    progress(f"reading {name}", len(split), len(split))
    return hashes


def _task_name(dataset: Path) -> str | None:
    try:
        return str(read_json(dataset / BUILD_FILE, MAX_JSON_BYTES)["task"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot_read(dataset / BUILD_FILE, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{dataset / BUILD_FILE} cannot be read: {error}") from error
