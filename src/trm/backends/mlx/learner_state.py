"""The state of a learner as named arrays: what checkpoints hold and ranks compare.

Names, shapes and precisions are those of the PyTorch backend, so that either resumes what the other saved.
Between ranks, arrays travel in memory of NumPy, which a world may write to. Latents are float32 there: their
precision is that of the plan, which each rank has for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trm.backends.failures import check_shapes
from trm.backends.mlx.device import to_array, to_mlx
from trm.backends.sharing import at_writer
from trm.backends.world import World

Named = dict[str, mx.array]
Groups = dict[str, Named]
_SLOT_DIMENSION = 2  # of latents
_LATENTS = "latents"


def whole_state(shared: Groups, latents: mx.array | None, world: World) -> Groups:
    """Return the state of all slots at the writer; on other ranks, with their own latents."""
    if latents is None:
        return shared
    if world.size > 1:
        whole = world.gather(to_array(latents), _SLOT_DIMENSION)
        latents = latents if whole is None else mx.array(whole).astype(latents.dtype)
    return {**shared, _LATENTS: {_LATENTS: latents}}


def loaded_state(
    shared: Groups, latents: mx.array | None, groups: dict[str, Any], world: World
) -> tuple[Groups, mx.array | None]:
    """Return what the writer has read as the state of every rank.

    Groups are removed from the mapping as they are taken, since each occupies memory.
    """
    at_writer(world, partial(_check, shared, latents, groups, sum(world.shares)))
    found = {}
    for name, ours in shared.items():
        theirs = groups.pop(name, {})
        found[name] = _from_writer(ours, theirs, world)
    if latents is not None:
        latents = _own_latents(latents, groups.pop(_LATENTS, {}).get(_LATENTS), world)
    mx.eval(found, latents)
    return found, latents


def _check(shared: Groups, latents: mx.array | None, groups: dict[str, Any], num_slots: int) -> None:
    expected: dict[str, Mapping[str, Any]] = dict(shared)
    if latents is not None:
        shape = list(latents.shape)
        shape[_SLOT_DIMENSION] = num_slots
        expected[_LATENTS] = {_LATENTS: np.broadcast_to(np.float32(0), shape)}
    for name, ours in expected.items():
        check_shapes(ours, groups.get(name, {}), f"The {name} of the checkpoint do")


def copied_from_writer(shared: Groups, world: World) -> Groups:
    return {name: _from_writer(group, group, world) for name, group in shared.items()}


def _from_writer(ours: Named, theirs: Mapping[str, Any], world: World) -> Named:
    """Return on every rank what the writer has under each of our names."""
    found = {}
    for name, array in ours.items():
        here = to_mlx(theirs[name]).astype(array.dtype) if world.writes else array
        if world.size > 1:
            bits = _bits(here)
            world.copy_from_writer(bits)
            here = _from_bits(bits, array.dtype)
        found[name] = here
    return found


def _own_latents(latents: mx.array, whole: Any, world: World) -> mx.array:
    if world.size == 1:
        return to_mlx(whole).astype(latents.dtype)
    own = to_array(latents)
    world.scatter(to_array(to_mlx(whole)) if world.writes else None, own, _SLOT_DIMENSION)
    return mx.array(own).astype(latents.dtype)


def digest(weights: Named) -> str:
    """Return the SHA-256 of the bits of all weights."""
    found = hashlib.sha256()
    for array in weights.values():
        found.update(_bits(array).data)
    return found.hexdigest()


def _bits(array: mx.array) -> NDArray[Any]:
    """Return a copy that NumPy can hold, to the last bit: bfloat16 as integers."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _from_bits(bits: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    array = mx.array(bits)
    return array.view(dtype) if array.dtype != dtype else array
