"""The command line: parse, call one function, print.

Torch, pydantic and rich are imported inside the commands, so that `trm --help` answers at once.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.errors import DataError, LaptopError
from trm.cli.checkpoints import checkpoint
from trm.cli.common import PATH, json_option, show, write_json
from trm.cli.data import data, with_options

if TYPE_CHECKING:
    from trm.config import EvaluationConfig
    from trm.inference import Prediction, Question, TrainedModel
    from trm.tasks.base import IntArray
    from trm.training.loop import Outcome


def thinking_options(command: Callable[..., None]) -> Callable[..., None]:
    """How long and how often a model thinks about a puzzle."""
    options = (
        click.option("--halt", is_flag=True, default=None, help="Stop when the halting head believes in it."),
        click.option(
            "--tries",
            type=click.IntRange(1, 1000),
            help="If the halting head doubts the first answer: think so often, and let it choose.",
        ),
        click.option(
            "--noise", type=click.FloatRange(0, 100), help="In the first thoughts of all tries but one."
        ),
        click.option(
            "--guesses",
            type=click.IntRange(0, 1000),
            help="Beliefs that all tries but one take for given, one after the other.",
        ),
    )
    return with_options(command, options)


def _thinking(
    recipe: EvaluationConfig, options: Mapping[str, Any], depth: int | None, settle: int | None
) -> EvaluationConfig:
    """The recipe's, but for what is asked. An explicit depth is gone through to its end."""
    from trm.config import EvaluationConfig, parse_section

    asked = {name: value for name, value in options.items() if value is not None}
    if depth or settle:
        asked |= {"depth": depth or recipe.depth, "settle": settle}
    return parse_section(EvaluationConfig, {**recipe.model_dump(), **asked}, "These options")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="macbook-trm", prog_name="trm")
def cli() -> None:
    """Train a Tiny Recursive Model on the laptop you own."""


cli.add_command(data)
cli.add_command(checkpoint)


@cli.command()
@json_option
def doctor(as_json: bool) -> None:
    """This machine, what it can do, the plan that it would get, and what to mend."""
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.training.doctor import examine, page

    with ProgressDisplay() as display:
        found = examine(display)
    show(found.to_json(), as_json, page(found))


@cli.command()
@click.option(
    "--profile", "names", type=click.Choice(["8gb", "16gb", "32gb", "here"]), multiple=True,
    default=["here"], show_default=True,
    help="Model and micro-batch for a machine of this size, or of this one's; may be given several times.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Processes a profile."
)
@click.option("--out", type=PATH, metavar="FILE", help="Save everything that was measured, as JSON.")
@click.option("--compare", type=PATH, metavar="FILE", help="Faster or slower than when FILE was saved?")
@json_option
def bench(
    names: tuple[str, ...], repeats: int, out: Path | None, compare: Path | None, as_json: bool
) -> None:
    """How fast this machine trains a model of its size, and what that takes.

    Real steps on random tokens, each repeat in a new process. Close other programs first.
    """
    from macbook_optimization.hardware_detection import HardwareDetector
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.training import benchmark_report as reports
    from trm.training.benchmark import chosen_profiles, measure

    hardware = HardwareDetector().detect(with_torch=False)
    profiles = chosen_profiles(names, hardware.memory.total_memory)
    if out is not None:
        reports.check_place(out)
    baseline = None if compare is None else reports.read_baseline(compare, [p.name for p in profiles])
    with ProgressDisplay() as display:
        report = measure(profiles, repeats, hardware, display)
    compared = reports.compare(report, baseline, compare) if baseline and compare else None
    show(reports.facts(report, compared), as_json, reports.page(report, compared))
    if out is not None:  # last: what was measured has been shown, whatever becomes of the file
        reports.write_report(report, out)


@cli.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run", type=PATH, help="Run directory [default: runs/RECIPE].")
@click.option("--fresh", is_flag=True, help="Set an earlier run in that directory aside and start anew.")
@click.option(
    "--max-minutes", type=click.FloatRange(min=0, min_open=True), help="Stop this start after so long."
)
@click.option("--max-steps", type=click.IntRange(min=1), help="Stop this start at this step.")
@click.option("--fit", is_flag=True, help="If RECIPE does not fit into memory, take the best smaller one.")
@json_option
def train(
    recipe: str,
    overrides: tuple[str, ...],
    run: Path | None,
    fresh: bool,
    fit: bool,
    max_minutes: float | None,
    max_steps: int | None,
    as_json: bool,
) -> None:
    """Train RECIPE, a YAML file or the name of a shipped one; resumes by itself.

    KEY=VALUE overrides a recipe key, for example model.hidden_size=256 or plan.threads=1.
    """
    from trm.config import load_config
    from trm.runs import only_trainer

    config, path = load_config(recipe, overrides), run or Path("runs") / Path(recipe).stem
    with only_trainer(path) as lock:  # before anything that takes time
        from macbook_optimization.progress_monitoring import ProgressDisplay
        from trm.training.loop import Limits
        from trm.training.supervisor import prepare, supervise

        with ProgressDisplay() as display:
            job = prepare(config, path, display, fresh=fresh, fit=fit)
        outcome = supervise(job, Limits(max_minutes * 60 if max_minutes else None, max_steps), lock)
    show(_outcome_facts(outcome), as_json, _outcome_text(outcome))
    if outcome.reason == "interrupted":
        sys.exit(130)


