"""A sequence length that follows memory pressure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class AdaptiveSequenceLength:
    """A sequence length that gets shorter under memory pressure and recovers afterwards.

    Unlike the micro-batch size, the length changes what is learned, so it is only for tasks of variable
    length that opt in.
    """

    base_seq_len: int = 512
    min_seq_len: int = 128
    shrink_above_percent: float = 85.0
    grow_below_percent: float = 60.0
    current_seq_len: int = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.min_seq_len <= self.base_seq_len:
            raise ValueError(f"min_seq_len {self.min_seq_len} is not between 1 and {self.base_seq_len}")
        self.current_seq_len = self.base_seq_len

    def adjust_for_memory_pressure(self, memory_usage_percent: float) -> int:
        if memory_usage_percent > self.shrink_above_percent:
            self.current_seq_len = max(self.min_seq_len, self.current_seq_len * 3 // 4)
        elif memory_usage_percent < self.grow_below_percent:
            grown = math.ceil(self.current_seq_len * 1.1)
            self.current_seq_len = min(self.base_seq_len, grown)
        return self.current_seq_len
