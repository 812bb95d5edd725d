"""A trained mail classifier: what it needs to decide, and where that is on disk.

A model directory holds no message: `mail.json` has the categories and the calibration, `linear.safetensors`
the table and the idf, and `vocabulary.txt` the n-grams that are its columns. With a recursive path, its
weights and its tokenizer are beside them. `baseline.safetensors` is only compared with.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from macbook_optimization.durable_files import make_directory, replace_file
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_input
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import MIB
from trm.arrays import BoolArray, Float32Array, FloatArray, IntArray
from trm.mail.calibration import ErrorCurve, log_softmax, softmax
from trm.mail.mixing import Mixture
from trm.mail.network import Network, file_names
from trm.mail.reading import Features
from trm.tasks.documents.bags import Bags, Vocabulary
from trm.tasks.documents.linear import Table
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.words import is_content

SCHEMA = 1
DESCRIPTION_FILE = "mail.json"
TABLE_FILE = "linear.safetensors"
VOCABULARY_FILE = "vocabulary.txt"
BASELINE_FILE = "baseline.safetensors"
LINEAR, RECURSIVE, TOGETHER, BASELINE = "linear path", "recursive path", "together", "TF-IDF + LinearSVC"
DEFAULT_MAX_ERROR = 0.01
# Of the different words of a message; below, the answer is unsure. With a model of the train part of
# SpamAssassin, 3 of the 830 messages of its dev part are below it. Of random bytes, 10 to 200,000 of them, at
# most a fifth of the "words" were known.
MIN_KNOWN_SHARE = 0.25
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
    temperature: float  # of the linear path
    curve: ErrorCurve
    facts: JsonObject  # about the training, for people
    network: Network | None = None
    mixture: Mixture = field(default_factory=Mixture)
    baseline: Table | None = None

    def bags(self, documents: Sequence[Counter[str]]) -> Bags:
        return self.vocabulary.bags(documents)

    def linear(self, bags: Bags) -> FloatArray:
        """Return the log-probabilities of the linear path."""
        return log_softmax(self.table.scores(bags), self.temperature)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a message that deciding may need; 0 if the linear path decides alone."""
        return self.network.length if self.network is not None and self.mixture.gate else 0

    def recursive_scores(self, mails: Sequence[Mail]) -> FloatArray:
        """Return what the recursive path adds, in units of the linear scores."""
        assert self.network is not None
        return self.temperature * self.mixture.added(self.network.log_probabilities(mails))

    def probabilities(self, bags: Bags, mails: Sequence[Mail], *, full: bool = False) -> FloatArray:
        """Return probabilities of the categories.

        The recursive path is skipped where the linear one is certain, unless `full`.
        """
        linear = self.linear(bags)
        found: FloatArray = np.exp(linear)
        rows = self.mixture.needs_recursion(np.zeros_like(found) if full else found)
        if self.network is not None and len(rows):
            recursive = self.network.log_probabilities([mails[row] for row in rows.tolist()])
            found[rows] = self.mixture.together(linear[rows], recursive)
        return found

    @property
    def main_column(self) -> str:
        """The column of `columns` that decides."""
        return LINEAR if self.network is None else TOGETHER

    def columns(self, bags: Bags, mails: Sequence[Mail]) -> dict[str, FloatArray]:
        """Return the probabilities of each path alone, of both together, and of the baseline."""
        linear = self.linear(bags)
        found = {LINEAR: np.exp(linear)}
        if self.network is not None:
            recursive = self.network.log_probabilities(mails)
            found[RECURSIVE] = softmax(recursive, self.mixture.recursive_temperature)
            together = np.exp(linear)
            rows = self.mixture.needs_recursion(together)
            together[rows] = self.mixture.together(linear[rows], recursive[rows])
            found[TOGETHER] = together
        if self.baseline is not None:
            found[BASELINE] = softmax(self.baseline.scores(bags), 1.0)
        return found

    def decide(
        self, features: Sequence[Features], max_error: float = DEFAULT_MAX_ERROR, *, full: bool = False
    ) -> list[Decision]:
        """Decide about every message; an answer below the confidence that keeps the error budget is unsure,
        and so is one about unknown words."""
        bags = self.bags([each.counts for each in features])
        decisions = []
        rows = self.probabilities(bags, [each.mail for each in features], full=full)
        known_shares = np.array([self.known_share(each.counts) for each in features])
        unsure = self.unsure(rows, known_shares, max_error).tolist()
        for row, is_unsure in zip(rows, unsure, strict=True):
            best = int(row.argmax())
            named = dict(zip(self.categories, row.tolist(), strict=True))
            decisions.append(Decision(self.categories[best], float(row[best]), is_unsure, named))
        return decisions

    def unsure(self, probabilities: FloatArray, known_shares: FloatArray, max_error: float) -> BoolArray:
        """Return which answers are unsure: those below the confidence that keeps the error budget, and those
        about messages of which too few words are known.

        Noise and foreign languages share single short words with any mail. What is known of them says little,
        and nothing in calibration was like them, so the confidence is not that of such messages.
        """
        is_low: BoolArray = probabilities.max(1) < self.curve.threshold(max_error)
        return is_low | (known_shares < MIN_KNOWN_SHARE)

    def known_share(self, counts: Counter[str]) -> float:
        """Return how many of the different words of a message are in the vocabulary; 0 without words."""
        content = [name for name in counts if is_content(name)]
        known = sum(name in self.vocabulary.columns for name in content)
        return known / max(1, len(content))

    def known_shares(self, bags: Bags, num_words: IntArray) -> FloatArray:
        """Return the same for rows of this vocabulary; `num_words`: the different words of each message."""
        is_word = np.array([is_content(name) for name in self.vocabulary.columns], dtype=np.bool_)
        ends = np.concatenate([[0], np.cumsum(is_word[bags.indices])])[bags.starts]
        shares: FloatArray = (ends[1:] - ends[:-1]) / np.maximum(1, num_words)
        return shares

    def corrected(self, columns: np.ndarray, change: Float32Array) -> MailModel:
        """Return the model with a change of some columns of its table."""
        weights = self.table.weights.copy()
        weights[columns] += change
        return replace(self, table=Table(weights, self.table.bias))


