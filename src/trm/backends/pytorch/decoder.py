"""A causal language model: grouped-query attention, rotary positions, SwiGLU and RMS norm before each part.

It has the same seam to the learner as the recursion: `losses` of a micro-batch, whose sum is divided by the
slots of all ranks. Dropout draws from a generator per slot and place, so the split into micro-batches does
not change it, and a layer that is recomputed drops the same units again.

Shapes: B slots, L positions, D hidden size, H heads, G key/value heads, S head size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from macbook_optimization.errors import CompilationError
from trm.arrays import IntArray
from trm.backends.draws import DECODER_STD
from trm.backends.pytorch.fused import converting_linear, grouped_heads, normalized, swiglu
from trm.backends.pytorch.layers import Generator
from trm.backends.pytorch.losses import SlotLosses, decoder_losses
from trm.backends.pytorch.model import rotary_angles
from trm.backends.sizes import LOGITS_AT_A_TIME
from trm.config import DecoderConfig, TrainingConfig
from trm.slots import random_words
from trm.tasks.base import DataSpec

if TYPE_CHECKING:
    from trm.backends.base import StepSettings
    from trm.backends.pytorch.step_tensors import MicroBatch


def _normal(*shape: int, std: float, generator: Generator, dtype: torch.dtype) -> Tensor:
    """Draw before rounding, so that a seed means the same model in either precision of the weights."""
    if generator is None:
        return torch.empty(*shape, device="meta", dtype=dtype)
    return torch.randn(*shape, generator=generator).mul_(std).to(dtype)


class Matrix(nn.Module):
    def __init__(self, rows: int, columns: int, config: DecoderConfig, generator: Generator) -> None:
        super().__init__()
        dtype = torch.bfloat16 if config.weights_dtype == "bfloat16" else torch.get_default_dtype()
        self.weight = nn.Parameter(_normal(rows, columns, std=DECODER_STD, generator=generator, dtype=dtype))


class Norm(nn.Module):
    """RMS norm with a learned scale per channel."""

    def __init__(self, like: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(like.shape[-1], dtype=like.dtype, device=like.device))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return normalized(x_BLD, self.weight, self.eps)


class KeyValueCache:
    """Keys and values of the positions so far, of one layer and one text."""

    def __init__(self, config: DecoderConfig, length: int, like: Tensor) -> None:
        shape = (2, 1, config.kv_heads, length, config.head_size)
        self.stored = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.used = 0

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new positions, and return those of all positions."""
        end = self.used + key.shape[2]
        self.stored[0, :, :, self.used : end] = key
        self.stored[1, :, :, self.used : end] = value
        self.used = end
        return self.stored[0, :, :, :end], self.stored[1, :, :, :end]


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, generator: Generator) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_size = config.head_size
        outputs = (self.num_heads + 2 * self.kv_heads) * self.head_size
        self.qkv_proj = Matrix(outputs, config.hidden_size, config, generator)
        self.o_proj = Matrix(config.hidden_size, config.hidden_size, config, generator)

    def forward(self, x_BLD: Tensor, angles: tuple[Tensor, Tensor], cache: KeyValueCache | None) -> Tensor:
        B, L, D = x_BLD.shape
        qkv = converting_linear(x_BLD, self.qkv_proj.weight).view(B, L, -1, self.head_size)
        shared = self.num_heads // self.kv_heads
        query, key, value = grouped_heads(qkv, angles, self.kv_heads, shared if cache is None else 1)
        if cache is not None:
            key, value = cache.extended(key, value)
            if shared > 1:  # `enable_gqa` is newer than the oldest supported version
                key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=L > 1)
        return converting_linear(mixed.transpose(1, 2).reshape(B, L, D), self.o_proj.weight)


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig, generator: Generator) -> None:
        super().__init__()
        self.gate_up_proj = Matrix(2 * config.inner_size, config.hidden_size, config, generator)
        self.down_proj = Matrix(config.hidden_size, config.inner_size, config, generator)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if self.down_proj.weight.dtype != x_BLD.dtype:
            gate, up = converting_linear(x_BLD, self.gate_up_proj.weight).chunk(2, dim=-1)
            return converting_linear(F.silu(gate) * up, self.down_proj.weight)
        flat = x_BLD.reshape(-1, x_BLD.shape[-1])
        return swiglu(flat, self.gate_up_proj.weight, self.down_proj.weight, dim=1).view_as(x_BLD)


