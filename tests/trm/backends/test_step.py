"""One step, whatever the cut."""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny import SHAPE, VARIANTS, model_config, step_batch, training_config

from macbook_optimization.errors import AllocationFailed, CompilationError, NonFiniteError
from trm.backends.base import StepSettings
from trm.backends.pytorch.fused import add_and_normalize, gated, split_heads
from trm.backends.pytorch.lanes import Lanes
from trm.backends.pytorch.memory import estimate_memory, state_bytes
from trm.backends.pytorch.model import rotary_angles
from trm.backends.pytorch.optim import orthogonalized
from trm.backends.pytorch.step import TorchLearner


def learner(supervision="deep", **model):
    return TorchLearner(model_config(**model), training_config(supervision=supervision), SHAPE, seed=0)


def take(ours, step=1, cut=6, cycles=2, learning_rate=1e-2):
    settings = StepSettings(step, cycles, learning_rate=learning_rate, puzzle_emb_lr=1e-2)
    return ours.step(step_batch(seed=step), settings, lambda done: cut)


def assert_same_state(ours, theirs, **tolerance):
    for group, tensors in ours.tensors().items():
        for name, tensor in tensors.items():
            expected = theirs.tensors()[group][name]
            torch.testing.assert_close(tensor, expected, msg=f"{group} {name}", **tolerance)


MANY = ["mixer", "attention, rotary", "attention, puzzle prefix", "singlez, mixer", "transformer"]


