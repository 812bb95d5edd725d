"""The PyTorch model against the plain NumPy reference, for every variant."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import recursion
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config

from macbook_optimization.errors import ConfigError
from trm.backends.base import StepSettings
from trm.backends.pytorch.layers import by_convolution, by_shifts, truncated_normal
from trm.backends.pytorch.losses import log_stablemax, probabilities, token_losses
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.tasks.base import DataSpec, GridLayout

CYCLES = 2
TESTS = Path(__file__).parents[2]
BFLOAT16 = """
from tiny import make_batch, make_learner, model_config
from trm.backends.base import StepSettings
for dtype in ("float32", "bfloat16"):
    config = model_config(mixer="mlp", pos_encodings="none", hidden_size=16, forward_dtype=dtype)
    print(make_learner(config).step(make_batch(), StepSettings(1, 2, 0.0, 0.0), lambda done: 6).loss)
"""


def settings(**changes):
    values = {"step": 1, "cycles": CYCLES, "learning_rate": 0.0, "puzzle_emb_lr": 0.0}
    return StepSettings(**{**values, **changes})


def randomized(model: TinyRecursiveModel) -> TinyRecursiveModel:
    """Draw the weights that are zero in a new model: the halting head and the puzzle embedding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.q_head.weight.normal_(0, 0.5, generator=generator)
        model.q_head.bias.normal_(0, 0.5, generator=generator)
        if model.config.puzzle_emb_ndim:
            model.puzzle_emb.weights.normal_(0, 0.5, generator=generator)
    return model