class DecoderLayer(nn.Module):
    def __init__(self, number: int, config: DecoderConfig, generator: Generator) -> None:
        super().__init__()
        self.number = number
        self.self_attn = Attention(config, generator)
        self.mlp = FeedForward(config, generator)
        like = self.self_attn.o_proj.weight
        self.input_norm = Norm(like, config.rms_norm_eps)
        self.mlp_norm = Norm(like, config.rms_norm_eps)

    def forward(
        self,
        x_BLD: Tensor,
        angles: tuple[Tensor, Tensor],
        dropout: Dropout | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        change = self.self_attn(self.input_norm(x_BLD), angles, cache)
        x_BLD = x_BLD + (change if dropout is None else dropout(change, 2 * self.number + 1))
        change = self.mlp(self.mlp_norm(x_BLD))
        return x_BLD + (change if dropout is None else dropout(change, 2 * self.number + 2))


class Dropout:
    """Zeroes a share of the units, by a generator per slot that the place in the model seeds.

    `bernoulli_` would draw the same from it, except on processors of Intel, where it uses a generator of MKL.
    """

    def __init__(self, share: float, seeds: IntArray) -> None:
        self.kept = 1 - share
        self.seeds = seeds

    def __call__(self, x_BLD: Tensor, place: int) -> Tensor:
        words = random_words(self.seeds, place).astype("int64").tolist()
        generators = (torch.Generator().manual_seed(word) for word in words)
        drawn = (
            torch.rand(x_BLD.shape[1:], dtype=torch.float64, generator=generator, device="cpu")
            for generator in generators
        )
        masks = [each < self.kept for each in drawn]
        return x_BLD * (torch.stack(masks) / self.kept).to(device=x_BLD.device, dtype=x_BLD.dtype)


class Decoder(nn.Module):
    """A causal decoder. Every `recompute_every`-th layer is recomputed in the backward pass; 0: none."""

    recompute_every = 0
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self, config: DecoderConfig, data: DataSpec, seed: int | None = 0, precision: str | None = None
    ) -> None:
        """Without a seed the model has no weights, only their shapes."""
        super().__init__()
        self.config = config
        self.data = data
        self.precision = precision or config.forward_dtype
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.embed_tokens = Matrix(data.vocab_size, config.hidden_size, config, generator)
        self.layers = nn.ModuleList(
            DecoderLayer(number, config, generator) for number in range(config.num_layers)
        )
        weight = self.embed_tokens.weight
        self.norm = Norm(weight, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = Matrix(data.num_outputs, config.hidden_size, config, generator)
        self._shrink_residuals()
        cos, sin = rotary_angles(data.max_len, config.head_size, config.rope_theta)
        self.register_buffer("rope_cos", cos.to(weight.device), persistent=False)
        self.register_buffer("rope_sin", sin.to(weight.device), persistent=False)

    @torch.no_grad()
    def _shrink_residuals(self) -> None:
        """Keep the variance of the sum of all layers at the start, as in GPT-2."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * self.config.num_layers) ** -0.5)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of activations."""
        if self.precision == "bfloat16":
            return torch.bfloat16
        return torch.promote_types(self.embed_tokens.weight.dtype, torch.float32)

    def forward(
        self,
        tokens_BL: Tensor,
        dropout: Dropout | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """Return (B, L, D) after the last norm. Caches hold the positions before these tokens."""
        first = 0 if caches is None else caches[0].used
        here = slice(first, first + tokens_BL.shape[1])
        angles = self.rope_cos[here], self.rope_sin[here]
        x_BLD = F.embedding(tokens_BL, self.embed_tokens.weight).to(self.dtype)
        if dropout is not None:
            x_BLD = dropout(x_BLD, 0)
        for number, layer in enumerate(self.layers):
            if caches is not None:
                x_BLD = layer(x_BLD, angles, None, caches[number])
            elif self.recompute_every and torch.is_grad_enabled() and number % self.recompute_every == 0:
                x_BLD = checkpoint(
                    layer, x_BLD, angles, dropout, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BLD = layer(x_BLD, angles, dropout)
        result: Tensor = self.norm(x_BLD)
        return result

    @property
    def undecayed(self) -> frozenset[str]:
        """Names of parameters without weight decay: the scales of the norms."""
        return frozenset(name for name, weight in self.named_parameters() if weight.ndim < 2)

    def token_logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        return converting_linear(hidden, head.weight)

    def losses(
        self, taken: MicroBatch, settings: StepSettings, training: TrainingConfig
    ) -> tuple[SlotLosses, Tensor | None]:
        """Return the losses of a micro-batch. There are no latents to carry."""
        dropout = None
        if self.config.dropout and taken.noise_seeds is not None:
            dropout = Dropout(self.config.dropout, taken.noise_seeds)
        hidden = self(taken.inputs, dropout)
        smoothing = settings.smoothing(training)
        at_a_time = max(1, LOGITS_AT_A_TIME // self.data.num_outputs)
        losses = decoder_losses(self.token_logits, hidden, taken.labels, training.loss, smoothing, at_a_time)
        return losses, None

    def compile_for(self, precision: str, batch_size: int, threads: int) -> None:
        raise CompilationError("A decoder is not compiled; its layers differ in their weights.")

    def discard_compiled(self) -> None:
        return None

    def new_caches(self) -> list[KeyValueCache]:
        like = self.rope_cos.to(self.dtype)
        return [KeyValueCache(self.config, self.data.max_len, like) for _ in self.layers]
