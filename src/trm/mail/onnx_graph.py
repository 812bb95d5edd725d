"""The recursive path as an ONNX graph, written operation by operation.

The recursion is unrolled to the depth of inference. The graph takes `tokens` (B, L) and `lengths` (B) and
returns `probabilities` (B, C) of the labelled position, for any batch size and any length up to the longest.
It does not depend on how a backend computes, so running it also checks the backend.

Shapes: B messages, L positions, D hidden size, H heads, S head size, C categories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from macbook_optimization.errors import ConfigError, LaptopError
from trm.arrays import Float32Array
from trm.config import ModelConfig, RunConfig, recursion_of
from trm.tasks.base import DataSpec
from trm.tasks.documents.email import LABELLED_POSITION

OPSET = 17
_FORBIDDEN = -1e9  # added to a score that must not count


def onnx_model(config: RunConfig, data: DataSpec, weights: dict[str, Float32Array]) -> bytes:
    """Return the serialised model."""
    _check(config)
    onnx = library()
    graph = _Graph(onnx, weights)
    probabilities = _probabilities(graph, config, data)
    int64 = onnx.TensorProto.INT64
    made = onnx.helper.make_graph(
        graph.nodes,
        "recursive path",
        [
            onnx.helper.make_tensor_value_info("tokens", int64, ["batch", "length"]),
            onnx.helper.make_tensor_value_info("lengths", int64, ["batch"]),
        ],
        [
            onnx.helper.make_tensor_value_info(
                probabilities, onnx.TensorProto.FLOAT, ["batch", data.num_outputs]
            )
        ],
        graph.constants,
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(made, opset_imports=opsets, ir_version=8, producer_name="macbook-trm")
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def run_onnx(content: bytes, tokens: np.ndarray, lengths: np.ndarray) -> Float32Array:
    """Run a model with ONNX's own reference implementation."""
    onnx = library()
    session = onnx.reference.ReferenceEvaluator(onnx.load_from_string(content))
    (found,) = session.run(None, {"tokens": tokens, "lengths": lengths})
    return np.asarray(found, dtype=np.float32)


def library() -> Any:
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
        import onnx.reference
    except ModuleNotFoundError as error:
        raise LaptopError(
            f"The Python package {error.name} is missing; exporting to ONNX needs it.",
            hint="Install it: python -m pip install onnx",
        ) from error
    return onnx


def _check(config: RunConfig) -> None:
    model = recursion_of(config.model, "The export to ONNX")
    problems = [
        name
        for name, is_given in (
            (f"model.mixer={model.mixer}", model.mixer != "attention"),
            (f"model.puzzle_emb_ndim={model.puzzle_emb_ndim}", model.puzzle_emb_ndim > 0),
            (f"training.loss={config.training.loss}", config.training.loss != "softmax_cross_entropy"),
        )
        if is_given
    ]
    if problems:
        raise ConfigError(f"The export to ONNX does not support {', '.join(problems)}")


@dataclass
class _Graph:
    """Collects operations. Every method adds one and returns the name of its result."""

    onnx: Any
    weights: dict[str, Float32Array]
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    transposed: dict[str, str] = field(default_factory=dict)  # weights that are in the graph, by name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def integers(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def linear(self, x: str, weight: str) -> str:
        """Multiply by the transpose of a weight matrix."""
        if weight not in self.transposed:
            self.transposed[weight] = self.constant(self.weights[weight].T)
        return self.op("MatMul", x, self.transposed[weight])

    def reshape(self, x: str, *shape: int) -> str:
        """Change the shape; 0 keeps a dimension, -1 takes what is left."""
        return self.op("Reshape", x, self.integers(*shape))

    def slice(self, x: str, start: str, end: str, axis: int) -> str:
        return self.op("Slice", x, start, end, self.integers(axis))


def _probabilities(graph: _Graph, config: RunConfig, data: DataSpec) -> str:
    model = recursion_of(config.model, "The export to ONNX")
    length = graph.op("Gather", graph.op("Shape", "tokens"), graph.integers(1))
    positions = graph.slice(
        graph.constant(np.arange(data.max_len), np.int64), graph.integers(0), length, axis=0
    )
    question = _embedded(graph, model, length)
    attended = _AttentionInputs.of(graph, model, data, positions, length)
    initial = graph.weights["initial_latents"]
    latents = [graph.op("Add", graph.constant(row), _zeros_like(graph, question)) for row in initial]
    steps = config.inference.depth
    if config.training.supervision != "terminal":
        steps *= model.cycles_per_step
    for _ in range(steps):
        latents = _cycle(graph, model, question, latents, attended)
    first = graph.op("Gather", latents[0], graph.constant(LABELLED_POSITION, np.int64), axis=1)
    return graph.op("Softmax", graph.linear(first, "lm_head.weight"), axis=-1)


def _zeros_like(graph: _Graph, x: str) -> str:
    return graph.op("Mul", x, graph.constant(0.0))


def _embedded(graph: _Graph, model: ModelConfig, length: str) -> str:
    """Return the question (B, L, D)."""
    embedded = graph.op("Gather", graph.constant(graph.weights["embed_tokens.embedding_weight"]), "tokens")
    scale = math.sqrt(model.hidden_size)
    if model.pos_encodings == "learned":
        table = graph.constant(graph.weights["embed_pos.embedding_weight"])
        embedded = graph.op("Add", embedded, graph.slice(table, graph.integers(0), length, axis=0))
        scale *= math.sqrt(0.5)
    return graph.op("Mul", embedded, graph.constant(scale))


