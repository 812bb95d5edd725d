"""The Tiny Recursive Model: one small network, applied again and again to its own answer.

Parameter names are those of the reference implementation, so checkpoints differ by a prefix only.

Shapes: L positions (prefix included), B slots, D hidden size, V outputs, K latents (2, or 1 for the variants
that carry only one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trm.backends.failures import check_shapes
from trm.backends.formulas import IMPOSSIBLE_LOGIT, INITIAL_HALT_BIAS
from trm.backends.pytorch.compile import compile_block
from trm.backends.pytorch.device import to_tensor
from trm.backends.pytorch.layers import Angles, Block, Generator, Projection, linear, truncated_normal
from trm.backends.pytorch.losses import SlotLosses, slot_losses
from trm.backends.pytorch.plain import widened
from trm.backends.sizes import count_positions
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import DataSpec

if TYPE_CHECKING:
    from trm.backends.base import StepSettings
    from trm.backends.pytorch.step_tensors import MicroBatch


class Embedding(nn.Module):
    def __init__(self, num_rows: int, config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        std = config.hidden_size**-0.5
        self.embedding_weight = nn.Parameter(
            truncated_normal(num_rows, config.hidden_size, std=std, generator=generator)
        )


class PuzzleEmbedding(nn.Module):
    """One learned row per puzzle identifier. A buffer, because its rows have an optimizer of their own."""

    weights: Tensor

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_rows, width))


class HaltHead(nn.Module):
    """Two logits, halt and continue, of which only the first is trained (as published)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, hidden_size))
        self.bias = nn.Parameter(torch.full((2,), INITIAL_HALT_BIAS))


