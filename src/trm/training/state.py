"""What a step changes and a checkpoint keeps: the learner, the slots and the step.

A step either happened as a whole or not at all. One whose loss is not a number did not happen to the
weights, but it did to the data: its examples are passed over, as another try would end the same.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.checkpoint_files import Checkpoint
from trm.backends.base import Learner, StepBatch, StepResult, StepSettings
from trm.batches import Order, Purpose, Slots
from trm.config import CurriculumConfig, RunConfig
from trm.runs import Plan, SavedState, check_compatible
from trm.tasks.base import IGNORE_LABEL, IntArray, Split, Task, fingerprint
from trm.training.schedule import cycles_of_step, in_force, learning_rate_factor

LIBRARIES = ("torch", "numpy", "safetensors")
PLAN_FACTS = ("micro_batch_size", "threads", "lanes", "precision", "gradient_checkpointing", "allocator")


class TrainingState:
    def __init__(
        self, config: RunConfig, plan: Plan, task: Task, split: Split, make_learner: Callable[[], Learner]
    ) -> None:
        self.config, self.plan, self.task, self.split = config, plan, task, split
        self.make_learner = make_learner
        self.order = Order(
            seed=config.seed,
            num_slots=config.training.effective_batch_size,
            group_indices=split.group_indices,
            puzzle_indices=split.puzzle_indices,
            **_curriculum_order(config, split),
        )
        self.curriculum = Curriculum()
        self.coming: tuple[Slots, tuple[IntArray, IntArray]] | None = None  # what was read ahead
        self.data, self.versions = fingerprint(split), versions()
        self.learner = make_learner()
        self.slots, self.step = Slots.new(self.order.num_slots), 0
        self.skipped_in_a_row = 0
        self.learning_rate_scale = 1.0
        self.rolled_back_from: int | None = None  # the step at which the numbers were none

    def restore(self, checkpoint: Checkpoint) -> SavedState:
        """Raises, before anything is changed, if the checkpoint is of something else."""
        saved = check_compatible(checkpoint, self.config, asdict(self.split.shape), self.data)
        slots = Slots.from_lists(saved.slots, self.order.num_slots)
        self.learner.restore(checkpoint.load_all())
        self.slots, self.step = slots, checkpoint.step
        self.curriculum = Curriculum(**saved.curriculum)
        self.skipped_in_a_row = saved.skipped_in_a_row
        self.learning_rate_scale, self.rolled_back_from = saved.learning_rate_scale, saved.rolled_back_from
        return saved

    def saved(self, seconds: float, evaluated: int, best: dict[str, Any] | None) -> dict[str, Any]:
        return SavedState(
            recipe=self.config.what_is_learned(),
            shape=asdict(self.split.shape),
            data=self.data,
            slots=self.slots.to_lists(),
            curriculum=asdict(self.curriculum),
            seconds=seconds,
            evaluated=evaluated,
            best=best,
            skipped_in_a_row=self.skipped_in_a_row,
            learning_rate_scale=self.learning_rate_scale,
            rolled_back_from=self.rolled_back_from,
            plan=self.plan.to_json(),
            versions=self.versions,
        ).model_dump(mode="json")

    def batch(self, slots: Slots, step: int) -> StepBatch:
        """A pure function of where the slots are, and of the step's place in the schedule."""
        if self.coming is not None and self.coming[0].same_examples(slots):
            examples, puzzles = self.coming[1]
        else:
            examples, puzzles = self.order.examples(slots.k, slots.stage)
        inputs, labels = self.split.rows(examples)
        if self.config.data.augment:
            draws = self.order.draws(Purpose.AUGMENT, slots.k, self.task.num_draws)
            inputs, labels = self.task.augment(inputs, labels, draws)
        if share := in_force(self.config.training.hints, step):
            draws = self.order.draws(Purpose.HINTS, slots.k, 2 + inputs.shape[1])
            inputs = with_hints(inputs, labels, draws, share)
        identifiers = self.split.puzzle_identifiers[puzzles].astype(np.int64)
        noise_seeds = self.order.noise_seeds(slots.k) if self.config.training.noise else None
        return StepBatch(inputs, labels, identifiers, slots.fresh, noise_seeds)

    def advance(self, next_cut: Callable[[int], int]) -> tuple[float, StepResult]:
        """One step, and its learning rate; whatever it raises, nothing has changed then."""
        config, training = self.config, self.config.training
        stage = self.curriculum.stage
        slots, step = self.slots.refilled(stage), self.step + 1
        factor = self.learning_rate_scale * learning_rate_factor(step, training)
        settings = StepSettings(
            step=step,
            cycles=cycles_of_step(step, config.model, training, config.seed),
            learning_rate=factor * training.learning_rate,
            puzzle_emb_lr=factor * training.puzzle_emb_lr,
        )
        batch = self.batch(slots, step)
        if self.split.reader.reads_ahead:  # at most what the next step will ask for
            coming = slots.all_halted().refilled(stage)
            self.coming = coming, self.order.examples(coming.k, coming.stage)
            self.split.reader.ahead(self.coming[1][0])
        result = self.learner.step(batch, settings, next_cut)
        max_steps = config.model.halt_max_steps if training.supervision == "deep" else 1
        self.slots = slots.supervised_once(
            result.halt_margins, config.seed, max_steps, config.model.halt_exploration_prob
        )
        if training.curriculum is not None:
            self.curriculum = self.curriculum.after(result.exact, step, training.curriculum)
        self.step, self.skipped_in_a_row = step, 0
        return settings.learning_rate, result

    def go_back(self, checkpoint: Checkpoint | None) -> None:
        """To a checkpoint, or to the beginning, with half the learning rate."""
        scale, step = self.learning_rate_scale / 2, self.step
        if checkpoint is None:
            self.learner, self.slots, self.step = self.make_learner(), Slots.new(self.order.num_slots), 0
            self.curriculum = Curriculum()
        else:
            self.restore(checkpoint)
        self.skipped_in_a_row, self.learning_rate_scale, self.rolled_back_from = 0, scale, step

    def skip(self) -> None:
        """The next step, without its update: every slot takes a new example, from fresh latents."""
        self.slots = self.slots.refilled(self.curriculum.stage).all_halted()
        self.step += 1
        self.skipped_in_a_row += 1

    def changes_since(self, saved: SavedState) -> list[str]:
        """What is carried out otherwise than when the checkpoint was written; none of it is refused."""
        before = {name: (saved.plan or {}).get(name) for name in PLAN_FACTS} | dict(saved.versions)
        now = {name: self.plan.to_json()[name] for name in PLAN_FACTS} | self.versions
        return [
            f"{name} {then} -> {now[name]}"
            for name, then in before.items()
            if then is not None and name in now and then != now[name]
        ]


