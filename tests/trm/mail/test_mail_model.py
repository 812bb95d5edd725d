"""From a mailbox to decisions: training, saving, deciding, explaining."""

import json
import shutil
import stat
from dataclasses import replace

import pytest
from click.testing import CliRunner
from letters import TOPICS, letter, write_mailbox
from tiny import Recorder

from macbook_optimization.errors import ConfigError, DataError, RunError
from trm.cli import cli
from trm.mail.deciding import open_classifier
from trm.mail.explain import as_html, explain
from trm.mail.model import BASELINE, LINEAR, load_model, save_model
from trm.mail.network_training import MAX_STEPS, NUM_EPOCHS, NetworkOptions
from trm.mail.training import MailOptions, train_mail
from trm.tasks.documents.labels import CategoryMap, load_map
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.splits import SplitRules


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_category_is_not_enough(tmp_path):
    shutil.rmtree(write_mailbox(tmp_path / "mailbox") / "spam")
    shutil.rmtree(tmp_path / "mailbox" / "work")
    with pytest.raises(DataError, match="needs two categories"):
        train_mail([tmp_path / "mailbox"], tmp_path / "run", MailOptions(), Recorder())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [3, 10_000])
def test_the_reasons_add_up_to_the_difference_of_the_scores(trained, count):
    with open_classifier(trained[0]) as classifier:
        ((read, decision),) = classifier.decide([Message("letter", letter("spam", 3, 5))])
        rival, reasons = explain(classifier.model, read.features, count=count)
        table = classifier.model.table
        scores = table.scores(classifier.model.bags([read.features.counts]))[0]
        names = classifier.model.categories
        one, other = names.index(decision.category), names.index(rival)
    difference = float(scores[one] - scores[other])
    assert sum(reason.share for reason in reasons) == pytest.approx(difference, abs=1e-5)
    assert reasons[-1].field == "the rest"
    assert count == 3 or {"subject", "text"} <= {reason.field for reason in reasons}


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


@pytest.mark.slow
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


def small_mailbox(directory, texts):
    """Write a directory with the given messages in each folder."""
    for folder, messages in texts.items():
        (directory / folder).mkdir(parents=True)
        for number, text in enumerate(messages):
            (directory / folder / f"{number}.eml").write_text(f"Subject: {folder}\n\n{text}\n")
    return directory


def test_a_category_of_copies_can_be_trained(tmp_path):
    """Its messages are in one fold, so some tables of cross-validation see only the other category."""
    copies = ["one two three four five six seven eight nine ten"] * 3
    others = [f"meeting {number} about the budget of project {number}" for number in range(8)]
    mailbox = small_mailbox(tmp_path / "mail", {"copies": copies, "others": others})
    options = MailOptions(held_out=SplitRules("random", 0.0))
    model, _ = train_mail([mailbox], tmp_path / "run", options, Recorder())
    assert model.categories == ("copies", "others")


@pytest.mark.slow
def test_words_that_are_too_rare_are_reported(tmp_path):
    mailbox = write_mailbox(tmp_path / "mailbox")
    with pytest.raises(DataError, match="No word occurs in 900 messages"):
        train_mail([mailbox], tmp_path / "run", MailOptions(min_documents=900), Recorder())


def test_a_split_by_time_needs_dates(tmp_path):
    texts = {name: [f"{name} number {number}" for number in range(20)] for name in ("one", "other")}
    options = MailOptions(held_out=SplitRules("time", 0.1))
    with pytest.raises(DataError, match="none can be held out by time"):
        train_mail([small_mailbox(tmp_path / "mail", texts)], tmp_path / "run", options, Recorder())
    assert not (tmp_path / "run").exists()


