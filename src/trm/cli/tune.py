"""`trm tune`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trm.cli.common import PATH, for_terminal, json_option, show, showing


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--minutes",
    required=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Time of the whole search, earlier starts included.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=2),
    default=12,
    show_default=True,
    help="Divide the time into this many candidates. Those that are given up early make room for more.",
)
@click.option("--run", "run", type=PATH, help="Directory of the search [default: tuning/RECIPE].")
@json_option
def tune(
    recipe: str, overrides: tuple[str, ...], minutes: float, trials: int, run: Path | None, as_json: bool
) -> None:
    """Search for a better learning rate, batch size, depth and width of RECIPE.

    Every candidate is really trained, for the same time each, and evaluated on held-out training examples;
    RECIPE itself is the first. The result is a recipe, a picture and a comparison with RECIPE. The same
    command continues a search that was interrupted, or that has more --minutes now.
    """
    with showing("Starting") as display:
        from trm.config import load_config
        from trm.tuning.result import describe_result
        from trm.tuning.search import Budget
        from trm.tuning.search import tune as search

        config = load_config(recipe, overrides)
        directory = run or Path("tuning") / Path(recipe).stem
        result = search(config, directory, Budget(minutes, trials), display)
    show(result.to_json(), as_json, for_terminal(describe_result(result), sys.stdout))
    if result.is_interrupted:
        sys.exit(130)
