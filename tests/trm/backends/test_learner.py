"""A training step: how it is computed does not change its result, and it happens completely or not at all."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config
from torch.utils.checkpoint import checkpoint

from macbook_optimization.errors import AllocationFailed, CompilationError, NonFiniteError
from trm.backends.base import Program, StepSettings
from trm.backends.pytorch.fused import add_and_normalize, split_heads, swiglu
from trm.backends.pytorch.memory import estimate, state_bytes
from trm.backends.pytorch.model import rotary_angles
from trm.plan import Execution


def learner(supervision="deep", **model):
    return make_learner(model_config(**model), training_config(supervision=supervision))


def take_step(ours, step=1, micro_batch_size=6, cycles=2, learning_rate=1e-2):
    settings = StepSettings(step, cycles, learning_rate=learning_rate, puzzle_emb_lr=1e-2)
    return ours.step(make_batch(seed=step), settings, lambda done: micro_batch_size)


def assert_same_state(ours, theirs, **tolerance):
    for group, tensors in ours.state().items():
        for name, tensor in tensors.items():
            expected = theirs.state()[group][name]
            torch.testing.assert_close(tensor, expected, msg=f"{group} {name}", **tolerance)


MANY = ["mixer", "attention, rotary", "attention, puzzle prefix", "singlez, mixer", "transformer"]


@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_the_micro_batch_size_does_not_change_the_step(variant, supervision):
    whole = learner(supervision, **VARIANTS[variant])
    expected = take_step(whole)
    for size in (5, 4, 3, 1):
        split = learner(supervision, **VARIANTS[variant])
        result = take_step(split, micro_batch_size=size)
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        np.testing.assert_array_equal(result.exact, expected.exact)
        for name, weight in whole.parameters.items():
            torch.testing.assert_close(
                split.parameters[name], weight, rtol=1e-5, atol=1e-7, msg=f"{size} {name}"
            )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_micro_batch_sizes_do_not_change_the_state_after_many_steps(variant, supervision):
    """In float32, ten steps of Adam amplify rounding beyond any useful bound; in float64 they do not."""
    whole, split = learner(supervision, **VARIANTS[variant]), learner(supervision, **VARIANTS[variant])
    sizes = (1, 5, 4, 3, 1, 2, 3, 4, 5, 1)
    for step, size in enumerate(sizes, start=1):
        take_step(whole, step, learning_rate=3e-3)
        take_step(split, step, size, learning_rate=3e-3)
    assert_same_state(split, whole, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("checkpointing", ["alternate", "all"])
@pytest.mark.parametrize("variant", MANY)
def test_recomputed_layers_give_the_same_update_to_the_last_bit(variant, checkpointing):
    config = model_config(**VARIANTS[variant])
    plain = make_learner(config)
    recomputing = make_learner(config, gradient_checkpointing=checkpointing)
    reconfigured = make_learner(config)
    reconfigured.reconfigure(replace(reconfigured.execution, gradient_checkpointing=checkpointing))
    for step in (1, 2):
        expected = take_step(plain, step).loss
        assert take_step(recomputing, step).loss == expected
        assert take_step(reconfigured, step).loss == expected
    assert_same_state(recomputing, plain, rtol=0, atol=0)
    assert_same_state(reconfigured, plain, rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_estimated_without_allocating_it(variant):
    program = Program(model_config(**VARIANTS[variant]), training_config(), SPEC)
    weights = sum(p.numel() for p in make_learner(program.model).model.parameters())
    none, every = (estimate(program, Execution(gradient_checkpointing=layers)) for layers in ("none", "all"))
    assert none.fixed_bytes >= 5 * 4 * weights
    assert none.fixed_bytes == state_bytes(program)
    assert none.bytes_per_example > every.bytes_per_example > 0


def test_a_failed_allocation_leaves_the_state_unchanged_except_during_the_update(monkeypatch):
    ours, untouched = learner(), learner()

    def no_memory(*arguments, **settings):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(ours.model, "embed", no_memory)
        with pytest.raises(AllocationFailed) as failed:
            take_step(ours)
    assert not failed.value.torn
    assert_same_state(ours, untouched, rtol=0, atol=0)
    with monkeypatch.context() as patch:
        patch.setattr(ours.optimizer, "update", no_memory)
        with pytest.raises(AllocationFailed) as failed:
            take_step(ours)
    assert failed.value.torn


def test_an_interrupted_step_has_not_happened():
    ours, untouched = learner(puzzle_emb_ndim=8), learner(puzzle_emb_ndim=8)
    for each in (ours, untouched):
        take_step(each)

    def stop(done):
        if done >= 4:
            raise KeyboardInterrupt
        return 2

    settings = StepSettings(2, 2, learning_rate=1e-2, puzzle_emb_lr=1e-2)
    with pytest.raises(KeyboardInterrupt):
        ours.step(make_batch(seed=2), settings, stop)
    assert_same_state(ours, untouched, rtol=0, atol=0)
    take_step(ours, 2)
    take_step(untouched, 2)
    assert_same_state(ours, untouched, rtol=0, atol=0)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_restored_state_continues_to_the_last_bit(supervision):
    ours, restored = learner(supervision, puzzle_emb_ndim=8), learner(supervision, puzzle_emb_ndim=8)
    for step in (1, 2):
        take_step(ours, step)
    saved = {
        group: {name: tensor.clone() for name, tensor in tensors.items()}
        for group, tensors in ours.state().items()
    }
    restored.load_state(saved)
    assert not saved, "each group is removed as soon as it is restored"
    for step in (3, 4):
        assert take_step(restored, step).loss == take_step(ours, step).loss
    assert_same_state(restored, ours, rtol=0, atol=0)


def test_a_loss_of_nan_leaves_the_weights_unchanged():
    ours = learner()
    with torch.no_grad():
        ours.model.embed_tokens.embedding_weight.fill_(float("nan"))
    before = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    with pytest.raises(NonFiniteError, match="step 1"):
        take_step(ours)
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("variant", "compares"), [("trm", False), ("singlez", False), ("transformer", True)])
def test_only_the_transformer_compares_halting_with_continuing(variant, compares):
    """As in the reference implementation: the other variants use the first logit alone."""
    ours = learner(variant=variant)
    with torch.no_grad():
        ours.model.q_head.bias.copy_(torch.tensor([1.0, 3.0]))  # the weights of a new head are zero
    result = take_step(ours)
    np.testing.assert_allclose(result.halt_margins, -2.0 if compares else 1.0)


def test_clipping_bounds_the_gradient_before_the_update():
    """After one step, Adam's first moment is (1 - beta1) times the gradient."""
    ours = make_learner(training=training_config(max_grad_norm=1e-3))
    result = take_step(ours)
    assert result.grad_norm > 1e-3
    moments = [m for name, m in ours.optimizer.moments.items() if name.endswith("exp_avg")]
    assert float(torch.cat([m.flatten() for m in moments]).norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_averaged_weights_follow_at_the_stated_rate():
    ours = make_learner(training=training_config(ema_rate=0.75))
    before = ours.model.lm_head.weight.detach().clone()
    take_step(ours)
    expected = 0.75 * before + 0.25 * ours.model.lm_head.weight.detach()
    torch.testing.assert_close(ours.averaged.lm_head.weight, expected)


def test_fresh_slots_do_not_depend_on_the_latents_of_their_previous_example():
    ours, other = learner(), learner()
    other.latents = torch.where(
        torch.from_numpy(make_batch(seed=1).fresh)[:, None], torch.randn_like(other.latents), other.latents
    )
    assert take_step(ours).loss == pytest.approx(take_step(other).loss, rel=1e-6)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_noise_in_the_initial_latents_belongs_to_the_slot_for_every_micro_batch_size(supervision):
    def learned(size, seeds):
        ours = make_learner(training=training_config(supervision=supervision, noise=1.0))
        batch = replace(make_batch(), noise_seeds=np.array(seeds))
        result = ours.step(batch, StepSettings(1, 2, 1e-2, 1e-2), lambda done: size)
        return result.loss, ours.parameters["lm_head.weight"]

    seeds = [3, 1, 4, 1, 5, 9]
    (loss, weight), (split_loss, split_weight) = learned(6, seeds), learned(2, seeds)
    assert split_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(split_weight, weight, rtol=1e-5, atol=1e-7)
    assert learned(6, [3, 1, 4, 1, 5, 8])[0] != loss


def test_noise_is_added_to_fresh_slots_only():
    """The others continue from their carried latents."""
    losses = []
    for seeds in ([1] * 6, [2] * 6):
        ours = make_learner(training=training_config(noise=1.0))
        batch = replace(make_batch(), fresh=np.zeros(6, dtype=bool), noise_seeds=np.array(seeds))
        losses.append(ours.step(batch, StepSettings(1, 2, 1e-2, 1e-2), lambda done: 6).loss)
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_training_learns_a_tiny_dataset():
    ours = make_learner(
        model_config(mixer="mlp", pos_encodings="none", hidden_size=16),
        training_config(supervision="terminal", learning_rate=1e-2, optimizer="adamw", weight_decay=0.0),
    )
    losses = []
    for step in range(1, 151):
        settings = StepSettings(step, 2, learning_rate=3e-3, puzzle_emb_lr=0.0)
        losses.append(ours.step(make_batch(), settings, lambda done: 6).loss)
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("variant", MANY)
def test_the_speed_of_workers_changes_no_bit_of_the_update(variant):
    """Three workers give the same bits as the same micro-batches computed one after the other."""
    config = model_config(**VARIANTS[variant])
    in_order = make_learner(config)
    in_workers = make_learner(config, threads=3, workers=3)
    for step in (1, 2, 3):
        expected = take_step(in_order, step, micro_batch_size=1).loss
        assert take_step(in_workers, step, micro_batch_size=3).loss == expected
    assert_same_state(in_workers, in_order, rtol=0, atol=0)


@pytest.mark.parametrize(("size", "threads", "used"), [(3, 1, True), (3, 2, False), (2, 1, False)])
def test_a_compiled_block_is_for_one_size_and_one_number_of_threads(size, threads, used):
    block, seen = learner().model.L_level, []
    block.compiled = lambda x, angles: seen.append(x.shape) or x
    block.compiled_size, block.compiled_threads = 3, 1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        block(torch.zeros(SPEC.max_len, size, 8), None)
    finally:
        torch.set_num_threads(before)
    assert bool(seen) == used


def test_a_compiled_block_is_not_used_once_it_is_switched_off():
    ours, seen = learner(), []
    block = ours.model.L_level
    block.compiled = lambda x, angles: seen.append(x.shape) or x
    block.compiled_size, block.compiled_threads = 6, torch.get_num_threads()
    take_step(ours)
    assert seen, "it was in use"
    seen.clear()
    ours.reconfigure(replace(ours.execution, compiled_size=None))
    take_step(ours, 2)
    assert not seen


def test_a_compiler_that_fails_is_a_compilation_error_and_changes_nothing(monkeypatch):
    def no_compiler(*arguments, **settings):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    ours = learner()
    before = ours.execution
    with pytest.raises(CompilationError, match="No working C\\+\\+ compiler"):
        ours.reconfigure(replace(before, compiled_size=4, workers=2))
    assert ours.execution is before
    assert take_step(ours).loss == take_step(learner()).loss


def test_the_device_of_a_learner_is_fixed():
    ours = learner()
    with pytest.raises(ValueError, match="fixed"):
        ours.reconfigure(replace(ours.execution, device="mps"))


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_written_by_hand_equal_numerical_ones(dim):
    generator = torch.Generator().manual_seed(0)
    width, inner, n = 5, 4, 3

    def some(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    x = some(width, n) if dim == 0 else some(n, width)
    # It writes over what it kept, so its backward pass runs once; `checkpoint` repeats the forward pass for
    # each.
    gated = partial(checkpoint, partial(swiglu, dim=dim), use_reentrant=False)
    assert torch.autograd.gradcheck(gated, (x, some(2 * inner, width), some(width, inner)))
    assert torch.autograd.gradcheck(
        lambda a, b: add_and_normalize(a, b, dim, 1e-5), (some(4, 3, 2), some(4, 3, 2))
    )
    angles = rotary_angles(4, 6, 100.0)
    cos, sin = (angle.double() for angle in angles)
    assert torch.autograd.gradcheck(lambda qkv: split_heads(qkv, (cos, sin)), some(4, 2, 3, 2, 6))
