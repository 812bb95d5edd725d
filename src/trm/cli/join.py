"""`trm join`."""

from __future__ import annotations

import re
import sys

import click

from trm.cli.common import json_option, show, showing

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number of seconds, minutes or hours, such as 90s, 10m or 2h."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if found is None:
            self.fail(f"{value!r} is not a duration such as 90s, 10m or 2h", param, ctx)
        return float(found[1]) * _SECONDS[found[2] or "s"]


@click.command()
@click.argument("place", metavar="ADDR[:PORT][/TOKEN]")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--wait",
    type=Duration(),
    default=600.0,
    metavar="DURATION",
    help="Wait for a host that does not answer, for example 90s, 10m or 2h [default: 10m].",
)
@click.option("--allow-public", is_flag=True, help="Join even at a public address.")
@json_option
def join(place: str, overrides: tuple[str, ...], wait: float, allow_public: bool, as_json: bool) -> None:
    """Train together with another machine, where `trm train RECIPE --listen ADDR` shows what to write here.

    The host sends the recipe and keeps the run. KEY=VALUE sets what belongs to this machine: plan.threads=2,
    limits.memory_limit_mb=4000 or data.path=DIRECTORY, for example. Ctrl-C leaves; the others continue.
    """
    with showing("Starting") as display:
        from trm.training.hosting import parse_address, split_token
        from trm.training.joining import join as join_run

        address, token = split_token(place)
        where = parse_address(address, allow_public=allow_public)
        outcome = join_run(where, token, overrides, wait, display)
    why = {
        "left": "This machine has left",
        "interrupted": "The host has stopped the run",
        "limit": "The host has stopped the run at its limit",
    }.get(outcome.reason, "The run has ended")
    facts = {"host": str(where), "reason": outcome.reason, "step": outcome.step}
    show(facts, as_json, f"{why} after step {outcome.step}.")
    if outcome.reason == "left":
        sys.exit(130)
