"""From mailboxes to a model, in one call."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from macbook_optimization.durable_files import make_directory
from macbook_optimization.errors import DataError, RunError
from trm.arrays import BoolArray, IntArray
from trm.display import Display
from trm.mail.calibration import expected_calibration_error
from trm.mail.fitting import TrainingSet, classifier_metrics, fit_model, measure_drift
from trm.mail.model import DEFAULT_MAX_ERROR, DESCRIPTION_FILE, MailModel, load_model, save_model
from trm.mail.network_training import (
    MIN_MESSAGES,
    VALIDATION_SHARE,
    Labelled,
    NetworkOptions,
    add_network,
)
from trm.mail.reading import Read, read_features, training_features_of
from trm.mail.report import HeldOut, Report
from trm.runs.directory import MAIL, is_free, only_trainer
from trm.tasks.documents.bags import MIN_DOCUMENTS, Corpus
from trm.tasks.documents.duplicates import Fingerprint, find_duplicates
from trm.tasks.documents.labels import (
    CategoryMap,
    LabelCounts,
    category_of,
    default_map,
    describe_unused,
)
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.mailboxes import Format
from trm.tasks.documents.parse_pool import ParsePool
from trm.tasks.documents.quality import QualityCounter, QualityReport
from trm.tasks.documents.sources import messages_of
from trm.tasks.documents.splits import SplitItem, SplitRules, choose_test
from trm.tasks.documents.tokens import TRAINING_TOKENS
from trm.tasks.documents.words import is_content


@dataclass(frozen=True, slots=True)
class MailOptions:
    """Options of a mail model."""

    format: Format = "auto"
    mapping: CategoryMap | None = None
    min_documents: int = MIN_DOCUMENTS
    held_out: SplitRules = field(default_factory=lambda: SplitRules("random", 0.1))
    max_error: float = DEFAULT_MAX_ERROR
    jobs: int = 1
    network: NetworkOptions | None = None  # None: the linear path alone


@dataclass(slots=True)
class Collected:
    """The messages that were read, in compact form. Those that were skipped are only counted."""

    corpus: Corpus = field(default_factory=Corpus)
    reads: list[Read] = field(default_factory=list)  # without their raw text and counts
    num_words: list[int] = field(default_factory=list)  # different ones of each of them
    skipped: list[Mail] = field(default_factory=list)
    label_counts: LabelCounts = field(default_factory=LabelCounts)

    def add(self, read: Read) -> None:
        mail = read.features.mail
        if mail.verdict == "skipped":
            self.skipped.append(mail)
            return
        self.corpus.add(read.features.counts)
        self.num_words.append(sum(map(is_content, read.features.counts)))
        self.label_counts.add(read.message.labels, mail.labels)
        self.reads.append(Read(replace(read.message, raw=b""), replace(read.features, counts=Counter())))


def train_mail(
    sources: Sequence[str | Path], run: Path, options: MailOptions, display: Display
) -> tuple[MailModel, Report]:
    """Read, fit, measure on held-out messages, and save the model in the run directory.

    The model is saved, and can be used, before the recursive path is trained. The same call continues that
    training if it was interrupted.
    """
    with only_trainer(run) as lock:
        return _train(sources, run, options, display, lock)


def _train(
    sources: Sequence[str | Path], run: Path, options: MailOptions, display: Display, lock: int
) -> tuple[MailModel, Report]:
    started = time.monotonic()
    directory = run / MAIL
    earlier = _earlier(run, options)
    material = _read(sources, options, display)
    display.message(material.quality.text())
    parts = _split(material.items, options)
    inputs = _digest(material, parts, options)
    if earlier not in (None, inputs):
        raise RunError(
            f"{run} was begun with other mail or options",
            hint="Give the same mail and options to continue it, or choose another --run directory.",
        )
    display.status("Fitting the linear path")
    training = material.part(~parts.held_out)
    facts = {"held_out": int(parts.held_out.sum()), "inputs": inputs}
    model, unseen = fit_model(training, facts, options.min_documents)
    drift = measure_drift(training, model, options.max_error)

    def report_on(model: MailModel) -> Report:
        display.status("Measuring on messages that were held out")
        found = _measure(model, material, parts.held_out, options.max_error)
        seconds = time.monotonic() - started
        gate = None if model.network is None else model.mixture.gate
        return Report(str(run), material.quality.to_json(), found, drift, seconds, gate)

    make_directory(run, mode=0o700)  # its dataset holds tokens, from which the mail could be read
    report = _save(model, report_on(model), directory, complete=parts.is_validation is None)
    if options.network is None or parts.is_validation is None:
        if options.network is not None:
            display.message(
                f"Only the linear path was trained: {len(training.rows)} training messages are fewer than "
                f"the {MIN_MESSAGES} that the recursive path needs."
            )
        return model, report
    display.message(
        f"The linear path is in {run} and can be used now, after {report.seconds:.0f} s. Training the "
        "recursive path; the same command continues it after Ctrl-C."
    )
    mails = material.mails(~parts.held_out)
    given = Labelled(mails, options.min_documents, training.labels, unseen, parts.is_validation)
    model = add_network(model, given, (run, lock), options.network, display)
    return model, _save(model, report_on(model), directory, complete=True)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The messages that are only measured on, and those of the others that are kept from the network."""

    held_out: BoolArray
    is_validation: BoolArray | None  # among those that are not held out; None without a network


