"""A training step with MLX against PyTorch: the same losses, gradients, updates and answers."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import thread_worlds, together
from test_padding import WIDE, padded_batch
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config
from twins import assert_same_state, in_mlx, numbers, puzzle_row_gradient, twins

from macbook_optimization.checkpoint_files import open_checkpoint, write_checkpoint
from macbook_optimization.children import ChildDied, run_in_child
from macbook_optimization.errors import AllocationFailed, CheckpointError, ConfigError, NonFiniteError
from trm.backends.base import StepSettings
from trm.backends.failures import allocations
from trm.batch import IGNORE_LABEL
from trm.config import InferenceConfig, RunConfig
from trm.inference.search import Search

mx = pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

TESTS = Path(__file__).parents[2]
MANY = [
    "mixer",
    "attention, rotary",
    "attention, puzzle prefix",
    "neighbourhood",
    "candidates",
    "transformer",
]


def settings(step=1, cycles=2, rate=1e-2, **changes):
    return StepSettings(step, cycles, rate, rate, **changes)


def both_step(theirs, ours, batch=None, how=None, size=4):
    """Take the same step in both backends, and return their results."""
    batch = make_batch() if batch is None else batch
    how = how or settings()
    return theirs.step(batch, how, lambda done: size), ours.step(batch, how, lambda done: size)


def gradients(learner):
    """Return the gradients of the first step: a moment starts at zero, so it is a share of them."""
    beta1 = learner.training.beta1
    moments = learner.state()["optimizer"]
    return {
        name.removesuffix(".exp_avg"): numbers(moment) / (1 - beta1)
        for name, moment in moments.items()
        if name.endswith(".exp_avg")
    }


def assert_same_gradients(ours, theirs, relative=5e-5):
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        worst = np.abs(found[name] - gradient).max()
        assert worst <= relative * np.abs(gradient).max() + 1e-9, f"{name}: {worst:.1e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_is_the_same_model_in_both_backends(variant):
    theirs = make_learner(model_config(**VARIANTS[variant]), seed=7)
    from trm.backends.mlx.learner import MlxLearner

    ours = MlxLearner(theirs.program, replace(theirs.execution, backend="mlx"), theirs.world)
    assert_same_state(ours, theirs, relative=3e-7)


@pytest.mark.parametrize(
    ("variant", "loss"),
    [*((name, "stablemax_cross_entropy") for name in VARIANTS), ("mixer", "softmax_cross_entropy")],
)
def test_loss_and_gradients_equal_those_of_pytorch(variant, loss):
    theirs, ours = twins(model_config(**VARIANTS[variant]), training_config(loss=loss))
    expected, found = both_step(theirs, ours, how=settings(rate=0.0))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=5e-5)
    assert found.token_accuracy == expected.token_accuracy
    np.testing.assert_array_equal(found.exact, expected.exact)
    np.testing.assert_allclose(found.halt_margins, expected.halt_margins, atol=1e-5)
    assert_same_gradients(ours, theirs)
    np.testing.assert_allclose(
        numbers(ours.state()["latents"]["latents"]), numbers(theirs.state()["latents"]["latents"]), atol=1e-4
    )


@pytest.mark.parametrize("variant", ["mixer, puzzle prefix", "attention, puzzle prefix"])
def test_gradients_of_puzzle_embeddings_equal_those_of_pytorch(variant):
    from trm.backends.mlx.model import PUZZLE_ROWS
    from trm.backends.mlx.step_arrays import StepArrays

    theirs, ours = twins(model_config(**VARIANTS[variant]))
    batch = make_batch()
    expected = numbers(puzzle_row_gradient(theirs, batch, settings(cycles=1)))
    arrays = StepArrays.of(ours, batch)
    rows = ours.weights[PUZZLE_ROWS][mx.array(arrays.row_ids.astype(np.int32))]
    _, found = ours.plain[1]({**ours.parameters, PUZZLE_ROWS: rows}, arrays.take(slice(0, 6)), 0.0)
    assert np.abs(expected).max() > 0
    assert np.abs(numbers(found[PUZZLE_ROWS]) - expected).max() <= 5e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_of_terminal_supervision_stay_together(variant):
    training = training_config(supervision="terminal", learning_rate=1e-3)
    theirs, ours = twins(model_config(**VARIANTS[variant]), training)
    for step in range(1, 21):
        batch = replace(make_batch(seed=step), noise_seeds=np.arange(6) + step)
        expected, found = both_step(theirs, ours, batch, settings(step, cycles=1 + step % 3, rate=1e-3))
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 0.05},
        {"label_smoothing": 0.2},
        {"label_smoothing": 0.2, "loss": "softmax_cross_entropy"},
        {"noise": 0.5},
        {"halt_loss_weight": 0.0, "ema": False},
        {"weight_decay": 0.5, "puzzle_emb_weight_decay": 0.5},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_settings_of_the_objective_act_as_in_pytorch(changes):
    theirs, ours = twins(model_config(puzzle_emb_ndim=8), training_config(**changes))
    for step in (1, 2):
        batch = replace(make_batch(seed=step), weights=np.linspace(0.5, 2, 6))
        if changes.get("noise"):
            batch = replace(batch, noise_seeds=np.arange(6) + 2**40)
        expected, found = both_step(theirs, ours, batch, settings(step))
        assert found.loss == pytest.approx(expected.loss, rel=2e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=5e-5)
    assert_same_state(ours, theirs, relative=2e-4)


def test_smoothing_of_a_phase_replaces_that_of_the_recipe():
    theirs, ours = twins(training=training_config(label_smoothing=0.3))
    expected, found = both_step(theirs, ours, how=settings(label_smoothing=0.0))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("moments_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam_atan2", "muon", "adafactor"])
def test_every_optimizer_updates_as_in_pytorch(optimizer, moments_dtype):
    training = training_config(optimizer=optimizer, moments_dtype=moments_dtype, supervision="terminal")
    theirs, ours = twins(training=training)
    for step in range(1, 6):
        both_step(theirs, ours, make_batch(seed=step), settings(step))
    # A moment on the edge between two bfloat16 numbers may be rounded to either, 1/256 apart.
    assert_same_state(ours, theirs, relative=1e-4 if moments_dtype == "float32" else 1 / 128, absolute=2e-9)


@pytest.mark.parametrize(
    "model",
    [
        {"pos_encodings": "rope"},
        {"pos_encodings": "learned", "puzzle_emb_ndim": 12, "puzzle_emb_len": 3},
        {"pos_encodings": "rope", "attention_window": 1},
        {"pos_encodings": "none", "attention_window": 2, "puzzle_emb_ndim": 8, "puzzle_emb_len": 0},
    ],
    ids=str,
)
def test_rows_of_different_lengths_are_computed_as_in_pytorch(model):
    theirs, ours = twins(model_config(**model), training_config(noise=0.1), WIDE)
    for step in (1, 2):
        batch = replace(padded_batch(seed=step), noise_seeds=np.arange(6))
        batch.fresh[1:3] = step == 1
        expected, found = both_step(theirs, ours, batch, settings(step))
        assert found.loss == pytest.approx(expected.loss, rel=2e-6)
        np.testing.assert_allclose(found.halt_margins, expected.halt_margins, atol=2e-5)
    assert_same_state(ours, theirs, relative=2e-4)


def test_the_head_is_applied_to_labelled_positions_where_they_are_few():
    """A classifier is the same model with one labelled position."""
    from trm.backends.mlx.step_arrays import StepArrays

    theirs, ours = twins()
    batch = make_batch()
    batch.labels[:, 1:] = IGNORE_LABEL
    batch.labels[:, 0] = 2
    assert StepArrays.of(ours, batch).take(slice(0, 6)).labels.shape == (6, 1)
    expected, found = both_step(theirs, ours, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert_same_gradients(ours, theirs)


def test_a_row_without_labels_is_not_exact_in_either_backend():
    theirs, ours = twins()
    batch = make_batch()
    batch.labels[2] = IGNORE_LABEL
    expected, found = both_step(theirs, ours, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert not found.exact[2]


@pytest.mark.parametrize("loss", ["stablemax_cross_entropy", "softmax_cross_entropy"])
@pytest.mark.parametrize("value", [1.0, 0.0, -1.0, 1e4, -1e4])
def test_losses_have_finite_gradients_everywhere(loss, value):
    from trm.backends.mlx.losses import token_losses

    labels = mx.array([0, IGNORE_LABEL])
    gradient = mx.grad(lambda logits: token_losses(logits, labels, loss).sum())(mx.full((2, 3), value))
    assert bool(mx.isfinite(gradient).all())
    assert not np.array(gradient)[1].any(), "a position without a label has no gradient"


@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("size", [5, 4, 1])
def test_the_micro_batch_size_does_not_change_the_step(variant, size):
    config = model_config(**VARIANTS[variant])
    theirs, whole = twins(config)
    split = in_mlx(theirs)
    expected = whole.step(make_batch(), settings(), lambda done: 6)
    result = split.step(make_batch(), settings(), lambda done: size)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert_same_state(split, whole, relative=2e-4, absolute=1e-6)


@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("checkpointing", ["alternate", "all"])
def test_recomputed_layers_give_the_same_step(variant, checkpointing):
    theirs, plain = twins(model_config(**VARIANTS[variant]))
    recomputing = in_mlx(theirs, gradient_checkpointing=checkpointing)
    results = [each.step(make_batch(), settings(), lambda done: 6) for each in (plain, recomputing)]
    assert results[0].loss == results[1].loss
    assert_same_state(recomputing, plain, relative=1e-5)


def test_an_interrupted_step_has_not_happened():
    theirs, ours = twins(model_config(puzzle_emb_ndim=8))
    untouched = in_mlx(theirs)

    def stop(done):
        if done >= 4:
            raise KeyboardInterrupt
        return 2

    with pytest.raises(KeyboardInterrupt):
        ours.step(make_batch(), settings(), stop)
    assert_same_state(ours, untouched, relative=0)
    for each in (ours, untouched):
        each.step(make_batch(), settings(), lambda done: 6)
    assert_same_state(ours, untouched, relative=0)


def test_a_loss_of_nan_leaves_the_state_unchanged_and_says_what_pytorch_says():
    _, ours = twins()
    ours.weights["lm_head.weight"] = mx.full(ours.weights["lm_head.weight"].shape, float("nan"))
    before = ours.state()
    with pytest.raises(NonFiniteError, match="The loss is nan and the gradient norm nan at step 1"):
        ours.step(make_batch(), settings(), lambda done: 6)
    for group, tensors in before.items():
        for name, tensor in tensors.items():
            assert ours.state()[group][name] is tensor, f"{group} {name}"


def test_a_failed_allocation_as_metal_reports_it_is_one_of_ours():
    """The text is that of MLX's source; no Mac was there to provoke it."""
    with pytest.raises(AllocationFailed) as failed, allocations(torn=False):
        raise RuntimeError("[malloc_or_wait] Unable to allocate 4398046511104 bytes.")
    assert not failed.value.torn


