"""`trm eval`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.output_files import OutputFile
from macbook_optimization.units import counted
from trm.cli.common import (
    PATH,
    OutputOption,
    echo,
    force_option,
    inference_options,
    inference_settings,
    json_option,
    set_environment,
    show,
    showing,
    warn_on,
    write_json,
)
from trm.tasks.arc_submission import SUBMISSION

if TYPE_CHECKING:
    from trm.config import InferenceConfig, RunConfig
    from trm.inference.predict import TrainedModel
    from trm.tasks.base import Scorer, Submittable
    from trm.tasks.dataset import Split
    from trm.training.evaluation import Evaluation


ALL = "all"


def _examples(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == ALL:
        return value
    if not value.isdecimal() or not int(value):
        raise click.BadParameter(f"{value!r} is neither a number of examples, 1 or more, nor {ALL!r}.")
    return int(value)


@click.command("eval")
@click.argument("run", type=PATH)
@click.option("--data", "dataset", type=PATH, help="Dataset [default: the run's own].")
@click.option(
    "--examples",
    metavar="N|all",
    callback=_examples,
    help="Evaluate N test examples, spread evenly over the tasks, or all [default: the recipe's "
    "evaluation.examples; all with --submission].",
)
@click.option(
    "--depth", type=click.IntRange(min=1), help="Maximum number of steps per example [default: the recipe's]."
)
@click.option(
    "--converged-after",
    type=click.IntRange(min=0),
    help="Stop an example when its answer has not changed for N steps; 0 switches this off "
    "[default: the recipe's].",
)
@click.option("--settle", type=click.IntRange(min=0), hidden=True)  # earlier name of --converged-after
@click.option(
    "--submission",
    type=OutputOption(SUBMISSION),
    help="ARC: write two attempts for every test, in the competition's format.",
)
@force_option
@inference_options
@json_option
def evaluate(
    run: Path,
    dataset: Path | None,
    examples: int | str | None,
    submission: OutputFile | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Evaluate the best checkpoint of RUN on examples that it has never seen."""
    with showing("Reading the run") as display:
        from trm.inference.predict import open_model, open_test_set
        from trm.tasks.base import Submittable

        model = open_model(run, warn_on(display))
        split = open_test_set(model, dataset)
        mail = _mail_report(run)
    scorer = model.task.scorer(split)
    limit = _limit(model.config, examples, submission)
    if submission is not None:
        if not isinstance(scorer, Submittable):
            raise DataError(f"The task {model.task.name} of {run} has no competition to submit to")
        scorer.require_all_tests(split, limit)
    recipe = model.config.inference
    steps = _steps(recipe, options)
    settings = inference_settings(recipe, options, steps)
    result = _evaluated(model, split, scorer, settings, limit)
    step = model.checkpoint.step
    path = dataset or model.config.data.path
    row = result.row(step, 0.0).to_json()
    del row["seconds"]
    if submission is not None and isinstance(scorer, Submittable):
        write_json(submission, scorer.submission())
        row["tests_without_answer"] = _warn_of_unanswered(scorer)
        row["tests_with_one_answer"] = _report_single_answers(scorer)
    facts = {"run": str(run), "data": str(path), "checkpoint": model.checkpoint.path.name, **row}
    text = _text(run, path, step, result)
    if mail is not None:
        facts["mail"] = mail
        text = f"The recursive path: {text}\n{_mail_text(mail)}"
    show(facts, as_json, text)


def _evaluated(
    model: TrainedModel, split: Split, scorer: Scorer, settings: InferenceConfig, limit: int | None
) -> Evaluation:
    from trm.inference.predict import load_search
    from trm.inference.sampling import load_language_model
    from trm.plan import EVALUATION_FACTOR
    from trm.tasks.base import Generative
    from trm.training.evaluation import evaluate as evaluate_split
    from trm.training.evaluation import evaluate_text

    execution = model.execution
    set_environment(execution.threads)
    size = EVALUATION_FACTOR * model.plan.micro_batch_size
    with showing(f"Loading {execution.library}") as display:
        update = partial(display.update, "evaluating")
        if isinstance(model.task, Generative):
            language_model = load_language_model(model)
            display.status("Evaluating")
            return evaluate_text(language_model, split, scorer, size, limit, update)
        search = load_search(model, settings, execution)
        display.status("Evaluating")
        return evaluate_split(search, split, scorer, size, limit, update)


def _mail_text(found: JsonObject) -> str:
    from trm.mail.report import held_out_lines

    return "\n".join(held_out_lines(found))


def _mail_report(run: Path) -> JsonObject | None:
    """Return what was measured on held-out messages if this run is the recursive path of a mail model."""
    from trm.mail.loading import model_directory
    from trm.mail.model import DESCRIPTION_FILE, load_model

    directory = model_directory(run)
    if not (directory / DESCRIPTION_FILE).exists():
        return None
    found: JsonObject | None = load_model(directory).facts["report"]["held_out"]
    return found


def _limit(config: RunConfig, examples: int | str | None, submission: OutputFile | None) -> int | None:
    """Return how many examples to evaluate; None for all. A submission is of everything by default."""
    if isinstance(examples, int):
        return examples
    return None if examples == ALL or submission is not None else config.evaluation.examples


def _warn_of_unanswered(scorer: Submittable) -> int:
    count = scorer.unanswered()
    if count:
        tests = counted(count, "test")
        echo(f"warning: there is no valid answer to {tests}; a placeholder is submitted", err=True)
    return count


def _report_single_answers(scorer: Submittable) -> int:
    count = scorer.answered_once()
    if count:
        tests = counted(count, "test")
        echo(f"All votes agree on the answer to {tests}; both attempts are that answer.", err=True)
    return count


def _steps(recipe: InferenceConfig, options: dict[str, Any]) -> dict[str, int | None]:
    """Take the depth and the rule for convergence out of the options; what is not given is the recipe's."""
    depth, converged_after, settle = (options.pop(name) for name in ("depth", "converged_after", "settle"))
    given = converged_after if converged_after is not None else settle
    return {
        "depth": depth or recipe.depth,
        "converged_after": recipe.converged_after if given is None else given or None,
    }


def _text(run: Path, path: Path, step: int, result: Evaluation) -> str:
    where = f"{run}, step {step}, on {counted(result.examples, 'test example')} of {path}{result.coverage}:"
    if not result.accuracy_by_depth:
        return f"{where}\n{result.described()}"
    curve = ", ".join(f"{value:.1%} after {i + 1}" for i, value in _milestones(result.accuracy_by_depth))
    halting = result.metrics.scalars.get("halt_accuracy")
    head = "" if halting is None else f", halting head right {halting:.1%}"
    return (
        f"{where}\n{result.described()}{head}, {result.mean_steps:.1f} steps per example\n"
        f"exact by depth: {curve}"
    )


def _milestones(values: list[float]) -> list[tuple[int, float]]:
    """Return the first value, the last, and those at powers of two between."""
    chosen = {len(values) - 1} | {2**i - 1 for i in range(len(values).bit_length()) if 2**i <= len(values)}
    return [(i, values[i]) for i in sorted(chosen)]
