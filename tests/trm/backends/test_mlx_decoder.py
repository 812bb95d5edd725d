"""The decoder with MLX against PyTorch and plain NumPy: the same weights, losses, gradients and samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import decoder as reference
from test_decoder import KINDS, SETTINGS, SPEC, decoder_config, gradients_of, text_batch, training
from test_decoder import make as make_torch

from macbook_optimization.errors import CheckpointError
from trm.backends.base import Program, SingleProcess
from trm.batch import IGNORE_LABEL
from trm.plan import Execution

mx = pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

from trm.backends.mlx import decoder as module  # noqa: E402 - after the check that MLX is installed
from trm.backends.mlx.device import to_array, to_mlx  # noqa: E402
from trm.backends.mlx.language_model import language_model  # noqa: E402
from trm.backends.mlx.learner import MlxLearner  # noqa: E402
from trm.backends.mlx.step_arrays import StepArrays  # noqa: E402

VARIANTS = {
    **KINDS,
    "dropout": {"dropout": 0.3},
    "recomputed": {"dropout": 0.2},
    "stablemax, smoothing": {},
}
CHANGES = {"stablemax, smoothing": {"loss": "stablemax_cross_entropy", "label_smoothing": 0.1}}
HOW = {"recomputed": {"gradient_checkpointing": "alternate"}}


def make(model=None, changes=None, **execution):
    program = Program(model or decoder_config(), training(**(changes or {})), SPEC)
    how = Execution(**{"backend": "mlx", "device": "cpu", **execution})
    return MlxLearner(program, how, SingleProcess(program.num_slots))


def mlx_gradients(learner, batch):
    """Return the loss and the gradients of one micro-batch with all slots."""
    taken = StepArrays.of(learner, batch).take(slice(0, len(batch)))
    (loss, *_), gradients = learner.plain[1](learner.parameters, taken, learner.training.label_smoothing)
    return float(loss), {name: to_array(each) for name, each in gradients.items()}


def both_after(steps, model, changes, size=4):
    learners = make_torch(model, changes), make(model, changes)
    losses = [
        [
            each.step(text_batch(seed=step), replace(SETTINGS, step=step), lambda done: size).loss
            for step in range(1, steps + 1)
        ]
        for each in learners
    ]
    return *learners, *losses


def arrays_of(learner):
    """Return the state of a learner of either backend."""
    return {
        group: {name: to_array(to_mlx(each)) for name, each in arrays.items()}
        for group, arrays in learner.state().items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_is_the_same_decoder_in_either_backend(dtype):
    config = decoder_config(tie_embeddings=False, weights_dtype=dtype)
    theirs, ours = make_torch(config).model.state_dict(), make(config).weights
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert str(array.dtype).endswith(dtype)
        # Rounding to bfloat16 may turn a difference in the last bit of float32 into one of its own last bit.
        atol, rtol = (1e-8, 1e-6) if dtype == "float32" else (1e-8, 2**-7)
        np.testing.assert_allclose(to_array(array), theirs[name].float().numpy(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", VARIANTS)
def test_loss_and_gradients_equal_those_of_pytorch(kind):
    config = decoder_config(**VARIANTS[kind])
    theirs = make_torch(config, CHANGES.get(kind))
    ours = make(config, CHANGES.get(kind), **HOW.get(kind, {}))
    ours.weights = {name: to_mlx(each) for name, each in theirs.model.state_dict().items()}
    expected_loss, expected = gradients_of(theirs, [6])
    loss, found = mlx_gradients(ours, text_batch())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        assert np.abs(found[name] - gradient.numpy()).max() < 5e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_equals_the_reference(kind):
    config = decoder_config(**KINDS[kind])
    learner = make(config)
    batch = text_batch()
    weights = {name: to_array(each).astype(np.float64) for name, each in learner.weights.items()}
    loss, _ = mlx_gradients(learner, batch)
    assert loss == pytest.approx(reference.loss(batch.inputs, batch.labels, weights, config), abs=1e-6)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (1,) * 6])
def test_the_micro_batch_size_changes_neither_loss_nor_dropout(sizes):
    config = decoder_config(dropout=0.3)
    left = iter(sizes)
    whole = make(config).step(text_batch(), SETTINGS, lambda done: 6)
    split = make(config).step(text_batch(), SETTINGS, lambda done: next(left))
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)


@pytest.mark.parametrize("positions_at_a_time", [1, 7])
def test_the_loss_in_chunks_equals_the_whole(positions_at_a_time, monkeypatch):
    learner = make()
    expected_loss, expected = mlx_gradients(learner, text_batch())
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", positions_at_a_time * SPEC.num_outputs)
    loss, found = mlx_gradients(learner, text_batch())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "adam_atan2", "adafactor"])
def test_twenty_steps_equal_those_of_pytorch(optimizer):
    changes = {"optimizer": optimizer, "ema": True, "ema_rate": 0.9, "max_grad_norm": 1.0}
    theirs, ours, expected, found = both_after(20, decoder_config(dropout=0.1), changes)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for group, arrays in arrays_of(theirs).items():
        for name, array in arrays.items():
            scale = np.abs(array).max()
            np.testing.assert_allclose(arrays_of(ours)[group][name], array, atol=1e-3 * scale)


@pytest.mark.parametrize("kept", [{"weights_dtype": "bfloat16"}, {}])
def test_steps_with_weights_or_moments_in_bfloat16_stay_close_to_pytorch(kept):
    changes = {"optimizer": "adamw", "moments_dtype": "bfloat16"}
    _, _, expected, found = both_after(5, decoder_config(**kept), changes)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_travels_between_backends_bit_for_bit(dtype):
    changes = {"optimizer": "adafactor", "ema": True}
    config = decoder_config(weights_dtype=dtype)
    theirs, ours, *_ = both_after(2, config, changes)
    saved = {group: dict(arrays) for group, arrays in theirs.state().items()}
    ours.load_state(saved)
    for group, arrays in arrays_of(theirs).items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(arrays_of(ours)[group][name], array)


def test_cached_sampling_has_the_logits_of_pytorch():
    theirs = make_torch(decoder_config(num_kv_heads=1))
    program = theirs.program
    model = language_model(program, Execution(backend="mlx"), theirs.model.state_dict())
    tokens = np.random.default_rng(2).integers(0, SPEC.vocab_size, SPEC.max_len + 3)
    expected, found = (
        [each.begin(tokens[:3]), *(each.append(int(token)) for token in tokens[3:])]
        for each in (theirs.language_model(), model)
    )
    np.testing.assert_allclose(np.stack(found), np.stack(expected), atol=1e-5)


def test_losses_of_a_text_are_those_of_pytorch_and_zero_without_a_label():
    theirs = make_torch(decoder_config(dropout=0.3))
    model = language_model(theirs.program, Execution(backend="mlx"), theirs.model.state_dict())
    batch = text_batch()
    losses = model.token_losses(batch)
    np.testing.assert_allclose(losses, theirs.language_model().token_losses(batch), atol=1e-6)
    assert (losses[batch.labels == IGNORE_LABEL] == 0).all()


def test_weights_of_another_model_are_refused():
    wrong = {name: torch.zeros(2) for name in make_torch().model.state_dict()}
    with pytest.raises(CheckpointError, match="do not fit the model"):
        language_model(make_torch().program, Execution(backend="mlx"), wrong)
