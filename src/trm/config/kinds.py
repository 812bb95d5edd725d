"""Consequences of the kind of a model for other sections: a decoder does not recurse or carry latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from macbook_optimization.errors import ConfigError
from trm.config.decoder import DecoderConfig
from trm.config.inference import InferenceConfig
from trm.config.model import ModelConfig
from trm.config.renamed import Tree

if TYPE_CHECKING:
    from trm.config.machine import PlanSettings
    from trm.config.sections import EvaluationConfig, TrainingConfig

_DECODER_DEFAULTS = {
    "supervision": "terminal",  # every step takes a new example
    "optimizer": "adamw",
    "loss": "softmax_cross_entropy",
}
# Keys of `training` that act on the recursion, on its answers or on rows that are questions.
_OF_RECURSION = (
    "depths",
    "noise",
    "halt_loss_weight",
    "puzzle_emb_lr",
    "puzzle_emb_weight_decay",
    "hints",
    "class_weights",
    "word_dropout",
    "curriculum",
    "adaptive_min_length",
    "initial_embeddings",
)


def recursion_of(model: ModelConfig | DecoderConfig, what: str) -> ModelConfig:
    """Return the config of a model that recurses; raise `ConfigError` that this is only for those."""
    if isinstance(model, DecoderConfig):
        raise ConfigError(f"{what} is for models that recurse, not for model.kind=decoder")
    return model


def decoder_defaults(tree: Tree) -> Tree:
    """Return a recipe of a decoder with the defaults that differ from those of a recursion."""
    model = tree.get("model")
    training = tree.get("training", {})
    kind = model.get("kind", "trm") if isinstance(model, dict) else "trm"
    if kind not in ("trm", "decoder"):
        raise ValueError(f"model.kind is {kind!r}: it should be 'trm' or 'decoder'")
    if kind == "trm" or not isinstance(training, dict):
        return tree
    return {**tree, "training": {**_DECODER_DEFAULTS, **training}}


def check_kind(
    kind: str, training: TrainingConfig, inference: InferenceConfig, evaluation: EvaluationConfig
) -> None:
    """Raise `ValueError` for keys that this kind of model cannot honour."""
    if kind != "decoder":
        return
    usual = type(training)()
    changed = [name for name in _OF_RECURSION if getattr(training, name) != getattr(usual, name)]
    problems = [f"training.{name} is for models that recurse, not for model.kind=decoder" for name in changed]
    if training.supervision == "deep":
        problems.append("training.supervision=deep carries latents, and model.kind=decoder has none")
    if training.optimizer not in ("adamw", "adam_atan2", "adafactor"):
        problems.append(f"training.optimizer={training.optimizer} is for the block of a recursion")
    if inference != InferenceConfig():
        problems.append("the section inference is for models that recurse, not for model.kind=decoder")
    if evaluation.target_accuracy is not None:
        problems.append("evaluation.target_accuracy is for answers; of a decoder use target_loss")
    if problems:
        raise ValueError("; ".join(problems))


def check_backend(training: TrainingConfig, plan: PlanSettings) -> None:
    """Raise `ValueError` for what only PyTorch can do."""
    if plan.backend != "mlx":
        return
    problems = []
    if training.deterministic:
        problems.append("MLX does not promise the same bits again: training.deterministic needs PyTorch")
    if plan.profile:
        problems.append("MLX does not record single operations: plan.profile needs PyTorch")
    if plan.optimizer_in_backward:
        problems.append("MLX keeps gradients until the update: plan.optimizer_in_backward needs PyTorch")
    if problems:
        raise ValueError("; ".join(problems))


def check_several_machines(training: TrainingConfig, plan: PlanSettings) -> None:
    """Raise `ConfigError` for what one machine can do, and several together cannot."""
    check_exchange(training, plan.backend)
    if plan.optimizer_in_backward:
        raise ConfigError(
            "plan.optimizer_in_backward updates the weights before other machines could add their gradients.",
            hint="Set plan.optimizer_in_backward=false, or train on one machine.",
        )


def check_exchange(training: TrainingConfig, backend: str) -> None:
    """Raise `ConfigError` for messages between machines that only PyTorch can send."""
    if backend == "mlx" and training.gradient_message != "float32":
        raise ConfigError(
            "The MLX backend exchanges gradients in float32 only.",
            hint="Set training.gradient_message=float32, or plan.backend=pytorch.",
        )


def check_update_in_backward(kind: str, training: TrainingConfig, plan: PlanSettings) -> None:
    """Raise `ValueError` for what needs all gradients at the same time."""
    slots = training.effective_batch_size
    problems = []
    if kind != "decoder":
        problems.append("it is for model.kind=decoder")
    if training.max_grad_norm is not None:
        problems.append("clipping needs the norm of all gradients first; set training.max_grad_norm=null")
    if training.ema:
        problems.append("a moving average takes the memory that it saves; set training.ema=false")
    if plan.micro_batch_size is not None and plan.micro_batch_size < slots:
        problems.append(
            f"accumulation over micro-batches of {plan.micro_batch_size} would update the weights after each "
            f"of them; use plan.micro_batch_size={slots} or a smaller training.effective_batch_size"
        )
    if problems:
        raise ValueError(f"plan.optimizer_in_backward is refused: {'; '.join(problems)}")
