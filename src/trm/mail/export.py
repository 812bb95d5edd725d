"""Export a mail model: one directory with everything that standalone inference needs.

It has the tables, the network, the tokenizer, the categories, the calibration and a model card, and no
message. What was learned from corrections is part of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from macbook_optimization.durable_files import new_directory, replace_file, sync
from macbook_optimization.errors import LaptopError
from macbook_optimization.output_files import check_new_directory
from macbook_optimization.units import MIB
from trm.mail.card import model_card
from trm.mail.compression import pruned, quantized
from trm.mail.model import MailModel, save_model
from trm.mail.network import Network, weights_file
from trm.mail.onnx_graph import onnx_model, run_onnx
from trm.runs.directory import DATASET
from trm.tasks.documents.bags import Vocabulary
from trm.tasks.documents.email import question_batch
from trm.tasks.documents.linear import Table

CARD_FILE = "README.md"
_TOLERANCE = 1e-4  # of the probabilities that the exported graph gives
_NUM_CHECKED_ROWS = 8


@dataclass(frozen=True, slots=True)
class ExportOptions:
    min_documents: int | None = None  # leave out n-grams of fewer training messages
    prune: float = 0.0
    int8: bool = False
    onnx: bool = False

    @property
    def changes_answers(self) -> bool:
        return self.min_documents is not None or bool(self.prune) or self.int8


@dataclass(frozen=True, slots=True)
class Exported:
    path: str
    files: dict[str, int]  # sizes in bytes
    onnx_difference: float | None  # largest difference between the ONNX graph and our own probabilities

    @property
    def mib(self) -> float:
        return sum(self.files.values()) / MIB


def export_model(model: MailModel, directory: Path, options: ExportOptions) -> Exported:
    """Write the model to a new directory, complete or not at all."""
    check_new_directory(directory)
    smaller = _with_frequent_ngrams(model, options.min_documents)
    network = _without_paths(_compressed(model, options))
    smaller = replace(smaller, baseline=None, facts=_public_facts(model), network=network)
    with new_directory(directory.absolute()) as partial:
        save_model(smaller, partial)
        difference = _write_onnx(smaller, partial) if options.onnx else None
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        card = model_card(smaller, sizes, is_changed=options.changes_answers)
        replace_file(partial / CARD_FILE, card.encode(errors="backslashreplace"))
        sync(partial)
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    return Exported(str(directory), sizes, difference)


def _public_facts(model: MailModel) -> dict[str, object]:
    """Return the facts without where the model was trained, and on which files."""
    report = {name: value for name, value in model.facts.get("report", {}).items() if name != "run"}
    quality = report.get("quality", {})
    kept = {name: value for name, value in quality.items() if name not in ("reasons", "warnings")}
    return {**model.facts, "report": {**report, "quality": kept}}


def _without_paths(network: Network | None) -> Network | None:
    if network is None:
        return None
    recipe = network.recipe
    changed = {
        **recipe,
        "data": {**recipe["data"], "path": DATASET},
        "training": {**recipe["training"], "initial_weights": None},
    }
    return Network(changed, network.spec, network.files)


def _with_frequent_ngrams(model: MailModel, min_documents: int | None) -> MailModel:
    """Leave out rare n-grams. How many documents have one follows from its idf."""
    if min_documents is None:
        return model
    idf = model.vocabulary.idf
    num_documents = int(model.facts["documents"])
    frequency = np.rint((1 + num_documents) / np.exp(idf.astype(np.float64) - 1) - 1)
    kept = np.flatnonzero(frequency >= min_documents)
    names = list(model.vocabulary.columns)
    columns = {names[column]: place for place, column in enumerate(kept.tolist())}
    table = Table(model.table.weights[kept], model.table.bias)
    return replace(model, vocabulary=Vocabulary(columns, idf[kept]), table=table)


def _compressed(model: MailModel, options: ExportOptions) -> Network | None:
    from safetensors.numpy import save

    network = model.network
    if network is None or not (options.prune or options.int8):
        return network
    files = dict(network.files)
    for member in range(network.num_members):
        weights = pruned(network.weights(member), options.prune)
        files[weights_file(member)] = save(quantized(weights) if options.int8 else weights)
    return Network(network.recipe, network.spec, files)


def _write_onnx(model: MailModel, directory: Path) -> float:
    """Write each network as ONNX, and return the largest difference from our own output."""
    network = model.network
    if network is None:
        raise LaptopError(
            "This model has no recursive path, so there is nothing to export as ONNX",
            hint="Train one without --linear.",
        )
    differences = []
    for member in range(network.num_members):
        content = onnx_model(network.config, network.data, network.weights(member))
        differences.append(_difference(network, member, content))
        replace_file(directory / Path(weights_file(member)).with_suffix(".onnx"), content)
    return max(differences)


def _difference(network: Network, member: int, content: bytes) -> float:
    """Run a graph on random tokens; raise `LaptopError` if it does not give our own probabilities."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, network.length + 1, _NUM_CHECKED_ROWS)
    rows = [rng.integers(1, network.data.vocab_size, length) for length in lengths]
    found = run_onnx(content, question_batch(rows, network.length).inputs, lengths)
    difference = float(np.abs(found - network.probabilities_of(rows, [member])).max())
    if difference > _TOLERANCE:
        raise LaptopError(f"The ONNX graph differs from our output by {difference:.2g}; nothing was written")
    return difference
