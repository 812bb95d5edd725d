"""The sections of a recipe: everything that decides what is learned, and the settings beside it.

`task`, `seed`, `data`, `model` and `training` decide what is learned. `inference`, `evaluation`,
`checkpoints`, `plan` and `limits` decide how the recipe is run and monitored; they may change whenever a run
is resumed. Names are those that TRM configurations already use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.config.decoder import DecoderConfig
from trm.config.inference import InferenceConfig
from trm.config.kinds import check_backend, check_kind, check_update_in_backward, decoder_defaults
from trm.config.machine import LimitSettings, PlanSettings
from trm.config.model import ModelConfig
from trm.config.renamed import with_current_keys
from trm.config.schedules import (
    CurriculumConfig,
    EarlyStoppingConfig,
    PhaseConfig,
    PlateauConfig,
    check_phases,
    phase_starts,
)
from trm.config.values import (
    BelowOne,
    ClassWeights,
    Count,
    CountOrZero,
    Fraction,
    OncePerStep,
    Positive,
    PositiveOrZero,
    Rate,
    Section,
    Share,
)

AnyModelConfig: TypeAlias = ModelConfig | DecoderConfig
MODEL_KINDS: dict[str, type[AnyModelConfig]] = {"trm": ModelConfig, "decoder": DecoderConfig}


def _kind(section: Any) -> str:
    """Return the kind of a `model` section."""
    kind: str = section.get("kind", "trm") if isinstance(section, dict) else getattr(section, "kind", "trm")
    return kind


class TrainingConfig(Section):
    """The objective, the optimizer and their schedule."""

    supervision: Literal["deep", "terminal"] = "deep"
    """`deep` carries latents from step to step, as in the paper; `terminal` takes a new example every step
    and learns from the last of a random number of recursions."""
    effective_batch_size: Count = 768
    """Slots: examples per optimizer step, on all machines together."""
    max_steps: Count = 10_000
    """Optimizer steps, and the end of the learning-rate schedule."""
    extensions: dict[CountOrZero, Count] = Field(default_factory=dict)
    """From this step on, another last step than `max_steps`; `trm train RUN --more-steps N` adds an entry."""
    optimizer: Literal["adam_atan2", "adamw", "muon", "adafactor"] = "adam_atan2"
    """Optimizer of all weights except puzzle embeddings; `muon` uses AdamW outside the recursive block,
    `adafactor` keeps two vectors per matrix instead of two matrices, and its learning rate is relative to the
    size of each weight matrix. A decoder has `adamw` unless it says otherwise."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the optimizer keeps its moments."""
    learning_rate: Rate = 1e-4
    """Peak learning rate."""
    lr_min_ratio: Fraction = 1.0
    """Learning rate at `max_steps` as a share of the peak, reached by a cosine; 1 keeps it constant."""
    warmup_steps: CountOrZero = 2000
    """Steps of linear warm-up."""
    beta1: BelowOne = 0.9
    """Decay of the first moment."""
    beta2: BelowOne = 0.95
    """Decay of the second moment."""
    weight_decay: Annotated[PositiveOrZero, Field(le=1000)] = 0.1
    """Decoupled weight decay."""
    puzzle_emb_lr: BelowOne = 1e-2
    """Peak learning rate of the puzzle embeddings."""
    puzzle_emb_weight_decay: Annotated[PositiveOrZero, Field(le=1000)] = 0.1
    """Weight decay of the puzzle embeddings."""
    max_grad_norm: Annotated[Positive, Field(le=1e6)] | None = None
    """Norm to which the gradient is clipped; null for no clipping."""
    loss: Literal["stablemax_cross_entropy", "softmax_cross_entropy"] = "stablemax_cross_entropy"
    """Loss per labelled position."""
    label_smoothing: BelowOne = 0.0
    """Share of every label that is spread evenly over all outputs."""
    class_weights: ClassWeights = 0.0
    """Weight of an example's loss by its category, for a dataset whose categories have names: an exponent e
    gives (N / (C n)) ** e for a category with n of N examples among C categories, a mapping gives the weight
    of each named category and 1 to the others. 0 weighs all examples the same."""
    word_dropout: BelowOne = 0.0
    """Share of the words that is left out of every training example, each time drawn anew, where the task has
    words; of mail, the same share of the examples loses all header features."""
    halt_loss_weight: Annotated[PositiveOrZero, Field(le=1000)] = 0.5
    """Weight of the halting head's loss."""
    ema: bool = True
    """Keep an exponential moving average of the weights and use it for inference."""
    ema_rate: Fraction = 0.999
    """Decay of the moving average per step."""
    depths: Annotated[dict[CountOrZero, Count], OncePerStep] = Field(default_factory=lambda: {0: 1})
    """Terminal supervision: from this step on, the number of recursions is drawn from 1 to this value."""
    noise: Annotated[PositiveOrZero, Field(le=100)] = 0.0
    """Standard deviation of noise added to the initial latents of every example."""
    hints: Annotated[dict[CountOrZero, Fraction], OncePerStep] = Field(default_factory=lambda: {0: 0.0})
    """From this step on, in this share of the examples, up to half of the answer is given in the input."""
    curriculum: CurriculumConfig | None = None
    """Easy examples first; null for all examples from the start."""
    phases: tuple[PhaseConfig, ...] = ()
    """Phases in their order, such as warm-up, main and fine-tune, each with a factor of the learning rate."""
    plateau: PlateauConfig | None = None
    """Lower the learning rate when the primary metric stops improving; null for the schedule alone."""
    early_stopping: EarlyStoppingConfig | None = None
    """End training when the primary metric stops improving; null to train all steps."""
    adaptive_min_length: Count | None = None
    """Fewest tokens to which rows of different lengths may be cut while memory is short although the
    micro-batch is a single example; null never cuts. This changes what is learned, and when it happens
    depends on the machine; the events record each change."""
    initial_embeddings: Literal["random", "cooccurrence"] = "random"
    """Initial embeddings of tokens, where the task has words: `cooccurrence` gives similar ones to
    words that have similar neighbours in the training split."""
    initial_weights: Path | None = None
    """Another run, whose best weights this one starts from where names and shapes are the same; null to draw
    all weights at random."""
    gradient_message: Literal["float32", "bfloat16", "topk"] = "float32"
    """Form of gradients between machines: `bfloat16` halves the bytes and rounds them; `topk` sends only
    the largest entries of each machine's gradient and adds the rest to its next one. Both need PyTorch. On
    one machine it has no effect."""
    gradient_share: Share = 0.1
    """Share of the entries of a gradient that `gradient_message: topk` sends."""
    deterministic: bool = False
    """Give the same bits again on the same machine, with the same versions and plan; may be slower."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("depths", "hints"):
            if 0 not in getattr(self, name):
                raise ValueError(f"{name} must have a value for step 0")
        if any(last <= start for start, last in self.extensions.items()):
            raise ValueError("extensions must end after they start")
        check_phases(self.phases, self.max_steps)
        if self.initial_embeddings != "random" and self.initial_weights is not None:
            raise ValueError("initial_embeddings and initial_weights both set the embeddings; one is enough")
        if self.plateau is not None and self.early_stopping is not None:
            reduced_after, stopped_after = self.plateau.patience, self.early_stopping.patience
            if stopped_after <= reduced_after:
                raise ValueError(
                    f"early_stopping.patience {stopped_after} ends training before a learning rate that was "
                    f"lowered after {reduced_after} evaluations (plateau.patience) has any effect; it must "
                    "be larger"
                )
        return self

    @property
    def phase_starts(self) -> dict[int, PhaseConfig]:
        """The phases by the step after which each one begins, as a schedule."""
        return phase_starts(self.phases, self.max_steps)

    @property
    def last_steps(self) -> dict[int, int]:
        """The last step by the step from which on it is known, as a schedule."""
        return {0: self.max_steps, **self.extensions}

    @property
    def last_step(self) -> int:
        """The step at which training ends."""
        return self.last_steps[max(self.last_steps)]


class EvaluationConfig(Section):
    """Evaluations on the test split, and the target that ends a run."""

    every_steps: Count | None = 1000
    """Steps between evaluations, besides one at the end; null for no evaluation at all, so that the newest
    checkpoint is used."""
    examples: Count | None = None
    """Evaluate only this many test examples, spread evenly over the tasks of the test split; null for all."""
    target_accuracy: Fraction | None = None
    """Stop training when the task's primary metric reaches this value."""
    target_loss: Annotated[Positive, Field(le=1000)] | None = None
    """Stop training when the loss on the test split is at most this value, where it is the primary metric
    (the task `text`)."""

    @property
    def target(self) -> float | None:
        """The value of the primary metric at which training ends."""
        return self.target_loss if self.target_accuracy is None else self.target_accuracy

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("target_accuracy", "target_loss"):
            value = getattr(self, name)
            if self.every_steps is None and value is not None:
                raise ValueError(
                    f"{name} {value:g} is never reached without evaluations; with every_steps null, set "
                    f"evaluation.{name}=null too"
                )
        return self


