"""From slots to a batch: which examples they hold, read, augmented and completed with hints and noise.

The batch of a step is a pure function of where its slots are and of the step's place in the schedule, so any
process can compute the rows of any slots. Rows of the next step are read ahead where that takes time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from macbook_optimization.errors import ConfigError, DataError
from trm.arrays import FloatArray, IntArray
from trm.batch import IGNORE_LABEL, Batch
from trm.config import CurriculumConfig, RunConfig, did_you_mean
from trm.schedule import value_at, word_dropout_of_step
from trm.slots import Order, Purpose, Slots
from trm.tasks.base import Generative, HasWords, HasWordVectors, Task
from trm.tasks.dataset import Split
from trm.tasks.metrics import smaller_is_better

_ROWS_AT_A_TIME = 16_384


class Feed:
    """Batches of one split for one recipe."""

    def __init__(self, config: RunConfig, task: Task, split: Split) -> None:
        self.config = config
        self.task = task
        self.split = split
        self.order = _order(config, split)
        self._ahead: tuple[Slots, IntArray, IntArray] | None = None  # slots, examples and puzzles read ahead
        self._weight_of_class = class_weights(config.training.class_weights, split)
        _check_hints(config, split)
        _check_words(config, task)
        require_kind(config, task)
        require_target(config, task)
        if split.lengths is not None:
            config.model.require_padding()

    def batch(
        self, slots: Slots, step: int, max_length: int | None = None, owned: slice | None = None
    ) -> Batch:
        """Return the batch of a step, or the rows that one rank owns of it.

        Rows are cut to `max_length` tokens, if it is given.
        """
        examples, puzzles = self._examples(slots)
        identifiers = self.split.puzzle_identifiers[puzzles].astype(np.int64)
        everybody = None
        if owned is not None:
            everybody = identifiers
            slots, examples, identifiers = slots[owned], examples[owned], identifiers[owned]
        batch = self.split.batch(examples, identifiers)
        batch = replace(batch, slots=slots.ids, fresh=slots.fresh, all_puzzle_identifiers=everybody)
        if self.config.data.augment:
            batch = self.task.augment(batch, self.order.draws(Purpose.AUGMENT, slots, self.task.num_draws))
        if share := value_at(self.config.training.hints, step):
            draws = self.order.draws(Purpose.HINTS, slots, 2 + batch.inputs.shape[1])
            batch = replace(batch, inputs=with_hints(batch.inputs, batch.labels, draws, share))
        dropout = word_dropout_of_step(step, self.config.training)
        if dropout and isinstance(self.task, HasWords):
            draws = self.order.draws(Purpose.WORDS, slots, batch.inputs.shape[1])
            batch = self.task.without_words(batch, draws, dropout)
        if self._weight_of_class is not None:
            batch = replace(batch, weights=self._weight_of_class[class_of_rows(batch.labels)])
        if self.config.training.noise or self.config.model.dropout:
            batch = replace(batch, noise_seeds=self.order.noise_seeds(slots))
        return batch if max_length is None else batch.cut(max_length)

    def read_ahead(self, slots: Slots, stage: int, owned: slice | None = None) -> None:
        """Start to read what the step after this one needs at most: a new example in every owned slot."""
        if not self.split.reader.reads_ahead:
            return
        coming = slots.all_halted().refilled(stage)
        examples, puzzles = self.order.examples(coming)
        self._ahead = coming, examples, puzzles
        self.split.reader.read_ahead(examples if owned is None else examples[owned])

    def open_share(self, stage: int) -> float:
        """Return the share of the groups that a stage of the curriculum takes new examples from."""
        num_groups = len(self.order.group_indices) - 1
        return 1.0 if self.order.open_groups is None else self.order.open_groups(stage) / num_groups

    def _examples(self, slots: Slots) -> tuple[IntArray, IntArray]:
        if self._ahead is not None and self._ahead[0].same_examples(slots):
            return self._ahead[1], self._ahead[2]
        return self.order.examples(slots)


def with_hints(inputs: IntArray, labels: IntArray, draws: FloatArray, share: float) -> IntArray:
    """Copy up to half of the answer into the input, in this share of the examples.

    A dataset of hard examples has no easy ones to start from; hints make some. The first two draws of a row
    decide whether it gets hints and how many.
    """
    given = np.where(draws[:, :1] < share, draws[:, 1:2] / 2, 0.0)
    return np.where((draws[:, 2:] < given) & (labels != IGNORE_LABEL), labels, inputs)


def class_of_rows(labels: IntArray) -> IntArray:
    """Return the first label of every row."""
    found: IntArray = labels[np.arange(len(labels)), (labels != IGNORE_LABEL).argmax(1)]
    if (found == IGNORE_LABEL).any():
        raise DataError(
            "An example without a label has no category, so training.class_weights cannot weigh it"
        )
    return found


def class_weights(setting: float | Mapping[str, float], split: Split) -> FloatArray | None:
    """Return the weight of every category, or None if all examples count the same."""
    if not setting:
        return None
    names = split.spec.class_names
    if not names:
        raise ConfigError(
            "training.class_weights needs a dataset whose categories have names; this one has none",
            hint="Remove training.class_weights.",
        )
    if isinstance(setting, Mapping):
        if unknown := sorted(set(setting) - set(names)):
            raise ConfigError(
                f"training.class_weights names {', '.join(unknown)}{did_you_mean(unknown[0], names)}",
                hint=f"The categories of this dataset are: {', '.join(names)}",
            )
        return np.array([setting.get(name, 1.0) for name in names])
    counts = np.zeros(len(names), dtype=np.int64)
    for start in range(0, len(split), _ROWS_AT_A_TIME):
        batch = split.batch(np.arange(start, min(start + _ROWS_AT_A_TIME, len(split))))
        counts += np.bincount(class_of_rows(batch.labels), minlength=len(names))
    weights: FloatArray = (len(split) / (len(names) * np.maximum(counts, 1))) ** setting
    return weights


def _check_words(config: RunConfig, task: Task) -> None:
    training = config.training
    by_phase = (phase.word_dropout for phase in training.phases)
    if (training.word_dropout or any(by_phase)) and not isinstance(task, HasWords):
        key = "training.word_dropout" if training.word_dropout else "word_dropout of training.phases"
        raise ConfigError(f"{key} is for tasks with words; {task.name} has none", hint=f"Remove {key}.")
    if training.initial_embeddings != "random" and not isinstance(task, HasWordVectors):
        raise ConfigError(
            f"training.initial_embeddings is for tasks whose tokens are words; those of {task.name} are not",
            hint="Remove training.initial_embeddings.",
        )


def require_kind(config: RunConfig, task: Task) -> None:
    """Raise `ConfigError` if the model cannot learn the task: text needs a decoder, others a recursion."""
    wanted = "decoder" if isinstance(task, Generative) else "trm"
    if config.model.kind != wanted:
        raise ConfigError(
            f"The task {task.name} needs model.kind={wanted}; this recipe has {config.model.kind}",
            hint="`trm recipes` lists recipes of every task.",
        )


def require_target(config: RunConfig, task: Task) -> None:
    """Raise `ConfigError` if the target is of the other direction than the task's primary metric."""
    wanted, other = "target_accuracy", "target_loss"
    if smaller_is_better(task.primary_metric):
        wanted, other = other, wanted
    if getattr(config.evaluation, other) is not None:
        raise ConfigError(
            f"evaluation.{other} is set, but the primary metric of {task.name} is {task.primary_metric}",
            hint=f"Use evaluation.{wanted}.",
        )


def _check_hints(config: RunConfig, split: Split) -> None:
    spec = split.spec
    if any(config.training.hints.values()) and spec.num_outputs != spec.vocab_size:
        raise ConfigError(
            "training.hints copies labels into the input, so labels and inputs must share one vocabulary; "
            f"this dataset has {spec.vocab_size} input tokens and {spec.num_outputs} outputs",
            hint="Remove training.hints.",
        )


def _order(config: RunConfig, split: Split) -> Order:
    order = Order(
        seed=config.seed,
        num_slots=config.training.effective_batch_size,
        group_indices=split.group_indices,
        puzzle_indices=split.puzzle_indices,
    )
    curriculum = config.training.curriculum
    return order if curriculum is None else _with_curriculum(order, curriculum, split)


def _with_curriculum(order: Order, settings: CurriculumConfig, split: Split) -> Order:
    first_examples = split.puzzle_indices[split.group_indices[:-1]]
    difficulties = split.difficulties()[first_examples]

    def open_groups(stage: int) -> int:
        share = min(1.0, settings.share * settings.widen**stage)
        return max(1, math.ceil(share * len(difficulties)))

    return replace(order, easiest=np.argsort(difficulties, kind="stable"), open_groups=open_groups)
