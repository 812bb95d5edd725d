"""Small real things that many tests need: a model of a few thousand weights, a batch, a dataset."""

import sys
from pathlib import Path

import numpy as np

from trm.backends.base import Program, SingleProcess
from trm.batch import Batch
from trm.config import ModelConfig, RunConfig, TrainingConfig
from trm.plan import Execution, Plan
from trm.tasks.base import DataSpec, GridLayout
from trm.training.resources import HeldMemory

TRM = Path(sys.executable).with_name("trm")
MIXER = ("model.mixer=mlp", "model.H_layers=2")  # which the reference implementation has, too
TINY = (
    *MIXER, "model.hidden_size=16", "training.max_steps=40", "evaluation.every_steps=20",
    "inference.depth=3", "evaluation.target_accuracy=null", "plan.threads=1",
    "plan.report=false",
)  # fmt: skip
FOUR = ("data.path=set", "data.build={size: 4, difficulty: easy, train: 60, test: 12}")

SPEC = DataSpec(
    max_len=4,
    vocab_size=6,
    num_outputs=4,
    num_puzzle_identifiers=3,
    layout=GridLayout(rows=2, columns=2, box=(1, 2)),
)

VARIANTS = {
    "mixer": {"mixer": "mlp", "pos_encodings": "none"},
    "mixer, learned positions": {"mixer": "mlp", "pos_encodings": "learned"},
    "attention, rotary": {"pos_encodings": "rope"},
    "attention, learned positions": {"pos_encodings": "learned"},
    "attention, no positions": {"pos_encodings": "none"},
    "mixer, puzzle prefix": {
        "mixer": "mlp",
        "pos_encodings": "none",
        "puzzle_emb_ndim": 12,
        "puzzle_emb_len": 2,
    },
    "attention, puzzle prefix": {"puzzle_emb_ndim": 8, "puzzle_emb_len": 0},
    "neighbourhood": {"mixer": "neighbourhood", "pos_encodings": "none"},
    "neighbourhood, learned positions": {
        "mixer": "neighbourhood",
        "neighbourhood_size": 5,
        "pos_encodings": "learned",
    },
    "candidates": {"mixer": "candidates", "pos_encodings": "none", "expansion": 4.0},
    "candidates, one latent": {
        "mixer": "candidates",
        "pos_encodings": "learned",
        "expansion": 4.0,
        "variant": "transformer",
        "H_layers": 2,
    },
    "singlez, mixer": {"variant": "singlez", "mixer": "mlp", "pos_encodings": "none"},
    "singlez, attention": {"variant": "singlez"},
    "transformer": {"variant": "transformer", "H_layers": 2},
}


def model_config(**changes: object) -> ModelConfig:
    small = {"hidden_size": 8, "num_heads": 2, "L_layers": 2, "H_cycles": 2, "L_cycles": 2, "expansion": 1.5}
    return ModelConfig.model_validate({**small, "width_multiple": 4, **changes})


def training_config(**changes: object) -> TrainingConfig:
    few = {"effective_batch_size": 6, "warmup_steps": 0, "learning_rate": 1e-2, "max_steps": 100}
    return TrainingConfig.model_validate({**few, **changes})


def make_batch(num_slots: int = 6, spec: DataSpec = SPEC, seed: int = 0) -> Batch:
    """Return a batch with a different number of unlabelled positions in every slot."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, spec.num_outputs, (num_slots, spec.max_len))
    for slot in range(num_slots):
        labels[slot, : slot % spec.max_len] = -100
    return Batch(
        slots=np.arange(num_slots),
        inputs=rng.integers(0, spec.vocab_size, (num_slots, spec.max_len)),
        labels=labels,
        puzzle_identifiers=rng.integers(0, spec.num_puzzle_identifiers, num_slots),
        fresh=np.arange(num_slots) % 3 != 1,
    )


def make_learner(model=None, training=None, spec: DataSpec = SPEC, seed: int = 0, world=None, **execution):
    """Return a learner on the CPU, which is named explicitly as any other device would be."""
    from trm.backends.pytorch.learner import TorchLearner

    program = Program(model or model_config(), training or training_config(), spec, seed)
    how = Execution(**{"device": "cpu", "precision": program.model.forward_dtype, **execution})
    return TorchLearner(program, how, world or SingleProcess(program.num_slots))


def sudoku_dataset(directory: Path, train: int = 40, test: int = 12, size: int = 4) -> Path:
    from trm.tasks.grids.sudoku import TASK

    options = {"size": size, "difficulty": "easy", "train": train, "test": test}
    TASK.build(options, directory, lambda what, done, total: None)
    return directory


def plan_of(config: RunConfig) -> Plan:
    """Return what the recipe fixes, and otherwise the whole batch in one micro-batch on one thread."""
    slots = config.training.effective_batch_size
    execution = Execution(
        precision=config.plan.precision or config.model.forward_dtype,
        gradient_checkpointing=config.plan.gradient_checkpointing or "none",
        deterministic=config.training.deterministic,
    )
    return Plan.of(execution, min(config.plan.micro_batch_size or slots, slots), slots)


def run_config(dataset: Path, **changes: object) -> RunConfig:
    """Return a recipe whose steps take a few milliseconds."""
    tree = {
        "task": "sudoku",
        "data": {"path": str(dataset)},
        "model": model_config(mixer="mlp", pos_encodings="none").model_dump(),
        "training": training_config(max_steps=20).model_dump(),
        "inference": {"depth": 3},
        "evaluation": {"every_steps": 10},
        "plan": {"threads": 1},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        if leaf:
            tree[section][leaf] = value  # type: ignore[index]
        else:
            tree[section] = value
    return RunConfig.model_validate(tree)


HELD = HeldMemory(lambda: 0, lambda: 0, lambda: False)  # nothing that could be released


class Recorder:
    """A display that records messages, and can react to updates."""

    def __init__(self, react=None):
        self.messages = []
        self.react = react

    def update(self, what, done, total, *facts):
        if self.react:
            self.react("  ".join(facts) or what, done)

    def status(self, text, *, plain=False):
        pass

    def message(self, text):
        self.messages.append(text)

    def panel(self, panel, instead_of=""):
        pass


def run(config, path, react=None, **limits):
    from trm.training.loop import Limits
    from trm.training.start import train

    return train(config, path, plan_of(config), Limits(**limits), Recorder(react))
