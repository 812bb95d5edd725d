"""The Tiny Recursive Model: one small network, applied again and again to its own answer.

A network has no weights of its own: its methods take them as an argument, because MLX differentiates
functions by their arguments. Names and shapes are those of the PyTorch backend.

Shapes: L positions (prefix included), B slots, D hidden size, V outputs, K latents (2, or 1 for the variants
that carry only one).
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from trm.backends.draws import Draws
from trm.backends.formulas import IMPOSSIBLE_LOGIT, INITIAL_HALT_BIAS
from trm.backends.mlx.layers import Angles, Block, Drawn, Weights, linear, widened
from trm.backends.mlx.losses import (
    SlotLosses,
    count_correct,
    halt_losses,
    sum_over_slots,
    token_losses,
)
from trm.backends.mlx.step_arrays import MicroBatch
from trm.backends.sizes import count_positions
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import DataSpec

INITIAL_LATENTS = "initial_latents"
PUZZLE_ROWS = "puzzle_emb.weights"  # one learned row per puzzle identifier, with an optimizer of its own
_BLOCK = "L_level."
_TOKENS = "embed_tokens.embedding_weight"
_POSITIONS = "embed_pos.embedding_weight"


def rotary_angles(num_positions: int, head_size: int, theta: float) -> tuple[mx.array, mx.array]:
    """Return cosines and sines, computed in float32 throughout as in the PyTorch backend."""
    powers = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = np.float32(1) / np.float32(theta) ** powers
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    return mx.array(np.cos(angles)), mx.array(np.sin(angles))


def candidate_marks(tokens_LB: mx.array, vocab_size: int) -> mx.array:
    """Return (L x digits, B) marks per digit of each cell: 0 open, 1 given, 2 another digit is given.

    Digits are the last tokens of the vocabulary.
    """
    L, B = tokens_LB.shape
    digits = math.isqrt(L)
    digit_1D1 = mx.arange(vocab_size - digits, vocab_size)[None, :, None]
    token_L1B = tokens_LB[:, None]
    marks = mx.where(token_L1B == digit_1D1, 1, 2) * (token_L1B >= vocab_size - digits)
    return marks.reshape(L * digits, B)


class TinyRecursiveModel:
    undecayed: frozenset[str] = frozenset()  # parameters without weight decay: none, as published
    buffers = (INITIAL_LATENTS, PUZZLE_ROWS)  # among the weights, but not changed by the optimizer
    token_table = _TOKENS

    def __init__(self, config: ModelConfig, data: DataSpec, precision: str) -> None:
        self.config = config
        self.data = data
        self.precision = precision
        self.num_positions = count_positions(config, data)
        self.num_latents = 2 if config.variant == "trm" else 1
        self.block = Block(self.num_positions, config, data.layout)
        self.all_angles: Angles = None
        if config.pos_encodings == "rope":
            head_size = config.hidden_size // config.num_heads
            self.all_angles = rotary_angles(self.num_positions, head_size, config.rope_theta)

    def draw(self, draws: Draws) -> Drawn:
        """Draw the initial weights, buffers included."""
        config, data = self.config, self.data
        D = config.hidden_size
        candidates = config.mixer == "candidates"

        def embedding(num_rows: int) -> mx.array:
            return mx.array(draws.truncated_normal(num_rows, D, std=D**-0.5))

        drawn = {_TOKENS: embedding(3 if candidates else data.vocab_size)}
        if config.pos_encodings == "learned":
            drawn[_POSITIONS] = embedding(self.num_positions)
        if config.puzzle_emb_ndim:
            drawn[PUZZLE_ROWS] = mx.zeros((data.num_puzzle_identifiers, config.puzzle_emb_ndim))
        drawn |= {_BLOCK + name: each for name, each in self.block.draw(draws).items()}
        num_outputs = 1 if candidates else data.num_outputs
        drawn["lm_head.weight"] = mx.array(draws.truncated_normal(num_outputs, D, std=D**-0.5))
        drawn["q_head.weight"] = mx.zeros((2, D))
        drawn["q_head.bias"] = mx.full((2,), INITIAL_HALT_BIAS)
        drawn[INITIAL_LATENTS] = mx.array(draws.truncated_normal(self.num_latents, D, std=1))
        return drawn

    @property
    def recompute_every(self) -> int:
        return self.block.recompute_every

    @recompute_every.setter
    def recompute_every(self, every: int) -> None:
        self.block.recompute_every = every

    @property
    def dtype(self) -> mx.Dtype:
        return mx.bfloat16 if self.precision == "bfloat16" else mx.float32

    def start(self, weights: Weights, batch_size: int, length: int | None = None) -> mx.array:
        """Return initial latents (K, L, B, D), for rows of this many tokens."""
        initial = weights[INITIAL_LATENTS].astype(self.dtype)[:, None, None, :]
        shape = (self.num_latents, self.positions_of(length), batch_size, self.config.hidden_size)
        return mx.broadcast_to(initial, shape)

    def positions_of(self, length: int | None) -> int:
        """Return the positions of rows of this many tokens; None for full rows."""
        return self.num_positions - (0 if length is None else self.data.max_len - length)

    def noise(self, seed: int, length: int | None = None) -> mx.array:
        """Draw noise for the initial latents of one example; a shorter row gets a part of the same noise."""
        drawn = Draws(seed).normal(self.num_latents, self.num_positions, 1, self.config.hidden_size)
        return mx.array(drawn[:, : self.positions_of(length)]).astype(self.dtype)

    def embed(self, weights: Weights, taken: MicroBatch) -> mx.array:
        """Return the question x, (L, B, D); puzzle embeddings fill the prefix."""
        config = self.config
        tokens_LB = taken.inputs.T
        if config.mixer == "candidates":
            tokens_LB = candidate_marks(tokens_LB, self.data.vocab_size)
        x_LBD = weights[_TOKENS].astype(self.dtype)[tokens_LB]
        if taken.puzzle_rows is not None:
            missing = config.prefix_len * config.hidden_size - config.puzzle_emb_ndim
            padded = mx.pad(weights[PUZZLE_ROWS][taken.puzzle_rows], [(0, 0), (0, missing)])
            prefix = padded.reshape(-1, config.prefix_len, config.hidden_size).swapaxes(0, 1)
            x_LBD = mx.concatenate([prefix.astype(x_LBD.dtype), x_LBD])
        if config.pos_encodings == "learned":  # the factor keeps the variance of the sum at one
            positions = weights[_POSITIONS][: len(x_LBD)].astype(x_LBD.dtype)[:, None]
            x_LBD = math.sqrt(0.5) * (x_LBD + positions)
        return math.sqrt(config.hidden_size) * x_LBD

    def cycle(self, weights: Weights, taken: MicroBatch, latents: mx.array) -> mx.array:
        """Recurse once. The answer y is the first new latent."""
        x_LBD = self.embed(weights, taken)
        angles: Angles = None
        if self.all_angles is not None:
            angles = self.all_angles[0][: len(x_LBD)], self.all_angles[1][: len(x_LBD)]
        mask = self._attended(taken.padding)
        own = {name.removeprefix(_BLOCK): each for name, each in weights.items() if name.startswith(_BLOCK)}

        def block(latent: mx.array) -> mx.array:
            return self.block(own, latent, angles, mask)

        if self.config.variant == "transformer":
            return block(latents[0] + x_LBD)[None]
        if self.config.variant == "singlez":
            z_LBD = latents[0]
            for _ in range(self.config.L_cycles):
                z_LBD = block(z_LBD + x_LBD)
            return block(z_LBD)[None]
        y_LBD, z_LBD = latents
        question_LBD = y_LBD + x_LBD  # y does not change while z is updated
        for _ in range(self.config.L_cycles):
            z_LBD = block(z_LBD + question_LBD)
        return mx.stack([block(y_LBD + z_LBD), z_LBD])

    def _attended(self, padding_BL: mx.array | None) -> mx.array | None:
        """Return (B, L) positions that others may attend to: the prefix, and tokens that are not padding."""
        if padding_BL is None:
            return None
        self.config.require_padding()
        prefix = mx.ones((len(padding_BL), self.config.prefix_len), dtype=mx.bool_)
        return mx.concatenate([prefix, ~padding_BL], axis=1)

    def losses(
        self, weights: Weights, taken: MicroBatch, training: TrainingConfig, smoothing: float
    ) -> tuple[SlotLosses, mx.array]:
        """Recurse once, with gradient; return the losses of a micro-batch, and its new latents."""
        assert taken.latents is not None
        new_latents = self.cycle(weights, taken, taken.latents)
        positions = self.answer_positions(new_latents[0])
        if taken.places is not None:
            positions = positions[mx.arange(len(positions))[:, None], taken.places]
        logits = self.token_logits(weights, positions)
        correct, counts = count_correct(logits, taken.labels)
        per_token = token_losses(logits, taken.labels, training.loss, smoothing)
        halting, continuing = self.halt_logits(weights, new_latents[0]).T
        total = sum_over_slots(per_token, counts, taken.weights)
        total = total + training.halt_loss_weight * halt_losses(halting, correct, counts)
        # As published: recursive variants halt when the halt logit is positive, the transformer baseline when
        # it exceeds the continue logit.
        margins = halting - continuing if self.config.variant == "transformer" else halting
        return SlotLosses(total, correct, counts, margins), new_latents

    def answer_positions(self, y_LBD: mx.array) -> mx.array:
        """Return (B, L, D) without the prefix; with candidates (B, cells, digits, D)."""
        if self.config.mixer == "candidates":
            return y_LBD.reshape(self.data.max_len, -1, *y_LBD.shape[1:]).transpose(2, 0, 1, 3)
        return y_LBD[self.config.prefix_len :].swapaxes(0, 1)

    def token_logits(self, weights: Weights, positions: mx.array) -> mx.array:
        logits = linear(positions, weights["lm_head.weight"])
        if self.config.mixer != "candidates":
            return logits
        scores = logits.squeeze(-1)
        impossible = mx.full((*scores.shape[:-1], self.data.num_outputs - scores.shape[-1]), IMPOSSIBLE_LOGIT)
        return mx.concatenate([impossible.astype(scores.dtype), scores], axis=-1)

    def halt_logits(self, weights: Weights, y_LBD: mx.array) -> mx.array:
        """Return (B, 2) from the first position, which is never padding.

        An answer of candidates is as good as its weakest one, so their odds are combined by a soft minimum.
        The factor lets the logits grow sooner.
        """
        weight = weights["q_head.weight"].astype(y_LBD.dtype)
        bias = weights["q_head.bias"].astype(y_LBD.dtype)
        if self.config.mixer == "candidates":
            each = widened(linear(y_LBD, math.sqrt(self.config.hidden_size) * weight) + bias)
            return math.log(len(each)) - mx.logsumexp(-each, axis=0)
        return widened(linear(y_LBD[0], weight) + bias)
