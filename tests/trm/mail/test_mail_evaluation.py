"""The tables of an evaluation: checked by hand, against scikit-learn, and for how they look."""

import json
import re
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from letters import TOPICS, letter, write_mailbox
from rich.cells import cell_len
from sklearn.metrics import precision_recall_fscore_support
from tiny import Recorder

from trm.cli import cli
from trm.mail.calibration import expected_calibration_error
from trm.mail.deciding import open_classifier
from trm.mail.evaluation import Column, collect, evaluate, reliability
from trm.mail.evaluation_html import as_html
from trm.mail.evaluation_text import as_text
from trm.mail.training import MailOptions, train_mail
from trm.tasks.documents.labels import CATEGORIES
from trm.tasks.documents.sources import messages_of
from trm.tasks.documents.splits import SplitRules

NAMES = ("spam", "work")


def columns_of(rows):
    return {"linear path": Column(np.array(rows))}


def test_the_numbers_by_hand():
    """Four messages of spam, one of them taken for work; two of work, both right; one answer is unsure."""
    rows = [[0.9, 0.1]] * 3 + [[0.4, 0.6], [0.2, 0.8], [0.2, 0.8]]
    labels = np.array([0, 0, 0, 0, 1, 1])
    decided = np.array([True, True, True, True, True, False])
    found = evaluate({"linear path": Column(np.array(rows), decided=decided)}, labels, NAMES)
    (column,) = found.columns
    assert column.accuracy == pytest.approx(5 / 6)
    assert column.confusion == [[3, 1], [0, 2]]
    spam, work = column.categories
    assert (spam.number, spam.precision, spam.recall) == (4, 1.0, 0.75)
    assert (work.number, work.precision, work.recall) == (2, pytest.approx(2 / 3), 1.0)
    assert (spam.f1, work.f1) == (pytest.approx(6 / 7), pytest.approx(4 / 5))
    assert column.macro_f1 == pytest.approx((6 / 7 + 4 / 5) / 2)
    assert (column.decided, column.error_of_decided) == (pytest.approx(5 / 6), pytest.approx(1 / 5))
    # three answers of 0.9 are right, two of 0.8 are right, one of 0.6 is wrong
    assert column.calibration_error == pytest.approx((3 * 0.1 + 2 * 0.2 + 0.6) / 6)


answers = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.floats(0.01, 1), min_size=3, max_size=3)),
    min_size=1,
    max_size=60,
)


@given(answers)
def test_the_numbers_agree_with_scikit_learn(given_answers):
    labels = np.array([label for label, _ in given_answers])
    scores = np.array([row for _, row in given_answers])
    (column,) = evaluate({"x": Column(scores, are_probabilities=False)}, labels, ("a", "b", "c")).columns
    wanted = precision_recall_fscore_support(labels, scores.argmax(1), labels=[0, 1, 2], zero_division=0)
    ours = [(each.precision, each.recall, each.f1, each.number) for each in column.categories]
    np.testing.assert_allclose(np.array(ours).T, np.array(wanted), atol=1e-12)
    assert (column.calibration_error, column.reliability, column.decided) == (None, [], None)


@given(answers)
def test_the_bins_of_the_diagram_add_up_to_the_calibration_error(given_answers):
    labels = np.array([label for label, _ in given_answers])
    rows = np.array([row for _, row in given_answers])
    probabilities = rows / rows.sum(1, keepdims=True)
    bins = reliability(probabilities, labels)
    assert sum(each.number for each in bins) == len(labels)
    total = sum(each.number * abs(each.accuracy - each.confidence) for each in bins) / len(labels)
    assert total == pytest.approx(expected_calibration_error(probabilities, labels))


def random_evaluation(names, num_messages=500, seed=0, columns=("linear path",)):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(names), num_messages)
    found = {}
    for name in columns:
        scores = rng.random((num_messages, len(names))) * 0.5
        scores[np.arange(num_messages), labels] += 0.4
        probabilities = scores / scores.sum(1, keepdims=True)
        found[name] = Column(probabilities, decided=probabilities.max(1) > 0.3)
    return evaluate(found, labels, names)


@pytest.mark.parametrize(
    "names",
    [
        ("spam", "work"),
        tuple(f"category {letter}" for letter in "abcdefg"),  # the first seven letters are the same
        CATEGORIES,  # ten
        tuple(f"Inbox/a rather long name of a folder, number {number}" for number in range(40)),
        ("受信箱", "仕事のメール", "迷惑メール", "\x1b[31mred\n"),
    ],
    ids=["two", "similar", "ten", "forty", "wide"],
)  # fmt: skip
def test_the_text_fits_a_terminal_and_is_aligned(names):
    text = as_text(random_evaluation(names))
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert text.isprintable() or set(text) & {"\n"}
    assert "\x1b" not in text
    start = next(i for i, line in enumerate(lines) if line.startswith("category "))
    assert len({cell_len(line) for line in lines[start : start + len(names) + 1]}) == 1
    if len(names) < 20:
        rows = lines[-len(names) - 1 :]
        assert len({cell_len(row) for row in rows}) == 1
        assert (
            sum(int(number) for row in rows[1:] for number in row.split()[-len(names) :] if number != ".")
            == 500
        )
    else:
        assert "The most frequent of" in text


