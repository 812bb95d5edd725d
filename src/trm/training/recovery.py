"""Recovery from a loss, a gradient or a weight that is NaN or Inf.

Such values are never checkpointed: a step with a non-finite loss is skipped. Three in a row return to the
last intact checkpoint with half the learning rate; if that does not help, the run stops. A step that has
already updated some weights (`NonFiniteError.torn`) cannot be skipped and returns there immediately.
"""

from __future__ import annotations

from macbook_optimization.errors import NonFiniteError
from trm.runs.events import RolledBack, StepSkipped
from trm.training.checkpointing import BestSoFar, Checkpointer
from trm.training.log import RunLog
from trm.training.state import TrainingState

MAX_SKIPS_IN_A_ROW = 3


def skip_step(state: TrainingState, log: RunLog, error: NonFiniteError) -> bool:
    """Skip a step; return whether it is time to roll back."""
    state.skip_step()
    log.event(StepSkipped(state.step, str(error)))
    log.message(f"{error} The step is skipped.")
    return state.skipped_in_a_row >= MAX_SKIPS_IN_A_ROW


def roll_back(
    state: TrainingState, checkpointer: Checkpointer, best: BestSoFar, log: RunLog, error: NonFiniteError
) -> None:
    """Return to the last checkpoint that was saved while the loss was finite."""
    if state.rolled_back_from is not None:
        raise NonFiniteError(
            f"{error} Returning to the last good checkpoint with {state.learning_rate_scale:g} of the "
            "learning rate did not help. That checkpoint is intact.",
            hint="Start a new run with a lower training.learning_rate; `trm checkpoint import` starts it "
            "from the weights of this one.",
        )
    checkpointer.recover()
    manager = checkpointer.manager
    sound = (each for each in manager.intact_checkpoints() if not each.metadata.get("skipped_in_a_row"))
    checkpoint = next(sound, None)
    if checkpoint is None and state.world.size > 1:  # only the writer has what a run starts from
        raise NonFiniteError(
            f"{error} There is no earlier checkpoint that several machines could return to.",
            hint="Train on one machine, or start a new run with a lower training.learning_rate.",
        )
    failed_step = state.step
    state.roll_back(checkpoint, log.message)
    state.learner.reconfigure(state.plan.execution)  # it may be a new one
    manager.abandon_after(state.step)
    checkpointer.saved_step = None if checkpoint is None else checkpoint.step
    best.restore(best.row)
    scale = state.learning_rate_scale
    log.event(RolledBack(failed_step, state.step, scale))
    log.message(f"{error} Returning to step {state.step} with {scale:g} of the learning rate.")
