"""The longest row that training computes: the dataset's, or less while memory is short.

Unlike every other reaction to the machine, this one changes what is learned: the tokens after the limit are
not seen in these steps, and when that happens depends on the memory of the machine. It is therefore off
unless the recipe sets `training.adaptive_min_length`. It is also the last reaction: rows are cut only while a
micro-batch of one example is still too much.
"""

from __future__ import annotations

import math
from dataclasses import replace

from macbook_optimization.errors import ConfigError
from macbook_optimization.memory_management import AdaptiveSequenceLength, MemoryManager, MemoryModel
from trm.config import RunConfig
from trm.runs.events import RowLengthChanged
from trm.tasks.dataset import Split
from trm.training.log import RunLog

_UNDER_PRESSURE = math.inf  # percentage of memory in use that is above every threshold


class RowLength:
    """The present limit in tokens."""

    def __init__(self, lengths: AdaptiveSequenceLength, log: RunLog) -> None:
        self.lengths = lengths
        self.log = log
        self.cut_at = -math.inf
        self.calm_since: float | None = None

    @classmethod
    def of(cls, config: RunConfig, split: Split, log: RunLog) -> RowLength | None:
        """Return what the recipe requests, or None."""
        least = config.training.adaptive_min_length
        if least is None:
            return None
        if split.lengths is None:
            raise ConfigError(
                "training.adaptive_min_length is for rows of different lengths; those of this dataset are "
                "all alike",
                hint="Remove training.adaptive_min_length.",
            )
        longest = split.spec.max_len
        if least > longest:
            raise ConfigError(
                f"training.adaptive_min_length is {least}, but rows have at most {longest} tokens",
                hint=f"Choose a number from 1 to {longest}.",
            )
        threshold = config.limits.memory_pressure_threshold
        return cls(AdaptiveSequenceLength(longest, least, threshold, threshold - 10), log)

    @property
    def limit(self) -> int:
        return self.lengths.current_seq_len

    def resume(self, limit: int | None) -> None:
        """Continue with the limit of a checkpoint."""
        if limit is not None:
            self.lengths.current_seq_len = min(
                max(limit, self.lengths.min_seq_len), self.lengths.base_seq_len
            )

    def scaled(self, model: MemoryModel | None) -> MemoryModel | None:
        """Return the memory of examples that are cut; the plan measured whole ones.

        At least what an example adds shrinks in proportion to its length, and attention more.
        """
        if model is None:
            return None
        share = self.limit / self.lengths.base_seq_len
        return replace(model, bytes_per_example=math.ceil(share * model.bytes_per_example))

    def react(self, manager: MemoryManager, step: int) -> None:
        """Cut after pressure that the micro-batch size cannot relieve; grow in steps when it is over."""
        now = manager.clock()
        if manager.unrelieved is not None:
            self.calm_since = None
            if now - self.cut_at >= manager.settings.settle_seconds:
                self.cut_at = now
                self.cut(manager.unrelieved, step)
            return
        if self.calm_since is None:
            self.calm_since = now
        if now - self.calm_since >= manager.settings.grow_after_seconds:
            self.calm_since = now
            percent_used = manager.average_percent or 0.0
            if percent_used < self.lengths.grow_below_percent:
                self._adjust(percent_used, "memory pressure is over", step)

    def cut(self, reason: str, step: int) -> bool:
        """Return whether rows could be cut any further."""
        return self._adjust(_UNDER_PRESSURE, reason, step)

    def _adjust(self, percent_used: float, reason: str, step: int) -> bool:
        before = self.limit
        after = self.lengths.adjust_for_memory_pressure(percent_used)
        if after == before:
            return False
        self.log.event(RowLengthChanged(step, before, after, reason))
        self.log.message(f"Rows are cut after {after} tokens instead of {before}: {reason}.")
        return True
