"""The Tiny Recursive Model: one small network, applied again and again to its own answer.

Parameter names are those of the public code, so its checkpoints differ from ours by a prefix only.
Tensors are kept sequence first: the mixer then multiplies along positions, and the channel network along
the hidden size, without a single transposition.

Shapes: L positions (prefix included), B slots, D hidden size, H heads, V output vocabulary,
K latents (2, or 1 for the variants that carry only one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from macbook_optimization.errors import CheckpointError, ConfigError
from macbook_optimization.training_config_adapter import Checkpointing
from trm.backends.pytorch.fused import add_and_normalize, gated, split_heads, widened
from trm.config import ModelConfig
from trm.tasks.base import TaskShape
from trm.tasks.sudoku_puzzles import box_shape

# Standard deviation of a standard normal truncated to [-2, 2]; dividing by it restores the asked one.
_TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))

NEVER = -20.0  # the logit of a token that is no digit, where candidates answer

# Only oneDNN has a fast convolution of single channels, and PyTorch for Apple Silicon comes without it.
_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def truncated_normal(*shape: int, std: float, generator: torch.Generator | None) -> Tensor:
    """Normal, cut at two of its standard deviations before truncation, with `std` after it.

    Without a generator it has a shape and no content: a model of such tensors takes no memory.
    """
    if generator is None:
        return torch.empty(*shape, device="meta")
    bound = math.erf(math.sqrt(2))
    uniform = torch.rand(*shape, generator=generator) * (2 * bound) - bound
    normal = torch.erfinv(uniform) * math.sqrt(2)
    return normal.clamp(-2, 2) * (std / _TRUNCATED_STD)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


class Projection(nn.Module):
    """A matrix under the name that the public code gives it."""

    def __init__(self, num_in: int, num_out: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal(num_out, num_in, std=num_in**-0.5, generator=generator))


class Embedding(nn.Module):
    def __init__(self, num_rows: int, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        std = config.hidden_size**-0.5
        self.embedding_weight = nn.Parameter(
            truncated_normal(num_rows, config.hidden_size, std=std, generator=generator)
        )


class SwiGLU(nn.Module):
    def __init__(self, width: int, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        inner = config.inner_width(width)
        self.gate_up_proj = Projection(width, 2 * inner, generator)
        self.down_proj = Projection(inner, width, generator)

    def forward(self, x_LBD: Tensor, *, along_positions: bool = False) -> Tensor:
        L, _, D = x_LBD.shape
        x = x_LBD.reshape(L, -1) if along_positions else x_LBD.reshape(-1, D)
        weights = self.gate_up_proj.weight, self.down_proj.weight
        return gated(x, *weights, dim=0 if along_positions else 1).view_as(x_LBD)


def rotary_angles(num_positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    frequencies = 1 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv_proj = Projection(config.hidden_size, 3 * config.hidden_size, generator)
        self.o_proj = Projection(config.hidden_size, config.hidden_size, generator)

    def forward(self, x_LBD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        L, B, D = x_LBD.shape
        qkv = linear(x_LBD, self.qkv_proj.weight).view(L, B, 3, self.num_heads, D // self.num_heads)
        query, key, value = split_heads(qkv, angles)  # each (B, H, L, head size)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return linear(mixed.permute(2, 0, 1, 3).reshape(L, B, D), self.o_proj.weight)


class Nearby(nn.Module):
    """Every cell of a square grid takes from those around it, each channel with weights of its own."""

    def __init__(self, size: int, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            truncated_normal(config.hidden_size, 1, size, size, std=1 / size, generator=generator)
        )

    def forward(self, x_LBD: Tensor) -> Tensor:
        fast = _ONEDNN and x_LBD.dtype == torch.float32
        return (by_convolution if fast else by_shifts)(x_LBD, self.weight.to(x_LBD.dtype))


def by_convolution(x_LBD: Tensor, weight: Tensor) -> Tensor:
    """Slots and channels lie side by side: one picture with B x D channels, and nothing has to be moved."""
    L, B, D = x_LBD.shape
    side = math.isqrt(L)
    picture = x_LBD.reshape(1, side, side, B * D).permute(0, 3, 1, 2)
    mixed = F.conv2d(picture, weight.repeat(B, 1, 1, 1), padding=weight.shape[-1] // 2, groups=B * D)
    return mixed.permute(0, 2, 3, 1).reshape(L, B, D)


def by_shifts(x_LBD: Tensor, weight: Tensor) -> Tensor:
    L, B, D = x_LBD.shape
    side, size = math.isqrt(L), weight.shape[-1]
    edge = size // 2
    padded = F.pad(x_LBD.reshape(side, side, B, D), (0, 0, 0, 0, edge, edge, edge, edge))
    parts = (
        padded[row : row + side, column : column + side] * weight[:, 0, row, column]
        for row in range(size)
        for column in range(size)
    )
    return reduce(torch.add, parts).reshape(L, B, D)


class Houses(SwiGLU):
    """A gated network over candidates, of whose hidden units most are added up over a house of Sudoku.

    A fifth of the units are a candidate's own. The others tell it what all candidates of its row, of its
    column, of its box (for the same digit) and of its cell (for all digits) say: nine of them, one of which
    is right. Nothing depends on where a house lies or which digit it is about.
    """

    def __init__(self, size: int, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__(config.hidden_size, config, generator)
        self.box = box_shape(size)
        inner = config.inner_width(config.hidden_size)
        self.units = inner // 5 // 8 * 8 or inner // 5  # for each kind of house, aligned

    def forward(self, x_LBD: Tensor, *, along_positions: bool = False) -> Tensor:
        x = x_LBD.reshape(-1, x_LBD.shape[-1])
        return gated(x, self.gate_up_proj.weight, self.down_proj.weight, 1, self.add_up).view_as(x_LBD)

    def add_up(self, hidden: Tensor) -> Tensor:
        rows, columns = self.box
        size = rows * columns
        # Rows and columns of boxes, each with those in it; digit, slot, unit.
        grid = hidden.view(columns, rows, rows, columns, size, -1, hidden.shape[-1])
        for kind, dims in enumerate(((2, 3), (0, 1), (1, 3), (4,))):
            start = hidden.shape[-1] - (4 - kind) * self.units
            houses = grid[..., start : start + self.units]
            houses.copy_(houses.sum(dims, keepdim=True).mul_(size**-0.5).expand_as(houses))
        return hidden


class Layer(nn.Module):
    """Mix positions, then channels; after each, add and normalise (over what was mixed, as published)."""

    def __init__(self, num_positions: int, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        if config.mlp_t:
            self.mlp_t = SwiGLU(num_positions, config, generator)
        elif config.neighbourhood:
            self.nearby = Nearby(config.neighbourhood, config, generator)
        elif config.attention:
            self.self_attn = Attention(config, generator)
        self.mlp: SwiGLU
        if config.candidates:  # mixes both at once
            self.mlp = Houses(round(num_positions ** (1 / 3)), config, generator)
        else:
            self.mlp = SwiGLU(config.hidden_size, config, generator)

    def forward(self, x_LBD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        if hasattr(self, "mlp_t"):
            x_LBD = add_and_normalize(x_LBD, self.mlp_t(x_LBD, along_positions=True), 0, self.eps)
        elif hasattr(self, "nearby"):
            x_LBD = add_and_normalize(x_LBD, self.nearby(x_LBD), -1, self.eps)
        elif hasattr(self, "self_attn"):
            x_LBD = add_and_normalize(x_LBD, self.self_attn(x_LBD, angles), -1, self.eps)
        return add_and_normalize(x_LBD, self.mlp(x_LBD), -1, self.eps)


RECOMPUTE_EVERY: dict[Checkpointing, int] = {"none": 0, "alternate": 2, "all": 1}


class Level(nn.Module):
    """`recompute_every` n: of n layers, one keeps only its input for the backward pass, and is computed again
    there. 0 keeps everything. The gradient is the same to the last bit.

    `compiled` takes the place of the layers for batches of `compiled_size` and `compiled_threads`; any other
    size or number would be compiled anew, so it stays as it is."""

    recompute_every = 0
    compiled: Callable[[Tensor, tuple[Tensor, Tensor] | None], Tensor] | None = None
    compiled_size: int | None = None
    compiled_threads: int | None = None

    def __init__(self, num_positions: int, config: ModelConfig, generator: torch.Generator | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_positions, config, generator) for _ in range(config.num_layers))

    def forward(self, x_LBD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        now = x_LBD.shape[1], torch.get_num_threads()
        if self.compiled is not None and now == (self.compiled_size, self.compiled_threads):
            return self.compiled(x_LBD, angles)
        return self.through_layers(x_LBD, angles)

    def through_layers(self, x_LBD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.recompute_every and torch.is_grad_enabled() and index % self.recompute_every == 0:
                x_LBD = checkpoint(layer, x_LBD, angles, use_reentrant=False, preserve_rng_state=False)
            else:
                x_LBD = layer(x_LBD, angles)
        return x_LBD


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
        self.bias = nn.Parameter(torch.full((2,), -5.0))  # hardly ever halt until it is learned


def positions(config: ModelConfig, shape: TaskShape) -> int:
    """Of the latents: the prefix and the cells, or every digit of every cell."""
    if config.candidates:
        digits = math.isqrt(shape.seq_len)
        if shape.seq_len != digits**2 or min(shape.vocab_size, shape.output_vocab_size) < digits:
            raise ConfigError(
                "model.candidates is for Sudoku, which has as many digits as cells in a row; this dataset "
                f"has {shape.seq_len} cells and {shape.output_vocab_size} possible answers for each"
            )
        return shape.seq_len * digits
    count = config.prefix_len + shape.seq_len
    if config.neighbourhood and math.isqrt(count) ** 2 != count:
        raise ConfigError(f"model.neighbourhood is for square grids; {count} cells are none")
    return count


def candidate_marks(tokens_LB: Tensor, vocab_size: int) -> Tensor:
    """(L x digits, B) for every digit of every cell: 0 open, 1 given, 2 another one is given.

    Digits are the last tokens of a vocabulary."""
    digits = math.isqrt(len(tokens_LB))
    digit_1D1 = torch.arange(vocab_size - digits, vocab_size, device=tokens_LB.device)[None, :, None]
    token_L1B = tokens_LB[:, None]
    marks = torch.where(token_L1B == digit_1D1, 1, 2) * (token_L1B >= vocab_size - digits)
    return marks.flatten(0, 1)


class TinyRecursiveModel(nn.Module):
    initial_latents: Tensor

    def __init__(self, config: ModelConfig, shape: TaskShape, seed: int | None = 0) -> None:
        """Without a seed it has no weights, only their shapes."""
        super().__init__()
        self.config = config
        self.shape = shape
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.num_positions = num_positions = positions(config, shape)
        self.embed_tokens = Embedding(3 if config.candidates else shape.vocab_size, config, generator)
        if config.pos_encodings == "learned":
            self.embed_pos = Embedding(num_positions, config, generator)
        if config.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(shape.num_puzzle_identifiers, config.puzzle_emb_ndim)
        self.L_level = Level(num_positions, config, generator)
        num_scores = 1 if config.candidates else shape.output_vocab_size
        self.lm_head = Projection(config.hidden_size, num_scores, generator)
        self.q_head = HaltHead(config.hidden_size)
        num_latents = 2 if config.variant == "trm" else 1
        initial = truncated_normal(num_latents, config.hidden_size, std=1, generator=generator)
        self.register_buffer("initial_latents", initial)
        self.angles: tuple[Tensor, Tensor] | None = None
        if config.pos_encodings == "rope":
            head_size = config.hidden_size // config.num_heads
            cos, sin = rotary_angles(num_positions, head_size, config.rope_theta)
            self.angles = cos.to(initial.device), sin.to(initial.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.forward_dtype == "bfloat16" else self.initial_latents.dtype

    def start(self, batch_size: int) -> Tensor:
        """Latents (K, L, B, D) of examples that nobody has thought about yet."""
        num_latents, hidden_size = self.initial_latents.shape
        initial = self.initial_latents.to(self.dtype)[:, None, None, :]
        return initial.expand(num_latents, self.num_positions, batch_size, hidden_size)

    def noise(self, luck: torch.Generator) -> Tensor:
        """For the first latents of one example."""
        like = self.start(1)
        return torch.randn(like.shape, generator=luck).to(like.dtype)

    def embed(self, inputs_BL: Tensor, puzzle_rows: Tensor | None) -> Tensor:
        """The question x, (L, B, D); `puzzle_rows` (B, puzzle_emb_ndim) fill the prefix."""
        tokens_LB = inputs_BL.T
        if self.config.candidates:
            tokens_LB = candidate_marks(tokens_LB, self.shape.vocab_size)
        x_LBD = F.embedding(tokens_LB, self.embed_tokens.embedding_weight.to(self.dtype))
        if puzzle_rows is not None:
            prefix_len, hidden_size = self.config.prefix_len, self.config.hidden_size
            padded = F.pad(puzzle_rows, (0, prefix_len * hidden_size - puzzle_rows.shape[1]))
            prefix = padded.view(-1, prefix_len, hidden_size).transpose(0, 1).to(x_LBD.dtype)
            x_LBD = torch.cat((prefix, x_LBD))
        if self.config.pos_encodings == "learned":  # halves the variance again, so that its scale stays
            positions = self.embed_pos.embedding_weight.to(x_LBD.dtype)[:, None]
            x_LBD = math.sqrt(0.5) * (x_LBD + positions)
        return math.sqrt(self.config.hidden_size) * x_LBD

    def forward(
        self, inputs_BL: Tensor, puzzle_rows: Tensor | None, latents_KLBD: Tensor, cycles: int
    ) -> Tensor:
        """Recurse `cycles` times, only the last with gradient. The answer y is the first new latent."""
        x_LBD = self.embed(inputs_BL, puzzle_rows)
        latents = latents_KLBD.unbind(0)
        with torch.no_grad():
            for _ in range(cycles - 1):
                latents = self._cycle(x_LBD, latents)
        return torch.stack(self._cycle(x_LBD, latents))

    def _cycle(self, x_LBD: Tensor, latents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.config.variant == "transformer":
            return (self.L_level(latents[0] + x_LBD, self.angles),)
        if self.config.variant == "singlez":
            (z_LBD,) = latents
            for _ in range(self.config.L_cycles):
                z_LBD = self.L_level(z_LBD + x_LBD, self.angles)
            return (self.L_level(z_LBD, self.angles),)
        y_LBD, z_LBD = latents
        question_LBD = y_LBD + x_LBD  # y does not change while z thinks
        for _ in range(self.config.L_cycles):
            z_LBD = self.L_level(z_LBD + question_LBD, self.angles)
        return self.L_level(y_LBD + z_LBD, self.angles), z_LBD

    def answer_positions(self, y_LBD: Tensor) -> Tensor:
        """(B, L, D) without the prefix; (B, cells, digits, D) of candidates."""
        if self.config.candidates:
            return y_LBD.view(self.shape.seq_len, -1, *y_LBD.shape[1:]).permute(2, 0, 1, 3)
        return y_LBD[self.config.prefix_len :].transpose(0, 1)

    def token_logits(self, positions: Tensor) -> Tensor:
        logits = linear(positions, self.lm_head.weight)
        if self.config.candidates:
            scores = logits.squeeze(-1)
            return F.pad(scores, (self.shape.output_vocab_size - scores.shape[-1], 0), value=NEVER)
        return logits

    def halt_logits(self, y_LBD: Tensor) -> Tensor:
        """(B, 2) from the first position, which is the prefix's where there is one. An answer of candidates
        is as good as its weakest: the odds of all are put together. The factor lets them grow sooner."""
        weight, bias = self.q_head.weight.to(y_LBD.dtype), self.q_head.bias.to(y_LBD.dtype)
        if self.config.candidates:
            each = widened(F.linear(y_LBD, math.sqrt(self.config.hidden_size) * weight, bias))
            return math.log(len(each)) - torch.logsumexp(-each, 0)
        return widened(F.linear(y_LBD[0], weight, bias))


def load_weights(model: TinyRecursiveModel, weights: Mapping[str, Tensor]) -> None:
    check_shapes(model.state_dict(), weights, "The weights do")
    model.load_state_dict(weights)


def check_shapes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what_do: str) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    found = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    if expected != found:
        wrong = sorted(
            f"{name}: {found.get(name, 'missing')} instead of {expected.get(name, 'nothing')}"
            for name in {*expected, *found}
            if expected.get(name) != found.get(name)
        )
        raise CheckpointError(f"{what_do} not fit the model of the recipe: {'; '.join(wrong[:5])}")
