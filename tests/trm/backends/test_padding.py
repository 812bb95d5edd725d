"""Rows of different lengths: a padded row is computed as if it were alone and had no padding."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import recursion
from tiny import SPEC, make_learner, model_config, training_config

from macbook_optimization.errors import ConfigError
from trm.backends.base import StepSettings
from trm.batch import IGNORE_LABEL, PAD_TOKEN, Batch
from trm.config import InferenceConfig
from trm.inference.search import Search
from trm.tasks.base import DataSpec

WIDE = DataSpec(max_len=7, vocab_size=6, num_outputs=4, num_puzzle_identifiers=6)
LENGTHS = (7, 1, 3, 5, 2, 7)
ATTENTION = {
    "rotary": {"pos_encodings": "rope"},
    "learned positions": {"pos_encodings": "learned"},
    "no positions": {"pos_encodings": "none"},
    "rotary, puzzle prefix": {"puzzle_emb_ndim": 12, "puzzle_emb_len": 2},
    "learned positions, puzzle prefix": {
        "pos_encodings": "learned", "puzzle_emb_ndim": 12, "puzzle_emb_len": 3,
    },
    "singlez": {"variant": "singlez"},
    "transformer": {"variant": "transformer", "H_layers": 2},
}  # fmt: skip


def padded_batch(lengths=LENGTHS, seed=0):
    """Return fresh rows of random tokens, most of them labelled, each with a puzzle identifier of its own."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    batch = Batch(
        slots=np.arange(count),
        inputs=rng.integers(1, WIDE.vocab_size, (count, WIDE.max_len)),
        labels=rng.integers(0, WIDE.num_outputs, (count, WIDE.max_len)),
        puzzle_identifiers=np.arange(count) % WIDE.num_puzzle_identifiers,
        fresh=np.ones(count, dtype=bool),
        lengths=np.array(lengths),
    )
    batch.labels[:, 1:][rng.random((count, WIDE.max_len - 1)) < 0.2] = IGNORE_LABEL
    batch.inputs[batch.padding] = PAD_TOKEN
    batch.labels[batch.padding] = IGNORE_LABEL
    return batch


def without_padding(batch, row):
    """Return one row of a batch as a batch of its own length, for a learner with one slot."""
    length = int(batch.lengths[row])
    alone = replace(batch[row : row + 1], slots=np.array([0]))
    return replace(alone, inputs=alone.inputs[:, :length], labels=alone.labels[:, :length], lengths=None)


def learner(num_slots, variant="rotary", supervision="deep", execution=None, **training):
    """Return a learner whose halting head and puzzle embedding are not zero, as those of a new model are."""
    config = model_config(**ATTENTION[variant])
    training = training_config(effective_batch_size=num_slots, supervision=supervision, **training)
    ours = make_learner(config, training, WIDE, **(execution or {}))
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(2, config.hidden_size, generator=generator)
    rows = torch.randn(WIDE.num_puzzle_identifiers, config.puzzle_emb_ndim, generator=generator)
    with torch.no_grad():
        for model in (ours.model, ours.averaged):
            model.q_head.weight.copy_(head)
            model.q_head.bias.zero_()
        if config.puzzle_emb_ndim:
            ours.model.puzzle_emb.weights.copy_(rows)  # shared with the averaged model
    return ours


def take_step(ours, batch, step=1, learning_rate=0.0, size=None):
    how = StepSettings(step, 2, learning_rate=learning_rate, puzzle_emb_lr=1e-2)
    return ours.step(batch, how, lambda done: size or len(batch))


def gradients(ours):
    return {name: parameter.grad.clone() for name, parameter in ours.parameters.items()}


def mean_of_rows(batch, variant, weights=None):
    """Return mean loss and mean gradients of rows that are computed alone, without padding."""
    losses, sums = [], {}
    for row in range(len(batch)):
        alone = learner(1, variant)
        if weights is not None:
            alone.model.load_state_dict(weights)
        losses.append(take_step(alone, without_padding(batch, row)).loss)
        for name, gradient in gradients(alone).items():
            sums[name] = sums.get(name, 0) + gradient
    return np.mean(losses), {name: total / len(batch) for name, total in sums.items()}


