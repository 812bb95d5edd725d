"""Actions of one rank for all of them: the writer acts, and every rank gets the value or the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from macbook_optimization import errors
from macbook_optimization.json_types import JsonObject
from trm.backends.world import World


def at_writer(world: World, action: Callable[[], Any]) -> Any:
    """Return on every rank the JSON value that `action` returns at the writer, or raise its `LaptopError`.

    The other ranks wait, so files are read and written by one process only.
    """
    if world.size == 1:
        return action()
    answer: JsonObject = world.broadcast(_attempt(action) if world.writes else None)
    if "error" not in answer:
        return answer["value"]
    kind: type[errors.LaptopError] = getattr(errors, answer["error"])
    raise kind(answer["message"], answer["hint"])


def _attempt(action: Callable[[], Any]) -> JsonObject:
    try:
        return {"value": action()}
    except errors.LaptopError as error:
        return {"error": type(error).__name__, "message": str(error), "hint": error.hint}
