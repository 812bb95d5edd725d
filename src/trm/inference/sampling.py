"""Text that a decoder continues, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from macbook_optimization.errors import ConfigError
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.backends.base import LanguageModel, Program, load_backend
from trm.inference.predict import TrainedModel


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    max_tokens: int = 200
    temperature: float = 0.8  # 0 always takes the likeliest token
    top_p: float = 1.0  # share of the probability, from the likeliest tokens on, that is drawn from
    seed: int = 0

    def __post_init__(self) -> None:
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("temperature", 0 <= self.temperature < float("inf"), "at least 0")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("seed", self.seed >= 0, "at least 0")

    def _require(self, name: str, holds: bool, limit: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)}; it must be {limit}")


def load_language_model(model: TrainedModel) -> LanguageModel:
    """Load the weights, which takes the seconds that the backend takes to import."""
    execution = model.execution
    backend = load_backend(execution)
    backend.prepare(execution)
    return backend.language_model(Program.of(model.config, model.data), execution, model.weights())


def sample(model: LanguageModel, prompt: IntArray, settings: SamplingSettings) -> Iterator[int]:
    """Yield the tokens that follow a prompt. The same seed gives the same text."""
    generator = np.random.Generator(np.random.Philox(settings.seed))
    logits = model.begin(prompt)
    for number in range(1, settings.max_tokens + 1):
        token = draw(logits, settings, generator.random())
        yield token
        if number < settings.max_tokens:
            logits = model.append(token)


def draw(logits: Float32Array, settings: SamplingSettings, uniform: float) -> int:
    """Return the token that a number from [0, 1) chooses."""
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities = _probabilities(logits.astype(np.float64) / settings.temperature)
    order = np.argsort(-probabilities, kind="stable")
    cumulative = np.cumsum(probabilities[order])
    kept = int(np.searchsorted(cumulative, settings.top_p * cumulative[-1])) + 1
    kept = min(kept, len(order))
    place = int(np.searchsorted(cumulative[:kept], uniform * cumulative[kept - 1], side="right"))
    return int(order[min(place, kept - 1)])


def _probabilities(scaled: FloatArray) -> FloatArray:
    weights = np.exp(scaled - scaled.max())
    probabilities: FloatArray = weights / weights.sum()
    return probabilities