def assert_same_as_rows_alone(batch, variant, tolerance):
    """Compare losses and gradients, and return the learner and the gradients that were expected."""
    whole = learner(len(batch), variant)
    result = take_step(whole, batch, learning_rate=1e-2)
    loss, expected = mean_of_rows(batch, variant)
    assert result.loss == pytest.approx(loss, abs=tolerance)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=name)
    return whole, expected


@contextmanager
def double_precision():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("variant", ATTENTION)
def test_padding_changes_neither_losses_nor_gradients(variant):
    """Rows alone are computed in float64: in float32, both sides round, which torch 2.2.2 does by 1.1e-6."""
    batch = padded_batch()
    whole = learner(len(batch), variant)
    weights = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    result = take_step(whole, batch)
    with double_precision():
        loss, expected = mean_of_rows(batch, variant, weights)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", ATTENTION)
def test_padding_changes_neither_gradients_nor_updated_weights_in_float64(variant):
    whole, mean_gradients = assert_same_as_rows_alone(padded_batch(), variant, tolerance=1e-14)
    expected = learner(6, variant)
    for name, parameter in expected.parameters.items():
        parameter.grad = mean_gradients[name]
    expected.optimizer.update(1, 1e-2)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(whole.parameters[name], parameter, rtol=0, atol=1e-9, msg=name)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    variant=st.sampled_from(sorted(ATTENTION)),
    lengths=st.lists(st.integers(1, WIDE.max_len), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_rows_of_any_lengths_share_a_batch(variant, lengths, seed):
    with double_precision():
        assert_same_as_rows_alone(padded_batch(lengths, seed), variant, tolerance=1e-13)


@pytest.mark.usefixtures("float64")
def test_padding_does_not_change_the_update_of_puzzle_embeddings():
    """Every row has an identifier of its own, so its update depends on this row only."""
    batch, variant = padded_batch(), "rotary, puzzle prefix"
    whole = learner(6, variant)
    before = whole.model.puzzle_emb.weights.clone()
    take_step(whole, batch)
    assert not torch.equal(whole.model.puzzle_emb.weights, before)
    for row in range(len(batch)):
        alone = learner(1, variant)
        take_step(alone, without_padding(batch, row))
        torch.testing.assert_close(alone.model.puzzle_emb.weights[row], whole.model.puzzle_emb.weights[row])


@pytest.mark.parametrize("variant", ATTENTION)
def test_the_loss_of_padded_rows_equals_the_reference(variant):
    """The NumPy reference receives each row without its padding."""
    batch, ours = padded_batch(), learner(6, variant)
    weights = {name: tensor.double().numpy() for name, tensor in ours.model.state_dict().items()}
    rows = [without_padding(batch, row) for row in range(6)]
    arrays = [row.inputs[0] for row in rows], [row.labels[0] for row in rows], batch.puzzle_identifiers
    starts = [[latent[:, 0].double().numpy() for latent in ours.model.start(1, length)] for length in LENGTHS]
    expected = recursion.batch_loss(arrays, starts, weights, ours.model.config, ours.training, cycles=2)
    assert take_step(ours, batch).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("converged_after", [None, 1])
@pytest.mark.parametrize("variant", ATTENTION)
def test_padding_does_not_change_answers(variant, converged_after, float64):
    """Tokens and halting logits of every step, and the number of steps until an answer has converged."""
    batch, ours = padded_batch(), learner(6, variant, "terminal")
    search = Search(ours.predictor(), InferenceConfig(depth=8, converged_after=converged_after), WIDE)
    together = search.answer(batch, probabilities=True)
    assert (together.tokens[:, batch.padding] == PAD_TOKEN).all()
    for row, length in enumerate(LENGTHS):
        alone = search.answer(without_padding(batch, row), probabilities=True)
        np.testing.assert_array_equal(together.tokens[:, row, :length], alone.tokens[:, 0])
        np.testing.assert_allclose(together.halt_logits[:, row], alone.halt_logits[:, 0], atol=1e-6)
        np.testing.assert_allclose(
            together.probabilities[row, :length], alone.probabilities[0], rtol=0, atol=1e-6
        )
        assert together.steps[row] == alone.steps[0]


def test_some_padded_answers_converge_early():
    """Without this, equal numbers of steps would show little."""
    ours = learner(6, "rotary", "terminal")
    settings = InferenceConfig(depth=8, converged_after=1)
    steps = Search(ours.predictor(), settings, WIDE).answer(padded_batch()).steps
    assert (steps < 8).any()


@pytest.mark.parametrize("variant", ATTENTION)
def test_the_content_of_padded_positions_does_not_matter(variant):
    """Not a single bit changes, in training and in inference."""
    clean, other = padded_batch(), padded_batch()
    rng = np.random.default_rng(5)
    other.inputs[other.padding] = rng.integers(0, WIDE.vocab_size, other.padding.sum())
    other.labels[other.padding] = rng.integers(0, WIDE.num_outputs, other.padding.sum())
    first, second = learner(6, variant), learner(6, variant)
    expected, found = (
        take_step(first, clean, learning_rate=1e-2),
        take_step(second, other, learning_rate=1e-2),
    )
    assert found.loss == expected.loss
    assert found.token_accuracy == expected.token_accuracy
    np.testing.assert_array_equal(found.exact, expected.exact)
    for name, parameter in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], parameter), name
    inference = InferenceConfig(depth=6, converged_after=2)
    answers = [
        Search(ours.predictor(), inference, WIDE).answer(batch)
        for ours, batch in ((first, clean), (second, other))
    ]
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    np.testing.assert_array_equal(answers[0].halt_logits, answers[1].halt_logits)
    np.testing.assert_array_equal(answers[0].steps, answers[1].steps)


