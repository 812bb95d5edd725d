"""The task `email-masked`: which tokens are masked, and a model that predicts them."""

import sys

import numpy as np
import pytest
from tiny import make_learner, run_config
from tiny import run as train_run
from tiny_mail import email_config, email_dataset, folders_of_mail, masked_dataset

from macbook_optimization.errors import ConfigError, DataError
from trm.backends.pytorch.predictor import TorchPredictor
from trm.batch import IGNORE_LABEL
from trm.config import InferenceConfig
from trm.feed import Feed
from trm.inference.search import Search
from trm.runs.reading import read_rows
from trm.slots import Slots
from trm.tasks.base import DataSpec, HasWords
from trm.tasks.dataset import open_split
from trm.tasks.documents.email import TASK as EMAIL
from trm.tasks.documents.masked import MASKED_SHARE, TASK
from trm.tasks.documents.tokens import SEP_TOKEN, UNK_TOKEN

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    return email_dataset(tmp_path_factory.mktemp("email") / "set")


@pytest.fixture(scope="module")
def dataset(labelled):
    return masked_dataset(labelled.with_name("masked"), labelled)


def unmasked(batch):
    return np.where(batch.labels == IGNORE_LABEL, batch.inputs, batch.labels)


def assert_masked(batch, tokens):
    """Check that the batch has these tokens, some of them masked and no mark; return the share."""
    is_masked = batch.labels != IGNORE_LABEL
    np.testing.assert_array_equal(unmasked(batch), tokens)
    assert (batch.inputs[is_masked] == UNK_TOKEN).all()
    assert (batch.labels[is_masked] > SEP_TOKEN).all()
    return is_masked.sum() / (tokens > SEP_TOKEN).sum()


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_dataset_has_the_messages_of_another_with_masked_tokens(labelled, dataset, name):
    whole, split = (open_split(each, name) for each in (labelled, dataset))
    assert TASK.complete(split.spec) == DataSpec(max_len=48, vocab_size=300, num_outputs=300)
    assert (dataset / "tokenizer.json").read_bytes() == (labelled / "tokenizer.json").read_bytes()
    everything = np.arange(len(split))
    share = assert_masked(split.batch(everything), whole.batch(everything).inputs)
    assert share == pytest.approx(MASKED_SHARE, abs=0.03)


def masked_config(dataset, **changes):
    return email_config(dataset, task="email-masked", **changes)


def test_masks_are_a_function_of_slot_and_example(labelled, dataset):
    feed = Feed(masked_config(dataset), TASK, open_split(dataset, "train"))
    whole = Feed(email_config(labelled), EMAIL, open_split(labelled, "train"))
    slots = Slots.new(16).refilled()
    masks = []
    shares = []
    for step in range(1, 9):  # the eighth begins the second epoch
        batch = feed.batch(slots, step)
        shares.append(assert_masked(batch, whole.batch(slots, step).inputs))
        part = feed.batch(slots[4:9], step + 1)
        np.testing.assert_array_equal(part.inputs, batch.inputs[4:9])
        np.testing.assert_array_equal(part.labels, batch.labels[4:9])
        masks.append(batch.labels != IGNORE_LABEL)
        slots = slots.all_halted().refilled()
    assert all((mask != masks[0]).any() for mask in masks[1:])
    assert np.mean(shares) == pytest.approx(MASKED_SHARE, abs=0.03)


def test_without_augmentation_the_masks_are_those_of_the_dataset(dataset):
    split = open_split(dataset, "train")
    config = masked_config(dataset, data={"path": str(dataset), "augment": False})
    slots = Slots.new(16).refilled()
    feed = Feed(config, TASK, split)
    examples, _ = feed.order.examples(slots)
    np.testing.assert_array_equal(feed.batch(slots, 1).inputs, split.batch(examples).inputs)


@pytest.mark.slow
def test_mail_needs_no_categories_and_may_share_a_vocabulary(tmp_path, labelled):
    mail = folders_of_mail(tmp_path / "mail") / "work"
    options = {"from": [str(mail)], "length": 32, "tokenizer": str(labelled), "test_share": 0.2}
    TASK.check_options(options)
    assert TASK.spec(options) == DataSpec(32, 300, 300)
    TASK.build(options, tmp_path / "set", lambda *facts: None)
    assert TASK.vocabulary(tmp_path / "set") == EMAIL.vocabulary(labelled)
    assert open_split(tmp_path / "set", "train").spec == DataSpec(32, 300, 300)
    with pytest.raises(ConfigError, match=r"vocab_size is 200, but the vocabulary of .* has 300 tokens"):
        TASK.build({**options, "vocab_size": 200}, tmp_path / "other", lambda *facts: None)
    with pytest.raises(ConfigError, match="mapping"):
        TASK.check_options({**options, "mapping": "mapping.yaml"})
    with pytest.raises(DataError, match=r"dataset\.json"):
        TASK.build({**options, "tokenizer": str(mail)}, tmp_path / "other", lambda *facts: None)
    with pytest.raises(DataError, match=r"dataset\.json"):  # before the mail is read
        EMAIL.build({**options, "from": ["nowhere"], "tokenizer": str(mail)}, tmp_path / "other", print)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        TASK.build({"from": [str(tmp_path / "empty")]}, tmp_path / "other", lambda *facts: None)
    assert not (tmp_path / "other").exists()
    assert TASK.vocabulary(tmp_path / "other") is None


def test_categories_and_masked_tokens_are_not_mistaken_for_each_other(labelled, dataset):
    with pytest.raises(DataError, match="300 tokens; this dataset has 3 outputs"):
        TASK.complete(open_split(labelled, "train").spec)
    with pytest.raises(DataError, match="names its categories"):
        EMAIL.complete(open_split(dataset, "train").spec)
    assert not isinstance(TASK, HasWords)  # leaving words out would move them away from their labels


@pytest.mark.slow
def test_a_run_learns_to_predict_tokens(dataset, tmp_path):
    outcome = train_run(masked_config(dataset, evaluation={"every_steps": 30}), tmp_path / "run")
    assert outcome.best["primary_metric"] == "token_accuracy"
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert max(row["token_accuracy"] for row in rows if row["kind"] == "eval") > 0.02
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < 4.5 < np.log(300)


def test_answers_do_not_depend_on_how_many_logits_are_computed_at_a_time(dataset, monkeypatch):
    split = open_split(dataset, "test")
    ours = make_learner(masked_config(dataset).model, spec=split.spec)
    batch = split.batch(np.arange(7))

    def answers():
        return Search(ours.predictor(), InferenceConfig(depth=2), split.spec).answer(batch).tokens

    together = answers()
    module = sys.modules[TorchPredictor.__module__]
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 2 * 48 * 300)
    np.testing.assert_array_equal(answers(), together)


def test_other_tasks_have_no_masks(tmp_path, dataset):
    with pytest.raises(DataError, match="names its categories"):
        train_run(run_config(dataset, task="email"), tmp_path / "run")