def in_numpy(model: TinyRecursiveModel) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def random_latents(model: TinyRecursiveModel, num_slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(model.start(num_slots).shape, generator=generator)


def per_slot(latents: torch.Tensor) -> list[list[np.ndarray]]:
    return [[latent[:, slot].double().numpy() for latent in latents] for slot in range(latents.shape[2])]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_pass_equals_the_reference(variant):
    model = randomized(TinyRecursiveModel(model_config(**VARIANTS[variant]), SPEC, seed=3))
    batch, weights = make_batch(), in_numpy(model)
    latents = random_latents(model, 6)
    rows = model.puzzle_emb.weights[batch.puzzle_identifiers] if model.config.puzzle_emb_ndim else None
    new = model(torch.from_numpy(batch.inputs), rows, latents, CYCLES).detach()
    logits = model.token_logits(model.answer_positions(new[0])).detach().numpy()
    halting = model.halt_logits(new[0]).detach().numpy()
    for slot, state in enumerate(per_slot(latents)):
        expected = recursion.supervise(
            batch.inputs[slot], batch.puzzle_identifiers[slot], state, weights, model.config, CYCLES
        )
        np.testing.assert_allclose(np.stack(expected[0]), new[:, :, slot], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(expected[1], logits[slot], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(expected[2], halting[slot], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "loss"),
    [*((name, "stablemax_cross_entropy") for name in VARIANTS), ("mixer", "softmax_cross_entropy")],
)
def test_loss_and_gradients_equal_the_reference(variant, loss):
    training = training_config(loss=loss)
    learner = make_learner(model_config(**VARIANTS[variant]), training, seed=3)
    model = randomized(learner.model)
    learner.latents = random_latents(model, 6)
    batch, weights, config = make_batch(), in_numpy(model), model.config
    starts = per_slot(torch.where(torch.from_numpy(batch.fresh)[:, None], model.start(6), learner.latents))

    def loss_of(moved):
        arrays = (batch.inputs, batch.labels, batch.puzzle_identifiers)
        return recursion.batch_loss(arrays, starts, moved, config, training, CYCLES, frozen=weights)

    result = learner.step(batch, settings(), lambda done: 6)
    assert result.loss == pytest.approx(loss_of(weights), rel=1e-5)
    rng = np.random.default_rng(4)
    for name, parameter in model.named_parameters():
        indices = [tuple(rng.integers(parameter.shape)) for _ in range(3)]
        expected = recursion.gradient(loss_of, weights, name, indices)
        found = [float(parameter.grad[index]) for index in indices]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6, err_msg=name)


def test_a_row_without_labels_has_a_halting_loss_only_and_is_not_exact():
    """Its prediction cannot be right, so the halting head learns not to be confident in it."""
    training = training_config()
    learner = make_learner(training=training, seed=3)
    model, batch = randomized(learner.model), make_batch()
    batch.labels[2] = -100
    starts, weights = per_slot(model.start(6)), in_numpy(model)
    arrays = (batch.inputs, batch.labels, batch.puzzle_identifiers)
    expected = recursion.batch_loss(arrays, starts, weights, model.config, training, CYCLES)
    result = learner.step(replace(batch, fresh=np.ones(6, dtype=bool)), settings(), lambda done: 6)
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert not result.exact[2]


@pytest.mark.slow
def test_the_sign_of_its_gradient_moves_each_puzzle_row():
    config = model_config(puzzle_emb_ndim=12, puzzle_emb_len=2)
    training = training_config(puzzle_emb_weight_decay=0.5)
    learner = make_learner(config, training, seed=3)
    model, batch = randomized(learner.model), make_batch()
    before, weights = model.puzzle_emb.weights.clone(), in_numpy(model)
    learner.step(batch, settings(puzzle_emb_lr=0.1), lambda done: 6)
    arrays = (batch.inputs, batch.labels, batch.puzzle_identifiers)
    starts = per_slot(model.start(6))
    for row in set(batch.puzzle_identifiers.tolist()):
        slope = recursion.gradient(
            lambda moved: recursion.batch_loss(arrays, starts, moved, config, training, CYCLES, weights),
            weights, "puzzle_emb.weights", [(row, column) for column in range(12)],
        )  # fmt: skip
        expected = before[row].numpy() * (1 - 0.1 * 0.5) - 0.1 * np.sign(slope)
        np.testing.assert_allclose(model.puzzle_emb.weights[row], expected, rtol=1e-5)


def test_rows_of_puzzles_outside_the_batch_do_not_move():
    learner = make_learner(model_config(puzzle_emb_ndim=8))
    randomized(learner.model)
    batch = make_batch()
    batch.puzzle_identifiers[:] = 1
    before = learner.model.puzzle_emb.weights.clone()
    learner.step(batch, settings(puzzle_emb_lr=0.1), lambda done: 6)
    after = learner.model.puzzle_emb.weights
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("value", [1.0, 0.0, -1.0, 1e4, -1e4])
def test_stablemax_has_finite_gradients_everywhere(value):
    logits = torch.full((1, 3), value, requires_grad=True)
    log_stablemax(logits)[0, 0].backward()
    assert torch.isfinite(logits.grad).all()


def test_probabilities_are_those_of_the_loss():
    logits = torch.tensor([30.0, 20.0, -50.0, -50.0])
    stable = probabilities(logits, "stablemax_cross_entropy")
    soft = probabilities(logits, "softmax_cross_entropy")
    np.testing.assert_allclose(stable[:2], [31 / 52.04, 21 / 52.04], rtol=1e-3)
    assert soft[0] > 0.9999
    for each, loss in ((stable, "stablemax_cross_entropy"), (soft, "softmax_cross_entropy")):
        expected = (-token_losses(logits[None], torch.tensor([1]), loss)).exp()
        np.testing.assert_allclose(each[1], expected[0], rtol=1e-4)


def test_initial_weights_have_the_requested_spread_and_no_tails():
    sample = truncated_normal(200_000, std=0.3, generator=torch.Generator().manual_seed(0))
    assert float(sample.std()) == pytest.approx(0.3, rel=0.01)
    assert float(sample.abs().max()) <= 2 * 0.3 / 0.8796 + 1e-6  # 0.8796: std of a normal truncated at 2


@pytest.mark.parametrize("size", [3, 5])
def test_adding_shifted_copies_equals_the_convolution(size):
    """Copies are added where torch has no fast depthwise convolution, as on a Mac."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(36, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(8, 1, size, size, generator=generator, requires_grad=True)
    results = (by_convolution(x, weight), by_shifts(x, weight))
    torch.testing.assert_close(*results)
    gradients = (torch.autograd.grad(each.square().mean(), (x, weight)) for each in results)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_candidates_give_a_symmetric_copy_of_a_puzzle_the_copied_answer():
    """Rows, columns and digits may be permuted: no layer depends on where a group is."""
    config = model_config(mixer="candidates", pos_encodings="none", hidden_size=16, expansion=4.0)
    six = DataSpec(max_len=36, vocab_size=8, num_outputs=8, layout=GridLayout(6, 6, box=(2, 3)))
    model = TinyRecursiveModel(config, six, seed=1)
    rng = np.random.default_rng(0)
    cells, digits = rng.integers(1, 8, (1, 6, 6)), 2 + rng.permutation(6)
    rows = np.concatenate([2 * band + rng.permutation(2) for band in rng.permutation(3)])
    columns = np.concatenate([3 * stack + rng.permutation(3) for stack in rng.permutation(2)])
    relabelled = np.concatenate([[0, 1], digits])

    def scores(grid):
        with torch.no_grad():
            y_LBD = model(torch.from_numpy(grid.reshape(1, 36)), None, model.start(1), CYCLES)[0]
            found = model.token_logits(model.answer_positions(y_LBD))
            return found.reshape(6, 6, 8).numpy(), model.halt_logits(y_LBD).numpy()

    (plain, halt), (copied, copied_halt) = scores(cells), scores(relabelled[cells][:, rows][:, :, columns])
    np.testing.assert_allclose(copied[..., relabelled], plain[rows][:, columns], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(copied_halt, halt, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_len": 6, "layout": None},
        {"max_len": 36, "layout": GridLayout(6, 6)},
        {"max_len": 36, "layout": GridLayout(6, 6, box=(2, 3))},  # more digits than outputs
    ],
)
def test_candidates_are_for_sudoku_only(changes):
    config = model_config(**VARIANTS["candidates"])
    with pytest.raises(ConfigError, match="is for Sudoku"):
        TinyRecursiveModel(config, replace(SPEC, **changes))


def test_a_neighbourhood_needs_a_square_grid():
    with pytest.raises(ConfigError, match="6 positions do not form one"):
        TinyRecursiveModel(model_config(**VARIANTS["neighbourhood"]), replace(SPEC, max_len=6))


def test_the_token_head_is_applied_to_labelled_positions_only():
    """A classifier is the same model with one labelled position."""
    learner = make_learner()
    seen = []
    compute = learner.model.token_logits
    learner.model.token_logits = lambda positions: seen.append(positions.shape) or compute(positions)
    batch = make_batch()
    batch.labels[:, 1:] = -100
    batch.labels[:, 0] = 2
    learner.step(batch, settings(), lambda done: 6)
    assert seen == [(6, 8)]


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    """In a child process: a CPU that reports instructions it lacks kills it at the first product."""
    child = subprocess.run([sys.executable, "-c", BFLOAT16], capture_output=True, text=True, cwd=TESTS)
    if child.returncode == -signal.SIGILL:
        pytest.skip("this machine cannot multiply in bfloat16")
    assert child.returncode == 0, child.stderr
    wide, narrow = map(float, child.stdout.split())
    assert narrow == pytest.approx(wide, rel=0.02)  # eight bits of mantissa
