"""Answers: when a puzzle is done, and how it is tried again."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import SHAPE, VARIANTS, model_config, step_batch, training_config

from macbook_optimization.errors import ConfigError
from trm.backends.pytorch.answering import with_a_guess
from trm.backends.pytorch.step import TorchLearner
from trm.tasks.base import TaskShape


def learner(supervision="deep", shape=SHAPE, **model):
    return TorchLearner(model_config(**model), training_config(supervision=supervision), shape, seed=0)


@pytest.mark.parametrize("settle", [None, 1, 2])
def test_an_answer_does_not_depend_on_the_other_puzzles(settle):
    answerer = learner("terminal", mlp_t=True, pos_encodings="none").answerer()
    batch = step_batch()
    together = answerer.answer(batch.inputs, batch.puzzle_identifiers, depth=6, settle=settle)
    for i in range(len(batch.inputs)):
        alone = answerer.answer(batch.inputs[i : i + 1], batch.puzzle_identifiers[:1], depth=6, settle=settle)
        np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, i])
        assert alone.steps[0] == together.steps[i]


def test_a_settled_answer_stood_still():
    answerer = learner("terminal", mlp_t=True, pos_encodings="none").answerer()
    batch = step_batch(num_slots=12)
    answers = answerer.answer(batch.inputs, batch.puzzle_identifiers, depth=20, settle=2)
    full = answerer.answer(batch.inputs, batch.puzzle_identifiers, depth=20)
    early = np.flatnonzero(answers.steps < 20)
    assert len(early), "no answer settled, so this test shows nothing"
    for i in early:
        last = answers.steps[i] - 1
        assert (answers.tokens[last - 2 : last + 1, i] == answers.tokens[last, i]).all()
        assert (answers.tokens[last:, i] == answers.tokens[last, i]).all()
        np.testing.assert_array_equal(answers.tokens[: last + 1, i], full.tokens[: last + 1, i])
    assert (full.steps == 20).all()


def test_answers_do_not_depend_on_lanes():
    ours, batch = learner(), step_batch()
    one = ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=4, settle=2)
    ours.set_lanes(2)
    two = ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=4, settle=2)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.steps, two.steps)


def test_a_puzzle_leaves_when_the_halting_head_believes_in_its_answer():
    ours, batch = learner(), step_batch()
    head = ours.averaged.q_head
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(2))
    full = ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=10)
    with torch.no_grad():
        head.bias.sub_(float(np.median(full.halt_logits)))
    full = ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=10)
    early = ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=10, halt=True)
    believed = full.halt_logits >= 0
    first = np.where(believed.any(0), believed.argmax(0) + 1, 10)
    np.testing.assert_array_equal(early.steps, first)
    assert len(set(first)) > 1
    for i, steps in enumerate(first):
        np.testing.assert_array_equal(early.tokens[-1, i], full.tokens[steps - 1, i])


def test_of_several_tries_the_halting_head_chooses():
    ours, batch = learner(), step_batch()
    with torch.no_grad():
        ours.averaged.q_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    answerer = ours.answerer()
    answers = [
        answerer.answer(batch.inputs, batch.puzzle_identifiers, depth=3, tries=tries, noise=1.0)
        for tries in (1, 2, 8)
    ]
    believed = [each.halt_logits[-1] for each in answers]
    assert (believed[0] <= believed[1]).all()
    assert (believed[1] <= believed[2]).all()
    assert (believed[0] < believed[2]).any()
    alone = answerer.answer(batch.inputs[2:3], batch.puzzle_identifiers[2:3], depth=3, tries=8, noise=1.0)
    np.testing.assert_array_equal(alone.tokens[:, 0], answers[2].tokens[:, 2])


SAME_TOKENS = TaskShape(seq_len=4, vocab_size=4, output_vocab_size=4, num_puzzle_identifiers=3)


def believing(monkeypatch, model, *, logits):
    """What the model is asked, step by step, when the halting head says this of all puzzles at each step."""
    asked, says = [], iter(logits)
    compute = model.forward
    monkeypatch.setattr(
        model, "forward", lambda inputs, *rest: asked.append(inputs.clone()) or compute(inputs, *rest)
    )
    monkeypatch.setattr(model, "halt_logits", lambda y: torch.full((y.shape[1], 2), next(says)))
    return asked


def always_the_same(monkeypatch, model):
    monkeypatch.setattr(model, "token_logits", lambda y: torch.eye(4).expand(len(y), 4, 4))


def test_the_first_try_is_plain_and_the_only_one_if_it_is_believed_in(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(shape=SAME_TOKENS)
    always_the_same(monkeypatch, ours.averaged)
    asked = believing(monkeypatch, ours.averaged, logits=[1.0] * 8)
    answers = ours.answerer().answer(
        batch.inputs, batch.puzzle_identifiers, depth=8, settle=2, tries=5, noise=1.0, guesses=3
    )
    assert (answers.steps == 3).all()
    assert len(asked) == 3
    assert all((inputs.numpy() == batch.inputs).all() for inputs in asked)


def test_guesses_are_spread_over_the_depth(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(shape=SAME_TOKENS)
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 16)
    ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=8, tries=2, guesses=3)
    changed = [(inputs.numpy() != batch.inputs).sum(-1) for inputs in asked]
    assert all((count == 0).all() for count in changed[:8]), "the first try"
    assert all((count == 0).all() for count in changed[8:10])
    assert all((count == 1).all() for count in changed[10:12])
    for most, steps in ((2, changed[12:14]), (3, changed[14:16])):
        assert all(((count >= 1) & (count <= most)).all() for count in steps), "one may replace another"


def test_an_answer_found_by_guesses_must_stand_without_them(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(num_slots=1, shape=SAME_TOKENS)
    always_the_same(monkeypatch, ours.averaged)
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 3 + [-1.0] * 4 + [1.0] * 3)
    answers = ours.answerer().answer(
        batch.inputs, batch.puzzle_identifiers, depth=9, settle=2, tries=2, guesses=2
    )
    guessed = [bool((inputs.numpy() != batch.inputs).any()) for inputs in asked]
    assert guessed == [False] * 3 + [False, False, False, True, True, False, False]
    assert answers.steps[0] == 7


def test_an_answer_that_falls_with_its_guesses_is_not_the_end(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(num_slots=1, shape=SAME_TOKENS)
    always_the_same(monkeypatch, ours.averaged)
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 3 + [-1.0] * 4 + [1.0] + [-1.0] * 4)
    answers = ours.answerer().answer(
        batch.inputs, batch.puzzle_identifiers, depth=9, settle=2, tries=2, guesses=2
    )
    guessed = [bool((inputs.numpy() != batch.inputs).any()) for inputs in asked]
    assert guessed[3:] == [False, False, False, True, True, False, True, True, True]
    assert answers.steps[0] == 3, "of the first try: the second has no answer"
    assert answers.halt_logits[-1, 0] == -1


@pytest.mark.parametrize("variant", ["mixer", "candidates"])
def test_guesses_do_not_depend_on_the_other_puzzles(variant):
    ours = learner(shape=SAME_TOKENS, **VARIANTS[variant])
    batch = step_batch(shape=SAME_TOKENS)
    ways = {"depth": 12, "tries": 3, "noise": 0.5, "guesses": 4}
    together = ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, **ways)
    for i in range(len(batch.inputs)):
        alone = ours.answerer().answer(batch.inputs[i : i + 1], batch.puzzle_identifiers[i : i + 1], **ways)
        np.testing.assert_array_equal(together.tokens[:, i], alone.tokens[:, 0])


def test_guesses_need_answers_in_the_tokens_of_the_questions():
    batch = step_batch()
    with pytest.raises(ConfigError, match="same tokens"):
        learner().answerer().answer(batch.inputs, batch.puzzle_identifiers, depth=2, tries=2, guesses=1)


def test_a_guess_is_drawn_as_often_as_its_weight_says():
    beliefs = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.9, 0.1]]])
    question = torch.tensor([[1, 0, 0]])
    luck, many = torch.Generator().manual_seed(0), 4000
    drawn = Counter(tuple(with_a_guess(question, beliefs, luck)[0].tolist()) for _ in range(many))
    weights = {(1, 1, 0): 0.125, (1, 2, 0): 0.125, (1, 0, 1): 0.081, (1, 0, 2): 0.009}
    assert drawn.keys() == weights.keys()
    for outcome, weight in weights.items():
        expected = weight / sum(weights.values())
        assert abs(drawn[outcome] / many - expected) < 4 * (expected * (1 - expected) / many) ** 0.5


def test_where_everything_is_certain_nothing_is_guessed():
    question = torch.tensor([[1, 2, 0]])
    certain = torch.nn.functional.one_hot(torch.tensor([[1, 2, 2]]), 3).float()
    assert (with_a_guess(question, certain, torch.Generator().manual_seed(0)) == question).all()
