"""The result of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN_GAIN = "What that gains is not known."
LEAST_GAIN = 1.1  # times as fast: undisturbed steps differ by less


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that was measured, and what to do about it."""

    kind: str  # such as "contention"; each kind is reported once until its cause has gone
    step: int
    evidence: str  # what was measured, in one sentence
    advice: str  # what to change, in one sentence
    gain: str = UNKNOWN_GAIN  # what to expect from the change, where that follows from a measurement

    def in_words(self) -> str:
        """Return the whole finding in one line."""
        return f"{self.kind[:1].upper()}{self.kind[1:]}: {self.evidence} {self.advice} {self.gain}"


def gain_in_speed(factor: float | None) -> str:
    """Return what is gained if steps become this many times as fast; None if that was not measured."""
    if factor is None or not factor >= LEAST_GAIN:
        return UNKNOWN_GAIN
    return f"Up to {factor:.1f} times as fast."
