"""Test-time search: when a row stops, what a retry changes, and which answer wins."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config

from macbook_optimization.errors import ConfigError
from trm.backends.base import StepOutput
from trm.backends.pytorch.losses import probabilities
from trm.batch import PAD_TOKEN
from trm.config import InferenceConfig, parse_section
from trm.inference.search import Search, with_a_guess
from trm.tasks.base import DataSpec, GridLayout

SAME_TOKENS = DataSpec(
    max_len=4, vocab_size=4, num_outputs=4, num_puzzle_identifiers=3, layout=GridLayout(2, 2, box=(1, 2))
)


def answer(ours, batch, **settings):
    search = Search(ours.predictor(), InferenceConfig(**settings), ours.program.data)
    return search.answer(batch)


def learner(supervision="deep", spec=SPEC, **model):
    return make_learner(model_config(**model), training_config(supervision=supervision), spec)


@pytest.mark.parametrize("converged_after", [None, 1, 2])
def test_an_answer_does_not_depend_on_the_other_rows(converged_after):
    ours = learner("terminal", mixer="mlp", pos_encodings="none")
    batch = make_batch()
    together = answer(ours, batch, depth=6, converged_after=converged_after)
    for i in range(len(batch)):
        alone = answer(ours, batch[i : i + 1], depth=6, converged_after=converged_after)
        np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, i])
        assert alone.steps[0] == together.steps[i]


def test_a_converged_answer_did_not_change_for_the_stated_steps():
    ours = learner("terminal", mixer="mlp", pos_encodings="none")
    batch = make_batch(num_slots=12)
    answers = answer(ours, batch, depth=20, converged_after=2)
    full = answer(ours, batch, depth=20)
    early = np.flatnonzero(answers.steps < 20)
    assert len(early), "no answer converged, so this test shows nothing"
    for i in early:
        last = answers.steps[i] - 1
        assert (answers.tokens[last - 2 : last + 1, i] == answers.tokens[last, i]).all()
        assert (answers.tokens[last:, i] == answers.tokens[last, i]).all()
        np.testing.assert_array_equal(answers.tokens[: last + 1, i], full.tokens[: last + 1, i])
    assert (full.steps == 20).all()


def test_answers_do_not_depend_on_workers():
    ours, batch = learner(), make_batch()
    one = answer(ours, batch, depth=4, converged_after=2)
    ours.reconfigure(replace(ours.execution, workers=2))
    two = answer(ours, batch, depth=4, converged_after=2)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.steps, two.steps)


def test_a_row_stops_when_the_halting_head_is_confident():
    ours, batch = learner(), make_batch()
    head = ours.averaged.q_head
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(2))
    full = answer(ours, batch, depth=10)
    with torch.no_grad():
        head.bias.sub_(float(np.median(full.halt_logits)))
    full = answer(ours, batch, depth=10)
    early = answer(ours, batch, depth=10, halt=True)
    confident = full.halt_logits >= 0
    first = np.where(confident.any(0), confident.argmax(0) + 1, 10)
    np.testing.assert_array_equal(early.steps, first)
    assert len(set(first)) > 1
    for i, steps in enumerate(first):
        np.testing.assert_array_equal(early.tokens[-1, i], full.tokens[steps - 1, i])


def test_the_most_confident_of_several_attempts_wins():
    ours, batch = learner(), make_batch()
    with torch.no_grad():
        ours.averaged.q_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    answers = [answer(ours, batch, depth=3)]
    answers += [answer(ours, batch, depth=3, retries=retries, noise=1.0) for retries in (1, 7)]
    confidence = [each.halt_logits[-1] for each in answers]
    assert (confidence[0] <= confidence[1]).all()
    assert (confidence[1] <= confidence[2]).all()
    assert (confidence[0] < confidence[2]).any()
    alone = answer(ours, batch[2:3], depth=3, retries=7, noise=1.0)
    np.testing.assert_array_equal(alone.tokens[:, 0], answers[2].tokens[:, 2])


@dataclass
class ScriptedPredictor:
    """Gives all rows the halting logit that the script has for each step, and records what it receives.

    `predict` returns probabilities (n, L, V) from the number of the step, over all attempts, and the inputs.
    """

    halt_logits: list[float]
    predict: Callable[[int, np.ndarray], np.ndarray]
    inputs: list[np.ndarray] = field(default_factory=list)  # per step, over all attempts
    attempts: list[tuple[int, float, int]] = field(default_factory=list)  # rows, noise and its seed

    def begin(self, batch, noise=0.0, noise_seed=0):
        self.attempts.append((len(batch), noise, noise_seed))
        self.padding = batch.padding

    def advance(self, rows, inputs, *, probabilities=False):
        step = len(self.inputs)
        self.inputs.append(inputs.copy())
        predicted = self.predict(step, inputs)
        tokens = predicted.argmax(-1)
        if self.padding is not None:
            tokens[self.padding[rows]] = PAD_TOKEN
        halt_logits = np.full(len(rows), self.halt_logits[step], dtype=np.float32)
        return StepOutput(tokens, halt_logits, predicted if probabilities else None)

    def answer(self, batch, **settings):
        return Search(self, InferenceConfig(**settings), SAME_TOKENS).answer(batch)


# The answer is 0, 1, 2, 3 at any step. No guess can restore the givens 3, 0, 1, 2, which are impossible.
CONSTANT = 0.6 * np.eye(4) + 0.4 * np.roll(np.eye(4), 1, axis=1)


def constant(step, inputs):
    return np.broadcast_to(CONSTANT[: inputs.shape[1]], (*inputs.shape, 4)).copy()


def one_row(*tokens):
    return replace(make_batch(num_slots=1, spec=SAME_TOKENS), inputs=np.array([tokens]))


def has_guesses(predictor, batch):
    return [bool((inputs != batch.inputs).any()) for inputs in predictor.inputs]


def test_a_confident_first_attempt_has_no_noise_and_no_guesses_and_is_the_only_one():
    batch = make_batch(spec=SAME_TOKENS)
    predictor = ScriptedPredictor([1.0] * 8, constant)
    answers = predictor.answer(batch, depth=8, converged_after=2, retries=4, noise=1.0, guesses=3)
    assert (answers.steps == 3).all()
    assert predictor.attempts == [(6, 0.0, 0)]
    assert len(predictor.inputs) == 3
    assert not any(has_guesses(predictor, batch))


def test_every_retry_has_noise_of_its_own():
    predictor = ScriptedPredictor([-1.0] * 12, constant)
    predictor.answer(make_batch(spec=SAME_TOKENS), depth=3, retries=3, noise=0.5)
    assert predictor.attempts == [(6, 0.0, 0), (6, 0.5, 1), (6, 0.5, 2), (6, 0.5, 3)]


def test_guesses_are_spread_over_the_depth():
    """One alternative per position is as likely as the present token, so every guess adds a position."""
    batch = make_batch(spec=SAME_TOKENS)
    alternative = np.eye(4)[(batch.inputs + 1) % 4]
    predictor = ScriptedPredictor([-1.0] * 28, lambda step, inputs: (alternative + np.eye(4)[inputs]) / 2)
    predictor.answer(batch, depth=14, retries=1, guesses=3)
    changed = [(inputs != batch.inputs).sum(-1) for inputs in predictor.inputs]
    assert all((count == 0).all() for count in changed[:14]), "the first attempt has no guesses"
    retry = changed[14:]
    expected = [0] * 3 + [1] * 3 + [2] * 3 + [3] * 5
    assert len(retry) == len(expected)
    for count, guesses in zip(retry, expected, strict=True):
        assert (count == guesses).all()


def test_a_later_guess_may_replace_an_earlier_one():
    """Only one position is uncertain, and its given token is impossible: the guess there changes."""
    batch = one_row(0, 1, 2, 3)
    uncertain = np.eye(4)
    uncertain[0] = [0.0, 0.5, 0.5, 0.0]
    predictor = ScriptedPredictor([-1.0] * 28, lambda step, inputs: uncertain[None].copy())
    predictor.answer(batch, depth=14, retries=1, guesses=3)
    retry = np.concatenate(predictor.inputs[14:])
    assert (retry[:, 1:] == [1, 2, 3]).all()
    first, second, third = retry[3, 0], retry[6, 0], retry[9, 0]
    assert {first, second} == {1, 2}
    assert third == first


def test_an_answer_found_by_guesses_must_be_stable_without_them():
    batch = one_row(3, 0, 1, 2)
    predictor = ScriptedPredictor([-1.0] * 3 + [-1.0] * 4 + [1.0] * 3, constant)
    answers = predictor.answer(batch, depth=9, converged_after=2, retries=1, guesses=2)
    assert has_guesses(predictor, batch)[3:] == [False, False, True, True, True, False, False]
    assert answers.steps[0] == 7


def test_an_answer_that_is_unstable_without_its_guesses_is_discarded():
    batch = one_row(3, 0, 1, 2)
    predictor = ScriptedPredictor([-1.0] * 3 + [-1.0] * 4 + [1.0] + [-1.0] * 7, constant)
    answers = predictor.answer(batch, depth=12, converged_after=2, retries=1, guesses=3)
    assert has_guesses(predictor, batch)[3:] == [False] * 2 + [True] * 3 + [False] + [True] * 6
    assert answers.steps[0] == 3, "the steps of the first attempt, because the retry has no answer"
    assert answers.halt_logits[-1, 0] == -1


def test_a_retry_must_keep_the_givens_that_the_first_answer_kept():
    """The first answer repeats the question; then the head is confident in one that does not."""
    batch = one_row(0, 1, 2, 3)
    others = np.roll(CONSTANT, 1, axis=0)
    predictor = ScriptedPredictor(
        [-1.0] * 3 + [1.0] * 9, lambda step, inputs: (CONSTANT if step < 3 else others)[None].copy()
    )
    answers = predictor.answer(batch, depth=9, converged_after=2, retries=1, guesses=2)
    assert len(predictor.inputs) == 3 + 9, "no answer of the retry counts as stable"
    np.testing.assert_array_equal(answers.tokens[-1], batch.inputs)


def test_probabilities_are_those_of_the_attempt_that_wins():
    batch = make_batch(spec=SAME_TOKENS)
    halt_logits = [-1.0] * 2 + [1.0] * 2 + [0.5] * 2
    predictor = ScriptedPredictor(halt_logits, lambda step, inputs: constant(step, inputs) + step)
    search = Search(predictor, InferenceConfig(depth=2, retries=2, noise=1.0), SAME_TOKENS)
    final = search.answer(batch, probabilities=True).final()
    np.testing.assert_allclose(final.probabilities, constant(3, batch.inputs) + 3, rtol=1e-6)
    assert (final.halt_logits == 1.0).all()


def test_probabilities_are_returned_on_request_only():
    predictor = ScriptedPredictor([-1.0] * 16, constant)
    settings = {"depth": 8, "retries": 1, "guesses": 1}  # guesses need probabilities themselves
    assert predictor.answer(make_batch(spec=SAME_TOKENS), **settings).probabilities is None


def padded(width, *lengths):
    """Return rows of threes with these lengths."""
    batch = make_batch(num_slots=len(lengths), spec=SAME_TOKENS)
    batch = replace(batch, inputs=np.full((len(lengths), width), 3), lengths=np.array(lengths))
    return replace(batch, inputs=np.where(batch.padding, PAD_TOKEN, batch.inputs))


def test_nothing_is_guessed_at_padded_positions():
    batch = padded(4, 1, 2, 3, 4)
    predictor = ScriptedPredictor([-1.0] * 200, constant)
    predictor.answer(batch, depth=10, retries=9, guesses=4)
    inputs = np.stack(predictor.inputs)
    changed = (inputs != batch.inputs).any(0)
    np.testing.assert_array_equal(changed, ~batch.padding)


def test_the_guesses_of_a_row_do_not_depend_on_the_width_of_its_batch():
    """A longer row in the same batch makes it wider."""
    narrow, wide = ScriptedPredictor([-1.0] * 60, constant), ScriptedPredictor([-1.0] * 60, constant)
    for predictor, batch in ((narrow, padded(2, 2)), (wide, padded(4, 2, 4))):
        predictor.answer(batch, depth=12, retries=4, guesses=4)
    assert any(has_guesses(narrow, padded(2, 2)))
    for in_narrow, in_wide in zip(narrow.inputs, wide.inputs, strict=True):
        np.testing.assert_array_equal(in_wide[0, :2], in_narrow[0])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixer", "candidates"])
def test_guesses_do_not_depend_on_the_other_rows_or_on_workers(variant, float64):
    ours = learner("terminal", spec=SAME_TOKENS, **VARIANTS[variant])
    batch = make_batch(num_slots=40, spec=SAME_TOKENS)
    head = ours.averaged.q_head
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(8))
        head.bias.sub_(float(np.quantile(answer(ours, batch, depth=20).halt_logits, 0.5)))
    settings = {"depth": 20, "converged_after": 2, "retries": 3, "noise": 2.0, "guesses": 4}
    together = answer(ours, batch, **settings)
    plain = answer(ours, batch, depth=20, converged_after=2)
    by_guesses = np.flatnonzero(together.halt_logits[-1] != plain.halt_logits[-1])
    assert len(by_guesses) >= 3, "too few answers were found by guesses, so this shows little"
    ours.reconfigure(replace(ours.execution, workers=2))
    in_workers = answer(ours, batch, **settings)
    np.testing.assert_array_equal(in_workers.tokens, together.tokens)
    for i in by_guesses:
        alone = answer(ours, batch[i : i + 1], **settings)
        np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, i])
        assert alone.steps[0] == together.steps[i]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"retries": 1}, "the same without noise or guesses"),
        ({"guesses": 2}, "retries must be 1 or more"),
        ({"retries": 1, "guesses": 1, "depth": 9, "converged_after": 4}, "a depth of more than 9"),
    ],
)
def test_settings_without_any_effect_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_section(InferenceConfig, settings, "This")


def test_guesses_need_one_vocabulary_for_inputs_and_answers():
    with pytest.raises(ConfigError, match=r"share one vocabulary.*6 input tokens and 4 outputs"):
        answer(learner(), make_batch(), depth=8, retries=1, guesses=1)


def test_a_guess_is_drawn_with_the_stated_weight():
    """The weight is p^2 (1 - p); the token that is already in the input has none."""
    predicted = np.array([[[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.9, 0.1]]])
    question, many = np.array([[1, 0, 0]]), 4000
    chances = np.random.default_rng(0).standard_exponential((many, 3, 3))
    drawn = Counter(tuple(with_a_guess(question, predicted, each)[0].tolist()) for each in chances)
    weights = {(1, 1, 0): 0.125, (1, 2, 0): 0.125, (1, 0, 1): 0.081, (1, 0, 2): 0.009}
    assert drawn.keys() == weights.keys()
    for outcome, weight in weights.items():
        expected = weight / sum(weights.values())
        assert abs(drawn[outcome] / many - expected) < 4 * (expected * (1 - expected) / many) ** 0.5


def test_a_confident_row_waits_without_guesses_until_its_answer_is_stable():
    """Then no row of the batch guesses, which is not an error."""
    batch = one_row(3, 0, 1, 2)
    predictor = ScriptedPredictor([-1.0] * 8 + [1.0] * 3, constant)
    answers = predictor.answer(batch, depth=8, retries=1, guesses=3)
    assert not any(has_guesses(predictor, batch))
    assert answers.steps[0] == 3


def test_nothing_is_guessed_where_every_prediction_is_certain():
    question = np.array([[1, 2, 0]])
    certain = probabilities(40.0 * torch.eye(3)[[1, 2, 2]][None], "softmax_cross_entropy").numpy()
    chances = np.random.default_rng(0).standard_exponential((3, 3))
    assert (with_a_guess(question, certain, chances)[:, :2] == question[:, :2]).all()
    assert (with_a_guess(np.array([[1, 2, 2]]), certain, chances) == [[1, 2, 2]]).all()