def _split(items: list[SplitItem], options: MailOptions) -> _Parts:
    held_out = np.zeros(len(items), dtype=np.bool_)
    if options.held_out.test_share:
        held_out = _chosen(items, options.held_out)
    inside = [item for item, held in zip(items, held_out.tolist(), strict=True) if not held]
    if options.network is None or len(inside) < MIN_MESSAGES:
        return _Parts(held_out, None)
    rules = replace(options.held_out, test_share=VALIDATION_SHARE, seed=options.held_out.seed + 1)
    is_validation = _chosen(inside, rules)
    return _Parts(held_out, is_validation if is_validation.any() else None)


def _chosen(items: list[SplitItem], rules: SplitRules) -> BoolArray:
    is_test = choose_test(items, rules)
    if rules.method == "time" and not is_test.any():
        raise DataError("No message has a date, so none can be held out by time", hint="Use --split random.")
    return is_test


def _digest(material: Material, parts: _Parts, options: MailOptions) -> str:
    """Return what a training that is continued must have in common with its first start."""
    known = hashlib.sha256()
    for item in material.items:
        known.update(item.fingerprint.digest or item.key.encode(errors="surrogateescape"))
        known.update(item.category.encode(errors="surrogateescape") + b"\0")
    known.update(parts.held_out.tobytes())
    if parts.is_validation is not None:
        known.update(parts.is_validation.tobytes())
    network = options.network
    known.update(str(options.min_documents).encode())
    known.update(b"" if network is None else network.profile.encode())
    return known.hexdigest()


def _earlier(run: Path, options: MailOptions) -> str | None:
    """Return the digest of a training that can be continued; None for a new one. Refuse anything else."""
    directory = run / MAIL
    if not (directory / DESCRIPTION_FILE).exists():
        if not is_free(run):
            raise RunError(f"{run} is not empty and not a mail model", hint="Choose another --run directory.")
        return None
    facts = load_model(directory).facts
    if facts.get("complete") or options.network is None:
        raise RunError(f"{run} already holds a mail model", hint="Choose another --run directory.")
    return str(facts.get("inputs"))


def _save(model: MailModel, report: Report, directory: Path, *, complete: bool) -> Report:
    facts = {**model.facts, "complete": complete, "report": report.to_json()}
    save_model(replace(model, facts=facts), directory)
    return report


@dataclass(frozen=True, slots=True)
class Material:
    """The messages that have a category, in compact form."""

    quality: QualityReport
    collected: Collected
    rows: IntArray  # of the corpus
    items: list[SplitItem]
    labels: IntArray
    groups: IntArray
    categories: tuple[str, ...]

    def part(self, chosen: BoolArray) -> TrainingSet:
        dates = np.array([np.nan if item.date is None else item.date for item in self.items])
        return TrainingSet(
            self.collected.corpus,
            self.rows[chosen],
            self.labels[chosen],
            dates[chosen],
            self.groups[chosen],
            self.categories,
        )

    def mails(self, chosen: BoolArray) -> list[Mail]:
        return [self.collected.reads[row].features.mail for row in self.rows[chosen].tolist()]


def _read(sources: Sequence[str | Path], options: MailOptions, display: Display) -> Material:
    num_tokens = 0 if options.network is None else TRAINING_TOKENS
    collected = Collected()
    with ParsePool(partial(training_features_of, num_tokens=num_tokens), options.jobs) as pool:
        for read in read_features(messages_of(sources, options.format, display.update), pool):
            collected.add(read)
    if options.mapping is not None:
        for problem in describe_unused(options.mapping, collected.label_counts):
            display.message(f"warning: {problem}")
    quality, rows, items = _categorised(collected, options)
    categories = tuple(sorted(quality.categories))
    labels = np.array([categories.index(item.category) for item in items], dtype=np.int64)
    groups = find_duplicates([item.fingerprint for item in items]).near
    return Material(quality, collected, rows, items, labels, groups, categories)


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
    if not collected.reads:
        raise DataError("There is no message that can be read", hint="Give a mailbox with messages.")
    if not items:
        raise DataError(
            "No message has a category",
            hint="Use a directory whose folders are the categories, or a mapping (--mapping FILE).",
        )
    quality = counter.report(find_duplicates([item.fingerprint for item in items]))
    return quality, np.array(rows, dtype=np.int64), items


def _measure(model: MailModel, material: Material, held_out: BoolArray, max_error: float) -> HeldOut | None:
    if not held_out.any():
        return None
    test = material.part(held_out)
    bags = test.corpus.bags(model.vocabulary, test.rows)
    mails = material.mails(held_out)
    probabilities = model.probabilities(bags, mails)
    num_words = np.array([material.collected.num_words[row] for row in test.rows.tolist()])
    decided = ~model.unsure(probabilities, model.known_shares(bags, num_words), max_error)
    wrong = probabilities.argmax(1) != test.labels
    return HeldOut(
        messages=len(test.rows),
        columns={
            name: classifier_metrics(test.labels, found.argmax(1), len(test.categories))
            for name, found in model.columns(bags, mails).items()
        },
        decided=float(decided.mean()),
        error_of_decided=float(wrong[decided].mean()) if decided.any() else 0.0,
        calibration_error=expected_calibration_error(probabilities, test.labels),
    )
