"""The `model` section: one small network and the recursion that applies it."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from macbook_optimization.errors import ConfigError
from macbook_optimization.training_config_adapter import fitting_heads
from trm.config.renamed import model_with_mixer
from trm.config.values import Count, CountOrZero, Fraction, Positive, Rate, Section

Mixer = Literal["attention", "mlp", "neighbourhood", "candidates"]


class ModelConfig(Section):
    """The network. In the paper's letters: x is the question, y the answer (z_H), z the latent (z_L),
    n is `L_cycles`, T is `H_cycles` and N_sup is `halt_max_steps`."""

    fitted_keys: ClassVar[tuple[str, ...]] = ("hidden_size", "num_heads", "puzzle_emb_ndim")
    dropout: ClassVar[float] = 0.0  # a decoder may have it

    kind: Literal["trm"] = "trm"
    """Family of the model; `trm` recurses on its own answer."""
    variant: Literal["trm", "singlez", "transformer"] = "trm"
    """Latents that recurse: `trm` has y and z, `singlez` only z, `transformer` passes one latent through its
    layers once per cycle."""
    hidden_size: Annotated[Count, Field(le=2**16)] = 512
    """Width of every latent."""
    num_heads: Count = 8
    """Attention heads."""
    L_layers: Count = 2
    """Layers of the recursive block."""
    H_layers: Count = 8
    """Layers of the `transformer` variant, whose block the reference implementation calls H."""
    H_cycles: Count = 3
    """Recursions per supervision step; only the last one has a gradient."""
    L_cycles: Count = 6
    """Updates of z per recursion."""
    expansion: Annotated[Positive, Field(le=64)] = 4.0
    """Inner width of the SwiGLU networks, as a multiple of their width (two thirds of it is used)."""
    mixer: Mixer = "attention"
    """Position mixer: `attention`, `mlp` (a network over all positions), `neighbourhood`
    (a convolution over a square grid), or `candidates` (Sudoku: one latent per digit and cell, pooled over
    rows, columns, boxes and cells)."""
    attention_window: Count | None = None
    """Positions to either side that a position attends to, besides the puzzle embedding and the first token,
    which attend to all positions and are attended to by all; null for all positions. Time and memory then
    grow with the length of a row rather than with its square."""
    neighbourhood_size: Literal[3, 5, 7] = 3
    """Side of the square that the `neighbourhood` mixer covers, in cells."""
    pos_encodings: Literal["rope", "learned", "none"] = "rope"
    """Position encodings; `rope` needs the `attention` mixer."""
    puzzle_emb_ndim: CountOrZero = 0
    """Width of the learned embedding per puzzle identifier; 0 for none."""
    puzzle_emb_len: CountOrZero = 16
    """Positions that the puzzle embedding occupies; 0 for as many as `puzzle_emb_ndim` needs."""
    rms_norm_eps: Rate = 1e-5
    """Epsilon of the RMS norm."""
    rope_theta: Annotated[Positive, Field(le=1e12)] = 10000.0
    """Base of the rotary frequencies."""
    width_multiple: Count = 256
    """Inner widths are rounded up to a multiple of this; 256 as in the reference implementation, 32 suits
    small models."""
    halt_max_steps: Count = 16
    """Maximum number of supervision steps per example in deep supervision."""
    halt_exploration_prob: Fraction = 0.1
    """Probability that a slot may not halt before a drawn number of supervision steps."""
    forward_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of activations requested by the recipe; `plan.precision` overrides it."""

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier_keys(cls, section: object) -> object:
        return model_with_mixer(section) if isinstance(section, dict) else section

    @property
    def prefix_len(self) -> int:
        """Positions of the puzzle embedding, before the first token."""
        if self.puzzle_emb_ndim == 0:
            return 0
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    def require_padding(self) -> None:
        """Raise `ConfigError` if rows of different lengths cannot share a batch."""
        if self.mixer != "attention":
            raise ConfigError(
                f"model.mixer={self.mixer} needs rows of one length, and this dataset has lengths",
                hint="Use model.mixer=attention.",
            )

    @property
    def cycles_per_step(self) -> int:
        return 1 if self.variant == "transformer" else self.H_cycles

    @property
    def num_layers(self) -> int:
        return self.H_layers if self.variant == "transformer" else self.L_layers

    @property
    def block_passes_per_cycle(self) -> int:
        """The number of times that one recursion passes through the block of layers."""
        return 1 if self.variant == "transformer" else self.L_cycles + 1

    def resized(self, hidden_size: int) -> dict[str, int | None]:
        """Return the keys of a model of another width that differ from this one's."""
        heads = fitting_heads(hidden_size, self.num_heads)
        sizes = (hidden_size, heads, min(self.puzzle_emb_ndim, hidden_size))
        keys = zip(self.fitted_keys, sizes, strict=True)
        return {name: value for name, value in keys if value != getattr(self, name)}

    def inner_width(self, width: int) -> int:
        """Return the inner width of a SwiGLU network over `width` channels or positions."""
        return math.ceil(round(self.expansion * width * 2 / 3) / self.width_multiple) * self.width_multiple

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._attention_problems(), *self._grid_problems()]
        if self.prefix_len * self.hidden_size < self.puzzle_emb_ndim:
            problems.append(f"puzzle_emb_ndim {self.puzzle_emb_ndim} does not fit puzzle_emb_len positions")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _attention_problems(self) -> list[str]:
        problems = []
        head_size, rest = divmod(self.hidden_size, self.num_heads)
        uses_rope = self.pos_encodings == "rope"
        if self.mixer != "attention":
            if self.attention_window is not None:
                problems.append(f"attention_window is for attention; the mixer is {self.mixer}")
            if uses_rope:
                problems.append(
                    f"rotary positions act inside attention; with the mixer {self.mixer} use pos_encodings "
                    "none or learned"
                )
            return problems
        if rest:
            problems.append(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if uses_rope and head_size % 2:
            problems.append(
                f"rotary positions need an even head size; hidden_size / num_heads is {head_size}"
            )
        return problems

    def _grid_problems(self) -> list[str]:
        if self.mixer not in ("neighbourhood", "candidates"):
            return []
        problems = []
        if self.puzzle_emb_ndim:
            problems.append(
                f"the mixer {self.mixer} reaches grid cells only; puzzle_emb_ndim would put positions before "
                "them"
            )
        if self.mixer == "candidates" and self.inner_width(self.hidden_size) < 5:
            problems.append("candidates need a fifth of the inner width per constraint group; it is below 5")
        return problems
