"""From a mailbox to decisions: training, saving, deciding, explaining."""

import json
import shutil

import pytest
from click.testing import CliRunner
from letters import TOPICS, letter, write_mailbox
from tiny import Recorder

from macbook_optimization.errors import DataError, RunError
from trm.cli import cli
from trm.mail.deciding import open_classifier
from trm.mail.explain import as_html, explain
from trm.mail.model import BASELINE, LINEAR, load_model
from trm.mail.training import MailOptions, train_mail
from trm.tasks.documents.labels import load_map
from trm.tasks.documents.mailboxes import Message


def test_a_model_of_a_small_mailbox_classifies_new_messages(trained):
    with open_classifier(trained[0]) as classifier:
        given = [
            Message(category, letter(category, number, 3)) for category in TOPICS for number in range(20)
        ]
        decided = list(classifier.decide(given))
    right = [read.message.key == decision.category for read, decision in decided]
    assert sum(right) >= 0.95 * len(right)


def test_the_report_compares_with_the_baseline_on_the_same_messages(trained):
    report = trained[1]
    assert report.held_out.messages == 9
    assert set(report.held_out.columns) == {LINEAR, BASELINE}
    assert report.held_out.columns[BASELINE].accuracy >= 0.5
    assert sum(map(sum, report.held_out.columns[LINEAR].confusion)) == 9
    assert report.quality["categories"] == {"spam": 30, "travel": 30, "work": 30}
    json.dumps(report.to_json())


def test_training_twice_gives_the_same_files(trained, tmp_path):
    mailbox = write_mailbox(tmp_path / "mailbox")
    train_mail([mailbox], tmp_path / "again", MailOptions(jobs=2), Recorder())
    for name in ("linear.safetensors", "vocabulary.txt"):
        assert (tmp_path / "again" / "mail" / name).read_bytes() == (trained[0] / "mail" / name).read_bytes()


def test_a_saved_model_holds_no_message(trained):
    text = b" ".join(path.read_bytes() for path in (trained[0] / "mail").iterdir())
    for category in TOPICS:
        body = letter(category, 0).split(b"\n\n")[-1].strip()
        assert body not in text


def test_a_model_is_not_replaced(trained, tmp_path):
    with pytest.raises(RunError, match="already holds a mail model"):
        train_mail([write_mailbox(tmp_path / "mailbox")], trained[0], MailOptions(), Recorder())


def test_damaged_files_are_refused(trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    weights = run / "mail" / "linear.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(DataError, match="do not belong together"):
        load_model(run / "mail")
    with pytest.raises(DataError, match="holds no mail model"):
        load_model(tmp_path / "nothing")


def test_one_category_is_not_enough(tmp_path):
    shutil.rmtree(write_mailbox(tmp_path / "mailbox") / "spam")
    shutil.rmtree(tmp_path / "mailbox" / "work")
    with pytest.raises(DataError, match="needs two categories"):
        train_mail([tmp_path / "mailbox"], tmp_path / "run", MailOptions(), Recorder())
    assert not (tmp_path / "run").exists()


def test_the_reasons_add_up_to_the_difference_of_the_scores(trained):
    with open_classifier(trained[0]) as classifier:
        ((read, decision),) = classifier.decide([Message("letter", letter("spam", 3, 5))])
        rival, reasons = explain(classifier.model, read.features, count=10_000)
        table = classifier.model.table
        scores = table.scores(classifier.model.bags([read.features.counts]))[0]
        names = classifier.model.categories
        one, other = names.index(decision.category), names.index(rival)
    difference = float(scores[one] - scores[other] - (table.bias[one] - table.bias[other]))
    assert sum(reason.share for reason in reasons) == pytest.approx(difference, abs=1e-5)
    assert {"subject", "text"} <= {reason.field for reason in reasons}


def test_a_page_of_reasons_escapes_hostile_words(trained):
    raw = b"From: a@example.org\nSubject: <script>alert(1)</script>\n\nprize <img src=x onerror=alert(2)>\n"
    with open_classifier(trained[0]) as classifier:
        ((read, decision),) = classifier.decide([Message("<b>", raw)])
        rival, reasons = explain(classifier.model, read.features)
    page = as_html("<b>", decision, rival, reasons)
    assert "<script>" not in page
    assert "<b>" not in page
    assert "<img" not in page


def test_skipped_messages_have_no_decision(trained):
    with open_classifier(trained[0]) as classifier:
        ((read, decision),) = classifier.decide([Message("empty", b"")])
    assert decision is None
    assert read.features.mail.verdict == "skipped"


def test_a_report_says_why_every_answer_is_unsure(trained):
    report = trained[1]
    assert report.held_out.decided == 0
    assert "Every answer is unsure: no confidence keeps the error budget." in report.text()


def test_a_mapping_of_a_mailbox_is_written_once_and_can_be_trained_with(tmp_path):
    mailbox = write_mailbox(tmp_path / "mailbox")
    out = tmp_path / "mapping.yaml"
    arguments = ["email", "mapping", str(mailbox), "--out", str(out), "--json", "--jobs", "1"]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert json.loads(done.stdout) == {"path": str(out), "messages": 90}
    out.write_text(out.read_text().replace('"work"', '"office"'))
    mapping = load_map(out)
    _, report = train_mail([mailbox], tmp_path / "run", MailOptions(mapping=mapping), Recorder())
    assert report.quality["categories"] == {"spam": 30, "travel": 30, "office": 30}
    with pytest.raises(DataError, match="exists"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
