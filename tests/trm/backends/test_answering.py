"""Answers: when a puzzle is done, and how it is tried again."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import SHAPE, VARIANTS, model_config, step_batch, training_config

from macbook_optimization.errors import ConfigError
from trm.backends.pytorch.answering import with_a_guess
from trm.backends.pytorch.losses import beliefs, token_losses
from trm.backends.pytorch.step import TorchLearner
from trm.config import EvaluationConfig, parse_section
from trm.tasks.base import TaskShape


def think(ours, batch, **ways):
    return ours.answerer().answer(batch.inputs, batch.puzzle_identifiers, EvaluationConfig(**ways))


def learner(supervision="deep", shape=SHAPE, **model):
    return TorchLearner(model_config(**model), training_config(supervision=supervision), shape, seed=0)


@pytest.mark.parametrize("settle", [None, 1, 2])
def test_an_answer_does_not_depend_on_the_other_puzzles(settle):
    answerer = learner("terminal", mlp_t=True, pos_encodings="none").answerer()
    batch = step_batch()
    together = answerer.answer(
        batch.inputs, batch.puzzle_identifiers, EvaluationConfig(depth=6, settle=settle)
    )
    for i in range(len(batch.inputs)):
        alone = answerer.answer(
            batch.inputs[i : i + 1], batch.puzzle_identifiers[:1], EvaluationConfig(depth=6, settle=settle)
        )
        np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, i])
        assert alone.steps[0] == together.steps[i]


def test_a_settled_answer_stood_still():
    answerer = learner("terminal", mlp_t=True, pos_encodings="none").answerer()
    batch = step_batch(num_slots=12)
    answers = answerer.answer(batch.inputs, batch.puzzle_identifiers, EvaluationConfig(depth=20, settle=2))
    full = answerer.answer(batch.inputs, batch.puzzle_identifiers, EvaluationConfig(depth=20))
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
    one = think(ours, batch, depth=4, settle=2)
    ours.set_lanes(2)
    two = think(ours, batch, depth=4, settle=2)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.steps, two.steps)


def test_a_puzzle_leaves_when_the_halting_head_believes_in_its_answer():
    ours, batch = learner(), step_batch()
    head = ours.averaged.q_head
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(2))
    full = think(ours, batch, depth=10)
    with torch.no_grad():
        head.bias.sub_(float(np.median(full.halt_logits)))
    full = think(ours, batch, depth=10)
    early = think(ours, batch, depth=10, halt=True)
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
        answerer.answer(
            batch.inputs, batch.puzzle_identifiers, EvaluationConfig(depth=3, tries=tries, noise=1.0)
        )
        for tries in (1, 2, 8)
    ]
    believed = [each.halt_logits[-1] for each in answers]
    assert (believed[0] <= believed[1]).all()
    assert (believed[1] <= believed[2]).all()
    assert (believed[0] < believed[2]).any()
    alone = answerer.answer(
        batch.inputs[2:3], batch.puzzle_identifiers[2:3], EvaluationConfig(depth=3, tries=8, noise=1.0)
    )
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
    answers = think(ours, batch, depth=8, settle=2, tries=5, noise=1.0, guesses=3)
    assert (answers.steps == 3).all()
    assert len(asked) == 3
    assert all((inputs.numpy() == batch.inputs).all() for inputs in asked)


def test_guesses_are_spread_over_the_depth(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(shape=SAME_TOKENS)
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 28)
    think(ours, batch, depth=14, tries=2, guesses=3)
    changed = [(inputs.numpy() != batch.inputs).sum(-1) for inputs in asked]
    assert all((count == 0).all() for count in changed[:14]), "the first try"
    second = changed[14:]
    assert all((count == 0).all() for count in second[:3])
    assert all((count == 1).all() for count in second[3:6])
    for most, steps in ((2, second[6:9]), (3, second[9:])):
        assert all(((count >= 1) & (count <= most)).all() for count in steps), "one may replace another"


def test_an_answer_found_by_guesses_must_stand_without_them(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(num_slots=1, shape=SAME_TOKENS)
    always_the_same(monkeypatch, ours.averaged)
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 3 + [-1.0] * 4 + [1.0] * 3)
    answers = think(ours, batch, depth=9, settle=2, tries=2, guesses=2)
    guessed = [bool((inputs.numpy() != batch.inputs).any()) for inputs in asked]
    assert guessed[3:] == [False, False, True, True, True, False, False]
    assert answers.steps[0] == 7


def test_an_answer_that_falls_with_its_guesses_is_none(monkeypatch):
    ours, batch = learner(shape=SAME_TOKENS), step_batch(num_slots=1, shape=SAME_TOKENS)
    always_the_same(monkeypatch, ours.averaged)
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 3 + [-1.0] * 4 + [1.0] + [-1.0] * 7)
    answers = think(ours, batch, depth=12, settle=2, tries=2, guesses=3)
    guessed = [bool((inputs.numpy() != batch.inputs).any()) for inputs in asked]
    assert guessed[3:] == [False] * 2 + [True] * 3 + [False] + [True] * 6
    assert answers.steps[0] == 3, "of the first try: the second has no answer"
    assert answers.halt_logits[-1, 0] == -1


def test_what_the_first_answer_kept_of_a_question_must_be_kept(monkeypatch):
    """The first answer gives the question back; then the head believes in one that does not."""
    ours = learner(shape=SAME_TOKENS)
    batch = replace(step_batch(num_slots=1, shape=SAME_TOKENS), inputs=np.array([[0, 1, 2, 3]]))
    asked = believing(monkeypatch, ours.averaged, logits=[-1.0] * 3 + [1.0] * 9)
    others = torch.eye(4).roll(1, dims=0)
    monkeypatch.setattr(
        ours.averaged, "token_logits", lambda y: (torch.eye(4) if len(asked) <= 3 else others).expand(1, 4, 4)
    )
    answers = think(ours, batch, depth=9, settle=2, tries=2, guesses=2)
    assert len(asked) == 3 + 9, "nothing stands in the second try"
    np.testing.assert_array_equal(answers.tokens[-1], batch.inputs)


@pytest.mark.parametrize("variant", ["mixer", "candidates"])
def test_guesses_do_not_depend_on_the_other_puzzles_or_lanes(variant, float64):
    ours = learner("terminal", shape=SAME_TOKENS, **VARIANTS[variant])
    batch = step_batch(num_slots=40, shape=SAME_TOKENS)
    head = ours.averaged.q_head
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(2))
        head.bias.sub_(float(np.quantile(think(ours, batch, depth=20).halt_logits, 0.7)))
    ways = {"depth": 20, "settle": 2, "tries": 4, "noise": 2.0, "guesses": 4}
    together = think(ours, batch, **ways)
    plain = think(ours, batch, depth=20, settle=2)
    by_guesses = np.flatnonzero(together.halt_logits[-1] != plain.halt_logits[-1])
    assert len(by_guesses) >= 3, "too few answers came of guesses, so this shows little"
    ours.set_lanes(2)
    in_lanes = think(ours, batch, **ways)
    np.testing.assert_array_equal(in_lanes.tokens, together.tokens)
    for i in by_guesses:
        one = slice(i, i + 1)
        alone = ours.answerer().answer(
            batch.inputs[one], batch.puzzle_identifiers[one], EvaluationConfig(**ways)
        )
        np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, i])
        assert alone.steps[0] == together.steps[i]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"tries": 2}, "the same without noise or guesses"),
        ({"guesses": 2}, "tries must be 2 or more"),
        ({"tries": 2, "guesses": 1, "depth": 9, "settle": 4}, "a depth of more than 9"),
    ],
)
def test_what_would_do_nothing_is_refused(asked, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_section(EvaluationConfig, asked, "This")


def test_guesses_need_answers_in_the_tokens_of_the_questions():
    batch = step_batch()
    with pytest.raises(ConfigError, match="same tokens"):
        learner().answerer().answer(
            batch.inputs, batch.puzzle_identifiers, EvaluationConfig(depth=8, tries=2, guesses=1)
        )


def test_a_guess_is_drawn_as_often_as_its_weight_says():
    beliefs_BLV = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.9, 0.1]]])
    question, many = torch.tensor([[1, 0, 0]]), 4000
    chances = torch.empty(many, 3, 3).exponential_(generator=torch.Generator().manual_seed(0))
    drawn = Counter(tuple(with_a_guess(question, beliefs_BLV, each)[0].tolist()) for each in chances)
    weights = {(1, 1, 0): 0.125, (1, 2, 0): 0.125, (1, 0, 1): 0.081, (1, 0, 2): 0.009}
    assert drawn.keys() == weights.keys()
    for outcome, weight in weights.items():
        expected = weight / sum(weights.values())
        assert abs(drawn[outcome] / many - expected) < 4 * (expected * (1 - expected) / many) ** 0.5


def test_where_everything_is_certain_nothing_is_guessed():
    question = torch.tensor([[1, 2, 0]])
    certain = beliefs(40.0 * torch.eye(3)[[1, 2, 2]][None], "softmax_cross_entropy")
    chances = torch.empty(3, 3).exponential_(generator=torch.Generator().manual_seed(0))
    assert (with_a_guess(question, certain, chances)[:, :2] == question[:, :2]).all()
    assert (with_a_guess(torch.tensor([[1, 2, 2]]), certain, chances) == torch.tensor([[1, 2, 2]])).all()


def test_beliefs_are_as_the_loss_understood_them():
    logits = torch.tensor([30.0, 20.0, -50.0, -50.0])
    stable, soft = beliefs(logits, "stablemax_cross_entropy"), beliefs(logits, "softmax_cross_entropy")
    np.testing.assert_allclose(stable[:2], [31 / 52.04, 21 / 52.04], rtol=1e-3)
    assert soft[0] > 0.9999
    for each, loss in ((stable, "stablemax_cross_entropy"), (soft, "softmax_cross_entropy")):
        expected = (-token_losses(logits[None], torch.tensor([1]), loss)).exp()
        np.testing.assert_allclose(each[1], expected[0], rtol=1e-4)
