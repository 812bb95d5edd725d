"""A training step on a device other than the CPU: one that is made up, as there is no Mac here.

`test_second_device.py` runs these tests in a process of their own.
"""

from dataclasses import replace

import numpy as np
import pytest
import second_device
import torch
from ranks import thread_worlds, together
from tiny import SPEC, VARIANTS, make_batch, make_learner, model_config, training_config
from twins import puzzle_row_gradient, randomized

from trm.backends.base import Program, StepSettings
from trm.backends.pytorch import fused, layers, plain
from trm.backends.pytorch.language_model import language_model
from trm.backends.pytorch.predictor import predictor
from trm.config import DecoderConfig
from trm.plan import Execution
from trm.tasks.base import DataSpec

second_device.register()

SAME_KERNELS = [
    name for name in VARIANTS if not {"attention", "transformer"} & set(name.replace(",", "").split())
]
WIDE = DataSpec(max_len=7, vocab_size=6, num_outputs=4, num_puzzle_identifiers=6)
DECODER = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24}
OF_DECODER = {"supervision": "terminal", "loss": "softmax_cross_entropy", "ema": False, "optimizer": "adamw"}


@pytest.fixture
def same_formulas(monkeypatch):
    """Let both devices compute with the same formulas and kernels.

    These are those written by hand: torch decomposes the gradient of `silu` on devices that it does not know.
    """
    monkeypatch.setattr(fused, "WRITTEN_BY_HAND", frozenset({"cpu", second_device.NAME}))
    monkeypatch.setattr(layers, "_ONEDNN", False)


def learners(model=None, spec=SPEC, worlds=(None, None), execution=None, **training):
    """Return a learner on the CPU and one on the other device."""
    config = training_config(**training)
    return [
        make_learner(model or model_config(), config, spec, world=world, device=device, **(execution or {}))
        for device, world in zip(("cpu", second_device.NAME), worlds, strict=True)
    ]


def take(learner, batches, size=4):
    steps = [StepSettings(step, 2, 1e-3, 1e-2) for step in range(1, len(batches) + 1)]
    return [learner.step(batch, how, lambda done: size) for batch, how in zip(batches, steps, strict=True)]


