"""Attention within a window equals attention over all positions with everything else masked."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from test_padding import WIDE, padded_batch, take_step
from tiny import make_learner, model_config, training_config

from trm.backends.pytorch.windows import windowed_attention
from trm.backends.sizes import flops_per_sample
from trm.tasks.base import DataSpec


def dense(heads, mask, window, num_global):
    length = mask.shape[1]
    at = torch.arange(length)
    seen = (at[:, None] - at).abs() <= window
    seen[:num_global] = True
    seen[:, :num_global] = True
    return F.scaled_dot_product_attention(*heads, attn_mask=seen & mask[:, None, None, :])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("num_global", [1, 3])
@pytest.mark.parametrize(("length", "window"), [(1, 4), (5, 4), (6, 4), (16, 4), (17, 4), (19, 1), (40, 7)])
def test_a_window_equals_a_mask_on_all_positions(length, window, num_global):
    generator = torch.Generator().manual_seed(length)
    shape = (3, 3, 2, length, 6)
    heads = torch.randn(shape, generator=generator).requires_grad_()
    lengths = torch.tensor([length, max(num_global, length // 2), max(num_global, length - 1)])
    mask = torch.arange(length) < lengths[:, None]
    num_global = min(num_global, length)
    found = windowed_attention(tuple(heads), mask, window, num_global)
    expected = dense(tuple(heads), mask, window, num_global)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=generator)
    (gradient,) = torch.autograd.grad((found * weights).sum(), heads)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), heads)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", [{}, {"puzzle_emb_ndim": 12, "puzzle_emb_len": 2}])
def test_a_window_as_wide_as_the_row_learns_the_same(prefix):
    batch = padded_batch()
    training = training_config(effective_batch_size=len(batch))
    everywhere = make_learner(model_config(**prefix), training, WIDE)
    windowed = make_learner(model_config(**prefix, attention_window=7), training, WIDE)
    narrow = make_learner(model_config(**prefix, attention_window=1), training, WIDE)
    losses = [take_step(ours, batch, learning_rate=1e-2).loss for ours in (everywhere, windowed, narrow)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=1e-6)
    for name, parameter in everywhere.parameters.items():
        torch.testing.assert_close(windowed.parameters[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


def test_the_first_token_sees_the_last_one_through_any_window():
    """A classifier answers there, so it must reach every word in one layer."""
    spec = DataSpec(max_len=64, vocab_size=9, num_outputs=2)
    config = model_config(attention_window=2, L_layers=1, L_cycles=1, H_cycles=1)
    model = make_learner(config, training_config(effective_batch_size=1), spec).model
    tokens = torch.ones(1, 64, dtype=torch.long)
    other = tokens.clone()
    other[0, -1] = 2
    with torch.no_grad():
        first, second = (model(each, None, model.start(1), 1)[0, 0] for each in (tokens, other))
    assert not torch.equal(first, second)


def test_a_window_takes_fewer_operations():
    spec = DataSpec(max_len=1024, vocab_size=9, num_outputs=2)
    counts = [flops_per_sample(model_config(attention_window=w), spec) for w in (None, 512, 64)]
    assert counts[0] == counts[1] > counts[2]
    assert np.isclose(counts[0] - counts[2], 2 * 2 * (1024 - 193) * 1024 * 8 * 2 * 3 * 4)


def test_a_window_needs_attention():
    with pytest.raises(ValidationError, match="attention_window"):
        model_config(mixer="mlp", pos_encodings="none", attention_window=4)
