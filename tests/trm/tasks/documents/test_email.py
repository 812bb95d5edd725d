"""The task `email`: a dataset of tokens with one label per row, and a model that learns it."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import make_learner, run_config, training_config
from tiny import run as train_run
from tiny_mail import OPTIONS, WORDS, documents, email_config, email_dataset, folders_of_mail

from macbook_optimization.errors import ConfigError, DataError
from trm.backends.base import StepSettings
from trm.batch import IGNORE_LABEL, Batch
from trm.config import InferenceConfig
from trm.feed import Feed
from trm.inference.search import Search
from trm.runs.reading import read_rows
from trm.slots import Slots
from trm.tasks.base import DataSpec
from trm.tasks.dataset import open_split
from trm.tasks.documents.collecting import Documents
from trm.tasks.documents.email import TASK, question_batch, write_documents
from trm.tasks.documents.tokens import MailTokenizer, TokenOptions
from trm.tasks.grids.sudoku import TASK as SUDOKU

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return email_dataset(tmp_path_factory.mktemp("email") / "set")


def test_a_dataset_has_lengths_names_and_one_label_per_message(dataset):
    for name, count in (("train", 120), ("test", 40)):
        split = open_split(dataset, name)
        spec = DataSpec(max_len=48, vocab_size=300, num_outputs=3, class_names=("spam", "work", "home"))
        assert TASK.complete(split.spec) == spec
        batch = split.batch(np.arange(len(split)))
        assert len(batch) == count
        assert (batch.labels[:, 1:] == IGNORE_LABEL).all()
        assert [spec.class_names[label] for label in batch.labels[:, 0]] == [
            each.category for each in documents(count, seed=0 if name == "train" else 1)
        ]
        assert batch.lengths.min() < batch.lengths.max() <= 48
        assert (batch.inputs[batch.padding] == 0).all()


def test_the_tokenizer_of_a_dataset_gives_the_rows_of_the_dataset(dataset):
    tokenizer = MailTokenizer.load(dataset / "tokenizer.json")
    mails = [each.mail for each in documents(40, seed=1)]
    batch = question_batch(tokenizer.encode(mails, OPTIONS.length), OPTIONS.length)
    stored = open_split(dataset, "test").batch(np.arange(40))
    np.testing.assert_array_equal(batch.inputs, stored.inputs)
    np.testing.assert_array_equal(batch.lengths, stored.lengths)


def test_a_classifier_needs_categories_that_it_knows(tmp_path):
    few = documents(4, seed=0)
    with pytest.raises(DataError, match="two categories"):
        write_documents(Documents(few, few, ("spam",)), tmp_path / "one", OPTIONS)
    with pytest.raises(DataError, match="not in the list of categories: work"):
        write_documents(Documents(few, few, ("spam", "home")), tmp_path / "unknown", OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_dataset_without_names_of_categories_is_refused():
    with pytest.raises(DataError, match="names its categories"):
        TASK.complete(DataSpec(48, 300, 3))


def test_options_are_checked():
    TASK.check_options({"from": ["mail"], "length": 512, "vocab_size": 12_000})
    with pytest.raises(ConfigError, match="vocab_size"):
        TASK.check_options({"from": ["mail"], "vocab_sizes": 1})
    with pytest.raises(ConfigError, match="from"):
        TASK.check_options({})


@pytest.mark.slow
def test_a_directory_of_mail_becomes_a_dataset(tmp_path):
    folders_of_mail(tmp_path / "mail")
    options = {"from": [str(tmp_path / "mail")], "length": 32, "vocab_size": 200, "test_share": 0.25}
    TASK.build(options, tmp_path / "set", lambda *facts: None)
    splits = [open_split(tmp_path / "set", name) for name in ("train", "test")]
    assert sum(map(len, splits)) == 40
    assert 5 <= len(splits[1]) <= 15
    assert splits[0].spec.class_names == ("home", "spam", "work")


@pytest.mark.slow
def test_outputs_differ_between_mails_after_fifty_steps(dataset):
    """Embeddings much smaller than the latents would be erased by the recursion: all mails alike."""
    config = email_config(dataset)
    split = open_split(dataset, "train")
    feed = Feed(config, TASK, split)
    ours = make_learner(config.model, config.training, split.spec)
    embedded = ours.model.embed(split_tokens(split), None).detach()
    assert 0.8 < float(embedded.std() / ours.model.start(1).std()) < 1.25
    slots = Slots.new(16)
    for step in range(1, 51):
        slots = slots.all_halted().refilled()
        ours.step(feed.batch(slots, step), StepSettings(step, 1, 3e-3, 0.0), lambda done: 8)
    search = Search(ours.predictor(), InferenceConfig(depth=1), split.spec)
    answers = search.answer(split.batch(np.arange(40)), probabilities=True)
    probabilities = answers.probabilities[:, 0]
    assert probabilities.std(0).max() > 0.1
    assert len(set(answers.final().tokens[:, 0])) > 1


def split_tokens(split):
    import torch

    return torch.from_numpy(split.batch(np.arange(40)).inputs)


@pytest.mark.slow
def test_a_run_learns_categories_and_reports_them(dataset, tmp_path):
    outcome = train_run(email_config(dataset, evaluation={"every_steps": 30}), tmp_path / "run")
    assert outcome.best["primary_metric"] == "accuracy"
    row = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "accuracy" in row][-1]
    assert row["accuracy"] > 0.8
    assert row["accuracy"] == pytest.approx(row["accuracy_by_depth"][-1])
    confusion = np.array(row["tables"]["confusion"])
    assert confusion.sum() == 40
    assert np.trace(confusion) / 40 == pytest.approx(row["accuracy"])


def test_dropped_words_are_a_function_of_slot_and_example(dataset):
    split = open_split(dataset, "train")
    config = email_config(dataset)
    plain = Feed(config, TASK, split)
    settings = config.training.model_copy(update={"word_dropout": 0.3})
    dropping = Feed(config.model_copy(update={"training": settings}), TASK, split)
    slots = Slots.new(16).refilled()
    whole, dropped = plain.batch(slots, 1), dropping.batch(slots, 1)
    left = dropped.lengths.sum() / whole.lengths.sum()
    assert 0.65 < left < 0.85
    for row in range(16):
        before, after = (each.inputs[row, : each.lengths[row]].tolist() for each in (whole, dropped))
        assert is_subsequence(after, before)
        assert [token for token in after if token <= 3] == [token for token in before if token <= 3]
        assert not dropped.inputs[row, dropped.lengths[row] :].any()
    np.testing.assert_array_equal(dropped.labels, whole.labels)
    np.testing.assert_array_equal(dropping.batch(slots[4:9], 7).inputs, dropped.inputs[4:9])
    later = slots.all_halted().refilled()
    assert dropping.batch(later, 2).lengths.tolist() != dropped.lengths.tolist()


def test_some_messages_lose_all_header_features():
    row = np.array([[2, 9, 3, 20, 21, 22, 3, 30, 31, 0]])
    batch = Batch(np.zeros(1), row, np.full_like(row, IGNORE_LABEL), np.zeros(1), np.ones(1))
    batch = replace(batch, lengths=np.array([9]))
    draws = np.ones((1, 10))
    assert TASK.without_words(batch, draws, 0.2).inputs.tolist() == row.tolist()
    draws[0, 0] = 0.1
    dropped = TASK.without_words(batch, draws, 0.2)
    assert dropped.inputs.tolist() == [[2, 9, 3, 3, 30, 31, 0, 0, 0, 0]]
    assert dropped.lengths.tolist() == [6]


def is_subsequence(some, of):
    rest = iter(of)
    return all(token in rest for token in some)


def test_word_dropout_needs_words(dataset):
    settings = training_config(word_dropout=0.1)
    config = run_config(dataset, training=settings.model_dump())
    with pytest.raises(ConfigError, match="sudoku has none"):
        Feed(config, SUDOKU, open_split(dataset, "train"))


def class_weighted_feed(dataset, weights):
    config = email_config(dataset)
    settings = config.training.model_validate({**config.training.model_dump(), "class_weights": weights})
    return Feed(config.model_copy(update={"training": settings}), TASK, open_split(dataset, "train"))


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_rare_categories_count_for_more(dataset, exponent):
    feed = class_weighted_feed(dataset, exponent)
    batch = feed.batch(Slots.new(16).refilled(), 1)
    counts = np.bincount(feed.split.batch(np.arange(120)).labels[:, 0])
    expected = (120 / (3 * counts)) ** exponent
    np.testing.assert_allclose(batch.weights, expected[batch.labels[:, 0]])


def test_weights_can_be_given_by_name(dataset):
    batch = class_weighted_feed(dataset, {"home": 4}).batch(Slots.new(16).refilled(), 1)
    np.testing.assert_array_equal(batch.weights, np.array([1.0, 1.0, 4.0])[batch.labels[:, 0]])
    assert class_weighted_feed(dataset, 0).batch(Slots.new(16).refilled(), 1).weights is None
    with pytest.raises(ConfigError, match="did you mean home") as error:
        class_weighted_feed(dataset, {"hme": 4})
    assert "spam, work, home" in error.value.hint


def test_the_difficulty_of_a_message_is_its_length_before_it_was_cut(tmp_path):
    """Otherwise all long messages would be equally difficult."""
    given = Documents(documents(40, 0), documents(10, 1), tuple(WORDS))
    settings = TokenOptions(length=24, vocab_size=300)
    tokenizer = write_documents(given, tmp_path / "set", settings)
    split = open_split(tmp_path / "set", "train")
    whole = [len(tokens) for tokens in tokenizer.encode([each.mail for each in given.train], 1000)]
    assert split.difficulties().tolist() == whole
    np.testing.assert_array_equal(np.minimum(whole, 24), split.lengths)
    assert len({length for length in whole if length > 24}) > 5


@pytest.mark.slow
def test_a_curriculum_starts_with_short_messages(dataset, tmp_path):
    stages = {"share": 0.25, "threshold": 0.0, "widen": 2.0, "every_steps": 20}
    config = email_config(dataset)
    training = config.training.model_validate({**config.training.model_dump(), "curriculum": stages})
    config = config.model_copy(update={"training": training})
    split = open_split(dataset, "train")
    batch = Feed(config, TASK, split).batch(Slots.new(16).refilled(), 1)
    assert batch.lengths.max() <= np.quantile(split.lengths, 0.25)
    train_run(config, tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["curriculum_stage"] for row in rows if row["kind"] == "train"][-1] == 2


def test_a_phase_may_have_its_own_word_dropout(dataset):
    phases = [{"name": "main", "steps": 5}, {"name": "fine-tune", "word_dropout": 0.0}]
    config = email_config(dataset)
    changes = {"word_dropout": 0.3, "phases": phases}
    training = config.training.model_validate({**config.training.model_dump(), **changes})
    split = open_split(dataset, "train")
    slots = Slots.new(16).refilled()
    feed = Feed(config.model_copy(update={"training": training}), TASK, split)
    whole = Feed(config, TASK, split).batch(slots, 1)
    assert feed.batch(slots, 5).lengths.sum() < whole.lengths.sum()
    np.testing.assert_array_equal(feed.batch(slots, 6).inputs, whole.inputs)


def test_word_dropout_of_a_phase_needs_words(dataset):
    settings = training_config(phases=[{"name": "main", "word_dropout": 0.1}])
    config = run_config(dataset, training=settings.model_dump())
    with pytest.raises(ConfigError, match=r"word_dropout of training.phases .* sudoku has none"):
        Feed(config, SUDOKU, open_split(dataset, "train"))
