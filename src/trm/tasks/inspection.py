"""What a dataset holds, told without training on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.dataset_files import BUILD
from macbook_optimization.dataset_management import MIB, DatasetManager
from macbook_optimization.errors import DataError
from trm.tasks.base import Progress, Split, open_split

_ROWS = 16_384  # read at a time


@dataclass(frozen=True, slots=True)
class SplitFacts:
    examples: int
    puzzles: int
    groups: int
    megabytes: float
    repeated: int  # examples whose question occurred before


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    path: str
    task: str | None  # where it was built here
    seq_len: int
    vocab_size: int
    num_puzzle_identifiers: int
    splits: dict[str, SplitFacts]
    in_both: int  # test examples whose question is also in the training half
    strategy: str
    reason: str


def examine(dataset: Path, progress: Progress) -> DatasetFacts:
    names = [name for name in ("train", "test") if (dataset / name).is_dir()] or ["train"]
    splits = {name: open_split(dataset, name) for name in names}
    hashes = {name: _hashes(split, name, progress) for name, split in splits.items()}
    first = next(iter(splits.values()))
    analysis = DatasetManager().analyze_dataset_requirements(dataset, names[0])
    both = np.isin(hashes["test"], hashes["train"]).sum() if len(hashes) == 2 else 0
    return DatasetFacts(
        path=str(dataset),
        task=_task_of(dataset),
        seq_len=first.shape.seq_len,
        vocab_size=first.shape.vocab_size,
        num_puzzle_identifiers=first.shape.num_puzzle_identifiers,
        splits={name: _facts(split, hashes[name]) for name, split in splits.items()},
        in_both=int(both),
        strategy=analysis.recommended_strategy,
        reason=analysis.reason,
    )


def page(found: DatasetFacts) -> str:
    lines = [
        f"{found.path}: {found.task or 'not built here'}, {found.seq_len} cells, {found.vocab_size} tokens, "
        f"{found.num_puzzle_identifiers:,} puzzle identifiers"
    ]
    for name, split in found.splits.items():
        lines.append(
            f"{name:6} {split.examples:,} examples of {split.puzzles:,} puzzles in {split.groups:,} groups, "
            f"{split.megabytes:,.1f} MB; {split.repeated:,} with a question that occurred before"
        )
    if len(found.splits) == 2:
        lines.append(f"{found.in_both:,} test questions are also in the training half")
    lines.append(f"On this machine: {found.strategy}. {found.reason}")
    return "\n".join(lines)


def _facts(split: Split, hashes: NDArray[np.uint64]) -> SplitFacts:
    size = split.inputs.nbytes + split.labels.nbytes
    return SplitFacts(
        examples=len(split),
        puzzles=len(split.puzzle_identifiers),
        groups=len(split.group_indices) - 1,
        megabytes=size / MIB,
        repeated=len(hashes) - len(np.unique(hashes)),
    )


def _hashes(split: Split, name: str, progress: Progress) -> NDArray[np.uint64]:
    """Of every question with its puzzle identifier: a polynomial in 64 bits, chunk by chunk."""
    rng = np.random.Generator(np.random.Philox(0))
    factors = rng.integers(1, 2**63, split.shape.seq_len + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    found = np.empty(len(split), dtype=np.uint64)
    for start in range(0, len(split), _ROWS):
        progress(f"reading {name}", start, len(split))
        examples = np.arange(start, min(start + _ROWS, len(split)))
        inputs, _ = split.rows(examples)
        words = np.column_stack((inputs, split.identifiers(examples))).astype(np.uint64) + np.uint64(1)
        words = (words ^ (words << np.uint64(29))) * factors
        found[examples] = (words ^ (words >> np.uint64(32))).sum(1, dtype=np.uint64)
    progress(f"reading {name}", len(split), len(split))
    return found


def _task_of(dataset: Path) -> str | None:
    try:
        return str(json.loads((dataset / BUILD).read_bytes())["task"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{dataset / BUILD} cannot be read: {error}") from error
