"""`trm eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.errors import DataError
from trm.cli.common import (
    PATH,
    inference_options,
    inference_settings,
    json_option,
    set_environment,
    show,
    write_json,
)

if TYPE_CHECKING:
    from trm.config import InferenceConfig
    from trm.training.evaluation import Evaluation


@click.command("eval")
@click.argument("run", type=PATH)
@click.option("--data", "dataset", type=PATH, help="Dataset [default: the run's own].")
@click.option("--depth", type=click.IntRange(min=1), help="Steps per example [default: the recipe's].")
@click.option(
    "--converged-after",
    type=click.IntRange(min=1),
    help="Stop an example when its answer has not changed for N steps.",
)
@click.option("--settle", type=click.IntRange(min=1), hidden=True)  # earlier name of --converged-after
@click.option(
    "--submission", type=PATH, help="ARC: write two attempts for every test, in the competition's format."
)
@inference_options
@json_option
def evaluate(
    run: Path,
    dataset: Path | None,
    depth: int | None,
    converged_after: int | None,
    settle: int | None,
    submission: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Evaluate the best checkpoint of RUN on examples that it has never seen."""
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.inference.predict import load_search, open_model, open_test_set
    from trm.plan import EVALUATION_FACTOR
    from trm.tasks.base import Submittable
    from trm.training.evaluation import evaluate as evaluate_split

    model = open_model(run)
    split = open_test_set(model, dataset)
    scorer = model.task.scorer(split)
    if submission is not None and not isinstance(scorer, Submittable):
        raise DataError(f"The task {model.task.name} of {run} has no competition to submit to")
    recipe = model.config.inference
    settings = inference_settings(recipe, options, _steps(recipe, depth, converged_after or settle))
    execution = model.execution
    set_environment(execution.threads)
    with ProgressDisplay() as display:
        result = evaluate_split(
            load_search(model, settings, execution),
            split,
            scorer,
            EVALUATION_FACTOR * model.plan.micro_batch_size,
            model.config.evaluation.examples,
            lambda done, total: display.update("evaluating", done, total),
        )
    if submission is not None and isinstance(scorer, Submittable):
        write_json(submission, scorer.submission())
    step = model.checkpoint.step
    path = dataset or model.config.data.path
    row = result.row(step, 0.0).to_json()
    del row["seconds"]
    show({"run": str(run), "data": str(path), **row}, as_json, _text(run, path, step, result))


def _steps(recipe: InferenceConfig, depth: int | None, converged_after: int | None) -> dict[str, int | None]:
    """An explicit depth is used in full, unless a rule for convergence is given as well."""
    if not (depth or converged_after):
        return {}
    return {"depth": depth or recipe.depth, "converged_after": converged_after}


def _text(run: Path, path: Path, step: int, result: Evaluation) -> str:
    curve = ", ".join(f"{value:.1%} after {i + 1}" for i, value in _milestones(result.accuracy_by_depth))
    halting = result.metrics.scalars.get("halt_accuracy")
    head = "" if halting is None else f", halting head right {halting:.1%}"
    return (
        f"{run}, step {step}, on {result.examples} test examples of {path}:\n"
        f"{result.described()}{head}, {result.mean_steps:.1f} steps per example\n"
        f"exact by depth: {curve}"
    )


def _milestones(values: list[float]) -> list[tuple[int, float]]:
    """Return the first value, the last, and those at powers of two between."""
    chosen = {len(values) - 1} | {2**i - 1 for i in range(len(values).bit_length()) if 2**i <= len(values)}
    return [(i, values[i]) for i in sorted(chosen)]