def test_a_directory_with_something_else_is_not_used(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty and not a mail model"):
        train_mail([write_mailbox(tmp_path / "mailbox")], tmp_path / "run", MailOptions(), Recorder())


@pytest.mark.parametrize("change", ["mail", "seed", "min_df"])
def test_an_unfinished_training_is_not_continued_with_other_input(trained, tmp_path, change):
    run = shutil.copytree(trained[0], tmp_path / "run")
    model = load_model(run / "mail")
    save_model(replace(model, facts={**model.facts, "complete": False}), run / "mail")
    before = (run / "mail" / "mail.json").read_bytes()
    options = MailOptions(network=NetworkOptions())
    mailbox = write_mailbox(tmp_path / "mailbox", seed=1 if change == "mail" else 0)
    if change == "seed":
        options = replace(options, held_out=SplitRules("random", 0.1, seed=4))
    if change == "min_df":
        options = replace(options, min_documents=3)
    with pytest.raises(RunError, match="begun with other mail or options"):
        train_mail([mailbox], run, options, Recorder())
    assert (run / "mail" / "mail.json").read_bytes() == before


@pytest.mark.slow
def test_a_small_mailbox_gets_the_linear_path_and_is_told_so(tmp_path):
    display = Recorder()
    options = MailOptions(network=NetworkOptions())
    model, _ = train_mail([write_mailbox(tmp_path / "mailbox")], tmp_path / "run", options, display)
    assert model.network is None
    assert any("81 training messages are fewer than the 200" in text for text in display.messages)
    assert load_model(tmp_path / "run" / "mail").facts["complete"]


def test_keys_that_the_mail_decides_about_cannot_be_overridden(tmp_path):
    for override in ("seed=7", "task=sudoku", "data.path=elsewhere"):
        with pytest.raises(ConfigError, match="cannot be set"):
            NetworkOptions(overrides=(override,)).config(tmp_path, 300)
    config = NetworkOptions().config(tmp_path / "Mail #1: [x]", 300)
    assert config.data.path == tmp_path / "Mail #1: [x]" / "dataset"


@pytest.mark.parametrize("batch_size", [16, 32, 64])
def test_messages_are_seen_equally_often_with_every_batch_size(tmp_path, batch_size):
    override = f"training.effective_batch_size={batch_size}"
    config = NetworkOptions(overrides=(override,)).config(tmp_path, 3200)
    assert config.training.max_steps * batch_size == NUM_EPOCHS * 3200
    assert config.training.warmup_steps == config.training.max_steps // 16


def test_overrides_may_depend_on_the_chosen_steps_and_sizes(tmp_path):
    phases = "training.phases=[{name: main, steps: 1500}, {name: end}]"
    options = NetworkOptions(profile="32gb", overrides=(phases, "model.num_heads=128"))
    assert options.config(tmp_path, 20_000).training.max_steps == MAX_STEPS


def test_a_mailbox_without_messages_is_named_as_such(tmp_path):
    (tmp_path / "empty.mbox").touch()
    with pytest.raises(DataError, match="There is no message that can be read"):
        train_mail([tmp_path / "empty.mbox"], tmp_path / "run", MailOptions(), Recorder())


def test_the_result_says_whether_recursion_is_used(trained):
    report = trained[1]
    assert "The recursive path" not in report.text()
    assert "The recursive path is not used: it did not help" in replace(report, gate=0.0).text()
    assert "The recursive path is added with a gate of 0.5." in replace(report, gate=0.5).text()
    held_out = replace(report.held_out, decided=8 / 9, error_of_decided=1 / 8)
    assert "88.9% decided, 12.5% of those wrong (1 of 8)" in replace(report, held_out=held_out).text()


def test_nobody_else_can_read_the_run(trained):
    assert stat.S_IMODE(trained[0].stat().st_mode) == 0o700


def test_a_pattern_of_the_mapping_that_matches_nothing_is_named(trained, tmp_path):
    mapping = CategoryMap({"work": ("work", "Wrok"), "spam": ("sp*",)}, ignore=("label:Snet",))
    display = Recorder()
    options = MailOptions(mapping=mapping)
    train_mail([trained[0].parent / "mailbox"], tmp_path / "run", options, display)
    assert [text for text in display.messages if text.startswith("warning: no folder")] == [
        "warning: no folder and no label matches 'Wrok', which the mapping has in 'work'",
        "warning: no folder and no label matches 'label:Snet', which the mapping has in 'ignore'",
    ]