@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("cut", [5, 4, 3, 1])
def test_any_cut_of_a_step_gives_the_same_update(variant, supervision, cut):
    whole, pieces = learner(supervision, **VARIANTS[variant]), learner(supervision, **VARIANTS[variant])
    one, other = take(whole), take(pieces, cut=cut)
    assert other.loss == pytest.approx(one.loss, rel=1e-5)
    np.testing.assert_array_equal(other.exact, one.exact)
    for name, weight in whole.parameters.items():
        torch.testing.assert_close(pieces.parameters[name], weight, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", MANY)
@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("cut", [5, 4, 3, 1])
def test_any_cuts_of_many_steps_give_the_same_state(variant, supervision, cut):
    """In float32, ten steps of Adam blow rounding up beyond any useful bound; in float64 they do not."""
    whole, pieces = learner(supervision, **VARIANTS[variant]), learner(supervision, **VARIANTS[variant])
    for step in range(1, 11):
        take(whole, step, learning_rate=3e-3)
        take(pieces, step, cut, learning_rate=3e-3)
    assert_same_state(pieces, whole, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("checkpointing", ["alternate", "all"])
@pytest.mark.parametrize("variant", MANY)
def test_layers_that_are_computed_twice_give_the_same_update_to_the_last_bit(variant, checkpointing):
    config, training = model_config(**VARIANTS[variant]), training_config()
    plain = TorchLearner(config, training, SHAPE, seed=0)
    saving = TorchLearner(config, training, SHAPE, seed=0, gradient_checkpointing=checkpointing)
    for step in (1, 2):
        assert take(saving, step).loss == take(plain, step).loss
    assert_same_state(saving, plain, rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_estimated_without_taking_any(variant):
    config, training = model_config(**VARIANTS[variant]), training_config()
    weights = sum(p.numel() for p in TorchLearner(config, training, SHAPE, seed=0).model.parameters())
    none, every = (estimate_memory(config, training, SHAPE, layers) for layers in ("none", "all"))
    assert none.fixed_bytes >= 5 * 4 * weights
    assert none.fixed_bytes == state_bytes(config, training, SHAPE)
    assert none.bytes_per_example > every.bytes_per_example > 0


def test_a_failed_allocation_leaves_the_state_alone_unless_it_came_in_the_update(monkeypatch):
    ours, untouched = learner(), learner()

    def no_memory(*arguments, **settings):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(ours.model, "embed", no_memory)
        with pytest.raises(AllocationFailed) as failed:
            take(ours)
    assert not failed.value.torn
    assert_same_state(ours, untouched, rtol=0, atol=0)
    with monkeypatch.context() as patch:
        patch.setattr(ours.optimizer, "update", no_memory)
        with pytest.raises(AllocationFailed) as failed:
            take(ours)
    assert failed.value.torn


def test_an_interrupted_step_has_not_happened():
    ours, untouched = learner(puzzle_emb_ndim=8), learner(puzzle_emb_ndim=8)
    for each in (ours, untouched):
        take(each)

    def stop(done):
        if done >= 4:
            raise KeyboardInterrupt
        return 2

    settings = StepSettings(2, 2, learning_rate=1e-2, puzzle_emb_lr=1e-2)
    with pytest.raises(KeyboardInterrupt):
        ours.step(step_batch(seed=2), settings, stop)
    assert_same_state(ours, untouched, rtol=0, atol=0)
    take(ours, 2)
    take(untouched, 2)
    assert_same_state(ours, untouched, rtol=0, atol=0)


def test_a_loss_that_is_not_a_number_leaves_the_weights_alone():
    ours = learner()
    with torch.no_grad():
        ours.model.embed_tokens.embedding_weight.fill_(float("nan"))
    before = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    with pytest.raises(NonFiniteError, match="step 1"):
        take(ours)
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("variant", "compares"), [("trm", False), ("singlez", False), ("transformer", True)])
def test_only_the_baseline_weighs_halting_against_going_on(variant, compares):
    """As in the public code: the others ask the first logit alone."""
    ours = learner(variant=variant)
    with torch.no_grad():
        ours.model.q_head.bias.copy_(torch.tensor([1.0, 3.0]))  # the weights of a new head are zero
    result = take(ours)
    np.testing.assert_allclose(result.halt_margins, -2.0 if compares else 1.0)


def test_clipping_bounds_the_gradient_before_the_update():
    """With sgd-like accounting: Adam's first moment after one step is (1 - beta1) times the gradient."""
    ours = TorchLearner(model_config(), training_config(max_grad_norm=1e-3), SHAPE, seed=0)
    result = take(ours)
    assert result.grad_norm > 1e-3
    moments = [m for name, m in ours.optimizer.moments.items() if name.endswith("exp_avg")]
    assert float(torch.cat([m.flatten() for m in moments]).norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_averaged_weights_follow_at_the_stated_rate():
    ours = TorchLearner(model_config(), training_config(ema_rate=0.75), SHAPE, seed=0)
    before = ours.model.lm_head.weight.detach().clone()
    take(ours)
    expected = 0.75 * before + 0.25 * ours.model.lm_head.weight.detach()
    torch.testing.assert_close(ours.averaged.lm_head.weight, expected)


def test_fresh_slots_forget_what_the_slot_thought_before():
    ours, other = learner(), learner()
    other.latents = torch.where(
        torch.from_numpy(step_batch(seed=1).fresh)[:, None], torch.randn_like(other.latents), other.latents
    )
    assert take(ours).loss == pytest.approx(take(other).loss, rel=1e-6)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_noise_in_the_first_thoughts_belongs_to_the_slot_whatever_the_cut(supervision):
    def learned(cut, seeds):
        training = training_config(supervision=supervision, noise=1.0)
        ours = TorchLearner(model_config(), training, SHAPE, seed=0)
        batch = replace(step_batch(), noise_seeds=np.array(seeds))
        result = ours.step(batch, StepSettings(1, 2, 1e-2, 1e-2), lambda done: cut)
        return result.loss, ours.parameters["lm_head.weight"]

    seeds = [3, 1, 4, 1, 5, 9]
    (loss, weight), (cut_loss, cut_weight) = learned(6, seeds), learned(2, seeds)
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(cut_weight, weight, rtol=1e-5, atol=1e-7)
    assert learned(6, [3, 1, 4, 1, 5, 8])[0] != loss


def test_noise_is_for_slots_that_begin():
    """The others go on from where they were."""
    losses = []
    for seeds in ([1] * 6, [2] * 6):
        ours = TorchLearner(model_config(), training_config(noise=1.0), SHAPE, seed=0)
        batch = replace(step_batch(), fresh=np.zeros(6, dtype=bool), noise_seeds=np.array(seeds))
        losses.append(ours.step(batch, StepSettings(1, 2, 1e-2, 1e-2), lambda done: 6).loss)
    assert losses[0] == losses[1]


def test_training_learns_a_tiny_set():
    ours = TorchLearner(
        model_config(mlp_t=True, pos_encodings="none", hidden_size=16),
        training_config(supervision="terminal", learning_rate=1e-2, optimizer="adamw", weight_decay=0.0),
        SHAPE,
        seed=0,
    )
    losses = []
    for step in range(1, 151):
        settings = StepSettings(step, 2, learning_rate=3e-3, puzzle_emb_lr=0.0)
        losses.append(ours.step(step_batch(), settings, lambda done: 6).loss)
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("variant", MANY)
def test_lanes_give_the_same_update_to_the_last_bit_whoever_is_faster(variant):
    """As the same pieces one after the other, so the order in which lanes finish changes nothing."""
    config, training = model_config(**VARIANTS[variant]), training_config()
    in_order = TorchLearner(config, training, SHAPE, seed=0)
    in_lanes = TorchLearner(config, training, SHAPE, seed=0, lanes=3)
    for step in (1, 2, 3):
        assert take(in_lanes, step, cut=3).loss == take(in_order, step, cut=1).loss
    assert_same_state(in_lanes, in_order, rtol=0, atol=0)


def test_lanes_that_have_no_room_stand_still():
    busy, most = set(), []

    def compute(slots):
        busy.add(slots.start)
        most.append(len(busy))
        time.sleep(0.02)
        busy.remove(slots.start)
        return slots

    done = []
    Lanes(3).each(8, lambda taken: 3 if taken < 3 else 1, compute, done.append)
    assert [slots.start for slots in done] == list(range(8))
    assert max(most[:3]) <= 3
    assert most[-1] == 1


def test_where_there_is_no_room_for_lanes_all_threads_work_together():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lanes, seen = Lanes(2), []
        lanes.each(3, lambda taken: 1, lambda slots: torch.get_num_threads(), seen.append)
        lanes.each(2, lambda taken: 2, lambda slots: torch.get_num_threads(), seen.append)
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2, 2, 1, 1]
    assert [lanes.piece(size) for size in (1, 2, 5)] == [(1, 2), (1, 1), (2, 1)]


@pytest.mark.parametrize(("size", "threads", "used"), [(3, 1, True), (3, 2, False), (2, 1, False)])
def test_a_compiled_level_is_for_one_size_and_one_number_of_threads(size, threads, used):
    level, seen = learner().model.L_level, []
    level.compiled = lambda x, angles: seen.append(x.shape) or x
    level.compiled_size, level.compiled_threads = 3, 1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        level(torch.zeros(SHAPE.seq_len, size, 8), None)
    finally:
        torch.set_num_threads(before)
    assert bool(seen) == used


def test_what_a_lane_raises_reaches_the_caller_after_all_have_stopped():
    running = []

    def compute(slots):
        if slots.start == 1:
            raise KeyError("this one")
        running.append(slots.start)
        time.sleep(0.05)
        running.remove(slots.start)

    with pytest.raises(KeyError, match="this one"):
        Lanes(2).each(100, lambda taken: 2, compute, lambda result: None)
    assert not running


@pytest.mark.slow
def test_a_compiled_level_learns_the_same(tmp_path, monkeypatch):
    """One whose hidden units are shared in place, forward and backward."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config, training = model_config(**VARIANTS["candidates"]), training_config()
    plain = TorchLearner(config, training, SHAPE, seed=0, lanes=2)
    compiled = TorchLearner(config, training, SHAPE, seed=0, lanes=2)
    compiled.compile(4)
    calls = []
    inner = compiled.model.L_level.compiled
    compiled.model.L_level.compiled = lambda x, angles: calls.append(x.shape[1]) or inner(x, angles)
    for step in (1, 2):
        assert take(compiled, step, cut=4).loss == pytest.approx(take(plain, step, cut=4).loss, rel=1e-5)
    assert set(calls) == {2}
    for name, weight in plain.parameters.items():
        torch.testing.assert_close(compiled.parameters[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    calls.clear()
    compiled.compile(None)
    take(compiled, 3, cut=4)
    assert not calls


def test_a_compiler_that_fails_is_one_error(monkeypatch):
    def no_compiler(*arguments, **settings):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    ours = learner()
    with pytest.raises(CompilationError, match="No working C\\+\\+ compiler"):
        ours.compile(4)
    assert take(ours).loss == take(learner()).loss


@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradients_written_by_hand_are_right(dim):
    generator = torch.Generator().manual_seed(0)
    width, inner, n = 5, 4, 3

    def some(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    x = some(width, n) if dim == 0 else some(n, width)
    assert torch.autograd.gradcheck(partial(gated, dim=dim), (x, some(2 * inner, width), some(width, inner)))
    assert torch.autograd.gradcheck(
        lambda a, b: add_and_normalize(a, b, dim, 1e-5), (some(4, 3, 2), some(4, 3, 2))
    )
    angles = rotary_angles(4, 6, 100.0)
    cos, sin = (angle.double() for angle in angles)
    assert torch.autograd.gradcheck(lambda qkv: split_heads(qkv, (cos, sin)), some(4, 2, 3, 2, 6))


@pytest.mark.parametrize("shape", [(8, 8), (6, 24), (24, 6)])
def test_muon_steps_are_nearly_orthogonal(shape):
    """By the singular values, which the exact answer would make one; and in the gradient's own directions."""
    gradient = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(gradient)
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.4
    assert (left.T @ found @ right.T).diagonal().min() > 0.6


def test_muon_moves_the_matrices_of_the_level_and_adam_the_rest():
    made = {
        name: TorchLearner(model_config(), training_config(optimizer=name, weight_decay=0.0), SHAPE, seed=0)
        for name in ("muon", "adamw")
    }
    before = {name: weight.clone() for name, weight in made["muon"].model.named_parameters()}
    for ours in made.values():
        take(ours)
    for name, weight in made["muon"].parameters.items():
        moved = (weight - before[name]).detach()
        if name.startswith("L_level."):
            sizes = torch.linalg.svdvals(moved) / (1e-2 * 0.2 * max(moved.shape) ** 0.5)
            assert 0.5 < sizes.median() < 1.3, name
            assert f"{name}.exp_avg_sq" not in made["muon"].optimizer.moments
        else:
            torch.testing.assert_close(weight, made["adamw"].parameters[name], msg=name)