def state_of(learner):
    """Return copies, on the CPU."""
    return {
        group: {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        for group, tensors in learner.state().items()
    }


def named_tensors(learner, groups):
    """Return the gradients of the last step, and the tensors of some groups of the state."""
    gradients = {name: each.grad.cpu() for name, each in learner.parameters.items() if each.grad is not None}
    state = state_of(learner)
    found = {"gradients": gradients, **{group: state[group] for group in groups if group in state}}
    return {f"{group} {name}": each for group, tensors in found.items() for name, each in tensors.items()}


def assert_equal(pair, batches, tolerance=0.0, groups=("latents",)):
    """Each step begins with the state of the CPU, as rounding grows from step to step.

    Gradients may differ by five times as much. Weights are no good measure: an optimizer may turn a tiny
    gradient into a change of either sign.
    """
    for batch in batches:
        (here,), (there,) = (take(each, [batch]) for each in pair)
        assert there.loss == pytest.approx(here.loss, rel=tolerance)
        assert there.grad_norm == pytest.approx(here.grad_norm, rel=tolerance)
        np.testing.assert_array_equal(there.exact, here.exact)
        np.testing.assert_allclose(there.halt_margins, here.halt_margins, rtol=tolerance, atol=tolerance)
        tensors = [named_tensors(each, groups) for each in pair]
        for name, tensor in tensors[0].items():
            assert float((tensors[1][name] - tensor).norm()) <= 5 * tolerance * float(tensor.norm()), name
        pair[1].load_state(state_of(pair[0]))
    assert all(each.device.type == second_device.NAME for each in pair[1].parameters.values())


@pytest.mark.usefixtures("same_formulas")
@pytest.mark.parametrize("variant", SAME_KERNELS)
def test_steps_of_the_same_formulas_are_equal_to_the_last_bit(variant):
    everything = ("weights", "ema", "optimizer", "latents")
    assert_equal(
        learners(model_config(**VARIANTS[variant]), ema=True),
        [make_batch(), make_batch(seed=1)],
        0,
        everything,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_of_every_variant_are_nearly_those_of_the_cpu(variant):
    pair = learners(model_config(**VARIANTS[variant]))
    assert_equal(pair, [make_batch()], 1e-5)


def rich_batch(seed):
    """Return rows of different lengths, with noise, weights and puzzle identifiers."""
    rng = np.random.default_rng(seed)
    batch = make_batch(6, WIDE, seed)
    lengths = np.array([7, 2, 3, 5, 4, 7])
    after = np.arange(WIDE.max_len) >= lengths[:, None]
    return replace(
        batch,
        inputs=np.where(after, 0, batch.inputs),
        labels=np.where(after, -100, batch.labels),
        lengths=lengths,
        noise_seeds=rng.integers(0, 2**62, 6),
        weights=rng.random(6),
    )


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam_atan2", "muon", "adafactor"])
def test_a_step_with_everything_is_nearly_that_of_the_cpu(optimizer, supervision):
    model = model_config(puzzle_emb_ndim=12, puzzle_emb_len=2)
    pair = learners(
        model, WIDE, supervision=supervision, optimizer=optimizer, noise=0.1, ema=True, max_grad_norm=0.5,
        loss="softmax_cross_entropy", label_smoothing=0.1,
    )  # fmt: skip
    assert_equal(pair, [rich_batch(seed) for seed in range(2)], 1e-5)


def test_gradients_of_puzzle_embeddings_are_nearly_those_of_the_cpu():
    here, there = learners(model_config(puzzle_emb_ndim=12, puzzle_emb_len=2), WIDE)
    there.load_state(state_of(randomized(here)))
    how = StepSettings(1, 2, 1e-3, 1e-2)
    expected, found = (puzzle_row_gradient(each, rich_batch(0), how).cpu() for each in (here, there))
    assert float(expected.norm()) > 0
    assert float((found - expected).norm()) <= 5e-5 * float(expected.norm())


@pytest.mark.parametrize("checkpointing", ["none", "alternate", "all"])
def test_recomputed_layers_and_windows_work_there(checkpointing):
    model = model_config(attention_window=2, puzzle_emb_ndim=8)
    assert_equal(
        learners(model, WIDE, execution={"gradient_checkpointing": checkpointing}), [rich_batch(0)], 1e-5
    )


@pytest.mark.parametrize("execution", [{}, {"optimizer_in_backward": True}])
def test_a_decoder_with_dropout_trains_there(execution):
    pair = learners(DecoderConfig(**DECODER, dropout=0.2), execution=execution, **OF_DECODER)
    batch = replace(make_batch(), noise_seeds=np.arange(6), fresh=np.ones(6, dtype=bool))
    assert_equal(pair, [batch, batch], 1e-5)


def test_a_decoder_in_bfloat16_trains_there():
    model = DecoderConfig(**DECODER, weights_dtype="bfloat16")
    batch = replace(make_batch(), noise_seeds=np.arange(6), fresh=np.ones(6, dtype=bool))
    assert_equal(learners(model, **OF_DECODER), [batch], 2e-2)  # two digits of bfloat16


def test_workers_are_for_the_cpu():
    here, there = learners(execution={"workers": 2, "threads": 2})
    assert (here.workers.count, there.workers.count) == (2, 1)


def test_a_state_moves_between_devices_without_changing_a_bit():
    here, there = learners(model_config(puzzle_emb_ndim=8))
    take(there, [make_batch()])
    saved = state_of(there)
    here.load_state(dict(saved))
    assert here.digest() == there.digest()
    take(there, [make_batch(seed=1)])
    there.load_state(saved)
    assert here.digest() == there.digest()


@pytest.mark.parametrize("variant", ["mixer", "attention, rotary", "candidates"])
def test_answers_are_those_of_the_cpu(variant):
    program = Program(model_config(**VARIANTS[variant]), training_config(), SPEC)
    weights = learners(program.model)[0].state()["weights"]
    batch = make_batch()
    found = []
    for device in ("cpu", second_device.NAME):
        ours = predictor(program, Execution(device=device, threads=2, workers=2), weights)
        ours.begin(batch, noise=0.1, noise_seed=1)
        ours.advance(np.arange(6), batch.inputs)
        found.append(ours.advance(np.array([0, 2, 3]), batch.inputs[[0, 2, 3]], probabilities=True))
    np.testing.assert_array_equal(found[1].tokens, found[0].tokens)
    np.testing.assert_allclose(found[1].halt_logits, found[0].halt_logits, rtol=1e-5)
    np.testing.assert_allclose(found[1].probabilities, found[0].probabilities, rtol=1e-5, atol=1e-6)


def test_text_is_that_of_the_cpu():
    program = Program(DecoderConfig(**DECODER), training_config(**OF_DECODER), SPEC)
    weights = learners(program.model, **OF_DECODER)[0].state()["weights"]
    pair = [
        language_model(program, Execution(device=device), weights) for device in ("cpu", second_device.NAME)
    ]
    here, there = (
        [each.begin(np.array([1, 2])), *(each.append(token) for token in (3, 4, 5))] for each in pair
    )
    np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6)
    losses = [each.token_losses(make_batch()) for each in pair]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-6)


