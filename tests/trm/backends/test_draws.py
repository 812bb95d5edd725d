"""What a seed gives without torch, against torch itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trm.backends.draws import AT_A_TIME, Draws
from trm.backends.pytorch.decoder import Dropout
from trm.backends.pytorch.layers import truncated_normal
from trm.slots import random_words

SEEDS = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**64 - 1))
SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
KINDS = st.sampled_from(("truncated", "normal", "bernoulli"))


def of_torch(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if kind == "truncated":
        return truncated_normal(*shape, std=0.3, generator=generator)
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) < 0.9).float()


def of_ours(kind: str, shape: tuple[int, ...], draws: Draws) -> np.ndarray:
    if kind == "truncated":
        return draws.truncated_normal(*shape, std=0.3)
    return draws.normal(*shape) if kind == "normal" else draws.bernoulli(*shape, share=0.9)


def assert_same(ours: np.ndarray, theirs: torch.Tensor) -> None:
    assert ours.shape == tuple(theirs.shape)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-6)


@given(SEEDS, st.lists(st.tuples(KINDS, SHAPES), min_size=1, max_size=5))
def test_calls_in_any_order_draw_what_torch_draws(
    seed: int, calls: list[tuple[str, tuple[int, ...]]]
) -> None:
    draws, generator = Draws(seed), torch.Generator().manual_seed(seed)
    for kind, shape in calls:
        assert_same(of_ours(kind, shape, draws), of_torch(kind, shape, generator))


@pytest.mark.parametrize("kind", ["truncated", "normal"])
@pytest.mark.parametrize("size", [AT_A_TIME, AT_A_TIME + 5])
def test_a_large_array_is_drawn_in_parts_without_a_difference(kind: str, size: int) -> None:
    draws, generator = Draws(2**40 + 7), torch.Generator().manual_seed(2**40 + 7)
    for _ in range(2):
        assert_same(of_ours(kind, (size,), draws), of_torch(kind, (size,), generator))


def test_float32_arrays_come_back() -> None:
    assert Draws(0).truncated_normal(3, std=1.0).dtype == np.float32
    assert Draws(0).normal(3).dtype == np.float32
    assert Draws(0).normal(40).dtype == np.float32


def test_dropout_drops_the_same_units_on_every_processor() -> None:
    """`bernoulli_` would not: on processors of Intel, it draws with MKL."""
    seeds = np.arange(3)
    kept = Dropout(0.2, seeds)(torch.ones(3, 9, 7), 4) != 0
    expected = [Draws(word).bernoulli(9, 7, share=0.8) for word in random_words(seeds, 4).tolist()]
    np.testing.assert_array_equal(kept.numpy(), expected)
