"""Failures that every backend shares: failed allocations, NaN and Inf, tensors of other shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from macbook_optimization.errors import (
    AllocationFailed,
    CheckpointError,
    MemoryBudgetError,
    NonFiniteError,
)

# Neither torch nor MLX has an exception for this; oneDNN and the C++ library have messages of their own.
_NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "bad_alloc", "create a primitive",
    "unable to allocate", "malloc", "insufficient memory", "invalid buffer size",
)  # fmt: skip


@contextmanager
def allocations(*, torn: bool) -> Iterator[None]:
    """Raise `AllocationFailed` for every kind of failed allocation; `torn` says that the weights may be
    half updated then."""
    failed = False
    try:
        yield
    except MemoryError:
        failed = True
    except RuntimeError as error:
        failed = any(words in str(error).lower() for words in _NO_MEMORY)
        if not failed:
            raise
    if failed:  # raised here, where no traceback keeps the tensors alive
        raise AllocationFailed(torn=torn)


@contextmanager
def creating_a_learner() -> Iterator[None]:
    """Raise `MemoryBudgetError` if there is no room for the state of a learner."""
    try:
        with allocations(torn=False):
            yield
    except AllocationFailed as error:
        raise MemoryBudgetError(
            "The model and its slots do not fit into memory.",
            hint="Lower model.hidden_size or training.effective_batch_size.",
        ) from error


def require_finite(loss: float, grad_norm: float, step: int, *, torn: bool = False) -> None:
    """Raise `NonFiniteError` before an update, while the weights are still good, unless some are updated."""
    if not math.isfinite(loss + grad_norm):
        raise NonFiniteError(
            f"The loss is {loss:.4g} and the gradient norm {grad_norm:.4g} at step {step}.",
            hint="Start a new run (--run or --fresh) with a lower training.learning_rate.",
            torn=torn,
        )


def check_shapes(ours: Mapping[str, Any], theirs: Mapping[str, Any], what_do: str) -> None:
    """Raise `CheckpointError` unless the tensors of both have the same names and shapes."""
    expected = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    found = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    if expected != found:
        wrong = sorted(
            f"{name}: {found.get(name, 'missing')} instead of {expected.get(name, 'nothing')}"
            for name in {*expected, *found}
            if expected.get(name) != found.get(name)
        )
        raise CheckpointError(f"{what_do} not fit the model of the recipe: {'; '.join(wrong[:5])}")