def changing_lengths():
    """Yield batches in which slots keep their example for several steps, while the longest row changes."""
    lengths_of_steps = [(7, 2, 3), (3, 2, 3), (3, 2, 5), (1, 2, 5), (1, 2, 1), (6, 2, 7), (6, 1, 7)]
    batch = None
    for number, lengths in enumerate(lengths_of_steps):
        new = padded_batch(lengths, seed=number)
        if batch is not None:
            kept = batch.lengths == new.lengths
            new = replace(
                new,
                fresh=~kept,
                inputs=np.where(kept[:, None], batch.inputs, new.inputs),
                labels=np.where(kept[:, None], batch.labels, new.labels),
            )
        batch = new
        yield batch


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", ["rotary", "learned positions, puzzle prefix", "singlez"])
def test_batches_of_changing_width_carry_the_same_latents(variant):
    trimmed, untrimmed = learner(3, variant), learner(3, variant)
    widths = []
    prefix_len = trimmed.model.config.prefix_len
    for step, batch in enumerate(changing_lengths(), start=1):
        narrow = batch.trimmed(multiple=2)
        widths.append(narrow.inputs.shape[1])
        expected = take_step(untrimmed, batch, step, learning_rate=1e-3)
        found = take_step(trimmed, narrow, step, learning_rate=1e-3)
        assert found.loss == pytest.approx(expected.loss, abs=1e-10)
        for slot, length in enumerate(batch.lengths):
            here = np.s_[:, : prefix_len + length, slot]
            torch.testing.assert_close(trimmed.latents[here], untrimmed.latents[here], rtol=0, atol=1e-10)
    assert widths == [7, 4, 6, 6, 2, 7, 7]
    for name, parameter in untrimmed.parameters.items():
        torch.testing.assert_close(trimmed.parameters[name], parameter, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("saved_after", [1, 2, 4])
def test_a_state_restored_between_widths_continues_to_the_last_bit(saved_after):
    """Also the latents at padded positions, which are saved though nothing depends on them."""
    uninterrupted, restored = learner(3), learner(3)
    for step, batch in enumerate(changing_lengths(), start=1):
        take_step(uninterrupted, batch.trimmed(2), step, learning_rate=1e-3)
        if step > saved_after:
            take_step(restored, batch.trimmed(2), step, learning_rate=1e-3)
            for group, tensors in uninterrupted.state().items():
                for name, tensor in tensors.items():
                    assert torch.equal(restored.state()[group][name], tensor), f"{group} {name} {step}"
        elif step == saved_after:
            saved = {
                group: {name: tensor.clone() for name, tensor in tensors.items()}
                for group, tensors in uninterrupted.state().items()
            }
            restored.load_state(saved)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "execution", [{"gradient_checkpointing": "all"}, {"gradient_checkpointing": "alternate"}, {"workers": 2}]
)
def test_padding_works_with_every_execution(execution):
    batch = padded_batch()
    plain, other = learner(6), learner(6, execution=execution)
    expected, found = take_step(plain, batch), take_step(other, batch, size=4)
    assert found.loss == pytest.approx(expected.loss, abs=1e-14)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(other)[name], gradient, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("lengths", [(7, 1, 3), (7, 7, 7), (5, 1, 3)])
