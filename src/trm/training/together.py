"""Decisions that the ranks of a run make together, between two steps.

A rank must not stop, save or pause by itself, because the others would wait for it. So each rank sends its
requests, and a request of any rank takes effect on all of them, at the same step. Everything else follows
from values that are the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from macbook_optimization.children import parent_is_gone
from trm.backends.base import Learner
from trm.backends.world import World
from trm.runs.events import WeightsDiffered
from trm.training.log import RunLog
from trm.training.power import PowerControl
from trm.training.signals import Interrupted, StopRequest

REGROUPING = "regrouping"  # why a start of a run ends when a machine arrives or leaves
LEFT = "left"  # why it ends on a machine that was asked to leave
DIGEST_STEPS = 100  # between two comparisons of the weights


class Wishes(NamedTuple):
    """Requests of a rank; 1 means yes."""

    stop: int = 0  # end the run here
    regroup: int = 0  # form the world anew, as a machine has arrived
    leave: int = 0  # likewise, as this machine leaves
    limit: int = 0  # a limit of time is reached
    save: int = 0
    pause: int = 0  # wait for mains power


@dataclass
class Together:
    """The decisions of one world.

    `has_newcomers` is called on the writer only. `on_waited` receives the slowest rank of every step, and the
    seconds that all others waited for it.
    """

    world: World
    has_newcomers: Callable[[], bool] = lambda: False
    on_waited: Callable[[int, float], None] = lambda rank, seconds: None
    agreed: Wishes = field(default_factory=Wishes)  # the last time
    save_requested: bool = False  # on this rank, for the next agreement
    computed_seconds: float = 0.0  # by this rank in the last step, for the next agreement

    @property
    def is_alone(self) -> bool:
        return self.world.size == 1

    def agree(self, wishes: Wishes, stop: StopRequest) -> Wishes:
        """Return the combined requests of all ranks, with stop requests and arriving machines included.

        If the supervisor of the host has ended, the others wait until it is started again. A stop takes
        precedence over a machine that has just arrived.
        """
        writes = self.world.writes
        abandoned = not self.is_alone and stop.requested and not stop.arrived
        own = wishes._replace(
            stop=int(writes and stop.arrived),
            leave=int(not writes and stop.requested),
            regroup=int(writes and (self.has_newcomers() or abandoned)),
        )
        computed = [0] * self.world.size
        computed[self.world.rank] = round(1e6 * self.computed_seconds)
        self.computed_seconds = 0.0
        found = self.world.agree([*own, *computed])
        self.agreed = Wishes(*found[: len(own)])
        if not self.is_alone:
            self._report_waiting(found[len(own) :])
        return self.agreed

    def _report_waiting(self, microseconds: Sequence[int]) -> None:
        second, most = sorted(microseconds)[-2:]
        self.on_waited(microseconds.index(most), (most - second) / 1e6)

    @property
    def regroups(self) -> bool:
        """Return whether a machine arrives or leaves."""
        return bool(self.agreed.regroup or self.agreed.leave) and not self.agreed.stop

    def check_agreed(self, stop: StopRequest) -> None:
        """Raise `Interrupted` if the ranks agreed that the run stops or a machine leaves."""
        self.check_alone(stop)
        if self.agreed.stop or self.agreed.leave:
            raise Interrupted

    def check(self, stop: StopRequest) -> None:
        """Raise `Interrupted` on all ranks if a stop is requested on one of them, or one leaves."""
        if self.is_alone:
            stop.check()
            return
        self.agree(Wishes(), stop)
        self.check_agreed(stop)

    def check_host(self, stop: StopRequest) -> None:
        """Raise `Interrupted` on all ranks if a stop is requested on the host. Nobody can leave meanwhile."""
        if self.is_alone:
            stop.check()
        elif self.agree(Wishes(), stop).stop:
            raise Interrupted

    def check_alone(self, stop: StopRequest) -> None:
        """Check where other ranks do not: with several of them, a request waits for the next agreement."""
        if self.is_alone:
            stop.check()

    def check_parents(self) -> None:
        """Raise `Interrupted` if the supervisor of any rank has ended."""
        if self.world.agree([int(parent_is_gone())])[0]:
            raise Interrupted

    def waits(self, power: PowerControl, step: int, stop: StopRequest) -> bool:
        """Return whether training pauses, after waiting for a moment; if one rank pauses, all of them do."""
        waits = power.waits(step, partial(self.check_alone, stop))
        if self.is_alone:
            return waits
        if self.agreed.pause and not waits:
            time.sleep(power.WAIT_SECONDS)
        return bool(self.agreed.pause)

    def compare_weights(self, step: int, learner: Learner, log: RunLog) -> None:
        """Compare the weights of all ranks from time to time, as different processors round differently.

        Where they differ, all continue with those of the writer.
        """
        if self.is_alone or step % DIGEST_STEPS:
            return
        digest = learner.digest()
        words = [int(digest[start : start + 8], 16) for start in range(0, len(digest), 8)]
        largest = self.world.agree([*words, *(-word for word in words)])
        if any(most != -least for most, least in zip(largest[:8], largest[8:], strict=True)):
            learner.copy_from_writer()
            log.event(WeightsDiffered(step))
