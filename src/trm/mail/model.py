"""A trained mail classifier: what it needs to decide, and where that is on disk.

A model directory holds no message: `mail.json` has the categories and the calibration, `linear.safetensors`
the table and the idf, and `vocabulary.txt` the n-grams that are its columns.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from macbook_optimization.durable_files import make_directory, replace_file
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_input
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB
from trm.arrays import Float32Array, FloatArray
from trm.mail.calibration import ErrorCurve, softmax
from trm.tasks.documents.bags import Bags, Vocabulary
from trm.tasks.documents.linear import Table

SCHEMA = 1
FILES = ("linear.safetensors", "vocabulary.txt")
DEFAULT_MAX_ERROR = 0.01
_MAX_BYTES = 2048 * MIB


@dataclass(frozen=True, slots=True)
class Decision:
    category: str
    confidence: float  # calibrated probability of the category
    unsure: bool
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True)
class MailModel:
    categories: tuple[str, ...]
    vocabulary: Vocabulary
    table: Table
    parts: tuple[str, ...]  # what the linear path was made of
    temperature: float
    curve: ErrorCurve
    facts: JsonObject  # about the training, for people

    def bags(self, documents: Sequence[Counter[str]]) -> Bags:
        return self.vocabulary.bags(documents)

    def probabilities(self, bags: Bags) -> FloatArray:
        return softmax(self.table.scores(bags), self.temperature)

    def decide(self, bags: Bags, max_error: float = DEFAULT_MAX_ERROR) -> list[Decision]:
        """Decide about every row; an answer below the confidence that keeps the error budget is unsure."""
        threshold = self.curve.threshold(max_error)
        decisions = []
        for row in self.probabilities(bags):
            best = int(row.argmax())
            confidence = float(row[best])
            named = dict(zip(self.categories, row.tolist(), strict=True))
            decisions.append(Decision(self.categories[best], confidence, confidence < threshold, named))
        return decisions

    def corrected(self, columns: np.ndarray, change: Float32Array) -> MailModel:
        """Return the model with a change of some columns of its table."""
        weights = self.table.weights.copy()
        weights[columns] += change
        return replace(self, table=Table(weights, self.table.bias))


def save_model(model: MailModel, directory: Path) -> None:
    """Write the files aside and rename them; the description comes last, with the hashes of the others."""
    from safetensors.numpy import save

    make_directory(directory)
    tensors = {"weights": model.table.weights, "bias": model.table.bias, "idf": model.vocabulary.idf}
    contents = {
        "linear.safetensors": save(tensors),
        "vocabulary.txt": "".join(f"{name}\n" for name in model.vocabulary.columns).encode(),
    }
    for name, content in contents.items():
        replace_file(directory / name, content)
    description = {
        "schema": SCHEMA,
        "categories": list(model.categories),
        "parts": list(model.parts),
        "temperature": model.temperature,
        "curve": asdict(model.curve),
        "facts": model.facts,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    replace_file(directory / "mail.json", json.dumps(description, indent=2).encode())


def load_model(directory: Path) -> MailModel:
    """Read a model, and verify that its files belong together."""
    from safetensors.numpy import load

    try:
        description = json.loads(read_input(directory / "mail.json", 64 * MIB))
        contents = {name: read_input(directory / name, _MAX_BYTES) for name in FILES}
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        if description["schema"] != SCHEMA or description["sha256"] != hashes:
            raise DataError(f"The files of {directory} do not belong together", hint="Train the model again.")
        tensors = load(contents["linear.safetensors"])
        names = contents["vocabulary.txt"].decode().split("\n")[:-1]
        return MailModel(
            categories=tuple(description["categories"]),
            vocabulary=Vocabulary({name: i for i, name in enumerate(names)}, tensors["idf"]),
            table=Table(tensors["weights"], tensors["bias"]),
            parts=tuple(description["parts"]),
            temperature=float(description["temperature"]),
            curve=ErrorCurve(**{name: tuple(values) for name, values in description["curve"].items()}),
            facts=description["facts"],
        )
    except OSError as error:
        raise DataError(
            f"{directory} holds no mail model: {error.strerror or error}",
            hint="Train one with: trm email train MAIL --run RUN",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The mail model in {directory} is damaged: {error}", hint="Train it again."
        ) from error