def test_the_compiled_block_is_for_full_rows_only(lengths):
    """It was traced without a mask and for one number of positions."""
    ours = learner(3)
    block, calls = ours.model.L_level, []
    block.compiled = lambda x, angles: calls.append(x.shape) or block.through_layers(x, angles)
    block.compiled_size, block.compiled_threads = 3, torch.get_num_threads()
    batch = padded_batch(lengths)
    take_step(ours, batch.trimmed(1))
    assert not calls
    narrow = replace(batch, inputs=batch.inputs[:, :1], labels=batch.labels[:, :1], lengths=None)
    take_step(ours, narrow)
    assert not calls
    take_step(ours, replace(batch, lengths=None))
    assert calls


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", ["rotary", "learned positions, puzzle prefix", "singlez"])
def test_the_noise_of_a_row_does_not_depend_on_the_width_of_its_batch(variant):
    ours = learner(3, variant)
    full = ours.model.noise(torch.Generator().manual_seed(7))
    for length in (1, 4, 7):
        part = ours.model.noise(torch.Generator().manual_seed(7), length)
        assert part.shape[1] == ours.model.config.prefix_len + length
        assert torch.equal(part, full[:, : part.shape[1]])
    batch = replace(padded_batch((1, 4, 3)), noise_seeds=np.array([3, 1, 4]))
    losses = [
        take_step(learner(3, variant, noise=1.0), each).loss
        for each in (batch, batch.trimmed(1), replace(batch, noise_seeds=None))
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-14)
    assert abs(losses[2] - losses[0]) > 1e-3


@pytest.mark.usefixtures("float64")
def test_retries_with_noise_do_not_depend_on_the_width_of_the_batch():
    ours = learner(6, "rotary", "terminal")
    for model in (ours.model, ours.averaged):
        with torch.no_grad():
            model.q_head.bias.fill_(-20)  # never confident, so that every row is retried
    search = Search(ours.predictor(), InferenceConfig(depth=4, retries=4, noise=2.0), WIDE)
    batch = padded_batch((1, 4, 3))
    first = search.answer(batch).final()
    plain = Search(ours.predictor(), InferenceConfig(depth=4), WIDE).answer(batch).final()
    assert (first.halt_logits > plain.halt_logits).any(), "no retry won, so this shows nothing"
    second = search.answer(batch.trimmed(1)).final()
    np.testing.assert_array_equal(first.tokens[:, :4], second.tokens)
    np.testing.assert_allclose(first.halt_logits, second.halt_logits, rtol=1e-6)


@pytest.mark.parametrize("mixer", ["mlp", "neighbourhood", "candidates"])
def test_mixers_of_fixed_positions_refuse_lengths(mixer):
    config = model_config(mixer=mixer, pos_encodings="none", expansion=4.0)
    ours = make_learner(config, training_config(effective_batch_size=2))
    batch = Batch(
        slots=np.arange(2),
        inputs=np.full((2, 4), 2),
        labels=np.full((2, 4), 2),
        puzzle_identifiers=np.zeros(2, dtype=np.int64),
        fresh=np.ones(2, dtype=bool),
        lengths=np.array([3, 2]),
    )
    for refused in (batch, batch.trimmed(1)):
        with pytest.raises(ConfigError, match=f"model.mixer={mixer}") as in_training:
            take_step(ours, refused)
        assert "attention" in in_training.value.hint
        with pytest.raises(ConfigError, match=f"model.mixer={mixer}"):
            Search(ours.predictor(), InferenceConfig(), SPEC).answer(refused)
    take_step(ours, replace(batch, lengths=None))
