"""Gradients of which each rank sends only the largest entries (`training.gradient_message: topk`).

What a rank does not send is added to its gradient of the next step (error feedback). This remainder belongs
to the rank and its slots: no checkpoint has it, and it starts from zero whenever ranks form a world, resume
or roll back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trm.backends.world import World

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of the same size


class SparseGradients:
    """Sums a flat gradient over ranks. `share` of its entries are sent, at least one."""

    def __init__(self, gradient: Tensor, share: float) -> None:
        self.gradient = gradient
        self.num_sent = max(1, round(share * len(gradient)))
        self.remainder = torch.zeros_like(gradient)  # that was not sent in earlier steps
        self.next_remainder = torch.zeros_like(gradient)  # becomes the remainder with the update

    def sum(self, world: World) -> None:
        """Replace the gradient by the sum of what all ranks send, with the same bits on each of them."""
        own = self.gradient.add_(self.remainder)
        places = own.abs().topk(self.num_sent, sorted=False).indices
        bits = _BITS[own.dtype]
        # Ranks send different places, so each has a part of the message; zeros of integers add no bits.
        message = torch.zeros(world.size, 2, self.num_sent, dtype=bits, device=own.device)
        message[world.rank, 0] = places
        message[world.rank, 1] = own[places].view(bits)
        self.next_remainder.copy_(own)
        self.next_remainder[places] = 0
        world.sum(message.view(-1))
        self.gradient.zero_()
        for places, values in message:
            self.gradient[places.long()] += values.view(own.dtype)

    def keep_remainder(self) -> None:
        """Note that the step has happened."""
        self.remainder, self.next_remainder = self.next_remainder, self.remainder

    def forget(self) -> None:
        self.remainder.zero_()