def test_ranks_on_different_devices_learn_what_one_process_learns():
    """The message between them is in the memory of the CPU."""
    settings = {"supervision": "terminal", "max_grad_norm": 0.1, "ema": True}
    batch = make_batch()
    alone = learners(model_config(puzzle_emb_ndim=8), **settings)[0]
    take(alone, [batch, batch])
    ranks = learners(model_config(puzzle_emb_ndim=8), worlds=thread_worlds((4, 2)), **settings)
    parts = (slice(0, 4), slice(4, 6))

    def steps(rank):
        everybody = replace(batch[parts[rank]], all_puzzle_identifiers=batch.puzzle_identifiers)
        take(ranks[rank], [everybody, everybody])
        return state_of(ranks[rank])

    here, there = together((0, 1), steps)
    for name, tensor in state_of(alone)["weights"].items():
        torch.testing.assert_close(here["weights"][name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(here["weights"][name], there["weights"][name]), name


FUSED = {
    "swiglu": lambda x: fused.swiglu(x, WEIGHTS[0], WEIGHTS[1], 1),
    "swiglu over rows": lambda x: fused.swiglu(x.T.contiguous(), WEIGHTS[0], WEIGHTS[1], 0),
    "add and normalise": lambda x: fused.add_and_normalize(x, x * x, -1, 1e-5),
    "normalised": lambda x: fused.normalized(x, WEIGHTS[0][0], 1e-5),
    "grouped heads": lambda x: torch.stack(
        fused.grouped_heads(x.view(1, 2, 6, 2), (x.detach()[:2, :1].cos(), x.detach()[:2, :1].sin()), 1, 4)
    ),
    "heads": lambda x: torch.stack(
        fused.split_heads(x.view(4, 1, 3, 1, 2), (x.detach()[:, :1].cos(), x.detach()[:, :1].sin()))
    ),
}
WEIGHTS = (torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(1, -1, 24).view(6, 4))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", FUSED)
def test_formulas_written_by_hand_are_the_plain_ones(name, monkeypatch):
    monkeypatch.setitem(globals(), "WEIGHTS", tuple(each.double() for each in WEIGHTS))
    found = []
    for by_hand in (frozenset({"cpu"}), frozenset()):
        monkeypatch.setattr(fused, "WRITTEN_BY_HAND", by_hand)
        x = torch.linspace(-2, 3, 24).view(4, 6).requires_grad_()
        y = FUSED[name](x)
        (gradient,) = torch.autograd.grad((y * torch.linspace(0, 1, y.numel()).view_as(y)).sum(), x)
        found.append((y.detach(), gradient))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=1e-12)


def test_the_device_refuses_what_a_mac_refuses():
    x = torch.ones(2).to(second_device.NAME)
    with pytest.raises(TypeError, match="no float64"):
        x.double()
    with pytest.raises(RuntimeError, match="tensors on second and on cpu"):
        x + torch.ones(2)
    assert plain.widened(x).device.type == second_device.NAME