@pytest.mark.slow
def test_a_process_that_dies_of_a_failed_allocation_counts_as_out_of_memory():
    """On the CPU, MLX 0.32 does not check for it and is killed; a probe or the supervisor sees the death."""
    with pytest.raises(ChildDied) as death:
        run_in_child("mlx_children:allocate_too_much", {}, environment={"PYTHONPATH": str(TESTS)})
    assert death.value.may_be_out_of_memory


def test_other_errors_of_mlx_stay_what_they_are():
    with pytest.raises(ValueError, match="must match"), allocations(torn=False):
        mx.zeros((2, 3)) @ mx.zeros((2, 3))


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_checkpoint_is_the_same_file_after_the_other_backend_has_loaded_and_saved_it(tmp_path, supervision):
    config = model_config(puzzle_emb_ndim=8, forward_dtype="bfloat16")
    training = training_config(supervision=supervision, moments_dtype="bfloat16", optimizer="muon")
    _, ours = twins(config, training)
    ours.step(make_batch(), settings(), lambda done: 4)
    back = make_learner(config, training)
    back_in_mlx = in_mlx(back)
    places = [tmp_path / name for name in ("mlx", "pytorch", "mlx-again")]
    write_checkpoint(places[0], ours.state(), {"step": 0})
    back.load_state(open_checkpoint(places[0]).load_all("torch"))
    write_checkpoint(places[1], back.state(), {"step": 0})
    back_in_mlx.load_state(open_checkpoint(places[1]).load_all("mlx"))
    write_checkpoint(places[2], back_in_mlx.state(), {"step": 0})
    names = {file.name for file in places[0].iterdir()}
    assert names >= {"weights.safetensors", "optimizer.safetensors", "ema.safetensors"}
    for name in names:
        assert len({(place / name).read_bytes() for place in places}) == 1, name


