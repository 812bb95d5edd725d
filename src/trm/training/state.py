"""The state that a step changes and a checkpoint keeps: the learner, the slots and the step.

A step either happened completely or not at all. A step with a non-finite loss leaves the weights unchanged,
but its examples are skipped, as another attempt would end the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from macbook_optimization.checkpoint_files import Checkpoint
from macbook_optimization.checkpoint_management import Warn, python_warning
from macbook_optimization.json_types import JsonObject
from trm.backends.base import Learner, StepResult, StepSettings, tensor_library
from trm.backends.sharing import at_writer
from trm.backends.world import World, owned_slots
from trm.batch import Batch
from trm.config import CurriculumConfig, PhaseConfig, RunConfig
from trm.feed import Feed
from trm.plan import Plan
from trm.planning.cache import versions
from trm.runs.saved_state import SavedSpec, SavedState, check_compatible
from trm.schedule import cycles_of_step, label_smoothing_of_step, learning_rate_factor, phase_of_step
from trm.slots import Slots
from trm.training.early_stopping import EarlyStopping
from trm.training.initial import initialise
from trm.training.plateau import Plateau

PLAN_FACTS = ("micro_batch_size", "threads", "workers", "precision", "gradient_checkpointing", "allocator")


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The curriculum's progress: how often it has widened, and how recent examples were answered."""

    stage: int = 0
    exact: int = 0
    seen: int = 0

    def after(self, num_exact: int, num_slots: int, step: int, settings: CurriculumConfig) -> Curriculum:
        """Return the curriculum after a step; the counts are those of all ranks."""
        right = self.exact + num_exact
        seen = self.seen + num_slots
        if step % settings.every_steps:
            return Curriculum(self.stage, right, seen)
        is_widest = settings.share * settings.widen**self.stage >= 1
        widens = right >= settings.threshold * seen and not is_widest
        return Curriculum(self.stage + widens)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the curriculum."""

    number: int
    share: float  # of the training examples, from which new ones are taken

    def described(self) -> str:
        which = (
            "all training examples" if self.share >= 1 else f"the easiest {self.share:.0%} of the examples"
        )
        return f"Curriculum: stage {self.number}, {which}"


class TrainingState:
    """The state of one run in this process."""

    def __init__(
        self, config: RunConfig, plan: Plan, feed: Feed, world: World, make_learner: Callable[[], Learner]
    ) -> None:
        self.config = config
        self.plan = plan
        self.feed = feed
        self.world = world
        self.make_learner = make_learner
        self.data = dict(feed.split.digests)
        self.learner = make_learner()
        self.step = 0
        self.slots = Slots.new(self.num_slots)  # of all ranks
        self.owned = None if world.size == 1 else owned_slots(world)
        self.curriculum = Curriculum()
        self.plateau = Plateau()
        self.early_stopping = EarlyStopping()
        self.skipped_in_a_row = 0
        self.learning_rate_scale = 1.0
        self.rolled_back_from: int | None = None  # step at which the loss became non-finite
        self.max_length: int | None = None  # to which rows are cut

    @property
    def stage(self) -> Stage | None:
        """The stage of the curriculum, if there is one."""
        if self.config.training.curriculum is None:
            return None
        number = self.curriculum.stage
        return Stage(number, self.feed.open_share(number))

    @property
    def phase(self) -> PhaseConfig | None:
        """The phase of the last step, if the recipe has phases."""
        return phase_of_step(self.step, self.config.training)

    @property
    def num_slots(self) -> int:
        return self.config.training.effective_batch_size

    @property
    def own_slots(self) -> int:
        """Slots that this rank computes."""
        return self.world.shares[self.world.rank]

    def initialise(self, warn: Warn) -> str | None:
        """Set what a new run starts from beside random weights; return what that is, or None."""
        return initialise(self.learner, self.feed, warn)

    def restore(self, checkpoint: Checkpoint) -> SavedState:
        """Load a checkpoint; if it belongs to something else, raise before anything is changed."""
        saved = check_compatible(checkpoint, self.config, self.feed.split.spec, self.data)
        slots = Slots.from_lists(saved.slots, self.num_slots)
        groups: dict[str, Any] = {}  # file -> its tensors, each read when it is copied
        library = tensor_library(self.plan.execution.backend)
        at_writer(self.world, lambda: groups.update(checkpoint.open_all(library)))
        self.learner.load_state(groups)
        self.slots = slots
        self.step = checkpoint.step
        self.curriculum = Curriculum(**saved.curriculum)
        self.plateau = Plateau(**saved.plateau.model_dump())
        self.early_stopping = EarlyStopping(**saved.early_stopping.model_dump())
        self.skipped_in_a_row = saved.skipped_in_a_row
        self.learning_rate_scale = saved.learning_rate_scale
        self.rolled_back_from = saved.rolled_back_from
        self.max_length = saved.max_length
        return saved

    def saved(self, seconds: float, evaluated: int, best: JsonObject | None) -> JsonObject:
        """Return what a checkpoint contains beside the tensors."""
        return SavedState.model_validate(
            {
                "recipe": self.config.what_is_learned(),
                "spec": SavedSpec.of(self.feed.split.spec),
                "data": self.data,
                "slots": self.slots.to_lists(),
                "curriculum": asdict(self.curriculum),
                "plateau": asdict(self.plateau),
                "early_stopping": asdict(self.early_stopping),
                "seconds": seconds,
                "evaluated": evaluated,
                "best": best,
                "skipped_in_a_row": self.skipped_in_a_row,
                "learning_rate_scale": self.learning_rate_scale,
                "rolled_back_from": self.rolled_back_from,
                "max_length": self.max_length,
                "plan": self.plan.to_json(),
                "versions": versions(self.plan.execution.backend),
            }
        ).model_dump(mode="json")

    @property
    def cycles(self) -> int:
        """The recursions of the last step."""
        return cycles_of_step(self.step, self.config.model, self.config.training, self.config.seed)

    def advance(self, next_size: Callable[[int], int]) -> tuple[float, StepResult]:
        """Take one step and return its learning rate and result.

        If it raises, nothing has changed, unless the error is `torn`.
        """
        config = self.config
        training = config.training
        stage = self.curriculum.stage
        slots = self.slots.refilled(stage)
        step = self.step + 1
        factor = self.learning_rate_scale * self.plateau.scale * learning_rate_factor(step, training)
        settings = StepSettings(
            step=step,
            cycles=cycles_of_step(step, config.model, training, config.seed),
            learning_rate=factor * training.learning_rate,
            puzzle_emb_lr=factor * training.puzzle_emb_lr,
            label_smoothing=label_smoothing_of_step(step, training),
        )
        started = time.monotonic()
        batch = self.next_batch(slots, step)
        waited = time.monotonic() - started
        result = self.learner.step(batch, settings, next_size)
        result = replace(result, seconds={**result.seconds, "data": waited})
        max_steps = config.model.halt_max_steps if training.supervision == "deep" else 1
        self.slots = slots.supervised_once(
            result.halt_margins, config.seed, max_steps, config.model.halt_exploration_prob
        )
        if training.curriculum is not None:
            self.curriculum = self.curriculum.after(
                result.num_exact, self.num_slots, step, training.curriculum
            )
        self.step = step
        self.skipped_in_a_row = 0
        return settings.learning_rate, result

    def next_batch(self, slots: Slots, step: int) -> Batch:
        """Return this rank's batch of a step, and start to read that of the next."""
        batch = self.feed.batch(slots, step, self.max_length, self.owned)
        self.feed.read_ahead(slots, self.curriculum.stage, self.owned)
        return batch

    def after_evaluation(self, value: float) -> None:
        """Take note of the primary metric after this step.

        The evaluation at the end of training does not count: it would not be there if the run were longer,
        and more steps must give the same run.
        """
        training = self.config.training
        every = self.config.evaluation.every_steps
        if every is None or self.step % every:
            return
        metric = self.feed.task.primary_metric
        if training.plateau is not None:
            self.plateau = self.plateau.after(value, training.plateau, metric)
        if training.early_stopping is not None:
            self.early_stopping = self.early_stopping.after(value, training.early_stopping, metric)

    @property
    def stops_early(self) -> bool:
        """Return whether the primary metric has not improved for as long as the recipe allows."""
        return self.early_stopping.is_over(self.config.training.early_stopping)

    def skip_step(self) -> None:
        """Count a step without its update: every slot takes a new example, from fresh latents."""
        self.slots = self.slots.refilled(self.curriculum.stage).all_halted()
        self.step += 1
        self.skipped_in_a_row += 1

    def roll_back(self, checkpoint: Checkpoint | None, warn: Warn = python_warning) -> None:
        """Return to a checkpoint, or to the start, with half the learning rate."""
        scale = self.learning_rate_scale / 2
        failed_step = self.step
        if checkpoint is None:
            self.learner = self.make_learner()
            self.initialise(warn)
            self.slots = Slots.new(self.num_slots)
            self.step = 0
            self.curriculum = Curriculum()
            self.plateau = Plateau()
            self.early_stopping = EarlyStopping()
        else:
            self.restore(checkpoint)
        self.skipped_in_a_row = 0
        self.learning_rate_scale = scale
        self.rolled_back_from = failed_step

    def changes_since(self, saved: SavedState) -> list[str]:
        """List what differs from when the checkpoint was written. None of it prevents resuming.

        A provisional plan is not listed: the first steps choose another one, which is recorded then.
        """
        now = self.plan.to_json()
        then = Plan.from_json(saved.plan).to_json() if saved.plan and not self.plan.provisional else {}
        pairs = [(name, then.get(name), now[name]) for name in ("backend", *PLAN_FACTS)]
        current = versions(self.plan.execution.backend)
        pairs += [(name, value, current.get(name)) for name, value in saved.versions.items()]
        return [
            f"{name} {before} -> {after}"
            for name, before, after in pairs
            if before is not None and after is not None and before != after
        ]
