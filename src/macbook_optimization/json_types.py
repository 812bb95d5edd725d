"""Names for values that come from JSON files or pipes, whose types the reader has to check; and a stricter
parser for files that other people or programs wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise `ValueError` for whatever is wrong with it.

    That includes a key that is given twice, of which Python keeps the last value only, and nesting that is
    too deep for the parser, which raises `RecursionError`.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    made: JsonObject = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} is given twice")
        made[key] = value
    return made
