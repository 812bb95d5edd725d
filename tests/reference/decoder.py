"""A causal decoder written out in plain NumPy, float64, one row and one head at a time.

It shares no code and no layout with the backends. Gradients are central differences, so there is no
derivation that could be wrong twice.
"""

import math

import numpy as np

from reference.recursion import IGNORE, rotated, silu


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def attention(x, weights, name, config):
    """Each query head attends to the positions up to its own, with the keys of its group."""
    size = config.hidden_size // config.num_heads
    kv_heads = config.num_kv_heads or config.num_heads
    everything = x @ weights[f"{name}.qkv_proj.weight"].T
    outputs = []
    for head in range(config.num_heads):
        group = head // (config.num_heads // kv_heads)
        places = (head, config.num_heads + group, config.num_heads + kv_heads + group)
        query, key, value = (everything[:, place * size : (place + 1) * size] for place in places)
        query, key = rotated(query, config.rope_theta), rotated(key, config.rope_theta)
        mixed = np.empty_like(value)
        for position in range(len(x)):
            scores = key[: position + 1] @ query[position] / math.sqrt(size)
            shares = np.exp(scores - scores.max())
            mixed[position] = shares @ value[: position + 1] / shares.sum()
        outputs.append(mixed)
    return np.concatenate(outputs, axis=1) @ weights[f"{name}.o_proj.weight"].T


def feed_forward(x, weights, name):
    inner = x @ weights[f"{name}.gate_up_proj.weight"].T
    half = inner.shape[-1] // 2
    return (silu(inner[:, :half]) * inner[:, half:]) @ weights[f"{name}.down_proj.weight"].T


def logits(tokens, weights, config):
    """Return the logits (L, V) of one row."""
    x = weights["embed_tokens.weight"][tokens]
    eps = config.rms_norm_eps
    for number in range(config.num_layers):
        layer = f"layers.{number}"
        normed = norm(x, weights[f"{layer}.input_norm.weight"], eps)
        x = x + attention(normed, weights, f"{layer}.self_attn", config)
        normed = norm(x, weights[f"{layer}.mlp_norm.weight"], eps)
        x = x + feed_forward(normed, weights, f"{layer}.mlp")
    head = weights["embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return norm(x, weights["norm.weight"], eps) @ head.T


def loss(inputs, labels, weights, config):
    """Return the mean over rows of the mean over labels of the cross-entropy."""
    total = 0.0
    for row, wanted in zip(inputs, labels, strict=True):
        found = logits(row, weights, config)
        log_sums = np.log(np.exp(found - found.max(-1, keepdims=True)).sum(-1)) + found.max(-1)
        known = wanted != IGNORE
        places = np.nonzero(known)[0]
        total += (log_sums[places] - found[places, wanted[places]]).mean()
    return total / len(inputs)


def gradient(inputs, labels, weights, config, name, place, width=1e-6):
    """Return the derivative by one weight."""
    values = []
    for sign in (1, -1):
        changed = weights[name].copy()
        changed[place] += sign * width
        values.append(loss(inputs, labels, {**weights, name: changed}, config))
    return (values[0] - values[1]) / (2 * width)


def adafactor(start, gradients, rate, decay, relative_to=1e-3):
    """Apply Adafactor (Shazeer & Stern 2018, with decoupled weight decay) to one matrix or vector."""
    x = start.copy()
    rows = columns = whole = 0.0
    for step, g in enumerate(gradients, start=1):
        beta = 1 - step**-0.8
        squares = g**2 + 1e-30
        if x.ndim == 2:
            rows = beta * rows + (1 - beta) * squares.mean(1)
            columns = beta * columns + (1 - beta) * squares.mean(0)
            second = np.outer(rows, columns) / rows.mean()
        else:
            whole = beta * whole + (1 - beta) * squares
            second = whole
        update = g / np.sqrt(second)
        update = update / max(1.0, np.sqrt((update**2).mean()))
        x = x * (1 - rate * (decay if x.ndim == 2 else 0.0))
        x = x - rate * max(relative_to, np.sqrt((x**2).mean())) * update
    return x
