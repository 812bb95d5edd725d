"""A causal language model: grouped-query attention, rotary positions, SwiGLU and RMS norm before each part.

Names, shapes and the order in which initial weights are drawn are those of the PyTorch backend. Dropout draws
from a generator per slot and place, so the split into micro-batches does not change it, and a layer that is
computed again drops the same units.

Shapes: B slots, L positions, D hidden size, H heads, G key/value heads, S head size, N positions at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from trm.arrays import IntArray
from trm.backends.draws import DECODER_STD, Draws
from trm.backends.mlx.layers import Drawn, Weights, computed_again, linear, rotated, swiglu, widened
from trm.backends.mlx.losses import SlotLosses, sum_over_slots, token_losses
from trm.backends.mlx.model import rotary_angles
from trm.backends.mlx.step_arrays import MicroBatch
from trm.backends.sizes import LOGITS_AT_A_TIME
from trm.batch import IGNORE_LABEL
from trm.config import DecoderConfig, TrainingConfig
from trm.slots import random_words
from trm.tasks.base import DataSpec

_TOKENS = "embed_tokens.weight"
_NORM = "norm.weight"


class KeyValueCache:
    """Keys and values of the positions so far, of one layer and one text."""

    def __init__(self) -> None:
        self.stored: tuple[mx.array, mx.array] | None = None

    def extended(self, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
        """Add those of new positions, and return those of all positions."""
        if self.stored is not None:
            key, value = (
                mx.concatenate(list(each), axis=2) for each in zip(self.stored, (key, value), strict=True)
            )
        self.stored = key, value
        return self.stored

    @property
    def used(self) -> int:
        return 0 if self.stored is None else self.stored[0].shape[2]


class Dropout:
    """Zeroes a share of the units, by a generator per slot that the place in the model seeds."""

    def __init__(self, share: float, seeds: IntArray) -> None:
        self.kept = 1 - share
        self.seeds = seeds

    def __call__(self, x_BLD: mx.array, place: int) -> mx.array:
        words = random_words(self.seeds, place).tolist()
        masks = np.stack([Draws(word).bernoulli(*x_BLD.shape[1:], share=self.kept) for word in words])
        return x_BLD * (mx.array(masks).astype(mx.float32) / self.kept).astype(x_BLD.dtype)


def normalized(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMS norm with a learned scale per channel."""
    return mx.fast.rms_norm(widened(x), widened(weight), eps).astype(x.dtype)