class CheckpointsConfig(Section):
    """The schedule of checkpoints, and how many are kept."""

    every_steps: Count | None = None
    """Steps between checkpoints, in addition to `every_seconds`."""
    every_seconds: Annotated[Positive, Field(le=1e8)] = 60.0
    """Seconds between checkpoints; longer where saving takes more than 0.5 % of the time."""
    keep: Count = 3
    """Newest checkpoints to keep, besides the best one."""
    keep_every_hours: Annotated[Positive, Field(le=1e6)] | None = None
    """Additionally keep one checkpoint per this many hours of training forever."""


class LoadingConfig(Section):
    """Settings for reading a dataset: held in memory, memory-mapped, or streamed row by row."""

    streaming_threshold_mb: Annotated[PositiveOrZero, Field(le=1e9)] = 200.0
    """Stream datasets above this size."""
    cache_threshold_mb: Annotated[PositiveOrZero, Field(le=1e9)] = 100.0
    """Hold datasets up to this size in memory."""
    chunk_size_mb: Annotated[Positive, Field(le=1e9)] = 50.0
    """Memory for rows that were read recently, when streaming."""
    enable_caching: bool = True
    """Hold small datasets in memory."""
    auto_fallback_streaming: bool = True
    """Stream a smaller dataset too when memory is short."""
    force_streaming_mode: bool = False
    """Stream every dataset."""


