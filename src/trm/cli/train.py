"""`trm train`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import counted
from trm.cli.common import PATH, for_terminal, json_option, show, showing

if TYPE_CHECKING:
    from trm.training.loop import Outcome


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run", type=PATH, help="Run directory [default: runs/RECIPE].")
@click.option("--fresh", is_flag=True, help="Set an earlier run in that directory aside and start a new one.")
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after this many minutes; the same command resumes.",
)
@click.option("--max-steps", type=click.IntRange(min=1), help="Stop at this step; the same command resumes.")
@click.option(
    "--more-steps",
    type=click.IntRange(1, 10**9),
    help="Train a finished run, named in place of RECIPE, for N more steps.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Record a few steps after auto-tuning: a summary and a trace in the run's directory profile.",
)
@click.option("--fit", is_flag=True, help="If RECIPE does not fit into memory, use the best smaller one.")
@click.option(
    "--listen",
    metavar="ADDR[:PORT]",
    help="Let other machines join at this address of this one, on a trusted network only [port: 29400].",
)
@click.option("--allow-public", is_flag=True, help="Listen even at a public address.")
@click.option("--quiet", is_flag=True, help="Show no progress and no messages.")
@json_option
def train(
    recipe: str,
    overrides: tuple[str, ...],
    run: Path | None,
    fresh: bool,
    fit: bool,
    max_minutes: float | None,
    max_steps: int | None,
    more_steps: int | None,
    profile: bool,
    listen: str | None,
    allow_public: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train RECIPE, a YAML file or the name of a shipped one; an earlier run is resumed.

    RECIPE may also be the directory of a run, which is resumed with its own recipe. KEY=VALUE overrides a
    recipe key, for example model.hidden_size=256 or plan.threads=1.
    """
    with nullcontext() if quiet else showing("Starting"):
        from trm.api import Start, train_recipe

    start = Start(
        fresh=fresh,
        fit=fit,
        quiet=quiet,
        more_steps=more_steps,
        max_minutes=max_minutes,
        max_steps=max_steps,
        listen=listen,
        allow_public=allow_public,
    )
    if profile:
        overrides = (*overrides, "plan.profile=true")
    outcome = train_recipe(recipe, overrides, run, start)
    show(_outcome_facts(outcome), as_json, _outcome_text(outcome))
    if outcome.reason == "interrupted":
        sys.exit(130)


def _outcome_facts(outcome: Outcome) -> JsonObject:
    return {
        "run": str(outcome.run),
        "reason": outcome.reason,
        "step": outcome.step,
        "seconds": outcome.seconds,
        "best": outcome.best,
    }


def _outcome_text(outcome: Outcome) -> str:
    from trm.runs.metric import metric_label, primary_metric
    from trm.tasks.metrics import shown_value

    why = {
        "target": "Reached the target",
        "max_steps": "Trained all steps",
        "early stopping": "Early stopping: the primary metric no longer improved. Training ended",
        "limit": "Reached --max-minutes or --max-steps",
        "interrupted": "Stopped",
    }[outcome.reason]
    lines = [f"{why} after step {outcome.step}, {outcome.seconds:.0f} s of training."]
    if outcome.step == 0:
        lines = [f"{why} before the first step was finished."]
    metric = primary_metric(outcome.best or {})
    if outcome.reason in ("max_steps", "early stopping") and outcome.target and metric:
        lines.append(f"The target of {shown_value(metric[0], outcome.target)} was not reached.")
    if outcome.best and metric:
        name, value = metric
        lines.append(
            f"Best: {metric_label(name)} {shown_value(name, value)} on "
            f"{counted(outcome.best['examples'], 'unseen example')} "
            f"(step {outcome.best['step']}, {outcome.best['seconds']:.0f} s)."
        )
    lines.append(f"The run is in {outcome.run}.")
    if (outcome.run / "report.html").exists() and outcome.reason != "interrupted":
        lines.append(f"The report is in {outcome.run / 'report.html'}.")
    if outcome.reason == "limit":
        lines.append("Without that limit, or with a later one, the same command resumes from there.")
    if outcome.reason in ("target", "max_steps", "early stopping"):
        lines.append(f"To train it longer: trm train {outcome.run} --more-steps N")
    if outcome.reason == "interrupted":
        lines.append("The same command resumes from there.")
    return for_terminal("\n".join(lines), sys.stdout)