def test_a_checkpoint_of_another_size_is_refused():
    theirs, ours = twins()
    state = make_learner(model_config(hidden_size=16)).state()
    with pytest.raises(CheckpointError, match="do not fit the model of the recipe"):
        ours.load_state(state)
    assert_same_state(ours, theirs, relative=0)


def test_embeddings_are_replaced_in_weights_and_average():
    theirs, ours = twins()
    tokens, vectors = np.array([4, 1]), np.arange(16, dtype=np.float32).reshape(2, 8)
    for each in (theirs, ours):
        each.set_embeddings(tokens, vectors)
    assert_same_state(ours, theirs, relative=0)


@pytest.mark.parametrize("variant", ["mixer", "attention, puzzle prefix"])
def test_ranks_with_unequal_shares_take_the_step_of_one_process(variant):
    config = model_config(**VARIANTS[variant])
    training = training_config(supervision="terminal", max_grad_norm=0.5)
    theirs, alone = twins(config, training)
    batch = make_batch()

    def learn(world):
        from trm.backends.mlx.learner import MlxLearner

        ours = MlxLearner(theirs.program, alone.execution, world)
        ours.weights = {name: mx.array(numbers(each)) for name, each in weights.items()}
        first = sum(world.shares[: world.rank])
        rows = slice(first, first + world.shares[world.rank])
        own = replace(batch[rows], all_puzzle_identifiers=batch.puzzle_identifiers)
        result = ours.step(own, settings(), lambda done: 3)
        return result.loss, result.exact, {name: numbers(each) for name, each in ours.weights.items()}

    weights = theirs.state()["weights"]
    expected = alone.step(batch, settings(), lambda done: 6)
    ranks = together(thread_worlds((4, 2)), learn)
    for loss, exact, learned in ranks:
        assert loss == pytest.approx(expected.loss, rel=1e-6)
        np.testing.assert_array_equal(exact, expected.exact)
        for name, array in learned.items():
            np.testing.assert_allclose(array, numbers(alone.weights[name]), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(array, ranks[0][2][name])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="on Linux, MLX compiles with a C++ compiler")