class DataConfig(Section):
    """The directory of the dataset, and the options to build it."""

    path: Path
    """Directory of the dataset."""
    loading: LoadingConfig = LoadingConfig()
    """Settings for reading it."""
    augment: bool = True
    """Replace every training example by a random symmetric copy, where the task has symmetries."""
    build: JsonObject | None = None
    """The task's own options, used to build the dataset when there is none at `path`."""


class RunConfig(Section):
    """A whole recipe."""

    task: str
    """Name of a task (`trm data build --help` lists them), or a Python file that defines one."""
    seed: CountOrZero = 0
    """Seed of weights, example order, augmentation and noise."""
    data: DataConfig
    """The dataset."""
    model: Annotated[
        Annotated[ModelConfig, Tag("trm")] | Annotated[DecoderConfig, Tag("decoder")], Discriminator(_kind)
    ] = ModelConfig()
    """The network; without this section, sizes are chosen for this machine."""
    training: TrainingConfig = TrainingConfig()
    """Objective, optimizer and schedule."""
    inference: InferenceConfig = InferenceConfig()
    """Settings for applying the model."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluations on the test split."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """Checkpoints."""
    plan: PlanSettings = PlanSettings()
    """Settings of how this machine runs it."""
    limits: LimitSettings = LimitSettings()
    """Limits on the use of this machine."""

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier_keys(cls, tree: object) -> object:
        return decoder_defaults(with_current_keys(tree)) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_kind(self.model.kind, self.training, self.inference, self.evaluation)
        check_backend(self.training, self.plan)
        if self.plan.optimizer_in_backward:
            check_update_in_backward(self.model.kind, self.training, self.plan)
        for name in ("plateau", "early_stopping"):
            if getattr(self.training, name) is not None and self.evaluation.every_steps is None:
                raise ValueError(
                    f"training.{name} is decided by evaluations, but evaluation.every_steps is null"
                )
        if self.training.adaptive_min_length is not None:
            self._check_adaptive_length()
        return self

    def _check_adaptive_length(self) -> None:
        if self.training.deterministic:
            raise ValueError(
                "training.adaptive_min_length depends on the free memory, so it excludes "
                "training.deterministic"
            )
        if not self.limits.dynamic_batch_sizing:
            raise ValueError(
                "training.adaptive_min_length applies when the micro-batch size cannot be lowered any "
                "further, so it needs limits.dynamic_batch_sizing"
            )

    def without_profile(self) -> Self:
        """Return the recipe as a run keeps it: a profile is recorded in one start only."""
        return self.model_copy(update={"plan": self.plan.model_copy(update={"profile": False})})

    def what_is_learned(self, until: int | None = None) -> JsonObject:
        """Return the part that a resumed run must share; `until` a step, what its weights depend on.

        Datasets are compared by content, not by path.
        """
        learned = self.model_dump(mode="json", include={"task", "seed", "model", "training"})
        learned["data"] = {"augment": self.data.augment}
        del learned["training"]["deterministic"]
        del learned["training"]["early_stopping"]  # where training ends, not what a step learns
        if self.training.lr_min_ratio == 1:  # nothing depends on where training ends
            del learned["training"]["extensions"]
            if all(phase.share is None for phase in self.training.phases):
                del learned["training"]["max_steps"]
        elif until is not None:  # an extension does not change the steps before it
            started = {start: last for start, last in self.training.extensions.items() if start < until}
            learned["training"]["extensions"] = started
        if self.training.plateau is not None:  # evaluations decide the learning rate
            learned["inference"] = self.inference.model_dump(mode="json")
            learned["evaluation"] = self.evaluation.model_dump(include={"every_steps", "examples"})
        return learned

    @classmethod
    def learned_with_defaults(cls, learned: JsonMapping, until: int | None = None) -> JsonObject:
        """Return what an earlier version saved, with present key names and keys that did not exist then."""
        try:
            whole = {**learned, "data": {"path": ".", **learned["data"]}}
            return cls.model_validate(whole).what_is_learned(until)
        except (ValidationError, KeyError, TypeError):  # saved by a newer version: compared as it is
            return dict(learned)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