def _outcome_facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "run": str(outcome.run),
        "reason": outcome.reason,
        "step": outcome.step,
        "seconds": outcome.seconds,
        "best": outcome.best,
    }


def _outcome_text(outcome: Outcome) -> str:
    from trm.runs import headline

    why = {
        "target": "Reached the target",
        "max_steps": "Trained all steps",
        "limit": "Reached the limit of this start",
        "interrupted": "Stopped",
    }[outcome.reason]
    lines = [f"{why} after step {outcome.step}, {outcome.seconds:.0f} s of training."]
    if outcome.step == 0:
        lines = [f"{why} before the first step was finished."]
    if outcome.reason == "max_steps" and outcome.target and outcome.best:
        lines.append(f"The target of {outcome.target:.0%} was not reached.")
    if outcome.best:
        best = outcome.best
        how = {"exact_accuracy": "exactly", "valid_accuracy": "by the rules"}
        judged = how.get(best.get("headline", "exact_accuracy"), f"({best.get('headline')})")
        lines.append(
            f"Best: {headline(best):.1%} of {best['examples']} unseen puzzles solved {judged} "
            f"(step {best['step']}, {best['seconds']:.0f} s)."
        )
    lines.append(f"The run is in {outcome.run}.")
    if outcome.reason == "limit":
        lines.append("Without that limit, or with a later one, the same command goes on from there.")
    if outcome.reason == "interrupted":
        lines.append("The same command goes on from there.")
    return "\n".join(lines)


@cli.command("eval")
@click.argument("run", type=PATH)
@click.option("--data", "dataset", type=PATH, help="Dataset [default: the run's own].")
@click.option("--depth", type=click.IntRange(min=1), help="Steps at test time [default: the recipe's].")
@click.option(
    "--settle", type=click.IntRange(min=1), help="Stop a puzzle once its answer stood so many steps."
)
@click.option(
    "--submission", type=PATH, help="ARC: write two attempts for every test, as the competition asks."
)
@thinking_options
@json_option
def evaluate(
    run: Path,
    dataset: Path | None,
    depth: int | None,
    settle: int | None,
    submission: Path | None,
    as_json: bool,
    **thinking: Any,
) -> None:
    """How many unseen puzzles the best checkpoint of RUN solves."""
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.inference import load_answerer, open_model, open_test_set
    from trm.tasks.arc import Votes
    from trm.training.evaluation import EVALUATION_CUT
    from trm.training.evaluation import evaluate as evaluate_split

    model = open_model(run)
    path = dataset or model.config.data.path
    split, scorer = open_test_set(model, dataset), model.task.scorer(path)
    if submission is not None and not isinstance(scorer, Votes):
        raise DataError(f"{run} is no run of ARC: there is nothing to submit")
    settings = _thinking(model.config.evaluation, thinking, depth, settle)
    with ProgressDisplay() as display:
        result = evaluate_split(
            load_answerer(model),
            split,
            settings,
            EVALUATION_CUT * model.plan.micro_batch_size,
            lambda done, total: display.update("evaluating", done, total),
            scorer,
        )
    if submission is not None and isinstance(scorer, Votes):
        write_json(submission, scorer.submission())
    facts = {"run": str(run), "data": str(path), "step": model.checkpoint.step, **result.row()}
    curve = ", ".join(
        f"{accuracy:.1%} after {i + 1}" for i, accuracy in _milestones(result.accuracy_by_depth)
    )
    text = (
        f"{run}, step {model.checkpoint.step}, on {result.examples} test puzzles of {path}:\n"
        f"{result.described()}  cells {result.token_accuracy:.2%}, "
        f"halting head right {result.halt_accuracy:.1%}, {result.mean_steps:.1f} steps a puzzle\n"
        f"exact by depth: {curve}"
    )
    show(facts, as_json, text)


def _milestones(values: list[float]) -> list[tuple[int, float]]:
    """The first, the last, and powers of two between."""
    chosen = {len(values) - 1} | {2**i - 1 for i in range(len(values).bit_length()) if 2**i <= len(values)}
    return [(i, values[i]) for i in sorted(chosen)]


