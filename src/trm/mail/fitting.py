"""From labelled documents to a calibrated model.

Everything that is chosen (the blend of the linear path, class weights, temperature, error curve) is chosen on
scores that cross-validation gives to the training set. Documents that are held out are only reported on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.mail.calibration import (
    expected_calibration_error,
    fit_error_curve,
    fit_temperature,
    softmax,
)
from trm.mail.model import DEFAULT_MAX_ERROR, MailModel
from trm.tasks.documents.bags import MIN_DOCUMENTS, Bags, Corpus
from trm.tasks.documents.linear import PARTS, LinearFit, Table, class_weights, fit_linear
from trm.tasks.metrics import confusion_matrix, macro_f1

NEWEST_SHARE = 0.15  # of the training set, to see whether mail changes with time
MIN_DATED = 200  # documents with a date, before drift is measured
UNBALANCED = 10  # times as many documents in the largest category as in the smallest
_WEIGHT_EXPONENTS = (0.0, 0.5)


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Some documents of a corpus, and their categories."""

    corpus: Corpus
    rows: IntArray  # of the corpus
    labels: IntArray
    dates: FloatArray  # NaN where unknown
    groups: IntArray  # equal for copies and near-copies, which cross-validation keeps together
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """The error of a model of the older documents on the newest, beside what cross-validation promises."""

    promised_error: float  # among decided answers
    newest_error: float
    newest_decided: float
    newest_documents: int

    @property
    def breaks_promise(self) -> bool:
        """Return whether the error is larger than the promise by more than two standard errors."""
        decided = max(1.0, self.newest_decided * self.newest_documents)
        spread = np.sqrt(max(self.promised_error, 1 / decided) / decided)
        return bool(self.newest_error > self.promised_error + 2 * spread)


def fit_model(
    training: TrainingSet, facts: JsonObject, min_documents: int = MIN_DOCUMENTS
) -> tuple[MailModel, Float32Array]:
    """Return the model, and the scores that it gives to training documents it had not seen."""
    num_categories = len(training.categories)
    labels = training.labels
    _check(training.categories, labels)
    vocabulary = training.corpus.vocabulary(training.rows, min_documents)
    if not vocabulary.columns:
        raise DataError(
            f"No word occurs in {min_documents} messages", hint="Use more mail, or a smaller --min-df."
        )
    bags = training.corpus.bags(vocabulary, training.rows)
    fit, exponent = _fit(bags, training)
    temperature = fit_temperature(fit.unseen_scores, labels)
    probabilities = softmax(fit.unseen_scores, temperature)
    found = classifier_metrics(labels, probabilities.argmax(1), num_categories)
    model = MailModel(
        categories=training.categories,
        vocabulary=vocabulary,
        table=fit.table,
        parts=fit.parts,
        temperature=temperature,
        curve=fit_error_curve(probabilities, labels),
        facts={
            **facts,
            "documents": len(labels),
            "by_category": dict(zip(training.categories, np.bincount(labels).tolist(), strict=False)),
            "features": bags.num_columns,
            "class_weight_exponent": exponent,
            "cross_validation": {
                "accuracy": found.accuracy,
                "macro_f1": found.macro_f1,
                "calibration_error": expected_calibration_error(probabilities, labels),
            },
        },
        baseline=fit_baseline(bags, labels, num_categories),
    )
    return model, fit.unseen_scores


def _check(categories: Sequence[str], labels: IntArray) -> None:
    counts = np.bincount(labels, minlength=len(categories))
    few = [f"{name} ({count})" for name, count in zip(categories, counts, strict=True) if count < 2]
    if len(categories) < 2 or few:
        missing = f"; too few in {', '.join(few)}" if few else ""
        raise DataError(
            f"A classifier needs two categories with two messages each or more{missing}",
            hint="Sort more mail into folders, or leave the small categories out.",
        )


def _fit(bags: Bags, training: TrainingSet) -> tuple[LinearFit, float]:
    """Fit with the class weights that are best in cross-validation: macro-F1 decides on unbalanced sets."""
    labels = training.labels
    num_categories = len(training.categories)

    def fit(exponent: float) -> LinearFit:
        weights = class_weights(labels, num_categories, exponent)
        return fit_linear(bags, labels, num_categories, weights, training.groups)

    counts = np.bincount(labels, minlength=num_categories)
    if counts.max() < UNBALANCED * counts.min():
        return fit(0.0), 0.0
    fits = {exponent: fit(exponent) for exponent in _WEIGHT_EXPONENTS}
    best = max(
        fits, key=lambda each: classifier_metrics(labels, fits[each].predicted, num_categories).macro_f1
    )
    return fits[best], best


def measure_drift(
    training: TrainingSet, model: MailModel, max_error: float = DEFAULT_MAX_ERROR
) -> Drift | None:
    """Fit the older documents, and decide about the newest; None where too few have a date."""
    dates = np.array(training.dates)
    dated = np.flatnonzero(~np.isnan(dates))
    if len(dated) < MIN_DATED:
        return None
    order = dated[np.argsort(dates[dated], kind="stable")]
    newest = order[int(len(order) * (1 - NEWEST_SHARE)) :]
    older = np.setdiff1d(np.arange(len(dates)), newest)
    labels = training.labels
    if len(np.unique(labels[older])) < 2:
        return None
    bags = training.corpus.bags(model.vocabulary, training.rows)
    num_categories = len(training.categories)
    weights = class_weights(labels[older], num_categories, float(model.facts["class_weight_exponent"]))
    groups = training.groups[older]
    fit = fit_linear(bags.rows(older), labels[older], num_categories, weights, groups)
    temperature = fit_temperature(fit.unseen_scores, labels[older])
    curve = fit_error_curve(softmax(fit.unseen_scores, temperature), labels[older])
    probabilities = softmax(fit.table.scores(bags.rows(newest)), temperature)
    decided = probabilities.max(1) >= curve.threshold(max_error)
    wrong = probabilities.argmax(1) != labels[newest]
    return Drift(
        promised_error=max_error,
        newest_error=float(wrong[decided].mean()) if decided.any() else 0.0,
        newest_decided=float(decided.mean()),
        newest_documents=len(newest),
    )


@dataclass(frozen=True, slots=True)
class ClassifierMetrics:
    """Metrics of a classifier on documents that it has not seen."""

    accuracy: float
    macro_f1: float
    confusion: list[list[int]]


def classifier_metrics(labels: IntArray, predicted: IntArray, num_categories: int) -> ClassifierMetrics:
    confusion = confusion_matrix(labels, predicted, num_categories)
    return ClassifierMetrics(
        float(np.trace(confusion) / max(1, confusion.sum())), macro_f1(confusion), confusion.tolist()
    )


def fit_baseline(bags: Bags, labels: IntArray, num_categories: int) -> Table:
    """Fit TF-IDF + LinearSVC on the same documents: the usual baseline, in which nothing was chosen."""
    return PARTS["hinge"](bags, labels, np.ones(len(labels)), num_categories)