class Decoder:
    """A causal decoder. Every `recompute_every`-th layer is recomputed in the backward pass; 0: none."""

    recompute_every = 0
    buffers: tuple[str, ...] = ()

    def __init__(self, config: DecoderConfig, data: DataSpec, precision: str) -> None:
        self.config = config
        self.data = data
        self.precision = precision
        self.all_angles = rotary_angles(data.max_len, config.head_size, config.rope_theta)

    def draw(self, draws: Draws) -> Drawn:
        """Draw the initial weights."""
        D = self.config.hidden_size
        drawn = {_TOKENS: self._matrix(draws, self.data.vocab_size, D)}
        for number in range(self.config.num_layers):
            layer = self._draw_layer(draws)
            drawn |= {f"layers.{number}.{name}": each for name, each in layer.items()}
        drawn[_NORM] = mx.ones((D,), dtype=self._kept_in)
        if not self.config.tie_embeddings:
            drawn["lm_head.weight"] = self._matrix(draws, self.data.num_outputs, D)
        return drawn

    def _draw_layer(self, draws: Draws) -> Drawn:
        """Draw a layer; what adds to the residual stream starts smaller, to keep the variance of the sum."""
        config = self.config
        D, inner = config.hidden_size, config.inner_size
        qkv = (config.num_heads + 2 * config.kv_heads) * config.head_size
        smaller = (2 * config.num_layers) ** -0.5
        return {
            "self_attn.qkv_proj.weight": self._matrix(draws, qkv, D),
            "self_attn.o_proj.weight": self._matrix(draws, D, D, smaller),
            "mlp.gate_up_proj.weight": self._matrix(draws, 2 * inner, D),
            "mlp.down_proj.weight": self._matrix(draws, D, inner, smaller),
            "input_norm.weight": mx.ones((D,), dtype=self._kept_in),
            "mlp_norm.weight": mx.ones((D,), dtype=self._kept_in),
        }

    def _matrix(self, draws: Draws, rows: int, columns: int, factor: float = 1.0) -> mx.array:
        """Draw and scale before rounding; the factor is applied to what was rounded, as in PyTorch."""
        drawn = mx.array(draws.normal(rows, columns) * np.float32(DECODER_STD)).astype(self._kept_in)
        return (widened(drawn) * factor).astype(self._kept_in)

    @property
    def _kept_in(self) -> mx.Dtype:
        """The precision of the weights."""
        return mx.bfloat16 if self.config.weights_dtype == "bfloat16" else mx.float32

    @property
    def dtype(self) -> mx.Dtype:
        """The precision of activations."""
        return mx.bfloat16 if self.precision == "bfloat16" else mx.float32

    @property
    def undecayed(self) -> frozenset[str]:
        """Names of parameters without weight decay: the scales of the norms."""
        layers = range(self.config.num_layers)
        return frozenset({_NORM}).union(
            f"layers.{number}.{norm}.weight" for number in layers for norm in ("input_norm", "mlp_norm")
        )

    def hidden(
        self,
        weights: Weights,
        tokens_BL: mx.array,
        dropout: Dropout | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> mx.array:
        """Return (B, L, D) after the last norm. Caches hold the positions before these tokens."""
        first = 0 if caches is None else caches[0].used
        here = slice(first, first + tokens_BL.shape[1])
        angles = self.all_angles[0][here], self.all_angles[1][here]
        x_BLD = weights[_TOKENS][tokens_BL].astype(self.dtype)
        if dropout is not None:
            x_BLD = dropout(x_BLD, 0)
        for number in range(self.config.num_layers):
            cache = None if caches is None else caches[number]
            compute = partial(self._layer, number, angles, dropout, cache)
            is_recomputed = self.recompute_every and number % self.recompute_every == 0
            prefix = f"layers.{number}."
            own = {
                name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
            }
            x_BLD = (computed_again(compute) if is_recomputed and cache is None else compute)(own, x_BLD)
        return normalized(x_BLD, weights[_NORM], self.config.rms_norm_eps)

    def _layer(
        self,
        number: int,
        angles: tuple[mx.array, mx.array],
        dropout: Dropout | None,
        cache: KeyValueCache | None,
        weights: Weights,
        x_BLD: mx.array,
    ) -> mx.array:
        eps = self.config.rms_norm_eps
        change = self._attention(weights, normalized(x_BLD, weights["input_norm.weight"], eps), angles, cache)
        x_BLD = x_BLD + (change if dropout is None else dropout(change, 2 * number + 1))
        change = swiglu(weights, "mlp", normalized(x_BLD, weights["mlp_norm.weight"], eps))
        return x_BLD + (change if dropout is None else dropout(change, 2 * number + 2))

    def _attention(
        self,
        weights: Weights,
        x_BLD: mx.array,
        angles: tuple[mx.array, mx.array],
        cache: KeyValueCache | None,
    ) -> mx.array:
        B, L, D = x_BLD.shape
        H, G = self.config.num_heads, self.config.kv_heads
        heads = linear(x_BLD, weights["self_attn.qkv_proj.weight"]).reshape(B, L, -1, self.config.head_size)
        query, key, value = mx.split(heads.swapaxes(1, 2), [H, H + G], axis=1)
        query, key = rotated(query, angles), rotated(key, angles)
        if cache is not None:
            key, value = cache.extended(key, value)
        scale = self.config.head_size**-0.5
        mask = "causal" if L > 1 else None
        mixed = mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask)
        return linear(mixed.swapaxes(1, 2).reshape(B, L, D), weights["self_attn.o_proj.weight"])

    def head(self, weights: Weights) -> mx.array:
        return weights[_TOKENS if self.config.tie_embeddings else "lm_head.weight"]

    def losses(
        self, weights: Weights, taken: MicroBatch, training: TrainingConfig, smoothing: float
    ) -> tuple[SlotLosses, None]:
        """Return the losses of a micro-batch. There are no latents to carry."""
        dropout = None
        if self.config.dropout and taken.noise_seeds is not None:
            dropout = Dropout(self.config.dropout, taken.noise_seeds)
        hidden = self.hidden(weights, taken.inputs, dropout)
        if taken.places is not None:
            hidden = hidden[mx.arange(len(hidden))[:, None], taken.places]
        per_token, right = self.judged(weights, hidden, taken.labels, training.loss, smoothing)
        counts = (taken.labels != IGNORE_LABEL).sum(-1)
        total = sum_over_slots(per_token, counts, None)
        return SlotLosses(total, right.sum(-1), counts, mx.zeros((len(counts),))), None

    def judged(
        self, weights: Weights, hidden_BMD: mx.array, labels_BM: mx.array, loss: str, smoothing: float = 0.0
    ) -> tuple[mx.array, mx.array]:
        """Return the loss of each label, and whether it is the likeliest token, some positions at a time.

        The logits of a whole micro-batch would take more memory than the model where the vocabulary is large.
        Those of a chunk are computed again in the backward pass instead of being kept.
        """

        def of_chunk(labels_N: mx.array, head: mx.array, hidden_ND: mx.array) -> tuple[mx.array, mx.array]:
            logits = linear(hidden_ND, head)
            return token_losses(logits, labels_N, loss, smoothing), mx.argmax(logits, axis=-1) == labels_N

        hidden, labels = hidden_BMD.reshape(-1, hidden_BMD.shape[-1]), labels_BM.reshape(-1)
        at_a_time = max(1, LOGITS_AT_A_TIME // self.data.num_outputs)
        computed = []
        for start in range(0, len(labels), at_a_time):
            part = slice(start, start + at_a_time)
            # What is bound has no gradient; arguments of what is computed again do.
            of_part: Callable[..., tuple[mx.array, mx.array]] = partial(of_chunk, labels[part])
            if len(labels) > at_a_time:
                of_part = mx.checkpoint(of_part)
            computed.append(of_part(self.head(weights), hidden[part]))
        per_token, right = (
            mx.concatenate(list(each)).reshape(labels_BM.shape) for each in zip(*computed, strict=True)
        )
        return per_token, right