@cli.command()
@click.argument("run", type=PATH)
@click.argument("puzzle", required=False)
@click.option("--example", type=int, help="Instead of PUZZLE: this puzzle of the run's test set, from 0.")
@click.option("--data", "dataset", type=PATH, help="Dataset of --example [default: the run's own].")
@click.option("--steps", is_flag=True, help="Show how the answer changes from step to step.")
@click.option("--png", type=PATH, help="Draw the answer into this file; wrong cells are framed in red.")
@click.option("--gif", type=PATH, help="Draw into this file how the answer forms, one frame a step.")
@click.option(
    "--depth", type=click.IntRange(min=1), help="Exactly so many steps [default: until it settles]."
)
@thinking_options
@json_option
def predict(
    run: Path,
    puzzle: str | None,
    example: int | None,
    dataset: Path | None,
    steps: bool,
    png: Path | None,
    gif: Path | None,
    depth: int | None,
    as_json: bool,
    **thinking: Any,
) -> None:
    """Solve PUZZLE with the best checkpoint of RUN; - reads one puzzle a line from standard input.

    Write one character a cell, row by row, with . or 0 for blanks.
    """
    from trm.inference import describe, load_answerer, open_model, open_test_set, question_of_test_set
    from trm.inference import predict as predict_one

    if (puzzle is None) == (example is None):
        raise click.UsageError("Give a PUZZLE, - for standard input, or --example N.")
    model = open_model(run)
    if example is not None:
        questions = [question_of_test_set(open_test_set(model, dataset), example)]
    else:
        given = sys.stdin.buffer.read().decode(errors="replace") if puzzle == "-" else None
        texts = [puzzle or ""] if given is None else [line for line in given.splitlines() if line.strip()]
        questions = [_encoded(model, text, number) for number, text in enumerate(texts, start=1)]
        if not questions:
            raise DataError("There was no puzzle on standard input")
    if (png or gif) and len(questions) > 1:
        raise click.UsageError("--png and --gif draw one puzzle; there are several.")
    recipe = model.config.evaluation
    until = (depth, None) if depth else (4 * recipe.depth, recipe.settle or 2)
    settings = _thinking(recipe, thinking, *until)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns
    answerer = load_answerer(model)
    for question in questions:
        prediction = predict_one(model, answerer, question, settings)
        if png or gif:
            _draw(model, question, prediction.answers, png, gif)
        text = describe(model.task, prediction, steps=steps, color=color, width=width)
        show(_prediction_facts(model, prediction), as_json, text)


def _draw(
    model: TrainedModel, question: Question, answers: IntArray, png: Path | None, gif: Path | None
) -> None:
    from trm.pictures import write_gif, write_png

    task, label = model.task, question.label
    if label is None:
        label = task.right_answer(question.tokens)
    pictures = [task.picture(question.tokens, answer, label) for answer in answers]
    if png is not None:
        write_png(png, pictures[-1])
    if gif is not None:
        write_gif(gif, pictures)


def _encoded(model: TrainedModel, text: str, number: int) -> Question:
    from trm.inference import Question

    try:
        return Question(model.task.encode(text, model.shape))
    except DataError as error:
        raise DataError(f"Puzzle {number}: {error}", hint=error.hint) from error


def _prediction_facts(model: TrainedModel, prediction: Prediction) -> dict[str, Any]:
    return {
        "question": model.task.decode(prediction.question),
        "answer": model.task.decode(prediction.answers[-1]),
        "valid": prediction.problem is None,
        "problem": prediction.problem,
        "steps": [model.task.decode(answer) for answer in prediction.answers],
        "confidence": prediction.confidence,
    }


@cli.command()
@click.argument("root", type=PATH, default=Path("runs"))
@json_option
def runs(root: Path, as_json: bool) -> None:
    """List the runs under ROOT [default: runs]."""
    from trm.runs import list_runs

    found = list_runs(root)
    lines = [
        f"{run.path}  {run.task or '?'}  {run.state}  step {run.step}/{run.max_steps or '?'}"
        + (f"  {run.seconds:.0f} s" if run.seconds is not None else "")
        + (f"  solved {run.accuracy:.1%}" if run.accuracy is not None else "")
        for run in found
    ]
    show([asdict(run) for run in found], as_json, "\n".join(lines) or f"There are no runs in {root}.")


def main() -> None:
    """The one place where errors become text and exit codes."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C where nothing had to be saved
        click.echo("Stopped.", err=True)
        sys.exit(130)
    except PermissionError as error:  # the path says it all, wherever it came from
        click.echo(f"error: Permission denied: {error.filename}", err=True)
        sys.exit(1)
    except LaptopError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
