"""More steps for a run that has finished.

The recipe of the run gets an entry in `training.extensions`: from the present step on, training and the
learning-rate schedule end later. Steps before it are not affected, so earlier checkpoints still belong to
the run, and the whole run can be repeated from its recipe.
"""

from __future__ import annotations

from macbook_optimization.errors import RunError
from trm.config import RunConfig
from trm.display import Display
from trm.runs.directory import Run, refuse_if_different
from trm.runs.events import Extended
from trm.runs.state import end_of, read_last
from trm.schedule import learning_rate_factor
from trm.tasks.metrics import shown_value
from trm.tasks.registry import load_task


def extend(
    run: Run, config: RunConfig, num_steps: int, display: Display, *, keep_target: bool = False
) -> RunConfig:
    """Record that a finished run is to be trained for more steps, and return `config` with them.

    `config` is the run's recipe, possibly with other settings. The same request resumes an extension that was
    interrupted. Unless `keep_target`, the target no longer ends the run: it may have been reached already.
    Early stopping no longer ends it either, unless `config` has another one than the run.
    """
    recorded = run.config
    refuse_if_different(config.what_is_learned(), recorded.what_is_learned(), run.path)
    step = run.checkpoints().newest_step() or 0
    extensions = recorded.training.extensions
    last_step = recorded.training.last_step
    is_new = end_of(run, recorded, read_last(run)) is not None
    if is_new:
        last_step = step + num_steps
        extensions = {**extensions, step: last_step}
    elif not extensions or last_step - max(extensions) != num_steps:
        raise RunError(
            f"{run.path} has not finished: it is at step {step} of {last_step}",
            hint=f"`trm train {run.path}` trains the rest; after that, --more-steps trains it longer.",
        )
    is_given = config.training.early_stopping != recorded.training.early_stopping
    keep_patience = is_given or not is_new  # an interrupted extension has what it began with
    extended = _extended(config, extensions, keep_target=keep_target, keep_patience=keep_patience)
    if is_new:
        run.write("recipe.yaml", extended.to_yaml())
        run.record(Extended(step, last_step))
    display.message(_describe(run, extended, step))
    return extended


def _extended(
    config: RunConfig, extensions: dict[int, int], *, keep_target: bool, keep_patience: bool
) -> RunConfig:
    tree = config.model_dump()
    tree["training"]["extensions"] = extensions
    if not keep_patience:
        tree["training"]["early_stopping"] = None
    if not keep_target:
        tree["evaluation"].update(target_accuracy=None, target_loss=None)
    return RunConfig.model_validate(tree)


def _describe(run: Run, config: RunConfig, step: int) -> str:
    training = config.training
    text = f"Training {run.path} from step {step} to step {training.last_step}"
    target = config.evaluation.target
    if target is not None:
        text += f" or a target of {shown_value(load_task(config.task).primary_metric, target)}"
    if training.early_stopping is not None:
        text += " or early stopping"
    if target is None and training.early_stopping is None:
        text += ", whatever its result"
    text += "."
    if training.lr_min_ratio < 1:
        before, after = (learning_rate_factor(each, training) for each in (max(step, 1), step + 1))
        text += (
            f" The learning rate decays until then: from {after:.0%} of its peak, after {before:.0%} in the "
            f"last step."
        )
    return text
