"""The base of every event of a run: a name, and the time when it was recorded."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import ClassVar

from macbook_optimization.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class Event:
    name: ClassVar[str]

    def to_row(self) -> JsonObject:
        return {"time": time.time(), "event": self.name, **asdict(self)}
