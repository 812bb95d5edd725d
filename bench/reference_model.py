"""The model of the reference implementation with our weights, for the benchmarks that compare both."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trm.backends.base import Program
from trm.batch import Batch
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import DataSpec

WEIGHT_DECAY = 0.1
_SAME_NAMES = (  # in our model section and in theirs
    "hidden_size", "H_cycles", "L_cycles", "L_layers", "H_layers", "num_heads", "expansion", "pos_encodings",
    "forward_dtype", "halt_max_steps", "puzzle_emb_ndim", "puzzle_emb_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the size of its batches."""

    name: str
    batch_size: int
    seq_len: int
    vocab_size: int
    model: ModelConfig

    @property
    def program(self) -> Program:
        training = TrainingConfig(
            effective_batch_size=self.batch_size,
            optimizer="adamw",
            weight_decay=WEIGHT_DECAY,
            puzzle_emb_weight_decay=WEIGHT_DECAY,
        )
        data = DataSpec(self.seq_len, self.vocab_size, self.vocab_size, num_puzzle_identifiers=2)
        return Program(self.model, training, data)


def attention(hidden_size: int, H_cycles: int, L_cycles: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size, H_cycles=H_cycles, L_cycles=L_cycles, puzzle_emb_ndim=hidden_size
    )


MLP_MIXER = attention(512, 3, 6).model_copy(update={"mixer": "mlp", "pos_encodings": "none"})


def reference_network(case: Case, directory: Path) -> Any:
    """Return the reference model with our weights, inside its loss."""
    sys.path.insert(0, str(directory))
    from models.losses import ACTLossHead  # type: ignore[import-not-found]
    from models.recursive_reasoning.trm import (  # type: ignore[import-not-found]
        TinyRecursiveReasoningModel_ACTV1,
    )

    from trm.backends.pytorch.model import TinyRecursiveModel
    from trm.backends.pytorch.reference_weights import to_reference

    model = case.model
    data = case.program.data
    settings = {
        **{name: getattr(model, name) for name in _SAME_NAMES},
        "mlp_t": model.mixer == "mlp",
        "batch_size": case.batch_size,
        "seq_len": data.max_len,
        "vocab_size": data.vocab_size,
        "num_puzzle_identifiers": data.num_puzzle_identifiers,
        "halt_exploration_prob": 0.0,
    }
    network = ACTLossHead(TinyRecursiveReasoningModel_ACTV1(settings), "stablemax_cross_entropy")
    weights = TinyRecursiveModel(model, data).state_dict()
    network.load_state_dict(to_reference(weights, model, compiled=False))
    return network


def reference_tensors(batch: Batch) -> dict[str, Any]:
    """Return a batch under the names of the reference implementation."""
    import torch

    return {
        "inputs": torch.from_numpy(batch.inputs),
        "labels": torch.from_numpy(batch.labels),
        "puzzle_identifiers": torch.from_numpy(batch.puzzle_identifiers),
    }
