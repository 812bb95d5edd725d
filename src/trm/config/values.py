"""What every section shares: number types with a range, without NaN, Inf and booleans; suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _not_boolean(value: object) -> object:
    if isinstance(value, bool):  # pydantic would accept `true` as 1
        raise ValueError("Input should be a number, not true or false")
    return value


_Number = BeforeValidator(_not_boolean)
Count = Annotated[int, _Number, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, _Number, Field(ge=0, lt=2**63)]
Positive = Annotated[float, _Number, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, _Number, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, _Number, Field(ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, _Number, Field(gt=0, lt=1, allow_inf_nan=False)]
BelowOne = Annotated[float, _Number, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Part of a recipe. The sentence under a field becomes its entry in the key reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
