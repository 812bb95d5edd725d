"""The state of a learner as named tensors: what checkpoints hold and ranks compare.

Weights, their average and the moments are the same on every rank. Latents belong to the rank that owns their
slots; a checkpoint has those of all slots, in their order, so that any number of ranks can resume it.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor

from macbook_optimization.json_types import JsonObject
from trm.backends.failures import check_shapes
from trm.backends.pytorch.device import to_array
from trm.backends.sharing import at_writer
from trm.backends.world import World

Named = dict[str, Tensor]
Groups = dict[str, Named]
_SLOT_DIMENSION = 2  # of latents


def whole_state(shared: Groups, latents: Tensor | None, world: World) -> Groups:
    """Return the state of all slots at the writer; on other ranks, with their own latents."""
    if latents is None:
        return shared
    whole = world.gather(latents, _SLOT_DIMENSION)
    return {**shared, "latents": {"latents": latents if whole is None else whole}}


def load_state(shared: Groups, latents: Tensor | None, groups: dict[str, JsonObject], world: World) -> None:
    """Copy what the writer has read into the tensors of every rank, group by group.

    Groups are removed as they are copied, since each occupies memory.
    """
    at_writer(world, partial(_check, shared, latents, groups, sum(world.shares)))
    for name, ours in shared.items():
        theirs = groups.pop(name, {})
        for key, tensor in ours.items():
            if world.writes:
                tensor.copy_(theirs[key])
            world.copy_from_writer(tensor)
    if latents is not None:
        world.scatter(groups.pop("latents", {}).get("latents"), latents, _SLOT_DIMENSION)


def _check(shared: Groups, latents: Tensor | None, groups: dict[str, JsonObject], num_slots: int) -> None:
    expected = dict(shared)
    if latents is not None:
        shape = list(latents.shape)
        shape[_SLOT_DIMENSION] = num_slots
        expected["latents"] = {"latents": torch.empty(shape, device="meta")}
    for name, ours in expected.items():
        check_shapes(ours, groups.get(name, {}), f"The {name} of the checkpoint do")


def copy_from_writer(shared: Groups, world: World) -> None:
    for group in shared.values():
        for tensor in group.values():
            world.copy_from_writer(tensor)


def digest(weights: Named) -> str:
    """Return the SHA-256 of the bits of all weights."""
    found = hashlib.sha256()
    for tensor in weights.values():
        found.update(to_array(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)).data)
    return found.hexdigest()