def rotary_angles(num_positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    frequencies = 1 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def candidate_marks(tokens_LB: Tensor, vocab_size: int) -> Tensor:
    """Return (L x digits, B) marks per digit of each cell: 0 open, 1 given, 2 another digit is given.

    Digits are the last tokens of the vocabulary.
    """
    digits = math.isqrt(len(tokens_LB))
    digit_1D1 = torch.arange(vocab_size - digits, vocab_size, device=tokens_LB.device)[None, :, None]
    token_L1B = tokens_LB[:, None]
    marks = torch.where(token_L1B == digit_1D1, 1, 2) * (token_L1B >= vocab_size - digits)
    return marks.flatten(0, 1)


class TinyRecursiveModel(nn.Module):
    initial_latents: Tensor
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self, config: ModelConfig, data: DataSpec, seed: int | None = 0, precision: str | None = None
    ) -> None:
        """Without a seed the model has no weights, only their shapes."""
        super().__init__()
        self.config = config
        self.data = data
        self.precision = precision or config.forward_dtype
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.num_positions = count_positions(config, data)
        candidates = config.mixer == "candidates"
        self.embed_tokens = Embedding(3 if candidates else data.vocab_size, config, generator)
        if config.pos_encodings == "learned":
            self.embed_pos = Embedding(self.num_positions, config, generator)
        if config.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(data.num_puzzle_identifiers, config.puzzle_emb_ndim)
        self.L_level = Block(self.num_positions, config, data.layout, generator)
        self.lm_head = Projection(config.hidden_size, 1 if candidates else data.num_outputs, generator)
        self.q_head = HaltHead(config.hidden_size)
        num_latents = 2 if config.variant == "trm" else 1
        initial = truncated_normal(num_latents, config.hidden_size, std=1, generator=generator)
        self.register_buffer("initial_latents", initial)
        if config.pos_encodings == "rope":
            head_size = config.hidden_size // config.num_heads
            cos, sin = rotary_angles(self.num_positions, head_size, config.rope_theta)
            self.register_buffer("rope_cos", cos.to(initial.device), persistent=False)
            self.register_buffer("rope_sin", sin.to(initial.device), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.dtype_for(self.precision)

    def dtype_for(self, precision: str) -> torch.dtype:
        return torch.bfloat16 if precision == "bfloat16" else self.initial_latents.dtype

    def start(self, batch_size: int, length: int | None = None) -> Tensor:
        """Return initial latents (K, L, B, D), for rows of this many tokens."""
        num_latents, hidden_size = self.initial_latents.shape
        positions = self.num_positions if length is None else self.positions_of(length)
        initial = self.initial_latents.to(self.dtype)[:, None, None, :]
        return initial.expand(num_latents, positions, batch_size, hidden_size)

    def positions_of(self, length: int) -> int:
        """Return the positions of rows of this many tokens."""
        return self.num_positions - (self.data.max_len - length)

    def noise(self, generator: torch.Generator, length: int | None = None) -> Tensor:
        """Draw noise for the initial latents of one example; a shorter row gets a part of the same noise."""
        full = self.start(1)
        drawn = torch.randn(full.shape, generator=generator)
        positions = self.num_positions if length is None else self.positions_of(length)
        return drawn[:, :positions].to(device=full.device, dtype=full.dtype)

    def angles(self, num_positions: int) -> Angles:
        if self.config.pos_encodings != "rope":
            return None
        return self.rope_cos[:num_positions], self.rope_sin[:num_positions]

    def embed(self, inputs_BL: Tensor, puzzle_rows: Tensor | None) -> Tensor:
        """Return the question x, (L, B, D); `puzzle_rows` (B, puzzle_emb_ndim) fill the prefix."""
        tokens_LB = inputs_BL.T
        if self.config.mixer == "candidates":
            tokens_LB = candidate_marks(tokens_LB, self.data.vocab_size)
        x_LBD = F.embedding(tokens_LB, self.embed_tokens.embedding_weight.to(self.dtype))
        if puzzle_rows is not None:
            prefix_len = self.config.prefix_len
            hidden_size = self.config.hidden_size
            padded = F.pad(puzzle_rows, (0, prefix_len * hidden_size - puzzle_rows.shape[1]))
            prefix = padded.view(-1, prefix_len, hidden_size).transpose(0, 1).to(x_LBD.dtype)
            x_LBD = torch.cat((prefix, x_LBD))
        if self.config.pos_encodings == "learned":  # the factor keeps the variance of the sum at one
            positions = self.embed_pos.embedding_weight[: len(x_LBD)].to(x_LBD.dtype)[:, None]
            x_LBD = math.sqrt(0.5) * (x_LBD + positions)
        return math.sqrt(self.config.hidden_size) * x_LBD

    def forward(
        self,
        inputs_BL: Tensor,
        puzzle_rows: Tensor | None,
        latents_KLBD: Tensor,
        cycles: int,
        padding_BL: Tensor | None = None,
    ) -> Tensor:
        """Recurse `cycles` times, only the last with gradient. The answer y is the first new latent.

        `padding_BL` is true where a row has no token; None if every row is full.
        """
        x_LBD = self.embed(inputs_BL, puzzle_rows)
        where = self.angles(len(x_LBD)), self._attended(padding_BL)
        latents = latents_KLBD.unbind(0)
        with torch.no_grad():
            for _ in range(cycles - 1):
                latents = self._cycle(x_LBD, latents, *where)
        return torch.stack(self._cycle(x_LBD, latents, *where))

    def _attended(self, padding_BL: Tensor | None) -> Tensor | None:
        """Return (B, L) positions that others may attend to: the prefix, and tokens that are not padding."""
        if padding_BL is None:
            return None
        self.config.require_padding()
        return F.pad(~padding_BL, (self.config.prefix_len, 0), value=True)

    def _cycle(
        self, x_LBD: Tensor, latents: tuple[Tensor, ...], angles: Angles, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        if self.config.variant == "transformer":
            return (self.L_level(latents[0] + x_LBD, angles, mask),)
        if self.config.variant == "singlez":
            (z_LBD,) = latents
            for _ in range(self.config.L_cycles):
                z_LBD = self.L_level(z_LBD + x_LBD, angles, mask)
            return (self.L_level(z_LBD, angles, mask),)
        y_LBD, z_LBD = latents
        question_LBD = y_LBD + x_LBD  # y does not change while z is updated
        for _ in range(self.config.L_cycles):
            z_LBD = self.L_level(z_LBD + question_LBD, angles, mask)
        return self.L_level(y_LBD + z_LBD, angles, mask), z_LBD

    def losses(
        self, taken: MicroBatch, settings: StepSettings, training: TrainingConfig
    ) -> tuple[SlotLosses, Tensor | None]:
        """Return the losses of a micro-batch, and its new latents."""
        assert taken.latents is not None
        new_latents: Tensor = self(
            taken.inputs, taken.puzzle_rows, taken.latents, settings.cycles, taken.padding
        )
        smoothing = settings.label_smoothing
        losses = slot_losses(self, new_latents[0], taken.labels, training, taken.weights, smoothing)
        return losses, new_latents

    @property
    def undecayed(self) -> frozenset[str]:
        """Names of parameters without weight decay: none, as in the reference implementation."""
        return frozenset()

    @property
    def recompute_every(self) -> int:
        return self.L_level.recompute_every

    @recompute_every.setter
    def recompute_every(self, every: int) -> None:
        self.L_level.recompute_every = every

    def compile_for(self, precision: str, batch_size: int, threads: int) -> None:
        """Compile the block for this micro-batch size and number of threads."""
        compile_block(self, precision, batch_size, threads)

    def discard_compiled(self) -> None:
        self.L_level.compiled_size = None

    def answer_positions(self, y_LBD: Tensor) -> Tensor:
        """Return (B, L, D) without the prefix; with candidates (B, cells, digits, D)."""
        if self.config.mixer == "candidates":
            return y_LBD.view(self.data.max_len, -1, *y_LBD.shape[1:]).permute(2, 0, 1, 3)
        return y_LBD[self.config.prefix_len :].transpose(0, 1)

    def token_logits(self, positions: Tensor) -> Tensor:
        logits = linear(positions, self.lm_head.weight)
        if self.config.mixer == "candidates":
            scores = logits.squeeze(-1)
            return F.pad(scores, (self.data.num_outputs - scores.shape[-1], 0), value=IMPOSSIBLE_LOGIT)
        return logits

    def halt_logits(self, y_LBD: Tensor) -> Tensor:
        """Return (B, 2) from the first position, which is never padding.

        An answer of candidates is as good as its weakest one, so their odds are combined by a soft minimum.
        The factor lets the logits grow sooner.
        """
        weight = self.q_head.weight.to(y_LBD.dtype)
        bias = self.q_head.bias.to(y_LBD.dtype)
        if self.config.mixer == "candidates":
            each = widened(F.linear(y_LBD, math.sqrt(self.config.hidden_size) * weight, bias))
            return math.log(len(each)) - torch.logsumexp(-each, 0)
        return widened(F.linear(y_LBD[0], weight, bias))


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy weights, which may be NumPy arrays, into a model on the CPU."""
    check_shapes(model.state_dict(), weights, "The weights do")
    cpu = torch.device("cpu")
    model.load_state_dict(
        {name: each if isinstance(each, Tensor) else to_tensor(each, cpu) for name, each in weights.items()}
    )
