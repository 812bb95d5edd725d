"""From mailboxes to a model, in one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from macbook_optimization.errors import DataError, RunError
from macbook_optimization.json_types import JsonObject
from trm.arrays import BoolArray, IntArray
from trm.display import Display
from trm.mail.calibration import expected_calibration_error
from trm.mail.deciding import DIRECTORY
from trm.mail.fitting import Drift, Figures, TrainingSet, figures, fit_baseline, fit_model, measure_drift
from trm.mail.model import DEFAULT_MAX_ERROR, MailModel, save_model
from trm.mail.reading import Read, read_features, training_features_of
from trm.tasks.documents.bags import MIN_DOCUMENTS, Corpus
from trm.tasks.documents.duplicates import Fingerprint, find_duplicates
from trm.tasks.documents.labels import CategoryMap, LabelCounts, category_of, default_map
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.mailboxes import Format
from trm.tasks.documents.parse_pool import ParsePool
from trm.tasks.documents.quality import QualityCounter, QualityReport
from trm.tasks.documents.sources import messages_of
from trm.tasks.documents.splits import SplitItem, SplitRules, choose_test


@dataclass(frozen=True, slots=True)
class MailOptions:
    """How a model is made of mail."""

    format: Format = "auto"
    mapping: CategoryMap | None = None
    min_documents: int = MIN_DOCUMENTS
    held_out: SplitRules = field(default_factory=lambda: SplitRules("random", 0.1))
    max_error: float = DEFAULT_MAX_ERROR
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well the model does on messages that nothing was chosen on."""

    messages: int
    linear: Figures
    baseline: Figures  # TF-IDF + LinearSVC on the same messages
    decided: float  # share of the messages that were not unsure
    error_of_decided: float
    calibration_error: float


@dataclass(frozen=True, slots=True)
class Report:
    run: str
    quality: JsonObject
    held_out: HeldOut | None
    drift: Drift | None
    seconds: float

    def to_json(self) -> JsonObject:
        return asdict(self)


@dataclass(slots=True)
class Collected:
    """The messages that were read, in compact form. Those that were skipped are only counted."""

    corpus: Corpus = field(default_factory=Corpus)
    reads: list[Read] = field(default_factory=list)  # without their raw text and counts
    skipped: list[Mail] = field(default_factory=list)
    label_counts: LabelCounts = field(default_factory=LabelCounts)

    def add(self, read: Read) -> None:
        mail = read.features.mail
        if mail.verdict == "skipped":
            self.skipped.append(mail)
            return
        self.corpus.add(read.features.counts)
        self.label_counts.add(read.message.labels, mail.labels)
        self.reads.append(Read(replace(read.message, raw=b""), replace(read.features, counts=Counter())))


def train_mail(
    sources: Sequence[str | Path], run: Path, options: MailOptions, display: Display
) -> tuple[MailModel, Report]:
    """Read, fit, measure on held-out messages, and save the model in the run directory."""
    started = time.monotonic()
    directory = run / DIRECTORY
    if (directory / "mail.json").exists():
        raise RunError(f"{run} already holds a mail model", hint="Choose another --run directory.")
    collected = Collected()
    with ParsePool(training_features_of, options.jobs) as pool:
        for read in read_features(messages_of(sources, options.format, display.update), pool):
            collected.add(read)
    quality, rows, items = _categorised(collected, options)
    display.message(quality.text())
    display.status("Fitting the linear path")
    categories = tuple(sorted(quality.categories))
    labels = np.array([categories.index(item.category) for item in items], dtype=np.int64)
    dates = np.array([np.nan if item.date is None else item.date for item in items])
    groups = find_duplicates([item.fingerprint for item in items]).near
    is_test = choose_test(items, options.held_out)

    def part(chosen: BoolArray) -> TrainingSet:
        return TrainingSet(
            collected.corpus, rows[chosen], labels[chosen], dates[chosen], groups[chosen], categories
        )

    training = part(~is_test)
    model, _ = fit_model(training, {"held_out": int(is_test.sum())}, options.min_documents)
    display.status("Measuring on messages that were held out")
    held_out = _measure(model, training, part(is_test), options.max_error)
    report = Report(
        run=str(run),
        quality=quality.to_json(),
        held_out=held_out,
        drift=measure_drift(training, model, options.max_error),
        seconds=time.monotonic() - started,
    )
    save_model(replace(model, facts={**model.facts, "report": report.to_json()}), directory)
    return model, report


def _categorised(
    collected: Collected, options: MailOptions
) -> tuple[QualityReport, IntArray, list[SplitItem]]:
    """Return the report, and the messages with a category: their rows, and what a split needs of them."""
    mapping = options.mapping or default_map(collected.label_counts)
    counter = QualityCounter()
    rows: list[int] = []
    items: list[SplitItem] = []
    for mail in collected.skipped:
        counter.add(mail, None, "unknown")
    for row, read in enumerate(collected.reads):
        mail = read.features.mail
        category = category_of(read.message.labels, mail.labels, mapping)
        mark = read.features.fingerprint or Fingerprint(b"", b"")
        counter.add(mail, category, read.features.language)
        if category is not None:
            rows.append(row)
            items.append(SplitItem(read.message.key, category, mark, mail.date, mail.thread))
    if not items:
        raise DataError(
            "No message has a category",
            hint="Use a directory whose folders are the categories, or a mapping (--mapping FILE).",
        )
    quality = counter.report(find_duplicates([item.fingerprint for item in items]))
    return quality, np.array(rows, dtype=np.int64), items


def _measure(model: MailModel, training: TrainingSet, test: TrainingSet, max_error: float) -> HeldOut | None:
    if not len(test.rows):
        return None
    bags = test.corpus.bags(model.vocabulary, test.rows)
    probabilities = model.probabilities(bags)
    predicted = probabilities.argmax(1)
    decided = probabilities.max(1) >= model.curve.threshold(max_error)
    num_categories = len(test.categories)
    train_bags = training.corpus.bags(model.vocabulary, training.rows)
    baseline = fit_baseline(train_bags, training.labels, num_categories)
    wrong = predicted != test.labels
    return HeldOut(
        messages=len(test.rows),
        linear=figures(test.labels, predicted, num_categories),
        baseline=figures(test.labels, baseline.scores(bags).argmax(1), num_categories),
        decided=float(decided.mean()),
        error_of_decided=float(wrong[decided].mean()) if decided.any() else 0.0,
        calibration_error=expected_calibration_error(probabilities, test.labels),
    )
