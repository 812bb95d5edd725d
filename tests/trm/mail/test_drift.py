"""A model of the older messages is tried on the newest: where mail changes with time, training warns."""

from collections import Counter
from datetime import UTC, datetime
from email.utils import format_datetime

import numpy as np
import pytest
from letters import COMMON, TOPICS
from tiny import Recorder

from trm.mail.fitting import MIN_DATED, NEWEST_SHARE, TrainingSet, fit_model, measure_drift
from trm.mail.report import Report
from trm.mail.training import MailOptions, train_mail
from trm.tasks.documents.bags import Corpus
from trm.tasks.documents.splits import SplitRules

NUM_MESSAGES = 240
NUM_NEWEST = round(NEWEST_SHARE * NUM_MESSAGES)
MAX_ERROR = 0.05
NEWEST_FIRST = np.arange(NUM_MESSAGES, 0, -1.0)
UNDATED = np.full(NUM_MESSAGES, np.nan)


def words_of(number, num_changed):
    """Return the words of a message of category `number % 2`; the first messages have those of the other."""
    rng = np.random.default_rng(number)
    topic = ("spam", "work")[(number + (number < num_changed)) % 2]
    return [str(word) for word in (*rng.choice(COMMON, 6), *rng.choice(TOPICS[topic], 4))]


def report_on(dates, num_changed):
    """Return the report of a model of messages with these dates."""
    corpus = Corpus()
    for number in range(NUM_MESSAGES):
        corpus.add(Counter(words_of(number, num_changed)))
    rows = np.arange(NUM_MESSAGES)
    training = TrainingSet(corpus, rows, rows % 2, dates, rows, ("spam", "work"))
    model, _ = fit_model(training, {})
    return Report("run", {}, None, measure_drift(training, model, MAX_ERROR), 1.0)


def test_mail_whose_newest_part_changes_gives_a_warning():
    report = report_on(NEWEST_FIRST, NUM_NEWEST)
    assert report.drift.newest_documents == NUM_NEWEST
    assert report.drift.newest_error > 0.9
    assert (
        f"Warning: mail changes with time. A model of the older messages was wrong about "
        f"{report.drift.newest_error:.1%} of the newest that it decided, instead of 5.0%."
    ) in report.text()


def test_mail_that_does_not_change_gives_no_warning():
    report = report_on(NEWEST_FIRST, 0)
    assert report.drift.newest_decided > 0.9
    assert "Warning" not in report.text()


@pytest.mark.parametrize("num_dated", [0, MIN_DATED - 1])
def test_mail_without_dates_gives_no_warning(num_dated):
    report = report_on(np.where(np.arange(NUM_MESSAGES) < num_dated, NEWEST_FIRST, UNDATED), NUM_NEWEST)
    assert report.drift is None
    assert "Warning" not in report.text()


@pytest.mark.parametrize("has_dates", [True, False])
def test_training_measures_drift_by_the_date_header(has_dates, tmp_path):
    mailbox = tmp_path / "mailbox"
    for number in range(NUM_MESSAGES):
        folder = mailbox / ("spam", "work")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        date = f"Date: {format_datetime(datetime.fromtimestamp(86_400 * NEWEST_FIRST[number], UTC))}\n"
        text = f"{date * has_dates}Subject: note\n\n{' '.join(words_of(number, NUM_NEWEST))}\n"
        (folder / f"{number:03d}.eml").write_text(text)
    options = MailOptions(held_out=SplitRules("random", 0.0), max_error=MAX_ERROR)
    _, report = train_mail([mailbox], tmp_path / "run", options, Recorder())
    assert ("Warning: mail changes with time" in report.text()) == has_dates
