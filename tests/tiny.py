"""Small real things that many tests need: a model of a few thousand weights, a batch, a dataset."""

import sys
from pathlib import Path

import numpy as np

from trm.backends.base import StepBatch
from trm.config import ModelConfig, RunConfig, TrainingConfig
from trm.runs import Plan
from trm.tasks.base import TaskShape

TRM = Path(sys.executable).with_name("trm")
MIXER = ("model.candidates=false", "model.mlp_t=true", "model.H_layers=2")  # the public code knows it, too
TINY = (
    *MIXER, "model.hidden_size=16", "training.max_steps=40", "evaluation.every_steps=20",
    "evaluation.depth=3", "evaluation.target_accuracy=null", "plan.threads=1",
)  # fmt: skip
FOUR = ("data.path=set", "data.build={size: 4, difficulty: easy, train: 60, test: 12}")

SHAPE = TaskShape(seq_len=4, vocab_size=6, output_vocab_size=4, num_puzzle_identifiers=3)

VARIANTS = {
    "mixer": {"mlp_t": True, "pos_encodings": "none"},
    "mixer, learned positions": {"mlp_t": True, "pos_encodings": "learned"},
    "attention, rotary": {"pos_encodings": "rope"},
    "attention, learned positions": {"pos_encodings": "learned"},
    "attention, no positions": {"pos_encodings": "none"},
    "mixer, puzzle prefix": {
        "mlp_t": True,
        "pos_encodings": "none",
        "puzzle_emb_ndim": 12,
        "puzzle_emb_len": 2,
    },
    "attention, puzzle prefix": {"puzzle_emb_ndim": 8, "puzzle_emb_len": 0},
    "neighbourhood": {"neighbourhood": 3, "pos_encodings": "none"},
    "neighbourhood, learned positions": {"neighbourhood": 5, "pos_encodings": "learned"},
    "candidates": {"candidates": True, "pos_encodings": "none", "expansion": 4.0},
    "candidates, one latent": {
        "candidates": True,
        "pos_encodings": "learned",
        "expansion": 4.0,
        "variant": "transformer",
        "H_layers": 2,
    },
    "singlez, mixer": {"variant": "singlez", "mlp_t": True, "pos_encodings": "none"},
    "singlez, attention": {"variant": "singlez"},
    "transformer": {"variant": "transformer", "H_layers": 2},
}


def model_config(**changes: object) -> ModelConfig:
    small = {"hidden_size": 8, "num_heads": 2, "L_layers": 2, "H_cycles": 2, "L_cycles": 2, "expansion": 1.5}
    return ModelConfig.model_validate({**small, "width_multiple": 4, **changes})


def training_config(**changes: object) -> TrainingConfig:
    few = {"effective_batch_size": 6, "warmup_steps": 0, "learning_rate": 1e-2, "max_steps": 100}
    return TrainingConfig.model_validate({**few, **changes})


def step_batch(num_slots: int = 6, shape: TaskShape = SHAPE, seed: int = 0) -> StepBatch:
    """Some positions without a label, and another number of them in every slot."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, shape.output_vocab_size, (num_slots, shape.seq_len))
    for slot in range(num_slots):
        labels[slot, : slot % shape.seq_len] = -100
    return StepBatch(
        inputs=rng.integers(0, shape.vocab_size, (num_slots, shape.seq_len)),
        labels=labels,
        puzzle_identifiers=rng.integers(0, shape.num_puzzle_identifiers, num_slots),
        fresh=np.arange(num_slots) % 3 != 1,
    )


def sudoku_dataset(directory: Path, train: int = 40, test: int = 12, size: int = 4) -> Path:
    from trm.tasks.sudoku import TASK

    options = {"size": size, "difficulty": "easy", "train": train, "test": test}
    TASK.build(options, directory, lambda what, done, total: None)
    return directory


def plan_of(config: RunConfig) -> Plan:
    """By hand: what the recipe fixes, and otherwise the whole batch at once on one thread."""
    slots = config.training.effective_batch_size
    size = min(config.plan.micro_batch_size or slots, slots)
    return Plan(
        micro_batch_size=size,
        accumulation_steps=-(-slots // size),
        threads=1,
        precision=config.plan.precision or config.model.forward_dtype,
        gradient_checkpointing=config.plan.gradient_checkpointing or "none",
    )


def run_config(dataset: Path, **changes: object) -> RunConfig:
    """A recipe that takes a few milliseconds a step."""
    tree = {
        "task": "sudoku",
        "data": {"path": str(dataset)},
        "model": model_config(mlp_t=True, pos_encodings="none").model_dump(),
        "training": training_config(max_steps=20).model_dump(),
        "evaluation": {"every_steps": 10, "depth": 3},
        "plan": {"threads": 1},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        if leaf:
            tree[section][leaf] = value  # type: ignore[index]
        else:
            tree[section] = value
    return RunConfig.model_validate(tree)


class Recorder:
    """A display that remembers, and can do something when it hears a certain update."""

    def __init__(self, react=None):
        self.messages, self.react = [], react

    def update(self, what, done, total, facts=""):
        if self.react:
            self.react(facts or what, done)

    def message(self, text):
        self.messages.append(text)


def run(config, path, react=None, **limits):
    from trm.training.loop import Limits, train

    return train(config, path, plan_of(config), Limits(**limits), Recorder(react))
