"""The `model` section of a causal decoder: a language model in the style of Llama."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from macbook_optimization.errors import ConfigError
from macbook_optimization.training_config_adapter import fitting_heads
from trm.config.values import BelowOne, Count, Positive, Rate, Section

INNER_MULTIPLE = 64  # to which an inner width that follows from the hidden size is rounded up


class DecoderConfig(Section):
    """A causal language model, for the task `text`: attention to earlier tokens only, with rotary positions,
    grouped key/value heads, SwiGLU and RMS norm. Its context is the `context` of the dataset."""

    # A decoder does not recurse: what general code reads of a recursion has one value.
    variant: ClassVar[Literal["decoder"]] = "decoder"
    cycles_per_step: ClassVar[int] = 1
    block_passes_per_cycle: ClassVar[int] = 1
    halt_max_steps: ClassVar[int] = 1
    halt_exploration_prob: ClassVar[float] = 0.0
    puzzle_emb_ndim: ClassVar[int] = 0
    prefix_len: ClassVar[int] = 0
    fitted_keys: ClassVar[tuple[str, ...]] = ("hidden_size", "num_heads", "num_kv_heads", "intermediate_size")

    kind: Literal["decoder"] = "decoder"
    """Family of the model; `decoder` predicts the next token."""
    hidden_size: Annotated[Count, Field(le=2**16)] = 384
    """Width of every layer."""
    num_layers: Count = 6
    """Layers, each with attention and a SwiGLU network."""
    num_heads: Count = 6
    """Attention heads."""
    num_kv_heads: Count | None = None
    """Heads of keys and values, each shared by `num_heads / num_kv_heads` heads; null for as many as
    `num_heads`."""
    intermediate_size: Count | None = None
    """Inner width of the SwiGLU networks; null for 8/3 of `hidden_size`, rounded up to a multiple of 64."""
    dropout: BelowOne = 0.0
    """Share of the embeddings and of what each layer adds that is zeroed in training."""
    tie_embeddings: bool = True
    """Use one matrix for the embeddings of tokens and for the output."""
    rms_norm_eps: Rate = 1e-5
    """Epsilon of the RMS norm."""
    rope_theta: Annotated[Positive, Field(le=1e12)] = 10000.0
    """Base of the rotary frequencies."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which weights are kept; `bfloat16` halves their memory and loses updates below about a
    500th of a weight. Gradients of micro-batches are summed in float32 either way."""
    forward_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of activations requested by the recipe; `plan.precision` overrides it."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def inner_size(self) -> int:
        exact = -(-8 * self.hidden_size // 3)
        return self.intermediate_size or -(-exact // INNER_MULTIPLE) * INNER_MULTIPLE

    @property
    def layer_weights(self) -> int:
        """Weights of one layer: attention, SwiGLU and two norms."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.inner_size + 2 * self.hidden_size

    def require_padding(self) -> None:
        """Raise `ConfigError`: every row of a decoder is full."""
        raise ConfigError("model.kind=decoder needs rows of one length, and this dataset has lengths")

    def resized(self, hidden_size: int) -> dict[str, int | None]:
        """Return the keys of a model of another width, with heads of about the same size."""
        heads = fitting_heads(hidden_size, hidden_size // self.head_size)
        kv_heads = None
        if self.num_kv_heads is not None:
            kv_heads = max(each for each in range(1, min(heads, self.num_kv_heads) + 1) if not heads % each)
        inner = None
        if self.intermediate_size is not None:
            inner = max(1, self.intermediate_size * hidden_size // self.hidden_size)
        keys = dict(zip(self.fitted_keys, (hidden_size, heads, kv_heads, inner), strict=True))
        return {name: value for name, value in keys.items() if value != getattr(self, name)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.hidden_size % self.num_heads:
            problems.append(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        elif self.head_size % 2:
            problems.append(
                f"rotary positions need an even head size; hidden_size / num_heads is {self.head_size}"
            )
        if self.num_heads % self.kv_heads:
            problems.append(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