@dataclass(frozen=True, slots=True)
class Curriculum:
    """How often it has widened, and how the examples since the last look were answered."""

    stage: int = 0
    exact: int = 0
    seen: int = 0

    def after(self, exact: NDArray[np.bool_], step: int, settings: CurriculumConfig) -> Curriculum:
        right, seen = self.exact + int(exact.sum()), self.seen + len(exact)
        if step % settings.every_steps:
            return Curriculum(self.stage, right, seen)
        widest = settings.share * settings.widen**self.stage >= 1
        return Curriculum(self.stage + (right >= settings.threshold * seen and not widest))


def _curriculum_order(config: RunConfig, split: Split) -> dict[str, Any]:
    settings = config.training.curriculum
    if settings is None:
        return {}
    first_examples = split.puzzle_indices[split.group_indices[:-1]]
    difficulties = split.difficulties()[first_examples]

    def open_groups(stage: int) -> int:
        share = min(1.0, settings.share * settings.widen**stage)
        return max(1, math.ceil(share * len(difficulties)))

    return {"easiest": np.argsort(difficulties, kind="stable"), "open_groups": open_groups}


def with_hints(inputs: IntArray, labels: IntArray, draws: NDArray[np.float64], share: float) -> IntArray:
    """In this share of the examples, up to half of the answer is given away: easier examples come first in
    understanding, and a set of hard ones has none. The first two draws decide whether and how much."""
    given = np.where(draws[:, :1] < share, draws[:, 1:2] / 2, 0.0)
    return np.where((draws[:, 2:] < given) & (labels != IGNORE_LABEL), labels, inputs)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
