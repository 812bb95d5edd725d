"""The Tiny Recursive Model written out in plain NumPy, float64, one example at a time.

It shares no code and no layout with the backends: sums and loops are those of the paper and the reference
implementation. Gradients are central differences, so there is no derivation that could be wrong twice.
"""

import math

import numpy as np

IGNORE = -100


def rms(x, eps):
    """Divide by the root mean square over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, weights, name):
    inner = x @ weights[f"{name}.gate_up_proj.weight"].T
    half = inner.shape[-1] // 2
    return (silu(inner[:, :half]) * inner[:, half:]) @ weights[f"{name}.down_proj.weight"].T


def rotated(x, theta):
    """Rotate each pair (i, i + d/2) of x (L, d) by the angle position * theta**(-2i/d)."""
    length, size = x.shape
    out = np.empty_like(x)
    for position in range(length):
        for i in range(size // 2):
            angle = position * theta ** (-2 * i / size)
            a, b = x[position, i], x[position, i + size // 2]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(x, weights, name, config):
    size = config.hidden_size // config.num_heads
    qkv = x @ weights[f"{name}.qkv_proj.weight"].T
    heads = []
    for head in range(config.num_heads):
        query, key, value = (qkv[:, part * config.hidden_size + head * size :][:, :size] for part in range(3))
        if config.pos_encodings == "rope":
            query, key = rotated(query, config.rope_theta), rotated(key, config.rope_theta)
        scores = query @ key.T / math.sqrt(size)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(scores / scores.sum(-1, keepdims=True) @ value)
    return np.concatenate(heads, axis=-1) @ weights[f"{name}.o_proj.weight"].T


def convolution(x, weight, size):
    """Convolve each channel of x (L, D), a square grid stored row by row, with zeros beyond its edge."""
    side = math.isqrt(len(x))
    out = np.zeros_like(x)
    for row in range(side):
        for column in range(side):
            for i in range(size):
                for j in range(size):
                    r, c = row + i - size // 2, column + j - size // 2
                    if 0 <= r < side and 0 <= c < side:
                        out[row * side + column] += weight[:, 0, i, j] * x[r * side + c]
    return out


def group_pooling_mlp(x, weights, name, box):
    """Apply SwiGLU to x (cells x digits, D) and sum hidden units over constraint groups, kind by kind.

    The first units belong to a candidate alone.
    """
    rows, columns = box
    size = rows * columns
    inner = x @ weights[f"{name}.gate_up_proj.weight"].T
    half = inner.shape[-1] // 2
    hidden = silu(inner[:, :half]) * inner[:, half:]
    units = half // 5 // 8 * 8 or half // 5
    triples = [(row, column, digit) for row in range(size) for column in range(size) for digit in range(size)]
    kinds = (
        lambda row, column, digit: (row, digit),
        lambda row, column, digit: (column, digit),
        lambda row, column, digit: (row // rows, column // columns, digit),
        lambda row, column, digit: (row, column),
    )
    pooled = hidden.copy()
    for kind, group_of in enumerate(kinds):
        start = half - (4 - kind) * units
        for i, triple in enumerate(triples):
            members = [j for j, other in enumerate(triples) if group_of(*other) == group_of(*triple)]
            assert len(members) == size
            pooled[i, start : start + units] = hidden[members, start : start + units].sum(0) / math.sqrt(size)
    return pooled @ weights[f"{name}.down_proj.weight"].T


def network(h, weights, config):
    """Pass a latent (L, D) through the layers of the block once."""
    for i in range(config.num_layers):
        name = f"L_level.layers.{i}"
        if config.mixer == "candidates":
            h = rms(h + group_pooling_mlp(h, weights, f"{name}.mlp", (1, 2)), config.rms_norm_eps)
            continue
        if config.mixer == "mlp":
            h = rms(h.T + swiglu(h.T, weights, f"{name}.mlp_t"), config.rms_norm_eps).T
        elif config.mixer == "neighbourhood":
            mixed = convolution(h, weights[f"{name}.nearby.weight"], config.neighbourhood_size)
            h = rms(h + mixed, config.rms_norm_eps)
        else:
            h = rms(h + attention(h, weights, f"{name}.self_attn", config), config.rms_norm_eps)
        h = rms(h + swiglu(h, weights, f"{name}.mlp"), config.rms_norm_eps)
    return h


def question(tokens, identifier, weights, config):
    """Return x (L, D): the embedded tokens, after the prefix of the puzzle embedding if there is one."""
    if config.mixer == "candidates":  # the last two of six tokens are digits
        digits = range(4, 6)
        tokens = [(1 if token == d else 2) if token in digits else 0 for token in tokens for d in digits]
    x = weights["embed_tokens.embedding_weight"][tokens]
    if config.puzzle_emb_ndim:
        prefix = np.zeros(config.prefix_len * config.hidden_size)
        prefix[: config.puzzle_emb_ndim] = weights["puzzle_emb.weights"][identifier]
        x = np.concatenate([prefix.reshape(config.prefix_len, config.hidden_size), x])
    if config.pos_encodings == "learned":
        x = (x + weights["embed_pos.embedding_weight"][: len(x)]) / math.sqrt(2)
    return math.sqrt(config.hidden_size) * x


def cycle(x, latents, weights, config):
    if config.variant == "transformer":
        return [network(latents[0] + x, weights, config)]
    if config.variant == "singlez":
        z = latents[0]
        for _ in range(config.L_cycles):
            z = network(z + x, weights, config)
        return [network(z, weights, config)]
    y, z = latents
    for _ in range(config.L_cycles):
        z = network(x + y + z, weights, config)
    return [network(y + z, weights, config), z]


def supervise(tokens, identifier, latents, weights, config, cycles, frozen=None):
    """Return new latents, token logits (L, V) and halting logits (2,).

    `frozen` weights compute all cycles but the last, because training has a gradient in the last one only.
    """
    frozen = weights if frozen is None else frozen
    x = question(tokens, identifier, frozen, config)
    for _ in range(cycles - 1):
        latents = cycle(x, latents, frozen, config)
    latents = cycle(question(tokens, identifier, weights, config), latents, weights, config)
    y = latents[0]
    if config.mixer == "candidates":
        each = np.sqrt(config.hidden_size) * y @ weights["q_head.weight"].T + weights["q_head.bias"]
        halt = -np.log(np.mean(np.exp(-each), axis=0))
        scores = (y @ weights["lm_head.weight"][0]).reshape(len(tokens), -1)
        others = np.full((len(tokens), 4 - scores.shape[1]), -20.0)  # the last two of four outputs are digits
        return latents, np.concatenate([others, scores], axis=1), halt
    halt = weights["q_head.weight"] @ y[0] + weights["q_head.bias"]
    return latents, y[config.prefix_len :] @ weights["lm_head.weight"].T, halt


def stablemax_loss(logits, label):
    scores = [x + 1 if x >= 0 else 1 / (1 - x) for x in logits]
    return -math.log(scores[label] / sum(scores))


def softmax_loss(logits, label):
    return math.log(sum(math.exp(x) for x in logits)) - logits[label]


def slot_loss(logits, halt, labels, training):
    token_loss = stablemax_loss if training.loss == "stablemax_cross_entropy" else softmax_loss
    labelled = [i for i, label in enumerate(labels) if label != IGNORE]
    exact = bool(labelled) and all(int(np.argmax(logits[i])) == labels[i] for i in labelled)
    tokens = sum(token_loss(logits[i], labels[i]) for i in labelled) / max(1, len(labelled))
    q = float(halt[0])
    halting = max(q, 0) - q * exact + math.log1p(math.exp(-abs(q)))
    return tokens + training.halt_loss_weight * halting


def batch_loss(batch, latents, weights, config, training, cycles, frozen=None):
    """Return the mean over slots; `latents` is a list of [y, z] per slot."""
    inputs, labels, identifiers = batch
    total = 0.0
    for tokens, expected, identifier, state in zip(inputs, labels, identifiers, latents, strict=True):
        _, logits, halt = supervise(tokens, identifier, state, weights, config, cycles, frozen)
        total += slot_loss(logits, halt, expected, training)
    return total / len(inputs)


def gradient(loss_of, weights, name, indices, width=1e-5):
    """Return central differences of loss_of(weights) at some entries of one tensor."""
    slopes = []
    for index in indices:
        values = []
        for sign in (1, -1):
            moved = dict(weights)
            moved[name] = weights[name].copy()
            moved[name][index] += sign * width
            values.append(loss_of(moved))
        slopes.append((values[0] - values[1]) / (2 * width))
    return np.array(slopes)


def adam(parameter, gradients, optimizer, rate, decay, beta1, beta2):
    """Return a parameter after one update per gradient."""
    mean = square = np.zeros_like(parameter)
    for step, slope in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * slope
        square = beta2 * square + (1 - beta2) * slope**2
        m, v = mean / (1 - beta1**step), square / (1 - beta2**step)
        move = np.arctan2(m, np.sqrt(v)) if optimizer == "adam_atan2" else m / (np.sqrt(v) + 1e-8)
        parameter = parameter * (1 - rate * decay) - rate * move
    return parameter