def test_several_models_are_shown_side_by_side():
    models = ("linear path", "recursive path", "together", "TF-IDF + LinearSVC")
    found = random_evaluation(CATEGORIES, columns=models)
    text = as_text(found)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert [line.split("  ")[0] for line in text.splitlines()[1:5]] == list(models)
    start = next(i for i, line in enumerate(text.splitlines()) if line.startswith("F1 "))
    row = text.splitlines()[start + 1]
    expected = [f"{column.categories[0].f1:.3f}" for column in found.columns]
    assert row.split()[1:] == expected
    page = as_html("title", found)
    assert page.count("<svg") == 4
    assert page.count('class="heat"') == 4


def test_a_page_has_no_scripts_and_escapes_names():
    page = as_html("<b>run</b>", random_evaluation(("<script>alert(1)</script>", "a&b", '"><img src=x>')))
    assert "Content-Security-Policy" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "a&amp;b" in page
    assert not re.search(r"https?://|url\(|@import", page)


def evaluate_command(*arguments):
    done = CliRunner().invoke(cli, ["email", "eval", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    """Return a mailbox of other messages than those of the training, and one folder that is not known."""
    mailbox = write_mailbox(tmp_path_factory.mktemp("unseen") / "mail", num_each=10, seed=21)
    (mailbox / "unknown").mkdir()
    (mailbox / "unknown" / "0.eml").write_bytes(letter("work", 0, 22))
    (mailbox / "work" / "empty.eml").write_bytes(b"")
    return mailbox


@pytest.mark.slow
def test_the_command_measures_a_mailbox(trained, unseen, tmp_path):
    page = tmp_path / "page.html"
    facts = json.loads(evaluate_command(trained[0], unseen, "--json", "--html", page, "--jobs", 1))
    assert facts["messages"] == 30
    assert facts["categories"] == sorted(TOPICS)
    assert facts["unknown_categories"] == {"unknown": 1}
    assert facts["skipped"] == {"empty": 1}
    column, baseline = facts["columns"]
    assert baseline["name"] == "TF-IDF + LinearSVC"
    assert column["name"] == "linear path"
    assert column["accuracy"] >= 0.9
    assert sum(map(sum, column["confusion"])) == 30
    assert page.read_text().startswith("<!doctype html>")
    text = evaluate_command(trained[0], unseen, "--jobs", 1)
    assert "1 message left out: the model has no category 'unknown'" in text
    assert "linear path" in text


def test_a_mapping_decides_about_the_categories(trained, unseen, tmp_path):
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text("categories:\n  work: [unknown, work]\n  spam: [spam]\n")
    facts = json.loads(evaluate_command(trained[0], unseen, "--json", "--mapping", mapping, "--jobs", 1))
    assert {each["name"]: each["number"] for each in facts["columns"][0]["categories"]} == {
        "spam": 10, "travel": 0, "work": 11,
    }  # fmt: skip
    assert facts["without_category"] == 10


def test_training_and_evaluation_count_the_same_messages_as_decided(tmp_path):
    """The newest messages, which are held out, are written in words that no other message has."""
    mailbox = write_mailbox(tmp_path / "old")
    (tmp_path / "new").mkdir()
    for number in range(10):
        category = sorted(TOPICS)[number % 3]
        words = (
            " ".join(f"{start}{number}xyz" for start in "abcdefghijklmnopqrstuvwxyz") if number < 7 else ""
        )
        name = tmp_path / "new" / category / f"new{number}.eml"
        name.parent.mkdir(exist_ok=True)
        known = " ".join(TOPICS[category][:3])
        name.write_text(f"Date: Mon, 03 Feb 2025 10:00:{number:02d} +0000\nSubject: {known}\n\n{words}\n")
    options = MailOptions(held_out=SplitRules("time", 0.1), max_error=0.3)
    _, report = train_mail([mailbox, tmp_path / "new"], tmp_path / "run", options, Recorder())
    with open_classifier(tmp_path / "run", all_paths=True) as classifier:
        found = collect(classifier.compare(messages_of([tmp_path / "new"]), max_error=0.3))
    assert report.held_out.messages == len(found.decided) == 10
    assert 0 < sum(found.decided) < 10
    assert report.held_out.decided == np.mean(found.decided)


def test_mail_without_a_known_category_is_refused(trained, unseen, tmp_path):
    shutil.copytree(unseen / "work", tmp_path / "mail" / "elsewhere")
    done = CliRunner().invoke(cli, ["email", "eval", str(trained[0]), str(tmp_path / "mail"), "--jobs", "1"])
    assert "No message has a category of this model" in str(done.exception)
