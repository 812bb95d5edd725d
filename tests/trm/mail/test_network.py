"""Both paths of a mail model: trained, mixed, saved, used, corrected and explained together."""

import json
import shutil
import signal
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from letters import LENGTH, TOPICS, letter, write_mailbox
from processes import wait_for
from tiny import TRM

from trm.mail.deciding import open_classifier
from trm.mail.explain import explain
from trm.mail.model import BASELINE, LINEAR, RECURSIVE, TOGETHER, load_model
from trm.mail.network import WEIGHTS_FILE
from trm.mail.reading import features_of
from trm.runs.directory import EVENTS, MAIL, METRICS, Run
from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.mailboxes import Message

pytest.importorskip("tokenizers")

SIZES = ("model.hidden_size=32", "training.max_steps=150", "training.learning_rate=0.003", "plan.threads=1")


def given_letters(count=6, seed=3):
    return [
        Message(f"{category}{number}", letter(category, number, seed))
        for category in TOPICS
        for number in range(count)
    ]


def test_a_saved_network_gives_the_same_probabilities_in_any_order_and_batch(untrained):
    mails = [parse_mail(each.raw) for each in given_letters(40)]
    network = load_model(untrained / MAIL).network
    found = network.log_probabilities(mails)
    np.testing.assert_allclose(np.exp(found).sum(1), 1, atol=1e-5)
    assert len(np.unique(found.round(6), axis=0)) > 30  # it does not say the same about all messages
    some = network.log_probabilities([mails[i] for i in (77, 3, 40)])
    np.testing.assert_allclose(some, found[[77, 3, 40]], atol=1e-5)


def test_weights_are_read_to_the_last_bit_without_the_backend(untrained):
    from safetensors.torch import load

    network = load_model(untrained / MAIL).network
    expected = load(network.files[WEIGHTS_FILE])
    found = network.weights(0)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name].numpy(), strict=True)


def test_a_worker_keeps_what_the_network_needs(untrained):
    network = load_model(untrained / MAIL).network
    long = letter("work", 1).replace(b"\n\n", b"\n\n" + b"meeting report budget " * 2000, 1)
    whole, kept = parse_mail(long), features_of(long, LENGTH).mail
    assert len(kept.text) < len(whole.text) / 10
    for one, other in zip(*(network.tokenizer.encode([mail], LENGTH) for mail in (whole, kept)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_recursive_path_is_skipped_where_the_linear_one_is_certain(untrained):
    model = load_model(untrained / MAIL)
    features = [features_of(each.raw, LENGTH) for each in given_letters()]
    bags = model.bags([each.counts for each in features])
    mails = [each.mail for each in features]
    linear = np.exp(model.linear(bags))
    never = replace(model, mixture=replace(model.mixture, certain=0.0))
    np.testing.assert_array_equal(never.probabilities(bags, mails), linear)
    always = never.probabilities(bags, mails, full=True)
    np.testing.assert_allclose(model.probabilities(bags, mails), always)
    assert abs(always - linear).max() > 0.01
    middle = float(np.median(linear.max(1)))
    half = replace(model, mixture=replace(model.mixture, certain=middle)).probabilities(bags, mails)
    is_low = linear.max(1) <= middle
    np.testing.assert_allclose(half[is_low], always[is_low], atol=1e-5)
    np.testing.assert_array_equal(half[~is_low], linear[~is_low])


@pytest.mark.slow
def test_corrections_hold_with_both_paths(untrained, tmp_path):
    run = shutil.copytree(untrained, tmp_path / "run")
    wrong = given_letters(3, seed=5)
    with open_classifier(run) as classifier:
        learned, _ = classifier.learn(wrong, "travel")
        assert learned >= 6
    for full in (False, True):
        with open_classifier(run, full=full) as classifier:
            assert {decision.category for _, decision in classifier.decide(wrong)} == {"travel"}


def test_an_explanation_says_what_the_recursive_path_added(untrained):
    model = load_model(untrained / MAIL)
    features = features_of(letter("spam", 3, 5), LENGTH)
    rival, reasons = explain(model, features, count=10_000)
    (added,) = [reason for reason in reasons if reason.field == "recursive path"]
    scores = model.table.scores(model.bags([features.counts]))[0] + model.recursive_scores([features.mail])[0]
    best, other = int(scores.argmax()), model.categories.index(rival)
    assert added.share != 0
    total = sum(reason.share for reason in reasons)
    assert total == pytest.approx(float(scores[best] - scores[other]), abs=1e-4)


@pytest.mark.slow
def test_an_interrupted_training_leaves_a_usable_model_and_continues(tmp_path):
    write_mailbox(tmp_path / "mailbox", num_each=100)
    overrides = [word for each in SIZES for word in ("--set", each)]
    command = [TRM, "email", "train", "mailbox", "--run", "run", "--json", *overrides]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for((tmp_path / "run" / METRICS).exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    given = given_letters(10, seed=9)
    with open_classifier(tmp_path / "run") as classifier:
        assert classifier.model.network is None
        assert shares_right(classifier, given) >= 0.9

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    events = [row["event"] for row in Run(tmp_path / "run").rows(EVENTS)]
    assert "resumed" in events
    columns = json.loads(done.stdout)["held_out"]["columns"]
    assert list(columns) == [LINEAR, RECURSIVE, TOGETHER, BASELINE]
    assert columns[RECURSIVE]["accuracy"] > 0.8
    with open_classifier(tmp_path / "run") as classifier:
        assert classifier.model.network is not None
        assert shares_right(classifier, given) >= 0.9
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "already holds a mail model" in again.stderr


def shares_right(classifier, given):
    return np.mean([read.message.key.startswith(each.category) for read, each in classifier.decide(given)])