@dataclass(frozen=True, slots=True)
class _AttentionInputs:
    """Inputs that every attention needs: the mask that is added to the scores, and the rotation."""

    mask: str  # (B, 1, 1 or L, L)
    cos: str | None = None  # (L, S / 2)
    sin: str | None = None

    @classmethod
    def of(
        cls, graph: _Graph, model: ModelConfig, data: DataSpec, positions: str, length: str
    ) -> _AttentionInputs:
        lengths = graph.op("Unsqueeze", "lengths", graph.integers(1))
        is_token = graph.op("Less", positions, lengths)  # (B, L)
        allowed = graph.op("Unsqueeze", is_token, graph.integers(1, 2))
        if model.attention_window is not None:
            allowed = graph.op("And", allowed, _window(graph, model, data, length))
        mask = graph.op("Where", allowed, graph.constant(0.0), graph.constant(_FORBIDDEN))
        if model.pos_encodings != "rope":
            return cls(mask)
        head_size = model.hidden_size // model.num_heads
        frequencies = 1 / model.rope_theta ** (np.arange(0, head_size, 2, dtype=np.float32) / head_size)
        angles = np.outer(np.arange(data.max_len, dtype=np.float32), frequencies)
        tables = (graph.constant(np.cos(angles)), graph.constant(np.sin(angles)))
        return cls(mask, *(graph.slice(table, graph.integers(0), length, axis=0) for table in tables))


def _window(graph: _Graph, model: ModelConfig, data: DataSpec, length: str) -> str:
    """Return (L, L), true within the window and in the row and column of the first position."""
    places = np.arange(data.max_len)
    near = abs(places[:, None] - places) <= (model.attention_window or 0)
    near[0] = near[:, 0] = True
    rows = graph.slice(graph.constant(near, np.bool_), graph.integers(0), length, axis=0)
    return graph.slice(rows, graph.integers(0), length, axis=1)


def _cycle(
    graph: _Graph, model: ModelConfig, question: str, latents: list[str], attended: _AttentionInputs
) -> list[str]:
    """Add one recursion, as the model's own."""

    def block(x: str) -> str:
        for layer in range(model.num_layers):
            x = _layer(graph, model, f"L_level.layers.{layer}", x, attended)
        return x

    if model.variant == "transformer":
        return [block(graph.op("Add", latents[0], question))]
    if model.variant == "singlez":
        (latent,) = latents
        for _ in range(model.L_cycles):
            latent = block(graph.op("Add", latent, question))
        return [block(latent)]
    answer, latent = latents
    together = graph.op("Add", answer, question)
    for _ in range(model.L_cycles):
        latent = block(graph.op("Add", latent, together))
    return [block(graph.op("Add", answer, latent)), latent]


def _layer(graph: _Graph, model: ModelConfig, name: str, x: str, attended: _AttentionInputs) -> str:
    x = _add_and_normalize(graph, model, x, _attention(graph, model, name, x, attended))
    gate, up = _halves(graph, graph.linear(x, f"{name}.mlp.gate_up_proj.weight"))
    hidden = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
    return _add_and_normalize(graph, model, x, graph.linear(hidden, f"{name}.mlp.down_proj.weight"))


def _halves(graph: _Graph, x: str) -> tuple[str, str]:
    name = f"split_{len(graph.nodes)}"
    outputs = [f"{name}_first", f"{name}_second"]
    graph.nodes.append(graph.onnx.helper.make_node("Split", [x], outputs, name=name, axis=-1))
    return outputs[0], outputs[1]


def _attention(graph: _Graph, model: ModelConfig, name: str, x: str, attended: _AttentionInputs) -> str:
    head_size = model.hidden_size // model.num_heads
    product = graph.linear(x, f"{name}.self_attn.qkv_proj.weight")
    split = graph.reshape(product, 0, 0, 3, model.num_heads, head_size)
    heads = graph.op("Transpose", split, perm=[2, 0, 3, 1, 4])  # (3, B, H, L, S)
    query, key, value = (graph.op("Gather", heads, graph.constant(i, np.int64)) for i in range(3))
    query, key = (_rotated(graph, each, attended) for each in (query, key))
    scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
    scaled = graph.op("Mul", scores, graph.constant(head_size**-0.5))
    shares = graph.op("Softmax", graph.op("Add", scaled, attended.mask), axis=-1)
    mixed = graph.op("Transpose", graph.op("MatMul", shares, value), perm=[0, 2, 1, 3])
    return graph.linear(graph.reshape(mixed, 0, 0, model.hidden_size), f"{name}.self_attn.o_proj.weight")


def _rotated(graph: _Graph, x: str, attended: _AttentionInputs) -> str:
    """Rotate the pairs (i, i + S / 2) by the angle of their position."""
    cos, sin = attended.cos, attended.sin
    if cos is None or sin is None:
        return x
    first, second = _halves(graph, x)
    real = graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin))
    imaginary = graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin))
    return graph.op("Concat", real, imaginary, axis=-1)


def _add_and_normalize(graph: _Graph, model: ModelConfig, x: str, change: str) -> str:
    total = graph.op("Add", x, change)
    squares = graph.op("ReduceMean", graph.op("Mul", total, total), axes=[-1], keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", squares, graph.constant(model.rms_norm_eps)))
    return graph.op("Div", total, root)