def save_model(model: MailModel, directory: Path) -> None:
    """Write the files aside and rename them; the description comes last, with the hashes of the others."""
    make_directory(directory)
    contents = _contents(model)
    for name, content in contents.items():
        replace_file(directory / name, content)
    description = {
        "schema": SCHEMA,
        "categories": list(model.categories),
        "parts": list(model.parts),
        "temperature": model.temperature,
        "curve": asdict(model.curve),
        "facts": model.facts,
        "mixture": asdict(model.mixture),
        "recursive": _recursive_facts(model.network),
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    replace_file(directory / DESCRIPTION_FILE, json.dumps(description, indent=2).encode())


def _recursive_facts(network: Network | None) -> JsonObject | None:
    if network is None:
        return None
    return {"recipe": network.recipe, "spec": network.spec, "members": network.num_members}


def _contents(model: MailModel) -> dict[str, bytes]:
    from safetensors.numpy import save

    tensors = {"weights": model.table.weights, "bias": model.table.bias, "idf": model.vocabulary.idf}
    contents = {
        TABLE_FILE: save(tensors),
        VOCABULARY_FILE: "".join(f"{name}\n" for name in model.vocabulary.columns).encode(),
    }
    if model.baseline is not None:
        contents[BASELINE_FILE] = save({"weights": model.baseline.weights, "bias": model.baseline.bias})
    if model.network is not None:
        contents |= model.network.files
    return contents


def load_model(directory: Path) -> MailModel:
    """Read a model, and verify that its files belong together."""
    try:
        description = json.loads(read_input(directory / DESCRIPTION_FILE, 64 * MIB))
        return _loaded(directory, description)
    except OSError as error:
        raise DataError(
            f"{directory} holds no mail model: {error.strerror or error}",
            hint="Train one with: trm email train MAIL --run RUN",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The mail model in {directory} is damaged: {error}", hint="Train it again."
        ) from error


def _loaded(directory: Path, description: JsonObject) -> MailModel:
    from safetensors.numpy import load

    recursive = description.get("recursive")
    network_files = file_names(int(recursive["members"])) if recursive else ()
    names = [TABLE_FILE, VOCABULARY_FILE, *network_files]
    if BASELINE_FILE in description["sha256"]:
        names.append(BASELINE_FILE)
    contents = {name: read_input(directory / name, _MAX_BYTES) for name in names}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if description["schema"] != SCHEMA or description["sha256"] != hashes:
        raise DataError(f"The files of {directory} do not belong together", hint="Train the model again.")
    tensors = load(contents[TABLE_FILE])
    ngrams = contents[VOCABULARY_FILE].decode().split("\n")[:-1]
    baseline = load(contents[BASELINE_FILE]) if BASELINE_FILE in contents else None
    files = {name: contents[name] for name in network_files}
    network = Network(recursive["recipe"], recursive["spec"], files) if recursive else None
    return MailModel(
        categories=tuple(description["categories"]),
        vocabulary=Vocabulary({name: i for i, name in enumerate(ngrams)}, tensors["idf"]),
        table=Table(tensors["weights"], tensors["bias"]),
        parts=tuple(description["parts"]),
        temperature=float(description["temperature"]),
        curve=ErrorCurve(**{name: tuple(values) for name, values in description["curve"].items()}),
        facts=description["facts"],
        network=network,
        mixture=Mixture(**description.get("mixture", {})),
        baseline=None if baseline is None else Table(baseline["weights"], baseline["bias"]),
    )