@pytest.mark.parametrize("variant", ["mixer", "attention, puzzle prefix"])
def test_compiling_does_not_change_the_step(variant):
    """A minute where nothing has been compiled before; only full rows of one size are."""
    theirs, plain = twins(model_config(**VARIANTS[variant]))
    compiled = in_mlx(theirs)
    compiled.reconfigure(replace(compiled.execution, compiled_size=4))
    for step in (1, 2):
        results = [
            each.step(make_batch(seed=step), settings(step, cycles=3), lambda done: 4)
            for each in (plain, compiled)
        ]
        assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert_same_state(compiled, plain, relative=1e-5)


def test_bfloat16_stays_near_float32():
    wide, _ = twins(model_config(mixer="mlp", pos_encodings="none", hidden_size=16))
    narrow = in_mlx(wide, precision="bfloat16")
    losses = [each.step(make_batch(), settings(), lambda done: 6).loss for each in (wide, narrow)]
    assert narrow.latents.dtype == mx.bfloat16
    assert losses[1] == pytest.approx(losses[0], rel=0.02)  # eight bits of mantissa


@pytest.mark.parametrize("variant", VARIANTS)
def test_inference_gives_the_same_answers_and_probabilities(variant):
    theirs, ours = twins(model_config(**VARIANTS[variant]))
    batch = make_batch(seed=5)
    expected, found = (
        Search(each.predictor(), InferenceConfig(depth=3), SPEC).answer(batch, probabilities=True)
        for each in (theirs, ours)
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=5e-5)
    np.testing.assert_allclose(found.halt_logits, expected.halt_logits, atol=1e-4)


@pytest.mark.parametrize("variant", MANY)
def test_answers_to_200_questions_are_the_same(variant):
    theirs, ours = twins(model_config(**VARIANTS[variant]))
    batch = make_batch(200, seed=5)
    expected, found = (
        Search(each.predictor(), InferenceConfig(depth=3), SPEC).answer(batch) for each in (theirs, ours)
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.steps, expected.steps)


def test_inference_of_short_rows_with_noise_and_retries_equals_that_of_pytorch():
    theirs, ours = twins(model_config(), training_config(), WIDE)
    how = InferenceConfig(depth=3, retries=2, noise=0.5)
    expected, found = (Search(each.predictor(), how, WIDE).answer(padded_batch()) for each in (theirs, ours))
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"deterministic": True}}, "deterministic needs PyTorch"),
        ({"plan": {"backend": "mlx", "profile": True}}, "plan.profile needs PyTorch"),
    ],
)
def test_a_recipe_that_mlx_cannot_honour_is_refused(changes, message):
    tree = {"task": "sudoku", "data": {"path": "set"}, "plan": {"backend": "mlx"}, **changes}
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(tree)


def test_deterministic_execution_is_refused():
    theirs, _ = twins()
    from trm.backends.mlx import prepare

    with pytest.raises(ConfigError, match="does not promise the same bits"):
        prepare(replace(theirs.execution, backend="mlx", deterministic=True))
