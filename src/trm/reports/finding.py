"""What a diagnosis returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that was measured, and what to do about it."""

    kind: str  # such as "contention"; each kind is reported once until its cause has gone
    step: int
    evidence: str  # what was measured, in one sentence
    advice: str  # what to change, in one sentence
    gain: str | None = None  # what to expect from the change; None if nothing measured supports a number

    def in_words(self) -> str:
        """Return the whole finding in one line."""
        said = f"{self.kind[:1].upper()}{self.kind[1:]}: {self.evidence} {self.advice}"
        return said if self.gain is None else f"{said} {self.gain}"
