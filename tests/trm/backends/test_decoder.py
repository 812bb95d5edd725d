"""The decoder against plain NumPy, and what must not change what it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import decoder as reference
from tiny import make_learner

from trm.backends.base import Program, StepSettings
from trm.backends.pytorch.language_model import TorchLanguageModel, language_model
from trm.backends.pytorch.losses import decoder_losses
from trm.backends.pytorch.memory import estimate
from trm.backends.pytorch.models import new_model
from trm.backends.sizes import count_weights
from trm.batch import IGNORE_LABEL, Batch
from trm.config import DecoderConfig, TrainingConfig
from trm.plan import Execution
from trm.tasks.base import DataSpec

SPEC = DataSpec(max_len=9, vocab_size=13, num_outputs=13)
SETTINGS = StepSettings(step=1, cycles=1, learning_rate=1e-2, puzzle_emb_lr=0.0)
KINDS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "one key/value head": {"num_kv_heads": 1},
    "as many key/value heads": {"num_kv_heads": None},
}


def decoder_config(**changes):
    small = {"hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24}
    return DecoderConfig.model_validate({**small, **changes})


def training(**changes):
    few = {
        "supervision": "terminal", "optimizer": "adamw", "loss": "softmax_cross_entropy", "ema": False,
        "effective_batch_size": 6, "warmup_steps": 0, "max_steps": 100,
    }  # fmt: skip
    return TrainingConfig.model_validate({**few, **changes})


def text_batch(num_slots=6, seed=0, ignored=True):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, SPEC.vocab_size, (num_slots, SPEC.max_len))
    if ignored:
        labels[1, :4] = IGNORE_LABEL
    return Batch(
        slots=np.arange(num_slots),
        inputs=rng.integers(0, SPEC.vocab_size, (num_slots, SPEC.max_len)),
        labels=labels,
        puzzle_identifiers=np.zeros(num_slots, dtype=np.int64),
        fresh=np.ones(num_slots, dtype=bool),
        noise_seeds=rng.integers(0, 2**62, num_slots),
    )


def make(model=None, changes=None, world=None, **execution):
    chosen = training(**(changes or {}))
    return make_learner(model or decoder_config(), chosen, SPEC, world=world, **execution)


def weights_of(learner):
    return {name: tensor.detach().double().numpy() for name, tensor in learner.model.state_dict().items()}


def gradients_of(learner, sizes, batch=None):
    """Return the loss and the gradients of one step, which changes nothing."""
    sizes = iter(sizes)
    result = learner.step(
        batch or text_batch(), replace(SETTINGS, learning_rate=0.0), lambda done: next(sizes)
    )
    return result.loss, {name: each.grad.clone() for name, each in learner.parameters.items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_equal_the_reference(kind):
    config = decoder_config(**KINDS[kind])
    learner = make(config)
    batch = text_batch()
    found = learner.model.token_logits(learner.model(torch.from_numpy(batch.inputs))).detach().numpy()
    weights = weights_of(learner)
    for row, tokens in enumerate(batch.inputs):
        np.testing.assert_allclose(found[row], reference.logits(tokens, weights, config), atol=1e-6)
    loss, _ = gradients_of(learner, [6])
    assert loss == pytest.approx(reference.loss(batch.inputs, batch.labels, weights, config), abs=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_reference(kind):
    """Rotary angles are float32 in the model, so they and not the differences set the bound."""
    config = decoder_config(**{**KINDS[kind], "num_layers": 2})
    learner = make(config)
    weights = weights_of(learner)
    batch = text_batch(num_slots=2)
    _, found = gradients_of(learner, [2], batch)
    rng = np.random.default_rng(1)
    for name, gradient in found.items():
        place = tuple(rng.integers(0, size) for size in gradient.shape)
        expected = reference.gradient(batch.inputs, batch.labels, weights, config, name, place)
        assert float(3 * gradient[place]) == pytest.approx(expected, abs=2e-7), name  # divided by 6 slots


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (1,) * 6])
def test_the_micro_batch_size_changes_neither_gradient_nor_dropout(sizes):
    config = decoder_config(dropout=0.3)
    expected_loss, expected = gradients_of(make(config), [6])
    loss, found = gradients_of(make(config), sizes)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training_and_not_in_inference():
    without, _ = gradients_of(make(), [6])
    with_dropout, _ = gradients_of(make(decoder_config(dropout=0.3)), [6])
    assert with_dropout != without
    batch = text_batch()
    losses = [
        make(config).language_model().token_losses(batch)
        for config in (decoder_config(), decoder_config(dropout=0.3))
    ]
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize("checkpointing", ["alternate", "all"])
def test_recomputed_layers_change_no_bit(checkpointing):
    config = decoder_config(dropout=0.2)
    plain, recomputing = make(config), make(config, gradient_checkpointing=checkpointing)
    for step in (1, 2, 3):
        losses = [
            each.step(text_batch(seed=step), replace(SETTINGS, step=step), lambda done: 3).loss
            for each in (plain, recomputing)
        ]
        assert losses[0] == losses[1]
    for name, weight in plain.parameters.items():
        assert torch.equal(recomputing.parameters[name], weight)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions_at_a_time", [1, 3, 17])
@pytest.mark.parametrize("ignored", [True, False])
def test_the_loss_in_chunks_equals_the_whole(positions_at_a_time, ignored):
    batch = text_batch(ignored=ignored)
    inputs, labels = torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
    found = []
    for at_a_time in (2**20, positions_at_a_time):
        model = make().model
        hidden = model(inputs)
        losses = decoder_losses(
            model.token_logits, hidden, labels, "softmax_cross_entropy", 0.1, positions_at_a_time=at_a_time
        )
        gradients = torch.autograd.grad(losses.total, list(model.parameters()))
        found.append((losses, gradients))
    (whole, expected), (chunked, gradients) = found
    torch.testing.assert_close(chunked.total, whole.total, rtol=1e-13, atol=0)
    assert torch.equal(chunked.correct_tokens, whole.correct_tokens)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["adamw", "adam_atan2", "adafactor"])
def test_saving_and_loading_continues_bit_for_bit(optimizer):
    changes = {"optimizer": optimizer, "ema": True}

    def take(learner, steps):
        for step in steps:
            learner.step(text_batch(seed=step), replace(SETTINGS, step=step), lambda done: 4)

    whole, first, second = (make(changes=changes) for _ in range(3))
    take(whole, range(1, 8))
    take(first, range(1, 5))
    saved = {
        group: {name: each.clone() for name, each in tensors.items()}
        for group, tensors in first.state().items()
    }
    second.load_state(saved)
    take(second, range(5, 8))
    for group, tensors in whole.state().items():
        for name, tensor in tensors.items():
            assert torch.equal(second.state()[group][name], tensor), (group, name)


def test_the_formula_counts_the_weights_that_are_built():
    for kind in KINDS.values():
        config = decoder_config(**kind)
        model = new_model(Program(config, training(), SPEC))
        assert sum(each.numel() for each in model.parameters()) == count_weights(config, SPEC)


def test_memory_is_estimated_without_allocating_it():
    program = Program(decoder_config(), training(), SPEC)
    none, alternate, every = (
        estimate(program, Execution(gradient_checkpointing=level)) for level in ("none", "alternate", "all")
    )
    assert none.bytes_per_example > alternate.bytes_per_example > every.bytes_per_example > 0


def test_cached_sampling_has_the_logits_of_the_whole_text():
    learner = make()
    model = learner.language_model()
    tokens = np.random.default_rng(2).integers(0, SPEC.vocab_size, SPEC.max_len)
    found = [model.begin(tokens[:3]), *(model.append(int(token)) for token in tokens[3:])]
    with torch.no_grad():
        whole = learner.model.token_logits(learner.model(torch.from_numpy(tokens)[None]))[0].numpy()
    np.testing.assert_allclose(np.stack(found), whole[2:], atol=1e-5)


def test_a_text_longer_than_the_context_continues_from_its_later_half():
    model = make().language_model()
    tokens = np.arange(SPEC.max_len) % SPEC.vocab_size
    model.begin(tokens)
    found = model.append(5)
    again = make().language_model()
    np.testing.assert_array_equal(found, again.begin(np.array([*tokens[SPEC.max_len // 2 + 1 :], 5])))


def test_losses_of_a_text_are_those_of_training():
    learner = make()
    batch = text_batch()
    losses = learner.language_model().token_losses(batch)
    counts = (batch.labels != IGNORE_LABEL).sum(1)
    loss, _ = gradients_of(learner, [6])
    assert (losses.sum(1) / counts).mean() == pytest.approx(loss, rel=1e-5)
    assert (losses[batch.labels == IGNORE_LABEL] == 0).all()


def test_a_saved_model_is_loaded_for_inference():
    learner = make()
    program = learner.program
    loaded = language_model(program, Execution(), learner.model.state_dict())
    assert isinstance(loaded, TorchLanguageModel)
    batch = text_batch()
    np.testing.assert_array_equal(loaded.token_losses(batch), learner.language_model().token_losses(batch))
